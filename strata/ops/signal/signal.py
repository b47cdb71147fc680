"""Window functions, ONNX's STFT and mel filters, the inverse STFT."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import Dim, f32, known_le
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Value, constant, function
from strata.ops.base.creation import ones
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import narrow, reshape, stack, swapaxes
from strata.ops.conv.windows import FoldWindows
from strata.ops.signal.fft import frames


def _cosines(n: int, weights: tuple[float, ...], periodic: bool, dtype: Any, what: str) -> Value:
    """Σ (-1)^k · weight[k] · cos(k · 2π · i / period)."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise OptionError(f"{what}: the size is a number of elements, at least 1, got {n!r}", code="O249")
    if n == 1:
        return constant(np.ones(1), dtype)
    angle = 2 * np.pi * np.arange(n) / (n if periodic else n - 1)
    return constant(sum((-1) ** k * w * np.cos(k * angle) for k, w in enumerate(weights)), dtype)


def hamming_window(
    n: int, periodic: bool = True, alpha: float = 0.54, beta: float | None = None, dtype: Any = f32
) -> Value:
    """alpha − beta · cos; beta is 1 − alpha unless given. ONNX's HammingWindow has alpha = 25 / 46."""
    return _cosines(n, (alpha, 1 - alpha if beta is None else beta), periodic, dtype, "hamming_window")


def blackman_window(n: int, periodic: bool = True, dtype: Any = f32) -> Value:
    """0.42 − 0.5 · cos + 0.08 · cos of the double angle."""
    return _cosines(n, (0.42, 0.5, 0.08), periodic, dtype, "blackman_window")


def mel_weight_matrix(
    num_mel_bins: int,
    dft_length: int,
    sample_rate: int,
    lower_edge_hertz: float,
    upper_edge_hertz: float,
    dtype: Any = f32,
) -> Value:
    """ONNX's MelWeightMatrix: triangles [dft_length // 2 + 1, num_mel_bins] in steps of 2595 · log10(1 + f / 700)."""
    if num_mel_bins < 1 or dft_length < 1 or sample_rate < 1 or not 0 <= lower_edge_hertz < upper_edge_hertz:
        raise OptionError(
            f"mel_weight_matrix: {num_mel_bins} bins of a transform of {dft_length} at {sample_rate} Hz "
            f"between {lower_edge_hertz} and {upper_edge_hertz} Hz", code="O249",
        )  # fmt: skip
    low, high = (2595 * np.log10(1 + f / 700) for f in (lower_edge_hertz, upper_edge_hertz))
    mels = low + np.arange(num_mel_bins + 2) * (high - low) / (num_mel_bins + 2)
    edges = ((dft_length + 1) * (700 * (10 ** (mels / 2595) - 1)) // sample_rate).astype(np.int64)
    bins = np.arange(dft_length // 2 + 1)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rise, fall = centre - left, right - centre
    rising = np.where(rise > 0, (bins - left) / np.maximum(rise, 1), bins == centre)
    falling = (right - bins) / np.maximum(fall, 1)
    inside = (bins >= left) & (bins <= centre)
    weights = np.where(inside, rising, 0.0)
    return constant(np.where((bins >= centre) & (bins < right), falling, weights), dtype)


@function()
def onnx_stft(
    signal: Operand,
    frame_step: int,
    window: Operand | None = None,
    frame_length: int | None = None,
    onesided: bool = True,
) -> Value:
    """ONNX's STFT: [B, T, 1] (real) or [B, T, 2] (complex) → [B, frames, bins, 2]."""
    value = to_inexact(as_value(signal))
    if value.ndim == 2:
        value = reshape(value, (*value.shape, 1))
    if value.ndim != 3 or value.shape[2] not in (1, 2):
        raise ShapeError(f"onnx_stft: needs [B, T], [B, T, 1] or [B, T, 2], got {value.type}", code="S318")
    weights = None if window is None else METHODS["cast"](as_value(window), value.dtype)
    if frame_length is None:
        if weights is None:
            raise OptionError("onnx_stft: needs a window or a frame_length", code="O249")
        frame_length = weights.shape[0].__index__()
    if weights is not None and weights.shape != (frame_length,):
        raise ShapeError(f"onnx_stft: the window must have {frame_length} elements, got {weights.type}", code="S318")
    parts = []
    for i in range(value.shape[2].__index__()):
        pieces = frames(reshape(narrow(value, 2, i, 1), value.shape[:2]), int(frame_length), int(frame_step))
        parts.append(pieces if weights is None else pieces * weights)
    if len(parts) == 1 and onesided:
        bins = METHODS["rfft"](parts[0])
    elif onesided:
        raise OptionError(f"onnx_stft: a complex signal {value.type} has no one-sided transform", code="O249")
    else:
        bins = METHODS["fft"](parts[0])
        if len(parts) == 2:
            imaginary = METHODS["fft"](parts[1])
            re = METHODS["real"](bins) - METHODS["imag"](imaginary)
            im = METHODS["imag"](bins) + METHODS["real"](imaginary)
            return stack([re, im], -1)
    return stack([METHODS["real"](bins), METHODS["imag"](bins)], -1)


@function()
def istft(
    spec: Operand,
    frame: int,
    hop: int | None = None,
    *,
    window: Operand | None = None,
    center: bool = True,
    length: Dim | None = None,
) -> Value:
    """The signal [.., T] of a complex spectrum [.., frame // 2 + 1, frames], as torch gives it.

    Windowed frames are added up and divided by the sum of squared windows; `center` cuts frame // 2 off both ends.
    """
    value = as_value(spec)
    step = frame // 4 if hop is None else hop
    if not value.dtype.is_complex or value.ndim < 2 or value.shape[-2] != frame // 2 + 1:
        raise ShapeError(f"istft: needs complex [.., {frame // 2 + 1}, frames], got {value.type}", code="S318")
    pieces = METHODS["irfft"](swapaxes(value, -1, -2), frame)
    weights = ones((frame,), pieces.dtype) if window is None else METHODS["cast"](as_value(window), pieces.dtype)
    if weights.shape != (frame,):
        raise ShapeError(f"istft: the window must have {frame} elements, got {weights.type}", code="S318")
    count = value.shape[-1]
    total = (count - 1) * step + frame
    fold = FoldWindows((frame,), (step,), ((0, 0),), (1,), (total,))
    square = METHODS["broadcast_to"](weights * weights, (count, frame))
    start = frame // 2 if center else 0
    wanted = length if length is not None else total - 2 * start
    if known_le(total + 1, start + wanted):
        raise ShapeError(f"istft: {count} frames give {total - start} elements, fewer than {wanted}", code="S318")
    signal, scale = (narrow(fold(x), -1, start, wanted) for x in (pieces * weights, square))
    tiny = constant(1e-11, scale.dtype)
    return METHODS["where"](scale > tiny, signal / METHODS["maximum"](scale, tiny), constant(0, signal.dtype))
