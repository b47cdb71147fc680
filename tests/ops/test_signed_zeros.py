"""Sums over nothing but -0.0 have the sign that NumPy gives them, whatever is known of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import as_dtype, dim_min
from strata.mir import Graph
from strata.ops.base.movement import Pad
from strata.runtime import Session

FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "cumsum": (lambda x: ops.cumsum(x, axis=-1), lambda x: np.cumsum(x, -1)),
    "cumsum columns": (lambda x: ops.cumsum(x, axis=0), lambda x: np.cumsum(x, 0)),
    "cumprod": (lambda x: ops.cumprod(x, axis=-1), lambda x: np.cumprod(x, -1)),
    "sum": (lambda x: ops.sum(x, axis=-1), lambda x: x.sum(-1)),
    "sum columns": (lambda x: ops.sum(x, axis=0), lambda x: x.sum(0)),
    "sum all": (ops.sum, np.sum),
    "mean": (lambda x: ops.mean(x, axis=-1), lambda x: x.mean(-1)),
    "prod": (lambda x: ops.prod(x, axis=-1), lambda x: x.prod(-1)),
    "max": (lambda x: ops.max(x, axis=-1), lambda x: x.max(-1)),
    "matmul": (lambda x: ops.matmul(x, ops.transpose(ops.abs(x) + 1.0)), lambda x: x @ (np.abs(x) + 1).T),
    "negative": (lambda x: ops.negative(ops.negative(x)), lambda x: x),
}


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 8), (2, 40), (70, 3)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_but_negative_zeros(name: str, shape: tuple[int, int], dtype: str) -> None:
    made, meaning = FUNCTIONS[name]
    x = np.full(shape, -0.0).astype(as_dtype(dtype).np)
    want = np.signbit(np.asarray(meaning(x.astype(np.float64))))
    for known in (shape, (st.sym("m", 0), st.sym("n", 0))):
        g = Graph("zeros")
        (got,) = Session("cpu").compile(g.outputs(made(g.input("x", known, dtype)))).run(x=x)
        np.testing.assert_array_equal(np.signbit(np.asarray(got, np.float64)), want, err_msg=str(known))


@pytest.mark.parametrize("length", [1, 5, 16, 33, 300, 5000, 40_000])
def test_leading_negative_zeros_of_a_running_sum(length: int) -> None:
    x = np.full(length, -0.0, np.float32)
    x[length // 2 + 1 :] = 1.0
    for exclusive in (False, True):
        for reverse in (False, True):
            want = np.cumsum(x[::-1] if reverse else x, dtype=np.float32)
            if exclusive:
                want = np.concatenate([np.zeros(1, np.float32), want[:-1]])
            want = want[::-1] if reverse else want
            for known in (length, st.sym("n", 0)):
                g = Graph("running")
                y = ops.cumsum(g.input("x", (known,), "f32"), axis=0, exclusive=exclusive, reverse=reverse)
                got = np.asarray(Session("cpu").compile(g.outputs(y)).run(x=x)[0])
                np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_zeros_that_differ_make_different_ops_beside_sizes_that_are_not_known() -> None:
    """Whether an open size is 0 is nobody's question there."""

    def padded(value: float) -> Any:
        n = st.sym("n", 0, 64)
        return Pad((0,), (n - dim_min(1, n),), (0,), value)

    assert padded(0.0) == padded(0.0)
    assert padded(0.0) != padded(-0.0)
