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


def test_masks_of_the_wrong_length() -> None:
    watch = ExpertWatch(mixture(), 4)
    for bad in (np.ones(3, bool), np.ones((3, 4), bool)):
        with pytest.raises(OptionError, match=r"bool\[4\] or bool\[2, 4\]"):
            watch.set_resident(bad)
    with pytest.raises(OptionError, match="are none"):
        ExpertWatch(mixture(), 0)
