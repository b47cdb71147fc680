"""Depth-wise convolution: every channel has its own taps, so vectors run along channels and nothing is packed.

    x[image, *sizes, channel]   weights[tap, channel]   out[image, *counts, channel]

Pixels, tiles, tables of addresses, chunks and the epilogue are those of strata.backends.llvm.conv; only the sums of a
tile are made differently: for a few vectors of channels, tap by tap, weight times value.
"""

from __future__ import annotations

from dataclasses import replace

from strata.backends.llvm.builder import Function, Module, Value
from strata.backends.llvm.contract import for_rows
from strata.backends.llvm.conv import FEWEST_CHUNKS, ConvDriver, Convolution, Window, plan_convolution
from strata.backends.llvm.gemm import Block, Chunk
from strata.backends.llvm.gemm_arith import Arithmetic, convert, mask_below
from strata.backends.llvm.gemm_finish import Epilogue, emit_finish
from strata.backends.llvm.registers import memory_type
from strata.core import DType, Target, f32


def plan_depthwise(
    pixels: int,
    channels: int,
    window: Window,
    target: Target,
    *,
    dtype: DType = f32,
    out: DType | None = None,
    width: int | None = None,
    m_exact: bool = False,
    epilogue: str = "",
    epilogue_pointers: tuple[str, ...] = (),
    epilogue_numbers: tuple[str, ...] = (),
) -> Convolution:
    """As plan_convolution; in the arguments, b is the weights, n the channels, k the taps, and batch 0 has extent 1."""
    spec = plan_convolution(
        pixels, channels, channels, window, target, dtype=dtype, out=out, width=width, epilogue=epilogue,
        epilogue_pointers=epilogue_pointers, epilogue_numbers=epilogue_numbers,
    )  # fmt: skip
    whole, rest = divmod(channels, spec.product.lanes)
    vectors = next(v for v in (3, 2, 1) if rest or whole % v == 0)  # without a tail where that can be
    product = replace(spec.product, a_runs=window.taps, vectors=vectors)
    # a table of addresses costs as much as a few channels: it is made once a pixel, and work is split by pixels alone
    height = product.heights[0]
    rows = min(product.chunk_rows, max(1, -(-pixels // (FEWEST_CHUNKS * height))) * height)
    panels = max(1, -(-channels // product.panel_columns))
    product = replace(product, chunk_rows=rows, chunk_panels=panels)
    if m_exact:
        product = for_rows(product, pixels)
    return replace(spec, product=product, joined=False)


def emit_depthwise(module: Module, spec: Convolution, epilogue: Epilogue | None = None, name: str | None = None) -> str:
    """Adds the kernel `void (ptr args, i64 begin, i64 end)` and returns its name."""
    name = name or f"depthwise_{spec.product.name}"
    finish = emit_finish(module, spec.product, f"{name}_finish", epilogue)
    f = module.function(name, [("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")])
    driver = _DepthwiseDriver(f, spec, finish)
    f.loop("%begin", "%end", 1, [], lambda chunk, _: driver.chunk(chunk))
    f.ret()
    return name


class _DepthwiseDriver(ConvDriver):
    """The driver of a convolution, with products along channels in place of the micro-kernels."""

    def _panel(self, chunk: Chunk, block: Block, panel: Value) -> None:
        f, spec, number = self.f, self.spec, self.number
        is_tail = f.compare("eq", "i64", panel, chunk.full_panels)
        column = f.mul(panel, spec.panel_columns)
        columns = f.select("i64", is_tail, chunk.tail, spec.panel_columns)
        in_output = f.binary("xor", "i1", is_tail, "true") if spec.stores_directly else "false"
        stride = f.select("i64", in_output, number["out_row"], spec.sums_columns)
        kernels = ["@" + self._products(height) for height in spec.heights]

        def tile(row: Value, height: Value) -> None:
            out = f.address(memory_type(spec.out), chunk.out, f.add(f.mul(row, number["out_row"]), column))
            sums = f.select("ptr", in_output, out, self._own_sums(chunk, row, panel))
            kernel = self._by_height(f.sub(chunk.rows, row), "ptr", kernels)
            f.call_address(
                "void", kernel, ("ptr", self._a_tile(chunk, block, row)), ("ptr", chunk.b), ("i64", self.n),
                ("i64", column), ("ptr", sums), ("i64", stride), ("i64", columns),
            )  # fmt: skip
            ready = is_tail if spec.stores_directly else "true"
            self._finish(chunk, block, ready, sums, stride, row, column, height, columns)

        self._row_tiles(chunk, tile)

    def _products(self, height: int) -> str:
        """`void (table, weights, weights stride, column, sums, sums stride, columns)` for tiles of a height."""
        module, spec = self.f.module, self.spec
        name = f"depthwise_{spec.a}_{height}x{spec.vectors}_{self.window.taps}"
        if module.has(name):
            return name
        parameters = [
            ("ptr noalias", "table"), ("ptr noalias", "weights"), ("i64", "weights_stride"), ("i64", "column"),
            ("ptr noalias", "sums"), ("i64", "sums_stride"), ("i64", "columns"),
        ]  # fmt: skip
        f = module.function(name, parameters, attributes="nounwind noinline", linkage="internal")
        full = f.compare("eq", "i64", "%columns", spec.panel_columns)

        def one_by_one() -> None:
            def some(at: str, _: list[str]) -> None:
                self._vectors(f, height, at, 1, mask_below(f, spec.lanes, f.smin(f.sub("%columns", at), spec.lanes)))

            f.loop(0, "%columns", spec.lanes, [], some)

        f.if_(full, lambda: self._vectors(f, height, 0, spec.vectors, None), one_by_one)
        f.ret()
        return name

    def _vectors(self, f: Function, height: int, at: Value, vectors: int, mask: str | None) -> None:
        """The sums of some vectors of channels for all rows of a tile."""
        spec = self.spec
        arithmetic = Arithmetic(spec.a, spec.b, spec.accumulator, spec.target)
        type_, lanes, element = arithmetic.type, spec.lanes, memory_type(spec.a)
        column = f.add("%column", at)

        def load(base: Value, vector_index: int) -> str:
            address = f.address(element, base, f.add(column, vector_index * lanes))
            raw, align = memory_type(spec.a, lanes), spec.a.itemsize
            value = f.load(raw, address, align) if mask is None else f.masked_load(raw, address, align, mask)
            return convert(f, value, spec.a, spec.accumulator, lanes, spec.target)

        def tap(index: str, sums: list[str]) -> list[Value]:
            table = f.address("ptr", "%table", f.mul(index, height))
            rows = [f.load("ptr", f.address("ptr", table, i), 8) for i in range(height)]

            def products() -> list[Value]:
                line = f.address(element, "%weights", f.mul(index, "%weights_stride"))
                weights = [load(line, j) for j in range(vectors)]
                return [
                    arithmetic.step(f, load(row, j), weights[j], sums[i * vectors + j])
                    for i, row in enumerate(rows)
                    for j in range(vectors)
                ]

            present = f.compare("ne", "ptr", rows[0], "null")
            return list(f.if_(present, products, lambda: list(sums), types=[type_] * len(sums)))

        start = [(type_, "zeroinitializer")] * (height * vectors)
        sums = f.loop(0, self.window.taps, 1, start, tap)
        for i in range(height):
            row = f.address(memory_type(spec.accumulator), "%sums", f.mul("%sums_stride", i))
            for j in range(vectors):
                place = f.address(memory_type(spec.accumulator), row, f.add(at, j * lanes))
                f.store(type_, sums[i * vectors + j], place, arithmetic.size)
