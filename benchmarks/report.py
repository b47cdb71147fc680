"""Results as Markdown and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.registry import CONTENDERS

Result = dict[str, Any]


def ratio(result: Result, kind: str = "best") -> float | None:
    """The best peer's time over ours: above 1 we are faster. None where there is no peer or no time of ours."""
    ours = result["contenders"].get("strata")
    peers = [c[kind] for name, c in result["contenders"].items() if name != "strata"]
    return min(peers) / ours[kind] if ours and peers else None


def best_peer(result: Result) -> str:
    peers = {name: c["best"] for name, c in result["contenders"].items() if name != "strata"}
    return min(peers, key=lambda n: peers[n]) if peers else ""


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def page(run: dict[str, Any]) -> str:
    """The whole page."""
    machine, results = run["machine"], [r for r in run["results"] if "error" not in r]
    ranked = sorted((r for r in results if ratio(r) is not None), key=lambda r: ratio(r) or 0)
    losses = [r for r in ranked if (ratio(r) or 0) < 1]
    wins = [r for r in ranked if (ratio(r) or 0) >= 1]
    versions = ", ".join(f"{n} {v}" for n, v in machine["versions"].items())
    parts = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`python -m benchmarks`); do not edit. All contenders compute the same from the same",
        "arrays; the first result of each is compared before it is timed. Each contender has a process of its own,",
        "with its default settings; they take turns in short bursts, and all but one are stopped. A call is timed as a",
        "user makes it, with its Python and its new result arrays. Weights that do not change are prepared once by all",
        "that can. **ratio** is the best time of the best peer over ours: below 1 we lose.",
        "",
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}",
        f"- {versions}; strata at {machine['commit']}, {machine['date']}",
        f"- load average {machine['load']} at the start, {run['load_after']} at the end" + _noise(run),
        f"- {len(results)} measurements, {run['suite']} suite, in {run['seconds'] / 60:.0f} minutes"
        + (f", of which {run['cpu_seconds'] / 60:.0f} on a core" if "cpu_seconds" in run else ""),
        "",
        "![ratios](benchmarks.svg)",
        "",
    ]
    for threads in sorted({r["threads"] for r in ranked}):
        values = [ratio(r) or 1 for r in ranked if r["threads"] == threads]
        medians = [ratio(r, "median") or 1 for r in ranked if r["threads"] == threads]
        lost = sum(v < 1 for v in values)
        parts.append(
            f"- On {threads} thread{'s' * (threads > 1)}: geometric mean of {len(values)} ratios "
            f"{geometric_mean(values):.2f} (of medians {geometric_mean(medians):.2f}), "
            f"{lost} loss{'es' * (lost != 1)}, the worst {min(values):.2f}."
        )
    parts += ["", "![ratios over the runs of the suite](benchmarks-history.svg)", "", *by_group(ranked)]
    parts += ["", f"## Losses ({len(losses)})", "", *table(losses), "", f"## Wins ({len(wins)})", "", *table(wins), ""]
    moving = [r for r in results if r.get("copy")]
    if moving:
        parts += ["## Memory", "", *memory(moving), ""]
    if run.get("ceilings"):
        parts += ["## Ceilings", "", *ceilings(run["ceilings"]), ""]
    if run.get("start_up"):
        parts += ["## Start-up", "", *start_up(run["start_up"]), ""]
    absent = [r for r in run["results"] if "error" in r or ratio(r) is None or r["wrong"] or r["failed"]]
    if absent:
        parts += ["## Left out", "", *(f"- {_reason(r)}" for r in absent), ""]
    return "\n".join(parts)


def by_group(results: Sequence[Result]) -> list[str]:
    """The geometric mean and the worst ratio of each group."""
    lines = ["| group | threads | workloads | geometric mean | worst | losses |", "|---|---:|---:|---:|---:|---:|"]
    for group, threads in dict.fromkeys((r["group"], r["threads"]) for r in sorted(results, key=_place)):
        values = [ratio(r) or 1 for r in results if (r["group"], r["threads"]) == (group, threads)]
        means = f"{geometric_mean(values):.2f} | {min(values):.2f} | {sum(v < 1 for v in values)}"
        lines.append(f"| {group} | {threads} | {len(values)} | {means} |")
    return lines


def _place(result: Result) -> tuple[str, int]:
    return result["group"], result["threads"]


def _noise(run: dict[str, Any]) -> str:
    """What to think of the numbers, by how busy the machine was with other things."""
    if max(run["machine"]["load"], run["load_after"]) <= run["machine"]["cores"] + 1:
        return ""
    return (
        ": other work was going on\n  on this machine, so single numbers are noisy. Best times suffer least;"
        " a median far above its best time is a mark of\n  that noise."
    )


def table(results: Sequence[Result]) -> list[str]:
    """Rows, the worst ratio first; times in milliseconds, best of all runs."""
    if not results:
        return ["None."]
    peers = [c for c in CONTENDERS if c != "strata" and any(c in r["contenders"] for r in results)]
    head = ["workload", "threads", "ratio", "of medians", "strata", "(median)", *peers]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for r in results:
        ours = r["contenders"]["strata"]
        best = best_peer(r)
        cells = [
            r["workload"],
            str(r["threads"]),
            f"**{ratio(r):.2f}**",
            f"{ratio(r, 'median'):.2f}",
            _ms(ours["best"]),
            _ms(ours["median"]),
        ]
        for name in peers:
            found = r["contenders"].get(name)
            shown = "" if found is None else _ms(found["best"])
            cells.append(f"*{shown}*" if name == best else shown)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", "Milliseconds; the best peer is in italics."]


