"""Scans along an axis: cumsum, cumprod, cummax, and the linear recurrence of their derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import Dim, TensorType, broadcast_shapes, f32, f64, i32, i64, normalize_axis
from strata.mir import METHODS, Op, Sample, Value, constant, draw, function, op
from strata.ops.base.along_axis import AlongAxis
from strata.ops.base.creation import zeros_like
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.base.movement import Pad, broadcast_to, flatten, narrow
from strata.ops.reduce.reduce import summable, summed_in

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


def shifted(x: Value, axis: int, fill: float, *, reverse: bool = False) -> Value:
    """Element i is x[i - 1] (x[i + 1] in reverse); `fill` enters at the free end."""
    ends = [(0, 0)] * x.ndim
    ends[axis] = (0, 1) if reverse else (1, 0)
    low, high = tuple(e[0] for e in ends), tuple(e[1] for e in ends)
    return narrow(Pad(low, high, (0,) * x.ndim, fill)(x), axis, 1 if reverse else 0, x.shape[axis])


def conjugate(x: Value) -> Value:
    return METHODS["conj"](x) if x.dtype.is_complex else x


class Running(AlongAxis):
    """A running sum or product. `exclusive` leaves out the element itself; `reverse` runs from the end."""

    exclusive: bool
    reverse: bool

    kind: ClassVar[str]
    start: ClassVar[int]  # the value over nothing

    def numpy(self, x: np.ndarray) -> np.ndarray:
        order = np.flip(x, self.axis) if self.reverse else x
        ufunc = np.add if self.kind == "sum" else np.multiply
        dtype = summed_in(x, x.shape[self.axis]) if self.kind == "sum" else x.dtype
        out = ufunc.accumulate(order, axis=self.axis, dtype=dtype).astype(x.dtype, copy=False)
        if self.exclusive:
            out = np.roll(out, 1, self.axis)
            np.moveaxis(out, self.axis, 0)[:1] = self.start
        return np.flip(out, self.axis) if self.reverse else out

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        last = k.index(x.shape[self.axis] - 1)

        def read(at: Expr) -> Expr:
            source = last - at if self.reverse else at
            return x[(*index[: self.axis], source, *index[self.axis + 1 :])]

        position = last - index[self.axis] if self.reverse else index[self.axis]
        found = k.scan(self.kind, x.shape[self.axis], read, position, exclusive=self.exclusive)
        if self.exclusive and self.kind == "sum" and x.dtype.is_inexact:  # over nothing 0.0, and -0.0 over that alone
            return k.select(position.eq(0), k.const(0, x.dtype), found)
        return found

    @classmethod
    def samples(cls) -> list[Sample]:
        plain = {"exclusive": False, "reverse": False}
        before = {"exclusive": True, "reverse": False}
        return [
            Sample(f32[3, 4], axis=1, **plain), Sample(f32[3, 4], axis=0, **before),
            Sample(f64[2, 3, 2], axis=1, exclusive=False, reverse=True), Sample(f32[2, 1], axis=1, **before),
            Sample(f32[5], axis=0, exclusive=True, reverse=True), Sample(f32[0, 3], axis=0, **before),
            Sample(i32[6], axis=0, grad=False, **plain),
            Sample(np.array([[2, 0, 3, 1], [0, 0, 1, 2], [1, 2, 3, 0]], np.float32), axis=1, **plain),
            Sample(np.array([[1 + 2j, 0, 3j], [2, 1j, 1 - 1j]], np.complex64), axis=1, **plain),
        ]  # fmt: skip


@op("cumsum")
class Cumsum(Running):
    """The sum of all elements up to each one."""

    kind = "sum"
    start = 0

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return self(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return Cumsum(self.axis, self.exclusive, not self.reverse)(ct)


@op("cumprod")
class Cumprod(Running):
    """The product of all elements up to each one. Derivatives follow a recurrence, so they are exact at zeros."""

    kind = "prod"
    start = 1

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        # P[i] = P[i-1]·x[i] gives dP[i] = x[i]·dP[i-1] + P[i-1]·dx[i]
        tangent = LinearRecurrence(self.axis, self.reverse)(x, self._before(x, out) * dx)
        return shifted(tangent, self.axis, 0.0, reverse=self.reverse) if self.exclusive else tangent

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        if self.exclusive:
            ct = shifted(ct, self.axis, 0.0, reverse=not self.reverse)
        factor = shifted(conjugate(x), self.axis, 0.0, reverse=not self.reverse)
        return LinearRecurrence(self.axis, not self.reverse)(factor, ct) * conjugate(self._before(x, out))

    def _before(self, x: Value, out: Value) -> Value:
        """The product up to, and without, each element."""
        return out if self.exclusive else shifted(out, self.axis, 1.0, reverse=self.reverse)


@op("linear_recurrence")
class LinearRecurrence(Op):
    """h[i] = a[i]·h[i-1] + b[i] along an axis, from h = 0; `reverse` runs from the end.

    Its derivatives are recurrences too.
    """

    axis: int
    reverse: bool

    dtypes = "inexact"

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        self.require(a.shape == b.shape, f"factors {a} and terms {b} differ in shape", code="S200")
        self.require_dtype(a.dtype is b.dtype, f"operands differ in dtype, {a} and {b}", code="D103")
        self.require(0 <= self.axis < a.ndim, f"axis {self.axis} is not an axis of {a}", code="S103")
        self.require_dtype(a.dtype.is_inexact, f"does not take {a}, only inexact types", code="D104")
        return b

    def numpy(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        rows, terms = np.moveaxis(a, self.axis, 0), np.moveaxis(b, self.axis, 0)
        out, state = np.zeros_like(terms), np.zeros_like(terms, shape=terms.shape[1:])
        steps = range(len(rows))
        for i in reversed(steps) if self.reverse else steps:
            out[i] = state = rows[i] * state + terms[i]
        return np.moveaxis(out, 0, self.axis)

    def jvp(self, a: Value, b: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value:
        da, db = dx
        terms = [] if da is None else [da * shifted(out, self.axis, 0.0, reverse=self.reverse)]
        terms += [] if db is None else [db]
        return self(a, terms[0] if len(terms) == 1 else terms[0] + terms[1])

    def vjp(self, a: Value, b: Value, *, out: Value, ct: Value) -> tuple[Value, Value]:
        factor = shifted(conjugate(a), self.axis, 0.0, reverse=not self.reverse)
        to_b = LinearRecurrence(self.axis, not self.reverse)(factor, ct)
        return to_b * conjugate(shifted(out, self.axis, 0.0, reverse=self.reverse)), to_b

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        spread = (x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True))
        return LinearRecurrence(self.axis + 1, self.reverse)(*spread)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], f32[3, 4], axis=1, reverse=False), Sample(f32[4, 2], f32[4, 2], axis=0, reverse=True),
            Sample(f64[0, 2], f64[0, 2], axis=0, reverse=False), Sample(f32[1], f32[1], axis=0, reverse=True),
            Sample(np.array([1j, 2, 1 - 1j], np.complex64), np.array([1, 1j, 2], np.complex64), axis=0, reverse=False),
        ]  # fmt: skip


class RunningExtremum(AlongAxis):
    """The best element so far and its id, the first one at a tie. NaN is the best."""

    allowed = "ordered"
    dtypes = "ordered"
    multi_output = True

    best: ClassVar[Any]

    def infer(self, x: TensorType) -> Any:
        kind = super().infer(x)
        return kind, kind.with_dtype(i64)

    def better(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        self.missing("numpy")

    def numpy(self, x: np.ndarray) -> Any:
        values = self.best.accumulate(x, axis=self.axis)
        rows, best = np.moveaxis(x, self.axis, 0), np.moveaxis(values, self.axis, 0)
        fresh = np.zeros(rows.shape, bool)
        fresh[1:] = self.better(rows[1:], best[:-1]) | (np.isnan(rows[1:]) & ~np.isnan(best[:-1]))
        steps = np.arange(len(rows)).reshape(-1, *(1,) * (x.ndim - 1))
        ids = np.maximum.accumulate(np.where(fresh, steps, 0), axis=0)
        return values, np.moveaxis(ids, 0, self.axis)

    def jvp(self, x: Value, *, out: tuple[Value, ...], dx: Value) -> tuple[Value | None, ...]:
        return METHODS["gather_elements"](dx, out[1], self.axis), None

    def vjp(self, x: Value, *, out: tuple[Value, ...], ct: tuple[Value | None, ...]) -> Value | None:
        if ct[0] is None:
            return None
        return METHODS["scatter_elements"](zeros_like(x), out[1], ct[0], self.axis, reduction="add")

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[3, 4], distinct=True), axis=1), Sample(draw(f64[4, 2], distinct=True), axis=0),
            Sample(f32[0, 2], axis=0), Sample(f32[2, 1], axis=1), Sample(i32[7], axis=0, grad=False),
            Sample(np.array([1, 1, 3, np.nan, 5, np.nan], np.float32), axis=0, grad=False),
            Sample(np.array([-np.inf, -np.inf, 0, 2, np.inf], np.float32), axis=0, grad=False),
        ]  # fmt: skip


@op("cummax")
class Cummax(RunningExtremum):
    """The largest element so far, and its id."""

    best = np.maximum

    def better(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x > y


@op("cummin")
class Cummin(RunningExtremum):
    """The smallest element so far, and its id."""

    best = np.minimum

    def better(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x < y


@op("logcumsumexp")
class LogCumsumExp(AlongAxis):
    """log of the running sum of exp(x), without overflow; its derivatives are recurrences of bounded factors."""

    allowed = "float"
    dtypes = "float"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.logaddexp.accumulate(x, axis=self.axis)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        base = self._finite(out)
        decay = _decay(shifted(out, self.axis, 0.0), base)
        return LinearRecurrence(self.axis, False)(decay, METHODS["exp"](x - base) * dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        base = self._finite(out)
        decay = _decay(out, shifted(base, self.axis, 0.0, reverse=True))
        return METHODS["exp"](x - base) * LinearRecurrence(self.axis, True)(decay, ct)

    def _finite(self, out: Value) -> Value:
        """0 where the sum is empty: everything below is -inf there."""
        return METHODS["where"](METHODS["isfinite"](out), out, constant(0, out.dtype))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], axis=1), Sample(draw(f64[4, 2], -50.0, 50.0), axis=0), Sample(f32[0], axis=0),
            Sample(np.array([-np.inf, 900.0, -np.inf, 901.0], np.float32), axis=0, grad=False),
        ]  # fmt: skip


def _decay(before: Value, after: Value) -> Value:
    """exp(before - after), which is at most 1; at the free end, where it multiplies 0, it must only be finite."""
    return METHODS["exp"](METHODS["minimum"](before - after, constant(0, after.dtype)))


# ------------------------------------------------------------------------------------------------------------ functions


def _running(cls: type[Running], x: Operand, axis: int | None, dtype: Any, exclusive: bool, reverse: bool) -> Value:
    value = as_value(x)
    value = METHODS["cast"](value, dtype) if dtype is not None else summable(value)
    if axis is None:
        value, axis = flatten(value), 0
    return cls(normalize_axis(axis, value.ndim, cls.name), exclusive, reverse)(value)


@function()
def cumsum(
    x: Operand, axis: int | None = None, dtype: Any = None, *, exclusive: bool = False, reverse: bool = False
) -> Value:
    """Running sum along an axis, of the flat array by default; narrow integers add up in 64 bits."""
    return _running(Cumsum, x, axis, dtype, exclusive, reverse)


@function()
def cumprod(
    x: Operand, axis: int | None = None, dtype: Any = None, *, exclusive: bool = False, reverse: bool = False
) -> Value:
    """Running product along an axis, of the flat array by default."""
    return _running(Cumprod, x, axis, dtype, exclusive, reverse)


@function()
def cumsum_backward(ct: Operand, axis: int, exclusive: bool = False) -> Value:
    """The cotangent of cumsum's input: suffix sums, without the own element when exclusive."""
    return cumsum(ct, axis, exclusive=exclusive, reverse=True)


