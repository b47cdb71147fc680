"""Separable pooling: wide windows one axis after the other, 5 + 5 taps in place of 25.

Planes of a volume that are not wide themselves are pooled whole: 9 + 3 taps in place of 27.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from strata.mir import Graph, Value
from strata.passes.base import Pass, PassContext, register, rewrite

WIDE = 16  # taps of a window from which a second pass costs less than the taps that it saves


@register
@dataclass(frozen=True)
class SeparatePools(Pass):
    """A pool over several axes as one pool an axis: maxima and minima stay the same, sums round otherwise."""

    name: ClassVar[str] = "separate_pools"
    seeks: ClassVar[frozenset[str]] = frozenset({"pool_max", "pool_min", "pool_sum"})

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        names = ("pool_max", "pool_min") if ctx.exact else ("pool_max", "pool_min", "pool_sum")
        return rewrite(graph, lambda value, inputs: _separated(value, inputs, names), self.name)


def _separated(value: Value, inputs: tuple[Value, ...], names: Sequence[str]) -> Sequence[Value] | None:
    op: Any = value.node.op
    if op.name not in names or prod(op.kernel) < WIDE:
        return None
    axes = [axis for axis in reversed(range(op.rank)) if op.kernel[axis] > 1 or op.stride[axis] > 1]
    together = [axis for axis in axes if axis >= op.rank - 2]
    if op.rank < 3 or prod(op.kernel[-2:]) >= WIDE:
        together = together[:1]
    groups = [together, *([axis] for axis in axes if axis not in together)]
    if len([group for group in groups if any(op.kernel[axis] > 1 for axis in group)]) < 2:
        return None
    (x,) = inputs
    none: dict[str, Any] = {"kernel": 1, "stride": 1, "padding": (0, 0), "dilation": 1}
    for group in groups:
        fields = {
            name: tuple(v if at in group else none[name] for at, v in enumerate(getattr(op, name))) for name in none
        }
        x = replace(op, **fields)(x)
    return [x]
