"""Drop fake quantisation of values that are on the same grid already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value
from strata.passes.base import Pass, PassContext, register, rewrite

MOVES = ("reshape", "transpose", "slice", "flip")  # elements elsewhere: fine where all share one scale
KEEPS = ("relu", "pool_max")  # elements that are there already, or 0, each in its channel


@register
@dataclass(frozen=True)
class MergeFakeQuantize(Pass):
    """A second fake quantisation, equal and with nothing between but movements, relu and max pooling, is dropped.

    What is between stays. With a given scale, nothing changes. A scale that is taken from the data may be smaller the
    second time, where the largest element is gone: keeping the first, as an integer kernel would, is not exact.
    """

    name: ClassVar[str] = "merge_fake_quantize"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        modes = ("fixed",) if ctx.exact else ("fixed", "per_batch")  # a moving scale learns from what it sees
        return rewrite(graph, lambda value, inputs: _merged(value, inputs, modes), self.name)


def _merged(value: Value, inputs: tuple[Value, ...], modes: Sequence[str]) -> Sequence[Value] | None:
    op = value.node.op
    if op.name != "fake_quantize" or op.scale_mode not in modes:  # type: ignore[attr-defined]
        return None
    x, *state = inputs
    passed = (*KEEPS, *MOVES) if op.axis is None else KEEPS  # type: ignore[attr-defined]
    source = x
    while source.node.op.name in passed:
        source = source.node.inputs[0]
    first = source.node
    if source.index or first.op != op or list(first.inputs[1:]) != state:
        return None
    return [x, Value(first, 1)]
