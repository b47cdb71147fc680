"""Sign and rounding: negative, absolute value, sign, floor, ceil, trunc, round."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import DType, f32, i32
from strata.mir import METHODS, Sample, Value, draw, function, op
from strata.ops.base.elementwise import Partial
from strata.ops.base.frontend import Operand, as_value
from strata.ops.elementwise.math import Math

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


@op("negative")
class Negative(Math):
    """-x; integers wrap."""

    allowed = "numeric"
    dtypes = "numeric"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (-1,)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return -x


@op("abs")
class Abs(Math):
    """Absolute value; its derivative at 0 is 0. Of a complex number: its modulus, a real number."""

    allowed = "numeric"
    dtypes = "numeric"

    def result_dtype(self, dtype: DType) -> DType:
        return dtype.real

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (METHODS["sign"](x),)

    def jvp(self, x: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        (tangent,) = dx
        if not x.dtype.is_complex or tangent is None:
            return super().jvp(x, out=out, dx=dx)
        return METHODS["real"](METHODS["conj"](METHODS["sign"](x)) * tangent)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        if not x.dtype.is_complex:
            return super().vjp(x, out=out, ct=ct)
        return (METHODS["cast"](ct, x.dtype) * METHODS["sign"](x) * 0.5,)  # the gradient is with respect to conj(z)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(draw(f32[3, 4], distinct=True)), Sample(f32[()]), Sample(i32[5], grad=False)]


@op("sign")
class Sign(Math):
    """-1, 0 or 1 (z / |z| on complex numbers); NaN stays. Its derivative is 0."""

    allowed = "numeric"
    dtypes = "numeric"
    differentiable = False

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        if not x.dtype.is_complex:
            return k.sign(x)
        size, zero, one = k.abs(x), k.const(0, x.dtype.real), k.const(1, x.dtype.real)
        re, im = k.real(x), k.imag(x)
        both = k.const(math.nan, x.dtype.real)
        far = k.select(k.isinf(im), both, k.copysign(one, re)), k.select(k.isinf(im), both, zero)
        # an infinite size is one of the real part, or counts as one of the imaginary part
        far = k.select(k.isinf(re), far[0], zero), k.select(k.isinf(re), far[1], k.copysign(one, im))
        near = (k.select(k.eq(size, zero), zero, part / size) for part in (re, im))
        return k.complex(*(k.select(k.isinf(size), *ends) for ends in zip(far, near, strict=True)))


class Rounding(Math):
    """A rounding function: integers stay, the derivative is 0 unless the op says otherwise."""

    allowed = "real"
    dtypes = "real"
    differentiable = False

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return super().numpy(x) if x.dtype.kind == "f" else x

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(np.array([-2.5, -1.5, -0.5, -0.2, 0.0, 0.5, 1.5, 2.5, 2.7], np.float32)),
            Sample(f32[3, 4]),
            Sample(i32[5], grad=False),
        ]


@op("floor")
class Floor(Rounding):
    """The largest integer that is not above x."""


@op("ceil")
class Ceil(Rounding):
    """The smallest integer that is not below x."""


@op("trunc")
class Trunc(Rounding):
    """x without its fraction."""


@op("round")
class Round(Rounding):
    """To the nearest integer, halves to even. The derivative is 1, straight through, as quantised training needs."""

    differentiable = True
    in_numpy = "rint"

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (1,)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(x.inputs[0], grad=False) for x in super().samples()]


@function("neg")
def negative(x: Operand) -> Value:
    """-x."""
    return Negative()(as_value(x))


@function("absolute")
def abs_(x: Operand) -> Value:
    """Absolute value."""
    value = as_value(x)
    return value if value.dtype.is_bool or value.dtype.kind == "uint" else Abs()(value)


@function()
def sign(x: Operand) -> Value:
    """-1, 0 or 1."""
    return Sign()(as_value(x))


def _rounding_function(cls: type[Math], *aliases: str) -> Any:
    def apply(x: Operand) -> Value:
        value = as_value(x)
        return value if value.dtype.is_int or value.dtype.is_bool else cls()(value)

    apply.__name__ = apply.__qualname__ = cls.name
    apply.__doc__ = cls.__doc__
    return function(*aliases)(apply)


floor = _rounding_function(Floor)
ceil = _rounding_function(Ceil)
trunc = _rounding_function(Trunc)
round_ = _rounding_function(Round, "rint")
