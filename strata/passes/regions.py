"""Mark trees of element-wise ops as regions, one op each, and take regions apart again."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from strata.mir import Graph, Node, Value, as_tuple, toposort
from strata.ops import elementwise_region
from strata.passes.base import Pass, PassContext, register, rewrite
from strata.passes.match import Uses

MAX_STEPS = 32
MAX_INPUTS = 16


@dataclass
class _Region:
    """Members in order; the last one is the tail, and only members read the others."""

    members: list[Node] = field(default_factory=list)
    inputs: dict[Value, None] = field(default_factory=dict)


@register
@dataclass(frozen=True)
class MarkElementwiseRegions(Pass):
    """Element-wise ops that only feed each other become one op, up to a number of steps and inputs."""

    max_steps: int = MAX_STEPS
    max_inputs: int = MAX_INPUTS

    name: ClassVar[str] = "mark_regions"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        tails = self._regions(graph)
        if not tails:
            return graph

        def change(value: Value, inputs: tuple[Value, ...]) -> list[Value] | None:
            region = tails.get(id(value.node))
            return None if region is None else [_emit(region, value.node, inputs)]

        return rewrite(graph, change, self.name)

    def _regions(self, graph: Graph) -> dict[int, _Region]:
        """Regions of two ops or more, by the identity of their tails."""
        uses = Uses(graph)
        region_of: dict[int, _Region] = {}
        for node in toposort(graph.results):
            if not is_step(node):
                continue
            joined = _Region()
            for x in node.inputs:
                inner = region_of.get(id(x.node)) if uses.of(x) == 1 else None
                if inner is None or len(joined.members) + len(inner.members) >= self.max_steps:
                    continue
                joined = _Region([*joined.members, *inner.members], {**joined.inputs, **inner.inputs})
            own = {id(m) for m in joined.members}
            joined.members.append(node)
            joined.inputs |= dict.fromkeys(x for x in node.inputs if id(x.node) not in own)
            if len(joined.inputs) > self.max_inputs:
                joined = _Region([node], dict.fromkeys(node.inputs))
            for member in joined.members:
                region_of[id(member)] = joined
        distinct = {id(r): r for r in region_of.values()}.values()
        return {id(r.members[-1]): r for r in distinct if len(r.members) > 1}


def is_step(node: Node) -> bool:
    """Whether a node can be a step of a region."""
    return node.op.elementwise and len(node.types) == 1 and node.op.name != "elementwise_region" and bool(node.inputs)


def _emit(region: _Region, tail: Node, inputs: tuple[Value, ...]) -> Value:
    """The region as one op, over the values that its members read after rewriting."""
    own = {id(m) for m in region.members}
    order: list[tuple[Node, Node]] = []  # members as they were and as they are, producers first
    _collect(tail, Value(tail, 0).node if inputs == tail.inputs else tail.op(*inputs).node, own, order, set())
    outside = list(
        dict.fromkeys(
            y for old, new in order for x, y in zip(old.inputs, new.inputs, strict=True) if id(x.node) not in own
        )
    )
    number = {y: i for i, y in enumerate(outside)}
    chain = []
    for old, new in order:
        operands = tuple(number[y] for y in new.inputs)
        static = tuple(getattr(old.op, f.name) for f in fields(old.op))
        chain.append((old.op.name, operands, static) if static else (old.op.name, operands))
        number[Value(new, 0)] = len(outside) + len(chain) - 1
    return elementwise_region(*outside, chain=tuple(chain))


def _collect(old: Node, new: Node, own: set[int], order: list[tuple[Node, Node]], seen: set[int]) -> None:
    """Members below a member, producers first; a region is at most `max_steps` deep."""
    if id(old) in seen:
        return
    seen.add(id(old))
    for x, y in zip(old.inputs, new.inputs, strict=True):
        if id(x.node) in own:
            _collect(x.node, y.node, own, order, seen)
    order.append((old, new))


@register
@dataclass(frozen=True)
class UnfuseElementwiseRegions(Pass):
    """Take regions apart: those with more steps or inputs than allowed, by default all."""

    max_steps: int = 0
    max_inputs: int = 0

    name: ClassVar[str] = "unfuse_regions"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite(graph, self._unfuse, self.name)

    def _unfuse(self, value: Value, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = value.node.op
        if op.name != "elementwise_region":
            return None
        if len(op.chain) <= self.max_steps and len(inputs) <= self.max_inputs:  # type: ignore[attr-defined]
            return None
        return as_tuple(op.decompose(*inputs))
