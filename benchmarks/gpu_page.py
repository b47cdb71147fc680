"""The page of the GPU rows, losses first, and a picture of them beside it.

    python -m benchmarks.gpu_page rows.json docs/benchmarks-gpu.md [earlier.json]

Rows of `benchmarks.device_calls`, `benchmarks.device_decode` and `benchmarks.gpu_sweep blocks` may stand among those of
`benchmarks.gpu`.
Peers that were not run this time have the times of an earlier run, if its rows are given, and the page says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, bars
from strata.ops import gguf_blocks

COPY = 4.1  # TB/s
MOST_ROWS = 8  # that are multiplied with weights as they are

HEAD = """# Benchmarks on a GPU

Written by `python -m benchmarks.gpu_page` from the rows of `python -m benchmarks.gpu` on {device} with PyTorch {torch}.
Times are of kernels, in milliseconds: medians of CUDA events around replays of a captured graph, all contenders in one
process, in turns, on the same random data. JAX is timed by the clock over ten calls, where it has a row. "Share" is the
best peer's time over strata's: above 1, strata is faster. "Of the limit" is the larger of the shares of the copy
bandwidth (4.1 TB/s) and of cuBLAS's best rate in bf16 (790 TFLOP/s). First calls include compiling.

Rows are sorted: losses first.{earlier}

![shares of the best peer](benchmarks-gpu.svg)
"""
EARLIER = """ Columns of torch.compile and JAX are of an earlier run on the same kind of card, whose clock moves by
a few percent with its heat."""
PEERS = ("torch_compile_ms", "torch_compile_first_s", "jax_ms")


def cell(value: Any) -> str:
    if value is None:
        return "–"
    return (
        f"{value:.4f}"
        if isinstance(value, float) and value < 10
        else f"{value:.2f}"
        if isinstance(value, float)
        else str(value)
    )


def limit(row: dict[str, Any]) -> float | None:
    """The share of what the card can do."""
    rate = row.get("tflops", 0.0) / 790 if "f32" not in row["work"] else 0.0
    return max(row.get("of_copy", 0.0), rate) or None


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| work | strata | torch | torch.compile | jax | share | TFLOP/s | of the limit | kernels | first call, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: r["of_best_peer"]):
        times = [cell(r.get(name)) for name in ("strata_ms", "torch_ms", "torch_compile_ms", "jax_ms")]
        first = cell(r.get("first_s"))
        if "torch_compile_first_s" in r:
            first += f" (torch.compile {r['torch_compile_first_s']})"
        rest = [f"{r['of_best_peer']:.2f}", cell(r.get("tflops")), share(limit(r)), str(r["kernels"]), first]
        lines.append(f"| {r['work']} | " + " | ".join([*times, *rest]) + " |")
    return "\n".join(lines)


TITLES = {
    "models": "Models",
    "steps": "Training steps",
    "gemm": "Matmuls, bf16",
    "quantised": "Quantised weights, x in bf16",
    "attention": "Attention, bf16",
    "training": "Attention with gradients, bf16",
    "memory": "What is bound by memory, bf16",
    "conv": "Convolutions",
}
NOTES = {
    "models": "Behind the embeddings, weights random. The decode step reads a KV cache and all weights once.",
    "gemm": "Sizes are rows x terms x columns.",
    "quantised": "Rows x terms x columns, with blocks as files have them; torch multiplies the same weights in bf16.",
    "attention": "batch x heads (key heads) x queries x keys x width.",
    "training": "Forward and backward, in one graph.",
    "steps": "Loss in bf16 over weights in f32, gradients, AdamW; strata writes new weights beside the old ones.",
}


def with_earlier(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with peers of an earlier run where this one has none."""
    before = {r["work"]: r for r in earlier if "work" in r}
    made = []
    for row in rows:
        peers = {k: v for k, v in before.get(row.get("work"), {}).items() if k in PEERS}
        full = {**peers, **row}
        if "strata_ms" in full:
            times = [full[k] for k in ("torch_ms", "torch_compile_ms", "jax_ms") if k in full]
            full["of_best_peer"] = min(times) / full["strata_ms"]
        made.append(full)
    return made


