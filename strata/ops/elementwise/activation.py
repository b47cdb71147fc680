"""Activations beyond those of `math`: softplus as an op, the others composed; derivatives of activations.

At a kink the derivative is the one torch takes: 0 on the flat side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from strata.core import TensorType, divide_exactly, f32, normalize_axis
from strata.errors import OptionError, ShapeError
from strata.mir import REGISTRY, Op, Sample, Value, draw, function, near, op
from strata.ops.base.elementwise import Elementwise, Partial, maximum, minimum
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.base.movement import narrow, reshape
from strata.ops.elementwise.logic import rounded_once, where
from strata.ops.elementwise.math import (
    Math,
    atan,
    cos,
    exp,
    expm1,
    gelu,
    log,
    log1p,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    sqrt,
    tan,
    tanh,
)
from strata.ops.elementwise.rounding import abs_, negative, round_, sign

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


@op("softplus")
class Softplus(Math):
    """log(1 + e ** x) without overflow; its derivative is exactly the sigmoid, also at 0."""

    def decompose(self, x: Value) -> Value:
        return relu(x) + log1p(exp(-abs_(x)))

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.logaddexp(x.dtype.type(0), x)

    def partials(self, x: Value, *, out: Value) -> tuple[Partial, ...]:
        return (sigmoid(x),)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        zero = k.const(0.0, x.dtype)
        return k.max(x, zero) + k.log1p(k.exp(-k.abs(x)))

    @classmethod
    def samples(cls) -> list[Sample]:
        extremes = np.array([-200, -20, 0, 20, 200], np.float32)
        return [
            *super().samples(),
            Sample(extremes),
            Sample(np.array([np.nan, np.inf, -np.inf], np.float32), grad=False),
        ]


# ---------------------------------------------------------------------------------------------------------- derivatives


def _np_sigmoid(x: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return expit(x)


def _np_gelu_slope(x: np.ndarray) -> np.ndarray:
    from scipy.special import ndtr

    return ndtr(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _np_gelu_tanh_slope(x: np.ndarray) -> np.ndarray:
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 0.134145 * x * x)


# What `activation_backward` accepts: the derivative of each kind, as NumPy computes it.
SLOPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": _np_gelu_slope,
    "gelu_tanh": _np_gelu_tanh_slope,
    "silu": lambda x: _np_sigmoid(x) * (1 + x * (1 - _np_sigmoid(x))),
    "relu": lambda x: np.where(x > 0, 1.0, 0.0),
    "sigmoid": lambda x: _np_sigmoid(x) * _np_sigmoid(-x),
    "softplus": _np_sigmoid,
    "tanh": lambda x: 1 / np.cosh(x) ** 2,
    "exp": np.exp,
    "log": lambda x: 1 / x,
    "sqrt": lambda x: np.where(x == 0, 0.0, 0.5 * x**-0.5),
    "rsqrt": lambda x: np.where(x == 0, 0.0, -0.5 * x**-1.5),
    "negative": lambda x: np.full_like(x, -1),
    "abs": np.sign,
    "sin": np.cos,
    "cos": lambda x: -np.sin(x),
    "tan": lambda x: 1 / np.cos(x) ** 2,
    "atan": lambda x: 1 / (1 + x * x),
    "round": np.ones_like,
}
KIND_ALIASES = {"gelu_approx": "gelu_tanh", "neg": "negative", "swish": "silu"}


@op("relu_backward")
class ReluBackward(Op):
    """dy where x > 0, else 0."""

    elementwise = True

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        return _same_type(self, x, dy)

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return np.where(x > 0, dy, dy.dtype.type(0))

    def decompose(self, x: Value, dy: Value) -> Value:
        return where(x > 0, dy, 0.0)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[3, 4], distinct=True), f32[3, 4]),
            Sample(f32[()], f32[()]),
            Sample(f32[0, 2], f32[0, 2]),
            Sample(np.array([-1, 0, 1], np.float32), np.array([np.nan, np.nan, 2], np.float32), grad=False),
        ]


@op("activation_backward")
class ActivationBackward(Op):
    """The derivative of an activation at its input x, times dy."""

    kind: str

    elementwise = True

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        ok = self.kind in SLOPES
        self.require(
            ok, f"no activation is named {self.kind!r}{near(self.kind, SLOPES)}", code="O210", error=OptionError
        )
        return _same_type(self, x, dy)

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return SLOPES[self.kind](x) * dy

    def decompose(self, x: Value, dy: Value) -> Value:
        forward = REGISTRY[self.kind]()
        assert isinstance(forward, Elementwise)
        (gradient,) = forward.vjp(x, out=forward(x), ct=dy)
        assert gradient is not None
        return gradient

    @classmethod
    def samples(cls) -> list[Sample]:
        positive = ("log", "sqrt", "rsqrt")
        kinked = ("relu", "abs")
        made = []
        for kind in SLOPES:
            x = draw(f32[3, 4], 0.3, 3.0) if kind in positive else draw(f32[3, 4], distinct=kind in kinked)
            made.append(Sample(x, f32[3, 4], kind=kind, grad=kind != "round"))
        return [*made, Sample(f32[()], f32[()], kind="tanh"), Sample(f32[0], f32[0], kind="gelu")]


def _same_type(self: Op, x: TensorType, dy: TensorType) -> TensorType:
    self.require_dtype(x.dtype.is_float, f"does not take {x.dtype}, only float types", code="D104")
    self.require_dtype(x.dtype is dy.dtype, f"operands differ in dtype, {x} and {dy}", code="D103")
    self.require(x.shape == dy.shape, f"the gradient {dy} does not have the shape of {x}", code="S230")
    return x


# ------------------------------------------------------------------------------------------------------------ functions


def _float(x: Operand) -> Value:
    return to_inexact(as_value(x))


def _clamp(x: Value, low: float, high: float) -> Value:
    """The bound is the first operand, so that it takes the derivative at a tie."""
    return minimum(high, maximum(low, x))


@function()
def relu_backward(x: Operand, dy: Operand) -> Value:
    """dy where x > 0, else 0."""
    return ReluBackward()(*promoted(x, dy))


@function()
def activation_backward(x: Operand, dy: Operand, kind: str) -> Value:
    """The gradient of the activation `kind` at its input x."""
    return ActivationBackward(KIND_ALIASES.get(kind, kind))(*promoted(x, dy))


@function()
@rounded_once
def softplus(x: Operand, beta: float = 1.0) -> Value:
    """log(1 + e ** (beta x)) / beta."""
    value = _float(x)
    return Softplus()(value) if beta == 1.0 else Softplus()(value * beta) / beta


@function("logsigmoid")
def log_sigmoid(x: Operand) -> Value:
    """log(sigmoid(x)) without underflow."""
    return -Softplus()(-_float(x))


@function()
def leaky_relu(x: Operand, negative_slope: float = 0.01) -> Value:
    """x where x > 0, else negative_slope x."""
    value = _float(x)
    return where(value > 0, value, value * negative_slope)


@function()
def prelu(x: Operand, slope: Operand, axis: int | None = None) -> Value:
    """x where x > 0, else slope x. The slope broadcasts; with `axis` a rank-1 slope lies along that axis."""
    value, factor = promoted(_float(x), slope)
    if axis is not None:
        at = normalize_axis(axis, value.ndim, "prelu")
        if factor.ndim != 1 or factor.shape[0] not in (1, value.shape[at]):
            message = (
                f"prelu: a slope along axis {at} of {value.type} needs {value.shape[at]} elements, got {factor.type}"
            )
            raise ShapeError(message, code="S231")
        factor = reshape(factor, (factor.shape[0], *(1,) * (value.ndim - at - 1)))
    return where(value > 0, value, value * factor)


@function()
@rounded_once
def elu(x: Operand, alpha: float = 1.0) -> Value:
    """x where x > 0, else alpha (e ** x - 1)."""
    value = _float(x)
    return where(value > 0, value, expm1(minimum(value, 0.0)) * alpha)


@function()
@rounded_once
def selu(x: Operand, alpha: float = SELU_ALPHA, scale: float = SELU_SCALE) -> Value:
    """Scaled elu that keeps mean 0 and variance 1."""
    return elu(x, alpha) * scale


@function()
@rounded_once
def celu(x: Operand, alpha: float = 1.0) -> Value:
    """max(x, 0) + min(alpha (e ** (x / alpha) - 1), 0)."""
    value = _float(x)
    return where(value > 0, value, expm1(minimum(value, 0.0) / alpha) * alpha)


@function()
@rounded_once
def softsign(x: Operand) -> Value:
    """x / (1 + |x|)."""
    value = _float(x)
    return value / (abs_(value) + 1.0)


@function("hardsigmoid")
@rounded_once
def hard_sigmoid(x: Operand, alpha: float = 1 / 6, beta: float = 0.5) -> Value:
    """alpha x + beta between 0 and 1. The defaults are torch's; ONNX takes alpha = 0.2."""
    return _clamp(_float(x) * alpha + beta, 0.0, 1.0)


