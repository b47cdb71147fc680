"""Models of transformers, timm, torchvision and diffusers (`torch_zoo`), compiled by strata.

    python -m tests.torch_models [names …] [--train] [--json FILE]

Models run in processes beside this one: eager in f64 is the truth, and strata's error against it may be at most twice
that of eager in f32. Libraries that are not installed are named, and their models count as not run. `--train` is
`torch_training`; times are `benchmarks.torch_models`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from tests.torch_training import NEAR, train_model
from tests.torch_zoo import MODELS, TRAINED, begin, leaves, wide

GROUP = 10  # models of one process: importing the libraries takes longer than most of them


def error(found: list[Any], truth: list[Any]) -> float:
    """How far results are from the truth, by the length of both: the worst of them."""
    worst = 0.0
    assert len(found) == len(truth), f"{len(found)} results, not {len(truth)}"
    for a, b in zip(found, truth, strict=True):
        assert a.shape == b.shape, f"{a.shape}, not {b.shape}"
        if b.numel():
            worst = max(worst, ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item())
    return worst


def run_model(name: str) -> dict[str, Any]:
    """One model, in this process."""
    import torch

    import strata as st

    begin()
    model, args, kwargs = MODELS[name]()
    model = model.eval()
    if kwargs and "use_cache" in getattr(model, "config", {}).__dict__:
        kwargs = {**kwargs, "use_cache": False}
    with torch.no_grad():
        eager = leaves(model(*args, **kwargs))
        run: Any = torch.compile(model, backend="strata")
        start = time.perf_counter()
        ours = leaves(run(*args, **kwargs))
        first = time.perf_counter() - start
        again = leaves(run(*args, **kwargs))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped matmul of torch has no f64
        truth = leaves(model.double()(*wide(args), **wide(kwargs)))
    report = st.torch.report()
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "two calls differ"
    ours_error, eager_error = error(ours, truth), error(eager, truth)
    return {
        "name": name, "error": ours_error, "eager": eager_error, "first": first, "graphs": len(report.graphs),
        "ops": sum(g.ops for g in report.graphs), "stayed": report.stayed,
        "right": ours_error <= max(2 * eager_error, 2**-22),
    }  # fmt: skip


def main() -> int:
    """Run models one after the other, a few in each process, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        for name in options.names:
            print("\n" + json.dumps(_guarded(name, options)), flush=True)
        return 0
    names = options.names or list(TRAINED if options.train else MODELS)
    results: list[dict[str, Any]] = []
    while names:
        for result in _apart(names[:GROUP], options):
            names.remove(result["name"])
            results.append(result)
            print(_line(result), flush=True)
    whole = sum(r["right"] and not r.get("stayed") for r in results)
    print(f"{len(results)} models: {sum(r['right'] for r in results)} right, {whole} of them without a fallback")
    if options.train:
        print(f"{sum(r.get('strict', False) for r in results)} of them within {NEAR} of eager in all they have")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0 if all(r["right"] for r in results) else 1


def _guarded(name: str, options: argparse.Namespace) -> dict[str, Any]:
    try:
        return train_model(name, options.steps) if options.train else run_model(name)
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is told, and the next model runs
        last = "".join(traceback.format_tb(failure.__traceback__)[-3:])
        return {"name": name, "right": False, "why": f"{type(failure).__name__}: {str(failure)[:600]}\n{last}"}


def _apart(names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results of a process that runs several models; one that ends it is the last."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.torch_models",
        *names,
        "--one",
        "--steps",
        str(options.steps),
    ]
    command += ["--train"] * options.train
    left = list(names)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"name"'):
                result = json.loads(line)
                left.remove(result["name"])
                yield result
        code = process.wait()
    if left:
        yield {"name": left[0], "right": False, "why": f"the process ended with {code}"}


def _line(r: dict[str, Any]) -> str:
    head = f"{r['name']:22s} {'right' if r['right'] else 'WRONG'}"
    if "why" in r:
        return f"{head}  {r['why']}"
    numbers = {k: v for k, v in r.items() if isinstance(v, float)}
    shown = "  ".join(f"{k} {v:.2e}" for k, v in numbers.items())
    apart = "  (not strictly: differences grow in eager as well)" if r["right"] and not r.get("strict", True) else ""
    return f"{head}  {shown}{apart}" + (f"  stayed {r['stayed']}" if r["stayed"] else "")


if __name__ == "__main__":
    sys.exit(main())
