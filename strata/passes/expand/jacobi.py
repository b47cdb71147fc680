"""Eigenvalues and singular values by Jacobi's rotations: a turn of the loop rotates n/2 pairs of all matrices at once.

Pairs meet as players of a tournament do: in n - 1 rounds, which are a sweep, each has met all others. The loop ends
with a sweep in which nothing had to be rotated. A matrix that is done is multiplied by 1 while others go on, so that
its result does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strata.core import Dim, f64, i32, i64
from strata.mir import METHODS, Graph, Value, constant
from strata.ops import (
    Slice,
    While,
    argsort,
    bitcast,
    broadcast_to,
    cast,
    concat,
    gather,
    matmul,
    narrow,
    reshape,
    swapaxes,
    where,
)
from strata.ops import iota as positions
from strata.passes.expand.factorize import all_of, as_column, as_row, conj, ensured, eyes, filled, real, squared
from strata.passes.expand.rules import expands, is_static

MOST = 512  # columns: more take too many turns
SWEEPS = 60  # a bound; matrices of 128 columns take 6 to 23


@expands("eigh", loops=True)
def _eigh(op: Any, x: Value) -> Sequence[Value] | None:
    """Rotations of rows and of columns make the matrix diagonal. Its conjugate is what is kept, for rows to do."""
    n = x.shape[-1]
    if not is_static(x) or n > MOST:
        return None
    if 0 in x.shape:
        return [filled(op.infer(x.type)[0], 0), x]
    if n == 1:
        return [reshape(real(x), x.shape[:-1]), filled(x.type, 1)]
    half = constant(0.5, x.dtype)
    scaled, scale, size = _scaled(_finite(op, x))
    whole = _padded((scaled + _adjoint(scaled)) * half)
    rounds = _Rounds(whole.type.static_shape[-1])
    eps = _eps(x)
    on = positions(whole.shape[-2:], 0), positions(whole.shape[-2:], 1)
    values = METHODS["sum"](where(METHODS["equal"](*on), real(whole), _number(0, size)), axis=-1)
    floor = as_column(size * _number(eps * eps / 64, size))

    def turn(off: Value, values: Value, rows: Value, floor: Value) -> tuple[Sequence[Value], Value]:
        met = conj(rounds.met(off))
        first, second = rounds.halves(values, -1)
        near = METHODS["sqrt"](METHODS["abs"](first)) * METHODS["sqrt"](METHODS["abs"](second))
        made = _Rotation(first, second, met, METHODS["maximum"](near * _number(eps / 4, near), floor))
        own, others = rounds.factors(made)
        off = rounds.turned(_adjoint(rounds.turned(off, own, others)), own, others)
        shift = rounds.of_pairs(made.shift)
        values = rounds.moved(values) + rounds.either(-shift, shift)
        rows = rounds.turned(rows, own, others)
        return [where(constant(rounds.done), _number(0, off), off), values, rows], made.rotates

    _, values, rows = rounds.swept([conj(whole), values, eyes(whole, rounds.n)], [floor], turn)
    values, rows = narrow(values, -1, 0, n), narrow(narrow(rows, -2, 0, n), -1, 0, n)
    order = argsort(values, -1)
    values = METHODS["gather_elements"](values, order, values.ndim - 1)
    return [values * as_column(scale), swapaxes(_orthonormal(_rows(rows, order)), -1, -2)]


@expands("svd", loops=True)
def _svd(op: Any, x: Value) -> Sequence[Value] | None:
    """Rotations of columns make them orthogonal; their lengths are the values. QR completes what has no length."""
    m, n = x.shape[-2:]
    if not is_static(x) or min(m, n) > MOST:
        return None
    if 0 in x.shape:
        u, s, vh = op.infer(x.type)
        return [eyes(x, *u.shape[-2:]), filled(s, 0), eyes(x, *vh.shape[-2:])]
    if m < n:
        u, s, vh = op(_adjoint(x))
        return [_adjoint(vh), s, _adjoint(u)]
    scaled, scale, size = _scaled(_finite(op, x))
    work, rows = swapaxes(scaled, -1, -2), eyes(swapaxes(scaled, -1, -2), n)
    if n > 1:
        work, rows = _orthogonal(work, rows, size)
    lengths = _lengths(work)
    order = argsort(lengths, -1, descending=True)
    lengths = METHODS["gather_elements"](lengths, order, lengths.ndim - 1)
    work, vh = _rows(work, order), conj(_orthonormal(_rows(rows, order)))
    u, r = METHODS["qr"](swapaxes(work, -1, -2), "complete" if op.full_matrices else "reduced")
    on = METHODS["equal"](positions(r.shape[-2:], 0), positions(r.shape[-2:], 1))
    signs = METHODS["sum"](where(on, real(r), _number(0, lengths)), axis=-2)
    signs = where(METHODS["less"](signs, _number(0, signs)), _number(-1, signs), _number(1, signs))
    if u.shape[-1] != n:
        signs = concat([signs, broadcast_to(_number(1, signs), (*signs.shape[:-1], u.shape[-1] - n))], -1)
    return [u * as_row(cast(signs, u.dtype)), lengths * as_column(scale), vh]


def _orthogonal(work: Value, rows: Value, size: Value) -> tuple[Value, Value]:
    """Columns, as rows, that are orthogonal, and what has been done to them done to other rows as well."""
    n, m = work.type.static_shape[-2:]
    joint = concat([work, rows], -1)
    if n % 2:
        joint = concat([joint, _zeros(joint, (*joint.shape[:-2], 1, m + n))], -2)
    rounds = _Rounds(n + n % 2)
    eps = _eps(work)
    tolerance = float(eps * np.sqrt(m))
    floor = size * _number(eps / 16, size)

    def turn(joint: Value, floor: Value) -> tuple[Sequence[Value], Value]:
        own = narrow(joint, -1, 0, m)
        first, second = rounds.halves(METHODS["sqrt"](METHODS["sum"](squared(own), axis=-1)), -1)
        top, bottom = rounds.halves(own, -2)
        met = METHODS["sum"](conj(top) * bottom, axis=-1)
        near = first * second * _number(tolerance, first)
        made = _Rotation(first * first, second * second, met, METHODS["maximum"](near, floor))
        own, others = rounds.factors(made)
        return [rounds.turned(joint, own, others)], made.rotates

    (joint,) = rounds.swept([joint], [as_column(floor * floor)], turn)
    joint = narrow(joint, -2, 0, n)
    return narrow(joint, -1, 0, m), narrow(joint, -1, m, n)


class _Rotation:
    """What rotates pairs so that nothing is left between them: [[c, s], [-s̄, c]] for columns, |angle| ≤ 45°."""

    def __init__(self, first: Value, second: Value, met: Value, least: Value) -> None:
        size = METHODS["abs"](met)
        self.rotates = METHODS["greater"](size, least)
        zero, one = _number(0, size), _number(1, size)
        safe = where(self.rotates, size, one)
        slope = (second - first) / (safe + safe)
        sign = where(METHODS["less"](slope, zero), -one, one)
        tangent = sign / (METHODS["abs"](slope) + METHODS["sqrt"](one + slope * slope))
        tangent = where(self.rotates, tangent, zero)
        self.shift = tangent * size
        length = one + tangent * tangent
        c = one / METHODS["sqrt"](length)
        c = c * (_number(1.5, c) - _number(0.5, c) * length * c * c)  # devices have square roots that are less exact
        s = cast(tangent * c, met.dtype) * (met / cast(safe, met.dtype))
        self.c, self.s = c, where(self.rotates, s, _number(0, s))


class _Rounds:
    """Rounds of a tournament of n players, n even: i meets i + n/2, then all but the first move on by one place."""

    def __init__(self, n: int) -> None:
        self.n, self.half = n, n // 2
        ring = [*range(1, self.half), *range(n - 1, self.half - 1, -1)]
        self.source = np.arange(n)
        self.source[ring] = np.roll(ring, 1)
        self.done = np.eye(n, dtype=bool)  # where the diagonal is after a round, and what has just been made 0
        here = np.argsort(self.source)
        self.done[here, np.roll(here, self.half)] = True

    def halves(self, x: Value, axis: int) -> tuple[Value, Value]:
        return narrow(x, axis, 0, self.half), narrow(x, axis, self.half, self.half)

    def met(self, x: Value) -> Value:
        """Elements (i, i + n/2) of matrices."""
        flat = reshape(x, (*x.shape[:-2], self.n * self.n))
        start, step = (*(0 for _ in x.shape[:-2]), self.half), (*(1 for _ in x.shape[:-2]), self.n + 1)
        return Slice(start, (*x.shape[:-2], self.half * self.n), step)(flat)

    def moved(self, x: Value) -> Value:
        """Elements of the last axis where they are in the next round."""
        return gather(x, constant(self.source), x.ndim - 1)

    def of_pairs(self, x: Value) -> Value:
        """What pairs have, for each player where it is in the next round."""
        return gather(x, constant(self.source % self.half), x.ndim - 1)

    def either(self, first: Value, second: Value) -> Value:
        """Of two vectors by player, the one for its place in its pair."""
        return where(constant(self.source < self.half), first, second)

    def factors(self, made: _Rotation) -> tuple[Value, Value]:
        """What rows are multiplied by, and those that they have met."""
        s = self.of_pairs(made.s)
        return as_column(self.of_pairs(made.c)), as_column(self.either(-conj(s), s))

    def turned(self, x: Value, own: Value, others: Value) -> Value:
        """Rows of matrices rotated, where they are in the next round."""
        at = x.ndim - 2
        other = gather(x, constant((self.source + self.half) % self.n), at)
        return gather(x, constant(self.source), at) * cast(own, x.dtype) + other * others

    def swept(
        self, carries: Sequence[Value], consts: Sequence[Value],
        turn: Callable[..., tuple[Sequence[Value], Value]],
    ) -> tuple[Value, ...]:  # fmt: skip
        """Rounds until there has been a sweep without a rotation."""
        zero, one, each = (constant(number, i64) for number in (0, 1, self.n - 1))
        start = [constant(True), zero, *carries]
        (test, told), (body, given) = (self._graph(name, [*start, *consts]) for name in ("goes_on", "round"))
        begins = METHODS["equal"](METHODS["remainder"](told[1], each), zero)
        goes_on = METHODS["logical_or"](METHODS["logical_not"](begins), told[0])
        begins = METHODS["equal"](METHODS["remainder"](given[1], each), zero)
        made, rotates = turn(*given[2:])
        rotated = METHODS["logical_or"](
            METHODS["any"](rotates), METHODS["logical_and"](given[0], METHODS["logical_not"](begins))
        )
        body.outputs(rotated, given[1] + one, *made)
        found = While(test.outputs(goes_on), body, len(start), SWEEPS * (self.n - 1))(*start, *consts)
        return tuple(found[2:])

    @staticmethod
    def _graph(name: str, values: Sequence[Value]) -> tuple[Graph, list[Value]]:
        graph = Graph(name)
        return graph, [graph.input(f"x{i}", x.type) for i, x in enumerate(values)]


# -------------------------------------------------------------------------------------------------------------- helpers


def _finite(op: Any, x: Value) -> Value:
    fine = all_of(METHODS["isfinite"](x))
    return ensured(x, fine, f"{op.name}: the iteration for a matrix does not converge", "X202")


def _scaled(x: Value) -> tuple[Value, Value, Value]:
    """Matrices times a power of 2 that keeps squares in range, the scale that it takes to undo this, and largest parts.

    The scale is a vector; powers are exact, as their bits are made.
    """
    parts = [METHODS["abs"](real(x))] + ([METHODS["abs"](METHODS["imag"](x))] if x.dtype.is_complex else [])
    top = METHODS["max"](METHODS["maximum"](*parts) if len(parts) == 2 else parts[0], axis=(-2, -1))
    bits, mantissa, bias, most = (i64, 52, 1023, 1000) if top.dtype is f64 else (i32, 23, 127, 100)
    exponent = METHODS["bitwise_and"](bitcast(top, bits), constant((2 * bias + 1) << mantissa, bits))
    exponent = METHODS["maximum"](exponent, constant((bias - most) << mantissa, bits))
    exponent = METHODS["minimum"](exponent, constant((bias + most) << mantissa, bits))
    inverse = bitcast(constant((2 * bias) << mantissa, bits) - exponent, top.dtype)
    scaled = x * as_column(as_column(cast(inverse, x.dtype)))
    return scaled, bitcast(exponent, top.dtype), top * inverse


def _padded(x: Value) -> Value:
    """Square matrices with an even number of columns; the last may be 0."""
    n = x.shape[-1]
    if n % 2 == 0:
        return x
    x = concat([x, _zeros(x, (*x.shape[:-1], 1))], -1)
    return concat([x, _zeros(x, (*x.shape[:-2], 1, n + 1))], -2)


def _orthonormal(rows: Value) -> Value:
    """A step of Newton's towards orthonormal rows: rounding errors of many rotations go."""
    error = eyes(rows, rows.shape[-1]) - matmul(rows, _adjoint(rows))
    return rows + matmul(error, rows) * _number(0.5, rows)


def _lengths(rows: Value) -> Value:
    """Also of rows whose squares are too small to be numbers."""
    top = METHODS["max"](METHODS["abs"](rows), axis=-1)
    zero = _number(0, top)
    safe = where(METHODS["greater"](top, zero), top, _number(1, top))
    return top * METHODS["sqrt"](METHODS["sum"](squared(rows / as_column(cast(safe, rows.dtype))), axis=-1))


def _rows(x: Value, order: Value) -> Value:
    return METHODS["gather_elements"](x, broadcast_to(as_column(order), x.shape), x.ndim - 2)


def _adjoint(x: Value) -> Value:
    return conj(swapaxes(x, -1, -2))


def _number(number: float, x: Value) -> Value:
    return constant(number, x.dtype)


def _zeros(x: Value, shape: Sequence[Dim]) -> Value:
    return broadcast_to(_number(0, x), shape)


def _eps(x: Value) -> float:
    return float(np.finfo(x.dtype.np).eps)
