"""Backward attention in two Triton kernels, without a score matrix: dq, then dk and dv.

The first takes a block of queries and goes through the keys that it reads; the second takes a block of keys and goes
through the queries that read it, of all heads that share its key head, in their order. All sums have a fixed order.
Both read the logarithm of each row's sum, which the forward kernel leaves where it is asked for it (`attention_lse`);
elsewhere a kernel before them, which is the forward kernel again, works it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from strata.backends.attention import LOG2E, AttentionPlaces
from strata.backends.triton.codegen.attention import AttentionText, takes_attention
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.codegen.grid import place_beside, programs_beside
from strata.backends.triton.codegen.render import Rendered, TritonProgram
from strata.backends.triton.codegen.scalars import decoded, encoded
from strata.backends.triton.schedules.schedule import AttentionBlocks, known, parse_gpu_schedule, power_of_two
from strata.backends.triton.schedules.winners import winner
from strata.backends.triton.target import Gpu
from strata.core import Dim, TensorType, dim_max, f32
from strata.kernel import Buffer, Kernel
from strata.lir import Spacing
from strata.mir import Node, Op

BESIDE = "; "  # between the schedules of programs over queries and over keys


def takes_backward(op: Op, types: Sequence[TensorType]) -> bool:
    """As forward, where every row keeps a key and nothing but q, k and v has a cotangent."""
    op_: Any = op
    if op.name != "attention_backward" or len(types) != (6 if op_.has_lse else 4):
        return False
    q, k, v, dy = types[:4]
    forward: Any = _Named("attention_lse", op_)
    return dy.dtype is q.dtype and takes_attention(forward, (q, k, v))


class _Named:
    """The fields of an op under another name."""

    def __init__(self, name: str, op: Any) -> None:
        self.name, self._op = name, op

    def __getattr__(self, field: str) -> Any:
        return getattr(self._op, field)


def render_backward(node: Node, views: Sequence[Spacing], gpu: Gpu, given: Sequence[str] = ()) -> Rendered:
    """The programs of a backward attention whose inputs are spaced as given; `given` are schedules of the programs
    over queries and over keys, where they are not empty."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    names = ("q", "k", "v", "dy", *(("out", "lse") if op.has_lse else ()))
    outputs = dict(zip(("dq", "dk", "dv"), node.types, strict=True))
    places = AttentionPlaces(op, {name: i for i, name in enumerate(names) if name != "lse"}, outputs, types, views)
    inputs = tuple(Buffer(name, t.dtype, t.shape) for name, t in zip(names, types, strict=True))
    made = tuple(Buffer(name, t.dtype, t.shape) for name, t in outputs.items())
    kernel = Kernel("attention_backward", inputs, made, ())
    starts = {name: view.start for name, view in zip(names, views, strict=True)}
    sizes = places.sizes
    texts = list(given)
    blocks = []
    for at, kind in enumerate(("queries", "keys")):
        measured = known(sizes.queries), known(sizes.keys), max(op.head_dim, sizes.value_dim)
        found = (
            parse_gpu_schedule(texts[at])
            if any(texts[at : at + 1])
            else winner(gpu, f"attention {kind} {types[0].dtype.bits}", measured)
        )
        assert isinstance(found, AttentionBlocks), f"{found} is no schedule of attention"
        rows, keys = power_of_two(known(sizes.queries), 16, found.rows), power_of_two(known(sizes.keys), 16, found.keys)
        warps = found.warps if rows * keys >= 32 * 32 * found.warps else min(4, found.warps)
        blocks.append(replace(found, rows=rows, keys=keys, warps=warps))
    text = BackwardText(kernel, op, places, starts, types, op.num_heads // op.kv_heads, blocks[0])
    return text.programs(blocks[0], blocks[1], views)


@dataclass
class BackwardText(AttentionText):
    """Writes the programs of one backward attention."""

    levels: tuple[Dim, ...] = ()  # strides of the logarithms of rows' sums, where the forward pass gave them

    def programs(self, by_queries: AttentionBlocks, by_keys: AttentionBlocks, views: Sequence[Spacing]) -> Rendered:
        sizes = self.places.sizes
        rows = sizes.batch * self.op.num_heads * sizes.queries
        self.levels = views[5].strides if self.op.has_lse else ()
        slopes, levels = Buffer("slope_of", f32, (rows,)), Buffer("most_of", f32, (rows,))
        scratch = (slopes,) if self.op.has_lse else (slopes, levels)
        first = [] if self.op.has_lse else [self._statistics(scratch)]
        self.blocks = by_queries
        made = [*first, self._queries(scratch, f"_{len(first)}" if first else "")]
        self.blocks = by_keys
        return Rendered(self.kernel, (*made, self._keys(scratch, f"_{len(made)}")), scratch)

    def _statistics(self, scratch: tuple[Buffer, ...]) -> TritonProgram:
        """The logarithm of the sum of every row, and the product of its result with its cotangent."""
        b, sizes = self.blocks, self.places.sizes
        e = self._emitter()
        count = (sizes.queries + b.rows - 1) // b.rows
        inside = self._query_block(e)
        self._start(e, "head", inside)
        self._rows_over_keys(e, inside)
        e.write("result = sums / total[:, None]")
        e.write(f"column = tl.arange(0, {self.value_width})")
        e.write(f"given = {self._rows(e, 'dy', 'head', inside, 'column', self.value_width, sizes.value_dim)}")
        e.write(f"slope = tl.sum(result * {decoded('given', self.dtype, e.needs)}, axis=1)")
        mask = f", mask={inside}" if inside else ""
        e.write(f"place = item.to(tl.int64) * {e.size(sizes.queries)} + row")
        e.write(f"tl.store(most_of + place, most + tl.log2(total){mask})")
        e.write(f"tl.store(slope_of + place, slope{mask})")
        return self._program(
            e, self.kernel.name, (*self.kernel.inputs, *scratch), (count, *programs_beside(self._items))
        )

    @property
    def _items(self) -> Dim:
        batch: Dim = self.places.sizes.batch
        return batch * self.op.num_heads

    def _query_block(self, e: TritonEmitter) -> str:
        b, sizes = self.blocks, self.places.sizes
        if self.op.causal:  # the longest rows first
            e.write(f"block = {e.size((sizes.queries + b.rows - 1) // b.rows)} - 1 - tl.program_id(0)")
        else:
            e.write("block = tl.program_id(0)")
        place_beside(e, "item", self._items)
        e.write(f"batch = (item // {self.op.num_heads}).to(tl.int64)")
        e.write(f"head = item % {self.op.num_heads}")
        e.write(f"shared = (head // {self.group}).to(tl.int64)")
        e.write("head = head.to(tl.int64)")
        e.write(f"row = block * {b.rows} + tl.arange(0, {b.rows})")
        e.write("query = row")
        return self._row_mask(e, sizes.queries, b.rows)

    def _rows(self, e: TritonEmitter, name: str, head: str, inside: str, lanes: str, width: int, count: Dim) -> str:
        """A block of rows of queries, or of what is as long."""
        at, sizes = self.places.strides[name], self.places.sizes
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [f"({lanes}[None, :] < {count})"] if width != count else []
        place = f"{self._at(e, name, head)} + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
        place += f" + {self._times(e, f'{lanes}[None, :]', at.element, count)}"
        return f"tl.load({place}{self._masked(masks)})"

    def _level(self, e: TritonEmitter, inside: str, item: str) -> None:
        """The logarithm of each row's sum, in base 2. Rows that do not exist have no weights."""
        outside = f', mask={inside}, other=float("inf")' if inside else ""
        if not self.op.has_lse:
            e.write(f"most = tl.load(most_of + {item} * {e.size(self.places.sizes.queries)} + query{outside})")
            return
        batch, head, row = self.levels
        start = self.starts["lse"]
        text = "lse" if start == 0 else f"lse + {e.size(start)}"
        text += f" + batch * {e.size(batch)} + head * {e.size(head)}"
        text += f" + {self._times(e, 'query', row, self.places.sizes.queries)}"
        e.write(f"most = tl.load({text}{outside}) * {LOG2E!r}")

    def _shifted(self, e: TritonEmitter) -> None:
        sizes = self.places.sizes
        if self.op.causal:
            e.write(f"shift = {e.size(dim_max(sizes.keys - sizes.queries, 0))}")

    def _queries(self, scratch: tuple[Buffer, ...], suffix: str) -> TritonProgram:
        """dq: a block of queries, and the keys that it reads. Where there is a result of the forward pass, its product
        with the cotangent is left for the next program."""
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e = self._emitter()
        inside = self._query_block(e)
        mask = f", mask={inside}" if inside else ""
        e.write(f"dim = tl.arange(0, {self.width})")
        e.write(f"column = tl.arange(0, {self.value_width})")
        e.write(f"queries = {self._rows(e, 'q', 'head', inside, 'dim', self.width, op.head_dim)}")
        e.write(f"given = {self._rows(e, 'dy', 'head', inside, 'column', self.value_width, sizes.value_dim)}")
        e.write(f"place = item.to(tl.int64) * {e.size(sizes.queries)} + query")
        if op.has_lse:
            e.write(f"result = {self._rows(e, 'out', 'head', inside, 'column', self.value_width, sizes.value_dim)}")
            product = " * ".join(decoded(x, self.dtype, e.needs) for x in ("result", "given"))
            e.write(f"slope = tl.sum({product}, axis=1)")
            e.write(f"tl.store(slope_of + place, slope{mask})")
        else:
            e.write(f"slope = tl.load(slope_of + place{mask + ', other=0.0' if mask else ''})")
        self._level(e, inside, "item.to(tl.int64)")
        self._shifted(e)
        e.write(f"sums = {self._zeros(b.rows, self.width)}")
        keys = e.size(sizes.keys)
        whole = isinstance(sizes.keys, int) and sizes.keys % b.keys == 0
        if op.causal:
            e.write(f"high = tl.minimum({keys}, (block + 1) * {b.rows} + shift)")
            e.write(f"full = tl.minimum(block * {b.rows} + shift + 1, {keys}) // {b.keys} * {b.keys}")
            self._queries_loop(e, "0", "full", bounded=False, positional=False)
            self._queries_loop(e, "full", "high", bounded=not whole, positional=True)
        else:
            self._queries_loop(e, "0", keys, bounded=not whole, positional=False)
        e.write(f"sums = sums * {op.scale!r}")
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [f"(dim[None, :] < {op.head_dim})"] if self.width != op.head_dim else []
        at = self.places.strides["dq"]
        place = f"{self._at(e, 'dq', 'head')} + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        e.write(f"tl.store({place} + dim[None, :], {encoded('sums', self.dtype, e.needs)}{mask})")
        count = (sizes.queries + b.rows - 1) // b.rows
        buffers = (*self.kernel.inputs, *scratch, self.kernel.outputs[0])
        return self._program(e, f"{self.kernel.name}{suffix}", buffers, (count, *programs_beside(self._items)))

    def _queries_loop(self, e: TritonEmitter, low: str, high: str, *, bounded: bool, positional: bool) -> None:
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e.write(f"for start in range({low}, {high}, {b.keys}):")
        with e.indented():
            e.write(f"key = start + tl.arange(0, {b.keys})")
            edge = [f"(key[:, None] < {e.size(sizes.keys)})"] if bounded else []
            e.write(f"keys = {self._tile(e, 'k', edge, 'dim', self.width, op.head_dim)}")
            e.write(f"values = {self._tile(e, 'v', edge, 'column', self.value_width, sizes.value_dim)}")
            e.write(f"score = {self._dot(e, 'queries', 'tl.trans(keys)', self._zeros(b.rows, b.keys))}")
            e.write(f"weight = tl.exp2(score * {op.scale * LOG2E!r} - most[:, None])")
            kept = [f"(key[None, :] < {e.size(sizes.keys)})"] if bounded else []
            kept += ["(key[None, :] <= query[:, None] + shift)"] if positional else []
            if kept:
                e.write(f"weight = tl.where({' & '.join(kept)}, weight, 0.0)")
            e.write(f"slopes = {self._dot(e, 'given', 'tl.trans(values)', self._zeros(b.rows, b.keys))}")
            e.write("slopes = weight * (slopes - slope[:, None])")
            e.write(f"sums = {self._dot(e, encoded('slopes', self.dtype, e.needs), 'keys', 'sums')}")

    def _keys(self, scratch: tuple[Buffer, ...], suffix: str) -> TritonProgram:
        """dk and dv: a block of keys, and the queries that read it, of all heads that share it. Scores have a row for
        each key, so that they are factors as they are made."""
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e = self._emitter()
        e.write("block = tl.program_id(0)")
        items = sizes.batch * op.kv_heads
        place_beside(e, "item", items)
        e.write(f"batch = (item // {op.kv_heads}).to(tl.int64)")
        e.write(f"shared = (item % {op.kv_heads}).to(tl.int64)")
        e.write(f"key = block * {b.keys} + tl.arange(0, {b.keys})")
        e.write(f"dim = tl.arange(0, {self.width})")
        e.write(f"column = tl.arange(0, {self.value_width})")
        whole = isinstance(sizes.keys, int) and sizes.keys % b.keys == 0
        edge = [] if whole else [f"(key[:, None] < {e.size(sizes.keys)})"]
        e.write(f"keys = {self._tile(e, 'k', edge, 'dim', self.width, op.head_dim)}")
        e.write(f"values = {self._tile(e, 'v', edge, 'column', self.value_width, sizes.value_dim)}")
        e.write(f"dk_sums = {self._zeros(b.keys, self.width)}")
        e.write(f"dv_sums = {self._zeros(b.keys, self.value_width)}")
        self._shifted(e)
        queries = e.size(sizes.queries)
        if op.causal:  # earlier queries do not read these keys; from some query on, all of them are read
            e.write(f"low = tl.minimum(tl.maximum(block * {b.keys} - shift, 0) // {b.rows} * {b.rows}, {queries})")
            most = f"tl.maximum((block + 1) * {b.keys} - 1 - shift, 0)"
            e.write(f"full = tl.minimum(({most} + {b.rows - 1}) // {b.rows} * {b.rows}, {queries})")
        with ExitStack() as inside:
            if self.group == 1:
                e.write("head = shared")
            else:
                e.write(f"for member in range(0, {self.group}):")
                inside.enter_context(e.indented())
                e.write(f"head = shared * {self.group} + member")
            if op.causal:
                self._keys_loop(e, "low", "full", positional=True)
            self._keys_loop(e, "full" if op.causal else "0", queries, positional=False)
        e.write(f"dk_sums = dk_sums * {op.scale!r}")
        for name, lanes, width, count in (
            ("dk", "dim", self.width, op.head_dim),
            ("dv", "column", self.value_width, sizes.value_dim),
        ):
            masks = [*edge, *([f"({lanes}[None, :] < {count})"] if width != count else [])]
            at = self.places.strides[name]
            place = f"{self._at(e, name, 'shared')} + {self._times(e, 'key[:, None]', at.row, sizes.keys)}"
            mask = f", mask={' & '.join(masks)}" if masks else ""
            e.write(f"tl.store({place} + {lanes}[None, :], {encoded(f'{name}_sums', self.dtype, e.needs)}{mask})")
        count_ = (sizes.keys + b.keys - 1) // b.keys
        read = tuple(x for x in self.kernel.inputs if x.name != "out")
        buffers = (*read, *scratch, *self.kernel.outputs[1:])
        return self._program(e, f"{self.kernel.name}{suffix}", buffers, (count_, *programs_beside(items)))

    def _keys_loop(self, e: TritonEmitter, low: str, high: str, *, positional: bool) -> None:
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e.write(f"for start in range({low}, {high}, {b.rows}):")
        with e.indented():
            e.write(f"query = start + tl.arange(0, {b.rows})")
            inside = ""
            if not isinstance(sizes.queries, int) or sizes.queries % b.rows:
                e.write(f"inside = query < {e.size(sizes.queries)}")
                inside = "inside"
            item = f"(batch * {op.num_heads} + head)"
            e.write(f"queries = {self._rows(e, 'q', 'head', inside, 'dim', self.width, op.head_dim)}")
            self._level(e, inside, item)
            e.write(f"score = {self._dot(e, 'keys', 'tl.trans(queries)', self._zeros(b.keys, b.rows))}")
            e.write(f"weight = tl.exp2(score * {op.scale * LOG2E!r} - most[None, :])")
            if positional:
                e.write("weight = tl.where(key[:, None] <= query[None, :] + shift, weight, 0.0)")
            e.write(f"given = {self._rows(e, 'dy', 'head', inside, 'column', self.value_width, sizes.value_dim)}")
            e.write(f"dv_sums = {self._dot(e, encoded('weight', self.dtype, e.needs), 'given', 'dv_sums')}")
            outside = f", mask={inside}, other=0.0" if inside else ""
            e.write(f"slope = tl.load(slope_of + {item} * {e.size(sizes.queries)} + query{outside})")
            e.write(f"slopes = {self._dot(e, 'values', 'tl.trans(given)', self._zeros(b.keys, b.rows))}")
            e.write("slopes = weight * (slopes - slope[None, :])")
            e.write(f"dk_sums = {self._dot(e, encoded('slopes', self.dtype, e.needs), 'queries', 'dk_sums')}")
