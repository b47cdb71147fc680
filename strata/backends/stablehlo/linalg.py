"""Matrix ops as StableHLO: cholesky and triangular_solve as it has them, the others as loops over columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.stablehlo.build import Hlo, StableHloBuilder, kind, value_type
from strata.backends.stablehlo.contract import dot
from strata.backends.stablehlo.reductions import reduce
from strata.backends.stablehlo.scalars import any_of, scalar
from strata.backends.stablehlo.table import Results, Writer, rule, types_of
from strata.core import i64
from strata.mir import placeholder
from strata.passes import expanded


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
    made = _triangle(b, made, "LE")
    diagonal = _diagonal(b, made)
    w.fail_if(_any(b, scalar(b, "isnan", diagonal.dtype, [diagonal])))
    return made


def _triangle(b: StableHloBuilder, x: Hlo, keep: str) -> Hlo:
    """x with zeros where columns do not compare so with rows."""
    row, column = b.iota(i64, x.shape, x.ndim - 2), b.iota(i64, x.shape, x.ndim - 1)
    return b.select(b.compare(keep, column, row), x, b.like(0, x))


@rule("triangular_solve")
def _triangular_solve(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    b = w.b
    (made,) = types_of(op, xs)
    if 0 in made.static_shape or 0 in xs[0].shape:
        return b.const(0, made.dtype, made.static_shape)
    a, y = (b.trailing(x, (*made.static_shape[:-2], *x.shape[-2:])) for x in xs)
    if not op.unit_diagonal:
        diagonal = _diagonal(b, xs[0])
        w.fail_if(_any(b, b.compare("EQ", diagonal, b.like(0, diagonal))))
    turn = "TRANSPOSE" if op.transpose else "NO_TRANSPOSE"
    attributes = (
        f"left_side = true, lower = {str(not op.upper).lower()}, unit_diagonal = {str(op.unit_diagonal).lower()}, "
        f"transpose_a = #stablehlo<transpose {turn}>"
    )
    return b.many("stablehlo.triangular_solve", [a, y], attributes, [(y.dtype, y.shape)])[0]


@rule("lu", "solve", "det", "slogdet")
def _by_columns(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """As the pass `expand` builds it, here where all sizes are known."""
    values = [placeholder(f"x{i}", value_type(x)) for i, x in enumerate(xs)]
    return w.values(expanded(op, *values), dict(zip(values, xs, strict=True)))


@rule("qr")
def _qr(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """Householder reflections, column by column, all matrices of a stack at once; signs are those of LAPACK.

    Matmuls with a vector, which XLA runs several times as fast as the sums that the pass `expand` has.
    """
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
    r = b.slice(r, [0] * r.ndim, r_type.static_shape)
    return b.slice(q, [0] * q.ndim, q_type.static_shape), _triangle(b, r, "GE")
