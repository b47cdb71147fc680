"""GGUF blocks in registers: 32 elements as two vectors of 16-bit integers, with their scales.

Where bits lie is read from the description of a format in strata.ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, constant, element_of, vector, vector_constant
from strata.ops import gguf_blocks, gguf_fields

FLOATS, WORDS, SHORTS, BYTES = "<8 x float>", "<8 x i32>", "<16 x i16>", "<16 x i8>"
PAIR: Final = "<4 x float>"


@dataclass(frozen=True)
class QuantGroup:
    """32 elements, quants · scale + least. Scale and least are in every lane of a vector <8 x float>."""

    quants: Sequence[str]  # <16 x i16> each: the first 16 elements, and the others
    scale: str
    least: str = ""
    second_scale: str = ""  # of the second 16 elements, where they have their own
    second_least: str = ""


@dataclass
class BlockHead:
    """What the groups of one block share: its address, its scales and least values in eights, bytes that were read."""

    at: str
    scales: list[str] = field(default_factory=list)
    least: list[str] = field(default_factory=list)
    loads: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scales:
    """The scales and the sums of one row of x, for the groups of a block."""

    pair: str = ""  # <4 x float>, for one group: its scale and its sum in the first two lanes
    scales: str = ""  # <8 x float>, for eight groups
    sums: tuple[str, ...] = ()  # <8 x float>, of eight groups, or of their sixteen halves


def load_at(f: IrFunction, kind: str, base: str, offset: int) -> str:
    return f.load(kind, f.address("i8", base, offset), 1)


def load_factor(f: IrFunction, base: str, factor: gguf_fields.Factor) -> str:
    """A float of a block."""
    if factor.dtype == "one":
        return constant("float", factor.times)
    if factor.nibbles:
        whole = ""
        for at, byte in enumerate(factor.nibbles):
            upper = f.convert("zext", "i8", f.binary("lshr", "i8", load_at(f, "i8", base, byte), "4"), "i16")
            moved = f.binary("shl", "i16", upper, str(4 * at)) if at else upper
            whole = f.binary("or", "i16", whole, moved) if whole else moved
        found = f.convert("fpext", "half", f.convert("bitcast", "i16", whole, "half"), "float")
    elif factor.dtype == "e8m0":
        found = half_power(f, "i32", f.convert("zext", "i8", load_at(f, "i8", base, factor.byte), "i32"))
    elif factor.dtype == "bf16":
        wide = f.convert("zext", "i16", load_at(f, "i16", base, factor.byte), "i32")
        found = f.convert("bitcast", "i32", f.binary("shl", "i32", wide, "16"), "float")
    elif factor.dtype == "<f4":
        found = load_at(f, "float", base, factor.byte)
    else:
        found = f.convert("fpext", "half", load_at(f, "half", base, factor.byte), "float")
    return f.binary("fmul", "float", found, constant("float", factor.times)) if factor.times != 1 else found


def half_power(f: IrFunction, kind: str, code: str) -> str:
    """Half of the power of two that a byte stands for, from i32, or a vector of them."""
    floats = kind.replace("i32", "float")
    small = f.binary("shl", kind, constant(kind, 0x00200000), code)
    large = f.binary("shl", kind, f.binary("sub", kind, code, constant(kind, 1)), constant(kind, 23))
    is_small = f.compare("ult", kind, code, constant(kind, 2))
    return f.convert("bitcast", kind, f.select(kind, is_small, small, large), floats)


def packed_bytes(f: IrFunction, at: str, places: Sequence[int], limit: int) -> str:
    """Bytes of a block of `limit` bytes side by side, read at once."""
    size = 1 << max(max(places) - min(places), 3).bit_length()
    start = max(0, min(*places, limit - size))
    assert size <= limit
    kind, picks = f"<{size} x i8>", [place - start for place in places]
    found = load_at(f, kind, at, start)
    return found if picks == list(range(size)) else f.shuffle(kind, found, "poison", picks)


def place_bits(f: IrFunction, kind: str, x: str, bits: Sequence[int], width: int, to: int) -> str:
    """Of each lane, a byte without sign, `width` bits moved to bit `to`, the others 0; the first of them is given."""

    def move(op: str, x: str, counts: Sequence[int]) -> str:
        if not any(counts):
            return x
        same = len(set(counts)) == 1
        return f.binary(op, kind, x, constant(kind, counts[0]) if same else vector_constant(element_of(kind), counts))

    after = to if min(bits) < to < max(bits) else 0  # moved at once, unless some go up and some go down
    down = [bit - to + after for bit in bits]
    x = move("lshr", x, down) if max(down) > 0 else move("shl", x, [-count for count in down])
    if width < 8 and (to or {bit + width for bit in bits} != {8}):
        x = f.binary("and", kind, x, constant(kind, ((1 << width) - 1) << to - after))
    return move("shl", x, [after] * len(bits))


class Format:
    """How a block format is unpacked.

    For a single row of x, `fold` multiplies the scales of a block by those of x once, and adds the least values times
    the sums to a running vector; groups taken after it need neither.
    """

    def __init__(self, block: gguf_blocks.BlockFormat) -> None:
        self.block, self.elements, self.bytes = block, block.elements, block.bytes
        self.groups = self.elements // 32  # of 32 elements
        self.is_halved = block.group == 16  # 16 elements share a scale, not 32
        self.is_single = self.groups == 1
        # what is added to the numbers of small blocks becomes a part of what is added to elements
        add = block.q.add if isinstance(block.q, gguf_fields.BitField) else 0
        self.least_factor = float(add) if self.is_single and not block.m else 1.0
        self.has_least = block.m is not None or (self.is_single and add != 0)

    @property
    def numbers(self) -> gguf_fields.BitField:
        assert isinstance(self.block.q, gguf_fields.BitField)
        return self.block.q

    @property
    def record(self) -> int:
        """Floats that x has beside the numbers of one block: a scale a group, sums of groups or their halves."""
        return self.groups * (3 if self.is_halved else 2)

    @cached_property
    def is_readable(self) -> bool:
        """One group with d (followed by m), or eight, with a scale for each 16 or 32; numbers in bytes or in bits."""
        block = self.block
        if not isinstance(block.q, gguf_fields.BitField) or not block.q.is_whole or len(block.q.values) not in (0, 16):
            return False
        if block.d.times != 1 or block.d.nibbles or (block.scales and (block.scales.times != 1 or block.scales.float8)):
            return False
        if self.elements not in (32, 256) or not all(map(self._is_run, range(0, self.elements, 16))):
            return False
        if self.is_single:
            pair = block.m is None or block.m.byte == block.d.byte + 2
            return block.d.dtype in ("<f2", "e8m0") and pair and block.scales is None
        return block.group in (16, 32, 256) and (block.m is None) == (block.minima is None)

    def _is_run(self, start: int) -> bool:
        for part in self.numbers.bits:
            byte, bit = part.places(range(start, start + 16))
            whole = [8 * a + b for a, b in zip(byte, bit, strict=True)]
            step = 8 if len(set(bit)) == 1 else 1
            if whole != list(range(whole[0], whole[0] + 16 * step, step)) or (step == 1 and (part.width > 1 or bit[0])):
                return False
        return True

    def head(self, f: IrFunction, at: str) -> BlockHead:
        block, head = self.block, BlockHead(at)
        if not self.is_single:
            d = f.splat(FLOATS, load_factor(f, at, block.d))
            head.scales = self._eights(f, at, block.scales, d) if block.scales else [d]
            if block.m and block.minima:
                m = f.binary("fmul", FLOATS, f.splat(FLOATS, load_factor(f, at, block.m)), constant(FLOATS, -1.0))
                head.least = self._eights(f, at, block.minima, m)
        return head

    def fold(self, f: IrFunction, head: BlockHead, x: Scales, least: str) -> str:
        if self.is_single:
            if self.block.m:  # d and m are read at once, with two fields after them that nothing looks at
                raw = load_at(f, "<4 x half>", head.at, self.block.d.byte)
                found = f.convert("fpext", "<4 x half>", raw, PAIR)
            else:
                found = f.splat(PAIR, load_factor(f, head.at, self.block.d))
            both = f.binary("fmul", PAIR, found, x.pair)
            head.scales = [f.shuffle(PAIR, both, "poison", [0] * 8)]
            return f.binary("fadd", PAIR, least, both)
        scales, head.scales = head.scales, []
        for i, scale in enumerate(scales):
            lanes = [4 * i + j // 2 for j in range(8)]
            spread = f.shuffle(FLOATS, x.scales, "poison", lanes) if self.is_halved else x.scales
            head.scales.append(f.binary("fmul", FLOATS, scale, spread))
            if head.least:
                least = f.fma(FLOATS, head.least[i], x.sums[i], least)
        head.least = []
        return least

    def folded_least(self, f: IrFunction, least: str) -> str:
        """What `fold` added up, as the number that belongs into the result."""
        if self.is_single:
            return f.binary("fmul", "float", f.extract(PAIR, least, 1), constant("float", self.least_factor))
        return f.fold_lanes(FLOATS, least, lambda kind, a, b: f.binary("fadd", kind, a, b))

    def group(self, f: IrFunction, head: BlockHead, j: int) -> QuantGroup:
        quants = [self._sixteen(f, head, 32 * j + 16 * i) for i in range(2)]
        if self.is_single:
            if head.scales:
                return QuantGroup(quants, head.scales[0])
            d = f.splat(FLOATS, load_factor(f, head.at, self.block.d))
            if self.block.m:
                return QuantGroup(quants, d, f.splat(FLOATS, load_factor(f, head.at, self.block.m)))
            least = f.binary("fmul", FLOATS, d, constant(FLOATS, self.least_factor)) if self.has_least else ""
            return QuantGroup(quants, d, least)
        parts = 2 if self.is_halved else 1
        which, lane = divmod(parts * j, 8)
        scale, *second = (f.shuffle(FLOATS, head.scales[which], "poison", [lane + i] * 8) for i in range(parts))
        if not head.least:
            return QuantGroup(quants, scale, second_scale="".join(second))
        least, *other = (f.shuffle(FLOATS, head.least[which], "poison", [lane + i] * 8) for i in range(parts))
        return QuantGroup(quants, scale, least, "".join(second), "".join(other))

    def _sixteen(self, f: IrFunction, head: BlockHead, start: int) -> str:
        """Numbers from `start` on, <16 x i16>; of small blocks without what is added to them."""
        q, found, to = self.numbers, "", 0
        for part in q.bits:
            byte, bit = part.places(range(start, start + 16))
            if len(set(bit)) == 1:
                if byte[0] not in head.loads:
                    raw = load_at(f, BYTES, head.at, byte[0])
                    head.loads[byte[0]] = f.convert("sext" if q.is_signed else "zext", BYTES, raw, SHORTS)
                bits = place_bits(f, SHORTS, head.loads[byte[0]], bit, part.width, to)
            else:
                mask = f.convert("bitcast", "i16", load_at(f, "i16", head.at, byte[0]), "<16 x i1>")
                bits = f.select(SHORTS, mask, constant(SHORTS, 1 << to), "zeroinitializer")
            found, to = f.binary("or", SHORTS, found, bits) if found else bits, to + part.width
        if q.values:
            table = vector_constant("i8", [int(value) for value in q.values])
            small = f.convert("trunc", SHORTS, found, BYTES)
            return f.convert(
                "sext", BYTES, f.call(BYTES, "llvm.x86.ssse3.pshuf.b.128", (BYTES, table), (BYTES, small)), SHORTS
            )
        return f.binary("sub", SHORTS, found, constant(SHORTS, -q.add)) if q.add and not self.is_single else found

    def _eights(self, f: IrFunction, at: str, numbers: gguf_fields.BitField, factor: str) -> list[str]:
        """The numbers of a field times a factor, eight to a vector."""
        found = [self.floats(f, at, numbers, range(i, i + 8)) for i in range(0, numbers.count, 8)]
        return [f.binary("fmul", FLOATS, x, factor) for x in found]

    def floats(self, f: IrFunction, at: str, numbers: gguf_fields.BitField, which: range) -> str:
        """Numbers of a field as floats."""
        kind, found, to = vector("i32", len(which)), "", 0
        for part in numbers.bits:
            byte, bit = part.places(which)
            extend = "sext" if numbers.is_signed else "zext"
            wide = f.convert(extend, vector("i8", len(which)), packed_bytes(f, at, byte, self.bytes), kind)
            bits = place_bits(f, kind, wide, bit, part.width, to)
            found, to = f.binary("or", kind, found, bits) if found else bits, to + part.width
        if numbers.add:
            found = f.binary("sub", kind, found, constant(kind, -numbers.add))
        return f.convert("sitofp", kind, found, vector("float", len(which)))


@cache
def _made(block: gguf_blocks.BlockFormat) -> Format:
    return Format(block)


def format_of(kind: str) -> Format:
    return _made(gguf_blocks.block_format(kind))
