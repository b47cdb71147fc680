"""Triton programs compiled on all cores: processes that take jobs as lines of text, and need no GPU.

Triton holds Python's lock while it compiles, so that threads would wait for each other. A worker is `jobs.py` run as a
program. Workers start with the first program that is missing, while the others are still being written.
"""

from __future__ import annotations

import base64
import json
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Thread, Timer

from strata.backends.triton.codegen.render import TritonProgram
from strata.backends.triton.launch import jobs
from strata.backends.triton.launch.compile import Binary, CompileJob, binary_of, keep, run_job
from strata.backends.triton.target import Gpu
from strata.cache import default_store
from strata.core import available_threads
from strata.errors import CompileError

FEW = 4  # jobs that are done here: a worker takes a moment to start
LONGEST = 300.0  # seconds that a worker may take for a job
_LAST = 1  # after all jobs, whose numbers are not positive
_CRASHES = {int(s): s.name for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)}


def compile_ahead(
    programs: Iterable[TritonProgram], gpu: Gpu, *, workers: int | None = None,
    done: Callable[[int, int], None] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Put the binaries of programs into the store, as far as they are not there. What Triton rejects is returned, by
    its text; `done(finished, all)` is told of progress, where `all` are those that were found so far."""
    store = default_store()
    pool = _Workers(1 if getattr(sys, "frozen", False) else available_threads(workers))  # its executable is no Python
    seen: set[str] = set()
    missing: list[CompileJob] = []
    rejected: dict[str, str] = {}
    try:
        for program in programs:
            job = CompileJob.of(program, gpu)
            key = job.key
            if key in seen:
                continue
            seen.add(key)
            if store.get(key) is None:
                missing.append(job)
                if pool.most > 1 and len(missing) >= FEW:  # from here on, all of them
                    for one in missing if len(missing) == FEW else (job,):
                        pool.take(one)
        for finished, waiting in enumerate(missing):
            job, answer = pool.answers.get() if pool.threads else (waiting, _done_here(waiting))
            if isinstance(answer, Binary):
                keep(job, answer)
            else:
                rejected[job.text] = answer
            if done is not None:
                done(finished + 1, len(missing))
    finally:
        pool.end()
    for thread in pool.threads:
        thread.join()
    return rejected


def _done_here(job: CompileJob) -> Binary | str:
    """As a worker answers: whatever goes wrong is told, since who waits for the answer must get one."""
    try:
        return binary_of(run_job(job), job)
    except CompileError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - as in a worker
        return str(job.rejected(jobs.reason(error)))


@dataclass
class _Workers:
    """Worker processes, no more than there are jobs; of the jobs that wait, the longest text is taken first."""

    most: int
    threads: list[Thread] = field(default_factory=list)
    answers: queue.SimpleQueue[tuple[CompileJob, Binary | str]] = field(default_factory=queue.SimpleQueue)
    is_over: bool = False
    _waiting: queue.PriorityQueue[tuple[int, int, CompileJob | None]] = field(default_factory=queue.PriorityQueue)
    _numbers: count[int] = field(default_factory=count)

    def take(self, job: CompileJob) -> None:
        self._waiting.put((-len(job.text), next(self._numbers), job))
        if len(self.threads) < self.most:
            self.threads.append(Thread(target=self._serve, daemon=True))
            self.threads[-1].start()

    def end(self) -> None:
        """No more jobs come, and nobody waits for those that an interrupt left behind."""
        self.is_over = True
        for _ in self.threads:
            self._waiting.put((_LAST, next(self._numbers), None))

    def _serve(self) -> None:
        """One worker after the other, each until it crashes, and the jobs that they take."""
        worker: _Worker | None = None
        while (job := self._waiting.get()[-1]) is not None and not self.is_over:
            try:
                worker = worker or _Worker()
                answer = worker.ask(job)
            except (OSError, ValueError, TypeError):  # there is no worker, it ended, or it answers something else
                reason = None if worker is None else worker.why_ended()
                worker = None
                answer = _done_here(job) if reason is None else str(job.rejected(reason))
            self.answers.put((job, answer))
        if worker is not None:
            worker.end()


class _Worker:
    """A process. It ends with its input, or when a job takes too long, and hears of no Ctrl-C."""

    def __init__(self) -> None:
        self._is_late = False
        command = [sys.executable, "-P", jobs.__file__]  # not beside modules that have names of other packages
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)

    def ask(self, job: CompileJob) -> Binary | str:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        timer = Timer(LONGEST, self._stop)
        timer.daemon = True
        timer.start()
        try:
            questions.write(json.dumps(job.data) + "\n")
            questions.flush()
            answer = answers.readline()
        finally:
            timer.cancel()
        code, *rest = json.loads(answer)
        return Binary(base64.b64decode(code), *rest) if rest else str(job.rejected(code))

    def _stop(self) -> None:
        self._is_late = True
        self._process.kill()

    def why_ended(self) -> str | None:
        """What the job that it had did to it; None where that was not the job. The worker is no more."""
        crash = _CRASHES.get(-self.end())
        if self._is_late:
            return f"its compiler took longer than {LONGEST:.0f} s"
        return None if crash is None else f"its compiler crashed ({crash})"

    def end(self) -> int:
        """The code that it returns."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what it did not read
                pipe.close()
        return self._process.wait()
