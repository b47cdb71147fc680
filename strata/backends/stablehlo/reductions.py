"""Reductions, argmax and scans as StableHLO: builders, then the rules of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strata.backends.stablehlo.build import Hlo, StableHloBuilder
from strata.backends.stablehlo.scalars import scalar
from strata.backends.stablehlo.table import Results, Writer, rule
from strata.core import DType, bool_, f32, i64
from strata.kernel import identity

_BODIES = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum", "all": "and", "any": "or"}


def wide(dtype: DType) -> DType:
    """The type that sums and products of a type are kept in."""
    return f32 if dtype.is_float and dtype.bits < 32 else dtype


def reduce(b: StableHloBuilder, kind: str, x: Hlo, axes: Sequence[int]) -> Hlo:
    """Over axes, which are dropped. Half precision adds up in f32."""
    if not axes:
        return x
    dtype = wide(x.dtype) if kind in ("sum", "prod") else x.dtype
    body = combiner(b, kind)
    start = b.const(identity(kind, dtype), dtype)
    (made,) = b.reduce([b.convert(x, dtype)], [start], axes, lambda p, q: (body(p, q),))
    return b.convert(made, x.dtype)


def combiner(b: StableHloBuilder, kind: str) -> Callable[[Hlo, Hlo], Hlo]:
    return lambda p, q: b.same(_BODIES[kind], p, q)


def running(
    b: StableHloBuilder, kind: str, x: Hlo, axis: int, *, exclusive: bool = False, reverse: bool = False
) -> Hlo:
    """The reduction of all up to each place along an axis, without the place itself when exclusive."""
    if x.size == 0:
        return x
    dtype = wide(x.dtype) if kind in ("sum", "prod") else x.dtype
    start = b.const(identity(kind, dtype), dtype)
    given = b.convert(x, dtype)
    if exclusive:  # one place earlier
        low, high = [0] * x.ndim, [0] * x.ndim
        low[axis], high[axis] = (-1, 1) if reverse else (1, -1)
        given = b.pad(given, start, low, high)
    return b.convert(scanned(b, given, start, combiner(b, kind), axis, reverse=reverse), x.dtype)


def scanned(
    b: StableHloBuilder, x: Hlo, start: Hlo, body: Callable[[Hlo, Hlo], Hlo], axis: int, *, reverse: bool = False
) -> Hlo:
    """What an associative function makes of all up to each place. XLA takes such windows apart into short ones."""
    length, ones = x.shape[axis], [1] * x.ndim
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis] = length
    padding[axis] = (0, length - 1) if reverse else (length - 1, 0)
    return b.reduce_window(x, start, body, window=window, stride=ones, dilation=ones, padding=padding, shape=x.shape)


def better(b: StableHloBuilder, largest: bool, x: Hlo, y: Hlo) -> Hlo:
    """Whether x is ahead of y: larger (smaller), or a NaN where y is none."""
    ahead = b.compare("GT" if largest else "LT", x, y)
    if not x.dtype.is_float:
        return ahead
    return b.same("or", ahead, b.same("and", b.compare("NE", x, x), b.compare("EQ", y, y)))


def choose(b: StableHloBuilder, largest: bool, last: bool) -> Callable[..., tuple[Hlo, Hlo]]:
    """Of two values with their places the better one; at a tie the first (or the last), NaN being best of all."""

    def body(x: Hlo, i: Hlo, y: Hlo, j: Hlo) -> tuple[Hlo, Hlo]:
        x_ahead, y_ahead = better(b, largest, x, y), better(b, largest, y, x)
        tie = b.compare("GT" if last else "LT", i, j)
        take = b.same("or", x_ahead, b.same("and", b.same("not", y_ahead), tie))
        return b.select(take, x, y), b.select(take, i, j)

    return body


def arg_reduce(b: StableHloBuilder, largest: bool, x: Hlo, axis: int, *, last: bool = False) -> Hlo:
    """Places of the largest (smallest) along an axis."""
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    if x.size == 0:
        return b.const(0, i64, shape)
    if x.dtype.is_float and x.dtype.bits < 32:
        x = b.convert(x, f32)
    start = b.const(identity("max" if largest else "min", x.dtype), x.dtype)
    nowhere = b.const(-1 if last else x.shape[axis], i64)  # after every place at a tie with the start
    body = choose(b, largest, last)
    _, places = b.reduce([x, b.iota(i64, x.shape, axis)], [start, nowhere], [axis], body)
    return places


def truth(b: StableHloBuilder, x: Hlo) -> Hlo:
    """One boolean: whether all are true."""
    return reduce(b, "all", x, range(x.ndim)) if x.ndim else b.convert(x, bool_)


# rules


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
