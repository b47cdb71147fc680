"""Fair timing of contenders in one process: bursts in turn, each after a pause.

Threads of the contender before may still spin while they wait for work, and would take a core; after the pause they
sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

PAUSE = 0.25  # seconds: OpenMP's threads go to sleep after 0.2 without work
BURST = 0.1  # seconds of calls before the next contender has its turn
LEAST = 3  # calls in a burst
MOST = 10_000  # calls in all


def in_turns(runs: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, by contender, until each has had its time, three bursts at least."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    turn = 0
    while turn < LEAST or any(sum(t) < seconds and len(t) < MOST for t in times.values()):
        turn += 1
        for name, run in runs.items():
            if len(runs) > 1:
                time.sleep(PAUSE)
            run()  # wakes its threads up
            times[name] += _burst(run)
    return times


def _burst(run: Callable[[], Any]) -> list[float]:
    times: list[float] = []
    while len(times) < LEAST or sum(times) < BURST:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
