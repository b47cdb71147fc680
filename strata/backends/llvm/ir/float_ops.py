"""Float arithmetic on vectors: what elementary functions are written with, tables in registers, calls of libm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from strata.backends.llvm.ir.builder import (
    IrFunction,
    bits_of,
    constant,
    element_of,
    integer_of,
    lanes_of,
    vector,
    vector_constant,
    with_element,
)
from strata.core import Target

TABLE: Final = 16  # numbers that one register of a table holds
_REGISTER: Final = 512  # bits of such a register
BIAS: Final = {32: 127, 64: 1023}
MANTISSA: Final = {32: 23, 64: 52}
# four bits for each kind of number, from the last on: a quiet NaN, another one, 0, 1, -inf, inf, negative, positive. 1
# answers with the number itself, 2 and 3 with NaN, 8 with 0
_NOT_NEGATIVE: Final = 0x18131122
MAGIC: Final = {32: 12582912.0, 64: 6755399441055744.0}  # 1.5 * 2^(mantissa bits): adding it rounds to an integer


@dataclass(frozen=True)
class VectorMath:
    """Short names for float arithmetic on one type."""

    f: IrFunction
    type: str
    target: Target
    meant: int = 0  # lanes whose results are used, where others are only there to fill a register

    @cached_property
    def bits(self) -> int:
        return bits_of(self.type)

    @cached_property
    def whole(self) -> str:
        """The integer type of the same width."""
        return integer_of(self.type)

    @property
    def flag(self) -> str:
        return with_element(self.type, "i1")

    def c(self, value: float) -> str:
        return constant(self.type, value)

    def i(self, value: int) -> str:
        return constant(self.whole, value)

    def add(self, a: str, b: str) -> str:
        return self.f.binary("fadd", self.type, a, b)

    def sub(self, a: str, b: str) -> str:
        return self.f.binary("fsub", self.type, a, b)

    def mul(self, a: str, b: str) -> str:
        return self.f.binary("fmul", self.type, a, b)

    def div(self, a: str, b: str) -> str:
        return self.f.binary("fdiv", self.type, a, b)

    def neg(self, a: str) -> str:
        return self.f.op(f"fneg {self.type} {a}")

    def fma(self, a: str, b: str, c: str) -> str:
        """a * b + c; rounded once where the target can."""
        return self.f.fma(self.type, a, b, c) if self.target.has_fma else self.add(self.mul(a, b), c)

    def abs(self, a: str) -> str:
        return self.f.intrinsic("fabs", self.type, a)

    def sqrt(self, a: str) -> str:
        return self.f.intrinsic("sqrt", self.type, a)

    def copysign(self, a: str, sign: str) -> str:
        return self.f.intrinsic("copysign", self.type, a, sign)

    def test(self, predicate: str, a: str, b: str) -> str:
        return self.f.compare(predicate, self.type, a, b)

    def select(self, condition: str, a: str, b: str) -> str:
        return self.f.select(self.type, condition, a, b)

    def at_most(self, a: str, limit: float) -> str:
        """min(a, limit) that keeps NaN."""
        return self.select(self.test("ogt", a, self.c(limit)), self.c(limit), a)

    def at_least(self, a: str, limit: float) -> str:
        return self.select(self.test("olt", a, self.c(limit)), self.c(limit), a)

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        """c0 + c1 x + c2 x² …"""
        result = self.c(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = self.fma(result, x, self.c(coefficient))
        return result

    def polynomial_of_halves(self, x: str, square: str, coefficients: Sequence[float]) -> str:
        """The same from its even and its odd powers, half of the steps of which wait for each other."""
        even, odd = (self.polynomial(square, coefficients[at::2]) for at in (0, 1))
        return self.fma(odd, x, even)

    def as_bits(self, a: str) -> str:
        return self.f.convert("bitcast", self.type, a, self.whole)

    def from_bits(self, a: str) -> str:
        return self.f.convert("bitcast", self.whole, a, self.type)

    def integer(self, operation: str, a: str, b: str) -> str:
        return self.f.binary(operation, self.whole, a, b)

    def power_of_two(self, n: str) -> str:
        """2ⁿ for an integer vector n that gives a normal number."""
        shifted = self.integer("shl", self.integer("add", n, self.i(BIAS[self.bits])), self.i(MANTISSA[self.bits]))
        return self.from_bits(shifted)

    def doubled(self) -> VectorMath:
        """The same lanes in f64."""
        return replace(self, type=with_element(self.type, "double"))

    @property
    def has_exponents(self) -> bool:
        """Whether instructions take numbers apart into powers of two and what they multiply."""
        return self.target.has_avx512 and lanes_of(self.type) * self.bits >= 128

    def exponent(self, a: str) -> str:
        """The whole part of log2 |a| as a float; of zeros -inf, of infinities inf."""
        return self._by_instruction("getexp", a)

    def mantissa(self, a: str) -> str:
        """|a| times a power of two, in [¾, 1½); 1 for zeros and infinities."""
        return self._by_instruction("getmant", a, ("i32", 0b0111))

    def _by_instruction(self, name: str, a: str, *more: tuple[str, int]) -> str:
        f, lanes = self.f, lanes_of(self.type)
        if lanes * self.bits > 512:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            return f.by_halves(self.type, a, self.type, lambda part: half._by_instruction(name, part, *more))
        width, kind = lanes * self.bits, "ps" if self.bits == 32 else "pd"
        rounding = (("i32", 4),) if width == 512 else ()  # as the processor is set
        mask = (f"i{max(8, lanes)}", -1)
        arguments = ((self.type, a), *more, (self.type, "zeroinitializer"), mask, *rounding)
        return f.call(self.type, f"llvm.x86.avx512.mask.{name}.{kind}.{width}", *arguments)

    @property
    def has_tables(self) -> bool:
        """Whether lanes can pick from numbers in a register."""
        return self.target.has_avx512 and self.bits == 32 and lanes_of(self.type) % TABLE == 0

    @property
    def has_wide_tables(self) -> bool:
        """The same for f64, from numbers in two registers."""
        return self.target.has_avx512 and self.bits == 64 and lanes_of(self.type) % (TABLE // 2) == 0

    def magnitude_at_most(self, a: str, limit: float) -> str:
        """min(|a|, limit) by one instruction, for types that have tables; the limit for NaN."""
        return self._smaller_magnitude(a, limit, 0b1010)

    def bounded(self, a: str, limit: float) -> str:
        """The same with the sign of a."""
        return self._smaller_magnitude(a, limit, 0b0010)

    def _smaller_magnitude(self, a: str, limit: float, kind: int) -> str:
        f, lanes = self.f, lanes_of(self.type)
        if lanes * self.bits > _REGISTER:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            return f.by_halves(self.type, a, self.type, lambda part: half._smaller_magnitude(part, limit, kind))
        rest = ((self.type, "zeroinitializer"), (f"i{lanes}", "-1"), ("i32", "4"))  # all lanes, rounding as it is set
        numbers = (self.type, a), (self.type, self.c(limit))
        name = f"llvm.x86.avx512.mask.range.{'ps' if self.bits == 32 else 'pd'}.512"
        return f.call(self.type, name, *numbers, ("i32", kind), *rest)

    def not_negative(self, a: str) -> str:
        """max(a, 0) by one instruction, for types that have tables; zeros and NaN as they are, NaN for -inf."""
        f, lanes = self.f, lanes_of(self.type)
        if lanes > TABLE:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            return f.by_halves(self.type, a, self.type, half.not_negative)
        answers = constant(self.whole, _NOT_NEGATIVE)
        numbers = (self.type, "zeroinitializer"), (self.type, a), (self.whole, answers)
        rest = ("i32", "0"), ("i16", "-1"), ("i32", "4")  # no exceptions, all lanes, rounding as it is set
        return f.call(self.type, "llvm.x86.avx512.mask.fixupimm.ps.512", *numbers, *rest)

    def inverse_near(self, a: str) -> str:
        """1 / a to 14 bits by one instruction, for types that have tables."""
        return self._near("rcp14", a)

    def inverse_root_near(self, a: str) -> str:
        """1 / √a to 14 bits by one instruction, for types that have tables."""
        return self._near("rsqrt14", a)

    def _near(self, name: str, a: str) -> str:
        f, lanes = self.f, lanes_of(self.type)
        if lanes * self.bits > _REGISTER:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            return f.by_halves(self.type, a, self.type, lambda part: half._near(name, part))
        rest = ((self.type, "zeroinitializer"), (f"i{lanes}", "-1"))
        kind = "ps" if self.bits == 32 else "pd"
        return f.call(self.type, f"llvm.x86.avx512.{name}.{kind}.512", (self.type, a), *rest)

    def scaled(self, a: str, n: str) -> str:
        """a · 2ⁿ rounded once, n rounded down, by an instruction of AVX-512."""
        lanes, f = lanes_of(self.type), self.f
        if lanes * self.bits > 512:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            parts = [range(lanes // 2), range(lanes // 2, lanes)]
            low, high = (half.scaled(*(f.shuffle(self.type, v, "poison", picks) for v in (a, n))) for picks in parts)
            return f.shuffle(half.type, low, high, range(lanes))
        width, kind = lanes * self.bits, "ps" if self.bits == 32 else "pd"
        rounding = (("i32", "4"),) if width == 512 else ()  # as the processor is set
        mask = (f"i{max(8, lanes)}", "-1")
        arguments = ((self.type, a), (self.type, n), (self.type, "zeroinitializer"), mask, *rounding)
        return f.call(self.type, f"llvm.x86.avx512.mask.scalef.{kind}.{width}", *arguments)

    def look_up(self, place: str, numbers: Sequence[float]) -> str:
        """For each lane, the number at the place that the last four bits of its integer say."""
        f, lanes = self.f, lanes_of(self.type)
        if lanes * self.bits > _REGISTER:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            parts = [range(lanes // 2), range(lanes // 2, lanes)]
            low, high = (half.look_up(f.shuffle(self.whole, place, "poison", picks), numbers) for picks in parts)
            return f.shuffle(half.type, low, high, range(lanes))
        if self.bits == 64:
            first, second = (vector_constant("double", numbers[at : at + lanes]) for at in (0, lanes))
            given = (self.type, first), (self.whole, place), (self.type, second)
            return f.call(self.type, "llvm.x86.avx512.vpermi2var.pd.512", *given)
        table = vector_constant(element_of(self.type), numbers)
        return f.call(self.type, "llvm.x86.avx512.permvar.sf.512", (self.type, table), (self.whole, place))


def in_registers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function computed on whole registers of AVX-512, whose tables and instructions narrower types do not have: so
    that one element gives the bits that it gives beside others."""

    def call(m: VectorMath, *args: str) -> Any:
        lanes, whole = lanes_of(m.type), _REGISTER // m.bits
        if not m.target.has_avx512 or lanes >= whole:
            return function(m, *args)
        f, element = m.f, element_of(m.type)
        wide = replace(m, type=vector(element, whole), meant=lanes)

        def spread(a: str) -> str:
            picks = [lane % lanes for lane in range(whole)]
            return f.splat(wide.type, a) if lanes == 1 else f.shuffle(m.type, a, "poison", picks)

        def first(a: str) -> str:
            return f.extract(wide.type, a, 0) if lanes == 1 else f.shuffle(wide.type, a, "poison", range(lanes))

        made = function(wide, *map(spread, args))
        return tuple(map(first, made)) if isinstance(made, tuple) else first(made)

    call.__doc__ = function.__doc__
    return call


