"""Orders along an axis that is not the last: a kernel of the phases of a sort may be split once more."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.backends import register_backend
from strata.core import DType, i8, u32, u64
from strata.mir import Graph
from strata.runtime import Session

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [u64, u32, i8])
@pytest.mark.parametrize(("shape", "axis"), [((33, 16), 0), ((5, 15, 15), 1), ((33, 16), 1)])
def test_sort_and_argsort_along_any_axis(dtype: DType, shape: tuple[int, ...], axis: int) -> None:
    from strata.backends.triton.backend import interpreted

    register_backend("triton_interpreter", interpreted())
    g = Graph("g")
    x = g.input("x", dtype[shape])
    a = np.random.default_rng(0).integers(0, 100, shape).astype(dtype.np)
    made = Session("triton_interpreter").compile(g.outputs(ops.argsort(x, axis=axis), ops.sort(x, axis=axis)))
    places, values = made.run({"x": a})
    np.testing.assert_array_equal(places, np.argsort(a, axis, kind="stable"))
    np.testing.assert_array_equal(values, np.sort(a, axis))
