"""Element by element: arithmetic, comparisons, logic, bits, functions of one number, activations."""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.core import SymExpr, TensorType, bool_, bounds, f16
from strata.mir import METHODS, Value
from strata.torch.aten.backward import derivative
from strata.torch.aten.promotion import as_truth, common, floating, in_common_type, in_result_type, value
from strata.torch.table import Unsupported, aten, enter

_FAMILY = "pointwise"

# Functions of one number under the same name here, computed in the type of the result.
_SAME = (
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2",
    "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf", "erfc", "sigmoid", "reciprocal", "digamma",
    "lgamma", "ceil", "floor", "trunc", "round", "relu", "selu", "square",
)  # fmt: skip
_RENAMED = {
    "neg": "negative", "hardsigmoid": "hard_sigmoid", "hardswish": "hard_swish", "silu": "silu", "mish": "mish",
    "relu6": "relu6",
}  # fmt: skip
for _name, _ours in {**dict(zip(_SAME, _SAME, strict=True)), **_RENAMED}.items():
    enter((_name,), in_result_type(METHODS[_ours]), _FAMILY)

# Two operands in the type of the result.
_BINARY = {
    "mul.Tensor": "multiply", "mul.Scalar": "multiply", "div.Tensor": "divide", "div.Scalar": "divide",
    "maximum": "maximum", "minimum": "minimum", "fmax": "fmax", "fmin": "fmin", "fmod.Tensor": "fmod",
    "fmod.Scalar": "fmod", "remainder.Tensor": "remainder", "remainder.Scalar": "remainder",
    "remainder.Scalar_Tensor": "remainder", "atan2": "arctan2", "hypot": "hypot", "copysign.Tensor": "copysign",
    "copysign.Scalar": "copysign", "logaddexp": "logaddexp", "gcd": "gcd",
    "lcm": "lcm", "pow.Tensor_Tensor": "power", "pow.Scalar": "power",
    "__lshift__.Scalar": "bitwise_left_shift", "__lshift__.Tensor": "bitwise_left_shift",
    "__rshift__.Scalar": "bitwise_right_shift", "__rshift__.Tensor": "bitwise_right_shift",
    "bitwise_left_shift.Tensor": "bitwise_left_shift", "bitwise_right_shift.Tensor": "bitwise_right_shift",
    "bitwise_left_shift.Tensor_Scalar": "bitwise_left_shift",
    "bitwise_right_shift.Tensor_Scalar": "bitwise_right_shift",
}  # fmt: skip
for _name, _ours in _BINARY.items():
    enter((_name,), in_result_type(METHODS[_ours]), _FAMILY)


@aten("pow.Tensor_Scalar")
def power(out: TensorType, x: Any, exponent: Any) -> Value:
    """x to a power. For integers torch refuses one that is negative; for others it has roots, which differ from powers
    at -inf and -0."""
    if out.dtype.is_int and (bounds(exponent)[0] if isinstance(exponent, SymExpr) else exponent) < 0:
        raise Unsupported("integers to a negative power")
    if out.dtype.is_inexact and out.dtype is not f16 and exponent in (0.5, -0.5):
        return in_result_type(ops.sqrt if exponent > 0 else ops.rsqrt)(out, x)
    return in_result_type(ops.power)(out, x, exponent)


def _or_zero(of: Value, made: Value) -> Value:
    """What was made of a number, and zero of what is none."""
    return ops.where(ops.equal(of, of), made, value(0, made.dtype)) if of.dtype.is_inexact else made


@aten("sign")
def sign(out: TensorType, x: Value) -> Value:
    """-1, 0 or 1; of nan, zero."""
    x = value(x, out.dtype)
    return _or_zero(x, ops.sign(x))


@aten("heaviside")
def heaviside(out: TensorType, x: Any, at_zero: Any) -> Value:
    """0 below zero and 1 above; of nan, zero."""
    x = value(x, out.dtype)
    return _or_zero(x, ops.heaviside(x, value(at_zero, out.dtype)))


for _name, _ours in {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}.items():  # fmt: skip
    enter((f"{_name}.Tensor", f"{_name}.Scalar"), in_common_type(METHODS[_ours]), _FAMILY)


