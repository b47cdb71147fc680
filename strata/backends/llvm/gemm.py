"""The block driver of a contraction: chunks of rows and column panels, blocks of k, row tiles, and tails.

    void kernel(ptr args, i64 begin, i64 end)

computes chunks [begin, end) of `spec.chunk_count(m, n, batch)`; `args` holds the slots of `spec.slots`. B is packed. Chunks write
disjoint parts of the output and share nothing, so any thread may run any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.backends.llvm.builder import Function, Module, Value
from strata.backends.llvm.contract import Contraction
from strata.backends.llvm.gemm_arith import llvm_type
from strata.backends.llvm.gemm_finish import Epilogue, emit_finish
from strata.backends.llvm.gemm_micro import Micro
from strata.backends.llvm.gemm_pack import emit_pack_a


def emit_contraction(module: Module, spec: Contraction, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel (and the internal functions it needs) and returns its name."""
    name = name or spec.name
    finish = emit_finish(module, spec, f"{name}_finish", epilogue)
    f = module.function(name, [("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")])
    driver = _Driver(f, spec, finish)
    f.loop("%begin", "%end", 1, [], lambda chunk, _: driver.chunk(chunk))
    f.ret()
    return name


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one chunk works on; `a` and `out` point at its first row, `b` at its batch's first panel."""

    a: str
    b: str
    out: str
    batch: tuple[Value, ...]
    row: Value
    rows: Value
    first_panel: Value
    full_panels: Value  # end of the panels that have all their columns
    tail: Value  # columns of the last, narrower panel, 0 when the chunk has none


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of k: where it starts, how long it is, whether sums resume, whether it is the last."""

    start: Value
    length: Value
    resume: Value
    is_last: Value


class _Driver:
    """Emits the loops of one kernel into `f`."""

    def __init__(self, f: Function, spec: Contraction, finish: str) -> None:
        self.f, self.spec, self.finish = f, spec, finish
        self.arithmetic = spec.arithmetic
        self.pointer = {p: f.load("ptr", f.address("i64", "%args", spec.slot(p)), 8) for p in ("a", "b", "out")}
        self.number = {n: f.load("i64", f.address("i64", "%args", spec.slot(n)), 8) for n in spec.numbers}
        element = llvm_type(spec.accumulator)
        self.sums = f.alloca(element, spec.tile_elements)
        self.a_block = f.alloca(element, spec.chunk_rows * spec.k_block) if spec.a_packed else ""
        self.m, self.n, self.k = (self.number[x] for x in "mnk")
        self.column_blocks = self._ceil(self.n, spec.panel_columns * spec.chunk_panels)
        self.row_blocks = self._ceil(self.m, spec.chunk_rows)
        self.block_length, self.blocks = self._k_blocks()

    def chunk(self, index: str) -> None:
        chunk = self._decode(index)
        start = self._few_rows(chunk)
        self._k_loop(lambda block: self._panels(chunk, block, start))

    # where a chunk is

    def _ceil(self, value: Value, unit: int) -> Value:
        return self.f.op(f"udiv i64 {self.f.add(value, unit - 1)}, {unit}")

    def _k_blocks(self) -> tuple[Value, Value]:
        """Blocks of k of nearly equal length; one block of no products when k is 0."""
        f, spec = self.f, self.spec
        if not spec.k_block:
            return self.k, 1
        count = f.smax(self._ceil(self.k, spec.k_block), 1)
        length = f.op(f"udiv i64 {f.sub(f.add(self.k, count), 1)}, {count}")
        return f.round_down(f.add(length, 7), 8), count  # k_block is a multiple of 8

    def _decode(self, index: str) -> _Chunk:
        f, spec, number = self.f, self.spec, self.number
        rest = f.op(f"udiv i64 {index}, {self.column_blocks}")
        column_block = f.sub(index, f.mul(rest, self.column_blocks))
        flat = f.op(f"udiv i64 {rest}, {self.row_blocks}")
        row = f.mul(f.sub(rest, f.mul(flat, self.row_blocks)), spec.chunk_rows)
        pointer = dict(self.pointer)
        types = {"a": llvm_type(spec.a), "b": llvm_type(spec.b), "out": llvm_type(spec.out)}
        batch: list[Value] = []
        for axis in reversed(range(spec.batch_rank)):
            outer = f.op(f"udiv i64 {flat}, {number[f'batch{axis}_extent']}")
            batch.insert(0, f.sub(flat, f.mul(outer, number[f"batch{axis}_extent"])))
            flat = outer
            for operand, type_ in types.items():
                offset = f.mul(batch[0], number[f"batch{axis}_{operand}"])
                pointer[operand] = f.address(type_, pointer[operand], offset)
        first = f.mul(column_block, spec.chunk_panels)
        end = f.add(first, spec.chunk_panels)
        whole = f.op(f"udiv i64 {self.n}, {spec.panel_columns}")
        left = f.sub(self.n, f.mul(whole, spec.panel_columns))
        has_tail = f.compare("sgt", "i64", end, whole)
        return _Chunk(
            a=f.address(types["a"], pointer["a"], f.mul(row, number["a_row"])),
            b=pointer["b"],
            out=f.address(types["out"], pointer["out"], f.mul(row, number["out_row"])),
            batch=tuple(batch),
            row=row,
            rows=f.smin(f.sub(self.m, row), spec.chunk_rows),
            first_panel=first,
            full_panels=f.smin(end, whole),
            tail=f.select("i64", has_tail, left, 0),
        )

    # loops

    def _k_loop(self, body: Callable[[_Block], None]) -> None:
        f = self.f
        if not self.spec.k_block:
            body(_Block(0, self.k, 0, "true"))
            return

        def one(index: str, _: list[str]) -> None:
            start = f.mul(index, self.block_length)
            length = f.smin(self.block_length, f.sub(self.k, start))
            last = f.compare("eq", "i64", f.add(index, 1), self.blocks)
            body(_Block(start, length, index, last))

        f.loop(0, self.blocks, 1, [], one)

    def _panels(self, chunk: _Chunk, block: _Block, first_panel: Value) -> None:
        f, spec = self.f, self.spec
        if spec.a_packed:
            self._row_tiles(chunk.rows, lambda row, height: self._pack_tile(chunk, block, row, height))

        def full(panel: str, _: list[str]) -> None:
            self._row_tiles(chunk.rows, lambda row, height: self._full_tile(chunk, block, panel, row, height))

        f.loop(first_panel, chunk.full_panels, 1, [], full)
        for vectors in range(1, spec.vectors + 1):
            low, high = (vectors - 1) * spec.lanes, vectors * spec.lanes
            fits = f.binary(
                "and", "i1", f.compare("sgt", "i64", chunk.tail, low), f.compare("sle", "i64", chunk.tail, high)
            )

            def tail(vectors: int = vectors) -> None:
                self._row_tiles(chunk.rows, lambda row, height: self._tail_tile(chunk, block, vectors, row, height))

            f.if_(fits, tail)

    def _row_tiles(self, rows: Value, body: Callable[[Value, int], None]) -> None:
        """Tiles of the tallest height, then what is left by the shorter ones."""
        f = self.f
        start: Value = 0
        for height in self.spec.heights:
            left = f.sub(rows, start)
            count = f.op(f"udiv i64 {left}, {height}") if height > 1 else left
            end = f.add(start, f.mul(count, height))
            f.loop(start, end, height, [], lambda row, _, height=height: body(row, height))
            start = end

    def _pack_tile(self, chunk: _Chunk, block: _Block, row: Value, height: int) -> None:
        f, spec, number = self.f, self.spec, self.number
        pack = emit_pack_a(f.module, spec.a, spec.accumulator, spec.target)
        offset = f.add(f.mul(row, number["a_row"]), f.mul(block.start, number["a_k"]))
        source = f.address(llvm_type(spec.a), chunk.a, offset)
        place = f.address(llvm_type(spec.accumulator), self.a_block, f.mul(row, block.length))
        f.call(
            "void", pack, ("ptr", source), ("i64", number["a_row"]), ("i64", number["a_k"]), ("ptr", place), ("i64", height),
            ("i64", block.length),
        )  # fmt: skip

    def _a_tile(self, chunk: _Chunk, block: _Block, row: Value) -> str:
        f, spec = self.f, self.spec
        if spec.a_packed:
            return f.address(llvm_type(spec.accumulator), self.a_block, f.mul(row, block.length))
        return f.address(llvm_type(spec.a), chunk.a, f.add(f.mul(row, self.number["a_row"]), block.start))

    def _micro(self, rows: int, vectors: int, streams: int = 1) -> Micro:
        spec = self.spec
        prefetch = spec.prefetch if rows == spec.heights[0] and vectors == spec.vectors else 0
        return Micro(self.arithmetic, spec.tile(rows, vectors, streams), spec.a_packed, prefetch)

    def _b_panel(self, chunk: _Chunk, block: _Block, panel: Value, vectors: int) -> str:
        f, spec = self.f, self.spec
        offset = f.add(f.mul(f.mul(panel, spec.panel_columns), self.k), f.mul(block.start, vectors * spec.lanes))
        return f.address(llvm_type(spec.b), chunk.b, offset)

    def _full_tile(self, chunk: _Chunk, block: _Block, panel: Value, row: Value, height: int) -> None:
        f, spec, number = self.f, self.spec, self.number
        column = f.mul(panel, spec.panel_columns)
        in_output = f.address(llvm_type(spec.out), chunk.out, f.add(f.mul(row, number["out_row"]), column))
        own, own_stride = self._own_sums(chunk, row, panel), spec.sums_columns
        if spec.stores_directly:
            sums, stride = in_output, number["out_row"]
        elif spec.k_block and spec.waits_in_output:
            waits = f.compare("sgt", "i64", self.blocks, 1)
            sums = f.select("ptr", waits, in_output, own)
            stride = f.select("i64", waits, number["out_row"], own_stride)
        else:
            sums, stride = own, own_stride
        self._micro(height, spec.vectors).call(
            f, self._a_tile(chunk, block, row), number["a_row"], self._b_panel(chunk, block, panel, spec.vectors), 0,
            sums, stride, block.length, block.resume,
        )  # fmt: skip
        if not spec.stores_directly:
            self._finish(chunk, block, sums, stride, row, column, height, spec.panel_columns)

    def _tail_tile(self, chunk: _Chunk, block: _Block, vectors: int, row: Value, height: int) -> None:
        f, spec = self.f, self.spec
        sums = self._own_sums(chunk, row, chunk.full_panels)
        self._micro(height, vectors).call(
            f, self._a_tile(chunk, block, row), self.number["a_row"],
            self._b_panel(chunk, block, chunk.full_panels, vectors), 0, sums, spec.sums_columns, block.length, block.resume,
        )  # fmt: skip
        column = f.mul(chunk.full_panels, spec.panel_columns)
        self._finish(chunk, block, sums, spec.sums_columns, row, column, height, chunk.tail)

    def _own_sums(self, chunk: _Chunk, row: Value, panel: Value) -> str:
        """Where this chunk keeps the sums of a tile."""
        f, spec = self.f, self.spec
        offset = f.mul(row, spec.sums_columns)
        if spec.sums_columns > spec.panel_columns:
            offset = f.add(offset, f.mul(f.sub(panel, chunk.first_panel), spec.panel_columns))
        return f.address(llvm_type(spec.accumulator), self.sums, offset)

    def _finish(
        self, chunk: _Chunk, block: _Block, sums: str, stride: Value, row: Value, column: Value, rows: Value, columns: Value
    ) -> None:
        f = self.f

        def call() -> None:
            numbers = (stride, f.add(chunk.row, row), column, rows, columns, *chunk.batch)
            f.call("void", self.finish, ("ptr", "%args"), ("ptr", sums), *(("i64", x) for x in numbers))

        if block.is_last == "true":
            call()
        else:
            f.if_(block.is_last, call)

    # few rows

    def _few_rows(self, chunk: _Chunk) -> Value:
        """With few rows the reading of B is what takes time: several panels at once. Returns the first panel left over."""
        f, spec, number = self.f, self.spec, self.number
        start = chunk.first_panel
        whole = _Block(0, self.k, 0, "true")
        for rows, streams in enumerate(spec.streams, 1):

            def some(panel: str, _: list[str], rows: int = rows, streams: int = streams) -> None:
                column = f.mul(panel, spec.panel_columns)
                width = spec.panel_columns * streams
                out = f.address(llvm_type(spec.out), chunk.out, column)
                sums, stride = (out, number["out_row"]) if spec.stores_directly else (self.sums, width)
                self._micro(rows, spec.vectors, streams).call(
                    f, self._a_tile(chunk, whole, 0), number["a_row"], self._b_panel(chunk, whole, panel, spec.vectors),
                    f.mul(self.k, spec.panel_columns), sums, stride, self.k, 0,
                )  # fmt: skip
                if not spec.stores_directly:
                    self._finish(chunk, whole, sums, stride, 0, column, rows, width)

            # the panels left over are taken one by one, together with those of every other number of rows
            groups = f.op(f"sdiv i64 {f.smax(f.sub(chunk.full_panels, start), 0)}, {streams}")
            applies = f.compare("eq", "i64", chunk.rows, rows)
            end = f.select("i64", applies, f.add(start, f.mul(groups, streams)), start)
            f.loop(start, end, streams, [], some)
            start = end
        return start
