"""What one multiply-accumulate step of a contraction does: element types, conversions on the way in, widening dots.

A step takes `group` consecutive k's: one for floats and plain integers, four for bytes on processors with a byte dot
product, two for bytes on others. Packed operands keep the values of one step side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.builder import Function, Value, constant, element_of, vector
from strata.backends.llvm.registers import from_memory, memory_type, register_type, to_memory
from strata.core import DType, Target, i8, i32, u8
from strata.errors import DTypeError

_PAIR_DOT: Final = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}
_BYTE_DOT: Final = {16: "llvm.x86.avx512.vpdpbusd.512", 8: "llvm.x86.avx512.vpdpbusd.256"}


def convert(f: Function, value: str, source: DType, to: DType, lanes: int, target: Target) -> str:
    """A value as it lies in memory to another dtype, again as in memory."""
    if source is to:
        return value
    register = from_memory(f, source, value, lanes, target)
    from_type, to_type = register_type(source, lanes), register_type(to, lanes)
    if from_type != to_type:
        register = f.convert(_cast(source, to, from_type, to_type), from_type, register, to_type)
    return to_memory(f, to, register, lanes, target)


def _cast(source: DType, to: DType, from_type: str, to_type: str) -> str:
    if source.is_float and to.is_float:
        return "fpext" if element_of(to_type) == "double" else "fptrunc"
    if source.is_float:
        return "fptosi" if to.is_signed else "fptoui"
    if to.is_float:
        return "sitofp" if source.is_signed else "uitofp"
    if to.bits < source.bits:
        return "trunc"
    return "sext" if source.is_signed else "zext"


def multiply_add(f: Function, type_: str, a: Value, b: Value, total: Value, target: Target) -> str:
    """total + a * b of floats, rounded once where the processor can."""
    if target.has_fma:
        return f.fma(type_, a, b, total)
    return f.binary("fadd", type_, total, f.binary("fmul", type_, a, b))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Element types of one contraction: of A and B in memory as the micro-kernel reads them, and of the sums."""

    a: DType
    b: DType
    accumulator: DType
    target: Target

    def __post_init__(self) -> None:
        for dtype in (self.a, self.b, self.accumulator):
            if dtype.is_complex or dtype.is_bool or dtype.bits < 8:
                raise DTypeError(f"contractions do not multiply elements of type {dtype}", code="D120")

    @property
    def is_byte_dot(self) -> bool:
        """Bytes summed in i32 by the processor's own dot products; two unsigned operands are widened instead."""
        bytes_ = self.accumulator is i32 and {self.a, self.b} <= {i8, u8} and i8 in (self.a, self.b)
        return bytes_ and self.lanes in _PAIR_DOT and "x86" in self.target.triple

    @property
    def has_quad_dot(self) -> bool:
        return self.is_byte_dot and self.target.has("avx512vnni") and self.lanes in _BYTE_DOT

    @property
    def group(self) -> int:
        """k's of one step."""
        return 4 if self.has_quad_dot else 2 if self.is_byte_dot else 1

    @property
    def is_shifted(self) -> bool:
        """The quad dot takes one unsigned operand: A is raised by 128, and 128 times B's sums are taken off."""
        return self.has_quad_dot and self.a is i8 and self.b is i8

    @property
    def lanes(self) -> int:
        """Output columns of one vector."""
        return self.target.lanes(self.accumulator.itemsize)

    @property
    def type(self) -> str:
        """One vector of sums."""
        return memory_type(self.accumulator, self.lanes)

    @property
    def size(self) -> int:
        """Bytes of one sum."""
        return self.accumulator.itemsize

    @property
    def a_bytes(self) -> int:
        """Of one row in one step."""
        return self.group * self.a.itemsize

    @property
    def b_bytes(self) -> int:
        """Of one vector of columns in one step."""
        return self.group * self.lanes * self.b.itemsize

    def load_a(self, f: Function, address: Value, valid: Value | None = None) -> str:
        """A's values of one step in every lane; with `valid`, only so many are there and the others count as 0."""
        if self.group == 1:
            scalar = f.load(memory_type(self.a), address, self.a.itemsize)
            return f.splat(self.type, convert(f, scalar, self.a, self.accumulator, 1, self.target))
        word = f"i{8 * self.group}"
        packed = f.load(word, address, 1) if valid is None else self._bytes(f, address, valid, word)
        if self.has_quad_dot:
            if self.is_shifted:
                packed = f.binary("xor", word, packed, constant(word, 0x80808080))
            return f.splat(self.type, packed)
        words = vector("i16", self.lanes)
        pairs = f.convert("bitcast", words, f.splat(words, packed), self._pairs("i8"))
        return f.convert("sext" if self.a.is_signed else "zext", self._pairs("i8"), pairs, self._pairs("i16"))

    def load_b(self, f: Function, address: Value) -> str:
        """B's values of one step, a vector of columns."""
        if self.group == 1:
            packed = f.load(memory_type(self.b, self.lanes), address, self.b.itemsize)
            return convert(f, packed, self.b, self.accumulator, self.lanes, self.target)
        if self.has_quad_dot:
            return f.load(self.type, address, 1)
        pairs = f.load(self._pairs("i8"), address, 1)
        return f.convert("sext" if self.b.is_signed else "zext", self._pairs("i8"), pairs, self._pairs("i16"))

    def step(self, f: Function, a: str, b: str, total: str) -> str:
        """total + a * b, rounded once where the processor can."""
        if self.has_quad_dot:
            unsigned, signed = (b, a) if self.b is u8 else (a, b)
            return f.call(self.type, _BYTE_DOT[self.lanes], *((self.type, x) for x in (total, unsigned, signed)))
        if self.is_byte_dot:
            pairs = self._pairs("i16")
            return f.binary("add", self.type, total, f.call(self.type, _PAIR_DOT[self.lanes], (pairs, a), (pairs, b)))
        if not self.accumulator.is_float:
            return f.binary("add", self.type, total, f.binary("mul", self.type, a, b))
        return multiply_add(f, self.type, a, b, total, self.target)

    def shift_step(self, f: Function, b: str, total: str) -> str:
        """The sum of B's values, for `unshift`."""
        ones = constant(self.type, 0x01010101)
        return f.call(self.type, _BYTE_DOT[self.lanes], (self.type, total), (self.type, ones), (self.type, b))

    def unshift(self, f: Function, total: str, b_sums: str) -> str:
        return f.binary("sub", self.type, total, f.binary("shl", self.type, b_sums, constant(self.type, 7)))

    def _pairs(self, element: str) -> str:
        return vector(element, 2 * self.lanes)

    def _bytes(self, f: Function, address: Value, valid: Value, word: str) -> str:
        """The first `valid` bytes at an address as an integer, reading no byte behind them."""
        result = constant(word, 0)
        for i in range(self.group - 1):  # a group that is not whole lacks its last byte
            inside = f.compare("sgt", "i64", valid, i)
            place = f.address("i8", address, f.select("i64", inside, i, 0, uniform=True))
            byte = f.select("i8", inside, f.load("i8", place, 1), 0, uniform=True)
            shifted = f.binary("shl", word, f.convert("zext", "i8", byte, word), constant(word, 8 * i))
            result = f.binary("or", word, result, shifted)
        return result
