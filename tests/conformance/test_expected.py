"""The cases of onnx.backend.test that fail: each shown to be the suite's, not ours."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the suite comes with the package onnx")

from strata.io.onnx import load
from tests.conformance.onnx_expected import EXPECTED_FAILURES
from tests.onnx_export import cases


@pytest.mark.parametrize("name", ["test_attention_4d_causal_fp16", "test_attention_4d_causal_fp16_expanded"])
def test_half_precision_is_nearer_to_the_truth(name: str) -> None:
    """Against the same attention in f64, our numbers are the better ones."""
    case = cases()[name]
    ((inputs, (wanted,)),) = case.data
    q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    truth = shares / shares.sum(-1, keepdims=True) @ v
    feeds = dict(zip([p.name for p in case.model.graph.input], inputs, strict=True))
    (ours,) = load(case.model, device="reference").run(feeds)
    assert abs(ours - truth).max() < abs(wanted - truth).max()
    assert abs(ours - truth).mean() <= abs(wanted - truth).mean()


@pytest.mark.parametrize("name", [name for name in EXPECTED_FAILURES if "bernoulli" in name])
def test_draws_of_the_generator_that_made_the_suite(name: str) -> None:
    """Onnx's own evaluator does not give them either; ours are draws with the probabilities that are asked for."""
    case = cases()[name]
    ((inputs, (wanted,)),) = case.data
    assert not np.array_equal(evaluated(case.model, inputs), wanted)
    (ours,) = load(case.model, device="reference").run(dict(zip(["x"], inputs, strict=False)))
    assert ours.dtype == wanted.dtype
    assert set(np.unique(ours)) <= {0, 1}


def test_the_comparison_of_the_suite_fails_on_equal_sequences() -> None:
    """Ours are the arrays that are expected; those without axes are what its comparison does not take."""
    case = cases()["test_loop16_seq_none"]
    ((inputs, (wanted,)),) = case.data
    feeds = dict(zip([p.name for p in case.model.graph.input], inputs, strict=True))
    (ours,) = load(case.model, device="reference").run(feeds)
    assert len(ours) == len(wanted)
    for got, want in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def evaluated(model: Any, inputs: Any) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ReferenceEvaluator(model).run(
            None, dict(zip([p.name for p in model.graph.input], inputs, strict=False))
        )
    return np.asarray(found[0])  # type: ignore[index]
