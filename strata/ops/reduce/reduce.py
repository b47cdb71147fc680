"""Reductions over axes: sum, product, maximum, minimum, all, any, and what is built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import Dim, DType, SymExpr, TensorType, bool_, dim_prod, f32, f64, i32, i64, normalize_axes, u64
from strata.mir import METHODS, Sample, UnaryOp, Value, constant, draw, function, op
from strata.ops.base.creation import dim_size
from strata.ops.base.elementwise import accepts
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import broadcast_to, reshape

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

Axes = int | Sequence[int] | None

MANY = 1024  # terms of a sum


def summed_in(x: np.ndarray, terms: int) -> np.dtype[Any]:
    """The type that NumPy adds up in: wide where there are many terms, as it adds them one by one."""
    wide = {"f": np.float64, "c": np.complex128}.get(x.dtype.kind)
    return x.dtype if wide is None or terms <= MANY else np.dtype(wide)


class Reduction(UnaryOp):
    """A reduction that drops `axes` (sorted, non-negative). No axes: the identity."""

    axes: tuple[int, ...]

    kind: ClassVar[str]
    allowed: ClassVar[str] = "numeric"
    dtypes: ClassVar[str | tuple[DType, ...]] = "numeric"
    has_identity: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        ok = list(self.axes) == sorted(set(self.axes)) and all(0 <= a < x.ndim for a in self.axes)
        self.require(ok, f"axes {self.axes} are not distinct axes of {x}", code="S103")
        self.require_dtype(accepts(self.allowed, x.dtype), f"does not take {x}, only {self.allowed} types", code="D104")
        if not self.has_identity:
            empty = next((a for a in self.axes if x.shape[a] == 0), None)
            self.require(
                empty is None, f"axis {empty} of {x} is empty, and an empty {self.kind} has no value", code="S124"
            )
        return x.drop(*self.axes)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return type(self)(tuple(a + 1 for a in self.axes))(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs

        def body(*inner: Expr) -> Expr:
            outer, reduced = iter(index), iter(inner)
            return x[tuple(next(reduced) if a in self.axes else next(outer) for a in range(len(x.shape)))]

        return k.reduce(self.kind, tuple(x.shape[a] for a in self.axes), body)

    def spread(self, y: Value, x: Value) -> Value:
        """A reduced value back over the reduced axes."""
        kept = tuple(1 if a in self.axes else d for a, d in enumerate(x.shape))
        return broadcast_to(reshape(y, kept), x.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[3, 4], distinct=True), axes=(1,)), Sample(draw(f32[2, 3, 4], distinct=True), axes=(0, 2)),
            Sample(draw(f32[3, 2, 2, 2], distinct=True), axes=(0, 2, 3)), Sample(f32[4], axes=()),
            Sample(f32[5, 1], axes=(0, 1)),
            Sample(f64[3, 4], axes=(0,)), Sample(i32[3, 4], axes=(0,), grad=False), Sample(f32[0, 3], axes=(1,)),
        ]  # fmt: skip


@op("reduce_sum")
class ReduceSum(Reduction):
    """Sum over axes; 0 over nothing. Half precision adds up in f32."""

    kind = "sum"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        if not self.axes:
            return x
        made = x.sum(self.axes, dtype=summed_in(x, math.prod(x.shape[a] for a in self.axes)))
        return np.asarray(made, x.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return self(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return self.spread(ct, x)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [*super().samples(), Sample(f32[3, 0], axes=(1,))]


@op("reduce_prod")
class ReduceProd(Reduction):
    """Product over axes; 1 over nothing. The derivative is exact where elements are 0."""

    kind = "prod"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x.prod(self.axes, dtype=x.dtype) if self.axes else x

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return ReduceSum(self.axes)(self._others(x) * dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        others = self._others(x)
        return self.spread(ct, x) * (METHODS["conj"](others) if x.dtype.is_complex else others)

    def _others(self, x: Value) -> Value:
        """The product of all other elements of the reduced extent, from exclusive products of both sides."""
        if not self.axes:
            return METHODS["ones_like"](x)
        kept = [a for a in range(x.ndim) if a not in self.axes]
        last = METHODS["transpose"](x, [*kept, *self.axes])
        flat = reshape(last, (*(x.shape[a] for a in kept), dim_prod([x.shape[a] for a in self.axes])))
        before = METHODS["cumprod"](flat, axis=-1, exclusive=True)
        after = METHODS["flip"](METHODS["cumprod"](METHODS["flip"](flat, -1), axis=-1, exclusive=True), -1)
        back = [0] * x.ndim
        for i, a in enumerate([*kept, *self.axes]):
            back[a] = i
        return METHODS["transpose"](reshape(before * after, last.shape), back)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            *super().samples(),
            Sample(f32[3, 0], axes=(1,)),
            Sample(np.array([[0, 2, 3], [0, 0, 2], [1, 2, 3]], np.float32), axes=(1,)),
        ]


class Extremum(Reduction):
    """Maximum or minimum: NaN wins, ties share the derivative equally."""

    allowed = "ordered"
    has_identity = False

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return ReduceSum(self.axes)(self._weights(x, out) * dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return self.spread(ct, x) * self._weights(x, out)

    def _weights(self, x: Value, out: Value) -> Value:
        best = METHODS["cast"](METHODS["equal"](x, self.spread(out, x)), x.dtype)
        return best / self.spread(ReduceSum(self.axes)(best), x)


@op("reduce_max")
class ReduceMax(Extremum):
    """Maximum over axes."""

    kind = "max"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x.max(self.axes) if self.axes else x


@op("reduce_min")
class ReduceMin(Extremum):
    """Minimum over axes."""

    kind = "min"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x.min(self.axes) if self.axes else x


class Logical(Reduction):
    """A reduction of booleans."""

    allowed = "bool"
    dtypes = (bool_,)
    differentiable = False

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(bool_[3, 4], axes=(1,)), Sample(bool_[2, 0], axes=(1,)), Sample(bool_[2, 3, 2], axes=(0, 2))]


@op("reduce_all")
class ReduceAll(Logical):
    """Whether all are true; true over nothing."""

    kind = "all"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.all(self.axes)) if self.axes else x


@op("reduce_any")
class ReduceAny(Logical):
    """Whether any is true; false over nothing."""

    kind = "any"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.any(self.axes)) if self.axes else x


# ------------------------------------------------------------------------------------------------------------ functions


def _reduce(cls: type[Reduction], x: Value, axis: Axes, keepdims: bool, what: str) -> Value:
    axes = normalize_axes(axis, x.ndim, what)
    result = cls(axes)(x) if axes else x
    return reshape(result, tuple(1 if a in axes else d for a, d in enumerate(x.shape))) if keepdims else result


def summable(x: Value) -> Value:
    """Narrow integers and booleans add up in 64 bits, as in NumPy."""
    if x.dtype.is_bool or (x.dtype.is_int and x.dtype.bits < 64):
        return METHODS["cast"](x, u64 if x.dtype.kind == "uint" else i64)
    return x


@function()
def reduce_sum(x: Operand, axes: Axes = None) -> Value:
    """Sum over axes in the dtype of x."""
    return _reduce(ReduceSum, as_value(x), axes, False, "reduce_sum")


@function()
def sum_(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: Any = None) -> Value:
    """Sum over axes; all of them by default."""
    value = as_value(x)
    value = METHODS["cast"](value, dtype) if dtype is not None else summable(value)
    return _reduce(ReduceSum, value, axis, keepdims, "sum")


@function()
def prod(x: Operand, axis: Axes = None, keepdims: bool = False, dtype: Any = None) -> Value:
    """Product over axes; all of them by default."""
    value = as_value(x)
    value = METHODS["cast"](value, dtype) if dtype is not None else summable(value)
    return _reduce(ReduceProd, value, axis, keepdims, "prod")


@function("amax", "reduce_max")
def max_(x: Operand, axis: Axes = None, keepdims: bool = False) -> Value:
    """Maximum over axes; NaN wins."""
    return _reduce(ReduceMax, as_value(x), axis, keepdims, "max")


@function("amin", "reduce_min")
def min_(x: Operand, axis: Axes = None, keepdims: bool = False) -> Value:
    """Minimum over axes; NaN wins."""
    return _reduce(ReduceMin, as_value(x), axis, keepdims, "min")


@function()
def all_(x: Operand, axis: Axes = None, keepdims: bool = False) -> Value:
    """Whether all elements are non-zero."""
    return _reduce(ReduceAll, METHODS["cast"](x, bool_), axis, keepdims, "all")


@function()
def any_(x: Operand, axis: Axes = None, keepdims: bool = False) -> Value:
    """Whether any element is non-zero."""
    return _reduce(ReduceAny, METHODS["cast"](x, bool_), axis, keepdims, "any")


def count_of(x: Value, axes: Sequence[int], dtype: DType) -> Value:
    """The number of elements along axes, as a value; a constant when it is known."""
    count = dim_prod([x.shape[a] for a in axes])
    return METHODS["cast"](dim_size(count), dtype) if isinstance(count, SymExpr) else constant(count, dtype)


@function()
def mean(x: Operand, axis: Axes = None, keepdims: bool = False) -> Value:
    """Arithmetic mean over axes; integers are averaged as floats, and that of nothing is NaN."""
    value = to_inexact(as_value(x))
    axes = normalize_axes(axis, value.ndim, "mean")
    wide = value.dtype.accumulator  # in which neither the sum nor the count of a long row is too large
    total = _reduce(ReduceSum, METHODS["cast"](value, wide), axes, keepdims, "mean")
    return METHODS["cast"](total / count_of(value, axes, wide), value.dtype)


@function()
def var(x: Operand, axis: Axes = None, keepdims: bool = False, correction: float = 0.0) -> Value:
    """Variance over axes by two passes; `correction` is subtracted from the count. That of nothing is NaN.

    What the mean lost when it was rounded is found in the second pass."""
    value = to_inexact(as_value(x))
    axes = normalize_axes(axis, value.ndim, "var")
    wide = METHODS["cast"](value, value.dtype.accumulator)
    centred = wide - mean(wide, axes, keepdims=True)
    square = METHODS["abs"](centred) if value.dtype.is_complex else centred
    total = _reduce(ReduceSum, square * square, axes, keepdims, "var")
    count = count_of(value, axes, total.dtype)
    if not value.dtype.is_complex:
        lost = _reduce(ReduceSum, centred, axes, keepdims, "var")
        total = about_mean(total, lost * (lost / count))
    return METHODS["cast"](total / (count - correction), value.dtype.real)


def about_mean(squares: Value, lost: Value) -> Value:
    """Squares about a rounded mean as those about the mean itself: less what is due to the rounding. They are never
    negative; where they are too large for their type, so may be what is taken off, and they stay infinite."""
    largest = float(np.finfo(squares.dtype.np).max)
    less: Value = METHODS["maximum"](squares - METHODS["minimum"](lost, largest), 0)
    return less


@function()
def std(x: Operand, axis: Axes = None, keepdims: bool = False, correction: float = 0.0) -> Value:
    """Standard deviation over axes."""
    value = to_inexact(as_value(x))
    spread = var(METHODS["cast"](value, value.dtype.accumulator), axis, keepdims, correction)
    return METHODS["cast"](METHODS["sqrt"](spread), value.dtype.real)
