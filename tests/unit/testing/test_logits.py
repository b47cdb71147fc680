"""Comparing numbers with a reference: tolerances, angles, and what is not finite."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from strata.errors import RunError, ShapeError
from strata.testing import LOOSE_F16, STRICT, check_finite, compare_logits


def test_strict_and_loose(rng: np.random.Generator) -> None:
    wanted = rng.standard_normal((5, 100))
    assert compare_logits(wanted, wanted).absolute == 0
    near = compare_logits(wanted + 5e-5, wanted)
    assert near
    assert (near.same_choice, near.wrong) == (1.0, None)
    off = wanted.copy()
    off[3, 7] += 0.02 + 0.02 * abs(off[3, 7])
    found = compare_logits(off, wanted, STRICT)
    assert not found
    assert found.wrong == (3, 7)
    assert "differ: largest difference" in str(found)
    assert "first wrong at [3, 7]" in str(found)
    assert compare_logits(off, wanted, LOOSE_F16)
    assert compare_logits(wanted * 1.0005, wanted)  # within the relative tolerance, however large
    assert compare_logits(1e6 * wanted * 1.0005, 1e6 * wanted)
    assert not compare_logits(wanted * 1.01, wanted)
    assert str(near).startswith("agree")


def test_a_turned_row_is_seen() -> None:
    """Each element is near, and all of them together point elsewhere."""
    wanted = np.full((2, 4), 1e-6)
    found = wanted * [[1, 1, 1, 1], [1, -1, 1, -1]]
    agreement = compare_logits(found, wanted)
    assert not agreement
    assert agreement.wrong is None
    assert abs(agreement.cosine) < 1e-12
    zero = np.zeros((1, 4))
    assert compare_logits(zero, zero)
    assert not compare_logits(zero, zero + 1e-6)
    assert compare_logits(np.zeros((0, 4)), np.zeros((0, 4)))
    assert compare_logits(1.0, 1.0)


def test_what_is_not_finite_is_an_error() -> None:
    bad = np.ones((2, 3), np.float32)
    bad[1, 2] = np.nan
    with pytest.raises(RunError, match=r"found: NaN at \[1, 2\] of f32\[2, 3\]"):
        compare_logits(bad, np.ones((2, 3)), LOOSE_F16)
    bad[0, 1] = -np.inf
    with pytest.raises(RunError, match=r"wanted: an infinity at \[0, 1\]"):
        compare_logits(np.ones((2, 3)), bad)
    with pytest.raises(RunError, match=r"layer 3: an infinity at \[0\]"):
        check_finite("layer 3", np.array([np.inf], ml_dtypes.bfloat16))
    for fine in (
        np.ones(3),
        np.arange(3),
        np.array([True]),
        np.zeros(0),
        np.ones(2, ml_dtypes.bfloat16),
        np.ones(2, complex),
    ):
        check_finite("fine", fine)
    with pytest.raises(ShapeError, match=r"\[2\] and \[3\]"):
        compare_logits([1, 2], [1, 2, 3])
