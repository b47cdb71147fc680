"""Element-wise ops: arithmetic, comparison, logic, activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from strata.core import as_dtype, bool_, f32
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import is_text
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

UNARY: dict[str, Callable[[Any], Value]] = {
    "Abs": ops.abs, "Acos": ops.acos, "Acosh": ops.acosh, "Asin": ops.asin, "Asinh": ops.asinh, "Atan": ops.atan,
    "Atanh": ops.atanh, "BitwiseNot": ops.bitwise_not, "Ceil": ops.ceil, "Cos": ops.cos, "Cosh": ops.cosh,
    "Erf": ops.erf, "Exp": ops.exp, "Floor": ops.floor, "HardSwish": ops.hard_swish, "IsNaN": ops.isnan, "Log": ops.log,
    "Mish": ops.mish, "Neg": ops.negative, "Not": ops.logical_not, "Reciprocal": ops.reciprocal, "Relu": ops.relu,
    "Round": ops.round,
    "Sigmoid": ops.sigmoid, "Sign": ops.sign, "Sin": ops.sin, "Sinh": ops.sinh, "Softplus": ops.softplus,
    "Softsign": ops.softsign, "Sqrt": ops.sqrt, "Tan": ops.tan, "Tanh": ops.tanh,
}  # fmt: skip


def _unary(fn: Callable[[Any], Value]) -> Callable[[NodeView], Any]:
    return lambda n: _same(fn(n[0]), n[0])


def _same(y: Value, x: Value) -> Value:
    """The result in the type of the operand, as ONNX has it; tests give booleans."""
    return y if y.dtype is bool_ or y.dtype is x.dtype else ops.cast(y, x.dtype)


for _name, _fn in UNARY.items():
    reads(_name)(_unary(_fn))


def _pair(n: NodeView) -> tuple[Value, Value]:
    """Both operands; before opset 7 the second one is placed by an axis."""
    x, y = n[0], n[1]
    if n.version >= 7:
        x, y = n.tracer.agree(x, y)
    axis = n.attr("axis")
    if n.version < 7 and n.attr("broadcast", 0) and axis is not None:
        y = ops.reshape(y, (*y.shape, *(1,) * (x.ndim - n.place(axis, x.ndim) - y.ndim)))
    return x, y


def _divide(x: Value, y: Value) -> Value:
    return ops.trunc_divide(x, y) if x.dtype.is_int else ops.divide(x, y)


BINARY: dict[str, Callable[[Any, Any], Value]] = {
    "Add": ops.add, "Sub": ops.subtract, "Mul": ops.multiply, "Div": _divide, "And": ops.logical_and,
    "Or": ops.logical_or, "Xor": ops.logical_xor, "BitwiseAnd": ops.bitwise_and, "BitwiseOr": ops.bitwise_or,
    "BitwiseXor": ops.bitwise_xor,
    "Equal": ops.equal, "Less": ops.less, "LessOrEqual": ops.less_equal, "Greater": ops.greater,
    "GreaterOrEqual": ops.greater_equal,
}  # fmt: skip


def _binary(name: str, fn: Callable[[Any, Any], Value]) -> Callable[[NodeView], Any]:
    def reader(n: NodeView) -> Any:
        if name == "Equal" and is_text(n.np_dtype(0)):
            return np.equal(n.array(0), n.array(1)).astype(bool)
        x, y = _pair(n)
        return fn(x, y)

    return reader


for _name, _pairwise in BINARY.items():
    reads(_name)(_binary(_name, _pairwise))


@reads("Pow")
def power(n: NodeView) -> Value:
    x, y = _pair(n)
    if x.dtype.is_int and y.dtype.is_float:
        return ops.cast(ops.power(ops.cast(x, y.dtype), y), x.dtype)
    return ops.cast(ops.power(x, ops.cast(y, x.dtype) if x.dtype.is_float else y), x.dtype)


@reads("Mod")
def mod(n: NodeView) -> Value:
    x, y = _pair(n)
    return ops.fmod(x, y) if n.attr("fmod", 0) else ops.remainder(x, y)


@reads("BitShift")
def bit_shift(n: NodeView) -> Value:
    """A count outside 0..bits-1 shifts everything out; only the sign is left of a negative number shifted right."""
    shift = {"LEFT": ops.bitwise_left_shift, "RIGHT": ops.bitwise_right_shift}
    x, y = n[0], n[1]
    if y.dtype.kind == "int":
        y = ops.where(y < 0, ops.full((), y.dtype.bits, y.dtype), y)
    return shift[n.choice("direction", "", list(shift))](x, y)


def _variadic(fn: Callable[[Any, Any], Value]) -> Callable[[NodeView], Any]:
    def reader(n: NodeView) -> Any:
        values = n.tracer.agree(*n.values())
        return reduce(fn, values)

    return reader


for _name, _pairwise in {"Max": ops.maximum, "Min": ops.minimum, "Sum": ops.add}.items():
    reads(_name)(_variadic(_pairwise))


@reads("Mean")
def mean(n: NodeView) -> Value:
    values = n.tracer.agree(*n.values())
    return reduce(ops.add, values) / float(len(values))


@reads("Where")
def where(n: NodeView) -> Any:
    if is_text(n.np_dtype(1)):
        return np.where(n.array(0), n.array(1), n.array(2))
    values = n.tracer.agree(*n.values())
    return ops.where(*values)


@reads("Clip")
def clip(n: NodeView) -> Value:
    low, high = n.attr("min"), n.attr("max")
    return _clipped(n[0], low, high)


@reads("Clip", since=11)
def clip_inputs(n: NodeView) -> Value:
    return _clipped(n[0], n[1], n[2])


def _clipped(x: Value, low: Any, high: Any) -> Value:
    """min(max(x, low), high): the upper bound wins where the bounds cross."""
    if low is not None:
        x = ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


@reads("IsInf")
def isinf(n: NodeView) -> Value:
    x = n[0]
    infinite = ops.isinf(x)
    if not n.attr("detect_negative", 1):
        infinite = ops.logical_and(infinite, ops.greater(x, 0.0))
    if not n.attr("detect_positive", 1):
        infinite = ops.logical_and(infinite, ops.less(x, 0.0))
    return infinite


@reads("Gelu")
def gelu(n: NodeView) -> Value:
    return ops.gelu(n[0], approximate=n.choice("approximate", "none", ("none", "tanh")))


@reads("Swish")
def swish(n: NodeView) -> Value:
    x = n[0]
    return x * ops.sigmoid(x * float(n.attr("alpha", 1.0)))


@reads("SwiGLU")
def swiglu(n: NodeView) -> Value:
    """swish(gate) · linear of two inputs, or of the halves of one."""
    alpha = float(n.attr("alpha", 1.0))
    if n.has(1):
        gate, linear = n[0], n[1]
    else:
        gate, linear = ops.split(n[0], 2, n.axis("axis", -1))
    return gate * ops.sigmoid(gate * alpha) * linear


@reads("PRelu")
def prelu(n: NodeView) -> Value:
    x, slope = n[0], n[1]
    if n.version < 7 and slope.ndim == 1 and slope.shape[0] != 1 and x.ndim > 2:
        slope = ops.reshape(slope, (slope.shape[0], *(1,) * (x.ndim - 2)))
    return ops.where(x < 0, slope * x, x)


@reads("LeakyRelu")
def leaky_relu(n: NodeView) -> Value:
    return ops.leaky_relu(n[0], n.attr("alpha", 0.01))


@reads("Elu")
def elu(n: NodeView) -> Value:
    return ops.elu(n[0], n.attr("alpha", 1.0))


@reads("Celu")
def celu(n: NodeView) -> Value:
    return ops.celu(n[0], n.attr("alpha", 1.0))


@reads("Selu")
def selu(n: NodeView) -> Value:
    return ops.selu(n[0], n.attr("alpha", 1.67326319217681884765625), n.attr("gamma", 1.05070102214813232421875))


@reads("HardSigmoid")
def hard_sigmoid(n: NodeView) -> Value:
    return ops.hard_sigmoid(n[0], n.attr("alpha", 0.2), n.attr("beta", 0.5))


@reads("ThresholdedRelu")
def thresholded_relu(n: NodeView) -> Value:
    return ops.thresholded_relu(n[0], n.attr("alpha", 1.0))


@reads("Shrink")
def shrink(n: NodeView) -> Value:
    return _same(ops.shrink(n[0], n.attr("lambd", 0.5), n.attr("bias", 0.0)), n[0])


@reads("BitCast")
def bit_cast(n: NodeView) -> Any:
    target = n.dtype_attr("to")
    assert target is not None
    return n.array(0).view(target)


def accumulate_in(x: Value) -> Value:
    """Half precision in f32, for sums that ONNX defines there."""
    return ops.cast(x, f32) if x.dtype.is_float and x.dtype.bits < 32 else x


def cast_to(x: Value, dtype: Any) -> Value:
    return ops.cast(x, as_dtype(dtype))
