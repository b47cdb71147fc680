"""One multiply-accumulate of a matmul: element types, conversions on load, widening dot products.

A step takes `group` consecutive k's: one for floats and plain integers, four for bytes on processors with a byte dot
product, two for bytes on others, and two for bf16 on processors that sum pairs of their products. Those treat numbers
below the least normal one as zero. Packed operands keep the values of one step side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, Value, constant, element_of, vector
from strata.backends.llvm.ir.registers import from_memory, memory_type, register_type, to_memory
from strata.core import DType, Target, bf16, f32, i8, i32, u8
from strata.errors import DTypeError

_PAIR_DOT: Final = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}
_BYTE_DOT: Final = {16: "llvm.x86.avx512.vpdpbusd.512", 8: "llvm.x86.avx512.vpdpbusd.256"}
_HALF_DOT: Final = {16: "llvm.x86.avx512bf16.dpbf16ps.512"}


def convert(f: IrFunction, value: str, source: DType, to: DType, lanes: int, target: Target) -> str:
    """A value as it lies in memory to another dtype, again as in memory."""
    if source is to:
        return value
    register = from_memory(f, source, value, lanes, target)
    from_type, to_type = register_type(source, lanes), register_type(to, lanes)
    if from_type != to_type:
        register = f.convert(_cast(source, to, to_type), from_type, register, to_type)
    return to_memory(f, to, register, lanes, target)


def _cast(source: DType, to: DType, to_type: str) -> str:
    if source.is_float and to.is_float:
        return "fpext" if element_of(to_type) == "double" else "fptrunc"
    if source.is_float:
        return "fptosi" if to.is_signed else "fptoui"
    if to.is_float:
        return "sitofp" if source.is_signed else "uitofp"
    if to.bits < source.bits:
        return "trunc"
    return "sext" if source.is_signed else "zext"


def multiply_add(f: IrFunction, type_: str, a: Value, b: Value, total: Value, target: Target) -> str:
    """total + a * b of floats, rounded once where the processor can."""
    if target.has_fma:
        return f.fma(type_, a, b, total)
    return f.binary("fadd", type_, total, f.binary("fmul", type_, a, b))


def is_multiplied(dtype: DType) -> bool:
    """Whether contractions multiply elements of a type; loops multiply others."""
    return not dtype.is_complex and not dtype.is_bool and dtype.bits >= 8


@dataclass(frozen=True)
class GemmArithmetic:
    """Element types of one contraction: of A and B in memory as the micro-kernel reads them, and of the sums.

    What follows from them is found once: the emitter asks for it at every instruction.
    """

    a: DType
    b: DType
    accumulator: DType
    target: Target
    by_twos: bool = True  # bf16, where the processor has such products

    def __post_init__(self) -> None:
        for dtype in (self.a, self.b, self.accumulator):
            if not is_multiplied(dtype):
                raise DTypeError(f"contractions do not multiply elements of type {dtype}", code="D120")

    @cached_property
    def is_byte_dot(self) -> bool:
        """Bytes summed in i32 by the processor's own dot products; two unsigned operands are widened instead."""
        bytes_ = self.accumulator is i32 and {self.a, self.b} <= {i8, u8} and i8 in (self.a, self.b)
        return bytes_ and self.lanes in _PAIR_DOT and "x86" in self.target.triple

    @cached_property
    def has_quad_dot(self) -> bool:
        return self.is_byte_dot and self.target.has("avx512vnni") and self.lanes in _BYTE_DOT

    @cached_property
    def is_half_dot(self) -> bool:
        """Pairs of bf16 multiplied and summed in f32 by one instruction."""
        halves = self.a is bf16 and self.b is bf16 and self.accumulator is f32
        return halves and self.by_twos and self.target.has("avx512bf16") and self.lanes in _HALF_DOT

    @cached_property
    def group(self) -> int:
        """k's of one step."""
        return 4 if self.has_quad_dot else 2 if self.is_byte_dot or self.is_half_dot else 1

    @cached_property
    def is_shifted(self) -> bool:
        """The quad dot takes one unsigned operand: A is raised by 128, and 128 times B's sums are taken off."""
        return self.has_quad_dot and self.a is i8 and self.b is i8

    @cached_property
    def head(self) -> int:
        """k's before the first of a packed panel of B: their place holds what the sums of its columns start at."""
        return self.group if self.is_shifted else 0

    @cached_property
    def lanes(self) -> int:
        """Output columns of one vector."""
        return self.target.lanes(self.accumulator.itemsize)

    @cached_property
    def type(self) -> str:
        """One vector of sums."""
        return memory_type(self.accumulator, self.lanes)

    @cached_property
    def size(self) -> int:
        """Bytes of one sum."""
        return self.accumulator.itemsize

    @cached_property
    def a_bytes(self) -> int:
        """Of one row in one step."""
        return self.group * self.a.itemsize

    @cached_property
    def b_bytes(self) -> int:
        """Of one vector of columns in one step."""
        return self.group * self.lanes * self.b.itemsize

    def load_a(self, f: IrFunction, address: Value, valid: Value | None = None) -> str:
        """A's values of one step in every lane; with `valid`, only that many are there and the others count as 0."""
        if self.group == 1:
            scalar = f.load(memory_type(self.a), address, self.a.itemsize)
            return f.splat(self.type, convert(f, scalar, self.a, self.accumulator, 1, self.target))
        word = f"i{8 * self.a_bytes}"
        packed = f.load(word, address, 1) if valid is None else self._first(f, address, valid, word)
        if self.is_half_dot:
            words = vector(word, self.lanes)
            return f.convert("bitcast", words, f.splat(words, packed), self._pairs("bfloat"))
        if self.has_quad_dot:
            every = f.splat(self.type, packed)
            return f.binary("xor", self.type, every, constant(self.type, -0x7F7F7F80)) if self.is_shifted else every
        words = vector("i16", self.lanes)
        pairs = f.convert("bitcast", words, f.splat(words, packed), self._pairs("i8"))
        return f.convert("sext" if self.a.is_signed else "zext", self._pairs("i8"), pairs, self._pairs("i16"))

    def load_b(self, f: IrFunction, address: Value) -> str:
        """B's values of one step, a vector of columns."""
        if self.group == 1:
            packed = f.load(memory_type(self.b, self.lanes), address, self.b.itemsize)
            return convert(f, packed, self.b, self.accumulator, self.lanes, self.target)
        if self.has_quad_dot:
            return f.load(self.type, address, 1)
        if self.is_half_dot:
            return f.load(self._pairs("bfloat"), address, self.b.itemsize)
        pairs = f.load(self._pairs("i8"), address, 1)
        return f.convert("sext" if self.b.is_signed else "zext", self._pairs("i8"), pairs, self._pairs("i16"))

    def step(self, f: IrFunction, a: str, b: str, total: str) -> str:
        """total + a * b, rounded once where the processor can."""
        if self.has_quad_dot:
            unsigned, signed = (b, a) if self.b is u8 else (a, b)
            return f.call(self.type, _BYTE_DOT[self.lanes], *((self.type, x) for x in (total, unsigned, signed)))
        if self.is_half_dot:
            pairs = self._pairs("bfloat")
            return f.call(self.type, _HALF_DOT[self.lanes], (self.type, total), (pairs, a), (pairs, b))
        if self.is_byte_dot:
            pairs = self._pairs("i16")
            return f.binary("add", self.type, total, f.call(self.type, _PAIR_DOT[self.lanes], (pairs, a), (pairs, b)))
        if not self.accumulator.is_float:
            return f.binary("add", self.type, total, f.binary("mul", self.type, a, b))
        return multiply_add(f, self.type, a, b, total, self.target)

    def shift_step(self, f: IrFunction, b: str, total: str) -> str:
        """The sum of B's values, for `start`."""
        ones = constant(self.type, 0x01010101)
        return f.call(self.type, _BYTE_DOT[self.lanes], (self.type, total), (self.type, ones), (self.type, b))

    def start(self, f: IrFunction, b_sums: str) -> str:
        """What the sums of shifted products start at."""
        return f.binary("mul", self.type, b_sums, constant(self.type, -128))

    def _pairs(self, element: str) -> str:
        return vector(element, 2 * self.lanes)

    def _first(self, f: IrFunction, address: Value, valid: Value, word: str) -> str:
        """The first `valid` elements at an address as an integer, reading nothing after them."""
        element, size = memory_type(self.a), self.a.itemsize
        result = constant(word, 0)
        for i in range(self.group - 1):  # a group that is not whole lacks its last element
            inside = f.compare("sgt", "i64", valid, i)
            place = f.address(element, address, f.select("i64", inside, i, 0, uniform=True))
            value = f.select(element, inside, f.load(element, place, size), 0, uniform=True)
            shifted = f.binary("shl", word, f.convert("zext", element, value, word), constant(word, 8 * size * i))
            result = f.binary("or", word, result, shifted)
        return result
