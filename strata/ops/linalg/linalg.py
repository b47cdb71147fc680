"""Functions of matrices: determinants, pseudo-inverse, powers, norms, least squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import TensorType, bool_, c64, f32, f64, i64, normalize_axis
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Sample, Value, constant, function, op
from strata.ops.base.creation import zeros
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.base.movement import broadcast_to, insert_axis, moveaxis, reshape
from strata.ops.elementwise.logic import cast, rounded_once, where
from strata.ops.linalg.factorize import Svd, svdvals
from strata.ops.linalg.matmul import MatMul, adjoint
from strata.ops.linalg.solve import (
    MatrixOp,
    Solve,
    as_matrix,
    identity,
    inv,
    main_diagonal,
    not_converging,
    require_matrix,
)
from strata.ops.reduce.cumulative import Cumprod
from strata.ops.reduce.reduce import ReduceSum


def _trace(x: Value) -> Value:
    return ReduceSum((x.ndim - 2,))(main_diagonal(x))


def _per_matrix(x: Value) -> Value:
    """One number per matrix, to multiply matrices by."""
    return reshape(x, (*x.shape, 1, 1))


@op("det")
class Det(MatrixOp):
    """The determinant. Its derivative is exact at singular matrices too."""

    def infer(self, x: TensorType) -> TensorType:
        require_matrix(self, x, square=True)
        return x.with_shape(x.shape[:-2])

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.linalg.det(x)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return _trace(MatMul()(Adjugate()(x), dx))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 3]), Sample(f32[2, 1, 2, 2]), Sample(c64[3, 3]), Sample(f32[0, 0]), Sample(f32[1, 1]),
            Sample(np.array([[1, 2, 3], [2, 4, 6], [1, 0, 1]], np.float32)), Sample(f32[0, 2, 2]),
        ]  # fmt: skip


@op("adjugate")
class Adjugate(MatrixOp):
    """The transposed cofactors: adj(A)·A = det(A)·I, defined for singular matrices too (its own derivative is not)."""

    def infer(self, x: TensorType) -> TensorType:
        require_matrix(self, x, square=True)
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        if x.shape[-1] == 0:
            return x.copy()
        try:
            u, s, vh = np.linalg.svd(x)
        except np.linalg.LinAlgError:
            not_converging(self.name, x)
        before = np.cumprod(np.concatenate([np.ones_like(s[..., :1]), s[..., :-1]], -1), -1)
        after = np.cumprod(np.concatenate([np.ones_like(s[..., :1]), s[..., :0:-1]], -1), -1)[..., ::-1]
        phase = np.linalg.det(u) * np.linalg.det(vh)
        v, uh = np.conj(np.swapaxes(vh, -1, -2)), np.conj(np.swapaxes(u, -1, -2))
        return phase[..., None, None] * ((v * (before * after)[..., None, :]) @ uh)

    def decompose(self, x: Value) -> Value:
        if x.shape[-1] == 0:
            return x
        u, s, vh = Svd()(x)
        last = s.ndim - 1
        others = Cumprod(last, True, False)(s) * Cumprod(last, True, True)(s)
        factors = cast(insert_axis(others, -2), x.dtype)
        return _per_matrix(Det()(u) * Det()(vh)) * MatMul()(adjoint(vh) * factors, adjoint(u))

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        moved = Solve()(x, dx)  # d(det(A)·A⁻¹)
        return _per_matrix(_trace(moved)) * out - MatMul()(moved, out)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 3]), Sample(f32[2, 2, 2]), Sample(c64[3, 3]), Sample(f32[1, 1]), Sample(f32[0, 0]),
                Sample(np.array([[1, 2], [2, 4]], np.float32), grad=False)]  # fmt: skip


@op("slogdet")
class SlogDet(MatrixOp):
    """Sign (or phase) and natural logarithm of the modulus of the determinant; 0 and -inf for a singular matrix."""

    multi_output = True

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        require_matrix(self, x, square=True)
        real = x.dtype.real if x.dtype.is_complex else x.dtype
        return x.with_shape(x.shape[:-2]), TensorType(real, x.shape[:-2])

    def numpy(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        sign, log = np.linalg.slogdet(x)
        return sign, log

    def jvp(self, x: Value, *, out: tuple[Value, Value], dx: Value) -> tuple[Value | None, Value]:
        relative = _trace(Solve()(x, dx))
        if not x.dtype.is_complex:
            return None, relative
        real = METHODS["real"](relative)
        return out[0] * (relative - cast(real, x.dtype)), real

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 3]), Sample(f32[2, 2, 2]), Sample(c64[3, 3]), Sample(f32[0, 0]), Sample(f32[1, 1])]


@op("pinv")
class Pinv(MatrixOp):
    """The Moore-Penrose inverse; singular values up to `rcond` times the largest count as 0.

    The derivative is along matrices of the same rank.
    """

    rcond: float

    def infer(self, x: TensorType) -> TensorType:
        require_matrix(self, x)
        *batch, m, n = x.shape
        return x.with_shape([*batch, n, m])

    def numpy(self, x: np.ndarray) -> np.ndarray:
        try:
            return np.linalg.pinv(x, rcond=self.rcond)
        except np.linalg.LinAlgError:
            not_converging(self.name, x)

    def decompose(self, x: Value) -> Value:
        if 0 in x.shape[-2:]:
            return zeros(self.infer(x.type).shape, x.dtype)
        u, s, vh = Svd()(x)
        kept = METHODS["greater"](s, METHODS["max"](s, -1, keepdims=True) * self.rcond)
        one, zero = constant(1, s.dtype), constant(0, s.dtype)
        inverse = where(kept, one / where(kept, s, one), zero)
        return MatMul()(adjoint(vh) * cast(insert_axis(inverse, -2), x.dtype), adjoint(u))

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        p, ph, dh = out, adjoint(out), adjoint(dx)
        *_, m, n = x.shape
        beside = identity(m, x.dtype) - MatMul()(x, p)
        inside = identity(n, x.dtype) - MatMul()(p, x)
        turned = MatMul()(MatMul()(p, ph), MatMul()(dh, beside)) + MatMul()(MatMul()(inside, dh), MatMul()(ph, p))
        return turned - MatMul()(p, MatMul()(dx, p))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 3], rcond=1e-6), Sample(f32[4, 2], rcond=1e-6), Sample(f32[2, 2, 4], rcond=1e-6),
            Sample(c64[3, 2], rcond=1e-6), Sample(f32[3, 0], rcond=1e-6), Sample(f32[1, 1], rcond=1e-6),
            Sample(np.array([[1, 2], [2, 4]], np.float32), rcond=1e-3, grad=False),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def det(a: Operand) -> Value:
    """The determinant of square matrices."""
    return Det()(as_matrix(a, "det", square=True))


@function()
def slogdet(a: Operand) -> tuple[Value, Value]:
    """Sign and logarithm of the modulus of the determinant."""
    return SlogDet()(as_matrix(a, "slogdet", square=True))


@function("logabsdet")
def logdet(a: Operand) -> Value:
    """Logarithm of the modulus of the determinant."""
    return slogdet(a)[1]


@function()
def pinv(a: Operand, rcond: float | None = None) -> Value:
    """The Moore-Penrose inverse; `rcond` defaults to max(M, N) times the machine epsilon."""
    value = as_matrix(a, "pinv")
    return Pinv(_default_rcond(value) if rcond is None else float(rcond))(value)


def _default_rcond(x: Value) -> float:
    sizes = [d for d in x.shape[-2:] if isinstance(d, int)]
    wide = x.dtype is f64 or x.dtype.bits == 128
    return float(max([*sizes, 1]) * np.finfo(np.float64 if wide else np.float32).eps)


@function()
def lstsq(a: Operand, b: Operand, rcond: float | None = None) -> Value:
    """The x of least norm among those with the least |a·x - b|; b is a vector or matrices, as in `solve`."""
    left, right = (to_inexact(x) for x in promoted(a, b))
    left = as_matrix(left, "lstsq")
    column = insert_axis(right, -1) if right.ndim == 1 else right
    if left.shape[-2] != column.shape[-2]:
        raise ShapeError(
            f"lstsq: {left.type} and {right.type} differ in rows, {left.shape[-2]} and {column.shape[-2]}", code="S362"
        )
    x = MatMul()(pinv(left, rcond), column)
    return reshape(x, x.shape[:-1]) if right.ndim == 1 else x


@function()
def matrix_power(a: Operand, n: int) -> Value:
    """a·a·…·a, by squaring; a negative power inverts first."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise OptionError(f"matrix_power: the power is an int, got {n!r}", code="O271")
    value = as_value(a)
    if value.ndim < 2 or value.shape[-1] != value.shape[-2]:
        raise ShapeError(f"matrix_power: needs square matrices, got {value.type}", code="S361")
    if n == 0:
        return broadcast_to(identity(value.shape[-1], value.dtype), value.shape)
    square = inv(value) if n < 0 else value
    result: Value | None = None
    for bit in bin(abs(n))[:1:-1]:
        if bit == "1":
            result = square if result is None else MatMul()(result, square)
        square = MatMul()(square, square)  # one square too many is built and never reached
    assert result is not None
    return result


