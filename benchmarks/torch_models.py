"""Models of transformers, timm, torchvision and diffusers (`tests.torch_zoo`): strata beside eager torch and inductor.

    python -m benchmarks.torch_models [--threads 2] [--seconds 0.3] [--inductor] [--cold] [--again] [names …]
    python -m benchmarks.torch_models --device cuda --together --check [--train] [--inductor] [names …]

Every model has a process of its own, and another one for inductor. They are timed in blocks of calls that come in
turns: loops of torch's threads go on spinning for a while, so a pause lies between two blocks. A first call is all from
`torch.compile` to the first result, with libraries imported and torch's tracer warm; with `--cold`, each model begins
with empty caches. What torch's own tracing takes of it is the first call of `aot_eager`, which compiles nothing.
`--again` measures the first call of a second process. With `--together` all models are compiled at once, which takes
less time, but says little of first calls. `--train` times steps of training: forward, a loss, backward. `--check`
compares with eager in f64: results, or gradients.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROUNDS = 4  # blocks of each contender
PAUSE = 0.02  # seconds between blocks
TRACED = "aot_eager"  # torch's backend that traces and compiles nothing: what it takes is in every first call


class Model:
    """One model in this process, with what runs it."""

    def __init__(self, name: str, contenders: list[str], options: argparse.Namespace) -> None:
        import torch

        from tests.torch_zoo import FULL, MODELS, begin

        torch.set_num_threads(options.threads)
        torch.backends.cudnn.allow_tf32 = False
        begin()
        module, args, kwargs = {**MODELS, **FULL}[name]()
        if kwargs and "use_cache" in getattr(module, "config", {}).__dict__:
            kwargs = {**kwargs, "use_cache": False}
        self.is_trained, self.device = options.train, options.device
        if self.is_trained:
            for part in module.modules():
                if isinstance(part, torch.nn.Dropout):
                    part.p = 0.0
        module = module.train(self.is_trained).to(self.device)
        self.args, self.kwargs = moved(args, self.device), moved(kwargs, self.device)
        self.made: dict[str, Any] = {"eager": module}
        self.first: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        truth = self._result(*widened(self)) if options.check else None
        for contender in contenders:
            if contender != "eager":
                self._compile(module, contender)
            for _ in range(3):
                self.run(contender)
            if truth is not None:
                found = self._result(self.made[contender], self.args, self.kwargs)
                self.errors[contender] = max(map(distance, found, truth), default=0.0)

    def _compile(self, module: Any, contender: str) -> None:
        import torch

        warm = torch.nn.ReLU().to(self.device)
        torch.compile(warm, backend=contender)(torch.randn(8, device=self.device))  # imports torch's tracer
        self.wait()
        start = time.perf_counter()
        self.made[contender] = torch.compile(module, backend=contender)
        self.run(contender)
        self.first[contender] = time.perf_counter() - start

    def run(self, contender: str) -> None:
        """One call, or one step of training."""
        self._step(self.made[contender], self.args, self.kwargs)
        self.wait()

    def _step(self, call: Any, args: Any, kwargs: Any) -> Any:
        import torch

        from tests.torch_zoo import leaves

        if not self.is_trained:
            with torch.no_grad():
                return call(*args, **kwargs)
        call.zero_grad()
        loss: Any = sum(t.square().mean() for t in leaves(call(*args, **kwargs)))
        loss.backward()
        return loss

    def _result(self, call: Any, args: Any, kwargs: Any) -> list[Any]:
        """What a call gives; of a step of training, all gradients."""
        import torch

        from tests.torch_zoo import leaves

        given = self._step(call, args, kwargs)
        if not self.is_trained:
            return [t.detach().double() for t in leaves(given)]
        return [torch.cat([p.grad.flatten() for p in call.parameters() if p.grad is not None]).double()]

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def block(self, contender: str, seconds: float) -> list[float]:
        """Times of calls, one behind the other."""
        times: list[float] = []
        gc.collect()
        gc.disable()
        time.sleep(PAUSE)
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            self.run(contender)
            times.append(time.perf_counter() - start)
        gc.enable()
        return times


def moved(x: Any, device: str) -> Any:
    """Arguments with their tensors on a device."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {k: moved(v, device) for k, v in x.items()}
    return type(x)(moved(v, device) for v in x) if isinstance(x, (list, tuple)) else x


