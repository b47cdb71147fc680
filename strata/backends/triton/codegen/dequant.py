"""Matmuls with quantised weights, which stay quantised in memory.

For few rows, weights become numbers in registers, where they are multiplied and added up in f32. For more of them, a
first program writes the weights in the type of x to scratch memory, and a matmul of tensor cores follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strata.backends.triton.codegen.blocks import BlockShape, BlockTile, Part
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.codegen.fragments import (
    CARRIERS,
    COLUMNS,
    LANES,
    QUAD,
    WHOLE,
    Columns,
    RowTile,
    add_tiles,
    is_fragments,
    pair,
    table_of,
)
from strata.backends.triton.codegen.render import Rendered, TritonProgram, render
from strata.backends.triton.codegen.scalars import decoded, encoded
from strata.backends.triton.codegen.words import Terms, WordTile, add_products, is_words
from strata.backends.triton.schedules.schedule import Fragments, TritonRows, known, parse_gpu_schedule, power_of_two
from strata.backends.triton.schedules.winners import winner
from strata.backends.triton.target import Gpu
from strata.core import Dim, DType, TensorType, bf16, dim_prod, f16, f32, f64
from strata.kernel import Buffer, Expr, Kernel, KernelBuilder
from strata.mir import Node, Op
from strata.ops import gguf_blocks

_FEW = 8  # rows that weights are multiplied with in registers
_TOGETHER = 4  # of them that share a read of the weights
_THREAD_ROWS = 4  # rows of weights of a thread, which share what it reads of x
_WIDE = 1 << 31  # bytes that 32 bits do not address


def takes_dequant(op: Op, types: Sequence[TensorType]) -> bool:
    """Whether a product with quantised weights is one step: floats of 16 and 32 bits."""
    if op.name != "dequant_matmul" or not types or types[0].dtype not in (f16, bf16, f32):
        return False
    weights = _weights(op, types)
    return weights.k > 0 and weights.n > 0 and types[0].shape != () and not any(t.dtype is f64 for t in types[1:])


def _weights(op: Any, types: Sequence[TensorType]) -> Any:
    return op.weights(types[0], types[1], tuple(types[2:]))


def render_dequant(node: Node, gpu: Gpu, given: str = "") -> Rendered:
    """The programs of a product; how many rows there are decides which of them run."""
    types = [x.type for x in node.inputs]
    weights = _weights(node.op, types)
    x, rows = types[0], dim_prod(types[0].shape[:-1])
    flat = [TensorType(x.dtype, (rows, weights.k)), *types[1:]]
    names = ["x", "codes", *(f"side{i}" for i in range(len(types) - 2))]
    inputs = tuple(Buffer(name, t.dtype, t.shape) for name, t in zip(names, flat, strict=True))
    out = Buffer("out", x.dtype, (rows, weights.n))
    kernel = Kernel("dequant_matmul", inputs, (out,), ())
    is_many = isinstance(rows, int) and rows > _FEW
    few = _few_rows(weights, kernel, gpu, "" if is_many else given)
    if known(rows) <= _FEW:
        return Rendered(kernel, few, ())
    table = Buffer("weights", x.dtype, (weights.n, weights.k))
    wide = _unpacked(weights, kernel, table, gpu, given if is_many else "")
    product = _product(inputs[0], table, out, gpu)
    cases = [(most, (*wide, *programs)) for most, programs in product.by_rows if most > _FEW]
    cases = [] if isinstance(rows, int) else [(_FEW, few), *cases]
    return Rendered(kernel, (*wide, *product.programs), (table, *product.scratch), rows, tuple(cases))


def _few_rows(weights: Any, kernel: Kernel, gpu: Gpu, given: str) -> tuple[TritonProgram, ...]:
    shape = _block_shape(weights)
    if shape is not None:
        blocks = BlockRows(shape, weights, kernel, gpu, given, is_few=True)
        if isinstance(blocks.schedule, Fragments):
            return (_multiplied_by_fragments(blocks),)
        return (_multiplied_by_words(blocks, gpu) if is_words(shape) else _multiplied(blocks),)
    k = KernelBuilder("dequant_matmul")
    x, codes, *sides = (k.input(b.name, b.type) for b in kernel.inputs)
    (out,) = kernel.outputs

    def element(index: tuple[Expr, ...]) -> Expr:
        row, column = index
        return k.reduce(
            "sum", (weights.k,), lambda at: k.cast(x[row, at], f32) * weights.lower(k, (at, column), codes, *sides)
        )

    k.output(out.name, out.type, lambda index: k.cast(element(index), out.dtype))
    return render(k.build(), gpu).programs


def _block_shape(weights: Any) -> BlockShape | None:
    """How blocks are tiles, where they are."""
    scheme = weights.scheme
    return BlockShape.of(gguf_blocks.block_format(scheme.kind)) if scheme.is_gguf else None


def _unpacked(weights: Any, kernel: Kernel, table: Buffer, gpu: Gpu, given: str) -> tuple[TritonProgram, ...]:
    """Weights as numbers, a row for each column of the result."""
    shape = _block_shape(weights)
    if shape is not None:
        return (_written(BlockRows(shape, weights, kernel, gpu, given, is_few=False), table),)
    k = KernelBuilder("unpack")
    codes, *sides = (k.input(b.name, b.type) for b in kernel.inputs[1:])
    k.output(table.name, table.type, lambda at: k.cast(weights.lower(k, (at[1], at[0]), codes, *sides), table.dtype))
    return render(k.build(), gpu).programs


def _product(x: Buffer, table: Buffer, out: Buffer, gpu: Gpu) -> Rendered:
    """x times the weights as numbers."""
    k = KernelBuilder("dequant_product")
    left, right = (k.input(b.name, b.type) for b in (x, table))

    def element(index: tuple[Expr, ...]) -> Expr:
        row, column = index
        return k.reduce("sum", (x.shape[1],), lambda at: k.cast(left[row, at], f32) * k.cast(right[column, at], f32))

    k.output(out.name, out.type, lambda index: k.cast(element(index), out.dtype))
    return render(k.build(), gpu)


def kind_of_winner(shape: BlockShape, dtype: DType, gpu: Gpu, *, is_few: bool) -> str:
    """Where schedules of a format are in the table: of few rows by fragments or words, by words only, by bytes."""
    if not is_few:
        kind = "rows unpacked"
    elif is_fragments(shape, dtype, gpu):
        kind = "few blocks"
    else:
        kind = "rows words" if is_words(shape) else "rows blocks"
    return f"{kind} {shape.form.name}"


class BlockRows:
    """Blocks of a matrix, row by row, and the tile that a program takes of them."""

    def __init__(
        self, shape: BlockShape, weights: Any, kernel: Kernel, gpu: Gpu, given: str = "", *, is_few: bool
    ) -> None:
        form = shape.form
        self.shape, self.k, self.n, self.kernel = shape, weights.k, weights.n, kernel
        self.form, self.count = form, weights.k // form.elements
        rows = min(_TOGETHER, known(kernel.inputs[0].shape[0]))
        kind = kind_of_winner(shape, kernel.inputs[0].dtype, gpu, is_few=is_few)
        sizes = rows, form.elements, weights.n, weights.k
        found = parse_gpu_schedule(given) if given else winner(gpu, kind, sizes)
        assert isinstance(found, TritonRows | Fragments), f"{given} is no schedule of blocks"
        if isinstance(found, TritonRows):  # no more than there are
            found = replace(found, points=power_of_two(self.n, 1, found.points))
        terms = power_of_two(self.k, form.elements, max(form.elements, found.terms))
        self.schedule = replace(found, terms=terms)  # whole blocks
        self.step = self.schedule.terms // form.elements  # blocks at a time

    def start(self, name: str) -> TritonEmitter:
        e = TritonEmitter(self.kernel, self.schedule, (self.schedule.points, self.schedule.terms))
        points = self.schedule.points
        wide = ".to(tl.int64)" if self.n * self.count * self.form.bytes >= _WIDE else ""
        e.write(f"row = {name} * {points} + tl.arange(0, {points})[:, None]")
        e.write(f"run = tl.arange(0, {self.step * self.shape.runs})[None, :]")
        e.write(f"byte = tl.arange(0, {self.shape.run})[None, None, :]")
        e.write(f"first = row{wide} * {self.count * self.form.bytes}")
        return e

    def tile(self, e: TritonEmitter, start: str) -> BlockTile:
        """Inside of a loop over blocks."""
        e.write(f"block = {start} + run // {self.shape.runs}")
        masks = []
        if self.is_cut:
            masks.append(f"(block < {self.count})")
        if self.n % self.schedule.points:
            masks.append(f"(row < {self.n})")
        if masks:
            e.write(f"inside = {' & '.join(masks)}")
        e.write(f"at = first + block * {self.form.bytes}")
        return BlockTile(e, self.shape, "codes", "at", "inside" if masks else "")

    @property
    def programs(self) -> int:
        return -(-self.n // self.schedule.points)

    @property
    def is_cut(self) -> bool:
        """Whether the last step of the loop is beyond the terms."""
        return bool(self.count % self.step)

    def program(self, e: TritonEmitter, name: str, buffers: tuple[Buffer, ...], grid: tuple[Dim, ...]) -> TritonProgram:
        lines = [f"    {text} = {text}.to(tl.int64)" for text in e.sizes.values()] + e.lines
        named = replace(self.kernel, inputs=buffers, outputs=())
        return TritonProgram(
            name, named, "\n".join(lines) + "\n", frozenset(e.helpers), buffers, tuple(e.sizes), grid, self.schedule
        )


def _multiplied(blocks: BlockRows) -> TritonProgram:
    """Rows of x with a tile of weights, a few rows at a time."""
    x, codes = blocks.kernel.inputs
    (out,) = blocks.kernel.outputs
    rows, dtype = x.shape[0], x.dtype
    together = min(_TOGETHER, known(rows))
    chunks = (rows + together - 1) // together
    e = blocks.start("(tl.program_id(0) // chunks)" if chunks != 1 else "tl.program_id(0)")
    if chunks != 1:
        e.lines.insert(0, f"    chunks = {e.size(chunks)}")
        e.write(f"line = tl.program_id(0) % chunks * {together}")
    else:
        e.write("line = 0")
    shape = [blocks.schedule.points, blocks.step * blocks.shape.runs, blocks.shape.run]
    for i in range(together):
        e.write(f"sum{i} = tl.full({shape}, 0.0, tl.float32)")
    e.write(f"for start in range(0, {blocks.count}, {blocks.step}):")
    with e.indented():
        tile = blocks.tile(e, "start")
        e.write(f"element = (block * {blocks.form.elements})[:, :, None] + {tile.element}")
        exact = isinstance(rows, int) and rows % together == 0
        for further, weight in tile.weights():
            for i in range(together):
                masks = [f"(block < {blocks.count})[:, :, None]"] if blocks.is_cut else []
                masks += [] if exact else [f"(line + {i} < {e.size(rows)})"]
                mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
                given = f"tl.load(x + (line + {i}) * {blocks.k} + element + {further}{mask})"
                e.write(f"sum{i} = sum{i} + {weight} * {decoded(given, dtype, e.needs)}")
    e.write(f"column = {'(tl.program_id(0) // chunks)' if chunks != 1 else 'tl.program_id(0)'} * "
            f"{blocks.schedule.points} + tl.arange(0, {blocks.schedule.points})")  # fmt: skip
    for i in range(together):
        masks = [f"(column < {blocks.n})"] if blocks.n % blocks.schedule.points else []
        masks += [] if exact else [f"(line + {i} < {e.size(rows)})"]
        mask = f", mask={' & '.join(masks)}" if masks else ""
        total = encoded(f"tl.sum(tl.sum(sum{i}, axis=2), axis=1)", dtype, e.needs)
        e.write(f"tl.store(out + (line + {i}) * {blocks.n} + column, {total}{mask})")
    return blocks.program(e, "dequant_matmul", (x, codes, out), (blocks.programs * chunks,))


def _multiplied_by_words(blocks: BlockRows, gpu: Gpu) -> TritonProgram:
    """The same by words of the blocks: a thread has some runs of some rows, and reads x for all of them."""
    x, codes = blocks.kernel.inputs
    (out,) = blocks.kernel.outputs
    rows, dtype, points = x.shape[0], x.dtype, blocks.schedule.points
    together = min(_TOGETHER, known(rows))
    chunks = (rows + together - 1) // together
    own = min(points, _THREAD_ROWS)
    beside, runs = points // own, blocks.step * blocks.shape.runs
    e = TritonEmitter(blocks.kernel, blocks.schedule, (points, blocks.schedule.terms))
    program, line = "tl.program_id(0)", "0"
    if chunks != 1:
        e.write(f"chunks = {e.size(chunks)}")
        program, line = "(tl.program_id(0) // chunks)", f"tl.program_id(0) % chunks * {together}"
    wide = ".to(tl.int64)" if blocks.n * blocks.count * blocks.form.bytes >= _WIDE else ""
    e.write(f"line = {line}")
    e.write(f"lane = tl.arange(0, {runs * beside})")
    e.write(f"run = lane // {beside}")
    e.write("terms = x.to(tl.pointer_type(tl.uint64))")
    weights = [e.name(f"{program} * {points} + {at * beside} + lane % {beside}", "row") for at in range(own)]
    firsts = [e.name(f"{row}{wide} * {blocks.count * blocks.form.bytes}", "first") for row in weights]
    zeros = f"tl.full([{runs * beside}], 0.0, tl.float32)"
    sums = [[e.name(zeros, "sum") for _ in range(together)] for _ in range(own)]
    exact = isinstance(rows, int) and rows % together == 0
    e.write(f"for start in range(0, {blocks.count}, {blocks.step}):")
    with e.indented():
        e.write(f"block = start + run // {blocks.shape.runs}")
        parts, moves = blocks.shape.parts(e)
        inside = [f"(block < {blocks.count})"] if blocks.is_cut else []
        tiles = []
        for row, first in zip(weights, firsts, strict=True):
            masks = [*inside, *([f"({row} < {blocks.n})"] if blocks.n % points else [])]
            mask = e.name(" & ".join(masks), "inside") if masks else ""
            tiles.append(WordTile(e, blocks.shape, parts, moves, first, mask, gpu.kind == "cuda"))
        size, given = dtype.itemsize, []
        if not exact:
            e.write("lines = line + run * 0")
        for i in range(together):
            place = f"(line + {i}) * {blocks.k * size // 8} + block * {blocks.form.elements * size // 8}"
            masks = [*inside, *([] if exact else [f"(lines + {i} < {e.size(rows)})"])]
            given.append(
                (e.name(f"terms + ({place})", "line"), f", mask={' & '.join(masks)}, other=0" if masks else "")
            )
        add_products(tiles, Terms(e, parts, dtype, given), sums)
    e.write(f"column = {program} * {points} + tl.arange(0, {beside})")
    for at, names in enumerate(sums):
        for i, name in enumerate(names):
            masks = [f"(column < {blocks.n - at * beside})"] if blocks.n % points else []
            masks += [] if exact else [f"(line + column * 0 + {i} < {e.size(rows)})"]
            mask = f", mask={' & '.join(masks)}" if masks else ""
            total = encoded(f"tl.sum(tl.reshape({name}, [{runs}, {beside}]), axis=0)", dtype, e.needs)
            e.write(f"tl.store(out + (line + {i}) * {blocks.n} + column + {at * beside}, {total}{mask})")
    return blocks.program(e, "dequant_matmul", (x, codes, out), (blocks.programs * chunks,))


def _multiplied_by_fragments(blocks: BlockRows) -> TritonProgram:
    """The same by tensor cores: a warp has 16 rows of weights, or some times as many, and blocks of its own."""
    x, codes = blocks.kernel.inputs
    (out,) = blocks.kernel.outputs
    schedule, form, rows, size = blocks.schedule, blocks.form, x.shape[0], x.dtype.itemsize
    warps, points, together = schedule.warps, schedule.points, min(COLUMNS, known(rows))
    apart, own = (2, 1) if together <= COLUMNS // 2 else (1, 2)  # columns of a row of x; those of a lane that count
    each = max(1, min(schedule.terms // form.elements, blocks.count) // warps)  # blocks of a warp at a time
    e = TritonEmitter(blocks.kernel, schedule, (points, schedule.terms))
    chunks = (rows + together - 1) // together
    program, line = "tl.program_id(0)", "0"
    if chunks != 1:
        e.write(f"chunks = {e.size(chunks)}")
        program, line = "(tl.program_id(0) // chunks)", f"tl.program_id(0) % chunks * {together}"
    wide = ".to(tl.int64)" if blocks.n * blocks.count * form.bytes >= _WIDE else ""
    e.write(f"lane = tl.arange(0, {LANES * warps})")
    e.write(f"quad = lane % {QUAD}")
    e.write(f"place = lane // {QUAD} % {COLUMNS}")
    e.write(f"begin = lane // {LANES} * {each}")
    constants = [("carrier", pair(CARRIERS[x.dtype], x.dtype)), ("whole", WHOLE)]
    constants += [(f"table{i}", word) for i, word in enumerate(table_of(blocks.shape, x.dtype))]
    for name, number in constants:
        e.write(f"{name} = {e.needs('unknown')}(lane.to(tl.uint32) * 0 + {number})")
    e.write(f"line = {line}")
    e.write(f"column = tl.minimum(line + place // {apart}, {e.size(rows)} - 1).to(tl.int32)")
    e.write(f"terms = x.to(tl.pointer_type(tl.uint64)) + column{wide} * {blocks.k * size // 8}")
    numbers = [e.name(f"{program} * {points} + {at} + place", "row") for at in range(0, points, COLUMNS)]
    firsts = [e.name(f"{row}{wide} * {blocks.count * form.bytes}", "first") for row in numbers]
    zeros = f"tl.full([{LANES * warps}], 0.0, tl.float32)"
    sums = [[e.name(zeros, "sum") for _ in range(own)] for _ in numbers]
    parts = [Part("quad", QUAD, blocks.shape.run // QUAD)]
    is_cut = bool(blocks.count % (each * warps))
    e.write(f"for start in range(0, {blocks.count}, {each * warps}):")
    with e.indented():
        for at in range(each):
            e.write(f"block = start + begin + {at}")
            inside = [f"(block < {blocks.count})"] if is_cut else []
            mask = f", mask={inside[0]}, other=0" if inside else ""
            address = e.name(f"terms + block * {form.elements * size // 8}", "line")
            tiles = []
            for row, first in zip(numbers, firsts, strict=True):
                masks = [*inside, *([f"({row} < {blocks.n})"] if blocks.n % points else [])]
                own_mask = e.name(" & ".join(masks), "inside") if masks else ""
                tiles.append(RowTile(e, blocks.shape, parts, [blocks.shape.run // QUAD], first, own_mask, True,
                                     dtype=x.dtype))  # fmt: skip
            add_tiles(tiles, Columns(e, address, mask), sums)
    e.write(f"lane = tl.arange(0, {LANES})")
    e.write(f"quad = lane % {QUAD}")
    for i, names in enumerate(sums):
        e.write(f"row = {program} * {points} + {i * COLUMNS} + lane // {QUAD}")
        for at, name in enumerate(names):
            e.write(f"column = quad * {own} + {at}")
            masks = [f"(column < {together})"] if together < QUAD * own else []
            masks += [] if isinstance(rows, int) and rows % together == 0 else [f"(line + column < {e.size(rows)})"]
            masks += [f"(row < {blocks.n})"] if blocks.n % points else []
            mask = f", mask={' & '.join(masks)}" if masks else ""
            total = encoded(f"tl.sum(tl.reshape({name}, [{warps}, {LANES}]), axis=0)", x.dtype, e.needs)
            e.write(f"tl.store(out + (line + column){wide} * {blocks.n} + row, {total}{mask})")
    return blocks.program(e, "dequant_matmul", (x, codes, out), (blocks.programs * chunks,))


def _written(blocks: BlockRows, table: Buffer) -> TritonProgram:
    """Weights to scratch memory."""
    codes = blocks.kernel.inputs[1]
    steps = -(-blocks.count // blocks.step)
    e = blocks.start(f"(tl.program_id(0) // {steps})")
    tile = blocks.tile(e, f"tl.program_id(0) % {steps} * {blocks.step}")
    wide = ".to(tl.int64)" if blocks.n * blocks.k >= _WIDE else ""
    e.write(f"place = (row{wide} * {blocks.k} + block * {blocks.form.elements})[:, :, None] + {tile.element}")
    for further, weight in tile.weights():
        mask = ", mask=inside[:, :, None]" if tile.mask else ""
        e.write(f"tl.store(weights + place + {further}, {encoded(weight, table.dtype, e.needs)}{mask})")
    return blocks.program(e, "unpack", (codes, table), (blocks.programs * steps,))
