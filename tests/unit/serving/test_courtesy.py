"""Short work of other threads goes first, and takes no more than a share of an engine's time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from strata.models import Decoder
from strata.serving import Engine, Server, Service, ask
from strata.serving.courtesy import MOST, SHARE, Courtesy


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self, courtesy: Courtesy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 0.0, [0.0]
        monkeypatch.setattr("strata.serving.courtesy.time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(courtesy._changed, "wait_for", self._wait)

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        self.waited.append(seconds)
        self.now += seconds
        return done()


def test_an_engine_waits_no_more_than_a_share_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    courtesy = Courtesy()
    clock = Clock(courtesy, monkeypatch)
    courtesy.wait(1.0)
    assert clock.waited == [0.0]  # there is nothing to wait for
    with courtesy.work(), courtesy.work():
        courtesy.wait(0.0)
        assert clock.waited[-1] == MOST  # what it has saved up, and no more
        for _ in range(100):
            courtesy.wait(0.001)
        assert clock.now == pytest.approx(MOST + 0.1 * SHARE)
    courtesy.wait(0.001)
    assert len(clock.waited) == 102


def test_it_goes_on_when_the_work_is_done() -> None:
    courtesy = Courtesy()
    courtesy.wait(1.0)
    courtesy.begin()
    timer = threading.Timer(0.001, courtesy.end)
    timer.start()
    courtesy.wait(0.0)
    timer.join()
    assert not courtesy._count


def test_requests_that_are_read_are_let_go_first(
    decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While small requests are read, and their answers written; nothing is counted when all is over."""
    service = Service(Engine(decoder()), name="tiny")
    counts: list[int] = []
    start = service.start

    def counted(*given: Any, **named: Any) -> Any:
        counts.append(service.courtesy._count)
        return start(*given, **named)

    monkeypatch.setattr(service, "start", counted)
    with Server(service, port=0) as server:
        for body in ({"prompt": "hello", "max_tokens": 2}, {"prompt": 3}, {"prompt": "x" * 40_000}):
            ask(server.url, "/v1/completions", body)
    assert counts == [1, 1, 0]
    assert service.courtesy._count == 0
    assert all(engine.courtesy is service.courtesy for engine in service.engines.values())
