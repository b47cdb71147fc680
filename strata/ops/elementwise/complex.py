"""Complex numbers: parts, conjugate, squared modulus, angle.

Gradients are taken with respect to the conjugate (Wirtinger).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.core import DType, TensorType, c64, c128, f32, f64
from strata.mir import METHODS, Op, Sample, Value, constant, function, op
from strata.ops.base.elementwise import Elementwise, ElementwiseBinary, ElementwiseUnary, Partial, unbroadcast
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


@op("conj")
class Conj(ElementwiseUnary):
    """The complex conjugate."""

    allowed = "complex"
    dtypes = "complex"

    def jvp(self, x: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0])

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (self(ct),)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(c64[3, 4]), Sample(c64[()]), Sample(c64[0])]


class ComplexPart(ElementwiseUnary):
    """The real or imaginary part of a complex number."""

    allowed = "complex"
    dtypes = "complex"

    def result_dtype(self, dtype: DType) -> DType:
        return dtype.real

    def jvp(self, x: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0])

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(c64[3, 4]), Sample(c64[()]), Sample(c64[0])]


@op("real")
class Real(ComplexPart):
    """The real part."""

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (make_complex(ct * 0.5, METHODS["zeros_like"](ct)),)


@op("imag")
class Imag(ComplexPart):
    """The imaginary part."""

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (make_complex(METHODS["zeros_like"](ct), ct * 0.5),)


@op("complex")
class MakeComplex(Elementwise):
    """A complex number from its parts."""

    allowed = "float"
    dtypes = (f32, f64)

    def result_dtype(self, dtype: DType) -> DType:
        return c128 if dtype is f64 else c64

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = np.empty(np.broadcast_shapes(x.shape, y.shape), np.result_type(x.dtype, np.complex64))
        out.real, out.imag = x, y  # as a sum, an infinite part would leave nothing of the other
        return out

    def jvp(self, x: Value, y: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        zero = constant(0, x.dtype)
        tx, ty = (zero if t is None else t for t in dx)
        return METHODS["broadcast_to"](self(tx, ty), out.shape)

    def vjp(self, x: Value, y: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return unbroadcast(Real()(ct) * 2.0, x.shape), unbroadcast(Imag()(ct) * 2.0, y.shape)

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        return k.complex(x, y)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 4], f32[3, 4]), Sample(f64[2], f64[()])]


@op("complex_norm_sq")
class ComplexNormSq(ComplexPart):
    """The squared modulus, a real number."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.real(x * np.conj(x))

    def jvp(self, x: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else Real()(Conj()(x) * dx[0]) * 2.0

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (ComplexNormSqBackward()(x, ct),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return k.real(x) * k.real(x) + k.imag(x) * k.imag(x)


@op("complex_norm_sq_backward")
class ComplexNormSqBackward(Op):
    """g·z: the gradient of |z|² with respect to the conjugate; twice this is the gradient in (re, im)."""

    dtypes = (c64,)

    def infer(self, z: TensorType, g: TensorType) -> TensorType:
        self.require_dtype(z.dtype.is_complex, f"does not take {z}, only complex types", code="D104")
        self.require_dtype(g.dtype is z.dtype.real, f"the gradient of {z} must be {z.dtype.real}, got {g}", code="D243")
        self.require(z.shape == g.shape, f"{z} and its gradient {g} differ in shape", code="S373")
        return z

    def numpy(self, z: np.ndarray, g: np.ndarray) -> np.ndarray:
        return z * g

    def decompose(self, z: Value, g: Value) -> Value:
        return MakeComplex()(Real()(z) * g, Imag()(z) * g)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(c64[3, 4], f32[3, 4]), Sample(c128[()], f64[()]), Sample(c64[0], f32[0])]


@op("atan2")
class Atan2(ElementwiseBinary):
    """The angle of the point (x, y), in (-π, π]; its derivative at the origin is 0."""

    allowed = "float"
    in_numpy = "arctan2"

    def partials(self, y: Value, x: Value, *, out: Value) -> tuple[Partial, ...]:
        zero, one = constant(0, x.dtype), constant(1, x.dtype)
        square = x * x + y * y
        origin = METHODS["equal"](square, zero)
        scale = METHODS["where"](origin, zero, one / METHODS["where"](origin, one, square))
        return x * scale, -y * scale

    @classmethod
    def samples(cls) -> list[Sample]:
        axes = np.array([[0, 0, 1, -1, 0], [0, -1, 0, 0, 2]], np.float32)
        return [
            Sample(f32[3, 4], f32[3, 4]), Sample(f32[3, 1], f32[2]), Sample(f64[()], f64[()]), Sample(f32[0], f32[0]),
            Sample(axes[0], axes[1], grad=False),
        ]  # fmt: skip


def make_complex(x: Operand, y: Operand) -> Value:
    """A complex number from its real and imaginary parts."""
    a, b = as_value(x), as_value(y)
    return MakeComplex()(a, b)


@function("conjugate")
def conj(x: Operand) -> Value:
    """The complex conjugate; real numbers stay."""
    value = as_value(x)
    return Conj()(value) if value.dtype.is_complex else value


@function()
def real(x: Operand) -> Value:
    """The real part."""
    value = as_value(x)
    return Real()(value) if value.dtype.is_complex else value


@function()
def imag(x: Operand) -> Value:
    """The imaginary part; 0 for real numbers."""
    value = as_value(x)
    return Imag()(value) if value.dtype.is_complex else METHODS["zeros_like"](value)


@function("abs_sq")
def complex_norm_sq(x: Operand) -> Value:
    """The squared modulus; the square of real numbers."""
    value = as_value(x)
    return ComplexNormSq()(value) if value.dtype.is_complex else value * value


@function("arctan2")
def atan2(y: Operand, x: Operand) -> Value:
    """The angle of the points (x, y)."""
    a, b = promoted(y, x)
    return Atan2()(to_inexact(a), to_inexact(b))


@function()
def angle(x: Operand) -> Value:
    """The phase of complex numbers; 0 or π for real ones."""
    value = to_inexact(as_value(x))
    if value.dtype.is_complex:
        return Atan2()(Imag()(value), Real()(value))
    return Atan2()(METHODS["zeros_like"](value), value)
