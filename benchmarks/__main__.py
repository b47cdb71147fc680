"""The suite against the peers that are installed: `python -m benchmarks`, `make bench`, `strata bench`.

    python -m benchmarks                     the quick suite; writes docs/benchmarks.md, docs/benchmarks.svg
    python -m benchmarks --only softmax      some workloads; prints a table and writes nothing
    python -m benchmarks --check             compare with benchmarks/ratios.json and the limits of benchmarks/costs.py,
                                             exit code 1 on a regression
    python -m benchmarks --store             make the ratios of this run the ones to compare with
    python -m benchmarks --part 2/6          the second sixth of the suite, for machines that are quiet only for a while
    python -m benchmarks --page              write the page from the newest result of each workload

Every run is added to bench-results/history.jsonl, the means of a run of the suite to benchmarks/history.json, which
docs/benchmarks-history.svg shows. `strata bench --compare old.json new.json` compares two runs of --json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import costs, history
from benchmarks.machine import describe, load
from benchmarks.measure import ROOT, Team, in_process, start_ups
from benchmarks.registry import Workload, load_workloads
from benchmarks.report import best_peer, geometric_mean, memory, page, picture, ratio, table

RATIOS = ROOT / "benchmarks/ratios.json"
HISTORY = ROOT / "bench-results/history.jsonl"
NOISE = 0.25  # a ratio may fall this much below the stored one
MOST = 2.0  # a stored ratio beyond this would defend luck
QUICK, FULL = 0.15, 1.0  # seconds for each contender, workload and number of threads
# workloads that are also timed from the start of a process: these groups, and an encoder
START_UPS = ("ONNX models", "MiniLM: one text of 16 tokens", "SmolLM2-135M Q4_1: 128 tokens in")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="workloads whose names contain the text, or of that group"
    )
    parser.add_argument("--threads", default="", metavar="1,2", help="default: one, and as many as there are cores")
    parser.add_argument(
        "--full", action="store_true", help=f"all workloads and contenders, {FULL:g} s for each instead of {QUICK:g}"
    )
    parser.add_argument("--check", action="store_true", help="fail where a stored ratio is missed beyond noise")
    parser.add_argument("--store", action="store_true", help="store the ratios of this run")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="a part of the suite; writes no page")
    parser.add_argument("--page", action="store_true", help="write the page from the newest results; measures nothing")
    parser.add_argument("--history", action="store_true", help="show how the ratios went over the runs of the suite")
    parser.add_argument("--no-start-up", action="store_true", help="leave out the start-up of processes")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--list", action="store_true", help="list the workloads and exit")
    options = parser.parse_args()
    if options.history:
        history.draw()
        print(history.picture(history.read()))
        return 0
    chosen = [w for w in load_workloads().values() if options.only in w.name or options.only == w.group]
    if not options.only and not options.full:
        chosen = [w for w in chosen if w.quick]
    if options.list:
        print("\n".join(f"{w.group:<22} {w.name}" for w in chosen))
        return 0
    if not chosen:
        parser.error(f"no workload has {options.only!r} in its name; --list shows them")
    counts = [int(t) for t in options.threads.split(",") if t] or sorted({1, _cores()})
    if options.page:
        run = newest({w.name for w in chosen}, counts)
    else:
        index, parts = (int(n) for n in options.part.split("/"))
        jobs = [(t, w) for t in counts for w in chosen]
        here = jobs[len(jobs) * (index - 1) // parts : len(jobs) * index // parts]
        run = run_suite(here, FULL if options.full else QUICK, show=not options.json)
        run["suite"] = "full" if options.full else "quick"
        if not options.only and not options.no_start_up and index == parts:
            names = [w.name for w in chosen if w.name in START_UPS or w.group in START_UPS]
            run["start_up"] = start_ups(counts[-1], names)
            run["ceilings"] = ceilings(counts)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        run["cpu_seconds"] = used.ru_utime + used.ru_stime
        HISTORY.parent.mkdir(exist_ok=True)
        with HISTORY.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
    if options.json:
        print(json.dumps(run, indent=2))
    elif options.only:
        print("\n".join(table(sorted((r for r in run["results"] if _ratio(r)), key=lambda r: _ratio(r) or 0))))
        moving = [r for r in run["results"] if r.get("copy")]
        print("\n".join(["", *memory(moving)] if moving else []))
    if options.page or not (options.only or options.check or options.part != "1/1"):
        history.keep(run)
        (ROOT / "docs/benchmarks.md").write_text(page(run), "utf-8")
        (ROOT / "docs/benchmarks.svg").write_text(picture(run), "utf-8")
    if options.store:
        RATIOS.write_text(json.dumps(to_defend(run["results"]), indent=1, ensure_ascii=False) + "\n", "utf-8")
    if not options.check:
        return 0
    worse = check(run)
    return worse or bool(not options.only and costs.check())


def newest(names: set[str], counts: list[int]) -> dict[str, Any]:
    """The newest result of each workload in the history, as if it were one run."""
    results: dict[tuple[int, str], dict[str, Any]] = {}
    used: dict[str, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    for line in HISTORY.read_text("utf-8").splitlines() if HISTORY.exists() else ():
        run = json.loads(line)
        extra |= {name: run[name] for name in ("start_up", "ceilings") if name in run}
        for r in run["results"]:
            if r["workload"] in names and r["threads"] in counts:
                results[r["threads"], r["workload"]] = r
                used[_key(r)] = run
    runs = list({id(run): run for run in used.values()}.values())
    machine = describe()
    if runs:
        machine["commit"] = ", ".join(dict.fromkeys(run["machine"]["commit"] for run in runs))
        machine["load"] = max(run["machine"]["load"] for run in runs)
    return {
        "machine": machine,
        "results": [results[key] for key in sorted(results, key=lambda k: k[0])],
        "suite": "/".join(dict.fromkeys(run["suite"] for run in runs)),
        "seconds": sum(run["seconds"] for run in runs),
        "cpu_seconds": sum(run.get("cpu_seconds", 0) for run in runs),
        "load_after": max((run["load_after"] for run in runs), default=0),
        **extra,
    }


def run_suite(jobs: list[tuple[int, Workload]], seconds: float, *, show: bool = True) -> dict[str, Any]:
    """A team of processes for each group and number of threads."""
    start, machine = time.perf_counter(), describe()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:  # strata's cache
        for (threads, _), same in itertools.groupby(jobs, key=lambda job: (job[0], job[1].group)):
            with Team(threads, Path(folder)) as team:
                for _, work in same:
                    results.append(measured(team, work, seconds))
                    if show:
                        print(_line(results[-1]), flush=True)
    return {"machine": machine, "results": results, "seconds": time.perf_counter() - start, "load_after": load()}


def ceilings(counts: list[int]) -> list[dict[str, Any]]:
    """Rows of benchmarks.ceilings for each number of threads; the large model on all."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in counts:
            words = ["benchmarks.ceilings", "--json", "--threads", str(threads), "--seconds", "0.5"]
            if threads < counts[-1]:
                words.append("--no-model")
            found += list(in_process(words, "strata", threads, Path(folder)))
    return found


