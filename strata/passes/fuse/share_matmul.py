"""Merge matmuls that share their left operand: one wide matmul with concatenated weights.

The weights depend on parameters only, so their concatenation runs when the parameters are set, never per call. A bias
that is added to a matmul joins too; the parts are then plain slices that later kernels read in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.core import DType
from strata.mir import Graph, Node, Value, fixed_values, toposort
from strata.ops import MatMul, concat, narrow, zeros
from strata.passes.base import Pass, PassContext, register, rewrite
from strata.passes.match import Uses


@register
@dataclass(frozen=True)
class ShareMatMul(Pass):
    """x @ w1, x @ w2, … become slices of x @ [w1 w2 …]."""

    least_columns: int = 8  # narrower matmuls (a router, a gate of one column) stay on their own

    name: ClassVar[str] = "share_matmul"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        order = toposort(graph.results)
        fixed = fixed_values(order)
        families: dict[tuple[Value, DType], list[Node]] = defaultdict(list)
        for node in order:
            if self._joins(node, fixed):
                left, right = node.inputs
                families[left, right.dtype].append(node)
        plan = _plan(graph, order, fixed, [f for f in families.values() if len(f) > 1])
        return rewrite(graph, plan.change, self.name) if plan.parts else graph

    def _joins(self, node: Node, fixed: set[Value]) -> bool:
        if node.op.name != "matmul":
            return False
        left, right = node.inputs
        columns = right.shape[-1]
        return (
            right.ndim == 2
            and right in fixed
            and left not in fixed
            and isinstance(columns, int)
            and columns >= self.least_columns
        )


@dataclass
class _Part:
    """One matmul of a family: where its columns start, and the bias that its only reader adds."""

    family: int
    start: int
    columns: int
    bias: Value | None


@dataclass
class _Plan:
    parts: dict[Value, _Part]  # by the value that is replaced: the matmul, or the sum with its bias
    families: list[list[tuple[Node, _Part]]]
    wide: dict[int, Value]

    def change(self, value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        part = self.parts.get(value)
        if part is None:
            return None
        if part.family not in self.wide:
            left = inputs[0] if value.node.op.name == "matmul" else self._left(inputs)
            self.wide[part.family] = self._join(part.family, left)
        return [narrow(self.wide[part.family], -1, part.start, part.columns)]

    def _left(self, inputs: tuple[Value, ...]) -> Value:
        product = next(x for x in inputs if x.node.op.name == "matmul")
        return product.node.inputs[0]

    def _join(self, family: int, left: Value) -> Value:
        members = self.families[family]
        joined: Value = MatMul()(left, concat([node.inputs[1] for node, _ in members], axis=1))  # of codes, too
        if all(part.bias is None for _, part in members):
            return joined
        dtype = members[0][0].types[0].dtype
        biases = [part.bias if part.bias is not None else zeros((part.columns,), dtype) for _, part in members]
        return joined + concat(biases, axis=0)


def _plan(graph: Graph, order: list[Node], fixed: set[Value], families: list[list[Node]]) -> _Plan:
    uses = Uses(graph)
    readers: dict[Value, list[Node]] = defaultdict(list)
    for node in order:
        for x in node.inputs:
            readers[x].append(node)
    plan = _Plan({}, [], {})
    for number, family in enumerate(families):
        members: list[tuple[Node, _Part]] = []
        start = 0
        for node in family:
            product = Value(node, 0)
            columns = node.inputs[1].shape[-1]
            assert isinstance(columns, int)
            bias, target = None, product
            if uses.of(product) == 1 and len(readers[product]) == 1 and readers[product][0].op.name == "add":
                adder = readers[product][0]
                other = next(x for x in adder.inputs if x != product) if adder.inputs[0] != adder.inputs[1] else product
                if other in fixed and other.shape == (columns,):
                    bias, target = other, Value(adder, 0)
            part = _Part(number, start, columns, bias)
            members.append((node, part))
            plan.parts[target] = part
            start += columns
        plan.families.append(members)
    return plan
