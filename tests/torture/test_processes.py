"""Threads, forks, limits on processors, and long streams of shapes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from strata import ops
from strata.core import sym
from strata.mir import Graph
from strata.runtime import CompiledGraph, Session


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def small_encoder(layers: int = 1, width: int = 32, heads: int = 4) -> Graph:
    """MiniLM in small, with open batch and length."""
    b, s = sym("batch", 1, 8), sym("seq", 1, 64)
    g = Graph("encoder")
    count = 0

    def w(*shape: int):
        nonlocal count
        count += 1
        return g.param(f"w{count}", shape)

    ids, mask = g.input("ids", (b, s), "i64"), g.input("mask", (b, 1, 1, s))
    x = ops.layer_norm(ops.take(w(100, width), ids, axis=0), w(width), w(width))
    for _ in range(layers):
        q, k, v = (
            (x @ w(width, width) + w(width)).reshape((b, s, heads, width // heads)).transpose((0, 2, 1, 3))
            for _ in range(3)
        )
        scores = q @ k.transpose((0, 1, 3, 2)) * 0.35 + mask
        mixed = (ops.softmax(scores, axis=-1) @ v).transpose((0, 2, 1, 3)).reshape((b, s, width))
        x = ops.layer_norm(x + (mixed @ w(width, width) + w(width)), w(width), w(width))
        x = ops.layer_norm(x + ops.gelu(x @ w(width, 2 * width)) @ w(2 * width, width), w(width), w(width))
    return g.outputs(ops.mean(x, axis=1))


def with_weights(c: CompiledGraph) -> CompiledGraph:
    rng = np.random.default_rng(0)
    c.set_params({n: (rng.standard_normal(t.static_shape) * 0.1).astype(np.float32) for n, t in c.params.items()})
    return c


def feeds(rng: np.random.Generator, batch: int, length: int) -> dict[str, np.ndarray]:
    return {"ids": rng.integers(0, 100, (batch, length)), "mask": np.zeros((batch, 1, 1, length), np.float32)}


def test_a_stream_of_shapes_needs_one_compile_and_no_more_memory(many, rng) -> None:
    c = with_weights(Session("cpu").compile(small_encoder()))
    code = c._executable
    held = {}
    for batch, length in ((1, 1), (8, 64), (3, 17)):
        f = feeds(np.random.default_rng(batch * 100 + length), batch, length)
        held[batch, length] = f, c.run(f)[0]
    for _ in range(many(600, 2000)):  # every shape once or more
        c.run(feeds(rng, int(rng.integers(1, 9)), int(rng.integers(1, 65))))
    before = resident_bytes()
    for _ in range(many(600, 10_000)):
        c.run(feeds(rng, int(rng.integers(1, 9)), int(rng.integers(1, 65))))
    assert resident_bytes() - before < 20 << 20
    assert c._executable is code
    for f, out in held.values():
        np.testing.assert_array_equal(c.run(f)[0], out)
    one = feeds(np.random.default_rng(5), 4, 20)  # rows of a batch do not see each other
    alone = [c.run({"ids": one["ids"][i : i + 1], "mask": one["mask"][i : i + 1]})[0][0] for i in range(4)]
    np.testing.assert_array_equal(c.run(one)[0], alone)


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
g = Graph("g")
c = Session("cpu").compile(g.outputs(ops.exp(g.input("x", (1 << 20,)))))
before = len(os.listdir("/proc/self/task"))
c.run(x=np.ones(1 << 20, np.float32))
print(len(os.listdir("/proc/self/task")) - before, c._executable._threads)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_one_core_is_one_thread() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_CORE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
