"""Convolution as an implicit GEMM: a matmul whose rows of A are found through a table of addresses.

    x[image, *sizes, channel]   weights[tap, channel, output] (packed)   out[image, *counts, output]

Channels are next to each other. A row of A is one output pixel; pixels are counted through rows and images, so small
maps fill whole tiles. For every tile the table holds, run by run, where each pixel's values are. A run is one tap's
channels; with few channels, all taps along the last axis. Runs that fall into the padding, or between the pixels of a
spread input, point at zeros, and are left out where that holds for all pixels of a tile; or they point at another fill,
that of codes. Runs that cross the border are copied. Groups are a batch axis of the contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from itertools import product as cartesian
from math import prod
from typing import Final, Unpack

from strata.backends.llvm.gemm.driver import Chunk, GemmBlock, GemmDriver
from strata.backends.llvm.gemm.epilogue import Epilogue, emit_finish
from strata.backends.llvm.gemm.planning import for_rows, plan_contraction, with_ending
from strata.backends.llvm.gemm.spec import Contraction, EpilogueFields
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.native import each_point, template
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, f32
from strata.kernel import ProductBlocks

TABLE_BYTES: Final = 96 << 10  # of a chunk's addresses and copied runs, on the stack
FEWEST_CHUNKS: Final = 32  # with 16, the last one of two threads works alone for a twentieth of the time
AT_ONCE: Final = 8  # pixels whose addresses are made together
WORTH: Final = 0.97  # time of uneven tiles, to that of even ones
LONGEST_CUT: Final = 128  # pixels of a line that may be cut into uneven tiles
FEW_ROWS: Final = 4  # a tile of fewer takes as long: it waits for weights
SHORT_RUN: Final = 16  # channels below which the taps of a row are joined: the loop over one tap's would hardly turn


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """The taps of a convolution over any number of axes."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    def joins(self, channels: int, groups: int) -> bool:
        """Whether all taps along the last axis are one run."""
        adjacent = groups == 1 and self.dilation[-1] == self.input_dilation[-1] == 1
        return adjacent and channels < SHORT_RUN and self.kernel[-1] > 1

    def runs(self, channels: int, groups: int) -> int:
        """Runs of a pixel."""
        return self.taps // (self.kernel[-1] if self.joins(channels, groups) else 1)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Arguments: sizes of x and of the output, padding before, and strides of x in elements."""
        axes = range(self.rank)
        return (*(f"{part}{axis}" for part in ("size", "count", "low", "x") for axis in axes), "x_image")

    def __str__(self) -> str:
        def times(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        return (
            f"window {times(self.kernel)} stride {times(self.stride)} dilation {times(self.dilation)} "
            f"input {times(self.input_dilation)}"
        )


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution, ready to be emitted; `channels` are those of one group. `product` is its contraction.

    `joined` says that a run holds all taps along the last axis. Arguments: `product.slots`, where a is x, m the output
    pixels of all images, n the outputs of one group, k taps times channels, a_row and a_k are 0 and 1, and batch 0
    counts groups: batch0_a is `channels`, batch0_out n; where groups are `beside` each other, as plan_beside says.
    """

    product: Contraction
    window: ConvWindow
    channels: int
    joined: bool
    fill: int = 0  # what x is in the padding
    beside: int = 0  # groups whose outputs vectors run along, side by side; 0: groups are a batch
    outputs: int = 0  # of one of those
    pixel: int = 0  # elements from a pixel of x to the next where that is known, of groups side by side
    line: tuple[int, ...] = ()  # tiles that every line is cut into, where they are uneven

    @property
    def run(self) -> int:
        """Values of one run."""
        return self.channels * (self.window.kernel[-1] if self.joined else 1)

    @property
    def zeros(self) -> int:
        """Values outside x that are read together, in whole registers."""
        least, whole = max(self.run, self.product.lanes if self.beside else 1), self.product.lanes
        return -(-least // whole) * whole

    @property
    def stack_bytes(self) -> int:
        copied = self.product.chunk_rows * self.product.a_runs * self.run if self.joined else 0
        return self.product.stack_bytes + (copied + self.zeros) * self.product.a.itemsize

    def __str__(self) -> str:
        filled = f" fill {self.fill}" if self.fill else ""
        kind = (
            " joined"
            if self.joined
            else f" beside {self.beside}*{self.outputs} pixel {self.pixel}"
            if self.beside
            else ""
        )
        kind += f" line {self.line}" if self.line else ""
        return f"{self.window} channels {self.channels}{kind}{filled}; {self.product}"


def plan_convolution(
    pixels: int,
    outputs: int,
    channels: int,
    window: ConvWindow,
    target: Target,
    *,
    dtype: DType = f32,
    weights: DType | None = None,
    out: DType | None = None,
    fill: int = 0,
    groups: int = 1,
    width: int | None = None,
    edges: tuple[int, int] | None = None,
    fewest: int | None = None,
    m_exact: bool = False,
    n_exact: bool = True,
    **ending: Unpack[EpilogueFields],
) -> Convolution:
    """`pixels` of the output, all images counted, or their upper bound; `outputs` and `channels` of one group.

    `width` is the output's last count where it is known: tiles that end with its rows leave out runs above and below.
    `edges` are the padding before that axis and its size in x where they are known: taps that are far apart are left
    out where tiles end with what they see.
    `fewest` pixels are to keep threads busy, too (all of them unless given). `m_exact` and `n_exact` say that there
    will be no other pixels and outputs.
    """
    spec = plan_contraction(
        pixels, outputs, window.taps * channels, target, a=dtype, b=weights, out=out, batch=groups, batch_rank=1,
        n_exact=n_exact, **ending,
    )  # fmt: skip
    spec = in_blocks(spec, channels, window)
    line = line_tiles(width, edges, window, spec.heights[0]) if width and edges and not fill and m_exact else ()
    if line:
        spec = replace(spec, heights=tuple(sorted(set(line), reverse=True)))
    elif width:
        height = next((h for h in range(spec.heights[0], spec.heights[0] // 2, -1) if width % h == 0), spec.heights[0])
        spec = replace(spec, heights=(height, *(h for h in spec.heights[1:] if h < height)))
    height = spec.heights[0]
    joined, runs = window.joins(channels, groups), window.runs(channels, groups)
    per_row = runs * (8 + (window.kernel[-1] * channels * dtype.itemsize if joined else 0))
    most = max(height, TABLE_BYTES // per_row // height * height)
    rows = -(-min(spec.chunk_rows, most) // height) * height
    if line:
        rows = max(1, rows // sum(line)) * sum(line)
    panels = panels_of_chunk(spec, pixels if fewest is None else min(fewest, pixels), outputs, rows, groups)
    spec = replace(
        spec, a_runs=runs, streams=(), chunk_rows=rows, chunk_panels=panels, load_numbers=window.numbers,
    )  # fmt: skip
    if m_exact and not line:
        spec = for_rows(spec, pixels)
    spec = with_ending(spec, window.taps * channels)
    return Convolution(spec, window, channels, joined, fill, line=line)


def in_blocks(spec: Contraction, channels: int, window: ConvWindow, *, beside: bool = False) -> Contraction:
    """With sums in the blocks of a convolution, whichever way it takes; `beside`: of narrow groups side by side."""
    blocks = ProductBlocks.of_convolution(channels, window.kernel, beside=beside) if spec.accumulator.is_float else None
    return replace(spec, blocks=blocks)


def line_tiles(width: int, edges: tuple[int, int], window: ConvWindow, tallest: int) -> tuple[int, ...]:
    """Tiles of a line that end where taps begin or cease to see x; none where even ones are as fast."""
    if width > LONGEST_CUT or window.dilation[-1] == 1 or window.input_dilation[-1] > 1:
        return ()
    low, size = edges

    def seen(x: int) -> frozenset[int]:
        at = x * window.stride[-1] - low
        return frozenset(t for t in range(window.kernel[-1]) if 0 <= at + t * window.dilation[-1] < size)

    def cost(tiles: tuple[int, ...]) -> int:
        total = begin = 0
        for height in tiles:
            total += max(height, FEW_ROWS) * len(frozenset().union(*map(seen, range(begin, begin + height))))
            begin += height
        return total

    ends = [x for x in range(1, width) if seen(x) != seen(x - 1)]
    cut: list[int] = []
    for begin, end in pairwise((0, *ends, width)):
        count = -(-(end - begin) // tallest)
        cut += [(i + 1) * (end - begin) // count - i * (end - begin) // count for i in range(count)]
    even = -(-width // tallest)
    plain = tuple((i + 1) * width // even - i * width // even for i in range(even))
    return tuple(cut) if cost(tuple(cut)) <= WORTH * cost(plain) else ()


def panels_of_chunk(spec: Contraction, pixels: int, outputs: int, rows: int, groups: int = 1) -> int:
    """All panels, since a chunk's table serves them all, unless pixels alone make too few chunks."""
    panels = max(1, -(-outputs // spec.panel_columns))
    row_blocks = max(1, -(-pixels // rows) * groups)
    return -(-panels // min(panels, -(-FEWEST_CHUNKS // row_blocks)))


def emit_convolution(
    module: IrModule, spec: Convolution, epilogue: Epilogue | None = None, name: str | None = None
) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"conv_{spec.product.name}"
    finish = emit_finish(module, spec.product, f"{name}_finish", epilogue)
    f = template(module, name)
    driver = ConvDriver(f, spec, finish, epilogue)
    each_point(f, lambda chunk, _: driver.chunk(chunk))
    return name


class ConvDriver(GemmDriver):
    """The driver of a contraction, with a table of addresses in place of A."""

    def __init__(self, f: IrFunction, spec: Convolution, finish: str, epilogue: Epilogue | None = None) -> None:
        super().__init__(f, spec.product, finish, epilogue)
        self.conv, self.window = spec, spec.window
        self.element = memory_type(spec.product.a)
        rows, runs = spec.product.chunk_rows, spec.product.a_runs
        self.table = f.alloca("ptr", rows * runs + AT_ONCE)
        self.copies = f.alloca(self.element, rows * runs * spec.run) if spec.joined else ""
        self.zeros = f.alloca(self.element, spec.zeros)
        type_ = vector(self.element, spec.product.lanes)
        f.fill(type_, self.zeros, spec.zeros, constant(type_, spec.fill))
        self.steps = self._steps()

    @property
    def a_stride(self) -> Value:
        return self.conv.run

    @property
    def run(self) -> int:
        return self.conv.run

    def _a_tile(self, chunk: Chunk, block: GemmBlock | None, row: Value) -> str:
        return self.f.address("ptr", self.table, self.f.mul(row, self.spec.a_runs))

    def _row_tiles(self, chunk: Chunk, body: Callable[[Value, Value], None], skipped: Value = 0) -> None:
        if not self.conv.line:
            super()._row_tiles(chunk, body, skipped)
            return

        def one(row: str, _: list[str]) -> None:
            before = 0
            for height in self.conv.line:
                body(self.f.add(row, before), height)
                before += height

        self.f.loop(0, chunk.rows, sum(self.conv.line), [], one)

    def _prepare(self, chunk: Chunk) -> None:
        self._row_tiles(chunk, lambda row, height: self._addresses_of_tile(chunk, row, height))

    def _steps(self) -> str:
        """Bytes in x from the first pixel of a tile to each, where no border is near; "" for other windows."""
        f, window = self.f, self.window
        if any(d > 1 for d in window.input_dilation) or self.spec.heights[0] > AT_ONCE:
            return ""
        type_ = vector("i64", AT_ONCE)
        step = f.mul(self.number[f"x{window.rank - 1}"], window.stride[-1] * self.spec.a.itemsize)
        return f.binary("mul", type_, f.splat(type_, step), vector_constant("i64", range(AT_ONCE)))

    def _addresses_of_tile(self, chunk: Chunk, row: Value, height: Value) -> None:
        table = self._a_tile(chunk, None, row)
        start = self._pixel(self.f.add(chunk.row, row))
        if not self.steps:
            self._each_address(chunk, table, row, height, start)
            return
        corners = self._corners(start[1:])
        self.f.if_(
            self._is_inside(start[1:], corners, height),
            lambda: self._plain_addresses(chunk, table, height, start[0], corners),
            lambda: self._each_address(chunk, table, row, height, start),
        )

    def _corners(self, position: list[Value]) -> list[Value]:
        """Where the window of an output pixel starts in x, padding counted."""
        f = self.f
        return [
            f.sub(f.mul(x, stride), self.number[f"low{axis}"])
            for axis, (x, stride) in enumerate(zip(position, self.window.stride, strict=True))
        ]

    def _is_inside(self, position: list[Value], corners: list[Value], height: Value) -> str:
        """Whether a tile is one line of pixels, all taps of which lie inside x."""
        f, window = self.f, self.window
        last = window.rank - 1
        result = f.compare("sle", "i64", f.add(position[-1], height), self.number[f"count{last}"])
        for axis, corner in enumerate(corners):
            reach: Value = (window.kernel[axis] - 1) * window.dilation[axis]
            if axis == last:
                reach = f.add(f.mul(f.sub(height, 1), window.stride[-1]), reach)
            low = f.compare("sge", "i64", corner, 0)
            high = f.compare("slt", "i64", f.add(corner, reach), self.number[f"size{axis}"])
            result = f.binary("and", "i1", result, f.binary("and", "i1", low, high))
        return result

    def _plain_addresses(self, chunk: Chunk, table: str, height: Value, image: Value, corners: list[Value]) -> None:
        """The table of a tile inside x, a vector of pixels at once; what is too much is overwritten by the next run."""
        f, window = self.f, self.window
        type_ = vector("i64", AT_ONCE)
        offset = f.mul(image, self.number["x_image"])
        for axis, corner in enumerate(corners):
            offset = f.add(offset, f.mul(corner, self.number[f"x{axis}"]))
        base = f.convert("ptrtoint", "ptr", f.address(self.element, chunk.a, offset), "i64")
        pixels = f.binary("add", type_, f.splat(type_, base), self.steps)
        size = self.spec.a.itemsize
        taps = [
            [f.mul(self.number[f"x{axis}"], tap * window.dilation[axis] * size) for tap in range(window.kernel[axis])]
            for axis in range(window.rank)
        ]
        kernel = window.kernel[:-1] if self.conv.joined else window.kernel
        for run, position in enumerate(cartesian(*map(range, kernel))):
            away: Value = 0
            for axis, tap in enumerate(position):
                away = f.add(away, taps[axis][tap])
            moved = f.binary("add", type_, pixels, f.splat(type_, away)) if run else pixels
            f.store(type_, moved, f.address("ptr", table, f.mul(run, height)), 8)

    def _each_address(self, chunk: Chunk, table: str, row: Value, height: Value, start: list[Value]) -> None:
        f, runs = self.f, self.spec.a_runs

        def one(i: str, carried: list[str]) -> list[Value]:
            found_before, at = carried[:runs], carried[runs:]
            addresses = self._addresses_of_pixel(chunk, f.add(row, i), at)
            for run, (_, address) in enumerate(addresses):
                f.store("ptr", address, f.address("ptr", table, f.add(f.mul(run, height), i)), 8)
            found = [f.binary("or", "i1", old, new) for old, (new, _) in zip(found_before, addresses, strict=True)]
            return [*found, *self._next_pixel(at)]

        found = f.loop(0, height, 1, [("i1", "false")] * runs + [("i64", at) for at in start], one)
        if self.conv.fill:
            return  # nothing is left out: what is outside counts
        for run, any_row in enumerate(found[:runs]):
            first = f.address("ptr", table, f.mul(run, height))
            f.store("ptr", f.select("ptr", any_row, f.load("ptr", first, 8), "null"), first, 8)

    def _addresses_of_pixel(self, chunk: Chunk, place: Value, pixel: list[str]) -> list[tuple[str, str]]:
        """(whether any of it lies inside x, address) of each run of one output pixel, the place-th of the chunk."""
        f = self.f
        image, *position_of_pixel = pixel
        corners = self._corners(list(position_of_pixel))
        base = f.address(self.element, chunk.a, f.mul(image, self.number["x_image"]))
        offsets = [self._axis_offsets(axis, corner) for axis, corner in enumerate(corners)]
        if self.conv.joined:
            last, offsets = offsets[-1], offsets[:-1]
        result = []
        for run, (inside, offset) in enumerate(self._places(offsets)):
            address = f.address(self.element, base, offset)
            if self.conv.joined:
                number = f.add(f.mul(place, self.spec.a_runs), run)
                copy = f.address(self.element, self.copies, f.mul(number, self.conv.run))
                address = self._joined(inside, address, last, copy)
            result.append((inside, f.select("ptr", inside, address, self.zeros)))
        return result

    def _places(self, offsets: list[list[tuple[str, Value]]]) -> Iterator[tuple[str, Value]]:
        """(inside, offset in x) of the taps along some axes, given those along each."""
        for taps in cartesian(*offsets):
            inside = "true"
            offset: Value = 0
            for is_in, part in taps:
                inside, offset = self.f.both(inside, is_in), self.f.add(offset, part)
            yield inside, offset

    def _joined(self, inside: str, line: str, taps: list[tuple[str, Value]], copy: str) -> str:
        """The address of all taps along the last axis: in place, or copied where some are outside."""
        f, channels, size = self.f, self.conv.channels, self.spec.a.itemsize
        whole = f.binary("and", "i1", taps[0][0], taps[-1][0])
        in_place = f.address(self.element, line, taps[0][1])

        def copied() -> list[Value]:
            for tap, (is_in, offset) in enumerate(taps):
                source = f.select("ptr", is_in, f.address(self.element, line, offset), self.zeros)

                def one(i: str, _: list[str], tap: int = tap, source: str = source) -> None:
                    value = f.load(self.element, f.address(self.element, source, i), size)
                    f.store(self.element, value, f.address(self.element, copy, f.add(tap * channels, i)), size)

                f.loop(0, channels, 1, [], one)
            return [copy]

        crosses = f.binary("and", "i1", inside, f.binary("xor", "i1", whole, "true"))
        return f.if_(crosses, copied, lambda: [in_place], types=["ptr"])[0]

    def _pixel(self, flat: Value) -> list[Value]:
        """Image and position in every axis of an output pixel, given by its number."""
        return self.f.digits(flat, [self.number[f"count{axis}"] for axis in range(self.window.rank)])

    def _next_pixel(self, pixel: list[str]) -> list[Value]:
        f = self.f
        image, *at = pixel
        result: list[Value] = []
        carry = "true"
        for axis in reversed(range(self.window.rank)):
            following = f.add(at[axis], f.convert("zext", "i1", carry, "i64"))
            carry = f.compare("eq", "i64", following, self.number[f"count{axis}"])
            result.insert(0, f.select("i64", carry, 0, following))
        return [f.add(image, f.convert("zext", "i1", carry, "i64")), *result]

    def _axis_offsets(self, axis: int, corner: Value) -> list[tuple[str, Value]]:
        """(inside, offset in x) of each tap along an axis."""
        f, spread = self.f, self.window.input_dilation[axis]
        result: list[tuple[str, Value]] = []
        for tap in range(self.window.kernel[axis]):
            at = index = f.add(corner, tap * self.window.dilation[axis])
            if spread > 1:
                index = f.op(f"sdiv i64 {at}, {spread}")
                exact = f.compare("eq", "i64", f.mul(index, spread), at)
                inside = f.binary("and", "i1", exact, f.compare("ult", "i64", index, self.number[f"size{axis}"]))
            else:
                inside = f.compare("ult", "i64", at, self.number[f"size{axis}"])
            result.append((inside, f.mul(index, self.number[f"x{axis}"])))
        return result
