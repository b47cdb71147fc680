"""Timing: contenders take turns in short bursts, each in a process of its own that stands still meanwhile."""

from __future__ import annotations

import json
import math
import os
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
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BURST = 0.012  # seconds of one contender before the next has its turn
PAUSE = 0.05  # between them where processes cannot be stopped: threads that spin while they wait give up by then


def measure(name: str, threads: int, seconds: float, contenders: dict[str, Contender]) -> dict[str, Any]:
    """Results of one workload: seconds of each call, by contender."""
    from benchmarks.registry import load_workloads

    workloads = load_workloads()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ready = {key: c for key, c in contenders.items() if c.prepare(name, Path(folder, f"{key}.npy"))}
        made = time.perf_counter() - start
        results = {key: np.load(Path(folder, f"{key}.npy")) for key in ready}
    judge = next((key for key in ("numpy", "torch") if key in results), "strata")
    expected = results[judge]
    scale = max(1.0, float(np.abs(expected).max()))
    differences = {
        key: float(np.abs(r.reshape(expected.shape) - expected).max()) / scale if r.size == expected.size else math.inf
        for key, r in results.items()
    }
    about = workloads[name].make()
    wrong = {key: d for key, d in differences.items() if not d <= about.tolerance}
    times = in_turns({key: c for key, c in ready.items() if key not in wrong}, seconds)
    return {
        "workload": name,
        "group": workloads[name].group,
        "threads": threads,
        "flops": about.flops,
        "judge": judge,
        "setup_seconds": made,
        "wrong": wrong,
        "differences": differences,
        "contenders": {
            key: {"best": min(t), "median": statistics.median(t), "runs": len(t)} for key, t in times.items()
        },
    }


