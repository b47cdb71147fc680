"""What the machine allows at most, and how near we come: fork-joins, and products with quantised weights.

    python -m benchmarks.ceilings [--threads 2] [--seconds 1]

A fork-join is timed from native code until every thread has taken its part: warm (a thousand in one program) and
after idling. The reading ceiling is four streams a thread through more memory than the caches hold; it is measured
in turns with the products, whose weights are read in turns from several copies that together do not fit the caches.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import strata as st
from strata import ops
from strata.backends.llvm import Argument, Program, Step, region_table
from strata.backends.llvm.builder import Module
from strata.backends.llvm.jit import compile_and_load
from strata.backends.llvm.pool import default_pool
from strata.core import Target
from strata.ops import schemes

KINDS = ("q4_0", "q4k", "q6k", "q8_0")
BARS = {"warm": 1e-6, "after idling": 60e-6, "share": 0.70}
MEMORY = 192 << 20  # bytes to read: several times the last cache
K, N = 4096, 14336
Run = Callable[[], Any]


def fork_joins(threads: int) -> dict[str, float]:
    """Seconds until every thread has taken its part of a step and is done with it."""
    count = 1000
    code = compile_and_load(_meeting(threads), ["meet"], Target.host())
    arrived = np.zeros(8 * count, np.int64)
    steps = tuple(Step("meet", (Argument(0, 64 * i),), threads, 1) for i in range(count))
    bound = Program(steps, 1).bind({"meet": code.address("meet")}, {})
    regions = region_table([arrived.ctypes.data])

    def run(last: int) -> float:
        arrived[:] = 0
        return _time(lambda: bound.run(regions, threads=threads, first=0, last=last))

    run(1)
    warm = min(run(count) for _ in range(20)) / count
    idle = []
    for _ in range(100):
        time.sleep(0.005)  # long after threads have stopped looking for work
        idle.append(run(1))
    return {"warm": warm, "after idling": float(np.median(idle))}


def _meeting(threads: int) -> str:
    """A chunk that ends when as many as there are threads have begun."""
    module = Module(Target.host().triple)
    f = module.function("meet", [("ptr", "args"), ("i64", "begin"), ("i64", "end")])
    cell = f.load("ptr", "%args", 8)
    f.op(f"atomicrmw add ptr {cell}, i64 1 seq_cst")
    head, done = f.fresh("head"), f.fresh("done")
    f.branch(head)
    f.label(head)
    here = f.op(f"load atomic i64, ptr {cell} seq_cst, align 8")
    f.branch_if(f.compare("sge", "i64", here, threads), done, head)
    f.label(done)
    f.ret()
    return module.text()


def reading(threads: int) -> tuple[Run, int]:
    """A run that reads much memory as four streams a chunk, and the bytes of it."""
    target = Target.host()
    lanes = target.lanes(4)
    chunk, type_ = 1 << 20, f"<{lanes} x i32>"
    module = Module(target.triple)
    f = module.function("read", [("ptr", "args"), ("i64", "begin"), ("i64", "end")])
    source, kept = (f.load("ptr", f.address("i64", "%args", i), 8) for i in range(2))

    def one(i: str, _: list[str]) -> None:
        base = f.address("i8", source, f.mul(i, chunk))
        streams = [f.address("i8", base, s * chunk // 4) for s in range(4)]

        def step(at: str, sums: list[str]) -> list[Any]:
            loaded = [f.load(type_, f.address("i8", stream, at), 4) for stream in streams]
            return [f.binary("xor", type_, s, x) for s, x in zip(sums, loaded, strict=True)]

        a, b, c, d = f.loop(0, chunk // 4, 4 * lanes, [(type_, "zeroinitializer")] * 4, step)
        total = f.binary("xor", type_, f.binary("xor", type_, a, b), f.binary("xor", type_, c, d))
        f.store(type_, total, f.address("i8", kept, f.mul(i, 64)), 4)

    f.loop("%begin", "%end", 1, [], one)
    f.ret()
    code = compile_and_load(module.text(), ["read"], target)
    memory, results = np.ones(MEMORY, np.uint8), np.zeros(MEMORY // chunk * 64, np.uint8)
    block = np.array([memory.ctypes.data, results.ctypes.data], np.int64)
    pool, address = default_pool(), ctypes.c_void_p(block.ctypes.data).value

    def run(keep: object = (code, memory, results, block)) -> None:
        assert address is not None
        pool.parallel(code.address("read"), address, MEMORY // chunk, 1, threads)

    return run, MEMORY


def product(kind: str, threads: int) -> tuple[Run, int]:
    """One row times quantised weights, a run for as many copies as do not fit the caches, and the bytes of all."""
    scheme = schemes.Scheme(f"gguf_{kind}")
    rng = np.random.default_rng(0)
    (part,) = scheme.encode(rng.standard_normal((K, 64)))
    codes = np.ascontiguousarray(np.tile(part, (N // 64,) + (1,) * (part.ndim - 1)))
    x = rng.standard_normal((1, K)).astype(np.float32)
    runs = []
    for _ in range(max(2, -(-MEMORY // codes.nbytes))):
        g = st.Graph("product")
        g.outputs(ops.dequant_matmul(g.input("x", (1, K)), g.param("w", codes.shape, "u8"), scheme=scheme))
        compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
        compiled.set_param("w", codes.copy())
        runs.append(compiled)

    def run() -> None:
        for compiled in runs:
            compiled.run({"x": x})

    return run, codes.nbytes * len(runs)


def shares(threads: int, seconds: float) -> dict[str, tuple[float, float]]:
    """GB/s of each kind, and of reading, best times in turns."""
    runs = {"read": reading(threads)} | {kind: product(kind, threads) for kind in KINDS}
    best = dict.fromkeys(runs, float("inf"))
    for run, _ in runs.values():
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, (run, _) in runs.items():
            best[name] = min(best[name], _time(run))
    rates = {name: size / best[name] / 1e9 for name, (_, size) in runs.items()}
    return {name: (rate, rate / rates["read"]) for name, rate in rates.items()}


def _time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=default_pool().default_threads)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of weights")
    options = parser.parse_args()
    for name, seconds in fork_joins(options.threads).items():
        told = "met" if seconds <= BARS[name] else "MISSED"
        print(
            f"fork-join of {options.threads}, {name:<13} {seconds * 1e6:8.2f} µs   bar {BARS[name] * 1e6:g} µs {told}"
        )
    for name, (rate, share) in shares(options.threads, options.seconds).items():
        bar = "" if name == "read" else f"bar {BARS['share']:.2f} {'met' if share >= BARS['share'] else 'MISSED'}"
        print(f"{name:<6} 1x{N}x{K}: {rate:6.1f} GB/s  {share:5.2f} of reading  {bar}")


if __name__ == "__main__":
    main()
