"""Schedules of Triton kernels: block sizes, warps, stages and orders, as data with a text.

    lanes 1024 warps 4                      programs of 1024 points
    rows 4 x 512 warps 4                    programs of 4 points, whose loops go 512 terms at a time
    fragments 16 x 2048 warps 4             programs of 16 rows of quantised weights, 2048 terms at a time
    squares 32 x 32 warps 4                 programs of points along two axes, for transposes
    product 64 x 64 x 32 warps 4 stages 3   programs of a tile of a matmul, 32 terms of its sums at a time
      … group 8                             8 rows of tiles are visited together, so that L2 holds their factors
      … parts 4                             split-k: sums in 4 parts, added up in their order by a second program
      … descriptors                         factors are loaded by the copy engine (TMA)
      … persistent 132                      so many programs take all tiles in turn
    attention 128 x 64 warps 8 stages 3     programs of 128 query rows, 64 keys at a time
      … segment 512                         programs of 512 keys, whose results a second program merges
      … consumers 2 persistent 132          so many programs, whose warps load or have 64 rows each of two blocks

Sizes of blocks are powers of two. A table of measured winners by size class and card (`winners.json`) chooses those of
matmuls and attention; other sizes are chosen from extents and from how elements lie in memory. Sizes that are not known
count as large.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from strata.core import Dim, bounds
from strata.errors import ParseError

PROGRAM_BYTES = 4096  # that a program without loops takes of each operand: half of it reached 0.8 of the bandwidth
POINTS = 1024  # that it takes at least, where there are many
TILE = 4096  # elements of a block of rows, at most
WHOLE_ROW = 4096  # terms that are held at once rather than gone through
STEP = 2048  # terms of a longer loop, at a time
SQUARE = 32  # points each way of a tile that is read across
MANY = 1 << 40
_PROGRAMS = 256  # that keep a GPU busy


@dataclass(frozen=True, slots=True)
class Lanes:
    """Points of a program without blocked loops."""

    points: int
    warps: int = 4

    def __str__(self) -> str:
        return f"lanes {self.points} warps {self.warps}"


@dataclass(frozen=True, slots=True)
class TritonRows:
    """Points of a program, and terms of its loops that are taken at a time."""

    points: int
    terms: int
    warps: int = 4
    stages: int = 1  # blocks of terms that are on their way at once

    def __str__(self) -> str:
        text = f"rows {self.points} x {self.terms} warps {self.warps}"
        return text + (f" stages {self.stages}" if self.stages > 1 else "")


@dataclass(frozen=True, slots=True)
class Fragments:
    """Rows of quantised weights of a program, multiplied by tensor cores, and terms that its warps take at a time."""

    points: int
    terms: int
    warps: int = 4

    def __str__(self) -> str:
        return f"fragments {self.points} x {self.terms} warps {self.warps}"


@dataclass(frozen=True, slots=True)
class TritonTiles:
    """A tile of a matmul, and the order in which tiles and terms are taken."""

    rows: int
    columns: int
    terms: int
    warps: int = 4
    stages: int = 3
    group: int = 1
    parts: int = 1
    descriptors: bool = False
    persistent: int = 0

    def __str__(self) -> str:
        text = f"product {self.rows} x {self.columns} x {self.terms} warps {self.warps} stages {self.stages}"
        text += f" group {self.group}" if self.group > 1 else ""
        text += f" parts {self.parts}" if self.parts > 1 else ""
        text += " descriptors" if self.descriptors else ""
        return text + (f" persistent {self.persistent}" if self.persistent else "")


@dataclass(frozen=True, slots=True)
class Squares:
    """Points of a program without loops, along two axes: what is read along one is written along the other."""

    rows: int
    columns: int
    warps: int = 4

    def __str__(self) -> str:
        return f"squares {self.rows} x {self.columns} warps {self.warps}"


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Query rows of a program, and keys that it takes at a time; with a segment, keys that it takes in all."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 3
    segment: int = 0
    consumers: int = 0  # warpgroups of a program with specialised warps
    persistent: int = 0

    def __str__(self) -> str:
        text = f"attention {self.rows} x {self.keys} warps {self.warps} stages {self.stages}"
        text += f" segment {self.segment}" if self.segment else ""
        return text + (f" consumers {self.consumers} persistent {self.persistent}" if self.consumers else "")


GpuSchedule = Lanes | TritonRows | Fragments | Squares | TritonTiles | AttentionBlocks

_N = r"(\d{1,9})"
_PATTERNS = (
    (re.compile(rf"lanes {_N} warps {_N}"), Lanes),
    (re.compile(rf"rows {_N} x {_N} warps {_N}(?: stages {_N})?"), TritonRows),
    (re.compile(rf"fragments {_N} x {_N} warps {_N}"), Fragments),
    (re.compile(rf"squares {_N} x {_N} warps {_N}"), Squares),
)
_ATTENTION = re.compile(
    rf"attention {_N} x {_N} warps {_N} stages {_N}(?: segment {_N})?(?: consumers ([123]) persistent {_N})?"
)
_PRODUCT = re.compile(
    rf"product {_N} x {_N} x {_N} warps {_N} stages {_N}(?: group {_N})?(?: parts {_N})?( descriptors)?"
    rf"(?: persistent {_N})?"
)


def parse_gpu_schedule(text: str) -> GpuSchedule:
    """Reads what `str(schedule)` prints."""
    if found := _PRODUCT.fullmatch(text):
        rows, columns, terms, warps, stages, group, parts, descriptors, persistent = found.groups()
        return TritonTiles(
            int(rows), int(columns), int(terms), int(warps), int(stages), int(group or 1), int(parts or 1),
            bool(descriptors), int(persistent or 0),
        )  # fmt: skip
    if found := _ATTENTION.fullmatch(text):
        return AttentionBlocks(*(int(n or 0) for n in found.groups()))
    for pattern, make in _PATTERNS:
        if found := pattern.fullmatch(text):
            return make(*(int(n) for n in found.groups() if n is not None))
    raise ParseError(f"{text!r} is not a schedule of a Triton kernel", code="P120")


def known(dim: Dim) -> int:
    """A size, or its upper bound; many where there is none."""
    if isinstance(dim, int):
        return dim
    most = bounds(dim)[1]
    return MANY if most is None else most


def power_of_two(n: int, least: int = 1, most: int = 1 << 30) -> int:
    """The smallest power of two that holds n, within limits."""
    return max(least, min(most, 1 << max(0, n - 1).bit_length()))


def choose_lanes(points: Dim, itemsize: int = 4) -> Lanes:
    """Small kernels still fill a warp, and give every processor of a GPU something to do."""
    most = max(POINTS, min(2 * POINTS, PROGRAM_BYTES // itemsize))
    spread = power_of_two(known(points) // _PROGRAMS, 128, most)
    lanes = power_of_two(known(points), 32, spread)
    return Lanes(lanes, 8 if lanes > POINTS else 4)


def choose_squares(rows: Dim, columns: Dim, itemsize: int = 4) -> Squares | None:
    """Whole lines of memory each way; None where one side is too short for them."""
    least = min(known(rows), known(columns))
    if least < SQUARE // 2:
        return None
    side = 2 * SQUARE if itemsize <= 4 and least >= 2 * SQUARE else SQUARE
    return Squares(side, side)


def choose_rows(points: Dim, terms: Dim, *, along_points: bool) -> TritonRows:
    """Whole rows where they fit a block; where neighbouring points, not terms, lie side by side, more points."""
    count, length = known(points), known(terms)
    if along_points:
        wide = power_of_two(count, 1, max(power_of_two(count // 128, 32, 128), power_of_two(count // 512, 32, 512)))
        block = TritonRows(wide, power_of_two(length, 1, max(8, TILE // wide)))
        if length > block.terms:
            return replace(block, warps=4 if wide * block.terms > 512 else 2, stages=3)
    elif length <= WHOLE_ROW:
        step = power_of_two(length, 1)
        block = TritonRows(power_of_two(count, 1, max(1, TILE // 2 // max(step, 64))), step)
    else:
        block = TritonRows(1, STEP)
    elements = block.points * block.terms
    return TritonRows(block.points, block.terms, 8 if elements >= TILE else 4 if elements > 512 else 2)


def fitted_tiles(tiles: TritonTiles, rows: Dim, columns: Dim, terms: Dim, bits: int) -> TritonTiles:
    """A tile no larger than what there is; tensor cores take at least 16 rows, and 32 terms of 8 bits."""
    least = 32 if bits == 8 else 16
    m, n = power_of_two(known(rows), 16, tiles.rows), power_of_two(known(columns), 16, tiles.columns)
    k = power_of_two(known(terms), least, max(least, tiles.terms))
    stages = tiles.stages if known(terms) > 2 * k else min(2, tiles.stages)
    warps = tiles.warps if m * n >= 32 * 32 * tiles.warps else min(4, tiles.warps)
    return replace(tiles, rows=m, columns=n, terms=k, stages=stages, warps=warps)
