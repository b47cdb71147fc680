"""Products with GGUF weights, read as the blocks they are stored in: nothing is unpacked in memory.

    quantize   x in f32 becomes 16-bit numbers with one scale for each 32 of them, and the scaled sum of each 32
    product    rows of weights times rows of x: whole-number products of 32 elements, then one scale a block

An element of a weight is d·q + m with small whole numbers q, so a block gives d·dx·Σ q·xq + m·dx·Σ xq. Sixteen bits for
x keep the result within 1e-4 of exact; eight would be faster, and lose 4 % over the layers of a small model.
Sums are the same for any number of threads. A single row of x takes a shorter way than four at a time do, so that the
last bits may depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.llvm.builder import Function, Module, Value, constant
from strata.backends.llvm.native import arguments, kernel, number_slots, numbers
from strata.backends.llvm.native_dequant_blocks import FLOATS, FORMATS, PAIR, SHORTS, WORDS, Group, Scales, folded_least
from strata.backends.llvm.overrides import Call, NativeOp, Planned, Sizes, override
from strata.core import Target, TensorType, dim_prod, f32
from strata.mir import Node, Op

LEAST_K = 64  # below, there is nothing to gain
GROUP = 32  # elements that share a scale of x
TOKENS = 64  # rows of x that are kept in the cache while rows of weights pass
CHUNK_BYTES = 48 << 10  # of weights that a thread takes at once
LEVELS = 32767


def _accepts(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """f32 rows of at least 64, weights in a block format that is read here, a processor with products of pairs."""
    x = types[0]
    form = op.scheme.kind.removeprefix("gguf_")  # type: ignore[attr-defined]
    able = target.has_avx2 and target.has_fma and target.has_f16c
    return able and form in FORMATS and x.dtype is f32 and x.shape[-1].__index__() >= LEAST_K


@override("dequant_matmul", instead_of_parts=_accepts)
def dequant_matmul(node: Node, target: Target) -> NativeOp | None:
    op: Any = node.op
    x, codes = (v.type for v in node.inputs[:2])
    if not _accepts(op, [x, codes], target):
        return None
    k, n = op.columns(x, codes, ())
    kind = op.scheme.kind.removeprefix("gguf_")
    row_bytes = codes.size.__index__() // n
    groups = k // GROUP

    def plan(sizes: Sizes) -> Planned:
        (rows,) = numbers([dim_prod(x.shape[:-1])], sizes)
        if rows == 0:
            return Planned(())
        scales = -(-rows * k * 2 // 64) * 64
        work = [("workspace", 0), ("workspace", scales)]
        tiles = -(-n // 4)
        grain = max(1, min(CHUNK_BYTES // (4 * row_bytes), tiles // 8))
        return Planned(
            (
                Call("quantize", [("input", 0), *work], rows * groups, max(1, min(rows * groups // 8, 64))),
                Call("product", [("input", 1), *work, ("output", 0), *number_slots(rows, n, k)], tiles, grain),
            ),
            scales + rows * groups * 8 + 64,
        )  # fmt: skip

    def emit(module: Module) -> None:
        _emit_quantize(module)
        _Product(kernel(module, "product"), kind).emit()

    return NativeOp(f"dequant_matmul {kind} {CHUNK_BYTES} {TOKENS}", emit, ("quantize", "product"), plan)


def _emit_quantize(module: Module) -> None:
    """A group of 32 a point: numbers, the scale, and an eighth of the scaled sum (each of eight lanes adds it once)."""
    f = kernel(module, "quantize")
    x, quants, scales = arguments(f, "ppp")

    def group(i: str, _: list[str]) -> None:
        first = f.mul(i, GROUP)
        parts = [f.load(FLOATS, f.address("float", x, f.add(first, 8 * j)), 4) for j in range(4)]
        sizes = [f.intrinsic("fabs", FLOATS, p) for p in parts]
        high = sizes[0]
        for s in sizes[1:]:
            high = f.select(FLOATS, f.compare("ogt", FLOATS, high, s), high, s)
        most = f.fold_lanes(FLOATS, high, lambda t, a, b: f.select(t, f.compare("ogt", t, a, b), a, b))
        scale = f.binary("fmul", "float", most, constant("float", 1 / LEVELS))
        some = f.compare("ogt", "float", scale, constant("float", 1e-35))
        rate = f.binary("fdiv", "float", constant("float", LEVELS), most)
        rate = f.splat(FLOATS, f.select("float", some, rate, constant("float", 0)))
        total = "zeroinitializer"
        for j, part in enumerate(parts):
            near = f.intrinsic("rint", FLOATS, f.binary("fmul", FLOATS, part, rate))
            whole = f.convert("fptosi", FLOATS, near, WORDS)
            total = f.binary("add", WORDS, total, whole)
            place = f.address("i16", quants, f.add(first, 8 * j))
            f.store("<8 x i16>", f.convert("trunc", WORDS, whole, "<8 x i16>"), place, 2)
        count = f.fold_lanes(WORDS, total, lambda t, a, b: f.binary("add", t, a, b))
        eighth = f.binary("fmul", "float", scale, constant("float", 0.125))
        f.store("float", scale, f.address("float", scales, f.mul(i, 2)), 4)
        value = f.binary("fmul", "float", f.convert("sitofp", "i32", count, "float"), eighth)
        f.store("float", value, f.address("float", scales, f.add(f.mul(i, 2), 1)), 4)

    f.loop("%begin", "%end", 1, [], group)
    f.ret()


class _Product:
    """Emits `product`: tiles of 4 rows of weights, each times blocks of rows of x."""

    def __init__(self, f: Function, kind: str) -> None:
        self.f, self.form = f, FORMATS[kind]
        self.codes, self.quants, self.scales, self.out, self.rows, self.n, self.k = arguments(f, "ppppiii")
        self.groups = f.op(f"lshr i64 {self.k}, 5")
        self.blocks = f.op(f"udiv i64 {self.k}, {self.form.elements}")
        self.row_bytes = f.mul(self.blocks, self.form.bytes)

    def emit(self) -> None:
        f = self.f
        low, high = f.mul("%begin", 4), f.smin(f.mul("%end", 4), self.n)

        def token_block(start: str, _: list[str]) -> None:
            stop = f.smin(f.add(start, TOKENS), self.rows)
            whole = f.add(start, f.round_down(f.sub(stop, start), 4))
            even = f.add(low, f.round_down(f.sub(high, low), 2))
            quarter = f.op(f"lshr i64 {f.sub(high, low)}, 2")
            many = f.compare("sgt", "i64", whole, start)

            def apart(row: Value) -> list[Value]:
                return [f.add(row, f.mul(quarter, i)) for i in range(4)]

            def four_tokens() -> None:
                f.loop(low, even, 2, [], lambda row, _: self.tokens([row, f.add(row, 1)], start, whole, 4))
                f.loop(even, high, 1, [], lambda row, _: self.tokens([row], start, whole, 4))

            f.if_(many, four_tokens)

            def one_token() -> None:
                # four rows far apart: memory is read as four streams, which is twice as fast as one
                f.loop(0, quarter, 1, [], lambda i, _: self.tokens(apart(f.add(low, i)), whole, stop, 1))
                f.loop(f.add(low, f.mul(quarter, 4)), high, 1, [], lambda row, _: self.tokens([row], whole, stop, 1))

            f.if_(f.compare("slt", "i64", whole, stop), one_token)

        f.loop(0, self.rows, TOKENS, [], token_block)
        f.ret()

    def tokens(self, rows: list[Value], first: Value, last: Value, width: int) -> None:
        one = self.row if width == 1 else self.tile
        self.f.loop(first, last, width, [], lambda token, _: one(rows, token, width))

    def tile(self, rows: list[Value], token: Value, width: int) -> None:
        """Some rows of weights times `width` rows of x."""
        f, height = self.f, len(rows)
        weights = [f.address("i8", self.codes, f.mul(row, self.row_bytes)) for row in rows]
        quants = [f.address("i16", self.quants, f.mul(f.add(token, t), self.k)) for t in range(width)]
        scales = [f.address("float", self.scales, f.mul(f.mul(f.add(token, t), self.groups), 2)) for t in range(width)]
        per_block = self.form.elements // GROUP

        def block(b: str, sums_so_far: list[str]) -> list[Value]:
            acc = list(sums_so_far)
            heads = [self.form.head(f, f.address("i8", w, f.mul(b, self.form.bytes))) for w in weights]
            for j in range(per_block):
                g = f.add(f.mul(b, per_block), j)
                parts = [self.form.group(f, head, j) for head in heads]
                for t in range(width):
                    start = f.mul(g, GROUP)
                    x = [f.load(SHORTS, f.address("i16", quants[t], f.add(start, 16 * i)), 2) for i in range(2)]
                    at = f.mul(g, 2)
                    scale = f.splat(FLOATS, f.load("float", f.address("float", scales[t], at), 4))
                    least = (
                        f.load("float", f.address("float", scales[t], f.add(at, 1)), 4) if self.form.has_least else ""
                    )
                    total = f.splat(FLOATS, least) if least else ""
                    for r, part in enumerate(parts):
                        acc[r * width + t] = self.add(acc[r * width + t], part, x, scale, total)
            return list(acc)

        start = [(FLOATS, "zeroinitializer")] * (height * width)
        acc = f.loop(0, self.blocks, 1, start, block)
        for r in range(height):
            for t in range(width):
                value = f.fold_lanes(FLOATS, acc[r * width + t], lambda kind, a, b: f.binary("fadd", kind, a, b))
                place = f.add(f.mul(f.add(token, t), self.n), rows[r])
                f.store("float", value, f.address("float", self.out, place), 4)

    def row(self, rows: list[Value], token: Value, width: int) -> None:
        """Some rows of weights times one row of x, whose scales are multiplied into those of the weights first."""
        f, form = self.f, self.form
        weights = [f.address("i8", self.codes, f.mul(row, self.row_bytes)) for row in rows]
        quants = f.address("i16", self.quants, f.mul(token, self.k))
        scales = f.address("float", self.scales, f.mul(f.mul(token, self.groups), 2))
        per_block, count = form.elements // GROUP, len(rows)
        kind = PAIR if per_block == 1 else FLOATS

        def block(b: str, so_far: list[str]) -> list[Value]:
            acc, least = list(so_far[:count]), list(so_far[count:])
            x_scales = self.x_scales(scales, b)
            heads = [form.head(f, f.address("i8", w, f.mul(b, form.bytes))) for w in weights]
            least = [form.fold(f, head, x_scales, part) for head, part in zip(heads, least, strict=True)]
            for j in range(per_block):
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
                value = f.binary("fadd", "float", value, folded_least(f, form, found[count + r]))
            f.store("float", value, f.address("float", self.out, f.add(f.mul(token, self.n), rows[r])), 4)

    def x_scales(self, scales: str, b: Value) -> Scales:
        """The scales and sums of x for block b."""
        f = self.f
        if self.form.elements == GROUP:
            pair = f.load("<2 x float>", f.address("float", scales, f.mul(b, 2)), 4)
            return Scales(pair=f.shuffle("<2 x float>", pair, "zeroinitializer", range(4)))
        at = f.mul(b, 16)
        low, high = (f.load(FLOATS, f.address("float", scales, f.add(at, 8 * i)), 4) for i in range(2))
        even, odd = (f.shuffle(FLOATS, low, high, range(i, 16, 2)) for i in range(2))
        return Scales(scales=even, sums=odd)

    def add(self, acc: str, part: Group, x: list[str], scale: str = "", total: str = "") -> str:
        """acc + d·dx·Σ q·xq + m·dx·Σ xq, by products of 16-bit pairs. Without `scale`, it is in the group's own."""
        f = self.f
        first, second = (
            f.call(WORDS, "llvm.x86.avx2.pmadd.wd", (SHORTS, q), (SHORTS, v))
            for q, v in zip(part.quants, x, strict=True)
        )

        def scaled(value: str) -> str:
            return f.binary("fmul", FLOATS, value, scale) if scale else value

        if part.second_scale:
            low, high = (scaled(f.convert("sitofp", WORDS, p, FLOATS)) for p in (first, second))
            return f.fma(FLOATS, high, part.second_scale, f.fma(FLOATS, low, part.scale, acc))
        fours = scaled(f.convert("sitofp", WORDS, f.binary("add", WORDS, first, second), FLOATS))
        acc = f.fma(FLOATS, fours, part.scale, acc)
        return f.fma(FLOATS, part.least, total, acc) if part.least and total else acc
