"""Modules that are imported by the first call that needs them, and less looking for garbage while much is made."""

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
_was_on = False
_makers = 0  # threads that make much
_thresholds: tuple[int, int, int] | None = None  # as they were before


def imported(name: str) -> ModuleType:
    """A module. What importing makes stays, so that looking for garbage in it, now or soon, is time lost."""
    if name in sys.modules:
        return import_module(name)  # which waits for another thread that is importing it
    _begin()
    try:
        return import_module(name)
    finally:
        _end()


def _begin() -> None:
    global _importing, _was_on
    with _lock:
        if _importing == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _importing += 1


def _end() -> None:
    """Put all objects among the oldest, which are looked at last: no object is touched for it."""
    global _importing
    with _lock:
        if hasattr(gc, "freeze") and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        _importing = max(0, _importing - 1)
        if _importing == 0 and _was_on:
            gc.enable()


@contextmanager
def making_much() -> Iterator[None]:
    """While many objects are made that stay for a while, garbage is looked for less often, and not in all of them."""
    global _makers, _thresholds
    with _lock:
        if _makers == 0 and gc.get_threshold()[0]:
            _thresholds = gc.get_threshold()
            gc.set_threshold(*(max(a, b) for a, b in zip(_thresholds, RARELY, strict=True)))
        _makers += 1
    try:
        yield
    finally:
        with _lock:
            _makers = max(0, _makers - 1)
            if _makers == 0:
                _restore()


def _restore() -> None:
    global _thresholds
    if _thresholds is not None:
        gc.set_threshold(*_thresholds)
    _thresholds = None


def _in_child() -> None:
    """In the child of a fork no other thread is importing or making anything."""
    global _importing, _lock, _makers
    _lock = threading.Lock()
    if _importing and _was_on:
        gc.enable()
    _importing = _makers = 0
    _restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
