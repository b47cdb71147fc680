"""What front-end functions share: converting arguments to values, promotion, shape arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import (
    Dim,
    DType,
    SymExpr,
    as_dtype,
    bool_,
    c64,
    check_shape,
    f32,
    i64,
    promote,
    promote_all,
)
from strata.errors import ShapeError, TraceError
from strata.kinds import with_article
from strata.mir import METHODS, Value, constant

Scalar = bool | int | float | complex
Operand = Value | Scalar | np.ndarray


def as_value(x: Any, dtype: DType | None = None) -> Value:
    """A value from a value, a number or anything NumPy can read."""
    if isinstance(x, Value):
        return x
    if isinstance(x, SymExpr):
        return METHODS["dim_size"](x)
    if hasattr(x, "__mir_value__"):  # objects of upper layers that hold a value
        raise TraceError(
            f"{with_article(type(x))} was passed where a graph value is needed: use strata.<op> on tensors", code="T116"
        )
    return constant(x, dtype)


def is_weak(x: Any) -> bool:
    """A Python number adapts to the type of the tensors beside it."""
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def common_dtype(operands: Sequence[Any]) -> DType:
    """The promoted dtype of operands; Python numbers only raise the class (int → float → complex), never the width."""
    strong = [_dtype_of(x) for x in operands if not is_weak(x)]
    weak = [x for x in operands if is_weak(x)]
    if not strong:
        return promote_all([as_dtype(type(x)) for x in weak])
    dtype = promote_all(strong)
    for x in weak:
        dtype = _meet_weak(dtype, x)
    return dtype


def _dtype_of(x: Any) -> DType:
    if isinstance(x, Value):
        return x.dtype
    if isinstance(x, SymExpr):
        return i64
    return as_dtype(x.dtype) if hasattr(x, "dtype") else as_value(x).dtype


def _meet_weak(dtype: DType, x: Scalar) -> DType:
    if isinstance(x, bool):
        return dtype
    if isinstance(x, complex):
        return dtype if dtype.is_complex else promote(dtype, c64)
    if isinstance(x, float):
        return dtype if dtype.is_inexact else promote(dtype, f32) if not dtype.is_bool else f32
    return i64 if dtype is bool_ else dtype


def promoted(*operands: Any) -> tuple[Value, ...]:
    """The operands as values of one dtype."""
    if len(operands) == 2:  # the usual cases, without a detour
        x, y = operands
        if type(x) is Value:
            if type(y) is Value and x.dtype is y.dtype:
                return operands
            if type(y) in (int, float) and _meet_weak(x.dtype, y) is x.dtype:
                return x, constant(y, x.dtype)
    dtype = common_dtype(operands)
    return tuple(METHODS["cast"](as_value(x, dtype if is_weak(x) else None), dtype) for x in operands)


def to_inexact(x: Value) -> Value:
    """Integers and booleans as floats (f64 for 64-bit integers), for functions that only exist on floats."""
    return x if x.dtype.is_inexact else METHODS["cast"](x, promote(x.dtype, f32) if x.dtype.is_int else f32)


def full_shape(shape: int | Dim | Sequence[Dim]) -> tuple[Dim, ...]:
    """A shape given as one size or a sequence of sizes."""
    if isinstance(shape, (int, np.integer, SymExpr)):
        shape = (shape,)
    try:
        return check_shape(tuple(shape))
    except TypeError:
        raise ShapeError(f"{shape!r} is not a shape", code="S101") from None


def same_size(a: Dim, b: Dim) -> bool:
    """Equal, or not known to differ: a symbol against a number is checked when the symbol is bound."""
    return a == b or not (isinstance(a, int) and isinstance(b, int))


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))
