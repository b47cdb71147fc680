"""Attention of a block of query rows (prefill), queries in vector lanes; keys and values are read in place.

Scores are made transposed, scores[key][query] = k[key] · qᵀ, from rows of keys in place and from the block's
queries, transposed once. Maxima and sums of the softmax are then vectors of queries, which no step has to fold, and
sums[query] += scoresᵀ · v reads rows of values in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from strata.backends.llvm.attention.form import Attend, AttentionSpec, pack_matrix
from strata.backends.llvm.gemm.arith import GemmArithmetic, convert
from strata.backends.llvm.gemm.micro import call_micro
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Typed, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.math import exponentials
from strata.core import DType, bool_

DEPTH_AT_ONCE: Final = 4  # elements of a head in one turn of the loop over them
KEYS_AT_ONCE: Final = 4  # of a pass over scores, each with its own maximum or sum
_LEAST_SCALE: Final = 1e-20  # above, the score of dropped keys over the scale is a number

# body(key of the block, carried) -> carried
_Body = Callable[[Value, list[str]], list[Value]]


class QueryBlock(Attend):
    """Emits the attention of one block of query rows of one head."""

    def __init__(self, f: IrFunction, spec: AttentionSpec) -> None:
        super().__init__(f, spec)
        self.wide = spec.padded(spec.query_rows)  # from key to key of the scores
        self.scores = f.alloca(self.element, spec.key_block * self.wide)
        self.turned = f.alloca(self.element, spec.head_dim * self.wide)
        self.sums = f.alloca(self.element, spec.query_rows * spec.value_columns)
        cells = [f.alloca(self.element, self.wide) for _ in range(5)]
        self.highest, self.before, self.totals, self.factors, self.unused = cells
        # scores wait for their scale where nothing but positions and bytes decide over them
        waits = spec.softcap is None and spec.mask != "bias" and spec.scale >= _LEAST_SCALE
        waits = waits and spec.dropped in (None, -math.inf)
        self.scale_first, self.scale_last = (1.0, spec.scale) if waits else (spec.scale, 1.0)
        self.dropped = constant(self.type, spec.dropped_score / self.scale_last)
        self.mask = _Mask(self) if spec.mask != "none" else None

    def chunk(self, index: str) -> None:
        f, spec, number = self.f, self.spec, self.number
        blocks = f.ceil_div(number["queries"], spec.query_rows)
        flat, block = f.divided(index, blocks)
        first = f.mul(block, spec.query_rows)
        batch, head = f.divided(flat, spec.num_heads)
        shared = f.op(f"udiv i64 {head}, {spec.num_heads // spec.kv_heads}")
        rows = f.smin(f.sub(number["queries"], first), spec.query_rows)
        position = f.add(first, self._shift(batch))  # of the first row
        low, high = self._key_range(position, rows)
        place = memory_type(spec.dtype)
        q = f.address(place, self.at("q", batch, head), f.mul(first, number["q_row"]))
        pack_matrix(f, spec.query_panels, q, self.turned, rows, spec.head_dim, 1, number["q_row"])
        k = self.at("k", batch, shared)
        in_place = "" if spec.packs_values else self.at("v", batch, shared)
        v = in_place or self.packed_values(f.add(f.mul(batch, spec.kv_heads), shared))
        if self.mask:
            self.mask.enter(self._mask_row(batch, head, first), rows)

        def key_block(start: Value, count: Value, resume: Value) -> None:
            settled = self._settled(position, start, count)
            self._score(rows, f.address(place, k, f.mul(start, number["k_row"])), count, settled)
            if self.mask:
                self.mask.enter_block(start, count)
            self._vectors(rows, lambda column: self._softmax(column, rows, position, start, count, resume, settled))
            self._mix(rows, v, position, start, count, resume)

        self._over_keys(rows, low, high, key_block)
        self._store(rows, f.address(place, self.at("out", batch, head), f.mul(first, number["out_row"])))

    def _vectors(self, rows: Value, body: Callable[[str], None]) -> None:
        self.f.loop(0, rows, self.spec.lanes, [], lambda column, _: body(column))

    def _load(self, cells: str, at: Value) -> str:
        return self.f.load(self.type, self.f.address(self.element, cells, at), self.size)

    def _put(self, value: str, cells: str, at: Value) -> None:
        self.f.store(self.type, value, self.f.address(self.element, cells, at), self.size)

    def _start(self, rows: Value) -> None:
        def one(column: str) -> None:
            self._put(constant(self.type, self.spec.lowest), self.highest, column)
            self._put("zeroinitializer", self.totals, column)

        self._vectors(rows, one)

    def _has_lost_row(self, rows: Value) -> str:
        f, lanes = self.f, self.spec.lanes

        def one(column: str, carried: list[str]) -> list[Value]:
            low = f.compare("ole", self.type, self._load(self.highest, column), self.dropped)
            inside = f.mask_below(lanes, f.smin(f.sub(rows, column), lanes))
            lost = f.binary("and", vector("i1", lanes), low, inside)
            return [f.binary("or", "i1", carried[0], self._any(lost))]

        return f.loop(0, rows, lanes, [("i1", "false")], one)[0]

    def _any(self, flags: str) -> str:
        f, lanes = self.f, self.spec.lanes
        if lanes == 1:
            return flags
        bits = f.convert("bitcast", vector("i1", lanes), flags, f"i{lanes}")
        return f.compare("ne", f"i{lanes}", bits, 0)

    # the two products

    def _score(self, rows: Value, k: str, count: Value, settled: tuple[Value, Value]) -> None:
        """scores[key, row] = k[key] · q[row]; maxima of the settled keys go to `highest`."""
        f, spec = self.f, self.spec
        low, high = settled
        self._vectors(rows, lambda column: self._put(self._load(self.highest, column), self.before, column))

        def panel(column: Value, vectors: Value) -> None:
            b = f.address(self.element, self.turned, f.mul(column, spec.head_dim))
            for first, end, cells in ((0, low, self.unused), (low, high, self.highest), (high, count, self.unused)):
                if first == end:
                    continue
                key = first
                for height in spec.score_tiles.heights:
                    tiles = f.op(f"udiv i64 {f.sub(end, key)}, {height}")
                    kernel = self._score_kernel(height, vectors)
                    a = f.address(memory_type(spec.dtype), k, f.mul(key, self.number["k_row"]))
                    c = f.address(self.element, self.scores, f.add(f.mul(key, self.wide), column))
                    maxima = f.address(self.element, cells, column)
                    arguments = (("ptr", a), ("i64", self.number["k_row"]), ("ptr", b), ("ptr", c), ("ptr", maxima))
                    f.call_address("void", kernel, *arguments, ("i64", tiles))
                    key = f.add(key, f.mul(tiles, height))

        self._panels_of(spec.query_panels, rows, panel)

    def _score_kernel(self, height: int, vectors: Value) -> Value:
        """The kernel for panels of this many vectors."""
        f, (first, *others) = self.f, self.spec.score_widths
        kernel: Value = "@" + emit_score(f.module, self.spec, height, first)
        for count in others:
            name = "@" + emit_score(f.module, self.spec, height, count)
            kernel = f.select("ptr", f.compare("eq", "i64", vectors, count), name, kernel)
        return kernel

    def _mix(self, rows: Value, v: str, position: Value, start: Value, count: Value, resume: Value) -> None:
        """sums[row] += the sum over keys of scores[key, row] * v[key]."""
        f, spec = self.f, self.spec
        tiles = spec.mix_tiles
        columns, v_row = spec.value_columns, self.number["v_row"]

        def panel(column: int, vectors: int) -> None:
            kernels = tiles.by_vectors(f, self.mixing, vectors)
            if tiles.strided_b:
                at = f.add(f.mul(start, v_row), column)
            else:
                at = f.add(f.mul(column, self.keys), f.mul(start, vectors * spec.lanes))
            b = f.address(self.element, v, at)

            def tile(row: Value, height: Value) -> None:
                a = f.address(self.element, self.scores, row)
                c = f.address(self.element, self.sums, f.add(f.mul(row, columns), column))
                kernel = tiles.by_height(f, f.sub(rows, row), "ptr", kernels)
                kept = self._kept_keys(f.add(position, row), height, start, count)
                call_micro(f, kernel, a, self.wide, b, v_row, c, columns, kept, resume)

            tiles.over_rows(f, rows, tile)

        width = tiles.vectors * spec.lanes
        for column in range(0, columns, width):
            panel(column, min(width, columns - column) // spec.lanes)

    # the softmax of a vector of queries

    def _softmax(
        self, column: str, rows: Value, position: Value, start: Value, count: Value, resume: Value,
        settled: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """Scores to exponentials, and the maxima and sums so far."""
        f, m = self.f, self.math
        column_scores = f.address(self.element, self.scores, column)

        def at(key: Value) -> Value:
            return f.mul(key, self.wide)

        def larger(key: Value, carried: list[str]) -> list[Value]:
            score = self._load(column_scores, at(key))
            score = self._final_score(score, column, f.add(position, column), start, key)
            self._put(score, column_scores, at(key))
            return [self._larger(self.type, score, carried[0])]

        before, high = self._load(self.before, column), self._load(self.highest, column)
        for low, end in ((0, settled[0]), (settled[1], count)):
            if low != end:
                (high,) = self._over(low, end, [(self.type, high)], larger, self._larger, 1 if self.mask else 2)
        self._put(high, self.highest, column)

        def exponential(key: Value, carried: list[str]) -> list[Value]:
            below = m.sub(self._load(column_scores, at(key)), high)
            e = exponentials.exp_of_product(m, below, self.scale_last)
            self._put(e, column_scores, at(key))
            return [m.add(carried[0], e)]

        def add(type_: str, a: str, b: str) -> str:
            return f.binary("fadd", type_, a, b)

        reach = self.spec.lanes + self.spec.mix_tiles.heights[0] - 1  # rows of the tiles that have rows of this vector
        kept = self._kept_keys(f.add(position, column), reach, start, count)
        (total,) = self._over(0, kept, [(self.type, "zeroinitializer")], exponential, add, KEYS_AT_ONCE)
        fade = exponentials.exp_of_product(m, m.sub(before, high), self.scale_last)
        self._put(m.fma(self._load(self.totals, column), fade, total), self.totals, column)

        def fade_sums() -> None:
            """Earlier blocks' sums, to the scale of the new maximum."""
            self._put(fade, self.factors, column)
            last = f.smin(rows, f.add(column, self.spec.lanes))
            f.loop(column, last, 1, [], lambda row, _: self._scale_row(row))

        moved = self._any(f.compare("one", self.type, before, high))
        f.if_(f.binary("and", "i1", moved, f.compare("ne", "i64", resume, 0)), fade_sums)

    def _over(
        self, low: Value, high: Value, start: list[Typed], body: _Body, combine: Callable[[str, str, str], str],
        turn: int,
    ) -> list[str]:  # fmt: skip
        """body over keys, `turn` at once with their own value each; the values combined in a fixed order."""
        f, (type_, first) = self.f, start[0]
        whole = f.add(low, f.round_down(f.sub(high, low), turn))
        own = [(type_, first)] * turn

        def several(key: str, carried: list[str]) -> list[Value]:
            return [body(f.add(key, i), [carried[i]])[0] for i in range(turn)]

        values = f.loop(low, whole, turn, own, several)
        while len(values) > 1:
            half = len(values) // 2
            values = [combine(type_, values[i], values[i + half]) for i in range(half)]
        return f.loop(whole, high, 1, [(type_, values[0])], body)

    def _scale_row(self, row: str) -> None:
        f, columns = self.f, self.spec.value_columns
        factor = f.splat(self.type, f.load(self.element, f.address(self.element, self.factors, row), self.size))
        sums = f.address(self.element, self.sums, f.mul(row, columns))
        f.loop(0, columns, self.spec.lanes, [], lambda d, _: self._put(
            self.math.mul(self._load(sums, d), factor), sums, d))  # fmt: skip

    # which keys a row keeps

    def _settled(self, position: Value, start: Value, count: Value) -> tuple[Value, Value]:
        """The keys of a block whose products are final scores for all rows; `position` is that of the first row."""
        f, spec = self.f, self.spec
        if spec.mask != "none" or spec.softcap is not None or self.scale_first != 1.0:
            return 0, 0
        if not spec.is_positional:
            return 0, count
        height = spec.score_tiles.heights[0]
        late = f.smax(0, f.smin(f.sub(f.add(position, 1), start), count))  # some row drops this key and those after it
        high = f.mul(f.op(f"udiv i64 {late}, {height}"), height)
        if spec.window is None:
            return 0, high
        old = f.smax(0, f.sub(f.add(position, spec.query_rows - 1 - spec.window), start))  # and those before this one
        low = f.mul(f.ceil_div(old, height), height)
        return f.smin(low, high), high

    def _kept_keys(self, position: Value, rows: Value, start: Value, count: Value) -> Value:
        """How many of a block's keys the rows from a position on may keep; what lies after has no weight."""
        f, spec = self.f, self.spec
        if (spec.mask != "none" and spec.dropped is None) or not spec.is_positional:
            return count  # a row may have lost all of its keys to a mask
        return f.smax(0, f.smin(count, f.sub(f.add(position, rows), start)))

    def _final_score(self, raw: str, column: Value, position: Value, start: Value, key: Value) -> str:
        """Scaled, capped, biased, and that of a dropped key where the masks say so."""
        f, m, spec = self.f, self.math, self.spec
        score = raw if self.scale_first == 1.0 else m.mul(raw, m.c(self.scale_first))
        if spec.softcap is not None:
            score = m.mul(exponentials.tanh(m, m.mul(score, m.c(1.0 / spec.softcap))), m.c(spec.softcap))
        keep = self._kept_by_position(f.add(start, key), position)
        if self.mask:
            value = self.mask.value(column, key)
            if spec.mask == "bias":
                score = m.add(score, value)
                if spec.dropped is None:
                    score = m.select(m.test("olt", score, self.dropped), self.dropped, score)
            else:
                chosen = m.test("une", value, m.c(0.0))
                keep = chosen if keep is None else f.binary("and", m.flag, keep, chosen)
        return score if keep is None else m.select(keep, score, self.dropped)

    def _kept_by_position(self, key: Value, position: Value) -> str | None:
        """Lanes whose query keeps a key; `position` is that of lane 0."""
        f, spec = self.f, self.spec
        if not spec.is_positional:
            return None
        words = vector("i32", spec.lanes)
        # distances fit i32: sequences are shorter than 2**31
        distance = f.splat(words, f.convert("trunc", "i64", f.sub(position, key), "i32"))
        distances = f.binary("add", words, distance, vector_constant("i32", range(spec.lanes)))
        keep = f.compare("sge", words, distances, "zeroinitializer")
        if spec.window is None:
            return keep
        near = f.compare("sle", words, distances, constant(words, spec.window))
        return f.binary("and", self.math.flag, keep, near)

    def _store(self, rows: Value, out: str) -> None:
        """The results: sums over totals."""
        f, m, spec = self.f, self.math, self.spec

        def share(column: str) -> None:
            total = self._divisor(self._load(self.totals, column))
            self._put(m.div(m.c(1.0), total), self.factors, column)

        self._vectors(rows, share)
        # without keys there are no sums either
        none = f.compare("eq", "i64", self.keys, 0)
        place, size = memory_type(spec.dtype), spec.dtype.itemsize
        kept = memory_type(spec.dtype, spec.lanes)

        def one(row: str, _: list[str]) -> None:
            factor = f.load(self.element, f.address(self.element, self.factors, row), self.size)
            share = f.splat(self.type, factor)
            sums = f.address(self.element, self.sums, f.mul(row, spec.value_columns))
            to = f.address(place, out, f.mul(row, self.number["out_row"]))

            def value(d: Value) -> str:
                mean = m.mul(self._load(sums, d), share)
                mean = f.select(self.type, none, constant(self.type, 0.0), mean, uniform=True)
                return convert(f, mean, spec.accumulator, spec.dtype, spec.lanes, spec.target)

            f.vectors(
                spec.value_dim, spec.lanes, lambda d, mask: f.store(kept, value(d), f.address(place, to, d), size, mask)
            )

        f.loop(0, rows, 1, [], one)


