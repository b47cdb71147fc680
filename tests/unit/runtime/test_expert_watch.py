"""Residency masks, statistics and captured ids of experts, on compiled graphs that run."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.errors import OptionError
from strata.mir import Graph
from strata.runtime import CompiledGraph, ExpertWatch, Session
from strata.serving import ExpertPool


def mixture(rows: int = 12, experts: int = 4) -> CompiledGraph:
    """Two layers of experts, each routed by its own ids."""
    g = Graph("mixture")
    x = g.input("x", (rows, 8))
    for layer in range(2):
        ids = g.input(f"ids{layer}", (rows,), "i64")
        hidden = ops.silu(ops.grouped_matmul(x, g.param(f"up{layer}", (experts, 8, 16)), ids))
        x = ops.grouped_matmul(hidden, g.param(f"down{layer}", (experts, 16, 8)), ids)
    return Session("cpu").compile(g.outputs(x))


@pytest.fixture
def feeds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "x": rng.standard_normal((12, 8)).astype(np.float32),
        "ids0": rng.integers(0, 4, 12), "ids1": rng.integers(0, 4, 12),
    }  # fmt: skip


def test_graphs_report_what_was_routed(feeds: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    compiled = mixture()
    compiled.set_params({n: rng.standard_normal(t.shape).astype(np.float32) for n, t in compiled.params.items()})
    (plain,) = compiled.run(feeds)
    pool = ExpertPool(4, 2)
    with ExpertWatch(compiled, 4) as watch:
        assert watch.layers == 2
        for mask in (pool.mask, np.stack([pool.mask, ~pool.mask])):
            watch.set_resident(mask)
            np.testing.assert_array_equal(compiled.run(feeds)[0], plain)  # whatever is in memory
            stats, rows = watch.take_stats(), np.broadcast_to(mask, (2, 4))
            want = tuple(int(rows[i][feeds[f"ids{i}"]].sum()) for i in range(2))
            assert stats.hits == want
            assert stats.misses == tuple(12 - n for n in want)
            assert stats.hit_rate == pytest.approx(sum(want) / 24)
            for layer, ids in enumerate(watch.take_topk()):
                np.testing.assert_array_equal(ids, feeds[f"ids{layer}"])
        pool.refresh(feeds["ids0"])  # what was captured decides who stays
        assert watch.take_stats().hits == (0, 0)
        assert [ids.size for ids in watch.take_topk()] == [0, 0]
    compiled.run(feeds)
    assert watch.take_stats().hit_rate == 1.0  # outside of the block nothing is seen


@pytest.mark.parametrize("top", [1, 2])
def test_the_choice_of_a_router_is_captured(top: int, rng: np.random.Generator) -> None:
    g = Graph("routed")
    x, router = g.input("x", (6, 8)), g.param("router", (8, 4))
    weights, ids = ops.route_top_k(x @ router, top)
    flat = ops.reshape(ids, (6 * top,))
    made = ops.grouped_matmul(ops.repeat(x, top, axis=0), g.param("w", (4, 8, 8)), flat)
    mixed = ops.reshape(made, (6, top, 8)) * ops.reshape(weights, (6, top, 1))
    compiled = Session("cpu").compile(g.outputs(ops.sum(mixed, axis=1)))
    params = {n: rng.standard_normal(t.shape).astype(np.float32) for n, t in compiled.params.items()}
    compiled.set_params(params)
    data = rng.standard_normal((6, 8)).astype(np.float32)
    with ExpertWatch(compiled, 4) as watch:
        watch.set_resident(np.array([True, False, True, False]))
        compiled.run(x=data)
        (captured,) = watch.take_topk()
        stats = watch.take_stats()
    want = np.argsort(-(data @ params["router"]), axis=1, kind="stable")[:, :top]
    np.testing.assert_array_equal(captured.reshape(6, top), want)
    assert (stats.hits, stats.misses) == (((want % 2 == 0).sum(),), ((want % 2 == 1).sum(),))
    chosen = np.unique(want)
    assert (stats.hit_calls, stats.miss_calls) == (((chosen % 2 == 0).sum(),), ((chosen % 2 == 1).sum(),))


def test_masks_of_the_wrong_length() -> None:
    watch = ExpertWatch(mixture(), 4)
    for bad in (np.ones(3, bool), np.ones((3, 4), bool)):
        with pytest.raises(OptionError, match=r"bool\[4\] or bool\[2, 4\]"):
            watch.set_resident(bad)
    with pytest.raises(OptionError, match="are none"):
        ExpertWatch(mixture(), 0)


@pytest.mark.parametrize("mask", [[0, 2, 1, 3], [0.5, 1, 1, 0], [None] * 4, "abcd", [[True], [True, False]]])
def test_masks_are_true_and_false(mask: object) -> None:
    with pytest.raises(OptionError, match=r"True and False"):
        ExpertWatch(mixture(), 4).set_resident(mask)


@pytest.mark.parametrize("experts", [3, 5])
def test_as_many_experts_as_the_graph_has(experts: int) -> None:
    with pytest.raises(OptionError, match=f"has layers of 4 experts, not {experts}"):
        ExpertWatch(mixture(), experts)
