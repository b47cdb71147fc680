"""Reductions, argmax, argmin and scans: the rules from ops to StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.stablehlo.build import Hlo
from strata.backends.stablehlo.reductions import arg_reduce, better, reduce, running, scanned, wide
from strata.backends.stablehlo.scalars import scalar
from strata.backends.stablehlo.table import Results, Writer, rule
from strata.core import i64
from strata.kernel import identity


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_all", "reduce_any")
def _reduce(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return reduce(w.b, op.kind, xs[0], op.axes)


@rule("argmax", "argmin")
def _argument(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return arg_reduce(w.b, op.name == "argmax", xs[0], op.axis, last=op.select_last)


@rule("cumsum", "cumprod")
def _running(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return running(w.b, op.kind, xs[0], op.axis, exclusive=op.exclusive, reverse=op.reverse)


@rule("cummax", "cummin")
def _extreme_so_far(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """The running extreme; its place is that of the last element that was ahead of all before it."""
    (x,) = xs
    b, largest = w.b, op.name == "cummax"
    places = b.iota(i64, x.shape, op.axis)
    if x.size == 0:
        return x, places
    given = b.convert(x, wide(x.dtype))
    best = running(b, "max" if largest else "min", given, op.axis)
    low, high = [0] * x.ndim, [0] * x.ndim
    low[op.axis], high[op.axis] = 1, -1
    before = b.pad(best, identity("max" if largest else "min", best.dtype), low, high)
    fresh = b.select(better(b, largest, given, before), places, b.like(0, places))
    return b.convert(best, x.dtype), running(b, "max", fresh, op.axis)


@rule("logcumsumexp")
def _log_of_running_sum(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b = w.b
    if x.size == 0:
        return x

    def add(p: Hlo, q: Hlo) -> Hlo:
        """log(exp(p) + exp(q)), without overflow."""
        top = b.same("maximum", p, q)
        base = b.select(scalar(b, "isfinite", top.dtype, [top]), top, b.like(0, top))
        parts = [b.same("exponential", b.same("subtract", v, base)) for v in (p, q)]
        return b.same("add", b.same("log", b.same("add", *parts)), base)

    given = b.convert(x, wide(x.dtype))
    return b.convert(scanned(b, given, b.const(float("-inf"), given.dtype), add, op.axis), x.dtype)


@rule("linear_recurrence")
def _linear_recurrence(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """h[i] = a[i]·h[i-1] + b[i], a step for each row."""
    factor, term = xs
    b, axis = w.b, op.axis
    if term.size == 0:
        return term
    result, dtype = term.dtype, wide(term.dtype)
    factor, term = b.convert(factor, dtype), b.convert(term, dtype)
    state = b.const(0, dtype, [n for a, n in enumerate(term.shape) if a != axis])
    length = term.shape[axis]

    def step(at: Hlo, h: Hlo, out: Hlo) -> list[Hlo]:
        place = b.same("subtract", b.const(length - 1, i64), at) if op.reverse else at
        new = b.same("add", b.same("multiply", b.row(factor, place, axis), h), b.row(term, place, axis))
        return [new, b.set_row(out, new, place, axis)]

    return b.convert(b.repeat(length, [state, term], step)[1], result)
