"""Experts at hand: who stays, who comes, when; and that what is computed never depends on it."""

from __future__ import annotations

import numpy as np
import pytest

from strata.errors import OptionError
from strata.serving import ExpertPool, ExpertStore, Moves, affordable_experts, hit_counts, merged_mask


def test_counts_of_ids() -> None:
    assert hit_counts(np.array([[2, 0], [2, 3]]), 5).tolist() == [1, 0, 2, 1, 0]
    assert hit_counts(np.zeros(0, np.int64), 2).tolist() == [0, 0]
    with pytest.raises(OptionError, match="0 to 5 are not all among 5"):
        hit_counts(np.array([0, 5]), 5)


def test_those_asked_for_most_are_kept() -> None:
    pool = ExpertPool(6, 2)
    assert pool.resident == (0, 1)
    assert pool.refresh(np.array([4, 4, 4, 3, 3, 1])) == Moves((3, 4), (0, 1))
    assert pool.resident == (3, 4)
    assert pool.refresh(np.array([5, 1, 4])) == Moves((1,), (3,))  # of equals the lower: 1 and 4
    assert pool.refresh(np.zeros(0, np.int64)) == Moves()  # nobody was asked for, so all stay
    assert pool.refresh(np.array([2])) == Moves((2,), (4,))  # only as many go as come; of equals the higher
    assert pool.resident == (1, 2)
    assert pool.mask.tolist() == [False, True, True, False, False, False]
    assert (pool.refreshes, pool.came, pool.went) == (4, 4, 4)


def test_when_to_look_again() -> None:
    pool = ExpertPool(8, 2, every=3)
    assert [step for step in range(10) if pool.is_due(step)] == [0, 3, 6, 9]
    assert pool.is_due(1, is_prefill=True)
    assert not any(ExpertPool(4, 4).is_due(step, is_prefill=True) for step in range(4))
    assert ExpertPool(4, 9).budget == 4


def test_what_fits_into_memory() -> None:
    assert affordable_experts(1000, bytes_per_expert=10, layers=4, experts=64) == 25
    assert affordable_experts(1000, bytes_per_expert=10, layers=4, experts=64, reserve=300) == 17
    assert affordable_experts(1000, bytes_per_expert=10, layers=4, experts=8) == 8
    assert affordable_experts(100, bytes_per_expert=10, layers=4, experts=8, reserve=200) == 0


def test_masks_of_layers_and_of_all() -> None:
    pools = [ExpertPool(4, 1), ExpertPool(4, 1)]
    pools[1].refresh(np.array([2]))
    assert [p.mask.tolist() for p in pools] == [[True, False, False, False], [False, False, True, False]]
    assert merged_mask(pools).tolist() == [True, False, True, False]


@pytest.mark.parametrize("every", [1, 4])
def test_results_do_not_depend_on_who_is_at_hand(every: int, rng: np.random.Generator) -> None:
    experts, k, n = 7, 24, 40
    gate, up = rng.standard_normal((2, experts, k, n)).astype(np.float32)
    down = rng.standard_normal((experts, n, k)).astype(np.float32)
    stores = [
        ExpertStore(ExpertPool(experts, budget, every=every), lambda e: (gate[e], up[e], down[e]))
        for budget in (0, 1, 3, 6, 7)
    ]
    for turn in range(8):
        x = rng.standard_normal((int(rng.integers(1, 20)), k)).astype(np.float32)
        ids = rng.integers(0, experts if turn % 2 else 3, len(x))
        found = [store.run(x, ids, is_prefill=turn == 0) for store in stores]
        a, b = np.einsum("mk,mkn->mn", x, gate[ids]), np.einsum("mk,mkn->mn", x, up[ids])
        wanted = np.einsum("mn,mnk->mk", a / (1 + np.exp(-a)) * b, down[ids])
        assert np.allclose(found[-1], wanted, rtol=1e-4, atol=1e-4)
        for other in found:
            assert np.array_equal(other, found[-1])
    fetched = [store.fetched for store in stores]
    assert fetched[-1] == experts  # all once
    assert fetched[0] > fetched[2] > fetched[-1]


def test_mistakes() -> None:
    for wrong in (lambda: ExpertPool(0, 1), lambda: ExpertPool(2, -1), lambda: ExpertPool(2, 1, every=0)):
        with pytest.raises(OptionError, match="makes no sense"):
            wrong()
    with pytest.raises(OptionError, match="do not make up an expert"):
        affordable_experts(10, bytes_per_expert=0, layers=1, experts=1)
    with pytest.raises(OptionError, match=r"gate, up and down of \[2, 3\], \[2, 3\], \[2, 3\] do not fit"):
        ExpertStore(ExpertPool(2, 1), lambda _: (np.zeros((2, 3)),) * 3)
