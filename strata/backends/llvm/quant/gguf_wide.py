"""Matmul of a few rows with GGUF weights on AVX-512: 64 8-bit products to an instruction.

The numbers of a block stay bytes without sign, as they are stored; a number of x is 256 · high + low with two signed
bytes, so that a sum of products is 256 · Σ q·high + Σ q·low. A step is four or eight blocks of 32 elements, or one of
256. It is unpacked into vectors of 64 bytes; x is stored in the order in which they come out:

    x of a step   for each vector: its 64 high bytes, its 64 low bytes
    beside it     a scale for each 32, then their sums, or the sums of each 16

After the last whole block, x is zero. A step that is not whole is copied first, so that nothing after is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.native import arguments, fill_zero
from strata.backends.llvm.quant.gguf_blocks import format_of, half_power, load_at, load_factor
from strata.core import Target
from strata.ops import gguf_fields

LEVELS: Final = 32639  # 256 · 127 + 127
STREAMS: Final = 4  # rows far apart: memory is read as four streams, which is twice as fast as one
AHEAD: Final = 256  # bytes between what is read and what is fetched
BYTES, FLOATS, WORDS, LONGS = "<64 x i8>", "<16 x float>", "<16 x i32>", "<8 x i64>"
EIGHT, SIXTEEN = "<8 x float>", "<16 x i8>"
ZERO = "zeroinitializer"


class WideStep:
    """How some blocks of a format are unpacked into vectors of 64 numbers without sign.

    `runs` names the 8 elements in each eighth of each vector, by their number among the step's eights.
    """

    def __init__(self, kind: str, runs: Sequence[Sequence[int]], at_once: int = STREAMS) -> None:
        self.form, self.runs = format_of(kind), runs
        self.block, q = self.form.block, self.form.numbers
        self.blocks = 64 * len(runs) // self.form.elements
        self.at_once = at_once  # rows unpacked before products: fewer where the parts of all fill the registers
        of_lanes = [[8 * run[i // 2] // min(self.block.group, 32) for i in range(16)] for run in runs]
        if self.block.minima and not self.form.is_halved:  # four scales, four minima, and the others
            of_lanes = [[lane + 4 * (lane // 4) for lane in lanes] for lanes in of_lanes]
        self.shared = next((i for i, lanes in enumerate(of_lanes) if lanes != of_lanes[0]), len(runs))
        self.lanes = of_lanes[:: self.shared]  # the scales of each lane, of vectors in a row that share them
        # what sums of x are multiplied by before least values, or the scales where all elements have a number added
        is_least = self.block.m is not None
        self.factor = float(
            (-1 if self.block.minima else 1) if is_least else -128 if q.is_signed or q.values else q.add
        )

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

    def numbers(self, f: IrFunction, at: str) -> list[str]:
        """The vectors of a step."""
        q, made = self.form.numbers, []
        for runs in self.runs:
            found, to = "", 0
            for part in q.bits:
                byte, bit = zip(*(part.place(8 * run) for run in runs), strict=True)
                bits = _placed(f, self._eights(f, at, part, byte), bit, part.width, to, len(q.bits) == 1)
                found, to = f.binary("or", BYTES, found, bits) if found else bits, to + part.width
            made.append(f.binary("xor", BYTES, found, constant(BYTES, 128)) if q.is_signed else self._named(f, found))
        return made

    def _named(self, f: IrFunction, codes: str) -> str:
        """The values that codes name, 128 more than they are; or the codes."""
        values = self.form.numbers.values
        if not values:
            return codes
        table = vector_constant("i8", [int(value) + 128 for value in values] * 4)
        return f.call(BYTES, "llvm.x86.avx512.pshuf.b.512", (BYTES, table), (BYTES, codes))

    def _eights(self, f: IrFunction, at: str, part: gguf_fields.Bits, bytes_: Sequence[int]) -> str:
        """Eights of the bytes of a field, side by side."""
        eights = [(byte - part.byte) // 8 for byte in bytes_]
        if sum((size - 1) * step for size, step, _ in part.digits) < 32:
            lower = load_at(f, "<32 x i8>", at, part.byte)
            return f.shuffle("<32 x i8>", lower, "poison", [8 * e + i for e in eights for i in range(8)])
        lines = sorted({e // 8 for e in eights})
        loads = [load_at(f, BYTES, at, part.byte + 64 * line) for line in lines]
        picks = [8 * lines.index(e // 8) + e % 8 for e in eights]
        return loads[0] if picks == list(range(8)) else _pick_eights(f, loads, picks)

    def sides(self, f: IrFunction, record: str) -> list[str]:
        """Scales and sums of x, once for all rows of weights."""
        if not self.form.is_halved:
            factors = vector_constant("float", [1.0] * 8 + [self.factor] * 8)
            both = f.binary("fmul", FLOATS, f.load(FLOATS, record, 4), factors)
            order = [i % 4 + 8 * (i // 4 % 2) + 4 * (i // 8) for i in range(16)]
            return [f.shuffle(FLOATS, both, "poison", order) if self.block.minima else both]
        scales = f.load(EIGHT, record, 4)
        sums = f.load(FLOATS, f.address("float", record, 8), 4)
        scaled = f.binary("fmul", FLOATS, sums, constant(FLOATS, self.factor))
        return [f.shuffle(EIGHT, scales, "poison", [i // 2 for i in range(16)]), scaled]

    def scales(self, f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
        """The scales of the vectors' lanes times those of x, and the sums of a row with what least values add."""
        block, form = self.block, self.form
        if form.is_halved:
            assert block.scales
            d = f.splat(FLOATS, load_factor(f, at, block.d))
            found = f.binary("fmul", FLOATS, form.floats(f, at, block.scales, range(16)), d)
            least = found
            if block.m and block.minima:
                m = f.splat(FLOATS, load_factor(f, at, block.m))
                least = f.binary("fmul", FLOATS, form.floats(f, at, block.minima, range(16)), m)
            return self._spread(f, f.binary("fmul", FLOATS, found, x[0])), f.fma(FLOATS, least, x[1], acc)
        if block.m:
            factors, lanes = self._by_fours(f, at), [*range(4, 8), *range(12, 16)]
        else:
            factors, lanes = f.splat(FLOATS, load_factor(f, at, block.d)), [*range(8, 16)]
            if block.scales:
                eight = form.floats(f, at, block.scales, range(8))
                factors = f.binary("fmul", FLOATS, f.shuffle(EIGHT, eight, "poison", [*range(8), *range(8)]), factors)
        found = f.binary("fmul", FLOATS, factors, x[0])
        return self._spread(f, found), _with_least(f, acc, found, lanes)

    def _by_fours(self, f: IrFunction, at: str) -> str:
        """Four scales, four minima and the others, put together in plain registers: vectors have enough to do."""
        block, both = self.block, "poison"
        assert block.m
        assert block.scales
        assert block.minima
        assert block.m.byte == block.d.byte + 2

        def down(x: str, count: int) -> str:
            return f.binary("lshr" if count > 0 else "shl", "i64", x, abs(count)) if count else x

        for half in range(2):
            word, to = "", 0
            for parts in zip(block.scales.bits, block.minima.bits, strict=True):
                assert all(part.digits[-1] == (4, 1, 0) for part in parts)
                (first, low), (second, high) = (part.place(4 * half) for part in parts)
                if (second, high) == (first + 4, low):
                    bits = down(load_at(f, "i64", at, first), low - to)
                else:
                    a, b = (f.convert("zext", "i32", load_at(f, "i32", at, byte), "i64") for byte in (first, second))
                    bits = f.binary("or", "i64", down(a, low - to), down(b, high - to - 32))
                bits = f.binary("and", "i64", bits, ((1 << parts[0].width) - 1 << to) * 0x0101010101010101)
                word, to = f.binary("or", "i64", word, bits) if word else bits, to + parts[0].width
            both = f.insert("<2 x i64>", both, word, half)
        whole = f.convert("zext", SIXTEEN, f.convert("bitcast", "<2 x i64>", both, SIXTEEN), WORDS)
        pair = f.convert("fpext", "<2 x half>", load_at(f, "<2 x half>", at, block.d.byte), "<2 x float>")
        factors = f.shuffle("<2 x float>", pair, "poison", [i // 4 % 2 for i in range(16)])
        return f.binary("fmul", FLOATS, f.convert("uitofp", WORDS, whole, FLOATS), factors)

    def _spread(self, f: IrFunction, scales: str, kind: str = FLOATS) -> list[str]:
        return [f.shuffle(kind, scales, "poison", lanes) for lanes in self.lanes]


def wide_step(kind: str, target: Target) -> WideStep | None:
    """How a format is unpacked, where the processor has what that takes."""
    able = all(target.has(x) for x in ("avx512f", "avx512vnni", "avx512vbmi", "gfni")) and target.vector_bytes == 64
    return STEPS.get(kind) if able else None


def each_row(f: IrFunction, n: Value, take: Callable[[list[Value]], None]) -> None:
    """Points %begin to %end of n rows: a point is a row of each quarter; after them, rows that are left over.

    Rows far apart are streams, which memory gives twice as fast as one; they go on from chunk to chunk.
    """
    part = f.op(f"udiv i64 {n}, {STREAMS}")
    f.loop("%begin", f.smin("%end", part), 1, [], lambda i, _: take([f.add(i, f.mul(part, j)) for j in range(STREAMS)]))
    left = f.mul(part, STREAMS - 1)
    f.loop(f.smax("%begin", part), "%end", 1, [], lambda i, _: take([f.add(left, i)]))


def each_product(f: IrFunction, rows: Value, n: Value, row: Callable[[list[Value], Value], None]) -> None:
    """The rest of a kernel: row(some rows of weights, one row of x) for all of both."""
    f.loop(0, rows, 1, [], lambda t, _: each_row(f, n, lambda some: row(some, t)))
    f.ret()


def row_points(n: int) -> int:
    """Points of `each_row`."""
    return n // STREAMS + n % STREAMS


class WideRows:
    """Emits `rows`: tiles of rows of weights times each row of x."""

    def __init__(self, f: IrFunction, step: WideStep) -> None:
        self.f, self.form, self.step = f, step.form, step
        self.codes, self.quants, self.x_sides, self.out, self.rows, self.n, self.k = arguments(f, "ppppiii")
        self.blocks = f.op(f"udiv i64 {self.k}, {self.form.elements}")
        self.row_bytes = f.mul(self.blocks, self.form.bytes)
        self.whole = f.op(f"udiv i64 {self.blocks}, {self.step.blocks}")
        self.steps = f.ceil_div(self.blocks, self.step.blocks)
        self.step_bytes = self.step.blocks * self.form.bytes
        self.room = -(-self.step_bytes // 64) * 64
        self.copies = f.alloca("i8", STREAMS * self.room) if self.step.blocks > 1 else ""

    def emit(self) -> None:
        f = self.f
        if self.copies:
            fill_zero(f, self.copies, STREAMS * self.room)
        each_product(f, self.rows, self.n, self.row)

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
            part = f.load(BYTES, f.address("i8", source, line), 1, mask)
            f.store(BYTES, part, f.address("i8", to, line), 64)


def _with_least(f: IrFunction, acc: str, found: str, lanes: Sequence[int]) -> str:
    """acc and some lanes of what was found; the others are scales."""
    return f.fma(FLOATS, found, vector_constant("float", [float(i in lanes) for i in range(16)]), acc)


def _dots(f: IrFunction, total: str, numbers: Sequence[str], x: Sequence[str]) -> str:
    """total + the sums of four products each of bytes without sign and bytes with one."""
    for a, b in zip(numbers, x, strict=True):
        total = f.call(WORDS, "llvm.x86.avx512.vpdpbusd.512", (WORDS, total), (BYTES, a), (BYTES, b))
    return total


def _placed(f: IrFunction, x: str, bits: Sequence[int], width: int, to: int, is_all: bool) -> str:
    """Of each byte, `width` bits moved to bit `to`, the others 0; the first of them is given for each eight bytes."""
    if width == 8:
        return x
    if len(set(bits)) > 1 or to or (is_all and bits[0]):
        return _bits(f, x, bits, width, to)
    moved = f.binary("lshr", BYTES, x, constant(BYTES, bits[0])) if bits[0] else x
    return f.binary("and", BYTES, moved, constant(BYTES, (1 << width) - 1))  # in one instruction with what is added


def _pick_eights(f: IrFunction, vectors: Sequence[str], picks: Sequence[int]) -> str:
    """Eights of bytes of one or two vectors."""
    first, *second = (f.convert("bitcast", BYTES, v, LONGS) for v in vectors)
    return f.convert("bitcast", LONGS, f.shuffle(LONGS, first, second[0] if second else "poison", picks), BYTES)


def _bits(f: IrFunction, x: str, firsts: Sequence[int], count: int, to: int = 0) -> str:
    """Of each byte, `count` bits moved to bit `to`, the others 0; the first of them is given for equal parts of x.

    It is the product of a byte and a matrix of bits, one for each eight bytes, whose last row makes bit 0.
    """
    matrices = (
        [1 << (first + 7 - row - to) if 0 <= 7 - row - to < count else 0 for row in range(8)] for first in firsts
    )
    matrix = vector_constant("i8", [byte for matrix in matrices for byte in matrix])
    return f.call(BYTES, "llvm.x86.vgf2p8affineqb.512", (BYTES, x), (BYTES, matrix), ("i8", "0"))


class SmallBlockStep(WideStep):
    """Four or eight blocks of 32 elements, whose scales and numbers are picked from the bytes of all."""

    def numbers(self, f: IrFunction, at: str) -> list[str]:
        q, bytes_ = self.form.numbers, self.form.bytes
        if q.is_signed:
            made = []
            for block in range(0, self.blocks, 2):
                halves = [load_at(f, "<32 x i8>", at, bytes_ * (block + i) + q.bits[0].byte) for i in range(2)]
                both = f.shuffle("<32 x i8>", halves[0], halves[1], range(64))
                made.append(f.binary("xor", BYTES, both, constant(BYTES, 128)))
            return made
        packed = [self._packed(f, f.address("i8", at, 4 * bytes_ * i)) for i in range(self.blocks // 4)]
        if len(packed) == 2:  # of each quarter of both, the first eights side by side, and the second: the same scales
            picks = ([i // 2 * 2 + odd + 8 * (i % 2) for i in range(8)] for odd in range(2))
            packed = [_pick_eights(f, packed, some) for some in picks]
        found = [_placed(f, x, [4 * half] * 8, 4, 0, True) for x in packed for half in range(2)]
        if len(q.bits) == 1:
            return [self._named(f, x) for x in found]
        return [self._with_fifth(f, at, half, part) for half, part in enumerate(found)]

    def _packed(self, f: IrFunction, at: str) -> str:
        """The bytes of four blocks that hold two numbers of 4 bits each."""
        first = self.form.numbers.bits[0].byte
        return self._gather(f, at, 1, [self.form.bytes * (i // 16) + first + i % 16 for i in range(64)])

    def _gather(self, f: IrFunction, at: str, width: int, offsets: Sequence[int]) -> str:
        """Fields of `width` bytes at some offsets of four blocks, from their first and their last 64 bytes."""
        size = min(4 * self.form.bytes, 128)
        kind, last = f"<{64 // width} x i{8 * width}>", size - 64
        a, b = (f.convert("bitcast", BYTES, load_at(f, BYTES, at, start), kind) for start in (0, last))
        assert all((offset - last) % width == 0 or offset + width <= 64 for offset in offsets)
        picks = [o // width if o + width <= 64 else 64 // width + (o - last) // width for o in offsets]
        return f.shuffle(kind, a, b if any(p >= 64 // width for p in picks) else "poison", picks)

    def _with_fifth(self, f: IrFunction, at: str, half: int, numbers: str) -> str:
        """Numbers of the first or second halves of four blocks with their fifth bits."""
        bits = ""
        for block in range(4):
            place = self.form.bytes * block + self.form.numbers.bits[1].byte + 2 * half
            moved = f.binary("shl", "i64", f.convert("zext", "i16", load_at(f, "i16", at, place), "i64"), 16 * block)
            bits = f.binary("or", "i64", bits, moved) if bits else moved
        mask = f.convert("bitcast", "i64", bits, "<64 x i1>")
        return f.select(BYTES, mask, f.binary("add", BYTES, numbers, constant(BYTES, 16)), numbers)

    def sides(self, f: IrFunction, record: str) -> list[str]:
        kind, factors = vector("float", 2 * self.blocks), [1.0] * self.blocks + [self.factor] * self.blocks
        return [f.binary("fmul", kind, f.load(kind, record, 4), vector_constant("float", factors))]

    def scales(self, f: IrFunction, at: str, x: list[str], acc: str) -> tuple[list[str], str]:
        """The scales of the blocks, and what is added to their elements, times scales and sums of x."""
        bytes_, starts = self.form.bytes, (self.block.d.byte, (self.block.m or self.block.d).byte)
        count = 2 * self.blocks
        kind, shorts, halves = (vector(element, count) for element in ("float", "i16", "half"))
        if self.blocks == 8:
            assert 3 * bytes_ + 4 <= 64  # all fields of four blocks are in one vector
            loads = [load_at(f, BYTES, at, 4 * bytes_ * i) for i in range(2)]
            if self.block.d.dtype == "e8m0":
                picks = [bytes_ * (i % 4) + start + 64 * (i // 4) for start in starts for i in range(8)]
                powers = f.convert("zext", SIXTEEN, f.shuffle(BYTES, loads[0], loads[1], picks), WORDS)
                return self._least(f, f.binary("fmul", kind, half_power(f, WORDS, powers), x[0]), acc)
            a, b = (f.convert("bitcast", BYTES, v, "<32 x i16>") for v in loads)
            picks = [(bytes_ * (i % 4) + start) // 2 + 32 * (i // 4) for start in starts for i in range(8)]
            found = f.shuffle("<32 x i16>", a, b, picks)
        else:
            found = self._gather(f, at, 2, [bytes_ * i + start for start in starts for i in range(4)])
        floats = f.convert("fpext", halves, f.convert("bitcast", shorts, found, halves), kind)
        both = f.binary("fmul", kind, floats, x[0])
        if self.blocks == 8:
            return self._least(f, both, acc)
        wide = f.shuffle(kind, both, ZERO, range(16))
        return self._spread(f, both, kind), _with_least(f, acc, wide, range(4, 8))

    def _least(self, f: IrFunction, both: str, acc: str) -> tuple[list[str], str]:
        return self._spread(f, both), _with_least(f, acc, both, range(8, 16))


def _eights(*sixteens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Runs of 8 from runs of 16."""
    return tuple(tuple(2 * run + i for run in runs for i in range(2)) for runs in sixteens)


_QUARTERS = _eights((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))  # 64 elements in order
_SAME_QUARTERS = _eights((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))  # of both halves
_SUBBLOCKS = _eights((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_SPLIT_HALVES = _eights((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))  # of each 32, low and high
_FOUR_BLOCKS = _eights((0, 2, 4, 6), (1, 3, 5, 7))
_WOVEN_BLOCKS = tuple(tuple(4 * (i // 2 + 4 * (i % 2)) + eight for i in range(8)) for eight in (0, 2, 1, 3))
_WOVEN_HALVES = tuple(tuple(16 * (i % 2) + 2 * (i // 2) + eight for i in range(8)) for eight in (0, 1, 8, 9))

STEPS: Final = {
    "q4_0": SmallBlockStep("q4_0", _WOVEN_BLOCKS),
    "q4_1": SmallBlockStep("q4_1", _WOVEN_BLOCKS),
    "q5_0": SmallBlockStep("q5_0", _FOUR_BLOCKS),
    "q5_1": SmallBlockStep("q5_1", _FOUR_BLOCKS),
    "q8_0": SmallBlockStep("q8_0", _QUARTERS[:2]),
    "q4k": WideStep("q4k", _SUBBLOCKS),
    "q5k": WideStep("q5k", _SUBBLOCKS, at_once=1),
    "q6k": WideStep("q6k", _WOVEN_HALVES, at_once=1),
    "q2k": WideStep("q2k", _SAME_QUARTERS),
    "q3k": WideStep("q3k", _SAME_QUARTERS),
    "q8k": WideStep("q8k", _QUARTERS),
    "iq4_nl": SmallBlockStep("iq4_nl", _WOVEN_BLOCKS),
    "iq4_xs": WideStep("iq4_xs", _SPLIT_HALVES),
    "mxfp4": SmallBlockStep("mxfp4", _WOVEN_BLOCKS),
}
