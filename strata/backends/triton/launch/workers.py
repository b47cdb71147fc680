"""Triton programs compiled on all cores: processes that take jobs as lines of text, and need no GPU.

Triton holds Python's lock while it compiles, so that threads would wait for each other. A worker is this module run as
a program: it reads a job from each line of its input, and answers each with a line, the binary or what went wrong.
"""

from __future__ import annotations

import base64
import json
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from threading import Thread

from strata.backends.triton.codegen.render import TritonProgram
from strata.backends.triton.launch.compile import Binary, CompileJob, binary_of, keep, run_job
from strata.backends.triton.target import Gpu
from strata.cache import default_store
from strata.core import available_threads
from strata.errors import CompileError, StrataError

FEW = 4  # jobs that are done here: a worker takes a second to start


def compile_ahead(
    programs: Sequence[TritonProgram], gpu: Gpu, *, workers: int | None = None,
    done: Callable[[int, int], None] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Put the binaries of programs into the store, as far as they are not there. What Triton rejects is returned, by
    its text; `done(finished, all)` is told of progress."""
    jobs = {job.key: job for job in (CompileJob.of(p, gpu) for p in programs)}
    store = default_store()
    missing = [job for key, job in jobs.items() if store.get(key) is None]
    count = min(available_threads(workers), len(missing))
    rejected: dict[str, str] = {}
    finished = 0

    def note(job: CompileJob, answer: Binary | str) -> None:
        nonlocal finished
        finished += 1
        if isinstance(answer, Binary):
            keep(job, answer)
        else:
            rejected[job.text] = answer
        if done is not None:
            done(finished, len(missing))

    if count < 2 or len(missing) < FEW:
        for job in missing:
            note(job, _done_here(job))
        return rejected
    waiting: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[CompileJob, Binary | str]] = queue.SimpleQueue()
    for job in sorted(missing, key=lambda j: -len(j.text)):  # the long ones first
        waiting.put(job)
    threads = [Thread(target=_serve, args=(waiting, answers), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in missing:
        note(*answers.get())
    for thread in threads:
        thread.join()
    return rejected


def _done_here(job: CompileJob) -> Binary | str:
    try:
        return binary_of(run_job(job), job)
    except CompileError as error:
        return str(error)


def _serve(waiting: queue.SimpleQueue[CompileJob], answers: queue.SimpleQueue[tuple[CompileJob, Binary | str]]) -> None:
    """One worker process, and the jobs that it takes."""
    command = [sys.executable, "-m", "strata.backends.triton.launch.workers"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                worker.stdin.close()
                return
            try:
                worker.stdin.write(job.dump() + "\n")
                worker.stdin.flush()
                read = json.loads(worker.stdout.readline())
                answers.put((job, Binary.unpack(base64.b64decode(read[0])) if read[0] else read[1]))
            except (OSError, ValueError):  # it died: what it was doing is done here
                answers.put((job, _done_here(job)))


def main() -> None:
    """Answer jobs until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what Triton prints is no answer
    for line in sys.stdin:
        job = CompileJob.load(line)
        try:
            made = base64.b64encode(binary_of(run_job(job), job).pack()).decode()
            answer = [made, ""]
        except StrataError as error:
            answer = ["", str(error)]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
