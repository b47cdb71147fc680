"""Direct convolution of few channels, channels first (NCHW): vectors run along the pixels of a long row.

    x[image, channel, *sizes]   weights[output, tap, channel]   out[image, output, *counts]

A chunk is a block of neighbouring lines of the output. The lines of x that it sees are laid out once, with zeros where
there is padding: of a stride of two, first the even elements, then the odd ones, so that neighbouring pixels see
neighbouring elements through every tap. A tile is some outputs of a few vectors of pixels: its sums stay in registers
over all taps and channels, and go through the epilogue to the output from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product as cartesian
from math import prod
from typing import Final, Unpack

from strata.backends.llvm.conv.lines import every, lanes_inside
from strata.backends.llvm.conv.nchw import PlaneDriver
from strata.backends.llvm.conv.table import ConvWindow, in_blocks
from strata.backends.llvm.gemm.arith import multiply_add
from strata.backends.llvm.gemm.epilogue import Epilogue, Site, emit_finish, put_sums
from strata.backends.llvm.gemm.micro import TileSet
from strata.backends.llvm.gemm.planning import SHORT_EPILOGUE, plan_contraction, with_even_tiles
from strata.backends.llvm.gemm.spec import Contraction, EpilogueFields
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import each_point, template
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, f32
from strata.kernel import PRODUCTS

BUFFER: Final = 80 << 10  # bytes of the lines of a chunk, on the stack
NEAR: Final = 20 << 10  # bytes of them that all outputs see before others are needed: they stay in the nearest cache
MOST_LINES: Final = 8  # of a chunk
MOST_COLUMNS: Final = 2048
FEWEST_CHUNKS: Final = 16
IDLE: Final = 1.05  # lanes of a line that may be counted for each pixel
LINE: Final = 64  # bytes of a cache line
MOST_UNROLLED: Final = 32  # taps of a line times channels that are written out


@dataclass(frozen=True, slots=True)
class Lines:
    """A convolution, ready to be emitted. A chunk is `lines` by `columns` pixels of one plane.

    Arguments: `product.slots`, where a is x, b the weights, m the outputs of all images, n the pixels of a plane.
    """

    product: Contraction
    window: ConvWindow
    channels: int
    outputs: int
    lines: int
    columns: int
    tiles: tuple[int, ...]  # vectors of pixels that a tile may have
    short: int = 0  # lanes of the vector that a line may end in, a tile by itself; 0: it is a whole one

    @property
    def k(self) -> int:
        """Products of one sum."""
        return self.channels * self.window.taps

    @property
    def above(self) -> int:
        """Planes of x that a plane of the output sees."""
        return self.channels * prod(self.window.kernel[:-2])

    @property
    def rows(self) -> int:
        """Lines of each such plane that a chunk sees."""
        return (self.lines - 1) * self.window.stride[-2] + (self.window.kernel[-2] - 1) * self.window.dilation[-2] + 1

    @property
    def phases(self) -> tuple[int, ...]:
        """Which elements of as many as a step is long are seen."""
        window = self.window
        return tuple(sorted({t * window.dilation[-1] % window.stride[-1] for t in range(window.kernel[-1])}))

    @property
    def reach(self) -> int:
        """Elements of a phase that the last pixel sees after its own."""
        return (self.window.kernel[-1] - 1) * self.window.dilation[-1] // self.window.stride[-1]

    @property
    def pitch(self) -> int:
        """Elements from a phase to the next: an odd number of cache lines, so that they lie in different sets."""
        width = max(self.product.lanes, LINE // 4)
        return (-(-(self.columns + self.reach) // width) | 1) * width

    @property
    def line(self) -> int:
        """Elements from a line to the next."""
        return self.pitch * len(self.phases)

    def place(self, tap: int) -> int:
        """Where in a line the first pixel sees an element through a tap along it."""
        away, stride = tap * self.window.dilation[-1], self.window.stride[-1]
        return self.phases.index(away % stride) * self.pitch + away // stride

    @property
    def together(self) -> int:
        """Columns that are worked on before the next are: parts of a line that are nearly even."""
        lanes, tile = self.product.lanes, self.product.panel_columns
        most = max(1, NEAR // (self.above * self.window.kernel[-2] * len(self.phases) * 4 * tile)) * tile
        parts = -(-self.columns // most)
        return -(-self.columns // (parts * lanes)) * lanes

    @property
    def spare(self) -> int:
        """Lanes that the last vector of a line may leave idle."""
        return self.product.lanes - 1 - self.short

    @property
    def is_short(self) -> bool:
        """The epilogue is written out for every vector of a tile."""
        return len(self.product.epilogue) <= SHORT_EPILOGUE

    @property
    def stack_bytes(self) -> int:
        waiting = 0 if self.is_short else self.product.heights[0] * self.product.panel_columns
        return (self.above * self.rows * self.line + waiting) * 4 + 1024

    def __str__(self) -> str:
        chunk = f"chunk {self.lines} lines {self.columns} columns tiles {self.tiles}"
        return f"channels first {self.window} channels {self.channels} {chunk}; {self.product}"


def plan_lines(
    images: int,
    outputs: int,
    channels: int,
    counts: tuple[int, ...],
    window: ConvWindow,
    target: Target,
    *,
    width_exact: bool = False,
    out: DType = f32,
    **ending: Unpack[EpilogueFields],
) -> Lines | None:
    """For counts, or for their upper bounds; None where lines would leave lanes idle.

    `width_exact` says that lines will have no other length: one may then end in half a vector."""
    *front, height, width = counts
    spec = plan_contraction(outputs, prod(counts), channels * window.taps, target, out=out, **ending)
    spec = in_blocks(spec, channels, window)
    lanes = spec.lanes
    unit = lanes // 2 if width_exact and target.splits_vectors else lanes
    if any(d > 1 for d in window.input_dilation) or channels > PRODUCTS:
        return None
    if window.rank == 2 and -(-width // unit) * unit > IDLE * width:  # volumes have no other way
        return None
    spec = replace(with_even_tiles(spec, outputs), streams=(), prefetch=0, load_numbers=(*window.numbers, "x_channel"))
    made = Lines(spec, window, channels, outputs, 1, 0, tuple(range(1, spec.vectors + 1)))
    others = images * prod(front)
    fewest = max(-(-width // MOST_COLUMNS), min(-(-FEWEST_CHUNKS // max(1, others * height)), width // (8 * lanes)), 1)
    for blocks in range(fewest, max(fewest, -(-width // lanes)) + 1):
        made = replace(made, columns=-(-width // (blocks * lanes)) * lanes)
        if made.stack_bytes <= BUFFER:
            break
    else:
        return None
    most = min(MOST_LINES, max(1, others * height * blocks // FEWEST_CHUNKS))
    taller = [replace(made, lines=-(-height // -(-height // n))) for n in range(1, most + 1)]
    made = [m for m in taller if m.stack_bytes <= BUFFER or m.lines == 1][-1]
    if not width_exact:
        return made
    made = replace(made, short=unit if 0 < width % lanes <= unit < lanes else 0)
    return replace(made, tiles=_tiles(width, made))


def _tiles(width: int, spec: Lines) -> tuple[int, ...]:
    """Vectors of the tiles that lines of a width are cut into."""
    found, lanes = set(), spec.product.lanes
    for columns in {min(width, spec.columns), width % spec.columns}:
        for piece in {min(columns, spec.together), columns % spec.together}:
            vectors = (piece + spec.spare) // lanes
            count = -(-vectors // spec.product.vectors)
            found |= {(i + 1) * vectors // count - i * vectors // count for i in range(count)}
    return tuple(sorted(found))


def emit_lines(module: IrModule, spec: Lines, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"lines_{spec.product.name}"
    f = template(module, name)
    driver = _Lines(f, spec, name, epilogue)
    each_point(f, lambda chunk, _: driver.chunk(chunk))
    return name


class _Lines(PlaneDriver):
    """The loops around the tiles."""

    def __init__(self, f: IrFunction, spec: Lines, name: str, epilogue: Epilogue | None) -> None:
        super().__init__(f, spec.product, spec.window)
        self.spec, self.name, self.epilogue = spec, name, epilogue
        self.rank = spec.window.rank
        self.lines = f.alloca("float", spec.above * spec.rows * spec.line)
        self.waiting, self.finish = "", ""
        if not spec.is_short:
            self.waiting = f.alloca("float", spec.product.heights[0] * spec.product.panel_columns)
            self.finish = emit_finish(f.module, spec.product, f"{name}_finish", epilogue)
        self.tile_set = TileSet(spec.product.heights, spec.product.vectors)

    def chunk(self, index: str) -> None:
        f, number, spec = self.f, self.number, self.spec
        down, along = self.rank - 2, self.rank - 1
        rest, block = f.divided(index, self.ceil(number[f"count{along}"], spec.columns))
        left = f.mul(block, spec.columns)
        rest, block = f.divided(rest, self.ceil(number[f"count{down}"], spec.lines))
        top = f.mul(block, spec.lines)
        position: list[Value] = []
        plane: Value = 0
        for axis in reversed(range(down)):
            rest, at = f.divided(rest, number[f"count{axis}"])
            position.insert(0, at)
        for axis, at in enumerate(position):
            plane = f.add(f.mul(plane, number[f"count{axis}"]), at)
        image: Value = rest
        columns = f.smin(f.sub(number[f"count{along}"], left), spec.columns)
        lines = f.smin(f.sub(number[f"count{down}"], top), spec.lines)
        self._lay_out(image, position, top, left, lines, columns)
        first = f.mul(image, spec.outputs)

        def line(i: str, _: list[str]) -> None:
            seen = f.address("float", self.lines, f.mul(i, spec.window.stride[-2] * spec.line))
            y = f.add(f.mul(plane, number[f"count{down}"]), f.add(top, i))
            pixel = f.add(f.mul(y, number[f"count{along}"]), left)
            f.loop(
                0, columns, spec.together, [],
                lambda at, _: self._multiply(
                    f.address("float", seen, at), first, f.add(pixel, at), f.smin(f.sub(columns, at), spec.together)
                ),
            )  # fmt: skip

        f.loop(0, lines, 1, [], line)

    # the lines of x

    def _lay_out(
        self, image: Value, position: list[Value], top: Value, left: Value, lines: Value, columns: Value
    ) -> None:  # fmt: skip
        """All that a chunk sees, in phases."""
        f, number, spec, window = self.f, self.number, self.spec, self.window
        down, along = self.rank - 2, self.rank - 1
        x = f.address("float", self.x, f.mul(image, number["x_image"]))
        start = f.sub(f.mul(left, window.stride[-1]), number[f"low{along}"])
        above = f.sub(f.mul(top, window.stride[-2]), number[f"low{down}"])
        reach = (window.kernel[-2] - 1) * window.dilation[-2] + 1
        rows = f.add(f.mul(f.sub(lines, 1), window.stride[-2]), reach)
        taps = list(cartesian(*map(range, window.kernel[:-2])))

        def vectors(at: str, _: list[str]) -> None:
            begin = f.add(start, f.mul(at, window.stride[-1]))
            parts = [part * self.lanes for part in range(window.stride[-1])]
            masks = [lanes_inside(f, self.lanes, f.add(begin, part), number[f"size{along}"]) for part in parts]

            def channel(c: str, _: list[str]) -> None:
                for tap, where in enumerate(taps):
                    source = f.add(f.mul(c, number["x_channel"]), begin)
                    is_in = "true"
                    for axis, t in enumerate(where):
                        z = f.sub(
                            f.add(f.mul(position[axis], window.stride[axis]), t * window.dilation[axis]),
                            number[f"low{axis}"],
                        )
                        is_in = f.both(is_in, f.compare("ult", "i64", z, number[f"size{axis}"]))
                        source = f.add(source, f.mul(z, number[f"x{axis}"]))
                    to = f.mul(f.add(f.mul(c, len(taps)), tap), spec.rows * spec.line)
                    planes(source, is_in, f.address("float", self.lines, f.add(to, at)))

            def planes(source: Value, is_in: str, to: str) -> None:
                def row(r: str, _: list[str]) -> None:
                    y = f.add(above, r)
                    found = f.both(is_in, f.compare("ult", "i64", y, number[f"size{down}"]))
                    place = f.address("float", x, f.add(source, f.mul(y, number[f"x{down}"])))
                    values = f.if_(
                        found,
                        lambda: self._phases(place, parts, masks),
                        lambda: [constant(self.type, 0)] * len(spec.phases),
                        types=[self.type] * len(spec.phases),
                    )
                    line = f.address("float", to, f.mul(r, spec.line))
                    for phase, value in enumerate(values):
                        f.store(self.type, value, f.address("float", line, phase * spec.pitch), 4)

                f.loop(0, rows, 1, [], row)

            f.loop(0, spec.channels, 1, [], channel)

        f.loop(0, f.add(columns, spec.reach), self.lanes, [], vectors)

    def _phases(self, place: str, parts: list[int], masks: list[str]) -> list[Value]:
        f = self.f
        found = [
            f.load(self.type, f.address("float", place, part), 4, mask) for part, mask in zip(parts, masks, strict=True)
        ]
        return [every(f, self.type, found, phase) for phase in self.spec.phases]

    # products

    def _multiply(self, seen: str, first: Value, pixel: Value, columns: Value) -> None:
        """All outputs of some neighbouring pixels: tiles as even as their number allows."""
        f, spec, product = self.f, self.spec, self.product
        vectors = f.op(f"udiv i64 {f.add(columns, spec.spare)}, {self.lanes}")
        count = self.ceil(vectors, product.vectors)

        def outputs(row: Value, height: Value) -> None:
            weights = f.address("float", self.weights, f.mul(row, spec.k))
            left = f.sub(spec.outputs, row)

            def work(tiles: list[Value], at: Value, length: Value) -> None:
                function = self.tile_set.by_height(f, left, "ptr", tiles)
                out_row, column = f.add(first, row), f.add(pixel, at)
                f.call_address(
                    "void", function, ("ptr", "%args"), ("ptr", weights), ("ptr", f.address("float", seen, at)),
                    ("ptr", self.waiting or "null"), ("i64", out_row), ("i64", column), ("i64", length),
                )  # fmt: skip
                if not spec.is_short:
                    numbers = (product.panel_columns, out_row, column, height, length)
                    f.call("void", self.finish, ("ptr", "%args"), ("ptr", self.waiting), *(("i64", n) for n in numbers))

            def tile(i: str, carried: list[str]) -> list[Value]:
                begin = carried[0]
                end = f.op(f"udiv i64 {f.mul(f.add(i, 1), vectors)}, {count}")
                wide = f.sub(end, begin)
                at = f.mul(begin, self.lanes)
                tiles = [self._by_vectors(each, wide) for each in product.heights]
                work(tiles, at, f.smin(f.sub(columns, at), f.mul(wide, self.lanes)))
                return [end]

            if spec.tiles:
                f.loop(0, count, 1, [("i64", 0)], tile)
            if spec.short:
                done = f.mul(vectors, self.lanes)
                tiles: list[Value] = ["@" + self._tile(each, 1, spec.short) for each in product.heights]
                is_left = f.compare("sgt", "i64", columns, done)
                f.if_(is_left, lambda: work(tiles, done, f.sub(columns, done)))

        self.tile_set.over_rows(f, spec.outputs, outputs)

    def _by_vectors(self, height: int, vectors: Value) -> Value:
        *others, last = self.spec.tiles
        result: Value = "@" + self._tile(height, last, self.lanes)
        for count in others:
            name = "@" + self._tile(height, count, self.lanes)
            result = self.f.select("ptr", self.f.compare("eq", "i64", vectors, count), name, result)
        return result

    def _tile(self, height: int, vectors: int, lanes: int) -> str:
        """The function for this many outputs of this many vectors of pixels."""
        name = f"{self.name}_{height}x{lanes}*{vectors}".replace("*", "_")
        if self.f.module.has(name):
            return name
        parameters = [
            ("ptr noalias", "args"), ("ptr noalias", "weights"), ("ptr noalias", "seen"), ("ptr noalias", "waiting"),
            ("i64", "row"), ("i64", "column"), ("i64", "columns"),
        ]  # fmt: skip
        f = self.f.module.outlined(name, parameters)
        sums = self._sums(f, height, vectors, lanes)
        rows = [sums[i * vectors : (i + 1) * vectors] for i in range(height)]
        if self.spec.is_short:
            put_sums(
                Site(f, self.product, "%args", "%row", "%column", (), lanes, None), rows, self.epilogue, "%columns"
            )
        else:
            for i, row in enumerate(rows):
                for j, value in enumerate(row):
                    place = f.address("float", "%waiting", i * self.product.panel_columns + j * lanes)
                    f.store(memory_type(f32, lanes), value, place, 4)
        f.ret()
        return name

    def _sums(self, f: IrFunction, height: int, vectors: int, lanes: int) -> list[str]:
        spec, window = self.spec, self.window
        channels, down, taps = spec.channels, window.kernel[-2], window.kernel[-1]
        front, plane, type_ = prod(window.kernel[:-2]), spec.rows * spec.line, memory_type(f32, lanes)

        def products(seen: str, weights: str, sums: list[str]) -> list[str]:
            b = [f.load(type_, f.address("float", seen, j * lanes), 4) for j in range(vectors)]
            for i in range(height):
                a = f.splat(type_, f.load("float", f.address("float", weights, i * spec.k), 4))
                for j in range(vectors):
                    at = i * vectors + j
                    sums[at] = multiply_add(f, type_, a, b[j], sums[at], spec.product.target)
            return sums

        blocks = spec.product.blocks
        places = f.alloca(type_, height * vectors) if blocks is not None else ""

        def zeros() -> list[str]:
            return [constant(type_, 0)] * (height * vectors)

        def joined(is_first: Value, sums: list[str]) -> list[str]:
            """The sums of a block, with those of the blocks before it."""

            def added() -> list[Value]:
                olds = [f.load(type_, f.address("float", places, i * lanes), 4) for i in range(len(sums))]
                return [f.binary("fadd", type_, old, new) for old, new in zip(olds, sums, strict=True)]

            return f.if_(is_first, lambda: list(sums), added, types=[type_] * len(sums))

        def keep(sums: list[str]) -> None:
            for i, value in enumerate(sums):
                f.store(type_, value, f.address("float", places, i * lanes), 4)

        def line(number: str, carried: list[str]) -> list[Value]:
            """The taps along a line, and the channels of each."""
            before: Value = f.op(f"udiv i64 {number}, {down}") if front > 1 else 0
            t = f.sub(number, f.mul(before, down))
            offset = f.add(f.mul(before, plane), f.mul(t, window.dilation[-2] * spec.line))
            line_seen = f.address("float", "%seen", offset)
            line_weights = f.address("float", "%weights", f.mul(number, taps * channels))
            sums = list(carried)
            for tap in range(taps):
                if blocks is not None and blocks.run and blocks.begins(tap * channels):
                    if tap:
                        keep(joined(f.compare("eq", "i64", number, 0) if tap == first_end else "false", sums))
                    sums = zeros()
                seen = f.address("float", line_seen, spec.place(tap))
                weights = f.address("float", line_weights, tap * channels)

                def channel(c: Value, sums: list[str], seen: str = seen, weights: str = weights) -> list[Value]:
                    place = f.address("float", seen, f.mul(c, front * plane))
                    return [*products(place, f.address("float", weights, c), list(sums))]

                if channels == 1 or channels * taps <= MOST_UNROLLED:
                    for c in range(channels):
                        sums = [str(s) for s in channel(c, sums)]
                else:
                    sums = f.loop(0, channels, 1, [(type_, s) for s in sums], channel)
            return [*sums]

        lines = front * down

        def some(begin: Value, end: Value) -> list[str]:
            return f.loop(begin, end, 1, [(type_, zero) for zero in zeros()], line)

        if blocks is None:
            return some(0, lines)
        first_end = blocks.terms // channels  # of the first block of taps along a line
        together = 1 if blocks.run else blocks.terms // (taps * channels)  # lines of a block
        last = (lines - 1) // together * together

        def is_first(begin: Value) -> str:
            return "false" if blocks.run else f.compare("eq", "i64", begin, 0)

        f.loop(
            0, last, together, [], lambda at, _: keep(joined(is_first(at), some(at, f.add(at, together))))
        )  # fmt: skip
        return joined(is_first(last), some(last, lines))
