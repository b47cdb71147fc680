"""What the attention kernels share: the description of one attention, and the key range that a block of rows reads.

    void pack(ptr args, i64 begin, i64 end)        packs the values of one key head per chunk, where they need it
    void attend(ptr args, i64 begin, i64 end)      one block of query rows of one head per chunk

Keys are taken in blocks of fixed length with a running maximum and sum per row (online softmax), so the order of every
sum depends on nothing but the number of keys. Blocks of keys that all rows of a query block drop are not read. Sizes,
strides and offsets are arguments; the head sizes and the kinds of mask are part of the code. The fields
mean what they do in strata.ops.nn.attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.gemm.micro import TileSet
from strata.backends.llvm.gemm.pack_b import Panels, pack_panel
from strata.backends.llvm.ir.builder import IrFunction, Value, constant, vector
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.math import exponentials
from strata.core import DType, Target, bool_, f32

DROPPED: Final = -1e9  # the score of a dropped key, where nothing else is said
_POINTERS: Final = ("q", "k", "v", "out", "work", "mask", "offset")
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
    mask_spans_rows: bool = True  # False: one row of the mask for all queries
    has_offset: bool = False
    softcap: float | None = None
    dropped: float | None = None
    zero_rows: bool = False
    decode: bool = False  # few queries: keys and values are read in place
    segment: int = 0  # keys that a chunk of a decode takes, where heads alone are too few chunks; 0: all of them
    query_rows: int = 32
    key_block: int = 1024
    queries: int | None = None  # where known, code for other sizes is left out
    keys: int | None = None

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
    def dropped_score(self) -> float:
        return DROPPED if self.dropped is None else self.dropped

    @property
    def lowest(self) -> float:
        """What maxima begin with, and what fills vectors after the last key: no number is below. A row whose scores
        are all -inf so has a maximum from which they differ, and a sum of 0."""
        return float(np.finfo(self.accumulator.np).min)

    @property
    def is_positional(self) -> bool:
        """Whether positions decide which keys a row keeps."""
        return self.causal or self.window is not None

    @property
    def score_tiles(self) -> TileSet:
        """Keys by vectors of queries: eight rows of a large power-of-two stride still fit a set of the cache."""
        keys = None if self.is_positional else self.keys
        heights = _needed(self.tiles.heights, self.key_block, keys)
        return TileSet(heights, 3 if self.target.vector_registers >= 32 else 2)

    @property
    def mix_tiles(self) -> TileSet:
        """Queries by vectors of values: the queries of a key are side by side, so a tile can have many."""
        heights = self.tiles.heights
        if self.target.vector_registers >= 32:
            heights = (12, *heights)
        heights = _needed(heights, self.query_rows, self.queries)
        return TileSet(heights, 2, "columns", strided_b=not self.packs_values)

    @property
    def score_widths(self) -> tuple[int, ...]:
        """Vectors of the existing panels of queries."""
        most = self.query_panels.vectors
        if self.queries is None:
            return tuple(range(most, 0, -1))
        vectors = [-(-rows // self.lanes) for rows in _parts(self.query_rows, self.queries)]
        return tuple(sorted({w for n in vectors for w in (most if n >= most else 0, n % most) if w}, reverse=True))

    @property
    def query_panels(self) -> Panels:
        """The layout of the transposed queries of a block."""
        return replace(self.panels, vectors=self.score_tiles.vectors)

    @property
    def lanes(self) -> int:
        return self.panels.lanes

    @property
    def value_columns(self) -> int:
        return self.padded(self.value_dim)

    def padded(self, dim: int) -> int:
        """A row of elements in whole vectors."""
        return -(-dim // self.lanes) * self.lanes

    @property
    def packs_values(self) -> bool:
        """Whether rows of values cannot be read in place, in whole vectors."""
        return not self.decode and (self.dtype is not self.accumulator or self.value_dim != self.value_columns)

    def v_packed_size(self, keys: int, batch: int = 1) -> int:
        """Elements of the packed values."""
        return batch * self.kv_heads * self.panels.size(self.value_dim, keys) if self.packs_values else 0

    def pack_count(self, batch: int) -> int:
        return batch * self.kv_heads

    def chunk_count(self, queries: int, batch: int) -> int:
        if self.decode:
            return batch * self.kv_heads * queries
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
        """Of the buffers of a block of rows."""
        wide = self.padded(self.query_rows)
        of_keys = self.key_block * (2 if self.mask != "none" and self.mask_spans_keys and self.mask_spans_rows else 1)
        elements = wide * (of_keys + self.head_dim + 5) + self.query_rows * self.value_columns
        return elements * self.accumulator.itemsize

    def __str__(self) -> str:
        parts = [f"attention {self.dtype} heads {self.num_heads}/{self.kv_heads} dim {self.head_dim}/{self.value_dim}"]
        parts += [f"scale {self.scale!r}", f"block {self.query_rows} x {self.key_block}"]
        sizes = ["?" if n is None else str(n) for n in (self.queries, self.keys)]
        parts += [] if sizes == ["?", "?"] else [f"for {' x '.join(sizes)}"]
        parts += ["decode"] if self.decode else []
        parts += [f"segment {self.segment}"] if self.segment else []
        parts += ["causal"] if self.causal else []
        parts += [f"window {self.window}"] if self.window is not None else []
        if self.mask != "none":
            spans = ("" if self.mask_spans_keys else " per row") + ("" if self.mask_spans_rows else " for all rows")
            parts += [f"mask {self.mask}{spans}"]
        parts += ["offset"] if self.has_offset else []
        parts += [f"softcap {self.softcap!r}"] if self.softcap is not None else []
        parts += [f"dropped {self.dropped!r}"] if self.dropped is not None else []
        parts += ["rows of zeros"] if self.zero_rows else []
        return "; ".join(parts)


def _parts(block: int, count: int) -> tuple[int, ...]:
    """The sizes of the blocks that a number of rows is cut into."""
    return tuple({n for n in (min(block, count), count % block) if n})


def _needed(heights: tuple[int, ...], block: int, count: int | None) -> tuple[int, ...]:
    """The heights of the tiles that blocks of a known number, or of any number, are cut into."""
    if count is None:
        return heights
    needed = set()
    for size in _parts(block, count):
        left = size
        for height in heights:
            if left >= height:
                needed.add(height)
                left %= height
    return tuple(h for h in heights if h in needed) or heights[-1:]


class Arguments:
    """The argument block, loaded once per call: pointers, then numbers from `batch` on."""

    def __init__(self, f: IrFunction, spec: AttentionSpec, slots: Sequence[str] = SLOTS) -> None:
        self.f, self.spec = f, spec
        places = {slot: f.address("i64", "%args", i) for i, slot in enumerate(slots)}
        pointers = slots.index("batch")
        self.pointer = {slot: f.load("ptr", places[slot], 8) for slot in slots[:pointers]}
        self.number = {slot: f.load("i64", places[slot], 8) for slot in slots[pointers:]}
        self.keys = self.number["keys"]

    def at(self, operand: str, batch: Value, head: Value, dtype: DType | None = None) -> str:
        """Where an operand's head starts."""
        f, number = self.f, self.number
        offset = f.add(f.mul(batch, number[f"{operand}_batch"]), f.mul(head, number[f"{operand}_head"]))
        return f.address(memory_type(dtype or self.spec.dtype), self.pointer[operand], offset)

    def packed_values(self, kv: Value) -> str:
        size = self.f.mul(self.keys, self.spec.value_columns)
        return self.f.address(memory_type(self.spec.accumulator), self.pointer["work"], self.f.mul(kv, size))


