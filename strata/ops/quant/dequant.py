"""Weights that stay quantised: dequantisation as an op, and the matmul that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, DType, TensorType, bf16, dim_prod, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8
from strata.errors import OptionError, ShapeError, StrataError
from strata.mir import Op, Sample, Value, function, op, pullback, pushforward
from strata.ops.base.creation import ones_like, zeros_like
from strata.ops.base.frontend import Operand, as_value, same_shape, to_inexact
from strata.ops.base.movement import broadcast_to, insert_axis, narrow, reshape
from strata.ops.elementwise.logic import cast, stop_gradient
from strata.ops.indexing.indexing import looked_up
from strata.ops.linalg.matmul import MatMul
from strata.ops.quant.gguf_blocks import FORMATS, PACKED, block_format, random_blocks
from strata.ops.quant.gguf_kernels import block_element
from strata.ops.quant.schemes import FP4, Scheme, as_scheme, side_dtype

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


@op("dequant_weights")
class DequantWeights(Op):
    """W[K, N] in f32 from codes and side tensors of a scheme; [E, K, N] from E of them when `experts` > 0.

    Codes may have any shape that holds the right number of elements. They are frozen; float side tensors have
    derivatives. Side tensors in f64 give f64.
    """

    scheme: Scheme
    k: int
    n: int
    experts: int = 0

    dtypes = (u8,)

    def infer(self, codes: TensorType, *sides: TensorType) -> TensorType:
        scheme, many = self.scheme, max(self.experts, 1)
        allowed: dict[str, tuple[DType, ...]] = {"fp8e4m3": (u8, i8, f8e4m3), "fp8e5m2": (u8, i8, f8e5m2)}
        kinds = allowed.get(scheme.kind, (scheme.storage,))
        self.require_dtype(codes.dtype in kinds, f"{scheme} codes are {kinds[0]}, got {codes}", code="D225")
        total = many * scheme.code_count(self.k, self.n)
        self.require(codes.size == total, f"{scheme} [{self.k}, {self.n}] has {total} codes, got {codes}", code="S277")
        names = scheme.sides
        self.require(
            len(sides) == len(names), f"{scheme} takes {len(names)} side tensors, got {len(sides)}", code="S278"
        )
        lead = (self.experts,) if self.experts else ()
        for name, shape, given in zip(names, scheme.side_shapes(self.k, self.n), sides, strict=True):
            wanted = TensorType(side_dtype(scheme, name), shape if name == "book" else (*lead, *shape))
            shared = scheme.kind.startswith("fp8") and same_shape(given.shape, (*lead, 1))
            typed = given.dtype.is_float if wanted.dtype is f32 else given.dtype is wanted.dtype
            ok = typed and (same_shape(given.shape, wanted.shape) or shared)
            self.require(ok, f"the {name} of {scheme} [{self.k}, {self.n}] is {wanted}, got {given}", code="S278")
        return TensorType(f64 if any(s.dtype is f64 for s in sides) else f32, (*lead, self.k, self.n))

    def numpy(self, codes: np.ndarray, *sides: np.ndarray) -> np.ndarray:
        if codes.dtype.kind == "f":  # 8-bit floats arrive widened
            narrow = f8e4m3 if self.scheme.kind == "fp8e4m3" else f8e5m2
            codes = codes.astype(narrow.np).view(np.uint8)
        if not self.experts:
            return self.scheme.decode(codes, *sides, k=self.k, n=self.n)
        slabs = np.ascontiguousarray(codes).reshape(self.experts, -1)
        if self.scheme.is_gguf:
            sides = ()
        return np.stack(
            [self.scheme.decode(c, *(s[e] for s in sides), k=self.k, n=self.n) for e, c in enumerate(slabs)]
        )

    def as_product(self, codes: Value, *sides: Value) -> Value:
        """The same weights as bare numbers times, and less, their side tensors: what derivatives are taken of."""
        out = self.infer(codes.type, *(s.type for s in sides))
        bare = [ones_like(s) if s.dtype.is_float else s for s in sides]
        if "zero" in self.scheme.sides:
            bare[1] = zeros_like(sides[1])
        numbers = stop_gradient(self(codes, *bare))
        wide = [cast(s, out.dtype) if s.dtype.is_float else s for s in sides]
        if self.scheme.is_gguf:
            return numbers
        if self.scheme.kind == "nvfp4":
            return numbers * insert_axis(wide[1], -1)
        if self.scheme.kind.startswith("fp8"):
            return numbers * insert_axis(wide[0], -2)
        return (numbers - self._rows(wide[1]) if len(wide) > 1 else numbers) * self._rows(wide[0])

    def _rows(self, x: Value) -> Value:
        """A side tensor [.., blocks, N] with a row for each of the K rows."""
        *lead, blocks, n = x.shape
        spread = broadcast_to(insert_axis(x, -2), (*lead, blocks, self.scheme.block_size, n))
        return narrow(reshape(spread, (*lead, blocks * self.scheme.block_size, n)), -2, 0, self.k)

    def jvp(self, *inputs: Value, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return pushforward([self.as_product(*inputs)], inputs[1:], dx[1:])[0]

    def vjp(self, *inputs: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return None, *pullback([self.as_product(*inputs)], [ct], inputs[1:])

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        many = size * max(self.experts, 1)
        if self.scheme.is_gguf:  # a codebook is one for all
            books = [
                reshape(narrow(x, 0, 0, 1), x.shape[1:]) if b else x for x, b in zip(inputs, batched, strict=True)
            ][1:]
            inputs, batched = inputs[:1], batched[:1]
        else:
            books = []
        spread = [x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True)]
        codes = reshape(spread[0], (dim_prod(spread[0].shape),))
        sides = [reshape(x, (many, *x.shape[2 if self.experts else 1 :])) for x in spread[1:]]
        out = DequantWeights(self.scheme, self.k, self.n, many.__index__())(codes, *sides, *books)
        return reshape(out, (size, *((self.experts,) if self.experts else ()), self.k, self.n))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        codes, *sides = inputs
        lead, (row, column) = index[:-2], index[-2:]
        slab = lead[0] * k.index(self.scheme.code_count(self.k, self.n)) if lead else k.index(0)

        def code(position: Expr) -> Expr:
            return codes[k.unflatten(slab + position, codes.shape)]

        if self.scheme.is_gguf:
            form = block_format(self.scheme.kind)
            start = (column * k.index(self.k // form.elements) + k.floordiv(row, k.index(form.elements))) * k.index(
                form.bytes
            )

            def book(line: Expr, at: Expr) -> Expr:
                return looked_up(k, sides[0], (k.cast(line, i64), at), [sides[0].shape[0]])

            return block_element(k, form, lambda at: code(start + at), k.mod(row, k.index(form.elements)), book)
        return self._lower_plain(k, code, lead, row, column, sides)

    def _lower_plain(
        self, k: KernelBuilder, code: Any, lead: tuple[Expr, ...], row: Expr, column: Expr, sides: list[View]
    ) -> Expr:
        kind, position = self.scheme.kind, row * k.index(self.n) + column
        wide = f64 if any(s.dtype is f64 for s in sides) else f32
        if kind.startswith("fp8"):
            scale = k.cast(sides[0][(*lead, k.index(0) if sides[0].shape[-1] == 1 else column)], wide)
            byte, wanted = code(position), f8e4m3 if kind == "fp8e4m3" else f8e5m2
            return k.cast(byte if byte.dtype.is_float else k.bitcast(byte, wanted), wide) * scale
        place = (*lead, k.floordiv(row, k.index(self.scheme.block_size)), column)
        if kind in ("int8", "int8a"):
            q = k.cast(code(position), wide)
        else:
            byte = k.cast(code(k.floordiv(position, k.index(2))), i32)
            shift = k.cast(k.mod(position, k.index(2)) * k.index(4), i32)
            nibble = k.and_(k.shr(byte, shift), k.const(15, i32))
            q = k.cast(nibble, wide) if kind == "int4" else k.cast(_fp4(k, nibble), wide)
        if kind == "nvfp4":
            scale = k.cast(k.bitcast(sides[0][place], f8e4m3), f32)
            scale = k.cast(k.select(k.isnan(scale), k.const(0.0, f32), scale), wide)
            return q * scale * k.cast(sides[1][(*lead, k.index(0))], wide)
        scale = k.cast(sides[0][place], wide)
        return (q - k.cast(sides[1][place], wide) if len(sides) > 1 else q) * scale

    @classmethod
    def samples(cls) -> list[Sample]:
        rng = np.random.default_rng(1)
        found = []
        shapes = {
            "int4/4": (5, 3),
            "int8/4": (8, 4),
            "int8a/3": (7, 2),
            "fp8e4m3": (3, 4),
            "fp8e5m2": (3, 2),
            "nvfp4/16": (20, 3),
        }
        for name, (k, n) in shapes.items():
            scheme = Scheme.from_text(name)
            found.append(Sample(*scheme.encode(rng.standard_normal((k, n))), scheme=scheme, k=k, n=n))
        for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "q8k"):
            scheme = Scheme(f"gguf_{name}")
            k = scheme.block_size
            found.append(Sample(*scheme.encode(rng.standard_normal((k, 2))), scheme=scheme, k=k, n=2, grad=False))
        for name, form in (
            FORMATS | {n: PACKED[n] for n in ("u4_32h", "i8_64b", "m4_32f", "nf4_64f", "nvfp4_64f", "e4m3_32f")}
        ).items():
            scheme = Scheme(f"gguf_{name}")
            if form.encode is None or form.code > 15:
                books = [scheme.book] if scheme.book is not None else []
                blocks = random_blocks(form, 2, rng)
                found.append(Sample(blocks, *books, scheme=scheme, k=form.elements, n=2, grad=False))
        experts = [Scheme("int4", 4).encode(rng.standard_normal((4, 3))) for _ in range(2)]
        found.append(Sample(*map(np.stack, zip(*experts, strict=True)), scheme=Scheme("int4", 4), k=4, n=3, experts=2))
        whole = Scheme("fp8e4m3").encode(rng.standard_normal((2, 3)))[0]
        found.append(Sample(whole, np.array([0.5], np.float32), scheme=Scheme("fp8e4m3"), k=2, n=3))
        return found


def _fp4(k: KernelBuilder, nibble: Expr) -> Expr:
    """The number of a 4-bit float: a chain of selections over its eight magnitudes."""
    magnitude = k.and_(nibble, k.const(7, i32))
    value = k.const(0.0, f32)
    for code in range(1, 8):
        value = k.select(k.eq(magnitude, k.const(code, i32)), k.const(float(FP4[code]), f32), value)
    return k.select(k.ge(nibble, k.const(8, i32)), -value, value)


@op("dequant_matmul")
class DequantMatMul(Op):
    """x [.., K] times a quantised W[K, N]: [.., N] in the dtype of x, added up in f32 or wider."""

    scheme: Scheme

    dtypes = (f16, bf16, f32)  # f64 is taken too, but the weights it meets have the precision of f32

    def columns(self, x: TensorType, codes: TensorType, sides: tuple[TensorType, ...]) -> tuple[int, int]:
        """K and N, from the shapes."""
        self.require(
            x.ndim >= 1 and isinstance(x.shape[-1], int), f"x must be [.., K] with a known K, got {x}", code="S279"
        )
        k = x.shape[-1].__index__()
        if self.scheme.bits == 4 and not self.scheme.is_gguf:
            self.require(bool(sides) and sides[0].ndim == 2, f"{self.scheme} needs a scale [blocks, N]", code="S278")
            return k, sides[0].shape[-1].__index__()
        each = self.scheme.code_count(k, 1)
        total = codes.size.__index__()
        self.require(each > 0 and total % each == 0, f"{codes} is no {self.scheme} matrix of {k} rows", code="S277")
        return k, total // each

    def weights(self, x: TensorType, codes: TensorType, sides: tuple[TensorType, ...]) -> DequantWeights:
        return DequantWeights(self.scheme, *self.columns(x, codes, sides))

    def infer(self, x: TensorType, codes: TensorType, *sides: TensorType) -> TensorType:
        self.require_dtype(x.dtype.is_float, f"x must be a float, got {x}", code="D104")
        try:
            w = self.weights(x, codes, sides).infer(codes, *sides)
        except StrataError as error:
            error.summary = error.summary.replace("dequant_weights", self.name)
            raise
        return x.with_shape((*x.shape[:-1], w.shape[1]))

    def numpy(self, x: np.ndarray, codes: np.ndarray, *sides: np.ndarray) -> np.ndarray:
        types = [TensorType(f32, x.shape), TensorType(u8, codes.shape), *(TensorType(f32, s.shape) for s in sides)]
        k, n = self.columns(types[0], types[1], tuple(types[2:]))
        w = DequantWeights(self.scheme, k, n).numpy(codes, *sides)
        return (x.astype(np.float64) @ w.astype(np.float64)).astype(x.dtype)

    def decompose(self, x: Value, codes: Value, *sides: Value) -> Value:
        wide = x.dtype.accumulator
        w = cast(self.weights(x.type, codes.type, tuple(s.type for s in sides))(codes, *sides), wide)
        rows = reshape(cast(x, wide), (dim_prod(x.shape[:-1]), x.shape[-1]))
        return cast(reshape(MatMul()(rows, w), (*x.shape[:-1], w.shape[1])), x.dtype)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if not any(batched[1:]):
            return self(*inputs)  # the batch axis is one more leading axis of x
        return super().vmap(*inputs, batched=batched, size=size)

    @classmethod
    def samples(cls) -> list[Sample]:
        rng = np.random.default_rng(2)

        def case(x: TensorType, scheme: Scheme, n: int, *, grad: bool = True) -> Sample:
            w = rng.standard_normal((x.shape[-1].__index__(), n))
            return Sample(x, *scheme.encode(w), scheme=scheme, grad=grad)

        return [
            case(f16[3, 8], Scheme("int4", 4), 5, grad=False), case(f32[3, 8], Scheme("int8", 4), 4),
            case(f32[2, 1, 6], Scheme("int8a", 4), 3), case(f32[5], Scheme("fp8e4m3"), 2),
            case(f32[2, 16], Scheme("nvfp4"), 3),
            case(f32[2, 32], Scheme("gguf_q4_0"), 3), case(f32[0, 4], Scheme("int8", 4), 2),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def dequant_weights(codes: Operand, *sides: Operand, scheme: Scheme | str, k: int, n: int) -> Value:
    """W[K, N] in f32 from its stored form."""
    kind = as_scheme(scheme)
    return DequantWeights(kind, k, n)(as_value(codes), *used_sides(kind, sides))


@function()
def dequant_matmul(x: Operand, codes: Operand, *sides: Operand, scheme: Scheme | str) -> Value:
    """x [.., K] times a quantised W[K, N]. A zero point that the scheme does not use may be passed and is left out."""
    kind = as_scheme(scheme)
    return DequantMatMul(kind)(to_inexact(as_value(x)), as_value(codes), *used_sides(kind, sides))


def used_sides(scheme: Scheme, sides: tuple[Any, ...]) -> list[Value]:
    """The side tensors that a scheme reads; a missing fp8 scale is 1."""
    names = scheme.sides
    if scheme.book is not None and not sides:
        return [as_value(scheme.book)]
    if scheme.kind.startswith("fp8") and not sides:
        return [as_value(np.ones(1, np.float32))]
    if len(sides) < len(names) or len(sides) > max(len(names), 2 if names else 0):
        raise ShapeError(f"{scheme} takes {len(names)} side tensors, got {len(sides)}", code="S278")
    return [as_value(s) for s in sides[: len(names)]]


def quantize_weights(w: np.ndarray, scheme: Scheme | str) -> tuple[np.ndarray, ...]:
    """The stored form of an array W[K, N]: codes, then side tensors."""
    array = np.asarray(w)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise OptionError(f"quantize_weights: needs numbers, got {array.dtype}", code="O239")
    return as_scheme(scheme).encode(array.astype(np.float32))
