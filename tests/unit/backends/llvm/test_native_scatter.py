"""Scatters with many updates on few rows and few on many, all reductions, narrow types, shapes that do not agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata.ops  # noqa: F401 - registers the ops
from strata.core import sym
from strata.mir import METHODS

UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize(
    ("rows", "count", "width"),
    [
        (10, 1000, 1),
        (50, 300, 7),
        (90, 300, 4),
        (90, 300, 37),
        (3000, 200, 64),
        (90, 300, 100),
        (7, 40, 1000),
        (5, 0, 3),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.complex64])
def test_scatter_add(native: Any, rows: int, count: int, width: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    updates, ids = rng.integers(-9, 9, (count, width)).astype(dtype), rng.integers(-rows, rows, count)
    (got,) = native(lambda u, i: METHODS["scatter_add"](u, i, rows, wrap=True), updates, ids)
    want = np.zeros((rows, width), dtype)
    np.add.at(want, ids, updates)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("width", [1, 3, 4, 21, 64, 65, 130])
def test_rows_without_and_with_a_known_width(native: Any, width: int) -> None:
    rng = np.random.default_rng(0)
    x, updates = rng.standard_normal((2, 40, width)), rng.standard_normal((70, width))
    ids = np.stack([rng.integers(0, 2, 70), rng.integers(0, 40, 70)], 1)
    want = x.copy()
    np.maximum.at(want, tuple(ids.T), updates)

    def make(a: Any, i: Any, u: Any) -> Any:
        return METHODS["scatter_nd"](a, i, u, reduction="max")

    for spec in (None, ((2, 40, sym("w")), ids.shape, (70, sym("w")))):
        (got,) = native(make, x, ids, updates, shapes=spec)
        np.testing.assert_array_equal(got, want)


def test_sums_of_half_are_kept_in_single(native: Any) -> None:
    updates, ids = np.ones((5000, 1), np.float16), np.zeros(5000, np.int64)
    (got,) = native(lambda u, i: METHODS["scatter_add"](u, i, 2), updates, ids)
    np.testing.assert_array_equal(got, np.array([[5000], [0]], np.float16))  # adding in half would stop at 2048


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize(
    ("shape", "ids_shape", "axis"),
    [
        ((50, 40), (200, 40), 0),
        ((50, 40), (30, 90), 1),
        ((4, 30, 300), (4, 7, 300), 1),
        ((20,), (500,), 0),
        ((9, 5), (9, 5), 1),
    ],
)
def test_scatter_elements(
    native: Any, shape: tuple[int, ...], ids_shape: tuple[int, ...], axis: int, reduction: str
) -> None:
    rng = np.random.default_rng(1)
    x, updates = rng.standard_normal(shape), rng.standard_normal(ids_shape)
    ids = rng.integers(0, shape[axis], ids_shape)
    (got,) = native(lambda a, i, u: METHODS["scatter_elements"](a, i, u, axis, reduction=reduction), x, ids, updates)
    want, at = x.copy(), list(np.indices(ids_shape, sparse=True))
    at[axis] = ids
    if reduction == "none":
        want[tuple(at)] = updates
    else:
        UFUNCS[reduction].at(want, tuple(at), updates)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_scatter_nd(native: Any, reduction: str) -> None:
    rng = np.random.default_rng(2)
    x, updates = (
        rng.standard_normal((6, 8, 9, 33)).astype(np.float32),
        rng.standard_normal((6, 70, 33)).astype(np.float32),
    )
    ids = np.stack([rng.integers(0, 8, (6, 70)), rng.integers(0, 9, (6, 70))], -1)
    (got,) = native(lambda a, i, u: METHODS["scatter_nd"](a, i, u, reduction=reduction, batch_dims=1), x, ids, updates)
    want, at = x.copy(), (np.arange(6)[:, None], ids[..., 0], ids[..., 1])
    if reduction == "none":
        want[at] = updates
    else:
        UFUNCS[reduction].at(want, at, updates)
    np.testing.assert_array_equal(got, want)


def test_symbolic_sizes(native: Any) -> None:
    n = sym("n")
    for count in (1, 77):
        updates, ids = np.ones((count, 3), np.float32), np.arange(count) % 5
        (got,) = native(lambda u, i: METHODS["scatter_add"](u, i, 5), updates, ids, shapes=[(n, 3), (n,)], threads=(2,))
        np.testing.assert_array_equal(got[:, 0], np.bincount(ids, minlength=5))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 37])
@pytest.mark.parametrize("wrap", [False, True])
def test_ids_from_the_end_and_outside(native: Any, wrap: bool, count: int, dtype: Any) -> None:
    """Ids that are looked at together and those that are left over; outside, they are the nearest row."""
    rng = np.random.default_rng(count)
    ids = rng.integers(-14, 20, count).astype(dtype)
    rows = np.clip(np.where(ids < 0, ids + 12, ids) if wrap else ids, 0, 11)
    for width in ((), (3,)):
        updates = rng.standard_normal((count, *width))
        (got,) = native(lambda u, i: METHODS["scatter_add"](u, i, 12, wrap=wrap), updates, ids)
        want = np.zeros((12, *width))
        np.add.at(want, rows, updates)
        np.testing.assert_array_equal(got, want)
    x, updates = rng.standard_normal((5, 12)), rng.standard_normal((5, count))
    many = np.stack([np.roll(ids, n) for n in range(5)])
    (got,) = native(
        lambda a, i, u: METHODS["scatter_elements"](a, i, u, 1, reduction="add", wrap=wrap), x, many, updates
    )
    want = x.copy()
    np.add.at(want, (np.arange(5)[:, None], np.stack([np.roll(rows, n) for n in range(5)])), updates)
    np.testing.assert_array_equal(got, want)
