"""The weight gradient of a convolution with channels last: a matmul that sums over pixels.

    w[tap, c, o] = Σ over pixels of x[pixel at tap, c] · dy[pixel, o]

Pixels of all images are k. A block of them at a time, dy is packed into panels of outputs; then, tap by tap, a tile of
channels is packed beside its pixels, zeros where the tap is outside x, and multiplied with every panel by the register
micro-kernels of all products. With few channels, the taps along the last axis lie side by side in x, and are one run of
rows. Depth-wise, vectors run along channels and nothing is packed.

Pixels are split by their number alone into parts with separate sums, which a last pass adds up in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from strata.backends.llvm.conv.gradient_depthwise import emit_depthwise_sums
from strata.backends.llvm.conv.gradient_pixels import PixelGeometry
from strata.backends.llvm.gemm.arith import GemmArithmetic, convert
from strata.backends.llvm.gemm.micro import Micro, RegisterTile, call_micro
from strata.backends.llvm.gemm.pack_b import Panels, pack_panel
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.native import each_point, fill_zero, kernel, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, TensorType, bf16, f16, f32, f64
from strata.mir import Node, Op

FEWEST_POINTS = 16
PIXELS = 256  # of a block: a tile of channels beside them stays in the first-level cache
PANEL_BYTES = 256 << 10  # of a block's panels of dy
PARTS_BYTES = 4 << 20  # of all parts' sums
LEAST_ROWS = 64  # of a point: below, packing dy again costs more than it spreads
SHORT_RUN = 16  # channels below which the taps along the last axis are joined
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class _PackedLine:
    """Neighbouring pixels of a line, and the tile that they are packed into."""

    inside: str  # whether x has the line that they see
    source: str  # where that line of x begins
    first: Value  # the first pixel's place in its line
    length: Value
    to: str
    height: int  # values of a pixel in the tile


@dataclass(frozen=True)
class Gradient:
    """What decides the code."""

    dtype: DType
    geometry: PixelGeometry
    groups: int
    channels: int  # of one group
    outputs: int  # of one group
    target: Target

    @property
    def accumulator(self) -> DType:
        return self.dtype.accumulator

    @property
    def arithmetic(self) -> GemmArithmetic:
        return GemmArithmetic(self.accumulator, self.accumulator, self.accumulator, self.target)

    @property
    def is_depthwise(self) -> bool:
        return self.channels == self.outputs == 1 and self.groups > 1

    @property
    def joined(self) -> bool:
        g = self.geometry
        return self.groups == 1 and self.channels < SHORT_RUN and g.kernel[-1] > 1 and g.dilation[-1] == 1

    @property
    def run(self) -> int:
        """Rows that lie side by side in x."""
        return self.channels * (self.geometry.kernel[-1] if self.joined else 1)

    @property
    def runs(self) -> int:
        kernel = self.geometry.kernel
        return prod(kernel[:-1]) if self.joined else prod(kernel)

    @property
    def rows(self) -> int:
        return self.channels * prod(self.geometry.kernel)

    @property
    def columns(self) -> int:
        """Columns of the parts' sums."""
        return self.groups if self.is_depthwise else self.outputs

    @property
    def padded(self) -> int:
        lanes = self.arithmetic.lanes
        return -(-self.columns // lanes) * lanes

    @property
    def vectors(self) -> int:
        """Of a panel: as many as leave no narrower one behind, if that can be."""
        most = 3 if self.target.vector_registers >= 32 else 2
        count = self.padded // self.arithmetic.lanes
        return next((v for v in range(most, 1, -1) if count % v == 0), min(most, count))

    @property
    def height(self) -> int:
        """Rows of a tile: as many as registers hold, in tiles of one height where that can be."""
        most = max(1, min(16, (24 if self.target.vector_registers >= 32 else 12) // self.vectors))
        whole = next((h for h in range(most, most // 2, -1) if self.run % h == 0), None)
        return whole or -(-self.run // -(-self.run // most))

    @property
    def tiles(self) -> int:
        """Of a run."""
        return -(-self.run // self.height)

    @property
    def panels(self) -> Panels:
        return Panels(self.dtype, self.accumulator, self.arithmetic.lanes, self.vectors, 1, self.target)

    @property
    def block(self) -> int:
        fits = PANEL_BYTES // (self.padded * self.accumulator.itemsize) // 8 * 8
        return max(32, min(PIXELS, fits))

    @property
    def key(self) -> str:
        parts = (self.dtype, self.geometry, self.groups, self.channels, self.outputs)
        return f"conv weight gradient {' '.join(map(str, parts))}"

    # code

    def emit(self, module: IrModule) -> None:
        if self.is_depthwise:
            emit_depthwise_sums(module, self.dtype, self.geometry, self.groups, self.target)
        else:
            self._emit_sums(module)
        self._emit_finish(module)

    def _emit_sums(self, module: IrModule) -> None:
        """Sums of the units (run, tile) from `first` on, of one part of the pixels, of one group."""
        f = kernel(module, "sums")
        pixels = self.geometry.arguments(f)
        parts, per_part, per_point, panel_bytes = (pixels.number(n) for n in ("parts", "per_part", "units", "panels"))
        element, item = memory_type(self.accumulator), self.accumulator.itemsize
        tile = f.alloca(element, self.block * self.height)
        all_units = self.runs * self.tiles
        points = f.op(f"udiv i64 {f.add(per_point, all_units - 1)}, {per_point}")
        panels = self.panels
        heights = sorted({self.height, self.run - (self.tiles - 1) * self.height}, reverse=True)
        packers = {h: self._emit_pack(module, h) for h in heights}

        def point(at: str, _: list[str]) -> None:
            rest, part = f.op(f"udiv i64 {at}, {parts}"), f.op(f"urem i64 {at}, {parts}")
            group, some = f.op(f"udiv i64 {rest}, {points}"), f.op(f"urem i64 {rest}, {points}")
            begin = f.mul(part, per_part)
            end = f.smin(f.add(begin, per_part), pixels.count)
            first_unit = f.mul(some, per_point)
            last_unit = f.smin(f.add(first_unit, per_point), all_units)
            packed = f.address("i8", pixels.pointer("packed"), f.mul(at, panel_bytes))
            x = f.address(memory_type(self.dtype), pixels.pointer("x"), f.mul(group, self.channels))
            dy = f.address(memory_type(self.dtype), pixels.pointer("dy"), f.mul(group, self.outputs))
            index = f.add(f.mul(part, self.groups), group)
            sums = f.address(element, pixels.pointer("sums"), f.mul(index, self.rows * self.padded))

            def block(start: str, _: list[str]) -> None:
                length = f.smin(f.sub(end, start), self.block)
                resume = f.sub(start, begin)
                width = self.groups * self.outputs
                origin = f.address(memory_type(self.dtype), dy, f.mul(start, width))

                def pack(column: str, _: list[str]) -> None:
                    base = f.address("i8", packed, f.mul(f.mul(column, length), item))
                    pack_panel(f, panels, origin, base, column, self.outputs, length, width, 1)

                f.loop(0, self.outputs, panels.columns, [], pack)
                place = pixels.decode(start)

                def unit(u: str, _: list[str]) -> None:
                    run, which = f.op(f"udiv i64 {u}, {self.tiles}"), f.op(f"urem i64 {u}, {self.tiles}")
                    channel = f.mul(which, self.height)
                    source = f.address(memory_type(self.dtype), x, 0 if self.joined else channel)
                    row = f.add(f.mul(run, self.run), channel)
                    to = f.address(element, sums, f.mul(row, self.padded))

                    def products(height: int) -> None:
                        given = (("ptr", "%arguments"), ("ptr", source), ("ptr", tile), ("i64", length), ("i64", run))
                        extra = [("i64", channel)] if self.joined else []
                        f.call("void", packers[height], *given, *extra, *(("i64", p) for p in place))
                        self._products(f, height, tile, packed, length, to, resume)

                    if len(heights) == 1:
                        products(self.height)
                    else:
                        last = f.compare("eq", "i64", which, self.tiles - 1)
                        f.if_(last, lambda: products(heights[1]), lambda: products(heights[0]))

                f.loop(first_unit, last_unit, 1, [], unit)

            f.loop(begin, end, self.block, [], block)

        each_point(f, point)

    def _products(
        self, f: IrFunction, height: int, tile: str, packed: str, length: Value, to: str, resume: Value
    ) -> None:
        """A packed tile times all panels."""
        element, columns = memory_type(self.accumulator), self.panels.columns
        whole = self.outputs // columns * columns

        def panel(column: Value, vectors: int) -> None:
            micro = "@" + Micro(self.arithmetic, RegisterTile(height, vectors), "packed").emit(f.module)
            b = f.address(element, packed, f.mul(column, length))
            call_micro(f, micro, tile, 0, b, 0, f.address(element, to, column), self.padded, length, resume)

        f.loop(0, whole, columns, [], lambda column, _: panel(column, self.vectors))
        if whole < self.outputs:
            panel(whole, -(-(self.outputs - whole) // self.arithmetic.lanes))

    def _emit_pack(self, module: IrModule, height: int) -> str:
        """Packs a tile: [pixel][row] of a block of pixels at one tap, or at all taps along the last axis."""
        name = f"pack_{height}"
        parameters = [("ptr", "arguments"), ("ptr noalias", "x"), ("ptr noalias", "packed"), ("i64", "length"),
                      ("i64", "run")]  # fmt: skip
        parameters += [("i64", "channel")] if self.joined else []
        at = ["image", *(f"at{axis}" for axis in range(self.geometry.rank))]
        f = module.outlined(name, [*parameters, *(("i64", a) for a in at)])
        pixels = self.geometry.arguments(f)
        axes = self.geometry.rank - 1 if self.joined else self.geometry.rank
        taps = self.geometry.taps(f, "%run", axes)

        def line(position: Value, image: Value, place: list[Value], length: Value) -> None:
            to = f.address(memory_type(self.accumulator), "%packed", f.mul(position, height))
            inside, source = pixels.line_of_x(image, place[:-1], taps)
            source = f.address(memory_type(self.dtype), "%x", f.mul(source, self.groups * self.channels))
            packed = _PackedLine(inside, source, place[-1], length, to, height)
            if self.joined:
                self._put_run(pixels, packed)
            else:
                self._put(pixels, packed, taps[-1])

        pixels.lines("%length", [f"%{a}" for a in at], line)
        f.ret()
        return name

    def _move(self, f: IrFunction, source: str | None, to: str, count: int) -> None:
        """Elements side by side, or zeros."""
        kept, item = memory_type(self.accumulator, count), self.accumulator.itemsize
        zero = "zeroinitializer" if count > 1 else "0.0"
        if source is not None:
            loaded = f.load(memory_type(self.dtype, count), source, self.dtype.itemsize)
            loaded = convert(f, loaded, self.dtype, self.accumulator, count, self.target)
        f.store(kept, zero if source is None else loaded, to, item)

    def _cell(self, f: IrFunction, line: _PackedLine, i: Value) -> str:
        """Where the values of a pixel of the line go."""
        return f.address(memory_type(self.accumulator), line.to, f.mul(i, line.height))

    def _put(self, pixels: Any, line: _PackedLine, tap: Value) -> None:
        """The pixels of a line at one tap."""
        f, g = pixels.f, self.geometry
        width = self.groups * self.channels
        low, high = pixels.valid(tap, line.first, line.length)
        low, high = (f.select("i64", line.inside, v, 0) for v in (low, high))
        offset = pixels.offset(tap)

        def zeros(begin: Value, end: Value) -> None:
            def one(i: str, _: list[str]) -> None:
                self._move(f, None, self._cell(f, line, i), line.height)

            f.loop(begin, end, 1, [], one)

        def one(i: str, _: list[str]) -> None:
            at = f.add(f.mul(f.add(line.first, i), g.stride[-1]), offset)
            place = f.address(memory_type(self.dtype), line.source, f.mul(at, width))
            self._move(f, place, self._cell(f, line, i), line.height)

        zeros(0, low)
        f.loop(low, high, 1, [], one)
        zeros(high, line.length)

    def _put_run(self, pixels: Any, line: _PackedLine) -> None:
        """The pixels of a line at all taps along the last axis; those near the border value by value."""
        f, g = pixels.f, self.geometry
        size = f.mul(pixels.number(f"size{g.rank - 1}"), self.channels)
        offset = f.add(f.mul(pixels.offset(0), self.channels), "%channel")

        def one(i: str, _: list[str]) -> None:
            at = f.add(f.mul(f.add(line.first, i), g.stride[-1] * self.channels), offset)
            place = self._cell(f, line, i)
            low = f.compare("sge", "i64", at, 0)
            high = f.compare("sle", "i64", f.add(at, line.height), size)
            whole = f.binary("and", "i1", line.inside, f.binary("and", "i1", low, high))

            def by_values() -> None:
                for row in range(line.height):
                    position = f.add(at, row)
                    exists = f.binary("and", "i1", line.inside, f.compare("ult", "i64", position, size))
                    cell = f.address(memory_type(self.accumulator), place, row)
                    value = f.address(memory_type(self.dtype), line.source, position)
                    f.if_(
                        exists,
                        lambda value=value, cell=cell: self._move(f, value, cell, 1),
                        lambda cell=cell: self._move(f, None, cell, 1),
                    )

            def at_once() -> None:
                self._move(f, f.address(memory_type(self.dtype), line.source, at), place, line.height)

            f.if_(whole, at_once, by_values)

        f.loop(0, line.length, 1, [], one)

    def _emit_finish(self, module: IrModule) -> None:
        """Adds up the parts of a row (of one group), in order."""
        f = kernel(module, "finish")
        pixels = self.geometry.arguments(f)
        parts = pixels.number("parts")
        groups = 1 if self.is_depthwise else self.groups
        element, item = memory_type(self.accumulator), self.accumulator.itemsize
        out_element, lanes = memory_type(self.dtype), self.arithmetic.lanes
        apart = groups * self.rows * self.padded

        def point(at: str, _: list[str]) -> None:
            row, group = f.op(f"udiv i64 {at}, {groups}"), f.op(f"urem i64 {at}, {groups}")
            source = f.add(f.mul(group, self.rows * self.padded), f.mul(row, self.padded))
            source_at = f.address(element, pixels.pointer("sums"), source)
            to = f.add(f.mul(row, groups * self.columns), f.mul(group, self.columns))
            to_at = f.address(out_element, pixels.pointer("out"), to)

            def some(count: int, low: Value, high: Value) -> None:
                type_ = memory_type(self.accumulator, count)

                def one(j: str, _: list[str]) -> None:
                    def add(p: str, carried: list[str]) -> list[Value]:
                        place = f.address(element, source_at, f.add(f.mul(p, apart), j))
                        return [f.binary("fadd", type_, carried[0], f.load(type_, place, item))]

                    first = f.load(type_, f.address(element, source_at, j), item)
                    (total,) = f.loop(1, parts, 1, [(type_, first)], add)
                    value = convert(f, total, self.accumulator, self.dtype, count, self.target)
                    place = f.address(out_element, to_at, j)
                    f.store(memory_type(self.dtype, count), value, place, self.dtype.itemsize)

                f.loop(low, high, count, [], one)

            whole = self.columns // lanes * lanes
            some(lanes, 0, whole)
            some(1, whole, self.columns)

        each_point(f, point)

    # calls

    def plan(self, types: list[TensorType], sizes: Sizes) -> Planned:
        x, dy = types
        images, *counts, _ = numbers(dy.shape, sizes)
        x_sizes = numbers(x.shape[1:-1], sizes)
        lows = numbers([low for low, _ in self.geometry.padding], sizes)
        lines, pixels = images * prod(counts[:-1]), images * prod(counts)
        item = self.accumulator.itemsize
        # a block of pixels, or a line where there is nothing to pack
        unit, number = (counts[-1], lines) if self.is_depthwise else (self.block, -(-pixels // self.block))
        part_bytes = self.groups * self.rows * self.padded * item
        if self.is_depthwise:
            part_bytes = self.rows * self.padded * item
            columns = -(-self.columns // self.arithmetic.lanes)
        most = max(1, min(FEWEST_POINTS, PARTS_BYTES // max(1, part_bytes)))
        per_part = max(1, -(-number // most)) * max(1, unit)
        parts = max(1, -(-pixels // per_part))
        all_units = self.runs * self.tiles
        wanted = max(1, -(-FEWEST_POINTS // (parts * self.groups)))
        per_point = max(-(-all_units // wanted), min(all_units, -(-LEAST_ROWS // self.height)))
        points = parts * (columns if self.is_depthwise else self.groups * -(-all_units // per_point))
        sums_bytes = -(-parts * part_bytes // _ALIGN) * _ALIGN
        panel_bytes = 0 if self.is_depthwise else self.block * self.padded * item
        values: dict[str, Slot] = {
            "x": ("input", 0), "dy": ("input", 1), "out": ("output", 0), "sums": ("workspace", 0),
            "packed": ("workspace", sums_bytes), "count": ("number", pixels), "parts": ("number", parts),
            "per_part": ("number", per_part), "units": ("number", per_point), "panels": ("number", panel_bytes),
        }  # fmt: skip
        for axis in range(self.geometry.rank):
            for part, all_axes in (("size", x_sizes), ("count", counts), ("low", lows)):
                values[f"{part}{axis}"] = ("number", all_axes[axis])
        slots = [values[name] for name in self.geometry.slots]
        if pixels == 0:
            return Planned((NativeCall("nothing", slots, 1),))
        finish = self.rows * (1 if self.is_depthwise else self.groups)
        calls = (NativeCall("sums", slots, points), NativeCall("finish", slots, finish, max(1, 4096 // self.padded)))
        return Planned(calls, sums_bytes + points * panel_bytes + _ALIGN)


def _accepts(op: Op, types: Any, target: Target) -> bool:
    x, dy = types
    known = all(isinstance(d, int) for d in (x.shape[-1], dy.shape[-1], op.groups))  # type: ignore[attr-defined]
    return known and x.dtype in (f16, bf16, f32, f64) and 0 not in (x.shape[-1], dy.shape[-1])


@override("conv_last_backward_weight", instead_of_parts=_accepts)
def conv_last_backward_weight(node: Node, target: Target) -> NativeOp | None:
    """The kernel for a node's types."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    if not _accepts(op, types, target):
        return None
    x, dy = types
    geometry = PixelGeometry(op.kernel, op.stride, op.dilation, op.padding)
    channels, outputs = int(x.shape[-1]) // op.groups, int(dy.shape[-1]) // op.groups
    gradient = Gradient(x.dtype, geometry, op.groups, channels, outputs, target)

    def emit(module: IrModule) -> None:
        gradient.emit(module)
        _emit_nothing(module, gradient)

    return NativeOp(gradient.key, emit, ("sums", "finish", "nothing"), lambda sizes: gradient.plan(types, sizes))


def _emit_nothing(module: IrModule, gradient: Gradient) -> None:
    """The sum over no pixels."""
    f = kernel(module, "nothing")
    out = gradient.geometry.arguments(f).pointer("out")
    count = gradient.rows * gradient.outputs * gradient.groups * gradient.dtype.itemsize
    fill_zero(f, out, count)
    f.ret()
