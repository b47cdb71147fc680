"""Convolution as a contraction whose rows are found through a table of addresses.

    x[image, *sizes, channel]   weights[tap, channel, output] (packed)   out[image, *counts, output]

Channels are next to each other. A row of A is one output pixel; pixels are counted through rows and images, so small maps
fill whole tiles. For every tile the table holds, tap by tap, where each pixel's channels are: taps that fall into the
padding, or between the pixels of a spread input, point at zeros. Groups are a batch axis of the contraction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from strata.backends.llvm.builder import Function, Module, Value
from strata.backends.llvm.contract import Contraction, plan_contraction
from strata.backends.llvm.gemm import Block, Chunk, Driver
from strata.backends.llvm.gemm_finish import Epilogue, emit_finish
from strata.backends.llvm.registers import memory_type
from strata.core import DType, Target, f32

TABLE_BYTES = 64 << 10  # of a chunk's addresses, on the stack


@dataclass(frozen=True, slots=True)
class Window:
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

    Arguments: `product.slots`, where a is x, m the output pixels of all images, n the outputs of one group, k taps times
    channels, a_row and a_k are 0 and 1, and batch 0 counts groups: batch0_a is `channels`, batch0_out n.
    """

    product: Contraction
    window: Window
    channels: int

    def __str__(self) -> str:
        return f"{self.window} channels {self.channels}; {self.product}"


def plan_convolution(
    pixels: int,
    outputs: int,
    channels: int,
    window: Window,
    target: Target,
    *,
    dtype: DType = f32,
    out: DType | None = None,
    groups: int = 1,
    n_exact: bool = True,
    epilogue: str = "",
    epilogue_pointers: tuple[str, ...] = (),
    epilogue_numbers: tuple[str, ...] = (),
) -> Convolution:
    """`pixels` of the output, all images counted, or their upper bound; `outputs` and `channels` of one group."""
    spec = plan_contraction(
        pixels, outputs, window.taps * channels, target, a=dtype, out=out, batch=groups, batch_rank=1, n_exact=n_exact,
        epilogue=epilogue, epilogue_pointers=epilogue_pointers, epilogue_numbers=epilogue_numbers,
    )  # fmt: skip
    height = spec.heights[0]
    most = max(height, TABLE_BYTES // (8 * window.taps) // height * height)
    spec = replace(
        spec, a_runs=window.taps, streams=(), chunk_rows=min(spec.chunk_rows, most), load_numbers=window.numbers
    )
    return Convolution(spec, window, channels)


def emit_convolution(
    module: Module, spec: Convolution, epilogue: Epilogue | None = None, name: str | None = None
) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"conv_{spec.product.name}"
    finish = emit_finish(module, spec.product, f"{name}_finish", epilogue)
    f = module.function(name, [("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")])
    driver = _ConvDriver(f, spec, finish)
    f.loop("%begin", "%end", 1, [], lambda chunk, _: driver.chunk(chunk))
    f.ret()
    return name


class _ConvDriver(Driver):
    """The driver of a contraction, with a table of addresses in place of A."""

    def __init__(self, f: Function, spec: Convolution, finish: str) -> None:
        super().__init__(f, spec.product, finish)
        self.window, self.channels = spec.window, spec.channels
        self.table = f.alloca("ptr", spec.product.chunk_rows * spec.window.taps)
        element = memory_type(spec.product.a)
        self.zeros = f.alloca(element, max(1, spec.channels))
        f.loop(0, spec.channels, 1, [], lambda i, _: self._clear(f.address(element, self.zeros, i)))

    @property
    def a_stride(self) -> Value:
        return self.channels

    def _clear(self, place: str) -> None:
        dtype = self.spec.a
        self.f.store(memory_type(dtype), "0.0" if dtype.is_float and dtype.bits >= 32 else "0", place, dtype.itemsize)

    def _a_tile(self, chunk: Chunk, block: Block | None, row: Value) -> str:
        return self.f.address("ptr", self.table, self.f.mul(row, self.window.taps))

    def _prepare(self, chunk: Chunk) -> None:
        self._row_tiles(chunk, lambda row, height: self._addresses_of_tile(chunk, row, height))

    def _addresses_of_tile(self, chunk: Chunk, row: Value, height: Value) -> None:
        f = self.f
        table = self._a_tile(chunk, None, row)

        def one(i: str, _: list[str]) -> None:
            image, corners = self._pixel(f.add(f.add(chunk.row, row), i))
            base = f.address(memory_type(self.spec.a), chunk.a, f.mul(image, self.number["x_image"]))
            offsets = [self._axis_offsets(axis, corner) for axis, corner in enumerate(corners)]
            for tap, position in enumerate(product(*map(range, self.window.kernel))):
                inside = "true"
                offset: Value = 0
                for axis, at in enumerate(position):
                    is_in, part = offsets[axis][at]
                    inside = is_in if inside == "true" else f.binary("and", "i1", inside, is_in)
                    offset = f.add(offset, part)
                address = f.address(memory_type(self.spec.a), base, offset)
                found = f.select("ptr", inside, address, self.zeros)
                f.store("ptr", found, f.address("ptr", table, f.add(f.mul(tap, height), i)), 8)

        f.loop(0, height, 1, [], one)

    def _pixel(self, flat: Value) -> tuple[Value, list[Value]]:
        """Image and first (spread, perhaps outside) input position per axis of an output pixel."""
        f = self.f
        corners: list[Value] = []
        for axis in reversed(range(self.window.rank)):
            count = self.number[f"count{axis}"]
            outer = f.op(f"udiv i64 {flat}, {count}")
            at = f.sub(flat, f.mul(outer, count))
            corners.insert(0, f.sub(f.mul(at, self.window.stride[axis]), self.number[f"low{axis}"]))
            flat = outer
        return flat, corners

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
