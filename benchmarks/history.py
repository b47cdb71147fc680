"""How the ratios went over time: a row for each run of the suite in benchmarks/history.json, drawn as a picture."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measure import ROOT
from benchmarks.report import geometric_mean, ratio
from strata.viewer import Plot, plot

ROWS = ROOT / "benchmarks/history.json"
PICTURE = ROOT / "docs/benchmarks-history.svg"


def read() -> list[dict[str, Any]]:
    """Runs of the suite, the oldest first."""
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text("utf-8")) if ROWS.exists() else []
    return rows


def row(run: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: geometric means of ratios by number of threads, of all workloads and of each group."""
    means: dict[str, float] = {}
    groups: dict[str, dict[str, float]] = {}
    good = [r for r in run["results"] if "error" not in r and ratio(r) is not None]
    for threads in sorted({r["threads"] for r in good}):
        here = [r for r in good if r["threads"] == threads]
        means[str(threads)] = round(geometric_mean([ratio(r) or 1 for r in here]), 3)
        for group in dict.fromkeys(r["group"] for r in here):
            values = [ratio(r) or 1 for r in here if r["group"] == group]
            groups.setdefault(group, {})[str(threads)] = round(geometric_mean(values), 3)
    machine = run["machine"]
    about = {"date": machine["date"], "commit": machine["commit"], "cpu": machine["cpu"], "measurements": len(good)}
    return {**about, "mean": means, "groups": groups}


def keep(run: dict[str, Any]) -> None:
    """Add a run, in place of an earlier one of the same commit, and draw the picture again."""
    new = row(run)
    rows = [r for r in read() if (r["commit"], r["cpu"]) != (new["commit"], new["cpu"])]
    ROWS.write_text(json.dumps([*rows, new], indent=1, ensure_ascii=False) + "\n", "utf-8")
    draw()


def draw() -> None:
    """Write the picture."""
    if read():
        picture(read()).save(PICTURE)


def picture(rows: list[dict[str, Any]]) -> Plot:
    """Geometric means over the runs, on each number of threads."""
    counts = sorted({threads for r in rows for threads in r["mean"]}, key=int)
    lines = {}
    for threads in counts:
        at = [i + 1 for i, r in enumerate(rows) if threads in r["mean"]]
        values = [r["mean"][threads] for r in rows if threads in r["mean"]]
        lines[f"{threads} thread{'s' * (threads != '1')}"] = (at, values)
    span = f"{rows[0]['date']} to {rows[-1]['date']}"
    return plot(lines, title=f"best peer's time over ours, {span}", x="run of the suite", y="geometric mean")
