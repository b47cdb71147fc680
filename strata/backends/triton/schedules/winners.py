"""Measured winners among schedules, by card, kind of kernel and size class: `winners.json`, part of the package.

A row is the sizes of a kernel that was measured and the schedule that won. Other sizes take the schedule of the nearest
row, by ratios of sizes, so that a size class is what lies around a row. Cards without rows of their own take `any`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from math import log2
from pathlib import Path

from strata.backends.triton.schedules.schedule import GpuSchedule, parse_gpu_schedule
from strata.backends.triton.target import Gpu

_MOST = 1 << 18  # larger sizes, and those that are not known, count as this


def winner(gpu: Gpu, kind: str, sizes: Sequence[int], without: str = "none") -> GpuSchedule:
    """The schedule of the measured kernel that is nearest in size, of those that do not say a word."""
    return parse_gpu_schedule(nearest(gpu, kind, sizes, without)[1])


def has_winners(kind: str) -> bool:
    """Whether kernels of a kind were measured."""
    return kind in _tables()["any"]


def nearest(gpu: Gpu, kind: str, sizes: Sequence[int], without: str = "none") -> tuple[tuple[int, ...], str]:
    """The sizes that were measured, and what won for them."""
    rows = _rows(gpu, kind)

    def distance(row: tuple[tuple[int, ...], str]) -> float:
        return sum(abs(_scale(a) - _scale(b)) for a, b in zip(sizes, row[0], strict=True))

    return min((row for row in rows if without not in row[1].split()), key=distance)


def _rows(gpu: Gpu, kind: str) -> list[tuple[tuple[int, ...], str]]:
    """Of a kind, or of that without its last word: what holds for a format of weights, or for all."""
    tables = _tables()
    for name in (kind, kind.rpartition(" ")[0]):
        for table in (tables.get(str(gpu), {}), tables["any"]):
            if name in table:
                return table[name]
    raise AssertionError(f"nothing of {kind} was measured")


def _scale(n: int) -> float:
    return log2(max(1, min(n, _MOST)))


@cache
def _tables() -> dict[str, dict[str, list[tuple[tuple[int, ...], str]]]]:
    """By card and kind: sizes and schedules."""
    read = json.loads((Path(__file__).parent / "winners.json").read_text(encoding="utf-8"))
    return {
        card: {kind: [(tuple(sizes), text) for sizes, text in rows] for kind, rows in kinds.items()}
        for card, kinds in read.items()
    }
