"""Timing: a process for each contender; one runs a burst while the others are stopped, again and again in turns.

Threads that wait by spinning would take a core from whoever is measured next. Stopping a process (SIGSTOP) stops its
threads whatever they do, so every contender runs with its own default settings and has the machine to itself.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.machine import copy_speed
from benchmarks.registry import COMPILERS, JUDGES, Workload

ROOT = Path(__file__).resolve().parents[1]
BURST = 0.015  # seconds of one contender before the next has its turn
LEAST = 3  # turns, whatever they take
FAR, FEW = 3.0, 2  # a peer so many times slower than the best has so few turns
SHARED = Path("/dev/shm")  # results are compared through memory where there is such a place
PATIENCE = 120.0  # seconds for a contender to make a workload ready
STOPS = hasattr(signal, "SIGSTOP")
PAUSE = 0.05  # seconds, where processes cannot be stopped: threads that spin while they wait have given up by then


def surroundings(contender: str, threads: int, cache: Path) -> dict[str, str]:
    """The environment of a contender's process. Modules are compiled once, as they are when packages are installed."""
    from benchmarks.contenders import settings

    here = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**here, "STRATA_CACHE_DIR": str(cache), **settings(contender, threads)}


class Worker:
    """The process of one contender; stopped except while it does what it was asked."""

    def __init__(self, contender: str, threads: int, cache: Path) -> None:
        self.contender = contender
        self.told = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", contender, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.told, text=True, cwd=ROOT,
            env=surroundings(contender, threads, cache),
        )  # fmt: skip

    def ask(self, **order: Any) -> dict[str, Any]:
        """The answer to an order; `error` in it where there is none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"error": self._last_words()}
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        self._signal("SIGCONT")
        line = self.process.stdout.readline()
        self._signal("SIGSTOP")
        timer.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        return answer

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.told.close()

    def _signal(self, name: str) -> None:
        if STOPS and self.alive:
            self.process.send_signal(getattr(signal, name))
        elif name == "SIGSTOP":
            time.sleep(PAUSE)

    def _last_words(self) -> str:
        code = self.process.wait()
        self.told.seek(0)
        last = self.told.read().strip().splitlines()[-1:] or ["no message"]
        return f"the process ended with {code}: {last[0]}"


class Team:
    """Workers for workloads on a number of threads, started as they are needed."""

    def __init__(self, threads: int, cache: Path) -> None:
        from benchmarks.contenders import installed

        self.threads, self.cache, self.names = threads, cache, installed()
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self.workers.values():
            worker.close()

    def worker(self, contender: str) -> Worker:
        found = self.workers.get(contender)
        if found is None or not found.alive:
            found = self.workers[contender] = Worker(contender, self.threads, self.cache)
        return found

    def measure(self, work: Workload, seconds: float, *, compilers: bool = False) -> dict[str, Any]:
        """Results of one workload: compared with the judge's, then timed in turns."""
        names = [n for n in self.names if compilers or work.compilers or n not in COMPILERS]
        for name in names:
            self.worker(name)  # they start side by side
        made: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as folder:
            for name in names:
                answer = self.worker(name).ask(make=work.name, result=str(Path(folder, f"{name}.npy")))
                if answer.get("has_form", True):
                    made[name] = answer
            results = {n: np.load(Path(folder, f"{n}.npy"), mmap_mode="r") for n in made if "error" not in made[n]}
            if "strata" not in results:
                told = made.get("strata", {}).get("error", "strata has no form of it")
                return {"workload": work.name, "group": work.group, "threads": self.threads, "error": told}
            judge = next((n for n in JUDGES if n in results), "strata")
            differences = _differences(results, judge)
            del results
        wrong = {n: d for n, d in differences.items() if not d <= made[judge]["tolerance"]}
        times = self.in_turns([n for n in differences if n not in wrong], seconds)
        moved = made[judge].get("bytes", 0.0)
        return {
            "workload": work.name,
            "group": work.group,
            "threads": self.threads,
            "flops": made[judge]["flops"],
            "bytes": moved,
            "copy": copy_speed(self.threads) if moved else 0.0,  # now: what else the machine does changes it
            "judge": judge,
            "wrong": wrong,
            "failed": {n: m["error"] for n, m in made.items() if "error" in m},
            "differences": differences,
            "contenders": {
                n: {
                    "best": min(t), "median": statistics.median(t), "runs": len(t),
                    "ready": made[n]["ready"], "rss_mb": made[n]["rss_mb"],
                }
                for n, t in times.items()
            },
        }  # fmt: skip

    def in_turns(self, names: list[str], seconds: float) -> dict[str, list[float]]:
        """Times of calls: a burst of each contender in turn, until each has had its seconds."""
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(1000):
            best = {n: min(t) for n, t in times.items() if t}
            near = {n for n in names if n == "strata" or n not in best or best[n] <= FAR * min(best.values())}
            waiting = [n for n in names if turn < FEW or (n in near and (turn < LEAST or sum(times[n]) < seconds))]
            if not waiting:
                break
            for name in waiting:
                answer = self.workers[name].ask(burst=BURST)
                if "error" in answer:
                    raise RuntimeError(f"{name}: {answer['error']}")
                times[name] += answer["times"]
        return times


