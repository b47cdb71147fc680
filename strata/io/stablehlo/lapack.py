"""Factorisations that JAX writes as calls of LAPACK on processors, by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata import ops
from strata.core import i32
from strata.io.stablehlo.rules import Item
from strata.io.stablehlo.syntax import HloOp
from strata.mir import Value

LOWER, NO_TRANSPOSE, CONJUGATE, LEFT, UNIT = (ord(c) for c in "LNCLU")


def _settings(op: HloOp) -> dict[str, Any]:
    found = op.attributes.get("mhlo.backend_config") or op.attributes.get("backend_config") or {}
    return found if isinstance(found, dict) else {}


def _done(a: Value) -> Value:
    """LAPACK's word that all went well: numbers that cannot be had are NaN already."""
    made: Value = ops.zeros(a.shape[:-2], i32)
    return made


def hermitian(a: Value, *, lower: bool) -> Value:
    """A matrix from one of its triangles: the other one is not read."""
    half, rest = (ops.tril(a), ops.tril(a, -1)) if lower else (ops.triu(a), ops.triu(a, 1))
    made: Value = half + ops.conj(ops.swapaxes(rest, -1, -2))
    return made


def potrf(op: HloOp, given: list[Item]) -> list[Value]:
    a, lower = given[0].value, _settings(op).get("uplo", LOWER) == LOWER
    return [ops.cholesky(hermitian(a, lower=lower), upper=not lower), _done(a)]


def syevd(op: HloOp, given: list[Item]) -> list[Value]:
    a = given[0].value
    values, vectors = ops.eigh(hermitian(a, lower=_settings(op).get("uplo", LOWER) == LOWER))
    return [vectors, values, _done(a)]


def gesdd(op: HloOp, given: list[Item]) -> list[Value]:
    a, mode = given[0].value, chr(_settings(op).get("mode", ord("A")))
    u, s, v = ops.svd(a, full_matrices=mode == "A")
    return [a, s, u, v, _done(a)]


def trsm(op: HloOp, given: list[Item]) -> list[Value]:
    settings = _settings(op)
    a, b = (x.value for x in given)
    turned = settings.get("trans_x", NO_TRANSPOSE) != NO_TRANSPOSE
    a = ops.conj(a) if settings.get("trans_x") == CONJUGATE else a
    lower, unit = settings.get("uplo", LOWER) == LOWER, settings.get("diag") == UNIT
    if settings.get("side", LEFT) == LEFT:
        return [ops.solve_triangular(a, b, lower=lower, transpose=turned, unit_diagonal=unit)]
    b = ops.swapaxes(b, -1, -2)  # x·a = b is aᵀ·xᵀ = bᵀ
    return [ops.swapaxes(ops.solve_triangular(a, b, lower=lower, transpose=not turned, unit_diagonal=unit), -1, -2)]


def getrf(op: HloOp, given: list[Item]) -> list[Value]:
    """Both triangles in one matrix, and for each step the row that it swapped its own with, counted from 1."""
    a = given[0].value
    swapped, lower, upper = ops.lu(a)
    whole = _padded(ops.tril(lower, -1), a) + _padded(upper, a)
    return [whole, _swaps(swapped, lower.shape[-1]), _done(a)]


def _swaps(permutation: Value, steps: Any) -> Value:
    """LAPACK's pivots: which place a row is fetched from, after the swaps of the steps before it."""
    wanted = ops.cast(ops.argmax(ops.real(permutation), axis=-2), i32)  # [.., M]: the row that comes to each place
    places = ops.iota((permutation.shape[-1],), 0, i32)
    start = ops.broadcast_to(places, wanted.shape)

    def step(rows: Value, x: Any) -> Any:
        at, row = x
        row = ops.expand_dims(row, -1)
        found = ops.cast(ops.argmax(ops.cast(ops.equal(rows, row), i32), axis=-1, keepdims=True), i32)
        here = ops.max(ops.where(ops.equal(places, at), rows, ops.zeros((), i32)), axis=-1, keepdims=True)
        rows = ops.where(ops.equal(places, found), here, rows)
        rows = ops.where(ops.equal(places, at), row, rows)
        return rows, ops.reshape(found + 1, found.shape[:-1])

    first = ops.moveaxis(ops.narrow(wanted, -1, 0, steps), -1, 0)
    _, pivots = ops.scan(step, start, (ops.narrow(places, 0, 0, steps), first))
    made: Value = ops.moveaxis(pivots, 0, -1)
    return made


