"""Functions that paths used to disagree on: what one computes all compute, and what one refuses all refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
import strata.tensor as tensors
from strata.core import ALL_DTYPES, DType
from strata.errors import DTypeError
from strata.mir import evaluate
from tests.differential.paths import compiling_at_once

MANY = 300_000  # elements for which an expression is compiled once it has been computed a few times
TIMES = 24
INTEGERS = [t for t in ALL_DTYPES if t.is_int]


def on_every_path(function: Callable[..., Any], *arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Results by path: interpreted, compiled, jitted, lazy, and lazy when it has been compiled."""
    graph = st.Graph("one")
    inputs = [graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    made = function(*inputs)
    graph = graph.outputs(made.value if isinstance(made, st.Tensor) else made)
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    given = [tensors.tensor(a) for a in arrays]
    found = {
        "reference": evaluate(graph, feeds)[0],
        "compiled": st.Session("cpu").compile(graph).run(feeds)[0],
        "jit": st.jit(function)(*given).numpy(),
        "lazy": function(*given).numpy(),
    }
    with compiling_at_once():
        found["later"] = function(*(tensors.tensor(a) for a in arrays)).numpy()
    return found


def agree(found: dict[str, np.ndarray], want: np.ndarray, rtol: float = 0.0) -> None:
    for path, got in found.items():
        assert got.dtype == want.dtype, path
        if rtol:
            np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol, err_msg=path)
        else:
            np.testing.assert_array_equal(got, want, err_msg=path)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_powers_of_complex_numbers(dtype: Any, rng: np.random.Generator) -> None:
    x, y = ((rng.standard_normal(40) + 1j * rng.standard_normal(40)).astype(dtype) for _ in range(2))
    x[:6], y[:6] = [0, 0, 0, 0, 2, 1j], [0, 1, 1j, -1, 0, -3]
    with np.errstate(all="ignore"):
        want = np.power(x, y)
    close = 2e-6 if dtype is np.complex64 else 1e-13
    agree(on_every_path(lambda a, b: a**b, x, y), want, close)
    a, b = (tensors.tensor(np.resize(v, MANY)) for v in (x, y))
    for _ in range(TIMES if dtype is np.complex64 else 0):
        agree({"again": (a**b).numpy()[: x.size]}, want, close)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_signs_of_complex_numbers(dtype: Any, rng: np.random.Generator) -> None:
    parts = [0.0, -0.0, 1.0, -3.0, 1e-300, np.inf, -np.inf, np.nan]
    with np.errstate(all="ignore"):
        z = np.array([complex(a, b) for a in parts for b in parts]).astype(dtype)
        want = np.sign(z)
    agree(on_every_path(st.sign, z), want, 1e-6 if dtype is np.complex64 else 1e-14)


def test_some_pair_of_truths() -> None:
    """A product of truth values is whether any pair is true."""
    x, y = np.array([[1, 0, 1], [0, 0, 0]], bool), np.array([[0, 1], [1, 1], [0, 0]], bool)
    agree(on_every_path(lambda a, b: st.dot_general(a, b, ((1,), (0,))), x, y), x @ y)


@pytest.mark.parametrize("dtype", [t for t in INTEGERS if t.kind == "int" and t.bits > 4], ids=str)
def test_negative_powers_of_integers_are_whole_parts(dtype: DType) -> None:
    x = np.array([1, -1, -1, 0, 2, -3, 1, 5], dtype.np)
    y = np.array([-1, -1, -2, -1, -1, -2, -128, 2], dtype.np)
    want = np.array([1, -1, 1, 0, 0, 0, 1, 25], dtype.np)
    agree(on_every_path(lambda a, b: a**b, x, y), want)


@pytest.mark.parametrize("exponent", [-1, np.int32(-2)], ids=repr)
def test_a_negative_number_is_no_exponent_of_integers(exponent: Any) -> None:
    x = np.array([1, 2])
    graph = st.Graph("power")
    value = graph.input("x", x.shape, "i64")
    functions: list[Callable[[], Any]] = [
        lambda: value**exponent,
        lambda: tensors.tensor(x) ** exponent,
        lambda: st.power(x, exponent),
        lambda: st.power(x[0], exponent),
        lambda: st.jit(lambda a: a**exponent)(x),
    ]
    for function in functions:
        with pytest.raises(DTypeError) as caught:
            function()
        assert caught.value.code == "D105"


@pytest.mark.parametrize("dtype", [t for t in INTEGERS if t.bits > 4], ids=str)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_shifts_by_any_count_are_those_of_numpy(dtype: DType, left: bool) -> None:
    info = np.iinfo(dtype.np)
    counts = [0, 1, dtype.bits - 1, dtype.bits, dtype.bits + 1, info.max, *([-1, info.min] if info.min else [])]
    numbers = np.array([info.min, info.max, 1, 5], dtype.np)
    x, y = (a.reshape(-1).copy() for a in np.meshgrid(numbers, np.array(counts, dtype.np)))
    want = np.left_shift(x, y) if left else np.right_shift(x, y)
    agree(on_every_path((lambda a, b: a << b) if left else (lambda a, b: a >> b), x, y), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floor_division_has_the_infinities_of_numpy(dtype: Any) -> None:
    edges = np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 3, -3], dtype)
    x, y = (a.reshape(-1).copy() for a in np.meshgrid(edges, edges))
    with np.errstate(all="ignore"):
        want = np.floor_divide(x, y)
    found = on_every_path(lambda a, b: a // b, x, y)
    agree(found, want)
    for got in found.values():
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))
    by_number = on_every_path(lambda a: a // float("inf"), x)
    with np.errstate(all="ignore"):
        agree(by_number, np.floor_divide(x, dtype(np.inf)))


@pytest.mark.parametrize("source", [np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16], ids=lambda d: d.__name__)
def test_products_of_floats_that_became_integers_saturate_first(source: Any, dtype: Any) -> None:
    x = np.array([[1e20, -1e20, np.nan, 1.9], [-2.9, 3e9, 0.5, np.inf]], source)
    whole = np.where(np.isnan(x), 0, np.trunc(x)).astype(np.float64)
    info = np.iinfo(dtype)
    cut = [[int(min(max(v, info.min), info.max)) for v in row] for row in whole]
    a = np.array(cut, dtype)
    agree(on_every_path(lambda p: p.astype(np.dtype(dtype).name) @ p.astype(np.dtype(dtype).name).T, x), a @ a.T)
