"""Members as threads of one process: messages are passed by reference through queues."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextvars import copy_context
from threading import Thread
from typing import Any, TypeVar

from strata.distributed.group import Group
from strata.errors import OptionError, RunError

T = TypeVar("T")


class ThreadTransport:
    """One member's ends of the queues between all pairs."""

    def __init__(self, rank: int, lines: Sequence[Sequence[queue.SimpleQueue[Any]]], *, timeout: float) -> None:
        self.rank, self.size = rank, len(lines)
        self._lines, self._timeout = lines, timeout

    def send(self, to: int, head: bytes, body: bytes) -> None:
        self._lines[self.rank][to].put((head, body))

    def receive(self, source: int) -> tuple[bytes, Any]:
        try:
            found: tuple[bytes, Any] = self._lines[source][self.rank].get(timeout=self._timeout)
        except queue.Empty:
            raise RunError(f"rank {self.rank} waited {self._timeout:g} s for rank {source}", code="X611") from None
        return found

    def close(self) -> None:
        """Nothing to close."""


def local_groups(size: int, *, timeout: float = 60.0) -> list[Group]:
    """A group of threads: one view of it for each."""
    if size < 1:
        raise OptionError(f"group: the number of members is at least 1, got {size}", code="O630")
    lines = [[queue.SimpleQueue[Any]() for _ in range(size)] for _ in range(size)]
    return [Group(ThreadTransport(rank, lines, timeout=timeout)) for rank in range(size)]


def run_members(size: int, work: Callable[[Group], T], *, timeout: float = 60.0) -> list[T]:
    """Run work(group) in a thread for each member; results by rank. An error of one is raised at the end."""
    found: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def one(group: Group) -> None:
        try:
            found[group.rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - it is raised where all are awaited
            errors[group.rank] = error

    groups = local_groups(size, timeout=timeout)
    threads = [Thread(target=copy_context().run, args=(one, group), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        waited = [e for e in errors.values() if isinstance(e, RunError) and e.code == "X611"]
        raise next((e for e in errors.values() if e not in waited), next(iter(errors.values())))  # the cause first
    return [found[rank] for rank in range(size)]
