"""Schedules of shaders, as data: which loops are the grid, what a workgroup shares.

    points 2 by 64      the first two loops are points; an invocation each, 64 to a workgroup; other loops inside it
    words 1 of 4 by 64  points, four neighbours an invocation: it writes whole words (packed_words.py)
    tiles 64 x 64 x 16 by 256   squares of a matmul's results (tiles.py)
    rows 1 by 256       the first loop is rows; a workgroup each, whose 256 invocations share the loops inside

The choice depends on the kernel alone, so that sums are added up in one order wherever they run.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.wgsl.bounds import extent_range
from strata.core import Dim, dim_prod
from strata.kernel import LoopBlock, MapLoop, ReduceLoop, parallel_chain, walk_loops

POINTS = 64  # invocations of a workgroup that do not work together
SHORT = 64  # iterations that are not worth sharing
LONG = 256  # iterations that are, where the grid alone would not fill a device
FEW = 4096  # points that do not fill a device
TYPICAL = 1024  # stands in for a size that is not known
MOST_LANES = 256  # that every device has


@dataclass(frozen=True, slots=True)
class Points:
    loops: int
    size: int = POINTS

    def __str__(self) -> str:
        return f"points {self.loops} by {self.size}"


@dataclass(frozen=True, slots=True)
class WgslRows:
    loops: int
    size: int

    def __str__(self) -> str:
        return f"rows {self.loops} by {self.size}"


Schedule = Points | WgslRows


def typical(dim: Dim) -> int:
    """A number to compare sizes by."""
    if isinstance(dim, int):
        return dim
    low, high = extent_range(dim)
    return max(low, min(high, TYPICAL))


def choose(nest: LoopBlock) -> Schedule:
    """How the loops of a nest are handed out."""
    chain = parallel_chain(nest)
    inner = chain[-1].body if chain else nest
    reduces = [s for s in inner.steps if isinstance(s, ReduceLoop)]
    maps = [s for s in inner.steps if isinstance(s, MapLoop)]
    if any(isinstance(loop, MapLoop) and loop.scans for loop in walk_loops(inner)):
        return Points(len(chain))
    inside: list[MapLoop | ReduceLoop] = [*reduces, *maps]
    longest = max((typical(loop.axis.extent) for loop in inside), default=0)
    points = typical(dim_prod([loop.axis.extent for loop in chain]))
    is_row = bool(maps) and longest >= SHORT
    is_long = longest >= LONG and points < FEW
    if is_row or is_long:
        return WgslRows(len(chain), MOST_LANES if longest >= 2 * MOST_LANES else 64)
    return Points(len(chain))
