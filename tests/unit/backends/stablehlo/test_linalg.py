"""Factorisations by loops over columns, on matrices larger than the samples, against NumPy and SciPy."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import scipy.linalg

from strata import ops
from strata.mir import Graph
from strata.runtime import Session

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="the xla device runs on jax, which is not installed")


def matrices(*shape: int, dtype: str = "f8") -> np.ndarray:
    rng = np.random.default_rng(0)
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if dtype.startswith("c") else made).astype(dtype)


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_large_matrices(dtype: str) -> None:
    a, b = matrices(2, 24, 24, dtype=dtype), matrices(2, 24, 3, dtype=dtype)
    a[1, :4] *= 1e-6  # pivots matter
    g = Graph("factors")
    x, y = (
        g.input("x", a.shape, "f64" if dtype == "f8" else "c128"),
        g.input("y", b.shape, "f64" if dtype == "f8" else "c128"),
    )
    g.outputs(*ops.lu(x), *ops.qr(x), ops.solve(x, y), ops.det(x), *ops.slogdet(x))
    compiled = Session("xla").compile(g)
    assert compiled.host_steps == []
    p, lower, upper, q, r, solved, det, sign, log = compiled.run(x=a, y=b)
    for i in range(2):
        for got, want in zip((p[i], lower[i], upper[i]), scipy.linalg.lu(a[i]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        for got, want in zip((q[i], r[i]), np.linalg.qr(a[i]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(solved, np.linalg.solve(a, b), rtol=1e-6)
    np.testing.assert_allclose(det, np.linalg.det(a), rtol=1e-9)
    for got, want in zip((sign, log), np.linalg.slogdet(a), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_matrices_without_an_inverse() -> None:
    a = np.array([[[0, 1, 2], [0, 2, 4], [0, 3, 6]], [[0, 1, 0], [1, 0, 0], [0, 0, 1]]], np.float64)
    g = Graph("singular")
    x = g.input("x", a.shape, "f64")
    g.outputs(ops.det(x), *ops.slogdet(x), *ops.qr(x))
    det, sign, log, q, r = Session("xla").compile(g).run(x=a)
    np.testing.assert_array_equal(det, [0, -1])
    np.testing.assert_array_equal(sign, [0, -1])
    np.testing.assert_array_equal(log, [-np.inf, 0])
    np.testing.assert_allclose(q @ r, a, atol=1e-12)
    np.testing.assert_allclose(q.swapaxes(-1, -2) @ q, np.broadcast_to(np.eye(3), (2, 3, 3)), atol=1e-12)
