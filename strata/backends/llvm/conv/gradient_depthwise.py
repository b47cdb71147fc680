"""The weight gradient of a depthwise convolution: vectors run along channels, nothing is packed.

A point is a vector of channels (the last one masked) over one part of the output lines. For each tap of the axes but
the last, the sums of all taps along the last axis stay in registers while dy is read once.
"""

from __future__ import annotations

from math import prod

from strata.backends.llvm.conv.gradient_pixels import PixelGeometry, Pixels
from strata.backends.llvm.gemm.arith import GemmArithmetic, convert
from strata.backends.llvm.ir.builder import IrModule, Value
from strata.backends.llvm.ir.native import each_point, kernel
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target

AT_ONCE = 8  # taps along the last axis whose sums are kept in registers


def emit_depthwise_sums(module: IrModule, dtype: DType, geometry: PixelGeometry, channels: int, target: Target) -> None:
    """Adds the kernel `sums`: [part][tap][channel, rounded up to vectors]."""
    _Sums(module, dtype, geometry, channels, target).emit()


class _Sums:
    def __init__(self, module: IrModule, dtype: DType, geometry: PixelGeometry, channels: int, target: Target) -> None:
        self.f = kernel(module, "sums")
        self.pixels: Pixels = geometry.arguments(self.f)
        self.dtype, self.geometry, self.channels, self.target = dtype, geometry, channels, target
        self.arithmetic = GemmArithmetic(dtype.accumulator, dtype.accumulator, dtype.accumulator, target)
        self.blocks = -(-channels // self.arithmetic.lanes)

    def emit(self) -> None:
        f, pixels, lanes = self.f, self.pixels, self.arithmetic.lanes
        per_part = pixels.number("per_part")

        def point(at: str, _: list[str]) -> None:
            part, block = f.op(f"udiv i64 {at}, {self.blocks}"), f.op(f"urem i64 {at}, {self.blocks}")
            channel = f.mul(block, lanes)
            begin = f.mul(part, per_part)
            length = f.sub(f.smin(f.add(begin, per_part), pixels.count), begin)
            full = f.compare("sle", "i64", f.add(channel, lanes), self.channels)

            def all_taps(mask: str | None) -> None:
                self._taps(part, channel, begin, length, mask)

            if self.channels % lanes == 0:
                all_taps(None)
            else:
                mask = f.mask_below(lanes, f.sub(self.channels, channel))
                f.if_(full, lambda: all_taps(None), lambda: all_taps(mask))

        each_point(f, point)

    def _taps(self, part: Value, channel: Value, begin: Value, length: Value, mask: str | None) -> None:
        f, kernel_ = self.f, self.geometry.kernel
        element, padded = memory_type(self.arithmetic.accumulator), self.blocks * self.arithmetic.lanes
        start = self.pixels.decode(begin)
        taps = prod(kernel_)

        def line_of_taps(outer: str, _: list[str]) -> None:
            position = self.geometry.taps(f, outer, self.geometry.rank - 1)
            for first in range(0, kernel_[-1], AT_ONCE):
                count = min(AT_ONCE, kernel_[-1] - first)
                sums = self._sums(position, first, count, start, begin, length, channel, mask)
                for i, value in enumerate(sums):
                    tap = f.add(f.mul(outer, kernel_[-1]), first + i)
                    place = f.add(f.mul(f.add(f.mul(part, taps), tap), padded), channel)
                    to = f.address(element, self.pixels.pointer("sums"), place)
                    f.store(self.arithmetic.type, value, to, self.arithmetic.size)

        f.loop(0, prod(kernel_[:-1]), 1, [], line_of_taps)

    def _sums(
        self, position: list[Value], first: int, count: int, start: list[Value], begin: Value, length: Value,
        channel: Value, mask: str | None,
    ) -> list[str]:  # fmt: skip
        """The sums of neighbouring taps along the last axis, over whole output lines."""
        f, pixels = self.f, self.pixels
        type_ = self.arithmetic.type
        width = pixels.number(f"count{self.geometry.rank - 1}")
        lines = f.op(f"udiv i64 {length}, {width}")
        stride, size = self.geometry.stride[-1], pixels.number(f"size{self.geometry.rank - 1}")
        inner_low, _ = pixels.valid(first, 0, width)
        _, inner_high = pixels.valid(first + count - 1, 0, width)
        inner_high = f.smax(inner_high, inner_low)

        def line(i: str, carried: list[str]) -> list[Value]:
            at, sums = carried[: len(start)], carried[len(start) :]
            dy = f.add(f.mul(f.add(begin, f.mul(i, width)), self.channels), channel)
            inside, source = pixels.line_of_x(at[0], list(at[1:-1]), position)
            x = f.add(f.mul(source, self.channels), channel)

            def step(ow: str, sums: list[str], checked: bool) -> list[Value]:
                grad = self._load("dy", f.add(dy, f.mul(ow, self.channels)), mask)
                result: list[Value] = []
                for tap in range(count):
                    column = f.add(f.mul(ow, stride), pixels.offset(first + tap))
                    place = f.add(x, f.mul(column, self.channels))

                    def product(place: Value = place, tap: int = tap, grad: str = grad) -> list[Value]:
                        return [self.arithmetic.step(f, self._load("x", place, mask), grad, sums[tap])]

                    if checked:
                        is_in = f.compare("ult", "i64", column, size)
                        kept = [sums[tap]]
                        result += f.if_(is_in, product, lambda kept=kept: list(kept), types=[type_])  # type: ignore[misc]
                    else:
                        result += product()
                return result

            def present() -> list[Value]:
                typed = [(type_, s) for s in sums]
                made = f.loop(0, inner_low, 1, typed, lambda ow, c: step(ow, c, True))
                typed = [(type_, s) for s in made]
                made = f.loop(inner_low, inner_high, 1, typed, lambda ow, c: step(ow, c, False))
                typed = [(type_, s) for s in made]
                return list(f.loop(inner_high, width, 1, typed, lambda ow, c: step(ow, c, True)))

            made = f.if_(inside, present, lambda: list(sums), types=[type_] * count)
            return [*pixels.next_line(list(at)), *made]

        carried = [*(("i64", a) for a in start), *([(type_, "zeroinitializer")] * count)]
        return f.loop(0, lines, 1, carried, line)[len(start) :]

    def _load(self, name: str, index: Value, mask: str | None) -> str:
        f, lanes = self.f, self.arithmetic.lanes
        place = f.address(memory_type(self.dtype), self.pixels.pointer(name), index)
        raw, align = memory_type(self.dtype, lanes), self.dtype.itemsize
        value = f.load(raw, place, align, mask)
        return convert(f, value, self.dtype, self.arithmetic.accumulator, lanes, self.target)
