"""How torch chooses the element type of an expression, and wrappers for rules that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strata.core import DType, SymExpr, TensorType, bool_, f32, i64, u8
from strata.mir import METHODS, Constant, Value, constant
from strata.torch.kinds import DTYPES, TORCH_DTYPES
from strata.torch.table import Unsupported


def default_dtype() -> DType:
    return DTYPES[torch.get_default_dtype()]


def value(x: Any, dtype: DType | None = None) -> Value:
    """A tensor, a number or a size as a value, in a type if one is given."""
    if isinstance(x, Value):
        if dtype is None or x.dtype is dtype:
            return x
        if x.dtype.is_complex and not dtype.is_complex:
            raise Unsupported(f"{x.dtype} as {dtype}, without its imaginary part")
        if x.dtype.is_float and dtype.is_int and dtype.bits < 32 and not _is_bounded(x):
            x = METHODS["cast"](x, i64)  # torch wraps around, where a cast of ours stops at the limits
        return METHODS["cast"](x, dtype)
    if isinstance(x, SymExpr):
        return value(METHODS["dim_size"](x), dtype)
    if dtype is None:
        dtype = bool_ if isinstance(x, bool) else i64 if isinstance(x, int) else default_dtype()
    if dtype.is_int and isinstance(x, (int, float)):
        return constant(_wrapped(int(x), dtype), dtype)
    return constant(x, dtype)


def number(x: Any, dtype: DType) -> Any:
    """A number of Python as it is in a type."""
    made = value(x, dtype).node.op
    assert isinstance(made, Constant)
    return made.data.array.item()


def _is_bounded(x: Value) -> bool:
    """Whether limits were put on a tensor just now, as quantisation does."""
    return x.node.op.name in ("clip", "minimum", "maximum", "relu", "sigmoid")


def _wrapped(n: int, dtype: DType) -> int:
    """A whole number as torch stores it in a narrow type."""
    n &= (1 << dtype.bits) - 1
    return n - (1 << dtype.bits) if dtype.kind == "int" and n >> (dtype.bits - 1) else n


_CLASSES = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


def common(*operands: Any) -> DType:
    """The type that operands meet in: those with axes decide, then those without, then Python's numbers."""
    groups: list[DType | None] = [None, None, None]
    dtype: DType | None
    for x in operands:
        if isinstance(x, Value):
            at, dtype = (0 if x.ndim else 1), x.dtype
        elif isinstance(x, SymExpr):
            at, dtype = 2, i64
        else:
            at = 2
            dtype = (
                bool_ if isinstance(x, bool) else i64 if isinstance(x, int)
                else _complex_of(default_dtype()) if isinstance(x, complex) else default_dtype()
            )  # fmt: skip
        groups[at] = _meet(groups[at], dtype)
    result: DType | None = None
    for dtype in groups:
        if dtype is None:
            continue
        if result is None:
            result = dtype
        elif _CLASSES[dtype.kind] > _CLASSES[result.kind]:
            result = _raised(result, dtype)
    assert result is not None
    return result


def _raised(result: DType, other: DType) -> DType:
    """A type raised to a higher class by an operand of lower priority."""
    if other.is_complex and result.is_float:
        return _complex_of(result)
    return other


def _complex_of(dtype: DType) -> DType:
    return DTYPES[TORCH_DTYPES[dtype].to_complex()]


def _meet(a: DType | None, b: DType) -> DType:
    if a is None:
        return b
    return DTYPES[torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b])]


def in_result_type(f: Callable[..., Value]) -> Callable[..., Value]:
    """A rule on tensors that are first cast to the type of the result; truth values are counted as whole numbers."""

    def rule(out: TensorType, *operands: Any, **options: Any) -> Value:
        dtype = u8 if out.dtype is bool_ else out.dtype
        made = f(*(value(x, dtype) for x in operands), **options)
        return made if out.dtype is not bool_ or made.dtype is bool_ else METHODS["not_equal"](made, value(0, u8))

    rule.__module__, rule.__doc__ = f.__module__, f.__doc__
    return rule


def in_common_type(f: Callable[..., Value]) -> Callable[..., Value]:
    """A rule on tensors that are first cast to the type they meet in."""

    def rule(out: TensorType, *operands: Any, **options: Any) -> Value:
        dtype = common(*operands)
        return f(*(value(x, dtype) for x in operands), **options)

    rule.__module__, rule.__doc__ = f.__module__, f.__doc__
    return rule


def as_truth(x: Any) -> Value:
    """Not zero."""
    v = value(x)
    return v if v.dtype is bool_ else METHODS["not_equal"](v, value(0, v.dtype))


def floating(x: Value) -> Value:
    """At least f32, for formulas whose intermediate results want the bits."""
    return x if x.dtype.is_inexact and x.dtype.bits >= 32 else METHODS["cast"](x, f32)
