"""Winograd convolution, F(2 x 2, 3 x 3): 3 x 3 taps with fewer multiplications.

    x[image, y, x, channel]   weights[tap, channel, output]   out[image, y, x, output]

A tile is two by two pixels of the output. The four by four pixels of x that it sees, and the taps, are transformed to
sixteen values; sixteen products take the place of thirty-six. Each of the sixteen is a matmul, tiles by channels and
channels by outputs, and runs through the micro-kernels of every contraction. A chunk is some tiles by some panels of
outputs: what it transforms and multiplies stays on its stack. Both transforms only add and subtract, and no pixel gets
a term from outside its own window. Taps are transformed when they are packed, in twice the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Unpack

from strata.backends.llvm.conv.table import ConvWindow
from strata.backends.llvm.gemm.driver import Chunk, GemmDriver
from strata.backends.llvm.gemm.epilogue import Epilogue, emit_finish
from strata.backends.llvm.gemm.micro import call_micro
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS
from strata.backends.llvm.gemm.planning import for_rows, plan_contraction
from strata.backends.llvm.gemm.spec import BYTES, FLOPS, Contraction, EpilogueFields
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import each_point, template, while_loop
from strata.backends.llvm.ir.registers import memory_type
from strata.core import Dim, DType, Target, dim_max, dim_min, f32, f64

TURNED: Final = 16  # values of a tile
MOST_TILES: Final = 24  # of a chunk: the packed taps come from the third-level cache once for this many
MOST_CHANNELS: Final = 128  # transformed at once
PANEL_COLUMNS: Final = 144  # outputs of a chunk, in whole panels
AT_ONCE: Final = 8  # tiles of a row that are transformed back together
FEWEST_CHUNKS: Final = 16
FEWEST_CHANNELS: Final = 8  # 28 x 28, 4 to 64: 1.09 times as fast; 8 to 64: 1.33; 32 to 32: 1.69; 128 to 128: 2.06
UNITS: Final = 3e12  # of time, in a second: costs are whole numbers of them, for sizes that are known later, too
PRODUCT, BYTE = round(2 * UNITS / FLOPS), round(UNITS / BYTES)  # what a product costs, and a byte of weights
TURN: Final = round(0.7e-9 * UNITS)  # what it costs to transform one channel of a tile
Load = Callable[[IrFunction, Value, Value, int, "str | None"], list[str]]


@dataclass(frozen=True, slots=True)
class Winograd:
    """A convolution, ready to be emitted. `product` is its contraction: m counts tiles, k channels."""

    product: Contraction
    window: ConvWindow
    channels: int

    @property
    def k_block(self) -> int:
        """Channels that are transformed at once."""
        blocks = -(-self.channels // MOST_CHANNELS)
        return -(-self.channels // (blocks * self.product.lanes)) * self.product.lanes

    @property
    def row(self) -> int:
        """Distance of a tile to the next among transformed values of x: not a power of two, for the sake of the
        caches."""
        return self.k_block + self.product.lanes

    @property
    def plane(self) -> int:
        """Distance of one of the sixteen values of x to the next."""
        return self.product.chunk_rows * self.row + self.product.lanes

    @property
    def sums_plane(self) -> int:
        """Distance of one of the sixteen sums to the next."""
        return self.product.chunk_rows * self.product.panel_columns + self.product.lanes

    @property
    def stack_bytes(self) -> int:
        numbers = TURNED * (self.plane + self.sums_plane * self.product.chunk_panels) + self.channels
        line = 2 * AT_ONCE * self.product.panel_columns
        return (numbers + 2 * line) * 4 + self.product.chunk_rows * TURNED * 8 + self.product.stack_bytes

    def packed_elements(self, outputs: int) -> int:
        return self.product.panels().size(outputs, TURNED * self.channels)

    def __str__(self) -> str:
        return f"winograd 2x2 {self.window} channels {self.channels}; {self.product}"


def winograd_wins(window: ConvWindow, channels: int, outputs: int, size: Dim, counts: Sequence[Dim], low: Dim) -> Dim:
    """1 where fewer multiplications are worth the transforms and larger weights, by what both ways cost, else 0.

    `size` is that of x down its lines, `counts` are those of the output, `low` is the padding above. The number of
    images has no say, so that an image gives the same bits in any batch.
    """
    ones = (1, 1)
    if window != ConvWindow((3, 3), ones, ones, ones) or channels < FEWEST_CHANNELS:
        return 0
    height, width = counts
    lines: Dim = 0  # that the taps see, of all lines of the output
    for tap in range(3):
        lines = lines + dim_max(dim_min(height, size + low - tap) - dim_max(low - tap, 0), 0)
    tiles = (height + 1) // 2 * ((width + 1) // 2)
    weights = channels * -(-outputs // 8) * 8  # whole vectors
    direct = dim_max(PRODUCT * 3 * lines * width, BYTE * 4 * 9) * weights
    turned = dim_max(PRODUCT * TURNED * tiles, BYTE * 4 * TURNED) * weights
    return dim_max(dim_min(direct - turned - tiles * ((channels + outputs) * TURN), 1), 0)


def plan_winograd(
    tiles: int,
    outputs: int,
    channels: int,
    window: ConvWindow,
    target: Target,
    *,
    out: DType = f32,
    m_exact: bool = False,
    **ending: Unpack[EpilogueFields],
) -> Winograd:
    """`tiles` of all images, or their upper bound; `m_exact` says that there will be no other number of them."""
    spec = plan_contraction(tiles, outputs, channels, target, out=out, n_exact=True, **ending)
    panels = max(1, -(-outputs // spec.panel_columns))
    most = max(1, PANEL_COLUMNS // spec.panel_columns)
    parts = -(-panels // most)
    blocks = max(-(-tiles // MOST_TILES), min(-(-FEWEST_CHUNKS // parts), tiles // spec.heights[0]), 1)
    rows = -(-tiles // blocks)
    rows = min(MOST_TILES, -(-rows // spec.heights[0]) * spec.heights[0])
    spec = replace(spec, streams=(), chunk_rows=rows, chunk_panels=-(-panels // parts), load_numbers=window.numbers)
    return Winograd(for_rows(spec, tiles) if m_exact else spec, window, channels)


def emit_winograd(module: IrModule, spec: Winograd, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"winograd_{spec.product.name}"
    finish = emit_finish(module, spec.product, f"{name}_finish", epilogue)
    f = template(module, name)
    driver = _WinogradDriver(f, spec, finish)
    each_point(f, lambda chunk, _: driver.chunk(chunk))
    return name


class _WinogradDriver(GemmDriver):
    """The matmul driver: sixteen matmuls in a chunk, and the transforms before and after them."""

    def __init__(self, f: IrFunction, spec: Winograd, finish: str) -> None:
        super().__init__(f, spec.product, finish)
        self.conv, product = spec, spec.product
        self.table = f.alloca("ptr", product.chunk_rows * TURNED)
        self.values = f.alloca("float", TURNED * spec.plane)
        self.products = f.alloca("float", TURNED * spec.sums_plane * product.chunk_panels)
        self.line = 2 * AT_ONCE * product.panel_columns
        self.lines = f.alloca("float", 2 * self.line)
        self.zeros = f.alloca("float", spec.channels)
        f.fill("float", self.zeros, spec.channels, constant("float", 0))
        self.tiles = [f.op(f"lshr i64 {f.add(self.number[f'count{axis}'], 1)}, 1") for axis in range(2)]

    def chunk(self, index: str) -> None:
        f = self.f
        chunk = self._decode(index)
        self._addresses(chunk)
        end = self._last_panel(chunk)

        def block(first: str, _: list[str]) -> None:
            length = f.smin(f.sub(self.conv.channels, first), self.conv.k_block)
            self._turn(chunk, first, length)
            f.loop(chunk.first_panel, end, 1, [], lambda panel, _: self._multiply(chunk, panel, first, length))

        f.loop(0, self.conv.channels, self.conv.k_block, [], block)
        f.loop(chunk.first_panel, end, 1, [], lambda panel, _: self._turn_back(chunk, panel))

    def _tile(self, flat: Value) -> list[Value]:
        """Image, line and column of a tile, given by its number."""
        f = self.f
        line = f.op(f"udiv i64 {flat}, {self.tiles[1]}")
        image = f.op(f"udiv i64 {line}, {self.tiles[0]}")
        return [image, f.sub(line, f.mul(image, self.tiles[0])), f.sub(flat, f.mul(line, self.tiles[1]))]

    def _tiles_on(self, at: Sequence[Value], count: Value) -> list[Value]:
        """The tile after some neighbours of one line."""
        f = self.f
        column = f.add(at[2], count)
        ends = f.compare("sge", "i64", column, self.tiles[1])
        line = f.add(at[1], f.convert("zext", "i1", ends, "i64"))
        last = f.compare("sge", "i64", line, self.tiles[0])
        image = f.add(at[0], f.convert("zext", "i1", last, "i64"))
        return [image, f.select("i64", last, 0, line), f.select("i64", ends, 0, column)]

    def _addresses(self, chunk: Chunk) -> None:
        """The table: where the sixteen pixels of each tile are, zeros for those in the padding."""
        f, number = self.f, self.number

        def one(i: str, at: list[str]) -> list[Value]:
            base = f.address("float", chunk.a, f.mul(at[0], number["x_image"]))
            places = []
            for axis in range(2):
                corner = f.sub(f.mul(at[axis + 1], 2), number[f"low{axis}"])
                taps = [f.add(corner, tap) for tap in range(4)]
                size, apart = number[f"size{axis}"], number[f"x{axis}"]
                places.append([(f.compare("ult", "i64", tap, size), f.mul(tap, apart)) for tap in taps])
            row = f.address("ptr", self.table, f.mul(i, TURNED))
            for y, (y_inside, y_offset) in enumerate(places[0]):
                line = f.address("float", base, y_offset)
                for x, (x_inside, x_offset) in enumerate(places[1]):
                    inside = f.binary("and", "i1", y_inside, x_inside)
                    pixel = f.select("ptr", inside, f.address("float", line, x_offset), self.zeros)
                    f.store("ptr", pixel, f.address("ptr", row, 4 * y + x), 8)
            return self._tiles_on(at, 1)

        f.loop(0, chunk.rows, 1, [("i64", v) for v in self._tile(chunk.row)], one)

    def _turn(self, chunk: Chunk, first: Value, length: Value) -> None:
        f, spec = self.f, self.spec
        turn = _emit_turn(f.module, spec.lanes)

        def one(i: str, _: list[str]) -> None:
            f.call(
                "void", turn, ("ptr", f.address("ptr", self.table, f.mul(i, TURNED))),
                ("ptr", f.address("float", self.values, f.mul(i, self.conv.row))), ("i64", self.conv.plane),
                ("i64", first), ("i64", length),
            )  # fmt: skip

        f.loop(0, chunk.rows, 1, [], one)

    def _sums(self, chunk: Chunk, panel: Value) -> str:
        number = self.f.sub(panel, chunk.first_panel)
        return self.f.address("float", self.products, self.f.mul(number, TURNED * self.conv.sums_plane))

    def _multiply(self, chunk: Chunk, panel: Value, first: Value, length: Value) -> None:
        """A block of channels of the sixteen products of a panel."""
        f, spec, conv = self.f, self.spec, self.conv
        vectors = self._columns_of(chunk, panel)[2]
        kernels = [self._by_vectors(vectors, height) for height in spec.heights]
        width = f.mul(vectors, spec.lanes)
        taps = f.address("float", chunk.b, f.mul(panel, spec.panel_columns * TURNED * conv.channels))
        sums = self._sums(chunk, panel)

        def one(which: str, _: list[str]) -> None:
            b = f.address("float", taps, f.mul(f.add(f.mul(which, conv.channels), first), width))
            values = f.address("float", self.values, f.mul(which, conv.plane))
            to = f.address("float", sums, f.mul(which, conv.sums_plane))

            def tile(row: Value, height: Value) -> None:
                kernel = self.row_tiles.by_height(f, f.sub(chunk.rows, row), "ptr", kernels)
                a = f.address("float", values, f.mul(row, conv.row))
                c = f.address("float", to, f.mul(row, spec.panel_columns))
                call_micro(f, kernel, a, conv.row, b, 0, c, spec.panel_columns, length, first)

            self._row_tiles(chunk, tile)

        f.loop(0, TURNED, 1, [], one)

    def _turn_back(self, chunk: Chunk, panel: Value) -> None:
        """The pixels of a panel, some tiles of a line at a time, through the epilogue to the output."""
        f, spec, number = self.f, self.spec, self.number
        back = _emit_turn_back(f.module, spec.lanes, spec.panel_columns)
        _, columns, vectors, _ = self._columns_of(chunk, panel)
        width = f.mul(vectors, spec.lanes)
        column = f.mul(panel, spec.panel_columns)
        sums = self._sums(chunk, panel)

        def put(line: int, row: Value, pixels: Value) -> None:
            numbers = (spec.panel_columns, row, column, pixels, columns)
            lines = f.address("float", self.lines, line * self.line)
            f.call("void", self.finish, ("ptr", "%args"), ("ptr", lines), *(("i64", x) for x in numbers))

        def some(carried: list[str]) -> list[Value]:
            tile, *at = carried
            count = f.smin(f.smin(f.sub(chunk.rows, tile), f.sub(self.tiles[1], at[2])), AT_ONCE)
            f.call(
                "void", back, ("ptr", f.address("float", sums, f.mul(tile, spec.panel_columns))),
                ("i64", self.conv.sums_plane), ("ptr", self.lines), ("i64", count), ("i64", width),
            )  # fmt: skip
            y, x = f.mul(at[1], 2), f.mul(at[2], 2)
            pixels = f.smin(f.mul(count, 2), f.sub(number["count1"], x))
            line = f.add(f.mul(at[0], number["count0"]), y)
            row = f.add(f.mul(line, number["count1"]), x)
            put(0, row, pixels)
            below = f.compare("slt", "i64", f.add(y, 1), number["count0"])
            f.if_(below, lambda: put(1, f.add(row, number["count1"]), pixels))
            return [f.add(tile, count), *self._tiles_on(at, count)]

        start: list[Value] = [0, *self._tile(chunk.row)]
        while_loop(f, [("i64", v) for v in start], lambda c: f.compare("slt", "i64", c[0], chunk.rows), some)


def _emit_turn(module: IrModule, lanes: int) -> str:
    """`void (ptr pixels, ptr to, i64 plane, i64 first, i64 count)`: channels of one tile, from first on."""
    name = f"winograd_turn_{lanes}"
    if module.has(name):
        return name
    parameters = [
        ("ptr noalias", "pixels"),
        ("ptr noalias", "to"),
        ("i64", "plane"),
        ("i64", "first"),
        ("i64", "count"),
    ]
    f = module.outlined(name, parameters)
    type_ = memory_type(f32, lanes)
    places = [f.load("ptr", f.address("ptr", "%pixels", i), 8) for i in range(TURNED)]

    def turn(d: Sequence[str]) -> list[str]:
        return [
            f.binary("fsub", type_, d[0], d[2]), f.binary("fadd", type_, d[1], d[2]),
            f.binary("fsub", type_, d[2], d[1]), f.binary("fsub", type_, d[1], d[3]),
        ]  # fmt: skip

    def some(at: Value, mask: str | None) -> None:
        def load(i: int) -> str:
            place = f.address("float", places[i], f.add("%first", at))
            return f.load(type_, place, 4, mask)

        columns = [turn([load(4 * y + x) for y in range(4)]) for x in range(4)]
        to = f.address("float", "%to", at)
        for y in range(4):
            for x, value in enumerate(turn([columns[x][y] for x in range(4)])):
                f.store(type_, value, f.address("float", to, f.mul("%plane", 4 * y + x)), 4)

    f.vectors("%count", lanes, some)
    f.ret()
    return name


def _emit_turn_back(module: IrModule, lanes: int, columns: int) -> str:
    """`void (ptr sums, i64 plane, ptr lines, i64 tiles, i64 width)`: tiles of a line to two lines of pixels."""
    name = f"winograd_back_{lanes}_{columns}"
    if module.has(name):
        return name
    parameters = [
        ("ptr noalias", "sums"),
        ("i64", "plane"),
        ("ptr noalias", "lines"),
        ("i64", "tiles"),
        ("i64", "width"),
    ]
    f = module.outlined(name, parameters)
    type_ = memory_type(f32, lanes)

    def back(m: Sequence[str]) -> list[str]:
        both = f.binary("fadd", type_, m[0], m[1]), f.binary("fsub", type_, m[1], m[2])
        return [f.binary("fadd", type_, both[0], m[2]), f.binary("fsub", type_, both[1], m[3])]

    def one(tile: str, _: list[str]) -> None:
        source = f.address("float", "%sums", f.mul(tile, columns))
        to = f.address("float", "%lines", f.mul(tile, 2 * columns))

        def some(at: str, _: list[str]) -> None:
            place = f.address("float", source, at)
            m = [f.load(type_, f.address("float", place, f.mul("%plane", i)), 4) for i in range(TURNED)]
            turned = [back([m[4 * y + x] for y in range(4)]) for x in range(4)]
            for y in range(2):
                for x, value in enumerate(back([turned[x][y] for x in range(4)])):
                    offset = f.add(at, y * 2 * AT_ONCE * columns + x * columns)
                    f.store(type_, value, f.address("float", to, offset), 4)

        f.loop(0, "%width", lanes, [], some)

    f.loop(0, "%tiles", 1, [], one)
    f.ret()
    return name


def emit_pack_taps(module: IrModule, spec: Winograd, name: str, load: Load) -> str:
    """The packer: a panel of outputs a point, as [one of the sixteen, channel, output].

    load(f, channel, output, lanes, mask) gives vectors of the nine taps.
    """
    product = spec.product
    lanes, width = product.lanes, product.panel_columns
    f = template(module, name)
    packed = f.load("ptr", f.address("i64", "%args", PACK_SLOTS.index("packed")), 8)
    outputs = f.load("i64", f.address("i64", "%args", PACK_SLOTS.index("n")), 8)
    wide, type_ = memory_type(f64, lanes), memory_type(f32, lanes)
    half = constant(wide, 0.5)

    def turn(g: Sequence[str]) -> list[str]:
        ends = f.binary("fadd", wide, g[0], g[2])
        sums = (f.binary(kind, wide, ends, g[1]) for kind in ("fadd", "fsub"))
        return [g[0], *(f.binary("fmul", wide, s, half) for s in sums), g[2]]

    def panel(index: str, _: list[str]) -> None:
        column = f.mul(index, width)
        left = f.smin(f.sub(outputs, column), width)
        whole = f.round_down(f.add(left, lanes - 1), lanes)
        base = f.address("float", packed, f.mul(column, TURNED * spec.channels))

        def some(at: Value, mask: str | None) -> None:
            def one(channel: str, _: list[str]) -> None:
                taps = load(f, channel, f.add(column, at), lanes, mask)
                taps = [f.convert("fpext", type_, tap, wide) for tap in taps]
                columns = [turn([taps[3 * y + x] for y in range(3)]) for x in range(3)]
                to = f.address("float", base, f.add(f.mul(channel, whole), at))
                apart = f.mul(whole, spec.channels)
                for y in range(4):
                    for x, value in enumerate(turn([columns[x][y] for x in range(3)])):
                        place = f.address("float", to, f.mul(apart, 4 * y + x))
                        f.store(type_, f.convert("fptrunc", wide, value, type_), place, 4)

            f.loop(0, spec.channels, 1, [], one)

        f.vectors(left, lanes, some)

    each_point(f, panel)
    return name