def memory(results: Sequence[Result]) -> list[str]:
    """Workloads that wait for memory: bytes that must be read and written, against the fastest copy of as many."""
    lines = [
        "What must be read and written at least, over the time that it takes, and that speed as a share of the fastest",
        "copy measured on as many threads.",
        "",
        "| workload | threads | GB/s | copy GB/s | share of copy ceiling |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in sorted(results, key=lambda r: (r["threads"], copy_share(r))):
        speed = r["bytes"] / r["contenders"]["strata"]["best"]
        rates = f"{speed / 1e9:.1f} | {r['copy'] / 1e9:.1f}"
        lines.append(f"| {r['workload']} | {r['threads']} | {rates} | **{copy_share(r):.2f}** |")
    return lines


def copy_share(result: Result) -> float:
    """Of the speed of a copy."""
    return float(result["bytes"] / result["contenders"]["strata"]["best"] / result["copy"])


def ceilings(rows: Sequence[Result]) -> list[str]:
    """What is measured against the machine instead of a peer."""
    lines = [
        "Against what the machine can do at best, measured in turns: multiply-adds in registers for matmuls, reading",
        "four streams a thread for weights. A fork-join is the time until all threads have had a part.",
        "",
        "| what | threads | reached | ceiling | share | bar | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        share = "" if r["share"] is None else f"**{r['share']:.2f}**"
        told = "met" if r["met"] else "missed"
        lines.append(
            f"| {r['what']} | {r['threads']} | {r['value']} | {r['ceiling']} | {share} | {r['bar']} | {told} |"
        )
    return lines


def start_up(rows: Sequence[Result]) -> list[str]:
    """A fresh process: time to the first result, and memory."""
    lines = [
        "A fresh process for each: import, then the workload made ready (compiled, loaded) and run once. Memory is the",
        "peak of the process, with weights, NumPy and what makes the inputs.",
        "",
        "| workload | contender | import s | ready and first run s | peak RSS MB |",
        "|---|---|---:|---:|---:|",
    ]
    for r in rows:
        times = f"{r['import']:.2f} | {r['ready']:.2f} | {r['rss_mb']:.0f}"
        lines.append(f"| {r.get('workload', '')} | {r['label']} | {times} |")
    return lines


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def _reason(r: Result) -> str:
    if "error" in r:
        return f"{r['workload']} on {r['threads']}: {r['error'].splitlines()[0]}"
    told = []
    if r["wrong"]:
        far = ", ".join(f"{n} by {d:.1e}" for n, d in r["wrong"].items())
        told.append(f"results differ from {r['judge']}'s: {far}")
    told += [f"{name}: {error}" for name, error in r["failed"].items()]
    if told:
        return f"{r['workload']} on {r['threads']}: {'; '.join(told)}"
    return f"{r['workload']} on {r['threads']}: no peer is installed that runs it"


# ------------------------------------------------------------------------------------------------------------- picture


def picture(run: dict[str, Any]) -> str:
    """Ratios of a run as bars."""
    results = [r for r in run["results"] if "error" not in r and ratio(r) is not None]
    groups: dict[str, list[Bar]] = {}
    for r in sorted(results, key=lambda r: (r["workload"], r["threads"])):
        groups.setdefault(r["group"], []).append((f"{r['workload']}, {r['threads']}T", ratio(r) or 1, best_peer(r)))
    order = dict.fromkeys(r["group"] for r in results)
    return bars({name: groups[name] for name in order})


Bar = tuple[str, float, str]  # what was measured, a ratio, and what stands behind it


def bars(groups: Mapping[str, Sequence[Bar]]) -> str:
    """Ratios as bars on a logarithmic scale, by group; the line is 1."""
    left, width, step = 300, 420, 13
    lines, y = [], 30

    def place(value: float) -> float:
        return left + width * (math.log2(min(max(value, 0.25), 8)) + 2) / 5  # from 1/4 to 8

    for name, members in groups.items():
        y += 10
        lines.append(f'<text x="8" y="{y}" font-weight="bold">{escape(name)}</text>')
        y += 6
        for label, value, note in members:
            a, b = sorted((place(1), place(value)))
            colour = "#2a7f62" if value >= 1 else "#b5482f"
            lines.append(f'<text x="{left - 6}" y="{y + 9}" text-anchor="end">{escape(label)}</text>')
            lines.append(f'<rect x="{a:.1f}" y="{y + 1}" width="{max(b - a, 1):.1f}" height="9" fill="{colour}"/>')
            lines.append(f'<text x="{left + width + 8}" y="{y + 9}">{value:.2f} {escape(note)}</text>')
            y += step
    size = f'width="{left + width + 120}" height="{y + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
    marks = [
        f'<line x1="{place(v):.1f}" y1="24" x2="{place(v):.1f}" y2="{y}" stroke="{"#333" if v == 1 else "#ddd"}"/>'
        f'<text x="{place(v):.1f}" y="20" text-anchor="middle">{v:g}</text>'
        for v in (0.25, 0.5, 1, 2, 4, 8)
    ]
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *marks, *lines, "</svg>"]) + "\n"
