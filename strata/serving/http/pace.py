"""Pacing of large requests: one is read at a time, and other requests have their turn before the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

ACCEPTED: Final = 0.25  # of the time, for reading requests that are answered
REFUSED: Final = 0.04  # for those that bring nothing
LONGEST: Final = 10.0  # seconds of a pause
BYTES_PER_SECOND: Final = 400e6  # that the event loop moves if it does nothing else
PART: Final = 4 << 20  # bytes that are let through before the loop looks how long to wait


@dataclass
class Turn:
    """What a request took, told by the thread that read it."""

    seconds: float = 0.0
    is_accepted: bool = False


class Pace:
    """Turns of large requests. What one has taken decides how long the next one waits."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._next = 0.0  # when the next one may begin
        self._bytes = 0
        self._moved = 0.0  # when the bytes that came are paid for

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait for a turn, and say in it what it took."""
        async with self._lock:
            await asyncio.sleep(max(self._next - time.monotonic(), 0))
            taken = Turn()
            try:
                yield taken
            finally:
                share = ACCEPTED if taken.is_accepted else REFUSED
                self._next = time.monotonic() + min(taken.seconds * (1 / share - 1), LONGEST)

    async def let_through(self, size: int, share: float) -> None:
        """Wait where bodies come faster than the event loop has time for them."""
        self._bytes += size
        if self._bytes < PART:
            return
        now = time.monotonic()
        self._moved = max(self._moved, now) + self._bytes / BYTES_PER_SECOND / share
        self._bytes = 0
        await asyncio.sleep(self._moved - now)
