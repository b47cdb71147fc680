"""Attention as one op where the operator is the plain kind, otherwise by the standard's function body."""

from __future__ import annotations

from typing import Any

from strata.core import f32
from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value, constant


@reads("Attention")
def attention(n: NodeView) -> Any:
    """Heads of [B, H, S, D], or of [B, S, H · D] with the number of heads as attributes."""
    q, k, v, mask, past_k, past_v = (n[i] for i in range(6))
    if not _is_plain(n, q):
        return NotImplemented
    flat = q.ndim == 3
    if flat:
        q = _heads(q, n.attr("q_num_heads"))
        k, v = (_heads(x, n.attr("kv_num_heads")) for x in (k, v))
    before = 0 if past_k is None else past_k.shape[2]
    if past_k is not None:
        k, v = ops.concat([past_k, k], 2), ops.concat([past_v, v], 2)
    if q.shape[-1] != v.shape[-1] or not isinstance(before, int):
        return NotImplemented
    causal = bool(n.attr("is_causal", 0))
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    bias = None if mask is None else ops.broadcast_to(mask, shape)
    out = ops.attention(
        q, k, v, bias, num_heads=q.shape[1], kv_heads=k.shape[1], mask_kind=None if bias is None else "bias",
        causal=causal, scale=n.attr("scale"), softcap=n.attr("softcap") or None, layout="bhsd",
        offset=constant(before, "i64") if causal else None, empty="mean" if bias is None else "zero",
    )  # fmt: skip
    if flat:
        out = ops.reshape(ops.transpose(out, 0, 2, 1, 3), (q.shape[0], q.shape[2], q.shape[1] * q.shape[3]))
    return out, k, v


def _is_plain(n: NodeView, q: Value) -> bool:
    """f32, without padded keys, windows, or a look at the scores; masks that are added."""
    return (
        q.dtype is f32
        and not n.has(6)
        and not n.wants(3)
        and n.attr("left_window_size", -1) < 0
        and n.attr("right_window_size", -1) < 0
        and n.attr("softmax_precision", 1) == 1
        and (not n.has(3) or (n[3].dtype is f32 and n[3].shape[-1] != 1))
    )


def _heads(x: Value, count: int) -> Value:
    batch, length, width = x.shape
    return ops.transpose(ops.reshape(x, (batch, length, count, width // count)), 0, 2, 1, 3)