def pack_matrix(
    f: IrFunction, panels: Panels, source: str, to: str, n: Value, k: Value, k_stride: Value, n_stride: Value
) -> None:
    """An n by k matrix in panels."""

    def one(column: str, _: list[str]) -> None:
        place = f.address(memory_type(panels.packed), to, f.mul(column, k))
        pack_panel(f, panels, source, place, column, n, k, k_stride, n_stride)

    f.loop(0, n, panels.columns, [], one)


class Attend(Arguments):
    """What the kernels over blocks of query rows share: types, positions, ranges of keys."""

    def __init__(self, f: IrFunction, spec: AttentionSpec, slots: Sequence[str] = SLOTS) -> None:
        super().__init__(f, spec, slots)
        accumulator, target = spec.accumulator, spec.target
        self.element = memory_type(accumulator)
        self.type = vector(self.element, spec.lanes)
        self.size = accumulator.itemsize
        self.scoring = GemmArithmetic(spec.dtype, accumulator, accumulator, target)
        self.mixing = GemmArithmetic(accumulator, accumulator, accumulator, target)
        self.math = exponentials.VectorMath(f, self.type, target)

    def _start(self, rows: Value) -> None:
        """Before the first block of keys."""
        raise NotImplementedError

    def _has_lost_row(self, rows: Value) -> str:
        """Whether some row kept no key so far."""
        raise NotImplementedError

    def _over_keys(self, rows: Value, low: Value, high: Value, block: Callable[[Value, Value, Value], None]) -> None:
        """block(first key, number of keys, 0 in the first block) for all blocks of keys in a range."""
        f, spec = self.f, self.spec

        def one_pass(_: str, carried: list[str]) -> list[Value]:
            wanted, first, last = carried

            def one_block(start: str, _: list[str]) -> None:
                resume = f.convert("zext", "i1", f.compare("ne", "i64", start, first), "i64")
                block(start, f.smin(f.sub(last, start), spec.key_block), resume)

            def all_blocks() -> None:
                self._start(rows)
                f.loop(first, last, spec.key_block, [], one_block)

            f.if_(wanted, all_blocks)
            return [self._has_lost_row(rows), 0, self.keys]

        # a mask may drop every key that a row keeps by position: that row averages over all keys, in a second pass
        passes = 2 if spec.mask != "none" and spec.is_positional and spec.dropped is None else 1
        f.loop(0, passes, 1, [("i1", "true"), ("i64", low), ("i64", high)], one_pass)

    def _shift(self, batch: Value) -> Value:
        """The absolute position of query 0."""
        f = self.f
        if not self.spec.has_offset:
            return f.smax(f.sub(self.keys, self.number["queries"]), 0)
        place = f.address("i64", self.pointer["offset"], f.mul(batch, self.number["offset_batch"]))
        return f.load("i64", place, 8)

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
        if spec.dropped is not None:
            low = f.op(f"udiv i64 {f.smin(low, self.keys)}, {spec.key_block}")
            return f.mul(low, spec.key_block), high
        empty = f.compare("sge", "i64", f.sub(last, spec.window), self.keys)
        low = f.select("i64", empty, 0, f.op(f"udiv i64 {low}, {spec.key_block}"))
        return f.mul(low, spec.key_block), f.select("i64", empty, self.keys, high)

    def _mask_row(self, batch: Value, head: Value, first: Value) -> str:
        if self.spec.mask == "none":
            return ""
        dtype = self._mask_dtype()
        start = self.at("mask", batch, head, dtype)
        return self.f.address(memory_type(dtype), start, self.f.mul(first, self.number["mask_row"]))

    def _mask_dtype(self) -> DType:
        return bool_ if self.spec.mask == "custom" else self.spec.dtype

    def _panels_of(self, panels: Panels, count: Value, body: Callable[[Value, Value], None]) -> None:
        """body(first column, vectors) for the panels of this many columns."""
        f, columns, lanes = self.f, panels.columns, panels.lanes

        def one(column: str, _: list[str]) -> None:
            left = f.sub(count, column)
            vectors = f.ceil_div(f.smin(left, columns), lanes)
            body(column, vectors)

        f.loop(0, count, columns, [], one)

    def _divisor(self, total: str) -> str:
        """A vector of sums to divide by: that of a row without a key is 1 where its results are zeros, else 0."""
        m, spec = self.math, self.spec
        if spec.dropped == -math.inf and not spec.zero_rows:
            none = self.f.compare("eq", "i64", self.keys, 0)
            return self.f.select(self.type, none, constant(self.type, 1.0), total, uniform=True)
        return m.select(m.test("oeq", total, m.c(0.0)), m.c(1.0), total)

    def _larger(self, type_: str, a: str, b: str) -> str:
        f = self.f
        return f.select(type_, f.compare("ogt", type_, a, b), a, b)
