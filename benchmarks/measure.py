"""Timing: a process of its own for each workload, contenders in turns, short bursts with a pause before each."""

from __future__ import annotations

import json
import math
import os
import resource
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
PAUSE = 0.004  # between them, so that threads which wait by spinning have gone to sleep
QUIET = {"KMP_BLOCKTIME": "1", "OPENBLAS_THREAD_TIMEOUT": "18", "GOMP_SPINCOUNT": "1000"}


def measure(name: str, threads: int, seconds: float) -> dict[str, Any]:
    """Results of one workload, in this process: seconds of each call, by contender."""
    from benchmarks.contenders import first_array, make_runs
    from benchmarks.registry import load_workloads

    workloads = load_workloads()
    case = workloads[name].make()
    start = time.perf_counter()
    runs = make_runs(case, threads)
    made = time.perf_counter() - start
    results = {key: first_array(run()) for key, run in runs.items()}
    judge = next((key for key in ("numpy", "torch") if key in results), "strata")
    expected = results[judge]
    scale = max(1.0, float(np.abs(expected).max()))
    differences = {
        key: float(np.abs(r.reshape(expected.shape) - expected).max()) / scale if r.size == expected.size else math.inf
        for key, r in results.items()
    }
    wrong = {key: d for key, d in differences.items() if not d <= case.tolerance}
    timed = {key: run for key, run in runs.items() if key not in wrong}
    times = in_turns(timed, seconds)
    return {
        "workload": name,
        "group": workloads[name].group,
        "threads": threads,
        "flops": case.flops,
        "judge": judge,
        "setup_seconds": made,
        "wrong": wrong,
        "differences": differences,
        "contenders": {
            key: {"best": min(t), "median": statistics.median(t), "runs": len(t)} for key, t in times.items()
        },
    }


def in_turns(runs: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Times of calls: a burst of each contender, again and again until each has had its seconds."""
    counts, times = {}, {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        taken = max(time.perf_counter() - start, 1e-7)
        counts[name], times[name] = max(1, min(2000, int(BURST / taken))), [taken]
    spent = dict.fromkeys(runs, 0.0)
    for turn in range(1000):
        if all(s >= seconds for s in spent.values()) and turn >= 3:
            break
        for name, run in runs.items():
            if spent[name] >= seconds and turn >= 3:
                continue
            time.sleep(PAUSE)
            run()  # wakes the threads up
            begin = time.perf_counter()
            for _ in range(counts[name]):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
            spent[name] += time.perf_counter() - begin
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
    settings = {**os.environ, **QUIET}
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
    """`start-up CONTENDER THREADS`, or `THREADS SECONDS WORKLOAD...`; a line of JSON for each result."""
    if words[0] == "start-up":
        print(json.dumps(start_up(words[1], int(words[2]))))
        return
    for name in words[2:]:
        try:
            print(json.dumps(measure(name, int(words[0]), float(words[1]))), flush=True)
        except Exception as error:  # noqa: BLE001 - one workload must not take the others with it; it is told
            print(
                json.dumps({"workload": name, "threads": int(words[0]), "error": f"{type(error).__name__}: {error}"}),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
