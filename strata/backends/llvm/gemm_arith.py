"""What one multiply-accumulate step of a contraction does: element types, conversions on the way in, widening dots.

A step takes `group` consecutive k's: one for floats and plain integers, four for bytes on processors with a byte dot
product, two for bytes elsewhere. Packed operands keep the values of one step side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.builder import Function, Value, vector, with_element
from strata.core import DType, Target, bf16, f16, f32, i8, i32, u8
from strata.errors import DTypeError

LLVM_TYPE: Final = {
    "bool": "i8", "i8": "i8", "u8": "i8", "i16": "i16", "u16": "i16", "i32": "i32", "u32": "i32", "i64": "i64",
    "u64": "i64", "bf16": "i16", "f16": "half", "f32": "float", "f64": "double",
}  # fmt: skip


def llvm_type(dtype: DType, lanes: int = 1) -> str:
    """How a dtype lies in memory; bf16 is handled as its 16 bits."""
    if dtype.name not in LLVM_TYPE:
        raise DTypeError(f"contractions do not take elements of type {dtype}", code="D120")
    return vector(LLVM_TYPE[dtype.name], lanes)


def convert(f: Function, value: Value, source: DType, to: DType, lanes: int, target: Target) -> str:
    """A value (as `llvm_type(source, lanes)`) in another dtype, rounded to nearest even."""
    if source is to:
        return str(value)
    from_type, to_type = llvm_type(source, lanes), llvm_type(to, lanes)
    if source is bf16:
        wide = f.convert("zext", from_type, value, vector("i32", lanes))
        single = f.binary("shl", vector("i32", lanes), wide, _splat_int(16, lanes))
        return convert(f, f.convert("bitcast", vector("i32", lanes), single, vector("float", lanes)), f32, to, lanes, target)
    if to is bf16:
        return _round_to_bf16(f, convert(f, value, source, f32, lanes, target), lanes)
    if source is f16 and not target.has_f16c:
        return convert(f, _half_to_single(f, str(value), lanes), f32, to, lanes, target)
    if to is f16 and not target.has_f16c:
        return _single_to_half(f, convert(f, value, source, f32, lanes, target), lanes)
    if source.is_float and to.is_float:
        return f.convert("fpext" if source.bits < to.bits else "fptrunc", from_type, value, to_type)
    if source.is_float:
        return f.convert("fptosi" if to.is_signed else "fptoui", from_type, value, to_type)
    if to.is_float:
        return f.convert("sitofp" if source.is_signed else "uitofp", from_type, value, to_type)
    if source.bits < to.bits:
        return f.convert("sext" if source.is_signed else "zext", from_type, value, to_type)
    return f.convert("trunc", from_type, value, to_type)


def _splat_int(value: int, lanes: int, element: str = "i32") -> str:
    return str(value) if lanes == 1 else f"splat ({element} {value})"


def _round_to_bf16(f: Function, value: str, lanes: int) -> str:
    """Nearest even on the upper 16 bits; a NaN keeps its sign and becomes quiet."""
    single, word = vector("float", lanes), vector("i32", lanes)
    bits = f.convert("bitcast", single, value, word)
    odd = f.binary("and", word, f.binary("lshr", word, bits, _splat_int(16, lanes)), _splat_int(1, lanes))
    rounded = f.binary("add", word, f.binary("add", word, bits, odd), _splat_int(0x7FFF, lanes))
    quiet = f.binary("or", word, bits, _splat_int(0x400000, lanes))
    is_nan = f.compare("uno", single, value, value)
    kept = f.binary("lshr", word, f.select(word, is_nan, quiet, rounded), _splat_int(16, lanes))
    return f.convert("trunc", word, kept, vector("i16", lanes))


def _half_to_single(f: Function, value: str, lanes: int) -> str:
    """Exact, by integer operations: the exponent is re-biased by a multiplication, which also normalises subnormals."""
    word, single = vector("i32", lanes), vector("float", lanes)
    bits = f.convert("zext", vector("i16", lanes), f.convert("bitcast", vector("half", lanes), value, vector("i16", lanes)), word)
    sign = f.binary("shl", word, f.binary("and", word, bits, _splat_int(0x8000, lanes)), _splat_int(16, lanes))
    magnitude = f.binary("shl", word, f.binary("and", word, bits, _splat_int(0x7FFF, lanes)), _splat_int(13, lanes))
    scale = "0x46F0000000000000"  # 2**112
    scaled = f.binary("fmul", single, f.convert("bitcast", word, magnitude, single), scale if lanes == 1 else f"splat (float {scale})")
    special = f.compare("uge", word, magnitude, _splat_int(0x7C00 << 13, lanes))
    infinite = f.binary("or", word, magnitude, _splat_int(0x7F800000, lanes))
    chosen = f.select(word, special, infinite, f.convert("bitcast", single, scaled, word))
    return f.convert("bitcast", word, f.binary("or", word, chosen, sign), single)


def _single_to_half(f: Function, value: str, lanes: int) -> str:
    """Nearest even by integer operations; too large gives infinity, too small a rounded subnormal."""
    word, single = vector("i32", lanes), vector("float", lanes)
    bits = f.convert("bitcast", single, value, word)
    sign = f.binary("and", word, f.binary("lshr", word, bits, _splat_int(16, lanes)), _splat_int(0x8000, lanes))
    magnitude = f.binary("and", word, bits, _splat_int(0x7FFFFFFF, lanes))
    odd = f.binary("and", word, f.binary("lshr", word, magnitude, _splat_int(13, lanes)), _splat_int(1, lanes))
    rebias = _splat_int(0xFFF - (112 << 23), lanes)
    normal = f.binary("lshr", word, f.binary("add", word, f.binary("add", word, magnitude, rebias), odd), _splat_int(13, lanes))
    # adding 0.5 leaves the subnormal's bits, rounded to nearest even, at the bottom of the significand
    half = "0x3FE0000000000000" if lanes == 1 else "splat (float 0x3FE0000000000000)"
    shifted = f.binary("fadd", single, f.convert("bitcast", word, magnitude, single), half)
    small = f.binary("sub", word, f.convert("bitcast", single, shifted, word), _splat_int(0x3F000000, lanes))
    is_small = f.compare("ult", word, magnitude, _splat_int(113 << 23, lanes))
    is_large = f.compare("uge", word, magnitude, _splat_int(0x477FF000, lanes))
    is_nan = f.compare("ugt", word, magnitude, _splat_int(0x7F800000, lanes))
    finite = f.select(word, is_small, small, normal)
    bounded = f.select(word, is_large, _splat_int(0x7C00, lanes), finite)
    chosen = f.select(word, is_nan, _splat_int(0x7E00, lanes), bounded)
    narrow = f.convert("trunc", word, f.binary("or", word, chosen, sign), vector("i16", lanes))
    return f.convert("bitcast", vector("i16", lanes), narrow, vector("half", lanes))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Element types of one contraction as the micro-kernel sees them, after packing.

    `a` and `b` are the types in memory; `accumulator` is the type of the sum. `lanes` counts output columns of one vector.
    """

    a: DType
    b: DType
    accumulator: DType
    target: Target

    def __post_init__(self) -> None:
        for dtype in (self.a, self.b, self.accumulator):
            llvm_type(dtype)

    @property
    def is_byte_dot(self) -> bool:
        return self.accumulator is i32 and self.a in (i8, u8) and self.b in (i8, u8)

    @property
    def lanes(self) -> int:
        return self.target.lanes(self.accumulator.itemsize)

    @property
    def type(self) -> str:
        """The type of one vector of sums."""
        return llvm_type(self.accumulator, self.lanes)

    @property
    def size(self) -> int:
        """Bytes of one sum."""
        return self.accumulator.itemsize

    def load_a(self, f: Function, address: Value) -> str:
        """One value of A in every lane."""
        scalar = f.load(llvm_type(self.a), address, self.a.itemsize)
        return f.splat(self.type, convert(f, scalar, self.a, self.accumulator, 1, self.target))

    def load_b(self, f: Function, address: Value) -> str:
        """One vector of B, converted to the type of the sums."""
        packed = f.load(llvm_type(self.b, self.lanes), address, self.b.itemsize)
        return convert(f, packed, self.b, self.accumulator, self.lanes, self.target)

    def step(self, f: Function, a: str, b: str, total: str) -> str:
        """total + a * b; rounded once where the processor can."""
        if not self.accumulator.is_float:
            return f.binary("add", self.type, total, f.binary("mul", self.type, a, b))
        if self.target.has_fma:
            return f.fma(self.type, a, b, total)
        return f.binary("fadd", self.type, total, f.binary("fmul", self.type, a, b))


def mask_below(f: Function, lanes: int, count: Value) -> str:
    """Lanes whose number is less than `count`."""
    numbers = "<" + ", ".join(f"i32 {lane}" for lane in range(lanes)) + ">"
    limit = f.convert("trunc", "i64", count, "i32")
    word = vector("i32", lanes)
    return f.compare("slt", word, numbers if lanes > 1 else 0, f.splat(word, limit))


__all__ = ["Arithmetic", "convert", "llvm_type", "mask_below", "with_element"]
