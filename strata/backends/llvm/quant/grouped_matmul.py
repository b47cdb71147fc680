"""Grouped matmul (mixture of experts): each row times its expert's matrix, every matrix read once.

    sort       row numbers by expert, in order (a counting sort)
    gather     rows of x side by side with the other rows of their expert
    multiply   a chunk is some columns of one expert's matrix: few rows read them in place, more pack them first
    scatter    results to their rows

Sums run over k in the order of every matmul, whatever the number of rows and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.gemm.micro import Micro, RegisterTile, TileSet, call_micro
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, vector
from strata.backends.llvm.ir.native import (
    WORKSPACE_ALIGN,
    Workspace,
    arguments,
    copy,
    each_point,
    fill_zero,
    kernel,
    number_slots,
    numbers,
)
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, TensorType, bounds, dim_prod, f32, f64, i32
from strata.kernel import PRODUCTS, ProductBlocks
from strata.mir import Node

FEW = 4  # fewer rows than this read a matrix in place
ROWS = 4  # for each expert; fewer are left to the loops of the op
PANELS = 4  # of a chunk: what is read of a row of the matrix is longer than a line of the cache
K_BLOCK = PRODUCTS  # rows of the matrix that are packed at once: a block of every sum
AHEAD = 12  # rows of the matrix between what is packed and what is fetched


def _accepts(types: Sequence[TensorType]) -> bool:
    x, w, _ = types
    most = bounds(x.shape[0])[1]
    if x.dtype not in (f32, f64) or not all(isinstance(d, int) and d > 0 for d in (*w.shape, x.shape[1])):
        return False
    return most is None or most >= ROWS * w.shape[0].__index__()


@override("grouped_matmul", whole=True)
def grouped_matmul(node: Node, target: Target) -> NativeOp | None:
    types = [v.type for v in node.inputs]
    if not _accepts(types):
        return None
    x, w, ids = types
    experts, k, n = (d.__index__() for d in w.shape)
    columns = columns_of(x.dtype, target)
    blocks = -(-n // columns)
    size = x.dtype.itemsize

    def plan(sizes: Sizes) -> Planned:
        (rows,) = numbers([dim_prod(x.shape[:1])], sizes)
        if rows == 0:
            return Planned(())

        def product(_: Workspace, sorted_x: Slot, first: Slot, results: Slot) -> list[NativeCall]:
            slots = [sorted_x, ("input", 1), first, results, *number_slots(k, n, blocks)]
            return [NativeCall("multiply", slots, experts * blocks)]

        return plan_by_expert(rows, experts, (k * size, n * size, blocks * columns * size), product)

    def emit(module: IrModule) -> None:
        emit_sort(module, ids.dtype)
        emit_gather(module)
        GroupedMultiply(kernel(module, "multiply"), x.dtype, target).emit()
        emit_scatter(module)

    return NativeOp(f"grouped_matmul {x.dtype} {ids.dtype}", emit, ("sort", "gather", "multiply", "scatter"), plan)


def plan_by_expert(
    rows: int,
    experts: int,
    row_bytes: tuple[int, int, int],
    product: Callable[[Workspace, Slot, Slot, Slot], list[NativeCall]],
) -> Planned:
    """Rows sorted by expert before the matmul, results sorted back after it.

    `row_bytes` are those of x, of the output and of a row of results; product(workspace, sorted x, where experts begin,
    results) -> its calls.
    """
    width, out, result = row_bytes
    work = Workspace()
    order, first, x, results = (work.area(n) for n in (8 * rows, 8 * (experts + 1), rows * width, rows * result))
    calls = (
        NativeCall("sort", [("input", 2), order, first, *number_slots(rows, experts)]),
        NativeCall("gather", [("input", 0), order, x, *number_slots(width)], rows, 16),
        *product(work, x, first, results),
        NativeCall("scatter", [results, order, ("output", 0), *number_slots(out, result)], rows, 16),
    )
    return Planned(calls, work.size + WORKSPACE_ALIGN)


def tiles_of(target: Target) -> TileSet:
    if target.vector_registers >= 32:
        return TileSet((8, 4, 2, 1), 3)
    return TileSet((6, 4, 2, 1) if target.has_fma else (4, 2, 1), 2)


def columns_of(dtype: DType, target: Target) -> int:
    """Of a chunk."""
    return PANELS * tiles_of(target).vectors * target.lanes(dtype.itemsize)


def emit_sort(module: IrModule, dtype: DType) -> None:
    """Row numbers by expert, and where each expert's begin. Ids outside the range count as the nearest inside."""
    f = kernel(module, "sort")
    ids, order, first, rows, experts = arguments(f, "pppii")
    element = memory_type(dtype)

    def expert(i: str) -> Value:
        loaded = f.load(element, f.address(element, ids, i), dtype.itemsize)
        wide = f.convert("sext", element, loaded, "i64") if dtype is i32 else loaded
        return f.smin(f.smax(wide, 0), f.sub(experts, 1))

    def add(place: str, value: Value) -> str:
        before = f.load("i64", place, 8)
        f.store("i64", f.add(before, value), place, 8)
        return before

    fill_zero(f, first, f.mul(f.add(experts, 1), 8))
    f.loop(0, rows, 1, [], lambda i, _: _nothing(add(f.address("i64", first, expert(i)), 1)))

    def begin(e: str, total: list[str]) -> list[Value]:
        place = f.address("i64", first, e)
        count = f.load("i64", place, 8)
        f.store("i64", total[0], place, 8)
        return [f.add(total[0], count)]

    f.loop(0, f.add(experts, 1), 1, [("i64", 0)], begin)
    # placing a row moves its expert's beginning to its end, which is the next one's beginning: they are put back below
    f.loop(0, rows, 1, [], lambda i, _: f.store(
        "i64", i, f.address("i64", order, add(f.address("i64", first, expert(i)), 1)), 8))  # fmt: skip

    def back(e: str, _: list[str]) -> None:
        at = f.sub(experts, e)
        f.store("i64", f.load("i64", f.address("i64", first, f.sub(at, 1)), 8), f.address("i64", first, at), 8)

    f.loop(0, experts, 1, [], back)
    f.store("i64", 0, first, 8)
    f.ret()


