"""Matmul of many rows with GGUF weights (prefill): a panel of weights is dequantised once for all rows.

A panel is as many rows of weights as a vector has lanes, in pieces of up to 1024 columns. Its numbers are laid out in
pairs of neighbours, a vector for each pair, so that one instruction multiplies a pair of every row of the panel with a
pair of x and adds both products to whole-number sums. After each group the sums are scaled into the results.
"""

from __future__ import annotations

from strata.backends.llvm.gemm.pack_b import transpose
from strata.backends.llvm.ir.builder import IrFunction, Value, vector
from strata.backends.llvm.ir.native import arguments, each_point
from strata.backends.llvm.quant.gguf_blocks import FLOATS, SHORTS, Format
from strata.core import Target

GROUP = 32  # elements that share a scale of x
PAIRS = GROUP // 2
PIECE = 1024  # columns that are unpacked at once: with their copy in rows they stay in the cache next to the core
PAD = 32  # elements after each unpacked row, so that rows do not fall on the same lines of the cache


def panel_rows(target: Target) -> int:
    """Rows of weights in a panel."""
    return 16 if target.has_avx512 else 8


class GgufPanels:
    """Emits `panels`: some panels of weights times all rows of x."""

    def __init__(self, f: IrFunction, form: Format, target: Target) -> None:
        self.f, self.form, self.target = f, form, target
        self.codes, self.quants, self.sides, self.out, self.rows, self.n, self.k = arguments(f, "ppppiii")
        self.blocks = f.op(f"udiv i64 {self.k}, {self.form.elements}")
        self.lanes = panel_rows(target)
        self.heights = (12, 8, 4, 2, 1) if target.has_avx512 else (4, 2, 1)
        self.floats, self.words = vector("float", self.lanes), vector("i32", self.lanes)
        self.parts = 2 if self.form.is_halved else 1  # scales of a group
        groups = PIECE // GROUP
        self.flat = f.alloca("i16", self.lanes * (PIECE + PAD))
        self.pairs = f.alloca("i32", groups * PAIRS * self.lanes)
        self.scale = f.alloca("float", groups * self.parts * self.lanes)
        self.least = f.alloca("float", groups * self.parts * self.lanes) if self.form.has_least else ""

    def emit(self) -> None:
        each_point(self.f, lambda panel, _: self.panel(self.f.mul(panel, self.lanes)))

    def panel(self, first: Value) -> None:
        f, form = self.f, self.form
        numbers = ", ".join(f"i64 {i}" for i in range(self.lanes))
        index, count = f"<{numbers}>", vector("i64", self.lanes)
        mask = f.compare("slt", count, index, f.splat(count, f.sub(self.n, first)))
        step = PIECE // form.elements

        def piece(start: str, _: list[str]) -> None:
            length = f.smin(step, f.sub(self.blocks, start))
            # what is unpacked next is fetched meanwhile: the rest of the rows, or the beginning of the next panel's
            following = f.sub(f.mul(self.blocks, self.lanes), start)
            more = f.compare("slt", "i64", f.add(start, step), self.blocks)
            ahead = f.mul(f.select("i64", more, step, following, uniform=True), form.bytes)
            f.loop(0, self.lanes, 1, [], lambda row, _: self.unpack(first, row, start, length, ahead))
            f.loop(0, f.mul(length, form.groups), 1, [], lambda group, _: self.pair_up(group))
            later = f.splat(with_bits(self.lanes), f.compare("sgt", "i64", start, 0))
            before = f.binary("and", with_bits(self.lanes), mask, later)
            token: Value = 0
            for height in self.heights:
                whole = f.op(f"udiv i64 {f.sub(self.rows, token)}, {height}")
                stop = f.add(token, f.mul(whole, height))

                def tile(t: str, _: list[str], height: int = height) -> None:
                    self.tile(t, height, first, start, length, mask, before)

                f.loop(token, stop, height, [], tile)
                token = stop

        f.loop(0, self.blocks, step, [], piece)

    def unpack(self, first: Value, row: str, start: Value, length: Value, ahead: Value) -> None:
        """One row of a piece as numbers, its scales beside those of the other rows. Rows after the last repeat it."""
        f, form = self.f, self.form
        place = f.smin(f.add(first, row), f.sub(self.n, 1))
        codes = f.address("i8", self.codes, f.mul(f.add(f.mul(place, self.blocks), start), form.bytes))
        flat = f.address("i16", self.flat, f.mul(row, PIECE + PAD))

        def block(b: str, _: list[str]) -> None:
            place = f.address("i8", codes, f.mul(b, form.bytes))
            for line in range(0, form.bytes, 64):
                f.prefetch(f.address("i8", place, f.add(ahead, line)))
            head = form.head(f, place)
            for j in range(form.groups):
                group = f.add(f.mul(b, form.groups), j)
                found = form.group(f, head, j)
                for i, half in enumerate(found.quants):
                    f.store(SHORTS, half, f.address("i16", flat, f.add(f.mul(group, GROUP), 16 * i)), 2)
                pairs = [(self.scale, found.scale), (self.scale, found.second_scale)][: self.parts]
                if self.least:
                    pairs += [(self.least, found.least), (self.least, found.second_least)][: self.parts]
                for i, (array, value) in enumerate(pairs):
                    at = f.add(f.mul(f.add(f.mul(group, self.parts), i % self.parts), self.lanes), row)
                    f.store("float", f.extract(FLOATS, value, 0), f.address("float", array, at), 4)

        f.loop(0, length, 1, [], block)

    def pair_up(self, group: str) -> None:
        """The numbers of a group from rows to pairs: a vector holds the same pair of every row."""
        f = self.f
        for half in range(0, PAIRS, self.lanes):
            places = [f.add(f.mul(group, GROUP), row * (PIECE + PAD) + 2 * half) for row in range(self.lanes)]
            rows = [f.load(self.words, f.address("i16", self.flat, at), 2) for at in places]
            for i, turned in enumerate(transpose(f, self.words, rows)):
                at = f.mul(f.add(f.mul(group, PAIRS), half + i), self.lanes)
                f.store(self.words, turned, f.address("i32", self.pairs, at), 64)

    def tile(
        self, token: Value, height: int, first: Value, start: Value, length: Value, mask: str, before: str
    ) -> None:
        """A piece of a panel times some rows of x, added to what earlier pieces gave."""
        f, form = self.f, self.form
        rows = [f.add(token, t) for t in range(height)]
        quants = [f.address("i16", self.quants, f.add(f.mul(r, self.k), f.mul(start, form.elements))) for r in rows]
        sides = [f.address("float", self.sides, f.mul(f.add(f.mul(r, self.blocks), start), form.record)) for r in rows]
        places = [f.address("float", self.out, f.add(f.mul(r, self.n), first)) for r in rows]
        acc = [(self.floats, f.load(self.floats, place, 4, before)) for place in places]

        def group(b: Value, j: Value, so_far: list[str]) -> list[Value]:
            number = f.add(f.mul(b, form.groups), j)
            at = [f.address("i16", q, f.mul(number, GROUP)) for q in quants]
            side = [f.address("float", s, f.mul(b, form.record)) for s in sides]
            pairs = f.address("i32", self.pairs, f.mul(number, PAIRS * self.lanes))
            current = list(so_far)
            for part in range(self.parts):
                current = self.add_part(part, current, number, j, at, side, pairs)
            return list(current)

        def block(b: str, so_far: list[str]) -> list[Value]:
            if form.groups == 1:
                return group(b, 0, so_far)
            inner = f.loop(0, form.groups, 1, [(self.floats, x) for x in so_far], lambda j, x: group(b, j, x))
            return list(inner)

        for place, total in zip(places, f.loop(0, length, 1, acc, block), strict=True):
            f.store(self.floats, total, place, 4, mask)

    def add_part(
        self, part: int, acc: list[str], number: Value, j: Value, at: list[str], side: list[str], pairs: str
    ) -> list[str]:
        """The elements of a group that share a scale: sums of products, then scales and least values."""
        f, form = self.f, self.form
        count = PAIRS // self.parts
        sums = ["zeroinitializer"] * len(acc)
        for p in range(part * count, (part + 1) * count):
            w = f.load(self.words, f.address("i32", pairs, p * self.lanes), 64)
            for t, x in enumerate(at):
                both = f.splat(self.words, f.load("i32", f.address("i16", x, 2 * p), 2))
                sums[t] = self.dot(sums[t], w, both)
        place = f.mul(f.add(f.mul(number, self.parts), part), self.lanes)
        scale = f.load(self.floats, f.address("float", self.scale, place), 4)
        least = f.load(self.floats, f.address("float", self.least, place), 4) if self.least else ""
        result = []
        for t, before in enumerate(acc):
            x_scale = f.splat(self.floats, f.load("float", f.address("float", side[t], j), 4))
            found = f.convert("sitofp", self.words, sums[t], self.floats)
            total = f.fma(self.floats, found, f.binary("fmul", self.floats, scale, x_scale), before)
            if least:
                which = f.add(form.groups + part, f.mul(j, self.parts))
                x_sum = f.splat(self.floats, f.load("float", f.address("float", side[t], which), 4))
                total = f.fma(self.floats, least, x_sum, total)
            result.append(total)
        return result

    def dot(self, total: str, w: str, x: str) -> str:
        """total + the sum of two products of 16-bit numbers, in every lane."""
        f, shorts = self.f, vector("i16", 2 * self.lanes)
        if self.target.has_avx512 and self.target.has("avx512vnni"):
            given = ((self.words, v) for v in (total, w, x))
            return f.call(self.words, "llvm.x86.avx512.vpdpwssd.512", *given)
        name = "llvm.x86.avx512.pmaddw.d.512" if self.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        a, b = (f.convert("bitcast", self.words, v, shorts) for v in (w, x))
        return f.binary("add", self.words, total, f.call(self.words, name, (shorts, a), (shorts, b)))


def with_bits(lanes: int) -> str:
    return vector("i1", lanes)
