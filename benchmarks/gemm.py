"""Matrix products against NumPy (OpenBLAS) and torch, interleaved, best of many short bursts.

    python benchmarks/gemm.py [--threads 1,2] [--rounds 12] [--only 1024x1024x1024]

Weights are packed before the clock starts, as they are when a program is bound. Matrices larger than the last cache are
read in turns from two copies, by everyone. `peak` is measured: independent chains of multiply-adds in registers.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import math
import os
import time
from collections.abc import Callable

# idle threads of the peers must sleep, not spin, while the others are measured
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")
os.environ.setdefault("KMP_BLOCKTIME", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np

from strata.backends.llvm.builder import Module, constant, vector
from strata.backends.llvm.contract import Contraction, plan_contraction
from strata.backends.llvm.contract_run import argument_block, build, pack
from strata.backends.llvm.jit import compile_and_load
from strata.backends.llvm.pool import default_pool
from strata.core import DType, Target, as_dtype, f32, f64

SHAPES = (
    ("f32", 256, 256, 256), ("f32", 512, 512, 512), ("f32", 1024, 1024, 1024), ("f32", 128, 384, 384),
    ("f32", 128, 1536, 384), ("f32", 128, 384, 1536), ("f32", 8, 4096, 4096), ("f32", 1, 4096, 4096),
    ("f64", 1024, 1024, 1024),
)  # fmt: skip  # dtype, m, n, k
LARGE = 32 << 20
Run = Callable[[], object]


def aligned(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> np.ndarray:
    """A page-aligned array of normal numbers."""
    count = math.prod(shape)
    storage = np.empty(count * dtype.itemsize + 4096, np.uint8)
    offset = -storage.ctypes.data % 4096
    result = storage[offset : offset + count * dtype.itemsize].view(dtype.np).reshape(shape)
    result[...] = np.random.default_rng(seed).standard_normal(shape)
    return result


def in_turns(runs: list[Run]) -> Run:
    """Calls the runs one after the other, one per call."""
    if len(runs) == 1:
        return runs[0]
    state = [0]

    def run() -> None:
        state[0] = (state[0] + 1) % len(runs)
        runs[state[0]]()

    return run


def ours(spec: Contraction, a: np.ndarray, bs: list[np.ndarray], out: np.ndarray, threads: int) -> Run:
    code = build(spec, as_dtype(bs[0].dtype), None)
    kernel, pool = code.address("gemm"), default_pool()
    count = spec.chunk_count(a.shape[0], bs[0].shape[1])
    runs: list[Run] = []
    for b in bs:
        packed = pack(spec, b)
        place = aligned(packed.shape, spec.b)
        place[...] = packed
        block = argument_block(spec, a, place, b, out, {})
        address = block.ctypes.data

        def run(address: int = address, keep: object = (code, block, place, out)) -> None:
            pool.parallel(kernel, address, count, 1, threads)

        runs.append(run)
    return in_turns(runs)


def peak(dtype: DType, threads: int) -> tuple[Run, float]:
    """Twelve chains of multiply-adds per thread; returns the run and its operations."""
    target = Target.host()
    lanes = target.lanes(dtype.itemsize)
    type_ = vector({4: "float", 8: "double"}[dtype.itemsize], lanes)
    module = Module(target.triple)
    f = module.function("peak", [("ptr", "args"), ("i64", "begin"), ("i64", "end")])
    x = constant(type_, 0.5)
    turns = 20000
    start = [(type_, constant(type_, float(i))) for i in range(12)]
    sums = f.loop(0, turns, 1, start, lambda _, sums: [f.fma(type_, x, s, x) for s in sums])
    total = sums[0]
    for other in sums[1:]:
        total = f.binary("fadd", type_, total, other)
    place = f.address(type_, f.load("ptr", "%args", 8), "%begin")
    f.store(type_, total, place, 8)
    f.ret()
    code = compile_and_load(module.text(), ["peak"], target)
    results = aligned((threads * lanes,), dtype)
    block = np.array([results.ctypes.data], np.int64)
    pool, kernel, address = default_pool(), code.address("peak"), block.ctypes.data

    def run(keep: object = (code, results, block)) -> None:
        pool.parallel(kernel, address, threads, 1, threads)

    return run, 2.0 * 12 * lanes * turns * threads


def set_blas_threads(count: int) -> None:
    folder = os.path.join(os.path.dirname(np.__file__), "..", "numpy.libs")
    for path in glob.glob(os.path.join(folder, "*openblas*")):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(count)


def peers(a: np.ndarray, bs: list[np.ndarray], out: np.ndarray, threads: int) -> dict[str, Run]:
    set_blas_threads(threads)
    result: dict[str, Run] = {"numpy": in_turns([lambda b=b: np.matmul(a, b, out=out) for b in bs])}
    try:
        import torch
    except ImportError:
        return result
    torch.set_num_threads(threads)
    x, y = torch.from_numpy(a), torch.from_numpy(out)
    weights = [torch.from_numpy(b) for b in bs]
    transposed = [torch.from_numpy(np.ascontiguousarray(b.T)) for b in bs]
    result["torch.mm"] = in_turns([lambda w=w: torch.mm(x, w, out=y) for w in weights])
    result["torch.linear"] = in_turns([lambda w=w: torch.nn.functional.linear(x, w) for w in transposed])
    return result


def best_times(runs: dict[str, Run], rounds: int, burst: float = 0.01) -> dict[str, float]:
    """The shortest time of each run over interleaved bursts."""
    best, repeats = dict.fromkeys(runs, math.inf), {}
    for name, run in runs.items():
        run()
        begin = time.perf_counter()
        run()
        repeats[name] = max(2, int(burst / max(time.perf_counter() - begin, 1e-7)))
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.005)
            run()
            for _ in range(repeats[name]):
                begin = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    target = Target.host()
    ratios = []
    for threads in map(int, options.threads.split(",")):
        print(f"\n{threads} thread(s)   GFLOP/s, times over the best peer, part of the measured peak")
        for name, m, n, k in SHAPES:
            if options.only and options.only != f"{m}x{n}x{k}":
                continue
            dtype = {"f32": f32, "f64": f64}[name]
            a, out, theirs = aligned((m, k), dtype, 1), aligned((m, n), dtype), aligned((m, n), dtype)
            copies = 2 if k * n * dtype.itemsize > LARGE else 1
            bs = [aligned((k, n), dtype, 2) for _ in range(copies)]
            spec = plan_contraction(m, n, k, target, a=dtype, m_exact=True, n_exact=True)
            ceiling, operations = peak(dtype, threads)
            runs = {"ours": ours(spec, a, bs, out, threads), "peak": ceiling} | peers(a, bs, theirs, threads)
            times = best_times(runs, options.rounds)
            flops = 2.0 * m * n * k
            assert np.allclose(out, theirs, atol=1e-2), "results differ"
            others = {key: t for key, t in times.items() if key not in ("ours", "peak")}
            ratio = min(others.values()) / times["ours"]
            ratios.append(ratio)
            share = flops / times["ours"] / (operations / times["peak"])
            theirs_text = "  ".join(f"{key} {flops / t / 1e9:6.1f}" for key, t in others.items())
            print(f"{name} {m:5d} x {n:5d} x {k:5d}  ours {flops / times['ours'] / 1e9:6.1f}  {theirs_text}   "
                  f"{ratio:5.2f}x  {share:5.2f} of peak", flush=True)  # fmt: skip
    print(f"\ngeometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x, worst {min(ratios):.2f}x")


if __name__ == "__main__":
    main()
