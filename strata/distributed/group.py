"""Collective operations over any transport: every member calls the same ones in the same order.

An array is cut into as many parts as there are members. Each member adds up one part of all members' arrays, in the
order of ranks, and sends the result to all: every element is summed once, the same way whoever is late, so that all
members have the same bits. They are those of a loop over the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Protocol, Self

import numpy as np

from strata.errors import OptionError, RunError

REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
}  # fmt: skip


class Transport(Protocol):
    """Carries bytes between the members of a group, whole and in order; `send` does not wait for the other side."""

    rank: int
    size: int

    def send(self, to: int, head: bytes, body: bytes) -> None:
        """Send a message to another member."""
        ...

    def receive(self, source: int) -> tuple[bytes, Any]:
        """The next message of another member: its head, and its body as a buffer."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Group:
    """One member, `rank`, of a group of `size` that compute together."""

    def __init__(self, transport: Transport) -> None:
        if not 0 <= transport.rank < transport.size:
            raise OptionError(f"group: there is no rank {transport.rank} among {transport.size}", code="O630")
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._calls = 0

    def all_reduce(self, array: Any, reduction: str = "sum") -> np.ndarray:
        """The sum of all members' arrays, or another reduction of them: mean, max, min, prod. All get the same bits."""
        given = _checked(array)
        whole = np.concatenate(self._gathered("all_reduce", self._reduced("all_reduce", given, reduction)))
        return whole.reshape(given.shape)

    def reduce_scatter(self, array: Any, reduction: str = "sum") -> np.ndarray:
        """This member's part of the reduction: rows `rank`·n to (`rank` + 1)·n of size·n."""
        given = _checked(array)
        if given.ndim == 0 or given.shape[0] % self.size:
            raise OptionError(
                f"reduce_scatter: {list(given.shape)} has no rows for {self.size} members alike", code="O631"
            )
        mine = self._reduced("reduce_scatter", given, reduction)
        return mine.reshape(given.shape[0] // self.size, *given.shape[1:])

    def all_gather(self, array: Any) -> np.ndarray:
        """All members' arrays concatenated by rank; first sizes may differ."""
        given = np.atleast_1d(_checked(array))
        parts = self._gathered("all_gather", given)
        if len({(p.dtype, p.shape[1:]) for p in parts}) > 1:
            kinds = "; ".join(f"rank {i}: {p.dtype}{list(p.shape)}" for i, p in enumerate(parts))
            raise RunError(f"all_gather: the arrays do not go together: {kinds}", code="X610")
        return np.concatenate(parts)

    def broadcast(self, array: Any, root: int = 0) -> np.ndarray:
        """The array of one member, for all; what the others give does not matter."""
        if not 0 <= root < self.size:
            raise OptionError(f"broadcast: there is no rank {root} among {self.size}", code="O630")
        given = _checked(array) if self.rank == root else np.empty(0)
        self._calls += 1
        if self.rank == root:
            for to in self._others:
                self._send(to, "broadcast", given)
            return given.copy()
        return self._receive(root, "broadcast")

    def barrier(self) -> None:
        """Wait until all members are here."""
        self._gathered("barrier", np.empty(0))

    def close(self) -> None:
        """Leave the group."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------------- parts

    @property
    def _others(self) -> list[int]:
        """The next member first, so that not all talk to one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _reduced(self, name: str, given: np.ndarray, reduction: str) -> np.ndarray:
        """This member's part of the reduction, flat."""
        if reduction not in REDUCTIONS:
            raise OptionError(f"{name}: {reduction!r} is not one of {', '.join(REDUCTIONS)}", code="O631")
        if given.dtype.kind not in "fciub" or (reduction == "mean" and given.dtype.kind not in "fc"):
            raise OptionError(f"{name}: there is no {reduction} of {given.dtype}", code="O631")
        flat = given.reshape(-1)
        ends = [flat.size * i // self.size for i in range(self.size + 1)]
        self._calls += 1
        note = f"{name} {reduction} of {given.dtype}{list(given.shape)}"
        for to in self._others:
            self._send(to, note, flat[ends[to] : ends[to + 1]])
        parts = {self.rank: flat[ends[self.rank] : ends[self.rank + 1]]}
        for source in self._others:
            parts[source] = self._receive(source, note)
        combine = REDUCTIONS[reduction]
        total = parts[0].copy()
        for rank in range(1, self.size):
            combine(total, parts[rank], out=total)
        if reduction == "mean":
            total /= self.size
        return total

    def _gathered(self, name: str, part: np.ndarray) -> list[np.ndarray]:
        """The parts of all members, by rank."""
        self._calls += 1
        for to in self._others:
            self._send(to, name, part)
        found = {self.rank: part} | {source: self._receive(source, name) for source in self._others}
        return [found[rank] for rank in range(self.size)]

    def _send(self, to: int, note: str, array: np.ndarray) -> None:
        kind = array.dtype.name if array.dtype.kind == "V" else array.dtype.str  # bf16 and the like have no letter
        head = json.dumps([self._calls, note, kind, array.shape]).encode()
        self._transport.send(to, head, array.tobytes())  # a copy: the caller may write to its array afterwards

    def _receive(self, source: int, note: str) -> np.ndarray:
        head, body = self._transport.receive(source)
        calls, other, dtype, shape = json.loads(head)
        if (calls, other) != (self._calls, note):
            raise RunError(
                f"rank {source} is in its call {calls}, {other}; rank {self.rank} in its call {self._calls}, {note}",
                code="X610",
            )
        return np.frombuffer(body, np.dtype(dtype)).reshape(shape).copy()


def _checked(array: Any) -> np.ndarray:
    given = np.ascontiguousarray(array)
    if given.dtype.hasobject:
        raise OptionError(f"group: an array of {given.dtype} cannot be sent", code="O631")
    return given.reshape(np.shape(array))
