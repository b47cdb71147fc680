"""Six transformer layers in the shapes of MiniLM-L6, with random weights, for every contender."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.registry import Case, Onnx, normal

HIDDEN, LAYERS, HEADS, INNER = 384, 6, 12, 1536


def encoder_weights() -> dict[str, np.ndarray]:
    """Random weights in the shapes of MiniLM-L6."""
    made: dict[str, np.ndarray] = {}
    for i in range(LAYERS):
        for name, (a, b) in {
            "q": (HIDDEN, HIDDEN),
            "k": (HIDDEN, HIDDEN),
            "v": (HIDDEN, HIDDEN),
            "o": (HIDDEN, HIDDEN),
            "u": (HIDDEN, INNER),
            "d": (INNER, HIDDEN),
        }.items():
            made[f"w{name}{i}"] = normal(a, b, seed=len(made), scale=a**-0.5)
            made[f"b{name}{i}"] = normal(b, seed=len(made), scale=0.02)
        for name in ("n", "m"):
            made[f"g{name}{i}"] = 1 + normal(HIDDEN, seed=len(made), scale=0.02)
            made[f"h{name}{i}"] = normal(HIDDEN, seed=len(made), scale=0.02)
    return made


def _encoder_graph(length: int, x: Any, w: Any) -> Any:
    import strata as st

    def heads(y: Any) -> Any:
        return y.reshape(1, length, HEADS, HIDDEN // HEADS).transpose(0, 2, 1, 3)

    for i in range(LAYERS):
        q, k, v = (heads(x @ w[f"w{n}{i}"] + w[f"b{n}{i}"]) for n in "qkv")
        y = st.ops.scaled_dot_product_attention(q, k, v).transpose(0, 2, 1, 3).reshape(1, length, HIDDEN)
        x = (x + y @ w[f"wo{i}"] + w[f"bo{i}"]).layer_norm(w[f"gn{i}"], w[f"hn{i}"], eps=1e-12)
        y = (x @ w[f"wu{i}"] + w[f"bu{i}"]).gelu() @ w[f"wd{i}"] + w[f"bd{i}"]
        x = (x + y).layer_norm(w[f"gm{i}"], w[f"hm{i}"], eps=1e-12)
    return x


def _encoder_torch(length: int, x: Any, **w: Any) -> Any:
    import torch

    F = torch.nn.functional

    def linear(y: Any, n: str) -> Any:
        return torch.addmm(w[f"b{n}"], y, w[f"w{n}"])

    x = x[0]
    for i in range(LAYERS):
        q, k, v = (linear(x, f"{n}{i}").view(1, length, HEADS, -1).transpose(1, 2) for n in "qkv")
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(length, HIDDEN)
        x = F.layer_norm(x + linear(y, f"o{i}"), (HIDDEN,), w[f"gn{i}"], w[f"hn{i}"], 1e-12)
        y = linear(F.gelu(linear(x, f"u{i}")), f"d{i}")
        x = F.layer_norm(x + y, (HIDDEN,), w[f"gm{i}"], w[f"hm{i}"], 1e-12)
    return x[None]


def _encoder_onnx(length: int) -> Onnx:
    nodes: list[Any] = []
    depth = HIDDEN // HEADS
    extra = {
        "split": np.array([1, length, HEADS, depth], np.int64),
        "join": np.array([1, length, HIDDEN], np.int64),
        "scale": np.array(depth**-0.5, np.float32),
    }

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        out = f"t{len(nodes)}"
        nodes.append((op, inputs, [out], attributes))
        return out

    def linear(x: str, n: str) -> str:
        return node("Add", node("MatMul", x, f"w{n}"), f"b{n}")

    x = "x"
    for i in range(LAYERS):
        q, k, v = (node("Reshape", linear(x, f"{n}{i}"), "split") for n in "qkv")
        q, v = (node("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
        s = node("Mul", node("MatMul", q, node("Transpose", k, perm=[0, 2, 3, 1])), "scale")
        y = node("Transpose", node("MatMul", node("Softmax", s, axis=-1), v), perm=[0, 2, 1, 3])
        y = linear(node("Reshape", y, "join"), f"o{i}")
        x = node("LayerNormalization", node("Add", x, y), f"gn{i}", f"hn{i}", epsilon=1e-12)
        y = linear(node("Gelu", linear(x, f"u{i}")), f"d{i}")
        x = node("LayerNormalization", node("Add", x, y), f"gm{i}", f"hm{i}", epsilon=1e-12)
    return Onnx(nodes, [x], extra)


def _encoder_jax(length: int, x: Any, **w: Any) -> Any:
    import jax

    def norm(y: Any, scale: Any, shift: Any) -> Any:
        z = y - y.mean(-1, keepdims=True)
        return z * jax.lax.rsqrt((z * z).mean(-1, keepdims=True) + 1e-12) * scale + shift

    x = x[0]
    for i in range(LAYERS):
        q, k, v = ((x @ w[f"w{n}{i}"] + w[f"b{n}{i}"]).reshape(1, length, HEADS, -1) for n in "qkv")
        y = jax.nn.dot_product_attention(q, k, v).reshape(length, HIDDEN)
        x = norm(x + y @ w[f"wo{i}"] + w[f"bo{i}"], w[f"gn{i}"], w[f"hn{i}"])
        y = jax.nn.gelu(x @ w[f"wu{i}"] + w[f"bu{i}"], approximate=False) @ w[f"wd{i}"] + w[f"bd{i}"]
        x = norm(x + y, w[f"gm{i}"], w[f"hm{i}"])
    return x[None]


def encoder(length: int) -> Case:
    """Six transformer layers on one text."""
    flops = LAYERS * (2.0 * length * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) + 4.0 * length * length * HIDDEN)
    return Case(
        {"x": normal(1, length, HIDDEN, seed=999)},
        lambda g, v: _encoder_graph(length, v["x"], v),
        encoder_weights(),
        None,
        partial(_encoder_torch, length),
        _encoder_onnx(length),
        jax=partial(_encoder_jax, length),
        tolerance=2e-3,
        flops=flops,
    )
