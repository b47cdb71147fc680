"""Runs onnx.backend.test on a device: every CPU case, in parallel processes, each under a time limit.

python -m tests.conformance.onnx_suite [--device cpu|reference] [--jobs 2] [--only REGEX] [--failed FILE] [--write-docs]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 120.0  # seconds a case may take
DOCS = Path(__file__).parents[2] / "docs" / "onnx.md"


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    name: str
    passed: bool
    seconds: float
    message: str = ""

    @property
    def op(self) -> str:
        return op_of(self.name)


@cache
def cases(device: str = "cpu") -> dict[str, Callable[..., Any]]:
    """Every CPU case by name."""
    os.environ.setdefault("ONNX_MODELS", str(Path(tempfile.gettempdir()) / f"onnx-models-{os.getuid()}"))
    warnings.simplefilter("ignore")
    from onnx.backend.test import BackendTest

    from strata.io.onnx import ReferenceBackend, StrataBackend

    suite = BackendTest({"cpu": StrataBackend, "reference": ReferenceBackend}[device], __name__)
    found: dict[str, Callable[..., Any]] = {}
    for items in suite._test_items.values():
        found |= {name.removesuffix("_cpu"): item.func for name, item in items.items() if name.endswith("_cpu")}
    return found


def op_of(name: str) -> str:
    """The op that a case is about, as far as its name tells."""
    words = name.removeprefix("test_").split("_")
    return words[0]


def run_case(name: str, device: str = "cpu") -> Outcome:
    start = time.perf_counter()
    try:
        cases(device)[name](None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} @ {Path(where.filename).name}:{where.lineno}"
        return Outcome(name, False, time.perf_counter() - start, " ".join(text.split())[:600])
    return Outcome(name, True, time.perf_counter() - start)


def _work(pipe: Connection, device: str) -> None:
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    while (name := pipe.recv()) is not None:
        pipe.send(run_case(name, device))


class Worker:
    """A process that runs cases one after the other."""

    def __init__(self, device: str) -> None:
        self.pipe, theirs = mp.Pipe()
        self.process = mp.get_context("fork").Process(target=_work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.name: str | None = None
        self.since = 0.0

    def give(self, name: str) -> None:
        self.name, self.since = name, time.perf_counter()
        self.pipe.send(name)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def run_all(names: Sequence[str], device: str, jobs: int, timeout: float = TIMEOUT) -> list[Outcome]:
    """All cases; one that hangs or kills its process is a failure and the rest go on."""
    cases(device)  # loaded once, inherited by the workers
    queue, outcomes = list(reversed(names)), []
    workers = [Worker(device) for _ in range(min(jobs, max(len(names), 1)))]
    for worker in workers:
        if queue:
            worker.give(queue.pop())
    while any(w.name for w in workers):
        ready = wait([w.pipe for w in workers if w.name], timeout=1.0)
        for i, worker in enumerate(workers):
            if worker.name is None:
                continue
            seconds = time.perf_counter() - worker.since
            failure = None
            if worker.pipe in ready:
                try:
                    outcomes.append(worker.pipe.recv())
                except (EOFError, OSError):
                    worker.process.join(5)
                    failure = f"the process died with code {worker.process.exitcode}"
            elif seconds > timeout:
                failure = f"took more than {timeout:.0f} s"
            else:
                continue
            if failure:
                outcomes.append(Outcome(worker.name, False, seconds, failure))
                worker.stop()
                workers[i] = Worker(device)
            workers[i].name = None
            if queue:
                workers[i].give(queue.pop())
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)}/{len(names)}", end="", file=sys.stderr)
    for worker in workers:
        worker.stop()
    return sorted(outcomes, key=lambda o: o.name)


def report(outcomes: Sequence[Outcome]) -> str:
    """Passed and failed by op, then the totals."""
    by_op: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_op[o.op].append(o)
    lines = [
        f"{op:28} {sum(o.passed for o in group):4} of {len(group):4}" + ("" if all(o.passed for o in group) else "   <")
        for op, group in sorted(by_op.items())
    ]
    passed = sum(o.passed for o in outcomes)
    return "\n".join([*lines, f"{passed} of {len(outcomes)} cases pass ({passed / max(len(outcomes), 1):.1%})"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression of case names")
    parser.add_argument("--failed", type=Path, help="run only what failed in this file of results")
    parser.add_argument("--results", type=Path, help="write results as JSON here")
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.name}")
    options = parser.parse_args(argv)
    names = [n for n in sorted(cases(options.device)) if re.search(options.only, n)]
    if options.failed:
        failed = {o["name"] for o in json.loads(options.failed.read_text()) if not o["passed"]}
        names = [n for n in names if n in failed]
    start = time.perf_counter()
    outcomes = run_all(names, options.device, options.jobs, options.timeout)
    print(report(outcomes))
    for o in outcomes:
        if not o.passed:
            print(f"FAIL {o.name}: {o.message}")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.results:
        options.results.write_text(json.dumps([asdict(o) for o in outcomes], indent=0))
    if options.write_docs:
        from tests.conformance.onnx_docs import page

        DOCS.write_text(page(outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
