"""How fast the machine is just now: bounds in seconds are written for one machine, and hold on slower and busy ones."""

from __future__ import annotations

import time

REFERENCE = (
    0.004  # seconds of a processor that `_work` takes where the bounds were written (Zen 4, nothing else running)
)


def slowness() -> float:
    """How many times as long as there a piece of Python takes here, at least 1; the least of several tries."""
    best = float("inf")
    for _ in range(7):
        start = time.process_time()
        _work()
        best = min(best, time.process_time() - start)
    return max(1.0, best / REFERENCE)


def _work() -> dict[tuple[int, str], int]:
    """Calls, tuples, texts and dicts: what compiling is made of."""
    table: dict[tuple[int, str], int] = {}
    for i in range(20_000):
        key = (i % 97, str(i % 13))
        table[key] = table.get(key, 0) + len(key)
    return table
