"""sort, argsort, topk and searchsorted on sizes that reach every way of sorting, in all kinds of types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strata.ops  # noqa: F401 - registers the ops
from strata.core import sym
from strata.mir import METHODS

TYPES = [
    np.float32,
    np.float64,
    np.float16,
    ml_dtypes.bfloat16,
    np.int8,
    np.uint16,
    np.int32,
    np.uint64,
    np.int64,
    np.bool_,
]
SHAPES = [
    ((5,), 0),
    ((40, 30), 1),
    ((3, 33), 1),
    ((20, 700), 1),
    ((2, 1500), 1),
    ((300, 40), 0),
    ((2, 70, 3), 1),
    ((1, 5000), 1),
]


def _draw(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind in "iub":
        return rng.integers(0, 2 if kind.kind == "b" else 100, shape).astype(kind)
    x = rng.standard_normal(shape).round(1)  # many ties
    x[rng.random(shape) < 0.02] = np.nan
    x[rng.random(shape) < 0.02] = -0.0
    x[rng.random(shape) < 0.01] = np.inf
    return x.astype(kind)


def _order(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    x = x.astype(np.float64) if x.dtype.kind in "fV" else x
    if not descending:
        return np.argsort(x, axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)


@pytest.mark.few(40)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_orders(native: Any, shape: tuple[int, ...], axis: int, dtype: Any, descending: bool) -> None:
    x = _draw(shape, dtype)
    order = _order(x, axis, descending)
    (ids,) = native(lambda v: METHODS["argsort"](v, axis, descending=descending), x)
    np.testing.assert_array_equal(ids, order)
    (values,) = native(lambda v: METHODS["sort"](v, axis, descending=descending), x)
    want = np.take_along_axis(x, order, axis)
    np.testing.assert_array_equal(values.astype(np.float64), want.astype(np.float64))
    if np.dtype(dtype).kind in "fV":  # zeros of both signs are equal, and stay in their order
        zeros = want == 0
        np.testing.assert_array_equal(
            np.signbit(values.astype(np.float64)[zeros]), np.signbit(want.astype(np.float64)[zeros])
        )


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 2), 1), ((1, 40), 1), ((3, 1000), 1), ((40, 7), 1), ((33, 65), 1), ((65, 33), 0), ((2, 9, 5), 1)],
)
def test_zeros_of_both_signs_stay_in_their_order(
    native: Any, shape: tuple[int, ...], axis: int, dtype: Any, descending: bool
) -> None:
    rng = np.random.default_rng(1)
    for share in (0.0, 0.1, 0.9, 1.0):  # of zeros; the others around them
        x = np.where(
            rng.random(shape) < share, np.where(rng.random(shape) < 0.5, 0.0, -0.0), rng.standard_normal(shape)
        )
        x = x.astype(dtype)
        (values,) = native(lambda v: METHODS["sort"](v, axis, descending=descending), x)
        want = np.take_along_axis(x, _order(x, axis, descending), axis)
        np.testing.assert_array_equal(values, want)
        np.testing.assert_array_equal(np.signbit(values), np.signbit(want))


@pytest.mark.parametrize(
    ("shape", "k"), [((3, 5000), 7), ((2, 20000), 300), ((40, 64), 8), ((3, 100), 60), ((300,), 300)]
)
@pytest.mark.parametrize("largest", [False, True])
def test_topk(native: Any, shape: tuple[int, ...], k: int, largest: bool) -> None:
    x = _draw(shape, np.float32)
    order = np.take(_order(x, -1, largest), np.arange(k), -1)
    values, ids = native(lambda v: METHODS["topk"](v, k, -1, largest=largest), x)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "k"), [((20, 700), 1), ((9, 131), 4), ((33, 40), 3), ((2, 3, 300), 16)])
def test_topk_of_few(native: Any, shape: tuple[int, ...], k: int, dtype: Any) -> None:
    """The best of rows of any type, with equals, in order of their positions; a row of equals; rising rows."""
    x = _draw(shape, dtype)
    x[..., 0, :] = x[..., 0, :1]
    x[..., 1, :] = np.sort(x[..., 1, :])
    for largest in (False, True):
        order = np.take(_order(x, -1, largest), np.arange(k), -1)
        values, ids = native(lambda v, largest=largest: METHODS["topk"](v, k, -1, largest=largest), x)
        np.testing.assert_array_equal(ids, order)
        bits = f"u{x.itemsize}"
        np.testing.assert_array_equal(values.view(bits), np.take_along_axis(x, order, -1).view(bits))


def test_topk_of_columns(native: Any) -> None:
    x = _draw((3000, 5), np.int32)
    values, ids = native(lambda v: METHODS["topk"](v, 9, 0), x)
    np.testing.assert_array_equal(ids, _order(x, 0, True)[:9])
    np.testing.assert_array_equal(values, np.take_along_axis(x, ids, 0))


def test_sorted_input_and_one_value(native: Any) -> None:
    for x in (np.arange(4000, dtype=np.float32), np.full(4000, 3, np.float32), -np.arange(4000, dtype=np.int64)):
        np.testing.assert_array_equal(native(METHODS["sort"], x)[0], np.sort(x))
        np.testing.assert_array_equal(native(METHODS["argsort"], x)[0], np.argsort(x, kind="stable"))


def test_symbolic_sizes(native: Any) -> None:
    rows, n = sym("rows"), sym("n")
    for shape in ((1, 3), (70, 50), (2, 3000)):
        x = _draw(shape, np.float32)
        (got,) = native(METHODS["argsort"], x, shapes=[(rows, n)], threads=(2,))
        np.testing.assert_array_equal(got, _order(x, 1, False))


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(native: Any, side: str) -> None:
    rng = np.random.default_rng(1)
    numbers = np.sort(rng.standard_normal(5000).astype(np.float32).round(2))
    x = np.concatenate([rng.standard_normal(700).round(2), [np.inf, -np.inf, -0.0, 0.0]]).astype(np.float32)
    (got,) = native(lambda a, b: METHODS["searchsorted"](a, b, side), numbers, x)
    np.testing.assert_array_equal(got, np.searchsorted(numbers, x, side))  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int32, np.int64, np.float16])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 16, 17, 1000])
@pytest.mark.parametrize("side", ["left", "right"])
def test_search_in_tables_of_all_lengths(native: Any, side: str, n: int, dtype: Any) -> None:
    """Whole registers of numbers and single ones; equal elements, -0 and 0, NaN and infinities; rows of their own."""
    rng = np.random.default_rng(n)
    special = [0.0, -0.0, np.nan, np.inf, -np.inf] if np.dtype(dtype).kind == "f" else [0, -100, 100]
    table = np.concatenate([rng.integers(-60, 60, max(0, n - 4)), special])[-n:] if n else np.zeros(0)
    table = np.sort(table.astype(dtype))
    x = np.concatenate([special, rng.integers(-70, 70, 70) / 2, table[:5]]).astype(dtype)
    (got,) = native(lambda a, b: METHODS["searchsorted"](a, b, side), table, x)
    np.testing.assert_array_equal(got, np.searchsorted(table, x, side))  # type: ignore[call-overload]
    rows, wanted = np.stack([table, table]), np.stack([x, x[::-1]])
    (got,) = native(lambda a, b: METHODS["searchsorted"](a, b, side), rows, wanted)
    expected = np.stack([np.searchsorted(table, w, side) for w in wanted])  # type: ignore[call-overload]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.int16])
@pytest.mark.parametrize("low", [2, 20, 40, 60, 120, 250])
def test_networks_of_all_lengths(native: Any, low: int, dtype: Any) -> None:
    """Rows of zeros and ones, whose order any wrong exchange would show, and of numbers; behind each other and side by
    side."""
    rng = np.random.default_rng(low)
    for n in range(low, low + 20):
        bits = rng.random((67, n)) < rng.random((67, 1))
        x = np.where(rng.random((67, 1)) < 0.5, bits, rng.integers(-n, n, (67, n))).astype(dtype)
        (rows,) = native(lambda a: METHODS["sort"](a, axis=1), x, threads=(2,))
        np.testing.assert_array_equal(rows, np.sort(x, 1))
        (places,) = native(lambda a: METHODS["argsort"](a, axis=1), x, threads=(2,))
        np.testing.assert_array_equal(places, np.argsort(x, 1, kind="stable"))
        (columns,) = native(lambda a: METHODS["sort"](a, axis=0), np.ascontiguousarray(x.T), threads=(2,))
        np.testing.assert_array_equal(columns, np.sort(x.T, 0))
