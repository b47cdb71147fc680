"""Structure keys: what an expression computes from what, with arrays as numbered slots.

The outline of `a + b` is the same whatever arrays `a` and `b` are, so it is the key under which programs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core import TensorType, here
from strata.errors import SymbolError, TraceError
from strata.mir import Graph, Input, Node, Param, Value, substitute_values
from strata.tensor.data import Data, Handle, handle_of


@dataclass(slots=True)
class Outline:
    """`key` has a type for each leaf and (op, slots of its inputs) for each node, producers first, then the roots."""

    key: tuple[Any, ...]
    leaves: list[Handle]
    leaf_slots: list[int]
    leaf_values: list[Value]
    nodes: list[Node]
    node_slots: list[tuple[tuple[int, ...], int]]  # of inputs, and of the first output
    roots: tuple[int, ...]
    size: int  # slots in all

    def graph(self, roots: Sequence[Value], name: str = "tensors") -> Graph:
        """The expression as a graph with an input d0, d1, … for each leaf."""
        graph = Graph(name)
        table = {x: graph.input(f"d{i}", h.type) for i, (x, h) in enumerate(self._leaves())}
        return graph.outputs(*substitute_values(roots, table))

    def _leaves(self) -> list[tuple[Value, Handle]]:
        return list(zip(self.leaf_values, self.leaves, strict=True))

    def binding(self) -> dict[str, int]:
        """The symbolic sizes that leaves have values for; two values for one name are an error."""
        found: dict[str, int] = {}
        for handle in self.leaves:
            for name, value in (handle.binding or {}).items():
                if found.setdefault(name, value) != value:
                    raise SymbolError(f"the size {name} is bound to {found[name]} and to {value}", code="S154")
        return found


def outline(roots: Sequence[Value], find: Callable[[Value], Any] = handle_of) -> Outline:
    """Walk down to what has storage, as `find` says. A value that belongs to a trace is an error."""
    parts: list[Any] = []
    leaves: list[Handle] = []
    leaf_slots: list[int] = []
    leaf_values: list[Value] = []
    nodes: list[Node] = []
    node_slots: list[tuple[tuple[int, ...], int]] = []
    slot: dict[tuple[int, int], int] = {}
    count = 0
    stack = [(x, False) for x in reversed(roots)]
    while stack:
        x, ready = stack.pop()
        node = x.node
        if (id(node), x.index) in slot:
            continue
        if not ready:
            handle = node.op.handle if type(node.op) is Data else find(x)
            if handle is not None:
                slot[id(node), x.index] = count
                leaf_slots.append(count)
                leaf_values.append(x)
                leaves.append(handle)
                parts.append(handle.type)
                count += 1
                continue
            if node.inputs:
                stack.append((x, True))
                stack.extend([(i, False) for i in reversed(node.inputs)])
                continue
            if isinstance(node.op, (Input, Param)):
                raise _escaped(x)
        inputs = tuple([slot[id(i.node), i.index] for i in node.inputs])
        parts.append((node.op, inputs))
        nodes.append(node)
        node_slots.append((inputs, count))
        for i in range(len(node.types)):
            slot.setdefault((id(node), i), count + i)
        count += len(node.types)
    ends = tuple([slot[id(x.node), x.index] for x in roots])
    return Outline((*parts, ends), leaves, leaf_slots, leaf_values, nodes, node_slots, ends, count)


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """An input of a graph in the place of storage: it has a type, which is all that structure needs."""

    type: TensorType
    binding: None = None


def outline_of(graph: Graph) -> Outline:
    """The structure of a graph; its inputs are the leaves, those that nothing uses left out."""
    inputs = {x: DeclaredInput(x.type) for x in (*graph.inputs, *graph.params)}
    return outline(graph.results, inputs.get)


def _escaped(x: Value) -> TraceError:
    leaf = x.node.op
    assert isinstance(leaf, (Input, Param))
    traced = x.node.origin.place
    return TraceError(
        f"the tensor has no elements: it depends on argument {leaf.key!r} : {x.type} of a function that is only traced",
        code="T205", place=here(), operands=() if traced is None else (f"traced at {traced.short}",),
        fix="return it from the function",
    )  # fmt: skip


def is_traced(x: Value) -> bool:
    """Whether a value depends on an argument of a function that is being traced."""
    if handle_of(x) is not None:
        return False
    seen: set[Node] = set()
    stack = [x]
    while stack:
        y = stack.pop()
        if y.node in seen or handle_of(y) is not None:
            continue
        if isinstance(y.node.op, (Input, Param)):
            return True
        seen.add(y.node)
        stack.extend(y.node.inputs)
    return False
