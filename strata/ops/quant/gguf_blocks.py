"""GGUF block formats, each described once: where the bits of its numbers lie, and what they stand for.

A tensor is a run of blocks along its last axis. An element is

    (d · scale) · q - m · minimum

with floats d and m of the block, the number q of the element, and whole numbers for the scale and the minimum of its
group. Formats without scales have d · q, those with m alone add it, others add nothing.

`FORMATS` says where each field lies; all else follows from it. Decoders and encoders on arrays are here, gguf_kernels
has an element as an expression of a kernel, and the processor's products unpack blocks in registers.

To add a format, add an entry to `FORMATS`: its code in files, its sizes and its fields. Its encoder is one of those
below, or a function that searches for scales and gives `packed` the codes of each field. The processor multiplies
natively with blocks of 32 or 256 elements whose numbers lie in 16 neighbouring bytes, or bits, for each 16 elements;
others are decoded by a kernel. For vectors of 512 bits, `STEPS` of the backend names an order of the elements. Numbers
from a codebook are a kind of field of their own: it needs `read` here, and `number` in gguf_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import numpy as np

from strata.errors import OptionError, ShapeError

Array = np.ndarray
CHUNK = 4096  # blocks encoded at once: the search works in f64 and holds several copies
Digit = tuple[int, int, int]


@dataclass(frozen=True)
class Bits:
    """Some bits of every number of a field.

    Those of number 0 begin at a bit of a byte. The index of a number is unpacked into digits, the first of which
    counts most: each is its size, and by how many bytes and bits the place moves where it is one more.
    """

    width: int
    byte: int
    digits: tuple[Digit, ...]
    bit: int = 0

    def place(self, number: int) -> tuple[int, int]:
        """The byte of a number, and the bit in it at which its bits begin."""
        byte, bit = self.byte, self.bit
        for size, bytes_, bits in reversed(self.digits):
            number, digit = divmod(number, size)
            byte, bit = byte + digit * bytes_, bit + digit * bits
        return byte, bit

    def places(self, numbers: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bytes of some numbers, and their bits."""
        return _places(self, numbers)


