"""Ops that change part of a value: no copy where the value is not used again, and in place where the caller says so."""

import numpy as np

from strata import ops
from strata.mir import Graph, evaluate
from strata.runtime import Session


def cache_graph() -> Graph:
    g = Graph("cache")
    cache, new, at = g.input("cache", (2, 64, 8)), g.input("new", (2, 1, 8)), g.input("at", (), "i64")
    updated = ops.dynamic_update_slice(cache, ops.tanh(new), [0, at, 0])
    return g.outputs(updated, updated.sum((1, 2)))


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "cache": rng.standard_normal((2, 64, 8)).astype(np.float32),
        "new": rng.standard_normal((2, 1, 8)).astype(np.float32),
        "at": np.array(5),
    }


def test_update_leaves_the_input_alone() -> None:
    compiled, given = Session("cpu").compile(cache_graph()), feeds()
    before = given["cache"].copy()
    for got, want in zip(compiled.run(given), evaluate(cache_graph(), given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(given["cache"], before)


def test_one_array_for_input_and_output_is_changed_in_place() -> None:
    compiled, given = Session("cpu").compile(cache_graph()), feeds()
    expected = evaluate(cache_graph(), given)
    out = [given["cache"], np.empty(2, np.float32)]
    compiled.run_into(given, out)
    np.testing.assert_allclose(out[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(out[1], expected[1], rtol=1e-5, atol=1e-5)


def test_a_value_that_dies_is_taken_over() -> None:
    g = Graph("twice")
    x, new = g.input("x", (16, 4)), g.input("new", (1, 4))
    first = ops.dynamic_update_slice(x * 2.0, new, [3, 0])
    g.outputs(ops.dynamic_update_slice(first, new, [5, 0]).sum(0))
    lir = Session("cpu").compile(g).lir
    scratch = [b for b in lir.buffers if b.role == "scratch"]
    assert sum(b.alias is None for b in scratch) < len(scratch)
