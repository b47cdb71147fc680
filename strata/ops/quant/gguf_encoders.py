"""Encoders of GGUF blocks: searches for the scales, minima and codes that lose least.

An encoder takes a format, rows x [blocks, elements], and how much each element counts, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from strata.ops.quant.gguf_fields import Array, BitField, float8_steps

if TYPE_CHECKING:
    from strata.ops.quant.gguf_blocks import BlockFormat


def rounded(x: Array) -> Array:
    """Round half away from zero, as C's roundf does."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def inverse(x: Array) -> Array:
    """1 / x, and 0 for 0."""
    with np.errstate(all="ignore"):
        return np.where(x == 0, np.float32(0), np.float32(1) / x)


def _levels(form: BlockFormat) -> int:
    assert isinstance(form.q, BitField)
    return form.q.levels


def _signed_scale(x: Array, levels: int) -> Array:
    """The scale that puts the element of largest magnitude, sign and all, at -levels."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    return (peak / np.float32(-levels)).astype(np.float32)


def encode_symmetric(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    levels = _levels(form) // 2
    if weight is not None:
        d = fit_symmetric(x, levels, weight)[:, None].astype(np.float16).astype(np.float32)
        q = np.clip(np.rint(x * inverse(d)), -levels, levels - 1) + levels
        return form.packed(len(x), d=d, q=q.astype(np.uint8))
    d = _signed_scale(x, levels)
    steps = x.astype(np.float64) * inverse(d).astype(np.float64) + (levels + 0.5)
    return form.packed(len(x), d=d, q=np.clip(np.trunc(steps), 0, 2 * levels - 1).astype(np.uint8))


def encode_affine(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    top, low = _levels(form) - 1, x.min(-1, keepdims=True)
    d = ((x.max(-1, keepdims=True) - low) / np.float32(top)).astype(np.float32)
    q = np.clip(np.trunc((x - low) * inverse(d) + np.float32(0.5)), 0, top).astype(np.uint8)
    return form.packed(len(x), d=d, m=low, q=q)


def encode_bytes(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    d = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return form.packed(len(x), d=d, q=rounded(x * inverse(d)).astype(np.int8).view(np.uint8))


def encode_summed_bytes(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    d = _signed_scale(x, 127)
    q = np.clip(rounded(x * inverse(d)), -127, 127).astype(np.int8)
    blocks = form.packed(len(x), d=d, q=q.view(np.uint8))
    sums = q.reshape(-1, 16, 16).sum(-1, dtype=np.int16)
    blocks[:, form.bytes - 32 :] = sums.astype("<i2").view(np.uint8)
    return blocks


# ------------------------------------------------------------------------------------------------------- scale searches


def fit_affine(x: Array, levels: int, weight: Array | None = None) -> tuple[Array, Array]:
    """Scale ≥ 0 and minimum ≥ 0 of rows x ≈ scale·q - minimum, q in 0..levels: the best of several least-squares
    fits."""
    low = np.minimum(x.min(-1, keepdims=True), 0).astype(np.float64)
    span = x.max(-1, keepdims=True) - low
    counts = np.ones_like(x) if weight is None else weight
    scale, least = span / levels, -low
    best = _affine_error(x, scale, least, levels, counts)
    for shift in np.linspace(-1.0, 1.0, 21):
        q = np.clip(np.rint((levels + shift) * (x - low) * inverse(span).astype(np.float64)), 0, levels)
        s, m = _least_squares(x, q, counts)
        error = _affine_error(x, s, m, levels, counts)
        better = error < best
        best, scale, least = np.where(better, error, best), np.where(better, s, scale), np.where(better, m, least)
    return scale[..., 0], least[..., 0]


def _least_squares(x: Array, q: Array, counts: Array) -> tuple[Array, Array]:
    """The scale and minimum that suit given quants; a minimum below 0 is held at 0."""

    def total(values: Array) -> Array:
        return (counts * values).sum(-1, keepdims=True, dtype=np.float64)

    count, sq, sx, sqq, sqx = total(np.ones_like(x)), total(q), total(x), total(q * q), total(q * x)
    determinant = count * sqq - sq * sq
    scale = np.where(determinant > 0, (count * sqx - sq * sx) / np.where(determinant > 0, determinant, 1), 0)
    least = (scale * sq - sx) / np.where(count > 0, count, 1)
    alone = sqx / np.where(sqq > 0, sqq, 1)
    return np.maximum(np.where(least >= 0, scale, alone), 0), np.maximum(least, 0)


def _affine_error(x: Array, scale: Array, least: Array, levels: int, counts: Array) -> Array:
    q = np.clip(np.rint((x + least) * inverse(scale.astype(np.float32)).astype(np.float64)), 0, levels)
    return (counts * (scale * q - least - x) ** 2).sum(-1, keepdims=True)


def fit_symmetric(x: Array, levels: int, weight: Array | None = None) -> Array:
    """The signed scale of rows x ≈ scale·q, q in -levels..levels - 1, that fits large elements best."""
    return _best_scale(x, _outwards(x, weight), -levels, lambda steps: np.clip(np.rint(steps), -levels, levels - 1))


def fit_values(x: Array, values: tuple[float, ...], weight: Array | None = None) -> Array:
    """The signed scale of rows x ≈ scale·v, v one of the values."""
    table = np.array(values, np.float64)
    return _best_scale(x, _outwards(x, weight), values[0], lambda steps: table[nearest(steps, values)])


def nearest(x: Array, values: tuple[float, ...]) -> Array:
    """The places of the values that are nearest, u8; of two that are equal, the first."""
    order = np.argsort(np.array(values, np.float64), kind="stable")
    table = np.array(values, np.float64)[order]
    return order[np.searchsorted((table[1:] + table[:-1]) / 2, x)].astype(np.uint8)


def _outwards(x: Array, weight: Array | None) -> Array:
    """How much elements count: large ones more."""
    wide = x.astype(np.float64)
    if weight is None:
        return wide**2
    return weight * np.sqrt(wide**2 + (wide**2).mean(-1, keepdims=True))


def _best_scale(x: Array, weight: Array, end: float, quants: Callable[[Array], Array]) -> Array:
    """The scale that fits best, of those that put the largest element at, or near, an end."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1).astype(np.float64)
    scale, best = np.zeros_like(peak), np.full_like(peak, -1.0)
    steps = np.linspace(-0.9, 0.9, 19) * max(1.0, abs(end) / 32)
    for shift in steps:
        rate = (end - shift) * inverse(peak.astype(np.float32))
        q = quants(rate * x)
        product, square = (weight * q * x).sum(-1, keepdims=True), (weight * q * q).sum(-1, keepdims=True)
        gain = product**2 / np.where(square > 0, square, 1)
        better = gain > best
        scale = np.where(better, product / np.where(square > 0, square, 1), scale)
        best = np.where(better, gain, best)
    return scale[..., 0]


