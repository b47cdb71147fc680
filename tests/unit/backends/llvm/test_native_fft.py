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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 15, 31, 64, 67, 100, 300, 301, 512, 2048])
def test_real_sequences(native: Any, n: int, dtype: Any) -> None:
    for rows in (1, 16, 33, 70):
        x = np.random.default_rng(1).standard_normal((rows, n)).astype(dtype)
        want = np.fft.rfft(x.astype(np.float64))
        (bins,) = native(METHODS["rfft"], x, threads=(1, 2))
        _close(bins, want)
        want = want + 0.5j  # the imaginary parts of the first bin and of the middle one do not count
        (back,) = native(lambda v: METHODS["irfft"](v, n), want.astype(bins.dtype), threads=(1, 2))
        np.testing.assert_allclose(back, np.fft.irfft(want, n), atol=1e-5 if dtype == np.float32 else 1e-13)


def test_real_sequences_of_unknown_number(native: Any) -> None:
    rows = sym("rows")
    for count in (1, 5, 100):
        x = np.random.default_rng(2).standard_normal((count, 60))
        _close(native(METHODS["rfft"], x, shapes=[(rows, 60)], threads=(2,))[0], np.fft.rfft(x))


def test_symbolic_sizes(native: Any) -> None:
    rows, n = sym("rows"), sym("n")
    for shape in ((1, 6), (40, 96), (2, 1009)):
        x = _draw(shape, np.complex128)
        _close(native(METHODS["fft"], x, shapes=[(rows, n)], threads=(2,))[0], np.fft.fft(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(130,), (2, 258), (1000,), (3, 1022), (2, 2018), (1, 2, 6006), (40000,), (1 << 17,)])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_few_long_real_sequences(native: Any, shape: tuple[int, ...], dtype: Any, norm: str) -> None:
    """As half as many complex numbers: powers of two, odd halves, large primes; several chunks of bins; and back. What
    the imaginary parts of the first and the last bin are does not matter."""
    x = np.random.default_rng(shape[-1]).standard_normal(shape)
    bins = np.fft.rfft(x, norm=norm)  # type: ignore[call-overload]
    close = 3e-6 if dtype == np.float32 else 1e-14
    (got,) = native(lambda a: METHODS["rfft"](a, norm=norm), x.astype(dtype))
    assert np.abs(got - bins).max() <= close * np.abs(bins).max()
    bins[..., [0, -1]] += 0.5j
    given = bins.astype(np.complex64 if dtype == np.float32 else np.complex128)
    (back,) = native(lambda a: METHODS["irfft"](a, shape[-1], norm=norm), given)
    assert np.abs(back - x).max() <= close * np.abs(x).max()
