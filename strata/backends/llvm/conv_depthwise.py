"""Depth-wise convolution: every channel has its own taps, so vectors run along channels and nothing is packed.

    x[image, *sizes, channel]   weights[tap, channel]   out[image, *counts, channel]

Chunks and the epilogue are those of strata.backends.llvm.conv. A tile is some neighbouring pixels of one output line.
Its sums stay in registers while the lines of x below it are read: each vector of x once, for all pixels that see it
through a tap. Lines that fall into the padding are left out; pixels that do are read from zeros.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

from strata.backends.llvm.builder import Function, Module, Value, constant
from strata.backends.llvm.contract import for_rows
from strata.backends.llvm.conv import FEWEST_CHUNKS, ConvDriver, Convolution, Window, plan_convolution
from strata.backends.llvm.gemm import Block, Chunk
from strata.backends.llvm.gemm_arith import Arithmetic, convert, mask_below
from strata.backends.llvm.gemm_finish import Epilogue, Site
from strata.backends.llvm.native import while_loop
from strata.backends.llvm.registers import memory_type
from strata.core import DType, Target, f32

MOST_PIXELS = 256  # of a chunk
PANEL = 4  # vectors of channels that one call of a tile's function works on
SHORT_EPILOGUE = 600  # characters of its text up to which an epilogue is written out for every pixel


def plan_depthwise(
    pixels: int,
    channels: int,
    window: Window,
    target: Target,
    *,
    dtype: DType = f32,
    weights: DType | None = None,
    out: DType | None = None,
    fill: int = 0,
    width: int | None = None,
    m_exact: bool = False,
    epilogue: str = "",
    epilogue_pointers: tuple[str, ...] = (),
    epilogue_numbers: tuple[str, ...] = (),
) -> Convolution:
    """As plan_convolution; in the arguments, b is the weights, n the channels, k the taps, and batch 0 has extent 1."""
    spec = plan_convolution(
        pixels, channels, channels, window, target, dtype=dtype, weights=weights, out=out, fill=fill, width=width,
        epilogue=epilogue, epilogue_pointers=epilogue_pointers, epilogue_numbers=epilogue_numbers,
    )  # fmt: skip
    whole = -(-channels // spec.product.lanes)
    vectors = next((v for v in range(min(PANEL, whole), 1, -1) if whole % v == 0), min(PANEL, whole))
    heights = spec.product.heights
    # work is split by pixels alone: neighbouring tiles share lines of x
    rows = min(MOST_PIXELS, max(1, -(-pixels // (FEWEST_CHUNKS * heights[0]))) * heights[0])
    if width and width <= rows:
        rows = rows // width * width  # whole lines
        heights = for_rows(replace(spec.product, chunk_rows=width), width).heights
    elif width and width % heights[0] == 0:
        heights = heights[:1]
    spec = replace(spec, product=replace(spec.product, a_runs=prod(window.kernel[:-1]), vectors=vectors))
    panels = max(1, -(-channels // spec.product.panel_columns))
    made = replace(spec.product, heights=heights, chunk_rows=rows, chunk_panels=panels)
    return replace(spec, product=made, joined=False)


def emit_depthwise(module: Module, spec: Convolution, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"depthwise_{spec.product.name}"
    f = module.function(name, [("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")])
    driver = _DepthwiseDriver(f, spec, name, epilogue)
    f.loop("%begin", "%end", 1, [], lambda chunk, _: driver.chunk(chunk))
    f.ret()
    return name


class _DepthwiseDriver(ConvDriver):
    """The driver of a convolution, with lines of x in place of the table of addresses."""

    def __init__(self, f: Function, spec: Convolution, name: str, epilogue: Epilogue | None) -> None:
        super().__init__(f, spec, "")
        self.name, self.epilogue = name, epilogue

    def _prepare(self, chunk: Chunk) -> None:
        """Lines are found tile by tile."""

    def _panel(self, chunk: Chunk, block: Block, panel: Value) -> None:
        f, spec, number, rank = self.f, self.spec, self.number, self.window.rank
        is_tail = f.compare("eq", "i64", panel, chunk.full_panels)
        column = f.mul(panel, spec.panel_columns)
        columns = f.select("i64", is_tail, chunk.tail, spec.panel_columns)
        kernels = ["@" + self._products(height) for height in spec.heights]
        width = number[f"count{rank - 1}"]

        def tile(carried: list[str]) -> list[Value]:
            row, *at = carried
            left = f.smin(f.sub(chunk.rows, row), f.sub(width, at[-1]))
            height = self._by_height(left, "i64", spec.heights)
            *corners, first = self._corners(list(at[1:]))
            self._lines(chunk, at[0], corners)
            f.call_address(
                "void", self._by_height(left, "ptr", kernels), ("ptr", "%args"), ("ptr", self.table),
                ("ptr", self.zeros), ("i64", first), ("i64", f.add(chunk.row, row)), ("i64", column), ("i64", columns),
            )  # fmt: skip
            return [f.add(row, height), *self._pixels_on(list(at), height)]

        start = [("i64", p) for p in (0, *self._pixel(chunk.row))]
        while_loop(f, start, lambda carried: f.compare("slt", "i64", carried[0], chunk.rows), tile)

    def _pixels_on(self, at: list[str], count: Value) -> list[Value]:
        """The pixel behind some neighbouring ones of a line."""
        last = self.f.sub(self.f.add(at[-1], count), 1)
        return self._next_pixel([*at[:-1], str(last)])

    def _lines(self, chunk: Chunk, image: Value, corners: list[Value]) -> None:
        """The table: where each line that a tile sees starts, null for those outside x."""
        f = self.f
        base = f.address(self.element, chunk.a, f.mul(image, self.number["x_image"]))
        offsets = [self._axis_offsets(axis, corner) for axis, corner in enumerate(corners)]
        for index, position in enumerate(product(*(range(len(o)) for o in offsets))):
            inside = "true"
            offset: Value = 0
            for axis, tap in enumerate(position):
                is_in, part = offsets[axis][tap]
                inside = is_in if inside == "true" else f.binary("and", "i1", inside, is_in)
                offset = f.add(offset, part)
            line = f.select("ptr", inside, f.address(self.element, base, offset), "null")
            f.store("ptr", line, f.address("ptr", self.table, index), 8)

    def _products(self, height: int) -> str:
        """The function for tiles of a height: `columns` channels from `column` on, the first pixel being a `row`."""
        module, spec, window = self.f.module, self.spec, self.window
        name = f"{self.name}_{height}"
        if module.has(name):
            return name
        parameters = [
            ("ptr noalias", "args"), ("ptr noalias", "lines"), ("ptr noalias", "zeros"), ("i64", "first"),
            ("i64", "row"), ("i64", "column"), ("i64", "columns"),
        ]  # fmt: skip
        f = module.function(name, parameters, attributes="nounwind noinline", linkage="internal")
        tile = _Tile(f, self, height)
        reach = (height - 1) * window.stride[-1] + (window.kernel[-1] - 1) * window.dilation[-1]
        low = f.compare("sge", "i64", "%first", 0)
        high = f.compare("slt", "i64", f.add("%first", reach), tile.number[f"size{window.rank - 1}"])
        inside = f.binary("and", "i1", low, high) if window.input_dilation[-1] == 1 else "false"
        whole = f.round_down("%columns", spec.lanes)
        type_ = memory_type(spec.accumulator, spec.lanes)

        def some(mask: str | None, at: Value) -> None:
            sums = f.if_(
                inside,
                lambda: tile.sums(at, mask, False),
                lambda: tile.sums(at, mask, True),
                types=[type_] * height,
            )
            tile.finish(sums, at, mask)

        f.loop(0, whole, spec.lanes, [], lambda at, _: some(None, at))
        if self.conv.channels % spec.lanes:
            rest = f.sub("%columns", whole)
            f.if_(f.compare("sgt", "i64", rest, 0), lambda: some(mask_below(f, spec.lanes, rest), whole))
        f.ret()
        return name


class _Tile:
    """The pixels of a tile inside its function."""

    def __init__(self, f: Function, driver: _DepthwiseDriver, height: int) -> None:
        self.f, self.height, self.epilogue = f, height, driver.epilogue
        self.spec, self.window = driver.spec, driver.window
        self.fill = driver.conv.fill
        sums = self.spec.accumulator  # what is loaded is converted at once: bytes are multiplied as words
        self.arithmetic = Arithmetic(sums, sums, sums, self.spec.target)
        site = self._site(0, 0, None)
        self.weights, self.out = site.pointer("b"), site.pointer("out")
        rank = self.window.rank
        self.number = {n: site.number(n) for n in ("n", "out_row", f"size{rank - 1}", f"x{rank - 1}")}
        self.waiting = "" if self.is_short else f.alloca(memory_type(self.spec.accumulator), height * self.spec.lanes)

    @property
    def is_short(self) -> bool:
        """The epilogue is written out for every pixel."""
        return len(self.spec.epilogue) <= SHORT_EPILOGUE

    def _site(self, row: Value, column: Value, mask: str | None) -> Site:
        return Site(self.f, self.spec, "%args", row, column, (0,), self.spec.lanes, mask)

    def sums(self, at: Value, mask: str | None, checked: bool) -> list[Value]:
        """The sums of a vector of channels for all pixels."""
        f, spec, window, height, arithmetic = self.f, self.spec, self.window, self.height, self.arithmetic
        type_, lanes = arithmetic.type, spec.lanes
        element, weight = memory_type(spec.a), memory_type(spec.b)
        channel = f.add("%column", at)
        apart = self.number["n"]
        taps, stride, dilation = window.kernel[-1], window.stride[-1], window.dilation[-1]

        def load(address: str, dtype: DType) -> str:
            raw, align = memory_type(dtype, lanes), dtype.itemsize
            value = f.load(raw, address, align) if mask is None else f.masked_load(raw, address, align, mask)
            return convert(f, value, dtype, spec.accumulator, lanes, spec.target)

        def line(index: str, sums: list[str]) -> list[Value]:
            start = f.load("ptr", f.address("ptr", "%lines", index), 8)
            present = f.compare("ne", "ptr", start, "null")

            def products() -> list[Value]:
                totals: list[Value] = list(sums)
                first_tap = f.mul(f.mul(index, taps), apart)
                row = f.address(weight, f.address(weight, self.weights, first_tap), channel)
                weights = [load(f.address(weight, row, f.mul(apart, tap)), spec.b) for tap in range(taps)]
                base = f.address(element, start, channel)
                for away in range((height - 1) * stride + (taps - 1) * dilation + 1):
                    users = [(p, t) for p in range(height) for t in range(taps) if p * stride + t * dilation == away]
                    if not users:
                        continue
                    place = self._pixel(base, away, checked)
                    value = load(f.select("ptr", present, place, "%zeros") if self.fill else place, spec.a)
                    for pixel, tap in users:
                        totals[pixel] = arithmetic.step(f, value, weights[tap], str(totals[pixel]))
                return totals

            if self.fill:  # lines outside count, too
                return products()
            return list(f.if_(present, products, lambda: list(sums), types=[type_] * height))

        zero = "zeroinitializer" if lanes > 1 else constant(type_, 0)
        return list(f.loop(0, prod(window.kernel[:-1]), 1, [(type_, zero)] * height, line))

    def _pixel(self, base: str, away: int, checked: bool) -> str:
        """The address of the pixel so many columns behind the first, or of zeros."""
        f, element, spread = self.f, memory_type(self.spec.a), self.window.input_dilation[-1]
        apart, size = (self.number[f"{n}{self.window.rank - 1}"] for n in ("x", "size"))
        at = index = f.add("%first", away)
        if not checked:
            return f.address(element, base, f.mul(index, apart))
        exact = "true"
        if spread > 1:
            index = f.op(f"sdiv i64 {at}, {spread}")
            exact = f.compare("eq", "i64", f.mul(index, spread), at)
        inside = f.binary("and", "i1", exact, f.compare("ult", "i64", index, size))
        return f.select("ptr", inside, f.address(element, base, f.mul(index, apart)), "%zeros")

    def finish(self, sums: list[str], at: Value, mask: str | None) -> None:
        """The sums through the epilogue to the output: from registers, or a long epilogue's in a loop."""
        f, type_, size, lanes = self.f, self.arithmetic.type, self.arithmetic.size, self.spec.lanes
        if self.is_short:
            for pixel, value in enumerate(sums):
                self._put(value, pixel, at, mask)
            return
        element = memory_type(self.spec.accumulator)
        for pixel, value in enumerate(sums):
            f.store(type_, value, f.address(element, self.waiting, pixel * lanes), size)

        def one(pixel: str, _: list[str]) -> None:
            value = f.load(type_, f.address(element, self.waiting, f.mul(pixel, lanes)), size)
            self._put(value, pixel, at, mask)

        f.loop(0, self.height, 1, [], one)

    def _put(self, value: str, pixel: Value, at: Value, mask: str | None) -> None:
        f, spec = self.f, self.spec
        row, column = f.add("%row", pixel), f.add("%column", at)
        if self.epilogue is not None:
            value = self.epilogue(self._site(row, column, mask), value)
        else:
            value = convert(f, value, spec.accumulator, spec.out, spec.lanes, spec.target)
        place = f.address(memory_type(spec.out), self.out, f.add(f.mul(row, self.number["out_row"]), column))
        type_ = memory_type(spec.out, spec.lanes)
        if mask is None:
            f.store(type_, value, place, spec.out.itemsize)
        else:
            f.masked_store(type_, value, place, spec.out.itemsize, mask)
