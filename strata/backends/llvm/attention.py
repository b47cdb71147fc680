"""Attention as two contractions around a softmax, blocked so that the scores stay in the second-level cache.

    void pack(ptr args, i64 begin, i64 end)        packs keys (transposed) and values of one key head per chunk
    void attend(ptr args, i64 begin, i64 end)      one block of query rows of one head per chunk

Keys are taken in blocks of fixed length with a running maximum and sum per row (online softmax), so the order of every
sum depends on nothing but the number of keys. Blocks of keys that all rows of a query block drop are not read. Sizes,
strides and offsets are arguments; the head sizes and the kinds of mask are part of the code. See strata.ops.attention
for the meaning of every field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm import vector_math
from strata.backends.llvm.builder import Function, Module, Value, constant, vector, vector_constant
from strata.backends.llvm.gemm_arith import Arithmetic, convert, mask_below
from strata.backends.llvm.gemm_micro import TileSet, call_micro
from strata.backends.llvm.gemm_pack import Panels, pack_panel
from strata.backends.llvm.registers import memory_type
from strata.core import DType, Target, bool_, f32

DROPPED: Final = -1e9  # the score of a dropped key
OUTSIDE: Final = -3e38  # fills vectors behind the last key; its exponential is 0 beside any score
_POINTERS: Final = ("q", "k", "v", "out", "k_packed", "v_packed", "mask", "offset")
_STRIDES: Final = tuple(f"{x}_{axis}" for x in ("q", "k", "v", "out", "mask") for axis in ("batch", "head", "row"))
SLOTS: Final = (*_POINTERS, "batch", "queries", "keys", *_STRIDES, "offset_batch")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention, ready to be emitted. `mask` is none, custom (bytes that keep) or bias (numbers that are added)."""

    target: Target
    num_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    dtype: DType = f32
    causal: bool = False
    window: int | None = None
    mask: str = "none"
    mask_spans_keys: bool = True  # False: one value of the mask for all keys of a row
    has_offset: bool = False
    softcap: float | None = None
    decode: bool = False  # few queries: keys and values are read where they lie
    segment: int = 0  # keys that a chunk of a decode takes, where heads alone are too few chunks; 0: all of them
    one_block: bool = False  # there are never more keys than a block has
    whole_heads: bool = False  # a chunk packs a key head and does all rows that read it; there is no pack step
    query_rows: int = 24
    key_block: int = 1024

    @property
    def accumulator(self) -> DType:
        return self.dtype.accumulator

    @property
    def tiles(self) -> TileSet:
        if self.target.vector_registers >= 32:
            return TileSet((8, 4, 2, 1), 2)
        return TileSet((6, 4, 2, 1) if self.target.has_fma else (4, 2, 1), 2)

    @property
    def panels(self) -> Panels:
        accumulator = self.accumulator
        return Panels(self.dtype, accumulator, self.target.lanes(accumulator.itemsize), 2, 1, self.target)

    @property
    def lanes(self) -> int:
        return self.panels.lanes

    @property
    def value_columns(self) -> int:
        return self.padded(self.value_dim)

    def padded(self, dim: int) -> int:
        """A row of so many elements in whole vectors."""
        return -(-dim // self.lanes) * self.lanes

    def k_packed_size(self, keys: int, batch: int = 1) -> int:
        """Elements of the packed keys."""
        return batch * self.kv_heads * self.panels.size(keys, self.head_dim)

    def v_packed_size(self, keys: int, batch: int = 1) -> int:
        return batch * self.kv_heads * self.panels.size(self.value_dim, keys)

    def pack_count(self, batch: int) -> int:
        return batch * self.kv_heads

    def chunk_count(self, queries: int, batch: int) -> int:
        if self.decode:
            return batch * self.kv_heads * queries
        if self.whole_heads:
            return batch * self.kv_heads
        return batch * self.num_heads * -(-queries // self.query_rows)

    @property
    def shared_by(self) -> int:
        """Query heads that read one key head."""
        return self.num_heads // self.kv_heads

    @property
    def block_rows(self) -> int:
        return self.shared_by if self.decode else self.query_rows

    @property
    def score_step(self) -> int:
        """From row to row of scores: not a power of two, with which all rows would share a set of the cache."""
        return self.key_block + 16

    @property
    def stack_bytes(self) -> int:
        elements = self.block_rows * (self.score_step + self.value_columns + 2)
        return elements * self.accumulator.itemsize

    def __str__(self) -> str:
        parts = [f"attention {self.dtype} heads {self.num_heads}/{self.kv_heads} dim {self.head_dim}/{self.value_dim}"]
        parts += [f"scale {self.scale!r}", f"block {self.query_rows} x {self.key_block}"]
        parts += ["decode"] if self.decode else []
        parts += [f"segment {self.segment}"] if self.segment else []
        parts += ["one block"] if self.one_block else []
        parts += ["whole heads"] if self.whole_heads else []
        parts += ["causal"] if self.causal else []
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"mask {self.mask}" + ("" if self.mask_spans_keys else " per row")] if self.mask != "none" else []
        parts += ["offset"] if self.has_offset else []
        parts += [f"softcap {self.softcap!r}"] if self.softcap is not None else []
        return "; ".join(parts)


def emit_attention(module: Module, spec: AttentionSpec, name: str = "attend") -> tuple[str, str]:
    """Adds both kernels, with the same arguments; returns the names of pack, "" where nothing is packed, and attend."""
    parameters = [("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")]
    if spec.decode:
        from strata.backends.llvm.attention_decode import emit_decode

        return "", emit_decode(module.function(name, parameters), spec)
    if spec.whole_heads:
        f = module.function(name, parameters)
        attend = Attend(f, spec)
        f.loop("%begin", "%end", 1, [], lambda chunk, _: attend.whole_head(chunk))
        f.ret()
        return "", name
    f = module.function(f"{name}_pack", parameters)
    packer = Arguments(f, spec)
    f.loop("%begin", "%end", 1, [], lambda chunk, _: _pack_head(packer, chunk))
    f.ret()
    f = module.function(name, parameters)
    attend = Attend(f, spec)
    f.loop("%begin", "%end", 1, [], lambda chunk, _: attend.chunk(chunk))
    f.ret()
    return f"{name}_pack", name


class Arguments:
    """The argument block, loaded once per call: pointers, then numbers from `batch` on."""

    def __init__(self, f: Function, spec: AttentionSpec, slots: Sequence[str] = SLOTS) -> None:
        self.f, self.spec = f, spec
        places = {slot: f.address("i64", "%args", i) for i, slot in enumerate(slots)}
        pointers = slots.index("batch")
        self.pointer = {slot: f.load("ptr", places[slot], 8) for slot in slots[:pointers]}
        self.number = {slot: f.load("i64", places[slot], 8) for slot in slots[pointers:]}
        self.keys = self.number["keys"]
        lanes = spec.lanes
        self.k_size = f.mul(f.round_down(f.add(self.keys, lanes - 1), lanes), spec.head_dim)
        self.v_size = f.mul(self.keys, spec.value_columns)

    def at(self, operand: str, batch: Value, head: Value, dtype: DType | None = None) -> str:
        """Where an operand's head starts."""
        f, number = self.f, self.number
        offset = f.add(f.mul(batch, number[f"{operand}_batch"]), f.mul(head, number[f"{operand}_head"]))
        return f.address(memory_type(dtype or self.spec.dtype), self.pointer[operand], offset)

    def packed(self, which: str, kv: Value) -> str:
        size = self.k_size if which == "k" else self.v_size
        element, base = memory_type(self.spec.accumulator), self.pointer[f"{which}_packed"]
        return self.f.address(element, base, self.f.mul(kv, size))


def _pack_head(arguments: Arguments, kv: str) -> None:
    """Keys as panels of columns over the head's dimension, values as panels over the keys."""
    f, spec, number = arguments.f, arguments.spec, arguments.number
    batch = f.op(f"udiv i64 {kv}, {spec.kv_heads}")
    head = f.sub(kv, f.mul(batch, spec.kv_heads))
    keys = arguments.keys
    k, v = (arguments.at(which, batch, head) for which in "kv")
    pack_matrix(f, spec, k, arguments.packed("k", kv), keys, spec.head_dim, 1, number["k_row"])
    pack_matrix(f, spec, v, arguments.packed("v", kv), spec.value_dim, keys, number["v_row"], 1)


def pack_matrix(
    f: Function, spec: AttentionSpec, source: str, to: str, n: Value, k: Value, k_stride: Value, n_stride: Value
) -> None:
    """An n by k matrix in panels."""

    def one(column: str, _: list[str]) -> None:
        place = f.address(memory_type(spec.accumulator), to, f.mul(column, k))
        pack_panel(f, spec.panels, source, place, column, n, k, k_stride, n_stride)

    f.loop(0, n, spec.panels.columns, [], one)


class Attend(Arguments):
    """Emits the attention of one block of query rows."""

    def __init__(self, f: Function, spec: AttentionSpec, slots: Sequence[str] = SLOTS) -> None:
        super().__init__(f, spec, slots)
        accumulator, target = spec.accumulator, spec.target
        self.element = memory_type(accumulator)
        self.type = vector(self.element, spec.lanes)
        self.size = accumulator.itemsize
        self.scoring = Arithmetic(spec.dtype, accumulator, accumulator, target)
        self.mixing = Arithmetic(accumulator, accumulator, accumulator, target)
        self.math = vector_math.Math(f, self.type, target)
        self.scores = f.alloca(self.element, spec.block_rows * spec.score_step)
        self.sums = f.alloca(self.element, spec.block_rows * spec.value_columns)
        self.highest = f.alloca(self.element, spec.block_rows)
        self.totals = f.alloca(self.element, spec.block_rows)
        self.mask_step = self.number["mask_row"]  # from row to row of a block
        self.out_step = self.number.get("out_row", "")

    def whole_head(self, kv: str) -> None:
        """All blocks of rows that read one key head."""
        f, spec = self.f, self.spec
        _pack_head(self, kv)
        blocks = f.op(f"udiv i64 {f.add(self.number['queries'], spec.query_rows - 1)}, {spec.query_rows}")
        first = f.mul(f.mul(kv, spec.shared_by), blocks)
        f.loop(first, f.add(first, f.mul(blocks, spec.shared_by)), 1, [], lambda chunk, _: self.chunk(chunk))

    def chunk(self, index: str) -> None:
        f, spec, number = self.f, self.spec, self.number
        blocks = f.op(f"udiv i64 {f.add(number['queries'], spec.query_rows - 1)}, {spec.query_rows}")
        flat = f.op(f"udiv i64 {index}, {blocks}")
        first = f.mul(f.sub(index, f.mul(flat, blocks)), spec.query_rows)
        batch = f.op(f"udiv i64 {flat}, {spec.num_heads}")
        head = f.sub(flat, f.mul(batch, spec.num_heads))
        shared = f.op(f"udiv i64 {head}, {spec.num_heads // spec.kv_heads}")
        kv = f.add(f.mul(batch, spec.kv_heads), shared)
        rows = f.smin(f.sub(number["queries"], first), spec.query_rows)
        position = f.add(first, self._shift(batch))  # of the first row
        low, high = self._key_range(position, rows)
        q = f.address(memory_type(spec.dtype), self.at("q", batch, head), f.mul(first, number["q_row"]))
        mask = self._mask_row(batch, head, first)

        def key_block(start: Value, count: Value) -> None:
            self._score(q, number["q_row"], spec.head_dim, rows, self.packed("k", kv), start, count, self.scores)
            f.loop(0, rows, 1, [], lambda i, _: self._softmax_row(i, f.add(position, i), start, count, mask))
            resume = 0 if spec.one_block else 1
            self._mix(rows, self.scores, self.packed("v", kv), spec.value_dim, start, count, resume)

        self._over_keys(rows, low, high, key_block)
        out = f.address(memory_type(spec.dtype), self.at("out", batch, head), f.mul(first, number["out_row"]))
        f.loop(0, rows, 1, [], lambda i, _: self._store_row(i, out))

    def _over_keys(self, rows: Value, low: Value, high: Value, block: Callable[[Value, Value], None]) -> None:
        """block(first key, number of keys) for all blocks of keys in a range."""
        f, spec = self.f, self.spec

        def one_pass(_: str, carried: list[str]) -> list[Value]:
            wanted, first, last = carried

            def one_block(start: str, _: list[str]) -> None:
                block(start, f.smin(f.sub(last, start), spec.key_block))

            def all_blocks() -> None:
                self._start(rows)
                f.loop(first, last, spec.key_block, [], one_block)

            f.if_(wanted, all_blocks)
            return [self._has_lost_row(rows), 0, self.keys]

        # a mask may drop every key that a row keeps by position: that row averages over all keys, in a second pass
        passes = 2 if spec.mask != "none" and (spec.causal or spec.window is not None) else 1
        f.loop(0, passes, 1, [("i1", "true"), ("i64", low), ("i64", high)], one_pass)

    def _shift(self, batch: Value) -> Value:
        """The absolute position of query 0."""
        f = self.f
        if not self.spec.has_offset:
            return f.smax(f.sub(self.keys, self.number["queries"]), 0)
        place = f.address("i64", self.pointer["offset"], f.mul(batch, self.number["offset_batch"]))
        return f.load("i64", place, 8)

    def _start(self, rows: Value) -> None:
        f, spec = self.f, self.spec

        def one(i: str, _: list[str]) -> None:
            nothing = constant(self.element, -math.inf)
            f.store(self.element, nothing, f.address(self.element, self.highest, i), self.size)
            f.store(self.element, constant(self.element, 0), f.address(self.element, self.totals, i), self.size)

        f.loop(0, rows, 1, [], one)
        end = f.mul(rows, spec.value_columns)
        f.loop(0, end, spec.lanes, [], lambda i, _: f.store(
            self.type, "zeroinitializer", f.address(self.element, self.sums, i), self.size))  # fmt: skip

    def _key_range(self, position: Value, rows: Value) -> tuple[Value, Value]:
        """Keys that some row of the block keeps; all keys when a row keeps none, since it then averages over all."""
        f, spec = self.f, self.spec
        if not spec.causal and spec.window is None:
            return 0, self.keys
        last = f.sub(f.add(position, rows), 1)
        high = f.smin(self.keys, f.add(last, 1))
        if spec.window is None:
            return 0, high
        low = f.smax(f.sub(position, spec.window), 0)
        empty = f.compare("sge", "i64", f.sub(last, spec.window), self.keys)
        low = f.select("i64", empty, 0, f.op(f"udiv i64 {low}, {spec.key_block}"))
        return f.mul(low, spec.key_block), f.select("i64", empty, self.keys, high)

    def _has_lost_row(self, rows: Value) -> str:
        """Whether some row kept no key so far."""
        f = self.f

        def one(i: str, carried: list[str]) -> list[Value]:
            high = f.load(self.element, f.address(self.element, self.highest, i), self.size)
            lost = f.compare("ole", self.element, high, constant(self.element, DROPPED))
            return [f.binary("or", "i1", carried[0], lost)]

        return f.loop(0, rows, 1, [("i1", "false")], one)[0]

    def _mask_row(self, batch: Value, head: Value, first: Value) -> str:
        if self.spec.mask == "none":
            return ""
        dtype = self._mask_dtype()
        start = self.at("mask", batch, head, dtype)
        return self.f.address(memory_type(dtype), start, self.f.mul(first, self.number["mask_row"]))

    def _mask_dtype(self) -> DType:
        return bool_ if self.spec.mask == "custom" else self.spec.dtype

    def _panels_of(self, count: Value, body: Callable[[Value, Value], None]) -> None:
        """body(first column, vectors) for the panels of so many columns."""
        f, columns, lanes = self.f, self.spec.panels.columns, self.spec.lanes

        def one(column: str, _: list[str]) -> None:
            left = f.sub(count, column)
            vectors = f.op(f"udiv i64 {f.add(f.smin(left, columns), lanes - 1)}, {lanes}")
            body(column, vectors)

        f.loop(0, count, columns, [], one)

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

        # keys behind the block but inside its last panel are scored too, and ignored
        whole = f.round_down(f.add(count, spec.panels.columns - 1), spec.panels.columns)
        self._panels_of(f.smin(whole, f.sub(self.keys, start)), panel)

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

        self._panels_of(dim, panel)

    # one row of scores

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
                score = f.select(self.type, inside, score, constant(self.type, OUTSIDE))
            if inside is not None or not self._is_plain:
                f.store(self.type, score, place(j), self.size)
            return [m.select(m.test("ogt", carried[0], score), carried[0], score)]

        (high,) = self._over_row(count, [(self.type, constant(self.type, OUTSIDE))], largest)
        block_high = f.fold_lanes(self.type, high, self._larger)
        if self._is_plain:
            block_high = f.binary("fmul", self.element, block_high, constant(self.element, self.spec.scale))
        high_place, total_place = (f.address(self.element, cells, i) for cells in (self.highest, self.totals))
        before, now = "", block_high
        if not self.spec.one_block:
            before = f.load(self.element, high_place, self.size)
            now = self._larger(self.element, before, block_high)
        f.store(self.element, now, high_place, self.size)
        lowered = f.splat(self.type, f.op(f"fneg {self.element} {now}"))

        def exponentials(j: Value, carried: list[str], inside: str | None) -> list[Value]:
            score = f.load(self.type, place(j), self.size)
            # places behind the last key are far below any score, whatever the scale
            score = m.fma(score, m.c(self.spec.scale), lowered) if self._is_plain else m.add(score, lowered)
            e = vector_math.exp_below(m, score)
            if inside is not None:
                e = f.select(self.type, inside, e, "zeroinitializer")
            f.store(self.type, e, place(j), self.size)
            return [m.add(carried[0], e)]

        (total,) = self._over_row(count, [(self.type, "zeroinitializer")], exponentials)
        block_total = f.fold_lanes(self.type, total, lambda type_, a, b: f.binary("fadd", type_, a, b))
        if self.spec.one_block:
            f.store(self.element, block_total, total_place, self.size)
            return
        fade = vector_math.exp(m, f.splat(self.type, f.binary("fsub", self.element, before, now)))
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
        inside = mask_below(f, lanes, f.sub(count, whole))
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

    def _larger(self, type_: str, a: str, b: str) -> str:
        f = self.f
        return f.select(type_, f.compare("ogt", type_, a, b), a, b)

    def _final_score(self, raw: str, key: Value, position: Value, mask_row: str) -> str:
        """Scaled, capped, biased, and DROPPED where the masks say so."""
        f, m, spec = self.f, self.math, self.spec
        score = m.mul(raw, m.c(spec.scale))
        if spec.softcap is not None:
            score = m.mul(vector_math.tanh(m, m.mul(score, m.c(1.0 / spec.softcap))), m.c(spec.softcap))
        dropped = m.c(DROPPED)
        if spec.mask == "bias":
            score = m.add(score, self._mask_values(mask_row, key))
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
        """The mask's values for a vector of keys; those behind the last key are not read."""
        f, spec, dtype = self.f, self.spec, self._mask_dtype()
        type_ = memory_type(dtype, spec.lanes)
        if spec.mask_spans_keys:
            inside = mask_below(f, spec.lanes, f.smin(f.sub(self.keys, key), spec.lanes))
            address = f.address(memory_type(dtype), mask_row, key)
            values = f.masked_load(type_, address, dtype.itemsize, inside)
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
        total = m.select(m.test("oeq", total, m.c(0.0)), m.c(1.0), total)  # no keys at all
        share = m.div(m.c(1.0), total)
        sums = f.address(self.element, self.sums, f.mul(i, spec.value_columns))
        kept = memory_type(spec.dtype, spec.lanes)

        def value(d: Value) -> str:
            mean = m.mul(f.load(self.type, f.address(self.element, sums, d), self.size), share)
            return convert(f, mean, spec.accumulator, spec.dtype, spec.lanes, spec.target)

        whole = spec.value_dim // spec.lanes * spec.lanes
        size = spec.dtype.itemsize
        f.loop(0, whole, spec.lanes, [], lambda d, _: f.store(kept, value(d), f.address(place, out, d), size))
        if whole < spec.value_dim:
            inside = mask_below(f, spec.lanes, spec.value_dim - whole)
            f.masked_store(kept, value(whole), f.address(place, out, whole), size, inside)
