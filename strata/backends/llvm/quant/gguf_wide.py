"""Matmul of a few rows with GGUF weights on AVX-512: 64 8-bit products to an instruction.

The numbers of a block stay bytes without sign, as they are stored; a number of x is 256 · high + low with two signed
bytes, so that a sum of products is 256 · Σ q·high + Σ q·low. A step is four or eight blocks of 32 elements, or one of
256. It is unpacked into vectors of 64 bytes; x is stored in the order in which they come out:

    x of a step   for each vector: its 64 high bytes, its 64 low bytes
    beside it     a scale for each 32, then their sums, or the sums of each 16

Behind the last whole block, x is zero. A step that is not whole is copied first, so that nothing behind is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, Value, constant, vector_constant
from strata.backends.llvm.ir.native import arguments, fill_zero
from strata.backends.llvm.quant.gguf_blocks import FORMATS, Format, q3_scales
from strata.core import Target

LEVELS: Final = 32639  # 256 · 127 + 127
STREAMS: Final = 4  # rows far apart: memory is read as four streams, which is twice as fast as one
AHEAD: Final = 256  # bytes between what is read and what is fetched
BYTES, FLOATS, WORDS, LONGS = "<64 x i8>", "<16 x float>", "<16 x i32>", "<8 x i64>"
EIGHT, SIXTEEN = "<8 x float>", "<16 x i8>"
ZERO = "zeroinitializer"


@dataclass(frozen=True)
class WideStep:
    """How one step of a format is unpacked.

    `runs` names the 8 elements in each eighth of each vector, by their number among the step's eights. `numbers` gives
    the vectors; `scales` the scales of their lanes, times those of x, and the sums of a row with what least values add.
    """

    blocks: int
    runs: tuple[tuple[int, ...], ...]
    numbers: Callable[[IrFunction, str], list[str]]
    sides: Callable[[IrFunction, str], list[str]]  # scales and sums of x, once for all rows of weights
    scales: Callable[[IrFunction, str, list[str], str], tuple[list[str], str]]
    shared: int = 1  # vectors in a row with the same scales
    at_once: int = STREAMS  # rows that are unpacked before products: fewer where the parts of all fill the registers

    @property
    def elements(self) -> int:
        return 64 * len(self.runs)

    @property
    def groups(self) -> int:
        """Groups of 32."""
        return 2 * len(self.runs)

    def places(self) -> list[int]:
        """Where each eight of a step is stored: bytes from the start of its x, of the high bytes."""
        found = {run: 128 * v + 8 * i for v, runs in enumerate(self.runs) for i, run in enumerate(runs)}
        return [found[run] for run in range(self.elements // 8)]


def has_wide(target: Target) -> bool:
    return all(target.has(x) for x in ("avx512f", "avx512vnni", "avx512vbmi", "gfni")) and target.vector_bytes == 64


def each_row(f: IrFunction, n: Value, take: Callable[[list[Value]], None]) -> None:
    """Points %begin to %end of n rows: a point is a row of each quarter; behind them, rows that are left over.

    Rows far apart are streams, which memory gives twice as fast as one; they go on from chunk to chunk.
    """
    part = f.op(f"udiv i64 {n}, {STREAMS}")
    f.loop("%begin", f.smin("%end", part), 1, [], lambda i, _: take([f.add(i, f.mul(part, j)) for j in range(STREAMS)]))
    left = f.mul(part, STREAMS - 1)
    f.loop(f.smax("%begin", part), "%end", 1, [], lambda i, _: take([f.add(left, i)]))


def row_points(n: int) -> int:
    """Points of `each_row`."""
    return n // STREAMS + n % STREAMS


class WideRows:
    """Emits `rows`: tiles of rows of weights times each row of x."""

    def __init__(self, f: IrFunction, kind: str) -> None:
        self.f, self.form, self.step = f, FORMATS[kind], STEPS[kind]
        self.codes, self.quants, self.x_sides, self.out, self.rows, self.n, self.k = arguments(f, "ppppiii")
        self.blocks = f.op(f"udiv i64 {self.k}, {self.form.elements}")
        self.row_bytes = f.mul(self.blocks, self.form.bytes)
        self.whole = f.op(f"udiv i64 {self.blocks}, {self.step.blocks}")
        self.steps = f.op(f"udiv i64 {f.add(self.blocks, self.step.blocks - 1)}, {self.step.blocks}")
        self.step_bytes = self.step.blocks * self.form.bytes
        self.room = -(-self.step_bytes // 64) * 64
        self.copies = f.alloca("i8", STREAMS * self.room) if self.step.blocks > 1 else ""

    def emit(self) -> None:
        f = self.f
        if self.copies:
            fill_zero(f, self.copies, STREAMS * self.room)
        f.loop(
            0,
            self.rows,
            1,
            [],
            lambda t, _: each_row(f, self.n, lambda rows: self.row(rows, t)),
        )
        f.ret()

    def row(self, rows: list[Value], token: Value) -> None:
        """Some rows of weights times one row of x."""
        f, step = self.f, self.step
        weights = [f.address("i8", self.codes, f.mul(row, self.row_bytes)) for row in rows]
        first = f.mul(token, self.steps)

        def turn(s: str, so_far: list[str], places: list[str]) -> list[Value]:
            at = f.add(first, s)
            x = f.address("i8", self.quants, f.mul(at, 2 * step.elements))
            sides = step.sides(f, f.address("float", self.x_sides, f.mul(at, step.blocks * self.form.record)))
            return self.take(places, x, sides, so_far)

        def whole(s: str, so_far: list[str]) -> list[Value]:
            places = [f.address("i8", w, f.mul(s, self.step_bytes)) for w in weights]
            for place in places:
                for line in range(0, self.step_bytes, 64):
                    f.prefetch(f.address("i8", place, AHEAD + line))
            return turn(s, so_far, places)

        def rest(s: str, so_far: list[str]) -> list[Value]:
            size = f.mul(f.sub(self.blocks, f.mul(s, step.blocks)), self.form.bytes)
            places = [f.address("i8", self.copies, self.room * i) for i in range(len(rows))]
            for place, w in zip(places, weights, strict=True):
                self.copy(place, f.address("i8", w, f.mul(s, self.step_bytes)), size)
            return turn(s, so_far, places)

        found = f.loop(0, self.whole, 1, [(FLOATS, ZERO)] * len(rows), whole)
        if self.copies:
            found = f.loop(self.whole, self.steps, 1, [(FLOATS, x) for x in found], rest)
        for row, total in zip(rows, found, strict=True):
            value = f.fold_lanes(FLOATS, total, lambda t, a, b: f.binary("fadd", t, a, b))
            f.store("float", value, f.address("float", self.out, f.add(f.mul(token, self.n), row)), 4)

    def take(self, places: list[str], x: str, sides: list[str], so_far: list[str]) -> list[Value]:
        """One step of each row."""
        made: list[Value] = []
        for r in range(0, len(places), self.step.at_once):
            some = slice(r, r + self.step.at_once)
            made += self._take_some(places[some], x, sides, so_far[some])
        return made

    def _take_some(self, places: list[str], x: str, sides: list[str], so_far: list[str]) -> list[str]:
        f, step = self.f, self.step
        taken, acc = [], []
        for place, before in zip(places, so_far, strict=True):
            scales, after = step.scales(f, place, sides, before)
            acc.append(after)
            taken.append((step.numbers(f, place), scales))
        for j in range(0, len(step.runs), step.shared):
            together = range(j, j + step.shared)
            high, low = ([f.load(BYTES, f.address("i8", x, 128 * i + half), 64) for i in together] for half in (0, 64))
            for r, (numbers, scales) in enumerate(taken):
                given = [numbers[i] for i in together]
                total = f.binary("shl", WORDS, _dots(f, ZERO, given, high), constant(WORDS, 8))
                if step.shared > 2:  # two short chains rather than a long one
                    total = f.binary("add", WORDS, total, _dots(f, ZERO, given, low))
                else:
                    total = _dots(f, total, given, low)
                acc[r] = f.fma(FLOATS, f.convert("sitofp", WORDS, total, FLOATS), scales[j // step.shared], acc[r])
        return acc

    def copy(self, to: str, source: str, size: Value) -> None:
        """The bytes of a step that is not whole."""
        f = self.f
        for line in range(0, self.room, 64):
            index = vector_constant("i16", range(line, line + 64))
            limit = f.splat("<64 x i16>", f.op(f"trunc i64 {size} to i16"))
            mask = f.compare("slt", "<64 x i16>", index, limit)
            part = f.masked_load(BYTES, f.address("i8", source, line), 1, mask)
            f.store(BYTES, part, f.address("i8", to, line), 64)


def _with_least(f: IrFunction, acc: str, found: str, lanes: Sequence[int], factor: float = 1.0) -> str:
    """acc + factor times some lanes of what was found; the others are scales."""
    factors = vector_constant("float", [factor if lane in lanes else 0.0 for lane in range(16)])
    return f.fma(FLOATS, found, factors, acc)


def _dots(f: IrFunction, total: str, numbers: Sequence[str], x: Sequence[str]) -> str:
    """total + the sums of four products each of bytes without sign and bytes with one."""
    for a, b in zip(numbers, x, strict=True):
        total = f.call(WORDS, "llvm.x86.avx512.vpdpbusd.512", (WORDS, total), (BYTES, a), (BYTES, b))
    return total


def _at(f: IrFunction, kind: str, base: str, offset: int) -> str:
    return f.load(kind, f.address("i8", base, offset), 1)


def _and(f: IrFunction, x: str, mask: int) -> str:
    return f.binary("and", BYTES, x, constant(BYTES, mask))


def _right(f: IrFunction, x: str, count: int) -> str:
    return f.binary("lshr", BYTES, x, constant(BYTES, count)) if count else x


def _woven(f: IrFunction, a: str, b: str) -> tuple[str, str]:
    """Of each quarter of two vectors, the first eights side by side, and the second eights.

    Two vectors whose quarters have a scale each become two with the same scales, which are added up at once.
    """
    x, y = (f.convert("bitcast", BYTES, v, LONGS) for v in (a, b))
    pairs = ([i // 2 * 2 + odd + 8 * (i % 2) for i in range(8)] for odd in (0, 1))
    first, second = (f.convert("bitcast", LONGS, f.shuffle(LONGS, x, y, picks), BYTES) for picks in pairs)
    return first, second


def _twice(f: IrFunction, base: str, offset: int) -> str:
    """32 bytes in both halves of a vector."""
    return f.shuffle("<32 x i8>", _at(f, "<32 x i8>", base, offset), "poison", [i % 32 for i in range(64)])


def _bits(f: IrFunction, x: str, firsts: Sequence[int], count: int, to: int = 0) -> str:
    """Of each byte, `count` bits moved to bit `to`, the others 0; the first of them is given for equal parts of x.

    It is the product of a byte and a matrix of bits, one for each eight bytes, whose last row makes bit 0.
    """
    matrices = [
        [1 << (first + 7 - row - to) if 0 <= 7 - row - to < count else 0 for row in range(8)] for first in firsts
    ]
    matrix = vector_constant("i8", [b for m in matrices for _ in range(8 // len(firsts)) for b in m])
    return f.call(BYTES, "llvm.x86.vgf2p8affineqb.512", (BYTES, x), (BYTES, matrix), ("i8", "0"))


def _lanes(f: IrFunction, x: str, kind: str, lanes: Sequence[int]) -> str:
    """Lanes of a vector, each as often as there are places for it in sixteen."""
    count = 16 // len(lanes)
    return f.shuffle(kind, x, "poison", [lanes[i // count] for i in range(16)])


# ------------------------------------------------------------------------------------------------ blocks of 32 elements


def _pieces(f: IrFunction, at: str, size: int) -> tuple[str, str]:
    """The first and the last 64 of up to 128 bytes, which two vectors hold together."""
    return _at(f, BYTES, at, 0), _at(f, BYTES, at, size - 64)


def _gather(f: IrFunction, pieces: tuple[str, str], size: int, width: int, offsets: Sequence[int]) -> str:
    """Fields of `width` bytes at some offsets of a step, side by side."""
    kind = f"<{64 // width} x i{8 * width}>"
    a, b = (f.convert("bitcast", BYTES, p, kind) for p in pieces)
    assert all((offset - (size - 64)) % width == 0 or offset + width <= 64 for offset in offsets)
    picks = [o // width if o + width <= 64 else 64 // width + (o - (size - 64)) // width for o in offsets]
    return f.shuffle(kind, a, b if any(p >= 64 // width for p in picks) else "poison", picks)


def _packed(f: IrFunction, at: str, bytes_: int, offset: int) -> str:
    """The bytes of four blocks that hold two numbers of 4 bits each."""
    offsets = [bytes_ * (i // 16) + offset + i % 16 for i in range(64)]
    return _gather(f, _pieces(f, at, 4 * bytes_), 4 * bytes_, 1, offsets)


def _nibbles(f: IrFunction, packed: str) -> list[str]:
    return [_and(f, packed, 15), _bits(f, packed, [4], 4)]


def _eight_blocks(bytes_: int, offset: int) -> Callable[[IrFunction, str], list[str]]:
    """Eight blocks of 32 numbers of 4 bits: quarters of their bytes in four vectors."""

    def numbers(f: IrFunction, at: str) -> list[str]:
        a, b = (_packed(f, f.address("i8", at, 4 * bytes_ * i), bytes_, offset) for i in range(2))
        return [part for half in _woven(f, a, b) for part in _nibbles(f, half)]

    return numbers


def _with_fifth(bytes_: int, offset: int) -> Callable[[IrFunction, str], list[str]]:
    """Four blocks of 32 numbers of 4 bits and a fifth; fifth bits lie together in 4 bytes before the others."""

    def numbers(f: IrFunction, at: str) -> list[str]:
        made = []
        for half, part in enumerate(_nibbles(f, _packed(f, at, bytes_, offset))):
            bits = ""
            for block in range(4):
                word = f.convert("zext", "i16", _at(f, "i16", at, bytes_ * block + offset - 4 + 2 * half), "i64")
                moved = f.binary("shl", "i64", word, 16 * block)
                bits = f.binary("or", "i64", bits, moved) if bits else moved
            mask = f.convert("bitcast", "i64", bits, "<64 x i1>")
            made.append(f.select(BYTES, mask, f.binary("add", BYTES, part, constant(BYTES, 16)), part))
        return made

    return numbers


def _signed_bytes(f: IrFunction, at: str) -> list[str]:
    """Four blocks of 32 bytes with sign, moved up by 128."""
    made = []
    for pair in range(2):
        halves = [_at(f, "<32 x i8>", at, 68 * pair + 34 * i + 2) for i in range(2)]
        both = f.shuffle("<32 x i8>", halves[0], halves[1], range(64))
        made.append(f.binary("xor", BYTES, both, constant(BYTES, 128)))
    return made


def _four_sides(factor: float) -> Callable[[IrFunction, str], list[str]]:
    """Four scales, and four sums times what least values are multiples of."""
    return _sides(EIGHT, [1.0] * 4 + [factor] * 4)


def _sides(kind: str, factors: Sequence[float]) -> Callable[[IrFunction, str], list[str]]:
    def sides(f: IrFunction, record: str) -> list[str]:
        return [f.binary("fmul", kind, f.load(kind, record, 4), vector_constant("float", factors))]

    return sides


def _four_scales(form: Format, least_at: int) -> Callable[[IrFunction, str, list[str], str], tuple[list[str], str]]:
    """The scales of four blocks, and their fields at `least_at`, times scales and sums of x."""
    size = 4 * form.bytes
    offsets = [form.bytes * i + start for start in (0, least_at) for i in range(4)]

    def scales(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
        pieces = _pieces(f, at, min(size, 128))
        found = _gather(f, pieces, min(size, 128), 2, offsets)
        floats = f.convert("fpext", "<8 x half>", f.convert("bitcast", "<8 x i16>", found, "<8 x half>"), EIGHT)
        both = f.binary("fmul", EIGHT, floats, x[0])
        lanes = ((0, 1), (2, 3)) if size > 128 else ((0, 1, 2, 3),)  # blocks to a vector
        wide = f.shuffle(EIGHT, both, ZERO, range(16))
        return [_lanes(f, both, EIGHT, some) for some in lanes], _with_least(f, acc, wide, (4, 5, 6, 7))

    return scales


def _whole_sides(factor: float) -> Callable[[IrFunction, str], list[str]]:
    """Eight scales, and eight sums times what least values are multiples of."""
    return _sides(FLOATS, [1.0] * 8 + [factor] * 8)


def _eight_scales(form: Format, least_at: int) -> Callable[[IrFunction, str, list[str], str], tuple[list[str], str]]:
    """The scales of eight blocks, and their fields at `least_at`, times scales and sums of x."""
    assert 3 * form.bytes + 4 <= 64  # all fields of four blocks are in one vector

    def scales(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
        loaded = [_at(f, BYTES, at, 4 * form.bytes * i) for i in range(2)]
        a, b = (f.convert("bitcast", BYTES, v, "<32 x i16>") for v in loaded)
        picks = [(form.bytes * (i % 4) + start) // 2 + 32 * (i // 4) for start in (0, least_at) for i in range(8)]
        halves = f.convert("bitcast", "<16 x i16>", f.shuffle("<32 x i16>", a, b, picks), "<16 x half>")
        both = f.binary("fmul", FLOATS, f.convert("fpext", "<16 x half>", halves, FLOATS), x[0])
        made = [_lanes(f, both, FLOATS, (0, 4, 1, 5, 2, 6, 3, 7))]
        return made, _with_least(f, acc, both, range(8, 16))

    return scales


# ----------------------------------------------------------------------------------------------- blocks of 256 elements

_QUARTERS = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))  # vectors of 64 elements in order


def _half(f: IrFunction, at: str, offset: int) -> str:
    return f.convert("fpext", "half", _at(f, "half", at, offset), "float")


def _eight_sides(f: IrFunction, record: str) -> list[str]:
    """Four scales, four sums with their sign turned, and the others: the order of `_six_bits`."""
    (both,) = _whole_sides(-1.0)(f, record)
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    return [f.shuffle(FLOATS, both, "poison", order)]


def _six_bits(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
    """Eight scales and eight least values of 6 bits, put together in plain registers: four of each at a time."""
    first, last = _at(f, "i64", at, 4), f.convert("zext", "i32", _at(f, "i32", at, 12), "i64")
    low = f.binary("and", "i64", first, str(0x3F3F3F3F3F3F3F3F))
    top = f.binary("and", "i64", f.binary("lshr", "i64", first, 2), str(0x3030303030303030))
    fours = f.binary("or", "i64", last, f.binary("shl", "i64", last, 28))
    high = f.binary("or", "i64", f.binary("and", "i64", fours, str(0x0F0F0F0F0F0F0F0F)), top)
    both = f.insert("<2 x i64>", f.insert("<2 x i64>", "poison", low, 0), high, 1)
    whole = f.convert("zext", SIXTEEN, f.convert("bitcast", "<2 x i64>", both, SIXTEEN), WORDS)
    halves = f.convert("bitcast", "i32", _at(f, "i32", at, 0), "<2 x half>")
    factors = f.convert("fpext", "<2 x half>", halves, "<2 x float>")
    factors = f.shuffle("<2 x float>", factors, "poison", [i // 4 % 2 for i in range(16)])
    found = f.binary("fmul", FLOATS, f.convert("uitofp", WORDS, whole, FLOATS), factors)
    found = f.binary("fmul", FLOATS, found, x[0])
    lanes = ((0, 2, 8, 10), (1, 3, 9, 11))
    made = [_lanes(f, found, FLOATS, pair) for pair in lanes]
    return made, _with_least(f, acc, found, (4, 5, 6, 7, 12, 13, 14, 15))


def _four_bits(f: IrFunction, at: str, offset: int) -> list[str]:
    """First and second halves of sub-blocks 0, 2, 4 and 6, then of 1, 3, 5 and 7: low and high halves of bytes."""
    a, b = (f.convert("bitcast", BYTES, _at(f, BYTES, at, offset + 64 * i), LONGS) for i in range(2))
    made = []
    for half in range(2):
        picks = [8 * (i // 4) + 4 * (i // 2 % 2) + 2 * half + i % 2 for i in range(8)]
        made.append(_nibbles(f, f.convert("bitcast", LONGS, f.shuffle(LONGS, a, b, picks), BYTES)))
    return [made[half][which] for which in range(2) for half in range(2)]


def _q4k(f: IrFunction, at: str) -> list[str]:
    return _four_bits(f, at, 16)


def _q5k(f: IrFunction, at: str) -> list[str]:
    made = []
    for i, part in enumerate(_four_bits(f, at, 48)):
        bits = f.shuffle(SIXTEEN, _at(f, SIXTEEN, at, 16 + 16 * (i % 2)), "poison", [j % 16 for j in range(64)])
        fifth = _bits(f, bits, [i // 2 + 2 * j for j in range(4)], 1, 4)
        made.append(f.binary("or", BYTES, part, fifth))
    return made


def _sixteen_sides(factor: float) -> Callable[[IrFunction, str], list[str]]:
    """The eight scales twice each, and the sixteen sums times what least values are multiples of."""

    def sides(f: IrFunction, record: str) -> list[str]:
        scales = f.load(EIGHT, record, 4)
        sums = f.load(FLOATS, f.address("float", record, 8), 4)
        scaled = f.binary("fmul", FLOATS, sums, constant(FLOATS, factor))
        return [f.shuffle(EIGHT, scales, "poison", [i // 2 for i in range(16)]), scaled]

    return sides


def _fold_sixteen(f: IrFunction, found: str, x: list[str], lanes: Sequence[Sequence[int]]) -> list[str]:
    both = f.binary("fmul", FLOATS, found, x[0])
    return [_lanes(f, both, FLOATS, four) for four in lanes]


def _floats(f: IrFunction, extend: str, numbers: str) -> str:
    return f.convert("sitofp", WORDS, f.convert(extend, SIXTEEN, numbers, WORDS), FLOATS)


_HALVES = ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))  # the same quarter of both halves


def _q6_scales(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
    d = f.splat(FLOATS, _half(f, at, 208))
    found = f.binary("fmul", FLOATS, _floats(f, "sext", _at(f, SIXTEEN, at, 192)), d)
    lanes = [[8 * (i % 2) + 4 * high + i // 2 for i in range(8)] for high in range(2)]
    return _fold_sixteen(f, found, x, lanes), f.fma(FLOATS, found, x[1], acc)


def _q6k(f: IrFunction, at: str) -> list[str]:
    """Quarters of 32 elements of both halves of a block: 4 bits of each, and 2 bits of a byte for all four quarters."""
    fours = _woven(f, _at(f, BYTES, at, 0), _at(f, BYTES, at, 64))
    twos = f.convert("bitcast", BYTES, _at(f, BYTES, at, 128), LONGS)
    made: list[list[str]] = [[], []]
    for eight, packed in enumerate(fours):
        picks = [4 * (i % 2) + 2 * (i // 2 % 2) + eight for i in range(8)]
        bits = f.convert("bitcast", LONGS, f.shuffle(LONGS, twos, "poison", picks), BYTES)
        for high in range(2):
            four = _and(f, _right(f, packed, 4 * high), 15)  # in one instruction with what follows
            made[high].append(f.binary("or", BYTES, four, _bits(f, bits, [4 * high, 4 * high + 2], 2, 4)))
    return made[0] + made[1]


def _q2_scales(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
    raw = _at(f, SIXTEEN, at, 0)
    low = f.binary("and", SIXTEEN, raw, constant(SIXTEEN, 15))
    high = f.binary("lshr", SIXTEEN, raw, constant(SIXTEEN, 4))
    d, m = (f.splat(FLOATS, _half(f, at, offset)) for offset in (80, 82))
    found = f.binary("fmul", FLOATS, _floats(f, "zext", low), d)
    offsets = f.binary("fmul", FLOATS, _floats(f, "zext", high), m)
    return _fold_sixteen(f, found, x, _HALVES), f.fma(FLOATS, offsets, x[1], acc)


def _q2k(f: IrFunction, at: str) -> list[str]:
    packed = _at(f, BYTES, at, 16)
    return [_bits(f, packed, [2 * quarter], 2) for quarter in range(4)]


def _q3_scales(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
    d = f.splat(FLOATS, _half(f, at, 108))
    found = f.binary("fmul", FLOATS, _floats(f, "sext", q3_scales(f, at)), d)
    return _fold_sixteen(f, found, x, _HALVES), f.fma(FLOATS, found, x[1], acc)


def _q3k(f: IrFunction, at: str) -> list[str]:
    bits, packed = _twice(f, at, 0), _at(f, BYTES, at, 32)
    made = []
    for quarter in range(4):
        part = _and(f, _right(f, packed, 2 * quarter), 3)
        third = _bits(f, bits, [quarter, quarter + 4], 1, 2)
        made.append(f.binary("or", BYTES, part, third))
    return made


def _q8k_scales(f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
    found = f.binary("fmul", FLOATS, f.splat(FLOATS, _at(f, "float", at, 0)), x[0])
    made = [_lanes(f, found, FLOATS, (2 * i, 2 * i + 1)) for i in range(4)]
    return made, _with_least(f, acc, found, range(8, 16))


def _q8k(f: IrFunction, at: str) -> list[str]:
    parts = (_at(f, BYTES, at, 4 + 64 * i) for i in range(4))
    return [f.binary("xor", BYTES, part, constant(BYTES, 128)) for part in parts]


def _eights(*sixteens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Runs of 8 from runs of 16."""
    return tuple(tuple(2 * run + i for run in runs for i in range(2)) for runs in sixteens)


