"""A worker process: compiles modules to object files, one after the other.

LLVM takes 90 MB of memory and more, and ends its process where it cannot select an instruction: in a process of its
own it does neither to the one that runs a model.

Loops are written with the addresses that they need: LLVM's search for better ones (loop strength reduction) takes a
third of its time and finds none that are faster. It can only be left out of a whole process, which may have other
users of LLVM where it is not one of these.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from strata.core import Target

START_SECONDS = 20  # until a process that says nothing is taken for something else
_PROGRAM = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path.insert(0, sys.argv[1])
import llvmlite.binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.initialize_native_asmparser()
source, sink = sys.stdin.buffer, sys.stdout.buffer
sink.write(b"ready\\n")
sink.flush()
machines = {}
while line := source.readline():
    number, triple, cpu, features, level, length = json.loads(line)
    text = source.read(length).decode()
    key = triple, cpu, features, level
    context = llvm.create_context()
    try:
        if key not in machines:
            machines[key] = llvm.Target.from_triple(triple).create_target_machine(
                cpu=cpu, features=features, opt=level, reloc="pic", codemodel="small", jit=False
            )
        module = llvm.parse_assembly(text, context)
        module.verify()
        # loop strength reduction takes a third of the time, and only inner loops of level 3 gain by it
        llvm.set_option("", "-disable-lsr=" + ("false" if level > 2 else "true"))
        made, is_good = machines[key].emit_object(module), 1
        module.close()
    except RuntimeError as error:
        made, is_good = str(error).encode(), 0
    sink.write(json.dumps([number, is_good, len(made)]).encode() + b"\\n" + made)
    sink.flush()
"""


class Died(Exception):  # noqa: N818 - not an error: the module is compiled elsewhere
    """A process ended before it answered; or it was none of ours, where it never said that it was ready."""

    def __init__(self, was_ready: bool, said: bytes = b"") -> None:
        super().__init__(was_ready)
        self.was_ready, self.said = was_ready, said


class Child:
    """One process; it belongs to one thread at a time. OSError where none can be started."""

    def __init__(self, *, is_heard: bool = False) -> None:
        """What LLVM says as it dies is kept where somebody wants to hear it."""
        if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself again
            raise FileNotFoundError("there is no Python to start")
        import llvmlite  # which a process that runs bundles does without

        self._words = tempfile.TemporaryFile() if is_heard else None  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(llvmlite.__file__).parents[1])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words or subprocess.DEVNULL,
        )  # fmt: skip
        self._is_ready = self._is_gone = False
        self._asked = 0

    def object_code(self, text: str, target: Target, level: int) -> tuple[bool, bytes]:
        """The object file of a module, or False and why it is not well formed."""
        if self._is_gone:
            raise Died(self._is_ready)
        is_done = False
        try:
            if not self._is_ready:
                self._is_ready = self._is_one_of_ours()
            made = self._answer(text.encode(), target, level) if self._is_ready else None
            is_done = made is not None
        except (OSError, ValueError, TypeError):
            made = None
        finally:
            if not is_done:
                self.kill()  # what it would say next answers nobody's question
        if made is None:
            raise Died(self._is_ready, self._said())
        return made

    def _is_one_of_ours(self) -> bool:
        """Whether it says that it is ready: where Python is part of another program, that may have been started."""
        limit = threading.Timer(START_SECONDS, self.process.kill)
        limit.daemon = True
        limit.start()
        try:
            return self.process.stdout.readline() == b"ready\n"  # type: ignore[union-attr]
        finally:
            limit.cancel()

    def _answer(self, data: bytes, target: Target, level: int) -> tuple[bool, bytes] | None:
        source, sink = self.process.stdin, self.process.stdout
        assert source is not None
        assert sink is not None
        self._asked += 1
        head = [self._asked, target.triple, target.cpu, target.feature_text, level, len(data)]
        source.write(json.dumps(head).encode() + b"\n" + data)
        source.flush()
        number, is_good, length = json.loads(sink.readline())
        made = sink.read(length)
        return (bool(is_good), made) if number == self._asked and len(made) == length else None

    def _said(self) -> bytes:
        if self._words is None:
            return b""
        self.process.wait()
        self._words.seek(0)
        return self._words.read()

    def kill(self) -> None:
        """It holds nothing that has to be finished; whoever writes to it later learns that it is gone."""
        self._is_gone = True
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def close(self) -> None:
        self.kill()
        self.process.wait()  # so that no zombie is left
        if self._words is not None:
            self._words.close()
