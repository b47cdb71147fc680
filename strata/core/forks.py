"""What a forked child must reset: locks that threads held, and work that they had begun.

A child that waited for such a lock would wait for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
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


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # what Python's own modules do with theirs
    for owner, method in list(_forgetting.items()):
        method(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
