"""The Fourier extension of the standard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import strata.tensor as tensors
from strata.core import as_dtype, f32
from strata.tensor.creation import asarray
from strata.tensor.tensor import Tensor

_ops: Any = tensors


def _one(name: str) -> Callable[..., Tensor]:
    def apply(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
        made: Tensor = getattr(_ops, name)(x, n, axis, norm)
        return made

    apply.__name__ = name
    return apply


def _many(name: str) -> Callable[..., Tensor]:
    def apply(x: Tensor, /, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Tensor:
        made: Tensor = getattr(_ops, name)(x, s, axes, norm)
        return made

    apply.__name__ = name
    return apply


fft, ifft, rfft, irfft, hfft, ihfft = (_one(n) for n in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"))
fftn, ifftn, rfftn, irfftn = (_many(n) for n in ("fftn", "ifftn", "rfftn", "irfftn"))


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Tensor:
    return asarray(np.fft.fftfreq(n, d).astype(as_dtype(dtype or f32).np), device=device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Tensor:
    return asarray(np.fft.rfftfreq(n, d).astype(as_dtype(dtype or f32).np), device=device)


def fftshift(x: Tensor, /, *, axes: Any = None) -> Tensor:
    made: Tensor = _ops.fftshift(x, axes)
    return made


def ifftshift(x: Tensor, /, *, axes: Any = None) -> Tensor:
    made: Tensor = _ops.ifftshift(x, axes)
    return made
