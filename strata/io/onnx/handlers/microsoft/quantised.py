"""com.microsoft: operators of quantised and generative models: quantised LSTM, block codes, fused products."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import FileError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.casting import convert_array
from strata.io.onnx.handlers.microsoft.fused import activated
from strata.io.onnx.handlers.quant import dequantize_linear, quantize_linear, to_codes, wide
from strata.io.onnx.handlers.rnn import rnn_options
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"

reads("QuantizeLinear", domain=MS)(quantize_linear)
reads("DequantizeLinear", domain=MS)(dequantize_linear)


@reads("DynamicQuantizeLSTM", domain=MS)
def dynamic_quantize_lstm(n: NodeView) -> Any:
    """An LSTM whose weights are codes, [directions, inputs, 4 · hidden]; its arithmetic is that of floats."""

    def real(at: int, scale: int) -> Value:
        codes = wide(n, at)
        zero = wide(n, scale + 1) if n.has(scale + 1) else None
        parts = [v if v is None or v.ndim < 2 else ops.insert_axis(v, 1) for v in (zero, wide(n, scale))]
        parts = [v if v is None or v.ndim != 1 else ops.reshape(v, (-1, 1, 1)) for v in parts]
        codes = codes if parts[0] is None else codes - parts[0]
        return ops.transpose(codes * parts[1], (0, 2, 1))

    rest = [n[i] for i in range(3, 8)]
    found = ops.onnx_lstm(
        n[0], real(1, 8), real(2, 10), *rest, input_forget=bool(n.attr("input_forget", 0)), **rnn_options(n)
    )
    return tuple(found)


@reads("GatherBlockQuantized", domain=MS)
def gather_block_quantized(n: NodeView) -> Value:
    """Rows of a table in blocks of codes with a scale each, decoded where they are read."""
    size, bits = int(n.attr("block_size", 128)), int(n.attr("bits", 4))
    codes = n.array(0)
    packed = codes.dtype == np.uint8 and bits < 8
    if packed:
        shifts = range(0, 8, bits)
        codes = np.stack([(codes >> s) & ((1 << bits) - 1) for s in shifts], -1).reshape(*codes.shape[:-1], -1)
    axis, along = n.attr("gather_axis", 0) % codes.ndim, n.attr("quantize_axis", 1) % codes.ndim
    if axis == along:
        raise FileError(f"{n.label}: rows are gathered along the axis of the blocks, {axis}", code="F504")
    middle = float(1 << (bits - 1)) if n.np_dtype(0) == np.uint8 else 0.0
    held = n.tracer.value(Host(codes.astype(np.int8 if codes.dtype.name == "int4" else np.uint8), True))
    scale = ops.gather(wide(n, 2), n[1], axis, wrap=True)
    spread = ops.repeat(scale, size, along + n.ndim(1) - 1)
    found = ops.cast(ops.gather(held, n[1], axis, wrap=True), "f32")
    at = along + n.ndim(1) - 1
    spread = ops.narrow(spread, at, 0, found.shape[at])
    if not n.has(3):
        return ops.cast((found - middle) * spread, n[2].dtype)
    points = n.array(3)
    if packed:
        points = np.stack([(points >> s) & ((1 << bits) - 1) for s in range(0, 8, bits)], -1)
        points = points.reshape(*points.shape[:-2], -1)[..., : n.shape(2)[-1]]
    zero = n.tracer.value(Host(convert_array(points, np.dtype(np.float32)), True))
    zero = ops.repeat(ops.gather(zero, n[1], axis, wrap=True), size, at)
    return ops.cast((found - ops.narrow(zero, at, 0, found.shape[at])) * spread, n[2].dtype)


@reads("QLinearSoftmax", domain=MS)
def qlinear_softmax(n: NodeView) -> Any:
    x = (wide(n, 0) - wide(n, 2) if n.has(2) else wide(n, 0)) * wide(n, 1)
    axis = int(n.attr("axis", -1))
    if int(n.attr("opset", 13)) < 13:
        y = _softmax_from(x, n.place(axis))
    else:
        y = ops.softmax(x, axis)
    return to_codes(y / wide(n, 3), wide(n, 4), n.np_dtype(4), n)


@reads("QLinearWhere", domain=MS)
def qlinear_where(n: NodeView) -> Any:
    x, y = ((wide(n, at) - wide(n, at + 2)) * wide(n, at + 1) for at in (1, 4))
    return to_codes(ops.where(n[0], x, y) / wide(n, 7), wide(n, 8), n.np_dtype(8), n)


@reads("FusedGemm", domain=MS)
def fused_gemm(n: NodeView) -> Value:
    """alpha · A · B + beta · C, and an activation."""
    a, b = n[0], n[1]
    a = ops.transpose(a, (1, 0)) if n.attr("transA", 0) else a
    b = ops.transpose(b, (1, 0)) if n.attr("transB", 0) else b
    out = ops.matmul(a, b) * n.attr("alpha", 1.0)
    out = out + n[2] * n.attr("beta", 1.0) if n.has(2) else out
    return activated(n, out)


@reads("BiasAdd", domain=MS)
def bias_add(n: NodeView) -> Value:
    return n[0] + n[1] + n[2]


@reads("BiasSplitGelu", domain=MS)
def bias_split_gelu(n: NodeView) -> Value:
    a, b = ops.split(n[0] + n[1], 2, n.ndim(0) - 1)
    return a * ops.gelu(b)


@reads("BiasSoftmax", domain=MS)
def bias_softmax(n: NodeView) -> Value:
    """Softmax of x + bias over an axis and all axes after it."""
    return _softmax_from(n[0] + n[1], n.axis("axis", 1))


def _softmax_from(x: Value, axis: int) -> Value:
    """Softmax over an axis and all axes after it."""
    return ops.reshape(ops.softmax(ops.reshape(x, (*x.shape[:axis], -1)), axis), x.shape)