@cache
def _places(bits: Bits, numbers: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
    byte, bit = zip(*map(bits.place, numbers), strict=True)
    return byte, bit


@dataclass(frozen=True)
class BitField:
    """Whole numbers: their bits, the lowest first; they have a sign, or a constant is added to each."""

    bits: tuple[Bits, ...]
    add: int = 0
    is_signed: bool = False

    @cached_property
    def count(self) -> int:
        return prod(size for size, *_ in self.bits[0].digits)

    @cached_property
    def levels(self) -> int:
        """How many different numbers it can hold."""
        return 1 << sum(part.width for part in self.bits)

    def read(self, blocks: Array) -> Array:
        """Numbers [blocks, count] in f32."""
        found: Array | None = None
        to = 0
        for part in self.bits:
            sizes, bytes_, bits = zip(*part.digits, strict=True)
            steps = (blocks.strides[0], *bytes_)
            view = np.lib.stride_tricks.as_strided(
                blocks[:, part.byte :], (len(blocks), *sizes), steps, writeable=False
            )
            moves = sum(step * place for step, place in zip(bits, np.ogrid[*map(slice, sizes)], strict=True))
            if any(bits) or part.bit:
                view = view >> (moves + part.bit).astype(np.uint8)
            codes = (view & ((1 << part.width) - 1) if part.width < 8 else view).reshape(len(blocks), -1)
            found, to = codes if found is None else found | codes << to, to + part.width
        assert found is not None
        numbers = (found.view(np.int8) if self.is_signed else found).astype(np.float32)
        return numbers + np.float32(self.add) if self.add else numbers

    def write(self, blocks: Array, codes: Array) -> None:
        """Puts codes, which are numbers less what is added to them, into blocks of zeros."""
        rest = codes.reshape(len(blocks), -1)
        for part in self.bits:
            byte, bit = map(np.array, part.places(range(self.count)))
            for start in set(bit.tolist()):  # no two numbers have the same bits, so that here are no two of a byte
                those = bit == start
                some = (rest[:, those] & ((1 << part.width) - 1)) << start
                blocks[:, byte[those]] |= some.astype(np.uint8)
            rest = rest >> part.width


@dataclass(frozen=True)
class Factor:
    """A float of a block, f16 unless told."""

    byte: int
    dtype: str = "<f2"

    def read(self, blocks: Array) -> Array:
        """In f32 [blocks, 1]."""
        size = np.dtype(self.dtype).itemsize
        return np.ascontiguousarray(blocks[:, self.byte : self.byte + size]).view(self.dtype).astype(np.float32)

    def write(self, blocks: Array, x: Array) -> None:
        found = np.asarray(x, np.float32).reshape(-1, 1).astype(self.dtype).view(np.uint8)
        blocks[:, self.byte : self.byte + found.shape[1]] = found


@dataclass(frozen=True)
class BlockFormat:
    """One block format: its code in files, its sizes, its fields, and how scales are found for it.

    What is added to an element is m, or m · minimum, which is taken away.
    """

    name: str
    code: int
    elements: int
    bytes: int
    encode: Callable[[BlockFormat, Array], Array]
    d: Factor
    q: BitField
    scales: BitField | None = None
    m: Factor | None = None
    minima: BitField | None = None

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        return self.elements // self.scales.count if self.scales else self.elements

    def decode(self, b: Array) -> Array:
        """Numbers [blocks, elements] of bytes [blocks, bytes]."""
        q = self.q.read(b).reshape(len(b), -1, self.group)
        d = self.d.read(b) * self.scales.read(b) if self.scales else self.d.read(b)
        found = np.multiply(q, d[:, :, None], out=q)
        if self.m and self.minima:
            found -= (self.m.read(b) * self.minima.read(b))[:, :, None]
        elif self.m:
            found += self.m.read(b)[:, :, None]
        return found.reshape(len(b), -1)

    def packed(self, count: int, **fields: Array) -> Array:
        """Blocks with given floats and codes, by the names of their fields."""
        blocks = np.zeros((count, self.bytes), np.uint8)
        for name, values in fields.items():
            getattr(self, name).write(blocks, values)
        return blocks


# ------------------------------------------------------------------------------------------------------------- encoders


def rounded(x: Array) -> Array:
    """Round half away from zero, as C's roundf does."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def inverse(x: Array) -> Array:
    """1 / x, and 0 for 0."""
    with np.errstate(all="ignore"):
        return np.where(x == 0, np.float32(0), np.float32(1) / x)


def _signed_scale(x: Array, levels: int) -> Array:
    """The scale that puts the element of largest magnitude, sign and all, at -levels."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    return (peak / np.float32(-levels)).astype(np.float32)


def encode_symmetric(form: BlockFormat, x: Array) -> Array:
    levels = form.q.levels // 2
    d = _signed_scale(x, levels)
    steps = x.astype(np.float64) * inverse(d).astype(np.float64) + (levels + 0.5)
    return form.packed(len(x), d=d, q=np.clip(np.trunc(steps), 0, 2 * levels - 1).astype(np.uint8))


def encode_affine(form: BlockFormat, x: Array) -> Array:
    top, low = form.q.levels - 1, x.min(-1, keepdims=True)
    d = ((x.max(-1, keepdims=True) - low) / np.float32(top)).astype(np.float32)
    q = np.clip(np.trunc((x - low) * inverse(d) + np.float32(0.5)), 0, top).astype(np.uint8)
    return form.packed(len(x), d=d, m=low, q=q)


def encode_bytes(form: BlockFormat, x: Array) -> Array:
    d = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return form.packed(len(x), d=d, q=rounded(x * inverse(d)).astype(np.int8).view(np.uint8))


def encode_summed_bytes(form: BlockFormat, x: Array) -> Array:
    d = _signed_scale(x, 127)
    q = np.clip(rounded(x * inverse(d)), -127, 127).astype(np.int8)
    blocks = form.packed(len(x), d=d, q=q.view(np.uint8))
    sums = q.reshape(-1, 16, 16).sum(-1, dtype=np.int16)
    blocks[:, form.bytes - 32 :] = sums.astype("<i2").view(np.uint8)
    return blocks


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


def encode_affine_groups(form: BlockFormat, x: Array) -> Array:
    assert form.scales
    parts, levels = x.reshape(len(x), -1, form.group), form.q.levels - 1
    scale, least = fit_affine(parts, levels)
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


def encode_symmetric_groups(form: BlockFormat, x: Array) -> Array:
    assert form.scales
    parts, levels = x.reshape(len(x), -1, form.group), form.q.levels // 2
    d, scales = _signed_common(fit_symmetric(parts, levels), form.scales.levels // 2)
    q = np.clip(np.rint(parts * inverse((d * scales).astype(np.float32))[:, :, None]), -levels, levels - 1)
    stored = (scales.astype(np.int16) - form.scales.add).astype(np.uint8)
    return form.packed(len(x), d=d, scales=stored, q=(q - form.q.add).astype(np.uint8))


# -------------------------------------------------------------------------------------------------------------- formats

_HALVES_32 = ((2, 0, 4), (16, 1, 0))  # low halves of 16 bytes, then high halves
_HALVES = ((4, 32, 0), (2, 0, 4), (32, 1, 0))  # the same for each 32 of 128 bytes
_PAIRS = ((2, 32, 0), (4, 0, 2), (32, 1, 0))  # pairs of bits of 32 bytes, then of the next 32
_SINGLE = ((8, 0, 1), (32, 1, 0))  # bits of 32 bytes
_SIX = (Bits(4, 4, ((2, 8, 0), (4, 1, 0))), Bits(2, 4, ((2, 0, 2), (4, 1, 0)), bit=4))
_SIX_MINIMA = (Bits(4, 8, ((2, 4, 4), (4, 1, 0))), Bits(2, 8, ((2, 0, 2), (4, 1, 0)), bit=4))
_D, _M = Factor(0), Factor(2)
_AFFINE = (BitField(_SIX), _M, BitField(_SIX_MINIMA))


def _nibbles(byte: int, *above: Bits, add: int = 0) -> BitField:
    return BitField((Bits(4, byte, _HALVES_32), *above), add)


def _fifth(byte: int) -> Bits:
    return Bits(1, byte, ((4, 1, 0), (8, 0, 1)))


def _signed(byte: int, count: int) -> BitField:
    return BitField((Bits(8, byte, ((count, 1, 0),)),), is_signed=True)


FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("q4_0", 2, 32, 18, encode_symmetric, _D, _nibbles(2, add=-8)),
        BlockFormat("q4_1", 3, 32, 20, encode_affine, _D, _nibbles(4), m=_M),
        BlockFormat("q5_0", 6, 32, 22, encode_symmetric, _D, _nibbles(6, _fifth(2), add=-16)),
        BlockFormat("q5_1", 7, 32, 24, encode_affine, _D, _nibbles(8, _fifth(4)), m=_M),
        BlockFormat("q8_0", 8, 32, 34, encode_bytes, _D, _signed(2, 32)),
        BlockFormat(
            "q2k", 10, 256, 84, encode_affine_groups, Factor(80), BitField((Bits(2, 16, _PAIRS),)),
            BitField((Bits(4, 0, ((16, 1, 0),)),)), Factor(82), BitField((Bits(4, 0, ((16, 1, 0),), bit=4),)),
        ),
        BlockFormat(
            "q3k", 11, 256, 110, encode_symmetric_groups, Factor(108),
            BitField((Bits(2, 32, _PAIRS), Bits(1, 0, _SINGLE)), add=-4),
            BitField((Bits(4, 96, ((2, 0, 4), (8, 1, 0))), Bits(2, 104, ((4, 0, 2), (4, 1, 0)))), add=-32),
        ),
        BlockFormat("q4k", 12, 256, 144, encode_affine_groups, _D, BitField((Bits(4, 16, _HALVES),)), *_AFFINE),
        BlockFormat(
            "q5k", 13, 256, 176, encode_affine_groups, _D,
            BitField((Bits(4, 48, _HALVES), Bits(1, 16, _SINGLE))), *_AFFINE,
        ),
        BlockFormat(
            "q6k", 14, 256, 210, encode_symmetric_groups, Factor(208),
            BitField((Bits(4, 0, ((2, 64, 0), (2, 0, 4), (2, 32, 0), (32, 1, 0))), Bits(2, 128, _PAIRS)), add=-32),
            _signed(192, 16),
        ),
        BlockFormat("q8k", 15, 256, 292, encode_summed_bytes, Factor(0, "<f4"), _signed(4, 256)),
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
            blocks[start : start + CHUNK] = kind.encode(kind, rows[start : start + CHUNK])
    return blocks.reshape(*data.shape[:-1], data.shape[-1] // kind.elements * kind.bytes)
