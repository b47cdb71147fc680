"""More numeric functions: quotients and remainders, hypot, logaddexp, gcd, bits, clipping, closeness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from strata.core import DType, f32, f64, i8, i32, u8, u16, u32, u64
from strata.errors import OptionError
from strata.mir import METHODS, Sample, Value, constant, draw, function, op
from strata.ops.base.creation import ones_like
from strata.ops.base.elementwise import Arithmetic, ElementwiseBinary, ElementwiseUnary, Partial, numbers
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.elementwise.logic import Predicate, rounded_once

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


# --------------------------------------------------------------------------------------------- quotients and remainders


class Division(Arithmetic):
    """A quotient or remainder of real numbers; an integer divided by 0 gives 0."""

    allowed = "real"
    dtypes = "real"

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        if x.dtype.is_float:
            return super().scalar(k, x, y)
        zero = k.const(0, x.dtype)
        by_zero = k.eq(y, zero)
        return k.select(by_zero, zero, super().scalar(k, x, k.select(by_zero, k.const(1, x.dtype), y)))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[3, 4], -9.0, 9.0), draw(f32[3, 4], 0.7, 2.0)),
            Sample(draw(f64[4, 1], -9.0, 9.0), draw(f64[3], -2.0, -0.7)), Sample(f32[0], f32[1], grad=False),
            Sample(
                np.array([7, -7, 7, -7, 0, 1, np.nan], np.float32), np.array([2, 2, -2, -2, 3, 0, 1], np.float32),
                grad=False,
            ),
            Sample(
                np.array([-1, 1, -0.0, -0.1, np.inf, -np.inf, 1], np.float32),
                np.array([np.inf, -np.inf, -1, -1, 2, np.inf, 0.1], np.float32), grad=False,
            ),
            Sample(np.array([7, -7, 7, -7, 6, 3]), np.array([2, 2, -2, -2, 3, 0]), grad=False),
            Sample(draw(u8[5], 0, 200), draw(u8[5], 1, 9), grad=False),
        ]  # fmt: skip


@op("floor_divide")
class FloorDivide(Division):
    """The quotient rounded down, as Python's //. Its derivative is 0."""

    differentiable = False
    in_kernel = "floordiv"

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.dtype.kind == "f":
            return np.floor_divide(x, y)
        return np.where(y == 0, 0, np.floor_divide(x, np.where(y == 0, 1, y))).astype(x.dtype)


@op("remainder")
class Remainder(Division):
    """x - floor(x / y)·y: the sign of y, as Python's %."""

    in_kernel = "mod"

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return 1, -FloorDivide()(x, y)


@op("fmod")
class Fmod(Division):
    """x - trunc(x / y)·y: the sign of x, as C's fmod."""

    in_kernel = "rem"

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return 1, -METHODS["stop_gradient"](METHODS["round"]((x - out) / y))


# ----------------------------------------------------------------------------------------------------- two real numbers


class RealPair(ElementwiseBinary):
    """A function of two floats."""

    allowed = "float"
    dtypes = "float"

    @classmethod
    def samples(cls) -> list[Sample]:
        special = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, np.inf, -np.inf], np.float32)
        return [
            Sample(f32[3, 4], f32[3, 4]), Sample(f64[4, 1], f64[3]), Sample(f32[()], f32[0]),
            Sample(special, special[::-1].copy(), grad=False), Sample(special, special, grad=False),
        ]  # fmt: skip


@op("hypot")
class Hypot(RealPair):
    """√(x² + y²) without overflow. The derivative at the origin is 0."""

    commutative = True

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        zero, one = constant(0, out.dtype), constant(1, out.dtype)
        origin = METHODS["equal"](out, zero)
        length = METHODS["where"](origin, one, out)
        return METHODS["where"](origin, zero, x / length), METHODS["where"](origin, zero, y / length)

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        a, b = k.abs(x), k.abs(y)
        infinite = k.or_(k.isinf(x), k.isinf(y))
        long, short = k.max(a, b), k.min(a, b)
        zero = k.const(0, x.dtype)
        ratio = short / k.select(k.eq(long, zero), k.const(1, x.dtype), long)
        length = long * k.sqrt(k.const(1, x.dtype) + ratio * ratio)
        return k.select(infinite, k.const(np.inf, x.dtype), length)


