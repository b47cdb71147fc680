"""Find up * silu(gate): over the halves of one product, or over two products that share their left side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strata.core import Dim
from strata.mir import Constant, Graph, Param, Value, toposort
from strata.ops import concat, fused_swiglu
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import RuleSet, V, pat

HALVES = RuleSet()
DUAL = RuleSet()
Shape = tuple[Dim, ...]


@HALVES.rule(
    pat.multiply(
        pat.slice(V.x, start=V.up, stop=V.up_stop, step=V.step).once,
        pat.silu(pat.slice(V.x, start=V.gate, stop=V.gate_stop, step=V.step).once).once,
    )
)
def swiglu_of_halves(x: Value, up: Shape, up_stop: Shape, gate: Shape, gate_stop: Shape, step: Shape) -> Value | None:
    """Both halves are read in place. The source may have other readers."""
    first, second = half(x, 0), half(x, 1)
    if first is None or second is None or any(s != 1 for s in step) or not x.dtype.is_float:
        return None
    if (up, up_stop) == first and (gate, gate_stop) == second:
        return fused_swiglu(x)
    if (up, up_stop) == second and (gate, gate_stop) == first:
        return fused_swiglu(x, gate_first=True)
    return None


def half(x: Value, which: int) -> tuple[Shape, Shape] | None:
    """Start and stop of a half of the last axis; None where there are no halves."""
    if not x.ndim or not isinstance(x.shape[-1], int) or x.shape[-1] % 2:
        return None
    middle = x.shape[-1] // 2
    lead = (0,) * (x.ndim - 1)
    return (*lead, which * middle), (*x.shape[:-1], middle * (which + 1))


@DUAL.rule(pat.multiply(pat.matmul(V.x, V.up).once, pat.silu(pat.matmul(V.x, V.gate).once).once))
def swiglu_of_two_products(x: Value, up: Value, gate: Value) -> Value | None:
    """One wide product reads x once. The weights depend on parameters only, so they are put side by side once."""
    fits = up.ndim == 2 and up.shape == gate.shape and x.ndim >= 2 and x.dtype.is_float
    if not fits or not (is_fixed(up) and is_fixed(gate)):
        return None
    return fused_swiglu(x @ concat([up, gate], axis=1))


def is_fixed(value: Value) -> bool:
    """Whether a value depends on parameters and constants only."""
    return all(n.inputs or isinstance(n.op, (Param, Constant)) for n in toposort([value]))


@register
@dataclass(frozen=True)
class FuseSwiGLU(Pass):
    """a * silu(b) over the halves of one value as one op."""

    name: ClassVar[str] = "fuse_swiglu"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return HALVES(graph, ctx, self.name)


@register
@dataclass(frozen=True)
class FuseSwiGLUDualMatmul(Pass):
    """(x up) * silu(x gate) as one product and one op."""

    name: ClassVar[str] = "fuse_swiglu_dual"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return DUAL(graph, ctx, self.name)
