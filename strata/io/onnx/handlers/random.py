"""Random numbers. A seed gives the same numbers in every run; without one the node's place in the model is the seed."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from strata.core import Dim, as_dtype
from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value, constant


def _key(n: NodeView) -> Value:
    """A key from the seed (a float, by the standard) and the output's name: nodes with equal seeds differ."""
    seed = n.attr("seed")
    bits = 0 if seed is None else int(np.float32(seed).view(np.uint32))
    return constant(np.array([zlib.crc32(n.proto.output[0].encode()), bits], np.uint32))


def draw_uniform(n: NodeView, shape: tuple[Dim, ...], dtype: Any) -> Value:
    """Numbers in [0, 1) with 24 random bits."""
    words = ops.random_bits(_key(n), shape)
    unit = ops.cast(ops.bitwise_right_shift(words, constant(np.uint32(8))), "f32") * float(2.0**-24)
    return ops.cast(unit, as_dtype(dtype))


def draw_normal(n: NodeView, shape: tuple[Dim, ...], dtype: Any) -> Value:
    """Standard normal numbers by the cosine branch of Box and Muller."""
    pair = draw_uniform(n, (2, *shape), "f32")
    first, second = (ops.squeeze(x, 0) for x in ops.split(pair, 2, 0))
    radius = ops.sqrt(ops.log(ops.maximum(first, 2.0**-25)) * -2.0)
    return ops.cast(radius * ops.cos(second * (2 * np.pi)), as_dtype(dtype))


def _kind(n: NodeView, *, like: bool) -> np.dtype[Any]:
    given = n.dtype_attr("dtype")
    if given is None:
        return n.np_dtype(0) if like else np.dtype(np.float32)
    return given


def _uniform(n: NodeView, shape: tuple[Dim, ...], dtype: Any) -> Value:
    low, high = n.attr("low", 0.0), n.attr("high", 1.0)
    return ops.cast(draw_uniform(n, shape, "f32") * (high - low) + low, as_dtype(dtype))


def _normal(n: NodeView, shape: tuple[Dim, ...], dtype: Any) -> Value:
    return ops.cast(draw_normal(n, shape, "f32") * n.attr("scale", 1.0) + n.attr("mean", 0.0), as_dtype(dtype))


@reads("RandomUniform")
def random_uniform(n: NodeView) -> Value:
    return _uniform(n, n.attr("shape"), _kind(n, like=False))


@reads("RandomNormal")
def random_normal(n: NodeView) -> Value:
    return _normal(n, n.attr("shape"), _kind(n, like=False))


@reads("RandomUniformLike")
def random_uniform_like(n: NodeView) -> Value:
    return _uniform(n, n.shape(0), _kind(n, like=True))


@reads("RandomNormalLike")
def random_normal_like(n: NodeView) -> Value:
    return _normal(n, n.shape(0), _kind(n, like=True))


@reads("Bernoulli")
def bernoulli(n: NodeView) -> Value:
    chance = n[0]
    hits = draw_uniform(n, chance.shape, "f32") < ops.cast(chance, "f32")
    return ops.cast(hits, as_dtype(_kind(n, like=True)))


@reads("Multinomial")
def multinomial(n: NodeView) -> Value:
    """Ids drawn with probability softmax(logits): the largest of logits and Gumbel noise."""
    logits = ops.cast(n[0], "f32")
    count = n.attr("sample_size", 1)
    batch, classes = logits.shape
    unit = ops.maximum(draw_uniform(n, (batch, count, classes), "f32"), 2.0**-25)
    noise = ops.negative(ops.log(ops.negative(ops.log(unit))))
    ids = ops.argmax(ops.insert_axis(logits, 1) + noise, 2)
    return ops.cast(ids, as_dtype(n.dtype_attr("dtype", 6)))
