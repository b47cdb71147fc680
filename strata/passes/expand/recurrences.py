"""Recurrences in log2(length) steps: each step joins an element with the one twice as far back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.core import f32
from strata.mir import METHODS, Value, constant
from strata.ops import broadcast_to, concat, cummax, linear_recurrence, narrow
from strata.passes.expand.rules import expands


def _earlier(x: Value, axis: int, by: int, fill: float, *, reverse: bool) -> Value:
    """Element i is x[i - by], or x[i + by] in reverse; `fill` is beyond the end."""
    n = x.shape[axis]
    shape = (*x.shape[:axis], by, *x.shape[axis + 1 :])
    rest = narrow(x, axis, by if reverse else 0, n - by)
    beyond = broadcast_to(constant(fill, x.dtype), shape)
    return concat([rest, beyond] if reverse else [beyond, rest], axis)


@expands("linear_recurrence")
def _linear(op: Any, a: Value, b: Value) -> Sequence[Value] | None:
    n = a.shape[op.axis]
    if not isinstance(n, int):
        return None
    kept = a.dtype
    if kept.is_float and kept.bits < 32:
        a, b = METHODS["cast"](a, f32), METHODS["cast"](b, f32)
    by = 1
    while by < n:
        b = b + a * _earlier(b, op.axis, by, 0.0, reverse=op.reverse)
        if 2 * by < n:
            a = a * _earlier(a, op.axis, by, 1.0, reverse=op.reverse)
        by *= 2
    return [METHODS["cast"](b, kept)]


@expands("cumprod")
def _products(op: Any, x: Value) -> Sequence[Value] | None:
    n = x.shape[op.axis]
    if not isinstance(n, int):
        return None
    if op.exclusive and n:
        x = _earlier(x, op.axis, 1, 1.0, reverse=op.reverse)
    by = 1
    while by < n:
        x = x * _earlier(x, op.axis, by, 1.0, reverse=op.reverse)
        by *= 2
    return [x]


@expands("logcumsumexp")
def _log_sums(op: Any, x: Value) -> Sequence[Value] | None:
    """Sums of exponentials, each taken apart by the largest so far: factors are at most 1."""
    n = x.shape[op.axis]
    if not isinstance(n, int):
        return None
    if n == 0:
        return [x]
    kept = x.dtype
    wide = METHODS["cast"](x, f32) if kept.bits < 32 else x
    where, exp = METHODS["where"], METHODS["exp"]
    most, _ = cummax(wide, op.axis)
    is_finite = METHODS["isfinite"](most)
    base = where(is_finite, most, constant(0, wide.dtype))
    decay = exp(METHODS["minimum"](_earlier(base, op.axis, 1, 0.0, reverse=False) - base, constant(0, wide.dtype)))
    total = linear_recurrence(decay, exp(wide - base), op.axis)
    found = where(is_finite, METHODS["log"](total) + base, most)
    return [METHODS["cast"](found, kept)]
