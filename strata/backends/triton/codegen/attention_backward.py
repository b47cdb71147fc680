"""Backward attention in three Triton kernels, without a score matrix: statistics of rows, then dk and dv, then dq.

The first is the forward kernel, which leaves the logarithm of each row's sum, and the product of its result with the
cotangent. The second takes a block of keys and goes through the queries that read it, of all heads that share its key
head, in their order; the third takes a block of queries and goes through the keys. All sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strata.backends.attention import AttentionPlaces
from strata.backends.triton.codegen.attention import LOG2E, AttentionText, takes_attention
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.codegen.render import Rendered, TritonProgram
from strata.backends.triton.codegen.scalars import decoded, encoded
from strata.backends.triton.schedules.schedule import AttentionBlocks, known, power_of_two
from strata.core import Dim, TensorType, dim_max, f32
from strata.kernel import Buffer, Kernel
from strata.lir import Spacing
from strata.mir import Node, Op


def takes_backward(op: Op, types: Sequence[TensorType]) -> bool:
    """As forward, where every row keeps a key and nothing but q, k and v has a cotangent."""
    if op.name != "attention_backward" or len(types) != 4:
        return False
    op_: Any = op
    q, k, v, dy = types
    plain = op_.mask == "none" and op_.window is None and not op_.has_offset and op_.softcap is None and op_.scale > 0
    forward: Any = _Named("attention", op_)
    return plain and dy.dtype is q.dtype and takes_attention(forward, (q, k, v))


class _Named:
    """The fields of an op under another name."""

    def __init__(self, name: str, op: Any) -> None:
        self.name, self._op = name, op

    def __getattr__(self, field: str) -> Any:
        return getattr(self._op, field)


def render_backward(node: Node, views: Sequence[Spacing]) -> Rendered:
    """The programs of a backward attention whose inputs are spaced as given."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    names = ("q", "k", "v", "dy")
    outputs = dict(zip(("dq", "dk", "dv"), node.types, strict=True))
    places = AttentionPlaces(op, {name: i for i, name in enumerate(names)}, outputs, types, views)
    inputs = tuple(Buffer(name, t.dtype, t.shape) for name, t in zip(names, types, strict=True))
    made = tuple(Buffer(name, t.dtype, t.shape) for name, t in outputs.items())
    kernel = Kernel("attention_backward", inputs, made, ())
    starts = {name: view.start for name, view in zip(names, views, strict=True)}
    side = 32 if types[0].dtype is f32 or max(op.head_dim, places.sizes.value_dim) > 128 else 64
    rows, keys = (power_of_two(known(n), 16, side) for n in (places.sizes.queries, places.sizes.keys))
    blocks = AttentionBlocks(rows, keys, 4, 2)
    return BackwardText(kernel, op, places, starts, types, op.num_heads // op.kv_heads, blocks).programs()


@dataclass
class BackwardText(AttentionText):
    """Writes the programs of one backward attention."""

    def programs(self) -> Rendered:
        sizes = self.places.sizes
        rows = sizes.batch * self.op.num_heads * sizes.queries
        scratch = (Buffer("most_of", f32, (rows,)), Buffer("slope_of", f32, (rows,)))
        made = (self._statistics(scratch), self._keys(scratch), self._queries(scratch))
        return Rendered(self.kernel, made, scratch)

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
        return self._program(e, self.kernel.name, (*self.kernel.inputs, *scratch), (count, self._items))

    @property
    def _items(self) -> Dim:
        batch: Dim = self.places.sizes.batch
        return batch * self.op.num_heads

    def _query_block(self, e: TritonEmitter) -> str:
        b = self.blocks
        e.write("block = tl.program_id(0)")
        e.write("item = tl.program_id(1)")
        e.write(f"batch = (item // {self.op.num_heads}).to(tl.int64)")
        e.write(f"head = item % {self.op.num_heads}")
        e.write(f"shared = (head // {self.group}).to(tl.int64)")
        e.write("head = head.to(tl.int64)")
        e.write(f"row = block * {b.rows} + tl.arange(0, {b.rows})")
        e.write("query = row")
        return self._row_mask(e, self.places.sizes.queries, b.rows)

    def _rows(self, e: TritonEmitter, name: str, head: str, inside: str, lanes: str, width: int, count: Dim) -> str:
        """A block of rows of queries, or of what is as long."""
        at, sizes = self.places.strides[name], self.places.sizes
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [f"({lanes}[None, :] < {count})"] if width != count else []
        place = f"{self._at(e, name, head)} + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
        place += f" + {self._times(e, f'{lanes}[None, :]', at.element, count)}"
        return f"tl.load({place}{self._masked(masks)})"

    def _weights(self, e: TritonEmitter, bound: str) -> None:
        """Probabilities of a block, and the cotangents of its scores."""
        e.write(f"score = {self._dot(e, 'queries', 'tl.trans(keys)', self._zeros(self.blocks.rows, self.blocks.keys))}")
        e.write(f"weight = tl.exp2(score * {self.op.scale * LOG2E!r} - most[:, None])")
        kept = [bound] if bound else []
        kept += ["(key[None, :] <= query[:, None] + shift)"] if self.op.causal else []
        if kept:
            e.write(f"weight = tl.where({' & '.join(kept)}, weight, 0.0)")
        e.write(
            f"slopes = {self._dot(e, 'given', 'tl.trans(values)', self._zeros(self.blocks.rows, self.blocks.keys))}"
        )
        e.write("slopes = weight * (slopes - slope[:, None])")

    def _row_facts(self, e: TritonEmitter, inside: str, item: str) -> None:
        """Rows that do not exist have no weights."""
        e.write(f"place = {item} * {e.size(self.places.sizes.queries)} + query")
        outside = f', mask={inside}, other=float("inf")' if inside else ""
        e.write(f"most = tl.load(most_of + place{outside})")
        e.write(f"slope = tl.load(slope_of + place{f', mask={inside}, other=0.0' if inside else ''})")

    def _shifted(self, e: TritonEmitter) -> None:
        sizes = self.places.sizes
        if self.op.causal:
            e.write(f"shift = {e.size(dim_max(sizes.keys - sizes.queries, 0))}")

    def _keys(self, scratch: tuple[Buffer, ...]) -> TritonProgram:
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e = self._emitter()
        e.write("block = tl.program_id(0)")
        e.write("item = tl.program_id(1)")
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
        low = "0"
        if op.causal:  # earlier queries do not read these keys
            e.write(f"low = tl.maximum(block * {b.keys} - shift, 0) // {b.rows} * {b.rows}")
            low = "low"
        e.write(f"for member in range(0, {self.group}):")
        with e.indented():
            e.write(f"head = shared * {self.group} + member")
            e.write(f"for start in range({low}, {e.size(sizes.queries)}, {b.rows}):")
            with e.indented():
                e.write(f"row = start + tl.arange(0, {b.rows})")
                e.write("query = row")
                inside = self._row_mask(e, sizes.queries, b.rows)
                e.write(f"queries = {self._rows(e, 'q', 'head', inside, 'dim', self.width, op.head_dim)}")
                e.write(f"given = {self._rows(e, 'dy', 'head', inside, 'column', self.value_width, sizes.value_dim)}")
                self._row_facts(e, inside, f"(batch * {op.num_heads} + head)")
                self._weights(e, "" if whole else f"(key[None, :] < {e.size(sizes.keys)})")
                weight, slopes = (f"tl.trans({encoded(x, self.dtype, e.needs)})" for x in ("weight", "slopes"))
                e.write(f"dv_sums = {self._dot(e, weight, 'given', 'dv_sums')}")
                e.write(f"dk_sums = {self._dot(e, slopes, 'queries', 'dk_sums')}")
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
        buffers = (*self.kernel.inputs, *scratch, *self.kernel.outputs[1:])
        return self._program(e, f"{self.kernel.name}_1", buffers, (count_, sizes.batch * op.kv_heads))

    def _queries(self, scratch: tuple[Buffer, ...]) -> TritonProgram:
        b, op, sizes = self.blocks, self.op, self.places.sizes
        e = self._emitter()
        inside = self._query_block(e)
        e.write(f"dim = tl.arange(0, {self.width})")
        e.write(f"column = tl.arange(0, {self.value_width})")
        e.write(f"queries = {self._rows(e, 'q', 'head', inside, 'dim', self.width, op.head_dim)}")
        e.write(f"given = {self._rows(e, 'dy', 'head', inside, 'column', self.value_width, sizes.value_dim)}")
        self._row_facts(e, inside, "item.to(tl.int64)")
        self._shifted(e)
        e.write(f"sums = {self._zeros(b.rows, self.width)}")
        keys = e.size(sizes.keys)
        high = f"tl.minimum({keys}, (block + 1) * {b.rows} + shift)" if op.causal else keys
        whole = isinstance(sizes.keys, int) and sizes.keys % b.keys == 0
        e.write(f"for start in range(0, {high}, {b.keys}):")
        with e.indented():
            e.write(f"key = start + tl.arange(0, {b.keys})")
            edge = [] if whole else [f"(key[:, None] < {keys})"]
            e.write(f"keys = {self._tile(e, 'k', edge, 'dim', self.width, op.head_dim)}")
            e.write(f"values = {self._tile(e, 'v', edge, 'column', self.value_width, sizes.value_dim)}")
            self._weights(e, "" if whole else f"(key[None, :] < {keys})")
            e.write(f"sums = {self._dot(e, encoded('slopes', self.dtype, e.needs), 'keys', 'sums')}")
        e.write(f"sums = sums * {op.scale!r}")
        masks = [f"{inside}[:, None]"] if inside else []
        masks += [f"(dim[None, :] < {op.head_dim})"] if self.width != op.head_dim else []
        at = self.places.strides["dq"]
        place = f"{self._at(e, 'dq', 'head')} + {self._times(e, 'query[:, None]', at.row, sizes.queries)}"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        e.write(f"tl.store({place} + dim[None, :], {encoded('sums', self.dtype, e.needs)}{mask})")
        count = (sizes.queries + b.rows - 1) // b.rows
        buffers = (*self.kernel.inputs, *scratch, self.kernel.outputs[0])
        return self._program(e, f"{self.kernel.name}_2", buffers, (count, self._items))
