"""Pixel addresses in the weight gradient of a convolution: positions of output pixels, rows of x at each tap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.backends.llvm.ir.builder import IrFunction, Value
from strata.backends.llvm.ir.native import while_loop
from strata.core import Dim

_POINTERS = ("x", "dy", "out", "sums", "packed")
_NUMBERS = ("count", "parts", "per_part", "units", "panels")


@dataclass(frozen=True)
class PixelGeometry:
    """The window of a convolution over any number of axes."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[Dim, Dim], ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def __str__(self) -> str:  # padding is an argument
        return f"{self.kernel} {self.stride} {self.dilation}"

    @property
    def slots(self) -> tuple[str, ...]:
        """The argument block, eight bytes a name: sizes of x and of dy, and the padding before, axis by axis."""
        axes = tuple(f"{part}{axis}" for part in ("size", "count", "low") for axis in range(self.rank))
        return (*_POINTERS, *_NUMBERS, *axes)

    def arguments(self, f: IrFunction) -> Pixels:
        return Pixels(f, self)

    def taps(self, f: IrFunction, flat: Value, axes: int) -> list[Value]:
        """The position of a tap, counted row-major over the first axes of the kernel."""
        return f.digits(flat, self.kernel[:axes])[1:]


class Pixels:
    """The arguments inside one function."""

    def __init__(self, f: IrFunction, geometry: PixelGeometry) -> None:
        self.f, self.geometry = f, geometry
        self._loaded: dict[str, str] = {}
        for name in geometry.slots:
            kind = "ptr" if name in _POINTERS else "i64"
            place = f.address("i64", "%arguments", geometry.slots.index(name))
            self._loaded[name] = f.load(kind, place, 8)

    @property
    def count(self) -> str:
        return self._loaded["count"]

    def pointer(self, name: str) -> str:
        return self._loaded[name]

    def number(self, name: str) -> str:
        return self._loaded[name]

    def decode(self, flat: Value) -> list[Value]:
        """Image and position in every axis of an output pixel."""
        return self.f.digits(flat, [self.number(f"count{axis}") for axis in range(self.geometry.rank)])

    def next_line(self, at: list[Value]) -> list[Value]:
        """The start of the line after the one that `at` (image, position) is in."""
        f = self.f
        found: list[Value] = [0]
        carry: Value = 1
        for axis in reversed(range(self.geometry.rank - 1)):
            following = f.add(at[axis + 1], carry)
            wraps = f.compare("eq", "i64", following, self.number(f"count{axis}"))
            found.insert(0, f.select("i64", wraps, 0, following))
            carry = f.convert("zext", "i1", wraps, "i64")
        return [f.add(at[0], carry), *found]

    def lines(self, length: Value, start: list[str], body: Callable[[Value, Value, list[Value], Value], None]) -> None:
        """So many pixels from `start` on, line by line: body(pixels before, image, position of the first, pixels)."""
        f = self.f
        last = self.number(f"count{self.geometry.rank - 1}")

        def one(carried: list[str]) -> list[Value]:
            done, *at = carried
            some = f.smin(f.sub(last, at[-1]), f.sub(length, done))
            body(done, at[0], list(at[1:]), some)
            return [f.add(done, some), *self.next_line(list(at))]

        def goes_on(carried: list[str]) -> str:
            return f.compare("slt", "i64", carried[0], length)

        while_loop(f, [("i64", 0), *(("i64", a) for a in start)], goes_on, one)

    def offset(self, tap: Value, axis: int | None = None) -> Value:
        """Where a tap of the window at position 0 is along an axis (the last), padding counted."""
        axis = self.geometry.rank - 1 if axis is None else axis
        return self.f.sub(self.f.mul(tap, self.geometry.dilation[axis]), self.number(f"low{axis}"))

    def line_of_x(self, image: Value, position: list[Value], taps: list[Value]) -> tuple[str, Value]:
        """Whether the line that a tap sees from an output line is inside x, and the number of its first pixel in x."""
        f = self.f
        inside = "true"
        line = image
        for axis, at in enumerate(position):
            size = self.number(f"size{axis}")
            place = f.add(f.mul(at, self.geometry.stride[axis]), self.offset(taps[axis], axis))
            is_in = f.compare("ult", "i64", place, size)
            inside = f.both(inside, is_in)
            line = f.add(f.mul(line, size), place)
        return inside, f.mul(line, self.number(f"size{self.geometry.rank - 1}"))

    def valid(self, tap: Value, first: Value, length: Value) -> tuple[Value, Value]:
        """Which of the pixels of a line, from `first` on, a tap along the last axis sees inside x: low, high."""
        f, stride = self.f, self.geometry.stride[-1]
        offset = self.offset(tap)
        size = self.number(f"size{self.geometry.rank - 1}")
        low: Value = f.op(f"sdiv i64 {f.smax(f.sub(stride - 1, offset), 0)}, {stride}")
        behind = f.smax(f.add(f.sub(size, offset), stride - 1), 0)  # (size - 1 - offset) / stride + 1
        high = f.op(f"sdiv i64 {behind}, {stride}")
        low = f.smax(f.smin(f.sub(low, first), length), 0)
        return low, f.smax(f.smin(f.sub(high, first), length), low)
