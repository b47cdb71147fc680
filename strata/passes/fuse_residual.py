"""Join the sum with a residual and the normalisation behind it, for backends with a kernel for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value
from strata.ops import fused_residual_layer_norm, fused_residual_rms_norm, zeros
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import RuleSet, V, pat

LAYER_NORM = RuleSet()
RMS_NORM = RuleSet()


def is_residual(x: Value, residual: Value, axes: tuple[int, ...]) -> bool:
    """Both have the full shape (a vector is a bias, not a residual), and the last axis is normalised."""
    return x.shape == residual.shape and axes == (x.ndim - 1,) and x.dtype.is_float


@LAYER_NORM.rule(pat.layer_norm(pat.add(V.x, V.residual).once, V.gamma, V.beta, axes=V.axes, eps=V.eps))
def layer_norm_of_sum(
    x: Value, residual: Value, gamma: Value, beta: Value, axes: tuple[int, ...], eps: float
) -> Value | None:
    """The sum stays in the kernel."""
    return fused_residual_layer_norm(x, residual, gamma, beta, eps=eps) if is_residual(x, residual, axes) else None


@RMS_NORM.rule(pat.rms_norm(pat.add(V.x, V.residual).once, V.gamma, V.beta, axes=V.axes, eps=V.eps))
def rms_norm_of_sum(
    x: Value, residual: Value, gamma: Value, beta: Value, axes: tuple[int, ...], eps: float
) -> Value | None:
    """The sum stays in the kernel."""
    return fused_residual_rms_norm(x, residual, gamma, beta, eps=eps) if is_residual(x, residual, axes) else None


@RMS_NORM.rule(pat.rms_norm(pat.add(V.x, V.residual).once, V.gamma, axes=V.axes, eps=V.eps), exact=False)
def rms_norm_of_sum_without_shift(
    x: Value, residual: Value, gamma: Value, axes: tuple[int, ...], eps: float
) -> Value | None:
    """The fused op always shifts; adding 0 turns -0 into 0."""
    if not is_residual(x, residual, axes):
        return None
    return fused_residual_rms_norm(x, residual, gamma, zeros(gamma.shape, gamma.dtype), eps=eps)


@register
@dataclass(frozen=True)
class FuseResidualLN(Pass):
    """layer_norm(x + residual) as one op, where nothing else reads the sum."""

    name: ClassVar[str] = "fuse_residual_layer_norm"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return LAYER_NORM(graph, ctx, self.name)


@register
@dataclass(frozen=True)
class FuseResidualRmsNorm(Pass):
    """rms_norm(x + residual) as one op, where nothing else reads the sum."""

    name: ClassVar[str] = "fuse_residual_rms_norm"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return RMS_NORM(graph, ctx, self.name)
