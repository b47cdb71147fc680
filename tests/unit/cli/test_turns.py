"""Contenders by turns: everyone has its time, and none runs right behind another."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise

import pytest

from strata.cli.bench import turns
from strata.cli.bench.turns import LEAST, PAUSE, in_turns


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


def test_one_contender_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    ticks = itertools.count()
    monkeypatch.setattr(turns.time, "sleep", pauses.append)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: 0.01 * next(ticks))
    in_turns({"only": lambda: None}, 0)
    assert pauses == []
    in_turns({"one": lambda: None, "other": lambda: None}, 0)
    assert pauses == [PAUSE] * 2 * LEAST
