"""GGUF blocks in registers: 32 elements as two vectors of 16-bit integers, with their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, constant, vector_constant

FLOATS, WORDS, SHORTS, BYTES = "<8 x float>", "<8 x i32>", "<16 x i16>", "<16 x i8>"
Halves = tuple[str, str]


@dataclass(frozen=True)
class QuantGroup:
    """32 elements, quants · scale + least. Scale and least are in every lane of a vector <8 x float>."""

    quants: Halves  # <16 x i16> each: the first 16 elements, and the others
    scale: str
    least: str = ""
    second_scale: str = ""  # of the second 16 elements, where they have their own
    second_least: str = ""


@dataclass
class BlockHead:
    """What the groups of one block share: its address, and fields that are decoded once."""

    at: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scales:
    """The scales and the sums of one row of x, for the groups of a block."""

    pair: str = ""  # <4 x float>, for one group: its scale and its sum in the first two lanes
    scales: str = ""  # <8 x float>, for eight groups
    sums: tuple[str, ...] = ()  # <8 x float>, of eight groups, or of their sixteen halves


@dataclass(frozen=True)
class Format:
    """A block format: its sizes, and how it is unpacked.

    For a single row of x, `fold` multiplies the scales of a block by those of x once, and adds the least values times
    the sums to a running vector; groups taken after it need neither.
    """

    elements: int
    bytes: int
    head: Callable[[IrFunction, str], BlockHead]
    group: Callable[[IrFunction, BlockHead, int], QuantGroup]
    fold: Callable[[IrFunction, BlockHead, Scales, str], str]
    has_least: bool = True
    least_factor: float = 1.0  # of what `fold` adds up for blocks of 32
    is_halved: bool = False  # 16 elements share a scale, not 32

    @property
    def groups(self) -> int:
        """Groups of 32 in a block."""
        return self.elements // 32

    @property
    def record(self) -> int:
        """Floats that x has beside the numbers of one block: a scale a group, sums of groups or their halves."""
        return self.groups * (3 if self.is_halved else 2)


def _f16(f: IrFunction, base: str, offset: int) -> str:
    """The f16 at a byte offset, as a float in every lane."""
    half = f.load("half", f.address("i8", base, offset), 1)
    return f.splat(FLOATS, f.convert("fpext", "half", half, "float"))


def _wide(f: IrFunction, base: str, offset: int, extend: str = "zext") -> str:
    """16 bytes as 16-bit numbers."""
    return f.convert(extend, BYTES, f.load(BYTES, f.address("i8", base, offset), 1), SHORTS)


def _and(f: IrFunction, x: str, mask: int) -> str:
    return f.binary("and", SHORTS, x, constant(SHORTS, mask))


def _right(f: IrFunction, x: str, count: int) -> str:
    return f.binary("lshr", SHORTS, x, constant(SHORTS, count)) if count else x


def _scaled(f: IrFunction, x: str, factor: float) -> str:
    return f.binary("fmul", FLOATS, x, constant(FLOATS, factor))


# ------------------------------------------------------------------------------------------------ blocks of 32 elements

PAIR: Final = "<4 x float>"


def _fold_pair(f: IrFunction, head: BlockHead, x: Scales, least: str) -> str:
    """d and m lie side by side and are read at once, with two fields behind them that nothing looks at."""
    raw = f.load("<4 x half>", head.at, 1)
    both = f.binary("fmul", PAIR, f.convert("fpext", "<4 x half>", raw, PAIR), x.pair)
    head.fields["scale"] = f.shuffle(PAIR, both, "poison", [0] * 8)
    return f.binary("fadd", PAIR, least, both)


def _fold_single(f: IrFunction, head: BlockHead, x: Scales, least: str) -> str:
    """Only d is stored; what is added to every element is a multiple of it."""
    half = f.load("half", head.at, 1)
    both = f.binary("fmul", PAIR, f.splat(PAIR, f.convert("fpext", "half", half, "float")), x.pair)
    head.fields["scale"] = f.shuffle(PAIR, both, "poison", [0] * 8)
    return f.binary("fadd", PAIR, least, both)


def folded_least(f: IrFunction, form: Format, least: str) -> str:
    """What `fold` added up, as the number that belongs into the result."""
    if form.elements == 32:
        total = f.extract(PAIR, least, 1)
        return f.binary("fmul", "float", total, constant("float", form.least_factor))
    return f.fold_lanes(FLOATS, least, lambda kind, a, b: f.binary("fadd", kind, a, b))


def _plain_head(f: IrFunction, at: str) -> BlockHead:
    return BlockHead(at)


def _nibbles(f: IrFunction, base: str, offset: int) -> Halves:
    """Low halves of 16 bytes, and high halves."""
    packed = _wide(f, base, offset)
    return _and(f, packed, 15), _right(f, packed, 4)


def _fifth_bits(f: IrFunction, quants: Halves, base: str, offset: int) -> Halves:
    """Quants with their fifth bits, which lie together in 4 bytes."""
    made = []
    for i, part in enumerate(quants):
        word = f.load("i16", f.address("i8", base, offset + 2 * i), 1)
        bits = f.convert("bitcast", "i16", word, "<16 x i1>")
        added = f.select(SHORTS, bits, constant(SHORTS, 16), "zeroinitializer")
        made.append(f.binary("or", SHORTS, part, added))
    return made[0], made[1]


def _q4_0(f: IrFunction, head: BlockHead, _: int) -> QuantGroup:
    if "scale" in head.fields:
        return QuantGroup(_nibbles(f, head.at, 2), head.fields["scale"])
    d = _f16(f, head.at, 0)
    return QuantGroup(_nibbles(f, head.at, 2), d, _scaled(f, d, -8.0))


def _q4_1(f: IrFunction, head: BlockHead, _: int) -> QuantGroup:
    if "scale" in head.fields:
        return QuantGroup(_nibbles(f, head.at, 4), head.fields["scale"])
    return QuantGroup(_nibbles(f, head.at, 4), _f16(f, head.at, 0), _f16(f, head.at, 2))


def _q5_0(f: IrFunction, head: BlockHead, _: int) -> QuantGroup:
    quants = _fifth_bits(f, _nibbles(f, head.at, 6), head.at, 2)
    if "scale" in head.fields:
        return QuantGroup(quants, head.fields["scale"])
    d = _f16(f, head.at, 0)
    return QuantGroup(quants, d, _scaled(f, d, -16.0))


def _q5_1(f: IrFunction, head: BlockHead, _: int) -> QuantGroup:
    quants = _fifth_bits(f, _nibbles(f, head.at, 8), head.at, 4)
    if "scale" in head.fields:
        return QuantGroup(quants, head.fields["scale"])
    return QuantGroup(quants, _f16(f, head.at, 0), _f16(f, head.at, 2))


def _q8_0(f: IrFunction, head: BlockHead, _: int) -> QuantGroup:
    quants = _wide(f, head.at, 2, "sext"), _wide(f, head.at, 18, "sext")
    return QuantGroup(quants, head.fields["scale"] if "scale" in head.fields else _f16(f, head.at, 0))


# ----------------------------------------------------------------------------------------------- blocks of 256 elements


def _lane(f: IrFunction, vector: str, lane: int) -> str:
    """One lane of eight floats in every lane."""
    return f.shuffle(FLOATS, vector, "poison", [lane] * 8)


def _six_bits(f: IrFunction, at: str) -> BlockHead:
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
    return BlockHead(at, {"scales": scales, "least": least})


def _fold_eight(f: IrFunction, head: BlockHead, x: Scales, least: str) -> str:
    head.fields["scales"] = f.binary("fmul", FLOATS, head.fields["scales"], x.scales)
    return f.fma(FLOATS, head.fields.pop("least"), x.sums[0], least)


def _four_bits(f: IrFunction, head: BlockHead, j: int, offset: int) -> Halves:
    """Sub-block j: the low or high halves of 32 bytes."""
    packed = [_wide(f, head.at, offset + 32 * (j // 2) + 16 * i) for i in range(2)]
    first, second = (_right(f, p, 4) if j % 2 else _and(f, p, 15) for p in packed)
    return first, second


def _least_lane(f: IrFunction, head: BlockHead, j: int) -> str:
    return _lane(f, head.fields["least"], j) if "least" in head.fields else ""


def _q4k(f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
    return QuantGroup(_four_bits(f, head, j, 16), _lane(f, head.fields["scales"], j), _least_lane(f, head, j))


def _q5k(f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
    made = []
    for i, part in enumerate(_four_bits(f, head, j, 48)):
        high = _wide(f, head.at, 16 + 16 * i)
        moved = _right(f, high, j - 4) if j >= 4 else f.binary("shl", SHORTS, high, constant(SHORTS, 4 - j))
        made.append(f.binary("or", SHORTS, part, _and(f, moved, 16)))
    return QuantGroup((made[0], made[1]), _lane(f, head.fields["scales"], j), _least_lane(f, head, j))


def _q6_head(f: IrFunction, at: str) -> BlockHead:
    d = _f16(f, at, 208)
    fields = {}
    for i in range(2):
        raw = f.load("<8 x i8>", f.address("i8", at, 192 + 8 * i), 1)
        wide = f.convert("sitofp", WORDS, f.convert("sext", "<8 x i8>", raw, WORDS), FLOATS)
        fields[f"scales{i}"] = f.binary("fmul", FLOATS, wide, d)
    return BlockHead(at, fields)


def _fold_sixteen(f: IrFunction, head: BlockHead, x: Scales, least: str) -> str:
    for i in range(2):
        twice = f.shuffle(FLOATS, x.scales, "poison", [4 * i + j // 2 for j in range(8)])
        head.fields[f"scales{i}"] = f.binary("fmul", FLOATS, head.fields[f"scales{i}"], twice)
        if f"least{i}" in head.fields:
            least = f.fma(FLOATS, head.fields.pop(f"least{i}"), x.sums[i], least)
    return least


def _halves(f: IrFunction, head: BlockHead, j: int, quants: Halves) -> QuantGroup:
    """Group j of a block in which 16 elements share a scale."""
    which, at = divmod(2 * j, 8)
    scales, least = head.fields[f"scales{which}"], head.fields.get(f"least{which}")
    first, second = _lane(f, scales, at), _lane(f, scales, at + 1)
    if least is None:
        return QuantGroup(quants, first, second_scale=second)
    return QuantGroup(quants, first, _lane(f, least, at), second, _lane(f, least, at + 1))


def _sixteen_floats(f: IrFunction, numbers: str, factor: str, extend: str) -> Halves:
    """Sixteen bytes as floats, times a factor."""
    made = []
    for i in range(2):
        part = f.shuffle(BYTES, numbers, "poison", range(8 * i, 8 * i + 8))
        wide = f.convert("sitofp", WORDS, f.convert(extend, "<8 x i8>", part, WORDS), FLOATS)
        made.append(f.binary("fmul", FLOATS, wide, factor))
    return made[0], made[1]


def _q6k(f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
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
    return _halves(f, head, j, (made[0], made[1]))


def _q2_head(f: IrFunction, at: str) -> BlockHead:
    raw = f.load(BYTES, at, 1)
    low = f.binary("and", BYTES, raw, constant(BYTES, 15))
    high = f.binary("lshr", BYTES, raw, constant(BYTES, 4))
    scales = _sixteen_floats(f, low, _f16(f, at, 80), "zext")
    least = _sixteen_floats(f, high, _scaled(f, _f16(f, at, 82), -1.0), "zext")
    return BlockHead(at, {"scales0": scales[0], "scales1": scales[1], "least0": least[0], "least1": least[1]})


def _two_bits(f: IrFunction, head: BlockHead, j: int, offset: int) -> Halves:
    """Group j = 4 · half + quarter: two bits of each of the half's 32 bytes."""
    half, quarter = divmod(j, 4)
    first, second = (
        _and(f, _right(f, _wide(f, head.at, offset + 32 * half + 16 * i), 2 * quarter), 3) for i in range(2)
    )
    return first, second


