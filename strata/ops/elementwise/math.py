"""Unary functions: exponentials, logarithms, roots, trigonometry, activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import f16, f32, i32
from strata.mir import METHODS, Sample, Value, constant, draw, function, op
from strata.ops.base.elementwise import ElementwiseUnary, Partial
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.elementwise.complex import make_complex
from strata.ops.elementwise.logic import rounded_once

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder

SQRT_2 = math.sqrt(2.0)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


class Math(ElementwiseUnary):
    """A function of one number. `domain` is where samples are drawn."""

    allowed = "float"
    domain: ClassVar[tuple[float, float]] = (-3.0, 3.0)

    @classmethod
    def samples(cls) -> list[Sample]:
        low, high = cls.domain
        return [
            Sample(draw(f32[3, 4], low, high)),
            Sample(draw(f32[()], low, high)),
            Sample(draw(f16[2, 0], low, high)),
        ]


def _c(value: float, like: Value) -> Value:
    return constant(value, like.dtype)


@op("exp")
class Exp(Math):
    """e ** x."""

    allowed = "inexact"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (out,)


@op("exp2")
class Exp2(Math):
    """2 ** x."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (out * math.log(2.0),)


@op("expm1")
class Expm1(Math):
    """e ** x - 1, accurate near 0."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (out + 1.0,)


@op("log")
class Log(Math):
    """Natural logarithm; the principal branch on complex numbers."""

    allowed = "inexact"
    domain = (0.2, 4.0)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (1.0 / x,)


@op("log2")
class Log2(Math):
    """Logarithm to base 2."""

    domain = (0.2, 4.0)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return ((1.0 / math.log(2.0)) / x,)


@op("log1p")
class Log1p(Math):
    """log(1 + x), accurate near 0."""

    domain = (-0.7, 3.0)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (1.0 / (x + 1.0),)


@op("sqrt")
class Sqrt(Math):
    """Square root; its derivative at 0 is 0."""

    allowed = "inexact"
    domain = (0.2, 4.0)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        zero = _c(0, out)
        is_zero = METHODS["equal"](out, zero)
        return (METHODS["where"](is_zero, zero, 0.5 / METHODS["where"](is_zero, _c(1, out), out)),)


@op("rsqrt")
class Rsqrt(Math):
    """1 / sqrt(x); its derivative at 0 is 0."""

    domain = (0.2, 4.0)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        zero = _c(0, out)
        is_zero = METHODS["equal"](x, zero)
        return (METHODS["where"](is_zero, zero, -0.5 * out / METHODS["where"](is_zero, _c(1, out), x)),)


@op("sin")
class Sin(Math):
    """Sine."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (cos(x),)


@op("cos")
class Cos(Math):
    """Cosine."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (-sin(x),)


@op("tan")
class Tan(Math):
    """Tangent."""

    domain = (-1.2, 1.2)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (out * out + 1.0,)


@op("asin")
class Asin(Math):
    """Inverse sine."""

    domain = (-0.8, 0.8)
    in_numpy = "arcsin"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (rsqrt(1.0 - x * x),)


@op("acos")
class Acos(Math):
    """Inverse cosine."""

    domain = (-0.8, 0.8)
    in_numpy = "arccos"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (-rsqrt(1.0 - x * x),)


@op("atan")
class Atan(Math):
    """Inverse tangent."""

    in_numpy = "arctan"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (1.0 / (x * x + 1.0),)


@op("sinh")
class Sinh(Math):
    """Hyperbolic sine."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (cosh(x),)