@function()
def linear_recurrence(a: Operand, b: Operand, axis: int = 0, *, reverse: bool = False) -> Value:
    """h[i] = a[i]·h[i-1] + b[i] along an axis, from h = 0."""
    values = [to_inexact(v) for v in promoted(a, b)]
    shape = broadcast_shapes(*(v.shape for v in values), what="linear_recurrence")
    factors, terms = (broadcast_to(v, shape) for v in values)
    return LinearRecurrence(normalize_axis(axis, factors.ndim, "linear_recurrence"), reverse)(factors, terms)


@function()
def cummax(x: Operand, axis: int = -1) -> tuple[Value, Value]:
    """The largest element so far along an axis, and its id; the first one at a tie."""
    value = as_value(x)
    return Cummax(normalize_axis(axis, value.ndim, "cummax"))(value)


@function()
def cummin(x: Operand, axis: int = -1) -> tuple[Value, Value]:
    """The smallest element so far along an axis, and its id; the first one at a tie."""
    value = as_value(x)
    return Cummin(normalize_axis(axis, value.ndim, "cummin"))(value)


@function()
def logcumsumexp(x: Operand, axis: int = -1) -> Value:
    """log of the running sum of exp(x) along an axis."""
    value = to_inexact(as_value(x))
    return LogCumsumExp(normalize_axis(axis, value.ndim, "logcumsumexp"))(value)
