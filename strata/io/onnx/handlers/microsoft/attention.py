"""com.microsoft: attention: masks of every form, earlier keys and values, packed projections and tokens."""

from __future__ import annotations

from typing import Any

from strata.errors import LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.microsoft.rotary import heads_of, turned
from strata.io.onnx.handlers.quant import numbers, wide
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"
HIDDEN = -1e30


@reads("MultiHeadAttention", domain=MS)
def multi_head_attention(n: NodeView) -> Any:
    """Heads of q, k and v [B, S, H · D]; keys and values may come as heads already, packed, or after earlier ones."""
    q, k, v, bias, padding, added, past_k, past_v = (n[i] for i in range(8))
    count = n.attr("num_heads")
    if k is None:  # [B, S, H, 3, D]
        q, k, v = (ops.transpose(ops.squeeze(x, 3), 0, 2, 1, 3) for x in ops.split(q, 3, 3))
    elif v is None:  # [B, T, H, 2, D]
        k, v = (ops.transpose(ops.squeeze(x, 3), 0, 2, 1, 3) for x in ops.split(k, 2, 3))
    if bias is not None:
        widths = [x.shape[1] * x.shape[3] if x.ndim == 4 else x.shape[2] for x in (q, k, v)]
        parts = ops.split(bias, widths, 0)
        q, k, v = (
            x + (ops.reshape(b, (x.shape[1], 1, x.shape[3])) if x.ndim == 4 else b)
            for x, b in zip((q, k, v), parts, strict=True)
        )
    q, k, v = (x if x.ndim == 4 else heads_of(x, count) for x in (q, k, v))
    if past_k is not None:
        k, v = ops.concat([past_k, k], 2), ops.concat([past_v, v], 2)
    keep = _kept(padding, q.shape[0], k.shape[2])
    return _attend(q, k, v, _with_causal(n, q, k, keep), added, n.attr("scale", 0.0)), k, v


@reads("DecoderMaskedMultiHeadAttention", domain=MS)
def decoder_masked_multi_head_attention(n: NodeView) -> Any:
    """The same for one new token a sequence; keys and values that are heads already are those of another sequence."""
    q, k, v, padding, added, past_k, past_v = (n[i] for i in range(7))
    if n.has(8) or n.has(9) or n.wants(3):
        raise LowerError(f"{n.label}: beams and scores are not supported", code="L500")
    count = n.attr("num_heads")
    if k is None:
        q, k, v = ops.split(q, 3, 2)
    if n.has(10):
        biases = ops.split(n[10], [x.shape[2] if x.ndim == 3 else x.shape[1] * x.shape[3] for x in (q, k, v)], 0)
        q, k, v = (x + b if x.ndim == 3 else x for x, b in zip((q, k, v), biases, strict=True))
    q, k, v = (x if x.ndim == 4 else heads_of(x, count) for x in (q, k, v))
    keep = None
    if past_k is not None and n.attr("past_present_share_buffer", 0):  # with room for all tokens
        key = ops.reshape(ops.iota(past_k.shape[2]), (1, 1, -1, 1))
        known = ops.cast(ops.reshape(n[7], (1, 1, 1, 1)), "i64")
        k, v = (ops.where(ops.equal(key, known), new, old) for new, old in ((k, past_k), (v, past_v)))
        keep = ops.reshape(key <= known, (1, 1, 1, past_k.shape[2]))
    elif past_k is not None:
        k, v = ops.concat([past_k, k], 2), ops.concat([past_v, v], 2)
    flags = _kept(padding, q.shape[0], k.shape[2])
    if flags is not None:
        keep = flags if keep is None else ops.logical_and(keep, _as_long(flags, k.shape[2]))
    return _attend(q, k, v, keep, None if added is None else _as_long(added, k.shape[2]), n.attr("scale", 0.0)), k, v


