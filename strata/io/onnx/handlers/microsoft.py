"""com.microsoft: the ops that common exporters emit."""

from __future__ import annotations

from typing import Any

from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"


@reads("FusedMatMul", domain=MS)
def fused_matmul(n: NodeView) -> Value:
    a, b = n[0], n[1]
    a = ops.swapaxes(a, -1, -2) if n.attr("transA", 0) else a
    b = ops.swapaxes(b, -1, -2) if n.attr("transB", 0) else b
    out = ops.matmul(a, b)
    return out if n.attr("alpha", 1.0) == 1.0 else out * n.attr("alpha")


@reads("Gelu", domain=MS)
def gelu(n: NodeView) -> Value:
    return ops.gelu(n[0])


@reads("BiasGelu", domain=MS)
def bias_gelu(n: NodeView) -> Value:
    return ops.gelu(n[0] + n[1])


@reads("FastGelu", domain=MS)
def fast_gelu(n: NodeView) -> Value:
    return ops.gelu(n[0] if n[1] is None else n[0] + n[1], approximate="tanh")


@reads("QuickGelu", domain=MS)
def quick_gelu(n: NodeView) -> Value:
    return n[0] * ops.sigmoid(n[0] * n.attr("alpha", 1.702))


@reads("SkipLayerNormalization", domain=MS)
def skip_layer_normalization(n: NodeView) -> tuple[Any, ...]:
    x, skip, gamma, beta, bias = (n[i] for i in range(5))
    total = x + skip if bias is None else x + skip + bias
    return ops.layer_norm(total, gamma, beta, eps=n.attr("epsilon", 1e-12)), None, None, total


@reads("SkipSimplifiedLayerNormalization", domain=MS)
def skip_rms_normalization(n: NodeView) -> tuple[Any, ...]:
    x, skip, gamma, bias = (n[i] for i in range(4))
    total = x + skip if bias is None else x + skip + bias
    return ops.rms_norm(total, gamma, eps=n.attr("epsilon", 1e-12)), None, None, total


@reads("SimplifiedLayerNormalization", domain=MS)
@reads("SimplifiedLayerNormalization")
def rms_normalization(n: NodeView) -> Value:
    axes = tuple(range(n.axis("axis", -1), n.ndim(0)))
    return ops.rms_norm(n[0], n[1], axis=axes, eps=n.attr("epsilon", 1e-5))


@reads("EmbedLayerNormalization", domain=MS)
def embed_layer_normalization(n: NodeView) -> tuple[Any, ...]:
    ids, segments, words, places, kinds, gamma, beta, mask, given = (n[i] for i in range(9))
    batch, length = ids.shape
    at = given if given is not None else ops.insert_axis(ops.iota(length), 0)
    total = ops.gather(words, ids, 0) + ops.gather(places, at, 0)
    if segments is not None:
        total = total + ops.gather(kinds, segments, 0)
    kept = ops.zeros((batch,), "i32") if mask is None else ops.sum(mask, 1, dtype=mask.dtype)
    return ops.layer_norm(total, gamma, beta, eps=n.attr("epsilon", 1e-12)), kept, total


@reads("FusedConv", domain=MS)
def fused_conv(n: NodeView) -> Value:
    from strata.io.onnx.handlers.conv import conv_options

    out = ops.conv(n[0], n[1], n[2], **conv_options(n, n.ndim(1) - 2))
    if n.has(3):
        out = out + n[3]
    kind, params = n.attr("activation", ""), n.attr("activation_params", ())
    table: dict[str, Any] = {
        "": lambda x: x, "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Tanh": ops.tanh,
        "LeakyRelu": lambda x: ops.leaky_relu(x, *params[:1]), "Clip": lambda x: ops.clip(x, *params[:2]),
        "HardSigmoid": lambda x: ops.hard_sigmoid(x, *params[:2]),
    }  # fmt: skip
    return table[n.choice("activation", "", list(table))](out) if kind else out


@reads("DynamicQuantizeMatMul", domain=MS)
def dynamic_quantize_matmul(n: NodeView) -> Value:
    """a times dequantised codes of b; a itself need not be rounded to codes."""
    b = ops.cast(n[1], "f32")
    if n.has(3):
        b = b - ops.cast(n[3], "f32")
    out = ops.matmul(n[0], b * n[2])
    return out if n[4] is None else out + n[4]


@reads("MatMulIntegerToFloat", domain=MS)
def matmul_integer_to_float(n: NodeView) -> Value:
    a, b = ops.cast(n[0], "i32"), ops.cast(n[1], "i32")
    if n.has(4):
        a = a - ops.cast(n[4], "i32")
    if n.has(5):
        b = b - ops.cast(n[5], "i32")
    out = ops.cast(ops.matmul(a, b), "f32") * (n[2] * n[3])
    return out if n[6] is None else out + n[6]