def _parts(form: BlockFormat, weight: Array | None) -> Array | None:
    return None if weight is None else weight.reshape(len(weight), -1, form.group)


def _common(fields: Array, levels: int) -> tuple[Array, Array]:
    """A shared f16 factor and the small integers that approximate `fields`."""
    factor = (fields.max(-1, keepdims=True) / levels).astype(np.float16).astype(np.float32)
    return factor, np.clip(np.rint(fields * inverse(factor)), 0, levels).astype(np.uint8)


def encode_affine_groups(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    assert form.scales
    parts, levels = x.reshape(len(x), -1, form.group), _levels(form) - 1
    scale, least = fit_affine(parts, levels, _parts(form, weight))
    d, scales = _common(scale, form.scales.levels - 1)
    m, minima = _common(least, form.scales.levels - 1)
    rate = inverse((d * scales).astype(np.float32))[:, :, None]
    q = np.clip(np.rint((parts + (m * minima)[:, :, None]) * rate), 0, levels).astype(np.uint8)
    return form.packed(len(x), d=d, m=m, scales=scales, minima=minima, q=q)


def _signed_common(scale: Array, levels: int) -> tuple[Array, Array]:
    """A shared f16 factor and integers in -levels..levels - 1 for signed scales."""
    peak = np.take_along_axis(scale, np.abs(scale).argmax(-1, keepdims=True), -1)
    d = (peak / -levels).astype(np.float16).astype(np.float32)
    return d, np.clip(np.rint(scale * inverse(d)), -levels, levels - 1).astype(np.int8)


def encode_symmetric_groups(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    assert form.scales
    parts, levels = x.reshape(len(x), -1, form.group), _levels(form) // 2
    d, scales = _signed_common(fit_symmetric(parts, levels, _parts(form, weight)), form.scales.levels // 2)
    q = np.clip(np.rint(parts * inverse((d * scales).astype(np.float32))[:, :, None]), -levels, levels - 1)
    stored = (scales.astype(np.int16) - form.scales.add).astype(np.uint8)
    return form.packed(len(x), d=d, scales=stored, q=(q + levels).astype(np.uint8))


# ------------------------------------------------------------------------------------------------- lists of values


def _values(form: BlockFormat) -> tuple[float, ...]:
    assert isinstance(form.q, BitField)
    return form.q.values


def encode_values(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    values = _values(form)
    d = fit_values(x, values, weight)[:, None].astype(np.float16).astype(np.float32)
    return form.packed(len(x), d=d, q=nearest(x * inverse(d), values))


def encode_value_groups(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    assert form.scales
    parts, values = x.reshape(len(x), -1, form.group), _values(form)
    d, scales = _signed_common(fit_values(parts, values, _parts(form, weight)), form.scales.levels // 2)
    q = nearest(parts * inverse((d * scales).astype(np.float32))[:, :, None], values)
    stored = (scales.astype(np.int16) - form.scales.add).astype(np.uint8)
    return form.packed(len(x), d=d, scales=stored, q=q)


def encode_power(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    """The scale is the power of two that puts the largest element below the largest value."""
    most = np.abs(x).max(-1, keepdims=True)
    power = np.where(most > 0, np.floor(np.log2(np.where(most > 0, most, 1))) - 3, -128)
    d = np.exp2(np.maximum(power, -128)).astype(np.float32)
    away = np.abs(d[..., None] * np.array(_values(form), np.float32) - x[..., None])
    return form.packed(len(x), d=d, q=away.argmin(-1).astype(np.uint8))


def encode_float8_groups(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    assert form.scales
    parts, values = x.reshape(len(x), -1, form.group), _values(form)
    unit = form.d.read(np.zeros((1, form.bytes), np.uint8))[0, 0]
    steps = np.array([float8_steps(code) for code in range(127)], np.float64)
    wanted = np.abs(parts).max(-1) / max(values) / unit
    scales = np.searchsorted((steps[1:] + steps[:-1]) / 2, wanted).astype(np.uint8)
    q = nearest(parts * inverse((steps[scales] * unit).astype(np.float32))[:, :, None], values)
    return form.packed(len(x), scales=scales, q=q)


def encode_ternary(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    d = np.abs(x).max(-1, keepdims=True)
    return form.packed(len(x), d=d, q=(rounded(x * inverse(d)) + 1).astype(np.uint8))


def encode_sign(form: BlockFormat, x: Array, weight: Array | None = None) -> Array:
    return form.packed(len(x), d=np.abs(x).mean(-1, keepdims=True), q=(x >= 0).astype(np.uint8))
