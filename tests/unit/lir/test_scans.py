"""Running reductions in kernels: one loop goes along one axis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata import ops
from strata.mir import Graph, Value, evaluate
from strata.runtime import Session

TWO_WAYS: dict[str, Callable[[Value], list[Value]]] = {
    "a sum": lambda x: [ops.cumsum(x, axis=0) + ops.cumsum(x, axis=1)],
    "of one value": lambda x: [ops.cumsum(y := ops.tanh(x) * 2.0, axis=0), ops.cumsum(y, axis=1)],
    "of a result": lambda x: [y := ops.tanh(x) * 2.0, ops.cumsum(y, axis=0), ops.cumsum(y, axis=1)],
    "inside each other": lambda x: [ops.cumsum(ops.cumsum(x, axis=0), axis=1)],
    "beside a row": lambda x: [ops.cumsum(x, axis=0) * ops.cumsum(x, axis=1) + ops.softmax(x, axis=-1)],
    "back and forth": lambda x: [ops.cumsum(x, axis=1) + ops.flip(ops.cumsum(ops.flip(x, 1), axis=1), 1)],
}


@pytest.mark.parametrize("shape", [(4, 5), (33, 17), (1, 7), (0, 3)])
@pytest.mark.parametrize("name", TWO_WAYS)
def test_running_sums_along_two_axes_are_two_kernels(name: str, shape: tuple[int, int]) -> None:
    g = Graph("scans")
    g.outputs(*TWO_WAYS[name](g.input("x", shape)))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    compiled = Session("cpu").compile(g)
    for got, want in zip(compiled.run(x=x), evaluate(g, {"x": x}, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