def picture(rows: list[dict[str, Any]]) -> str:
    groups: dict[str, list[Bar]] = {}
    for row in sorted((r for r in rows if "of_best_peer" in r), key=lambda r: r["of_best_peer"]):
        groups.setdefault(TITLES[row["group"]], []).append((row["work"], row["of_best_peer"], ""))
    return bars({title: groups[title] for title in TITLES.values() if title in groups})


def as_users_see_it(rows: list[dict[str, Any]]) -> list[str]:
    """Times by the clock of the host: of calls (`device_calls`), and of tokens (`device_decode`)."""
    parts = []
    calls = [r for r in rows if "us" in r]
    if calls:
        lines = ["| x + 1 on 8 floats that are there | µs a call | best |", "|---|---|---|"]
        lines += [f"| {r['call']} | {r['us']} | {r['best_us']} |" for r in sorted(calls, key=lambda r: r["us"])]
        about = "By `python -m benchmarks.device_calls`: the clock of the host, over 2,000 calls and one wait."
        parts += ["## Calls\n", about + "\n", "\n".join(lines) + "\n"]
    told = [r for r in rows if "tokens_s" in r]
    if told:
        lines = ["| model | tokens/s | best | first token, s |", "|---|---|---|---|"]
        lines += [f"| {r['model']} | {r['tokens_s']} | {r['best']} | {r['first_token_s']} |" for r in told]
        about = "By `python -m benchmarks.device_decode`: `model.tokens` of one sequence, the median of parts of 32."
        parts += ["## Generation\n", about + "\n", "\n".join(lines) + "\n"]
    return parts


def blocks_share(row: dict[str, Any]) -> float:
    """Of the copy bandwidth, how fast a row's best schedule reads quantised weights."""
    form, (n, k) = gguf_blocks.block_format(row["kind"].split(" ")[-2]), row["sizes"]
    return float(n * k / form.elements * form.bytes / row["best"][0][0] / 1e9 / COPY)


def swept(rows: list[dict[str, Any]]) -> list[str]:
    """Few rows with quantised weights by the best schedule, and how fast the weights are read (`gpu_sweep`)."""
    lines = ["| format | rows x terms x columns | µs | weights, TB/s | of the copy bandwidth | schedule |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        *_, name, m = row.get("kind", " ").split(" ")
        if not row.get("best") or int(m) > MOST_ROWS:
            continue
        (n, k), (ms, text), share = row["sizes"], row["best"][0], blocks_share(row)
        lines.append(f"| {name} | {m} x {k} x {n} | {1e3 * ms:.1f} | {share * COPY:.2f} | {share:.2f} | {text} |")
    about = "By `python -m benchmarks.gpu_sweep blocks`: weights take turns, so that none is in L2 when it is read."
    return ["## Quantised weights from memory, x in bf16\n", about + "\n", "\n".join(lines) + "\n"] if lines[2:] else []


def page(rows: list[dict[str, Any]], *, has_earlier: bool = False) -> str:
    about = rows[0]
    found = [r for r in rows[1:] if "of_best_peer" in r]
    parts = [HEAD.format(device=about["device"], torch=about["torch"], earlier=EARLIER if has_earlier else "")]
    for group, title in TITLES.items():
        mine = [r for r in found if r["group"] == group]
        if mine:
            parts += [f"## {title}\n", *([NOTES[group] + "\n"] if group in NOTES else []), table(mine) + "\n"]
    parts += swept(rows)
    parts += as_users_see_it(rows)
    failed = [r for r in rows[1:] if "fails" in r or not r.get("right", True)]
    if failed:
        parts += [
            "## Rows that fail\n",
            *(f"- {r['work']}: {r.get('fails', 'wrong by ' + str(r.get('error')))}" for r in failed),
        ]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    source, target, *earlier = map(Path, sys.argv[1:])
    rows = json.loads(source.read_text())
    if earlier:
        rows = with_earlier(rows, json.loads(earlier[0].read_text()))
    target.write_text(page(rows, has_earlier=bool(earlier)), encoding="utf-8")
    target.with_suffix(".svg").write_text(picture(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