def widened(model: Model) -> tuple[Any, Any, Any]:
    """A copy of a model in f64, and its arguments."""
    from tests.torch_zoo import wide

    return copy.deepcopy(model.made["eager"]).double(), wide(model.args), wide(model.kwargs)


def distance(found: Any, truth: Any) -> float:
    """The length of a difference, by the length of what is true."""
    if not truth.numel():
        return 0.0
    return float((found - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def serve(name: str, contenders: list[str], options: argparse.Namespace) -> None:
    """Compile a model, then time blocks as they are asked for on the standard input."""
    import strata as st

    try:
        model = Model(name, contenders, options)
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is told
        print(json.dumps({"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}), flush=True)
        return
    stayed = dict(st.torch.report().stayed) if "strata" in contenders else {}
    print(json.dumps({"first": model.first, "errors": model.errors, "stayed": stayed}), flush=True)
    for line in sys.stdin:
        contender, seconds = line.split()
        print(json.dumps({"times": model.block(contender, float(seconds))}), flush=True)


class Child:
    """A process that serves one model."""

    def __init__(self, name: str, contenders: list[str], options: argparse.Namespace, caches: dict[str, str]) -> None:
        self.contenders = contenders
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.torch_models", name, "--serve"]
        command += [",".join(contenders), "--threads", str(options.threads), "--device", options.device]
        command += [f"--{flag}" for flag in ("train", "check") if getattr(options, flag)]
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


def prepared(name: str, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[Child]]:
    """A row, and the processes in which the model is compiled, one after the other."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "STRATA_CACHE_DIR": str(folder / "strata")}
    caches["TRITON_CACHE_DIR"] = str(folder / "triton")
    row: dict[str, Any] = {"model": name, "first": {}, "errors": {}, "stayed": {}}
    teams = [["strata", "eager"], *([["strata"]] if options.again else [])]
    teams += [[TRACED], ["inductor"]] if options.inductor else []
    children = []
    for number, team in enumerate(teams):
        child = Child(name, team, options, caches if options.cold else {})
        answer = child.answer()
        if "failed" in answer:
            row["failed"] = f"{team[0]}: {answer['failed']}"
        elif team == ["strata"] and number:
            row["first"]["again"] = answer["first"]["strata"]
        else:
            for key in ("first", "errors", "stayed"):
                row[key].update(answer[key])
        if team == [TRACED] or (number and team == ["strata"]):
            child.close()
        else:
            children.append(child)
    return row, children


def timed(row: dict[str, Any], children: list[Child], seconds: float) -> None:
    """Time a model that is compiled, and end its processes."""
    if "failed" not in row:
        measure(children, row, seconds)
    for child in children:
        child.close()


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
    if "again" in first:
        shown += [f"again {first['again']:.2f}"]
    shown += [f"{c} {e:.1e}" for c, e in row["errors"].items()] + [f"stayed {row['stayed']}"] * bool(row["stayed"])
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
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.names[0], options.serve.split(","), options)
        return 0
    known = {**MODELS, **FULL}
    names = [n for n in known if not options.names or any(p in n for p in options.names)]
    if all(n in known for n in options.names):
        names = options.names or names
    rows = []
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(len(names) if options.together else 1) as pool:
        coming = [pool.submit(prepared, name, options, Path(top) / name) for name in names] if options.together else []
        done = [future.result() for future in coming]  # none is timed before all are compiled
        for at, name in enumerate(names):
            row, children = done[at] if done else prepared(name, options, Path(top) / name)
            timed(row, children, options.seconds)
            rows.append(row)
            print(line(row), flush=True)
    print("\n".join(summary(rows)))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
