"""Attention in one Triton kernel: two `tl.dot` in one loop over the keys (online softmax), never a score matrix.

A program takes a block of query rows of one head and goes through the keys, block by block, with a running maximum and
sum per row; scores are in base 2. Causal blocks below the diagonal need no mask, and come in a loop of their own;
blocks that all rows drop are not read. Few queries (decode) are taken together with those of all heads that share a key
head; a program takes a segment of the keys, and a second one merges segments in their order. Whether and how keys are
split depends on their number alone, so that the bits of a row do not depend on the batch that it is in.

Meanings are those of `strata.ops.nn.attention`: dropped keys score -1e9, so that a row that keeps no key averages over
all of them. Such rows are found at the end, and done again over all keys. Where the op says that they score -inf,
maxima begin with a number from which -inf differs, and the sum of a row without a key is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata.backends.attention import DROPPED, LOG2E, LOWEST, AttentionPlaces, HeadStrides
from strata.backends.triton.codegen.elements import literal
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.codegen.grid import place_beside, programs_beside
from strata.backends.triton.codegen.render import Rendered, TritonProgram, finished
from strata.backends.triton.codegen.scalars import decoded, dot, encoded
from strata.backends.triton.codegen.specialised import render_specialised, suits_specialised
from strata.backends.triton.schedules.schedule import AttentionBlocks, known, parse_gpu_schedule, power_of_two
from strata.backends.triton.schedules.winners import winner
from strata.backends.triton.target import Gpu
from strata.core import Dim, DType, TensorType, bf16, bool_, dim_max, f16, f32, i32, i64
from strata.kernel import Buffer, Kernel
from strata.lir import Spacing
from strata.mir import Node, Op

_LEAST = LOWEST / LOG2E  # scores below, which -inf is not, count as this: in base 2 they would be -inf
_WIDEST = 256  # elements of a head
_FEW_QUERIES = 16  # that are a decode
_FEW_ROWS = 64  # of all heads that share a key head
_MERGED = 16  # segments at a time
_SEGMENTS = ((2048, 128), (4096, 256))  # up to so many keys, so many are a segment
_LONG_SEGMENT = 512  # of more keys, where no winner says otherwise


def takes_attention(op: Op, types: Sequence[TensorType]) -> bool:
    """Whether an attention on these types is one kernel: floats of 16 and 32 bits, heads of known sizes. The sums of
    rows are left for a backward pass where every row keeps a key and scores are products and no more."""
    if op.name not in ("attention", "attention_lse") or len(types) < 3:
        return False
    op_: Any = op
    plain = op_.mask == "none" and op_.window is None and not op_.has_offset and op_.softcap is None and op_.scale > 0
    plain = plain and op_.dropped is None
    if op.name == "attention_lse" and not plain:
        return False
    q, k, v, *extra = types
    sizes = op_.sizes(q, k, v)
    numbers = (op_.num_heads, op_.kv_heads, op_.head_dim, sizes.value_dim)
    if q.dtype not in (f16, bf16, f32) or not all(isinstance(n, int) for n in numbers) or sizes.keys == 0:
        return False
    if max(op_.head_dim, sizes.value_dim) > _WIDEST or min(numbers) < 1:
        return False
    if op_.mask != "none" and extra[0].dtype is not (bool_ if op_.mask == "custom" else q.dtype):
        return False
    return not op_.has_offset or extra[-1].dtype in (i32, i64)


def render_attention(node: Node, views: Sequence[Spacing], gpu: Gpu, given: str = "") -> Rendered:
    """The programs of an attention whose inputs are spaced as given."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    places = AttentionPlaces(op, {"q": 0, "k": 1, "v": 2, "mask": 3}, {"out": node.types[0]}, types, views)
    names = ["q", "k", "v", *(["mask"] if op.mask != "none" else []), *(["offset"] if op.has_offset else [])]
    inputs = tuple(Buffer(name, t.dtype, t.shape) for name, t in zip(names, types, strict=True))
    outputs = tuple(Buffer(name, t.dtype, t.shape) for name, t in zip(("out", "lse"), node.types, strict=False))
    kernel = Kernel("attention", inputs, outputs, ())
    starts = {name: view.start for name, view in zip(names, views, strict=True)}
    sizes = places.sizes
    group = op.num_heads // op.kv_heads
    decodes = isinstance(sizes.queries, int) and sizes.queries <= _FEW_QUERIES and sizes.queries * group <= _FEW_ROWS
    decodes = decodes and len(outputs) == 1
    rows = sizes.queries * group if decodes else known(sizes.queries)
    kind = f"attention {types[0].dtype.bits}{' causal' if op.causal and not decodes else ''}"
    measured = (rows, known(sizes.keys), op.head_dim)
    suits = not decodes and suits_specialised(op, places, starts, types[0].dtype, gpu)
    found = parse_gpu_schedule(given) if given else winner(gpu, kind, measured, "none" if suits else "consumers")
    assert isinstance(found, AttentionBlocks)
    if found.consumers and suits:
        return render_specialised(kernel, op, places, starts, types[0].dtype, found)
    if found.consumers:  # asked for where it does not apply
        found = winner(gpu, kind, measured, "consumers")
        assert isinstance(found, AttentionBlocks)
    form = AttentionText(kernel, op, places, starts, types, group, fitted(found, rows, sizes.keys, decodes))
    return form.decode() if decodes else form.prefill()


