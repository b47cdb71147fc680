"""GGUF blocks in registers: 32 elements at a time as bytes, with what they are multiplied by and what is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from strata.backends.llvm.builder import Function, constant

FLOATS, WORDS, SHORTS, BYTES, HALF = "<8 x float>", "<8 x i32>", "<16 x i16>", "<32 x i8>", "<16 x i8>"


@dataclass(frozen=True)
class Group:
    """32 elements: quants · factors · scale + least, all but the quants in every lane of a vector."""

    quants: str  # <32 x i8>
    scale: str  # <8 x float>
    least: str = ""  # <8 x float>, what is added to every element
    is_signed: bool = False
    factors: str = ""  # <16 x i16>: whole factors of the first and the second 16


@dataclass
class Head:
    """What the groups of one block share: its address, and fields that are decoded once."""

    at: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A block format: its sizes, and how it is taken apart."""

    elements: int
    bytes: int
    head: Callable[[Function, str], Head]
    group: Callable[[Function, Head, int], Group]
    has_least: bool = True


def f16_at(f: Function, base: str, offset: int) -> str:
    """The f16 at a byte offset, as a float in every lane."""
    half = f.load("half", f.address("i8", base, offset), 1)
    return f.splat(FLOATS, f.convert("fpext", "half", half, "float"))


def _bytes(f: Function, base: str, offset: int, type_: str = BYTES) -> str:
    return f.load(type_, f.address("i8", base, offset), 1)


def _both_halves(f: Function, base: str, offset: int) -> str:
    """16 bytes as 32 numbers: low halves, then high halves."""
    packed = _bytes(f, base, offset, HALF)
    high = f.binary("lshr", HALF, packed, constant(HALF, 4))
    both = f.shuffle(HALF, packed, high, range(32))
    return f.binary("and", BYTES, both, constant(BYTES, 15))


def _scaled(f: Function, x: str, factor: float) -> str:
    return f.binary("fmul", FLOATS, x, constant(FLOATS, factor))


def _with_bits(f: Function, quants: str, bits: str) -> str:
    """Quants with a fifth bit where the mask <32 x i1> says so."""
    added = f.select(BYTES, bits, constant(BYTES, 16), "zeroinitializer")
    return f.binary("or", BYTES, quants, added)


# ------------------------------------------------------------------------------------------------ blocks of 32 elements


def _plain_head(f: Function, at: str) -> Head:
    return Head(at)


def _q4_0(f: Function, head: Head, _: int) -> Group:
    d = f16_at(f, head.at, 0)
    return Group(_both_halves(f, head.at, 2), d, _scaled(f, d, -8.0))


def _q4_1(f: Function, head: Head, _: int) -> Group:
    return Group(_both_halves(f, head.at, 4), f16_at(f, head.at, 0), f16_at(f, head.at, 2))


def _fifth(f: Function, base: str, offset: int) -> str:
    word = f.load("i32", f.address("i8", base, offset), 1)
    return f.convert("bitcast", "i32", word, "<32 x i1>")


def _q5_0(f: Function, head: Head, _: int) -> Group:
    d = f16_at(f, head.at, 0)
    return Group(_with_bits(f, _both_halves(f, head.at, 6), _fifth(f, head.at, 2)), d, _scaled(f, d, -16.0))


def _q5_1(f: Function, head: Head, _: int) -> Group:
    quants = _with_bits(f, _both_halves(f, head.at, 8), _fifth(f, head.at, 4))
    return Group(quants, f16_at(f, head.at, 0), f16_at(f, head.at, 2))


def _q8_0(f: Function, head: Head, _: int) -> Group:
    return Group(_bytes(f, head.at, 2), f16_at(f, head.at, 0), is_signed=True)


# ----------------------------------------------------------------------------------------------- blocks of 256 elements


def _lane(f: Function, vector: str, lane: int) -> str:
    """One lane of eight floats in every lane."""
    return f.shuffle(FLOATS, vector, "poison", [lane] * 8)


