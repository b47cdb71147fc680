"""Element-wise functions of the standard: ours by its names, with the few whose rules differ written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import strata.tensor as tensors
from strata.core import here
from strata.errors import DTypeError
from strata.tensor.creation import asarray
from strata.tensor.tensor import Tensor

_ops: Any = tensors

UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "conj", "cos", "cosh", "exp", "expm1", "isfinite",
    "isinf", "isnan", "log", "log10", "log1p", "log2", "negative", "real", "imag", "reciprocal", "sign", "signbit",
    "sin", "sinh", "sqrt", "square", "tan", "tanh", "logical_not", "bitwise_invert",
)  # fmt: skip
BINARY = (
    "add", "atan2", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "copysign", "divide", "equal", "floor_divide", "greater", "greater_equal", "hypot", "less", "less_equal",
    "logaddexp", "logical_and", "logical_or", "logical_xor", "maximum", "minimum", "multiply", "not_equal",
    "remainder", "subtract",
)  # fmt: skip
ROUNDING = ("ceil", "floor", "trunc", "round")
NAMES = [*UNARY, *BINARY, *ROUNDING, "clip", "nextafter", "positive", "pow"]


def _operands(x1: Any, x2: Any) -> tuple[Any, Any]:
    """At least one is an array; a Python number must be of a kind that the array's type can hold."""
    if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
        raise DTypeError("one of the operands must be an array", code="D380", place=here())
    return x1, x2


def _expm1(z: np.ndarray) -> np.ndarray:
    """exp(z) - 1; NumPy's own loses the special values of the standard."""
    return np.where(np.isfinite(z) & (z != 0), np.expm1(z), np.exp(z) - 1).astype(z.dtype)


HOST: dict[str, Callable[..., Any]] = {  # functions of complex numbers that are NumPy's
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "cos": np.cos, "cosh": np.cosh, "sin": np.sin,
    "sinh": np.sinh, "tanh": np.tanh, "tan": np.tan, "expm1": _expm1,
    "log1p": np.log1p, "log10": np.log10, "log2": np.log2,
}  # fmt: skip


@cache
def _on_host(name: str) -> Callable[..., Any]:
    def execute(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(HOST[name](x))

    made: Callable[..., Any] = _ops.custom_op(execute, name=f"complex_{name}", differentiable=False)
    return made


def _unary(name: str) -> Callable[[Any], Tensor]:
    def apply(x: Tensor, /) -> Tensor:
        if name in HOST and x.dtype.is_complex:
            made: Tensor = _on_host(name)(x)
            return made
        result: Tensor = getattr(_ops, name)(x)
        return result

    apply.__name__ = name
    return apply


def _binary(name: str) -> Callable[[Any, Any], Tensor]:
    def apply(x1: Any, x2: Any, /) -> Tensor:
        result: Tensor = getattr(_ops, name)(*_operands(x1, x2))
        return result

    apply.__name__ = name
    return apply


def _rounding(name: str) -> Callable[[Any], Tensor]:
    def apply(x: Tensor, /) -> Tensor:
        result: Tensor = x if not x.dtype.is_inexact else getattr(_ops, name)(x)
        return result

    apply.__name__ = name
    return apply


def floor_divide(x1: Any, x2: Any, /) -> Tensor:
    """The operator `//`, but for infinities: the standard rounds their quotient down, NumPy and `//` do not."""
    a, b = _operands(x1, x2)
    made: Tensor = a // b
    if not made.dtype.is_float:
        return made
    infinite = _ops.isinf(_ops.abs(a) + _ops.abs(b))
    result: Tensor = _ops.where(infinite, _ops.floor(a / b), made)
    return result


globals().update({n: _unary(n) for n in UNARY})
globals().update({n: _binary(n) for n in BINARY if n != "floor_divide"})
globals().update({n: _rounding(n) for n in ROUNDING})


def positive(x: Any, /) -> Tensor:
    made: Tensor = +x
    return made


def pow(x1: Any, x2: Any, /) -> Tensor:
    made: Tensor = _ops.power(*_operands(x1, x2))
    return made


def nextafter(x1: Any, x2: Any, /) -> Tensor:
    """The neighbour of x1 on the way to x2; computed at once."""
    first, second = _operands(x1, x2)
    return asarray(np.nextafter(*(x.numpy() if isinstance(x, Tensor) else x for x in (first, second))))


def clip(x: Any, /, min: Any = None, max: Any = None) -> Tensor:
    """Elements cut to min .. max, in the type of x."""
    low, high = (v.cast(x.dtype) if isinstance(v, Tensor) else v for v in (min, max))
    made: Tensor = x if low is None and high is None else _ops.clip(x, low, high)
    return made.cast(x.dtype)


__all__ = [*NAMES]  # noqa: PLE0604 - all of them are strings