def measured(team: Team, work: Workload, seconds: float) -> dict[str, Any]:
    """One result, or why there is none; a workload that fails must not take the others with it."""
    try:
        return team.measure(work, seconds, compilers=seconds >= FULL)
    except Exception as error:  # noqa: BLE001 - told in the table
        told = f"{type(error).__name__}: {error}"
        return {"workload": work.name, "group": work.group, "threads": team.threads, "error": told}


def check(run: dict[str, Any]) -> int:
    """Compare with the stored ratios; what seems worse is measured twice more, longer, before it counts."""
    if not RATIOS.exists():
        print(f"there are no stored ratios in {RATIOS.relative_to(ROOT)}: --store makes them", file=sys.stderr)
        return 2
    stored = json.loads(RATIOS.read_text("utf-8"))
    known = load_workloads()
    worse = [r for r in run["results"] if _is_worse(r, stored)]
    for _ in range(2):
        again: list[dict[str, Any]] = []
        for r in worse:
            again += run_suite([(r["threads"], known[r["workload"]])], FULL)["results"]
        worse = [r for r in again if _is_worse(r, stored)]
    for r in worse:
        print(f"worse: {_key(r)}: {_ratio(r):.2f}, stored {stored[_key(r)]:.2f}")
    shared = [_ratio(r) or 1 for r in run["results"] if _key(r) in stored and _ratio(r)]
    print(f"{len(shared)} ratios compared, {len(worse)} worse; geometric mean now {geometric_mean(shared):.2f}")
    return 1 if worse else 0


def to_defend(results: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios for later runs to reach: of best or median times, whichever is less, and no more than MOST."""
    good = [r for r in results if _ratio(r)]
    return {_key(r): round(min(ratio(r) or MOST, ratio(r, "median") or MOST, MOST), 2) for r in good}


def _is_worse(result: dict[str, Any], stored: dict[str, float]) -> bool:
    now, before = _ratio(result), stored.get(_key(result))
    return before is not None and now is not None and now < before * (1 - NOISE)


def _ratio(result: dict[str, Any]) -> float | None:
    return None if "error" in result else ratio(result)


def _key(result: dict[str, Any]) -> str:
    return f"{result['workload']} / {result['threads']}"


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['workload']:<46} {result['threads']}T  {result['error']}"
    times = "  ".join(f"{name} {c['best'] * 1e3:.4g}" for name, c in result["contenders"].items())
    times += "".join(f"  {name} differs by {d:.1e}" for name, d in result["wrong"].items())
    times += "".join(f"  {name}: {told}" for name, told in result["failed"].items())
    found = ratio(result)
    shown = "      " if found is None else f"{found:5.2f}×"
    return f"{result['workload']:<46} {result['threads']}T  {shown} {best_peer(result):<12} ms: {times}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
