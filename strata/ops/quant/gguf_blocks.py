"""GGUF block formats, each described once: where the bits of its numbers lie, and what they stand for.

A tensor is a run of blocks along its last axis. An element is

    (d · scale) · q - m · minimum

with floats d and m of the block, the number q of the element, and whole numbers for the scale and the minimum of its
group. Formats without scales have d · q, those with m alone add it, others add nothing.

`FORMATS` says where each field lies; all else follows from it. Decoders on arrays are here, encoders in gguf_encoders;
gguf_kernels has an element as an expression of a kernel, and the processor's products unpack blocks in registers.
`PACKED` has the formats that weights of other files are brought into, bit for bit: groups with a scale and a zero
point, 4-bit and 8-bit floats.

To add a format, add an entry to `FORMATS`: its code in files, its sizes and its fields. Its encoder is one of those
that exist, or a function that searches for scales and gives `packed` the codes of each field. The processor multiplies
natively with blocks of 32 or 256 elements whose numbers lie in 16 neighbouring bytes, or bits, for each 16 elements;
others are decoded in its caches. For vectors of 512 bits, `STEPS` of the backend names an order of the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import OptionError, ShapeError
from strata.ops.quant import gguf_encoders as encoders
from strata.ops.quant.gguf_fields import FLOAT8_UNIT, Array, BitField, Bits, BookField, Factor, Ternary

CHUNK = 4096  # blocks encoded at once: the search works in f64 and holds several copies
Encoder = Callable[["BlockFormat", Array, "Array | None"], Array]


@dataclass(frozen=True)
class BlockFormat:
    """One block format: its code in files, its sizes, its fields, and how scales are found for it.

    What is added to an element is m, or m · minimum, which is taken away.
    """

    name: str
    code: int
    elements: int
    bytes: int
    encode: Encoder | None
    d: Factor
    q: BitField | BookField | Ternary
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

    @property
    def book(self) -> str:
        """The codebook that numbers come from, or none."""
        return self.q.book if isinstance(self.q, BookField) else ""


# -------------------------------------------------------------------------------------------------------------- formats

_HALVES_32 = ((2, 0, 4), (16, 1, 0))  # low halves of 16 bytes, then high halves
_HALVES = ((4, 32, 0), (2, 0, 4), (32, 1, 0))  # the same for each 32 of 128 bytes
_PAIRS = ((2, 32, 0), (4, 0, 2), (32, 1, 0))  # pairs of bits of 32 bytes, then of the next 32
_SINGLE = ((8, 0, 1), (32, 1, 0))  # bits of 32 bytes
_SIX = (Bits(4, 4, ((2, 8, 0), (4, 1, 0))), Bits(2, 4, ((2, 0, 2), (4, 1, 0)), bit=4))
_SIX_MINIMA = (Bits(4, 8, ((2, 4, 4), (4, 1, 0))), Bits(2, 8, ((2, 0, 2), (4, 1, 0)), bit=4))
_D, _M = Factor(0), Factor(2)
_AFFINE = (BitField(_SIX), _M, BitField(_SIX_MINIMA))


_SEVENS_8 = ((8, 8, 0), (4, 0, 7))  # four times seven bits of each second four bytes
_WORDS = ((32, 2, 0),)
_BYTES_32 = ((32, 1, 0),)
_BITS_32 = ((32, 1, 0), (8, 0, 1))
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BNB_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
BNB_FP4_VALUES = (*_BNB_FP4, *(-x for x in _BNB_FP4))


def _odd(*bits: Bits) -> BitField:
    """2 · code + 1."""
    return BitField(bits, add=1, times=2)


def _nibbles(byte: int, *above: Bits, add: int = 0) -> BitField:
    return BitField((Bits(4, byte, _HALVES_32), *above), add)


def _fifth(byte: int) -> Bits:
    return Bits(1, byte, ((4, 1, 0), (8, 0, 1)))


def _signed(byte: int, count: int) -> BitField:
    return BitField((Bits(8, byte, ((count, 1, 0),)),), is_signed=True)


FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("q4_0", 2, 32, 18, encoders.encode_symmetric, _D, _nibbles(2, add=-8)),
        BlockFormat("q4_1", 3, 32, 20, encoders.encode_affine, _D, _nibbles(4), m=_M),
        BlockFormat("q5_0", 6, 32, 22, encoders.encode_symmetric, _D, _nibbles(6, _fifth(2), add=-16)),
        BlockFormat("q5_1", 7, 32, 24, encoders.encode_affine, _D, _nibbles(8, _fifth(4)), m=_M),
        BlockFormat("q8_0", 8, 32, 34, encoders.encode_bytes, _D, _signed(2, 32)),
        BlockFormat(
            "q2k", 10, 256, 84, encoders.encode_affine_groups, Factor(80), BitField((Bits(2, 16, _PAIRS),)),
            BitField((Bits(4, 0, ((16, 1, 0),)),)), Factor(82), BitField((Bits(4, 0, ((16, 1, 0),), bit=4),)),
        ),
        BlockFormat(
            "q3k", 11, 256, 110, encoders.encode_symmetric_groups, Factor(108),
            BitField((Bits(2, 32, _PAIRS), Bits(1, 0, _SINGLE)), add=-4),
            BitField((Bits(4, 96, ((2, 0, 4), (8, 1, 0))), Bits(2, 104, ((4, 0, 2), (4, 1, 0)))), add=-32),
        ),
        BlockFormat(
            "q4k", 12, 256, 144, encoders.encode_affine_groups, _D, BitField((Bits(4, 16, _HALVES),)), *_AFFINE
        ),
        BlockFormat(
            "q5k", 13, 256, 176, encoders.encode_affine_groups, _D,
            BitField((Bits(4, 48, _HALVES), Bits(1, 16, _SINGLE))), *_AFFINE,
        ),
        BlockFormat(
            "q6k", 14, 256, 210, encoders.encode_symmetric_groups, Factor(208),
            BitField((Bits(4, 0, ((2, 64, 0), (2, 0, 4), (2, 32, 0), (32, 1, 0))), Bits(2, 128, _PAIRS)), add=-32),
            _signed(192, 16),
        ),
        BlockFormat("q8k", 15, 256, 292, encoders.encode_summed_bytes, Factor(0, "<f4"), _signed(4, 256)),
        BlockFormat(
            "iq2_xxs", 16, 256, 66, None, Factor(0, times=0.125),
            BookField(BitField((Bits(8, 2, ((8, 8, 0), (4, 1, 0))),)), "iq2_xxs", BitField((Bits(7, 6, _SEVENS_8),))),
            _odd(Bits(4, 9, ((8, 8, 0),), bit=4)),
        ),
        BlockFormat(
            "iq2_xs", 17, 256, 74, None, Factor(0, times=0.125),
            BookField(
                BitField((Bits(8, 2, _WORDS), Bits(1, 3, _WORDS))), "iq2_xs", BitField((Bits(7, 3, _WORDS, bit=1),))
            ),
            _odd(Bits(4, 66, ((8, 1, 0), (2, 0, 4)))),
        ),
        BlockFormat(
            "iq3_xxs", 18, 256, 98, None, Factor(0, times=0.25),
            BookField(
                BitField((Bits(8, 2, ((64, 1, 0),)),)), "iq3_xxs", BitField((Bits(7, 66, ((8, 4, 0), (4, 0, 7))),))
            ),
            _odd(Bits(4, 69, ((8, 4, 0),), bit=4)),
        ),
        BlockFormat(
            "iq1_s", 19, 256, 50, None, Factor(0, times=0.125),
            BookField(
                BitField((Bits(8, 2, _BYTES_32), Bits(3, 34, ((8, 2, 0), (4, 0, 3))))), "iq1",
                shifts=BitField((Bits(1, 35, ((8, 2, 0),), bit=7),)),
            ),
            _odd(Bits(3, 35, ((8, 2, 0),), bit=4)),
        ),
        BlockFormat(
            "iq4_nl", 20, 32, 18, encoders.encode_values, _D, BitField((Bits(4, 2, _HALVES_32),), values=IQ4_VALUES)
        ),
        BlockFormat(
            "iq3_s", 21, 256, 110, None, _D,
            BookField(
                BitField((Bits(8, 2, ((64, 1, 0),)), Bits(1, 66, ((8, 1, 0), (8, 0, 1))))), "iq3_s",
                BitField((Bits(1, 74, _BITS_32),)),
            ),
            _odd(Bits(4, 106, ((4, 1, 0), (2, 0, 4)))),
        ),
        BlockFormat(
            "iq2_s", 22, 256, 82, None, Factor(0, times=0.125),
            BookField(
                BitField((Bits(8, 2, _BYTES_32), Bits(2, 66, ((8, 1, 0), (4, 0, 2))))), "iq2_s",
                BitField((Bits(1, 34, _BITS_32),)),
            ),
            _odd(Bits(4, 74, ((8, 1, 0), (2, 0, 4)))),
        ),
        BlockFormat(
            "iq4_xs", 23, 256, 136, encoders.encode_value_groups, _D,
            BitField((Bits(4, 8, ((8, 16, 0), *_HALVES_32)),), values=IQ4_VALUES),
            BitField((Bits(4, 4, ((4, 1, 0), (2, 0, 4))), Bits(2, 2, ((2, 1, 0), (4, 0, 2)))), add=-32),
        ),
        BlockFormat(
            "iq1_m", 29, 256, 56, None, Factor(49, times=0.125, nibbles=(49, 51, 53, 55)),
            BookField(
                BitField((Bits(8, 0, _BYTES_32), Bits(3, 32, ((16, 1, 0), (2, 0, 4))))), "iq1",
                shifts=BitField((Bits(1, 32, ((16, 1, 0), (2, 0, 4)), bit=3),)),
            ),
            _odd(Bits(3, 48, ((4, 2, 0), (4, 0, 3)))),
        ),
        BlockFormat(
            "tq1_0", 34, 256, 54, encoders.encode_ternary, Factor(52), Ternary(((0, 32, 5), (32, 16, 5), (48, 4, 4)))
        ),
        BlockFormat(
            "tq2_0", 35, 256, 66, encoders.encode_ternary, Factor(64), BitField((Bits(2, 0, _PAIRS),), add=-1)
        ),
        BlockFormat(
            "mxfp4", 39, 32, 17, encoders.encode_power, Factor(0, "e8m0"),
            BitField((Bits(4, 1, _HALVES_32),), values=FP4_VALUES),
        ),
        BlockFormat(
            "nvfp4", 40, 64, 36, encoders.encode_float8_groups, Factor(0, "one", times=FLOAT8_UNIT / 2),
            BitField((Bits(4, 4, ((4, 8, 0), (2, 0, 4), (8, 1, 0))),), values=FP4_VALUES),
            BitField((Bits(8, 0, ((4, 1, 0),)),), float8="ue4m3"),
        ),
        BlockFormat(
            "q1_0", 41, 128, 18, encoders.encode_sign, _D,
            BitField((Bits(1, 2, ((16, 1, 0), (8, 0, 1))),), values=(-1, 1)),
        ),
    )
}  # fmt: skip


# ------------------------------------------------------------------------------------------- weights of other files

GROUPS = (256, 128, 64, 32)  # elements of a block of `PACKED`
_DTYPES = {"h": "<f2", "b": "bf16", "f": "<f4"}


def _packed_format(kind: str, size: int, short: str) -> BlockFormat:
    """Blocks of `size` elements: d, what is taken away or added, then codes."""
    dtype = _DTYPES[short]
    d = Factor(0, dtype)
    at, name = d.bytes, f"{kind}_{size}{short}"
    halves = ((size // 32, 16, 0), *_HALVES_32)

    def made(bytes_: int, q: BitField, **fields: Any) -> BlockFormat:
        return BlockFormat(name, -1, size, bytes_, None, d, q, **fields)

    match kind:
        case "u4":  # d · (q - zero)
            zero = BitField((Bits(8, at, ((1, 1, 0),)),))
            return made(at + 1 + size // 2, BitField((Bits(4, at + 1, halves),)), m=d, minima=zero)
        case "i8":
            zero = BitField((Bits(8, at, ((1, 1, 0),)),), is_signed=True)
            return made(at + 1 + size, _signed(at + 1, size), m=d, minima=zero)
        case "m4":  # d · q + m
            return made(2 * at + size // 2, BitField((Bits(4, 2 * at, halves),)), m=Factor(at, dtype))
        case "nf4" | "fp4":
            values = NF4_VALUES if kind == "nf4" else BNB_FP4_VALUES
            return made(at + size // 2, BitField((Bits(4, at, halves),), values=values))
        case "nvfp4":  # d · scale · q, with a scale for 16
            d, parts = Factor(0, dtype, times=FLOAT8_UNIT / 2), size // 16
            q = BitField((Bits(4, at + parts, halves),), values=FP4_VALUES)
            scales = BitField((Bits(8, at, ((parts, 1, 0),)),), float8="ue4m3")
            return BlockFormat(name, -1, size, at + parts + size // 2, None, d, q, scales)
        case _:
            return made(at + size, BitField((Bits(8, at, ((size, 1, 0),)),), float8=kind))


PACKED: dict[str, BlockFormat] = {
    made.name: made
    for kind in ("u4", "i8", "m4", "nf4", "fp4", "nvfp4", "e4m3", "e5m2") for size in GROUPS for short in _DTYPES
    for made in (_packed_format(kind, size, short),)
}  # fmt: skip


def block_format(name: str) -> BlockFormat:
    """The format of a name: q4_0, q4k (or q4_k), gguf_q4k."""
    short = name.lower().removeprefix("gguf_")
    short = short.replace("_k", "k")
    found = FORMATS.get(short) or PACKED.get(short)
    if found is None:
        raise OptionError(f"gguf: {name!r} is not one of {', '.join(FORMATS)}", code="O238")
    return found


def decode(packed: Array, name: str) -> Array:
    """Numbers [.., K] in f32 from bytes [.., K / elements · bytes]."""
    kind = block_format(name)
    data = np.asarray(packed, np.uint8)
    if data.ndim < 1 or data.shape[-1] % kind.bytes:
        raise ShapeError(
            f"gguf: rows of {kind.name} are multiples of {kind.bytes} bytes, got {data.shape}", code="S276"
        )
    shape = *data.shape[:-1], data.shape[-1] // kind.bytes * kind.elements
    if not data.size:
        return np.zeros(shape, np.float32)
    return kind.decode(np.ascontiguousarray(data).reshape(-1, kind.bytes)).reshape(shape)


def encode(x: Array, name: str, weight: Array | None = None) -> Array:
    """Bytes [.., K / elements · bytes] that approximate numbers [.., K].

    `weight` [K] says how much the numbers of a column count: an importance matrix has it for each matmul.
    """
    kind = block_format(name)
    if kind.encode is None:
        known = ", ".join(n for n, f in FORMATS.items() if f.encode)
        raise OptionError(f"gguf: {kind.name} is read and not written; written are {known}", code="O238")
    data = np.asarray(x, np.float32)
    if data.ndim < 1 or data.shape[-1] % kind.elements:
        raise ShapeError(
            f"gguf: rows of {kind.name} are multiples of {kind.elements} elements, got {data.shape}", code="S276"
        )
    rows = np.ascontiguousarray(data).reshape(-1, kind.elements)
    blocks = np.empty((len(rows), kind.bytes), np.uint8)
    each = None if weight is None else np.asarray(weight, np.float32).reshape(-1, kind.elements)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), CHUNK):
            some = rows[start : start + CHUNK]
            counts = None if each is None else each[np.arange(start, start + len(some)) % len(each)]
            blocks[start : start + CHUNK] = kind.encode(kind, some, counts)
    return blocks.reshape(*data.shape[:-1], data.shape[-1] // kind.elements * kind.bytes)


def random_blocks(form: BlockFormat, count: int, rng: np.random.Generator) -> Array:
    """Blocks of random bytes, u8[count, bytes], with floats near 1: what samples and tests decode."""
    blocks = rng.integers(0, 256, (count, form.bytes), np.uint8)
    for factor in filter(None, (form.d, form.m)):
        factor.write(blocks, np.exp2(rng.integers(-2, 3, count)))
    if isinstance(form.q, BitField) and form.q.float8:
        for part in form.q.bits:  # no NaN, no infinity
            blocks[:, part.byte :] &= 0xBF
    return blocks