def emit_score(module: IrModule, spec: AttentionSpec, height: int, vectors: int) -> str:
    """`void score(ptr k, i64 k_row, ptr q, ptr scores, ptr highest, i64 tiles)`: keys times a panel of queries.

    Maxima are taken while the next tile is multiplied: they need other parts of the processor.
    """
    name = f"score_{spec.dtype}_{height}x{vectors}_{spec.head_dim}"
    if module.has(name):
        return name
    arithmetic = GemmArithmetic(spec.dtype, spec.accumulator, spec.accumulator, spec.target)
    parameters = [("ptr noalias", "k"), ("i64", "k_row"), ("ptr noalias", "q"), ("ptr noalias", "scores")]
    parameters += [("ptr noalias", "highest"), ("i64", "tiles")]
    f = module.outlined(name, parameters)
    element, type_, size = memory_type(spec.accumulator), arithmetic.type, arithmetic.size
    wide, lanes = spec.padded(spec.query_rows), spec.lanes
    places = [f.address(element, "%highest", j * lanes) for j in range(vectors)]
    turn = next(n for n in (DEPTH_AT_ONCE, 2, 1) if spec.head_dim % n == 0)
    line = 64 // spec.dtype.itemsize
    at_once = height * turn // line  # rows of the next tile that a turn fetches a line of
    steps = [f.mul("%k_row", i) for i in range(height)]
    next_tile, key_type = f.mul("%k_row", height), memory_type(spec.dtype)

    def tile(index: str, before: list[str]) -> list[Value]:
        highest: list[Value] = list(before)
        keys = f.address(key_type, "%k", f.mul(index, next_tile))
        rows = [f.address(key_type, keys, step) for step in steps]

        def products(d: str, so_far: list[str]) -> list[Value]:
            sums: list[Value] = list(so_far)
            if at_once:
                start = f.round_down(d, line)
                row = f.mul(f.op(f"udiv i64 {f.sub(d, start)}, {turn}"), at_once)
                ahead = f.address(key_type, f.address(key_type, keys, f.mul(row, "%k_row")), f.add(next_tile, start))
                for step in steps[:at_once]:
                    f.prefetch(f.address(key_type, ahead, step))
            for i in range(turn):
                at = f.address(element, "%q", f.mul(f.add(d, i), vectors * lanes))
                q = [f.load(type_, f.address(element, at, j * lanes), size) for j in range(vectors)]
                for row, key in enumerate(rows):
                    k = arithmetic.load_a(f, f.address(key_type, key, f.add(d, i)))
                    for j in range(vectors):
                        sums[row * vectors + j] = arithmetic.step(f, k, q[j], str(sums[row * vectors + j]))
            return sums

        sums = f.loop(0, spec.head_dim, turn, [(type_, "zeroinitializer")] * (height * vectors), products)
        to = f.address(element, "%scores", f.mul(index, height * wide))
        for n, value in enumerate(sums):
            row, j = divmod(n, vectors)
            f.store(type_, value, f.address(element, to, row * wide + j * lanes), size)
            highest[j] = f.select(type_, f.compare("ogt", type_, value, highest[j]), value, highest[j])
        return highest

    highest = f.loop(0, "%tiles", 1, [(type_, f.load(type_, place, size)) for place in places], tile)
    for place, value in zip(places, highest, strict=True):
        f.store(type_, value, place, size)
    f.ret()
    return name


