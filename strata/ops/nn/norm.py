"""Normalisations: biased variance, eps inside the root, two-pass statistics, in f32 for half precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import (
    Dim,
    TensorType,
    bf16,
    dim_prod,
    divide_exactly,
    f32,
    f64,
    normalize_axes,
    normalize_axis,
    promote_all,
)
from strata.errors import OptionError, ShapeError
from strata.mir import Op, Sample, Value, draw, function, op
from strata.ops.base.creation import ones, zeros
from strata.ops.base.elementwise import maximum
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import narrow, pad_constant, reshape
from strata.ops.elementwise.logic import cast
from strata.ops.elementwise.math import rsqrt, sqrt
from strata.ops.elementwise.rounding import abs_
from strata.ops.nn.norm_gradients import (
    AxesNorm,
    BatchNormInferenceBackwardBeta,
    BatchNormInferenceBackwardGamma,
    BatchNormInferenceBackwardInput,
    ChannelNorm,
    GroupNormBackwardBeta,
    GroupNormBackwardGamma,
    GroupNormBackwardInput,
    LayerNormBackwardGamma,
    LayerNormBackwardInput,
    RmsNormBackwardBeta,
    RmsNormBackwardGamma,
    RmsNormBackwardInput,
    along,
    check_affine,
    check_axes,
    check_float,
    check_groups,
    np_along,
    np_standardized,
    others,
    scaled,
    standardized,
)
from strata.ops.reduce.reduce import mean as mean_of
from strata.ops.reduce.reduce import sum_, var
from strata.ops.reduce.softmax import widened

Axis = int | Sequence[int]


class AffineNorm(AxesNorm):
    """A normalisation over axes with an optional scale γ and shift β: takes (x), (x, γ) or (x, γ, β)."""

    def infer(self, x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None) -> TensorType:
        affine = [t for t in (gamma, beta) if t is not None]
        check_float(self, x, *affine)
        check_axes(self, x, self.axes)
        check_affine(self, x, self.axes, *affine)
        return x

    def decompose(self, x: Value, *affine: Value) -> Value:
        y = self.normal(widened(x))
        if affine:
            y = y * along(affine[0], self.axes, x.shape)
        if len(affine) > 1:
            y = y + along(affine[1], self.axes, x.shape)
        return cast(y, x.dtype)

    def numpy(self, x: np.ndarray, *affine: np.ndarray) -> np.ndarray:
        y = self.np_normal(x)
        if affine:
            y = y * np_along(affine[0], self.axes, x.shape)
        return y + np_along(affine[1], self.axes, x.shape) if len(affine) > 1 else y

    def normal(self, x: Value) -> Value:
        raise NotImplementedError

    def np_normal(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def parameter(self, x: Value, given: Sequence[Value], i: int) -> Value:
        """γ (0) or β (1), made up where it was not given."""
        shape = [x.shape[a] for a in self.axes]
        return given[i] if len(given) > i else (zeros if i else ones)(shape, x.dtype)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if any(batched[1:]):
            return super().vmap(*inputs, batched=batched, size=size)
        return type(self)(tuple(a + 1 for a in self.axes), self.eps)(*inputs)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 6], f32[6], f32[6], axes=(1,), eps=1e-5),
            Sample(f32[3, 6], axes=(1,), eps=1e-5),
            Sample(f64[2, 3, 4], f64[3], axes=(1,), eps=1e-3),
            Sample(f32[2, 3, 2], f32[3, 2], f32[3, 2], axes=(1, 2), eps=1e-5),
            Sample(f32[4, 3], f32[4], f32[4], axes=(0,), eps=1e-6),
            Sample(f32[0, 3], f32[3], f32[3], axes=(1,), eps=1e-5),
            Sample(f32[5], axes=(0,), eps=1e-5),
            Sample(bf16[2, 8], bf16[8], bf16[8], axes=(1,), eps=1e-5, grad=False),
        ]


@op("layer_norm")
class LayerNormOp(AffineNorm):
    """(x - mean) / sqrt(var + eps) γ + β."""

    def normal(self, x: Value) -> Value:
        return standardized(x, self.axes, self.eps)[0]

    def np_normal(self, x: np.ndarray) -> np.ndarray:
        return np_standardized(x, self.axes, self.eps)[0]

    def vjp(self, x: Value, *affine: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        grads = [LayerNormBackwardInput(self.axes, self.eps)(x, self.parameter(x, affine, 0), ct)]
        if affine:
            grads.append(LayerNormBackwardGamma(self.axes, self.eps)(x, ct))
        if len(affine) > 1:
            grads.append(sum_(ct, others(self.axes, x.ndim)))
        return tuple(grads)


@op("rms_norm")
class RmsNorm(AffineNorm):
    """x / sqrt(mean(x²) + eps) γ + β."""

    def normal(self, x: Value) -> Value:
        return scaled(x, self.axes, self.eps)[0]

    def np_normal(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(self.axes, keepdims=True) + self.eps)

    def vjp(self, x: Value, *affine: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        inputs = (x, self.parameter(x, affine, 0), self.parameter(x, affine, 1), ct)
        gradients = (RmsNormBackwardInput, RmsNormBackwardGamma, RmsNormBackwardBeta)
        return tuple(cls(self.axes, self.eps)(*inputs) for cls in gradients[: 1 + len(affine)])


@op("layer_norm_2d")
class LayerNorm2d(Op):
    """Layer norm across the channels of [N, C, H, W] at each pixel; takes (x), (x, γ) or (x, γ, β)."""

    eps: float

    def infer(self, x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None) -> TensorType:
        self.require(x.ndim == 4, f"needs [N, C, H, W], got {x}", code="S235")
        affine = [t for t in (gamma, beta) if t is not None]
        check_float(self, x, *affine)
        check_axes(self, x, (1,))
        check_affine(self, x, (1,), *affine)
        return x

    def decompose(self, x: Value, *affine: Value) -> Value:
        return LayerNormOp((1,), self.eps)(x, *affine)

    def numpy(self, x: np.ndarray, *affine: np.ndarray) -> np.ndarray:
        last = np.moveaxis(x, 1, -1)
        y = (last - last.mean(-1, keepdims=True)) / np.sqrt(last.var(-1, keepdims=True) + self.eps)
        y = y * affine[0] if affine else y
        y = y + affine[1] if len(affine) > 1 else y
        return np.moveaxis(y, -1, 1)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 3, 2, 2], f32[3], f32[3], eps=1e-6),
            Sample(f64[1, 4, 1, 3], eps=1e-5),
            Sample(f32[0, 2, 2, 1], f32[2], eps=1e-5),
        ]


@op("group_norm")
class GroupNormOp(Op):
    """Each sample of [N, C, ...] normalised over groups of channels; takes (x), (x, γ) or (x, γ, β)."""

    groups: int
    eps: float

    def infer(self, x: TensorType, gamma: TensorType | None = None, beta: TensorType | None = None) -> TensorType:
        affine = [t for t in (gamma, beta) if t is not None]
        check_float(self, x, *affine)
        check_groups(self, x, self.groups)
        check_affine(self, x, (1,), *affine)
        return x

    def decompose(self, x: Value, *affine: Value) -> Value:
        # the groups keep their own axis to the end: what belongs to a group is made once for it
        width = divide_exactly(x.shape[1], self.groups)
        assert width is not None
        shape = (x.shape[0], self.groups, width, dim_prod(x.shape[2:]))
        y = standardized(reshape(widened(x), shape), (2, 3), self.eps)[0]
        sides = [reshape(widened(v), (self.groups, width, 1)) for v in affine]
        y = y * sides[0] if affine else y
        y = y + sides[1] if len(affine) > 1 else y
        return reshape(cast(y, x.dtype), x.shape)

    def numpy(self, x: np.ndarray, *affine: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        width = x.shape[1] // self.groups
        for n in range(x.shape[0]):
            for c in range(0, x.shape[1], width):
                part = x[n, c : c + width]
                y[n, c : c + width] = (part - part.mean()) / np.sqrt(part.var() + self.eps)
        y = y * np_along(affine[0], (1,), x.shape) if affine else y
        return y + np_along(affine[1], (1,), x.shape) if len(affine) > 1 else y

    def vjp(self, x: Value, *affine: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        channels = (x.shape[1],)
        gamma = affine[0] if affine else ones(channels, x.dtype)
        beta = affine[1] if len(affine) > 1 else zeros(channels, x.dtype)
        grads = [GroupNormBackwardInput(self.groups, self.eps)(x, gamma, beta, ct)]
        if affine:
            grads.append(GroupNormBackwardGamma(self.groups, self.eps)(x, ct))
        if len(affine) > 1:
            grads.append(GroupNormBackwardBeta(self.groups, self.eps)(x, ct))
        return tuple(grads)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if any(batched[1:]):
            return super().vmap(*inputs, batched=batched, size=size)
        x, *affine = inputs
        return reshape(self(reshape(x, (dim_prod(x.shape[:2]), *x.shape[2:])), *affine), x.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4, 3, 2], f32[4], f32[4], groups=2, eps=1e-5),
            Sample(f64[2, 6, 3], f64[6], groups=3, eps=1e-3),
            Sample(f32[2, 4], groups=1, eps=1e-5),
            Sample(f32[2, 3, 2, 2], f32[3], f32[3], groups=3, eps=1e-5),
            Sample(f32[0, 2, 3], f32[2], f32[2], groups=2, eps=1e-5),
        ]


@op("batch_norm_inference")
class BatchNormInference(ChannelNorm):
    """γ (x - mean) / sqrt(var + eps) + β for the channels along `axis`; takes (x, γ, β, mean, var)."""

    def infer(
        self, x: TensorType, gamma: TensorType, beta: TensorType, mean: TensorType, var: TensorType
    ) -> TensorType:
        self.check(x, gamma, beta, mean, var)
        return x

    def decompose(self, x: Value, gamma: Value, beta: Value, mean: Value, var: Value) -> Value:
        scale = self.channels(gamma, x) * rsqrt(self.channels(var, x) + self.eps)
        return cast((widened(x) - self.channels(mean, x)) * scale + self.channels(beta, x), x.dtype)

    def numpy(
        self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> np.ndarray:
        last = np.moveaxis(x, self.axis, -1)
        return np.moveaxis(gamma * (last - mean) / np.sqrt(var + self.eps) + beta, -1, self.axis)

    def vjp(
        self, x: Value, gamma: Value, beta: Value, mean: Value, var: Value, *, out: Value, ct: Value
    ) -> tuple[Value | None, ...]:
        dx = BatchNormInferenceBackwardInput(self.axis, self.eps)(x, gamma, mean, var, ct)
        dgamma = BatchNormInferenceBackwardGamma(self.axis, self.eps)(x, mean, var, ct)
        dbeta = BatchNormInferenceBackwardBeta(self.axis)(ct)
        inv = rsqrt(widened(var) + self.eps)
        dmean = -sum_(dx, others((self.axis,), x.ndim))
        dvar = cast(widened(gamma) * widened(dgamma) * inv * inv * -0.5, x.dtype)
        return dx, dgamma, dbeta, dmean, dvar

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if any(batched[1:]):
            return super().vmap(*inputs, batched=batched, size=size)
        return BatchNormInference(self.axis + 1, self.eps)(*inputs)

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(x: TensorType, channels: int, **fields: Any) -> Sample:
            c = TensorType(x.dtype, (channels,))
            return Sample(x, c, c, c, draw(c, 0.3, 2.0), **fields)

        return [
            case(f32[3, 4], 4, axis=1, eps=1e-5),
            case(f64[2, 3, 4], 3, axis=1, eps=1e-3),
            case(f32[0, 2], 2, axis=1, eps=1e-5),
            case(f32[2, 2, 2, 3], 3, axis=3, eps=1e-5),
        ]


# ------------------------------------------------------------------------------------------------------------ functions


def _apply(norm: Op, x: Operand, *parameters: Operand | None) -> Value:
    """Apply an op whose last parameters may be absent in the widest dtype given; the result has the dtype of x."""
    value = to_inexact(as_value(x))
    given = [to_inexact(as_value(p)) for p in parameters if p is not None]
    wide = promote_all([value.dtype, *(p.dtype for p in given)])
    return cast(norm(*(cast(v, wide) for v in (value, *given))), value.dtype)


def _affine_norm(
    cls: type[AffineNorm], x: Operand, gamma: Operand | None, beta: Operand | None, axis: Axis, eps: float
) -> Value:
    value = as_value(x)
    axes = normalize_axes(axis, value.ndim, cls.name)
    if gamma is None and beta is not None:
        gamma = ones([value.shape[a] for a in axes], as_value(beta).dtype)
    return _apply(cls(axes, check_eps(eps, cls.name)), value, gamma, beta)


def check_eps(eps: float, what: str) -> float:
    if not float(eps) >= 0.0:
        raise OptionError(f"{what}: eps must not be negative, got {eps}", code="O211")
    return float(eps)


@function()
def layer_norm(
    x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, axis: Axis = -1, eps: float = 1e-5
) -> Value:
    """x with mean 0 and variance 1 over axes, times gamma plus beta, which have the sizes of those axes."""
    return _affine_norm(LayerNormOp, x, gamma, beta, axis, eps)


@function()
def rms_norm(
    x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, axis: Axis = -1, eps: float = 1e-5
) -> Value:
    """x with mean square 1 over axes, times gamma plus beta, which have the sizes of those axes."""
    return _affine_norm(RmsNorm, x, gamma, beta, axis, eps)


def _with_channels(x: Value, gamma: Operand | None, beta: Operand | None) -> tuple[Operand | None, Operand | None]:
    if gamma is None and beta is not None and x.ndim > 1:
        gamma = ones((x.shape[1],), as_value(beta).dtype)
    return gamma, beta


@function()
def layer_norm_2d(x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-6) -> Value:
    """[N, C, H, W] normalised across the channels at each pixel."""
    value = as_value(x)
    return _apply(LayerNorm2d(check_eps(eps, "layer_norm_2d")), value, *_with_channels(value, gamma, beta))


@function()
def group_norm(
    x: Operand, groups: int, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-5
) -> Value:
    """[N, C, ...] normalised over each group of channels and all positions, sample by sample."""
    value = as_value(x)
    return _apply(GroupNormOp(int(groups), check_eps(eps, "group_norm")), value, *_with_channels(value, gamma, beta))


@function()
def instance_norm(x: Operand, gamma: Operand | None = None, beta: Operand | None = None, *, eps: float = 1e-5) -> Value:
    """[N, C, ...] normalised over the positions of each sample and channel."""
    value = as_value(x)
    if value.ndim < 3 or not isinstance(value.shape[1], int):
        raise ShapeError(f"instance_norm: needs [N, C, positions ...] with C known, got {value.type}", code="S235")
    return group_norm(value, value.shape[1], gamma, beta, eps=eps)


@function()
def batch_norm_inference(
    x: Operand, gamma: Operand, beta: Operand, mean: Operand, var: Operand, *, axis: int = -1, eps: float = 1e-5
) -> Value:
    """gamma (x - mean) / sqrt(var + eps) + beta for each channel along an axis."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim, "batch_norm_inference")
    return _apply(BatchNormInference(at, check_eps(eps, "batch_norm_inference")), value, gamma, beta, mean, var)