def _bits(name: str) -> Any:
    """Bits of whole numbers, or truth values."""

    def rule(out: TensorType, *operands: Any) -> Value:
        logic = METHODS[name.replace("bitwise", "logical")] if out.dtype is bool_ else METHODS[name]
        return logic(*(value(x, out.dtype) for x in operands))

    rule.__module__ = __name__
    return rule


for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    enter((f"{_name}.Tensor", f"{_name}.Scalar", f"{_name}.Scalar_Tensor"), _bits(_name), _FAMILY)
enter(("bitwise_not",), _bits("bitwise_not"), _FAMILY)


def _truth(name: str) -> Any:
    def rule(out: TensorType, *operands: Any) -> Value:
        return METHODS[name](*map(as_truth, operands))

    rule.__module__ = __name__
    return rule


for _name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    enter((_name,), _truth(_name), _FAMILY)


def _scaled(y: Value, alpha: Any) -> Value:
    return y if alpha == 1 else y * value(alpha, y.dtype)


@aten("add.Tensor", "add.Scalar")
def add(out: TensorType, x: Any, y: Any, alpha: Any = 1) -> Value:
    """x + alpha·y."""
    return in_result_type(lambda a, b: ops.add(a, _scaled(b, alpha)))(out, x, y)


@aten("sub.Tensor", "sub.Scalar")
def subtract(out: TensorType, x: Any, y: Any, alpha: Any = 1) -> Value:
    """x - alpha·y."""
    return in_result_type(lambda a, b: ops.subtract(a, _scaled(b, alpha)))(out, x, y)


@aten("rsub.Tensor", "rsub.Scalar")
def reversed_subtract(out: TensorType, x: Any, y: Any, alpha: Any = 1) -> Value:
    """y - alpha·x."""
    return subtract(out, y, x, alpha)


