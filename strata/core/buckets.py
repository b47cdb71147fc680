"""Ranges of sizes that share a program, and what a call may do that fits no program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from strata.errors import RunError
from strata.places import here

ON_MISS = ("error", "bucket", "interpret", "compile")


def rising(sizes: Sequence[int]) -> bool:
    """Whether sizes can be the largest ones of ranges: whole numbers, each above the one before."""
    whole = all(isinstance(s, int) and not isinstance(s, bool) for s in sizes)
    return whole and bool(sizes) and all(a < b for a, b in pairwise((0, *sizes)))


def range_of(size: int, sizes: Sequence[int], first: int, what: str) -> tuple[int, int]:
    """The range that a size is in. It begins behind the one before, the first one at `first`."""
    at = bisect_left(sizes, size)
    if at == len(sizes):
        raise RunError(f"{what}{size} is above the largest bucket, {sizes[-1]}", code="X401", place=here())
    return sizes[at - 1] + 1 if at else first, sizes[at]
