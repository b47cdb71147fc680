"""any and all end where the result is known, wherever that is."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st

LENGTHS = (1, 63, 64, 257, 5000, 70_001, (1 << 17) + 3, 1_000_003)


def _compiled(shape, dtype, device="cpu", **axis):
    g = st.Graph("ends")
    x = g.input("x", shape, dtype)
    g.outputs(st.ops.any(x, **axis), st.ops.all(st.ops.equal(x, 0) if dtype != "bool" else x, **axis))
    return st.Session(device).compile(g)


@pytest.mark.parametrize("dtype", ["bool", "f32", "i64", "u8"])
@pytest.mark.parametrize("device", ["cpu", "cpu:avx2", "cpu:baseline"])
def test_one_element_anywhere_decides(dtype, device, rng):
    kind = {"bool": "?", "f32": "f4", "i64": "i8", "u8": "u1"}[dtype]
    for n in LENGTHS:
        compiled = _compiled((n,), dtype, device)
        for place in (None, 0, n - 1, n // 2, *rng.integers(0, n, 4)):
            x = np.zeros(n, kind)
            if place is not None:
                x[place] = 1
            any_, all_ = compiled.run(x=x)
            assert any_ == (place is not None)
            assert all_ == ((n == 1 and place == 0) if dtype == "bool" else place is None)
            if dtype == "bool":
                assert compiled.run(x=~x)[1] == (place is None)
                assert compiled.run(x=~x)[0] == (n > 1 or place is None)


@pytest.mark.parametrize("shape", [(3, 100_001), (1000, 300), (40_000, 3)])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns(shape, axis, rng):
    compiled = _compiled(shape, "bool", axis=axis)
    for share in (0.0, 1e-5, 0.5, 1 - 1e-5, 1.0):
        x = rng.random(shape) < share
        found = compiled.run(x=x)
        np.testing.assert_array_equal(found[0], x.any(axis))
        np.testing.assert_array_equal(found[1], x.all(axis))


def test_symbolic_sizes(rng):
    n = st.sym("n")
    compiled = _compiled((n,), "bool")
    for size in (1, 100, 300_000):
        x = rng.random(size) < 1e-5
        found = compiled.run(x=x)
        assert (bool(found[0]), bool(found[1])) == (x.any(), x.all())
