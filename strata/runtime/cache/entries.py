"""Bounded make-once caches: each entry is made once, however many threads ask for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from strata.core import call_in_children, here, new_lock
from strata.errors import OptionError

T = TypeVar("T")
POLICIES = ("lru", "fifo")


@dataclass(slots=True)
class Counters:
    """What a cache did so far."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class Entries(Generic[T]):
    """At most `capacity` entries; then the least recently used one goes (lru), or the first made (fifo)."""

    def __init__(self, capacity: int | None, policy: str = "lru") -> None:
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
            raise OptionError(
                f"the capacity of a cache is a whole number of at least 1, got {capacity!r}", code="O406", place=here()
            )
        if policy not in POLICIES:
            raise OptionError(
                f"the policy of a cache is one of {', '.join(POLICIES)}, got {policy!r}", code="O406", place=here()
            )
        self.capacity, self.policy = capacity, policy
        self.counters = Counters()
        self._made: OrderedDict[Hashable, T] = OrderedDict()
        self._making: dict[Hashable, Future[T]] = {}
        self._lock = new_lock()
        call_in_children(self._forget)

    def _forget(self) -> None:
        """In a forked child no other thread is left that could finish."""
        self._making.clear()

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """The entry, made by the first caller that asks for it; a failure reaches all who waited, and is not kept."""
        with self._lock:
            if key in self._made:
                self.counters.hits += 1
                if self.policy == "lru":
                    self._made.move_to_end(key)
                return self._made[key]
            future = self._making.get(key)
            is_maker = future is None
            if future is None:
                self.counters.misses += 1
                future = self._making[key] = Future()
        if not is_maker:
            return future.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            future.set_exception(error)
            raise
        self.put(key, value)
        with self._lock:
            del self._making[key]
        future.set_result(value)
        return value

    def get(self, key: Hashable) -> T | None:
        """The entry, or None; counts as a use of it."""
        with self._lock:
            if key not in self._made:
                return None
            if self.policy == "lru":
                self._made.move_to_end(key)
            return self._made[key]

    def put(self, key: Hashable, value: T) -> None:
        with self._lock:
            self._made[key] = value
            while self.capacity is not None and len(self._made) > self.capacity:
                self._made.popitem(last=False)
                self.counters.evictions += 1

    def known(self) -> list[Hashable]:
        """The keys, the next to go first."""
        with self._lock:
            return list(self._made)

    def clear(self) -> None:
        with self._lock:
            self._made.clear()

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._made

    def __len__(self) -> int:
        with self._lock:
            return len(self._made)
