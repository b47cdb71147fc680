"""Transposed convolutions as plain ones: every output pixel computes only the taps that meet an input pixel.

Along an axis with input dilation s, the output pixels q · s + r of one phase r see every s-th tap, from one on that
depends on r alone. So a phase is a plain convolution with a part of the taps, and the result is its phases put between
each other. Phases may also share a convolution of s times as many outputs, with zeros where one lacks a tap that
another one has: where windows do not overlap, so that each phase has one tap, and where few outputs would leave lanes
of vectors empty. Those along the last axis then lie as they will in the result; others are moved past pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from strata.core import Dim, dim_prod
from strata.mir import Node, Value, constant
from strata.ops import ConvLast, Slice, broadcast_to, concat, pad_constant, reshape, stack, transpose, weight_to_last

LANES = 16  # outputs that a vector along channels has
APART, MOVED = 1.1, 1.05  # cost of a convolution for every phase beyond its arithmetic, and of phases that are moved
MOST_PHASES = 64


@dataclass(frozen=True, slots=True)
class ConvPhase:
    """Of one axis: the first tap of a phase, how many it has, and the input pixel, from q on, that it sees first."""

    first: int
    taps: int
    start: int


def is_transposed(node: Node) -> bool:
    """Whether a convolution spreads its input, and has neither strides nor dilation."""
    op: Any = node.op
    spread = any(s > 1 for s in op.input_dilation) and prod(op.input_dilation) <= MOST_PHASES
    plain = all(v == 1 for values in (op.stride, op.dilation) for v in values) and not op.outside()
    x, w = node.inputs
    numbers = all(isinstance(d, int) for d in (*w.shape, *(low for low, _ in op.padding)))
    return spread and plain and numbers and x.dtype.is_float


def _quotients(node: Node) -> list[Dim]:
    """Pixels of a phase along each axis, those of the last one rounded up."""
    op: Any = node.op
    return [(n + (s - 1)) // s for n, s in zip(node.types[0].shape[2:], op.input_dilation, strict=True)]


def as_plain(node: Node, x: Value, w: Value) -> Value:
    """Such a convolution of x [N, *sizes, C] with w [O, C / groups, *kernel], as [N, *sizes, O]."""
    op: Any = node.op
    counts = node.types[0].shape[2:]
    spread = op.input_dilation
    axes = _axes(op, w)
    quotients = _quotients(node)
    outputs = int(w.shape[0])
    rank = len(counts)
    ways = [rank] if op.groups != 1 else [rank - 1, *range(rank - 1), rank]
    apart = min(ways, key=lambda way: _cost(outputs, axes, way))
    made = _by_phases(op.groups, x, w, axes, quotients, apart)
    whole = [q * s for q, s in zip(quotients, spread, strict=True)]
    made = reshape(made, (x.shape[0], *whole, outputs))
    if whole == list(counts):
        return made
    return Slice((0,) * (rank + 2), (x.shape[0], *counts, outputs), (1,) * (rank + 2))(made)


def is_product(node: Node) -> bool:
    """Whether such a convolution is a matmul: its windows lie side by side, so that each phase has one tap
    and sees the pixels of x as they are."""
    op: Any = node.op
    if op.groups != 1 or not is_transposed(node):
        return False
    x, w = node.inputs
    phases = [p for axis in _axes(op, w) for p in axis]
    return all(p.taps == 1 and p.start == 0 for p in phases) and tuple(_quotients(node)) == x.shape[2:]


def as_product(node: Node, x: Value, w: Value) -> Value:
    """Such a convolution of x [N, C, *sizes] with w [O, C, *kernel], as [N, O, *sizes]."""
    op: Any = node.op
    rank, outputs, spread = x.ndim - 2, w.shape[0], op.input_dilation
    taps = [reshape(_taps(w, phases, spread), (outputs, 1, w.shape[1])) for phases in product(*_axes(op, w))]
    rows = reshape(concat(taps, 1), (outputs * len(taps), w.shape[1]))
    made = rows @ reshape(x, (*x.shape[:2], dim_prod(x.shape[2:])))
    apart = reshape(made, (x.shape[0], outputs, *spread, *x.shape[2:]))
    between = transpose(apart, (0, 1, *(a for axis in range(2, rank + 2) for a in (axis + rank, axis))))
    whole = reshape(between, (x.shape[0], outputs, *(q * s for q, s in zip(x.shape[2:], spread, strict=True))))
    shape = node.types[0].shape
    return whole if whole.shape == shape else Slice((0,) * (rank + 2), shape, (1,) * (rank + 2))(whole)


def _axes(op: Any, w: Value) -> list[list[ConvPhase]]:
    """The phases of each axis."""
    given = zip(op.input_dilation, op.padding, w.shape[2:], strict=True)
    return [_phases(s, low, int(k)) for s, (low, _), k in given]


def _phases(spread: int, low: int, kernel: int) -> list[ConvPhase]:
    found = []
    for r in range(spread):
        first = (low - r) % spread
        found.append(ConvPhase(first, max(0, -(-(kernel - first) // spread)), (r + first - low) // spread))
    return found


def _reach(phases: Sequence[ConvPhase]) -> int:
    """Taps from the first to the last that any phase has."""
    return max(1, max(p.start + p.taps for p in phases) - min(p.start for p in phases))


def _cost(outputs: int, axes: Sequence[Sequence[ConvPhase]], apart: int) -> float:
    """Multiplications for a pixel where the phases of this many axes, from the first on, have a convolution each."""
    taps = prod(sum(p.taps for p in phases) for phases in axes[:apart]) * prod(_reach(p) for p in axes[apart:])
    beyond = APART if apart == len(axes) else MOVED if apart < len(axes) - 1 else 1.0
    return beyond * taps * _up(outputs * prod(len(phases) for phases in axes[apart:]))


def _up(count: int) -> int:
    return -(-count // LANES) * LANES


def _taps(w: Value, phases: Sequence[ConvPhase], spread: Sequence[int]) -> Value:
    """The taps of one phase of every axis, as [O, C / groups, *taps]."""
    start = (0, 0, *(p.first for p in phases))
    return Slice(start, w.shape, (1, 1, *spread))(w)


def _plain(x: Value, taps: Value, groups: Any, starts: Sequence[int], counts: Sequence[Dim]) -> Value:
    """The convolution whose windows start at a pixel of the input, and that has this many outputs along each axis."""
    rank, ones = len(counts), (1,) * len(counts)
    padding = tuple(
        (-start, count - n + (int(k) - 1 + start))
        for start, count, k, n in zip(starts, counts, taps.shape[2:], x.shape[1:-1], strict=True)
    )
    return ConvLast(ones, padding, ones, groups, ones)(x, transpose(taps, weight_to_last(rank)))


def _by_phases(
    groups: Any, x: Value, w: Value, axes: Sequence[Sequence[ConvPhase]], counts: Sequence[Dim], apart: int
) -> Value:
    """A convolution for every phase of the first axes; the results as [N, q, r, q, r, …, O]."""

    def joined(position: tuple[int, ...]) -> Value:
        axis = len(position)
        if axis == apart:
            chosen = [[phases[r]] for phases, r in zip(axes, position, strict=False)]
            return _together(groups, x, w, axes, [*chosen, *axes[apart:]], counts, apart)
        parts = [joined((*position, r)) for r in range(len(axes[axis]))]
        return stack(parts, 2 + axis) if len(parts) > 1 else reshape(parts[0], _with_one(parts[0].shape, 2 + axis))

    return joined(())


def _with_one(shape: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*shape[:at], 1, *shape[at:])


def _together(
    groups: Any,
    x: Value,
    w: Value,
    axes: Sequence[Sequence[ConvPhase]],
    chosen: Sequence[Sequence[ConvPhase]],
    counts: Sequence[Dim],
    apart: int,
) -> Value:
    """One convolution whose outputs are those of the chosen phases, as [N, q, …, q, r, q, r, …, O]: one phase of each
    of the first axes, all of the others."""
    spread, several = [len(phases) for phases in axes], [len(phases) for phases in chosen[apart:]]
    starts = [min(p.start for p in phases) for phases in chosen]
    reach = [_reach(phases) for phases in chosen]
    parts = []
    for phases in product(*chosen):
        before = [p.start - start for p, start in zip(phases, starts, strict=True)]
        if all(p.taps for p in phases):
            rest = [n - b - p.taps for n, b, p in zip(reach, before, phases, strict=True)]
            borders = [(0, 0), (0, 0), *zip(before, rest, strict=True)]
            taps = _taps(w, phases, spread)
            parts.append(pad_constant(taps, borders) if any(map(any, borders)) else taps)
        else:
            parts.append(broadcast_to(constant(0, w.dtype), (*w.shape[:2], *reach)))
    made = _plain(x, concat(parts, 0) if len(parts) > 1 else parts[0], groups, starts, counts)
    beside = reshape(made, (x.shape[0], *counts, *several, w.shape[0]))
    rank = len(counts)
    between = [a for axis in range(apart, rank) for a in (1 + axis, 1 + rank + axis - apart)]
    return transpose(beside, (0, *range(1, apart + 1), *between, 1 + rank + len(several)))
