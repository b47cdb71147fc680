"""Contenders by turns: everyone has its time, and none runs right behind another."""

from __future__ import annotations

import time
from itertools import pairwise

from strata.cli.turns import BURST, LEAST, PAUSE, in_turns


def test_turns_and_pauses() -> None:
    called: list[tuple[str, float]] = []

    def contender(name: str, seconds: float):
        def run() -> None:
            called.append((name, time.perf_counter()))
            time.sleep(seconds)

        return run

    times = in_turns({"quick": contender("quick", 0.002), "slow": contender("slow", 0.06)}, 0.3)
    assert sum(times["quick"]) >= 0.3
    assert len(times["slow"]) >= LEAST * LEAST
    changes = [(a, b) for a, b in pairwise(called) if a[0] != b[0]]
    assert len(changes) >= 2 * LEAST - 1
    assert all(b[1] - a[1] >= PAUSE for a, b in changes)
    assert len(called) == len(times["quick"]) + len(times["slow"]) + len(changes) + 1  # a call before each burst


def test_one_contender_need_not_wait() -> None:
    start = time.perf_counter()
    in_turns({"only": lambda: time.sleep(0.01)}, 0)
    assert time.perf_counter() - start < LEAST * (BURST + PAUSE)