def in_double(function: Callable[..., str]) -> Callable[..., str]:
    """A function computed in f64 whatever it is called with: for f32 the result is then rounded once."""

    def call(m: VectorMath, *args: str) -> str:
        if m.bits == 64:
            return function(m, *args)
        wide = m.doubled()
        made = function(wide, *(m.f.convert("fpext", m.type, a, wide.type) for a in args))
        return m.f.convert("fptrunc", wide.type, made, m.type)

    call.__doc__ = function.__doc__
    return call


def library(name: str, m: VectorMath, *args: str) -> str:
    """A function of the C library, lane by lane, in f64; lanes that are not meant have the result of the first."""
    wide = m.doubled()
    inputs = [m.f.convert("fpext", m.type, a, wide.type) if m.bits == 32 else a for a in args]
    lanes = lanes_of(m.type)
    if lanes == 1:
        result = m.f.call("double", name, *(("double", a) for a in inputs))
    else:
        meant, result = m.meant or lanes, "poison"
        for lane in range(meant):
            scalars = [m.f.extract(wide.type, a, lane) for a in inputs]
            one = m.f.call("double", name, *(("double", a) for a in scalars))
            result = m.f.insert(wide.type, result, one, lane)
        if meant < lanes:
            result = m.f.shuffle(wide.type, result, "poison", [lane if lane < meant else 0 for lane in range(lanes)])
    return m.f.convert("fptrunc", wide.type, result, m.type) if m.bits == 32 else result
