"""All that a card has to show, in ten minutes: tests first, then every bar with what was measured, as a table.

    python -m benchmarks.gpu_bars --out rows.json     on a machine with an NVIDIA GPU, PyTorch and JAX
    python -m benchmarks.gpu_bars --rows rows.json    the table again, of rows that were measured before

Each stage is a process of its own with a limit of time; rows count as they are printed, and a bar whose row did not
come is open. Without a GPU only the tests run, on what stands in for one. Exit code 0: every bar is met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import strata as st
from benchmarks.gpu_page import blocks_share

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A number of a row, and what it has to be: at least, or at most."""

    row: str
    key: str
    limit: float
    most: bool = False
    over: str = ""  # the row whose number it is divided by

    @property
    def name(self) -> str:
        return f"{self.row}: {self.key}" + (f" over that of {self.over}" if self.over else "")

    @property
    def wanted(self) -> str:
        return f"{'<=' if self.most else '>='} {self.limit:g}"

    def measured(self, rows: Mapping[str, Row]) -> float | None:
        """None where there is no such number, or the results of its row are wrong."""
        found = [rows.get(name, {}) for name in (self.row, self.over) if name]
        if not all(row.get("right", True) and row.get(self.key) is not None for row in found):
            return None
        value, *below = (float(row[self.key]) for row in found)
        return value / below[0] if below else value

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Stage:
    """A process whose lines are rows, or a suite of tests, which is one row."""

    name: str
    command: tuple[str, ...]
    seconds: float
    is_suite: bool = False
    prefix: str = ""  # of the names of its rows


HERE = "tensors, streams, memory, threads"
SUITES = {
    "samples of all ops": ("tests/backends/test_cuda.py",),
    HERE: (
        "tests/unit/tensor/test_residence.py", "tests/backends/test_torch_cuda.py", "tests/backends/test_on_a_card.py",
    ),
}  # fmt: skip
LAUNCHER = ("tests/unit/backends/triton/test_cuda.py", "tests/unit/backends/triton/test_workers.py")
AGAIN = "again: "


def stages(*, has_card: bool) -> list[Stage]:
    """What matters most comes first. First calls are of an empty cache, so that models come before other rows."""
    spread = ("-n", "auto") if has_card and find_spec("xdist") else ()
    few = () if has_card else ("--few",)
    suites = SUITES if has_card else {"launcher": LAUNCHER, HERE: SUITES[HERE]}
    made = [Stage(name, ("-m", "pytest", "-q", *spread, *few, *paths), 200 if has_card else 600, is_suite=True)
            for name, paths in suites.items()]  # fmt: skip
    if not has_card:
        return made
    gpu = ("-m", "benchmarks.gpu")
    alone = ("--no-compile", "--no-jax")
    return [
        *made,
        Stage("models", (*gpu, "--only", "models,steps", *alone), 120),
        Stage("warm models", (*gpu, "--only", "models", "--match", "BERT-base", *alone), 40, prefix=AGAIN),
        Stage("calls", ("-m", "benchmarks.device_calls"), 40),
        Stage("kernels", (*gpu, "--only", "gemm,attention,training,memory"), 200),
        Stage("decode", ("-m", "benchmarks.device_decode"), 90),
        Stage("quantised", ("-m", "benchmarks.gpu_sweep", "blocks", "--table"), 60),
        Stage("learning curve", ("-m", "benchmarks.gpt2_curve", "--only", "f32"), 150),
    ]


def bars() -> list[Bar]:
    """Of calls and whole programs, then of kernels."""
    made = [Bar(name, "passed", 1) for name in SUITES]
    made += [Bar(f"strata, {how}", "us", 10, most=True) for how in ("jit", "compiled graph")]
    made += [
        Bar("Llama of 22 layers, bf16", "tokens_s", 400),
        Bar("GPT-2 f32 beside the processor", "largest_gap", 1e-2, most=True),
        Bar("BERT-base bf16 1x128", "strata_ms", 1.0, most=True),
        Bar("BERT-base bf16 32x128", "strata_ms", 2.6, most=True),
        Bar("BERT-base bf16 32x128", "first_s", 4, most=True),
        Bar(f"{AGAIN}BERT-base bf16 32x128", "first_s", 0.3, most=True),
        Bar("ResNet-50 f16 64", "strata_ms", 2.7, most=True),
        Bar("Llama-1.1B bf16 decode over 1024", "strata_ms", 1.0, most=True),
        Bar("Llama-1.1B bf16 prefill 2048", "tflops", 350),
        Bar("GPT-2 124M bf16 16x1024, AdamW", "strata_ms", 41, most=True),
        Bar("GPT-2 124M bf16 16x1024, AdamW", "first_s", 6, most=True),
    ]
    shares = {(8192,) * 3: 0.95, (4096,) * 3: 0.88, (2048,) * 3: 0.8, (1024,) * 3: 0.8, (16, 4096, 4096): 1.0,
              (1, 4096, 14336): 1.0}  # fmt: skip
    made += [Bar(f"matmul {'x'.join(map(str, sizes))}", "of_best_peer", share) for sizes, share in shares.items()]
    made += [
        Bar("matmul 1x4096x14336", "of_copy", 0.75),
        Bar("gelu(4096x4096x4096 + bias)", "strata_ms", 1.03, most=True, over="matmul 4096x4096x4096"),
    ]
    attentions = {"4x16(16)x4096x4096x128": 0.9, "4x16(16)x4096x4096x128 causal": 0.9, "8x16(16)x1024x1024x64": 1.0,
                  "32x12(12)x128x128x64": 1.0}  # fmt: skip
    made += [Bar(f"attention {name}", "of_best_peer", share) for name, share in attentions.items()]
    made += [Bar(f"attention {name}", "of_copy", 0.8) for name in ("1x32(8)x1x32768x128", "8x32(8)x1x8192x128")]
    gradients = ("16x12x1024x64 causal", "4x16x4096x128 causal", "8x16x1024x64")
    made += [Bar(f"attention and gradients {name}", "of_best_peer", 0.7) for name in gradients]
    rows = ("copy + 1", "softmax", "layer norm", "rms norm of x + y", "gelu(x * w + w)", "sum of rows",
            "sum of columns", "transpose", "cumsum of rows")  # fmt: skip
    made += [Bar(f"{name} 16384x4096", "of_copy", 0.85) for name in rows]
    made.append(Bar("cross entropy 4096x131072", "of_copy", 0.85))
    formats = ("q4k", "q6k", "q8_0", "q4_0")
    return made + [Bar(f"{name} 1x4096x14336 from memory", "of_copy", 0.75) for name in formats]


