"""GGUF block formats on arrays: exact decoders, and encoders that search for good scales.

A tensor is a run of blocks along its last axis. Every function here works on bytes [blocks, bytes per block] and
numbers [blocks, elements per block]; `decode` and `encode` take whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.errors import OptionError, ShapeError

Array = np.ndarray
CHUNK = 4096  # blocks encoded at once: the search works in f64 and holds several copies


@dataclass(frozen=True)
class BlockFormat:
    """One block format: its sizes, its code in files, and both directions."""

    name: str
    code: int
    elements: int
    bytes: int
    decode: Callable[[Array], Array]
    encode: Callable[[Array], Array]


def f16_at(blocks: Array, offset: int) -> Array:
    """The f16 field at a byte offset, as f32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def f16_bytes(x: Array) -> Array:
    return np.asarray(x, np.float32).reshape(-1, 1).astype("<f2").view(np.uint8)


def rounded(x: Array) -> Array:
    """Round half away from zero, as C's roundf does."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def inverse(x: Array) -> Array:
    """1 / x, and 0 for 0."""
    with np.errstate(all="ignore"):
        return np.where(x == 0, np.float32(0), np.float32(1) / x)


# ------------------------------------------------------------------------------------------------ blocks of 32 elements


def nibbles(packed: Array) -> Array:
    """Low halves, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def pack_nibbles(q: Array) -> Array:
    half = q.shape[-1] // 2
    return (q[..., :half] | q[..., half:] << 4).astype(np.uint8)


def fifth_bits(blocks: Array, offset: int) -> Array:
    word = np.ascontiguousarray(blocks[:, offset : offset + 4]).view("<u4")
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8)


def pack_fifth_bits(q: Array) -> Array:
    return np.packbits(q >> 4, axis=-1, bitorder="little")


def decode_q4_0(b: Array) -> Array:
    return f16_at(b, 0) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def decode_q4_1(b: Array) -> Array:
    return f16_at(b, 0) * nibbles(b[:, 4:]).astype(np.float32) + f16_at(b, 2)


def decode_q5_0(b: Array) -> Array:
    return f16_at(b, 0) * ((nibbles(b[:, 6:]) | fifth_bits(b, 2) << 4).astype(np.float32) - 16)


def decode_q5_1(b: Array) -> Array:
    return f16_at(b, 0) * (nibbles(b[:, 8:]) | fifth_bits(b, 4) << 4).astype(np.float32) + f16_at(b, 2)


def decode_q8_0(b: Array) -> Array:
    return f16_at(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _signed_scale(x: Array, levels: int) -> Array:
    """The scale that puts the element of largest magnitude, sign and all, at -levels."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    return (peak / np.float32(-levels)).astype(np.float32)


def _symmetric_quants(x: Array, levels: int) -> tuple[Array, Array]:
    d = _signed_scale(x, levels)
    steps = x.astype(np.float64) * inverse(d).astype(np.float64) + (levels + 0.5)
    return d, np.clip(np.trunc(steps), 0, 2 * levels - 1).astype(np.uint8)


def _affine_quants(x: Array, levels: int) -> tuple[Array, Array, Array]:
    low = x.min(-1, keepdims=True)
    d = ((x.max(-1, keepdims=True) - low) / np.float32(levels)).astype(np.float32)
    return d, low, np.clip(np.trunc((x - low) * inverse(d) + np.float32(0.5)), 0, levels).astype(np.uint8)


def encode_q4_0(x: Array) -> Array:
    d, q = _symmetric_quants(x, 8)
    return np.concatenate([f16_bytes(d), pack_nibbles(q)], -1)


def encode_q4_1(x: Array) -> Array:
    d, m, q = _affine_quants(x, 15)
    return np.concatenate([f16_bytes(d), f16_bytes(m), pack_nibbles(q)], -1)


def encode_q5_0(x: Array) -> Array:
    d, q = _symmetric_quants(x, 16)
    return np.concatenate([f16_bytes(d), pack_fifth_bits(q), pack_nibbles(q & 15)], -1)


def encode_q5_1(x: Array) -> Array:
    d, m, q = _affine_quants(x, 31)
    return np.concatenate([f16_bytes(d), f16_bytes(m), pack_fifth_bits(q), pack_nibbles(q & 15)], -1)


def encode_q8_0(x: Array) -> Array:
    d = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return np.concatenate([f16_bytes(d), rounded(x * inverse(d)).astype(np.int8).view(np.uint8)], -1)


# ----------------------------------------------------------------------------------------------- blocks of 256 elements


def scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes."""
    low, high = packed[:, :8], packed[:, 8:]
    scales = np.concatenate([low[:, :4] & 63, (high & 15) | (low[:, :4] >> 6) << 4], -1)
    mins = np.concatenate([low[:, 4:] & 63, (high >> 4) | (low[:, 4:] >> 6) << 4], -1)
    return scales.astype(np.float32), mins.astype(np.float32)


def pack_scales_and_mins(scales: Array, mins: Array) -> Array:
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], -1).astype(np.uint8)