def _nothing(_: str) -> None:
    return None


def emit_gather(module: IrModule) -> None:
    f = kernel(module, "gather")
    source, order, to, size = arguments(f, "pppi")

    def one(i: str, _: list[str]) -> None:
        row = f.load("i64", f.address("i64", order, i), 8)
        copy(f, f.address("i8", to, f.mul(i, size)), f.address("i8", source, f.mul(row, size)), size)

    each_point(f, one)


def emit_scatter(module: IrModule) -> None:
    f = kernel(module, "scatter")
    source, order, to, size, step = arguments(f, "pppii")

    def one(i: str, _: list[str]) -> None:
        row = f.load("i64", f.address("i64", order, i), 8)
        copy(f, f.address("i8", to, f.mul(row, size)), f.address("i8", source, f.mul(i, step)), size)

    each_point(f, one)


class GroupedMultiply:
    """Emits `multiply`: some columns of one expert's matrix for all of its rows."""

    def __init__(self, f: IrFunction, dtype: DType, target: Target, sides: int = 0) -> None:
        self.f, self.dtype, self.target = f, dtype, target
        given = arguments(f, "ppppiii" + "p" * sides)
        self.x, self.w, self.first, self.out, self.k, self.n, self.blocks, *self.sides = given
        self.element, self.size = memory_type(dtype), dtype.itemsize
        self.lanes, self.columns = target.lanes(dtype.itemsize), columns_of(dtype, target)
        self.arithmetic = GemmArithmetic(dtype, dtype, dtype, target)
        self.packed = f.alloca(self.element, K_BLOCK * self.columns)
        self.out_row = f.mul(self.blocks, self.columns)

    def emit(self) -> None:
        each_point(self.f, lambda i, _: self.chunk(i))

    def chunk(self, index: str) -> None:
        f = self.f
        expert, block = f.divided(index, self.blocks)
        column = f.mul(block, self.columns)
        begin, end = (f.load("i64", f.address("i64", self.first, f.add(expert, i)), 8) for i in range(2))
        rows = f.sub(end, begin)
        x = f.address(self.element, self.x, f.mul(begin, self.k))
        out = f.address(self.element, self.out, f.add(f.mul(begin, self.out_row), column))
        f.if_(f.compare("sgt", "i64", rows, 0), lambda: self.some_columns(expert, column, x, out, rows))

    def some_columns(self, expert: Value, column: Value, x: str, out: str, rows: Value) -> None:
        """The chunk of an expert that has rows."""
        f = self.f
        matrix = f.mul(f.mul(expert, self.k), self.n)
        w = f.address(self.element, self.w, f.add(matrix, column))
        is_whole = f.compare("sle", "i64", f.add(column, self.columns), self.n)
        is_few = f.binary("and", "i1", f.compare("slt", "i64", rows, FEW), is_whole)

        def pack(start: Value, length: Value) -> None:
            self.pack(f.address(self.element, w, f.mul(start, self.n)), length, f.sub(self.n, column))

        f.if_(is_few, lambda: self.in_place(x, w, out, rows), lambda: self.by_blocks(x, out, rows, pack))

    def in_place(self, x: str, w: str, out: str, rows: Value) -> None:
        """The matrix in place, all columns of the chunk at once: what is read of its rows is one stream."""
        heights = (2, 1) if self.target.vector_registers >= 32 else (1,)
        tiles = TileSet(heights, self.columns // self.lanes, strided_b=True)
        kernels = self.micros(tiles)
        tiles.over_rows(
            self.f, rows, lambda row, _: self.call(tiles, kernels, x, w, self.n, out, rows, row, 0, 0, self.k, 0)
        )

    def micros(self, tiles: TileSet) -> list[Value]:
        """The micro-kernels of all heights."""
        made = (
            Micro(
                self.arithmetic,
                RegisterTile(h, tiles.vectors),
                "rows",
                strided_b=tiles.strided_b,
                blocks=ProductBlocks(K_BLOCK),
            )  # fmt: skip
            for h in tiles.heights
        )
        return ["@" + micro.emit(self.f.module) for micro in made]

    def by_blocks(self, x: str, out: str, rows: Value, pack: Callable[[Value, Value], None]) -> None:
        """Blocks of k are packed, a panel after the other; sums go on from block to block in the results."""
        f, tiles = self.f, tiles_of(self.target)
        kernels = self.micros(tiles)
        width = self.panel_width

        def block(start: str, _: list[str]) -> None:
            length = f.smin(f.sub(self.k, start), K_BLOCK)
            resume = f.select("i64", f.compare("sgt", "i64", start, 0), 1, 0)
            pack(start, length)
            for panel in range(PANELS):
                b = f.address(self.element, self.packed, panel * K_BLOCK * width)

                def tile(row: Value, _: Value, b: str = b, panel: int = panel) -> None:
                    self.call(tiles, kernels, x, b, 0, out, rows, row, panel * width, start, length, resume)

                tiles.over_rows(f, rows, tile)

        f.loop(0, self.k, K_BLOCK, [], block)

    @property
    def panel_width(self) -> int:
        """Columns of a packed panel, and so the distance of its rows."""
        return tiles_of(self.target).vectors * self.lanes

    def place(self, k: Value, at: Value) -> str:
        """Where the columns from `at` on of a row of a block are packed."""
        f, width = self.f, self.panel_width
        inner: Value = at % width if isinstance(at, int) else f.op(f"urem i64 {at}, {width}")
        panel = f.sub(at, inner)
        index = f.add(f.add(f.mul(panel, K_BLOCK), inner), f.mul(k, width))
        return f.address(self.element, self.packed, index)

    def pack(self, w: str, length: Value, left: Value) -> None:
        """Rows of a block as panels; columns that the matrix does not have are zero."""
        f, type_ = self.f, vector(self.element, self.lanes)
        places = range(0, self.columns, self.lanes)
        inside = [f.mask_below(self.lanes, f.smin(f.smax(f.sub(left, at), 0), self.lanes)) for at in places]
        lines = self.columns * self.size // 64

        def one(k: str, _: list[str]) -> None:
            row = f.address(self.element, w, f.mul(k, self.n))
            following = f.address(self.element, row, f.mul(self.n, AHEAD))
            for line in range(lines):
                f.prefetch(f.address("i8", following, 64 * line))
            for at, mask in zip(places, inside, strict=True):
                loaded = f.load(type_, f.address(self.element, row, at), self.size, mask)
                f.store(type_, loaded, self.place(k, at), self.size)

        f.loop(0, length, 1, [], one)

    def call(
        self, tiles: TileSet, kernels: list[Value], x: str, b: str, b_step: Value, out: str, rows: Value, row: Value,
        column: int, start: Value, length: Value, resume: Value,
    ) -> None:  # fmt: skip
        f = self.f
        micro = tiles.by_height(f, f.sub(rows, row), "ptr", kernels)
        a = f.address(self.element, x, f.add(f.mul(row, self.k), start))
        c = f.address(self.element, out, f.add(f.mul(row, self.out_row), column))
        call_micro(f, micro, a, self.k, b, b_step, c, self.out_row, length, resume)
