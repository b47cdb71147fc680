"""Float arithmetic on vectors: short names for what elementary functions are made of, and tables in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from strata.backends.llvm.builder import (
    Function,
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
BIAS: Final = {32: 127, 64: 1023}
MANTISSA: Final = {32: 23, 64: 52}


@dataclass(frozen=True, slots=True)
class Math:
    """Short names for float arithmetic on one type."""

    f: Function
    type: str
    target: Target

    @property
    def bits(self) -> int:
        return bits_of(self.type)

    @property
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

    def doubled(self) -> Math:
        """The same lanes in f64."""
        return replace(self, type=with_element(self.type, "double"))

    @property
    def has_tables(self) -> bool:
        """Whether lanes can pick from numbers in a register."""
        return self.target.has_avx512 and self.bits == 32 and lanes_of(self.type) % TABLE == 0

    def look_up(self, place: str, numbers: Sequence[float]) -> str:
        """For each lane, the number at the place that the last four bits of its integer say."""
        f, lanes = self.f, lanes_of(self.type)
        if lanes > TABLE:
            half = replace(self, type=vector(element_of(self.type), lanes // 2))
            parts = [range(lanes // 2), range(lanes // 2, lanes)]
            low, high = (half.look_up(f.shuffle(self.whole, place, "poison", picks), numbers) for picks in parts)
            return f.shuffle(half.type, low, high, range(lanes))
        table = vector_constant(element_of(self.type), numbers)
        return f.call(self.type, "llvm.x86.avx512.permvar.sf.512", (self.type, table), (self.whole, place))