def named(row: Row) -> tuple[str, Row] | None:
    """The name that bars know a row by."""
    if "losses" in row:
        return f"GPT-2 {row['kind']} beside the processor", {k: v for k, v in row.items() if k != "losses"}
    if row.get("best") and "sizes" in row:
        *_, form, rows = row["kind"].split(" ")
        n, k = row["sizes"]
        return f"{form} {rows}x{k}x{n} from memory", {"of_copy": round(blocks_share(row), 3), **row}
    name = next((row[key] for key in ("work", "call", "model", "suite") if key in row), None)
    return None if name is None else (name, row)


def rows_of(stage: Stage, seconds: float, environment: Mapping[str, str]) -> Iterator[Row]:
    """Rows as they are printed; the process ends in time."""
    command = [sys.executable, *stage.command]
    begin = time.perf_counter()
    told = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = Timer(seconds, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                told = line.strip() or told
                if not stage.is_suite and line.startswith("{"):
                    with suppress(ValueError):  # what another library prints
                        yield json.loads(line)
        finally:
            timer.cancel()
            process.kill()
    if stage.is_suite:
        yield {"suite": stage.name, "passed": int(process.returncode == 0), "told": told}
    elif process.returncode:
        spent = time.perf_counter() - begin
        yield {"stage": stage.name, "fails": f"exit code {process.returncode} after {spent:.0f} s: {told[:200]}"}


def collected(todo: Sequence[Stage], seconds: float, cache: str) -> Iterator[Row]:
    """Rows of all stages, none of which begins when time is over."""
    end = time.perf_counter() + seconds
    environment = {**os.environ, "STRATA_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
    for stage in todo:
        left = end - time.perf_counter()
        if left <= 0:
            yield {"stage": stage.name, "fails": "no time was left"}
            continue
        for row in rows_of(stage, min(left, stage.seconds), environment):
            if stage.prefix and "work" in row:
                row["work"] = stage.prefix + row["work"]
            yield row


def table(wanted: Sequence[Bar], rows: Sequence[Row]) -> tuple[str, bool]:
    """Bars that are not met first, and whether there are none."""
    known = dict(found for row in rows if (found := named(row)) is not None)
    lines = []
    for bar in wanted:
        value = bar.measured(known)
        state = "open" if value is None else "pass" if bar.is_met(value) else "FAIL"
        why = ""
        if value is None:
            row = known.get(bar.row, {})
            why = row.get("fails", "" if row.get("right", True) else f"results are wrong by {row.get('error')}")
        lines.append((state, bar.name, bar.wanted, "-" if value is None else f"{value:.4g}", why))
    lines.sort(key=lambda line: ("FAIL", "open", "pass").index(line[0]))
    width = max(len(name) for _, name, *_ in lines)
    text = [
        f"{state}  {name:{width}}  {limit:>8}  {value:>9}  {why}".rstrip() for state, name, limit, value, why in lines
    ]
    text += [f"{row['stage']}: {row['fails']}" for row in rows if "stage" in row]
    text += [f"{row['suite']}: {row['told']}" for row in rows if "suite" in row]
    counts = {state: sum(line[0] == state for line in lines) for state in ("pass", "FAIL", "open")}
    text.append(", ".join(f"{count} {state}" for state, count in counts.items()))
    return "\n".join(text), counts["pass"] == len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=Path, help="judge rows of a file, and measure nothing")
    parser.add_argument("--out", type=Path, help="a file for the rows")
    parser.add_argument("--minutes", type=float, default=10)
    given = parser.parse_args()
    rows: list[Row] = json.loads(given.rows.read_text()) if given.rows else []
    if given.rows is None:
        has_card = any(name.startswith("cuda") for name in st.devices())
        if not has_card:
            print("no NVIDIA GPU here: tests run on what stands in for one, nothing is timed", flush=True)
        with tempfile.TemporaryDirectory(prefix="strata-bars-") as cache:
            for row in collected(stages(has_card=has_card), 60 * given.minutes, cache):
                rows.append(row)
                print(json.dumps(row if "losses" not in row else {**row, "losses": "..."}), flush=True)
                if given.out is not None:
                    given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    text, is_met = table(bars(), rows)
    print(text)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
