"""Sets of numbers, against NumPy: every dtype, ties, NaN, zeros of both signs, nothing at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st

DTYPES = ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 0), (40, 5), (3000,))


def numbers(dtype: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(len(shape))
    made = rng.integers(0, 9, shape)
    x = np.asarray(made - 4 * (np.dtype(dtype).kind in "ifc")).astype(dtype)
    if np.dtype(dtype).kind in "fc" and x.size > 6:
        x.reshape(-1)[:6] = [np.nan, -0.0, 0.0, np.inf, np.nan, -np.inf]
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    x = numbers(dtype, shape)
    values, first, inverse, counts = np.unique(x, True, True, True, equal_nan=False)
    found = st.xp.unique_all(st.asarray(x))
    for got, wanted in zip(found, (values, first, inverse.reshape(shape), counts), strict=True):
        np.testing.assert_array_equal(got.numpy(), wanted)
        assert got.dtype == st.asarray(wanted).dtype
    for made in (st.xp.unique_values(st.asarray(x)), st.xp.unique_counts(st.asarray(x)).values):
        np.testing.assert_array_equal(made.numpy(), values)
        assert made.dtype == found.values.dtype
    np.testing.assert_array_equal(st.xp.unique_counts(st.asarray(x)).counts.numpy(), counts)
    made = st.xp.unique_inverse(st.asarray(x))
    np.testing.assert_array_equal(made.inverse_indices.numpy(), inverse.reshape(shape))
