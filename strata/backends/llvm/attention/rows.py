"""Scores of one query row with keys in vector lanes: what the decode and backward kernels are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from strata.backends.llvm.attention.form import SLOTS, Attend, AttentionSpec
from strata.backends.llvm.gemm.arith import convert
from strata.backends.llvm.gemm.micro import call_micro
from strata.backends.llvm.ir.builder import IrFunction, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.math import exponentials


class RowScores(Attend):
    """Emits scores, their softmax and the mixing of values for a block of rows."""

    def __init__(self, f: IrFunction, spec: AttentionSpec, slots: Sequence[str] = SLOTS) -> None:
        super().__init__(f, spec, slots)
        self.scores = f.alloca(self.element, spec.block_rows * spec.score_step)
        self.sums = f.alloca(self.element, spec.block_rows * spec.value_columns)
        self.highest = f.alloca(self.element, spec.block_rows)
        self.totals = f.alloca(self.element, spec.block_rows)
        self.mask_step = self.number["mask_row"]  # from row to row of a block
        self.out_step = self.number.get("out_row", "")

    def _start(self, rows: Value) -> None:
        f, spec = self.f, self.spec

        def one(i: str, _: list[str]) -> None:
            nothing = constant(self.element, -math.inf)
            f.store(self.element, nothing, f.address(self.element, self.highest, i), self.size)
            f.store(self.element, constant(self.element, 0), f.address(self.element, self.totals, i), self.size)

        f.loop(0, rows, 1, [], one)
        f.fill(self.type, self.sums, f.mul(rows, spec.value_columns), "zeroinitializer")

    def _has_lost_row(self, rows: Value) -> str:
        """Whether some row kept no key so far."""
        f, spec = self.f, self.spec

        def one(i: str, carried: list[str]) -> list[Value]:
            high = f.load(self.element, f.address(self.element, self.highest, i), self.size)
            lost = f.compare("ole", self.element, high, constant(self.element, spec.dropped_score))
            return [f.binary("or", "i1", carried[0], lost)]

        return f.loop(0, rows, 1, [("i1", "false")], one)[0]

    def _score(
        self, q: str, step: Value, depth: int, rows: Value, k: str, start: Value, count: Value, scores: str
    ) -> None:
        """scores[row, key] = q[row] · k[key] over `depth` elements, with packed keys."""
        f, spec, tiles = self.f, self.spec, self.spec.tiles
        # a block starts on a whole panel, so only the last panel of all is narrow, and with it the panel's own width
        block = f.address(self.element, k, f.mul(start, depth))

        def panel(column: Value, vectors: Value) -> None:
            kernels = tiles.by_vectors(f, self.scoring, vectors)
            b = f.address(self.element, block, f.mul(column, depth))

            def tile(row: Value, height: Value) -> None:
                a = f.address(memory_type(spec.dtype), q, f.mul(row, step))
                c = f.address(self.element, scores, f.add(f.mul(row, spec.score_step), column))
                kernel = tiles.by_height(f, f.sub(rows, row), "ptr", kernels)
                call_micro(f, kernel, a, step, b, 0, c, spec.score_step, depth, 0)

            tiles.over_rows(f, rows, tile)

        # keys after the block but inside its last panel are scored too, and ignored
        whole = f.round_down(f.add(count, spec.panels.columns - 1), spec.panels.columns)
        self._panels_of(self.spec.panels, f.smin(whole, f.sub(self.keys, start)), panel)

    def _mix(self, rows: Value, weights: str, v: str, dim: int, start: Value, count: Value, resume: int = 1) -> None:
        """sums[row] += the sum over keys of weights[row, key] * v[key], with packed values of `dim` elements."""
        f, spec, tiles = self.f, self.spec, self.spec.tiles
        columns = spec.padded(dim)

        def panel(column: Value, vectors: Value) -> None:
            kernels = tiles.by_vectors(f, self.mixing, vectors)
            width = f.mul(vectors, spec.lanes)
            b = f.address(self.element, v, f.add(f.mul(column, self.keys), f.mul(start, width)))

            def tile(row: Value, height: Value) -> None:
                a = f.address(self.element, weights, f.mul(row, spec.score_step))
                c = f.address(self.element, self.sums, f.add(f.mul(row, columns), column))
                kernel = tiles.by_height(f, f.sub(rows, row), "ptr", kernels)
                call_micro(f, kernel, a, spec.score_step, b, 0, c, columns, count, resume)

            tiles.over_rows(f, rows, tile)

        self._panels_of(self.spec.panels, dim, panel)

    def _softmax_row(self, i: Value, position: Value, start: Value, count: Value, mask: str) -> None:
        """Scores to exponentials, and the row's maximum and sum so far."""
        f, m = self.f, self.math
        row = f.address(self.element, self.scores, f.mul(i, self.spec.score_step))
        mask_row = f.address(memory_type(self._mask_dtype()), mask, f.mul(i, self.mask_step)) if mask else ""

        def place(j: Value) -> str:
            return f.address(self.element, row, j)

        def largest(j: Value, carried: list[str], inside: str | None) -> list[Value]:
            score = f.load(self.type, place(j), self.size)
            if not self._is_plain:
                score = self._final_score(score, f.add(start, j), position, mask_row)
            if inside is not None:
                score = f.select(self.type, inside, score, constant(self.type, self.spec.lowest))
            if inside is not None or not self._is_plain:
                f.store(self.type, score, place(j), self.size)
            return [m.select(m.test("ogt", carried[0], score), carried[0], score)]

        (high,) = self._over_row(count, [(self.type, constant(self.type, self.spec.lowest))], largest)
        block_high = f.fold_lanes(self.type, high, self._larger)
        if self._is_plain:
            block_high = f.binary("fmul", self.element, block_high, constant(self.element, self.spec.scale))
        high_place, total_place = (f.address(self.element, cells, i) for cells in (self.highest, self.totals))
        before = f.load(self.element, high_place, self.size)
        now = self._larger(self.element, before, block_high)
        f.store(self.element, now, high_place, self.size)
        lowered = f.splat(self.type, f.op(f"fneg {self.element} {now}"))

        def exps(j: Value, carried: list[str], inside: str | None) -> list[Value]:
            score = f.load(self.type, place(j), self.size)
            # places after the last key are far below any score, whatever the scale
            score = m.fma(score, m.c(self.spec.scale), lowered) if self._is_plain else m.add(score, lowered)
            e = exponentials.exp_below(m, score)
            if inside is not None:
                e = f.select(self.type, inside, e, "zeroinitializer")
            f.store(self.type, e, place(j), self.size)
            return [m.add(carried[0], e)]

        (total,) = self._over_row(count, [(self.type, "zeroinitializer")], exps)
        block_total = f.fold_lanes(self.type, total, lambda type_, a, b: f.binary("fadd", type_, a, b))
        fade = exponentials.exp(m, f.splat(self.type, f.binary("fsub", self.element, before, now)))
        earlier = f.load(self.element, total_place, self.size)
        faded = f.binary("fmul", self.element, earlier, f.extract(self.type, fade, 0))
        f.store(self.element, f.binary("fadd", self.element, faded, block_total), total_place, self.size)
        self._fade_sums(i, fade, f.compare("one", self.element, before, now))

    @property
    def _is_plain(self) -> bool:
        """Scores are scaled by a positive number and nothing else: the scale can wait for the exponential."""
        spec = self.spec
        masked = spec.causal or spec.window is not None or spec.mask != "none" or spec.softcap is not None
        return not masked and spec.scale > 0

    def _over_row(
        self, count: Value, start: Sequence[tuple[str, Value]],
        body: Callable[[Value, list[str], str | None], list[Value]],
    ) -> list[str]:  # fmt: skip
        """body(first key, carried, lanes inside or None for all) over the vectors of a row."""
        f, lanes = self.f, self.spec.lanes
        whole = f.round_down(count, lanes)
        values = f.loop(0, whole, lanes, start, lambda j, carried: body(j, carried, None))
        types = [type_ for type_, _ in start]
        inside = f.mask_below(lanes, f.sub(count, whole))
        return f.if_(
            f.compare("sgt", "i64", count, whole),
            lambda: body(whole, values, inside),
            lambda: list(values),
            types=types,
        )

    def _fade_sums(self, i: Value, fade: str, moved: str) -> None:
        """Earlier blocks' sums, to the scale of the new maximum."""
        f, columns = self.f, self.spec.value_columns
        sums = f.address(self.element, self.sums, f.mul(i, columns))

        def one(d: str, _: list[str]) -> None:
            place = f.address(self.element, sums, d)
            f.store(self.type, self.math.mul(f.load(self.type, place, self.size), fade), place, self.size)

        f.if_(moved, lambda: f.loop(0, columns, self.spec.lanes, [], one))

    def _final_score(self, raw: str, key: Value, position: Value, mask_row: str) -> str:
        """Scaled, capped, biased, and that of a dropped key where the masks say so."""
        f, m, spec = self.f, self.math, self.spec
        score = m.mul(raw, m.c(spec.scale))
        if spec.softcap is not None:
            score = m.mul(exponentials.tanh(m, m.mul(score, m.c(1.0 / spec.softcap))), m.c(spec.softcap))
        dropped = m.c(spec.dropped_score)
        if spec.mask == "bias":
            score = m.add(score, self._mask_values(mask_row, key))
            if spec.dropped is None:
                score = m.select(m.test("olt", score, dropped), dropped, score)
        keep = self._kept_by_position(key, position)
        if spec.mask == "custom":
            bytes_ = vector("i8", spec.lanes)
            chosen = f.compare("ne", bytes_, self._mask_values(mask_row, key), "zeroinitializer")
            keep = chosen if keep is None else f.binary("and", vector("i1", spec.lanes), keep, chosen)
        return score if keep is None else m.select(keep, score, dropped)

    def _kept_by_position(self, key: Value, position: Value) -> str | None:
        f, spec = self.f, self.spec
        if not spec.causal and spec.window is None:
            return None
        words, flags = vector("i32", spec.lanes), vector("i1", spec.lanes)
        # distances fit i32: sequences are shorter than 2**31
        distance = f.convert("trunc", "i64", f.sub(position, key), "i32")
        distances = f.binary("sub", words, f.splat(words, distance), vector_constant("i32", range(spec.lanes)))
        keep = f.compare("sge", words, distances, "zeroinitializer")
        if spec.window is None:
            return keep
        return f.binary("and", flags, keep, f.compare("sle", words, distances, constant(words, spec.window)))

    def _mask_values(self, mask_row: str, key: Value) -> str:
        """The mask's values for a vector of keys; those after the last key are not read."""
        f, spec, dtype = self.f, self.spec, self._mask_dtype()
        type_ = memory_type(dtype, spec.lanes)
        if spec.mask_spans_keys:
            inside = f.mask_below(spec.lanes, f.smin(f.sub(self.keys, key), spec.lanes))
            address = f.address(memory_type(dtype), mask_row, key)
            values = f.load(type_, address, dtype.itemsize, inside)
        else:
            values = f.splat(type_, f.load(memory_type(dtype), mask_row, dtype.itemsize))
        if spec.mask == "custom":
            return values
        return convert(f, values, dtype, spec.accumulator, spec.lanes, spec.target)

    def _store_row(self, i: Value, first_row: str) -> None:
        f, m, spec = self.f, self.math, self.spec
        place = memory_type(spec.dtype)
        out = f.address(place, first_row, f.mul(i, self.out_step))
        total = f.splat(self.type, f.load(self.element, f.address(self.element, self.totals, i), self.size))
        share = m.div(m.c(1.0), self._divisor(total))
        sums = f.address(self.element, self.sums, f.mul(i, spec.value_columns))
        kept = memory_type(spec.dtype, spec.lanes)

        def value(d: Value) -> str:
            mean = m.mul(f.load(self.type, f.address(self.element, sums, d), self.size), share)
            return convert(f, mean, spec.accumulator, spec.dtype, spec.lanes, spec.target)

        size = spec.dtype.itemsize
        f.vectors(
            spec.value_dim, spec.lanes, lambda d, mask: f.store(kept, value(d), f.address(place, out, d), size, mask)
        )
