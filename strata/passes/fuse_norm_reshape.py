"""Flatten the rows before a normalisation rather than after it: the reshape of its input is a view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strata.core import Dim
from strata.mir import Graph, Value
from strata.ops import reshape, rms_norm
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import RuleSet, V, pat

RULES = RuleSet()


@RULES.rule(pat.reshape(pat.rms_norm(V.x, V.gamma, axes=V.axes, eps=V.eps).once, shape=V.shape))
def flat_rms_norm(x: Value, gamma: Value, axes: tuple[int, ...], eps: float, shape: tuple[Dim, ...]) -> Value | None:
    return rms_norm(reshape(x, shape), gamma, eps=eps) if is_leading_flatten(x, axes, shape) else None


@RULES.rule(pat.reshape(pat.rms_norm(V.x, V.gamma, V.beta, axes=V.axes, eps=V.eps).once, shape=V.shape))
def flat_rms_norm_with_shift(
    x: Value, gamma: Value, beta: Value, axes: tuple[int, ...], eps: float, shape: tuple[Dim, ...]
) -> Value | None:
    return rms_norm(reshape(x, shape), gamma, beta, eps=eps) if is_leading_flatten(x, axes, shape) else None


def is_leading_flatten(x: Value, axes: tuple[int, ...], shape: tuple[Dim, ...]) -> bool:
    """Whether a reshape joins all axes but the last, and the last is the one that is normalised."""
    return len(shape) == 2 and x.ndim > 2 and shape[-1] == x.shape[-1] and axes == (x.ndim - 1,)


@register
@dataclass(frozen=True)
class FuseRmsNormReshape(Pass):
    """reshape(rms_norm(x)) to rows becomes rms_norm of the rows."""

    name: ClassVar[str] = "fuse_rms_norm_reshape"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return RULES(graph, ctx, self.name)
