"""Several workers behind one queue of requests, and how the next one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final, Generic, TypeVar

from strata.errors import OptionError

T = TypeVar("T")
POLICIES: Final = ("least_loaded", "round_robin")


class WorkerPool(Generic[T]):
    """Equal workers: engines, models, devices. `policy` is round_robin, or least_loaded with ties in turn."""

    def __init__(self, workers: Sequence[T], *, policy: str = "least_loaded") -> None:
        if not workers:
            raise OptionError("workers: a pool of none does no work", code="O609")
        if policy not in POLICIES:
            raise OptionError(f"workers: the policy {policy!r} is not one of {', '.join(POLICIES)}", code="O609")
        self.workers, self.policy = tuple(workers), policy
        self._loads = [0] * len(workers)
        self._next = 0
        self._lock = Lock()

    @property
    def loads(self) -> tuple[int, ...]:
        """The load of each worker now."""
        with self._lock:
            return tuple(self._loads)

    @contextmanager
    def worker(self, weight: int = 1) -> Iterator[T]:
        """The worker for a request, which counts as `weight` of its load until the block ends."""
        at = self._take(weight)
        try:
            yield self.workers[at]
        finally:
            with self._lock:
                self._loads[at] -= weight

    def _take(self, weight: int) -> int:
        with self._lock:
            turn = [(self._next + i) % len(self.workers) for i in range(len(self.workers))]
            at = turn[0] if self.policy == "round_robin" else min(turn, key=lambda i: self._loads[i])
            self._next = (at + 1) % len(self.workers)
            self._loads[at] += weight
            return at
