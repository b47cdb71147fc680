"""Backward attention: dq, dk and dv from one recomputation of the probabilities, a block of query rows at a time.

    void slopes(ptr args, i64 begin, i64 end)      a part of the query rows of one key head per chunk
    void slopes_sum(ptr args, i64 begin, i64 end)  what the parts of a key head found, added up in order, per key head

For a block of rows: scores and their cotangents dP = dY·Vᵀ, probabilities P, dS = P·(dP - sum of P·dP), and with these
dQ = dS·K, dK += dSᵀ·Q, dV += Pᵀ·dY. Where all keys of a row fit a block of keys, scores are made once; for longer rows
they are made twice, first for the rows' maxima and sums, and are never all in memory. How rows split into parts depends
on sizes alone, and so does the order of every sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from strata.backends.llvm.attention.form import AttentionSpec, pack_matrix
from strata.backends.llvm.attention.rows import RowScores
from strata.backends.llvm.gemm.micro import TileSet, call_micro
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import template
from strata.backends.llvm.math import exponentials

_POINTERS: Final = ("q", "k", "v", "dy", "dq", "dk", "dv", "work", "mask", "offset")
OPERANDS: Final = ("q", "k", "v", "dy", "dq", "dk", "dv", "mask")
_STRIDES: Final = tuple(f"{x}_{axis}" for x in OPERANDS for axis in ("batch", "head", "row"))
BACKWARD_SLOTS: Final = (*_POINTERS, "batch", "queries", "keys", *_STRIDES, "offset_batch", "parts")
KEY_BLOCK: Final = 512
PARTS: Final = 16  # chunks to have at least, where there are that many blocks of rows
_ALIGN: Final = 16  # elements


def backward_spec(spec: AttentionSpec) -> AttentionSpec:
    """The blocks that the backward pass works on."""
    return replace(spec, query_rows=4 * spec.tiles.heights[0], key_block=KEY_BLOCK, decode=False)


def can_go_back(spec: AttentionSpec) -> bool:
    plain = spec.mask in ("none", "custom") and spec.softcap is None and spec.dropped is None
    return spec.dtype is spec.accumulator and plain


def parts_of(spec: AttentionSpec, queries: int, batch: int) -> int:
    """Into how many chunks the query rows of one key head go."""
    heads, tasks = batch * spec.kv_heads, spec.shared_by * -(-queries // spec.query_rows)
    return max(1, min(tasks, -(-PARTS // max(heads, 1))))


def work_size(spec: AttentionSpec, keys: int, parts: int, batch: int) -> int:
    """Elements of working memory."""
    whole = -(-keys // spec.lanes) * spec.lanes
    sizes = (whole * spec.head_dim, whole * spec.value_dim, keys * spec.padded(spec.head_dim))
    sums = keys * (spec.padded(spec.head_dim) + spec.value_columns)
    return batch * spec.kv_heads * parts * (-(-(sum(sizes) + sums) // _ALIGN) * _ALIGN)


def emit_backward(module: IrModule, spec: AttentionSpec, name: str = "slopes") -> tuple[str, str]:
    """Adds both kernels; they take the same arguments."""
    assert can_go_back(spec)
    bodies: dict[str, Callable[[_Backward, str], None]] = {name: _Backward.chunk, f"{name}_sum": _Backward.add_parts}
    for function, body in bodies.items():
        f = template(module, function)
        backward = _Backward(f, spec)
        f.loop("%begin", "%end", 1, [], lambda i, _, body=body, backward=backward: body(backward, i))  # type: ignore[misc]
        f.ret()
    return name, f"{name}_sum"


class _Backward(RowScores):
    """Emits the backward pass of one part of a key head's query rows."""

    def __init__(self, f: IrFunction, spec: AttentionSpec) -> None:
        super().__init__(f, spec, BACKWARD_SLOTS)
        self.d_columns = spec.padded(spec.head_dim)
        self.sums = f.alloca(self.element, spec.query_rows * self.d_columns)  # dQ of the block
        self.changes = f.alloca(self.element, spec.query_rows * spec.score_step)  # dP, then dS
        self.means = f.alloca(self.element, spec.query_rows)  # sums of P·dP
        aligned = spec.head_dim == self.d_columns, spec.value_dim == spec.value_columns
        self.q_copy = "" if aligned[0] else f.alloca(self.element, spec.query_rows * self.d_columns)
        self.dy_copy = "" if aligned[1] else f.alloca(self.element, spec.query_rows * spec.value_columns)
        whole = f.round_down(f.add(self.keys, spec.lanes - 1), spec.lanes)
        self.places: dict[str, Value] = {}  # of the parts of a chunk's memory
        end: Value = 0
        for part, size in (
            ("k_scoring", f.mul(whole, spec.head_dim)),
            ("v_scoring", f.mul(whole, spec.value_dim)),
            ("k_mixing", f.mul(self.keys, self.d_columns)),
            ("dk", f.mul(self.keys, self.d_columns)),
            ("dv", f.mul(self.keys, spec.value_columns)),
        ):
            self.places[part] = end
            end = f.add(end, size)
        self.chunk_size = f.round_down(f.add(end, _ALIGN - 1), _ALIGN)

    def chunk(self, index: str) -> None:
        f, spec, number = self.f, self.spec, self.number
        kv, part = f.divided(index, number["parts"])
        batch, kv_head = f.divided(kv, spec.kv_heads)
        memory = self._memory(index)
        k, v = self.at("k", batch, kv_head), self.at("v", batch, kv_head)
        pack_matrix(f, spec.panels, k, memory["k_scoring"], self.keys, spec.head_dim, 1, number["k_row"])
        pack_matrix(f, spec.panels, v, memory["v_scoring"], self.keys, spec.value_dim, 1, number["v_row"])
        pack_matrix(f, spec.panels, k, memory["k_mixing"], spec.head_dim, self.keys, number["k_row"], 1)
        f.fill(self.type, memory["dk"], f.mul(self.keys, self.d_columns), "zeroinitializer")
        f.fill(self.type, memory["dv"], f.mul(self.keys, spec.value_columns), "zeroinitializer")
        blocks = f.ceil_div(number["queries"], spec.query_rows)
        tasks = f.mul(blocks, spec.shared_by)
        first = f.op(f"udiv i64 {f.mul(part, tasks)}, {number['parts']}")
        last = f.op(f"udiv i64 {f.mul(f.add(part, 1), tasks)}, {number['parts']}")

        def task(at: str, _: list[str]) -> None:
            local, block = f.divided(at, blocks)
            row = f.mul(block, spec.query_rows)
            self._query_block(batch, f.add(f.mul(kv_head, spec.shared_by), local), row, memory)

        f.loop(first, last, 1, [], task)

    def _memory(self, index: Value) -> dict[str, str]:
        f = self.f
        base = f.address(self.element, self.pointer["work"], f.mul(index, self.chunk_size))
        return {part: f.address(self.element, base, place) for part, place in self.places.items()}

    def _query_block(self, batch: Value, head: Value, first: Value, memory: dict[str, str]) -> None:
        f, spec, number = self.f, self.spec, self.number
        rows = f.smin(f.sub(number["queries"], first), spec.query_rows)
        position = f.add(first, self._shift(batch))
        # a mask may leave a row without a key, and such a row averages over all of them
        positional = spec.mask == "none" and not spec.has_offset
        low, high = self._key_range(position, rows) if positional else (0, self.keys)
        q, dy, dq = (
            f.address(self.element, self.at(x, batch, head), f.mul(first, number[f"{x}_row"]))
            for x in ("q", "dy", "dq")
        )
        mask = self._mask_row(batch, head, first)
        q_rows = self._whole_vectors(rows, q, number["q_row"], spec.head_dim, self.q_copy)
        dy_rows = self._whole_vectors(rows, dy, number["dy_row"], spec.value_dim, self.dy_copy)
        self._begin(rows)

        def products(start: Value, count: Value) -> None:
            k, v = memory["k_scoring"], memory["v_scoring"]
            self._score(q, number["q_row"], spec.head_dim, rows, k, start, count, self.scores)
            self._score(dy, number["dy_row"], spec.value_dim, rows, v, start, count, self.changes)

        def gather(start: Value, count: Value) -> None:
            f.loop(0, rows, 1, [], lambda i, _: self._gather_row(i, f.add(position, i), start, count, mask))

        def spread(start: Value, count: Value, fresh: bool) -> None:
            """dQ, dK and dV of a block of keys; `fresh` scores have not been turned into exponentials."""
            f.loop(0, rows, 1, [], lambda i, _: self._change_row(i, f.add(position, i), start, count, mask, fresh))
            self._mix(rows, self.changes, memory["k_mixing"], spec.head_dim, start, count)
            self._outer(rows, self.changes, *q_rows, memory["dk"], spec.head_dim, start, count)
            self._outer(rows, self.scores, *dy_rows, memory["dv"], spec.value_dim, start, count)

        def at_once() -> None:
            count = f.sub(high, low)
            products(low, count)
            gather(low, count)
            spread(low, count, fresh=False)

        def each(body: Callable[[Value, Value], None]) -> None:
            def one(start: str, _: list[str]) -> None:
                count = f.smin(f.sub(high, start), spec.key_block)
                products(start, count)
                body(start, count)

            f.loop(low, high, spec.key_block, [], one)

        def twice() -> None:
            each(gather)
            each(lambda start, count: spread(start, count, fresh=True))

        f.if_(f.compare("sle", "i64", f.sub(high, low), spec.key_block), at_once, twice)
        f.loop(0, rows, 1, [], lambda i, _: self._put_row(
            [f.address(self.element, self.sums, f.mul(i, self.d_columns))],
            f.address(self.element, dq, f.mul(i, number["dq_row"])), spec.head_dim))  # fmt: skip

    def _whole_vectors(self, rows: Value, source: str, step: Value, dim: int, copy: str) -> tuple[str, Value]:
        """Rows of whole vectors and their distance: the source's own, or a copy filled up with zeros."""
        if not copy:
            return source, step
        f, spec = self.f, self.spec
        columns, whole = spec.padded(dim), dim // spec.lanes * spec.lanes

        def one(i: str, _: list[str]) -> None:
            row, to = f.address(self.element, source, f.mul(i, step)), f.address(self.element, copy, f.mul(i, columns))
            for d in range(0, columns, spec.lanes):
                place = f.address(self.element, row, d)
                mask = None if d < whole else f.mask_below(spec.lanes, dim - whole)
                value = f.load(self.type, place, self.size, mask)
                f.store(self.type, value, f.address(self.element, to, d), self.size)

        f.loop(0, rows, 1, [], one)
        return copy, columns

    def _begin(self, rows: Value) -> None:
        f = self.f

        def one(i: str, _: list[str]) -> None:
            for cells, value in ((self.highest, -math.inf), (self.totals, 0.0), (self.means, 0.0)):
                f.store(self.element, constant(self.element, value), f.address(self.element, cells, i), self.size)

        f.loop(0, rows, 1, [], one)
        f.fill(self.type, self.sums, f.mul(rows, self.d_columns), "zeroinitializer")

    # one row of scores

    def _row(self, buffer: str, i: Value) -> Callable[[Value], str]:
        row = self.f.address(self.element, buffer, self.f.mul(i, self.spec.score_step))
        return lambda j: self.f.address(self.element, row, j)

    def _masked_score(self, raw: str, j: Value, position: Value, start: Value, count: Value, mask_row: str) -> str:
        f, lanes = self.f, self.spec.lanes
        score = self._final_score(raw, f.add(start, j), position, mask_row)
        inside = f.mask_below(lanes, f.smin(f.sub(count, j), lanes))
        return f.select(self.type, inside, score, constant(self.type, self.spec.lowest))

    def _mask_of(self, mask: str, i: Value) -> str:
        return self.f.address("i8", mask, self.f.mul(i, self.mask_step)) if mask else ""

    def _gather_row(self, i: Value, position: Value, start: Value, count: Value, mask: str) -> None:
        """A row's maximum so far, and the sums of its exponentials e and of e·dP; scores become exponentials."""
        f, m, lanes = self.f, self.math, self.spec.lanes
        scores, changes, mask_row = self._row(self.scores, i), self._row(self.changes, i), self._mask_of(mask, i)

        def largest(j: str, carried: list[str]) -> list[Value]:
            raw = f.load(self.type, scores(j), self.size)
            score = self._masked_score(raw, j, position, start, count, mask_row)
            f.store(self.type, score, scores(j), self.size)
            return [m.select(m.test("ogt", carried[0], score), carried[0], score)]

        (high,) = f.loop(0, count, lanes, [(self.type, constant(self.type, self.spec.lowest))], largest)
        before = f.load(self.element, f.address(self.element, self.highest, i), self.size)
        now = self._larger(self.element, before, f.fold_lanes(self.type, high, self._larger))
        f.store(self.element, now, f.address(self.element, self.highest, i), self.size)
        everywhere = f.splat(self.type, now)

        def exps(j: str, carried: list[str]) -> list[Value]:
            e = exponentials.exp_below(m, m.sub(f.load(self.type, scores(j), self.size), everywhere))
            f.store(self.type, e, scores(j), self.size)
            return [m.add(carried[0], e), m.fma(e, f.load(self.type, changes(j), self.size), carried[1])]

        found = f.loop(0, count, lanes, [(self.type, "zeroinitializer")] * 2, exps)
        fade = f.extract(
            self.type, exponentials.exp(m, f.splat(self.type, f.binary("fsub", self.element, before, now))), 0
        )
        for cells, values in ((self.totals, found[0]), (self.means, found[1])):
            place = f.address(self.element, cells, i)
            new = f.fold_lanes(self.type, values, lambda type_, a, b: f.binary("fadd", type_, a, b))
            faded = f.binary("fmul", self.element, f.load(self.element, place, self.size), fade)
            f.store(self.element, f.binary("fadd", self.element, faded, new), place, self.size)

    def _change_row(self, i: Value, position: Value, start: Value, count: Value, mask: str, fresh: bool) -> None:
        """Scores to P, dP to dS times the scale. Dropped keys of a row that keeps some have P = 0."""
        f, m, spec = self.f, self.math, self.spec
        scores, changes, mask_row = self._row(self.scores, i), self._row(self.changes, i), self._mask_of(mask, i)

        def number(cells: str) -> str:
            return f.load(self.element, f.address(self.element, cells, i), self.size)

        one = constant(self.element, 1.0)
        highest, inverse = number(self.highest), f.binary("fdiv", self.element, one, number(self.totals))
        mean = f.splat(self.type, f.binary("fmul", self.element, number(self.means), inverse))
        # a row without a key averages over all, and no score moves it
        lost = f.compare("ole", self.element, highest, constant(self.element, spec.dropped_score))
        zero, scale = constant(self.element, 0.0), constant(self.element, spec.scale)
        factor = f.splat(self.type, f.select(self.element, lost, zero, scale, uniform=True))
        inverse, highest = f.splat(self.type, inverse), f.splat(self.type, highest)

        def change(j: str, _: list[str]) -> None:
            e = f.load(self.type, scores(j), self.size)
            if fresh:
                score = self._masked_score(e, j, position, start, count, mask_row)
                e = exponentials.exp_below(m, m.sub(score, highest))
            p = m.mul(e, inverse)
            f.store(self.type, p, scores(j), self.size)
            away = m.sub(f.load(self.type, changes(j), self.size), mean)
            f.store(self.type, m.mul(m.mul(p, away), factor), changes(j), self.size)

        f.loop(0, count, spec.lanes, [], change)

    def _outer(
        self, rows: Value, weights: str, b: str, step: Value, sums: str, dim: int, start: Value, count: Value
    ) -> None:
        """sums[key] += the sum over rows of weights[row, key] * b[row]."""
        f, spec = self.f, self.spec
        tiles = TileSet(spec.tiles.heights, spec.tiles.vectors, "columns", strided_b=True)
        columns = spec.padded(dim)

        def panel(column: Value, vectors: Value) -> None:
            kernels = tiles.by_vectors(f, self.mixing, vectors)
            from_ = f.address(self.element, b, column)

            def tile(key: Value, height: Value) -> None:
                a = f.address(self.element, weights, key)
                c = f.address(self.element, sums, f.add(f.mul(f.add(start, key), columns), column))
                kernel = tiles.by_height(f, f.sub(count, key), "ptr", kernels)
                call_micro(f, kernel, a, spec.score_step, from_, step, c, columns, rows, 1)

            tiles.over_rows(f, count, tile)

        self._panels_of(self.spec.panels, columns, panel)

    # what the parts found

    def add_parts(self, kv: str) -> None:
        """dK and dV of a key head."""
        f, spec, number = self.f, self.spec, self.number
        batch, head = f.divided(kv, spec.kv_heads)
        memory = self._memory(f.mul(kv, number["parts"]))
        for which, dim in (("dk", spec.head_dim), ("dv", spec.value_dim)):
            out = self.at(which, batch, head)

            def one(key: str, _: list[str], which: str = which, dim: int = dim, out: str = out) -> None:
                row = f.address(self.element, memory[which], f.mul(key, spec.padded(dim)))
                to = f.address(self.element, out, f.mul(key, number[f"{which}_row"]))
                self._put_row([row, self.chunk_size, number["parts"]], to, dim)

            f.loop(0, self.keys, 1, [], one)

    def _put_row(self, source: list[Value], to: str, dim: int) -> None:
        """Stores a row of sums: one, or the sum of several, given as the first, their distance and their number."""
        f, spec = self.f, self.spec
        first, *others = source

        def value(d: Value) -> str:
            start = f.load(self.type, f.address(self.element, first, d), self.size)
            if not others:
                return start
            distance, count = others

            def add(part: str, carried: list[str]) -> list[Value]:
                row = f.address(self.element, first, f.mul(part, distance))
                return [self.math.add(carried[0], f.load(self.type, f.address(self.element, row, d), self.size))]

            return f.loop(1, count, 1, [(self.type, start)], add)[0]

        f.vectors(
            dim, spec.lanes,
            lambda d, mask: f.store(self.type, value(d), f.address(self.element, to, d), self.size, mask),
        )  # fmt: skip
