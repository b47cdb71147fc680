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
    """alpha · A · B, each turned in its last two axes, or with its first axis moved after those of the batch."""
    a, b = (_turned(n, n[i], "AB"[i]) for i in range(2))
    out = ops.matmul(a, b)
    return out if n.attr("alpha", 1.0) == 1.0 else out * n.attr("alpha")


def _turned(n: NodeView, x: Value, which: str) -> Value:
    if n.attr(f"transBatch{which}", 0) and x.ndim > 2:
        x = ops.moveaxis(x, 0, x.ndim - 2)
    return ops.swapaxes(x, -1, -2) if n.attr(f"trans{which}", 0) and x.ndim > 1 else x


@reads("FusedMatMulActivation", domain=MS)
def fused_matmul_activation(n: NodeView) -> Value:
    return activated(n, fused_matmul(n))


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
    """The activation that is fused to a product, with the parameters that its attributes give."""
    names = [name for name in ("activation_alpha", "activation_beta", "activation_gamma") if n.has_attr(name)]
    params = n.attr("activation_params", ()) or tuple(n.attr(name) for name in names)

    def scaled_tanh(x: Value) -> Value:
        return ops.tanh(x * params[1]) * params[0]

    table: dict[str, Any] = {
        "": lambda x: x, "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Tanh": ops.tanh, "Softplus": ops.softplus,
        "Softsign": ops.softsign, "Elu": lambda x: ops.elu(x, *params[:1]), "ScaledTanh": scaled_tanh,
        "LeakyRelu": lambda x: ops.leaky_relu(x, *params[:1]), "Clip": lambda x: ops.clip(x, *params[:2]),
        "HardSigmoid": lambda x: ops.hard_sigmoid(x, *(params or (0.2, 0.5))[:2]),
        "Selu": lambda x: ops.selu(x, *params[:2]),
        "ThresholdedRelu": lambda x: ops.where(x > (params or (1.0,))[0], x, ops.zeros_like(x)),
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
    out = ops.cast(ops.matmul(a, b), "f32") * (wide(n, 2) * wide(n, 3))
    return ops.cast(out if n[6] is None else out + wide(n, 6), n[2].dtype)


@reads("QGemm", domain=MS)
def qgemm(n: NodeView) -> Any:
    """alpha · A · B + C of codes over y's scale: as codes, or as numbers where y has no zero point."""
    turned = bool(n.attr("transB", 0))
    a, b = numbers(n, 0, 2), numbers(n, 3, 5, lambda z: ops.insert_axis(z, 1) if z.ndim and turned else z)
    a = ops.transpose(a, (1, 0)) if n.attr("transA", 0) else a
    b = ops.transpose(b, (1, 0)) if turned else b
    total = ops.matmul(a, b)
    if n.has(6):
        total = total + n[6]
    scale = wide(n, 1) * wide(n, 4) * n.attr("alpha", 1.0)
    made = ops.cast(total, "f32") * (scale / wide(n, 7) if n.has(7) else scale)
    return to_codes(made, wide(n, 8), n.np_dtype(8), n) if n.has(8) else made


# quantised


@reads("MatMulNBits", domain=MS)
def matmul_nbits(n: NodeView) -> Value:
    """x times a matrix [N, K] in blocks of codes of 2, 4 or 8 bits with a scale each."""
    if n.attr("weight_prepacked", 0) or n.has(4):
        raise LowerError(f"{n.label}: codes in the order of a device, and g_idx, are not supported", code="L500")
    return _times_codes(n, n[0], (1, 2, 3, 5), int(n.attr("N")))


def _times_codes(n: NodeView, x: Value, at: tuple[int, int, int | None, int], rows: int) -> Value:
    """x times codes with scales, zero points and a bias, which are these inputs."""
    packed, scale, point, bias = at
    size, columns, bits = n.attr("block_size"), n.attr("K"), int(n.attr("bits", 4))
    if bits not in (2, 4, 8):
        raise LowerError(f"{n.label}: {bits} bits are not supported, only 2, 4 and 8", code="L500")
    blocks = -(-columns // size)
    codes = unpacked(n.array(packed).reshape(rows, blocks, -1), bits)
    zero: Any = float(1 << (bits - 1))
    if point is not None and n.has(point):
        points = n.array(point)
        if points.dtype == np.uint8:
            points = unpacked(points.reshape(rows, -1), bits)[:, :blocks]
        zero = n.tracer.value(Host(points.reshape(rows, blocks, 1).astype(np.float32), n.is_fixed(point)))
    held = n.tracer.value(Host(codes, n.is_fixed(packed)))
    weights = (ops.cast(held, "f32") - zero) * ops.reshape(ops.cast(n[scale], "f32"), (rows, blocks, 1))
    matrix = ops.narrow(ops.reshape(weights, (rows, blocks * size)), 1, 0, columns)
    out = ops.matmul(x, ops.transpose(ops.cast(matrix, x.dtype), 1, 0))
    return out if n[bias] is None else out + n[bias]


def _normed(n: NodeView, eps: float) -> tuple[Value, Value | None]:
    """Inputs 0 and 1 added up, with mean square 1 where there is a scale, input 2; and the sum."""
    total = n[0] + n[1] if n.has(1) else n[0]
    return ops.rms_norm(total, n[2], eps=n.attr("epsilon", eps)) if n.has(2) else total, total if n.has(1) else None


@reads("MatMulNBitsMlp", domain=MS)
def matmul_nbits_mlp(n: NodeView) -> tuple[Any, ...]:
    """act(x · G) · (x · U), both matrices as codes, x normalised before."""
    x, total = _normed(n, 1e-5)
    gate, up = (_times_codes(n, x, (at, at + 1, None, at + 2), int(n.attr("N"))) for at in (3, 6))
    table: dict[str, Any] = {"silu": ops.silu, "gelu": ops.gelu, "relu": ops.relu, "sigmoid": ops.sigmoid}
    return table[n.choice("activation", "silu", list(table))](gate) * up, total


@reads("MatMulNBitsQkv", domain=MS)
def matmul_nbits_qkv(n: NodeView) -> tuple[Any, ...]:
    """x normalised, times three matrices of codes."""
    x, total = _normed(n, 1e-6)
    sizes = [int(n.attr(name)) for name in ("Nq", "Nkv", "Nkv")]
    parts = [_times_codes(n, x, (at, at + 1, None, at + 2), size) for at, size in zip((3, 6, 9), sizes, strict=True)]
    return (*parts, total)


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
