"""A sum starts from zero, so that no sum of negative zeros is one, however its terms lie and whatever is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata import ops as functions
from strata.core import sym
from strata.mir import Graph
from strata.runtime import Session

ops: Any = functions


@pytest.mark.parametrize("length", [0, 1, 3, 8, 16, 40, 64, 100, 128, 5000, 40000])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "c64"])
def test_sums_of_negative_zeros(length: int, dtype: str) -> None:
    g = Graph("static")
    x = g.input("x", (3, length), dtype)
    minus = -np.zeros((3, length), x.dtype.np)
    outputs = Session("cpu").compile(g.outputs(ops.sum(x, 1), ops.sum(x, 0), ops.sum(x))).run(x=minus)
    g = Graph("symbolic")
    x = g.input("x", (3, sym("n", 0)), dtype)
    outputs += Session("cpu").compile(g.outputs(ops.sum(x, 1), ops.sum(x, 0), ops.sum(x))).run(x=minus)
    for out in outputs:
        assert not np.signbit(out.real.astype(np.float64)).any()
        assert not np.signbit(out.imag.astype(np.float64)).any()
