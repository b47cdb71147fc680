"""The queue of requests: fair between clients, by priority, and by adapter so that switches are rare."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from strata.errors import OptionError, UnknownNameError

T = TypeVar("T")
MOST_CLIENTS: Final = 4096  # whose shares are remembered while they wait for nothing


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    item: T
    adapter: str | None
    cost: int


class AdapterQueue(Generic[T]):
    """A queue of requests; a batch is the requests at its head that want one adapter, at most `limit`.

    A lower `priority` comes first. Among equals, clients take turns: next is the one that was given least so far, in
    units of cost. The requests of one client stay in their order.
    """

    def __init__(self, limit: int, known: Collection[str] | None = None) -> None:
        if limit < 1:
            raise OptionError(f"adapters: a batch of {limit} requests is none", code="O604")
        self.limit = limit
        self._known = known
        self._waiting: dict[int, dict[str, deque[_Waiting[T]]]] = {}  # by priority, then by client
        self._given: dict[str, float] = {}
        self._count = 0
        self.active: str | None = None  # None is the model itself
        self.swaps = 0  # how often another adapter became active

    def __len__(self) -> int:
        return self._count

    def put(
        self, item: T, adapter: str | None = None, *, client: str = "", priority: int = 0, cost: int = 1
    ) -> None:  # fmt: skip
        """A request for an adapter, or for the model as it is."""
        self.check(adapter)
        if not self.count_of(client):  # who was away is next, and gets no more than those who stayed
            least = min((self._given.get(c, 0.0) for c in self._clients()), default=0.0)
            self._given[client] = max(self._given.get(client, 0.0), least - 1)
        self._waiting.setdefault(priority, {}).setdefault(client, deque()).append(_Waiting(item, adapter, cost))
        self._count += 1

    def check(self, adapter: str | None) -> None:
        """Refuse an adapter that is not known."""
        if adapter is not None and self._known is not None and adapter not in self._known:
            known = ", ".join(sorted(self._known)) or "none"
            raise UnknownNameError(f"there is no adapter {adapter!r}; known: {known}", code="N600")

    def head(self) -> tuple[str | None, T] | None:
        """The next request and its adapter."""
        found = self._first()
        return None if found is None else (found[2][0].adapter, found[2][0].item)

    def pop(self) -> T:
        """Serve the head of the queue; its adapter becomes the active one."""
        found = self._first()
        if found is None:
            raise OptionError("adapters: nothing waits", code="O604")
        priority, client, line = found
        first = line[0]
        self._remove(priority, client, 0)
        self.charge(client, first.cost)
        if first.adapter != self.active:
            self.active, self.swaps = first.adapter, self.swaps + 1
        return first.item

    def batch(self) -> tuple[str | None, list[T]]:
        """The next batch: requests at the head that want one adapter."""
        found: list[T] = []
        first = self.head()
        if first is None:
            return self.active, found
        while len(found) < self.limit and (head := self.head()) is not None and head[0] == first[0]:
            found.append(self.pop())
        return first[0], found

    def drop(self, item: T) -> bool:
        """Take a request out of the queue; False where it is not waiting."""
        for priority, clients in self._waiting.items():
            for client, line in clients.items():
                for at, waiting in enumerate(line):
                    if waiting.item is item:
                        self._remove(priority, client, at)
                        return True
        return False

    # ---------------------------------------------------------------------------------------------------- fair shares

    def charge(self, client: str, cost: float) -> None:
        """Count what a client was given; the next turn goes to others."""
        self._given[client] = self._given.get(client, 0.0) + cost
        if len(self._given) > MOST_CLIENTS:
            here = set(self._clients())
            self._given = {c: given for c, given in self._given.items() if c in here}

    def count_of(self, client: str) -> int:
        """How many requests of a client wait."""
        return sum(len(clients[client]) for clients in self._waiting.values() if client in clients)

    def newest_of_largest(self) -> tuple[str, T] | None:
        """Of the client with the most requests here, the one that came last, and its client."""
        counts = {client: self.count_of(client) for client in self._clients()}
        if not counts:
            return None
        client = max(counts, key=lambda c: counts[c])
        last = max(p for p, clients in self._waiting.items() if client in clients)
        return client, self._waiting[last][client][-1].item

    def _clients(self) -> list[str]:
        return list(dict.fromkeys(client for clients in self._waiting.values() for client in clients))

    def _first(self) -> tuple[int, str, deque[_Waiting[T]]] | None:
        if not self._waiting:
            return None
        priority = min(self._waiting)
        clients = self._waiting[priority]
        client = min(clients, key=lambda c: self._given.get(c, 0.0))
        return priority, client, clients[client]

    def _remove(self, priority: int, client: str, at: int) -> None:
        line = self._waiting[priority][client]
        del line[at]
        self._count -= 1
        if not line:
            del self._waiting[priority][client]
        if not self._waiting[priority]:
            del self._waiting[priority]
