"""Processes that make machine code while many modules are compiled: one for each core, and gone when all is made.

LLVM takes 90 MB of memory and more, which a process that runs a model has no other use for. The processes also work
while this one writes the next modules, instead of taking turns with it. Where none can be started, or one dies, the
module is compiled in another way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import llvmlite

from strata.core import Target, new_lock

if TYPE_CHECKING:
    from subprocess import Popen

FEW = 4  # modules that are not worth a process
SOME = 16  # the same, where LLVM is in this process anyway
_CHILD = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path.insert(0, sys.argv[1])
import llvmlite.binding as llvm
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
llvm.initialize_native_asmparser()
source, sink = sys.stdin.buffer, sys.stdout.buffer
machines = {}
while line := source.readline():
    triple, cpu, features, level, length = json.loads(line)
    text = source.read(length).decode()
    key = triple, cpu, features, level
    if key not in machines:
        machines[key] = llvm.Target.from_triple(triple).create_target_machine(
            cpu=cpu, features=features, opt=level, reloc="pic", codemodel="small", jit=False
        )
    context = llvm.create_context()
    try:
        module = llvm.parse_assembly(text, context)
        module.verify()
        made, is_good = machines[key].emit_object(module), 1
        module.close()
    except RuntimeError as error:
        made, is_good = str(error).encode(), 0
    sink.write(json.dumps([is_good, len(made)]).encode() + b"\\n" + made)
    sink.flush()
"""


class Died(Exception):  # noqa: N818 - not an error: the module is compiled elsewhere
    """A process ended before it answered."""


class Makers:
    """Some processes, each with one module at a time; a thread that finds all of them busy waits."""

    def __init__(self, count: int) -> None:
        import subprocess  # which not every process needs

        folder = str(Path(llvmlite.__file__).parents[1])
        self._all = [
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CHILD, folder],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
            for _ in range(count)
        ]  # fmt: skip
        self._free: SimpleQueue[Any] = SimpleQueue()
        for process in self._all:
            self._free.put(process)

    def object_code(self, text: str, target: Target, level: int) -> tuple[bool, bytes]:
        """The object file of a module, or False and why it is not well formed."""
        process = self._free.get()
        is_done = False
        try:
            data = text.encode()
            head = json.dumps([target.triple, target.cpu, target.feature_text, level, len(data)])
            process.stdin.write(head.encode() + b"\n" + data)
            process.stdin.flush()
            is_good, length = json.loads(process.stdout.readline())
            made = process.stdout.read(length)
            is_done = len(made) == length
        except (OSError, ValueError):
            raise Died from None
        finally:
            if not is_done:
                _end(process)  # what it would say next answers nobody's question
            self._free.put(process)
        if not is_done:
            raise Died
        return bool(is_good), made

    def close(self) -> None:
        for process in self._all:
            _end(process)
        for process in self._all:
            process.wait()


def _end(process: Popen[bytes]) -> None:
    """It holds nothing that has to be finished; whoever writes to it later learns that it is gone."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


_lock = new_lock()
_open: list[Makers] = []  # one, while somebody compiles many modules
_users = 0


def current() -> Makers | None:
    """The processes that are there now."""
    with suppress(IndexError):
        return _open[0]
    return None


@contextmanager
def many(count: int, cores: int) -> Iterator[None]:
    """While so many modules are compiled, processes are there for them if they are worth it."""
    global _users
    is_loaded = "llvmlite.binding" in sys.modules
    if count < (SOME if is_loaded else FEW) or not sys.executable:
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
