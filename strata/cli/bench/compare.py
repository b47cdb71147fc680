"""`strata bench --compare old.json new.json`: two results of `strata bench --json`, or of the suite, side by side."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from typing import Any

from strata.cli import show
from strata.cli.parser import Mistake
from strata.cli.programs import read_text
from strata.viewer import bars


def compare(options: Namespace) -> int:
    """Times that both have, the largest change first; exit code 1 where one grew beyond the noise."""
    old, new = (read_times(name) for name in options.compare)
    shared = [name for name in old if name in new]
    if not shared:
        raise Mistake(f"{options.compare[0]} and {options.compare[1]} have no measurement in common")
    rows = [(name, old[name], new[name], old[name] / new[name]) for name in shared]
    rows.sort(key=lambda row: row[3])
    slower = [row for row in rows if row[3] < 1 / (1 + options.noise)]
    faster = [row for row in rows if row[3] > 1 + options.noise]
    mean = math.exp(sum(math.log(row[3]) for row in rows) / len(rows))
    missing = {"only_old": sorted(set(old) - set(new)), "only_new": sorted(set(new) - set(old))}
    if options.json:
        show.as_json({
            "old": options.compare[0], "new": options.compare[1], "noise": options.noise, "geometric_mean": mean,
            "slower": len(slower), "faster": len(faster), **missing,
            "rows": [{"name": n, "old": a, "new": b, "speedup": r} for n, a, b, r in rows],
        })  # fmt: skip
        return bool(slower)
    shown = [(name, show.duration(a), show.duration(b), f"{r:.2f}×", _told(r, options.noise)) for name, a, b, r in rows]
    show.table(("", ">old", ">new", ">speed-up", ""), shown)
    if len(rows) > 1:
        print(bars({name[:48]: r for name, *_, r in rows}, {name[:48]: f"{r:.2f}×" for name, *_, r in rows}) + "\n")
    print(
        f"{len(rows)} times: {len(faster)} faster, {len(slower)} slower beyond {options.noise:.0%}, "
        f"geometric mean {mean:.2f}×"
    )
    for title, names in (("no longer there", missing["only_old"]), ("new", missing["only_new"])):
        if names:
            print(f"{title}: {', '.join(names)}")
    return bool(slower)


def _told(speedup: float, noise: float) -> str:
    return "slower" if speedup < 1 / (1 + noise) else "faster" if speedup > 1 + noise else ""


def read_times(path: str) -> dict[str, float]:
    """Best seconds by name."""
    text = read_text(path)
    try:
        report = json.loads(text)
    except ValueError:  # the history of the suite: a run on each line, of which the newest counts
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            report = json.loads(lines[-1]) if lines else None
        except ValueError:
            report = None
    found = _times(report)
    if not found:
        raise Mistake(f"{path}: these are not the results of strata bench --json, or of python -m benchmarks --json")
    return found


def _times(report: Any) -> dict[str, float]:
    if not isinstance(report, dict):
        return {}
    found: dict[str, Any] = {}
    for way in report.get("ways") or ():
        found[f"{report.get('name')}, {way.get('name')}, {way.get('threads')}T"] = way.get("best")
    for kind in ("cold", "warm"):
        if f"{kind}_compile" in report:
            found[f"{report.get('name')}, first result, {kind} cache"] = report[f"{kind}_compile"]
    for result in report.get("results") or ():
        ours = (result.get("contenders") or {}).get("strata") or {}
        found[f"{result.get('workload')}, {result.get('threads')}T"] = ours.get("best")
    for kind in ("first_token", "per_token", "total"):
        for name, value in (report.get(kind) or {}).items() if isinstance(report.get(kind), dict) else ():
            found[f"{kind} {name}"] = value
    return {name: float(v) for name, v in found.items() if isinstance(v, int | float) and v > 0}
