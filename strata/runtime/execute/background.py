"""Threads for asynchronous runs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None


def background() -> ThreadPoolExecutor:
    """The threads that all compiled graphs share."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(4, "strata-submit")
    return _pool


def _forget_pool() -> None:
    """A forked child has none of the threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
