"""Factorizations of stacks of matrices: Cholesky, QR, SVD, symmetric eigenvalues, LU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import Dim, TensorType, c64, dim_min, f32, f64, known_le
from strata.errors import MissingRuleError, OptionError, RunError, ShapeError
from strata.mir import METHODS, Sample, Value, function, op
from strata.ops.base.creation import zeros_like
from strata.ops.base.frontend import Operand
from strata.ops.base.movement import concat, insert_axis, narrow, swapaxes
from strata.ops.elementwise.complex import make_complex
from strata.ops.linalg.matmul import MatMul, adjoint
from strata.ops.linalg.solve import (
    MatrixOp,
    TriangularSolve,
    as_matrix,
    first_failure,
    from_diagonal,
    hermitian_part,
    main_diagonal,
    not_converging,
    require_matrix,
    safe_reciprocal,
    triangle,
    which,
)


def _left(a: Value, b: Value, *, lower: bool) -> Value:
    """a⁻¹·b for a triangular a."""
    return TriangularSolve(upper=not lower)(a, b)


def _right(b: Value, a: Value) -> Value:
    """b·a⁻¹ for an upper triangular a."""
    return swapaxes(TriangularSolve(upper=True, transpose=True)(a, swapaxes(b, -1, -2)), -1, -2)


def _product(*factors: Value) -> Value:
    result = factors[0]
    for factor in factors[1:]:
        result = MatMul()(result, factor)
    return result


def _imaginary_diagonal(x: Value) -> Value:
    """i · Im of the diagonal, as a vector; only for complex matrices."""
    part = METHODS["imag"](main_diagonal(x))
    return make_complex(zeros_like(part), part)


def _columns(x: Value) -> Value:
    """A real vector as factors of columns, in its own dtype."""
    return insert_axis(x, -2)


def _scale(x: Value, factors: Value) -> Value:
    """Columns of x times a vector of real factors."""
    return x * METHODS["cast"](_columns(factors), x.dtype)


def _turns(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """How far columns are from others, each as a number: the sum of conj(got)·want."""
    return np.sum(np.conj(got) * want, axis=-2, keepdims=True)


def _phases(turns: np.ndarray) -> np.ndarray:
    size = np.abs(turns)
    return np.where(size > 0, turns / np.where(size > 0, size, 1), 1)


def _turned(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Orthonormal columns of the same space, as near to others as they can be turned."""
    if got.shape[-1] == 0 or got.size == 0:
        return got
    u, _, vh = np.linalg.svd(np.conj(np.swapaxes(got, -1, -2)) @ want)
    return np.asarray(got @ (u @ vh), got.dtype)


@op("cholesky")
class Cholesky(MatrixOp):
    """Lower-triangular L with L·Lᴴ = (A + Aᴴ)/2, which must be positive definite."""

    def infer(self, x: TensorType) -> TensorType:
        require_matrix(self, x, square=True)
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        hermitian = (x + np.conj(np.swapaxes(x, -1, -2))) / 2
        try:
            return np.linalg.cholesky(hermitian)
        except np.linalg.LinAlgError:
            from scipy.linalg import lapack  # on failure only

            at, order = first_failure(lambda m: lapack.get_lapack_funcs(("potrf",), (m,))[0](m, lower=1)[1], hermitian)
            raise RunError(
                f"{self.name}: {which(at)} is not positive definite, its leading {order}×{order} minor is not positive",
                code="X201",
            ) from None

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        inner = _left(out, adjoint(_left(out, hermitian_part(dx), lower=True)), lower=True)
        half = triangle(inner, lower=True, offset=-1) + from_diagonal(main_diagonal(inner) * 0.5)
        return MatMul()(out, half)

    @classmethod
    def samples(cls) -> list[Sample]:
        rng = np.random.default_rng(3)
        root = rng.standard_normal((2, 3, 3))
        real = (root @ root.swapaxes(-1, -2) + 0.5 * np.eye(3)).astype(np.float32)
        z = rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3))
        return [
            Sample(real[0]), Sample(real), Sample((z @ z.conj().T + np.eye(3)).astype(np.complex64)), Sample(f64[0, 0]),
            Sample(np.array([[4.0]], np.float32)), Sample(f32[0, 2, 2]),
        ]  # fmt: skip