@function()
def batch_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    mean: Operand | None = None,
    var: Operand | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    axis: int = 1,
    eps: float = 1e-5,
) -> Any:
    """Batch norm along a channel axis (1: [N, C, ...]).

    With `training`, statistics are those of the batch, and the result is (y, mean, var): y, and the running statistics
    moved by `momentum` towards the batch's (the variance unbiased), or the batch's own where none were given.
    """
    value = to_inexact(as_value(x))
    at = normalize_axis(axis, value.ndim, "batch_norm")
    channels = (value.shape[at],)
    gamma = ones(channels, value.dtype) if gamma is None else gamma
    beta = zeros(channels, value.dtype) if beta is None else beta
    if not training:
        if mean is None or var is None:
            raise OptionError("batch_norm: without training=True the mean and the variance must be given", code="O212")
        return batch_norm_inference(value, gamma, beta, mean, var, axis=at, eps=eps)
    rest = others((at,), value.ndim)
    batch_mean, batch_var = mean_of(widened(value), rest), _variance(widened(value), rest, 0.0)
    y = batch_norm_inference(value, gamma, beta, batch_mean, batch_var, axis=at, eps=eps)
    unbiased = _variance(widened(value), rest, 1.0)
    new_mean = batch_mean if mean is None else as_value(mean) * (1 - momentum) + batch_mean * momentum
    new_var = unbiased if var is None else as_value(var) * (1 - momentum) + unbiased * momentum
    return y, new_mean, new_var