@aten("div.Tensor_mode", "div.Scalar_mode")
def divide_rounded(out: TensorType, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    """x / y, rounded down or towards zero."""
    a, b = value(x, out.dtype), value(y, out.dtype)
    if rounding_mode is None:
        return ops.divide(a, b)
    if rounding_mode == "floor":
        return ops.floor_divide(a, b)
    return ops.trunc_divide(a, b) if out.dtype.is_int else ops.trunc(ops.divide(a, b))


@aten("floor_divide", "floor_divide.Scalar")
def floor_divide(out: TensorType, x: Any, y: Any) -> Value:
    return divide_rounded(out, x, y, "floor")


def _float_test(name: str) -> Any:
    def rule(out: TensorType, x: Value) -> Value:
        if not x.dtype.is_inexact and name != "signbit":
            return ops.full(x.shape, name == "isfinite", bool_)
        if x.dtype is bool_:
            return ops.full(x.shape, False, bool_)
        return METHODS[name](x)

    rule.__module__ = __name__
    return rule


for _name in ("isnan", "isinf", "isfinite", "signbit"):
    enter((_name,), _float_test(_name), _FAMILY)


@aten("where.self")
def where(out: TensorType, condition: Value, x: Any, y: Any) -> Value:
    return ops.where(as_truth(condition), value(x, out.dtype), value(y, out.dtype))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(out: TensorType, x: Value, mask: Value, fill: Any) -> Value:
    return ops.where(mask, value(fill, out.dtype), x)


@aten("clamp", "clamp.Tensor")
def clamp(out: TensorType, x: Value, low: Any = None, high: Any = None) -> Value:
    """The upper bound wins where the bounds cross."""
    x = value(x, out.dtype)
    if low is not None:
        x = ops.maximum(x, value(low, out.dtype))
    return x if high is None else ops.minimum(x, value(high, out.dtype))


@aten("clamp_min", "clamp_min.Tensor")
def clamp_min(out: TensorType, x: Value, low: Any) -> Value:
    return clamp(out, x, low)


@aten("clamp_max", "clamp_max.Tensor")
def clamp_max(out: TensorType, x: Value, high: Any) -> Value:
    return clamp(out, x, None, high)


@aten("hardtanh")
def hardtanh(out: TensorType, x: Value, low: float = -1.0, high: float = 1.0) -> Value:
    return clamp(out, x, low, high)


@aten("gelu")
def gelu(out: TensorType, x: Value, approximate: str = "none") -> Value:
    return ops.gelu(x, approximate)


@aten("gelu_backward")
def gelu_backward(out: TensorType, ct: Value, x: Value, approximate: str = "none") -> Value:
    return derivative([ops.gelu(x, approximate)], [ct], [x])[0]


@aten("leaky_relu")
def leaky_relu(out: TensorType, x: Value, slope: float = 0.01) -> Value:
    return ops.where(ops.greater(x, value(0, x.dtype)), x, x * value(slope, x.dtype))


@aten("elu")
def elu(out: TensorType, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    zero = value(0, x.dtype)
    negative = ops.expm1(x * value(input_scale, x.dtype)) * value(alpha * scale, x.dtype)
    return ops.where(ops.greater(x, zero), _scaled(x, scale), negative)


@aten("softplus")
def softplus(out: TensorType, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """Linear above the threshold."""
    scaled = _scaled(x, beta)
    soft = ops.log1p(ops.exp(scaled)) * value(1 / beta, x.dtype)
    return ops.where(ops.greater(scaled, value(threshold, x.dtype)), x, soft)


@aten("round.decimals")
def round_decimals(out: TensorType, x: Value, decimals: int = 0) -> Value:
    if not x.dtype.is_inexact:
        return x
    ten = value(10.0 ** abs(decimals), x.dtype)
    return ops.divide(ops.round(x * ten), ten) if decimals >= 0 else ops.round(ops.divide(x, ten)) * ten


@aten("logit")
def logit(out: TensorType, x: Value, eps: float | None = None) -> Value:
    x = value(x, out.dtype)
    if eps is not None:
        x = clamp(out, x, eps, 1 - eps)
    return ops.log(ops.divide(x, value(1, x.dtype) - x))


@aten("isclose")
def isclose(
    out: TensorType, x: Value, y: Value, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Value:
    a, b = (value(v, common(x, y)) for v in (x, y))
    if not a.dtype.is_inexact:
        a, b = floating(a), floating(b)
    return ops.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)


@aten("abs")
def absolute(out: TensorType, x: Value) -> Value:
    return x if x.dtype is bool_ else ops.abs(x)


@aten("_conj", "conj_physical")
def conj(out: TensorType, x: Value) -> Value:
    return ops.conj(x) if x.dtype.is_complex else x


@aten("sgn")
def sgn(out: TensorType, x: Value) -> Value:
    if not x.dtype.is_complex:
        return sign(out, x)
    size = ops.abs(x)
    zero = value(0, size.dtype)
    unit = ops.divide(x, value(ops.where(ops.equal(size, zero), value(1, size.dtype), size), x.dtype))
    return ops.where(ops.equal(size, zero), value(0, x.dtype), unit)


@aten("angle")
def angle(out: TensorType, x: Value) -> Value:
    return ops.angle(value(x, out.dtype) if not x.dtype.is_complex else x)


@aten("complex")
def complex_(out: TensorType, real: Value, imaginary: Value) -> Value:
    return value(real, out.dtype) + value(imaginary, out.dtype) * value(1j, out.dtype)


@aten("polar")
def polar(out: TensorType, size: Value, angle: Value) -> Value:
    return complex_(out, size * ops.cos(angle), size * ops.sin(angle))


@aten("view_as_real")
def view_as_real(out: TensorType, x: Value) -> Value:
    return ops.stack([ops.real(x), ops.imag(x)], x.ndim)


@aten("view_as_complex")
def view_as_complex(out: TensorType, x: Value) -> Value:
    return complex_(out, x[..., 0], x[..., 1])


@aten("real")
def real(out: TensorType, x: Value) -> Value:
    return ops.real(x) if x.dtype.is_complex else x


@aten("imag")
def imag(out: TensorType, x: Value) -> Value:
    return ops.imag(x)


@aten("nan_to_num")
def nan_to_num(
    out: TensorType, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    return ops.nan_to_num(x, nan or 0.0, posinf, neginf) if x.dtype.is_inexact else x
