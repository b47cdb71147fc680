"""Gradients of the normalisations as ops, with statistics recomputed from x.

x̂ is the normalised x, `inv` = 1 / sqrt(var + eps), means are over the normalised extent. Half precision is
normalised in f32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.core import Dim, TensorType, dim_prod, divide_exactly, f32, f64, show_shape
from strata.mir import Op, Sample, UnaryOp, Value, draw, op
from strata.ops.base.frontend import same_shape
from strata.ops.base.movement import reshape
from strata.ops.elementwise.logic import cast
from strata.ops.elementwise.math import rsqrt
from strata.ops.reduce.reduce import about_mean, mean, sum_
from strata.ops.reduce.softmax import widened

Axes = tuple[int, ...]


def standardized(x: Value, axes: Axes, eps: float) -> tuple[Value, Value]:
    """x̂ and inv over axes, by two passes. What the mean lost when it was rounded is found in the second one, and taken
    off: of rows far from zero, that is most of what would be wrong."""
    centred = x - mean(x, axes, keepdims=True)
    lost = mean(centred, axes, keepdims=True)
    inv = rsqrt(about_mean(mean(centred * centred, axes, keepdims=True), lost * lost) + eps)
    return (centred - lost) * inv, inv


def scaled(x: Value, axes: Axes, eps: float) -> tuple[Value, Value]:
    """x / r and 1 / r with r = sqrt(mean(x²) + eps) over axes."""
    inv = rsqrt(mean(x * x, axes, keepdims=True) + eps)
    return x * inv, inv


def along(v: Value, axes: Axes, shape: Sequence[Dim]) -> Value:
    """A value over `axes` of a shape, in f32 at least, with 1 for the other axes so that it broadcasts."""
    first = min(axes, default=0)
    return reshape(widened(v), [d if a in axes else 1 for a, d in enumerate(shape)][first:])


def others(axes: Axes, ndim: int) -> Axes:
    return tuple(a for a in range(ndim) if a not in axes)


def np_along(v: np.ndarray, axes: Axes, shape: Sequence[int]) -> np.ndarray:
    return v.reshape([d if a in axes else 1 for a, d in enumerate(shape)])


def np_standardized(x: np.ndarray, axes: Axes, eps: float) -> tuple[np.ndarray, np.ndarray]:
    inv = 1 / np.sqrt(x.var(axes, keepdims=True) + eps)
    return (x - x.mean(axes, keepdims=True)) * inv, inv


def check_float(self: Op, x: TensorType, *rest: TensorType) -> None:
    self.require_dtype(x.dtype.is_float, f"does not take {x.dtype}, only float types", code="D104")
    for t in rest:
        self.require_dtype(t.dtype is x.dtype, f"operands differ in dtype, {x} and {t}", code="D103")


def check_axes(self: Op, x: TensorType, axes: Axes) -> None:
    ok = len(axes) > 0 and list(axes) == sorted(set(axes)) and all(0 <= a < x.ndim for a in axes)
    self.require(ok, f"axes {axes} are not distinct axes of {x}", code="S103")
    empty = next((a for a in axes if x.shape[a] == 0), None)
    self.require(empty is None, f"axis {empty} of {x} is empty and cannot be normalised", code="S233")


def check_affine(self: Op, x: TensorType, axes: Axes, *given: TensorType) -> None:
    """Scales, shifts and statistics have the sizes of the axes they belong to."""
    sizes = [x.shape[a] for a in axes]
    for t in given:
        message = f"axes {axes} of {x} need parameters of shape {show_shape(sizes)}, got {t}"
        self.require(same_shape(t.shape, sizes), message, code="S234")


def check_gradient(self: Op, x: TensorType, dy: TensorType) -> None:
    self.require(same_shape(x.shape, dy.shape), f"the gradient {dy} does not have the shape of {x}", code="S230")


def check_groups(self: Op, x: TensorType, groups: int) -> None:
    self.require(x.ndim >= 2, f"needs [N, C, ...], got {x}", code="S235")
    ok = groups > 0 and divide_exactly(x.shape[1], groups) is not None
    self.require(ok, f"{x.shape[1]} channels of {x} do not divide into {groups} groups", code="S236")
    self.require(0 not in x.shape[1:], f"{x} has no elements to normalise", code="S233")


def grouped(x: Value, groups: int) -> Value:
    """[N, C, ...] as [N, groups, everything else]."""
    per_group = divide_exactly(x.shape[1], groups)
    assert per_group is not None
    return reshape(x, (x.shape[0], groups, dim_prod([per_group, *x.shape[2:]])))


class AxesNorm(Op):
    """Statistics over sorted, non-negative axes; scale and shift have the sizes of those axes."""

    axes: tuple[int, ...]
    eps: float


# ----------------------------------------------------------------------------------------------------------- layer norm


@op("layer_norm_backward_input")
class LayerNormBackwardInput(AxesNorm):
    """inv (dyγ - mean(dyγ) - x̂ mean(dyγ x̂))."""

    def infer(self, x: TensorType, gamma: TensorType, dy: TensorType) -> TensorType:
        check_float(self, x, gamma, dy)
        check_axes(self, x, self.axes)
        check_affine(self, x, self.axes, gamma)
        check_gradient(self, x, dy)
        return x

    def numpy(self, x: np.ndarray, gamma: np.ndarray, dy: np.ndarray) -> np.ndarray:
        normal, inv = np_standardized(x, self.axes, self.eps)
        g = dy * np_along(gamma, self.axes, x.shape)
        return inv * (g - g.mean(self.axes, keepdims=True) - normal * (g * normal).mean(self.axes, keepdims=True))

    def decompose(self, x: Value, gamma: Value, dy: Value) -> Value:
        normal, inv = standardized(widened(x), self.axes, self.eps)
        g = widened(dy) * along(gamma, self.axes, x.shape)
        dx = g - mean(g, self.axes, keepdims=True) - normal * mean(g * normal, self.axes, keepdims=True)
        return cast(inv * dx, x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 6], f32[6], f32[3, 6], axes=(1,), eps=1e-5),
            Sample(f64[4, 3], f64[4], f64[4, 3], axes=(0,), eps=1e-3),
            Sample(f32[2, 3, 2], f32[3, 2], f32[2, 3, 2], axes=(1, 2), eps=1e-5),
            Sample(f32[0, 3], f32[3], f32[0, 3], axes=(1,), eps=1e-5),
        ]


@op("layer_norm_backward_gamma")
class LayerNormBackwardGamma(AxesNorm):
    """Σ dy x̂ over the axes that are not normalised."""

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        check_float(self, x, dy)
        check_axes(self, x, self.axes)
        check_gradient(self, x, dy)
        return x.with_shape([x.shape[a] for a in self.axes])

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return (dy * np_standardized(x, self.axes, self.eps)[0]).sum(others(self.axes, x.ndim))

    def decompose(self, x: Value, dy: Value) -> Value:
        normal, _ = standardized(widened(x), self.axes, self.eps)
        return cast(sum_(widened(dy) * normal, others(self.axes, x.ndim)), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 6], f32[3, 6], axes=(1,), eps=1e-5),
            Sample(f64[4, 3, 2], f64[4, 3, 2], axes=(1,), eps=1e-3),
            Sample(f32[5], f32[5], axes=(0,), eps=1e-5),
            Sample(f32[0, 3], f32[0, 3], axes=(1,), eps=1e-5),
        ]


# ------------------------------------------------------------------------------------------------------------- rms norm


class RmsNormGradient(AxesNorm):
    """A gradient of rms_norm: takes (x, γ, β, dy)."""

    def infer(self, x: TensorType, gamma: TensorType, beta: TensorType, dy: TensorType) -> TensorType:
        check_float(self, x, gamma, beta, dy)
        check_axes(self, x, self.axes)
        check_affine(self, x, self.axes, gamma, beta)
        check_gradient(self, x, dy)
        return self.result(x, gamma)

    def result(self, x: TensorType, gamma: TensorType) -> TensorType:
        return gamma

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(x: TensorType, gamma: TensorType, axes: Axes, eps: float) -> Sample:
            return Sample(draw(x, -5.0, 9.0), gamma, gamma, x, axes=axes, eps=eps)

        return [
            case(f32[3, 6], f32[6], (1,), 1e-5),
            case(f64[4, 3], f64[4], (0,), 1e-3),
            case(f32[2, 3, 2], f32[3, 2], (1, 2), 1e-5),
            case(f32[0, 3], f32[3], (1,), 1e-5),
        ]


@op("rms_norm_backward_input")
class RmsNormBackwardInput(RmsNormGradient):
    """γ dy / r - x mean(γ dy x) / r³."""

    def result(self, x: TensorType, gamma: TensorType) -> TensorType:
        return x

    def numpy(self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, dy: np.ndarray) -> np.ndarray:
        r = np.sqrt((x * x).mean(self.axes, keepdims=True) + self.eps)
        g = dy * np_along(gamma, self.axes, x.shape)
        return g / r - x * (g * x).mean(self.axes, keepdims=True) / r**3

    def decompose(self, x: Value, gamma: Value, beta: Value, dy: Value) -> Value:
        unit, inv = scaled(widened(x), self.axes, self.eps)
        g = widened(dy) * along(gamma, self.axes, x.shape)
        return cast(inv * (g - unit * mean(g * unit, self.axes, keepdims=True)), x.dtype)


@op("rms_norm_backward_gamma")
class RmsNormBackwardGamma(RmsNormGradient):
    """Σ dy x / r."""

    def numpy(self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, dy: np.ndarray) -> np.ndarray:
        r = np.sqrt((x * x).mean(self.axes, keepdims=True) + self.eps)
        return (dy * x / r).sum(others(self.axes, x.ndim))

    def decompose(self, x: Value, gamma: Value, beta: Value, dy: Value) -> Value:
        unit, _ = scaled(widened(x), self.axes, self.eps)
        return cast(sum_(widened(dy) * unit, others(self.axes, x.ndim)), x.dtype)


@op("rms_norm_backward_beta")
class RmsNormBackwardBeta(RmsNormGradient):
    """Σ dy."""

    def numpy(self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return dy.sum(others(self.axes, x.ndim))

    def decompose(self, x: Value, gamma: Value, beta: Value, dy: Value) -> Value:
        return sum_(dy, others(self.axes, x.ndim))


# ----------------------------------------------------------------------------------------------------------- group norm


class GroupNormGradient(Op):
    """A gradient of group_norm."""

    groups: int
    eps: float

    def check(self, x: TensorType, dy: TensorType, *affine: TensorType) -> None:
        check_float(self, x, dy, *affine)
        check_groups(self, x, self.groups)
        check_affine(self, x, (1,), *affine)
        check_gradient(self, x, dy)

    def np_grouped(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], self.groups, int(np.prod(x.shape[1:])) // self.groups)


@op("group_norm_backward_input")
class GroupNormBackwardInput(GroupNormGradient):
    """The layer-norm gradient within each sample and group, with γ of each channel; takes (x, γ, β, dy)."""

    def infer(self, x: TensorType, gamma: TensorType, beta: TensorType, dy: TensorType) -> TensorType:
        self.check(x, dy, gamma, beta)
        return x

    def numpy(self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, dy: np.ndarray) -> np.ndarray:
        normal, inv = np_standardized(self.np_grouped(x), (2,), self.eps)
        g = self.np_grouped(dy * np_along(gamma, (1,), x.shape))
        dx = inv * (g - g.mean(2, keepdims=True) - normal * (g * normal).mean(2, keepdims=True))
        return dx.reshape(x.shape)

    def decompose(self, x: Value, gamma: Value, beta: Value, dy: Value) -> Value:
        normal, inv = standardized(grouped(widened(x), self.groups), (2,), self.eps)
        g = grouped(widened(dy) * along(gamma, (1,), x.shape), self.groups)
        dx = inv * (g - mean(g, 2, keepdims=True) - normal * mean(g * normal, 2, keepdims=True))
        return cast(reshape(dx, x.shape), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 4, 3, 2], f32[4], f32[4], f32[2, 4, 3, 2], groups=2, eps=1e-5),
            Sample(f64[3, 6, 2], f64[6], f64[6], f64[3, 6, 2], groups=3, eps=1e-3),
            Sample(f32[0, 2, 3], f32[2], f32[2], f32[0, 2, 3], groups=1, eps=1e-5),
        ]


class GroupNormParameterGradient(GroupNormGradient):
    """A gradient for each channel; takes (x, dy)."""

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        self.check(x, dy)
        return x.with_shape([x.shape[1]])

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 4, 3, 2], f32[2, 4, 3, 2], groups=2, eps=1e-5),
            Sample(f64[3, 6], f64[3, 6], groups=3, eps=1e-3),
            Sample(f32[0, 2, 3], f32[0, 2, 3], groups=1, eps=1e-5),
        ]


@op("group_norm_backward_gamma")
class GroupNormBackwardGamma(GroupNormParameterGradient):
    """Σ dy x̂ over samples and positions."""

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        normal, _ = np_standardized(self.np_grouped(x), (2,), self.eps)
        return (dy * normal.reshape(x.shape)).sum(others((1,), x.ndim))

    def decompose(self, x: Value, dy: Value) -> Value:
        normal, _ = standardized(grouped(widened(x), self.groups), (2,), self.eps)
        return cast(sum_(widened(dy) * reshape(normal, x.shape), others((1,), x.ndim)), x.dtype)


@op("group_norm_backward_beta")
class GroupNormBackwardBeta(GroupNormParameterGradient):
    """Σ dy over samples and positions."""

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return dy.sum(others((1,), x.ndim))

    def decompose(self, x: Value, dy: Value) -> Value:
        return sum_(dy, others((1,), x.ndim))


# ----------------------------------------------------------------------------------------------------------- batch norm


class ChannelNorm(Op):
    """A normalisation by given statistics of each channel along one axis."""

    axis: int
    eps: float

    def check(self, x: TensorType, *channels: TensorType) -> None:
        check_float(self, x, *channels)
        self.require(0 <= self.axis < x.ndim, f"axis {self.axis} is not an axis of {x}", code="S103")
        check_affine(self, x, (self.axis,), *channels)

    def channels(self, v: Value, x: Value) -> Value:
        return along(v, (self.axis,), x.shape)

    def np_channels(self, v: np.ndarray, x: np.ndarray) -> np.ndarray:
        return np_along(v, (self.axis,), x.shape)

    @staticmethod
    def case(x: TensorType, channels: int, **fields: object) -> Sample:
        """Variances are drawn positive; the last input is the gradient."""
        c = TensorType(x.dtype, (channels,))
        return Sample(x, c, c, draw(c, 0.3, 2.0), x, **fields)


@op("batch_norm_inference_backward_input")
class BatchNormInferenceBackwardInput(ChannelNorm):
    """dy γ inv; takes (x, γ, mean, var, dy)."""

    def infer(self, x: TensorType, gamma: TensorType, mean: TensorType, var: TensorType, dy: TensorType) -> TensorType:
        self.check(x, gamma, mean, var)
        check_gradient(self, x, dy)
        return x

    def numpy(self, x: np.ndarray, gamma: np.ndarray, mean: np.ndarray, var: np.ndarray, dy: np.ndarray) -> np.ndarray:
        return dy * self.np_channels(gamma / np.sqrt(var + self.eps), x)

    def decompose(self, x: Value, gamma: Value, mean: Value, var: Value, dy: Value) -> Value:
        inv = rsqrt(self.channels(var, x) + self.eps)
        return cast(widened(dy) * (self.channels(gamma, x) * inv), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            cls.case(f32[3, 4], 4, axis=1, eps=1e-5),
            cls.case(f64[2, 3, 4], 3, axis=1, eps=1e-3),
            cls.case(f32[0, 2], 2, axis=1, eps=1e-5),
        ]


@op("batch_norm_inference_backward_gamma")
class BatchNormInferenceBackwardGamma(ChannelNorm):
    """Σ dy (x - mean) inv; takes (x, mean, var, dy)."""

    def infer(self, x: TensorType, mean: TensorType, var: TensorType, dy: TensorType) -> TensorType:
        self.check(x, mean, var)
        check_gradient(self, x, dy)
        return x.with_shape([x.shape[self.axis]])

    def numpy(self, x: np.ndarray, mean: np.ndarray, var: np.ndarray, dy: np.ndarray) -> np.ndarray:
        normal = (x - self.np_channels(mean, x)) / self.np_channels(np.sqrt(var + self.eps), x)
        return (dy * normal).sum(others((self.axis,), x.ndim))

    def decompose(self, x: Value, mean: Value, var: Value, dy: Value) -> Value:
        centred = widened(x) - self.channels(mean, x)
        total = sum_(widened(dy) * centred, others((self.axis,), x.ndim))
        return cast(total * rsqrt(widened(var) + self.eps), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        made = [cls.case(f32[3, 4], 4, axis=1, eps=1e-5), cls.case(f64[2, 3, 4], 3, axis=1, eps=1e-3)]
        return [Sample(s.inputs[0], *s.inputs[2:], **s.fields) for s in made]


@op("batch_norm_inference_backward_beta")
class BatchNormInferenceBackwardBeta(UnaryOp):
    """Σ dy over all axes but that of the channels."""

    axis: int

    def infer(self, dy: TensorType) -> TensorType:
        check_float(self, dy)
        self.require(0 <= self.axis < dy.ndim, f"axis {self.axis} is not an axis of {dy}", code="S103")
        return dy.with_shape([dy.shape[self.axis]])

    def numpy(self, dy: np.ndarray) -> np.ndarray:
        return dy.sum(others((self.axis,), dy.ndim))

    def decompose(self, dy: Value) -> Value:
        return sum_(dy, others((self.axis,), dy.ndim))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 4], axis=1), Sample(f64[2, 3, 4], axis=0), Sample(f32[0, 2], axis=1)]
