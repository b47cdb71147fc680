"""The thread pool and native programs: many callers, forks, restarts, symbolic sizes, limits of containers."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import strata.backends.llvm.runtime.program as program_module
import strata.ops as functions_of_ops
from strata.backends.llvm import Argument, NativeProgram, ProgramStep, ThreadPool, region_table
from strata.backends.llvm.codegen.compile import compile_kernel
from strata.backends.llvm.executor.thread_pool import _SPIN, native_code
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.jit.jit import compile_and_load
from strata.backends.llvm.runtime import kernel_steps, symbolic_program
from strata.backends.llvm.runtime.program import BoundProgram, held_in_part
from strata.core import Dim, Target, sym
from strata.errors import CompileError, RunError
from strata.mir import Graph
from strata.runtime import CompileOptions, Session
from tests.unit.kernel import samples

ROWS = sym("R")
ops: Any = functions_of_ops


def softmax_program() -> tuple[NativeProgram, dict[str, int]]:
    kernel = compile_kernel(samples.softmax(ROWS, 130).kernel)
    KEEP.append(kernel)
    arguments = ((0, 1), (1, 2))
    steps = tuple(
        ProgramStep("softmax", (Argument(a), Argument(b), Argument(None, ROWS)), kernel.lowered.points, 16)
        for a, b in arguments
    )
    return NativeProgram(steps, 3), {"softmax": kernel.address}


KEEP: list[object] = []


def expected(x: np.ndarray) -> np.ndarray:
    softmax = samples.softmax(ROWS, 130).reference
    return softmax(softmax(x).astype(np.float32))


def arrays(rows: int) -> list[np.ndarray]:
    x = np.random.default_rng(rows).normal(size=(rows, 130)).astype(np.float32)
    return [x, np.zeros_like(x), np.zeros_like(x)]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_program(threads: int) -> None:
    program, functions = softmax_program()
    for rows in (1, 5, 333):
        bound = program.bind(functions, {"R": rows})
        held = arrays(rows)
        bound.run(region_table([a.ctypes.data for a in held]), threads=threads)
        np.testing.assert_allclose(held[2], expected(held[0]), rtol=1e-5)


def test_ranges_of_steps() -> None:
    program, functions = softmax_program()
    held = arrays(40)
    regions = region_table([a.ctypes.data for a in held])
    bound = program.bind(functions, {"R": 40})
    bound.run(regions, first=0, last=1)
    assert not held[2].any()
    bound.run(regions, first=1, last=2)
    np.testing.assert_allclose(held[2], expected(held[0]), rtol=1e-5)


def order_program(points: Dim, grain: int, reads: tuple[Dim, ...]) -> tuple[NativeProgram, dict[str, int]]:
    """Steps that note in region 1 + step, for each point, how many chunks were taken before its own."""
    module = IrModule(Target.host().triple)
    f = module.function("note", [("ptr", "args"), ("i64", "begin"), ("i64", "end")])
    counter, places = (f.load("ptr", f.address("i64", "%args", i), 8) for i in range(2))
    number = f.op(f"atomicrmw add ptr {counter}, i64 1 seq_cst")
    f.loop("%begin", "%end", 1, [], lambda i, _: f.store("i64", number, f.address("i64", places, i), 8))
    f.ret()
    code = compile_and_load(module.text(), ["note"], Target.host())
    KEEP.append(code)
    steps = [ProgramStep("note", (Argument(0, 8 * i), Argument(1 + i)), points, grain, r) for i, r in enumerate(reads)]
    return NativeProgram(tuple(steps), 1 + len(reads)), {"note": code.address("note")}


def orders(bound: BoundProgram, points: int, steps: int, pool: ThreadPool, threads: int) -> list[list[int]]:
    counters = np.zeros(steps, np.int64)
    noted = [np.full(points, -1) for _ in range(steps)]
    bound.run(region_table([a.ctypes.data for a in (counters, *noted)]), threads=threads, pool=pool)
    return [n.tolist() for n in noted]


def test_steps_that_read_more_than_a_cache_holds_turn() -> None:
    """One after the other they go from the first chunk to the last and from the last to the first; others never."""
    far, pool = held_in_part() + 1, ThreadPool()
    program, functions = order_program(10, 3, (far, 0, far, far - 1, far))
    bound = program.bind(functions)
    forward, backward = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3], [3, 3, 3, 2, 2, 2, 1, 1, 1, 0]
    first = orders(bound, 10, 5, pool, 1)
    assert first == [backward, forward, forward, forward, backward]
    assert orders(bound, 10, 5, pool, 1) == [forward, forward, backward, forward, forward]
    single, functions = order_program(2, 5, (far,))
    assert orders(single.bind(functions), 2, 1, pool, 1) == [[0, 0]]
    open_, functions = order_program(sym("P", 1), 1, (far // 100 * sym("P", 1),))
    for count in (101, 5):
        held = [np.zeros(1, np.int64), np.full(count, -1)]
        regions = region_table([a.ctypes.data for a in held])
        bound = open_.bind(functions, {"P": count})
        bound.run(regions, threads=1, pool=pool)
        bound.run(regions, threads=1, pool=pool)
        turned = held[1][0] == 2 * count - 1 or held[1][-1] == count
        assert turned == (count > 5)


@pytest.mark.parametrize("threads", [2, 7])
def test_turning_steps_take_every_chunk_once(threads: int) -> None:
    far, pool = held_in_part() + 1, ThreadPool()
    program, functions = order_program(1000, 7, (far, far))
    bound = program.bind(functions)
    wrong: list[object] = []

    def call() -> None:
        for _ in range(20):
            for noted in orders(bound, 1000, 2, pool, threads):
                chunks = [noted[i : i + 7] for i in range(0, 1000, 7)]
                if any(len(set(c)) != 1 for c in chunks) or sorted(c[0] for c in chunks) != list(range(143)):
                    wrong.append(noted)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert not wrong
    pool.stop()


@pytest.mark.parametrize("rows", [300, sym("M", 1, 400)], ids=["fixed", "open"])
def test_turning_changes_no_bit(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product, a reduction, a row kernel and a copy, twice in a row, on 1, 2 and 7 threads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 257)).astype(np.float32)
    w = rng.standard_normal((257, 700)).astype(np.float32)

    def results(threads: int) -> list[np.ndarray]:
        g = Graph("g")
        given = g.input("x", (rows, 257))
        y = given @ g.param("w", (257, 700))
        g.outputs(y, ops.softmax(y, axis=-1), ops.sum(ops.exp(y), axis=0), ops.transpose(given))
        compiled = Session("cpu").compile(g, CompileOptions(threads=threads))
        compiled.set_param("w", w)
        return [np.asarray(r) for _ in range(2) for r in compiled.run(x=x)]

    wanted = results(1)
    for module in (program_module, kernel_steps, symbolic_program):
        monkeypatch.setattr(module, "held_in_part", lambda: 1)
    for threads in (1, 2, 7):
        for found, want in zip(results(threads), wanted, strict=True):
            assert (found == want).all()


def test_concurrent_callers() -> None:
    program, functions = softmax_program()
    bound = program.bind(functions, {"R": 200})
    wrong: list[int] = []

    def call(number: int) -> None:
        held = arrays(200)
        regions = region_table([a.ctypes.data for a in held])
        wanted = expected(held[0])
        for _ in range(20):
            held[2][:] = 0
            bound.run(regions, threads=3)
            if not np.allclose(held[2], wanted, rtol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork() -> None:
    program, functions = softmax_program()
    bound = program.bind(functions, {"R": 200})
    held = arrays(200)
    regions = region_table([a.ctypes.data for a in held])
    wanted = expected(held[0])
    bound.run(regions, threads=2)
    child = os.fork()
    if child == 0:
        held[2][:] = 0
        bound.run(regions, threads=2)
        os._exit(0 if np.allclose(held[2], wanted, rtol=1e-5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    bound.run(regions, threads=2)


def test_stop_and_start_again() -> None:
    pool = ThreadPool()
    nothing = native_code().address("nothing")
    pool.parallel(nothing, 0, 100, 1, 4)
    assert pool.workers == 3
    pool.stop()
    assert pool.workers == 0
    pool.parallel(nothing, 0, 100, 1, 2)
    assert pool.workers == 1
    pool.stop()


def test_bad_programs() -> None:
    with pytest.raises(CompileError, match="region 3 of 2"):
        NativeProgram((ProgramStep("k", (Argument(3),), 1),), 2)
    with pytest.raises(RunError, match="R is not bound"):
        NativeProgram((ProgramStep("k", (), ROWS),), 0).bind({"k": native_code().address("nothing")})


def test_steps_without_points_are_left_out() -> None:
    NativeProgram((ProgramStep("k", (), sym("N", 0)),), 0).bind({"k": 0}, {"N": 0}).run(region_table([]))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be placed here")
def test_workers_are_woken_elsewhere_and_may_run_anywhere() -> None:
    pool = ThreadPool()
    nothing = native_code().address("nothing")
    before = set(os.listdir("/proc/self/task"))
    everywhere = os.sched_getaffinity(0)
    for threads in (2, 4, 2):
        pool.parallel(nothing, 0, 100, 1, threads)
        time.sleep(0.01)  # the workers sleep by now
        pool.parallel(nothing, 0, 100, 1, threads)
        time.sleep(0.01)
    workers = [int(t) for t in set(os.listdir("/proc/self/task")) - before]
    assert len(workers) == 3

    def places() -> list[set[int]]:
        return [os.sched_getaffinity(t) for t in workers]

    assert all(place <= everywhere and place for place in places())
    if len(everywhere) > 1:  # asleep, and not on the processor that called them last
        assert all(len(place) == len(everywhere) - 1 for place in places())
    rounds = ctypes.c_int32.from_address(pool.address + _SPIN)
    before_long, rounds.value = rounds.value, 1 << 30  # those that are awake stay so
    for _ in range(100_000):  # until each has done some work
        if all(place == everywhere for place in places()):
            break
        pool.parallel(nothing, 0, 1000, 1, 4)
    assert all(place == everywhere for place in places())
    rounds.value = before_long
    assert os.sched_getaffinity(0) == everywhere
    pool.stop()
    assert not set(os.listdir("/proc/self/task")) & {str(t) for t in workers}
    pool.parallel(nothing, 0, 100, 1, 12)  # too many to be placed
    assert pool.workers == 11
    pool.stop()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be placed here")
def test_one_processor_is_enough() -> None:
    everywhere = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(everywhere)})
        pool = ThreadPool()
        for _ in range(3):
            pool.parallel(native_code().address("nothing"), 0, 100, 1, 3)
            time.sleep(0.005)
        pool.stop()
    finally:
        os.sched_setaffinity(0, everywhere)
