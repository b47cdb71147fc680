"""Worker processes for a large compile: one for each core, ended when it is done.

A process that runs a model has no other use for LLVM and its memory. The processes also work while this one writes the
next modules, instead of taking turns with it. Where none can be started, or one dies, the module is compiled in another
way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from strata.core import Target, new_lock

if TYPE_CHECKING:
    from strata.backends.llvm.jit.worker_process import Child

FEW = 4  # modules that are not worth a process
SOME = 16  # the same, where LLVM is in this process anyway


class Makers:
    """A pool of worker processes, each with one module at a time; a thread that finds all of them busy waits."""

    def __init__(self, count: int) -> None:
        from strata.backends.llvm.jit.worker_process import Child  # which not every process needs

        self._all = [Child()]
        with suppress(OSError):  # one is enough
            while len(self._all) < count:
                self._all.append(Child())
        self._free: SimpleQueue[Child] = SimpleQueue()
        for child in self._all:
            self._free.put(child)

    def object_code(self, text: str, target: Target, level: int) -> tuple[bool, bytes]:
        """The object file of a module, or False and why it is not well formed; Died where there is no answer."""
        child = self._free.get()
        try:
            return child.object_code(text, target, level)
        finally:
            self._free.put(child)

    def close(self) -> None:
        for child in self._all:
            child.kill()
        for child in self._all:
            child.close()


_lock = new_lock()
_open: list[Makers] = []  # one, while somebody compiles many modules
_users = 0


def current() -> Makers | None:
    """The pool of worker processes that runs now."""
    with suppress(IndexError):
        return _open[0]
    return None


@contextmanager
def many(count: int, cores: int) -> Iterator[None]:
    """Keeps worker processes while this many modules are compiled, if they are worth starting."""
    global _users
    is_loaded = "llvmlite.binding" in sys.modules
    if count < (SOME if is_loaded else FEW):
        yield
        return
    with _lock:
        _users += 1
        if not _open:
            with suppress(OSError, ValueError):
                _open.append(Makers(min(cores, count)))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            done = _open.pop() if _users == 0 and _open else None
        if done is not None:
            done.close()


def _forget() -> None:
    """In the child of a fork: the processes are the parent's."""
    global _users
    _users = 0
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
