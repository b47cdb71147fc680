"""`strata bench`: times of one model, cold and warm, beside ONNX Runtime where it can run the same file."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strata.cli import show
from strata.cli.bench.turns import in_turns
from strata.cli.parser import Mistake
from strata.cli.programs import ExampleProgram, kind_of, open_program
from strata.cli.run import prepare
from strata.config import Settled, api_key, config, using


def bench(options: Namespace) -> int:
    """A model, or the suite."""
    if options.compare:
        from strata.cli.bench.compare import compare

        return compare(options)
    if options.model is None:
        return _suite(options)
    if options.model == "serve":
        return _load(options)
    report = measure(options)
    if options.json:
        show.as_json(report)
        return 0
    rows = [
        (w["name"], w["threads"], show.duration(w["best"]), show.duration(w["median"]), w.get("difference", ""))
        for w in report["ways"]
    ]
    show.table(("way", ">threads", ">best", ">median", ">largest difference"), rows, title=report["name"])
    from strata.viewer import bars

    names = {f"{w['name']}, {w['threads']}T": w["best"] for w in report["ways"]}
    print(bars(names, {name: show.duration(seconds) for name, seconds in names.items()}) + "\n")
    cold, warm = (show.duration(report[f"{name}_compile"]) for name in ("cold", "warm"))
    print(f"loaded, compiled and run once in {cold} with an empty cache, in {warm} with a full one")
    return 0


def _load(options: Namespace) -> int:
    """Ask a server for texts, and say how fast they came."""
    from strata.serving import LoadTest, plot_load, run_load

    found = run_load(LoadTest(
        url=options.url, requests=options.requests, clients=options.clients, rate=options.rate,
        prompt_tokens=options.prompt_tokens, max_tokens=options.max_tokens, shared=options.shared,
        model=options.model_name, api_key=options.api_key or api_key(),
    ))  # fmt: skip
    if options.plot:
        Path(options.plot).write_text(plot_load(found), "utf-8")
    if options.json:
        show.as_json(found)
    else:
        rows = [(name, *(show.duration(v) for v in found[name].values()))
                for name in ("first_token", "per_token", "total") if found[name]]  # fmt: skip
        show.table(("", ">p50", ">p90", ">p95", ">p99"), rows, title=options.url)
        print(
            f"{found['requests'] - found['failed']} of {found['requests']} requests in {found['seconds']:.1f} s: "
            f"{found['tokens_per_second']:.1f} tokens/s, {found['requests_per_second']:.2f} requests/s"
        )
        for error in found["errors"]:
            print(error)
    return 1 if found["failed"] else 0


def measure(options: Namespace) -> dict[str, Any]:
    """Compile with an empty and a full cache, then run in turns on one thread and on all."""
    from strata.core import available_threads

    with tempfile.TemporaryDirectory() as folder, using(cache_dir=Path(folder)):
        start = time.perf_counter()
        program = open_program(options.model, options.device)
        feeds, _ = prepare(program, options)
        expected = program.run(feeds)  # models compile on first use
        cold = time.perf_counter() - start
        start = time.perf_counter()
        again = open_program(options.model, options.device)
        prepare(again, options)
        again.run(feeds)
        warm = time.perf_counter() - start
    counts = [options.threads] if options.threads else sorted({1, available_threads(config().num_threads)})
    ways = [way for threads in counts for way in _ways(program, feeds, expected, options, threads)]
    return {"name": program.name, "cold_compile": cold, "warm_compile": warm, "ways": ways}


def _ways(
    program: ExampleProgram, feeds: dict[str, np.ndarray], expected: list[Any], options: Namespace, threads: int
) -> list[dict[str, Any]]:
    with using(num_threads=threads) as settings:  # once: making them takes longer than a run of a small model
        pass

    def ours() -> Any:
        with Settled(settings):
            return program.run(feeds)

    runs: dict[str, Callable[[], Any]] = {"strata": ours}
    if kind_of(options.model) == "onnx":
        theirs = _onnxruntime(options.model, feeds, threads)
        if theirs is not None:
            runs["onnxruntime"] = theirs
    times = in_turns(runs, options.seconds)
    found = []
    for name, seconds in times.items():
        way = {
            "name": name,
            "threads": threads,
            "best": min(seconds),
            "median": statistics.median(seconds),
            "runs": len(seconds),
        }
        if name != "strata":
            way["difference"] = f"{_difference(runs[name](), expected):.1e}"
        found.append(way)
    return found


def _onnxruntime(path: str, feeds: dict[str, np.ndarray], threads: int) -> Callable[[], Any] | None:
    try:
        import onnxruntime as ort
    except ImportError:
        return None
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 4
    session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def _difference(a: list[Any], b: list[Any]) -> float:
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(a, b, strict=True)]
    return max((float(np.abs(x - y).max()) for x, y in pairs if x.size), default=0.0)


def _suite(options: Namespace) -> int:
    if not Path("benchmarks/__main__.py").exists():
        raise Mistake("the suite lies in the source tree: run it there, or give a MODEL to time")
    words = [f"--only={options.only}"] if options.only else []
    words += [f"--threads={options.threads}"] if options.threads else []
    words += [f"--{name}" for name in ("full", "check", "json") if getattr(options, name)]
    return subprocess.run([sys.executable, "-m", "benchmarks", *words], check=False).returncode
