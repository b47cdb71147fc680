"""Reductions of many elements, as whole programs: the same bits on any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st

WHOLE: dict[str, tuple[tuple[int, ...], Any]] = {
    "all": ((700_001,), lambda x: x.sum()),
    "columns": ((30_001, 7), lambda x: x.max(0)),
    "wide columns": ((513, 700), lambda x: x.mean(0)),
    "middle": ((2, 400, 300), lambda x: x.sum(1)),
    "one row": ((1, 300_007), lambda x: x.softmax(-1)),
    "moments": ((400_003,), lambda x: (x - x.mean()) / x.std()),
    "condition": ((600_000,), lambda x: (x > -9.0).all()),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("is_open", [False, True])
def test_long_reductions_in_parts(name: str, is_open: bool) -> None:
    """Whole programs, with known and with open sizes, on any number of threads."""
    shape, function = WHOLE[name]
    array = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    g = st.Graph("reduction")
    x = g.input("x", tuple(st.sym(f"d{n}", 1) for n in range(len(shape))) if is_open else shape, "f32")
    g.outputs(function(x))
    results = []
    for threads in (1, 2, 7):
        compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
        (result,) = compiled.run({"x": array})
        results.append(np.array(result))
    assert all(r.tobytes() == results[0].tobytes() for r in results)
    (wanted,) = st.evaluate(g, {"x": array})
    np.testing.assert_allclose(results[0], wanted, rtol=1e-4, atol=1e-5 if name != "all" else 0.05)