@op("qr")
class Qr(MatrixOp):
    """Q with orthonormal columns and upper-triangular R, Q·R = A, for M ≥ N. `complete` gives a square Q."""

    complete: bool = False

    multi_output = True

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        require_matrix(self, x)
        *batch, m, n = x.shape
        self.require(known_le(n, m), f"needs at least as many rows as columns, got {x}", code="S364")
        k = m if self.complete else n
        return x.with_shape([*batch, m, k]), x.with_shape([*batch, k, n])

    def numpy(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        *batch, m, n = x.shape
        if x.size == 0:
            k = m if self.complete else n
            return np.broadcast_to(np.eye(m, k, dtype=x.dtype), (*batch, m, k)), np.zeros((*batch, k, n), x.dtype)
        q, r = np.linalg.qr(x, "complete" if self.complete else "reduced")
        return q, r

    def jvp(self, x: Value, *, out: tuple[Value, Value], dx: Value) -> tuple[Value, Value]:
        if self.complete and x.shape[-1] != x.shape[-2]:
            raise MissingRuleError(
                f"qr: the complete Q of {x.type} has no derivative; reduced mode has one", code="R210"
            )
        q, r = out
        moved = _right(dx, r)
        inner = MatMul()(adjoint(q), moved)
        below = triangle(inner, lower=True, offset=-1)
        rotation = below - adjoint(below)  # skew-Hermitian: Qᴴ·dQ
        if x.dtype.is_complex:  # the diagonal of R is real
            rotation = rotation + from_diagonal(_imaginary_diagonal(inner))
        stretch = inner - rotation  # upper triangular: dR·R⁻¹
        return moved - MatMul()(q, stretch), MatMul()(stretch, r)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[4, 3]), Sample(f32[2, 3, 3]), Sample(f32[3, 3], complete=True),
            Sample(f32[4, 2], complete=True, grad=False), Sample(c64[4, 3]), Sample(c64[3, 3]), Sample(f32[3, 0]),
            Sample(f32[1, 1]), Sample(f32[0, 3, 2]),
        ]  # fmt: skip