def fitted(blocks: AttentionBlocks, rows: int, keys: Dim, decodes: bool) -> AttentionBlocks:
    """Blocks no larger than what there is; a decode takes its keys in segments where there are many."""
    block = power_of_two(known(keys), 16, blocks.keys)
    height = power_of_two(rows, 16, _FEW_ROWS if decodes else blocks.rows)
    warps = blocks.warps if height * block >= 32 * 32 * blocks.warps else min(4, blocks.warps)
    segment = 0
    if decodes:
        length = known(keys)
        long = blocks.segment or _LONG_SEGMENT
        segment = max(block, next((n for most, n in _SEGMENTS if length <= most), long))
        segment = 0 if length <= segment else segment
    return replace(blocks, rows=height, keys=block, warps=warps, segment=segment)


@dataclass
class AttentionText:
    """Writes the programs of one attention."""

    kernel: Kernel
    op: Any
    places: AttentionPlaces
    starts: dict[str, Dim]
    types: Sequence[TensorType]
    group: int
    blocks: AttentionBlocks

    @property
    def dtype(self) -> DType:
        return self.types[0].dtype

    @property
    def is_positional(self) -> bool:
        return self.op.causal or self.op.window is not None

    @property
    def is_plain(self) -> bool:
        """Scores are products times a positive number, and nothing else."""
        return self.op.mask == "none" and self.op.softcap is None and self.op.scale > 0 and self.dtype is not f32

    @property
    def loses_rows(self) -> bool:
        """Whether a row may keep no key of those that its block reads."""
        skips = self.is_positional and self.op.dropped is None
        return skips and (self.op.mask != "none" or self.op.window is not None or self.op.has_offset)

    @property
    def width(self) -> int:
        return power_of_two(int(self.op.head_dim), 16)

    @property
    def value_width(self) -> int:
        return power_of_two(int(self.places.sizes.value_dim), 16)

    # programs

    def prefill(self) -> Rendered:
        b, sizes = self.blocks, self.places.sizes
        e = self._emitter()
        count = (sizes.queries + b.rows - 1) // b.rows
        if self.op.causal:  # the longest rows first
            e.write(f"block = {e.size(count)} - 1 - tl.program_id(0)")
        else:
            e.write("block = tl.program_id(0)")
        items = sizes.batch * self.op.num_heads
        place_beside(e, "item", items)
        e.write(f"batch = (item // {self.op.num_heads}).to(tl.int64)")
        e.write(f"head = item % {self.op.num_heads}")
        e.write(f"shared = (head // {self.group}).to(tl.int64)")
        e.write("head = head.to(tl.int64)")
        e.write(f"row = block * {b.rows} + tl.arange(0, {b.rows})")
        e.write("query = row")
        inside = self._row_mask(e, sizes.queries, b.rows)
        self._start(e, "head", inside)
        self._rows_over_keys(e, inside)
        self._divide(e)
        self._store_rows(e, "out", "head", inside)
        if len(self.kernel.outputs) > 1:
            place = f"lse + item.to(tl.int64) * {e.size(sizes.queries)} + row"
            mask = f", mask={inside}" if inside else ""
            e.write(f"tl.store({place}, (most + tl.log2(total)) * {1 / LOG2E!r}{mask})")
        grid = (count, *programs_beside(items))
        return Rendered(self.kernel, (self._program(e, "attention", self.kernel.buffers, grid),), ())

    def decode(self) -> Rendered:
        b, sizes = self.blocks, self.places.sizes
        count = sizes.queries * self.group
        items = sizes.batch * self.op.kv_heads
        segments = (sizes.keys + b.segment - 1) // b.segment if b.segment else 1
        e = self._emitter()
        e.write("item = tl.program_id(0)")
        e.write(f"batch = (item // {self.op.kv_heads}).to(tl.int64)")
        e.write(f"shared = (item % {self.op.kv_heads}).to(tl.int64)")
        e.write(f"row = tl.arange(0, {b.rows})")
        e.write(f"query = row // {self.group}")
        e.write(f"head = shared * {self.group} + row % {self.group}")
        inside = self._row_mask(e, count, b.rows)
        self._start(e, "head[:, None]", inside)
        keys = e.size(sizes.keys)
        low, high = "0", keys
        if b.segment:
            e.write("segment = tl.program_id(1)")
            e.write(f"low = segment * {b.segment}")
            low, high = "low", f"tl.minimum(low + {b.segment}, {keys})"
        if (
            self.is_positional and (self.op.mask == "none" or self.op.dropped is not None) and b.segment
        ):  # keys that no row keeps are not read
            e.write(f"last = {int(sizes.queries) - 1} + shift")
            high = f"tl.minimum({high}, tl.maximum(last + 1, 1))"
        whole = isinstance(sizes.keys, int) and sizes.keys % b.keys == 0 and b.segment % b.keys == 0
        self._loop(e, low, high, inside, positional=self.is_positional, bounded=not whole or b.segment == 0)
        if not b.segment:
            self._divide(e)
            self._store_rows(e, "out", "head[:, None]", inside)
            return Rendered(self.kernel, (self._program(e, "attention", self.kernel.buffers, (items,)),), ())
        wide = self.value_width
        part = Buffer("part", f32, (items * segments * b.rows * wide,))
        about = Buffer("about", f32, (items * segments * b.rows * 2,))
        e.write(f"place = (item.to(tl.int64) * {e.size(segments)} + segment) * {b.rows} + row")
        e.write(f"tl.store(part + place[:, None] * {wide} + tl.arange(0, {wide})[None, :], sums)")
        e.write("tl.store(about + place * 2, most)")
        e.write("tl.store(about + place * 2 + 1, total)")
        first = self._program(e, "attention", (*self.kernel.inputs, part, about), (items, segments))
        return Rendered(self.kernel, (first, self._merge(part, about, segments, items)), (part, about))

    def _merge(self, part: Buffer, about: Buffer, segments: Dim, items: Dim) -> TritonProgram:
        """Results of segments of one row, added up in their order."""
        b, sizes, wide = self.blocks, self.places.sizes, self.value_width
        e = self._emitter()
        e.write("item = tl.program_id(0)")
        e.write("row = tl.program_id(1)")
        e.write(f"batch = (item // {self.op.kv_heads}).to(tl.int64)")
        e.write(f"shared = (item % {self.op.kv_heads}).to(tl.int64)")
        e.write(f"query = row // {self.group}")
        e.write(f"head = shared * {self.group} + row % {self.group}")
        e.write('most = tl.full([1], float("-inf"), tl.float32)')
        e.write("total = tl.full([1], 0.0, tl.float32)")
        e.write(f"sums = tl.full([1, {wide}], 0.0, tl.float32)")
        e.write(f"column = tl.arange(0, {wide})")
        e.write(f"for start in range(0, {e.size(segments)}, {_MERGED}):")
        with e.indented():
            e.write(f"at = start + tl.arange(0, {_MERGED})")
            e.write(f"inside = at < {e.size(segments)}")
            e.write(f"place = (item.to(tl.int64) * {e.size(segments)} + at) * {b.rows} + row")
            e.write('highest = tl.load(about + place * 2, mask=inside, other=float("-inf"))')
            e.write("weight = tl.load(about + place * 2 + 1, mask=inside, other=0.0)")
            e.write("values = tl.load(part + place[:, None] * "
                    f"{wide} + column[None, :], mask=inside[:, None], other=0.0)")  # fmt: skip
            e.write("higher = tl.maximum(most, tl.max(highest, axis=0))")
            e.write("fade = tl.exp2(most - higher)")
            e.write("scale = tl.exp2(highest - higher)")
            e.write("total = total * fade + tl.sum(scale * weight, axis=0)")
            e.write("sums = sums * fade[:, None] + tl.sum(scale[:, None] * values, axis=0)[None, :]")
            e.write("most = higher")
        self._divide(e)
        at, out = self.places.strides["out"], encoded("sums", self.dtype, e.needs)
        base = f"out + batch * {e.size(at.batch)} + head * {e.size(at.head)} + query * {e.size(at.row)}"
        mask = f", mask=column[None, :] < {sizes.value_dim}" if wide != sizes.value_dim else ""
        e.write(f"tl.store({base} + column[None, :], {out}{mask})")
        schedule = replace(b, warps=1 if wide <= 128 else 2, segment=0)
        made = self._program(e, "attention_1", (part, about, *self.kernel.outputs), (items, sizes.queries * self.group))
        return replace(made, schedule=schedule)

    # parts

    def _emitter(self) -> TritonEmitter:
        return TritonEmitter(self.kernel, self.blocks, (self.blocks.rows, self.blocks.keys))

    def _program(
        self, e: TritonEmitter, name: str, buffers: tuple[Buffer, ...], grid: tuple[Dim, ...]
    ) -> TritonProgram:
        return finished(e, name, replace(self.kernel, inputs=buffers, outputs=()), buffers, grid)

    def _row_mask(self, e: TritonEmitter, count: Dim, block: int) -> str:
        if isinstance(count, int) and count % block == 0:
            return ""
        e.write(f"inside = row < {e.size(count)}")
        return "inside"

    def _at(self, e: TritonEmitter, name: str, head: str) -> str:
        at = self.places.strides[name]
        start = self.starts.get(name, 0)
        text = f"{name} + batch * {e.size(at.batch)}" + (f" + {head} * {e.size(at.head)}" if at.head != 0 else "")
        return text if start == 0 else f"{text} + {e.size(start)}"

    def _times(self, e: TritonEmitter, lanes: str, step: Dim, most: Dim) -> str:
        """Lanes times a stride, with as many bits as that needs."""
        if step == 1:
            return lanes
        if isinstance(step, int) and known(most) * step < 1 << 31:
            return f"{lanes} * {step}"
        return f"{lanes}.to(tl.int64) * {e.size(step)}"

    def _start(self, e: TritonEmitter, head: str, inside: str) -> None:
        """Queries, running values, and where the rows stand."""
        op, sizes, at = self.op, self.places.sizes, self.places.strides["q"]
        e.write(f"dim = tl.arange(0, {self.width})")
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [f"(dim[None, :] < {op.head_dim})"] if self.width != op.head_dim else []
        place = f"{self._at(e, 'q', head)} + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
        place += f" + {self._times(e, 'dim[None, :]', at.element, op.head_dim)}"
        e.write(f"queries = tl.load({place}{self._masked(masks)})")
        lowest = 'float("-inf")' if self.op.dropped is None else repr(LOWEST)
        e.write(f"most = tl.full([{self.blocks.rows}], {lowest}, tl.float32)")
        e.write(f"total = tl.full([{self.blocks.rows}], 0.0, tl.float32)")
        e.write(f"sums = tl.full([{self.blocks.rows}, {self.value_width}], 0.0, tl.float32)")
        if self.is_positional:
            if op.has_offset:
                moves = self.types[-1].shape[0] != 1
                text = f"offset + {e.size(self.starts['offset'])}" if self.starts["offset"] != 0 else "offset"
                text += f" + batch * {e.size(self.places.views[-1].strides[0])}" if moves else ""
                e.write(f"shift = tl.load({text}).to(tl.int32)")
            else:
                e.write(f"shift = {e.size(dim_max(sizes.keys - sizes.queries, 0))}")
            e.write("position = query + shift")

    def _divide(self, e: TritonEmitter) -> None:
        """Sums over totals; that of a row without a key is 0, and its result 0 or NaN, as the op says."""
        keys = self.places.sizes.keys
        if self.op.dropped != -math.inf or self.op.zero_rows:
            e.write("total = tl.where(total == 0, 1.0, total)")
        elif not isinstance(keys, int):  # no keys at all are no rows of -inf
            e.write(f"total = tl.where({e.size(keys)} == 0, 1.0, total)")
        e.write("sums = sums / total[:, None]")

    @staticmethod
    def _masked(masks: list[str]) -> str:
        return f", mask={' & '.join(masks)}, other=0" if masks else ""

    def _rows_over_keys(self, e: TritonEmitter, inside: str) -> None:
        """All keys that some row of the block keeps: those that all rows keep without a mask of positions."""
        b, op, keys = self.blocks, self.op, self.places.sizes.keys
        size = e.size(keys)
        exact = isinstance(keys, int) and keys % b.keys == 0
        if not self.is_positional:
            full = (keys // b.keys) * b.keys
            if full != 0:
                self._loop(e, "0", e.size(full), inside, positional=False, bounded=False)
            if not exact:
                self._loop(e, e.size(full), size, inside, positional=False, bounded=True)
            return
        e.write(f"first = block * {b.rows} + shift")
        e.write(f"high = tl.minimum({size}, tl.maximum(first + {b.rows}, 0))")
        if op.window is None:
            e.write(f"full = tl.minimum(tl.maximum(first + 1, 0), {size}) // {b.keys} * {b.keys}")
            self._loop(e, "0", "full", inside, positional=False, bounded=False)
            self._loop(e, "full", "high", inside, positional=True, bounded=True)
        else:
            e.write(f"low = tl.maximum(first - {op.window}, 0) // {b.keys} * {b.keys}")
            self._loop(e, "low", "high", inside, positional=True, bounded=True)
        if self.loses_rows:
            kept = f"{inside} & " if inside else ""
            e.write(f"lost = tl.max(({kept}(most <= {DROPPED * LOG2E!r})).to(tl.int32), axis=0)")
            e.write('most = tl.where(lost > 0, float("-inf"), most)')
            e.write("total = tl.where(lost > 0, 0.0, total)")
            e.write("sums = tl.where(lost > 0, 0.0, sums)")
            self._loop(e, "0", f"{size} * lost", inside, positional=True, bounded=True)

    def _loop(self, e: TritonEmitter, low: str, high: str, inside: str, *, positional: bool, bounded: bool) -> None:
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e.write(f"for start in range({low}, {high}, {b.keys}):")
        with e.indented():
            e.write(f"key = start + tl.arange(0, {b.keys})")
            limit = e.size(sizes.keys)
            edge = ["(key[:, None] < " + limit + ")"] if bounded else []
            e.write(f"keys = {self._tile(e, 'k', edge, 'dim', self.width, op.head_dim)}")
            e.write(f"score = {self._dot(e, 'queries', 'tl.trans(keys)', self._zeros(b.rows, b.keys))}")
            bound = f"(key[None, :] < {limit})" if bounded else ""
            near = "(key[None, :] <= position[:, None])" if positional else ""
            if positional and op.window is not None:
                near += f" & (key[None, :] >= position[:, None] - {op.window})"
            if self.is_plain:
                self._plain_score(e, bound, near)
            else:
                self._score(e, bound, near, inside)
            e.write("fade = tl.exp2(most - higher)")
            e.write("total = total * fade + tl.sum(weight, axis=1)")
            e.write("sums = sums * fade[:, None]")
            e.write(f"values = {self._tile(e, 'v', edge, 'column', self.value_width, sizes.value_dim)}")
            e.write(f"sums = {self._dot(e, encoded('weight', self.dtype, e.needs), 'values', 'sums')}")
            e.write("most = higher")

    def _zeros(self, rows: int, columns: int) -> str:
        return f"tl.full([{rows}, {columns}], 0.0, tl.float32)"

    def _plain_score(self, e: TritonEmitter, bound: str, near: str) -> None:
        """The scale goes into the exponent, with one multiply-add for each score."""
        scale = self.op.scale * LOG2E
        if near:
            e.write(f"score = tl.where({near}, score, {literal(self.op.dropped_score / self.op.scale, f32)})")
        if bound:
            e.write(f'score = tl.where({bound}, score, float("-inf"))')
        e.write(f"higher = tl.maximum(most, tl.max(score, axis=1) * {scale!r})")
        e.write(f"weight = tl.exp2(score * {scale!r} - higher[:, None])")

    def _score(self, e: TritonEmitter, bound: str, near: str, inside: str) -> None:
        op, dropped = self.op, literal(self.op.dropped_score, f32)
        e.write(f"score = score * {op.scale!r}")
        if op.softcap is not None:
            e.write(f"score = {e.needs('tanh_f32')}(score * {1 / op.softcap!r}) * {op.softcap!r}")
        if op.mask != "none":
            at: HeadStrides = self.places.strides["mask"]
            sizes = self.places.sizes
            place = self._at(e, "mask", "head[:, None]" if self.blocks_decode else "head")
            dims: list[str] = []
            if at.row != 0:
                place += f" + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
                dims += [f"{inside}[:, None]"] if inside else []
            if at.element != 0:
                place += f" + {self._times(e, 'key[None, :]', at.element, sizes.keys)}"
                dims += [bound] if bound else []
            whole = f"tl.broadcast_to({place}, [{self.blocks.rows}, {self.blocks.keys}])"
            e.write(f"extra = {decoded(f'tl.load({whole}{self._masked(dims)})', self.types[3].dtype, e.needs)}")
            if op.mask == "bias":
                e.write("score = score + extra")
            else:
                e.write(f"score = tl.where(extra, score, {dropped})")
        if op.dropped is None:
            e.write(f"score = tl.where(score < {dropped}, {dropped}, score)")
        else:
            e.write(f'score = tl.where((score < {_LEAST!r}) & (score != float("-inf")), {_LEAST!r}, score)')
        if near:
            e.write(f"score = tl.where({near}, score, {dropped})")
        e.write(f"score = score * {LOG2E!r}")
        if bound:
            e.write(f'score = tl.where({bound}, score, float("-inf"))')
        e.write("higher = tl.maximum(most, tl.max(score, axis=1))")
        e.write("weight = tl.exp2(score - higher[:, None])")

    @property
    def blocks_decode(self) -> bool:
        """Whether the rows of a program are of several heads."""
        queries = self.places.sizes.queries
        return isinstance(queries, int) and queries <= _FEW_QUERIES and queries * self.group <= _FEW_ROWS

    def _tile(self, e: TritonEmitter, name: str, edge: list[str], lanes: str, width: int, count: Dim) -> str:
        """A block of keys or values, as rows."""
        at, sizes = self.places.strides[name], self.places.sizes
        if lanes == "column":
            e.write(f"column = tl.arange(0, {width})")
        place = f"{self._at(e, name, 'shared')} + {self._times(e, 'key[:, None]', at.row, sizes.keys)}"
        place += f" + {self._times(e, f'{lanes}[None, :]', at.element, count)}"
        masks = [*edge, *([f"({lanes}[None, :] < {count})"] if width != count else [])]
        return f"tl.load({place}{self._masked(masks)})"

    def _dot(self, e: TritonEmitter, left: str, right: str, sums: str) -> str:
        return dot(left, right, sums, self.dtype, e.needs)

    def _store_rows(self, e: TritonEmitter, name: str, head: str, inside: str) -> None:
        at, sizes = self.places.strides[name], self.places.sizes
        e.write(f"column = tl.arange(0, {self.value_width})")
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [f"(column[None, :] < {sizes.value_dim})"] if self.value_width != sizes.value_dim else []
        place = f"{self._at(e, name, head)} + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        e.write(f"tl.store({place} + column[None, :], {encoded('sums', self.dtype, e.needs)}{mask})")
