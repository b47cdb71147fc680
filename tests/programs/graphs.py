"""Graphs shaped like known models, with as many layers as asked: programs to test the compiler, without weights."""

from __future__ import annotations

from typing import Any

from strata import ops as functions
from strata.core import Dim
from strata.mir import Graph, Value

ops: Any = functions


class Weights:
    """Declares parameters with running names."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.count = 0

    def __call__(self, *shape: int) -> Value:
        self.count += 1
        return self.graph.param(f"w{self.count}", shape)


def encoder_layer(w: Weights, x: Value, mask: Value, heads: int, inner: int) -> Value:
    """A post-norm encoder layer, as in BERT and MiniLM: every linear map has a bias."""
    batch, length, width = x.shape
    size = int(width) // heads

    def project(value: Value, columns: int) -> Value:
        return value @ w(int(value.shape[-1]), columns) + w(columns)

    q, k, v = (project(x, int(width)).reshape((batch, length, heads, size)).transpose((0, 2, 1, 3)) for _ in range(3))
    scores = q @ k.transpose((0, 1, 3, 2)) * (1.0 / size**0.5) + mask
    mixed = (ops.softmax(scores, axis=-1) @ v).transpose((0, 2, 1, 3)).reshape((batch, length, width))
    x = ops.layer_norm(x + project(mixed, int(width)), w(int(width)), w(int(width)))
    return ops.layer_norm(x + project(ops.gelu(project(x, inner)), int(width)), w(int(width)), w(int(width)))


def encoder(
    layers: int = 6, batch: Dim = 1, length: Dim = 32, width: int = 384, heads: int = 12, vocabulary: int = 1000
) -> Graph:
    """MiniLM-like: embeddings, encoder layers, mean pooling."""
    g = Graph("encoder")
    w = Weights(g)
    ids = g.input("ids", (batch, length), "i64")
    mask = g.input("mask", (batch, 1, 1, length))
    x = ops.layer_norm(ops.take(w(vocabulary, width), ids, axis=0), w(width), w(width))
    for _ in range(layers):
        x = encoder_layer(w, x, mask, heads, 4 * width)
    return g.outputs(ops.mean(x, axis=1))


def one_encoder_layer(batch: Dim = 1, length: Dim = 32, width: int = 384, heads: int = 12) -> Graph:
    g = Graph("encoder_layer")
    x = g.input("x", (batch, length, width))
    mask = g.input("mask", (batch, 1, 1, length))
    return g.outputs(encoder_layer(Weights(g), x, mask, heads, 4 * width))


def gpt2(
    layers: int = 12, batch: int = 1, length: int = 64, width: int = 256, heads: int = 8, vocabulary: int = 512
) -> Graph:
    """GPT-2-like: pre-norm decoder layers with a causal mask, logits over a tied embedding."""
    g = Graph("gpt2")
    w = Weights(g)
    ids = g.input("ids", (batch, length), "i64")
    table = w(vocabulary, width)
    x = ops.take(table, ids, axis=0) + w(length, width)
    for _ in range(layers):
        h = ops.layer_norm(x, w(width), w(width))
        q, k, v = ops.split(h @ w(width, 3 * width) + w(3 * width), 3, axis=-1)
        mixed = ops.attention(q, k, v, num_heads=heads, mask_kind="causal", layout="bsd")
        x = x + (mixed @ w(width, width) + w(width))
        h = ops.layer_norm(x, w(width), w(width))
        x = x + (ops.gelu(h @ w(width, 4 * width) + w(4 * width)) @ w(4 * width, width) + w(width))
    return g.outputs(ops.layer_norm(x, w(width), w(width)) @ table.T)


def llama(
    layers: int = 1, capacity: Dim = 64, width: int = 256, heads: int = 8, kv_heads: int = 2, inner: int = 512
) -> Graph:
    """Llama-like at decode: one token, and caches of keys and values that its row is written into."""
    g = Graph("llama")
    w = Weights(g)
    size = width // heads
    x = g.input("x", (1, 1, width))
    cos, sin = g.input("cos", (1, size // 2)), g.input("sin", (1, size // 2))
    past = g.input("past", (1,), "i64")
    start = [0, ops.reshape(past, ()), 0]
    results = []
    for i in range(layers):
        keys, values = (g.input(f"{n}{i}", (1, capacity, kv_heads * size)) for n in ("k", "v"))
        h = ops.rms_norm(x, w(width))
        q = ops.rope(h @ w(width, width), cos, sin, head_dim=size)
        k = ops.rope(h @ w(width, kv_heads * size), cos, sin, head_dim=size)
        keys = ops.dynamic_update_slice(keys, k, start)
        values = ops.dynamic_update_slice(values, h @ w(width, kv_heads * size), start)
        mixed = ops.attention(
            q, keys, values, num_heads=heads, kv_heads=kv_heads, layout="bsd", causal=True, offset=past
        )
        x = x + mixed @ w(width, width)
        h = ops.rms_norm(x, w(width))
        x = x + (ops.silu(h @ w(width, inner)) * (h @ w(width, inner))) @ w(inner, width)
        results += [keys, values]
    return g.outputs(x, *results)


def _conv(w: Weights, x: Value, channels: int, kernel: int, stride: int = 1) -> Value:
    """A convolution with its normalisation folded into scale and shift, as inference graphs have it."""
    y = ops.conv2d(x, w(channels, int(x.shape[1]), kernel, kernel), stride=stride, padding=kernel // 2)
    return y * w(channels, 1, 1) + w(channels, 1, 1)


def bottleneck(w: Weights, x: Value, channels: int, stride: int) -> Value:
    """A ResNet-50 block: 1x1, 3x3, 1x1 and the shortcut."""
    y = ops.relu(_conv(w, x, channels, 1))
    y = ops.relu(_conv(w, y, channels, 3, stride))
    y = _conv(w, y, 4 * channels, 1)
    if stride != 1 or x.shape[1] != 4 * channels:
        x = _conv(w, x, 4 * channels, 1, stride)
    return ops.relu(y + x)


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), size: int = 64, channels: int = 16, classes: int = 100) -> Graph:
    """ResNet-50-like."""
    g = Graph("resnet")
    w = Weights(g)
    x = ops.relu(_conv(w, g.input("image", (1, 3, size, size)), channels, 7, 2))
    x = ops.max_pool(x, 3, stride=2, padding=1)
    for stage, count in enumerate(blocks):
        for i in range(count):
            x = bottleneck(w, x, channels << stage, 2 if i == 0 and stage else 1)
    return g.outputs(ops.mean(x, axis=(2, 3)) @ w(int(x.shape[1]), classes) + w(classes))


def resnet_block(channels: int = 16, size: int = 14) -> Graph:
    g = Graph("resnet_block")
    x = g.input("x", (1, 4 * channels, size, size))
    return g.outputs(bottleneck(Weights(g), x, channels, 1))


def unet(depth: int = 3, size: int = 32, channels: int = 16) -> Graph:
    """U-Net-like: halving, then doubling with the skipped halves joined."""
    g = Graph("unet")
    w = Weights(g)
    x = g.input("image", (1, 3, size, size))

    def double(value: Value, width: int) -> Value:
        return ops.relu(_conv(w, ops.relu(_conv(w, value, width, 3)), width, 3))

    skipped = []
    for level in range(depth):
        x = double(x, channels << level)
        skipped.append(x)
        x = ops.max_pool(x, 2, stride=2)
    x = double(x, channels << depth)
    for level in reversed(range(depth)):
        n, c, rows, columns = x.shape
        wide = ops.broadcast_to(ops.reshape(x, (n, c, rows, 1, columns, 1)), (n, c, rows, 2, columns, 2))
        up = ops.reshape(wide, (n, c, rows * 2, columns * 2))
        x = double(ops.concat([skipped[level], up], axis=1), channels << level)
    return g.outputs(_conv(w, x, 1, 1))