def _six_bits(f: Function, at: str) -> Head:
    """Eight scales and eight least values of a Q4_K or Q5_K block, as floats."""
    part = "<4 x i8>"
    a, b, c = (_bytes(f, at, 4 + 4 * i, part) for i in range(3))

    def low(x: str) -> str:
        return f.binary("and", part, x, constant(part, 63))

    def top(x: str, nibble: str) -> str:
        upper = f.binary("and", part, f.binary("lshr", part, x, constant(part, 2)), constant(part, 48))
        return f.binary("or", part, nibble, upper)

    def floats(first: str, second: str, factor: str) -> str:
        both = f.shuffle(part, first, second, range(8))
        wide = f.convert("sitofp", WORDS, f.convert("zext", "<8 x i8>", both, WORDS), FLOATS)
        return f.binary("fmul", FLOATS, wide, factor)

    scales = floats(low(a), top(a, f.binary("and", part, c, constant(part, 15))), f16_at(f, at, 0))
    least = floats(low(b), top(b, f.binary("lshr", part, c, constant(part, 4))), _scaled(f, f16_at(f, at, 2), -1.0))
    return Head(at, {"scales": scales, "least": least})


def _four_bits(f: Function, head: Head, j: int, offset: int) -> str:
    """Sub-block j: the low or high halves of 32 bytes."""
    packed = _bytes(f, head.at, offset + 32 * (j // 2))
    if j % 2:
        packed = f.binary("lshr", BYTES, packed, constant(BYTES, 4))
    return f.binary("and", BYTES, packed, constant(BYTES, 15))


def _q4k(f: Function, head: Head, j: int) -> Group:
    return Group(_four_bits(f, head, j, 16), _lane(f, head.fields["scales"], j), _lane(f, head.fields["least"], j))


def _q5k(f: Function, head: Head, j: int) -> Group:
    bit = f.binary("and", BYTES, _bytes(f, head.at, 16), constant(BYTES, 1 << j))
    quants = _with_bits(f, _four_bits(f, head, j, 48), f.compare("ne", BYTES, bit, "zeroinitializer"))
    return Group(quants, _lane(f, head.fields["scales"], j), _lane(f, head.fields["least"], j))


def _q6_head(f: Function, at: str) -> Head:
    scales = f.convert("sext", "<16 x i8>", _bytes(f, at, 192, HALF), SHORTS)
    return Head(at, {"scales": scales, "d": f16_at(f, at, 208)})


def _q6k(f: Function, head: Head, j: int) -> Group:
    """Group j = 4 · half + quarter: halves of 128 elements, quarters of 32."""
    half, quarter = divmod(j, 4)
    packed = _bytes(f, head.at, 64 * half + 32 * (quarter % 2))
    if quarter >= 2:
        packed = f.binary("lshr", BYTES, packed, constant(BYTES, 4))
    low = f.binary("and", BYTES, packed, constant(BYTES, 15))
    high = _bytes(f, head.at, 128 + 32 * half)
    pair = f.binary("and", BYTES, high, constant(BYTES, 3 << (2 * quarter)))
    shift = 4 - 2 * quarter
    if shift:
        pair = f.binary("shl" if shift > 0 else "lshr", BYTES, pair, constant(BYTES, abs(shift)))
    quants = f.binary("sub", BYTES, f.binary("or", BYTES, low, pair), constant(BYTES, 32))
    first = 8 * half + 2 * quarter
    factors = f.shuffle(SHORTS, head.fields["scales"], "poison", [first] * 8 + [first + 1] * 8)
    return Group(quants, head.fields["d"], is_signed=True, factors=factors)


FORMATS: Final = {
    "q4_0": Format(32, 18, _plain_head, _q4_0), "q4_1": Format(32, 20, _plain_head, _q4_1),
    "q5_0": Format(32, 22, _plain_head, _q5_0), "q5_1": Format(32, 24, _plain_head, _q5_1),
    "q8_0": Format(32, 34, _plain_head, _q8_0, has_least=False), "q4k": Format(256, 144, _six_bits, _q4k),
    "q5k": Format(256, 176, _six_bits, _q5k), "q6k": Format(256, 210, _q6_head, _q6k, has_least=False),
}  # fmt: skip