def _differences(results: dict[str, np.ndarray], judge: str) -> dict[str, float]:
    """The largest difference from the judge's result, as a part of its largest number."""
    expected = results[judge]
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    return {
        name: float(np.abs(np.subtract(r.reshape(expected.shape), expected, dtype=np.float64)).max(initial=0)) / scale
        if r.size == expected.size else math.inf
        for name, r in results.items()
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- start-up


def start_up(contender: str, threads: int, name: str) -> dict[str, Any]:
    """In a fresh process: imports, then a workload made ready and run once, and the memory it all takes."""
    from benchmarks.contenders import limit_cores, make_run
    from benchmarks.registry import load_workloads

    limit_cores(contender, threads)
    case = load_workloads()[name].make()
    start = time.perf_counter()
    __import__({"torch.compile": "torch", "llama.cpp": "xllamacpp"}.get(contender, contender))
    if contender == "strata":
        import strata

        assert strata.Session
    imported = time.perf_counter() - start
    start = time.perf_counter()
    make_run(contender, case, threads)()
    ready = time.perf_counter() - start
    return {"contender": contender, "import": imported, "ready": ready, "rss_mb": peak_memory()}


def peak_memory() -> float:
    """The most memory that this process had, in MB. `ru_maxrss` begins with the memory of the process that made it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start_ups(threads: int, names: list[str]) -> list[dict[str, Any]]:
    """Start-up of each contender on some workloads, strata's with an empty and with a full cache."""
    from benchmarks.contenders import takers
    from benchmarks.registry import load_workloads

    found = []
    for name in names:
        peers = [c for c in takers(load_workloads()[name].make()) if c not in ("strata", "numpy", *COMPILERS)]
        with tempfile.TemporaryDirectory() as folder:
            ways = [("strata, empty cache", "strata"), ("strata, full cache", "strata"), *((c, c) for c in peers)]
            for label, contender in ways:
                words = ["benchmarks.measure", contender, str(threads), name]
                for answer in in_process(words, contender, threads, Path(folder)):
                    found.append(answer | {"label": label, "workload": name})
    return found


def in_process(words: list[str], contender: str, threads: int, cache: Path) -> Iterator[dict[str, Any]]:
    """Run a module in a fresh process; each of its lines is JSON. What goes wrong is said on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, check=False,
        env=surroundings(contender, threads, cache), timeout=PATIENCE,
    )  # fmt: skip
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"  {' '.join(words)}: the process ended with {done.returncode}: {last[0]}", file=sys.stderr)


if __name__ == "__main__":
    print(json.dumps(start_up(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
