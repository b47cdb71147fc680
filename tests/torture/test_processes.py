"""Threads, forks, and limits on processors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from strata import ops
from strata.core import sym
from strata.mir import Graph
from strata.runtime import Session
from tests.torture.conftest import resident_bytes


def test_threads_compile_and_run_as_one_would(many) -> None:
    sizes = [8, 12, 16, 24]

    def build(n: int) -> Graph:
        g = Graph(f"g{n}")
        x, w = g.input("x", (sym("N", 1, 32), n)), g.param("w", (n, n))
        return g.outputs(ops.softmax(ops.gelu(x @ w), axis=-1), ops.cumsum(x, axis=0))

    def results(n: int) -> list[np.ndarray]:
        rng = np.random.default_rng(n)
        c = Session("cpu").compile(build(n))
        c.set_param("w", rng.standard_normal((n, n)).astype(np.float32))
        return [out for rows in (1, 7, 32) for out in c.run(x=rng.standard_normal((rows, n)).astype(np.float32))]

    serial = {n: results(n) for n in sizes}
    wrong: list[object] = []
    deadline = time.monotonic() + many(3, 120)

    def work(seed: int) -> None:
        order = np.random.default_rng(seed)
        try:
            while time.monotonic() < deadline:
                n = sizes[int(order.integers(len(sizes)))]
                if not all(np.array_equal(a, b) for a, b in zip(results(n), serial[n], strict=True)):
                    wrong.append(n)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must see it
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(32)]
    for t in threads:
        t.start()
    middle = None
    while any(t.is_alive() for t in threads) and time.monotonic() < deadline + 120:
        time.sleep(0.2)
        if middle is None and time.monotonic() > deadline - many(1, 60):
            middle = resident_bytes()
    assert not wrong
    assert not any(t.is_alive() for t in threads)
    assert middle is None or resident_bytes() - middle < 64 << 20


FORKS = """
import os, sys
import numpy as np
from strata.mir import Graph
from strata.runtime import Session
from tests.torture.conftest import resident_bytes
def graph(n):
    g = Graph("g")
    return g.outputs(g.input("x", (n, n)) @ g.input("y", (n, n)))
x = np.ones((256, 256), np.float32)
c = Session("cpu").compile(graph(256), threads=2)
c.run(x=x, y=x)
c.submit(x=x, y=x).result()
for i in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        ok = float(c.run(x=x, y=x)[0][0, 0]) == 256 and float(c.submit(x=x, y=x).result()[0][0, 0]) == 256
        z = np.ones((8 + i % 3, 8 + i % 3), np.float32)
        ok = ok and float(Session("cpu").compile(graph(len(z))).run(x=z, y=z)[0][0, 0]) == len(z)
        os._exit(0 if ok else 3)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert float(c.run(x=x, y=x)[0][0, 0]) == 256
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_children_run_and_compile(many) -> None:
    count = many(8, 200)
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(count)], capture_output=True, text=True, timeout=60 + 2 * count, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from strata import ops
from strata.mir import Graph
from strata.runtime import Session
from tests.torture.conftest import resident_bytes
g = Graph("g")
c = Session("cpu").compile(g.outputs(ops.exp(g.input("x", (1 << 20,)))))
before = len(os.listdir("/proc/self/task"))
c.run(x=np.ones(1 << 20, np.float32))
print(len(os.listdir("/proc/self/task")) - before, c._executable.threads)
"""


@contextmanager
def control_group(quota: int, period: int) -> Iterator[Path]:
    """A control group with so many microseconds of processor time in each period; its file of processes."""
    name = f"strata-test-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/cpu", name), Path("/sys/fs/cgroup", name)
    folder = v1 if v1.parent.is_dir() else v2
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if folder == v1:
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        elif (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {period}")
        else:
            pytest.skip("control groups of this system do not limit processors")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


@pytest.mark.parametrize(("quota", "threads"), [(100_000, 1), (30_000, 1), (150_000, 2)])
def test_a_quota_limits_the_threads(quota: int, threads: int) -> None:
    if (os.cpu_count() or 1) < threads:
        pytest.skip("this machine has fewer cores")
    program = ONE_CORE.replace("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "")
    with control_group(quota, 100_000) as processes:
        join = f"import os\nopen({str(processes)!r}, 'w').write(str(os.getpid()))\n"
        done = subprocess.run([sys.executable, "-c", join + program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(threads - 1), str(threads)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_one_core_is_one_thread() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_CORE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


HELD_LOCKS = """
import os, signal, threading
import numpy as np
import strata as st
from strata.core import forks
g = st.Graph("g")
c = st.Session("cpu").compile(g.outputs(g.input("x", (300, 300)) @ g.param("w", (300, 300))))
c.set_param("w", np.eye(300, dtype=np.float32))
x = np.ones((300, 300), np.float32)
f = st.jit(lambda x: (x * 2 + 1).sum())
cache = st.CompileCache("cpu", 4)
def graph():
    h = st.Graph("h")
    return h.outputs(h.input("y", (3, 5)).exp())
c.run(x=x), f(x), (st.asarray(x) * 3).numpy()
held, gone = threading.Event(), threading.Event()
def hold():
    locks = [lock for lock in list(forks._locks) if lock.acquire(timeout=1)]
    held.set()
    gone.wait()
    for lock in locks:
        lock.release()
def build():
    held.wait()
    return gone.wait() and graph()
threads = [threading.Thread(target=cache.get_or_compile, args=("h", build)), threading.Thread(target=hold)]
threads[0].start()
while not cache._entries._making:
    pass
threads[1].start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    ok = float(c.run(x=x)[0][0, 0]) == 1 and float(f(x).item()) == 270000 and (st.asarray(x) * 3).numpy()[0, 0] == 3
    (y,) = cache.get_or_compile("h", graph).run(y=np.zeros((3, 5), np.float32))
    os._exit(0 if ok and y[0, 0] == 1 else 3)
_, status = os.waitpid(child, 0)
gone.set()
for thread in threads:
    thread.join()
print(status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_wait_for_threads_that_it_has_not() -> None:
    done = subprocess.run([sys.executable, "-c", HELD_LOCKS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


FEW_THREADS = """
import numpy as np
from strata import ops
from strata.backends.llvm.executor.thread_pool import ThreadPool
from strata.mir import Graph
from strata.runtime import Session
def refuse(self):
    raise OSError(11, "no more threads")
ThreadPool._start = refuse
g = Graph("g")
x = np.zeros(1 << 20, np.float32)
c = Session("cpu").compile(g.outputs(ops.exp(g.input("x", x.shape))), threads=4)
print(sorted({float(v) for y in (c.run(x=x)[0], c.run(x=x)[0]) for v in set(y.tolist())}) == [1.0])
"""


def test_a_system_without_threads_to_give_runs_on_those_that_there_are() -> None:
    done = subprocess.run([sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