@op("copysign")
class Copysign(RealPair):
    """The size of x with the sign of y, which may be that of -0.0."""

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return METHODS["sign"](x) * Copysign()(ones_like(out), y), None


@op("logaddexp")
class LogAddExp(RealPair):
    """log(exp(x) + exp(y)) without overflow."""

    commutative = True

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        same_infinity = METHODS["bitwise_and"](METHODS["isinf"](x), METHODS["equal"](x, y))
        gap = METHODS["where"](same_infinity, constant(0, out.dtype), x - y)
        return METHODS["sigmoid"](gap), METHODS["sigmoid"](-gap)

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        same = k.and_(k.isinf(x), k.eq(x, y))
        return k.select(same, x, k.max(x, y) + k.log1p(k.exp(-k.abs(x - y))))


# ----------------------------------------------------------------------------------------------------------------- bits


@op("gcd")
class Gcd(ElementwiseBinary):
    """The greatest common divisor of integers, never negative; gcd(0, 0) is 0."""

    allowed = "int"
    dtypes = "int"
    commutative = True
    differentiable = False

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(i32[4, 3], -40, 40), draw(i32[3], -40, 40)),
            Sample(np.array([0, 0, 6]), np.array([0, 5, -4])),
        ]


@op("bitwise_count")
class BitwiseCount(ElementwiseUnary):
    """The number of ones in the binary form of |x|, as u8."""

    allowed = "int"
    dtypes = "int"
    differentiable = False

    def result_dtype(self, dtype: DType) -> DType:
        return u8

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        if x.dtype.bits < 8:
            x = k.cast(x, i8)
        word = {8: u8, 16: u16, 32: u32, 64: u64}[x.dtype.bits]
        bits = k.cast(k.abs(x) if x.dtype.is_signed else x, word)

        def fields(pattern: int) -> Expr:
            return k.const(pattern * ((1 << word.bits) - 1) // 255, word)

        def down(count: int) -> Expr:
            return k.shr(bits, k.const(count, word))

        # ones are added up in fields of 2, 4 and 8 bits, then the bytes
        bits = bits - k.and_(down(1), fields(0x55))
        bits = k.and_(bits, fields(0x33)) + k.and_(down(2), fields(0x33))
        bits = k.and_(bits + down(4), fields(0x0F))
        for count in (8, 16, 32):
            if count < word.bits:
                bits = bits + down(count)
        return k.cast(k.and_(bits, k.const(0x7F, word)), u8)

    @classmethod
    def samples(cls) -> list[Sample]:
        edges = np.array([0, 1, -1, 255, -256, 2**62 + 1, -(2**63), 2**63 - 1])
        return [
            Sample(draw(i32[3, 4], -1000, 1000)),
            Sample(edges),
            Sample(np.array([-128, 127, -1], np.int8)),
            Sample(u8[0]),
        ]


@op("signbit")
class SignBit(Predicate):
    """Whether the sign is minus, also that of -0.0."""

    allowed = "float"
    dtypes = "float"

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(np.array([0.0, -0.0, 1, -1, np.inf, -np.inf], np.float32)), Sample(f64[()]), Sample(f32[0, 2])]


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def floor_divide(x: Operand, y: Operand) -> Value:
    """The quotient rounded down; an integer divided by 0 gives 0."""
    return FloorDivide()(*numbers(x, y))


@function("mod")
def remainder(x: Operand, y: Operand) -> Value:
    """x - floor(x / y)·y: the sign of y."""
    return Remainder()(*numbers(x, y))


@function()
def fmod(x: Operand, y: Operand) -> Value:
    """x - trunc(x / y)·y: the sign of x."""
    return Fmod()(*numbers(x, y))


def _floats(x: Operand, y: Operand) -> list[Value]:
    return [to_inexact(v) for v in promoted(x, y)]


@function()
def hypot(x: Operand, y: Operand) -> Value:
    """√(x² + y²) without overflow."""
    return Hypot()(*_floats(x, y))


@function()
def copysign(x: Operand, y: Operand) -> Value:
    """The size of x with the sign of y."""
    return Copysign()(*_floats(x, y))


@function()
def logaddexp(x: Operand, y: Operand) -> Value:
    """log(exp(x) + exp(y)) without overflow."""
    return LogAddExp()(*_floats(x, y))


