"""Depthwise convolution and others with narrow groups: vectors run along the output channels of all groups.

    x[image, *sizes, channel]   weights[tap, channel of its group, output]   out[image, *counts, output]

Chunks and the epilogue are those of `conv.table`. A tile is some neighbouring pixels of one output line. Its sums stay
in registers while the lines of x below it are read, one channel of the groups after the other: each vector of x once,
for all pixels that see it through a tap. Its lanes are that channel of the group that each output belongs to: with
depth-wise groups the channels as they lie; with small groups the channels of a few groups, spread by a shuffle; where a
group fills a vector, one value in all lanes. Lines that fall into the padding are left out; pixels that do are read
from zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Unpack

from strata.backends.llvm.conv.table import ConvDriver, Convolution, ConvWindow, in_blocks, plan_convolution
from strata.backends.llvm.gemm.arith import GemmArithmetic, convert
from strata.backends.llvm.gemm.driver import Chunk, GemmBlock
from strata.backends.llvm.gemm.epilogue import Epilogue, Site, put_vector
from strata.backends.llvm.gemm.planning import SHORT_EPILOGUE, for_rows
from strata.backends.llvm.gemm.spec import EpilogueFields
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import each_point, template, while_loop
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, f32

MOST_PIXELS = 256  # of a chunk
FEWEST_CHUNKS = 16
PANEL = 4  # vectors of outputs that one call of a tile's function works on, of depth-wise groups
WIDE_PANEL = 16  # of others, whose weights come from the second-level cache in any case
WIDEST = 16  # outputs of a group up to which a contraction by itself would fill too few vectors
MOST_SPREAD = 64  # taps of a line times channels, of which shuffles are written out


def fits_beside(channels: int, outputs: int, groups: int, window: ConvWindow, dtype: DType, target: Target) -> bool:
    """Whether groups of this many channels and outputs are better side by side than each a contraction."""
    if groups == 1:
        return False
    if channels == 1 == outputs:
        return True
    lanes = target.lanes(dtype.accumulator.itemsize)
    if not dtype.is_float or outputs > WIDEST:
        return False
    if outputs % lanes == 0:
        return True
    return lanes % outputs == 0 and channels <= outputs and channels * window.kernel[-1] <= MOST_SPREAD


def plan_beside(
    pixels: int,
    groups: int,
    window: ConvWindow,
    target: Target,
    *,
    channels: int = 1,
    outputs: int = 1,
    pixel: int = 0,
    dtype: DType = f32,
    weights: DType | None = None,
    out: DType | None = None,
    fill: int = 0,
    width: int | None = None,
    m_exact: bool = False,
    **ending: Unpack[EpilogueFields],
) -> Convolution:
    """As plan_convolution, for `channels` and `outputs` of one group; `pixel` is the distance of a pixel of x to the
    next where it is known. In the arguments, b is the weights, n the outputs
    of all groups, k taps times channels of a group, and batch 0 has extent 1."""
    columns = groups * outputs
    spec = plan_convolution(
        pixels, columns, channels, window, target, dtype=dtype, weights=weights, out=out, fill=fill, width=width,
        **ending,
    )  # fmt: skip
    whole = -(-columns // spec.product.lanes)
    most = min(PANEL if channels == 1 else WIDE_PANEL, whole)
    vectors = next((v for v in range(most, 1, -1) if whole % v == 0), most)
    heights = spec.product.heights
    # work is split by pixels alone: neighbouring tiles share lines of x
    rows = min(MOST_PIXELS, max(1, -(-pixels // (FEWEST_CHUNKS * heights[0]))) * heights[0])
    if width and width <= rows:
        rows = rows // width * width  # whole lines
        heights = for_rows(replace(spec.product, chunk_rows=width), width).heights
    elif width and width % heights[0] == 0:
        heights = heights[:1]
    spec = replace(spec, product=replace(spec.product, a_runs=prod(window.kernel[:-1]), vectors=vectors))
    panels = max(1, -(-columns // spec.product.panel_columns))
    made = replace(spec.product, heights=heights, chunk_rows=rows, chunk_panels=panels, ends_in_registers=False)
    made = in_blocks(made, channels, window, beside=True)
    return replace(spec, product=made, joined=False, beside=groups, outputs=outputs, pixel=pixel)


def emit_beside(module: IrModule, spec: Convolution, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"beside_{spec.product.name}"
    f = template(module, name)
    driver = _BesideDriver(f, spec, name, epilogue)
    each_point(f, lambda chunk, _: driver.chunk(chunk))
    return name


class _BesideDriver(ConvDriver):
    """The driver of a convolution, with lines of x in place of the table of addresses."""

    def __init__(self, f: IrFunction, spec: Convolution, name: str, epilogue: Epilogue | None) -> None:
        super().__init__(f, spec, "", epilogue)
        self.name = name

    def _prepare(self, chunk: Chunk) -> None:
        """Lines are found tile by tile."""

    def _panel(self, chunk: Chunk, block: GemmBlock, panel: Value) -> None:
        f, spec, number, rank = self.f, self.spec, self.number, self.window.rank
        is_tail = f.compare("eq", "i64", panel, chunk.full_panels)
        column = f.mul(panel, spec.panel_columns)
        columns = f.select("i64", is_tail, chunk.tail, spec.panel_columns)
        kernels = ["@" + self._products(height) for height in spec.heights]
        width = number[f"count{rank - 1}"]

        def tile(carried: list[str]) -> list[Value]:
            row, *at = carried
            left = f.smin(f.sub(chunk.rows, row), f.sub(width, at[-1]))
            height = self.row_tiles.by_height(f, left, "i64", spec.heights)
            *corners, first = self._corners(list(at[1:]))
            self._lines(chunk, at[0], corners)
            f.call_address(
                "void", self.row_tiles.by_height(f, left, "ptr", kernels), ("ptr", "%args"), ("ptr", self.table),
                ("ptr", self.zeros), ("i64", first), ("i64", f.add(chunk.row, row)), ("i64", column), ("i64", columns),
            )  # fmt: skip
            return [f.add(row, height), *self._pixels_on(list(at), height)]

        start = [("i64", p) for p in (0, *self._pixel(chunk.row))]
        while_loop(f, start, lambda carried: f.compare("slt", "i64", carried[0], chunk.rows), tile)

    def _pixels_on(self, at: list[str], count: Value) -> list[Value]:
        """The pixel after some neighbouring ones of a line."""
        last = self.f.sub(self.f.add(at[-1], count), 1)
        return self._next_pixel([*at[:-1], str(last)])

    def _lines(self, chunk: Chunk, image: Value, corners: list[Value]) -> None:
        """The table: where each line that a tile sees starts, null for those outside x."""
        f = self.f
        base = f.address(self.element, chunk.a, f.mul(image, self.number["x_image"]))
        offsets = [self._axis_offsets(axis, corner) for axis, corner in enumerate(corners)]
        for index, (inside, offset) in enumerate(self._places(offsets)):
            line = f.select("ptr", inside, f.address(self.element, base, offset), "null")
            f.store("ptr", line, f.address("ptr", self.table, index), 8)

    def _products(self, height: int) -> str:
        """The function for tiles of a height: `columns` outputs from `column` on, the first pixel being a `row`."""
        module, spec, window = self.f.module, self.spec, self.window
        name = f"{self.name}_{height}"
        if module.has(name):
            return name
        parameters = [
            ("ptr noalias", "args"), ("ptr noalias", "lines"), ("ptr noalias", "zeros"), ("i64", "first"),
            ("i64", "row"), ("i64", "column"), ("i64", "columns"),
        ]  # fmt: skip
        f = module.outlined(name, parameters)
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
        if self.conv.beside * self.conv.outputs % spec.lanes:
            rest = f.sub("%columns", whole)
            f.if_(f.compare("sgt", "i64", rest, 0), lambda: some(f.mask_below(spec.lanes, rest), whole))
        f.ret()
        return name


@dataclass(frozen=True, slots=True)
class _Pixels:
    """A line of x under a tile for a vector of outputs, and the weights of the first tap and channel."""

    places: dict[int, str]  # of pixels that are seen, by their distance from the first
    weights: str
    mask: str | None


class _Tile:
    """The pixels of a tile inside its function."""

    def __init__(self, f: IrFunction, driver: _BesideDriver, height: int) -> None:
        conv = driver.conv
        self.channels, self.outputs, self.columns = conv.channels, conv.outputs, conv.beside * conv.outputs
        self.f, self.height, self.epilogue = f, height, driver.epilogue
        self.spec, self.window = driver.spec, driver.window
        self.fill, self.pixel = conv.fill, conv.pixel
        sums = self.spec.accumulator  # what is loaded is converted at once: bytes are multiplied as words
        self.arithmetic = GemmArithmetic(sums, sums, sums, self.spec.target)
        site = self._site(0, 0, None)
        self.weights, self.out = site.pointer("b"), site.pointer("out")
        rank = self.window.rank
        self.number = {n: site.number(n) for n in ("out_row", f"size{rank - 1}", f"x{rank - 1}")}
        self.waiting = "" if self.is_short else f.alloca(memory_type(self.spec.accumulator), height * self.spec.lanes)

    @property
    def is_broadcast(self) -> bool:
        """All outputs of a vector belong to one group."""
        return self.outputs > 1 and self.outputs % self.spec.lanes == 0

    @property
    def is_short(self) -> bool:
        """The epilogue is written out for every pixel."""
        return len(self.spec.epilogue) <= SHORT_EPILOGUE

    def _site(self, row: Value, column: Value, mask: str | None) -> Site:
        return Site(self.f, self.spec, "%args", row, column, (0,), self.spec.lanes, mask)

    def sums(self, at: Value, mask: str | None, checked: bool) -> list[Value]:
        """The sums of a vector of outputs for all pixels."""
        f, spec, height, type_ = self.f, self.spec, self.height, self.arithmetic.type
        column = f.add("%column", at)
        group = column if self.outputs == 1 else f.op(f"udiv i64 {column}, {self.outputs}")
        first_channel = f.mul(group, self.channels)

        def line(index: str, sums: list[str]) -> list[Value]:
            start = f.load("ptr", f.address("ptr", "%lines", index), 8)
            present = f.compare("ne", "ptr", start, "null")

            def products() -> list[Value]:
                base = f.address(memory_type(spec.a), start, first_channel)
                place = f.mul(index, self.window.kernel[-1] * self.channels * self.columns)
                weights = f.address(memory_type(spec.b), self.weights, f.add(place, column))
                pixels = _Pixels(self._places(base, present, checked), weights, mask)
                if not self.is_broadcast:
                    totals: list[Value] = list(sums)
                    for channel in range(self.channels):
                        totals = self._channel(pixels, channel, totals)
                    return totals
                return list(self._channels(pixels, sums))

            if self.fill:  # lines outside count, too
                return products()
            return list(f.if_(present, products, lambda: list(sums), types=[type_] * height))

        zeros, lines = [(type_, self._zero)] * height, prod(self.window.kernel[:-1])
        if spec.blocks is None or spec.blocks.run:
            return list(f.loop(0, lines, 1, zeros, line))
        together = spec.blocks.terms // (self.window.kernel[-1] * self.channels)

        def block(first: str, totals: list[str]) -> list[Value]:
            sums = f.loop(first, f.smin(f.add(first, together), lines), 1, zeros, line)
            is_first = f.compare("eq", "i64", first, 0)
            pairs = [(s, f.binary("fadd", type_, t, s)) for t, s in zip(totals, sums, strict=True)]
            return [f.select(type_, is_first, own, added, uniform=True) for own, added in pairs]

        return list(f.loop(0, lines, together, zeros, block))

    @property
    def _zero(self) -> str:
        return "zeroinitializer" if self.spec.lanes > 1 else constant(self.arithmetic.type, 0)

    def _channels(self, pixels: _Pixels, sums: list[str]) -> list[str]:
        """The channels of groups that fill vectors, through the taps of a line, added to the sums; those of long lines
        in blocks."""
        f, blocks, type_ = self.f, self.spec.blocks, self.arithmetic.type

        def some(begin: Value, end: Value, start: list[str]) -> list[str]:
            return f.loop(begin, end, 1, [(type_, s) for s in start], lambda c, t: self._channel(pixels, c, list(t)))

        if blocks is None or not blocks.run:
            return some(0, self.channels, sums)
        together = blocks.terms // self.window.kernel[-1]

        def block(first: str, totals: list[str]) -> list[Value]:
            made = some(first, f.smin(f.add(first, together), self.channels), [self._zero] * self.height)
            return [f.binary("fadd", type_, t, m) for t, m in zip(totals, made, strict=True)]

        return f.loop(0, self.channels, together, [(type_, s) for s in sums], block)

    def _channel(self, pixels: _Pixels, channel: Value, totals: list[Value]) -> list[Value]:
        """The products of one channel of the groups through the taps along a line, added to the sums."""
        f, spec, window, height = self.f, self.spec, self.window, self.height
        taps, stride, dilation = window.kernel[-1], window.stride[-1], window.dilation[-1]
        line = f.address(memory_type(spec.b), pixels.weights, f.mul(channel, self.columns))
        weights = []
        for tap in range(taps):
            place = f.address(memory_type(spec.b), line, tap * self.channels * self.columns)
            weights.append(self._vector(place, spec.b, pixels.mask))
        for away, place in pixels.places.items():
            users = [(p, t) for p in range(height) for t in range(taps) if p * stride + t * dilation == away]
            value = self._seen(place, channel, pixels.mask)
            for pixel, tap in users:
                totals[pixel] = self.arithmetic.step(f, value, weights[tap], str(totals[pixel]))
        return totals

    def _vector(self, address: str, dtype: DType, mask: str | None, lanes: int = 0) -> str:
        f, lanes = self.f, lanes or self.spec.lanes
        raw, align = memory_type(dtype, lanes), dtype.itemsize
        value = f.load(raw, address, align, mask)
        return convert(f, value, dtype, self.spec.accumulator, lanes, self.spec.target)

    def _seen(self, place: str, channel: Value, mask: str | None) -> str:
        """A channel of the groups of a vector of outputs, at a pixel."""
        f, spec, lanes = self.f, self.spec, self.spec.lanes
        if self.is_broadcast:
            address = f.address(memory_type(spec.a), place, channel)
            one = f.load(memory_type(spec.a), address, spec.a.itemsize)
            return f.splat(self.arithmetic.type, convert(f, one, spec.a, spec.accumulator, 1, spec.target))
        if self.outputs == 1:
            return self._vector(place, spec.a, mask)
        assert isinstance(channel, int)
        read = lanes // self.outputs * self.channels
        if mask is not None and read < lanes:  # lanes of the first outputs of groups
            mask = f.shuffle(
                vector("i1", lanes), mask, "poison", [i // self.channels * self.outputs for i in range(read)]
            )
        values = self._vector(place, spec.a, mask, read)
        picks = [lane // self.outputs * self.channels + channel for lane in range(lanes)]
        return f.shuffle(memory_type(spec.accumulator, read), values, "poison", picks)

    def _places(self, base: str, present: str, checked: bool) -> dict[int, str]:
        """Where the pixels of a line are that a tile sees; those outside x are zeros."""
        f, window, element = self.f, self.window, memory_type(self.spec.a)
        taps, stride, dilation = window.kernel[-1], window.stride[-1], window.dilation[-1]
        seen = sorted({p * stride + t * dilation for p in range(self.height) for t in range(taps)})
        apart: Value = self.pixel or self.number[f"x{window.rank - 1}"]
        if not checked:
            first = f.address(element, base, f.mul("%first", apart))
            places = {away: f.address(element, first, f.mul(away, apart)) for away in seen}
        else:
            places = {away: self._checked_place(base, away, apart) for away in seen}
        if not self.fill:
            return places
        return {away: f.select("ptr", present, place, "%zeros") for away, place in places.items()}

    def _checked_place(self, base: str, away: int, apart: Value) -> str:
        """The address of the pixel this many columns after the first, or of zeros."""
        f, element, spread = self.f, memory_type(self.spec.a), self.window.input_dilation[-1]
        at = index = f.add("%first", away)
        exact = "true"
        if spread > 1:
            index = f.op(f"sdiv i64 {at}, {spread}")
            exact = f.compare("eq", "i64", f.mul(index, spread), at)
        size = self.number[f"size{self.window.rank - 1}"]
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
        site = self._site(self.f.add("%row", pixel), self.f.add("%column", at), mask)
        put_vector(site, value, self.epilogue, self.out, self.number["out_row"])
