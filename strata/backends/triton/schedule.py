"""Schedules of Triton kernels: block sizes and warps, as data that can be printed.

    lanes 1024 warps 4                      programs of 1024 points
    rows 4 x 512 warps 4                    programs of 4 points, whose loops go 512 terms at a time
    squares 32 x 32 warps 4                 programs of points along two axes, for transposes
    product 64 x 64 x 32 warps 4 stages 3   programs of a tile of a matmul, 32 terms of its sums at a time

Sizes of blocks are powers of two. One heuristic chooses them from extents and from how elements lie in memory; sizes
that are not known count as large.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core import Dim, DType, bounds

POINTS = 1024  # that a program without loops takes
TILE = 4096  # elements of a block of rows, at most
WHOLE_ROW = 4096  # terms that are held at once rather than gone through
STEP = 2048  # terms of a longer loop, at a time
SQUARE = 32  # points each way of a tile that is read across
MANY = 1 << 40


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

    def __str__(self) -> str:
        return f"rows {self.points} x {self.terms} warps {self.warps}"


@dataclass(frozen=True, slots=True)
class TritonTiles:
    """A tile of a matmul."""

    rows: int
    columns: int
    terms: int
    warps: int = 4
    stages: int = 3

    def __str__(self) -> str:
        return f"product {self.rows} x {self.columns} x {self.terms} warps {self.warps} stages {self.stages}"


@dataclass(frozen=True, slots=True)
class Squares:
    """Points of a program without loops, along two axes: what is read along one is written along the other."""

    rows: int
    columns: int
    warps: int = 4

    def __str__(self) -> str:
        return f"squares {self.rows} x {self.columns} warps {self.warps}"


GpuSchedule = Lanes | TritonRows | Squares | TritonTiles


def known(dim: Dim) -> int:
    """A size, or its upper bound; many where there is none."""
    if isinstance(dim, int):
        return dim
    most = bounds(dim)[1]
    return MANY if most is None else most


def power_of_two(n: int, least: int = 1, most: int = 1 << 30) -> int:
    """The smallest power of two that holds n, within limits."""
    return max(least, min(most, 1 << max(0, n - 1).bit_length()))


def choose_lanes(points: Dim) -> Lanes:
    """Small kernels still fill a warp."""
    return Lanes(power_of_two(known(points), 32, POINTS))


def choose_squares(rows: Dim, columns: Dim) -> Squares | None:
    """None where one side is too short for whole lines of memory."""
    if min(known(rows), known(columns)) < SQUARE // 2:
        return None
    return Squares(SQUARE, SQUARE)


def choose_rows(points: Dim, terms: Dim, *, along_points: bool) -> TritonRows:
    """Whole rows where they fit a block; where neighbouring points, not terms, lie side by side, more points."""
    count, length = known(points), known(terms)
    if along_points:
        wide = power_of_two(count, 1, 64)
        block = TritonRows(wide, power_of_two(length, 1, max(16, TILE // 2 // wide)))
    elif length <= WHOLE_ROW:
        step = power_of_two(length, 1)
        block = TritonRows(power_of_two(count, 1, max(1, TILE // 2 // max(step, 64))), step)
    else:
        block = TritonRows(1, STEP)
    elements = block.points * block.terms
    return TritonRows(block.points, block.terms, 8 if elements >= TILE else 4 if elements > 512 else 2)


def choose_tiles(rows: Dim, columns: Dim, terms: Dim, dtype: DType) -> TritonTiles:
    """Tensor cores take operands of 16 and 8 bits; f32 is multiplied exactly, on the other units."""
    least = 32 if dtype.bits == 8 else 16
    m, n = power_of_two(known(rows), 16, 128), power_of_two(known(columns), 16, 128)
    if dtype.bits >= 32:
        m, n = min(m, 64), min(n, 64)
    k = power_of_two(known(terms), least, 32 if dtype.bits >= 32 else 64)
    return TritonTiles(m, n, k, 8 if m * n >= 128 * 128 else 4, 3 if known(terms) > 2 * k else 2)