_FOUR_BIT_RUNS = _eights((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_WOVEN_BLOCKS = tuple(tuple(4 * (i // 2 + 4 * (i % 2)) + eight for i in range(8)) for eight in (0, 2, 1, 3))
_WOVEN_HALVES = tuple(tuple(16 * (i % 2) + 2 * (i // 2) + eight for i in range(8)) for eight in (0, 1, 8, 9))


def _four(kind: str, numbers: Callable[[IrFunction, str], list[str]], factor: float, least_at: int = 0) -> WideStep:
    scales = _four_scales(FORMATS[kind], least_at)
    is_whole = kind == "q8_0"  # a byte has one number
    runs = _eights(*(_QUARTERS[:2] if is_whole else ((0, 2, 4, 6), (1, 3, 5, 7))))
    return WideStep(4, runs, numbers, _four_sides(factor), scales, 1 if is_whole else 2)


def _eight(kind: str, offset: int, factor: float, least_at: int = 0) -> WideStep:
    form = FORMATS[kind]
    scales = _eight_scales(form, least_at)
    return WideStep(8, _WOVEN_BLOCKS, _eight_blocks(form.bytes, offset), _whole_sides(factor), scales, 4)


STEPS: Final = {
    "q4_0": _eight("q4_0", 2, -8.0),
    "q4_1": _eight("q4_1", 4, 1.0, least_at=2),
    "q5_0": _four("q5_0", _with_fifth(22, 6), -16.0),
    "q5_1": _four("q5_1", _with_fifth(24, 8), 1.0, least_at=2),
    "q8_0": _four("q8_0", _signed_bytes, -128.0),
    "q4k": WideStep(1, _FOUR_BIT_RUNS, _q4k, _eight_sides, _six_bits, 2),
    "q5k": WideStep(1, _FOUR_BIT_RUNS, _q5k, _eight_sides, _six_bits, 2, 1),
    "q6k": WideStep(1, _WOVEN_HALVES, _q6k, _sixteen_sides(-32.0), _q6_scales, 2, 1),
    "q2k": WideStep(1, _eights(*_HALVES), _q2k, _sixteen_sides(-1.0), _q2_scales),
    "q3k": WideStep(1, _eights(*_HALVES), _q3k, _sixteen_sides(-4.0), _q3_scales),
    "q8k": WideStep(1, _eights(*_QUARTERS), _q8k, _whole_sides(-128.0), _q8k_scales),
}
