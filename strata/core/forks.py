"""What a forked child must reset: locks that threads held, and work that they had begun.

A child that waited for such a lock would wait for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_forgetting: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def new_lock() -> threading.Lock:
    """A lock that nobody holds in a forked child."""
    made = threading.Lock()
    _locks.add(made)
    return made


def new_rlock() -> Any:
    """The same, for a thread that may take it again."""
    made = threading.RLock()
    _locks.add(made)
    return made


def call_in_children(method: Callable[[], None]) -> None:
    """Have forked children call an object's method as long as the object lives; one of each object."""
    owner: Any = method.__self__  # type: ignore[attr-defined]
    _forgetting[owner] = method.__func__  # type: ignore[attr-defined]


class SharedThreads:
    """Threads that start when there is work for them, and again in a forked child, which has none of them."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self._pool: ThreadPoolExecutor | None = None
        call_in_children(self._forget)

    def submit(self, work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        """Have a thread call a function."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, self.name)
        return self._pool.submit(work, *args, **named)

    def _forget(self) -> None:
        self._pool = None


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # what Python's own modules do with theirs
    for owner, method in list(_forgetting.items()):
        method(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
