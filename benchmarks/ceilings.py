"""What the machine allows at most, and how near we come: fork-joins, matmuls, quantised weights, a large model.

    python -m benchmarks.ceilings [--threads 2] [--seconds 1] [--json] [--no-model]

A fork-join is timed in native code until every thread has taken its part: warm (a thousand in one program) and after
idling. The call from Python that it is part of then takes tens of microseconds more, with one thread too: nothing is in
the caches. Its time is told in brackets. The ceiling of matmuls is independent chains of multiply-adds in registers;
that of quantised weights is reading four streams a thread through more memory than the caches hold. Ceilings are
measured in turns with what is held against them. Weights are read in turns from several copies that together do not fit
the caches. The large model is a Llama of a billion random weights in Q4_K.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from benchmarks.random_models import random_llama
from strata import ops
from strata.backends.llvm import Argument, NativeProgram, ProgramStep, region_table
from strata.backends.llvm.executor.thread_pool import default_pool
from strata.backends.llvm.ir.builder import IrModule, constant, vector
from strata.backends.llvm.jit.jit import compile_and_load
from strata.config import using
from strata.core import Target
from strata.ops.quant import schemes

KINDS = ("q4_0", "q4k", "q6k", "q8_0")
CUBES = ((256, "f32"), (512, "f32"), (1024, "f32"), (1024, "f64"))
MOST = {"warm": 1e-6, "after idling": 60e-6}  # seconds of a fork-join
PRODUCT, WEIGHTS, MODEL = 0.88, 0.70, 0.65  # least shares of the ceilings
MEMORY = 192 << 20  # bytes to read: several times the last cache
K, N = 4096, 14336
CONTEXT = 512
Run = Callable[[], Any]


def fork_joins(threads: int) -> tuple[dict[str, float], float]:
    """Seconds until every thread has taken its part of a step and is done with it; those of a call after idling."""
    count = 1000
    code = compile_and_load(_meeting(threads), ["meet", "note"], Target.host())
    arrived = np.zeros(8 * count, np.int64)
    steps = tuple(ProgramStep("meet", (Argument(0, 64 * i),), threads, 1) for i in range(count))
    bound = NativeProgram(steps, 1).bind({"meet": code.address("meet")}, {})
    regions = region_table([arrived.ctypes.data])
    noted = [ProgramStep("note", (Argument(0, 64 * (1 + i)),), 1, 1) for i in range(2)]
    functions = {name: code.address(name) for name in ("meet", "note")}
    timed = NativeProgram((noted[0], steps[0], noted[1]), 1).bind(functions, {})

    def run(last: int) -> float:
        arrived[:] = 0
        return _time(lambda: bound.run(regions, threads=threads, first=0, last=last))

    run(count)
    warm = min(run(count) for _ in range(20)) / count
    inside, outside = [], []
    for _ in range(100):
        time.sleep(0.005)  # long after threads have stopped looking for work
        outside.append(_time(lambda: timed.run(regions, threads=threads)))
        begin, end = (int(arrived[at]) + int(arrived[at + 1]) / 1e9 for at in (8, 16))
        inside.append(end - begin)
        arrived[:] = 0
    idle, called = (float(np.median(times)) for times in (inside, outside))
    return {"warm": warm, "after idling": idle}, called


def _meeting(threads: int) -> str:
    """A chunk that ends when as many as there are threads have begun, and one that notes the time."""
    module = IrModule(Target.host().triple)
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
    f = module.function("note", [("ptr", "args"), ("i64", "begin"), ("i64", "end")])
    f.call("i32", "clock_gettime", ("i32", 1), ("ptr", f.load("ptr", "%args", 8)))
    f.ret()
    return module.text()


def reading(threads: int) -> tuple[Run, int]:
    """A run that reads much memory as four streams a chunk, and the bytes of it."""
    target = Target.host()
    lanes = target.lanes(4)
    chunk, type_ = 1 << 20, f"<{lanes} x i32>"
    module = IrModule(target.triple)
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


def multiply_adds(kind: str, threads: int) -> tuple[Run, float]:
    """A run of twelve chains of multiply-adds a thread, and its operations."""
    target, dtype = Target.host(), np.dtype({"f32": np.float32, "f64": np.float64}[kind])
    lanes, turns = target.lanes(dtype.itemsize), 400_000
    type_ = vector({4: "float", 8: "double"}[dtype.itemsize], lanes)
    module = IrModule(target.triple)
    f = module.function("peak", [("ptr", "args"), ("i64", "begin"), ("i64", "end")])
    x = constant(type_, 0.5)
    start = [(type_, constant(type_, float(i))) for i in range(12)]
    total, *others = f.loop(0, turns, 1, start, lambda _, sums: [f.fma(type_, x, s, x) for s in sums])
    for other in others:
        total = f.binary("fadd", type_, total, other)
    f.store(type_, total, f.address(type_, f.load("ptr", "%args", 8), "%begin"), 8)
    f.ret()
    code = compile_and_load(module.text(), ["peak"], target)
    results = np.zeros(threads * lanes, dtype)
    block = np.array([results.ctypes.data], np.int64)
    pool = default_pool()

    def run(keep: object = (code, results, block)) -> None:
        pool.parallel(code.address("peak"), block.ctypes.data, threads, 1, threads)

    return run, 2.0 * 12 * lanes * turns * threads


def cube(size: int, kind: str, threads: int) -> tuple[Run, float]:
    """A product of square matrices, the second of them weights, and its operations."""
    g = st.Graph("cube")
    g.outputs(g.input("x", (size, size), kind) @ g.param("w", (size, size), kind))
    compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((size, size)).astype({"f32": "f4", "f64": "f8"}[kind]) for _ in range(2))
    compiled.set_param("w", w)
    result = [np.empty_like(x)]
    return lambda: compiled.run_into({"x": x}, result), 2.0 * size**3


def in_turns(runs: dict[str, tuple[Run, float]], seconds: float) -> dict[str, float]:
    """What each run does a second at best, of bytes or operations."""
    best = dict.fromkeys(runs, float("inf"))
    for run, _ in runs.values():
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, (run, _) in runs.items():
            best[name] = min(best[name], _time(run))
    return {name: amount / best[name] for name, (_, amount) in runs.items()}


def model_step(folder: Path, threads: int) -> tuple[Run, float]:
    """A token of the large model, and the bytes of weights that it reads."""
    from strata.models import load

    path = folder / "billion.gguf"
    weights = random_llama(path)
    with using(num_threads=threads):
        model = load(path, context=CONTEXT)
        state = model.start(capacity=CONTEXT)
    token = np.array([[1]], np.int32)

    def run() -> None:
        nonlocal state
        if state.length == CONTEXT:
            state = model.start(capacity=CONTEXT)
        model.step(state, token)

    return run, float(weights)


def rows(threads: int, seconds: float, *, model: bool = True) -> list[dict[str, Any]]:
    """All that is measured: what, how fast, the ceiling, the bar for it, and whether it is met."""
    found = []

    def add(what: str, value: str, ceiling: str, part: float | None, bar: str, met: bool) -> None:
        found.append({"what": what, "threads": threads, "value": value, "ceiling": ceiling, "share": part,
                      "bar": bar, "met": met})  # fmt: skip

    joins, called = fork_joins(threads) if threads > 1 else ({}, 0.0)
    for name, taken in joins.items():
        bar = f"at most {MOST[name] * 1e6:g} µs"
        call = "" if name == "warm" else f" (with its call {called * 1e6:.0f} µs)"
        add(f"fork-join, {name}{call}", f"{taken * 1e6:.2f} µs", "", None, bar, taken <= MOST[name])
    for size, kind in CUBES:
        runs = {"peak": multiply_adds(kind, threads), "ours": cube(size, kind, threads)}
        rates = in_turns(runs, seconds / 2)
        part = rates["ours"] / rates["peak"]
        values = [f"{rates[n] / 1e9:.0f} GFLOP/s" for n in ("ours", "peak")]
        add(f"product {size}³ {kind}", *values, part, f"{PRODUCT:.2f}", part >= PRODUCT)
    runs = {"read": reading(threads)} | {kind: product(kind, threads) for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        if model:
            runs["model"] = model_step(Path(folder), threads)
        rates = in_turns(runs, seconds)
    for kind in list(runs)[1:]:
        part, bar = rates[kind] / rates["read"], MODEL if kind == "model" else WEIGHTS
        what = "a token of a Llama of 10⁹ weights, Q4_K" if kind == "model" else f"{kind} weights 1x{N}x{K}"
        add(what, *(f"{rates[n] / 1e9:.1f} GB/s" for n in (kind, "read")), part, f"{bar:.2f}", part >= bar)
    return found


def _time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=default_pool().default_threads)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each of what is timed")
    parser.add_argument("--no-model", action="store_true", help="leave out the large model")
    parser.add_argument("--json", action="store_true", help="print the rows as lines of JSON")
    options = parser.parse_args()
    found = rows(options.threads, options.seconds, model=not options.no_model)
    if options.json:
        print("\n".join(map(json.dumps, found)))
        return
    for row in found:
        part = "" if row["share"] is None else f"{row['share']:.2f} of {row['ceiling']}"
        told = f"bar {row['bar']} {'met' if row['met'] else 'MISSED'}"
        print(f"{row['what']:<42} {row['value']:>14}  {part:<24} {told}")


if __name__ == "__main__":
    main()
