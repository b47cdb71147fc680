"""Fourier transforms, windows, mel filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value, constant


@reads("DFT")
def dft(n: NodeView) -> Value:
    return _dft(n, n.attr("axis", 1))


@reads("DFT", since=20)
def dft_axis_input(n: NodeView) -> Value:
    return _dft(n, int(n.scalar(2, -2)))


def _dft(n: NodeView, axis: int) -> Value:
    length = n.dims(1)[0] if n.has(1) else None
    if length is not None:
        n.room(length, 32)
    inverse, onesided = bool(n.attr("inverse", 0)), bool(n.attr("onesided", 0))
    return ops.cast(ops.onnx_dft(n[0], length, axis, inverse=inverse, onesided=onesided), n[0].dtype)


@reads("STFT")
def stft(n: NodeView) -> Value:
    length = int(n.scalar(3)) if n.has(3) else None
    made = ops.onnx_stft(n[0], int(n.scalar(1)), n[2], length, onesided=bool(n.attr("onesided", 1)))
    return ops.cast(made, n[0].dtype)


def _window(terms: tuple[float, ...]) -> Callable[[NodeView], Any]:
    """Σ (−1)ᵏ · term · cos(k · angle)."""

    def reader(n: NodeView) -> Any:
        size = int(n.scalar(0))
        n.room(size, 32)  # angles and their cosines
        period = size if n.attr("periodic", 1) else size - 1
        angle = 2 * np.pi * np.arange(size) / max(period, 1)
        window = sum(term * (-1) ** k * np.cos(k * angle) for k, term in enumerate(terms))
        dtype = n.dtype_attr("output_datatype", 1)
        return constant(np.asarray(window).astype(dtype))

    return reader


for _name, _terms in {
    "HannWindow": (0.5, 0.5),
    "HammingWindow": (25 / 46, 21 / 46),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}.items():
    reads(_name)(_window(_terms))


@reads("MelWeightMatrix")
def mel_weight_matrix(n: NodeView) -> Value:
    from strata.ops import mel_weight_matrix as filters

    bins, length, rate = (int(n.scalar(i)) for i in range(3))
    n.room(max(bins, 0) * max(length, 0), 32)
    dtype = n.dtype_attr("output_datatype", 1)
    return filters(bins, length, rate, float(n.scalar(3)), float(n.scalar(4)), dtype=dtype)
