"""Factorisations and solves as loops over columns: a turn works on all of a matrix, and on all of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strata.core import Dim, TensorType, broadcast_shapes, i64
from strata.mir import METHODS, Graph, Value, constant
from strata.ops import Ensure, ScanOp, broadcast_to, cast, gather, insert_axis, reshape, where
from strata.ops import iota as positions
from strata.passes.expand.rules import expands, is_static

_equal, _more, _least = (METHODS[name] for name in ("equal", "greater", "greater_equal"))


def _each_column(
    count: Dim, carries: Sequence[Value], consts: Sequence[Value], step: Callable[..., Sequence[Value]], *,
    reverse: bool = False,
) -> tuple[Value, ...]:  # fmt: skip
    """`step(k, *carries, *consts)` for each column k; gives the last carries, and the rest of the results stacked."""
    body = Graph("column")
    given = [body.input(f"c{i}", x.type) for i, x in enumerate((*carries, *consts))]
    k = body.input("k", i64[()])
    body.outputs(*step(k, *given))
    made: tuple[Value, ...] = ScanOp(body, count, len(carries), len(consts), reverse)(
        *carries, *consts, positions((count,), 0)
    )
    return made


def _at(x: Value, k: Value, axis: int) -> Value:
    """Row or column k."""
    return gather(x, k, x.ndim + axis)


def as_column(x: Value) -> Value:
    return insert_axis(x, -1)


def as_row(x: Value) -> Value:
    return insert_axis(x, -2)


def _zero(x: Value) -> Value:
    return constant(0, x.dtype)


def conj(x: Value) -> Value:
    return METHODS["conj"](x) if x.dtype.is_complex else x


def real(x: Value) -> Value:
    return METHODS["real"](x) if x.dtype.is_complex else x


def _stacked(x: Value, axis: int) -> Value:
    """What the turns gave, along an axis at the end."""
    return METHODS["moveaxis"](x, 0, axis)


def all_of(x: Value) -> Value:
    return METHODS["all"](x) if x.ndim else x


def eyes(x: Value, n: Dim, columns: Dim | None = None) -> Value:
    """Identity matrices, or their first columns, one for each matrix of x."""
    sizes = (n, n if columns is None else columns)
    eye = cast(_equal(positions(sizes, 0), positions(sizes, 1)), x.dtype)
    return broadcast_to(eye, (*x.shape[:-2], *sizes))


@expands("cholesky", loops=True)
def _cholesky(op: Any, x: Value) -> Sequence[Value] | None:
    if not is_static(x):
        return None
    n = x.shape[-1]
    if 0 in x.shape:
        return [x]
    half = constant(0.5, x.dtype)
    whole = (x + conj(METHODS["swapaxes"](x, -1, -2))) * half

    def step(k: Value, a: Value) -> Sequence[Value]:
        row = positions((n,), 0)
        column = _at(a, k, -1)
        pivot = real(_at(column, k, -1))
        root = as_column(cast(METHODS["sqrt"](pivot), a.dtype))
        below = where(_more(row, k), column / root, _zero(a))
        made = where(_equal(row, k), root, below)
        return a - as_column(made) * as_row(conj(made)), made, pivot

    _, columns, pivots = _each_column(n, [whole], [], step)
    fine = all_of(_more(pivots, _zero(pivots)))
    return [ensured(_stacked(columns, -1), fine, f"{op.name}: a matrix is not positive definite", "X201")]


def ensured(x: Value, ok: Value, message: str, code: str) -> Value:
    made: Value = Ensure(message, code)(x, ok)
    return made


def _eliminated(x: Value) -> tuple[Value, Value, Value]:
    """L below and U from the diagonal on, where rows of the result come from, and how many rows changed places."""
    *batch, m, n = x.shape
    count = min(m, n)
    order = broadcast_to(positions((m,), 0), (*batch, m))
    swaps = broadcast_to(constant(0, i64), batch)

    def step(k: Value, a: Value, order: Value, swaps: Value) -> Sequence[Value]:
        row, across = positions((m,), 0), positions((n,), 0)
        column = _at(a, k, -1)
        size = METHODS["abs"](real(column))
        if a.dtype.is_complex:
            size = size + METHODS["abs"](METHODS["imag"](column))  # as LAPACK measures it
        best = METHODS["argmax"](where(_least(row, k), size, constant(-1, size.dtype)), -1)
        chosen = as_column(best)
        source = where(_equal(row, k), chosen, where(_equal(row, chosen), k, row))
        a = METHODS["gather_elements"](a, broadcast_to(as_column(source), a.shape), a.ndim - 2)
        order = METHODS["gather_elements"](order, source, order.ndim - 1)
        pivot_row, column = _at(a, k, -2), _at(a, k, -1)
        pivot = as_column(_at(column, k, -1))
        empty = _equal(pivot, _zero(a))
        factors = where(empty, _zero(a), column / where(empty, constant(1, a.dtype), pivot))
        factors = where(_more(row, k), factors, _zero(a))
        reduced = a - as_column(factors) * as_row(where(_more(across, k), pivot_row, _zero(a)))
        below = METHODS["logical_and"](as_column(_more(row, k)), as_row(_equal(across, k)))
        return where(below, as_column(factors), reduced), order, swaps + cast(METHODS["not_equal"](best, k), i64)

    packed, order, swaps = _each_column(count, [x, order, swaps], [], step)
    return packed, order, swaps


@expands("lu", loops=True)
def _lu(op: Any, x: Value) -> Sequence[Value] | None:
    if not is_static(x):
        return None
    m, n = x.shape[-2:]
    count = min(m, n)
    if 0 in x.shape:
        return [eyes(x, m), *(filled(t, 0) for t in op.infer(x.type)[1:])]
    packed, order, _ = _eliminated(x)
    row, across = positions((m, n), 0), positions((m, n), 1)
    lower = METHODS["narrow"](where(_more(row, across), packed, _zero(x)), -1, 0, count)
    diagonal = _equal(positions((m, count), 0), positions((m, count), 1))
    lower = where(diagonal, constant(1, x.dtype), lower)
    upper = METHODS["narrow"](where(_least(across, row), packed, _zero(x)), -2, 0, count)
    permutation = cast(_equal(positions((m, m), 0), as_row(order)), x.dtype)
    return [permutation, lower, upper]


def filled(kind: TensorType, value: int) -> Value:
    return broadcast_to(constant(value, kind.dtype), kind.shape)


def _diagonal(packed: Value) -> Value:
    n = packed.shape[-1]
    on = _equal(positions((n, n), 0), positions((n, n), 1))
    return METHODS["sum"](where(on, packed, _zero(packed)), axis=-1)


def _odd(swaps: Value) -> Value:
    return _equal(METHODS["remainder"](swaps, constant(2, i64)), constant(1, i64))


@expands("det", loops=True)
def _det(op: Any, x: Value) -> Sequence[Value] | None:
    if not is_static(x):
        return None
    if 0 in x.shape:
        return [filled(op.infer(x.type), 1)]
    packed, _, swaps = _eliminated(x)
    found = _product(_diagonal(packed))
    return [where(_odd(swaps), -found, found)]


def _product(x: Value) -> Value:
    """The product of the last axis, in as many steps as its length has bits."""
    n = x.shape[-1]
    assert isinstance(n, int)
    while n > 1:
        half = n // 2
        rest = METHODS["narrow"](x, -1, 2 * half, n - 2 * half)
        pairs = METHODS["narrow"](x, -1, 0, half) * METHODS["narrow"](x, -1, half, half)
        x = METHODS["concat"]([pairs, rest], -1) if n % 2 else pairs
        n = half + n % 2
    return reshape(x, x.shape[:-1])


@expands("slogdet", loops=True)
def _slogdet(op: Any, x: Value) -> Sequence[Value] | None:
    if not is_static(x):
        return None
    if 0 in x.shape:
        return [filled(t, value) for t, value in zip(op.infer(x.type), (1, 0), strict=True)]
    packed, _, swaps = _eliminated(x)
    diagonal = _diagonal(packed)
    size = METHODS["abs"](diagonal)
    empty = _equal(size, _zero(size))
    unit = where(empty, _zero(diagonal), diagonal / cast(where(empty, constant(1, size.dtype), size), x.dtype))
    sign = _product(unit)
    return [where(_odd(swaps), -sign, sign), METHODS["sum"](METHODS["log"](size), axis=-1)]


@expands("triangular_solve", loops=True)
def _triangular(op: Any, a: Value, b: Value) -> Sequence[Value] | None:
    if not is_static(a, b):
        return None
    a, b = _same_batch(a, b)
    if 0 in b.shape or 0 in a.shape:
        return [b]
    upper = op.upper != op.transpose  # as it is used
    matrix = METHODS["swapaxes"](a, -1, -2) if op.transpose else a
    found = _substituted(matrix, b, upper=upper, unit=op.unit_diagonal)
    if op.unit_diagonal:
        return [found]
    fine = all_of(METHODS["not_equal"](_diagonal(a), _zero(a)))
    return [ensured(found, fine, f"{op.name}: a matrix is singular, a pivot is 0", "X200")]


def _same_batch(a: Value, b: Value) -> tuple[Value, Value]:
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2], what="solve")
    return broadcast_to(a, (*batch, *a.shape[-2:])), broadcast_to(b, (*batch, *b.shape[-2:]))


@expands("solve", loops=True)
def _solve(op: Any, a: Value, b: Value) -> Sequence[Value] | None:
    """A = P·L·U, and three solves that are known to be easy."""
    if not is_static(a, b):
        return None
    _, right = _same_batch(a, b)
    if 0 in right.shape or 0 in a.shape:
        return [right]
    packed, order, _ = _eliminated(a)
    fine = all_of(METHODS["not_equal"](_diagonal(packed), _zero(packed)))
    packed, _ = _same_batch(packed, right)
    order = broadcast_to(order, (*right.shape[:-2], order.shape[-1]))
    if op.adjoint:
        turned = conj(METHODS["swapaxes"](packed, -1, -2))
        made = _substituted(turned, right, upper=False, unit=False)
        made = _substituted(turned, made, upper=True, unit=True)
        back = METHODS["argsort"](order, -1)
        made = METHODS["gather_elements"](made, broadcast_to(as_column(back), made.shape), made.ndim - 2)
    else:
        moved = METHODS["gather_elements"](right, broadcast_to(as_column(order), right.shape), right.ndim - 2)
        made = _substituted(packed, moved, upper=False, unit=True)
        made = _substituted(packed, made, upper=True, unit=False)
    return [ensured(made, fine, f"{op.name}: a matrix is singular, a pivot is 0", "X200")]


def _substituted(a: Value, b: Value, *, upper: bool, unit: bool) -> Value:
    """A triangular solve, column by column; pivots are looked at elsewhere."""
    n = a.shape[-1]

    def step(k: Value, rest: Value, matrix: Value) -> Sequence[Value]:
        row = positions((n,), 0)
        column, found = _at(matrix, k, -1), _at(rest, k, -2)
        if not unit:
            found = found / as_column(_at(column, k, -1))
        later = METHODS["less"](row, k) if upper else _more(row, k)
        return rest - as_column(where(later, column, _zero(rest))) * as_row(found), found

    return _stacked(_each_column(n, [b], [a], step, reverse=upper)[1], -2)


@expands("qr", loops=True)
def _qr(op: Any, x: Value) -> Sequence[Value] | None:
    """Householder's reflections, with the signs of LAPACK."""
    if not is_static(x):
        return None
    m, n = x.shape[-2:]
    if 0 in x.shape:
        q, r = op.infer(x.type)
        return [eyes(x, m, q.shape[-1]), filled(r, 0)]

    def reflect(k: Value, r: Value) -> Sequence[Value]:
        row = positions((m,), 0)
        column = _at(r, k, -1)
        head = _at(column, k, -1)
        below = where(_more(row, k), column, _zero(r))
        rest = METHODS["sum"](squared(below), axis=-1)
        norm = METHODS["sqrt"](rest + squared(head))
        beta = where(_least(real(head), _zero(norm)), -norm, norm)
        beyond = rest + METHODS["abs"](METHODS["imag"](head)) if r.dtype.is_complex else rest
        still = _equal(beyond, _zero(beyond))
        one = constant(1, r.dtype)
        wide = cast(beta, r.dtype)
        tau = where(still, _zero(r), (wide - head) / where(still, one, wide))
        pivot = where(still, one, head - wide)
        v = where(_equal(row, k), one, below / as_column(pivot))
        v = where(as_column(still), cast(_equal(row, k), r.dtype), v)
        onto = METHODS["sum"](as_column(conj(v)) * r, axis=-2)
        return r - as_column(as_column(conj(tau)) * v) * as_row(onto), v, tau

    def collect(k: Value, q: Value, vs: Value, taus: Value) -> Sequence[Value]:
        v, tau = _at(vs, k, -vs.ndim), _at(taus, k, -taus.ndim)
        onto = METHODS["sum"](as_column(conj(v)) * q, axis=-2)
        return [q - as_column(as_column(tau) * v) * as_row(onto)]

    r, vs, taus = _each_column(n, [x], [], reflect)
    (q,) = _each_column(n, [eyes(x, m, m if op.complete else n)], [vs, taus], collect, reverse=True)
    r = where(_least(positions((m, n), 1), positions((m, n), 0)), r, _zero(x))
    return [q, r if op.complete else METHODS["narrow"](r, -2, 0, n)]


def squared(x: Value) -> Value:
    if not x.dtype.is_complex:
        return x * x
    real, imaginary = METHODS["real"](x), METHODS["imag"](x)
    return real * real + imaginary * imaginary
