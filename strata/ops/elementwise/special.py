"""Special functions: lgamma, digamma, polygamma, erfc."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from strata.core import f32, f64
from strata.errors import LowerError
from strata.mir import Sample, Value, draw, function, op
from strata.ops.base.elementwise import Partial
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.elementwise.math import Math, erf, exp, float_function

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


@op("erfc")
class Erfc(Math):
    """1 - erf(x), exact where erf(x) is all but 1."""

    domain = (-2.0, 1.5)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import erfc as erfc_of

        return erfc_of(x)

    def decompose(self, x: Value) -> Value:
        return 1.0 - erf(x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (exp(-(x * x)) * (-2.0 / math.sqrt(math.pi)),)


@op("lgamma")
class Lgamma(Math):
    """Logarithm of the absolute value of the gamma function."""

    domain = (0.4, 4.0)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import gammaln

        return np.where(np.isneginf(x), x.dtype.type(np.inf), gammaln(x))  # as C says, and kernels do

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (digamma(x),)


@op("polygamma")
class Polygamma(Math):
    """The order-th derivative of digamma; order 0 is digamma itself."""

    order: int

    domain = (0.4, 4.0)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import digamma as digamma_of
        from scipy.special import polygamma

        return digamma_of(x) if self.order == 0 else polygamma(self.order, x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (Polygamma(self.order + 1)(x),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return polygamma_series(k, self.order, x)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(draw(f32[3, 4], 0.4, 4.0), order=0), Sample(draw(f32[5], 0.4, 4.0), order=1)]


def polygamma_series(k: KernelBuilder, order: int, x: Expr) -> Expr:
    """The order-th derivative of digamma.

    Recurrence up to an argument above 8, then the asymptotic series; below 0, the value at 1 - x is reflected. The
    series ends with the term of B_14: below 1e-13 relative there.
    """
    if order > 1:
        k_name = f"polygamma of order {order}"
        raise LowerError(f"{k_name} has no kernel; orders 0 and 1 have", code="L120")
    given = x.cast(f64)

    def c(value: float) -> Expr:
        return k.const(value, f64)

    is_reflected = k.lt(given, c(0.0))
    wide = k.select(is_reflected, c(1.0) - given, given)
    shift, total = 8, c(0.0)
    for i in range(shift):
        step = wide + c(float(i)) if i else wide  # -0 + 0 is 0, and the pole at -0 is another
        total = total + (c(-1.0) / step if order == 0 else c(1.0) / (step * step))
    y = wide + c(float(shift))
    inverse = c(1.0) / y
    square = inverse * inverse
    bernoulli = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6]
    series = c(0.0)
    for n, b in reversed(list(enumerate(bernoulli, 1))):
        series = square * (c(-b / (2 * n) if order == 0 else b) + series)
    tail = k.log(y) - c(0.5) * inverse + series if order == 0 else inverse + c(0.5) * square + inverse * series
    part = (given - k.floor(given + c(0.5))) * c(math.pi)  # what is left of whole periods of π x
    if order == 0:
        turned = total + tail - c(math.pi) / k.tan(part)
        turned = k.select(k.eq(part, c(0.0)), c(math.nan), turned)  # a pole with both signs
    else:
        wave = c(math.pi) / k.sin(part)
        turned = wave * wave - (total + tail)
    return k.select(is_reflected, turned, total + tail).cast(x.dtype)


# ------------------------------------------------------------------------------------------------------------ functions


erfc = float_function(Erfc)
lgamma = float_function(Lgamma)


@function()
def digamma(x: Operand) -> Value:
    """The derivative of lgamma."""
    return Polygamma(0)(to_inexact(as_value(x)))