def _as_long(x: Value, length: Any) -> Value:
    """What is known of the first keys; zeros for those after, which are hidden."""
    return x if x.shape[3] == length else ops.pad(x, ((0, 0), (0, 0), (0, 0), (0, length - x.shape[3])))


@reads("GatedRelativePositionBias", domain=MS)
def gated_relative_position_bias(n: NodeView) -> Value:
    """A bias [B, H, S, S] by distances, times gates of the queries."""
    if n.has(6):
        raise LowerError(f"{n.label}: tokens without padding are not supported", code="L500")
    q = heads_of(n[0] + n[1], int(n.attr("num_heads")))
    made = ops.matmul(q, n[3]) + n[4]
    sums = ops.sum(ops.reshape(made, (*made.shape[:3], 2, made.shape[3] // 2)), 4)
    update, reset = ops.split(ops.sigmoid(sums), 2, 3)
    return (update * (reset * n[5] - 1.0) + 2.0) * n[2]


@reads("Attention", domain=MS)
def attention(n: NodeView) -> Any:
    """Self-attention with its projection: one matrix for queries, keys and values."""
    x, w, bias, mask, past, added = (n[i] for i in range(6))
    joint = ops.matmul(x, w)
    joint = joint if bias is None else joint + bias
    widths = n.attr("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    return _self_attention(n, joint, widths, mask, past, added)


@reads("QAttention", domain=MS)
def quantised_attention(n: NodeView) -> Any:
    """The same, with codes for x and the matrix."""
    total = ops.matmul(numbers(n, 0, 6), numbers(n, 1, 7))
    joint = ops.cast(total, "f32") * (wide(n, 3) * wide(n, 4)) + wide(n, 2)
    return _self_attention(n, ops.cast(joint, n[2].dtype), (n.shape(1)[1] // 3,) * 3, n[5], n[8], None)


def _self_attention(n: NodeView, joint: Value, widths: Any, mask: Value | None, past: Value | None, added: Any) -> Any:
    if n.attr("do_rotary", 0) or n.attr("past_present_share_buffer", 0):
        raise LowerError(f"{n.label}: rotations and shared buffers are not supported", code="L500")
    q, k, v = (heads_of(part, n.attr("num_heads")) for part in ops.split(joint, list(widths), 2))
    if past is not None:
        before = [ops.squeeze(x, 0) for x in ops.split(past, 2, 0)]
        k, v = (ops.concat([old, new], 2) for old, new in zip(before, (k, v), strict=True))
    keep = _with_causal(n, q, k, _kept(mask, q.shape[0], k.shape[2]))
    out = _attend(q, k, v, keep, added, n.attr("scale", 0.0))
    return (out, ops.stack([k, v], 0)) if n.wants(1) else out


@reads("PackedAttention", domain=MS)
def packed_attention(n: NodeView) -> Value:
    """Attention of tokens without padding [T, C]: sequences lie one after the other."""
    joint = ops.matmul(n[0], n[1]) + n[2]
    widths = n.attr("qkv_hidden_sizes") or (n.shape(1)[1] // 3,) * 3
    return _packed(n, ops.split(joint, list(widths), 1), n[4], n[5])


@reads("PackedMultiHeadAttention", domain=MS)
def packed_multi_head_attention(n: NodeView) -> Value:
    q, k, v, bias = (n[i] for i in range(4))
    if k is None:  # [T, H, 3, D]
        q, k, v = (ops.reshape(x, (x.shape[0], x.shape[1] * x.shape[3])) for x in ops.split(q, 3, 2))
    if bias is not None:
        parts = ops.split(bias, [x.shape[1] for x in (q, k, v)], 0)
        q, k, v = (x + b for x, b in zip((q, k, v), parts, strict=True))
    return _packed(n, (q, k, v), n[5], n[6])


def _packed(n: NodeView, parts: Any, ends: Value, added: Value | None) -> Value:
    """Tokens as one row, each of which sees those of its own sequence."""
    if added is not None:
        raise LowerError(f"{n.label}: a bias of packed sequences is not supported", code="L500")
    count = parts[0].shape[0]
    place = ops.insert_axis(ops.cast(ops.iota(count), ends.dtype), 1)
    sequence = ops.sum(ops.cast(place >= ops.insert_axis(ends, 0), "i64"), 1)  # how many began up to here
    keep = ops.equal(ops.insert_axis(sequence, 1), ops.insert_axis(sequence, 0))
    q, k, v = (heads_of(ops.insert_axis(x, 0), n.attr("num_heads")) for x in parts)
    keep = ops.reshape(keep, (1, 1, count, count))
    return ops.squeeze(_attend(q, k, v, keep, None, n.attr("scale", 0.0)), 0)


def _kept(mask: Value | None, batch: Any, total: Any) -> Value | None:
    """Which keys count, as [B or 1, 1, S or 1, T]: from flags, or from where the keys of each sequence end (and begin).

    One axis has B ends, B ends and B starts, or 3 · B + 2 numbers, of which B ends come first.
    """
    if mask is None:
        return None
    if mask.ndim == 1:
        key = ops.reshape(ops.cast(ops.iota(total), mask.dtype), (1, 1, 1, total))
        count = mask.shape[0]
        keep = key < ops.reshape(ops.narrow(mask, 0, 0, batch), (batch, 1, 1, 1))
        if count == 2 * batch:
            keep = ops.logical_and(keep, key >= ops.reshape(ops.narrow(mask, 0, batch, batch), (batch, 1, 1, 1)))
        return keep
    flags = ops.not_equal(mask, ops.zeros_like(mask))
    if mask.ndim == 2:
        return ops.reshape(flags, (mask.shape[0], 1, 1, mask.shape[1]))
    if mask.ndim == 3:
        return ops.insert_axis(flags, 1)
    raise LowerError(f"attention: a mask {mask.type} is not supported", code="L500")


def _with_causal(n: NodeView, q: Value, k: Value, keep: Value | None) -> Value | None:
    """Where `unidirectional` says so, queries, which are the last of all tokens, see no later keys."""
    if not n.attr("unidirectional", 0):
        return keep
    length, total = q.shape[2], k.shape[2]
    at = ops.reshape(ops.iota(length) + ops.dim_size(total - length), (1, 1, length, 1))
    seen = ops.reshape(ops.iota(total), (1, 1, 1, total)) <= at
    return seen if keep is None else ops.logical_and(keep, seen)


def _attend(q: Value, k: Value, v: Value, keep: Value | None, added: Value | None, scale: float) -> Value:
    """Attention of heads [B, H, S, D], joined again."""
    batch, heads, length, width = q.shape
    shape = (batch, heads, length, k.shape[2])
    bias = None if added is None else ops.broadcast_to(added, shape)
    if keep is not None:
        masked = ops.where(keep, ops.zeros((), q.dtype), ops.full((), -1e4 if q.dtype.bits < 32 else HIDDEN, q.dtype))
        bias = ops.broadcast_to(masked, shape) if bias is None else bias + masked
    out = ops.attention(
        q, k, v, bias, num_heads=heads, kv_heads=heads, mask_kind=None if bias is None else "bias",
        scale=scale or float(width) ** -0.5, layout="bhsd",
    )  # fmt: skip
    return ops.reshape(ops.transpose(out, 0, 2, 1, 3), (batch, length, heads * v.shape[3]))


@reads("GroupQueryAttention", domain=MS)
def group_query_attention(n: NodeView) -> tuple[Value, Value, Value]:
    """Causal attention with fewer heads of keys; new keys come after those of each row that are known already."""
    if n.attr("sliding_window_cache", 0) or n.has(12) or n.has(13) or n.wants(3):
        raise LowerError(f"{n.label}: caches of a window or of codes, and scores, are not supported", code="L500")
    q, k, v, past_k, past_v, last = (n[i] for i in range(6))
    heads, groups = int(n.attr("num_heads")), int(n.attr("kv_num_heads"))
    batch, length, _ = q.shape
    if k is None:
        size = q.shape[2] // (heads + 2 * groups)
        q, k, v = ops.split(q, [heads * size, groups * size, groups * size], 2)
    q, k, v = (heads_of(x, c) for x, c in ((q, heads), (k, groups), (v, groups)))
    if n.has(14):
        q, k = (ops.rms_norm(x, n[at], eps=n.attr("qk_norm_epsilon", 1e-6)) for x, at in ((q, 14), (k, 15)))
    width = q.shape[3]
    before = 0 if past_k is None else past_k.shape[2]
    last = ops.cast(ops.reshape(last, (-1,)), "i64")
    start = ops.clip(last + (1 - length), 0, before)  # where the new tokens of a row come
    place = ops.insert_axis(start, 1) + ops.insert_axis(ops.iota(length), 0)
    if n.attr("do_rotary", 0):
        at = n[9] if n.has(9) else place
        pairs = bool(n.attr("rotary_interleaved", 0))
        q, k = (turned(x, ops.cast(at, "i64"), n[7], n[8], pairs) for x in (q, k))
    k, v = (_placed(new, old, start, length) for new, old in ((k, past_k), (v, past_v)))
    total = k.shape[2]
    key = ops.reshape(ops.iota(total), (1, 1, total))
    keep = ops.broadcast_to(key <= ops.reshape(last, (-1, 1, 1)), (batch, length, total))
    if n.attr("causal", 1):
        keep = ops.logical_and(keep, key <= ops.insert_axis(place, 2))
    window = int(n.attr("local_window_size", -1))
    if window > 0:
        keep = ops.logical_and(keep, key > ops.insert_axis(place, 2) - window)
    low = ops.full((), -6e4 if q.dtype.bits < 32 else HIDDEN, q.dtype)
    bias = ops.insert_axis(ops.where(keep, ops.zeros((), q.dtype), low), 1)
    bias = bias + n[10] if n.has(10) else bias
    bias = ops.broadcast_to(bias, (batch, heads, length, total))
    seen_k, seen_v = k, v
    if n.has(11) or n.attr("smooth_softmax", 0) == 1:  # one more key, of which nothing is seen, with its own score
        zero = ops.zeros((), q.dtype)
        sink = ops.reshape(n[11], (1, heads, 1, 1)) if n.has(11) else zero
        bias = ops.concat([bias, ops.broadcast_to(sink, (batch, heads, length, 1))], 3)
        row = ops.broadcast_to(zero, (batch, groups, 1, width))
        seen_k, seen_v = ops.concat([k, row], 2), ops.concat([v, row], 2)
    out = ops.attention(
        q, seen_k, seen_v, bias, num_heads=heads, kv_heads=groups, mask_kind="bias", layout="bhsd",
        scale=n.attr("scale", 0.0) or float(width) ** -0.5, softcap=float(n.attr("softcap", 0.0)) or None,
    )  # fmt: skip
    return ops.reshape(ops.transpose(out, 0, 2, 1, 3), (batch, length, heads * width)), k, v


def _placed(new: Value, old: Value | None, start: Value, length: Any) -> Value:
    """Heads [B, H, T, D] of old tokens, with the new ones of each row from its start on."""
    if old is None:
        return new
    known = ops.concat([old, ops.zeros_like(new)], 2)
    total = known.shape[2]
    gap = ops.insert_axis(ops.iota(total), 0) - ops.insert_axis(start, 1)  # [B, T]
    is_new = ops.logical_and(gap >= 0, gap < length)
    at = ops.reshape(ops.clip(gap, 0, length - 1), (new.shape[0], 1, total, 1))
    moved = ops.gather_elements(new, ops.broadcast_to(at, (new.shape[0], new.shape[1], total, new.shape[3])), 2)
    return ops.where(ops.reshape(is_new, (new.shape[0], 1, total, 1)), moved, known)
