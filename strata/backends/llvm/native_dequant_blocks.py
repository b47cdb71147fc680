"""GGUF blocks in registers: 32 elements at a time as two vectors of 16-bit numbers, and what scales them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from strata.backends.llvm.builder import Function, constant

FLOATS, WORDS, SHORTS, BYTES = "<8 x float>", "<8 x i32>", "<16 x i16>", "<16 x i8>"
Halves = tuple[str, str]


@dataclass(frozen=True)
class Group:
    """32 elements, quants · scale + least. Scale and least are in every lane of a vector <8 x float>."""

    quants: Halves  # <16 x i16> each: the first 16 elements, and the others
    scale: str
    least: str = ""
    second_scale: str = ""  # of the second 16 elements, where it differs


@dataclass
class Head:
    """What the groups of one block share: its address, and fields that are decoded once."""

    at: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scales:
    """The scales and the eighths of sums of one row of x, for the groups of a block."""

    pair: str = ""  # <4 x float>, for one group: its scale and its sum in the first two lanes
    scales: str = ""  # <8 x float>, for eight groups
    sums: str = ""


@dataclass(frozen=True)
class Format:
    """A block format: its sizes, and how it is taken apart.

    For a single row of x, `fold` multiplies the scales of a block by those of x once, and adds the least values times
    the sums to a running vector; groups taken after it need neither.
    """

    elements: int
    bytes: int
    head: Callable[[Function, str], Head]
    group: Callable[[Function, Head, int], Group]
    fold: Callable[[Function, Head, Scales, str], str]
    has_least: bool = True
    least_factor: float = 1.0  # of what `fold` adds up for blocks of 32


def _f16(f: Function, base: str, offset: int) -> str:
    """The f16 at a byte offset, as a float in every lane."""
    half = f.load("half", f.address("i8", base, offset), 1)
    return f.splat(FLOATS, f.convert("fpext", "half", half, "float"))


def _wide(f: Function, base: str, offset: int, extend: str = "zext") -> str:
    """16 bytes as 16-bit numbers."""
    return f.convert(extend, BYTES, f.load(BYTES, f.address("i8", base, offset), 1), SHORTS)


def _and(f: Function, x: str, mask: int) -> str:
    return f.binary("and", SHORTS, x, constant(SHORTS, mask))


def _right(f: Function, x: str, count: int) -> str:
    return f.binary("lshr", SHORTS, x, constant(SHORTS, count)) if count else x


def _scaled(f: Function, x: str, factor: float) -> str:
    return f.binary("fmul", FLOATS, x, constant(FLOATS, factor))


# ------------------------------------------------------------------------------------------------ blocks of 32 elements

PAIR: Final = "<4 x float>"


def _fold_pair(f: Function, head: Head, x: Scales, least: str) -> str:
    """d and m lie side by side and are read at once, with two fields behind them that nothing looks at."""
    raw = f.load("<4 x half>", head.at, 1)
    both = f.binary("fmul", PAIR, f.convert("fpext", "<4 x half>", raw, PAIR), x.pair)
    head.fields["scale"] = f.shuffle(PAIR, both, "poison", [0] * 8)
    return f.binary("fadd", PAIR, least, both)


def _fold_single(f: Function, head: Head, x: Scales, least: str) -> str:
    """Only d is stored; what is added to every element is a multiple of it."""
    half = f.load("half", head.at, 1)
    both = f.binary("fmul", PAIR, f.splat(PAIR, f.convert("fpext", "half", half, "float")), x.pair)
    head.fields["scale"] = f.shuffle(PAIR, both, "poison", [0] * 8)
    return f.binary("fadd", PAIR, least, both)


def folded_least(f: Function, form: Format, least: str) -> str:
    """What `fold` added up, as the number that belongs into the result. Sums of x were stored as eighths."""
    if form.elements == 32:
        total = f.extract(PAIR, least, 1)
        return f.binary("fmul", "float", total, constant("float", 8 * form.least_factor))
    total = f.fold_lanes(FLOATS, least, lambda kind, a, b: f.binary("fadd", kind, a, b))
    return f.binary("fmul", "float", total, constant("float", 8.0))


def _plain_head(f: Function, at: str) -> Head:
    return Head(at)


def _nibbles(f: Function, base: str, offset: int) -> Halves:
    """Low halves of 16 bytes, and high halves."""
    packed = _wide(f, base, offset)
    return _and(f, packed, 15), _right(f, packed, 4)


def _fifth_bits(f: Function, quants: Halves, base: str, offset: int) -> Halves:
    """Quants with their fifth bits, which lie together in 4 bytes."""
    made = []
    for i, part in enumerate(quants):
        word = f.load("i16", f.address("i8", base, offset + 2 * i), 1)
        bits = f.convert("bitcast", "i16", word, "<16 x i1>")
        added = f.select(SHORTS, bits, constant(SHORTS, 16), "zeroinitializer")
        made.append(f.binary("or", SHORTS, part, added))
    return made[0], made[1]


def _q4_0(f: Function, head: Head, _: int) -> Group:
    if "scale" in head.fields:
        return Group(_nibbles(f, head.at, 2), head.fields["scale"])
    d = _f16(f, head.at, 0)
    return Group(_nibbles(f, head.at, 2), d, _scaled(f, d, -8.0))


def _q4_1(f: Function, head: Head, _: int) -> Group:
    if "scale" in head.fields:
        return Group(_nibbles(f, head.at, 4), head.fields["scale"])
    return Group(_nibbles(f, head.at, 4), _f16(f, head.at, 0), _f16(f, head.at, 2))


def _q5_0(f: Function, head: Head, _: int) -> Group:
    quants = _fifth_bits(f, _nibbles(f, head.at, 6), head.at, 2)
    if "scale" in head.fields:
        return Group(quants, head.fields["scale"])
    d = _f16(f, head.at, 0)
    return Group(quants, d, _scaled(f, d, -16.0))


def _q5_1(f: Function, head: Head, _: int) -> Group:
    quants = _fifth_bits(f, _nibbles(f, head.at, 8), head.at, 4)
    if "scale" in head.fields:
        return Group(quants, head.fields["scale"])
    return Group(quants, _f16(f, head.at, 0), _f16(f, head.at, 2))


def _q8_0(f: Function, head: Head, _: int) -> Group:
    quants = _wide(f, head.at, 2, "sext"), _wide(f, head.at, 18, "sext")
    return Group(quants, head.fields["scale"] if "scale" in head.fields else _f16(f, head.at, 0))


# ----------------------------------------------------------------------------------------------- blocks of 256 elements


def _lane(f: Function, vector: str, lane: int) -> str:
    """One lane of eight floats in every lane."""
    return f.shuffle(FLOATS, vector, "poison", [lane] * 8)


def _six_bits(f: Function, at: str) -> Head:
    """Eight scales and eight least values of a Q4_K or Q5_K block, as floats."""
    part = "<4 x i8>"
    a, b, c = (f.load(part, f.address("i8", at, 4 + 4 * i), 1) for i in range(3))

    def low(x: str) -> str:
        return f.binary("and", part, x, constant(part, 63))

    def top(x: str, nibble: str) -> str:
        upper = f.binary("and", part, f.binary("lshr", part, x, constant(part, 2)), constant(part, 48))
        return f.binary("or", part, nibble, upper)

    def floats(first: str, second: str, factor: str) -> str:
        both = f.shuffle(part, first, second, range(8))
        wide = f.convert("sitofp", WORDS, f.convert("zext", "<8 x i8>", both, WORDS), FLOATS)
        return f.binary("fmul", FLOATS, wide, factor)

    scales = floats(low(a), top(a, f.binary("and", part, c, constant(part, 15))), _f16(f, at, 0))
    least = floats(low(b), top(b, f.binary("lshr", part, c, constant(part, 4))), _scaled(f, _f16(f, at, 2), -1.0))
    return Head(at, {"scales": scales, "least": least})


def _fold_eight(f: Function, head: Head, x: Scales, least: str) -> str:
    head.fields["scales"] = f.binary("fmul", FLOATS, head.fields["scales"], x.scales)
    return f.fma(FLOATS, head.fields.pop("least"), x.sums, least)


def _four_bits(f: Function, head: Head, j: int, offset: int) -> Halves:
    """Sub-block j: the low or high halves of 32 bytes."""
    packed = [_wide(f, head.at, offset + 32 * (j // 2) + 16 * i) for i in range(2)]
    first, second = (_right(f, p, 4) if j % 2 else _and(f, p, 15) for p in packed)
    return first, second


def _least_lane(f: Function, head: Head, j: int) -> str:
    return _lane(f, head.fields["least"], j) if "least" in head.fields else ""


def _q4k(f: Function, head: Head, j: int) -> Group:
    return Group(_four_bits(f, head, j, 16), _lane(f, head.fields["scales"], j), _least_lane(f, head, j))


def _q5k(f: Function, head: Head, j: int) -> Group:
    made = []
    for i, part in enumerate(_four_bits(f, head, j, 48)):
        high = _wide(f, head.at, 16 + 16 * i)
        moved = _right(f, high, j - 4) if j >= 4 else f.binary("shl", SHORTS, high, constant(SHORTS, 4 - j))
        made.append(f.binary("or", SHORTS, part, _and(f, moved, 16)))
    return Group((made[0], made[1]), _lane(f, head.fields["scales"], j), _least_lane(f, head, j))


def _q6_head(f: Function, at: str) -> Head:
    d = _f16(f, at, 208)
    fields = {}
    for i in range(2):
        raw = f.load("<8 x i8>", f.address("i8", at, 192 + 8 * i), 1)
        wide = f.convert("sitofp", WORDS, f.convert("sext", "<8 x i8>", raw, WORDS), FLOATS)
        fields[f"scales{i}"] = f.binary("fmul", FLOATS, wide, d)
    return Head(at, fields)


def _fold_sixteen(f: Function, head: Head, x: Scales, least: str) -> str:
    for i in range(2):
        twice = f.shuffle(FLOATS, x.scales, "poison", [4 * i + j // 2 for j in range(8)])
        head.fields[f"scales{i}"] = f.binary("fmul", FLOATS, head.fields[f"scales{i}"], twice)
    return least


def _q6k(f: Function, head: Head, j: int) -> Group:
    """Group j = 4 · half + quarter: halves of 128 elements, quarters of 32."""
    half, quarter = divmod(j, 4)
    made = []
    for i in range(2):
        packed = _wide(f, head.at, 64 * half + 32 * (quarter % 2) + 16 * i)
        low = _right(f, packed, 4) if quarter >= 2 else _and(f, packed, 15)
        pair = _and(f, _wide(f, head.at, 128 + 32 * half + 16 * i), 3 << (2 * quarter))
        shift = 4 - 2 * quarter
        if shift > 0:
            pair = f.binary("shl", SHORTS, pair, constant(SHORTS, shift))
        pair = _right(f, pair, -shift) if shift < 0 else pair
        made.append(f.binary("sub", SHORTS, f.binary("or", SHORTS, low, pair), constant(SHORTS, 32)))
    scales = head.fields[f"scales{half}"]
    first, second = _lane(f, scales, 2 * quarter), _lane(f, scales, 2 * quarter + 1)
    return Group((made[0], made[1]), first, second_scale=second)


FORMATS: Final = {
    "q4_0": Format(32, 18, _plain_head, _q4_0, _fold_single, least_factor=-8.0),
    "q4_1": Format(32, 20, _plain_head, _q4_1, _fold_pair),
    "q5_0": Format(32, 22, _plain_head, _q5_0, _fold_single, least_factor=-16.0),
    "q5_1": Format(32, 24, _plain_head, _q5_1, _fold_pair),
    "q8_0": Format(32, 34, _plain_head, _q8_0, _fold_single, has_least=False),
    "q4k": Format(256, 144, _six_bits, _q4k, _fold_eight),
    "q5k": Format(256, 176, _six_bits, _q5k, _fold_eight),
    "q6k": Format(256, 210, _q6_head, _q6k, _fold_sixteen, has_least=False),
}
