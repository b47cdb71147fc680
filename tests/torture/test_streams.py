"""Long streams of shapes through one model: few compiles, steady memory, no padded work."""

from __future__ import annotations

import time

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import sym
from strata.mir import Graph
from strata.runtime import CompiledGraph, CompileOptions, Session
from tests.torture.conftest import resident_bytes

BATCH, LENGTH, WORDS = 8, 64, 100


def encoder(layers: int = 1, width: int = 32, heads: int = 4) -> Graph:
    """MiniLM, or less of it, with open batch and length."""
    b, s = sym("batch", 1, BATCH), sym("seq", 1, LENGTH)
    g = Graph("encoder")
    count = 0

    def w(*shape: int):
        nonlocal count
        count += 1
        return g.param(f"w{count}", shape)

    ids, mask = g.input("ids", (b, s), "i64"), g.input("mask", (b, 1, 1, s))
    x = ops.layer_norm(ops.take(w(WORDS, width), ids, axis=0), w(width), w(width))
    for _ in range(layers):
        q, k, v = (
            (x @ w(width, width) + w(width)).reshape((b, s, heads, width // heads)).transpose((0, 2, 1, 3))
            for _ in range(3)
        )
        scores = q @ k.transpose((0, 1, 3, 2)) * 0.35 + mask
        mixed = (ops.softmax(scores, axis=-1) @ v).transpose((0, 2, 1, 3)).reshape((b, s, width))
        x = ops.layer_norm(x + (mixed @ w(width, width) + w(width)), w(width), w(width))
        x = ops.layer_norm(x + ops.gelu(x @ w(width, 4 * width)) @ w(4 * width, width), w(width), w(width))
    return g.outputs(ops.mean(x, axis=1))


def weights(c: CompiledGraph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: (rng.standard_normal(t.static_shape) * 0.1).astype(np.float32) for n, t in c.params.items()}


def with_weights(c: CompiledGraph) -> CompiledGraph:
    c.set_params(weights(c))
    return c


def feeds(rng: np.random.Generator, batch: int, length: int) -> dict[str, np.ndarray]:
    return {"ids": rng.integers(0, WORDS, (batch, length)), "mask": np.zeros((batch, 1, 1, length), np.float32)}


def random_feeds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return feeds(rng, int(rng.integers(1, BATCH + 1)), int(rng.integers(1, LENGTH + 1)))


@pytest.fixture
def model(many) -> Graph:
    return encoder(many(1, 6), many(32, 384), many(4, 12))


def test_a_stream_of_shapes_needs_one_compile_and_no_more_memory(model, many, rng) -> None:
    c = with_weights(Session("cpu").compile(model))
    code = c._executable
    held = {}
    for batch, length in ((1, 1), (8, 64), (3, 17)):
        f = feeds(np.random.default_rng(batch * 100 + length), batch, length)
        held[batch, length] = f, c.run(f)[0]
    for _ in range(many(600, 1000)):
        c.run(random_feeds(rng))
    before = resident_bytes()
    for _ in range(many(600, 10_000)):
        c.run(random_feeds(rng))
    grown = resident_bytes() - before
    print(f"resident memory grew by {grown / 1e6:.1f} MB")
    assert grown < 20 << 20
    assert c._executable is code
    for f, out in held.values():
        np.testing.assert_array_equal(c.run(f)[0], out)
    one = feeds(np.random.default_rng(5), 4, 20)  # rows of a batch do not see each other
    alone = [c.run({"ids": one["ids"][i : i + 1], "mask": one["mask"][i : i + 1]})[0][0] for i in range(4)]
    np.testing.assert_array_equal(c.run(one)[0], alone)


@pytest.mark.parametrize(
    ("contract", "most"),
    [
        ({"max_variants": 4, "on_miss": "bucket"}, 4),  # three sizes, and the open form for all others
        ({"max_variants": 6, "buckets": {"batch": [2, 8], "seq": [16, 32, 64]}, "on_miss": "error"}, 6),
    ],
)
def test_a_stream_of_shapes_compiles_no_more_than_was_declared(contract, most: int, many, rng) -> None:
    v = st.specialize(encoder(), "cpu", **contract)
    c = with_weights(Session("cpu").compile(encoder()))
    for name, array in weights(c).items():
        v.set_param(name, array)
    before = 0
    for i in range(many(300, 10_000)):
        f = random_feeds(rng)
        out = v.run(f)[0]
        if i % 50 == 0:
            np.testing.assert_allclose(out, c.run(f)[0], rtol=2e-4, atol=2e-5)
        if i == many(150, 1000):
            before = resident_bytes()
    assert v.counters.compiled <= most
    assert resident_bytes() - before < 20 << 20


def test_open_sizes_take_the_time_of_exact_ones(model, request) -> None:
    if not request.config.getoption("--torture", default=False):
        pytest.skip("times need a quiet machine: --torture measures them")
    opened = with_weights(Session("cpu").compile(model))
    ratios = {}
    for batch, length in ((1, 16), (1, 64), (3, 40), (8, 64), (5, 27)):
        exact = with_weights(Session("cpu").compile(model, CompileOptions(dim_binding={"batch": batch, "seq": length})))
        f = feeds(np.random.default_rng(0), batch, length)
        np.testing.assert_allclose(opened.run(f)[0], exact.run(f)[0], rtol=1e-4, atol=1e-5)
        best = {"open": np.inf, "exact": np.inf}
        for _ in range(12):
            for name, c in (("open", opened), ("exact", exact)):
                for _ in range(5):
                    start = time.perf_counter()
                    c.run(f)
                    best[name] = min(best[name], time.perf_counter() - start)
        ratios[batch, length] = best["open"] / best["exact"]
    print(ratios)
    assert max(ratios.values()) <= 1.15, ratios
