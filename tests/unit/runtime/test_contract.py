"""The compile contract: variants, buckets, misses, and answers while a compile is still going on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.config import using
from strata.core import Table, sym
from strata.errors import OptionError, RunError, SymbolError, UnknownNameError
from strata.mir import Graph
from strata.runtime import VariantGraph


def softmax_graph() -> Graph:
    g = Graph("scores")
    x, w = g.input("x", (sym("N", 1, 512), 8)), g.param("w", (8, 8))
    return g.outputs(ops.softmax(x @ w, axis=0))


W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def made(**contract) -> VariantGraph:
    graph = st.specialize(softmax_graph(), "cpu", **contract)
    graph.set_param("w", W)
    return graph


def data(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)


def expected(n: int) -> np.ndarray:
    y = np.exp(data(n).astype(np.float64) @ W)
    return y / y.sum(axis=0)


def check(graph: VariantGraph, n: int) -> None:
    np.testing.assert_allclose(graph.run(x=data(n))[0], expected(n), rtol=1e-4, atol=1e-6)


def test_compile_makes_room() -> None:
    v = made(max_variants=2, on_miss="compile")
    for n in (3, 4, 3, 5, 4):
        check(v, n)
    assert v.counters.compiled == 4
    assert v.counters.hits == 1
    assert len(v.variants) == 2
    assert v.variants == ["N = 5", "N = 4"]


def test_error_refuses_and_says_what_there_is() -> None:
    v = made(max_variants=2, on_miss="error")
    check(v, 3)
    check(v, 4)
    with pytest.raises(RunError, match="2 variants and was called with N = 5; there are N = 3; N = 4"):
        v.run(x=data(5))
    check(v, 3)
    assert v.counters.refused == 1
    assert v.counters.compiled == 2


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_bucket_runs_the_open_form_within_the_limit(limit: int) -> None:
    v = made(max_variants=limit, on_miss="bucket")
    for n in (3, 4, 5, 6, 300):
        check(v, n)
    assert v.counters.compiled == limit
    assert v.counters.bucketed == 5 - (limit - 1)


def test_buckets_bound_the_number_of_compiles_without_padding() -> None:
    v = made(max_variants=3, buckets={"N": [16, 64, 512]}, on_miss="error")
    for n in (1, 5, 16, 17, 40, 500, 512, 64):
        check(v, n)
    assert v.counters.compiled == 3
    assert v.variants == ["N = 16", "N = 512", "N = 64"]


def test_sizes_above_the_buckets_are_refused() -> None:
    v = made(buckets={"N": [16]})
    with pytest.raises(RunError, match="above the largest bucket, 16"):
        v.run(x=data(17))


def test_interpret_answers_at_once_and_swaps() -> None:
    v = made(max_variants=2, on_miss="interpret")
    gate = threading.Event()
    compile_now = v._compile
    v._compile = lambda binding: (gate.wait(), compile_now(binding))[1]  # type: ignore[method-assign]
    check(v, 7)
    check(v, 7)
    assert not gate.is_set()
    assert v.counters.interpreted == 2
    assert v.counters.compiled == 0
    gate.set()
    v.wait(60)
    check(v, 7)
    assert v.counters.hits == 1
    assert v.counters.compiled == 1
    for n in (8, 9, 10):
        check(v, n)
    v.wait(60)
    assert v.counters.compiled == 2  # beyond the limit only the interpreter answers
    assert len(v.variants) == 2


def test_parameters_reach_all_forms() -> None:
    v = made(max_variants=2, on_miss="bucket")
    check(v, 3)
    check(v, 4)
    v.set_param("w", np.zeros((8, 8), np.float32))
    for n in (3, 4):
        np.testing.assert_allclose(v.run(x=data(n))[0], 1 / n, rtol=1e-6)


def test_threads_share_a_compile() -> None:
    v = made(max_variants=2)
    threads = [threading.Thread(target=check, args=(v, 20)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert v.counters.compiled == 1


@pytest.mark.parametrize(
    "contract",
    [
        {"on_miss": "guess"},
        {"max_variants": 0},
        {"buckets": {"N": [4, 2]}},
        {"buckets": {"M": [4]}},
        {"buckets": {"N": []}},
    ],
)
def test_impossible_contracts_are_refused(contract) -> None:
    with pytest.raises(OptionError):
        made(**contract)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(UnknownNameError):
        made().run(y=data(3))


def scaled(**contract) -> VariantGraph:
    g = Graph("scaled")
    n = sym("N", 1, 8)
    x, w, b = g.input("x", (n,)), g.param("w", ()), g.param("b", (n,))
    return st.specialize(g.outputs(x * w + b), "cpu", **contract)


def test_numbers_are_parameters_of_forms_that_come_later() -> None:
    v = scaled(max_variants=4, on_miss="compile")
    v.set_params({"w": 2.0, "b": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(v.run(x=np.ones(3, np.float32))[0], 2)
    with pytest.raises(UnknownNameError, match="no parameter 'v'; it has w, b"):
        v.set_param("v", 1.0)
    np.testing.assert_array_equal(v.run(x=np.ones(3, np.float32))[0], 2)


@pytest.mark.parametrize("buckets", [None, {"N": [3, 8]}])
def test_a_parameter_changes_its_size_and_comes_back(buckets) -> None:
    v = scaled(max_variants=4, on_miss="compile", buckets=buckets)
    v.set_param("w", 2.0)
    for size, value in ((3, 1), (5, 2), (3, 3), (5, 4)):
        v.set_param("b", np.full(size, value, np.float32))
        np.testing.assert_array_equal(v.run(x=np.ones(size, np.float32))[0], np.full(size, 2 + value))
    with pytest.raises(SymbolError):
        v.run(x=np.ones(3, np.float32))


def test_a_parameter_that_is_set_while_a_form_is_made_is_not_lost(monkeypatch) -> None:
    v = scaled(max_variants=4, on_miss="compile")
    v.set_params({"w": 2.0, "b": np.zeros(3, np.float32)})
    put = Table.put

    def late(self: Table, key: object, form: object) -> None:
        """Between the making of a form and its being there for others."""
        monkeypatch.setattr(Table, "put", put)
        v.set_param("w", 5.0)
        put(self, key, form)

    monkeypatch.setattr(Table, "put", late)
    for _ in range(2):
        np.testing.assert_array_equal(v.run(x=np.ones(3, np.float32))[0], 5)


@pytest.mark.parametrize("on_miss", ["compile", "bucket", "interpret"])
def test_settings_that_decide_the_code_have_forms_of_their_own(on_miss: str) -> None:
    g = Graph("rows")
    v = st.specialize(
        g.outputs(ops.take(g.input("x", (sym("N", 1, 8),)), g.input("at", (1,), "i64"))), "cpu",
        max_variants=4, on_miss=on_miss,
    )  # fmt: skip
    feeds = {"x": np.ones(3, np.float32), "at": np.array([2])}
    v.run(feeds)
    v.wait()
    with using(check_indices=True):
        v.run(feeds)
        v.wait()
        with pytest.raises(IndexError):
            v.run(feeds | {"at": np.array([7])})
    assert v.variants == ["N = 3", "N = 3"]