def _variance(x: Value, axes: tuple[int, ...], correction: float) -> Value:
    return var(x, axes, correction=correction)


@function()
def local_response_norm(x: Operand, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Value:
    """x / (k + alpha / size Σ x²) ** beta, the sum over `size` neighbouring channels of [N, C, ...]."""
    value = to_inexact(as_value(x))
    if value.ndim < 2:
        raise ShapeError(f"local_response_norm: needs [N, C, ...], got {value.type}", code="S235")
    if size < 1:
        raise OptionError(f"local_response_norm: size must be positive, got {size}", code="O213")
    wide = widened(value)
    before = (size - 1) // 2
    after = size - 1 - before
    if isinstance(wide.shape[1], int):  # further away there are no channels
        before, after = min(before, wide.shape[1]), min(after, wide.shape[1])
    if isinstance(wide.shape[1], int) and wide.shape[1] == 0:
        return value
    widths: list[tuple[Dim, Dim]] = [(before, after) if a == 1 else (0, 0) for a in range(wide.ndim)]
    square = pad_constant(wide * wide, widths)
    total = narrow(square, 1, 0, wide.shape[1])
    for shift in range(1, before + after + 1):
        total = total + narrow(square, 1, shift, wide.shape[1])
    return cast(wide / (total * (alpha / size) + k) ** beta, value.dtype)


@function("normalize")
def lp_normalize(x: Operand, p: float = 2.0, axis: int = -1, eps: float = 1e-12) -> Value:
    """x divided by its p-norm along an axis, or by eps where the norm is smaller."""
    value = to_inexact(as_value(x))
    wide = widened(value)
    at = normalize_axis(axis, value.ndim, "lp_normalize")
    if p == 2:
        norm = sqrt(sum_(wide * wide, at, keepdims=True))
    elif p == 1:
        norm = sum_(abs_(wide), at, keepdims=True)
    elif p > 0:
        norm = sum_(abs_(wide) ** float(p), at, keepdims=True) ** (1 / p)
    else:
        raise OptionError(f"lp_normalize: p must be positive, got {p}", code="O214")
    return cast(wide / maximum(norm, eps), value.dtype)


@function()
def mean_variance_normalization(x: Operand, axes: Axis = (0, 2, 3), eps: float = 1e-9) -> Value:
    """(x - mean) / (std + eps) over axes: ONNX's MeanVarianceNormalization."""
    value = to_inexact(as_value(x))
    wide, at = widened(value), normalize_axes(axes, value.ndim, "mean_variance_normalization")
    centred = wide - mean_of(wide, at, keepdims=True)
    deviation = sqrt(mean_of(centred * centred, at, keepdims=True))
    return cast(centred / (deviation + eps), value.dtype)
