"""Rematerialization: recompute cheap values in training graphs instead of keeping them.

A value that the forward part uses and the backward part uses again, much later, is held all the while. Where it is an
element-wise function of values that are held anyway, it is computed again from them, behind fences, so that the two are
not one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.core import bounds
from strata.mir import Constant, Graph, Leaf, Node, Value, as_tuple, make_node, origin_of, toposort
from strata.ops import Barrier, Fence
from strata.passes.base import Pass, PassContext, register, rewrite, with_results

TYPICAL = 1 << 16  # bytes that stand in for a size without a bound


@register
@dataclass(frozen=True)
class Rematerialize(Pass):
    """Compute element-wise values of `size` bytes again for readers at least `distance` ops after the first."""

    distance: int = 24
    size: int = 4096

    name: ClassVar[str] = "rematerialize"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        order = toposort(graph.results)
        position = {id(n): i for i, n in enumerate(order)}
        readers: dict[Value, list[Node]] = defaultdict(list)
        for node in order:
            for x in dict.fromkeys(node.inputs):
                readers[x].append(node)
        again = {v: late for n in order for v in n.outputs if (late := self._late(v, readers, position))}
        again = {v: late for v, late in again.items() if v not in graph.results}
        return _with_copies(graph, order, again, self.name) if again else graph

    def _late(self, v: Value, readers: dict[Value, list[Node]], position: dict[int, int]) -> set[int]:
        """The readers, by identity, that get a copy; none where the value is cheaper to keep."""
        node = v.node
        if (
            not node.op.elementwise
            or len(node.types) != 1
            or isinstance(node.op, (Leaf, Constant))
            or _bytes(v) < self.size
        ):
            return set()
        places = sorted((position[id(r)], id(r)) for r in readers[v])
        if len(places) < 2:
            return set()
        from_here = places[0][0] + self.distance
        late = {reader for place, reader in places if place >= from_here}
        held = all(self._is_held(x, readers, position, from_here) for x in node.inputs)
        return late if held else set()

    def _is_held(self, x: Value, readers: dict[Value, list[Node]], position: dict[int, int], late: int) -> bool:
        """Whether a value is a leaf, is small, or is needed late itself."""
        if isinstance(x.node.op, (Leaf, Constant)) or _bytes(x) < self.size:
            return True
        return any(position[id(r)] >= late for r in readers[x])


def _with_copies(graph: Graph, order: Sequence[Node], again: dict[Value, set[int]], made_by: str) -> Graph:
    table: dict[Value, Value] = {}
    copies: dict[Value, Value] = {}

    def copy_of(v: Value) -> Value:
        if v not in copies:
            inputs = [x if isinstance(x.node.op, Constant) else Fence()(table.get(x, x)) for x in v.node.inputs]
            copies[v] = v.node.op(*inputs)
        return copies[v]

    for node in order:
        with origin_of(node, made_by=made_by):
            inputs = tuple(copy_of(x) if id(node) in again.get(x, ()) else table.get(x, x) for x in node.inputs)
            if inputs != node.inputs:
                table.update(zip(node.outputs, make_node(node.op, inputs).outputs, strict=True))
    return with_results(graph, [table.get(x, x) for x in graph.results])


def _bytes(v: Value) -> int:
    size = v.type.nbytes
    if isinstance(size, int):
        return size
    high = bounds(size)[1]
    return high if high is not None else TYPICAL


@register
@dataclass(frozen=True)
class SplitBarriers(Pass):
    """A barrier over several values becomes a fence for each: what lies behind is still apart, without copies."""

    name: ClassVar[str] = "split_barriers"
    seeks: ClassVar[frozenset[str]] = frozenset({"barrier"})

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite(graph, self._split, self.name)

    def _split(self, value: Value, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if not isinstance(value.node.op, Barrier):
            return None
        return tuple(v for x in inputs for v in as_tuple(Fence()(x)))
