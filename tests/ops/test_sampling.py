"""The sampler: the numbered cases, its distribution, and what it must never return."""

import numpy as np
import pytest
import scipy.stats

from strata import ops
from strata.core import f32
from strata.errors import OptionError, RunError
from strata.mir import evaluate_values, placeholder
from strata.ops import random
from strata.ops.nn.sampling import SampleToken


def value(x):
    return evaluate_values([x], {}, {})[0]


def both(logits, seed, **options):
    """The op's NumPy meaning and its decomposition, which must agree."""
    logits = np.asarray(logits, np.float32)
    x = placeholder("x", f32[logits.shape])
    k = random.key(seed)
    y = ops.sample(x, k, **options)
    direct = evaluate_values([y], {x: logits}, {})[0]
    parts = evaluate_values([y.node.op.decompose(*y.node.inputs)], {x: logits}, {})[0]
    np.testing.assert_array_equal(direct, parts)
    return direct


def test_case_8_cold_temperature() -> None:
    logits = np.zeros(8)
    logits[5] = 9.0
    assert both(logits, 42, temperature=1e-3) == 5


def test_case_9_top_1() -> None:
    assert both([0.1, 5, 0.3, 0.4], 7, top_k=1) == 1


def test_case_102_calls_with_new_keys_differ_and_old_keys_reproduce() -> None:
    logits = np.zeros((64, 50), np.float32)
    root = random.key(0)
    first, second, again = (value(ops.sample(logits, random.fold_in(root, step))) for step in (0, 1, 0))
    assert (first != second).any()
    np.testing.assert_array_equal(first, again)


def test_zero_probability_is_never_drawn() -> None:
    logits = np.full((4000, 6), -np.inf, np.float32)
    logits[:, [1, 4]] = 0
    ids = both(logits, 1)
    assert set(ids.tolist()) == {1, 4}
    op = SampleToken()
    assert op._choose(np.array([-np.inf, 0.0, 0.0]), 0) == 1  # r = 0
    assert op._choose(np.array([0.0, 0.0, -np.inf]), 0xFFFFFFFF) == 1  # the largest r


def test_exactly_k_with_ties_to_the_smaller_id() -> None:
    ids = both(np.zeros((2000, 5)), 3, top_k=2)
    assert set(ids.tolist()) == {0, 1}


def test_distribution() -> None:
    p = np.array([0.5, 0.1, 0.25, 0.15])
    rows = np.tile(np.log(p), (8000, 1))
    counts = np.bincount(both(rows, 5), minlength=4)
    assert scipy.stats.chisquare(counts, p * 8000).pvalue > 1e-3
    nucleus = np.bincount(both(rows, 5, top_p=0.7), minlength=4)  # 0.5, then 0.75 ≥ 0.7
    assert nucleus[1] == nucleus[3] == 0
    assert scipy.stats.chisquare(nucleus[[0, 2]], np.array([2, 1]) / 3 * 8000).pvalue > 1e-3
    least = np.bincount(both(rows, 5, min_p=0.4), minlength=4)
    assert least[1] == least[3] == 0
    hot = np.bincount(both(rows, 5, temperature=2.0), minlength=4)
    q = np.sqrt(p) / np.sqrt(p).sum()
    assert scipy.stats.chisquare(hot, q * 8000).pvalue > 1e-3
    assert set(both(rows, 5, top_p=0.01).tolist()) == {0}  # at least one stays


def test_greedy_needs_no_key() -> None:
    logits = np.float32([[1, 3, 3], [0, -1, -2]])
    assert value(ops.sample(logits, greedy=True)).tolist() == [1, 0]
    assert value(ops.sample(logits, temperature=0)).tolist() == [1, 0]
    with pytest.raises(OptionError, match="needs a key"):
        ops.sample(logits)


def test_bad_logits_are_an_error() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(RunError, match="row 1"):
            value(ops.sample(np.float32([[0, 1], [bad, 0]]), random.key(0)))
    with pytest.raises(RunError, match="no finite entry"):
        value(ops.sample(np.float32([-np.inf, -np.inf]), random.key(0)))


def test_mistakes() -> None:
    x = placeholder("x", f32[2, 3])
    for options in ({"top_k": -1}, {"top_p": 0.0}, {"min_p": 2.0}, {"temperature": -1.0}):
        with pytest.raises(OptionError):
            ops.sample(x, random.key(0), **options)
