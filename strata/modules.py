"""Modules that are imported by the first call that needs them."""

import gc
import os
import sys
import threading
from importlib import import_module
from types import ModuleType

_lock = threading.Lock()
_importing = 0  # threads that are
_was_on = False


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


def _in_child() -> None:
    """In the child of a fork no other thread is importing."""
    global _importing, _lock
    _lock = threading.Lock()
    if _importing and _was_on:
        gc.enable()
    _importing = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