@function()
def matrix_rank(a: Operand, rcond: float | None = None) -> Value:
    """The number of singular values above `rcond` times the largest."""
    value = as_matrix(a, "matrix_rank")
    s = svdvals(value)
    if 0 in value.shape[-2:]:
        return METHODS["zeros_like"](METHODS["sum"](s, -1), i64)
    bound = METHODS["max"](s, -1, keepdims=True) * (_default_rcond(value) if rcond is None else rcond)
    return METHODS["sum"](cast(METHODS["greater"](s, bound), i64), -1)


@function()
@rounded_once
def norm(x: Operand, ord: Any = None, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Value:
    """Vector or matrix norm, with NumPy's orders: the 2-norm of everything by default; two axes make a matrix norm."""
    value = to_inexact(as_value(x))
    axes = list(range(value.ndim)) if axis is None else [axis] if isinstance(axis, int) else list(axis)
    axes = [normalize_axis(a, value.ndim, "norm") for a in axes]
    if (axis is None and ord is None) or len(axes) == 1 or (len(axes) == 2 and ord is None):
        return _vector_norm(value, 2 if ord is None else ord, tuple(axes), keepdims)
    if len(axes) != 2 or axes[0] == axes[1]:
        raise OptionError(f"norm: order {ord!r} needs one or two axes, got axis {axis!r} of {value.type}", code="O272")
    return _matrix_norm(value, ord, axes[0], axes[1], keepdims)


def _modulus(x: Value) -> Value:
    """|x| with derivative 0 at 0."""
    if not x.dtype.is_complex:
        return METHODS["abs"](x)
    re, im = METHODS["real"](x), METHODS["imag"](x)
    return _safe_root(re * re + im * im)


def _safe_root(x: Value) -> Value:
    """Square root with derivative 0 at 0."""
    zero, one = constant(0, x.dtype), constant(1, x.dtype)
    empty = METHODS["equal"](x, zero)
    return where(empty, zero, METHODS["sqrt"](where(empty, one, x)))


def _vector_norm(x: Value, order: Any, axes: tuple[int, ...], keepdims: bool) -> Value:
    reduce = {"axis": axes, "keepdims": keepdims}
    if isinstance(order, (str, complex)):
        raise OptionError(f"norm: {order!r} is not an order of a vector norm", code="O272")
    if order == 2:
        squares = METHODS["real"](x * METHODS["conj"](x)) if x.dtype.is_complex else x * x
        return _safe_root(METHODS["sum"](squares, **reduce))
    size = _modulus(x)
    if order == np.inf:
        return METHODS["max"](size, **reduce)
    if order == -np.inf:
        return METHODS["min"](size, **reduce)
    if order == 0:
        return METHODS["sum"](cast(cast(size, bool_), size.dtype), **reduce)
    if order == 1:
        return METHODS["sum"](size, **reduce)
    total = METHODS["sum"](METHODS["power"](size, float(order)), **reduce)
    empty = METHODS["equal"](total, constant(0, total.dtype))
    root = METHODS["power"](where(empty, constant(1, total.dtype), total), 1.0 / float(order))
    return where(empty, constant(0, total.dtype), root)


def _matrix_norm(x: Value, order: Any, row: int, column: int, keepdims: bool) -> Value:
    if order == "fro":
        return _vector_norm(x, 2, (row, column), keepdims)
    if order in (1, -1, np.inf, -np.inf):
        summed, kept = (row, column) if abs(order) == 1 else (column, row)
        sums = METHODS["sum"](_modulus(x), summed, keepdims=True)
        result = METHODS["max" if order > 0 else "min"](sums, kept, keepdims=True)
    elif order in ("nuc", 2, -2):
        s = svdvals(moveaxis(moveaxis(x, row, -1), column - (column > row), -1))
        if order == "nuc":
            flat = METHODS["sum"](s, -1)
        else:
            flat = METHODS["max" if order == 2 else "min"](s, -1)
        result = reshape(flat, tuple(1 if a in (row, column) else d for a, d in enumerate(x.shape)))
    else:
        raise OptionError(f"norm: {order!r} is not an order of a matrix norm", code="O272")
    return result if keepdims else reshape(result, x.type.drop(row, column).shape)
