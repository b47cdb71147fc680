"""Floats of fewer than 32 bits are rounded after each op: fused or not, the bits are those of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import as_dtype
from strata.mir import Graph, evaluate
from strata.runtime import CompileOptions, Session

CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda x, y: ((x + y) * x - y) * 0.3,
    "choices": lambda x, y: ops.maximum(ops.relu(x * y), ops.abs(x - y)) + ops.minimum(-x, y),
    "a sum of products": lambda x, y: ops.sum(x * y + x, axis=-1),
    "spread": lambda x, y: (x + y[:1]) * y,
    "a mean taken off": lambda x, y: (x + y) - ops.max(x + y, axis=-1, keepdims=True) * y,
}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_have_the_bits_of_numpy(name: str, dtype: str, rng: np.random.Generator) -> None:
    kind = as_dtype(dtype).np
    feeds = {"x": rng.standard_normal((7, 37)).astype(kind), "y": rng.standard_normal(37).astype(kind)}

    def graph(rows: Any) -> Graph:
        g = Graph("chain")
        return g.outputs(CHAINS[name](g.input("x", (rows, 37), dtype), g.input("y", (37,), dtype)))

    (want,) = evaluate(graph(7), feeds)
    for made in (graph(7), graph(st.sym("n", 0))):
        for fusion in (True, False):
            (got,) = Session("cpu").compile(made, CompileOptions(fusion=fusion)).run(feeds)
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["mish", "quick_gelu", "hard_swish", "selu", "softsign", "log10", "norm"])
def test_functions_of_several_ops_are_rounded_once(name: str, dtype: str, rng: np.random.Generator) -> None:
    x = (0.2 + np.abs(rng.standard_normal(300))).astype(as_dtype(dtype).np)
    g = Graph("once")
    (got,) = Session("cpu").compile(g.outputs(getattr(ops, name)(g.input("x", x.shape, dtype)))).run(x=x)
    wide = Graph("wide")
    (want,) = evaluate(wide.outputs(getattr(ops, name)(wide.input("x", x.shape, "f64"))), {"x": x.astype(np.float64)})
    rounded = np.asarray(want).astype(x.dtype)
    steps = np.abs(np.asarray(got).view(np.int16).astype(int) - rounded.view(np.int16).astype(int))
    assert steps.max() <= 1, f"{steps.max()} ulp"
    assert (steps == 0).mean() > 0.95


@pytest.mark.parametrize("name", ["sigmoid", "gelu", "silu", "softplus"])
def test_derivatives_are_rounded_once(name: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal(500).astype(as_dtype("bf16").np)

    def slope(values: Any) -> Any:
        return np.asarray(st.grad(lambda t: getattr(st, name)(t).sum())(st.asarray(values)).numpy())

    want = slope(x.astype(np.float64))
    np.testing.assert_allclose(slope(x).astype(np.float64), want, rtol=2**-7.5, atol=2**-9)
