"""Eigenvalues and singular values that are built from rotations, beside LAPACK's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strata import dispatch_report, ops
from strata.backends import register_backend
from strata.core import TensorType, as_dtype, f32, sym
from strata.errors import MissingRuleError, RunError
from strata.mir import REGISTRY, Graph
from strata.ops.linalg.factorize import Eigh, Svd
from strata.passes import expanded
from strata.passes.expand.jacobi import MOST
from strata.runtime import Session
from strata.testing.backend_suite import cases, run_case
from tests.dry_cuda import dry_cuda
from tests.fake_cuda import FakeCore, fake_backend

FAKE, DRY = "fake_rotations", "dry_rotations"
DTYPES = ("float32", "float64", "complex64", "complex128")


def built(op: Any, x: np.ndarray) -> list[np.ndarray]:
    """The results of what an op is built from, on the processor."""
    g = Graph("built")
    g.outputs(*expanded(op, g.input("x", TensorType(as_dtype(x.dtype), x.shape))))
    return [np.asarray(out) for out in Session("cpu").compile(g).run(x=x)]


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype[0] == "c" else x).astype(dtype)


def adjoint(x: np.ndarray) -> np.ndarray:
    return np.conj(np.swapaxes(x, -1, -2))


def ulps(error: np.ndarray, dtype: Any, scale: float) -> float:
    return float(np.max(np.abs(error), initial=0) / np.finfo(dtype).eps / (scale or 1.0))


def check_columns(x: np.ndarray, what: str) -> None:
    wide = x.astype(np.complex128)
    n = max(x.shape[-2:])
    assert ulps(adjoint(wide) @ wide - np.eye(x.shape[-1]), x.dtype, 1) <= 4 + n, what


def check_eigh(x: np.ndarray, what: str = "") -> None:
    """Within a few ulps times n of what LAPACK does to the same matrix."""
    w, v = built(Eigh(), x)
    half = x.dtype.type(0.5)
    whole = (x * half + adjoint(x) * half).astype(np.complex128)
    n, known = x.shape[-1], np.linalg.eigvalsh(whole)
    scale = float(np.max(np.abs(known), initial=0))
    assert [t.dtype for t in (w, v)] == [x.real.dtype, x.dtype], what
    assert np.all(np.diff(w) >= 0), what
    assert ulps(w - known, x.dtype, scale) <= 4 + n, what
    assert ulps(whole @ v - v.astype(np.complex128) * w[..., None, :], x.dtype, scale) <= 4 + n, what
    check_columns(v, what)


def check_svd(x: np.ndarray, what: str = "", *, full: bool = False) -> None:
    u, s, vh = built(Svd(full), x)
    wide = x.astype(np.complex128)
    m, n = x.shape[-2:]
    k, known = min(m, n), np.linalg.svd(wide, compute_uv=False)
    scale = float(np.max(known, initial=0))
    assert [t.dtype for t in (u, s, vh)] == [x.dtype, x.real.dtype, x.dtype], what
    assert np.all(np.diff(s, append=0) <= 0), what
    assert (u.shape[-1], vh.shape[-2]) == ((m, n) if full else (k, k)), what
    assert ulps(s - known, x.dtype, scale) <= 4 + k, what
    product = (u[..., :k].astype(np.complex128) * s[..., None, :]) @ vh[..., :k, :]
    assert ulps(product - wide, x.dtype, scale) <= 4 + k, what
    check_columns(u, what)
    check_columns(adjoint(vh), what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13, 33, 64])
def test_eigenvalues(rng: np.random.Generator, n: int, dtype: str) -> None:
    check_eigh(drawn(rng, (2, n, n), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 3), (4, 1), (2, 2), (3, 3), (5, 4), (4, 7), (13, 13), (33, 20), (17, 40), (64, 64)]
)
def test_singular_values(rng: np.random.Generator, sizes: tuple[int, int], dtype: str) -> None:
    check_svd(drawn(rng, (2, *sizes), dtype))
    if sizes[0] != sizes[1]:
        check_svd(drawn(rng, sizes, dtype), full=True)


def spectra(rng: np.random.Generator, m: int, n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Matrices that are hard, or ought to be easy."""
    x = rng.standard_normal((m, n))
    left, right = (np.linalg.qr(rng.standard_normal((d, d)))[0][:, :n] for d in (m, n))
    row, across = np.arange(m)[:, None], np.arange(n)
    yield "rank 2", x[:, :2] @ rng.standard_normal((2, n))
    yield "values of 12 decades", (left * 10.0 ** -np.linspace(0, 12, n)) @ right.T
    yield "values of 12 decades, symmetric", (right * 10.0 ** -np.linspace(0, 12, n)) @ right.T
    yield "equal values", (left * (across % 3)) @ right.T
    yield "equal values, symmetric", (right * (across % 3)) @ right.T
    yield "plus and minus 1", (right * (-1.0) ** across) @ right.T
    yield "nearly equal values", (right * (across % 3 + 1e-6 * x[0])) @ right.T
    yield "ones", np.ones((m, n))
    yield "zeros", np.zeros((m, n))
    yield "identity", np.eye(m, n)
    yield "diagonal", np.eye(m, n) * across
    yield "large", x * 1e20
    yield "small", x * 1e-20
    yield "subnormal", x * 1e-39
    yield "the largest", x * 1e37
    yield "Hilbert's", 1 / (1.0 + row + across)
    yield "columns of many sizes", x * 10.0**-across
    yield "rows of many sizes", x * 10.0**-row
    yield "differences", 2 * np.eye(m, n) - np.eye(m, n, 1) - np.eye(m, n, -1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(13, 13), (64, 64), (21, 8)])
