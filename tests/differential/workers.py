"""Programs in processes of their own, since one that is wrong may end its process."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.differential.draw import draw_program
from tests.differential.meaning import Violation
from tests.differential.paths import check, digest
from tests.differential.program import Program
from tests.differential.shrink import dies, shrink

ALSO = 6  # of so many programs of a process one is run in other processes too
CHUNK = 400  # programs of one process: what it keeps in memory stays small
FEW = 12  # violations that are made small in one process


@dataclass(slots=True)
class Totals:
    """What a run found."""

    programs: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0
    end: float = math.inf  # when no more programs are begun

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {len(self.violations)} violations in {self.seconds:.0f} s, "
            f"{self.processor / max(1, self.programs):.3f} s of a core each"
        )


def violation_of(program: Program, paths: Sequence[str]) -> Violation | None:
    """What is wrong with a program, if anything is."""
    try:
        check(program, paths)
    except Violation as found:
        return found
    return None


def small(program: Program, found: Violation, paths: Sequence[str]) -> Program:
    """A smaller program with the same violation."""
    base = found.path.split()[0]
    wanted = (base,) if base == "gradient" else (base, "graph", "bits")
    narrowed = [p for p in paths if p in wanted] if base in paths else list(paths)

    def fails(candidate: Program) -> bool:
        other = violation_of(candidate, narrowed)
        return other is not None and (other.path.split()[0], other.kind) == (base, found.kind)

    return shrink(program, fails if fails(program) else lambda p: _same(violation_of(p, paths), found))


def _same(a: Violation | None, b: Violation) -> bool:
    return a is not None and (a.path.split()[0], a.kind) == (b.path.split()[0], b.kind)


def work(first: int, count: int, paths: Sequence[str], *, whole: bool, seconds: float | None = None) -> int:
    """A worker: one line of JSON for each program that it comes to in its time."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    shown = 0
    digests: dict[int, str] = {}
    for seed in range(first, first + count):
        if time.monotonic() > end:
            break
        print(json.dumps({"begin": seed}), flush=True)
        program = draw_program(seed)
        found = violation_of(program, paths)
        if found is None:
            if "process" in paths and (seed - first) % ALSO == 0:
                digests[seed] = digest(program)
            continue
        shown += 1
        if not whole and shown <= FEW:
            program = small(program, found, paths)
            found = violation_of(program, paths) or found
        print(json.dumps({"seed": seed, "text": f"{found}\n{program}"}), flush=True)
    for seed, text in elsewhere(digests):
        print(json.dumps({"seed": seed, "text": text}), flush=True)
    print(json.dumps({"end": time.process_time()}), flush=True)
    return 0


def elsewhere(digests: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """The same programs in two new processes: one finds all code on disk, one has nothing and other threads."""
    if not digests:
        return
    seeds = ",".join(map(str, digests))
    with tempfile.TemporaryDirectory() as folder:
        for change in ({}, {"STRATA_CACHE_DIR": folder, "STRATA_NUM_THREADS": "2"}):
            command = [sys.executable, "-m", "tests.differential", "--digests", seeds]
            done = subprocess.run(command, env={**os.environ, **change}, capture_output=True, text=True, check=False)
            if done.returncode:
                yield (
                    next(iter(digests)),
                    f"process: ended with {done.returncode} on seeds {seeds}: {done.stderr[-800:]}",
                )
                continue
            for seed, made in json.loads(done.stdout).items():
                if made != digests[int(seed)]:
                    kind = "without a cache" if change else "with a warm cache"
                    yield int(seed), f"process: other bits in a new process {kind}\n{draw_program(int(seed))}"


def run_all(
    first: int, count: int, jobs: int, paths: Sequence[str], *, whole: bool, seconds: float | None = None
) -> Totals:
    """All programs, or those that there is time for, on so many processes; violations are printed as they are found."""
    totals = Totals(end=math.inf if seconds is None else time.monotonic() + seconds)
    todo: queue.Queue[tuple[int, int]] = queue.Queue()
    for start in range(first, first + count, CHUNK):
        todo.put((start, min(CHUNK, first + count - start)))
    began = time.monotonic()
    step = partial(_progress, totals, count) if sys.stderr.isatty() else None
    threads = [threading.Thread(target=_serve, args=(todo, totals, paths, whole, step)) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    totals.seconds = time.monotonic() - began
    return totals


def _progress(totals: Totals, count: int) -> None:
    print(f"\r{totals.programs} of {count}", end="", file=sys.stderr, flush=True)


def _serve(todo: queue.Queue[tuple[int, int]], totals: Totals, paths: Sequence[str], whole: bool, step: object) -> None:
    while True:
        try:
            start, count = todo.get_nowait()
        except queue.Empty:
            return
        end = start + count
        while start < end and time.monotonic() < totals.end:
            start = _one_process(start, end - start, totals, paths, whole, step)


def _one_process(start: int, count: int, totals: Totals, paths: Sequence[str], whole: bool, step: object) -> int:
    """Run a worker; gives the seed to go on from."""
    command = [sys.executable, "-m", "tests.differential", "--worker", "--seed", str(start), "--count", str(count)]
    command += ["--paths", ",".join(paths), *(["--whole"] if whole else [])]
    if totals.end < math.inf:
        command += ["--seconds", str(totals.end - time.monotonic())]
    at: int | None = None
    ended = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            said = json.loads(line)
            if "begin" in said:
                at = int(said["begin"])
                totals.programs += 1
                if callable(step):
                    step()
            elif "text" in said:
                _report(totals, said["text"])
            else:
                ended = True
                totals.processor += float(said["end"])
    if ended:
        return start + count
    if at is None:
        _report(totals, f"no program could be run: {' '.join(command)} ended with {child.returncode}")
        return start + count
    program = draw_program(at)
    if not whole:
        program = shrink(program, partial(dies, partial(check, paths=paths)))
    _report(totals, f"crash: the process ended with {child.returncode}\n{program}")
    return at + 1


def _report(totals: Totals, text: str) -> None:
    totals.violations.append(text)
    print(f"--- {text}", flush=True)
