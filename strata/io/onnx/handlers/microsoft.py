"""com.microsoft: the operators that common exporters emit."""

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


# attention


@reads("MultiHeadAttention", domain=MS)
def multi_head_attention(n: NodeView) -> Any:
    """Heads of q, k and v [B, S, H · D]; keys and values may come as heads already, or after those of earlier steps."""
    q, k, v, bias, padding, added, past_k, past_v = (n[i] for i in range(8))
    if k is None or v is None:
        raise LowerError(f"{n.label}: packed projections are not supported", code="L500")
    count = n.attr("num_heads")
    if bias is not None:
        widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
        q, k, v = (x + b for x, b in zip((q, k, v), ops.split(bias, widths, 0), strict=True))
    q, k, v = (x if x.ndim == 4 else _heads(x, count) for x in (q, k, v))
    if past_k is not None:
        k, v = ops.concat([past_k, k], 2), ops.concat([past_v, v], 2)
    causal = bool(n.attr("unidirectional", 0))
    out = _attend(q, k, v, _keep_keys(padding), added, n.attr("scale", 0.0), causal=causal)
    return out, k, v


@reads("Attention", domain=MS)
def packed_attention(n: NodeView) -> Any:
    """Self-attention with its projection: one matrix for queries, keys and values."""
    x, w, bias, mask, past, added = (n[i] for i in range(6))
    if past is not None:
        raise LowerError(f"{n.label}: earlier keys and values are not supported", code="L500")
    count = n.attr("num_heads")
    joint = ops.matmul(x, w)
    joint = joint if bias is None else joint + bias
    widths = n.attr("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    q, k, v = (_heads(part, count) for part in ops.split(joint, list(widths), 2))
    return _attend(q, k, v, _keep_keys(mask), added, n.attr("scale", 0.0), causal=bool(n.attr("unidirectional", 0)))


def _heads(x: Value, count: int) -> Value:
    batch, length, width = x.shape
    return ops.transpose(ops.reshape(x, (batch, length, count, width // count)), 0, 2, 1, 3)


def _keep_keys(mask: Value | None) -> Value | None:
    """[B, S] flags of the keys that count; the other forms of the mask are lengths, which are refused."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise LowerError(f"attention: a mask {mask.type} is not supported, only [B, S]", code="L500")
    return ops.reshape(ops.not_equal(mask, ops.zeros_like(mask)), (mask.shape[0], 1, 1, mask.shape[1]))


def _attend(
    q: Value, k: Value, v: Value, keep: Value | None, added: Value | None, scale: float, *, causal: bool
) -> Value:
    """Attention of heads [B, H, S, D], joined again."""
    batch, heads, length, width = q.shape
    shape = (batch, heads, length, k.shape[2])
    bias = None if added is None else ops.broadcast_to(added, shape)
    if keep is not None:
        masked = ops.where(keep, ops.zeros((), q.dtype), ops.full((), -1e4 if q.dtype.bits < 32 else -1e30, q.dtype))
        bias = ops.broadcast_to(masked, shape) if bias is None else bias + masked
    out = ops.attention(
        q, k, v, bias, num_heads=heads, kv_heads=heads, mask_kind=None if bias is None else "bias", causal=causal,
        scale=scale or float(width) ** -0.5, layout="bhsd",
    )  # fmt: skip
    return ops.reshape(ops.transpose(out, 0, 2, 1, 3), (batch, length, heads * v.shape[3]))


@reads("RotaryEmbedding", domain=MS)
def rotary_embedding(n: NodeView) -> Value:
    """Pairs of x [B, H, S, D] or [B, S, H · D] turned by the angles of their positions."""
    x, at, cos, sin = (n[i] for i in range(4))
    half = cos.shape[1]
    count = n.attr("num_heads", 0)
    flat = x.ndim == 3
    if flat:
        x = _heads(x, count or x.shape[2] // (2 * half))
    batch, _, length, width = x.shape
    if at.ndim == 1:
        at = ops.broadcast_to(ops.insert_axis(at + ops.iota(length), 0), (batch, length))
    cos, sin = (ops.insert_axis(ops.gather(table, at, 0), 1) for table in (cos, sin))
    turned, rest = ops.split(x, [2 * half, width - 2 * half], 3) if width != 2 * half else (x, None)
    if n.attr("interleaved", 0):
        pairs = ops.reshape(turned, (*turned.shape[:3], half, 2))
        a, b = (ops.squeeze(p, 4) for p in ops.split(pairs, 2, 4))
        turned = ops.reshape(ops.stack([a * cos - b * sin, b * cos + a * sin], 4), turned.shape)
    else:
        a, b = ops.split(turned, 2, 3)
        turned = ops.concat([a * cos - b * sin, b * cos + a * sin], 3)
    out = turned if rest is None else ops.concat([turned, rest], 3)
    if not flat:
        return out
    return ops.reshape(ops.transpose(out, 0, 2, 1, 3), (batch, length, out.shape[1] * width))


# quantised


@reads("MatMulNBits", domain=MS)
def matmul_nbits(n: NodeView) -> Value:
    """x times a matrix [N, K] in blocks of 4-bit codes with a scale each."""
    x, scales = n[0], n[2]
    size, rows, columns = n.attr("block_size"), n.attr("N"), n.attr("K")
    if n.attr("bits", 4) != 4:
        raise LowerError(f"{n.label}: {n.attr('bits')} bits are not supported, only 4", code="L500")
    blocks = -(-columns // size)
    codes = _nibbles(n.array(1).reshape(rows, blocks, -1))
    zero: Any = 8.0
    if n.has(3):
        points = n.array(3)
        if points.dtype == np.uint8:
            points = _nibbles(points.reshape(rows, -1))[:, :blocks]
        zero = n.tracer.value(Host(points.reshape(rows, blocks, 1).astype(np.float32), n.is_fixed(3)))
    held = n.tracer.value(Host(codes, n.is_fixed(1)))
    weights = (ops.cast(held, "f32") - zero) * ops.reshape(ops.cast(scales, "f32"), (rows, blocks, 1))
    matrix = ops.narrow(ops.reshape(weights, (rows, blocks * size)), 1, 0, columns)
    out = ops.matmul(x, ops.transpose(ops.cast(matrix, x.dtype), 1, 0))
    return out if n[5] is None else out + n[5]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The two codes of each byte, the low one first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def _real(n: NodeView, at: int) -> Value:
    """An operand of three inputs: codes, scale, zero point."""
    x = wide(n, at)
    if n.has(at + 2):
        x = x - wide(n, at + 2)
    return x * wide(n, at + 1)


def _coded(n: NodeView, y: Value, at: int) -> Any:
    """A result as codes; its scale and zero point are inputs."""
    target = n.np_dtype(at + 1) if n.has(at + 1) else n.np_dtype(0)
    return to_codes(y / wide(n, at), wide(n, at + 1) if n.has(at + 1) else None, target, n)


@reads("QLinearAdd", domain=MS)
def qlinear_add(n: NodeView) -> Any:
    return _coded(n, _real(n, 0) + _real(n, 3), 6)


@reads("QLinearMul", domain=MS)
def qlinear_mul(n: NodeView) -> Any:
    return _coded(n, _real(n, 0) * _real(n, 3), 6)


@reads("QLinearSigmoid", domain=MS)
def qlinear_sigmoid(n: NodeView) -> Any:
    return _coded(n, ops.sigmoid(_real(n, 0)), 3)


@reads("QLinearLeakyRelu", domain=MS)
def qlinear_leaky_relu(n: NodeView) -> Any:
    return _coded(n, ops.leaky_relu(_real(n, 0), n.attr("alpha", 0.01)), 3)


@reads("QLinearGlobalAveragePool", domain=MS)
def qlinear_global_average_pool(n: NodeView) -> Any:
    if n.attr("channels_last", 0):
        raise LowerError(f"{n.label}: channels last are not supported", code="L500")
    return _coded(n, ops.global_avg_pool(_real(n, 0)), 3)


@reads("QLinearConcat", domain=MS)
def qlinear_concat(n: NodeView) -> Any:
    parts = [_real(n, at) for at in range(2, len(n), 3)]
    return to_codes(ops.concat(parts, n.attr("axis")) / wide(n, 0), wide(n, 1), n.np_dtype(1), n)
