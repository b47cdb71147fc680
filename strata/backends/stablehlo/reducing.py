"""Reductions, extremes and running ops of a graph as StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.stablehlo.build import Hlo
from strata.backends.stablehlo.reductions import arg_reduce, choose, reduce, running, wide
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
    """Steps that double: log2(n) passes over the values, each with its place."""
    (x,) = xs
    b, largest = w.b, op.name == "cummax"
    places = b.iota(i64, x.shape, op.axis)
    if x.size == 0:
        return x, places
    body = choose(b, largest, last=False)
    value = b.convert(x, wide(x.dtype))
    step, length = 1, x.shape[op.axis]
    low, high = [0] * x.ndim, [0] * x.ndim
    while step < length:
        low[op.axis], high[op.axis] = step, -step
        before = b.pad(value, identity("max" if largest else "min", value.dtype), low, high)
        earlier = b.pad(places, length, low, high)  # behind every place: never taken at a tie
        value, places = body(before, earlier, value, places)
        step *= 2
    return b.convert(value, x.dtype), places


@rule("logcumsumexp")
def _log_of_running_sum(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b, axis = w.b, op.axis
    if x.size == 0:
        return x
    value = b.convert(x, wide(x.dtype))
    step, low, high = 1, [0] * x.ndim, [0] * x.ndim
    while step < x.shape[axis]:
        low[axis], high[axis] = step, -step
        before = b.pad(value, float("-inf"), low, high)
        top = b.same("maximum", before, value)
        safe = b.select(scalar(b, "isfinite", top.dtype, [top]), top, b.like(0, top))
        total = [b.same("exponential", b.same("subtract", v, safe)) for v in (before, value)]
        value = b.same("add", b.same("log", b.same("add", *total)), safe)
        step *= 2
    return b.convert(value, x.dtype)


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
