"""Models of transformers, timm, torchvision and diffusers (`tests.torch_zoo`): strata beside eager torch and inductor.

    python -m benchmarks.torch_models [--threads 2] [--seconds 0.3] [--inductor] [--cold] [names …]

Every model has a process of its own, and another one for inductor. They are timed in blocks of calls that come in
turns: loops of torch's threads go on spinning for a while, so a pause lies between two blocks. A first call is all from
`torch.compile` to the first result, with libraries imported and torch's tracer warm; with `--cold`, each model begins
with empty caches. What torch's own tracing takes of it is the first call of `aot_eager`, which compiles nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 4  # blocks of each contender
PAUSE = 0.02  # seconds between blocks
TRACED = "aot_eager"  # torch's backend that traces and compiles nothing: what it takes is in every first call


class Model:
    """One model in this process, with what runs it."""

    def __init__(self, name: str, contenders: list[str], threads: int) -> None:
        import torch

        from tests.torch_zoo import FULL, MODELS, begin

        torch.set_num_threads(threads)
        begin()
        module, self.args, kwargs = {**MODELS, **FULL}[name]()
        module = module.eval()
        if kwargs and "use_cache" in getattr(module, "config", {}).__dict__:
            kwargs = {**kwargs, "use_cache": False}
        self.kwargs = kwargs
        self.made: dict[str, Any] = {"eager": module}
        self.first: dict[str, float] = {}
        with torch.no_grad():
            for contender in contenders:
                if contender != "eager":
                    self._compile(module, contender)
                for _ in range(3):
                    self.made[contender](*self.args, **self.kwargs)

    def _compile(self, module: Any, contender: str) -> None:
        import torch

        torch.compile(torch.nn.ReLU(), backend=contender)(torch.randn(8))  # imports torch's tracer
        start = time.perf_counter()
        self.made[contender] = torch.compile(module, backend=contender)
        self.made[contender](*self.args, **self.kwargs)
        self.first[contender] = time.perf_counter() - start

    def block(self, contender: str, seconds: float) -> list[float]:
        """Times of calls, one behind the other."""
        import torch

        run, args, kwargs = self.made[contender], self.args, self.kwargs
        times: list[float] = []
        gc.collect()
        gc.disable()
        time.sleep(PAUSE)
        with torch.no_grad():
            end = time.perf_counter() + seconds
            while len(times) < 3 or time.perf_counter() < end:
                start = time.perf_counter()
                run(*args, **kwargs)
                times.append(time.perf_counter() - start)
        gc.enable()
        return times


def serve(name: str, contenders: list[str], threads: int, wait: Callable[[], None] = lambda: None) -> None:
    """Compile a model, then time blocks as they are asked for on the standard input."""
    try:
        model = Model(name, contenders, threads)
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is told
        print(json.dumps({"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}), flush=True)
        return
    print(json.dumps({"first": model.first}), flush=True)
    wait()
    for line in sys.stdin:
        contender, seconds = line.split()
        print(json.dumps({"times": model.block(contender, float(seconds))}), flush=True)


class Child:
    """A process that serves one model."""

    def __init__(self, name: str, contenders: list[str], threads: int, caches: dict[str, str]) -> None:
        self.contenders = contenders
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.torch_models", name, "--serve"]
        command += [",".join(contenders), "--threads", str(threads)]
        pipe = subprocess.PIPE
        own, nowhere = {**os.environ, **caches}, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, env=own)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):
                found: dict[str, Any] = json.loads(line)
                return found
        return {"failed": f"the process ended with {self.process.wait()}"}

    def block(self, contender: str, seconds: float) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{contender} {seconds}\n")
        self.process.stdin.flush()
        times: list[float] = self.answer()["times"]
        return times

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def prepared(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row: the model is compiled in one process after the other, then timed in turns."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "STRATA_CACHE_DIR": str(folder / "strata")}
    row: dict[str, Any] = {"model": name, "first": {}}
    children = []
    for team in (["strata", "eager"], *([[TRACED], ["inductor"]] if options.inductor else [])):
        children.append(Child(name, team, options.threads, caches if options.cold else {}))
        answer = children[-1].answer()
        if "failed" in answer:
            row["failed"] = f"{team[0]}: {answer['failed']}"
        else:
            row["first"].update(answer["first"])
        if team == [TRACED]:
            children.pop().close()
    if "failed" not in row:
        measure(children, row, options.seconds)
    for child in children:
        child.close()
    return row


def measure(children: list[Child], row: dict[str, Any], seconds: float) -> None:
    """Blocks in turns; what is kept is the best and the median of all calls."""
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for child in children:
            for contender in child.contenders:
                times.setdefault(contender, []).extend(child.block(contender, seconds / ROUNDS))
    row["best"] = {c: min(t) for c, t in times.items()}
    row["median"] = {c: sorted(t)[len(t) // 2] for c, t in times.items()}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "failed" in row:
        return f"| {row['model']} | {row['failed']} |"
    best, first = row["best"], row["first"]
    shown = [row["model"], f"{best['eager'] * 1e3:.3f}", f"{best['strata'] * 1e3:.3f}"]
    shown += [f"{row[k]['eager'] / row[k]['strata']:.2f}" for k in ("best", "median")]
    if "inductor" in best:
        shown += [f"{best['inductor'] * 1e3:.3f}", f"{best['inductor'] / best['strata']:.2f}"]
        shown += [f"{first[c]:.2f}" for c in ("strata", "inductor", TRACED)]
        shown += [f"{first['inductor'] / first['strata']:.1f}"]
    return "| " + " | ".join(shown) + " |"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric means, and the worst."""
    from benchmarks.report import geometric_mean

    good = [r for r in rows if "best" in r]
    lines = []
    for other in ("eager", "inductor"):
        for key in ("best", "median"):
            ratios = {r["model"]: r[key][other] / r[key]["strata"] for r in good if other in r[key]}
            if ratios:
                worst = min(ratios, key=lambda n: ratios[n])
                mean = geometric_mean(list(ratios.values()))
                lines.append(f"{key} of {len(ratios)}: {mean:.2f} × {other}, worst {ratios[worst]:.2f} ({worst})")
    first = [r["first"]["inductor"] / r["first"]["strata"] for r in good if "inductor" in r["first"]]
    if first:
        lines.append(
            f"first calls: inductor takes {geometric_mean(first):.1f} times as long, at least {min(first):.1f}"
        )
    return lines


def main() -> int:
    """Measure, and print the table."""
    from tests.torch_zoo import FULL, MODELS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="names of models, or parts of them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.names[0], options.serve.split(","), options.threads)
        return 0
    names = [n for n in (*MODELS, *FULL) if not options.names or any(p in n for p in options.names)]
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            row = prepared(name, options, Path(folder))
        rows.append(row)
        print(line(row), flush=True)
    print("\n".join(summary(rows)))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