@function("hardswish")
@rounded_once
def hard_swish(x: Operand) -> Value:
    """x hard_sigmoid(x)."""
    value = _float(x)
    return value * hard_sigmoid(value)


@function("hardtanh")
def hard_tanh(x: Operand, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    """x between two bounds, with derivative 0 at the bounds."""
    return _clamp(as_value(x), min_val, max_val)


@function()
def relu6(x: Operand) -> Value:
    """x between 0 and 6."""
    return _clamp(as_value(x), 0, 6)


@function()
@rounded_once
def mish(x: Operand) -> Value:
    """x tanh(softplus(x))."""
    value = _float(x)
    return value * tanh(softplus(value))


@function()
@rounded_once
def quick_gelu(x: Operand) -> Value:
    """x sigmoid(1.702 x)."""
    value = _float(x)
    return value * sigmoid(value * 1.702)


@function()
def threshold(x: Operand, threshold: float, value: float = 0.0) -> Value:
    """x where x > threshold, else value."""
    operand = as_value(x)
    return where(operand > threshold, operand, value)


@function()
def thresholded_relu(x: Operand, alpha: float = 1.0) -> Value:
    """x where x > alpha, else 0."""
    return threshold(_float(x), alpha)


@function()
@rounded_once
def tanhshrink(x: Operand) -> Value:
    """x - tanh(x)."""
    value = _float(x)
    return value - tanh(value)


@function("hardshrink")
def hard_shrink(x: Operand, lambd: float = 0.5) -> Value:
    """x where |x| > lambd, else 0."""
    value = as_value(x)
    return where(abs_(value) > lambd, value, 0)


@function()
@rounded_once
def softshrink(x: Operand, lambd: float = 0.5) -> Value:
    """x moved towards 0 by lambd, and 0 nearer than that."""
    return shrink(_float(x), lambd, lambd)


@function()
@rounded_once
def shrink(x: Operand, lambd: float = 0.5, bias: float = 0.0) -> Value:
    """x moved towards 0 by bias where |x| > lambd, else 0: ONNX's Shrink."""
    value = as_value(x)
    return where(abs_(value) > lambd, value - sign(value) * bias, 0)


@function()
@rounded_once
def glu(x: Operand, axis: int = -1) -> Value:
    """The first half along an axis times the sigmoid of the second."""
    first, second = halves(_float(x), axis, "glu")
    return first * sigmoid(second)


@function()
@rounded_once
def logit(x: Operand, eps: float | None = None) -> Value:
    """log(x / (1 - x)), the inverse of the sigmoid; `eps` keeps x inside [eps, 1 - eps]."""
    value = _float(x)
    value = value if eps is None else _clamp(value, eps, 1 - eps)
    return log(value) - log1p(-value)


def halves(x: Value, axis: int, what: str) -> tuple[Value, Value]:
    """The two halves of a value along an axis."""
    at = normalize_axis(axis, x.ndim, what)
    half = divide_exactly(x.shape[at], 2)
    if half is None:
        raise ShapeError(
            f"{what}: axis {at} of {x.type} has {x.shape[at]} elements, which do not make two halves", code="S232"
        )
    return narrow(x, at, 0, half), narrow(x, at, half, half)


def gelu_tanh(x: Operand) -> Value:
    """The tanh approximation of gelu."""
    return gelu(x, approximate="tanh")


# Activations by name, for fused ops and blocks. Each takes one value and needs no argument.
ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "relu": relu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "exp": exp,
    "softplus": softplus,
    "log_sigmoid": log_sigmoid,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "selu": selu,
    "celu": celu,
    "softsign": softsign,
    "hard_sigmoid": hard_sigmoid,
    "hard_swish": hard_swish,
    "hard_tanh": hard_tanh,
    "relu6": relu6,
    "mish": mish,
    "quick_gelu": quick_gelu,
    "log": log,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "negative": negative,
    "abs": abs_,
    "sin": sin,
    "cos": cos,
    "tan": tan,
    "atan": atan,
    "round": round_,
}


@function()
def activation(x: Operand, kind: str) -> Value:
    """An activation by its name; see ACTIVATIONS."""
    return ACTIVATIONS[activation_name(kind, "activation")](as_value(x))


def activation_name(kind: str, what: str) -> str:
    """The canonical name of an activation; an error names the nearest one."""
    name = KIND_ALIASES.get(kind, kind)
    if name not in ACTIVATIONS:
        raise OptionError(f"{what}: no activation is named {kind!r}{near(kind, ACTIVATIONS)}", code="O210")
    return name