@op("svd")
class Svd(MatrixOp):
    """U·diag(S)·Vᴴ = A with S descending. Outputs U, S, Vᴴ; reduced unless `full_matrices`.

    Equal singular values leave U and V free to turn: the derivative is that of functions which do not see the turn.
    """

    full_matrices: bool = False

    multi_output = True

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        require_matrix(self, x)
        *batch, m, n = x.shape
        k = dim_min(m, n)
        rows, columns = (m, n) if self.full_matrices else (k, k)
        s = TensorType(x.dtype.real if x.dtype.is_complex else x.dtype, (*batch, k))
        return x.with_shape([*batch, m, rows]), s, x.with_shape([*batch, columns, n])

    def numpy(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        if x.shape[-1] == 0 or x.shape[-2] == 0:
            u, singular, vh = (t.static_shape for t in self.infer(TensorType(f64, x.shape)))
            eyes = (np.broadcast_to(np.eye(sizes[-2], sizes[-1]), sizes) for sizes in (u, vh))
            return next(eyes), np.zeros(singular), next(eyes)
        try:
            return tuple(np.linalg.svd(x, full_matrices=self.full_matrices))
        except np.linalg.LinAlgError:
            not_converging(self.name, x)

    def matched(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Vectors of distinct values may point either way, both sides together; those without a value turn freely."""
        (u, s, vh), (wanted_u, _, wanted_vh) = got, want
        v, wanted_v = (np.conj(np.swapaxes(x, -1, -2)) for x in (vh, wanted_vh))
        k = s.shape[-1]
        phases = _phases(_turns(u[..., :k], wanted_u[..., :k]) + _turns(v[..., :k], wanted_v[..., :k]))
        u, v = (
            np.concatenate([np.asarray(x[..., :k] * phases, x.dtype), _turned(x[..., k:], wanted[..., k:])], -1)
            for x, wanted in ((u, wanted_u), (v, wanted_v))
        )
        return u, s, np.conj(np.swapaxes(v, -1, -2))

    def jvp(self, x: Value, *, out: tuple[Value, ...], dx: Value) -> tuple[Value, ...]:
        if self.full_matrices and x.shape[-1] != x.shape[-2]:
            raise MissingRuleError(
                f"svd: the full U and V of {x.type} have no derivative; full_matrices=False has one", code="R210"
            )
        u, s, vh = out
        v = adjoint(vh)
        inner = _product(adjoint(u), dx, v)
        squares = s * s
        gap = safe_reciprocal(insert_axis(squares, -2) - insert_axis(squares, -1))
        factor = METHODS["cast"](gap, x.dtype)
        row_scaled = adjoint(_scale(adjoint(inner), s))  # S·dP
        turn_u = factor * (_scale(inner, s) + adjoint(_scale(inner, s)))
        turn_v = factor * (row_scaled + adjoint(row_scaled))
        inverse = safe_reciprocal(s)
        diagonal = main_diagonal(inner)
        if x.dtype.is_complex:
            turn_u = turn_u + from_diagonal(_imaginary_diagonal(inner) * METHODS["cast"](inverse, x.dtype))
            diagonal = METHODS["real"](diagonal)
        du, dv = MatMul()(u, turn_u), MatMul()(v, turn_v)
        if not known_le(x.shape[-2], x.shape[-1]):  # U does not span its space
            side = MatMul()(dx, v)
            du = du + _scale(side - _product(u, adjoint(u), side), inverse)
        if not known_le(x.shape[-1], x.shape[-2]):
            side = MatMul()(adjoint(dx), u)
            dv = dv + _scale(side - _product(v, vh, side), inverse)
        return du, diagonal, adjoint(dv)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 3]), Sample(f32[2, 4, 3]), Sample(f32[2, 3], rtol=1e-5),
            Sample(f32[3, 3], full_matrices=True), Sample(f32[4, 2], full_matrices=True, grad=False),
            Sample(c64[3, 2], grad=False), Sample(f32[2, 0]), Sample(f32[1, 1]), Sample(f32[0, 2, 3]),
        ]  # fmt: skip


@op("eigh")
class Eigh(MatrixOp):
    """Eigenvalues in ascending order and orthonormal eigenvectors of (A + Aᴴ)/2.

    Equal eigenvalues leave their vectors free to turn: the derivative is that of functions which do not see the turn.
    """

    multi_output = True

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        require_matrix(self, x, square=True)
        real = x.dtype.real if x.dtype.is_complex else x.dtype
        return TensorType(real, x.shape[:-1]), x

    def numpy(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        try:
            w, v = np.linalg.eigh((x + np.conj(np.swapaxes(x, -1, -2))) / 2)
        except np.linalg.LinAlgError:
            not_converging(self.name, x)
        return w, v

    def matched(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Vectors of distinct values may point either way."""
        (w, v), (_, wanted) = got, want
        return w, np.asarray(v * _phases(_turns(v, wanted)), v.dtype)

    def jvp(self, x: Value, *, out: tuple[Value, ...], dx: Value) -> tuple[Value, ...]:
        w, v = out
        inner = _product(adjoint(v), hermitian_part(dx), v)
        gap = safe_reciprocal(insert_axis(w, -2) - insert_axis(w, -1))
        diagonal = main_diagonal(inner)
        turn = inner * METHODS["cast"](gap, x.dtype)
        return METHODS["real"](diagonal), MatMul()(v, turn)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 3]),
            Sample(f32[2, 4, 4]),
            Sample(c64[3, 3], grad=False),
            Sample(f32[0, 0]),
            Sample(f32[1, 1]),
        ]


