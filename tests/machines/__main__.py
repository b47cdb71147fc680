"""Histories of state machines without end: `python -m tests.machines --count 20000 --seed 7 --jobs 2`.

Each machine runs COUNT histories, in batches that have a seed each. The first seed is printed, and repeats the run; a
violation is printed with the steps that show it and the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.machines.running import BATCH, STEPS, Outcome, machines, run_batch

TOLD = 1000  # histories after which to say how far it is
Work = list[tuple[str, int, int]]  # machine, seed, histories


def main() -> int:
    known = machines()
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="histories of each machine")
    parser.add_argument("--seed", type=int, default=None, help="first seed; a random one by default")
    parser.add_argument("--machine", action="append", choices=sorted(known), help="one machine; may be given again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a history, at most")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for the shortest history")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else secrets.randbelow(1 << 31)
    names = options.machine or list(known)
    again = "".join(f" --machine {name}" for name in options.machine or ())
    print(f"seed {first}: repeat with --seed {first} --count {options.count}{again}", flush=True)
    work = [
        (name, first + at // BATCH, min(BATCH, options.count - at))
        for at in range(0, options.count, BATCH)
        for name in names
    ]
    start = time.monotonic()
    histories: Counter[str] = Counter()
    violations = 0
    for done in _outcomes(work, options.jobs, options.steps, not options.no_shrink):
        before = histories.total()
        histories[done.machine] += done.histories
        if before // TOLD != histories.total() // TOLD:
            print(f"{histories.total()} histories after {time.monotonic() - start:.0f} s", flush=True)
        if done.violation is not None:
            violations += 1
            count = min(BATCH, options.count)
            print(f"violation: repeat with --machine {done.machine} --seed {done.seed} --count {count}")
            print(done.violation, flush=True)
    shown = ", ".join(f"{name} {histories[name]}" for name in names)
    seconds = time.monotonic() - start
    print(f"{histories.total()} histories from seed {first}, {violations} violations in {seconds:.0f} s: {shown}")
    return bool(violations)


def _outcomes(work: Work, jobs: int, steps: int, shrink: bool) -> Iterator[Outcome]:
    """Outcomes as they come; a machine that broke once is not run on, for it would show the same again."""
    broken: set[str] = set()
    if jobs <= 1:
        for name, seed, count in work:
            if name not in broken:
                done = run_batch(name, seed, count, steps=steps, shrink=shrink)
                broken |= {name} if done.violation else set()
                yield done
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for part in _parts(work, 16 * jobs):
            waiting = [
                pool.submit(run_batch, name, seed, count, steps=steps, shrink=shrink)
                for name, seed, count in part
                if name not in broken
            ]
            for future in as_completed(waiting):
                done = future.result()
                broken |= {done.machine} if done.violation else set()
                yield done


def _parts(work: Work, size: int) -> Iterable[Work]:
    return (work[at : at + size] for at in range(0, len(work), size))


if __name__ == "__main__":
    sys.exit(main())
