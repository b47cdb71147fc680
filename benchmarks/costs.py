"""Promises in seconds: what importing, compiling, a warm start and a call may cost. `python -m benchmarks.costs`.

Tests pin the same things in counts, which do not depend on what else a machine does. These limits hold on a quiet one;
the least of several tries is what counts. `python -m benchmarks --check` checks them, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Cost:
    """Something that may take `limit` seconds; `measure` gives those of one try."""

    name: str
    limit: float
    measure: Callable[[], float]
    tries: int = 10


def least(cost: Cost) -> float:
    """Seconds of the best try; further ones are left out once it is within the limit."""
    best = float("inf")
    for _ in range(cost.tries):
        best = min(best, cost.measure())
        if best < cost.limit:
            break
    return best


def timed(call: Callable[[], Any], count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _child(code: str, cache: str) -> float:
    env = {**os.environ, "STRATA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return float(done.stdout)


IMPORT = "import time, numpy; s = time.perf_counter(); import strata; print(time.perf_counter() - s)"
COMPILE = """
import time
import strata.ops
from tests.programs.graphs import encoder
from strata.runtime import Session
g, s = encoder(6, 1, 32), Session("cpu")
start = time.process_time()
s.compile(g)
print(time.process_time() - start)
"""


def costs(cache: str) -> list[Cost]:
    """All promises; `cache` is an empty folder."""
    import strata as st
    from strata.core import f32
    from strata.mir import Graph, parse, verify
    from strata.runtime import CompilePipeline, Session
    from strata.transforms import grad, jvp, vmap
    from tests.programs import graphs

    rng = np.random.default_rng(0)
    a, b = (st.tensor(rng.standard_normal(1000).astype("f")) for _ in range(2))
    sizes = iter(range(1001, 100_000))

    def new_shape() -> float:
        n = next(sizes)
        x, y = (st.tensor(rng.standard_normal(n).astype("f")) for _ in range(2))

        def add() -> None:
            (x + y).numpy()

        return timed(add)

    def old_shape() -> float:
        def add() -> None:
            (a + b).numpy()

        return timed(add, 100)

    g = Graph("small")
    small = Session("cpu").compile(g.outputs(g.input("x", (4,)) + 1.0))
    x, out = np.ones(4, np.float32), [np.empty(4, np.float32)]
    feeds = {"x": x}

    def chain(count: int) -> Graph:
        g = Graph("chain")
        x = y = g.input("x", f32[4])
        for _ in range(count // 2):
            y = (y + x).tanh()
        return g.outputs(y.sum())

    long = chain(10_000)
    stages: dict[str, Callable[[], Any]] = {
        "verify": lambda: verify(long), "parse": lambda: parse(str(long)), "grad": lambda: grad(long, ["x"]),
        "jvp": lambda: jvp(long, ["x"]), "vmap": lambda: vmap(long, ["x"], 3),
    }  # fmt: skip

    def planned(build: Callable[[], Graph]) -> Callable[[], float]:
        graph = build()
        return lambda: timed(lambda: CompilePipeline("cpu").compile(graph))

    return [
        Cost("import strata, beyond numpy", 0.3, lambda: _child(IMPORT, cache)),
        Cost("compile an encoder of 6 layers, cold", 1.5, lambda: _child(COMPILE, tempfile.mkdtemp(dir=cache)), 3),
        Cost("compile an encoder of 6 layers, warm", 0.045, lambda: _child(COMPILE, cache), 12),
        Cost("plan an encoder of 12 layers", 0.5, planned(lambda: graphs.encoder(12)), 4),
        Cost("plan a decoder of 32 layers", 1.5, planned(lambda: graphs.llama(32)), 4),
        *(Cost(f"{name} 10,000 ops", 10.0, lambda run=run: timed(run), 2) for name, run in stages.items()),
        Cost("compile a chain of 512 multiply-adds", 1.0, _long_chain, 3),
        Cost("(a + b).numpy() of 1,000 floats", 60e-6, old_shape, 50),
        Cost("(a + b).numpy() of a new shape", 5e-3, new_shape, 40),
        Cost("run of four floats", 8e-6, lambda: timed(lambda: small.run(x=x), 2000), 25),
        Cost("run_into of four floats", 3e-6, lambda: timed(lambda: small.run_into(feeds, out), 2000), 25),
    ]


def _long_chain() -> float:
    from strata.backends.llvm.codegen.compile import compile_kernel
    from tests.unit.kernel import samples

    def chain(k: Any, x: Any, y: Any) -> Any:
        for _ in range(512):
            x = x * y + y
        return x

    kernel = samples.elementwise((1000,), chain, inputs=2)
    return timed(lambda: compile_kernel(kernel))


def check() -> int:
    """Measure all of them and print a table; the number of those beyond their limits."""
    from strata.config import using

    over = 0
    with tempfile.TemporaryDirectory() as cache, using(cache_dir=Path(cache)):
        for cost in costs(cache):
            seconds = least(cost)
            over += seconds > cost.limit
            word = "TOO LONG" if seconds > cost.limit else "ok"
            print(f"{word:<9} {cost.name:<40} {seconds:9.3g} s of {cost.limit:g}", flush=True)
    return over


if __name__ == "__main__":
    sys.exit(bool(check()))