@op("lu")
class Lu(MatrixOp):
    """A = P·L·U: a permutation matrix, a lower triangle with 1 on its diagonal, an upper triangle."""

    multi_output = True

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        require_matrix(self, x)
        *batch, m, n = x.shape
        k = dim_min(m, n)
        return tuple(x.with_shape([*batch, *sizes]) for sizes in ((m, m), (m, k), (k, n)))

    def numpy(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        import scipy.linalg

        types = self.infer(TensorType(f64, x.shape))
        outs = tuple(np.zeros(t.static_shape, x.dtype) for t in types)
        for at in np.ndindex(x.shape[:-2]):
            if x.size == 0:
                outs[0][at] = np.eye(x.shape[-2])
                continue
            for out, part in zip(outs, scipy.linalg.lu(x[at]), strict=True):
                out[at] = part
        return outs

    def jvp(self, x: Value, *, out: tuple[Value, ...], dx: Value) -> tuple[Value | None, ...]:
        p, lower, upper = out
        m, n = x.shape[-2:]
        moved = MatMul()(adjoint(p), dx)
        if known_le(n, m):
            return None, *self._tall(lower, upper, moved, m, n)
        if known_le(m, n):
            return None, *self._wide(lower, upper, moved, m, n)
        raise MissingRuleError(f"lu: the derivative needs to know which size of {x.type} is larger", code="R210")

    def _tall(self, lower: Value, upper: Value, moved: Value, m: Dim, n: Dim) -> tuple[Value, Value]:
        top = narrow(lower, -2, 0, n)
        inner = _right(_left_unit(top, narrow(moved, -2, 0, n)), upper)
        du = MatMul()(triangle(inner, lower=False), upper)
        dl = MatMul()(top, triangle(inner, lower=True, offset=-1))
        if m == n:
            return dl, du
        rest = narrow(moved, -2, n, m - n) - MatMul()(narrow(lower, -2, n, m - n), du)
        return concat([dl, _right(rest, upper)], -2), du

    def _wide(self, lower: Value, upper: Value, moved: Value, m: Dim, n: Dim) -> tuple[Value, Value]:
        left = narrow(upper, -1, 0, m)
        inner = _right(_left_unit(lower, narrow(moved, -1, 0, m)), left)
        dl = MatMul()(lower, triangle(inner, lower=True, offset=-1))
        du = MatMul()(triangle(inner, lower=False), left)
        rest = narrow(moved, -1, m, n - m) - MatMul()(dl, narrow(upper, -1, m, n - m))
        return dl, concat([du, _left_unit(lower, rest)], -1)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 3]), Sample(f32[2, 4, 3]), Sample(f32[3, 4]), Sample(c64[3, 3]), Sample(f32[1, 1]),
            Sample(f32[0, 0]), Sample(f32[2, 0]), Sample(f32[0, 2, 2]),
        ]  # fmt: skip


def _left_unit(a: Value, b: Value) -> Value:
    return TriangularSolve(unit_diagonal=True)(a, b)


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def cholesky(a: Operand, *, upper: bool = False) -> Value:
    """L with L·Lᴴ = a, or U = Lᴴ with Uᴴ·U = a, for a Hermitian positive definite a."""
    lower = Cholesky()(as_matrix(a, "cholesky", square=True))
    return adjoint(lower) if upper else lower


@function()
def qr(a: Operand, mode: str = "reduced") -> Any:
    """(Q, R) with Q·R = a; mode is reduced, complete, or r for R alone."""
    if mode not in ("reduced", "complete", "r"):
        raise OptionError(f"qr: mode is 'reduced', 'complete' or 'r', got {mode!r}", code="O270")
    value = as_matrix(a, "qr")
    m, n = value.shape[-2:]
    if known_le(n, m):
        q, r = Qr(mode == "complete")(value)
    elif known_le(m, n):  # Q comes from the square part, the rest of R from Q
        q, square = Qr()(narrow(value, -1, 0, m))
        r = concat([square, MatMul()(adjoint(q), narrow(value, -1, m, n - m))], -1)
    else:
        raise ShapeError(f"qr: needs to know which size of {value.type} is larger", code="S364")
    return r if mode == "r" else (q, r)


@function()
def svd(a: Operand, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """(U, S, Vᴴ) with U·diag(S)·Vᴴ = a, or S alone. `full_matrices` makes U and V square."""
    value = as_matrix(a, "svd")
    square = value.shape[-1] == value.shape[-2]
    u, s, vh = Svd(full_matrices and compute_uv and not square)(value)
    return (u, s, vh) if compute_uv else s


@function()
def svdvals(a: Operand) -> Value:
    """Singular values in descending order."""
    return svd(a, compute_uv=False)


@function()
def eigh(a: Operand) -> tuple[Value, Value]:
    """Eigenvalues in ascending order and eigenvectors of a Hermitian a."""
    return Eigh()(as_matrix(a, "eigh", square=True))


@function()
def eigvalsh(a: Operand) -> Value:
    """Eigenvalues of a Hermitian a in ascending order."""
    return eigh(a)[0]


@function()
def lu(a: Operand) -> tuple[Value, Value, Value]:
    """(P, L, U) with P·L·U = a."""
    return Lu()(as_matrix(a, "lu"))
