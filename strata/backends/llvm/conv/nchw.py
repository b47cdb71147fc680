"""Convolution with channels first (NCHW), where a change of layout would cost more than it saves.

    x[image, channel, y, x]   weights[output, tap, channel of its group]   out[image, output, y, x]

Vectors run along the pixels of a line. Depth-wise: the sums of a few lines stay in registers while the lines of x below
them are read, each vector once for all taps that see it. Few channels: the values that some pixels see become a panel,
[tap and channel, pixel], which all outputs multiply by the micro-kernels of every contraction (where lines are short:
`nchw_direct` has the others). Rows of the contraction are outputs, its columns the pixels of a plane. What
lies in the padding is masked out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Unpack

from strata.backends.llvm.conv.lines import every, in_tiles, lanes_inside, seen
from strata.backends.llvm.conv.table import ConvWindow, in_blocks
from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.gemm.epilogue import Epilogue, Site, emit_finish, put_vector
from strata.backends.llvm.gemm.micro import TileSet, call_micro
from strata.backends.llvm.gemm.planning import plan_contraction
from strata.backends.llvm.gemm.spec import Contraction, EpilogueFields
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector_constant
from strata.backends.llvm.ir.native import each_point, template, while_loop
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, f32

LINES: Final = (8, 4, 2, 1)  # of depth-wise tiles
CHUNK_SUMS: Final = 16 << 10  # depth-wise sums that are worth handing out
CHUNK_PANELS: Final = 4
FEWEST_CHUNKS: Final = 16


@dataclass(frozen=True, slots=True)
class Border:
    """An axis of x: the padding before it, its size, and how many outputs there are along it."""

    low: int
    size: int
    count: int

    def __str__(self) -> str:
        return f"{self.low}+{self.size}->{self.count}"


@dataclass(frozen=True, slots=True)
class Planes:
    """A convolution, ready to be emitted; `channels` are those of one group, `groups` is 1 or the number of channels.

    A chunk is `planes` by `lines` of a depth-wise convolution, or some panels of pixels of one image. Arguments:
    `product.slots`, where a is x, b the weights, m the outputs of all images, n the pixels of a plane.
    """

    product: Contraction
    window: ConvWindow
    channels: int
    outputs: int
    groups: int
    planes: int
    lines: int
    heights: tuple[int, ...]  # lines of depth-wise tiles
    by_line: bool  # the epilogue takes no pixels of two lines at once
    borders: tuple[Border, ...] = ()  # of x down and along, where they are known and a plane is one tile

    @property
    def is_depthwise(self) -> bool:
        return self.channels == 1 and self.outputs == self.groups

    @property
    def k(self) -> int:
        """Products of one sum."""
        return self.channels * self.window.taps

    @property
    def stack_bytes(self) -> int:
        rows = 0 if self.is_depthwise else self.k + self.product.heights[0]
        return rows * self.product.panel_columns * 4 + 1024

    def __str__(self) -> str:
        kind = f"depth-wise {self.planes} planes {self.lines} lines" if self.is_depthwise else "panels of pixels"
        kind += "".join(f" {border}" for border in self.borders)
        return f"channels first {self.window} channels {self.channels} groups {self.groups} {kind}; {self.product}"


def plan_planes(
    images: int,
    outputs: int,
    channels: int,
    counts: tuple[int, int],
    window: ConvWindow,
    target: Target,
    *,
    groups: int = 1,
    out: DType = f32,
    by_line: bool = False,
    borders: tuple[Border, ...] = (),
    **ending: Unpack[EpilogueFields],
) -> Planes:
    """For sizes, or for their upper bounds; `borders` where they are known."""
    height, width = counts
    spec = plan_contraction(outputs, height * width, channels * window.taps, target, out=out, **ending)
    spec = in_blocks(spec, channels, window)
    planes = max(1, min(CHUNK_SUMS // max(1, height * width), -(-images * outputs // FEWEST_CHUNKS)))
    even = next((h for h in range(LINES[0], LINES[0] // 2, -1) if height % h == 0), LINES[0])
    heights = (even, *(h for h in LINES if h < even))
    lines = height if planes > 1 else max(even, min(height, CHUNK_SUMS // max(1, width) // even * even))
    panels = max(1, min(CHUNK_PANELS, images * height * width // (FEWEST_CHUNKS * spec.panel_columns)))
    spec = replace(
        spec, streams=(), prefetch=0, chunk_rows=spec.heights[0], chunk_panels=panels,
        load_numbers=(*window.numbers, "x_channel"),
    )  # fmt: skip
    is_tile = height <= LINES[0] and width <= spec.lanes and lines >= height
    is_tile = is_tile and (window.stride[1] == 1 or all(b.size <= 2 * spec.lanes for b in borders))
    known = borders if is_tile and outputs == groups and channels == 1 else ()
    return Planes(spec, window, channels, outputs, groups, planes, max(1, lines), heights, by_line, known)


def emit_planes(module: IrModule, spec: Planes, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"planes_{spec.product.name}"
    finish = "" if spec.is_depthwise else emit_finish(module, spec.product, f"{name}_finish", epilogue)
    f = template(module, name)
    if spec.is_depthwise:
        driver: _Planes = (_Tiles if spec.borders else _Depthwise)(f, spec, epilogue)
    else:
        driver = _Panels(f, spec, finish)
    each_point(f, lambda chunk, _: driver.chunk(chunk))
    return name


class PlaneDriver:
    """What all ways need: arguments, and where lines of x end."""

    def __init__(self, f: IrFunction, product: Contraction, window: ConvWindow) -> None:
        self.f, self.product, self.window = f, product, window
        site = Site(f, product, "%args", 0, 0, (), 1, None)
        self.x, self.weights, self.out = (site.pointer(p) for p in ("a", "b", "out"))
        self.number = {n: site.number(n) for n in product.numbers}
        self.lanes = product.lanes
        self.type = memory_type(f32, self.lanes)

    def chunk(self, index: str) -> None:
        raise NotImplementedError

    def ceil(self, value: Value, unit: Value) -> Value:
        return self.f.op(f"udiv i64 {self.f.sub(self.f.add(value, unit), 1)}, {unit}")


class _Planes(PlaneDriver):
    """What both ways here need: lines of x, tap by tap."""

    def __init__(self, f: IrFunction, spec: Planes) -> None:
        super().__init__(f, spec.product, spec.window)
        self.spec = spec

    def reads(self) -> dict[tuple[int, ...], list[int]]:
        """Taps along a line by the vectors that they need, given from the position of the first tap on."""
        found: dict[tuple[int, ...], list[int]] = {}
        for tap in range(self.window.kernel[1]):
            away, stride = tap * self.window.dilation[1], self.window.stride[1]
            vectors = range(away - away % stride, away - away % stride + stride * self.lanes, self.lanes)
            found.setdefault(tuple(vectors), []).append(tap)
        return found

    def masks(self, start: Value) -> dict[int, str]:
        """For each of those vectors, which of its lanes lie in a line of x."""
        f, size = self.f, self.number["size1"]
        offsets = sorted({away for reads in self.reads() for away in reads})
        return {away: lanes_inside(f, self.lanes, f.add(start, away), size) for away in offsets}

    def seen(self, line: str, reads: tuple[int, ...], taps: list[int], masks: dict[int, str]) -> list[str]:
        """What the pixels of a vector see of a line, through taps that need the same vectors."""
        f = self.f
        parts = [f.load(self.type, f.address("float", line, away), 4, masks[away]) for away in reads]
        return [every(f, self.type, parts, tap * self.window.dilation[1] % len(parts)) for tap in taps]


class _Depthwise(_Planes):
    """Planes by themselves."""

    def __init__(self, f: IrFunction, spec: Planes, epilogue: Epilogue | None) -> None:
        super().__init__(f, spec)
        self.epilogue = epilogue
        self.arithmetic = GemmArithmetic(f32, f32, f32, spec.product.target)
        reach = max(away for reads in self.reads() for away in reads) + self.lanes
        self.zeros = f.alloca("float", reach)
        f.fill("float", self.zeros, reach, constant("float", 0))

    def chunk(self, index: str) -> None:
        f, number = self.f, self.number
        parts = self.ceil(number["count0"], self.spec.lines)
        group, part = self.f.divided(index, parts)
        first, top = f.mul(group, self.spec.planes), f.mul(part, self.spec.lines)
        end = f.smin(f.add(first, self.spec.planes), number["m"])
        bottom = f.smin(f.add(top, self.spec.lines), number["count0"])
        f.loop(first, end, 1, [], lambda plane, _: self._plane(plane, top, bottom))

    def _plane(self, plane: str, top: Value, bottom: Value) -> None:
        x, weights = self._operands(plane)
        self.f.vectors(
            self.number["count1"], self.lanes,
            lambda at, mask: self._column(plane, x, weights, at, mask, top, bottom),
        )  # fmt: skip

    def _operands(self, plane: str) -> tuple[str, str]:
        """Where a plane of x begins, and its weights."""
        f, number = self.f, self.number
        image, channel = f.divided(plane, self.spec.groups)
        offset = f.add(f.mul(image, number["x_image"]), f.mul(channel, number["x_channel"]))
        x = f.address("float", self.x, offset)
        return x, f.address("float", self.weights, f.mul(channel, self.spec.k))

    def _column(
        self, plane: str, x: str, weights: str, at: Value, mask: str | None, top: Value, bottom: Value
    ) -> None:  # fmt: skip
        """One vector of pixels of all lines, some lines at a time."""
        f = self.f
        start = f.sub(f.mul(at, self.window.stride[1]), self.number["low1"])
        masks = self.masks(start)

        def tile(line: str, count: int) -> None:
            for i, value in enumerate(self._sums(x, weights, line, start, masks, count)):
                self._put(value, plane, f.add(line, i), at, mask)

        in_tiles(f, top, bottom, self.spec.heights, tile)

    def _sums(
        self, x: str, weights: str, line: str, start: Value, masks: dict[int, str], count: int
    ) -> list[str]:  # fmt: skip
        """The sums of neighbouring lines. Each takes its products line by line, as they lie in the weights."""
        f, window, number = self.f, self.window, self.number
        taps, stride, dilation = window.kernel[0], window.stride[0], window.dilation[0]
        first = f.sub(f.mul(line, stride), number["low0"])
        scale = {(t, tap): self._weight(weights, t, tap) for t in range(taps) for tap in range(window.kernel[1])}
        sums = [constant(self.type, 0)] * count
        for away, users in seen(count, taps, stride, dilation).items():
            y = f.add(first, away)
            place = f.address("float", x, f.add(f.mul(y, number["x0"]), start))
            place = f.select("ptr", f.compare("ult", "i64", y, number["size0"]), place, self.zeros)
            for reads, along in self.reads().items():
                for tap, value in zip(along, self.seen(place, reads, along, masks), strict=True):
                    for i, t in users:
                        sums[i] = self.arithmetic.step(f, value, scale[t, tap], sums[i])
        return sums

    def _weight(self, weights: str, row: int, column: int) -> str:
        f = self.f
        place = f.address("float", weights, row * self.window.kernel[1] + column)
        return f.splat(self.type, f.load("float", place, 4))

    def _put(self, value: str, plane: str, line: Value, at: Value, mask: str | None) -> None:
        f = self.f
        column = f.add(f.mul(line, self.number["count1"]), at)
        site = Site(f, self.product, "%args", plane, column, (), self.lanes, mask)
        put_vector(site, value, self.epilogue, self.out, self.number["out_row"])


class _Tiles(_Depthwise):
    """Planes that are one tile each: what the padding takes is known."""

    def chunk(self, index: str) -> None:
        f, number = self.f, self.number
        first = f.mul(index, self.spec.planes)
        f.loop(first, f.smin(f.add(first, self.spec.planes), number["m"]), 1, [], lambda plane, _: self._tile(plane))

    def _tile(self, plane: str) -> None:
        f, number, (down, along) = self.f, self.number, self.spec.borders
        x, weights = self._operands(plane)
        sums, rows = [constant(self.type, 0)] * down.count, self._rows()
        lines = {y: f.address("float", x, f.mul(y, number["x0"])) for y in rows}
        # steps of more than one: a line is in registers, and every tap picks its own
        kept = {y: self._line(line) for y, line in lines.items()} if self.window.stride[1] > 1 else {}
        kernel = self.window.kernel
        scale = {(t, tap): self._weight(weights, t, tap) for t in range(kernel[0]) for tap in range(kernel[1])}
        for y, users in rows.items():
            for tap in range(kernel[1]):
                value = self._picked(kept[y], tap) if kept else self._at(lines[y], tap)
                for line, t in users:
                    sums[line] = self.arithmetic.step(f, value, scale[t, tap], sums[line])
        mask = f.mask_below(self.lanes, along.count) if along.count < self.lanes else None
        for line, value in enumerate(sums):
            self._put(value, plane, line, 0, mask)

    def _rows(self) -> dict[int, list[tuple[int, int]]]:
        """The lines of x that are seen, and for each the lines of the output that see it through which taps."""
        down, window = self.spec.borders[0], self.window
        found: dict[int, list[tuple[int, int]]] = {}
        for line in range(down.count):
            for tap in range(window.kernel[0]):
                y = line * window.stride[0] + tap * window.dilation[0] - down.low
                if 0 <= y < down.size:
                    found.setdefault(y, []).append((line, tap))
        return dict(sorted(found.items()))

    def _places(self, tap: int) -> list[int]:
        """The elements of a line that the pixels see through a tap; -1 for those outside."""
        along, window = self.spec.borders[1], self.window
        places = [x * window.stride[1] + tap * window.dilation[1] - along.low for x in range(self.lanes)]
        return [at if 0 <= at < along.size and x < along.count else -1 for x, at in enumerate(places)]

    def _at(self, line: str, tap: int) -> str:
        """Neighbouring elements, read where they are."""
        f, places = self.f, self._places(tap)
        inside = [at >= 0 for at in places]
        if not any(inside):
            return constant(self.type, 0)
        first = next(at - x for x, at in enumerate(places) if at >= 0)
        place = f.address("float", line, first)
        if all(inside):
            return f.load(self.type, place, 4)
        return f.load(self.type, place, 4, vector_constant("i1", inside))

    def _line(self, line: str) -> str:
        """All of a line, as one or two vectors together."""
        f, size = self.f, self.spec.borders[1].size
        type_ = memory_type(f32, 2 * self.lanes)
        return f.load(type_, line, 4, f.mask_below(2 * self.lanes, size))

    def _picked(self, line: str, tap: int) -> str:
        wide = 2 * self.lanes
        picks = [at if at >= 0 else wide for at in self._places(tap)]
        return self.f.shuffle(memory_type(f32, wide), line, "zeroinitializer", picks)


class _Panels(_Planes):
    """All outputs of some pixels at a time."""

    def __init__(self, f: IrFunction, spec: Planes, finish: str) -> None:
        super().__init__(f, spec)
        self.finish = finish
        self.panel = f.alloca("float", spec.k * spec.product.panel_columns)
        self.sums = f.alloca("float", self.product.heights[0] * self.product.panel_columns)

    def chunk(self, index: str) -> None:
        f, number = self.f, self.number
        columns = self.product.panel_columns
        image, block = self.f.divided(index, self.ceil(number["n"], columns * self.product.chunk_panels))
        first = f.mul(block, columns * self.product.chunk_panels)
        end = f.smin(f.add(first, columns * self.product.chunk_panels), number["n"])
        f.loop(
            first, end, columns, [], lambda pixel, _: self._multiply(image, pixel, f.smin(f.sub(end, pixel), columns))
        )

    def _multiply(self, image: Value, pixel: str, count: Value) -> None:
        f, spec, product = self.f, self.spec, self.product
        self._fill(image, pixel, count)
        tiles = TileSet(product.heights, product.vectors, strided_b=True, blocks=product.blocks)
        kernels = tiles.by_vectors(f, product.arithmetic, self.ceil(count, self.lanes))
        first = f.mul(image, spec.outputs)

        def tile(row: Value, height: Value) -> None:
            kernel = tiles.by_height(f, f.sub(spec.outputs, row), "ptr", kernels)
            weights = f.address("float", self.weights, f.mul(row, spec.k))
            columns = product.panel_columns
            call_micro(f, kernel, weights, spec.k, self.panel, columns, self.sums, columns, spec.k, 0)
            self._finish(f.add(first, row), height, pixel, count)

        tiles.over_rows(f, spec.outputs, tile)

    def _finish(self, row: Value, rows: Value, pixel: str, count: Value) -> None:
        f, width = self.f, self.product.panel_columns

        def put(done: Value, length: Value) -> None:
            numbers = (width, row, f.add(pixel, done), rows, length)
            sums = f.address("float", self.sums, done)
            f.call("void", self.finish, ("ptr", "%args"), ("ptr", sums), *(("i64", n) for n in numbers))

        if self.spec.by_line:
            self._over_lines(pixel, count, lambda done, y, at, length: put(done, length))
        else:
            put(0, count)

    def _over_lines(self, pixel: str, count: Value, body: Callable[[Value, Value, Value, Value], None]) -> None:
        """The lines that some pixels are on: body(pixels before, line, column, pixels of this line)."""
        f, width = self.f, self.number["count1"]

        def some(carried: list[str]) -> list[Value]:
            done, y, at = carried
            length = f.smin(f.sub(count, done), f.sub(width, at))
            body(done, y, at, length)
            return [f.add(done, length), f.add(y, 1), 0]

        start = [0, *self.f.divided(pixel, width)]
        while_loop(f, [("i64", v) for v in start], lambda c: f.compare("slt", "i64", c[0], count), some)

    def _fill(self, image: Value, pixel: str, count: Value) -> None:
        """The panel, a line of pixels after the other."""
        f = self.f
        x = f.address("float", self.x, f.mul(image, self.number["x_image"]))

        def line(done: Value, y: Value, at: Value, length: Value) -> None:
            self._line(x, y, at, length, done)

        self._over_lines(pixel, count, line)

    def _line(self, x: str, y: Value, at: Value, length: Value, done: Value) -> None:
        f, number, window, columns = self.f, self.number, self.window, self.product.panel_columns
        left = f.sub(f.mul(at, window.stride[1]), number["low1"])
        top = f.sub(f.mul(y, window.stride[0]), number["low0"])

        def vectors(i: str, _: list[str]) -> None:
            start = f.add(left, f.mul(i, window.stride[1]))
            column = f.add(done, i)
            room = f.mask_below(self.lanes, f.sub(columns, column))
            masks = self.masks(start)

            def channel(c: str, _: list[str]) -> None:
                plane = f.address("float", x, f.mul(c, number["x_channel"]))
                for tap in range(window.kernel[0]):
                    row = f.add(tap * window.kernel[1] * self.spec.channels, c)
                    self._put_taps(plane, f.add(top, tap * window.dilation[0]), start, masks, column, row, room)

            f.loop(0, self.spec.channels, 1, [], channel)

        f.loop(0, length, self.lanes, [], vectors)

    def _put_taps(
        self, plane: str, y: Value, start: Value, masks: dict[int, str], column: Value, row: Value, room: str
    ) -> None:  # fmt: skip
        """What a vector of pixels sees of one line through the taps along it."""
        f, number = self.f, self.number
        inside = f.compare("ult", "i64", y, number["size0"])
        line = f.address("float", plane, f.add(f.mul(y, number["x0"]), start))

        def loaded() -> list[Value]:
            values: dict[int, Value] = {}
            for reads, along in self.reads().items():
                values |= zip(along, self.seen(line, reads, along, masks), strict=True)
            return [values[tap] for tap in range(count)]

        count = self.window.kernel[1]
        zeros: list[Value] = [constant(self.type, 0)] * count
        found = f.if_(inside, loaded, lambda: zeros, types=[self.type] * count)
        columns = self.product.panel_columns
        to = f.address("float", self.panel, f.add(f.mul(row, columns), column))
        for tap, value in enumerate(found):
            f.store(self.type, value, f.address("float", to, tap * self.spec.channels * columns), 4, room)