def _padded(x: Value, like: Value) -> Value:
    """A matrix with zeros below and to the right, to the size of another."""
    widths = [(0, 0)] * (x.ndim - 2) + [(0, n - m) for m, n in zip(x.shape[-2:], like.shape[-2:], strict=True)]
    made: Value = ops.pad(x, widths)
    return made


def geqrf(op: HloOp, given: list[Item]) -> list[Value]:
    """R, with the vectors of the reflections below it, and how much each reflects, as LAPACK keeps them."""
    a = given[0].value
    rows, columns = a.shape[-2:]
    down = ops.reshape(ops.iota((rows,), 0, i32), (rows, 1))
    along = ops.iota((columns,), 0, i32)
    steps = min(rows, columns)
    one, zero = ops.ones((), a.dtype), ops.zeros((), a.dtype)

    def step(m: Value, at: Value) -> Any:
        column = ops.sum(ops.where(ops.equal(along, at), m, zero), axis=-1, keepdims=True)
        head = ops.sum(ops.where(ops.equal(down, at), column, zero), axis=-2, keepdims=True)
        tail = ops.where(ops.greater(down, at), column, zero)
        size = ops.sum(_square(tail), axis=-2, keepdims=True)
        length = ops.sqrt(_square(head) + size)
        turned = ops.where(ops.less(ops.real(head), ops.zeros((), length.dtype)), length, -length)
        is_done = ops.equal(size, ops.zeros((), size.dtype))
        if a.dtype.is_complex:
            is_done = ops.logical_and(is_done, ops.equal(ops.imag(head), ops.zeros((), size.dtype)))
        beta = ops.where(is_done, head, ops.cast(turned, a.dtype))
        tau = ops.where(is_done, zero, (beta - head) / ops.where(is_done, one, beta))
        vector = tail / ops.where(is_done, one, head - beta) + ops.where(ops.equal(down, at), one, zero)
        vector = ops.where(ops.less(down, at), zero, vector)
        moved = m - ops.conj(tau) * vector * ops.sum(ops.conj(vector) * m, axis=-2, keepdims=True)
        kept = ops.where(ops.greater(down, at), vector, ops.where(ops.equal(down, at), beta, column))
        m = ops.where(ops.greater(along, at), moved, ops.where(ops.equal(along, at), kept, m))
        return m, ops.reshape(tau, tau.shape[:-2])

    packed, taus = ops.scan(step, a, ops.iota((steps,), 0, i32))
    return [packed, ops.moveaxis(taus, 0, -1)]


def orgqr(op: HloOp, given: list[Item]) -> list[Value]:
    """The reflections that LAPACK keeps below R, multiplied: the columns of Q."""
    packed, taus = (x.value for x in given)
    rows, columns = packed.shape[-2:]
    down = ops.reshape(ops.iota((rows,), 0, i32), (rows, 1))
    along = ops.iota((columns,), 0, i32)
    one, zero = ops.ones((), packed.dtype), ops.zeros((), packed.dtype)
    start = ops.broadcast_to(ops.where(ops.equal(down, along), one, zero), packed.shape)

    def step(q: Value, x: Any) -> Any:
        at, tau = x
        column = ops.sum(ops.where(ops.equal(along, at), packed, zero), axis=-1, keepdims=True)
        vector = ops.where(ops.greater(down, at), column, ops.where(ops.equal(down, at), one, zero))
        tau = ops.reshape(tau, (*tau.shape, 1, 1))
        return q - tau * vector * ops.sum(ops.conj(vector) * q, axis=-2, keepdims=True), at

    order = ops.iota((taus.shape[-1],), 0, i32)
    q, _ = ops.scan(step, start, (order, ops.moveaxis(taus, -1, 0)), reverse=True)
    return [q]


def _square(x: Value) -> Value:
    made: Value = ops.real(x * ops.conj(x)) if x.dtype.is_complex else x * x
    return made


ROUTINES: dict[str, Callable[[HloOp, list[Item]], list[Value]]] = {
    f"lapack_{kind}{name}_ffi": routine
    for name, routine in {
        "potrf": potrf,
        "trsm": trsm,
        "gesdd": gesdd,
        "syevd": syevd,
        "heevd": syevd,
        "getrf": getrf,
        "geqrf": geqrf,
        "orgqr": orgqr,
        "ungqr": orgqr,
    }.items()  # fmt: skip
    for kind in "sdcz"
}
