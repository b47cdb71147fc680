"""Fourier transforms: every radix, prime lengths, few long and many short sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata.ops  # noqa: F401 - registers the ops
from strata.core import sym
from strata.mir import METHODS

LENGTHS = [
    1,
    2,
    3,
    5,
    7,
    8,
    12,
    16,
    49,
    60,
    61,
    64,
    67,
    100,
    121,
    128,
    210,
    499,
    512,
    1000,
    1024,
    1331,
    2048,
    5040,
    10007,
    16384,
]


def _draw(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def _close(got: np.ndarray, want: np.ndarray) -> None:
    tolerance = 1e-6 if got.dtype == np.complex64 else 1e-14
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < tolerance * max(1.0, np.log2(want.shape[-1])), f"relative error {error}"


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(native: Any, n: int, dtype: Any) -> None:
    for rows in (1, 3, 16, 35):
        if rows * n > 200_000:
            continue
        x = _draw((rows, n), dtype)
        _close(native(METHODS["fft"], x, threads=(1, 2))[0], np.fft.fft(x.astype(np.complex128)))
        _close(native(METHODS["ifft"], x, threads=(1, 2))[0], np.fft.ifft(x.astype(np.complex128)))


def test_one_long_sequence(native: Any) -> None:
    for n in (1 << 18, 3**10, 100_000):
        x = _draw((n,), np.complex64)
        _close(native(METHODS["fft"], x)[0], np.fft.fft(x.astype(np.complex128)))


def test_real_sequences(native: Any) -> None:
    x = np.random.default_rng(1).standard_normal((20, 300))
    (bins,) = native(METHODS["rfft"], x)
    np.testing.assert_allclose(bins, np.fft.rfft(x), atol=1e-12)
    np.testing.assert_allclose(native(lambda v: METHODS["irfft"](v, 300), bins)[0], x, atol=1e-12)


def test_symbolic_sizes(native: Any) -> None:
    rows, n = sym("rows"), sym("n")
    for shape in ((1, 6), (40, 96), (2, 1009)):
        x = _draw(shape, np.complex128)
        _close(native(METHODS["fft"], x, shapes=[(rows, n)], threads=(2,))[0], np.fft.fft(x))
