"""Transposed convolutions as plain ones: every output pixel sees only the taps that meet a pixel of the input.

Along an axis with input dilation s, the output pixels q · s + r of one phase r see every s-th tap, from one on that
depends on r alone. So a phase is a plain convolution with a part of the taps, and the result is its phases put between
each other. Few outputs leave lanes of vectors empty: then all phases are one convolution of s times as many outputs,
with zeros where a phase lacks a tap that another one has. Windows that do not overlap are the case of one tap each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from strata.core import Dim, divide_exactly
from strata.mir import Node, Value, constant
from strata.ops import ConvLast, Slice, broadcast_to, concat, pad_constant, reshape, stack, transpose, weight_to_last

LANES = 16  # outputs that a vector along channels has
APART = 1.1  # what a convolution for every phase costs beyond its products
MOST_PHASES = 64


@dataclass(frozen=True, slots=True)
class Phase:
    """Of one axis: the first tap of a phase, how many it has, and the input pixel, from q on, that it sees first."""

    first: int
    taps: int
    start: int


def is_transposed(node: Node) -> bool:
    """Whether a convolution spreads its input, has whole phases, and no strides or dilation of its own."""
    op: Any = node.op
    spread = any(s > 1 for s in op.input_dilation) and prod(op.input_dilation) <= MOST_PHASES
    plain = all(v == 1 for values in (op.stride, op.dilation) for v in values) and not op.outside()
    x, w = node.inputs
    numbers = all(isinstance(d, int) for d in (*w.shape, *(p for pair in op.padding for p in pair)))
    return spread and plain and numbers and x.dtype.is_float and None not in _quotients(node)


def _quotients(node: Node) -> list[Dim | None]:
    """Pixels of a phase along each axis, the last one rounded up; None where a size that is not known has a rest."""
    op: Any = node.op
    return [
        -(-count // s) if isinstance(count, int) else divide_exactly(count, s)
        for count, s in zip(node.types[0].shape[2:], op.input_dilation, strict=True)
    ]


def as_plain(node: Node, x: Value, w: Value) -> Value:
    """Such a convolution of x [N, *sizes, C] with w [O, C / groups, *kernel], as [N, *sizes, O]."""
    op: Any = node.op
    counts = node.types[0].shape[2:]
    spread = op.input_dilation
    axes = [_phases(s, low, int(k)) for s, (low, _), k in zip(spread, op.padding, w.shape[2:], strict=True)]
    quotients = [q for q in _quotients(node) if q is not None]
    outputs = int(w.shape[0])
    apart = APART * _up(outputs) * prod(sum(p.taps for p in phases) for phases in axes)
    together = _up(outputs * prod(spread)) * prod(_reach(phases) for phases in axes)
    if op.groups == 1 and together <= apart:
        made = _together(x, w, axes, quotients)
    else:
        made = _apart(op.groups, x, w, axes, quotients)
    whole = [q * s for q, s in zip(quotients, spread, strict=True)]
    made = reshape(made, (x.shape[0], *whole, outputs))
    if whole == list(counts):
        return made
    rank = len(counts)
    return Slice((0,) * (rank + 2), (x.shape[0], *counts, outputs), (1,) * (rank + 2))(made)


def _phases(spread: int, low: int, kernel: int) -> list[Phase]:
    found = []
    for r in range(spread):
        first = (low - r) % spread
        found.append(Phase(first, max(0, -(-(kernel - first) // spread)), (r + first - low) // spread))
    return found


def _reach(phases: Sequence[Phase]) -> int:
    """Taps from the first to the last that any phase has."""
    return max(1, max(p.start + p.taps for p in phases) - min(p.start for p in phases))


def _up(count: int) -> int:
    return -(-count // LANES) * LANES


def _taps(w: Value, phases: Sequence[Phase], spread: Sequence[int]) -> Value:
    """The taps of one phase of every axis, as [O, C / groups, *taps]."""
    start = (0, 0, *(p.first for p in phases))
    return Slice(start, w.shape, (1, 1, *spread))(w)


def _plain(x: Value, taps: Value, groups: Any, starts: Sequence[int], counts: Sequence[Dim]) -> Value:
    """The convolution whose windows start at a pixel of the input, and that has so many outputs along each axis."""
    rank, ones = len(counts), (1,) * len(counts)
    padding = tuple(
        (-start, count - n + (int(k) - 1 + start))
        for start, count, k, n in zip(starts, counts, taps.shape[2:], x.shape[1:-1], strict=True)
    )
    return ConvLast(ones, padding, ones, groups, ones)(x, transpose(taps, weight_to_last(rank)))


def _apart(groups: Any, x: Value, w: Value, axes: Sequence[Sequence[Phase]], counts: Sequence[Dim]) -> Value:
    """A convolution for every phase; the results as [N, q, r, q, r, …, O]."""
    spread = [len(phases) for phases in axes]
    shape = (x.shape[0], *counts, w.shape[0])
    made: dict[tuple[int, ...], Value] = {}
    for position in product(*map(range, spread)):
        chosen = [phases[r] for phases, r in zip(axes, position, strict=True)]
        if all(p.taps for p in chosen):
            made[position] = _plain(x, _taps(w, chosen, spread), groups, [p.start for p in chosen], counts)
        else:
            made[position] = broadcast_to(constant(0, x.dtype), shape)

    def joined(position: tuple[int, ...]) -> Value:
        axis = len(position)
        if axis == len(spread):
            return made[position]
        parts = [joined((*position, r)) for r in range(spread[axis])]
        return stack(parts, 2 + axis) if len(parts) > 1 else reshape(parts[0], _with_one(parts[0].shape, 2 + axis))

    return joined(())


def _with_one(shape: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*shape[:at], 1, *shape[at:])


def _together(x: Value, w: Value, axes: Sequence[Sequence[Phase]], counts: Sequence[Dim]) -> Value:
    """One convolution whose outputs are those of all phases, as [N, q, r, q, r, …, O]."""
    spread = [len(phases) for phases in axes]
    starts = [min(p.start for p in phases) for phases in axes]
    reach = [_reach(phases) for phases in axes]
    parts = []
    for position in product(*map(range, spread)):
        chosen = [phases[r] for phases, r in zip(axes, position, strict=True)]
        before = [p.start - start for p, start in zip(chosen, starts, strict=True)]
        if all(p.taps for p in chosen):
            rest = [n - b - p.taps for n, b, p in zip(reach, before, chosen, strict=True)]
            borders = [(0, 0), (0, 0), *zip(before, rest, strict=True)]
            parts.append(pad_constant(_taps(w, chosen, spread), borders))
        else:
            parts.append(broadcast_to(constant(0, w.dtype), (*w.shape[:2], *reach)))
    made = _plain(x, concat(parts, 0), 1, starts, counts)
    apart = reshape(made, (x.shape[0], *counts, *spread, w.shape[0]))
    rank = len(counts)
    between = [a for axis in range(1, rank + 1) for a in (axis, axis + rank)]
    return transpose(apart, (0, *between, 2 * rank + 1))
