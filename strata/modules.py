"""Lazy imports, and fewer garbage collections while much is allocated."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

RARELY = (5000, 20, 1 << 20)  # thresholds of the three generations

_lock = threading.Lock()
_importing = 0  # threads that are
_makers = 0  # threads that make much
_theirs: tuple[int, int, int] | None = None  # thresholds of the application, while ours are set
_ours: tuple[int, int, int] | None = None


def imported(name: str) -> ModuleType:
    """A module. What importing makes stays, so that looking for garbage in it, now or soon, is time lost."""
    if name in sys.modules:
        return import_module(name)  # which waits for another thread that is importing it
    _count(importing=1)
    try:
        return import_module(name)
    finally:
        _age()
        _count(importing=-1)


def _age() -> None:
    """Put all objects among the oldest, which are looked at last: no object is touched for it."""
    with _lock:
        if hasattr(gc, "freeze") and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()


@contextmanager
def making_much() -> Iterator[None]:
    """While many objects are made that stay for a while, garbage is looked for less often, and not in all of them."""
    _count(makers=1)
    try:
        yield
    finally:
        _count(makers=-1)


def _count(*, importing: int = 0, makers: int = 0) -> None:
    """Threads that come and go, and the thresholds that follow: none while one imports, rare ones while one makes."""
    global _importing, _makers
    with _lock:
        _importing, _makers = max(0, _importing + importing), max(0, _makers + makers)
        _set_thresholds()


def _set_thresholds() -> None:
    """What the application sets meanwhile is what comes back."""
    global _ours, _theirs
    now = gc.get_threshold()
    if _theirs is None or now != _ours:
        _theirs = now
    wanted = _theirs
    if _theirs[0] and _importing:  # 0: the collector is off, and stays off
        wanted = (0, *_theirs[1:])
    elif _theirs[0] and _makers:
        first, second, third = (max(a, b) for a, b in zip(_theirs, RARELY, strict=True))
        wanted = (first, second, third)
    if wanted != now:
        gc.set_threshold(*wanted)
    _ours = gc.get_threshold()
    if not _importing and not _makers:
        _ours = _theirs = None


def _in_child() -> None:
    """In the child of a fork no other thread is importing or making anything."""
    global _importing, _lock, _makers
    _lock = threading.Lock()
    if _theirs is not None:
        _importing = _makers = 0
        _set_thresholds()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
