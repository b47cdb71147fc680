"""Linear systems: dense and triangular solves of stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from strata.core import Dim, DType, TensorType, broadcast_shapes, c64, c128, f32, f64, i64
from strata.errors import RunError, ShapeError
from strata.mir import METHODS, Op, Sample, UnaryOp, Value, as_tuple, constant, function, op, placeholder, pullback
from strata.ops.base.creation import iota
from strata.ops.base.elementwise import lift, unbroadcast
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.base.movement import Slice, broadcast_to, insert_axis, reshape, swapaxes
from strata.ops.elementwise.logic import cast, where
from strata.ops.linalg.matmul import MatMul, adjoint

LINALG_DTYPES = (f32, f64, c64, c128)


# -------------------------------------------------------------------------------------------------------------- helpers


def require_matrix(op: Op, x: TensorType, *, square: bool = False) -> None:
    """The checks that every op on matrices makes of its first input."""
    op.require_dtype(x.dtype in LINALG_DTYPES, f"does not take {x}, only f32, f64, c64 and c128", code="D240")
    op.require(x.ndim >= 2, f"needs a matrix or a stack of them, got {x}", code="S360")
    if square:
        op.require(x.shape[-1] == x.shape[-2], f"needs square matrices, got {x}", code="S361")


class MatrixOp(UnaryOp):
    """An op on a stack of matrices. It writes its tangent; the cotangent is the transpose of that linear map."""

    dtypes = LINALG_DTYPES

    def vjp(self, x: Value, *, out: Any, ct: Any) -> Value | None:
        dx = placeholder("dx", x.type)
        tangents, cts = as_tuple(self.jvp(x, out=out, dx=dx)), as_tuple(ct)
        pairs = [(t, c) for t, c in zip(tangents, cts, strict=True) if t is not None and c is not None]
        return pullback([t for t, _ in pairs], [c for _, c in pairs], [dx])[0]

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Any:
        return self(x)


def as_matrix(x: Operand, what: str, *, square: bool = False) -> Value:
    """A front-end argument as a stack of float or complex matrices."""
    value = to_inexact(as_value(x))
    if value.ndim < 2:
        raise ShapeError(f"{what}: needs a matrix or a stack of them, got {value.type}", code="S360")
    if square and value.shape[-1] != value.shape[-2]:
        raise ShapeError(f"{what}: needs square matrices, got {value.type}", code="S361")
    return value


def identity(n: Dim, dtype: DType) -> Value:
    """The identity matrix."""
    return cast(METHODS["equal"](iota((n, n), 0), iota((n, n), 1)), dtype)


def triangle(x: Value, *, lower: bool, offset: int = 0) -> Value:
    """x with zeros above (or below) a diagonal: `column - row <= offset` is kept, or `>= offset`."""
    row, column = iota(x.shape[-2:], 0), iota(x.shape[-2:], 1)
    far = constant(offset, i64)
    kept = METHODS["less_equal"](column, row + far) if lower else METHODS["greater_equal"](column, row + far)
    return where(kept, x, constant(0, x.dtype))


def main_diagonal(x: Value) -> Value:
    """The diagonal of square matrices."""
    *batch, n, _ = x.shape
    if n == 0:
        return reshape(x, (*batch, 0))
    flat = reshape(x, (*batch, n * n))
    start, step = (0,) * flat.ndim, n + 1
    if isinstance(step, int):
        return Slice(start, flat.shape, (*(1,) * len(batch), step))(flat)
    return METHODS["reduce_sum"](triangle(triangle(x, lower=True), lower=False), (x.ndim - 1,))


def from_diagonal(x: Value) -> Value:
    """Square matrices with x on the diagonal."""
    n = x.shape[-1]
    on = METHODS["equal"](iota((n, n), 0), iota((n, n), 1))
    return where(on, broadcast_to(insert_axis(x, -1), (*x.shape, n)), constant(0, x.dtype))


def hermitian_part(x: Value) -> Value:
    """(x + xᴴ) / 2."""
    return (x + adjoint(x)) * 0.5


def safe_reciprocal(x: Value) -> Value:
    """1 / x, and 0 where x is 0."""
    zero, one = constant(0, x.dtype), constant(1, x.dtype)
    empty = METHODS["equal"](x, zero)
    return where(empty, zero, one / where(empty, one, x))


def first_failure(info: Any, matrices: np.ndarray) -> tuple[tuple[int, ...], int]:
    """The first matrix of a stack for which a LAPACK call reports a positive status, and that status."""
    for at in np.ndindex(matrices.shape[:-2]):
        status = int(info(matrices[at]))
        if status > 0:
            return at, status
    return (), 0


def which(at: tuple[int, ...]) -> str:
    return f"matrix {list(at)} of the stack" if at else "the matrix"


def not_converging(name: str, x: np.ndarray) -> NoReturn:
    """Raise for the first matrix of a stack that is not finite: what an iteration fails on."""
    bad = next((at for at in np.ndindex(x.shape[:-2]) if not np.isfinite(x[at]).all()), ())
    raise RunError(f"{name}: the iteration for {which(bad)} does not converge", code="X202")


# --------------------------------------------------------------------------------------------------------------- solves


class LinearSolve(Op):
    """Shared by the solves: A [.., N, N] and b [.., N, K], batch axes broadcast."""

    dtypes = LINALG_DTYPES

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        require_matrix(self, a, square=True)
        self.require_dtype(a.dtype is b.dtype, f"operands differ in dtype, {a} and {b}", code="D103")
        self.require(b.ndim >= 2, f"the right side must be a matrix or a stack of them, got {b}", code="S360")
        self.require(
            a.shape[-1] == b.shape[-2], f"{a} and {b} differ in rows, {a.shape[-1]} and {b.shape[-2]}", code="S362"
        )
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2], what=self.name)
        return b.with_shape([*batch, *b.shape[-2:]])

    def spread_shapes(self, *inputs: TensorType) -> list[tuple[Sequence[Dim], Sequence[Dim]]]:
        batch = self.infer(*inputs).shape[:-2]
        return [(t.shape[:-2], batch) for t in inputs]

    def vmap(self, a: Value, b: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        rank = max(v.ndim - flag for v, flag in zip((a, b), batched, strict=True))
        return self(*(lift(v, rank) if flag else v for v, flag in zip((a, b), batched, strict=True)))


@op("solve")
class Solve(LinearSolve):
    """x with A·x = b, or Aᴴ·x = b: LU with partial pivoting. Both forms can share one factorization of A."""

    adjoint: bool = False

    def numpy(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        try:
            return np.linalg.solve(np.conj(np.swapaxes(a, -1, -2)) if self.adjoint else a, b)
        except np.linalg.LinAlgError:
            singular_error(self.name, a)

    def jvp(self, a: Value, b: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        ta, tb = dx
        right = tb
        if ta is not None:
            moved = MatMul()(adjoint(ta) if self.adjoint else ta, out)
            right = -moved if tb is None else tb - moved
        return None if right is None else broadcast_to(self(a, right), out.shape)

    def vjp(self, a: Value, b: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        to_b = Solve(not self.adjoint)(a, ct)
        to_a = MatMul()(out, adjoint(to_b)) if self.adjoint else MatMul()(to_b, adjoint(out))
        return unbroadcast(-to_a, a.shape), unbroadcast(to_b, b.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 3], f32[3, 2]), Sample(f32[2, 3, 3], f32[3, 1], adjoint=True),
            Sample(f32[3, 3], f32[4, 3, 2]), Sample(f64[2, 1, 2, 2], f64[3, 2, 2]), Sample(c64[3, 3], c64[3, 2]),
            Sample(c64[2, 3, 3], c64[2, 3, 2], adjoint=True), Sample(f32[0, 0], f32[0, 2]),
            Sample(f32[1, 1], f32[1, 1]), Sample(f32[0, 2, 2], f32[0, 2, 3]),
        ]  # fmt: skip


def singular_error(name: str, a: np.ndarray) -> NoReturn:
    """Raise for the first singular matrix of a stack, naming the pivot that is 0."""
    from scipy.linalg import lapack  # on failure only

    at, status = first_failure(lambda m: lapack.get_lapack_funcs(("getrf",), (m,))[0](m)[2], a)
    raise RunError(f"{name}: {which(at)} is singular, pivot {status - 1} is 0", code="X200")


@op("triangular_solve")
class TriangularSolve(LinearSolve):
    """x with A·x = b, or Aᵀ·x = b, where only one triangle of A is read, and its diagonal unless that is taken as 1."""

    upper: bool = False
    transpose: bool = False
    unit_diagonal: bool = False

    def numpy(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        kept = np.triu(a) if self.upper else np.tril(a)
        n = a.shape[-1]
        if self.unit_diagonal:
            kept = np.where(np.eye(n, dtype=bool), 1, kept).astype(a.dtype)
        zeros = np.argwhere(np.diagonal(kept, axis1=-2, axis2=-1) == 0)
        if len(zeros):
            *at, pivot = (int(i) for i in zeros[0])
            raise RunError(f"{self.name}: {which(tuple(at))} is singular, pivot {pivot} is 0", code="X200")
        return np.linalg.solve(np.swapaxes(kept, -1, -2) if self.transpose else kept, b)

    def _masked(self, a: Value) -> Value:
        strict = 1 if self.unit_diagonal else 0
        return triangle(a, lower=not self.upper, offset=strict if self.upper else -strict)

    def jvp(self, a: Value, b: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        ta, tb = dx
        right = tb
        if ta is not None:
            kept = self._masked(ta)
            moved = MatMul()(swapaxes(kept, -1, -2) if self.transpose else kept, out)
            right = -moved if tb is None else tb - moved
        return None if right is None else broadcast_to(self(a, right), out.shape)

    def vjp(self, a: Value, b: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        conj = METHODS["conj"]
        other = TriangularSolve(self.upper, not self.transpose, self.unit_diagonal)
        to_b = conj(other(a, conj(ct)))
        to_a = MatMul()(conj(out), swapaxes(to_b, -1, -2)) if self.transpose else MatMul()(to_b, adjoint(out))
        return unbroadcast(self._masked(-to_a), a.shape), unbroadcast(to_b, b.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        dominant = np.array([[2, 0.3, 0.1], [0.5, -1.5, 0.2], [0.25, 0.7, 3]], np.float32)
        z = (dominant + 0.5j * dominant.T).astype(np.complex64)
        return [
            Sample(dominant, f32[3, 2]), Sample(dominant, f32[3, 2], upper=True),
            Sample(dominant, f32[3, 2], transpose=True), Sample(dominant, f32[2, 3, 1], upper=True, transpose=True),
            Sample(dominant, f32[3, 2], unit_diagonal=True), Sample(z, c64[3, 2]),
            Sample(z, c64[3, 2], upper=True, transpose=True, unit_diagonal=True),
            Sample(np.stack([dominant, dominant.T]), f32[3, 2]), Sample(f32[0, 0], f32[0, 2]),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


def _operands(a: Operand, b: Operand, what: str) -> tuple[Value, Value]:
    left, right = promoted(a, b)
    return as_matrix(left, what, square=True), to_inexact(right)


@function()
def solve(a: Operand, b: Operand) -> Value:
    """x with a·x = b. As in NumPy, b is a vector only when it has one axis, else a stack of matrices."""
    left, right = _operands(a, b, "solve")
    if right.ndim == 1:
        return reshape(column := Solve()(left, insert_axis(right, -1)), column.shape[:-1])
    return Solve()(left, right)


@function()
def solve_triangular(
    a: Operand, b: Operand, *, lower: bool = False, transpose: bool = False, unit_diagonal: bool = False
) -> Value:
    """x with a·x = b (or aᵀ·x = b) for a triangular a; the other triangle is not read. b as in `solve`."""
    left, right = _operands(a, b, "solve_triangular")
    rule = TriangularSolve(not lower, transpose, unit_diagonal)
    if right.ndim == 1:
        return reshape(column := rule(left, insert_axis(right, -1)), column.shape[:-1])
    return rule(left, right)


@function()
def dense_solve(a: Operand, b: Operand) -> Value:
    """x with a·x = b for one matrix [N, N] and b [N] or [N, K]."""
    left, right = _operands(a, b, "dense_solve")
    if left.ndim != 2 or right.ndim not in (1, 2):
        raise ShapeError(f"dense_solve: needs [N, N] and [N] or [N, K], got {left.type} and {right.type}", code="S363")
    return solve(left, right)


@function()
def batched_dense_solve(a: Operand, b: Operand) -> Value:
    """x with a·x = b for each of a batch: a [B, N, N], b [B, N] (a batch of vectors) or [B, N, K]."""
    left, right = _operands(a, b, "batched_dense_solve")
    if left.ndim != 3 or right.ndim not in (2, 3) or left.shape[0] != right.shape[0]:
        raise ShapeError(
            f"batched_dense_solve: needs [B, N, N] and [B, N] or [B, N, K], got {left.type} and {right.type}",
            code="S363",
        )
    if right.ndim == 2:
        return reshape(Solve()(left, insert_axis(right, -1)), right.shape)
    return Solve()(left, right)


@function("linalg_inv")
def inv(a: Operand) -> Value:
    """The inverse of square matrices."""
    value = as_matrix(a, "inv", square=True)
    eye = identity(value.shape[-1], value.dtype)
    return Solve()(value, eye if value.ndim == 2 else broadcast_to(eye, value.shape))