def in_turns(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    """Times of calls: a burst of each contender, again and again until each has had its seconds."""
    times = {name: contender.burst(1) for name, contender in contenders.items()}
    counts = {name: max(1, min(2000, int(BURST / max(t[0], 1e-7)))) for name, t in times.items()}
    spent = dict.fromkeys(contenders, 0.0)
    for turn in range(1000):
        left = [name for name in contenders if spent[name] < seconds or turn < 3]
        if not left:
            break
        for name in left:
            taken = contenders[name].burst(counts[name])
            times[name] += taken
            spent[name] += sum(taken)
    return times


class Contender:
    """A process of its own for one contender; it is stopped, spinning threads and all, while another has its turn."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        command = [sys.executable, "-m", "benchmarks.measure", "contender", name]
        settings = {**os.environ, "STRATA_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=settings
        )

    def prepare(self, workload: str, result: Path) -> bool:
        """Make a workload ready and store its first result; False when the contender has no form of it."""
        return bool(self._ask("prepare", workload, str(self.threads), str(result))["ready"])

    def burst(self, count: int) -> list[float]:
        """Seconds of so many calls, after one that wakes its threads up."""
        times: list[float] = self._ask("burst", str(count))["times"]
        return times

    def end(self) -> None:
        self._turn("SIGCONT")
        self._process.kill()
        self._process.communicate()

    def _ask(self, *words: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._turn("SIGCONT")
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                self._turn("SIGSTOP")
                if "error" in answer:
                    raise RuntimeError(f"{self.name}: {answer['error']}")
                return answer
        raise RuntimeError(f"{self.name}: its process ended with {self._process.wait()}")

    def _turn(self, name: str) -> None:
        if hasattr(signal, name):
            self._process.send_signal(getattr(signal, name))
        elif name == "SIGSTOP":
            time.sleep(PAUSE)


def contend(name: str) -> None:
    """The other side of a `Contender`: answers a line of JSON to each line of words."""
    run: Any = None
    for line in sys.stdin:
        word, *rest = json.loads(line)
        try:
            if word == "prepare":
                run = _prepare(name, *rest)
                answer: dict[str, Any] = {"ready": run is not None}
            else:
                answer = {"times": _times(run, int(rest[0]))}
        except Exception as error:  # noqa: BLE001 - one workload must not take the others with it; it is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _prepare(name: str, workload: str, threads: str, result: str) -> Any:
    from benchmarks.contenders import first_array, make_runs
    from benchmarks.registry import load_workloads

    run = make_runs(load_workloads()[workload].make(), int(threads), only=name).get(name)
    if run is not None:
        np.save(result, first_array(run()))
    return run


def _times(run: Any, count: int) -> list[float]:
    run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


# ------------------------------------------------------------------------------------------------------------- start-up


def start_up(contender: str, threads: int) -> dict[str, Any]:
    """In a fresh process: imports, then a model made ready and run once, and the memory it all takes."""
    from benchmarks import contenders
    from benchmarks.encoder import encoder
    from benchmarks.registry import Case

    case = encoder(128)
    keep = {"strata": "graph", "torch": "torch", "onnxruntime": "onnx", "openvino": "onnx"}[contender]
    only = Case(case.inputs, params=case.params, **{keep: getattr(case, keep)})
    start = time.perf_counter()
    if contender in ("torch", "onnxruntime", "openvino"):
        __import__(contender)
    else:
        import strata

        assert strata.Session
    imported = time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contenders.installed = lambda: [contender]  # nothing else is imported
    contenders.set_threads = _torch_threads if contender == "torch" else lambda threads: None
    start = time.perf_counter()
    contenders.make_runs(only, threads)[contender]()
    ready = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "contender": contender,
        "import": imported,
        "ready": ready,
        "rss_mb": after / 1024,
        "own_rss_mb": (after - before) / 1024,
    }


def _torch_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------------ processes


def in_process(words: list[str], cache: Path | None = None, timeout: float = 900) -> Iterator[dict[str, Any]]:
    """Run this module in a fresh process; each of its lines is JSON. What goes wrong is said on stderr."""
    settings = dict(os.environ)
    if cache is not None:
        settings["STRATA_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "benchmarks.measure", *words]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True, cwd=ROOT, env=settings)
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        timer.cancel()
        if process.wait() != 0:
            told.seek(0)
            last = told.read().strip().splitlines()[-1:] or ["no message"]
            print(f"  {words[-1]}: the process ended with {process.returncode}: {last[0]}", file=sys.stderr)


def start_ups(threads: int) -> list[dict[str, Any]]:
    """Start-up of each contender, strata's with an empty and with a full cache."""
    from benchmarks.contenders import installed

    peers = [c for c in installed() if c not in ("strata", "numpy")]
    ways = [("strata, empty cache", "strata"), ("strata, full cache", "strata"), *((c, c) for c in peers)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for label, contender in ways:
            tries = []
            for i in range(3):
                place = Path(folder, str(i)) if "empty" in label else Path(folder, "0")
                tries += list(in_process(["start-up", contender, str(threads)], place))
            if tries:
                fastest = min(tries, key=lambda t: t["ready"])
                found.append(fastest | {"label": label, "import": min(t["import"] for t in tries)})
    return found


def main(words: list[str]) -> None:
    """`start-up CONTENDER THREADS`, `contender NAME`, or `THREADS SECONDS WORKLOAD...`: lines of JSON."""
    from benchmarks.contenders import installed

    if words[0] == "start-up":
        print(json.dumps(start_up(words[1], int(words[2]))))
        return
    if words[0] == "contender":
        contend(words[1])
        return
    contenders = {name: Contender(name, int(words[0])) for name in installed()}
    try:
        for name in words[2:]:
            try:
                result = measure(name, int(words[0]), float(words[1]), contenders)
            except Exception as error:  # noqa: BLE001 - one workload must not take the others with it; it is told
                result = {"workload": name, "threads": int(words[0]), "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(result), flush=True)
    finally:
        for contender in contenders.values():
            contender.end()


if __name__ == "__main__":
    main(sys.argv[1:])
