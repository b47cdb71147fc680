"""Scheduling requests by adapter: those that want the same one run together, so that switches are rare."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

from strata.errors import OptionError, UnknownNameError

T = TypeVar("T")


class AdapterQueue(Generic[T]):
    """A first-in-first-out queue; a batch is the requests at its head that want one adapter, at most `limit`."""

    def __init__(self, limit: int, known: Collection[str] | None = None) -> None:
        if limit < 1:
            raise OptionError(f"adapters: a batch of {limit} requests is none", code="O604")
        self.limit = limit
        self._known = known
        self._waiting: deque[tuple[str | None, T]] = deque()
        self.active: str | None = None  # None is the model itself
        self.swaps = 0  # how often another adapter became active

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T, adapter: str | None = None) -> None:
        """A request for an adapter, or for the model as it is."""
        self.check(adapter)
        self._waiting.append((adapter, item))

    def check(self, adapter: str | None) -> None:
        """Refuse an adapter that is not known."""
        if adapter is not None and self._known is not None and adapter not in self._known:
            known = ", ".join(sorted(self._known)) or "none"
            raise UnknownNameError(f"there is no adapter {adapter!r}; there are {known}", code="N600")

    def head(self) -> tuple[str | None, T] | None:
        """The next request and its adapter."""
        return self._waiting[0] if self._waiting else None

    def pop(self) -> T:
        """Serve the head of the queue; its adapter becomes the active one."""
        adapter, item = self._waiting.popleft()
        if adapter != self.active:
            self.active, self.swaps = adapter, self.swaps + 1
        return item

    def batch(self) -> tuple[str | None, list[T]]:
        """The next batch: requests at the head that want one adapter."""
        found: list[T] = []
        first = self.head()
        if first is None:
            return self.active, found
        while len(found) < self.limit and self._waiting and self._waiting[0][0] == first[0]:
            found.append(self.pop())
        return first[0], found

    def drop(self, item: T) -> bool:
        """Take a request out of the queue; False where it is not waiting."""
        for at, (_, waiting) in enumerate(self._waiting):
            if waiting is item:
                del self._waiting[at]
                return True
        return False
