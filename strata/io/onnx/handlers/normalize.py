"""Normalisation."""

from __future__ import annotations

from typing import Any

from strata.core import as_dtype
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import numpy_dtype
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value


@reads("BatchNormalization")
def batch_normalization(n: NodeView) -> Any:
    x, scale, bias, mean, var = (n[i] for i in range(5))
    eps = n.attr("epsilon", 1e-5)
    if not (n.attr("training_mode", 0) or (n.version < 7 and not n.attr("is_test", 0) and n.num_outputs > 1)):
        shape = (-1, *(1,) * (x.ndim - 2))
        if scale.dtype is x.dtype and mean.dtype is x.dtype:
            return ops.batch_norm_inference(x, scale, bias, mean, var, axis=1 if x.ndim > 1 else 0, eps=eps)
        scale, bias, mean, var = (ops.reshape(ops.cast(v, "f32"), shape) for v in (scale, bias, mean, var))
        return ops.cast((ops.cast(x, "f32") - mean) / ops.sqrt(var + eps) * scale + bias, x.dtype)
    momentum = n.attr("momentum", 0.9)
    axes = (0, *range(2, x.ndim))
    seen_mean, seen_var = ops.mean(x, axes), ops.var(x, axes)
    out = ops.batch_norm_inference(x, scale, bias, seen_mean, seen_var, axis=1, eps=eps)
    new_mean = mean * momentum + ops.cast(seen_mean, mean.dtype) * (1.0 - momentum)
    new_var = var * momentum + ops.cast(seen_var, var.dtype) * (1.0 - momentum)
    return (out, new_mean, new_var) if n.version >= 14 else (out, new_mean, new_var, seen_mean, seen_var)


@reads("InstanceNormalization")
def instance_normalization(n: NodeView) -> Value:
    return ops.instance_norm(n[0], n[1], n[2], eps=n.attr("epsilon", 1e-5))


@reads("GroupNormalization", since=18)
def group_normalization_groups(n: NodeView) -> Value:
    """The first form: one scale a group."""
    x, scale, bias = n[0], n[1], n[2]
    groups = n.attr("num_groups")
    each = x.shape[1] // groups
    spread = [
        ops.reshape(ops.broadcast_to(ops.insert_axis(v, 1), (groups, each)), (x.shape[1],)) for v in (scale, bias)
    ]
    return ops.group_norm(x, groups, *spread, eps=n.attr("epsilon", 1e-5))


@reads("GroupNormalization", since=21)
def group_normalization(n: NodeView) -> Value:
    return ops.group_norm(n[0], n.attr("num_groups"), n[1], n[2], eps=n.attr("epsilon", 1e-5))


@reads("LayerNormalization")
def layer_normalization(n: NodeView) -> Any:
    x = n[0]
    axes = tuple(range(n.axis("axis", -1), x.ndim))
    eps = n.attr("epsilon", 1e-5)
    if not n.wants(1) and not n.wants(2) and _fits(x, n[1], axes) and _fits(x, n[2], axes):
        return ops.layer_norm(x, n[1], n[2], axis=axes, eps=eps)
    stash = as_dtype(numpy_dtype(n.attr("stash_type", 1)))
    wide = ops.cast(x, stash)
    mean = ops.mean(wide, axes, keepdims=True)
    inverse = ops.rsqrt(ops.var(wide, axes, keepdims=True) + eps)
    out = ops.cast((wide - mean) * inverse, x.dtype) * n[1]
    return (out if n[2] is None else out + n[2]), mean, inverse


@reads("RMSNormalization")
def rms_normalization(n: NodeView) -> Value:
    x = n[0]
    axes = tuple(range(n.axis("axis", -1), x.ndim))
    eps = n.attr("epsilon", 1e-5)
    if _fits(x, n[1], axes):
        return ops.rms_norm(x, n[1], axis=axes, eps=eps)
    wide = ops.cast(x, as_dtype(numpy_dtype(n.attr("stash_type", 1))))
    inverse = ops.rsqrt(ops.mean(wide * wide, axes, keepdims=True) + eps)
    return ops.cast(wide * inverse, x.dtype) * n[1]


def _fits(x: Value, gamma: Value | None, axes: tuple[int, ...]) -> bool:
    return gamma is None or (gamma.dtype is x.dtype and gamma.shape == tuple(x.shape[a] for a in axes))


@reads("LRN")
def lrn(n: NodeView) -> Value:
    channels = n.shape(0)[1] if n.ndim(0) > 1 else 0
    n.tracer.limits.nodes(max(min(n.attr("size"), 2 * channels if isinstance(channels, int) else n.attr("size")), 0))
    return ops.local_response_norm(
        n[0], n.attr("size"), n.attr("alpha", 1e-4), n.attr("beta", 0.75), n.attr("bias", 1.0)
    )


@reads("LpNormalization")
def lp_normalization(n: NodeView) -> Value:
    x = n[0]
    axis, p = n.axis("axis", -1), n.attr("p", 2)
    size = ops.sum(ops.abs(x), axis, keepdims=True) if p == 1 else ops.sqrt(ops.sum(x * x, axis, keepdims=True))
    return ops.where(
        ops.equal(size, 0.0), ops.zeros_like(x), x / ops.where(ops.equal(size, 0.0), ops.ones_like(size), size)
    )


@reads("MeanVarianceNormalization")
def mean_variance_normalization(n: NodeView) -> Value:
    return ops.mean_variance_normalization(n[0], n.attr("axes", (0, 2, 3)))
