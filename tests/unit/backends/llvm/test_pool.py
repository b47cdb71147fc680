"""The thread pool and native programs: many callers, forks, restarts, symbolic sizes, limits of containers."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest

from strata.backends.llvm import Argument, Pool, Program, Step, region_table
from strata.backends.llvm.compile import compile_kernel
from strata.backends.llvm.pool import _SPIN, native_code
from strata.core import sym
from strata.errors import CompileError, RunError
from tests.unit.kernel import samples

ROWS = sym("R")


def softmax_program() -> tuple[Program, dict[str, int]]:
    kernel = compile_kernel(samples.softmax(ROWS, 130).kernel)
    KEEP.append(kernel)
    arguments = ((0, 1), (1, 2))
    steps = tuple(
        Step("softmax", (Argument(a), Argument(b), Argument(None, ROWS)), kernel.lowered.points, 16)
        for a, b in arguments
    )
    return Program(steps, 3), {"softmax": kernel.address}


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
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
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
    pool = Pool()
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
        Program((Step("k", (Argument(3),), 1),), 2)
    with pytest.raises(RunError, match="R is not bound"):
        Program((Step("k", (), ROWS),), 0).bind({"k": native_code().address("nothing")})


def test_steps_without_points_are_left_out() -> None:
    Program((Step("k", (), sym("N", 0)),), 0).bind({"k": 0}, {"N": 0}).run(region_table([]))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be placed here")
def test_workers_are_woken_elsewhere_and_may_run_anywhere() -> None:
    pool = Pool()
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
    give_up = time.monotonic() + 20
    while any(place != everywhere for place in places()):  # until each has done some work
        assert time.monotonic() < give_up
        pool.parallel(nothing, 0, 1000, 1, 4)
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
        pool = Pool()
        for _ in range(3):
            pool.parallel(native_code().address("nothing"), 0, 100, 1, 3)
            time.sleep(0.005)
        pool.stop()
    finally:
        os.sched_setaffinity(0, everywhere)
