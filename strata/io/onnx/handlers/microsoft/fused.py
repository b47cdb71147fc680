"""com.microsoft: fused matmuls, convolutions, normalisations, activations, and arithmetic on codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.conv import conv_options
from strata.io.onnx.handlers.quant import dynamic_codes, numbers, to_codes, wide
from strata.io.onnx.items import Host
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
    out = ops.conv(n[0], n[1], n[2], **conv_options(n, n.ndim(1) - 2))
    return activated(n, out + n[3] if n.has(3) else out)


def activated(n: NodeView, x: Value) -> Value:
    """What the attributes of a fused convolution say."""
    params = n.attr("activation_params", ())
    table: dict[str, Any] = {
        "": lambda x: x, "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Tanh": ops.tanh,
        "LeakyRelu": lambda x: ops.leaky_relu(x, *params[:1]), "Clip": lambda x: ops.clip(x, *params[:2]),
        "HardSigmoid": lambda x: ops.hard_sigmoid(x, *params[:2]),
    }  # fmt: skip
    made: Value = table[n.choice("activation", "", list(table))](x)
    return made


@reads("DynamicQuantizeMatMul", domain=MS)
def dynamic_quantize_matmul(n: NodeView) -> Value:
    """Codes of a, whose scale is that of the data, times codes of b."""
    codes, scale, zero = dynamic_codes(n[0])
    total = ops.matmul(ops.cast(codes, "i32") - ops.cast(zero, "i32"), numbers(n, 1, 3))
    out = ops.cast(total, "f32") * (scale * n[2])
    return out if n[4] is None else out + n[4]


@reads("MatMulIntegerToFloat", domain=MS)
def matmul_integer_to_float(n: NodeView) -> Value:
    a, b = numbers(n, 0, 4), numbers(n, 1, 5)
    out = ops.cast(ops.matmul(a, b), "f32") * (n[2] * n[3])
    return out if n[6] is None else out + n[6]


@reads("QGemm", domain=MS)
def qgemm(n: NodeView) -> Any:
    """alpha · A · B + C of codes, as codes of y's scale, or as numbers where that is absent."""
    turned = bool(n.attr("transB", 0))
    a, b = numbers(n, 0, 2), numbers(n, 3, 5, lambda z: ops.insert_axis(z, 1) if z.ndim and turned else z)
    a = ops.transpose(a, (1, 0)) if n.attr("transA", 0) else a
    b = ops.transpose(b, (1, 0)) if turned else b
    total = ops.matmul(a, b)
    if n.has(6):
        total = total + n[6]
    scale = wide(n, 1) * wide(n, 4) * n.attr("alpha", 1.0)
    if not n.has(7):
        return ops.cast(total, "f32") * scale
    target = n.np_dtype(8) if n.has(8) else n.np_dtype(0)
    return to_codes(ops.cast(total, "f32") * (scale / wide(n, 7)), wide(n, 8) if n.has(8) else None, target, n)


# quantised


@reads("MatMulNBits", domain=MS)
def matmul_nbits(n: NodeView) -> Value:
    """x times a matrix [N, K] in blocks of codes of 2, 4 or 8 bits with a scale each."""
    x, scales = n[0], n[2]
    size, rows, columns = n.attr("block_size"), n.attr("N"), n.attr("K")
    bits = int(n.attr("bits", 4))
    if bits not in (2, 4, 8):
        raise LowerError(f"{n.label}: {bits} bits are not supported, only 2, 4 and 8", code="L500")
    blocks = -(-columns // size)
    codes = unpacked(n.array(1).reshape(rows, blocks, -1), bits)
    zero: Any = float(1 << (bits - 1))
    if n.has(3):
        points = n.array(3)
        if points.dtype == np.uint8:
            points = unpacked(points.reshape(rows, -1), bits)[:, :blocks]
        zero = n.tracer.value(Host(points.reshape(rows, blocks, 1).astype(np.float32), n.is_fixed(3)))
    held = n.tracer.value(Host(codes, n.is_fixed(1)))
    weights = (ops.cast(held, "f32") - zero) * ops.reshape(ops.cast(scales, "f32"), (rows, blocks, 1))
    matrix = ops.narrow(ops.reshape(weights, (rows, blocks * size)), 1, 0, columns)
    out = ops.matmul(x, ops.transpose(ops.cast(matrix, x.dtype), 1, 0))
    return out if n[5] is None else out + n[5]


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The codes of each byte, the lowest first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)


def real(n: NodeView, at: int) -> Value:
    """An operand of three inputs: codes, scale, zero point."""
    x = wide(n, at)
    if n.has(at + 2):
        x = x - wide(n, at + 2)
    return x * wide(n, at + 1)


def coded(n: NodeView, y: Value, at: int) -> Any:
    """A result as codes; its scale and zero point are inputs."""
    target = n.np_dtype(at + 1) if n.has(at + 1) else n.np_dtype(0)
    return to_codes(y / wide(n, at), wide(n, at + 1) if n.has(at + 1) else None, target, n)


@reads("QLinearAdd", domain=MS)
def qlinear_add(n: NodeView) -> Any:
    return coded(n, real(n, 0) + real(n, 3), 6)


@reads("QLinearMul", domain=MS)
def qlinear_mul(n: NodeView) -> Any:
    return coded(n, real(n, 0) * real(n, 3), 6)


@reads("QLinearSigmoid", domain=MS)
def qlinear_sigmoid(n: NodeView) -> Any:
    return coded(n, ops.sigmoid(real(n, 0)), 3)


@reads("QLinearLeakyRelu", domain=MS)
def qlinear_leaky_relu(n: NodeView) -> Any:
    return coded(n, ops.leaky_relu(real(n, 0), n.attr("alpha", 0.01)), 3)


@reads("QLinearConcat", domain=MS)
def qlinear_concat(n: NodeView) -> Any:
    parts = [real(n, at) for at in range(2, len(n), 3)]
    return to_codes(ops.concat(parts, n.attr("axis")) / wide(n, 0), wide(n, 1), n.np_dtype(1), n)
