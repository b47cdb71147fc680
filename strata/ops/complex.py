"""Complex numbers: parts, conjugate, squared modulus. Gradients are taken with respect to the conjugate (Wirtinger)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.core import DType, c64, c128, f32, f64
from strata.mir import METHODS, Sample, Value, constant, function, op
from strata.ops.elementwise import Elementwise, unbroadcast
from strata.ops.frontend import Operand, as_value

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


@op("conj")
class Conj(Elementwise):
    """The complex conjugate."""

    allowed = "complex"
    dtypes = "complex"

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.conj(x)

    def jvp(self, x: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0])

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (self(ct),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return k.conj(x)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(c64[3, 4]), Sample(c64[()]), Sample(c64[0])]


class Part(Elementwise):
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
class Real(Part):
    """The real part."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.real(x)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (make_complex(ct * 0.5, METHODS["zeros_like"](ct)),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return k.real(x)


@op("imag")
class Imag(Part):
    """The imaginary part."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.imag(x)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return (make_complex(METHODS["zeros_like"](ct), ct * 0.5),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return k.imag(x)


@op("complex")
class MakeComplex(Elementwise):
    """A complex number from its parts."""

    allowed = "float"
    dtypes = (f32, f64)

    def result_dtype(self, dtype: DType) -> DType:
        return c128 if dtype is f64 else c64

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + 1j * y.astype(x.dtype)

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


def make_complex(x: Operand, y: Operand) -> Value:
    """A complex number from its real and imaginary parts."""
    a, b = as_value(x), as_value(y)
    return MakeComplex()(a, b)


@function()
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


