"""Matmul with GGUF blocks that integer dot products do not fit: weights are decoded in the cache, piece by piece.

Codebooks, 8-bit floats, lists of values and groups of other sizes come out as f32, and are multiplied in f32 with every
row of x. A piece is decoded once for all of them; what is decoded never leaves the core's own cache.
"""

from __future__ import annotations

from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.native import arguments
from strata.backends.llvm.quant.gguf_blocks import load_at, load_factor, packed_bytes, place_bits
from strata.backends.llvm.quant.gguf_wide import STREAMS, each_row
from strata.core import Target
from strata.ops import gguf_blocks, gguf_codebooks, gguf_fields

LANES: Final = 16
FLOATS, WORDS, SHORTS, BYTES = (vector(element, LANES) for element in ("float", "i32", "i16", "i8"))
PIECE: Final = 1024  # elements of a row that are decoded at once: four rows of them stay in the cache next to the core
AHEAD: Final = 512


class DecodedRows:
    """Emits `decoded`: rows of weights, four at a time, times all rows of x."""

    def __init__(self, f: IrFunction, block: gguf_blocks.BlockFormat, target: Target) -> None:
        self.f, self.block, self.target = f, block, target
        self.codes, self.x, self.out, self.rows, self.n, self.k = arguments(f, "pppiii")
        self.blocks = f.op(f"udiv i64 {self.k}, {block.elements}")
        self.row_bytes = f.mul(self.blocks, block.bytes)
        self.piece_blocks = max(1, PIECE // block.elements)
        self.piece = self.piece_blocks * block.elements
        self.flat = f.alloca("float", STREAMS * self.piece)
        self.heights = (4, 1) if target.has_avx512 else (2, 1)

    def emit(self) -> None:
        each_row(self.f, self.n, self.tile)
        self.f.ret()

    def tile(self, rows: list[Value]) -> None:
        f = self.f

        def piece(start: str, _: list[str]) -> None:
            length = f.smin(self.piece_blocks, f.sub(self.blocks, start))
            for r, row in enumerate(rows):
                at = f.add(f.mul(row, self.row_bytes), f.mul(start, self.block.bytes))
                self.decode(f.address("i8", self.codes, at), r, length)
            is_later = f.compare("sgt", "i64", start, 0)
            token: Value = 0
            for height in self.heights:
                whole = f.op(f"udiv i64 {f.sub(self.rows, token)}, {height}")
                stop = f.add(token, f.mul(whole, height))

                def some(t: str, _: list[str], height: int = height) -> None:
                    self.multiply(rows, [f.add(t, i) for i in range(height)], start, length, is_later)

                f.loop(token, stop, height, [], some)
                token = stop

        f.loop(0, self.blocks, self.piece_blocks, [], piece)

    def multiply(self, rows: list[Value], tokens: list[Value], start: str, length: Value, is_later: str) -> None:
        """A decoded piece of some rows of weights times some rows of x, added to what earlier pieces gave."""
        f, elements = self.f, self.block.elements
        first = f.mul(start, elements)
        xs = [f.address("float", self.x, f.add(f.mul(t, self.k), first)) for t in tokens]
        weights = [f.address("float", self.flat, r * self.piece) for r in range(len(rows))]
        zeros = [(FLOATS, "zeroinitializer")] * (len(rows) * len(tokens))

        def step(at: str, so_far: list[str]) -> list[Value]:
            given = [f.load(FLOATS, f.address("float", x, at), 4) for x in xs]
            found: list[Value] = []
            for r, w in enumerate(weights):
                decoded = f.load(FLOATS, f.address("float", w, at), 4)
                found += [f.fma(FLOATS, decoded, g, so_far[r * len(xs) + t]) for t, g in enumerate(given)]
            return found

        sums = f.loop(0, f.mul(length, elements), LANES, zeros, step)
        for r, row in enumerate(rows):
            for t, token in enumerate(tokens):
                total = f.fold_lanes(FLOATS, sums[r * len(tokens) + t], lambda kind, a, b: f.binary("fadd", kind, a, b))
                place = f.address("float", self.out, f.add(f.mul(token, self.n), row))

                def before(place: str = place) -> list[Value]:
                    return [f.load("float", place, 4)]

                (earlier,) = f.if_(is_later, before, lambda: [constant("float", 0.0)], ["float"])
                f.store("float", f.binary("fadd", "float", earlier, total), place, 4)

    def decode(self, codes: str, row: int, length: Value) -> None:
        """Blocks of one row as f32."""
        f = self.f

        def one(b: str, _: list[str]) -> None:
            at = f.address("i8", codes, f.mul(b, self.block.bytes))
            for line in range(0, self.block.bytes, 64):
                f.prefetch(f.address("i8", at, AHEAD + line))
            to = f.address("float", self.flat, f.add(f.mul(b, self.block.elements), row * self.piece))
            BlockDecoder(f, self.block, at, self.target).decode(to)

        f.loop(0, length, 1, [], one)


class BlockDecoder:
    """One block in registers: sixteen elements at a time as floats, rounded as the decoder on arrays rounds."""

    def __init__(self, f: IrFunction, block: gguf_blocks.BlockFormat, at: str, target: Target) -> None:
        self.f, self.block, self.at, self.target = f, block, at, target

    def decode(self, to: str) -> None:
        f, block = self.f, self.block
        d = load_factor(f, self.at, block.d)
        m = load_factor(f, self.at, block.m) if block.m else ""
        scales: dict[int, str] = {}
        for start in range(0, block.elements, LANES):
            group = start // block.group
            if group not in scales:
                scale = f.binary("fmul", "float", d, self.number(block.scales, group)) if block.scales else d
                scales[group] = f.splat(FLOATS, scale)
            found = f.binary("fmul", FLOATS, self.sixteen(start), scales[group])
            if m:
                if block.minima:
                    which = start * block.minima.count // block.elements
                    least = f.binary("fmul", "float", m, self.number(block.minima, which))
                    found = f.binary("fsub", FLOATS, found, f.splat(FLOATS, least))
                else:
                    found = f.binary("fadd", FLOATS, found, f.splat(FLOATS, m))
            f.store(FLOATS, found, f.address("float", to, start), 4)

    # --------------------------------------------------------------------------------------------- one number at a time

    def code(self, field: gguf_fields.BitField, number: int) -> str:
        """The bits of a number of a field, i32."""
        f, found, to = self.f, "", 0
        for part in field.bits:
            byte, bit = part.place(number)
            crosses = bit + part.width > 8
            kind = "i16" if crosses else "i8"
            raw = f.convert("zext", kind, load_at(f, kind, self.at, byte), "i32")
            if bit:
                raw = f.binary("lshr", "i32", raw, str(bit))
            if bit + part.width < (16 if crosses else 8):
                raw = f.binary("and", "i32", raw, str((1 << part.width) - 1))
            if to:
                raw = f.binary("or", "i32", found, f.binary("shl", "i32", raw, str(to)))
            found, to = raw, to + part.width
        return found

    def number(self, field: gguf_fields.BitField, number: int) -> str:
        """A number of a field of scales, as a float."""
        f, code = self.f, self.code(field, number)
        if field.float8:
            table = f.module.table("float", [float(gguf_fields.float8_steps(c)) for c in range(256)])
            return f.load("float", f.address("float", table, f.convert("zext", "i32", code, "i64")), 4)
        if field.is_signed:
            code = f.convert("sext", "i8", f.convert("trunc", "i32", code, "i8"), "i32")
        if field.times != 1:
            code = f.binary("mul", "i32", code, str(field.times))
        if field.add:
            code = f.binary("add", "i32", code, str(field.add))
        return f.convert("sitofp", "i32", code, "float")

    # -------------------------------------------------------------------------------------------------- sixteen at once

    def sixteen(self, start: int) -> str:
        """Numbers of elements from `start` on, as floats."""
        q = self.block.q
        if isinstance(q, gguf_fields.BookField):
            return self._grid(q, start)
        if isinstance(q, gguf_fields.Ternary):
            return self._ternary(q, start)
        return self._bits(q, start)

    def _bits(self, q: gguf_fields.BitField, start: int) -> str:
        f, found, to = self.f, "", 0
        for part in q.bits:
            byte, bit = part.places(range(start, start + LANES))
            raw = packed_bytes(f, self.at, byte, self.block.bytes)
            if q.is_signed:
                return f.convert("sitofp", BYTES, raw, FLOATS)
            if q.float8:
                return self._float8(raw, q.float8)
            bits = place_bits(f, WORDS, f.convert("zext", BYTES, raw, WORDS), bit, part.width, to)
            found, to = f.binary("or", WORDS, found, bits) if found else bits, to + part.width
        if q.values:
            return self._values(q, found)
        if q.add:
            found = f.binary("add", WORDS, found, constant(WORDS, q.add))
        return f.convert("sitofp", WORDS, found, FLOATS)

    def _values(self, q: gguf_fields.BitField, codes: str) -> str:
        f, padded = self.f, [float(v) for v in q.values] + [0.0] * (LANES - len(q.values))
        if self.target.has_avx512:
            table = vector_constant("float", padded)
            return f.call(FLOATS, "llvm.x86.avx512.permvar.sf.512", (FLOATS, table), (WORDS, codes))
        table, found = f.module.table("float", padded), "poison"
        for lane in range(LANES):
            at = f.convert("zext", "i32", f.extract(WORDS, codes, lane), "i64")
            found = f.insert(FLOATS, found, f.load("float", f.address("float", table, at), 4), lane)
        return found

    def _float8(self, raw: str, kind: str) -> str:
        """Through f16, which has the bits of an 8-bit float at its upper end, or its numbers divided by 256."""
        f, halves = self.f, vector("half", LANES)
        wide = f.convert("zext", BYTES, raw, SHORTS)
        if kind == "e5m2":
            bits = f.binary("shl", SHORTS, wide, constant(SHORTS, 8))
            return f.convert("fpext", halves, f.convert("bitcast", SHORTS, bits, halves), FLOATS)
        size = f.binary("and", SHORTS, wide, constant(SHORTS, 127))
        sign = f.binary("shl", SHORTS, f.binary("and", SHORTS, wide, constant(SHORTS, 128)), constant(SHORTS, 8))
        bits = f.binary("or", SHORTS, f.binary("shl", SHORTS, size, constant(SHORTS, 7)), sign)
        none = f.compare("eq", SHORTS, size, constant(SHORTS, 127))
        bits = f.select(SHORTS, none, constant(SHORTS, 0x7E00), bits)
        found = f.convert("fpext", halves, f.convert("bitcast", SHORTS, bits, halves), FLOATS)
        return f.binary("fmul", FLOATS, found, constant(FLOATS, 256.0))

    def _ternary(self, q: gguf_fields.Ternary, start: int) -> str:
        f = self.f
        byte, power = zip(*map(q.place, range(start, start + LANES)), strict=True)
        wide = f.convert("zext", BYTES, packed_bytes(f, self.at, byte, self.block.bytes), WORDS)
        rest = f.binary("and", WORDS, f.binary("mul", WORDS, wide, vector_constant("i32", power)), constant(WORDS, 255))
        digit = f.binary("lshr", WORDS, f.binary("mul", WORDS, rest, constant(WORDS, 3)), constant(WORDS, 8))
        return f.convert("sitofp", WORDS, f.binary("sub", WORDS, digit, constant(WORDS, 1)), FLOATS)

    def _grid(self, q: gguf_fields.BookField, start: int) -> str:
        f, width = self.f, q.width
        word, count = f"i{8 * width}", LANES // width
        rows = gguf_codebooks.codebook(q.book).view(f"<u{width}")[:, 0]
        table = f.module.table(word, [int(row) for row in rows])
        both, kind = "poison", vector(word, count)
        for i in range(count):
            index = f.convert("zext", "i32", self.code(q.index, start // width + i), "i64")
            both = f.insert(kind, both, f.load(word, f.address(word, table, index), width), i)
        found = f.convert("sext", BYTES, f.convert("bitcast", kind, both, BYTES), WORDS)
        if q.shifts:
            each = q.count // q.shifts.count
            lanes = [self.code(q.shifts, (start + lane) // each) for lane in range(0, LANES, 8)]
            away = [f.binary("sub", "i32", "1", f.binary("shl", "i32", lane, "1")) for lane in lanes]
            first, second = (f.splat(WORDS, lane) for lane in away)
            shift = f.shuffle(WORDS, first, second, [*range(8), *range(24, 32)])
            found = f.binary("add", WORDS, f.binary("shl", WORDS, found, constant(WORDS, 3)), shift)
        if q.signs:
            mask = f.convert("bitcast", "i16", self._signs(q, start), vector("i1", LANES))
            found = f.select(WORDS, mask, f.binary("sub", WORDS, "zeroinitializer", found), found)
        return f.convert("sitofp", WORDS, found, FLOATS)

    def _signs(self, q: gguf_fields.BookField, start: int) -> str:
        """The signs of sixteen elements, a bit each, i16."""
        f = self.f
        assert q.signs
        if q.signs.count == q.count:
            byte, bit = q.signs.bits[0].place(start)
            assert bit == 0
            return load_at(f, "i16", self.at, byte)
        table = f.module.table("i8", gguf_fields.SIGNS.view("i1").tolist())
        halves = []
        for i in range(2):
            at = f.convert("zext", "i32", self.code(q.signs, start // 8 + i), "i64")
            halves.append(f.convert("zext", "i8", f.load("i8", f.address("i8", table, at), 1), "i16"))
        return f.binary("or", "i16", halves[0], f.binary("shl", "i16", halves[1], "8"))
