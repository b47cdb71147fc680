"""The block driver of a matmul: chunks of rows and column panels, k blocks, row tiles, tails.

    void kernel(ptr args, i64 begin, i64 end)

computes chunks [begin, end) of `spec.chunk_count(m, n, batch, k)`; `args` holds the slots of `spec.slots`. B is packed,
unless the spec says that it is read in rows.
Chunks write disjoint parts of the output and share nothing, so any thread may run any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.backends.llvm.gemm.epilogue import Epilogue, Site, emit_finish, put_sums
from strata.backends.llvm.gemm.micro import Micro, RegisterTile, TileHeights, call_micro
from strata.backends.llvm.gemm.spec import FEW_CHUNKS, UNBOUNDED, Contraction
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.native import template
from strata.backends.llvm.ir.registers import memory_type

LINE = 64  # bytes that come from memory together


def emit_contraction(
    module: IrModule, spec: Contraction, epilogue: Epilogue | None = None, name: str | None = None
) -> str:
    """Adds the kernel (and the internal functions it needs) and returns its name."""
    name = name or spec.name
    finish = emit_finish(module, spec, f"{name}_finish", epilogue)
    f = template(module, name)
    driver = GemmDriver(f, spec, finish, epilogue)
    if spec.joined == 1:
        f.loop("%begin", "%end", 1, [], lambda chunk, _: driver.chunk(chunk))
    else:
        f.loop("%begin", "%end", spec.joined, [], lambda chunk, _: driver.chunks(chunk, f.sub("%end", chunk)))
    f.ret()
    return name


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one chunk works on; `a` and `out` point at its first row, `b` at its batch's first panel."""

    a: str
    b: str
    out: str
    batch: tuple[Value, ...]
    row: Value
    rows: Value
    tiles: Value  # row tiles
    first_panel: Value
    full_panels: Value  # end of the panels that have all their columns
    tail: Value  # columns of the last, narrower panel, 0 when the chunk has none


@dataclass(frozen=True, slots=True)
class GemmBlock:
    """A block of k: where it starts, how long it is, whether sums resume, whether it is the last."""

    start: Value
    length: Value
    resume: Value
    is_last: Value


