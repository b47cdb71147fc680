"""Ops that work along one axis: the field, its checks, and batching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from strata.core import Dim, DType, TensorType
from strata.mir import UnaryOp, Value
from strata.ops.base.elementwise import accepts


class AlongAxis(UnaryOp):
    """An op along one axis (non-negative) of a tensor whose type it keeps, unless its own `infer` says otherwise."""

    axis: int

    allowed: ClassVar[str] = "numeric"
    dtypes: ClassVar[str | tuple[DType, ...]] = "numeric"

    def infer(self, x: TensorType) -> Any:
        self.require(0 <= self.axis < x.ndim, f"axis {self.axis} is not an axis of {x}", code="S103")
        self.require_dtype(accepts(self.allowed, x.dtype), f"does not take {x}, only {self.allowed} types", code="D104")
        return x

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Any:
        return replace(self, axis=self.axis + 1)(x)
