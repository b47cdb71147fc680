"""Matrix ops as StableHLO: cholesky, triangular_solve, and an LU factorization by elimination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.backends.stablehlo.build import Hlo, StableHloBuilder, kind
from strata.backends.stablehlo.contract import dot
from strata.backends.stablehlo.reductions import arg_reduce, reduce
from strata.backends.stablehlo.scalars import any_of, scalar
from strata.backends.stablehlo.table import Results, Writer, rule, types_of
from strata.core import DType, i64


def _any(b: StableHloBuilder, x: Hlo) -> Hlo:
    return any_of(b, x) if x.ndim else x


def _adjoint(b: StableHloBuilder, x: Hlo) -> Hlo:
    flipped = b.transpose(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])
    return scalar(b, "conj", x.dtype, [flipped]) if x.dtype.is_complex else flipped


def _diagonal(b: StableHloBuilder, x: Hlo) -> Hlo:
    """The diagonals of matrices, [*batch, min(M, N)]."""
    k = min(x.shape[-2:])
    lead = x.ndim - 2
    square = b.slice(x, [0] * x.ndim, [*x.shape[:lead], k, k])
    on = b.compare("EQ", b.iota(i64, square.shape, lead), b.iota(i64, square.shape, lead + 1))
    return reduce(b, "sum", b.select(on, square, b.like(0, square)), [lead + 1])


@rule("cholesky")
def _cholesky(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b = w.b
    if x.size == 0:
        return x
    half = b.same("multiply", b.same("add", x, _adjoint(b, x)), b.like(0.5, x))
    made = b.op(f"stablehlo.cholesky {half.name}, lower = true : {kind(x)}", x.dtype, x.shape)
    made = _triangle(b, made, lower=True)
    diagonal = _diagonal(b, made)
    w.fail_if(_any(b, scalar(b, "isnan", diagonal.dtype, [diagonal])))
    return made


def _triangle(b: StableHloBuilder, x: Hlo, *, lower: bool, offset: int = 0) -> Hlo:
    """x with zeros above (or below) a diagonal."""
    lead = x.ndim - 2
    row, column = b.iota(i64, x.shape, lead), b.iota(i64, x.shape, lead + 1)
    limit = b.same("add", row, b.like(offset, row))
    return b.select(b.compare("LE" if lower else "GE", column, limit), x, b.like(0, x))


def _spread_batch(b: StableHloBuilder, *xs: Hlo) -> list[Hlo]:
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in xs))
    return [b.trailing(x, (*batch, *x.shape[-2:])) for x in xs]


def _solved(b: StableHloBuilder, a: Hlo, y: Hlo, *, lower: bool, turn: str = "NO_TRANSPOSE", unit: bool = False) -> Hlo:
    attributes = (
        f"left_side = true, lower = {str(lower).lower()}, unit_diagonal = {str(unit).lower()}, "
        f"transpose_a = #stablehlo<transpose {turn}>"
    )
    return b.many("stablehlo.triangular_solve", [a, y], attributes, [(y.dtype, y.shape)])[0]


@rule("triangular_solve")
def _triangular_solve(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    b = w.b
    (made,) = types_of(op, xs)
    if 0 in made.static_shape or 0 in xs[0].shape:
        return b.const(0, made.dtype, made.static_shape)
    a, y = _spread_batch(b, *xs)
    if not op.unit_diagonal:
        diagonal = _diagonal(b, xs[0])
        w.fail_if(_any(b, b.compare("EQ", diagonal, b.like(0, diagonal))))
    turn = "TRANSPOSE" if op.transpose else "NO_TRANSPOSE"
    return _solved(b, a, y, lower=not op.upper, turn=turn, unit=op.unit_diagonal)


def _factored(b: StableHloBuilder, x: Hlo) -> tuple[Hlo, Hlo, Hlo]:
    """L below and U on and above the diagonal of one matrix, the rows in their new order, and how many were exchanged.

    Elimination by columns with partial pivoting, all matrices of a stack at once.
    """
    lead = x.ndim - 2
    m, n = x.shape[-2:]
    batch = x.shape[:lead]
    vector = (*batch, m)
    order = b.iota(i64, vector, lead)
    rows = b.iota(i64, vector, lead)
    swaps = b.const(0, i64, batch)

    def exchanged(v: Hlo, at: Hlo, best: Hlo) -> Hlo:
        """v with the row `at` and the row `best` of each matrix exchanged."""
        keep = range(lead + 1)
        first = b.spread(at, vector, ())
        second = b.spread(best, vector, range(lead))
        is_first, is_second = b.compare("EQ", rows, first), b.compare("EQ", rows, second)

        def row_at(mask: Hlo) -> Hlo:
            wide = b.spread(mask, v.shape, keep)
            picked = b.select(wide, v, b.like(0, v))
            return b.spread(reduce(b, "sum", picked, [lead]), v.shape, [a for a in range(v.ndim) if a != lead])

        made = b.select(b.spread(is_first, v.shape, keep), row_at(is_second), v)
        return b.select(b.spread(is_second, v.shape, keep), row_at(is_first), made)

    def step(at: Hlo, a: Hlo, order: Hlo, swaps: Hlo) -> list[Hlo]:
        size = _pivot_size(b, b.row(a, at, lead + 1))
        here = b.spread(at, vector, ())
        size = b.select(b.compare("GE", rows, here), size, b.like(-1, size))
        best = arg_reduce(b, True, size, lead)
        moved = b.compare("NE", best, b.spread(at, batch, ()))
        a, order = exchanged(a, at, best), exchanged(order, at, best)
        pivot_row = b.row(a, at, lead)
        pivot = b.row(pivot_row, at, lead)
        column = b.row(a, at, lead + 1)
        zero = b.compare("EQ", pivot, b.like(0, pivot))
        divisor = b.spread(b.select(zero, b.like(1, pivot), pivot), vector, range(lead))
        below = b.compare("GT", rows, here)
        factor = b.select(below, b.same("divide", column, divisor), b.like(0, column))
        right = b.compare("GT", b.iota(i64, a.shape, lead + 1), b.spread(at, a.shape, ()))
        outer = b.same("multiply", b.spread(factor, a.shape, range(lead + 1)),
                       b.spread(pivot_row, a.shape, [*range(lead), lead + 1]))  # fmt: skip
        a = b.select(right, b.same("subtract", a, outer), a)
        a = b.set_row(a, b.select(below, factor, column), at, lead + 1)
        return [a, order, b.same("add", swaps, b.convert(moved, i64))]

    a, order, swaps = b.repeat(min(m, n), [x, order, swaps], step)
    return a, order, swaps


def _pivot_size(b: StableHloBuilder, x: Hlo) -> Hlo:
    """What pivots are chosen by: of complex numbers the sum of both parts, as LAPACK does."""
    if not x.dtype.is_complex:
        return b.same("abs", x)
    return b.same("add", *(b.same("abs", scalar(b, part, x.dtype.real, [x])) for part in ("real", "imag")))


def _one_hot(b: StableHloBuilder, order: Hlo, dtype: DType) -> Hlo:
    """[*batch, M, M] with 1 at (order[i], i): the permutation P of A = P·L·U."""
    m, lead = order.shape[-1], order.ndim - 1
    shape = (*order.shape, m)
    on = b.compare("EQ", b.iota(i64, shape, lead), b.spread(order, shape, [*range(lead), lead + 1]))
    return b.select(on, b.const(1, dtype, shape), b.const(0, dtype, shape))


@rule("lu")
def _lu(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b, kinds = w.b, types_of(op, xs)
    if x.size == 0:
        p, lower, upper = (b.const(0, t.dtype, t.static_shape) for t in kinds)
        return (_one_hot(b, b.iota(i64, p.shape[:-1], p.ndim - 2), x.dtype) if p.size else p), lower, upper
    a, order, _ = _factored(b, x)
    m, n = x.shape[-2:]
    k, lead = min(m, n), x.ndim - 2
    below = b.slice(a, [0] * x.ndim, [*x.shape[:lead], m, k])
    lower = _triangle(b, below, lower=True, offset=-1)
    on = b.compare("EQ", b.iota(i64, lower.shape, lead), b.iota(i64, lower.shape, lead + 1))
    lower = b.select(on, b.like(1, lower), lower)
    upper = _triangle(b, b.slice(a, [0] * x.ndim, [*x.shape[:lead], k, n]), lower=False)
    return _one_hot(b, order, x.dtype), lower, upper


@rule("solve")
def _solve(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    a, y = xs
    b, (made,) = w.b, types_of(op, xs)
    if 0 in made.static_shape or 0 in a.shape:
        return b.const(0, made.dtype, made.static_shape)
    factors, order, _ = _factored(b, _adjoint(b, a) if op.adjoint else a)
    diagonal = _diagonal(b, factors)
    w.fail_if(_any(b, b.compare("EQ", diagonal, b.like(0, diagonal))))
    turned = _one_hot(b, order, a.dtype)
    factors, turned, y = _spread_batch(b, factors, turned, y)
    lead = y.ndim - 2
    axes = list(range(lead))

    moved = dot(b, turned, y, ([lead], [lead]), (axes, axes), y.dtype)  # Pᵀ·y
    inner = _solved(b, factors, moved, lower=True, unit=True)
    return _solved(b, factors, inner, lower=False)


@rule("det")
def _det(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b, (made,) = w.b, types_of(op, xs)
    if x.size == 0:
        return b.const(1, made.dtype, made.static_shape)
    a, _, swaps = _factored(b, x)
    return b.same("multiply", reduce(b, "prod", _diagonal(b, a), [x.ndim - 2]), _parity(b, swaps, x.dtype))


def _parity(b: StableHloBuilder, swaps: Hlo, dtype: DType) -> Hlo:
    odd = b.compare("NE", b.same("and", swaps, b.like(1, swaps)), b.like(0, swaps))
    return b.select(odd, b.const(-1, dtype, swaps.shape), b.const(1, dtype, swaps.shape))


@rule("slogdet")
def _slogdet(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b, (sign, log) = w.b, types_of(op, xs)
    if x.size == 0:
        return b.const(1, sign.dtype, sign.static_shape), b.const(0, log.dtype, log.static_shape)
    a, _, swaps = _factored(b, x)
    diagonal = _diagonal(b, a)
    size = scalar(b, "abs", log.dtype, [diagonal])
    if x.dtype.is_complex:
        safe = b.select(b.compare("EQ", size, b.like(0, size)), b.like(1, size), size)
        unit = b.same("divide", diagonal, scalar(b, "cast", x.dtype, [safe]))
    else:
        unit = scalar(b, "sign", x.dtype, [diagonal])
    total = reduce(b, "sum", b.same("log", size), [size.ndim - 1])
    phase = b.same("multiply", reduce(b, "prod", unit, [unit.ndim - 1]), _parity(b, swaps, x.dtype))
    return phase, total


@rule("qr")
def _qr(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """Householder reflections, column by column, all matrices of a stack at once; signs are those of LAPACK."""
    (x,) = xs
    b, (q_type, r_type) = w.b, types_of(op, xs)
    m, n, lead = x.shape[-2], x.shape[-1], x.ndim - 2
    batch, dtype, real = x.shape[:lead], x.dtype, x.dtype.real
    square = (*batch, m, m)
    eye = b.compare("EQ", b.iota(i64, square, lead), b.iota(i64, square, lead + 1))
    q = b.select(eye, b.const(1, dtype, square), b.const(0, dtype, square))
    if x.size == 0:
        cut = b.slice(q, [0] * q.ndim, q_type.static_shape) if q.size else b.const(0, dtype, q_type.static_shape)
        return cut, b.const(0, dtype, r_type.static_shape)
    vector, axes = (*batch, m), list(range(lead))
    rows = b.iota(i64, vector, lead)

    def conj(v: Hlo) -> Hlo:
        return scalar(b, "conj", v.dtype, [v]) if v.dtype.is_complex else v

    def step(at: Hlo, q: Hlo, r: Hlo) -> list[Hlo]:
        column, here = b.row(r, at, lead + 1), b.spread(at, vector, ())
        below = b.select(b.compare("GT", rows, here), column, b.like(0, column))
        size = scalar(b, "abs", real, [below])
        rest = reduce(b, "sum", b.same("multiply", size, size), [lead])
        first = b.row(column, at, lead)
        head = scalar(b, "abs", real, [first])
        length = b.same("sqrt", b.same("add", b.same("multiply", head, head), rest))
        straight = b.compare("EQ", rest, b.like(0, rest))  # nothing below: no reflection, unless the head is complex
        plain = scalar(b, "real", real, [first]) if dtype.is_complex else first
        if dtype.is_complex:
            part = scalar(b, "imag", real, [first])
            straight = b.same("and", straight, b.compare("EQ", part, b.like(0, part)))
        beta = b.select(b.compare("GE", plain, b.like(0, plain)), b.same("negate", length), length)
        target = scalar(b, "cast", dtype, [beta])
        shift = b.same("subtract", first, target)
        safe = b.select(straight, b.like(1, shift), shift)
        v = b.same("divide", below, b.spread(safe, vector, axes))
        v = b.select(b.compare("EQ", rows, here), b.like(1, v), v)
        tau = b.same("divide", b.same("subtract", target, first), b.select(straight, b.like(1, target), target))
        tau = b.select(straight, b.like(0, tau), tau)
        wide = b.spread(tau, r.shape, axes)
        # R − conj(τ)·v·(vᴴ·R), Q − τ·(Q·v)·vᴴ
        product = dot(b, conj(v), r, ([lead], [lead]), (axes, axes), dtype)
        outer = b.same("multiply", b.spread(v, r.shape, [*axes, lead]), b.spread(product, r.shape, [*axes, lead + 1]))
        r = b.same("subtract", r, b.same("multiply", conj(wide), outer))
        turned = dot(b, q, v, ([lead + 1], [lead]), (axes, axes), dtype)
        outer = b.same(
            "multiply", b.spread(turned, q.shape, [*axes, lead]), b.spread(conj(v), q.shape, [*axes, lead + 1])
        )
        return [b.same("subtract", q, b.same("multiply", b.spread(tau, q.shape, axes), outer)), r]

    q, r = b.repeat(min(m, n), [q, x], step)
    q = b.slice(q, [0] * q.ndim, q_type.static_shape)
    return q, _triangle(b, b.slice(r, [0] * r.ndim, r_type.static_shape), lower=False)
