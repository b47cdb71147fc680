"""MatMul, Gemm, dropout, determinants."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import Dim, f32
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.random import draw_uniform
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value


@reads("MatMul")
def matmul(n: NodeView) -> Value:
    a, b = n[0], n[1]
    if a.ndim and b.ndim:
        n.tracer.match(a.shape[-1], b.shape[max(b.ndim - 2, 0)])
    return ops.matmul(a, b)


@reads("Gemm")
def gemm(n: NodeView) -> Value:
    a, b, c = n[0], n[1], n[2]
    a = ops.transpose(a, 1, 0) if n.attr("transA", 0) else a
    b = ops.transpose(b, 1, 0) if n.attr("transB", 0) else b
    n.tracer.match(a.shape[-1], b.shape[0])
    out = _scaled(ops.matmul(a, b), n.attr("alpha", 1.0))
    return out if c is None else out + _scaled(c, n.attr("beta", 1.0))


def _scaled(x: Value, factor: float) -> Value:
    if factor == 1.0:
        return x
    return ops.cast(ops.cast(x, "f64") * factor, x.dtype) if x.dtype.is_int else x * factor


@reads("Einsum")
def einsum(n: NodeView) -> Value:
    return ops.einsum(n.attr("equation").replace(" ", ""), *n.values())


@reads("Det")
def det(n: NodeView) -> Value:
    """The determinant; of floats of 16 bits it is computed in f32."""
    x = n[0]
    return ops.cast(ops.det(ops.cast(x, f32) if x.dtype.bits < 32 else x), x.dtype)


@reads("Dropout")
def dropout(n: NodeView) -> Any:
    """The identity with a full mask; before opset 12 always, later unless training."""
    return _not_dropped(n)


@reads("Dropout", since=12)
def dropout_training(n: NodeView) -> Any:
    training = bool(n.scalar(2, default=False))
    rate = float(n.scalar(1, 0.5))
    if not training or rate == 0.0:
        return _not_dropped(n)
    x = n[0]
    keep = _drawn(n, x.shape, rate)
    return ops.where(keep, x / (1.0 - rate), ops.zeros_like(x)), keep


def _drawn(n: NodeView, shape: tuple[Dim, ...], rate: float) -> Value:
    """Which elements stay. With a seed, as in the standard's example: NumPy's generator of that seed."""
    if n.has_attr("seed") and all(isinstance(d, int) for d in shape):
        draws = np.random.RandomState(n.attr("seed") % (1 << 32)).uniform(0, 1, shape)
        return n.tracer.value(Host(draws >= rate))
    return ops.greater_equal(draw_uniform(n, shape, "f32"), rate)


def _not_dropped(n: NodeView) -> Any:
    x = n[0]
    if not n.wants(1):
        return x
    mask = ops.ones(x.shape, "bool" if n.version >= 10 else x.dtype)
    return x, mask