class _Mask:
    """The mask of a block of rows, as vectors of queries."""

    def __init__(self, block: QueryBlock) -> None:
        self.block, self.f = block, block.f
        self.dtype: DType = bool_ if block.spec.mask == "custom" else block.spec.dtype
        spec = block.spec
        keys = spec.key_block if spec.mask_spans_keys else 1
        self.turned = self.f.alloca(block.element, keys * block.wide) if spec.mask_spans_rows else ""
        self.row = ""  # of the block's first query
        self.rows: Value = 0
        self.start: Value = 0
        self.count: Value = 0

    def enter(self, row: str, rows: Value) -> None:
        self.row, self.rows = row, rows
        if not self.block.spec.mask_spans_keys:
            self._turn(row, 1)

    def enter_block(self, start: Value, count: Value) -> None:
        self.start, self.count = start, count
        if self.block.spec.mask_spans_keys:
            self._turn(self.f.address(memory_type(self.dtype), self.row, start), count)

    def _turn(self, source: str, keys: Value) -> None:
        """Rows of a mask to vectors of queries, in panels."""
        f, spec = self.f, self.block.spec
        if not spec.mask_spans_rows:
            return
        panels = replace(spec.query_panels, source=self.dtype)
        pack_matrix(f, panels, source, self.turned, self.rows, keys, 1, self.block.number["mask_row"])

    def value(self, column: Value, key: Value) -> str:
        """The values for the queries from a column on and one key of the block."""
        f, block = self.f, self.block
        spec = block.spec
        if spec.mask_spans_rows:
            keys: Value = self.count if spec.mask_spans_keys else 1
            first = f.op(f"urem i64 {column}, {spec.query_panels.columns}")  # within its panel
            panel = f.sub(column, first)
            whole = f.round_down(f.add(f.sub(self.rows, panel), spec.lanes - 1), spec.lanes)
            width = f.smin(whole, spec.query_panels.columns)
            at = f.add(f.add(f.mul(panel, keys), first), f.mul(key if spec.mask_spans_keys else 0, width))
            return f.load(block.type, f.address(block.element, self.turned, at), block.size)
        index = f.add(self.start, key) if spec.mask_spans_keys else 0
        scalar = f.load(
            memory_type(self.dtype), f.address(memory_type(self.dtype), self.row, index), self.dtype.itemsize
        )
        return f.splat(block.type, convert(f, scalar, self.dtype, spec.accumulator, 1, spec.target))
