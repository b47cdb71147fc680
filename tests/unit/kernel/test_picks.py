"""Sums under a one-hot mask are read where the mask says, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st


def _compiled(sizes, labels, dtype="i64", device="cpu"):
    g = st.Graph("pick")
    x, t = g.input("x", sizes), g.input("t", labels, dtype)
    places = st.ops.iota((1, sizes[-1]), 1, dtype)
    mask = st.ops.equal(places, st.ops.insert_axis(t, 1))
    g.outputs(st.ops.where(mask, x * 2.0, 0.0).sum(axis=-1))
    return st.Session(device).compile(g)


@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "u8"])
@pytest.mark.parametrize("device", ["cpu", "cpu:avx2", "cpu:baseline"])
def test_a_masked_sum_is_one_element(dtype, device, rng):
    rows, columns = 37, 100
    compiled = _compiled((rows, columns), (rows,), dtype, device)
    (kernel,) = compiled.lir.kernels.values()
    assert " sum " not in str(kernel)
    x = rng.standard_normal((rows, columns)).astype("f4")
    x[0, 0], x[1, 1] = -0.0, np.nan
    t = rng.integers(0, columns, rows)
    t[:4] = 0, 2, 99, 100
    t = t.astype({"i8": "i1", "i32": "i4", "i64": "i8", "u8": "u1"}[dtype])
    if dtype != "u8":
        t[4] = -1
    expected = np.where(np.arange(columns) == t[:, None], x * 2, np.float32(0)).sum(-1)
    found = compiled.run(x=x, t=t)[0]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_places_too_many_for_the_type_of_the_labels_stay_a_sum(rng):
    compiled = _compiled((5, 300), (5,), "i8")
    (kernel,) = compiled.lir.kernels.values()
    assert " sum " in str(kernel)
    x, t = rng.standard_normal((5, 300)).astype("f4"), np.array([3, -1, 0, 127, -128], "i1")
    places = np.arange(300).astype("i1")
    expected = np.where(places == t[:, None], x * 2, np.float32(0)).sum(-1)
    np.testing.assert_allclose(compiled.run(x=x, t=t)[0], expected, rtol=1e-5)


def test_symbolic_sizes_and_further_conditions(rng):
    n, m = st.sym("n"), st.sym("m")
    g = st.Graph("pick")
    x, t, keep = g.input("x", (n, m, 3)), g.input("t", (n,), "i64"), g.input("keep", (n, m), "bool")
    here = st.ops.equal(st.ops.iota((1, m), 1, "i64"), st.ops.insert_axis(t, 1))
    mask = st.ops.insert_axis(st.ops.logical_and(here, keep), 2)
    g.outputs(st.ops.where(mask, x, 0.0).sum(axis=(1, 2)), st.ops.where(mask, x, 0.0).sum(axis=1))
    compiled = st.Session("cpu").compile(g)
    for rows, columns in ((1, 1), (4, 9), (70, 33)):
        a = rng.standard_normal((rows, columns, 3)).astype("f4")
        b, c = rng.integers(-1, columns + 1, rows), rng.random((rows, columns)) < 0.5
        masked = np.where(((np.arange(columns) == b[:, None]) & c)[..., None], a, np.float32(0))
        both = compiled.run(x=a, t=b, keep=c)
        np.testing.assert_allclose(both[0], masked.sum((1, 2)), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(both[1], masked.sum(1))
