"""How the ratios went over time: a row for each run of the suite in benchmarks/history.json, drawn as pictures.

docs/benchmarks-history.svg shows all runs, docs/benchmarks-groups.svg the newest one by kind of workload.
"""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from benchmarks.measure import ROOT
from benchmarks.report import geometric_mean, ratio
from strata.viewer import Plot, plot

ROWS = ROOT / "benchmarks/history.json"
PICTURE, GROUPS = ROOT / "docs/benchmarks-history.svg", ROOT / "docs/benchmarks-groups.svg"


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
    """Write the pictures."""
    if read():
        picture(read()).save(PICTURE)
        GROUPS.write_text(groups_picture(read()[-1]), "utf-8")


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


def groups_picture(row: dict[str, Any]) -> str:
    """Bars of the newest run, the longest first: a group of workloads, and a bar for each number of threads."""
    named = sorted(row["groups"].items(), key=lambda item: -max(item[1].values()))
    named = [*named, ("all of them", row["mean"])]
    most = max(v for _, values in named for v in values.values())
    left, width, bar = 170, 430, 11
    colours = ("#2a7f62", "#7cbfa5", "#b9dccd")

    def place(value: float) -> float:
        return left + width * math.log2(max(value, 0.5) / 0.5) / math.log2(most / 0.5)

    parts, y = [], 34
    for name, values in named:
        high = bar * len(values)
        weight = ' font-weight="bold"' if name == "all of them" else ""
        middle = y + high / 2 + 4
        parts.append(f'<text x="{left - 10}" y="{middle:.1f}" text-anchor="end"{weight}>{escape(name)}</text>')
        for colour, value in zip(colours, values.values(), strict=False):
            a, b = sorted((place(1), place(value)))
            parts.append(f'<rect x="{a:.1f}" y="{y}" width="{max(b - a, 1):.1f}" height="{bar - 1}" fill="{colour}"/>')
            parts.append(f'<text x="{max(a, b) + 5:.1f}" y="{y + bar - 2}" font-size="10">{value:.1f}</text>')
            y += bar
        y += 8
    marks = [
        f'<line x1="{place(v):.1f}" y1="26" x2="{place(v):.1f}" y2="{y - 4}" stroke="{"#333" if v == 1 else "#ddd"}"/>'
        f'<text x="{place(v):.1f}" y="20" text-anchor="middle">{v:g}</text>'
        for v in (0.5, 1, 2, 4)
    ]
    legend = [
        f'<rect x="{left + 110 * i}" y="{y + 3}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{left + 110 * i + 15}" y="{y + 12}">{threads} thread{"s" * (threads != "1")}</text>'
        for i, (colour, threads) in enumerate(zip(colours, row["mean"], strict=False))
    ]
    size = f'width="{left + width + 50}" height="{y + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    paper = '<rect width="100%" height="100%" rx="6" fill="#fff"/>'
    return "\n".join([head, paper, *marks, *parts, *legend, "</svg>"]) + "\n"
