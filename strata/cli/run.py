"""`strata run`: a model or a graph on arrays from files, or random ones."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np

from strata.cli import show
from strata.cli.arrays import binding_for, random_array, random_weight, read_arrays, read_mapping, read_sizes
from strata.cli.parser import Mistake
from strata.cli.programs import ExampleProgram, open_program
from strata.config import using


def run(options: Namespace) -> None:
    """Run and show the results, or write them."""
    if options.output and not options.output.endswith(".npz"):
        raise Mistake(f"--output {options.output}: results are written as .npz")
    with using(**({"num_threads": options.threads} if options.threads else {})):
        start = time.perf_counter()
        program = open_program(options.model, options.device)
        loaded = time.perf_counter() - start
        feeds, is_random = prepare(program, options)
        times = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            results = program.run(feeds)
            times.append(time.perf_counter() - start)
    if options.output:
        np.savez(options.output, **dict(zip(program.outputs, results, strict=True)))  # type: ignore[arg-type]
    report = {
        "name": program.name, "inputs": [_described(n, a, is_random[n]) for n, a in feeds.items()],
        "outputs": [_described(n, a) for n, a in zip(program.outputs, results, strict=True)],
        "load_seconds": loaded, "runs": len(times), "best_seconds": min(times),
        "median_seconds": statistics.median(times),
    }  # fmt: skip
    if options.json:
        show.as_json(report)
    else:
        _print(report, options.output)


def prepare(program: ExampleProgram, options: Namespace) -> tuple[dict[str, np.ndarray], dict[str, bool]]:
    """Parameters set, inputs read or drawn; and which inputs are random."""
    given = read_arrays(options.input, list(program.inputs))
    known = [(program.inputs[n], a) for n, a in given.items()]
    types = [*program.inputs.values(), *program.params.values()]
    binding = binding_for(types, read_sizes(options.size), known)
    rng = np.random.default_rng(options.seed)
    if options.params:
        program.set_params(read_mapping(options.params))
    elif program.params:
        program.set_params({n: random_weight(t.bind(binding), rng) for n, t in program.params.items()})
    feeds = {n: given[n] if n in given else random_array(t.bind(binding), rng) for n, t in program.inputs.items()}
    return feeds, {n: n not in given for n in feeds}


def _described(name: str, array: Any, is_random: bool | None = None) -> dict[str, Any]:
    if not isinstance(array, np.ndarray):
        return {"name": name, "type": type(array).__name__}
    facts: dict[str, Any] = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
    if is_random is not None:
        return facts | {"random": is_random}
    if array.size and array.dtype.kind in "fiub":
        numbers = array.astype(np.float64)
        facts |= {"min": float(numbers.min()), "mean": float(numbers.mean()), "max": float(numbers.max())}
    return facts | {"first": array.reshape(-1)[:6].tolist()}


def _print(report: Mapping[str, Any], output: str | None) -> None:
    drawn = [i["name"] for i in report["inputs"] if i["random"]]
    if drawn:
        print(f"random input: {', '.join(drawn)}")
    rows = []
    for o in report["outputs"]:
        first = " ".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in o.get("first", []))
        numbers = [f"{o[k]:.5g}" if k in o else "" for k in ("min", "mean", "max")]
        rows.append((o["name"], f"{o.get('dtype', o.get('type'))}{o.get('shape', '')}", *numbers, first))
    show.table(("output", "type", ">min", ">mean", ">max", "first values"), rows, title=report["name"])
    best, runs = show.duration(report["best_seconds"]), report["runs"]
    median = "" if runs == 1 else f" at best, {show.duration(report['median_seconds'])} in the median of {runs}"
    print(f"loaded and compiled in {show.duration(report['load_seconds'])}, ran in {best}{median}")
    if output:
        print(f"written to {output}")
