"""Recurrences along an axis: rows side by side, gathered, alone; ends that do not fill a vector."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strata.ops  # noqa: F401 - registers the ops
from strata.core import sym
from strata.mir import METHODS

SHAPES = [
    ((7, 5), 0),
    ((100, 70), 0),
    ((100, 70), 1),
    ((3, 50, 17), 1),
    ((2, 9, 130), 1),
    ((40, 33), 1),
    ((5, 1000), 1),
]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_recurrence(native: Any, shape: tuple[int, ...], axis: int, dtype: Any, reverse: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(-0.9, 0.9, shape).astype(dtype) for _ in range(2))
    (got,) = native(lambda x, y: METHODS["linear_recurrence"](x, y, axis, reverse=reverse), a, b)
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    factors, terms = (np.moveaxis(v.astype(wide), axis, 0) for v in (a, b))
    state, want = np.zeros(terms.shape[1:], wide), np.zeros_like(terms)
    for i in reversed(range(len(terms))) if reverse else range(len(terms)):
        want[i] = state = factors[i] * state + terms[i]
    np.testing.assert_allclose(got, np.moveaxis(want, 0, axis).astype(dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8])
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_running_extremum(native: Any, shape: tuple[int, ...], axis: int, dtype: Any, name: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 50, shape).astype(dtype)
    if np.dtype(dtype).kind == "f":
        x[rng.random(shape) < 0.01] = np.nan
    values, ids = native(lambda v: METHODS[name](v, axis), x)
    best = np.maximum if name == "cummax" else np.minimum
    np.testing.assert_array_equal(values, best.accumulate(x, axis))
    np.testing.assert_array_equal(np.take_along_axis(x, ids, axis), values)
    np.testing.assert_array_equal(np.diff(ids, axis=axis) >= 0, True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.int8, np.int32, np.uint64])
@pytest.mark.parametrize("length", [1, 15, 16, 333])
def test_extrema_of_few_rows(native: Any, length: int, dtype: Any) -> None:
    """Rising and falling rows, equal numbers, NaN first and later, infinities: places are those of the first best."""
    rng = np.random.default_rng(1)
    x = np.abs(rng.standard_normal((5, length)) * 9)
    x[0], x[1], x[2] = np.sort(x[0]), -np.sort(-x[1]), 3
    if np.dtype(dtype).kind in "fV":
        x[3, length // 2], x[4, 0], x[0, 0] = np.nan, np.nan, -np.inf
    x = x.astype(dtype)
    for name in ("cummax", "cummin"):
        values, ids = native(lambda v, name=name: METHODS[name](v, 1), x)
        wide = x.astype(np.float64)
        best = (np.maximum if name == "cummax" else np.minimum).accumulate(wide, 1)
        first = [
            [np.nonzero((row == b) | ((row != row) & (b != b)))[0][0] for b in line]
            for row, line in zip(wide, best, strict=True)
        ]
        np.testing.assert_array_equal(values.astype(np.float64), best)
        np.testing.assert_array_equal(ids, first)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logcumsumexp(native: Any, shape: tuple[int, ...], axis: int, dtype: Any) -> None:
    x = (np.random.default_rng(2).standard_normal(shape) * 30).astype(dtype)
    (got,) = native(lambda v: METHODS["logcumsumexp"](v, axis), x)
    np.testing.assert_allclose(got, np.logaddexp.accumulate(x.astype(np.float64), axis), rtol=2e-5, atol=2e-5)


def test_symbolic_sizes(native: Any) -> None:
    n, m = sym("n"), sym("m")
    for shape in ((1, 1), (30, 200), (300, 3)):
        x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
        values, _ = native(lambda v: METHODS["cummax"](v, 0), x, shapes=[(n, m)], threads=(2,))
        np.testing.assert_array_equal(values, np.maximum.accumulate(x, 0))


def test_gcd(native: Any) -> None:
    rng = np.random.default_rng(4)
    for dtype in (np.int64, np.uint8, np.int32):
        a, b = (rng.integers(0, 120, 999).astype(dtype) for _ in range(2))
        np.testing.assert_array_equal(native(METHODS["gcd"], a, b)[0], np.gcd(a, b))


@pytest.mark.parametrize("length", [1, 3, 8, 16, 17, 33, 1000, 70_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logcumsumexp_of_one_long_row(native: Any, length: int, dtype: Any) -> None:
    """Heights that differ by more than an exponential can hold, equal ones, infinities and NaN, wherever they lie."""
    rng = np.random.default_rng(length)
    rise = np.repeat(rng.uniform(-2000, 2000, -(-length // 5)), 5)[:length]
    rows = [rng.standard_normal(length), rise, np.sort(rise), np.sort(rise)[::-1], np.zeros(length)]
    for fill in (np.inf, -np.inf, np.nan):
        rows.append(np.where(rng.random(length) < 0.1, fill, rng.standard_normal(length)))
    for row in rows:
        x = row.astype(dtype)
        (got,) = native(lambda v: METHODS["logcumsumexp"](v, 0), x)
        with np.errstate(invalid="ignore"):
            want = np.logaddexp.accumulate(x.astype(np.float64))
        np.testing.assert_allclose(
            got, want, rtol=3e-6 if dtype == np.float32 else 1e-13, atol=1e-5 if dtype == np.float32 else 1e-12
        )