def test_hard_matrices(rng: np.random.Generator, sizes: tuple[int, int], dtype: str) -> None:
    for what, x in spectra(rng, *sizes):
        if x.shape == sizes:
            check_svd(x.astype(dtype), what)
        if x.shape[0] == x.shape[1]:
            check_eigh(x.astype(dtype), what)


def test_diagonals_are_exact() -> None:
    """Matrices that are done are not changed, whatever their scale."""
    w, v = built(Eigh(), np.diag([3.0, -1e-3, 7e12]))
    np.testing.assert_array_equal(w, [-1e-3, 3.0, 7e12])
    np.testing.assert_array_equal(np.abs(v), np.eye(3)[[1, 0, 2]].T)
    u, s, vh = built(Svd(), np.diag(np.array([3.0, -1e-3, 7e12], np.float32)))
    np.testing.assert_array_equal(s, np.array([7e12, 3.0, 1e-3], np.float32))
    np.testing.assert_array_equal(u[1] * vh[:, 1], np.float32([0, 0, -1]))


def test_matrices_of_a_stack_do_not_know_of_each_other(rng: np.random.Generator) -> None:
    """A matrix that takes many sweeps does not change another that takes few."""
    x = np.stack([np.eye(8), rng.standard_normal((8, 8)), 1 / (1.0 + np.arange(8)[:, None] + np.arange(8))])
    for op in (Eigh(), Svd()):
        again = [built(op, part[None]) for part in x]
        for i, out in enumerate(built(op, x)):
            for j, alone in enumerate(again):
                np.testing.assert_allclose(out[j], alone[i][0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0), (3, 0), (0, 2), (2, 4, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    for op in (Svd(), Svd(True), *([Eigh()] if shape[-1] == shape[-2] else [])):
        for got, want in zip(built(op, x), op.numpy(x), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["eigh", "svd"])
def test_what_is_not_finite_is_an_error(name: str, number: float) -> None:
    x = np.eye(5)
    x[1, 2] = x[2, 1] = number
    with pytest.raises(RunError, match="does not converge") as raised:
        built(REGISTRY[name](), x)
    assert raised.value.code == "X202"


@pytest.mark.parametrize("n", [MOST + 1, sym("N", 1)])
def test_sizes_that_are_left_to_the_host(n: Any) -> None:
    g = Graph("large")
    x = g.input("x", f32[n, n])
    for name in ("eigh", "svd"):
        with pytest.raises(MissingRuleError):
            expanded(REGISTRY[name](), x)


def test_vectors_are_compared_up_to_their_direction(rng: np.random.Generator) -> None:
    x = drawn(rng, (2, 5, 3), "complex64")
    want = Svd(True).numpy(x.astype(np.complex128))
    turn = np.array([1, -1, 1j])
    rest, _ = np.linalg.qr(drawn(rng, (2, 2, 2), "complex128"))
    u = np.concatenate([want[0][..., :3] * turn, want[0][..., 3:] @ rest], -1)
    for got, known in zip(Svd(True).matched([u, want[1], np.conj(turn)[:, None] * want[2]], want), want, strict=True):
        np.testing.assert_allclose(got, known, atol=1e-12)
    one_side = Svd(True).matched([u, want[1], want[2]], want)
    assert max(np.abs(a - b).max() for a, b in zip(one_side, want, strict=True)) > 0.1
    w, v = np.linalg.eigh(x[..., :3, :] + adjoint(x[..., :3, :]))
    np.testing.assert_allclose(Eigh().matched([w, v * turn], [w, v])[1], v, atol=1e-6)


@pytest.mark.parametrize("name", ["eigh", "svd", "pinv", "adjugate"])
def test_samples_on_a_device(name: str) -> None:
    """Over a `cuda.core` that is NumPy."""
    core = FakeCore()
    register_backend(FAKE, fake_backend(core, FAKE))
    for case in cases([REGISTRY[name]]):
        run_case(FAKE, case)
    assert not core.broken


def test_nothing_runs_on_the_host() -> None:
    with dry_cuda(DRY):
        for kind in (f32[3, 16, 16], f32[4, 4]):
            g = Graph("values")
            x = g.input("x", kind)
            g.outputs(*ops.eigh(x), ops.eigvalsh(x), *ops.svd(x), ops.svdvals(x), ops.pinv(x))
            assert not Session(DRY).compile(g).host_steps
            assert "host" not in {op.path for op in dispatch_report(g, DRY).ops}


@pytest.mark.parametrize("name", ["qr", "svd"])
def test_tall_matrices_take_no_square_ones(name: str) -> None:
    """Of 200,000 rows: a square matrix of them would be 160 GB."""
    with dry_cuda(DRY):
        g = Graph("tall")
        g.outputs(*REGISTRY[name]()(g.input("x", f32[200_000, 6])))
        compiled = Session(DRY).compile(g)
        assert not compiled.host_steps
        assert compiled.memory.scratch < 100 << 20