class GemmDriver:
    """Emits the loops of one kernel into `f`."""

    def __init__(self, f: IrFunction, spec: Contraction, finish: str, epilogue: Epilogue | None = None) -> None:
        self.f, self.spec, self.finish, self.epilogue = f, spec, finish, epilogue
        self.arithmetic, self.row_tiles = spec.arithmetic, TileHeights(spec.heights)
        self.pointer = {p: f.load("ptr", f.address("i64", "%args", spec.slot(p)), 8) for p in ("a", "b", "out")}
        self.number = {n: self._number(n) for n in spec.numbers}
        element = memory_type(spec.accumulator)
        self.sums = f.alloca(element, spec.tile_elements * spec.matrices)
        self.totals = f.alloca(element, spec.tile_elements) if spec.parts_of_block else ""
        a_element = memory_type(self.arithmetic.a)
        self.a_block = f.alloca(a_element, spec.chunk_rows * spec.k_block) if spec.a_packed else ""
        self.m, self.n, self.k = (self.number[x] for x in "mnk")
        group = self.arithmetic.group
        self.packed_k = f.add(f.round_down(f.add(self.k, group - 1), group), self.arithmetic.head)
        self.b_elements = f.mul(self.packed_k, f.round_down(f.add(self.n, spec.lanes - 1), spec.lanes))
        self.chunk_panels: Value = self.number["chunk_panels"] if spec.is_open else spec.chunk_panels
        self.column_blocks = self.f.ceil_div(self.n, f.mul(self.chunk_panels, spec.panel_columns))
        self.row_blocks = self._row_blocks()
        self.block_rows = self._block_rows()
        self.block_length, self.blocks = self._k_blocks()

    @property
    def a_stride(self) -> Value:
        """What the micro-kernels take for the stride of A."""
        return self.number["a_row"]

    @property
    def run(self) -> int:
        """k's of a run of A that is found through a table of addresses."""
        return 0

    def chunk(self, index: str) -> None:
        self._compute(self._decode(index))

    def chunks(self, index: str, left: Value) -> None:
        """Chunks from one on, as many as are left and fit into one pass."""
        self._compute(self._decode(index, self.f.smin(left, self.spec.joined)))

    def _compute(self, chunk: Chunk) -> None:
        self._prepare(chunk)
        self._k_loop(chunk, lambda block: self._panels(chunk, block, self._few_rows(chunk, block)))
        if self.spec.parts_of_block:
            self._finish_totals(chunk)

    def _prepare(self, chunk: Chunk) -> None:
        """What a chunk needs before its first product."""

    # where a chunk is

    def _number(self, name: str) -> Value:
        """A size or stride; of complex matrices, in components."""
        fixed = name in ("m", "a_k", *self.spec.epilogue_numbers, *self.spec.load_numbers)
        fixed = fixed or name.endswith(("_b", "_extent"))
        return self.f.mul(self._argument(name), 1 if fixed else self.spec.parts)

    def _argument(self, name: str) -> str:
        return self.f.load("i64", self.f.address("i64", "%args", self.spec.slot(name)), 8)

    def _k_blocks(self) -> tuple[Value, Value]:
        """Blocks of k of nearly equal length; one block of no products when k is 0."""
        f, spec = self.f, self.spec
        if not spec.k_block:
            return self.k, 1
        count = f.smax(self.f.ceil_div(self.k, spec.k_block), 1)
        if spec.parts_of_block:
            return spec.k_block, count
        unit = spec.blocks.terms if spec.blocks is not None else 8  # k_block is a multiple of it
        length = f.op(f"udiv i64 {f.sub(f.add(self.k, count), 1)}, {count}")
        return f.round_down(f.add(length, unit - 1), unit), count

    def _row_blocks(self) -> Value:
        """As `spec.row_blocks` says."""
        f, count = self.f, self.f.ceil_div(self.m, self.spec.chunk_rows)
        if not self.spec.is_open:
            return count
        is_several, is_few = f.compare("ugt", "i64", count, 1), f.compare("ule", "i64", count, FEW_CHUNKS)
        odd = f.binary("and", "i64", count, 1)
        return f.add(count, f.select("i64", f.binary("and", "i1", is_several, is_few), odd, 0))

    def _block_rows(self) -> Value:
        """Rows of a chunk: all blocks but the last have the same, and as many tiles as it takes to be nearly even."""
        f, spec = self.f, self.spec
        if spec.a_runs or spec.load_numbers:  # pixels: the caller has chosen how many
            return spec.chunk_rows
        count, height = f.smax(self.row_blocks, 1), spec.heights[0]
        rows = f.op(f"udiv i64 {f.sub(f.add(self.m, count), 1)}, {count}")
        return f.smin(f.mul(self.f.ceil_div(rows, height), height), spec.chunk_rows)

    def _decode(self, index: str, joined: Value = 1) -> Chunk:
        f, spec, number = self.f, self.spec, self.number
        counts = [self.column_blocks, self.row_blocks]
        flat, *places = f.digits(index, counts if spec.columns_first else counts[::-1])
        column_block, row_block = places if spec.columns_first else places[::-1]
        row = f.mul(row_block, self.block_rows)
        pointer = dict(self.pointer)
        types = {"a": memory_type(spec.a), "b": memory_type(spec.b), "out": memory_type(spec.out)}
        batch: list[Value] = []
        for axis in reversed(range(spec.batch_rank)):
            flat, place = f.divided(flat, number[f"batch{axis}_extent"])
            batch.insert(0, place)
            for operand, type_ in types.items():
                offset = f.mul(batch[0], number[f"batch{axis}_{operand}"])
                pointer[operand] = f.address(type_, pointer[operand], offset)
        first = f.mul(column_block, self.chunk_panels)
        end = f.add(first, f.mul(self.chunk_panels, joined))
        whole, left = f.divided(self.n, spec.panel_columns)
        has_tail = f.compare("sgt", "i64", end, whole)
        rows = f.smin(f.sub(self.m, row), self.block_rows)
        return Chunk(
            a=f.address(types["a"], pointer["a"], f.mul(row, number["a_row"])),
            b=pointer["b"],
            out=f.address(types["out"], pointer["out"], f.mul(row, number["out_row"])),
            batch=tuple(batch),
            row=row,
            rows=rows,
            tiles=self.row_tiles.count(f, rows),
            first_panel=first,
            full_panels=f.smin(end, whole),
            tail=f.select("i64", has_tail, left, 0),
        )

    # loops

    def _k_loop(self, chunk: Chunk, body: Callable[[GemmBlock], None]) -> None:
        f = self.f
        if not self.spec.k_block:
            body(GemmBlock(0, self.k, 0, "true"))
            return

        parts = self.spec.parts_of_block

        def one(index: str, _: list[str]) -> None:
            start = f.mul(index, self.block_length)
            length = f.smin(self.block_length, f.sub(self.k, start))
            last = f.compare("eq", "i64", f.add(index, 1), self.blocks)
            if not parts:
                body(GemmBlock(start, length, index, last))
                return
            part = f.op(f"urem i64 {index}, {parts}")
            begins, later = f.compare("eq", "i64", part, 0), f.compare("sgt", "i64", index, 0)
            f.if_(f.binary("and", "i1", begins, later), lambda: self._join(chunk, f.sub(index, parts), self.totals))
            body(GemmBlock(start, length, part, "false"))  # sums are finished after the loop

        f.loop(0, self.blocks, 1, [], one)

    # blocks of sums that are made in several blocks of k

    def _join(self, chunk: Chunk, earlier: Value, to: str) -> None:
        """Sums of a block are added to those of the blocks before it, which there are where `earlier` is not 0."""
        f, spec, element = self.f, self.spec, memory_type(self.spec.accumulator)
        type_, size = memory_type(spec.accumulator, spec.lanes), spec.accumulator.itemsize
        is_later = f.compare("ne", "i64", earlier, 0)
        columns = f.mul(f.sub(self._last_panel(chunk), chunk.first_panel), spec.panel_columns)

        def row(index: str, _: list[str]) -> None:
            first = f.mul(index, spec.sums_columns)

            def some(column: str, _: list[str]) -> None:
                at = f.add(first, column)
                mine, before = (f.load(type_, f.address(element, x, at), size) for x in (self.sums, self.totals))
                total = f.select(type_, is_later, f.binary("fadd", type_, before, mine), mine, uniform=True)
                f.store(type_, total, f.address(element, to, at), size)

            f.loop(0, columns, spec.lanes, [], some)

        f.loop(0, chunk.rows, 1, [], row)

    def _finish_totals(self, chunk: Chunk) -> None:
        """The last block joins the others, and all sums of a chunk go through the epilogue."""
        f, spec = self.f, self.spec
        several = f.compare("sgt", "i64", self.blocks, spec.parts_of_block)
        f.if_(several, lambda: self._join(chunk, 1, self.sums))

        def one(panel: str, _: list[str]) -> None:
            columns, spare = self._columns_of(chunk, panel)[1::2]
            sums = f.address(memory_type(spec.accumulator), self._own_sums(chunk, 0, panel), spare)
            block = GemmBlock(0, 0, 0, "true")
            self._finish(
                chunk, block, "true", sums, spec.sums_columns, 0, f.mul(panel, spec.panel_columns), chunk.rows, columns
            )

        f.loop(chunk.first_panel, self._last_panel(chunk), 1, [], one)

    def _last_panel(self, chunk: Chunk) -> Value:
        """Where the panels of a chunk end."""
        f = self.f
        has_tail = f.compare("sgt", "i64", chunk.tail, 0)
        return f.add(chunk.full_panels, f.select("i64", has_tail, 1, 0))

    def _panels(self, chunk: Chunk, block: GemmBlock, first_panel: Value) -> None:
        f, spec = self.f, self.spec
        if spec.a_packed:
            self._pack_block(chunk, block)
        f.loop(first_panel, self._last_panel(chunk), 1, [], lambda panel, _: self._panel(chunk, block, panel))

    def _row_tiles(self, chunk: Chunk, body: Callable[[Value, Value], None], skipped: Value = 0) -> None:
        self.row_tiles.over_rows(self.f, chunk.rows, body, count=chunk.tiles, skipped=skipped)

    def _micro(self, rows: int, vectors: int, streams: int = 1, *, is_half: bool = False) -> Micro:
        spec = self.spec
        ahead = spec.ahead(rows, streams) if vectors == spec.vectors and not is_half else 0
        blocks = None if spec.parts_of_block else spec.blocks
        return Micro(
            self.arithmetic, RegisterTile(rows, vectors, streams, is_half), spec.layout, ahead, spec.b_rows, blocks,
            self.run if blocks is not None else 0,
        )  # fmt: skip

    def _pack_block(self, chunk: Chunk, block: GemmBlock) -> None:
        """A block of k of all rows: the tallest tiles together, the others one by one."""
        f, spec, number = self.f, self.spec, self.number
        height = spec.heights[0]
        tallest = f.op(f"udiv i64 {chunk.rows}, {height}")

        def pack(function: str, row: Value, count: Value) -> None:
            offset = f.add(f.mul(row, number["a_row"]), f.mul(block.start, number["a_k"]))
            source = f.address(memory_type(spec.a), chunk.a, offset)
            strides = [("i64", self._argument(name)) for name in ("a_row", "a_k")]
            place = self._a_tile(chunk, block, row)
            f.call("void", function, ("ptr", source), *strides, ("ptr", place), ("i64", count), ("i64", block.length))

        pack(spec.tile_packer.emit_block(f.module, height), 0, tallest)
        tile = spec.tile_packer.emit(f.module)
        self._row_tiles(chunk, lambda row, rows: pack(tile, row, rows), tallest)

    def _a_tile(self, chunk: Chunk, block: GemmBlock, row: Value) -> str:
        f, spec = self.f, self.spec
        if spec.a_packed:
            length = f.round_down(f.add(block.length, self.arithmetic.group - 1), self.arithmetic.group)
            return f.address(memory_type(self.arithmetic.a), self.a_block, f.mul(row, length))
        return f.address(memory_type(spec.a), chunk.a, f.add(f.mul(row, self.number["a_row"]), block.start))

    def _b_panel(self, chunk: Chunk, block: GemmBlock, panel: Value, columns: Value) -> str:
        f, spec = self.f, self.spec
        if spec.b_rows:
            place = f.add(f.mul(panel, spec.panel_columns), f.mul(block.start, self.number["b_k"]))
            return f.address(memory_type(spec.b), chunk.b, place)
        start = f.add(block.start, self.arithmetic.head)
        offset = f.add(f.mul(f.mul(panel, spec.panel_columns), self.packed_k), f.mul(start, columns))
        return f.address(memory_type(spec.b), chunk.b, offset)

    def _columns_of(self, chunk: Chunk, panel: Value) -> tuple[str, Value, Value, Value]:
        """Whether a panel is the tail, its columns, its vectors, and the columns before a tail that are summed with it:
        where B is read in rows, its last vector ends with the row."""
        f, spec = self.f, self.spec
        is_tail = f.compare("eq", "i64", panel, chunk.full_panels)
        vectors = f.select("i64", is_tail, self.f.ceil_div(chunk.tail, spec.lanes), spec.vectors)
        columns = f.select("i64", is_tail, chunk.tail, spec.panel_columns)
        spare: Value = 0
        if spec.b_rows:
            computed = f.mul(vectors, spec.lanes)
            if spec.half_tail:
                computed = f.sub(computed, f.select("i64", is_tail, spec.lanes // 2, 0))
            spare = f.sub(computed, columns)
        return is_tail, columns, vectors, spare

    def _panel(self, chunk: Chunk, block: GemmBlock, panel: Value) -> None:
        f, spec, number = self.f, self.spec, self.number
        is_tail, columns, vectors, spare = self._columns_of(chunk, panel)
        kernels = [self._by_vectors(vectors, height, is_tail) for height in spec.heights]
        b = self._b_panel(chunk, block, panel, f.mul(vectors, spec.lanes))
        column = f.mul(panel, spec.panel_columns)
        if spec.b_rows:
            b = f.address(memory_type(spec.b), b, f.sub(0, spare))
        # full panels may keep their sums in the output; the tail's output is narrower than its sums
        if spec.stores_directly:
            in_output = f.binary("xor", "i1", is_tail, "true")
        elif spec.k_block and spec.waits_in_output:
            in_output = f.select("i1", is_tail, "false", f.compare("sgt", "i64", self.blocks, 1))
        else:
            in_output = "false"
        stride = f.select("i64", in_output, number["out_row"], spec.sums_columns)

        def tile(row: Value, height: Value) -> None:
            out = f.address(memory_type(spec.out), chunk.out, f.add(f.mul(row, number["out_row"]), column))
            if not spec.ends_in_registers:
                through_memory(row, height, out)
                return
            is_tall = f.compare("eq", "i64", height, spec.heights[0])
            whole = f.binary("and", "i1", is_tall, f.binary("xor", "i1", is_tail, "true"))
            f.if_(
                whole,
                lambda: self._ended(chunk, block, row, b, column, out),
                lambda: through_memory(row, height, out),
            )

        def through_memory(row: Value, height: Value, out: str) -> None:
            sums = f.select("ptr", in_output, out, self._own_sums(chunk, row, panel))
            known = isinstance(height, int)
            kernel = (
                kernels[spec.heights.index(height)]
                if known
                else self.row_tiles.by_height(f, f.sub(chunk.rows, row), "ptr", kernels)
            )
            a = self._a_tile(chunk, block, row)
            self._fetch_operands(block, out, height)
            for b_panel, c in self._each(b, sums):
                apart = number["b_k"] if spec.b_rows else 0
                call_micro(f, kernel, a, self.a_stride, b_panel, apart, c, stride, block.length, block.resume)
            ready = is_tail if spec.stores_directly else "true"
            wanted = f.address(memory_type(spec.accumulator), sums, spare) if spec.b_rows else sums
            self._finish(chunk, block, ready, wanted, stride, row, column, height, columns)

        self._row_tiles(chunk, tile)

    def _ended(self, chunk: Chunk, block: GemmBlock, row: Value, b: str, column: Value, out: str) -> None:
        """A whole tile of the tallest height: from the products through the epilogue to the output."""
        f, spec = self.f, self.spec
        micro = self._micro(spec.heights[0], spec.vectors)
        name = f"{self.finish}_{micro.name}"
        places = ["row", "column", *(f"batch{axis}" for axis in range(spec.batch_rank))]

        def end(g: IrFunction, rows: list[list[str]]) -> None:
            batch = tuple(f"%batch{axis}" for axis in range(spec.batch_rank))
            put_sums(Site(g, spec, "%args", "%row", "%column", batch, spec.lanes, None), rows, self.epilogue, None)

        if not f.module.has(name):
            micro.emit_ended(f.module, name, [("ptr noalias", "args"), *(("i64", p) for p in places)], end)
        self._fetch_operands(block, out, spec.heights[0])
        f.call(
            "void", name, ("ptr", self._a_tile(chunk, block, row)), ("i64", self.a_stride), ("ptr", b),
            ("i64", self.number["b_k"] if spec.b_rows else 0), ("i64", block.length), ("ptr", "%args"),
            *(("i64", n) for n in (f.add(chunk.row, row), column, *chunk.batch)),
        )  # fmt: skip

    def _each(self, b: str, sums: str) -> list[tuple[str, str]]:
        """For each B, where its panel is and where its sums go."""
        if not self.spec.is_pair:
            return [(b, sums)]
        f, spec = self.f, self.spec
        second = f.address(memory_type(spec.b), b, self.b_elements)
        return [(b, sums), (second, f.address(memory_type(spec.accumulator), sums, spec.tile_elements))]

    def _fetch_operands(self, block: GemmBlock, out: str, height: Value) -> None:
        """Prefetch what the epilogue will read beside the output, while the sums are computed."""
        f, spec = self.f, self.spec
        if not spec.beside_output:
            return
        offset = f.sub(*(f.convert("ptrtoint", "ptr", x, "i64") for x in (out, self.pointer["out"])))
        row_bytes, size = f.mul(self.number["out_row"], spec.out.itemsize), spec.panel_columns * spec.out.itemsize
        bases = [f.load("ptr", f.address("i64", "%args", spec.slot(p)), 8) for p in spec.beside_output]

        def one_row(row: str, _: list[str]) -> None:
            for base in bases:
                place = f.address("i8", base, f.add(offset, f.mul(row, row_bytes)))
                for line in (*range(0, size, LINE), size - 1):
                    f.prefetch(f.address("i8", place, line))

        f.if_(block.is_last, lambda: f.loop(0, height, 1, [], one_row))

    def _by_vectors(self, vectors: Value, height: int, is_tail: str = "false") -> Value:
        """The micro-kernel of a height for a panel of this many vectors."""
        f, spec = self.f, self.spec
        if spec.half_tail:
            whole, half = (
                "@" + self._micro(height, count, is_half=is_half).emit(f.module)
                for count, is_half in ((spec.vectors, False), (spec.tails[0], True))
            )
            return f.select("ptr", is_tail, half, whole)
        result: Value = "@" + self._micro(height, spec.vectors).emit(f.module)
        for count in spec.tails:
            if count < spec.vectors:
                name = "@" + self._micro(height, count).emit(f.module)
                result = f.select("ptr", f.compare("eq", "i64", vectors, count), name, result)
        return result

    def _own_sums(self, chunk: Chunk, row: Value, panel: Value) -> str:
        """Where this chunk keeps the sums of a tile."""
        f, spec = self.f, self.spec
        offset = f.mul(row, spec.sums_columns)
        if spec.sums_columns > spec.panel_columns:
            offset = f.add(offset, f.mul(f.sub(panel, chunk.first_panel), spec.panel_columns))
        return f.address(memory_type(spec.accumulator), self.sums, offset)

    def _finish(
        self, chunk: Chunk, block: GemmBlock, ready: str, sums: str, stride: Value, row: Value, column: Value,
        rows: Value, columns: Value,
    ) -> None:  # fmt: skip
        f = self.f

        def call() -> None:
            numbers = (stride, f.add(chunk.row, row), column, rows, columns, *chunk.batch)
            f.call("void", self.finish, ("ptr", "%args"), ("ptr", sums), *(("i64", x) for x in numbers))

        f.if_(f.binary("and", "i1", ready, block.is_last), call)

    # few rows

    def _few_rows(self, chunk: Chunk, block: GemmBlock) -> Value:
        """With few rows, reading B is what takes time: several panels at once. Returns the first panel left over."""
        f, spec, number = self.f, self.spec, self.number
        if not spec.streams:
            return chunk.first_panel
        kernel: Value = "null"
        streams: Value = UNBOUNDED
        for rows, count in enumerate(spec.streams, 1):
            if not count:
                continue
            applies = f.compare("eq", "i64", chunk.rows, rows)
            name = "@" + self._micro(rows, spec.vectors, count).emit(f.module)
            kernel = f.select("ptr", applies, name, kernel)
            streams = f.select("i64", applies, count, streams)
        available = f.smax(f.sub(chunk.full_panels, chunk.first_panel), 0)
        end = f.add(chunk.first_panel, f.mul(f.op(f"udiv i64 {available}, {streams}"), streams))
        width = f.mul(streams, spec.panel_columns)
        apart = number["b_k"] if spec.b_rows else f.mul(self.packed_k, spec.panel_columns)

        def some(panel: str, _: list[str]) -> None:
            column = f.mul(panel, spec.panel_columns)
            out = f.address(memory_type(spec.out), chunk.out, column)
            sums, stride = self._few_sums(chunk, panel, out, width)
            b, a = self._b_panel(chunk, block, panel, spec.panel_columns), self._a_tile(chunk, block, 0)
            for b_panel, c in self._each(b, sums):
                call_micro(f, kernel, a, number["a_row"], b_panel, apart, c, stride, block.length, block.resume)
            if not spec.stores_directly:
                self._finish(chunk, block, "true", sums, stride, 0, column, chunk.rows, width)

        f.loop(chunk.first_panel, end, streams, [], some)
        return end

    def _few_sums(self, chunk: Chunk, panel: Value, out: str, width: Value) -> tuple[str, Value]:
        """Where the sums of several panels are kept, and how far apart their rows are."""
        f, spec = self.f, self.spec
        if spec.stores_directly:
            return out, self.number["out_row"]
        if not spec.k_block:
            return self.sums, width
        if not spec.waits_in_output:
            return self._own_sums(chunk, 0, panel), spec.sums_columns
        several = f.compare("sgt", "i64", self.blocks, 1)
        return f.select("ptr", several, out, self.sums), f.select("i64", several, self.number["out_row"], width)
