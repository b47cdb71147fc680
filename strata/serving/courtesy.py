"""An engine pauses briefly between steps so that other threads can read requests and write answers.

All threads share one interpreter lock, and a busy engine holds it most of the time. A request passes through several
threads, and would wait for the lock in each of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Final

SHARE: Final = 0.25  # of its own time that an engine waits at most
MOST: Final = 0.01  # seconds that it waits at once


class Courtesy:
    """Counts short work, and lets an engine wait for it: no longer than a share of the time that its steps took."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._count = 0
        self._credit = 0.0  # seconds that the engine may wait

    def begin(self) -> None:
        """Short work has come."""
        with self._changed:
            self._count += 1

    def end(self) -> None:
        """As much of it is done."""
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify_all()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Short work, inside of it."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def wait(self, taken: float) -> None:
        """Called behind a step of so many seconds: wait until no short work is left, or long enough."""
        self._credit = min(self._credit + taken * SHARE, MOST)
        if not self._count:
            return
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._count, self._credit)
        self._credit -= min(time.perf_counter() - start, self._credit)
