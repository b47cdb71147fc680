"""Large requests take turns and leave time for others, by a clock that the test turns."""

from __future__ import annotations

import asyncio

import pytest

from strata.serving.http import pace
from strata.serving.http.pace import ACCEPTED, BYTES_PER_SECOND, LONGEST, PART, REFUSED, Pace


class Clock:
    """Time passes only where somebody sleeps, or works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(pace.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("accepted", "share"), [(True, ACCEPTED), (False, REFUSED)])
def test_a_turn_is_paid_for_before_the_next(monkeypatch: pytest.MonkeyPatch, accepted: bool, share: float) -> None:
    clock = Clock(monkeypatch)
    made = Pace()

    async def work(seconds: float) -> float:
        async with made.turn() as turn:
            begun = clock.now
            clock.now += seconds
            turn.seconds, turn.is_accepted = seconds, accepted
        return begun

    async def both() -> list[float]:
        return [await work(seconds) for seconds in (0.1, 100.0, 0.1, 0.1)]

    first, second, third, fourth = asyncio.run(both())
    assert first == 100.0  # nobody waits for the first one
    assert second - first == pytest.approx(0.1 / share)
    assert third - second == pytest.approx(100.0 + LONGEST)
    assert fourth - third == pytest.approx(0.1 / share)


def test_a_turn_that_fails_is_paid_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    made = Pace()

    async def fails() -> None:
        async with made.turn() as turn:
            turn.seconds = 0.1
            raise ValueError("not JSON")

    async def twice() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="not JSON"):
                await fails()

    asyncio.run(twice())
    assert clock.now == pytest.approx(100.0 + 0.1 * (1 / REFUSED - 1))


def test_bodies_come_no_faster_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    made = Pace()

    async def parts(count: int) -> None:
        for _ in range(count):
            await made.let_through(1 << 16, ACCEPTED)

    asyncio.run(parts((PART >> 16) - 1))
    assert clock.now == 100.0  # what is small is not held up
    asyncio.run(parts(64 * (PART >> 16) + 1))
    assert clock.now - 100.0 == pytest.approx(65 * PART / BYTES_PER_SECOND / ACCEPTED, rel=0.02)
