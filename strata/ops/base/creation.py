"""Tensors made from a shape alone: constants, index ramps, sizes as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, DType, SymExpr, TensorType, as_dtype, f32, i32, i64, normalize_axis, show_shape
from strata.mir import Op, Sample, Value, constant, function, op
from strata.ops.base.frontend import Operand, as_value, full_shape
from strata.ops.base.movement import broadcast_to

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


@op("iota")
class Iota(Op):
    """0, 1, 2, … along one axis of a shape."""

    shape: tuple[Dim, ...]
    axis: int
    dtype: DType

    differentiable = False

    def infer(self) -> TensorType:
        self.require(
            0 <= self.axis < len(self.shape),
            f"axis {self.axis} is not an axis of {show_shape(self.shape)}",
            code="S103",
        )
        return TensorType(self.dtype, self.shape)

    def numpy(self) -> np.ndarray:
        shape = self.infer().static_shape
        ramp = np.arange(shape[self.axis]).reshape([-1 if i == self.axis else 1 for i in range(len(shape))])
        return np.broadcast_to(ramp, shape).astype(self.dtype.np)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        return Iota((size, *self.shape), self.axis + 1, self.dtype)()

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return k.cast(index[self.axis], self.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(shape=(3, 4), axis=1, dtype=i64),
            Sample(shape=(5,), axis=0, dtype=f32),
            Sample(shape=(0, 2), axis=0, dtype=i32),
        ]


@op("dim_size")
class DimSize(Op):
    """A symbolic size as an i64 number."""

    dim: Dim

    differentiable = False

    def infer(self) -> TensorType:
        return TensorType(i64, ())

    def numpy(self) -> np.ndarray:
        return np.asarray(self.dim.__index__(), np.int64)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        return broadcast_to(self(), (size,))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return k.index(self.dim)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(dim=7)]


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def dim_size(dim: Dim) -> Value:
    """A size as a number: a constant when it is known."""
    return DimSize(dim)() if isinstance(dim, SymExpr) else constant(dim, i64)


def full(shape: Any, value: Any, dtype: Any = None) -> Value:
    """A shape filled with one number."""
    return broadcast_to(constant(value, dtype), full_shape(shape))


def zeros(shape: Any, dtype: Any = f32) -> Value:
    """A shape filled with 0."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = f32) -> Value:
    """A shape filled with 1."""
    return full(shape, 1, dtype)


@function()
def zeros_like(x: Operand, dtype: Any = None) -> Value:
    """Zeros of the same shape."""
    value = as_value(x)
    return full(value.shape, 0, value.dtype if dtype is None else dtype)


@function()
def ones_like(x: Operand, dtype: Any = None) -> Value:
    """Ones of the same shape."""
    value = as_value(x)
    return full(value.shape, 1, value.dtype if dtype is None else dtype)


def iota(shape: Any, axis: int = 0, dtype: Any = i64) -> Value:
    """0, 1, 2, … along one axis of a shape."""
    sizes = full_shape(shape)
    return Iota(sizes, normalize_axis(axis, len(sizes), "iota"), as_dtype(dtype))()