@op("cosh")
class Cosh(Math):
    """Hyperbolic cosine."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (sinh(x),)


@op("tanh")
class Tanh(Math):
    """Hyperbolic tangent."""

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (1.0 - out * out,)


@op("asinh")
class Asinh(Math):
    """Inverse hyperbolic sine."""

    in_numpy = "arcsinh"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (rsqrt(x * x + 1.0),)


@op("acosh")
class Acosh(Math):
    """Inverse hyperbolic cosine."""

    domain = (1.3, 4.0)
    in_numpy = "arccosh"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (rsqrt(x * x - 1.0),)


@op("atanh")
class Atanh(Math):
    """Inverse hyperbolic tangent."""

    domain = (-0.8, 0.8)
    in_numpy = "arctanh"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (1.0 / (1.0 - x * x),)


@op("erf")
class Erf(Math):
    """The error function."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import erf as erf_of

        return erf_of(x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (exp(-(x * x)) * (2.0 / math.sqrt(math.pi)),)


@op("sigmoid")
class Sigmoid(Math):
    """1 / (1 + e ** -x), without overflow."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        return expit(x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (out * (1.0 - out),)


@op("relu")
class Relu(Math):
    """max(x, 0); NaN stays NaN, and the derivative at 0 is 0."""

    allowed = "real"
    dtypes = "real"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.where(x < 0, x.dtype.type(0), x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (METHODS["where"](out > 0, _c(1, x), _c(0, x)),)  # out is often stored anyway; x then need not be

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return k.select(k.lt(x, k.const(0, x.dtype)), k.const(0, x.dtype), x)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(draw(f32[3, 4], distinct=True)), Sample(f32[()]), Sample(i32[5], grad=False),
                Sample(np.array([np.nan, -1, 0, np.inf], np.float32), grad=False)]  # fmt: skip


@op("gelu")
class Gelu(Math):
    """x * Φ(x) with the exact normal distribution function."""

    def decompose(self, x: Value) -> Value:
        return x * 0.5 * (erf(x * (1 / SQRT_2)) + 1.0)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import erf as erf_of

        return x * 0.5 * (erf_of(x * (1 / SQRT_2)) + 1.0)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        cdf = 0.5 * (erf(x * (1 / SQRT_2)) + 1.0)
        return (cdf + x * exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)),)


@op("gelu_tanh")
class GeluTanh(Math):
    """The tanh approximation of gelu, as x * sigmoid(2 u): (1 + tanh u) / 2 would lose digits where u is negative."""

    def decompose(self, x: Value) -> Value:
        return x * sigmoid(2 * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3)))

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        s = sigmoid(2 * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
        inner = 2 * SQRT_2_OVER_PI * (1.0 + 3 * GELU_CUBIC * x * x)
        return (s + x * s * (1.0 - s) * inner,)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        wide = k.cast(x, x.dtype.accumulator)  # constants have its digits

        def c(value: float) -> Expr:
            return k.const(value, wide.dtype)

        u = wide + c(GELU_CUBIC) * wide * wide * wide
        return k.cast(wide * k.sigmoid(c(2 * SQRT_2_OVER_PI) * u), x.dtype)


@op("silu")
class Silu(Math):
    """x * sigmoid(x)."""

    def decompose(self, x: Value) -> Value:
        return x * sigmoid(x)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        return x * expit(x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        s = sigmoid(x)
        return (s * (1.0 + x * (1.0 - s)),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return x * k.sigmoid(x)


# ------------------------------------------------------------------------------------------------------------ functions


def float_function(cls: type[Math], *aliases: str) -> Any:
    def apply(x: Operand) -> Value:
        return cls()(to_inexact(as_value(x)))

    apply.__name__ = apply.__qualname__ = cls.name
    apply.__doc__ = cls.__doc__
    return function(*aliases)(apply)


exp = float_function(Exp)
exp2 = float_function(Exp2)
expm1 = float_function(Expm1)
log = float_function(Log)
log2 = float_function(Log2)
log1p = float_function(Log1p)
sqrt = float_function(Sqrt)
rsqrt = float_function(Rsqrt)
sin = float_function(Sin)
cos = float_function(Cos)
tan = float_function(Tan)
asin = float_function(Asin, "arcsin")
acos = float_function(Acos, "arccos")
atan = float_function(Atan, "arctan")
sinh = float_function(Sinh)
cosh = float_function(Cosh)
tanh = float_function(Tanh)
asinh = float_function(Asinh, "arcsinh")
acosh = float_function(Acosh, "arccosh")
atanh = float_function(Atanh, "arctanh")
erf = float_function(Erf)
sigmoid = float_function(Sigmoid)
silu = float_function(Silu, "swish")


@function()
@rounded_once
def log10(x: Operand) -> Value:
    """Logarithm to base 10."""
    made, scale = log(x), 1 / math.log(10.0)
    if made.dtype.is_complex:  # each part: as a complex factor, 0 times an infinity would be none
        return make_complex(METHODS["real"](made) * scale, METHODS["imag"](made) * scale)
    return made * scale


@function()
def reciprocal(x: Operand) -> Value:
    """1 / x."""
    value = to_inexact(as_value(x))
    if not value.dtype.is_complex:
        return 1.0 / value
    # as NumPy: scaled by the larger part; where both are 0, so is neither part of the result
    where, re, im = METHODS["where"], METHODS["real"](value), METHODS["imag"](value)
    flat = METHODS["abs"](im) <= METHODS["abs"](re)
    ratio = where(flat, im, re) / where(flat, re, im)
    scale = where(flat, re + im * ratio, re * ratio + im)
    one = METHODS["ones_like"](ratio)
    return make_complex(where(flat, one, ratio) / scale, -where(flat, ratio, one) / scale)


@function()
def square(x: Operand) -> Value:
    """x * x."""
    value = as_value(x)
    return value * value


@function()
def relu(x: Operand) -> Value:
    """max(x, 0)."""
    return Relu()(as_value(x))


@function()
def gelu(x: Operand, approximate: str = "none") -> Value:
    """Gaussian error linear unit; approximate="tanh" takes the tanh form."""
    value = to_inexact(as_value(x))
    return GeluTanh()(value) if approximate == "tanh" else Gelu()(value)
