"""ai.onnx.preview.training: optimiser steps and gradients of the graph."""

from __future__ import annotations

from typing import Any

from strata.errors import FileError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value, pullback

TRAINING = "ai.onnx.preview.training"


def _groups(n: NodeView, kinds: int) -> list[list[Value]]:
    """Inputs after the rate and the step count, which list all tensors of one kind before the next kind."""
    count = (len(n) - 2) // kinds
    return [[n[2 + kind * count + i] for i in range(count)] for kind in range(kinds)]


@reads("Adagrad", domain=TRAINING)
def adagrad(n: NodeView) -> tuple[Value, ...]:
    rate = n[0] / (1.0 + ops.cast(n[1], "f32") * n.attr("decay_factor", 0.0))
    weights, news = [], []
    for x, g, h in zip(*_groups(n, 3), strict=True):
        slope = g + x * n.attr("norm_coefficient", 0.0)
        square = h + slope * slope
        weights.append(x - rate * slope / (ops.sqrt(square) + n.attr("epsilon", 1e-6)))
        news.append(square)
    return (*weights, *news)


@reads("Momentum", domain=TRAINING)
def momentum(n: NodeView) -> tuple[Value, ...]:
    alpha, beta = n.attr("alpha"), n.attr("beta")
    nesterov = n.choice("mode", "standard", ("standard", "nesterov")) == "nesterov"
    damp = ops.where(n[1] > 0, ops.full((), float(beta), "f32"), ops.full((), 1.0, "f32"))
    weights, news = [], []
    for x, g, v in zip(*_groups(n, 3), strict=True):
        slope = g + x * n.attr("norm_coefficient", 0.0)
        moved = v * alpha + slope * damp
        news.append(moved)
        weights.append(x - n[0] * (slope + moved * alpha if nesterov else moved))
    return (*weights, *news)


@reads("Adam", domain=TRAINING)
def adam(n: NodeView) -> tuple[Value, ...]:
    alpha, beta = n.attr("alpha", 0.9), n.attr("beta", 0.999)
    step = ops.cast(n[1], "f32")
    unbiased = (
        n[0]
        * ops.sqrt(1.0 - ops.power(ops.full((), beta, "f32"), step))
        / (1.0 - ops.power(ops.full((), alpha, "f32"), step))
    )
    rate = ops.where(n[1] > 0, unbiased, n[0])
    weights, first, second = [], [], []
    for x, g, v, h in zip(*_groups(n, 4), strict=True):
        slope = g + x * n.attr("norm_coefficient", 0.0)
        mean = v * alpha + slope * (1.0 - alpha)
        square = h * beta + slope * slope * (1.0 - beta)
        moved = x - rate * mean / (ops.sqrt(square) + n.attr("epsilon", 1e-6))
        weights.append(moved * (1.0 - n.attr("norm_coefficient_post", 0.0)))
        first.append(mean)
        second.append(square)
    return (*weights, *first, *second)


@reads("Gradient", domain=TRAINING)
def gradient(n: NodeView) -> tuple[Any, ...]:
    """Derivatives of the tensor named y in those named xs, where the graph has them."""
    frame = n.tracer.frame
    xs = [n.tracer.value(frame.find(name)) for name in n.attr("xs")]
    y = n.tracer.value(frame.find(n.attr("y")))
    if any(not x.dtype.is_float for x in xs):
        raise FileError(f"{n.label}: only floats have derivatives", code="F504")
    found = pullback([y], [ops.ones_like(y)], xs)
    return tuple(ops.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True))
