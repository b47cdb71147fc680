"""Decode attention: few queries over a long KV cache, which is read once, in place, row by row.

One chunk is one query of one key head; the query heads that share the key head are the rows of its block. Scores are
inner products along the head's dimension, four keys at a time; values are mixed by the micro-kernel over unpacked rows.

Where heads are few, a chunk takes a segment of the keys, and leaves its sums, maximum and total; a second kernel adds
the segments of a row up in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from strata.backends.llvm.attention.form import SLOTS, AttentionSpec
from strata.backends.llvm.attention.rows import RowScores
from strata.backends.llvm.gemm.arith import GemmArithmetic, convert
from strata.backends.llvm.gemm.micro import Micro, RegisterTile, call_micro
from strata.backends.llvm.gemm.pack_b import transpose
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import each_point, template
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.math import exponentials

KEYS_AT_ONCE = 4
HEADS_AT_ONCE = 4


def can_decode(spec: AttentionSpec) -> bool:
    """Rows of keys and values must be whole vectors."""
    whole = spec.head_dim % spec.lanes == 0 and spec.value_dim % spec.lanes == 0
    return whole and spec.lanes >= KEYS_AT_ONCE


def part_elements(spec: AttentionSpec) -> int:
    """Of what a segment leaves for each row: sums, and a vector that begins with the maximum and the total."""
    return spec.value_columns + spec.lanes


def emit_merge(module: IrModule, spec: AttentionSpec, name: str = "merge") -> str:
    """Adds the kernel that adds segments up, with the arguments of the decode; `work` is what they left."""
    f = template(module, name)
    decode = Decode(f, spec)
    each_point(f, lambda item, _: decode.merge(item))
    return name


def emit_decode(f: IrFunction, spec: AttentionSpec) -> str:
    assert can_decode(spec)
    decode = Decode(f, spec)
    each_point(f, lambda chunk, _: decode.chunk(chunk))
    return f.name


class Decode(RowScores):
    """Emits the attention of one query for all heads that share a key head."""

    def __init__(self, f: IrFunction, spec: AttentionSpec, slots: Sequence[str] = SLOTS) -> None:
        super().__init__(f, spec, slots)
        self.mask_step, self.out_step = self.number["mask_head"], self.number["out_head"]
        self.given = memory_type(spec.dtype)  # of queries, keys, values and results
        self.mixing_rows = GemmArithmetic(spec.accumulator, spec.dtype, spec.accumulator, spec.target)

    def _place(self, item: Value) -> tuple[Value, Value, Value, Value]:
        """The batch, the key head, its first query head and the query of a chunk."""
        f, spec, queries = self.f, self.spec, self.number["queries"]
        kv = f.op(f"udiv i64 {item}, {queries}")
        batch = f.op(f"udiv i64 {kv}, {spec.kv_heads}")
        kv_head = f.sub(kv, f.mul(batch, spec.kv_heads))
        return batch, kv_head, f.mul(kv_head, spec.shared_by), f.sub(item, f.mul(kv, queries))

    def _segments(self) -> Value:
        return self.f.ceil_div(self.keys, self.spec.segment)

    def _left(self, item: Value, segment: Value, row: Value) -> str:
        """Where a segment leaves what it found for a row."""
        f, spec = self.f, self.spec
        at = f.add(f.mul(f.add(f.mul(item, self._segments()), segment), spec.shared_by), row)
        return f.address(self.element, self.pointer["work"], f.mul(at, part_elements(spec)))

    def _leave_row(self, item: Value, segment: Value, row: str) -> None:
        f, spec = self.f, self.spec
        place = self._left(item, segment, row)
        sums = f.address(self.element, self.sums, f.mul(row, spec.value_columns))
        for d in range(0, spec.value_columns, spec.lanes):
            part = f.load(self.type, f.address(self.element, sums, d), self.size)
            f.store(self.type, part, f.address(self.element, place, d), self.size)
        for i, cells in enumerate((self.highest, self.totals)):
            value = f.load(self.element, f.address(self.element, cells, row), self.size)
            f.store(self.element, value, f.address(self.element, place, spec.value_columns + i), self.size)

    def merge(self, item: str) -> None:
        """All segments of the rows of one query and key head."""
        f, number = self.f, self.number
        batch, _, head, query = self._place(item)
        out = f.address(self.given, self.at("out", batch, head), f.mul(query, number["out_row"]))

        def one(row: str, _: list[str]) -> None:
            self._merge_row(item, row)
            self._store_row(row, out)

        f.loop(0, self.spec.shared_by, 1, [], one)

    def _merge_row(self, item: str, row: str) -> None:
        f, m, spec = self.f, self.math, self.spec
        segments, nothing = self._segments(), constant(self.element, -math.inf)

        def found(segment: str, at: int) -> str:
            return f.load(self.element, f.address(self.element, self._left(item, segment, row), at), self.size)

        def larger(segment: str, high: list[str]) -> list[Value]:
            return [self._larger(self.element, high[0], found(segment, spec.value_columns))]

        (high,) = f.loop(0, segments, 1, [(self.element, nothing)], larger)

        def add(segment: str, so_far: list[str]) -> list[Value]:
            below = f.binary("fsub", self.element, found(segment, spec.value_columns), high)
            fade = exponentials.exp_below(m, f.splat(self.type, below))
            total = f.splat(self.type, found(segment, spec.value_columns + 1))
            place = self._left(item, segment, row)
            parts = [f.load(self.type, f.address(self.element, place, d), self.size) for d in columns]
            return [m.fma(fade, x, before) for x, before in zip([*parts, total], so_far, strict=True)]

        columns = range(0, spec.value_columns, spec.lanes)
        *sums, total = f.loop(0, segments, 1, [(self.type, "zeroinitializer")] * (len(columns) + 1), add)
        for d, value in zip(columns, sums, strict=True):
            place = f.address(self.element, self.sums, f.add(f.mul(row, spec.value_columns), d))
            f.store(self.type, value, place, self.size)
        f.store(self.element, f.extract(self.type, total, 0), f.address(self.element, self.totals, row), self.size)

    def chunk(self, index: str) -> None:
        f, spec, number = self.f, self.spec, self.number
        item: Value = index
        segment: Value = 0
        if spec.segment:
            item = f.op(f"udiv i64 {index}, {self._segments()}")
            segment = f.sub(index, f.mul(item, self._segments()))
        batch, kv_head, head, query = self._place(item)
        position = f.add(query, self._shift(batch))
        low, high = self._key_range(position, 1)
        if spec.segment:
            first = f.mul(segment, spec.segment)
            low, high = f.smax(low, first), f.smin(high, f.add(first, spec.segment))
        q = f.address(self.given, self.at("q", batch, head), f.mul(query, number["q_row"]))
        mask = self._mask_row(batch, head, query)

        def key_block(start: Value, count: Value, _: Value) -> None:
            self._score_block(q, batch, kv_head, start, count)
            f.loop(0, spec.shared_by, 1, [], lambda i, _: self._softmax_row(i, position, start, count, mask))
            self._mix_block(batch, kv_head, start, count)

        self._over_keys(spec.shared_by, low, high, key_block)
        if spec.segment:
            f.loop(0, spec.shared_by, 1, [], lambda i, _: self._leave_row(item, segment, i))
            return
        out = f.address(self.given, self.at("out", batch, head), f.mul(query, number["out_row"]))
        f.loop(0, spec.shared_by, 1, [], lambda i, _: self._store_row(i, out))

    def _score_block(self, q: str, batch: Value, head: Value, start: Value, count: Value) -> None:
        """Scores of `count` keys from `start` on."""
        self._score_rows(q, self._row(("k", batch, head), start), count)

    def _mix_block(self, batch: Value, head: Value, start: Value, count: Value) -> None:
        """Adds up their values."""
        self._mix_rows(self._row(("v", batch, head), start), count)

    def _row(self, of: tuple[str, Value, Value], start: Value) -> str:
        f = self.f
        return f.address(self.given, self.at(*of), f.mul(start, self.number[f"{of[0]}_row"]))

    def _score_rows(self, q: str, keys: str, count: Value, at: Value = 0, step: Value | None = None) -> None:
        """Scores of rows of keys, `step` elements apart; they are `at` places from the beginning of their block."""
        f = self.f
        # the keys of one turn come from four distant places: long streams are fetched ahead, four short ones are not
        apart = f.op(f"udiv i64 {count}, {KEYS_AT_ONCE}")

        def some(chosen: list[Value]) -> None:
            for head in range(0, self.spec.shared_by, HEADS_AT_ONCE):
                heads = range(head, min(head + HEADS_AT_ONCE, self.spec.shared_by))
                self._products(q, keys, chosen, heads, at, self.number["k_row"] if step is None else step)

        f.loop(0, apart, 1, [], lambda j, _: some([f.add(j, f.mul(apart, i)) for i in range(KEYS_AT_ONCE)]))
        f.loop(f.mul(apart, KEYS_AT_ONCE), count, 1, [], lambda j, _: some([j]))

    def _products(self, q: str, keys: str, chosen: list[Value], heads: range, at: Value, step: Value) -> None:
        """Scores of some heads for one or four keys."""
        f, spec, m = self.f, self.spec, self.math
        width = len(chosen)
        rows = [f.address(self.given, keys, f.mul(j, step)) for j in chosen]
        queries = [f.address(self.given, q, f.mul(head, self.number["q_head"])) for head in heads]

        def read(row: str, d: str) -> str:
            loaded = f.load(vector(self.given, spec.lanes), f.address(self.given, row, d), spec.dtype.itemsize)
            return convert(f, loaded, spec.dtype, spec.accumulator, spec.lanes, spec.target)

        def add(d: str, sums: list[str]) -> list[Value]:
            k = [read(row, d) for row in rows]
            result: list[Value] = []
            for n, query in enumerate(queries):
                x = read(query, d)
                result += [m.fma(x, k[i], sums[n * width + i]) for i in range(width)]
            return result

        start = [(self.type, "zeroinitializer")] * (len(queries) * width)
        sums = f.loop(0, spec.head_dim, spec.lanes, start, add)
        for n, head in enumerate(heads):
            parts = [self._quarters(s) for s in sums[n * width : (n + 1) * width]]
            scores = f.address(self.element, self.scores, f.add(at, head * spec.score_step))
            four = vector(self.element, 4)
            if width == 1:
                total = f.fold_lanes(four, parts[0], lambda type_, x, y: f.binary("fadd", type_, x, y))
                f.store(self.element, total, f.address(self.element, scores, chosen[0]), self.size)
                continue
            a, b, c, d = transpose(f, four, parts)
            totals = f.binary("fadd", four, f.binary("fadd", four, a, c), f.binary("fadd", four, b, d))
            for lane, j in enumerate(chosen):
                place = f.address(self.element, scores, j)
                f.store(self.element, f.extract(four, totals, lane), place, self.size)

    def _quarters(self, value: str) -> str:
        """A vector folded to four lanes."""
        f, lanes = self.f, self.spec.lanes
        while lanes > 4:
            whole, half = vector(self.element, lanes), lanes // 2
            low = f.shuffle(whole, value, "poison", range(half))
            high = f.shuffle(whole, value, "poison", range(half, lanes))
            value, lanes = f.binary("fadd", vector(self.element, half), low, high), half
        return value

    def _mix_rows(self, values: str, count: Value, at: Value = 0, step: Value | None = None) -> None:
        f, spec, tiles = self.f, self.spec, self.spec.tiles
        row = 0
        while row < spec.shared_by:
            height = next(h for h in tiles.heights if h <= spec.shared_by - row)
            column = 0
            while column < spec.value_dim:
                vectors = min(self._vectors_at_once(height), (spec.value_dim - column) // spec.lanes)
                kernel = Micro(self.mixing_rows, RegisterTile(height, vectors), "rows", strided_b=True).emit(f.module)
                a = f.address(self.element, self.scores, f.add(at, row * spec.score_step))
                b = f.address(self.given, values, column)
                c = f.address(self.element, self.sums, row * spec.value_columns + column)
                stride = self.number["v_row"] if step is None else step
                call_micro(f, f"@{kernel}", a, spec.score_step, b, stride, c, spec.value_columns, count, 1)
                column += vectors * spec.lanes
            row += height

    def _vectors_at_once(self, height: int) -> int:
        """As much of a row of values as the registers hold sums for: what is read in one pass is one stream."""
        room = max(1, (self.spec.target.vector_registers - 8) // height)
        return min(8, 1 << (room.bit_length() - 1))
