"""Matmul with GGUF weights, read as the blocks they are stored in: nothing is dequantised in memory.

    quantize   x in f32 becomes 16-bit numbers with one scale for each 32 of them, and the scaled sums of these
    rows       a few rows of x: rows of weights as they lie, four streams at a time; `gguf_wide` for 512 bits
    panels     more rows of x: weights are unpacked once for all of them, see `gguf_panel`
    decoded    any rows of x, with blocks whose numbers are not whole or not side by side, see `gguf_decoded`

An element of a weight is d·q + m with small whole numbers q, so a block gives d·dx·Σ q·xq + m·dx·Σ xq. Sixteen bits for
x keep the result within 1e-4 of exact; eight would be faster, and lose 4 % over the layers of a small model.
Results are the same for any number of threads. A few rows of x are added up in another order than many are, so that the
last bits may depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import arguments, each_point, kernel, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.quant.gguf_blocks import (
    FLOATS,
    PAIR,
    SHORTS,
    WORDS,
    Format,
    QuantGroup,
    Scales,
    format_of,
)
from strata.backends.llvm.quant.gguf_decoded import DecodedRows
from strata.backends.llvm.quant.gguf_panel import GROUP, GgufPanels, panel_rows
from strata.backends.llvm.quant.gguf_wide import LEVELS as WIDE_LEVELS
from strata.backends.llvm.quant.gguf_wide import STREAMS, WideRows, WideStep, each_product, row_points, wide_step
from strata.core import Target, TensorType, dim_prod, f32
from strata.mir import Node, Op
from strata.ops import gguf_blocks

LEAST_K = 64  # below, there is nothing to gain
MANY = 4  # from this many rows of x on, unpacking weights once for all of them pays
# bytes of weights that a thread takes at once: streams want to be long, and all threads busy
LEAST_CHUNK, MOST_CHUNK = 64 << 10, 384 << 10
AHEAD = 512  # bytes between what is read and what is fetched: rows are too short for the processor to do it well
LEVELS = 32767


def _accepts(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    return reads_blocks(op, types[0], target) or decodes_blocks(op, types[0], target)


def decodes_blocks(op: Op, x: TensorType, target: Target) -> bool:
    """f32 rows, blocks that are not multiplied as whole numbers."""
    scheme = op.scheme  # type: ignore[attr-defined]
    return bool(scheme.is_gguf and x.dtype is f32 and target.has_f16c and not format_of(scheme.kind).is_readable)


def reads_blocks(op: Op, x: TensorType, target: Target) -> bool:
    """f32 rows of at least 64, weights in a block format that is read here, a processor with products of pairs."""
    scheme = op.scheme  # type: ignore[attr-defined]
    able = target.has_avx2 and target.has_fma and target.has_f16c and scheme.is_gguf
    return able and format_of(scheme.kind).is_readable and x.dtype is f32 and x.shape[-1].__index__() >= LEAST_K


@override("dequant_matmul", instead_of_parts=_accepts)
def dequant_matmul(node: Node, target: Target) -> NativeOp | None:
    op: Any = node.op
    x, codes = (v.type for v in node.inputs[:2])
    if not _accepts(op, [x, codes], target):
        return None
    k, n = op.columns(x, codes, ())
    if decodes_blocks(op, x, target):
        return _decoded_matmul(op, x, k, n, target)
    kind = op.scheme.kind.removeprefix("gguf_")
    form = format_of(kind)
    row_bytes = codes.size.__index__() // n
    groups, blocks = k // GROUP, k // form.elements
    step = wide_step(kind, target)

    def plan(sizes: Sizes) -> Planned:
        (rows,) = numbers([dim_prod(x.shape[:-1])], sizes)
        if rows == 0 or n == 0:
            return Planned(())
        wide = step if rows < MANY else None
        whole = -(-blocks // wide.blocks) * wide.blocks if wide else blocks  # blocks of x, zeros at the end included
        sides = -(-rows * whole * form.elements * 2 // 64) * 64
        work = [("workspace", 0), ("workspace", sides)]
        slots = [("input", 1), *work, ("output", 0), *number_slots(rows, n, k)]
        if rows >= MANY:
            panels = -(-n // panel_rows(target))
            product = NativeCall("panels", slots, panels, max(1, min(panels // 32, 4)))
        else:
            points = row_points(n)
            chunk = min(max(n * row_bytes // 32, LEAST_CHUNK), MOST_CHUNK)
            product = NativeCall("rows", slots, points, max(1, min(chunk // (STREAMS * row_bytes), points // 4)))
        counts = number_slots(groups, whole * form.groups)
        name, every = "quantize_wide" if wide else "quantize", rows * whole * form.groups
        quantize = NativeCall(name, [("input", 0), *work, *counts], every, 64)
        return Planned((quantize, product), sides + rows * whole * form.record * 4 + 64)

    def emit(module: IrModule) -> None:
        emit_products(module, kind, target)

    functions = ("quantize", "rows", "panels", *(["quantize_wide"] if step else []))
    return NativeOp(f"dequant_matmul {kind} {AHEAD}", emit, functions, plan)


def _decoded_matmul(op: Any, x: TensorType, k: int, n: int, target: Target) -> NativeOp:
    form = gguf_blocks.block_format(op.scheme.kind)

    def plan(sizes: Sizes) -> Planned:
        (rows,) = numbers([dim_prod(x.shape[:-1])], sizes)
        if rows == 0 or n == 0:
            return Planned(())
        slots = [("input", 1), ("input", 0), ("output", 0), *number_slots(rows, n, k)]
        points = row_points(n)
        return Planned((NativeCall("decoded", slots, points, max(1, min(16, points // 16))),), 0)

    def emit(module: IrModule) -> None:
        DecodedRows(kernel(module, "decoded"), form, target).emit()

    return NativeOp(f"dequant_matmul {form.name} decoded", emit, ("decoded",), plan)


def emit_products(module: IrModule, kind: str, target: Target) -> None:
    """Adds `quantize`, `rows` and `panels`, and `quantize_wide` where rows have steps of 512 bits."""
    form = format_of(kind)
    emit_quantize(module, form)
    if step := wide_step(kind, target):
        emit_quantize(module, form, step)
        WideRows(kernel(module, "rows"), step).emit()
    else:
        GgufRows(kernel(module, "rows"), form).emit()
    GgufPanels(kernel(module, "panels"), form, target).emit()


def emit_quantize(module: IrModule, form: Format, step: WideStep | None = None) -> None:
    """A group of 32 a point: numbers, the scale, and the scaled sum of the group or of each half."""
    f = kernel(module, "quantize_wide" if step else "quantize")
    x, quants, sides, groups, whole = arguments(f, "pppii")
    levels = WIDE_LEVELS if step else LEVELS
    together = step.groups if step else form.groups  # groups that have their scales side by side

    def group(i: str, _: list[str]) -> None:
        parts = _behind_the_end(f, x, i, groups, whole) if step else _parts(f, x, i)
        # as bits, where a NaN is larger than all numbers: it must not be lost
        bits = [f.convert("bitcast", FLOATS, p, WORDS) for p in parts]
        high, *others = [f.binary("and", WORDS, b, constant(WORDS, 0x7FFFFFFF)) for b in bits]
        for other in others:
            high = f.select(WORDS, f.compare("ugt", WORDS, high, other), high, other)
        largest = f.fold_lanes(WORDS, high, lambda t, a, b: f.select(t, f.compare("ugt", t, a, b), a, b))
        most = f.convert("bitcast", "i32", largest, "float")
        # no whole number stands for what is not finite: then all are 0, and the scale makes the sum NaN
        finite = f.compare("ult", "i32", largest, str(0x7F800000))
        parts = [f.select(FLOATS, finite, p, constant(FLOATS, 0), uniform=True) for p in parts]
        scale = f.binary("fmul", "float", most, constant("float", 1 / levels))
        some = f.compare("ogt", "float", scale, constant("float", 1e-35))
        rate = f.binary("fdiv", "float", constant("float", levels), most)
        rate = f.splat(FLOATS, f.select("float", some, rate, constant("float", 0)))
        nearest = (f.intrinsic("rint", FLOATS, f.binary("fmul", FLOATS, part, rate)) for part in parts)
        wholes = [f.convert("fptosi", FLOATS, near, WORDS) for near in nearest]
        if step:
            _store_bytes(f, step, wholes, quants, i)
        else:
            for j, part in enumerate(wholes):
                place = f.address("i16", quants, f.add(f.mul(i, GROUP), 8 * j))
                f.store("<8 x i16>", f.convert("trunc", WORDS, part, "<8 x i16>"), place, 2)
        block, at = (f.op(f"{op} i64 {i}, {together}") for op in ("udiv", "urem"))
        record = f.address("float", sides, f.mul(block, together * form.record // form.groups))
        f.store("float", scale, f.address("float", record, at), 4)
        count = 2 if form.is_halved else 1
        for number, summed in enumerate([wholes[:2], wholes[2:]] if form.is_halved else [wholes]):
            total = summed[0]
            for more in summed[1:]:
                total = f.binary("add", WORDS, total, more)
            all_ = f.fold_lanes(WORDS, total, lambda t, a, b: f.binary("add", t, a, b))
            value = f.binary("fmul", "float", f.convert("sitofp", "i32", all_, "float"), scale)
            f.store("float", value, f.address("float", record, f.add(together + number, f.mul(at, count))), 4)

    each_point(f, group)


def _parts(f: IrFunction, x: str, group: Value) -> list[str]:
    """The 32 elements of a group."""
    first = f.mul(group, GROUP)
    return [f.load(FLOATS, f.address("float", x, f.add(first, 8 * j)), 4) for j in range(4)]


def _behind_the_end(f: IrFunction, x: str, group: str, groups: str, whole: str) -> list[str]:
    """The 32 elements of a group, of rows that have zeros after their elements up to a whole step."""
    row, at = (f.op(f"{op} i64 {group}, {whole}") for op in ("udiv", "urem"))
    is_there = f.compare("slt", "i64", at, groups)

    def zeros() -> list[Value]:
        return ["zeroinitializer"] * 4

    return f.if_(is_there, lambda: _parts(f, x, f.add(f.mul(row, groups), at)), zeros, [FLOATS] * 4)


def _store_bytes(f: IrFunction, step: WideStep, wholes: list[str], quants: str, group: str) -> None:
    """Numbers as 256 · high + low, each eight of them where its step wants it."""
    at, which = (f.op(f"{op} i64 {group}, {step.groups}") for op in ("udiv", "urem"))
    base = f.address("i8", quants, f.mul(at, 2 * step.elements))
    places = f.module.table("i64", step.places())
    for j, low in enumerate(wholes):
        place = f.load("i64", f.address("i64", places, f.add(f.mul(which, 4), j)), 8)
        high = f.binary("ashr", WORDS, f.binary("add", WORDS, low, constant(WORDS, 128)), constant(WORDS, 8))
        for offset, part in ((0, high), (64, low)):
            small = f.convert("trunc", WORDS, part, "<8 x i8>")
            f.store("<8 x i8>", small, f.address("i8", base, f.add(place, offset)), 1)


class GgufRows:
    """Emits `rows`: tiles of 4 rows of weights times each row of x."""

    def __init__(self, f: IrFunction, form: Format) -> None:
        self.f, self.form = f, form
        self.codes, self.quants, self.sides, self.out, self.rows, self.n, self.k = arguments(f, "ppppiii")
        self.blocks = f.op(f"udiv i64 {self.k}, {form.elements}")
        self.row_bytes = f.mul(self.blocks, form.bytes)

    def emit(self) -> None:
        each_product(self.f, self.rows, self.n, self.row)

    def row(self, rows: list[Value], token: Value) -> None:
        """Some rows of weights times one row of x, whose scales are multiplied into those of the weights first."""
        f, form = self.f, self.form
        weights = [f.address("i8", self.codes, f.mul(row, self.row_bytes)) for row in rows]
        quants = f.address("i16", self.quants, f.mul(token, self.k))
        sides = f.address("float", self.sides, f.mul(f.mul(token, self.blocks), form.record))
        count = len(rows)
        kind = PAIR if form.groups == 1 else FLOATS

        def block(b: str, so_far: list[str]) -> list[Value]:
            acc, least = list(so_far[:count]), list(so_far[count:])
            places = [f.address("i8", w, f.mul(b, form.bytes)) for w in weights]
            for place in places:
                for line in range(0, form.bytes, 64):
                    f.prefetch(f.address("i8", place, AHEAD + line))
            x_scales = self.x_scales(f.address("float", sides, f.mul(b, form.record)))
            heads = [form.head(f, place) for place in places]
            least = [form.fold(f, head, x_scales, part) for head, part in zip(heads, least, strict=True)]
            for j in range(form.groups):
                at = f.add(f.mul(b, form.elements), j * GROUP)
                x = [f.load(SHORTS, f.address("i16", quants, f.add(at, 16 * i)), 2) for i in range(2)]
                for r, head in enumerate(heads):
                    acc[r] = self.add(acc[r], form.group(f, head, j), x)
            return [*acc, *least]

        start = [(FLOATS, "zeroinitializer")] * count + [(kind, "zeroinitializer")] * count
        found = f.loop(0, self.blocks, 1, start, block)
        for r in range(count):
            value = f.fold_lanes(FLOATS, found[r], lambda kind, a, b: f.binary("fadd", kind, a, b))
            if form.has_least:
                value = f.binary("fadd", "float", value, form.folded_least(f, found[count + r]))
            f.store("float", value, f.address("float", self.out, f.add(f.mul(token, self.n), rows[r])), 4)

    def x_scales(self, record: str) -> Scales:
        """The scales and sums of x for a block."""
        f, form = self.f, self.form
        if form.groups == 1:
            pair = f.load("<2 x float>", record, 4)
            return Scales(pair=f.shuffle("<2 x float>", pair, "zeroinitializer", range(4)))
        first, *sums = (f.load(FLOATS, f.address("float", record, at), 4) for at in range(0, form.record, 8))
        return Scales(scales=first, sums=tuple(sums))

    def add(self, acc: str, part: QuantGroup, x: list[str]) -> str:
        """acc + d·Σ q·xq, by products of 16-bit pairs."""
        f = self.f
        first, second = (
            f.call(WORDS, "llvm.x86.avx2.pmadd.wd", (SHORTS, q), (SHORTS, v))
            for q, v in zip(part.quants, x, strict=True)
        )
        if part.second_scale:
            low, high = (f.convert("sitofp", WORDS, p, FLOATS) for p in (first, second))
            return f.fma(FLOATS, high, part.second_scale, f.fma(FLOATS, low, part.scale, acc))
        fours = f.convert("sitofp", WORDS, f.binary("add", WORDS, first, second), FLOATS)
        return f.fma(FLOATS, fours, part.scale, acc)
