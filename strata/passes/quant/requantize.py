"""Requantisation: divisions by an output scale are folded into the input scales.

    round((n · a + b) / s)   becomes   round(n · (a / s) + b / s)

A kernel that ends in codes then multiplies once where it would multiply and divide: `a / s` and `b / s` are computed
when parameters are bound. What is rounded differs by a unit or two in the last place, as it does between any two orders
of the sum after `n · a`: a number next to a half may become the neighbouring code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strata.core import f32
from strata.mir import Constant, Graph, Value, constant, fixed_values, toposort
from strata.ops import ConvLast, maximum, relu
from strata.passes.base import Pass, PassContext, register, rewrite


@register
@dataclass(frozen=True)
class Requantize(Pass):
    """(whole numbers · scale + bias) / scale of the result, with one multiplication."""

    name: ClassVar[str] = "requantize"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        order = toposort(graph.results)
        if not ctx.claimed(ConvLast.name) or not any(n.op.name == "round" for n in order):
            return graph
        uses = Counter(x for node in order for x in node.inputs)
        uses.update(graph.results)
        rounded = {node.inputs[0] for node in order if node.op.name == "round"}
        return rewrite(graph, _Divisions(fixed_values(order), uses, rounded).change, self.name)


@dataclass(frozen=True, slots=True)
class _Divisions:
    fixed: set[Value]
    uses: Counter[Value]
    rounded: set[Value]

    def change(self, value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        node = value.node
        if node.op.name != "divide" or value.dtype is not f32 or node.inputs[0] in self.fixed:
            return None
        if value not in self.rounded or self.uses[value] != 1:
            return None
        by = node.inputs[1].node.op
        if not isinstance(by, Constant) or by.data.array.size != 1 or by.data.array.reshape(-1)[0] <= 0:
            return None
        factor = constant(np.float32(1 / np.float64(by.data.array.reshape(-1)[0])))
        made = self._scaled(node.inputs[0], inputs[0], factor)
        return None if made is None or made.shape != value.shape else [made]

    def _scaled(self, old: Value, new: Value, factor: Value) -> Value | None:
        """`new`, the rewritten `old`, times a factor, which no operation of each run has to apply."""
        if old in self.fixed:
            return new * factor
        name, parts = old.node.op.name, list(zip(old.node.inputs, new.node.inputs, strict=True))
        if name == "multiply":
            for (_, first), (scale, second) in (parts, parts[::-1]):
                if scale in self.fixed and _is_whole(first):
                    return first * (second * factor)
            return None
        if self.uses[old] > 1:
            return None
        if name in ("add", "subtract"):
            left, right = (self._scaled(*part, factor) for part in parts)
            if left is None or right is None:
                return None
            return left + right if name == "add" else left - right
        if name == "relu" or (name == "maximum" and _is_zero(new.node.inputs[1])):
            inside = self._scaled(*parts[0], factor)
            return None if inside is None else relu(inside) if name == "relu" else maximum(inside, 0.0)
        return None


def _is_whole(x: Value) -> bool:
    return x.node.op.name == "cast" and x.node.inputs[0].dtype.is_int


def _is_zero(x: Value) -> bool:
    return isinstance(x.node.op, Constant) and not x.node.op.data.array.any()
