"""Matrix ops by LAPACK: larger sizes, stacks, all types, symbolic sizes, and what failures say."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import strata.ops  # noqa: F401 - registers the ops
from strata.backends.llvm.linalg.lapack import thread_functions
from strata.core import f64, sym
from strata.errors import RunError
from strata.mir import METHODS, REGISTRY, Graph
from strata.runtime import Session

TYPES = [np.float32, np.float64, np.complex64, np.complex128]
SHAPES = [(1, 1), (5, 5), (3, 40, 40), (2, 2, 17, 17), (130, 130)]


def _draw(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def _positive(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    x = _draw(shape, dtype)
    return x @ np.conj(np.swapaxes(x, -1, -2)) + 0.5 * np.eye(shape[-1], dtype=dtype)


def _close(got: np.ndarray, want: np.ndarray) -> None:
    single = got.dtype.itemsize // (2 if got.dtype.kind == "c" else 1) == 4
    scale = float(np.abs(want).max(initial=1.0))
    np.testing.assert_allclose(got, want, rtol=2e-3 if single else 1e-9, atol=(3e-4 if single else 1e-11) * scale)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_solve(native: Any, shape: tuple[int, ...], dtype: Any) -> None:
    a = _draw(shape, dtype) + 2 * shape[-1] * np.eye(shape[-1], dtype=dtype)
    b = _draw((*shape[:-1], 3), dtype, 1)
    _close(native(METHODS["solve"], a, b)[0], np.linalg.solve(a, b))
    kept = np.tril(a)
    _close(native(lambda x, y: METHODS["solve_triangular"](x, y, lower=True), a, b)[0], np.linalg.solve(kept, b))
    back = REGISTRY["solve"](True)  # type: ignore[call-arg]
    _close(native(back, a, b)[0], np.linalg.solve(np.conj(np.swapaxes(a, -1, -2)), b))


def test_solve_with_one_matrix_for_all(native: Any) -> None:
    a, b = _draw((9, 9), np.float64), _draw((50, 9, 2), np.float64, 1)
    _close(native(METHODS["solve"], a, b)[0], np.linalg.solve(a, b))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cholesky(native: Any, shape: tuple[int, ...], dtype: Any) -> None:
    a = _positive(shape, dtype)
    _close(native(METHODS["cholesky"], a)[0], np.linalg.cholesky(a))


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 50, 20), (70, 1)])
def test_factors(native: Any, shape: tuple[int, ...], dtype: Any) -> None:
    a = _draw(shape, dtype)
    q, r = native(METHODS["qr"], a)
    _close(q @ r, a)
    _close(
        np.conj(np.swapaxes(q, -1, -2)) @ q,
        np.broadcast_to(np.eye(q.shape[-1]), (*shape[:-2], q.shape[-1], q.shape[-1])),
    )
    np.testing.assert_array_equal(np.tril(r, -1), 0)
    u, s, vh = native(lambda x: METHODS["svd"](x, full_matrices=False), a)
    _close((u * s[..., None, :]) @ vh, a)
    _close(s, np.linalg.svd(a, compute_uv=False))
    p, low, up = native(METHODS["lu"], a)
    _close(p @ low @ up, a)
    np.testing.assert_array_equal(np.triu(low, 1), 0)
    np.testing.assert_array_equal(np.tril(up, -1), 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_spectra(native: Any, shape: tuple[int, ...], dtype: Any) -> None:
    a = _positive(shape, dtype)
    w, v = native(METHODS["eigh"], a)
    _close((v * w[..., None, :]) @ np.conj(np.swapaxes(v, -1, -2)), a)
    _close(w, np.linalg.eigvalsh(a))
    sign, log = native(METHODS["slogdet"], a)
    want_sign, want_log = np.linalg.slogdet(a)
    _close(sign, want_sign)
    _close(log, want_log)


@pytest.mark.parametrize("shape", [(4, 4), (3, 6, 4), (5, 9)])
def test_pseudo_inverse(native: Any, shape: tuple[int, ...]) -> None:
    a = _draw(shape, np.float64)
    a[..., 0] = a[..., 1]  # one less than full rank
    _close(native(lambda x: METHODS["pinv"](x, 1e-10), a)[0], np.linalg.pinv(a, rcond=1e-10))


def test_symbolic_sizes(native: Any) -> None:
    batch, n = sym("batch"), sym("n")
    for shape in ((1, 2, 2), (7, 30, 30)):
        a = _positive(shape, np.float64)
        _close(native(METHODS["cholesky"], a, shapes=[(batch, n, n)], threads=(2,))[0], np.linalg.cholesky(a))
        _close(native(METHODS["det"], a, shapes=[(batch, n, n)], threads=(2,))[0], np.linalg.det(a))


def _with_zero(at: tuple[int, ...]) -> np.ndarray:
    a = np.broadcast_to(np.eye(4), (3, 5, 4, 4)).copy()
    a[at] = 0
    return a


def test_failures_name_the_first_matrix(native: Any) -> None:
    a = _with_zero((1, 2, 2, 2))
    a[2, 0, 1, 1] = 0
    with pytest.raises(RunError, match=r"solve: matrix \[1, 2\] of the stack is singular, pivot 2 is 0"):
        native(METHODS["solve"], a, a)
    with pytest.raises(RunError, match=r"triangular_solve: matrix \[1, 2\] of the stack is singular, pivot 2 is 0"):
        native(lambda x: METHODS["solve_triangular"](x, x), a)
    with pytest.raises(
        RunError, match=r"cholesky: matrix \[1, 2\] of the stack is not positive definite, its leading 3×3"
    ):
        native(METHODS["cholesky"], a)
    with pytest.raises(RunError, match="solve: the matrix is singular, pivot 1 is 0"):
        native(METHODS["inv"], np.array([[1, 2], [2, 4]], np.float32))


@pytest.mark.parametrize("dtype", TYPES)
def test_svd_refuses_what_is_not_finite(native: Any, dtype: Any) -> None:
    a = np.broadcast_to(np.eye(3, dtype=dtype), (4, 3, 3)).copy()
    a[2, 1, 1] = np.nan
    with pytest.raises(RunError, match=r"svd: the iteration for matrix \[2\] of the stack does not converge"):
        native(METHODS["svd"], a)


def test_a_failed_run_leaves_the_program_usable(native: Any) -> None:
    graph = Graph("g")
    x = graph.input("x", f64[3, 3])
    compiled = Session("cpu").compile(graph.outputs(METHODS["cholesky"](x)))
    with pytest.raises(RunError):
        compiled.run(x=-np.eye(3))
    np.testing.assert_array_equal(compiled.run(x=np.eye(3))[0], np.eye(3))


def test_determinants_of_singular_matrices(native: Any) -> None:
    a = np.array([[1.0, 2.0], [2.0, 4.0]])
    assert native(METHODS["det"], a)[0] == 0
    sign, log = native(METHODS["slogdet"], a)
    assert (sign, log) == (0, -np.inf)


def test_many_callers_leave_the_library_as_it_was() -> None:
    graph = Graph("g")
    x = graph.input("x", f64[20, 30, 30])
    compiled = Session("cpu").compile(graph.outputs(METHODS["eigh"](x)[0]))
    a = _positive((20, 30, 30), np.float64)
    read, _ = thread_functions()
    threads = ctypes.CFUNCTYPE(ctypes.c_int)(read) if read else lambda: 0
    before = threads()
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: compiled.run(x=a)[0].tobytes(), range(40)))
    assert len(set(results)) == 1
    assert threads() == before
