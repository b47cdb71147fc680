"""com.microsoft: mixtures of experts: MoE, and QMoE whose matrices are codes of 2, 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.microsoft.fused import unpacked
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"


@reads("MoE", domain=MS)
def mixture_of_experts(n: NodeView) -> Value:
    layers = [(n[w], n[b]) for w, b in ((2, 3), (4, 5), (6, 7))]
    return _mixed(n, layers, n[1])


@reads("QMoE", domain=MS)
def quantised_mixture_of_experts(n: NodeView) -> Value:
    if n.attr("quant_type", "int") != "int" or n.attr("weights_prepacked", 0) == 1:
        raise LowerError(f"{n.label}: only integer codes in their plain order are supported", code="L500")
    places = ((2, 3, 4, 11), (5, 6, 7, 12), (8, 9, 10, 13))
    names = ("fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits")
    usual = n.attr("expert_weight_bits", 4)
    layers = [
        (_decoded(n, w, s, z, int(n.attr(name, usual) or usual)), n[b])
        for (w, s, b, z), name in zip(places, names, strict=True)
    ]
    return _mixed(n, layers, n[14] if n.has(14) else n[1])


def _decoded(n: NodeView, at: int, scale: int, zero: int, bits: int) -> Value | None:
    """Matrices [E, N, K] from codes, with a scale for each row, or each block of a row."""
    if not n.has(at):
        return None
    codes = unpacked(n.array(at), bits)
    experts, rows, columns = codes.shape
    held = n.tracer.value(Host(codes, n.is_fixed(at)))
    scales = ops.cast(n[scale], "f32")
    blocks = scales.shape[2] if scales.ndim == 3 else 1
    points: Any = float(1 << (bits - 1))
    if n.has(zero):
        some = unpacked(n.array(zero).reshape(experts, -1) if blocks == 1 else n.array(zero), bits)
        some = some[:, :rows] if blocks == 1 else some[..., :blocks]
        table = some.reshape(experts, rows, blocks, 1).astype(np.float32)
        points = n.tracer.value(Host(table, n.is_fixed(zero)))
    apart = ops.reshape(ops.cast(held, "f32"), (experts, rows, blocks, columns // blocks))
    real = (apart - points) * ops.reshape(scales, (experts, rows, blocks, 1))
    return ops.cast(ops.reshape(real, (experts, rows, columns)), n[0].dtype)


def _mixed(n: NodeView, layers: list[Any], weights: Value) -> Value:
    """Each token through its k experts, added up by their shares."""
    if n.attr("use_sparse_mixer", 0):
        raise LowerError(f"{n.label}: the sparse mixer is not supported", code="L500")
    (first, first_bias), (second, second_bias), (third, third_bias) = layers
    x, k = n[0], int(n.attr("k", 1))
    tokens = ops.reshape(x, (-1, x.shape[-1]))
    count = tokens.shape[0]
    scores = ops.cast(n[1], "f32")
    is_apart = len(n.items) > 14 and n.has(14)
    shares = ops.cast(weights, "f32") if is_apart else ops.softmax(scores, 1)
    _, ids = ops.topk(scores, k, 1)
    picked = ops.gather_elements(shares, ids, 1)
    if n.attr("normalize_routing_weights", 0):
        picked = picked / ops.sum(picked, 1, keepdims=True)
    ids = ops.reshape(ids, (count * k,))
    rows = ops.reshape(
        ops.broadcast_to(ops.insert_axis(tokens, 1), (count, k, tokens.shape[1])), (count * k, tokens.shape[1])
    )

    def layer(values: Value, matrix: Value, bias: Value | None) -> Value:
        made = ops.grouped_matmul(values, ops.transpose(matrix, 0, 2, 1), ids)
        return made if bias is None else made + ops.gather(bias, ids, 0)

    hidden = layer(rows, first, first_bias)
    gate = None if third is None else layer(rows, third, third_bias)
    made = layer(_activated(n, hidden, gate), second, second_bias)
    shared = ops.reshape(made, (count, k, made.shape[1])) * ops.cast(ops.insert_axis(picked, 2), made.dtype)
    return ops.reshape(ops.sum(shared, 1), x.shape)


def _activated(n: NodeView, hidden: Value, other: Value | None) -> Value:
    kind = n.choice("activation_type", "relu", ("relu", "gelu", "silu", "swiglu", "identity"))
    if kind == "swiglu":
        fusion = int(n.attr("swiglu_fusion", 0))
        gate, line = hidden, other
        if fusion == 1:
            pairs = ops.reshape(hidden, (hidden.shape[0], hidden.shape[1] // 2, 2))
            gate, line = (ops.squeeze(p, 2) for p in ops.split(pairs, 2, 2))
        elif fusion == 2:
            gate, line = ops.split(hidden, 2, 1)
        if line is None:
            raise LowerError(f"{n.label}: swiglu needs fc3, or both halves in fc1", code="L500")
        limit = n.attr("swiglu_limit")
        if limit is not None:
            gate, line = ops.minimum(gate, float(limit)), ops.clip(line, -float(limit), float(limit))
        return gate * ops.sigmoid(gate * n.attr("activation_alpha", 1.0)) * (line + n.attr("activation_beta", 0.0))
    table: dict[str, Any] = {
        "relu": ops.relu, "gelu": ops.gelu, "silu": ops.silu, "identity": lambda v: v,
    }  # fmt: skip
    made: Value = table[kind](hidden)
    return made if other is None else made * other