def _q2k(f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
    return _halves(f, head, j, _two_bits(f, head, j, 16))


def q3_scales(f: IrFunction, at: str) -> str:
    """Sixteen bytes from scales of 6 bits: four of number i in byte i % 8, the upper two in byte 8 + i % 4."""
    low = f.load("<8 x i8>", f.address("i8", at, 96), 1)
    top = f.load("<4 x i8>", f.address("i8", at, 104), 1)
    fours = f.shuffle("<8 x i8>", low, "poison", [i % 8 for i in range(16)])
    shift = vector_constant("i8", [4 * (i // 8) for i in range(16)])
    fours = f.binary("and", BYTES, f.binary("lshr", BYTES, fours, shift), constant(BYTES, 15))
    twos = f.shuffle("<4 x i8>", top, "poison", [i % 4 for i in range(16)])
    shift = vector_constant("i8", [2 * (i // 4) for i in range(16)])
    twos = f.binary("and", BYTES, f.binary("lshr", BYTES, twos, shift), constant(BYTES, 3))
    both = f.binary("or", BYTES, fours, f.binary("shl", BYTES, twos, constant(BYTES, 4)))
    return f.binary("sub", BYTES, both, constant(BYTES, 32))


def _q3_head(f: IrFunction, at: str) -> BlockHead:
    scales = _sixteen_floats(f, q3_scales(f, at), _f16(f, at, 108), "sext")
    return BlockHead(at, {"scales0": scales[0], "scales1": scales[1]})


def _q3k(f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
    made = []
    for i, part in enumerate(_two_bits(f, head, j, 32)):
        bit = _and(f, _right(f, _wide(f, head.at, 16 * i), j), 1)
        both = f.binary("or", SHORTS, part, f.binary("shl", SHORTS, bit, constant(SHORTS, 2)))
        made.append(f.binary("sub", SHORTS, both, constant(SHORTS, 4)))
    return _halves(f, head, j, (made[0], made[1]))


def _q8k_head(f: IrFunction, at: str) -> BlockHead:
    return BlockHead(at, {"scales": f.splat(FLOATS, f.load("float", at, 1))})


def _fold_scales(f: IrFunction, head: BlockHead, x: Scales, least: str) -> str:
    head.fields["scales"] = f.binary("fmul", FLOATS, head.fields["scales"], x.scales)
    return least


def _q8k(f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
    first, second = (_wide(f, head.at, 4 + 32 * j + 16 * i, "sext") for i in range(2))
    return QuantGroup((first, second), _lane(f, head.fields["scales"], j))


FORMATS: Final = {
    "q4_0": Format(32, 18, _plain_head, _q4_0, _fold_single, least_factor=-8.0),
    "q4_1": Format(32, 20, _plain_head, _q4_1, _fold_pair),
    "q5_0": Format(32, 22, _plain_head, _q5_0, _fold_single, least_factor=-16.0),
    "q5_1": Format(32, 24, _plain_head, _q5_1, _fold_pair),
    "q8_0": Format(32, 34, _plain_head, _q8_0, _fold_single, has_least=False),
    "q4k": Format(256, 144, _six_bits, _q4k, _fold_eight),
    "q5k": Format(256, 176, _six_bits, _q5k, _fold_eight),
    "q6k": Format(256, 210, _q6_head, _q6k, _fold_sixteen, has_least=False, is_halved=True),
    "q2k": Format(256, 84, _q2_head, _q2k, _fold_sixteen, is_halved=True),
    "q3k": Format(256, 110, _q3_head, _q3k, _fold_sixteen, has_least=False, is_halved=True),
    "q8k": Format(256, 292, _q8k_head, _q8k, _fold_scales, has_least=False),
}
