"""Weights of a matmul are packed when they are bound, whatever other loops the kernel has for sizes of 1."""

from __future__ import annotations

import numpy as np

import strata as st


def test_a_matmul_over_two_open_axes(rng: np.random.Generator) -> None:
    g = st.Graph("rows")
    n, m = st.sym("n", 1), st.sym("m", 1)
    x, w = g.input("x", (n, m, 40), "f32"), g.param("w", (40, 139), "f32")
    g.outputs((x * x) @ w)
    c = st.Session("cpu").compile(g)
    weights = rng.standard_normal((40, 139)).astype(np.float32)
    c.set_param("w", weights)
    for shape in ((1, 1, 40), (1, 7, 40), (5, 1, 40), (3, 4, 40)):
        data = rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(c.run(x=data)[0], (data * data) @ weights, rtol=1e-4, atol=1e-4)
