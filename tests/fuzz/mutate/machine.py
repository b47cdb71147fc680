"""The machine: worker processes that try mutants, a watchdog over them, and what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]
SECONDS = 5.0  # of a core that a mutant may take: nearly all take hundredths, and load does not count
WAITING = (
    120.0  # seconds of a clock in which it uses no core at all: under load everyone gets a little, who blocks none
)
STARTING = 300.0  # seconds for a worker to be ready
PIECE = 2000  # mutants of one worker process


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that a mutant did and nothing may do."""

    form: str
    seed: int
    number: int
    what: str

    def __str__(self) -> str:
        again = f"--format {self.form} --seed {self.seed} --number {self.number}"
        return f"{self.form} {self.number}: {self.what}\n    repeat with {again}"


@dataclass
class Found:
    """What became of the mutants of a run."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)  # of a core, by format
    violations: list[Violation] = field(default_factory=list)


@dataclass
class _Piece:
    form: str
    first: int
    count: int


class Machine:
    """Runs pieces of work in at most `jobs` processes at a time."""

    def __init__(
        self, seed: int, jobs: int, told: Callable[[Violation], None] = lambda _: None, seconds: float = SECONDS
    ) -> None:
        """`seconds` of a core are what a mutant may take."""
        self.seed, self.jobs, self.told, self.seconds = seed, jobs, told, seconds
        self.found = Found()
        self._lock = threading.Lock()
        self._left: list[_Piece] = []
        self._failure: RuntimeError | None = None  # of a worker that could not start

    def run(self, counts: Sequence[tuple[str, int, int]]) -> Found:
        """Try mutants of formats: (name, first number, count)."""
        for name, first, count in counts:
            self._left += [
                _Piece(name, at, min(PIECE, first + count - at)) for at in range(first, first + count, PIECE)
            ]
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(self.jobs, len(self._left)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self.found

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._left or self._failure is not None:
                    return
                piece = self._left.pop(0)
            try:
                while piece.count > 0:
                    done = self._process(piece)
                    piece = _Piece(piece.form, piece.first + done, piece.count - done)
            except RuntimeError as error:
                self._failure = error

    def _process(self, piece: _Piece) -> int:
        """One worker, until it has done its piece or is lost; how many mutants are behind it."""
        command = [sys.executable, "-m", "tests.fuzz.mutate.worker", piece.form]
        command += [str(n) for n in (self.seed, piece.first, piece.count)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process:
                watch = _Watch(process, self.seconds)
                assert process.stdout is not None
                done = self._listen(piece, process.stdout, watch)
                watch.stop()
            if done == piece.count:
                return done
            errors.seek(0)
            tail = errors.read()[-4000:]
        if not watch.is_ready:
            raise RuntimeError(f"the worker for {piece.form} did not start:\n{tail}")
        what = f"hung: {watch.reason}" if watch.reason else f"ended the process with {_ending(process.returncode)}"
        self._add(piece.form, piece.first + done, "hang" if watch.reason else "crash", 0.0, f"{what}{_where(tail)}")
        return done + 1

    def _listen(self, piece: _Piece, lines: IO[str], watch: _Watch) -> int:
        done = 0
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            watch.heard(told)
            if "outcome" in told:
                wrong, seconds = told["wrong"], told["cpu"]
                if not wrong and seconds > self.seconds:
                    wrong = f"took {seconds:.1f} seconds of a core"
                self._add(piece.form, told["number"], told["outcome"], seconds, wrong)
                done += 1
        return done

    def _add(self, form: str, number: int, outcome: str, seconds: float, wrong: str) -> None:
        with self._lock:
            self.found.outcomes.setdefault(form, Counter())[outcome] += 1
            self.found.seconds[form] += seconds  # type: ignore[assignment]  # a Counter of floats
            if wrong:
                made = Violation(form, self.seed, number, wrong)
                self.found.violations.append(made)
                self.told(made)


class _Watch:
    """Ends a worker whose mutant takes too long, with a signal that makes it say where it is."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.process, self.seconds = process, seconds
        self.reason = ""
        self.is_ready = False
        self._started: float | None = None  # seconds of a core at a mutant's start
        self._moved = (0.0, 0.0)  # seconds of a core when they last grew, and of a clock
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def heard(self, told: dict[str, Any]) -> None:
        self.is_ready = True
        self._moved = (told["cpu"], time.monotonic())
        self._started = told["cpu"] if "at" in told else None

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.25):
            reason = self._late()
            if reason:
                self.reason = reason
                self.process.send_signal(signal.SIGABRT)
                if not self._ended.wait(20):
                    self.process.kill()
                return

    def _late(self) -> str:
        started = self._started
        if started is None:
            late = not self.is_ready and time.monotonic() - self._since > STARTING
            return f"not ready after {STARTING:.0f} s" if late else ""
        used = _core_seconds(self.process.pid)
        if used is not None and used - started > self.seconds:
            return f"more than {self.seconds:.0f} seconds of a core"
        if used is not None and used > self._moved[0]:
            self._moved = (used, time.monotonic())
        waited = time.monotonic() - self._moved[1]
        return f"idle for {waited:.0f} seconds" if waited > WAITING else ""


def _core_seconds(pid: int) -> float | None:
    """What a process has used of a core; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _where(tail: str) -> str:
    """The innermost calls that Python's fault handler printed, or the last lines."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    calls = [line for line in lines if line.startswith("File ")]
    own = [line for line in calls if "/strata/" in line] or calls or lines[-3:]
    return "".join(f"\n    {line}" for line in own[:4])
