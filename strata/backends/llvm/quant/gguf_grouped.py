"""Grouped matmul (mixture of experts) with GGUF weights: only experts that have rows are read, as stored.

    sort, gather   rows of x side by side with the other rows of their expert, as for grouped matmuls of floats
    quantize       GGUF blocks: rows of x as numbers of 16 bits, see `gguf_matmul`
    multiply       a chunk is a part of one expert's matrix; without rows of x it is done
    scatter        results to their rows

GGUF blocks are multiplied as they are for a single matrix. Other schemes are decoded to floats, some rows of some
columns at a time, and multiplied while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from strata.backends.llvm.gemm.arith import convert
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.native import Workspace, arguments, each_point, kernel, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.math.exponentials import VectorMath
from strata.backends.llvm.quant.gguf_blocks import format_of
from strata.backends.llvm.quant.gguf_matmul import MANY, emit_products, reads_blocks
from strata.backends.llvm.quant.gguf_panel import GROUP, panel_rows
from strata.backends.llvm.quant.gguf_wide import STREAMS, wide_step
from strata.backends.llvm.quant.grouped_matmul import (
    GroupedMultiply,
    columns_of,
    emit_gather,
    emit_scatter,
    emit_sort,
    plan_by_expert,
)
from strata.core import DType, Target, TensorType, bf16, f8e4m3, f8e5m2, f16, f32, i8, u8
from strata.mir import Node, Op
from strata.ops import schemes

FEW: Final = 2  # this many rows of x are multiplied with weights in registers; for more, a block is decoded once
VECTORS: Final = 4  # of columns at once
PART_BYTES: Final = 128 << 10  # of weights that a chunk reads
_PARTS: Final = ("codes", "first", "out", "quants", "sides", "wide_quants", "wide_sides")
_COUNTS: Final = ("n", "k", "slab", "parts", "quant_row", "side_row", "wide_quant_row", "wide_side_row")


def _accepts(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """f32 rows; GGUF blocks as for a single matrix; other schemes with sides of 16 or 32 bits."""
    x, _, _, *sides = types
    scheme = op.scheme  # type: ignore[attr-defined]
    if x.dtype is not f32 or not op.n:  # type: ignore[attr-defined]
        return False
    if not scheme.is_gguf:
        return all(s.dtype in (f32, f16, bf16, u8) for s in sides)
    return reads_blocks(op, x, target)


@override("dequant_grouped_matmul", instead_of_parts=_accepts)
def dequant_grouped_matmul(node: Node, target: Target) -> NativeOp | None:
    op: Any = node.op
    types = [v.type for v in node.inputs]
    if not _accepts(op, types, target):
        return None
    made = _Blocks(op, types, target) if op.scheme.is_gguf else _Decoded(op, types, target)
    return NativeOp(made.key, made.emit, made.functions, made.plan)


class _Grouped:
    """What both forms share: the rows sorted by expert before the matmul, the results sorted back after it."""

    def __init__(self, op: Any, types: Sequence[TensorType], target: Target) -> None:
        self.op, self.types, self.target = op, types, target
        self.k, self.n = types[0].shape[1].__index__(), op.n
        self.slab = op.scheme.code_count(self.k, self.n) * types[1].dtype.itemsize
        self.experts = types[1].nbytes.__index__() // self.slab
        self.ids = types[2].dtype

    def around(
        self, sizes: Sizes, out_row: int, product: Callable[[int, Workspace, Slot, Slot, Slot], list[NativeCall]]
    ) -> Planned:
        """product(rows, workspace, sorted x, where experts begin, results) -> calls."""
        (rows,) = numbers([self.types[0].shape[0]], sizes)
        if rows == 0:
            return Planned(())
        return plan_by_expert(rows, self.experts, (4 * self.k, 4 * self.n, out_row), partial(product, rows))

    def emit_around(self, module: IrModule) -> None:
        emit_sort(module, self.ids)
        emit_gather(module)
        emit_scatter(module)


# -------------------------------------------------------------------------------------------------------- GGUF blocks


class _Blocks(_Grouped):
    """Matmuls with blocks: few rows read them row by row, more unpack a panel of them once."""

    def __init__(self, op: Any, types: Sequence[TensorType], target: Target) -> None:
        super().__init__(op, types, target)
        self.kind = op.scheme.kind.removeprefix("gguf_")
        self.form = format_of(self.kind)
        self.step = wide_step(self.kind, target)
        self.key = f"dequant_grouped_matmul {self.kind} {self.ids}"
        quantize = ("quantize", "quantize_wide") if self.step else ("quantize",)
        self.functions = ("sort", "gather", *quantize, "multiply", "scatter")

    def plan(self, sizes: Sizes) -> Planned:
        return self.around(sizes, 4 * self.n, self._product)

    def _product(self, rows: int, layout: Workspace, x: Slot, first: Slot, results: Slot) -> list[NativeCall]:
        form, blocks = self.form, self.k // self.form.elements
        slots: dict[str, Slot] = {"codes": ("input", 1), "first": first, "out": results}
        counts = dict(n=self.n, k=self.k, slab=self.slab, parts=max(1, min(self.slab // PART_BYTES, self.n // 16)))
        calls = []
        for name, step in (("", None), ("wide_", self.step)):
            whole = -(-blocks // step.blocks) * step.blocks if step else blocks
            counts[f"{name}quant_row"] = 2 * whole * form.elements
            counts[f"{name}side_row"] = 4 * whole * form.record
            if name and not step:
                slots |= {f"{name}quants": slots["quants"], f"{name}sides": slots["sides"]}
                continue
            both = [layout.area(rows * counts[f"{name}{part}_row"]) for part in ("quant", "side")]
            slots |= dict(zip((f"{name}quants", f"{name}sides"), both, strict=True))
            groups = number_slots(self.k // GROUP, whole * form.groups)
            function = "quantize_wide" if step else "quantize"
            calls.append(NativeCall(function, [x, *both, *groups], rows * whole * form.groups, 64))
        given = [*(slots[part] for part in _PARTS), *number_slots(*(counts[count] for count in _COUNTS))]
        return [*calls, NativeCall("multiply", given, self.experts * counts["parts"])]

    def emit(self, module: IrModule) -> None:
        self.emit_around(module)
        emit_products(module, self.kind, self.target)
        self._emit_multiply(kernel(module, "multiply"))

    def _emit_multiply(self, f: IrFunction) -> None:
        given = dict(zip((*_PARTS, *_COUNTS), arguments(f, "p" * len(_PARTS) + "i" * len(_COUNTS)), strict=True))
        block = f.alloca("i64", 7)

        def chunk(index: str, _: list[str]) -> None:
            expert, part = f.divided(index, given["parts"])
            begin, end = (f.load("i64", f.address("i64", given["first"], f.add(expert, i)), 8) for i in range(2))
            rows = f.sub(end, begin)

            def some(function: str, name: str, points: Value) -> None:
                """Its part of the points of a matmul for one matrix."""
                out_row = f.mul(given["n"], 4)
                places = (("codes", expert, given["slab"]), (f"{name}quants", begin, given[f"{name}quant_row"]),
                          (f"{name}sides", begin, given[f"{name}side_row"]), ("out", begin, out_row))  # fmt: skip
                for at, (what, which, step) in enumerate(places):
                    place = f.address("i8", given[what], f.mul(which, step))
                    f.store("ptr", place, f.address("i64", block, at), 8)
                for at, number in enumerate((rows, given["n"], given["k"]), len(places)):
                    f.store("i64", number, f.address("i64", block, at), 8)
                low, high = (f.op(f"udiv i64 {f.mul(f.add(part, i), points)}, {given['parts']}") for i in range(2))
                f.call("void", function, ("ptr", block), ("i64", low), ("i64", high))

            lanes = panel_rows(self.target)
            panels = f.ceil_div(given["n"], lanes)
            quarters, left = (f.op(f"{op} i64 {given['n']}, {STREAMS}") for op in ("udiv", "urem"))
            points = f.add(quarters, left)  # of `rows`: see row_points

            def by_count() -> None:
                few = f.compare("slt", "i64", rows, MANY)
                f.if_(few, lambda: some("rows", "wide_", points), lambda: some("panels", "", panels))

            f.if_(f.compare("sgt", "i64", rows, 0), by_count)

        each_point(f, chunk)


# ------------------------------------------------------------------------------------------------------- other schemes


class _Decoded(_Grouped):
    """Matmuls with weights decoded to f32, a block of rows and columns at a time."""

    def __init__(self, op: Any, types: Sequence[TensorType], target: Target) -> None:
        super().__init__(op, types, target)
        self.sides = types[3:]
        self.key = (
            f"dequant_grouped_matmul {op.scheme} {self.ids} {[s.dtype.name for s in self.sides]} {self._one_scale}"
        )
        self.key += f" {'odd' if self.n % 2 else 'even'}"
        self.functions = ("sort", "gather", "multiply", "scatter")

    @property
    def _one_scale(self) -> bool:
        """Whether an fp8 matrix has one scale for all of its columns."""
        return self.op.scheme.kind.startswith("fp8") and self.sides[0].shape[-1] == 1 and self.n != 1

    def plan(self, sizes: Sizes) -> Planned:
        columns = columns_of(f32, self.target)
        blocks = -(-self.n // columns)

        def product(rows: int, layout: Workspace, x: Slot, first: Slot, results: Slot) -> list[NativeCall]:
            counts = number_slots(self.k, self.n, blocks)
            sides = [("input", 3 + i) for i in range(len(self.sides))]
            given = [x, ("input", 1), first, results, *counts, *sides]
            return [NativeCall("multiply", given, self.experts * blocks)]

        return self.around(sizes, 4 * blocks * columns, product)

    def emit(self, module: IrModule) -> None:
        self.emit_around(module)
        dtypes = [s.dtype for s in self.sides]
        _DecodeMultiply(kernel(module, "multiply"), self.target, self.op.scheme, dtypes, self._one_scale, self.n).emit()


@dataclass(frozen=True)
class _Scaling:
    """The zero points and the factors of some columns."""

    f: IrFunction
    type: str
    factors: tuple[str, ...]
    zero: str = ""

    def shifted(self, q: str) -> str:
        return self.f.binary("fsub", self.type, q, self.zero) if self.zero else q

    def scaled(self, value: str) -> str:
        for factor in self.factors:
            value = self.f.binary("fmul", self.type, value, factor)
        return value


class _DecodeMultiply(GroupedMultiply):
    """Emits `multiply` for weights that are decoded on their way into the packed block."""

    def __init__(
        self, f: IrFunction, target: Target, scheme: Any, dtypes: Sequence[DType], one_scale: bool, n: int
    ) -> None:
        super().__init__(f, f32, target, len(dtypes))
        self.scheme, self.dtypes, self.one_scale = scheme, dtypes, one_scale
        self.is_packed = scheme.bits == 4
        self.by_lanes = not (self.is_packed and n % 2)  # else rows begin in the middle of bytes

    def some_columns(self, expert: Value, column: Value, x: str, out: str, rows: Value) -> None:
        f = self.f
        elements = f.mul(self.k, self.n)
        slab = f.op(f"lshr i64 {f.add(elements, 1)}, 1") if self.is_packed else elements
        codes = f.address("i8", self.w, f.mul(expert, slab))

        def pack(start: Value, length: Value) -> None:
            end = f.add(start, length)

            def some_lanes(at: str, _: list[str]) -> None:
                left = f.sub(self.n, f.add(column, at))
                f.if_(
                    f.compare("sge", "i64", left, self.lanes if self.by_lanes else f.add(left, 1)),
                    lambda: self.pack_rows(codes, expert, start, end, f.add(column, at), self.place(0, at), self.lanes),
                    lambda: self.one_by_one(codes, expert, start, end, f.add(column, at), self.place(0, at), left),
                )

            f.loop(0, self.columns, self.lanes, [], some_lanes)

        def for_all() -> None:
            self.by_blocks(x, out, rows, pack)

        if not self.by_lanes:
            for_all()
            return
        is_whole = f.compare("sle", "i64", f.add(column, self.columns), self.n)
        is_few = f.binary("and", "i1", f.compare("sle", "i64", rows, FEW), is_whole)

        def for_each() -> None:
            f.loop(0, rows, 1, [], lambda row, _: self.single_row(
                codes, expert, column, f.address("float", x, f.mul(row, self.k)),
                f.address("float", out, f.mul(row, self.out_row))))  # fmt: skip

        f.if_(is_few, for_each, for_all)

    def single_row(self, codes: str, expert: Value, column: Value, x: str, out: str) -> None:
        """One row times the chunk's columns, which stay in registers from their codes to the sum of a block."""
        f, type_ = self.f, vector("float", self.lanes)
        size, blocks = self.shared_rows()

        def some_columns(at: str, _: list[str]) -> None:
            places = [f.add(f.add(column, at), i * self.lanes) for i in range(VECTORS)]

            def block(index: str, so_far: list[str]) -> list[Value]:
                of_all = f.add(f.mul(expert, blocks), index)
                scaling = [self.scaling(expert, of_all, place, self.lanes) for place in places]

                def row(k: str, sums: list[str]) -> list[Value]:
                    factor = f.splat(type_, f.load("float", f.address("float", x, k), 4))
                    start = f.mul(k, self.n)
                    numbers = [self.numbers(codes, f.add(start, place), self.lanes) for place in places]
                    shifted = [one.shifted(q) for one, q in zip(scaling, numbers, strict=True)]
                    return [math.fma(factor, q, total) for q, total in zip(shifted, sums, strict=True)]

                first = f.mul(index, size)
                last = f.smin(f.add(first, size), self.k)
                sums = f.loop(first, last, 1, [(type_, "zeroinitializer")] * VECTORS, row)
                scaled = [one.scaled(total) for one, total in zip(scaling, sums, strict=True)]
                return [math.add(total, before) for total, before in zip(scaled, so_far, strict=True)]

            totals = f.loop(0, blocks, 1, [(type_, "zeroinitializer")] * VECTORS, block)
            for i, total in enumerate(totals):
                f.store(type_, total, f.address("float", out, f.add(at, i * self.lanes)), 4)

        math = VectorMath(f, type_, self.target)
        f.loop(0, self.columns, VECTORS * self.lanes, [], some_columns)

    def shared_rows(self) -> tuple[Value, Value]:
        """How many rows share scales, and how many such groups of rows there are."""
        size: Value = self.scheme.block_size or self.f.smax(self.k, 1)
        return size, self.f.ceil_div(self.k, size)

    def one_by_one(
        self, codes: str, expert: Value, start: Value, end: Value, column: Value, place: str, left: Value
    ) -> None:
        """A vector of columns, some of which the matrix may not have: they are zero."""
        f, type_ = self.f, vector("float", self.lanes)
        f.loop(0, f.sub(end, start), 1, [], lambda k, _: f.store(
            type_, "zeroinitializer", f.address("float", place, f.mul(k, self.panel_width)), 4))  # fmt: skip

        def one(lane: str, _: list[str]) -> None:
            self.pack_rows(codes, expert, start, end, f.add(column, lane), f.address("float", place, lane), 1)

        f.loop(0, f.smin(left, self.lanes), 1, [], one)

    def pack_rows(
        self, codes: str, expert: Value, start: Value, end: Value, column: Value, place: str, lanes: int
    ) -> None:
        """Some columns of rows `start` to `end`: rows that share scales after each other."""
        f, type_ = self.f, vector("float", lanes)
        size, blocks = self.shared_rows()

        def block(index: str, _: list[str]) -> None:
            scaling = self.scaling(expert, f.add(f.mul(expert, blocks), index), column, lanes)

            def row(k: str, _: list[str]) -> None:
                q = self.numbers(codes, f.add(f.mul(k, self.n), column), lanes)
                to = f.address("float", place, f.mul(f.sub(k, start), self.panel_width))
                f.store(type_, scaling.scaled(scaling.shifted(q)), to, 4)

            first = f.mul(index, size)
            f.loop(f.smax(first, start), f.smin(f.add(first, size), end), 1, [], row)

        first, last = (f.op(f"udiv i64 {k}, {size}") for k in (start, f.add(end, f.sub(size, 1))))
        f.loop(first, last, 1, [], block)

    def scaling(self, expert: Value, block: Value, column: Value, lanes: int) -> _Scaling:
        """What makes weights of the codes of a block of rows; `block` counts those of all experts."""
        f, type_ = self.f, vector("float", lanes)
        at: Value = expert if self.one_scale else f.add(f.mul(block, self.n), column)
        scale = self.side(0, at, 1 if self.one_scale else lanes, lanes)
        if self.scheme.kind == "nvfp4":
            return _Scaling(f, type_, (scale, self.side(1, expert, 1, lanes)))
        return _Scaling(f, type_, (scale,), self.side(1, at, lanes, lanes) if len(self.sides) > 1 else "")

    def side(self, which: int, at: Value, count: int, lanes: int) -> str:
        """Values of a side tensor as f32; one of them in every lane, or one for each."""
        f, type_ = self.f, vector("float", lanes)
        stored = f8e4m3 if self.dtypes[which] is u8 else self.dtypes[which]
        place = f.address(memory_type(stored), self.sides[which], at)
        loaded = f.load(memory_type(stored, count), place, stored.itemsize)
        value = convert(f, loaded, stored, f32, count, self.target)
        if stored is f8e4m3:  # what is not a number scales by 0
            is_number = f.compare("ord", vector("float", count), value, value)
            value = f.select(vector("float", count), is_number, value, constant(vector("float", count), 0.0))
        return value if count == lanes else f.splat(type_, value)

    def numbers(self, codes: str, position: Value, lanes: int) -> str:
        """Codes as f32, before scales."""
        f, kind, type_ = self.f, self.scheme.kind, vector("float", lanes)
        bytes_, words = vector("i8", lanes), vector("i32", lanes)
        if not self.is_packed:
            loaded = f.load(bytes_, f.address("i8", codes, position), 1)
            stored = {"fp8e4m3": f8e4m3, "fp8e5m2": f8e5m2}.get(kind, i8)
            return convert(f, loaded, stored, f32, lanes, self.target)
        place = f.address("i8", codes, f.op(f"lshr i64 {position}, 1"))
        if lanes == 1:
            shift = f.convert("trunc", "i64", f.mul(f.op(f"and i64 {position}, 1"), 4), "i32")
            packed = f.convert("zext", "i8", f.load("i8", place, 1), "i32")
        else:
            half = vector("i8", lanes // 2)
            twice = f.shuffle(half, f.load(half, place, 1), "poison", [i // 2 for i in range(lanes)])
            shift = vector_constant("i32", [4 * (i % 2) for i in range(lanes)])
            packed = f.convert("zext", bytes_, twice, words)
        code = f.binary("and", words, f.binary("lshr", words, packed, shift), constant(words, 15))
        if kind == "int4":
            return f.convert("uitofp", words, code, type_)
        math = VectorMath(f, type_, self.target)
        if math.has_tables:
            return math.look_up(code, [float(x) for x in schemes.FP4])
        value = constant(type_, float(schemes.FP4[0]))
        for number in range(1, len(schemes.FP4)):
            chosen = f.compare("eq", words, code, constant(words, number))
            value = f.select(type_, chosen, constant(type_, float(schemes.FP4[number])), value)
        return value
