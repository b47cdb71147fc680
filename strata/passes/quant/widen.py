"""Convolutions of narrow floats computed in f32; inputs and outputs stay narrow.

    conv(x, w) : bf16   becomes   cast(conv(cast(x, f32), cast(w, f32)), bf16)

A convolution reads every number many times, so it is converted once, by whatever makes it: the kernel before, or the
one that changes its layout. Weights are converted where they are parameters: once. Sums are of f32 in any case and are
rounded once, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.core import f32
from strata.mir import Graph, Value, as_tuple
from strata.ops import cast
from strata.passes.base import rewrite

CONVOLUTIONS = frozenset(("conv", "conv_backward_weight"))


def widen_convolutions(graph: Graph, made_by: str) -> Graph:
    """The graph with f16, bf16 and narrower convolutions through f32."""
    return rewrite(graph, _widened, made_by)


def _widened(out: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
    node = out.node
    dtype = out.dtype
    if node.op.name not in CONVOLUTIONS or not dtype.is_float or dtype.bits >= f32.bits:
        return None
    if any(x.dtype is not dtype for x in inputs):
        return None
    return [cast(y, dtype) for y in as_tuple(node.op(*(cast(x, f32) for x in inputs)))]