@function()
def gcd(x: Operand, y: Operand) -> Value:
    """The greatest common divisor of integers."""
    return Gcd()(*promoted(x, y))


@function()
def lcm(x: Operand, y: Operand) -> Value:
    """The least common multiple of integers, not negative but where it wraps; 0 if either is 0."""
    a, b = (METHODS["abs"](v) for v in promoted(x, y))
    return METHODS["trunc_divide"](a, Gcd()(a, b)) * b


@function("bit_count")
def bitwise_count(x: Operand) -> Value:
    """The number of ones in the binary form of |x|, as u8."""
    return BitwiseCount()(as_value(x))


@function()
def signbit(x: Operand) -> Value:
    """Whether x is negative; -0.0 is."""
    value = as_value(x)
    return SignBit()(value) if value.dtype.is_float else value < 0


@function()
def fmax(x: Operand, y: Operand) -> Value:
    """The larger of x and y; a number wins over NaN."""
    a, b = promoted(x, y)
    return _unless_nan(a, b, METHODS["maximum"](a, b))


@function()
def fmin(x: Operand, y: Operand) -> Value:
    """The smaller of x and y; a number wins over NaN."""
    a, b = promoted(x, y)
    return _unless_nan(a, b, METHODS["minimum"](a, b))


def _unless_nan(x: Value, y: Value, best: Value) -> Value:
    if not x.dtype.is_inexact:
        return best
    return METHODS["where"](METHODS["isnan"](x), y, METHODS["where"](METHODS["isnan"](y), x, best))


@function("clamp")
def clip(x: Operand, min: Operand | None = None, max: Operand | None = None) -> Value:
    """x kept between two bounds; at a bound the derivative is still 1."""
    if min is None and max is None:
        raise OptionError("clip: needs a lower or an upper bound", code="O206")
    value = as_value(x)
    if min is not None:
        value = METHODS["maximum"](value, min)
    return value if max is None else METHODS["minimum"](value, max)


@function()
@rounded_once
def lerp(x: Operand, y: Operand, t: Operand) -> Value:
    """x + t·(y - x)."""
    a, b, weight = promoted(x, y, t)
    return a + weight * (b - a)


@function()
def heaviside(x: Operand, y: Operand) -> Value:
    """0 where x < 0, y where x is 0, 1 where x > 0; NaN stays."""
    a, at_zero = promoted(x, y)
    zero, one = constant(0, a.dtype), constant(1, a.dtype)
    step = METHODS["where"](a > zero, one, METHODS["where"](a < zero, zero, METHODS["stop_gradient"](a)))
    return METHODS["where"](METHODS["equal"](a, zero), at_zero, step)


@function()
@rounded_once
def isclose(x: Operand, y: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Value:
    """Whether |x - y| ≤ atol + rtol·|y|; infinities are close to themselves only."""
    a, b = (to_inexact(v) for v in numbers(x, y))
    gap, size = METHODS["abs"](a - b), METHODS["abs"](b)
    near = METHODS["bitwise_and"](gap <= size * rtol + atol, METHODS["isfinite"](b))
    close = METHODS["bitwise_or"](near, METHODS["equal"](a, b))
    if equal_nan:
        close = METHODS["bitwise_or"](close, METHODS["bitwise_and"](METHODS["isnan"](a), METHODS["isnan"](b)))
    return close


@function()
def allclose(x: Operand, y: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Value:
    """Whether all elements are close, as a boolean scalar."""
    return METHODS["all"](isclose(x, y, rtol, atol, equal_nan))


@function()
def nan_to_num(x: Operand, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Value:
    """NaN and infinities replaced by numbers: 0 and the largest finite ones by default."""
    value = as_value(x)
    if not value.dtype.is_float:
        return value
    limits = ml_dtypes.finfo(value.dtype.np)  # type: ignore[no-untyped-call]
    high = float(limits.max) if posinf is None else posinf
    low = float(limits.min) if neginf is None else neginf
    top, bottom = constant(np.inf, value.dtype), constant(-np.inf, value.dtype)
    for found, number in (
        (METHODS["isnan"](value), nan), (METHODS["equal"](value, top), high), (METHODS["equal"](value, bottom), low),
    ):  # fmt: skip
        value = METHODS["where"](found, constant(number, value.dtype), value)
    return value
