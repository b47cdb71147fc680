"""Fourier transforms as matmuls: the stages of a mixed-radix transform, Bluestein's convolution for large primes.

A transform of n = f·r numbers is r transforms of f, a factor for each element, and f transforms of r. Transforms of few
numbers are products with their matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import DType
from strata.mir import Value, constant
from strata.ops import broadcast_to, concat, matmul, narrow, reshape, swapaxes
from strata.passes.expand.rules import expands

RADIX = 64  # numbers whose transform is a matmul
LARGEST = 512  # the same for a length without factors
MOST = 1 << 22


@expands("fft")
def _fft(op: Any, x: Value) -> Sequence[Value] | None:
    n = x.shape[-1]
    if not isinstance(n, int) or n > MOST:
        return None
    factor = {"one": 1.0, "by_n": 1.0 / n, "ortho": n**-0.5}[op.scale]
    found = _transform(x, 1.0 if op.inverse else -1.0)
    return [found if factor == 1.0 else found * constant(factor, x.dtype)]


def _roots(power: np.ndarray, n: int, sign: float, dtype: DType) -> Value:
    """e^(±2πi·power/n), exact at quarters of a turn; the power is taken modulo n first, so that nothing is lost."""
    rest = power % n
    found = np.exp(sign * 2j * np.pi * rest / n)
    quarter, beyond = np.divmod(4 * rest, n)
    found = np.where(beyond == 0, np.array([1, sign * 1j, -1, -sign * 1j])[quarter], found)
    return constant(found.astype(dtype.np), dtype)


def _transform(x: Value, sign: float) -> Value:
    """The transform of the last axis, without a scale."""
    n = x.shape[-1]
    assert isinstance(n, int)
    if n == 1:
        return x
    first = next((f for f in range(RADIX, 1, -1) if n % f == 0), 1)
    if n <= RADIX or (first == 1 and n <= LARGEST):
        return _product(x, n, sign)
    if first == 1:
        return _by_convolution(x, sign)
    rest = n // first
    batch = x.shape[:-1]
    columns = swapaxes(reshape(x, (*batch, first, rest)), -1, -2)  # [.., rest, first]
    turned = swapaxes(_product(columns, first, sign), -1, -2)
    power = np.arange(first)[:, None] * np.arange(rest)[None, :]
    made = _transform(turned * _roots(power, n, sign, x.dtype), sign)
    return reshape(swapaxes(made, -1, -2), (*batch, n))


def _product(x: Value, n: int, sign: float) -> Value:
    """Rows times the matrix of the transform, which is symmetric."""
    numbers = np.arange(n)
    rows = x if x.ndim > 1 else reshape(x, (1, n))
    return reshape(matmul(rows, _roots(numbers[:, None] * numbers[None, :], n, sign, x.dtype)), x.shape)


def _by_convolution(x: Value, sign: float) -> Value:
    """Bluestein: n·k = (n² + k² - (k - n)²) / 2 makes the transform a convolution, whose length has small factors."""
    n = x.shape[-1]
    assert isinstance(n, int)
    squares = np.arange(n, dtype=np.int64) ** 2
    chirp = _roots(squares, 2 * n, sign, x.dtype)
    room = 1 << (2 * n - 2).bit_length()
    kernel = np.zeros(room, np.complex128)
    kernel[:n] = np.exp(-sign * 2j * np.pi * (squares % (2 * n)) / (2 * n))
    kernel[room - n + 1 :] = kernel[1:n][::-1]
    bins = constant((np.fft.fft(kernel) / room).astype(x.dtype.np), x.dtype)
    zeros = broadcast_to(constant(0, x.dtype), (*x.shape[:-1], room - n))
    convolved = _transform(_transform(concat([x * chirp, zeros], -1), -1.0) * bins, 1.0)
    return narrow(convolved, -1, 0, n) * chirp