def _halves(qs: Array) -> Array:
    """Sub-blocks 2c and 2c + 1 are the low and high halves of bytes 32c .. 32c + 31."""
    groups = qs.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], 2).reshape(-1, 8, 32)


def _pack_halves(q: Array) -> Array:
    pairs = q.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128).astype(np.uint8)


def _affine(b: Array, q: Array) -> Array:
    scales, mins = scales_and_mins(b[:, 4:16])
    d, m = f16_at(b, 0) * scales, f16_at(b, 2) * mins
    return (d[:, :, None] * q.astype(np.float32) - m[:, :, None]).reshape(-1, 256)


def decode_q4_k(b: Array) -> Array:
    return _affine(b, _halves(b[:, 16:]))


def decode_q5_k(b: Array) -> Array:
    bit = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _affine(b, _halves(b[:, 48:]) | bit << 4)


def decode_q6_k(b: Array) -> Array:
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
    nibble = np.concatenate([low & 15, low >> 4], 2)
    q = (nibble | ((high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3) << 4).astype(np.float32) - 32
    scales = f16_at(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


def decode_q8_k(b: Array) -> Array:
    d = np.ascontiguousarray(b[:, :4]).view("<f4")
    return d * b[:, 4:260].view(np.int8).astype(np.float32)


def _pairs(qs: Array) -> Array:
    """2-bit numbers: for each half of 128 elements, four shifts over the same 32 bytes."""
    return ((qs.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(-1, 16, 16)


def _pack_pairs(q: Array) -> Array:
    parts = q.reshape(-1, 2, 4, 32)
    return (
        (parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6)
        .reshape(-1, 64)
        .astype(np.uint8)
    )


def decode_q2_k(b: Array) -> Array:
    scales = f16_at(b, 80) * (b[:, :16] & 15).astype(np.float32)
    mins = f16_at(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    return (scales[:, :, None] * _pairs(b[:, 16:80]).astype(np.float32) - mins[:, :, None]).reshape(-1, 256)


def scales_of_q3_k(packed: Array) -> Array:
    """Sixteen 6-bit scales from 12 bytes, less 32."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], -1)
    high = ((packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(-1, 16)
    return (low | high << 4).astype(np.float32) - 32


def decode_q3_k(b: Array) -> Array:
    scales = f16_at(b, 108) * scales_of_q3_k(b[:, 96:108])
    bit = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = _pairs(b[:, 32:96]).astype(np.float32) - np.where(bit.reshape(-1, 16, 16) == 1, np.float32(0), np.float32(4))
    return (scales[:, :, None] * q).reshape(-1, 256)


# ------------------------------------------------------------------------------------------------------- scale searches


def fit_affine(x: Array, levels: int) -> tuple[Array, Array]:
    """Scale ≥ 0 and minimum ≥ 0 of rows x ≈ scale·q - minimum, q in 0..levels: the best of several least-squares
    fits."""
    low = np.minimum(x.min(-1, keepdims=True), 0).astype(np.float64)
    span = x.max(-1, keepdims=True) - low
    scale, least = span / levels, -low
    best = _affine_error(x, scale, least, levels)
    for shift in np.linspace(-1.0, 1.0, 21):
        q = np.clip(np.rint((levels + shift) * (x - low) * inverse(span).astype(np.float64)), 0, levels)
        s, m = _least_squares(x, q)
        error = _affine_error(x, s, m, levels)
        better = error < best
        best, scale, least = np.where(better, error, best), np.where(better, s, scale), np.where(better, m, least)
    return scale[..., 0], least[..., 0]


def _least_squares(x: Array, q: Array) -> tuple[Array, Array]:
    """The scale and minimum that suit given quants; a minimum below 0 is held at 0."""
    count = x.shape[-1]
    sq, sx = q.sum(-1, keepdims=True), x.sum(-1, keepdims=True, dtype=np.float64)
    sqq, sqx = (q * q).sum(-1, keepdims=True), (q * x).sum(-1, keepdims=True)
    determinant = count * sqq - sq * sq
    scale = np.where(determinant > 0, (count * sqx - sq * sx) / np.where(determinant > 0, determinant, 1), 0)
    least = (scale * sq - sx) / count
    alone = sqx / np.where(sqq > 0, sqq, 1)
    return np.maximum(np.where(least >= 0, scale, alone), 0), np.maximum(least, 0)


def _affine_error(x: Array, scale: Array, least: Array, levels: int) -> Array:
    q = np.clip(np.rint((x + least) * inverse(scale.astype(np.float32)).astype(np.float64)), 0, levels)
    return ((scale * q - least - x) ** 2).sum(-1, keepdims=True)


def fit_symmetric(x: Array, levels: int) -> Array:
    """The signed scale of rows x ≈ scale·q, q in -levels..levels - 1, that fits large elements best."""
    weight = x.astype(np.float64) ** 2
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1).astype(np.float64)
    scale, best = np.zeros_like(peak), np.full_like(peak, -1.0)
    for shift in np.linspace(-0.9, 0.9, 19):
        rate = -(levels + shift) * inverse(peak.astype(np.float32))
        q = np.clip(np.rint(rate * x), -levels, levels - 1)
        product, square = (weight * q * x).sum(-1, keepdims=True), (weight * q * q).sum(-1, keepdims=True)
        gain = product**2 / np.where(square > 0, square, 1)
        better = gain > best
        scale = np.where(better, product / np.where(square > 0, square, 1), scale)
        best = np.where(better, gain, best)
    return scale[..., 0]


def _common(fields: Array, levels: int) -> tuple[Array, Array]:
    """A shared f16 factor and the small integers that approximate `fields`."""
    factor = (fields.max(-1, keepdims=True) / levels).astype(np.float16).astype(np.float32)
    return factor, np.clip(np.rint(fields * inverse(factor)), 0, levels).astype(np.uint8)


def _requantize(x: Array, scale: Array, least: Array, levels: int) -> Array:
    return np.clip(np.rint((x + least[:, :, None]) * inverse(scale.astype(np.float32))[:, :, None]), 0, levels).astype(
        np.uint8
    )


def _encode_affine(x: Array, levels: int) -> tuple[Array, Array]:
    parts = x.reshape(-1, 8, 32)
    scale, least = fit_affine(parts, levels)
    d, s = _common(scale, 63)
    dm, m = _common(least, 63)
    q = _requantize(parts, d * s, dm * m, levels)
    return np.concatenate([f16_bytes(d), f16_bytes(dm), pack_scales_and_mins(s, m)], -1), q


def encode_q4_k(x: Array) -> Array:
    head, q = _encode_affine(x, 15)
    return np.concatenate([head, _pack_halves(q)], -1)


def encode_q5_k(x: Array) -> Array:
    head, q = _encode_affine(x, 31)
    high = np.packbits(q >> 4, axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([head, high, _pack_halves(q & 15)], -1)


def encode_q2_k(x: Array) -> Array:
    parts = x.reshape(-1, 16, 16)
    scale, least = fit_affine(parts, 3)
    d, s = _common(scale, 15)
    dm, m = _common(least, 15)
    q = _requantize(parts, d * s, dm * m, 3)
    return np.concatenate([(s | m << 4).astype(np.uint8), _pack_pairs(q), f16_bytes(d), f16_bytes(dm)], -1)


def _signed_common(scale: Array, levels: int) -> tuple[Array, Array]:
    """A shared f16 factor and integers in -levels..levels - 1 for signed scales."""
    peak = np.take_along_axis(scale, np.abs(scale).argmax(-1, keepdims=True), -1)
    d = (peak / -levels).astype(np.float16).astype(np.float32)
    return d, np.clip(np.rint(scale * inverse(d)), -levels, levels - 1).astype(np.int8)


def encode_q6_k(x: Array) -> Array:
    parts = x.reshape(-1, 16, 16)
    d, s = _signed_common(fit_symmetric(parts, 32), 128)
    q = np.clip(np.rint(parts * inverse((d * s).astype(np.float32))[:, :, None]), -32, 31).astype(np.int8) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], 2).reshape(
        -1, 128
    )
    top = q >> 4
    high = (top[:, :, 0] | top[:, :, 1] << 2 | top[:, :, 2] << 4 | top[:, :, 3] << 6).reshape(-1, 64)
    return np.concatenate([low, high, s.view(np.uint8), f16_bytes(d)], -1)


def encode_q3_k(x: Array) -> Array:
    parts = x.reshape(-1, 16, 16)
    d, s = _signed_common(fit_symmetric(parts, 4), 32)
    q = np.clip(np.rint(parts * inverse((d * s).astype(np.float32))[:, :, None]), -4, 3).astype(np.int8) + 4
    q = q.astype(np.uint8)
    stored = (s.astype(np.int16) + 32).astype(np.uint8)
    low = (stored[:, :8] & 15 | (stored[:, 8:] & 15) << 4).astype(np.uint8)
    top = (stored >> 4).reshape(-1, 4, 4)
    high = top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6
    mask = np.packbits((q >> 2).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([mask, _pack_pairs(q & 3), low, high.astype(np.uint8), f16_bytes(d)], -1)


def encode_q8_k(x: Array) -> Array:
    d = _signed_scale(x, 127)
    q = np.clip(rounded(x * inverse(d)), -127, 127).astype(np.int8)
    sums = q.reshape(-1, 16, 16).sum(-1, dtype=np.int16)
    return np.concatenate([d.astype("<f4").view(np.uint8), q.view(np.uint8), sums.astype("<i2").view(np.uint8)], -1)


FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("q4_0", 2, 32, 18, decode_q4_0, encode_q4_0), BlockFormat("q4_1", 3, 32, 20, decode_q4_1,
        encode_q4_1),
        BlockFormat("q5_0", 6, 32, 22, decode_q5_0, encode_q5_0), BlockFormat("q5_1", 7, 32, 24, decode_q5_1,
        encode_q5_1),
        BlockFormat("q8_0", 8, 32, 34, decode_q8_0, encode_q8_0), BlockFormat("q2k", 10, 256, 84, decode_q2_k,
        encode_q2_k),
        BlockFormat("q3k", 11, 256, 110, decode_q3_k, encode_q3_k), BlockFormat("q4k", 12, 256, 144, decode_q4_k,
        encode_q4_k),
        BlockFormat("q5k", 13, 256, 176, decode_q5_k, encode_q5_k), BlockFormat("q6k", 14, 256, 210, decode_q6_k,
        encode_q6_k),
        BlockFormat("q8k", 15, 256, 292, decode_q8_k, encode_q8_k),
    )
}  # fmt: skip


def block_format(name: str) -> BlockFormat:
    """The format of a name: q4_0, q4k (or q4_k), gguf_q4k."""
    short = name.lower().removeprefix("gguf_")
    short = short.replace("_k", "k")
    if short not in FORMATS:
        raise OptionError(f"gguf: {name!r} is none of {', '.join(FORMATS)}", code="O238")
    return FORMATS[short]


def decode(packed: Array, name: str) -> Array:
    """Numbers [.., K] in f32 from bytes [.., K / elements · bytes]."""
    kind = block_format(name)
    data = np.asarray(packed, np.uint8)
    if data.ndim < 1 or data.shape[-1] % kind.bytes:
        raise ShapeError(
            f"gguf: rows of {kind.name} are multiples of {kind.bytes} bytes, got {data.shape}", code="S276"
        )
    blocks = np.ascontiguousarray(data).reshape(-1, kind.bytes)
    return kind.decode(blocks).reshape(*data.shape[:-1], data.shape[-1] // kind.bytes * kind.elements)


def encode(x: Array, name: str) -> Array:
    """Bytes [.., K / elements · bytes] that approximate numbers [.., K]."""
    kind = block_format(name)
    data = np.asarray(x, np.float32)
    if data.ndim < 1 or data.shape[-1] % kind.elements:
        raise ShapeError(
            f"gguf: rows of {kind.name} are multiples of {kind.elements} elements, got {data.shape}", code="S276"
        )
    rows = np.ascontiguousarray(data).reshape(-1, kind.elements)
    blocks = np.empty((len(rows), kind.bytes), np.uint8)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), CHUNK):
            blocks[start : start + CHUNK] = kind.encode(rows[start : start + CHUNK])
    return blocks.reshape(*data.shape[:-1], data.shape[-1] // kind.elements * kind.bytes)
