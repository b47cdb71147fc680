"""com.microsoft: layers of recurrent decoders: linear attention, gates, norms of groups, hyper-connections."""

from __future__ import annotations

from typing import Any

from strata.core import Dim
from strata.errors import FileError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.conv import causal_conv_with_state
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"

reads("CausalConvWithState", domain=MS)(causal_conv_with_state)


@reads("LinearAttention", domain=MS)
def linear_attention(n: NodeView) -> tuple[Value, Value]:
    """A state S [B, H, K, V] that each token decays, corrects by its key and value, and reads by its query."""
    rule = n.choice("update_rule", "gated_delta", ("linear", "gated", "delta", "gated_delta"))
    queries, groups = int(n.attr("q_num_heads")), int(n.attr("kv_num_heads"))
    heads, window = max(queries, groups), int(n.attr("state_window", 0))
    q, k, v = (_by_token(n[i], count) for i, count in ((0, queries), (1, groups), (2, groups)))
    if groups > queries:
        q = ops.repeat(q, groups // queries, 2)
    length, batch, _, size = q.shape
    q = ops.reshape(q, (length, batch, groups, heads // groups, size))
    scale = n.attr("scale", 0.0) or float(size) ** -0.5
    has_decay, has_rate = rule.startswith("gated"), rule.endswith("delta")
    for at, wanted in ((4, has_decay), (5, has_rate)):
        if wanted and not n.has(at):
            raise FileError(f"{n.label}: {rule} needs input {at}, which is absent", code="F504")
    rows = [q, k, v, *([_column(n[4], groups)] if has_decay else []), *([_column(n[5], groups)] if has_rate else [])]
    shape = (batch, groups, size, v.shape[3])
    first = ops.zeros(shape, "f32")
    if n.has(3):
        past = n[3]
        first = ops.cast(ops.squeeze(ops.narrow(past, 0, window - 1, 1), 0) if window else past, "f32")

    def step(state: Value, row: list[Value]) -> tuple[Value, Any]:
        now, key, value, *gates = row
        key = ops.insert_axis(key, 3)
        if has_decay:
            state = state * ops.exp(gates[0])
        if has_rate:
            value = gates[-1][:, :, 0] * (value - ops.sum(state * key, 2))
        state = state + key * ops.insert_axis(value, 2)
        seen = ops.matmul(now, state) * scale
        return state, (seen, state) if window else (seen,)

    last, (seen, *states) = ops.scan(step, first, rows)
    seen = ops.reshape(ops.transpose(seen, 1, 0, 2, 3, 4), (batch, length, heads * v.shape[3]))
    if window:  # the states after the last tokens; zeros before the first
        held = ops.concat([ops.zeros((window, *shape), "f32"), states[0]], 0)
        last = ops.narrow(held, 0, length, window)
    return ops.cast(seen, n[0].dtype), ops.cast(last, n[3].dtype if n.has(3) else n[0].dtype)


def _by_token(x: Value, heads: int) -> Value:
    """[B, T, H · D] as f32 [T, B, H, D]."""
    batch, length, width = x.shape
    apart = ops.reshape(ops.cast(x, "f32"), (batch, length, heads, width // heads))
    return ops.transpose(apart, 1, 0, 2, 3)


def _column(x: Value, heads: int) -> Value:
    """Gates of heads [B, T, H] or [B, T, 1], or of their keys [B, T, H · K], as [T, B, H or 1, K or 1, 1]."""
    return ops.insert_axis(_by_token(x, 1 if x.shape[2] == 1 else heads), 4)


@reads("LinearAttentionGate", domain=MS)
def linear_attention_gate(n: NodeView) -> Any:
    decay = n[2] * ops.softplus(ops.cast(n[0], "f32") + n[1])
    rate = ops.cast(ops.sigmoid(ops.cast(n[3], "f32")), n[0].dtype) if n.has(3) else None
    return ops.cast(decay, n[0].dtype), rate


@reads("GatedRMSNorm", domain=MS)
def gated_rms_norm(n: NodeView) -> Value:
    """x with mean square 1 in each group, as wide as the scale, times a gate."""
    x, scale, gate = (ops.cast(n[i], "f32") for i in range(3))
    sigmoid = ops.sigmoid(gate)
    gate = sigmoid if n.choice("activation", "silu", ("silu", "swish", "sigmoid")) == "sigmoid" else gate * sigmoid
    groups = ops.reshape(x, (*x.shape[:-1], x.shape[-1] // scale.shape[0], scale.shape[0]))
    made = ops.rms_norm(groups, scale, eps=n.attr("epsilon", 1e-5))
    return ops.cast(ops.reshape(made, x.shape) * gate, n[0].dtype)


@reads("GatedAdd", domain=MS)
def gated_add(n: NodeView) -> Value:
    return n[0] + n[1] * n[2]


@reads("ScaledSiLU", domain=MS)
def scaled_silu(n: NodeView) -> Value:
    x = n[0]
    scale = ops.reshape(ops.cast(n[1], "f32"), ()) if n.has(1) else n.attr("alpha", 1.0)
    made = ops.cast(ops.cast(x, "f32") * scale, x.dtype)
    return made * ops.sigmoid(made)


# hyper-connections: C branches of H features, as separate axes or as one


def _branches(n: NodeView, x: Value) -> Value:
    """x as f32 [..., C, H]."""
    count = int(n.attr("num_branches", 0))
    x = ops.cast(x, "f32")
    return ops.reshape(x, (*x.shape[:-1], count, x.shape[-1] // count)) if count else x


def _gates(gates: Value, x: Value) -> Value:
    """Gates of branches, or of their features, beside x [..., C, H]."""
    gates = ops.cast(gates, "f32")
    if gates.ndim == x.ndim:
        return gates
    return ops.reshape(gates, x.shape) if gates.shape[-1] != x.shape[-2] else ops.insert_axis(gates, gates.ndim)


@reads("BranchwiseRMSNorm", domain=MS)
def branchwise_rms_norm(n: NodeView) -> Value:
    x = _branches(n, n[0])
    made = ops.rms_norm(x, eps=n.attr("epsilon", 1e-5))
    if n.has(1):
        scale = ops.cast(n[1], "f32")
        is_shared = scale.ndim == 1 and scale.shape[0] == x.shape[-1]
        made = made * (scale if is_shared else ops.reshape(scale, x.shape[-2:]))
    return ops.cast(ops.reshape(made, n[0].shape), n[0].dtype)


@reads("HyperConnectionPreMix", domain=MS)
def hyper_connection_pre_mix(n: NodeView) -> Value:
    x = _branches(n, n[0])
    total = ops.sum(x * _gates(n[1], x), -2)
    return ops.cast(total * n.attr("reduction_scale", 1.0), n[0].dtype)


@reads("HyperConnectionPostMix", domain=MS)
def hyper_connection_post_mix(n: NodeView) -> Value:
    x = _branches(n, n[0])
    mixed = x if not n.has(3) else ops.matmul(ops.swapaxes(ops.cast(n[3], "f32"), -1, -2), x)
    made = mixed + _gates(n[2], x) * ops.insert_axis(ops.cast(n[1], "f32"), x.ndim - 2)
    return ops.cast(ops.reshape(made, n[0].shape), n[0].dtype)


@reads("EngramGate", domain=MS)
def engram_gate(n: NodeView) -> tuple[Any, ...]:
    """A value [B, T, H] for each branch, gated by how near the branch's key is to its query, both [B, T, C, H]."""
    eps = n.attr("epsilon", 1e-5)

    def normed(x: Value, scale: int) -> Value:
        return ops.rms_norm(x, eps=eps) * ops.cast(n[scale], "f32")

    key, query, value = (ops.cast(n[i], "f32") for i in range(3))
    near = ops.sum(normed(key, 3) * normed(query, 4), -1, keepdims=True) * float(_known(n, key.shape[-1])) ** -0.5
    gate = ops.sigmoid(ops.sign(near) * ops.sqrt(ops.maximum(ops.abs(near), 1e-6)))
    made = gate * ops.insert_axis(value, 2)
    after = ops.cast(normed(made, 5), n[0].dtype) if n.wants(1) else None
    return ops.cast(made, n[0].dtype), after


def _known(n: NodeView, size: Dim) -> int:
    if not isinstance(size, int):
        raise FileError(f"{n.label}: the number of features is open", code="F504")
    return size
