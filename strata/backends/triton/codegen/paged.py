"""Attention over a paged KV cache: pages are read where they are, through the page table, and never gathered.

As in `attention`, a program goes through keys block by block with a running maximum and sum per row. Blocks of keys
begin at multiples of their size, counted from the first token of a sequence: first those whose keys are all in pages,
then one that has both old and new keys, then those of new tokens. So the bits of a row depend neither on the batch that
it is in nor on where its prompt was cut. A single query (decode) is taken with those of all heads that share a key
head; programs take segments of the keys, and a second one merges as many segments as the sequence has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata.backends.attention import DROPPED, LOG2E
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.codegen.grid import place_beside, programs_beside
from strata.backends.triton.codegen.render import Rendered, TritonProgram, finished
from strata.backends.triton.codegen.scalars import dot, encoded
from strata.backends.triton.schedules.schedule import AttentionBlocks, power_of_two
from strata.core import Dim, DType, TensorType, bf16, f16, f32
from strata.kernel import Buffer, Kernel
from strata.mir import Node, Op

_WIDEST = 256  # elements of a head
_FEW_ROWS = 64  # of all heads that share a key head, in a decode
_MERGED = 8  # segments at a time
# measured on an H200, 16 heads of 128 over 8 key heads: 231 µs for 256 sequences of 800 tokens, where memory takes 205
_DECODE = AttentionBlocks(16, 32, 2, 2, 512)
_PREFILL = AttentionBlocks(64, 64, 4, 3)  # 77 µs for four prompts of 1,024 tokens
_NAMES = ("q", "k", "v", "new_k", "new_v", "table", "past")


def takes_paged(op: Op, types: Sequence[TensorType]) -> bool:
    """Whether a paged attention is one kernel: pages of floats of 16 or 32 bits, of known sizes."""
    if op.name != "paged_attention" or len(types) != len(_NAMES):
        return False
    op_: Any = op
    page = types[1].shape[1]
    sizes = (op_.num_heads, op_.kv_heads, op_.head_dim, page)
    if types[0].dtype not in (f16, bf16, f32) or not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    return bool(op_.head_dim <= _WIDEST) and op_.dense.scale > 0


def render_paged(node: Node) -> Rendered:
    """The programs of a paged attention."""
    types = [x.type for x in node.inputs]
    inputs = tuple(Buffer(name, t.dtype, t.shape) for name, t in zip(_NAMES, types, strict=True))
    kernel = Kernel("paged_attention", inputs, (Buffer("out", node.types[0].dtype, node.types[0].shape),), ())
    op: Any = node.op
    group = op.num_heads // op.kv_heads
    decodes = types[0].shape[1] == 1 and group <= _FEW_ROWS
    blocks = _fitted(_DECODE if decodes else _PREFILL, types[0].dtype, group if decodes else 0)
    form = PagedText(kernel, op, types, group, blocks)
    return form.decode() if decodes else form.prefill()


def _fitted(blocks: AttentionBlocks, dtype: DType, rows: int) -> AttentionBlocks:
    height = power_of_two(rows, 16) if rows else blocks.rows
    return replace(blocks, rows=height, keys=blocks.keys // 2 if dtype is f32 else blocks.keys,
                   stages=2 if dtype is f32 else blocks.stages)  # fmt: skip


@dataclass
class PagedText:
    """Writes the programs of one paged attention."""

    kernel: Kernel
    op: Any
    types: Sequence[TensorType]
    group: int
    blocks: AttentionBlocks

    @property
    def dtype(self) -> DType:
        return self.types[0].dtype

    @property
    def width(self) -> int:
        return power_of_two(int(self.op.head_dim), 16)

    @property
    def page(self) -> int:
        return int(self.types[1].shape[1])

    @property
    def step(self) -> int:
        """Elements of a token's row of keys or values."""
        return int(self.op.kv_heads * self.op.head_dim)

    # programs

    def prefill(self) -> Rendered:
        b = self.blocks
        batch, count = self.types[0].shape[:2]
        e = self._emitter()
        down = (count + b.rows - 1) // b.rows
        e.write(f"block = {e.size(down)} - 1 - tl.program_id(0)")  # the longest rows first
        items = batch * self.op.num_heads
        place_beside(e, "item", items)
        e.write(f"batch = (item // {self.op.num_heads}).to(tl.int64)")
        e.write(f"head = (item % {self.op.num_heads}).to(tl.int64)")
        e.write(f"shared = head // {self.group}")
        e.write(f"query = (block * {b.rows} + tl.arange(0, {b.rows})).to(tl.int64)")
        size = e.size(count)
        e.write(f"inside = query < {size}")
        self._start(e, f"(batch * {size} + query[:, None]) * {self.op.num_heads} + head")
        e.write("position = query + past")
        e.write(f"first = block * {b.rows} + past")
        e.write(f"last = tl.minimum(first + {b.rows}, past + {size})")  # behind the last key that some row sees
        low = "0"
        if self.op.window is not None:
            e.write(f"low = tl.maximum(first - {self.op.window}, 0) // {b.keys} * {b.keys}")
            low = "low"
        e.write(f"whole = past // {b.keys} * {b.keys}")
        near = self.op.window is not None
        self._loop(e, low, "whole", old=True, new=False, causal=False, near=near)
        e.write(f"mixed = {'whole' if low == '0' else 'tl.maximum(whole, low)'}")
        self._loop(e, "mixed", "past", old=True, new=True, causal=True, near=near)
        e.write(f"fresh = tl.maximum((past + {b.keys - 1}) // {b.keys} * {b.keys}, {low})")
        e.write(f"full = tl.maximum((first + 1) // {b.keys} * {b.keys}, fresh)")
        self._loop(e, "fresh", "tl.minimum(full, last)", old=False, new=True, causal=False, near=near)
        self._loop(e, "full", "last", old=False, new=True, causal=True, near=near)
        e.write("sums = sums / total[:, None]")
        self._store(e, f"(batch * {size} + query[:, None]) * {self.op.num_heads} + head", "sums", "inside[:, None]")
        made = self._program(e, "paged_attention", self.kernel.buffers, (down, *programs_beside(items)))
        return Rendered(self.kernel, (made,), ())

    def decode(self) -> Rendered:
        b = self.blocks
        batch, pages = self.types[5].shape
        items = batch * self.op.kv_heads
        segments = (pages * self.page + b.segment - 1) // b.segment
        part = Buffer("part", f32, (items * segments * self.group * self.width,))
        about = Buffer("about", f32, (items * segments * self.group * 2,))
        e = self._emitter()
        e.write("item = tl.program_id(0)")
        e.write("segment = tl.program_id(1)")
        e.write(f"batch = (item // {self.op.kv_heads}).to(tl.int64)")
        e.write(f"shared = (item % {self.op.kv_heads}).to(tl.int64)")
        e.write("past = tl.load(past + batch)")
        e.write(f"low = segment.to(tl.int64) * {b.segment}")
        e.write("if low <= past:")
        with e.indented():
            e.write(f"row = tl.arange(0, {b.rows})")
            e.write(f"inside = row < {self.group}")
            e.write("position = past + row * 0")
            where = f"batch * {self.op.num_heads} + shared * {self.group} + row[:, None]"
            self._start(e, where, loads_past=False)
            e.write(f"end = tl.minimum(low + {b.segment}, past + 1)")
            near = self.op.window is not None
            if near:
                e.write(f"start = tl.maximum(past - {self.op.window}, low) // {b.keys} * {b.keys}")
            e.write(f"whole = tl.minimum(end, past // {b.keys} * {b.keys})")
            self._loop(e, "start" if near else "low", "whole", old=True, new=False, causal=False, near=near)
            rest = f"tl.maximum(whole, {'start' if near else 'low'})"
            self._loop(e, rest, "end", old=True, new=True, causal=True, near=near)
            e.write(f"place = ((item.to(tl.int64) * {e.size(segments)} + segment) * {self.group} + row)")
            e.write(f"spot = part + place[:, None] * {self.width} + dim[None, :]")
            e.write("tl.store(spot, sums, mask=inside[:, None])")
            e.write("tl.store(about + place * 2, most, mask=inside)")
            e.write("tl.store(about + place * 2 + 1, total, mask=inside)")
        first = self._program(e, "paged_attention", (*self.kernel.inputs, part, about), (items, segments))
        merged = self._merge(part, about, segments, items)
        return Rendered(self.kernel, (first, merged), (part, about))

    def _merge(self, part: Buffer, about: Buffer, segments: Dim, items: Dim) -> TritonProgram:
        """Results of the segments that a sequence has, added up in their order."""
        b, wide = self.blocks, self.width
        e = self._emitter()
        e.write("item = tl.program_id(0)")
        e.write("row = tl.program_id(1)")
        e.write(f"batch = (item // {self.op.kv_heads}).to(tl.int64)")
        e.write(f"shared = (item % {self.op.kv_heads}).to(tl.int64)")
        e.write(f"count = tl.load(past + batch) // {b.segment} + 1")
        e.write(f"most = tl.full([1], {DROPPED * LOG2E!r}, tl.float32)")
        e.write("total = tl.full([1], 0.0, tl.float32)")
        e.write(f"sums = tl.full([1, {wide}], 0.0, tl.float32)")
        e.write(f"dim = tl.arange(0, {wide})")
        e.write(f"for start in range(0, count, {_MERGED}):")
        with e.indented():
            e.write(f"at = start + tl.arange(0, {_MERGED})")
            e.write("inside = at < count")
            e.write(f"place = (item.to(tl.int64) * {e.size(segments)} + at) * {self.group} + row")
            e.write('highest = tl.load(about + place * 2, mask=inside, other=float("-inf"))')
            e.write("weight = tl.load(about + place * 2 + 1, mask=inside, other=0.0)")
            e.write(f"spot = part + place[:, None] * {wide} + dim[None, :]")
            e.write("values = tl.load(spot, mask=inside[:, None], other=0.0)")
            e.write("higher = tl.maximum(most, tl.max(highest, axis=0))")
            e.write("fade = tl.exp2(most - higher)")
            e.write("scale = tl.exp2(highest - higher)")
            e.write("total = total * fade + tl.sum(scale * weight, axis=0)")
            e.write("sums = sums * fade[:, None] + tl.sum(scale[:, None] * values, axis=0)[None, :]")
            e.write("most = higher")
        e.write("sums = sums / total[:, None]")
        self._store(e, f"batch * {self.op.num_heads} + shared * {self.group} + row", "sums", "")
        buffers = (self.kernel.inputs[6], part, about, *self.kernel.outputs)
        made = self._program(e, "paged_attention_1", buffers, (items, self.group))
        return replace(made, schedule=replace(b, warps=1 if wide <= 128 else 2, segment=0))

    # parts

    def _emitter(self) -> TritonEmitter:
        return TritonEmitter(self.kernel, self.blocks, (self.blocks.rows, self.blocks.keys))

    def _program(
        self, e: TritonEmitter, name: str, buffers: tuple[Buffer, ...], grid: tuple[Dim, ...]
    ) -> TritonProgram:
        return finished(e, name, replace(self.kernel, inputs=buffers, outputs=()), buffers, grid)

    def _start(self, e: TritonEmitter, row: str, *, loads_past: bool = True) -> None:
        """Queries, and running values of their rows."""
        if loads_past:
            e.write("past = tl.load(past + batch)")
        e.write(f"dim = tl.arange(0, {self.width})")
        masks = ["inside[:, None]", *self._columns()]
        place = f"q + ({row}) * {self.op.head_dim} + dim[None, :]"
        e.write(f"queries = tl.load({place}, mask={' & '.join(masks)}, other=0)")
        e.write(f"most = tl.full([{self.blocks.rows}], {DROPPED * LOG2E!r}, tl.float32)")
        e.write(f"total = tl.full([{self.blocks.rows}], 0.0, tl.float32)")
        e.write(f"sums = tl.full([{self.blocks.rows}, {self.width}], 0.0, tl.float32)")

    def _columns(self) -> list[str]:
        return [f"(dim[None, :] < {self.op.head_dim})"] if self.width != self.op.head_dim else []

    def _loop(self, e: TritonEmitter, low: str, high: str, *, old: bool, new: bool, causal: bool, near: bool) -> None:
        """Blocks of keys that are in pages (`old`), among the new rows (`new`), or both; some rows may not see some."""
        b, op = self.blocks, self.op
        e.write(f"for start in range({low}, {high}, {b.keys}):" if low != "start" else
                f"for first_key in range(start, {high}, {b.keys}):")  # fmt: skip
        with e.indented():
            e.write(f"key = {'first_key' if low == 'start' else 'start'} + tl.arange(0, {b.keys})")
            if old:
                seen = ", mask=key < past, other=0" if new else ""
                pages = e.size(self.types[5].shape[1])
                e.write(f"number = tl.load(table + batch * {pages} + key // {self.page}{seen})")
                e.write(f"place = (number * {self.page} + key % {self.page}) * {self.step} + shared * {op.head_dim}")
            if new:
                count = e.size(self.types[0].shape[1])
                e.write(f"fresh_place = (batch * {count} + key - past) * {self.step} + shared * {op.head_dim}")
                e.write(f"is_new = (key >= past) & (key < past + {count})")
            e.write(f"keys = {self._tile('k', old, new)}")
            e.write(f"score = {dot('queries', 'tl.trans(keys)', self._zeros(), self.dtype, e.needs)}")
            times = op.dense.scale * LOG2E
            if op.softcap is not None:
                e.write(f"score = {e.needs('tanh_f32')}(score * {op.dense.scale / op.softcap!r})")
                times = op.softcap * LOG2E
            sees = ["(key[None, :] <= position[:, None])"] if causal else []
            sees += [f"(key[None, :] >= position[:, None] - {op.window})"] if near else []
            if sees:  # before the product, which is then added to in one rounding in every loop
                e.write(f"score = tl.where({' & '.join(sees)}, score, {DROPPED * LOG2E / times!r})")
            e.write(f"higher = tl.maximum(most, tl.max(score, axis=1) * {times!r})")
            e.write(f"weight = tl.exp2(score * {times!r} - higher[:, None])")
            e.write("fade = tl.exp2(most - higher)")
            e.write("total = total * fade + tl.sum(weight, axis=1)")
            e.write("sums = sums * fade[:, None]")
            e.write(f"values = {self._tile('v', old, new)}")
            e.write(f"sums = {dot(encoded('weight', self.dtype, e.needs), 'values', 'sums', self.dtype, e.needs)}")
            e.write("most = higher")

    def _tile(self, name: str, old: bool, new: bool) -> str:
        """A block of keys or values, as rows."""
        columns = self._columns()

        def loaded(base: str, place: str, rows: str) -> str:
            masks = [*([f"{rows}[:, None]"] if rows else []), *columns]
            text = f", mask={' & '.join(masks)}, other=0" if masks else ""
            return f"tl.load({base} + {place}[:, None] + dim[None, :]{text})"

        if not new:
            return loaded(name, "place", "")
        fresh = loaded(f"new_{name}", "fresh_place", "is_new")
        return f"tl.where(is_new[:, None], {fresh}, {loaded(name, 'place', '(key < past)')})" if old else fresh

    def _zeros(self) -> str:
        return f"tl.full([{self.blocks.rows}, {self.blocks.keys}], 0.0, tl.float32)"

    def _store(self, e: TritonEmitter, row: str, value: str, inside: str) -> None:
        masks = [*([inside] if inside else []), *self._columns()]
        mask = f", mask={' & '.join(masks)}" if masks else ""
        text = encoded(value, self.dtype, e.needs)
        e.write(f"tl.store(out + ({row}) * {self.op.head_dim} + dim[None, :], {text}{mask})")
