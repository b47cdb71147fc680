"""com.microsoft: the rest: pools of codes, channels last, matrices, tokens without padding, small functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.conv import conv_options, pool_options
from strata.io.onnx.handlers.microsoft.fused import activated, coded, fused_matmul, real
from strata.io.onnx.handlers.quant import wide
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"

reads("TransposeMatMul", domain=MS)(fused_matmul)


def _first(x: Value) -> Value:
    """Channels from the end to the second axis."""
    return ops.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def _last(x: Value) -> Value:
    return ops.transpose(x, (0, *range(2, x.ndim), 1))


@reads("QLinearAveragePool", domain=MS)
def qlinear_average_pool(n: NodeView) -> Any:
    last = bool(n.attr("channels_last", 0))
    x = _first(real(n, 0)) if last else real(n, 0)
    y = ops.avg_pool(x, count_include_pad=bool(n.attr("count_include_pad", 0)), **pool_options(n))
    return coded(n, _last(y) if last else y, 3)


@reads("QLinearGlobalAveragePool", domain=MS)
def qlinear_global_average_pool(n: NodeView) -> Any:
    last = bool(n.attr("channels_last", 0))
    y = ops.global_avg_pool(_first(real(n, 0)) if last else real(n, 0))
    return coded(n, _last(y) if last else y, 3)


@reads("QLinearReduceMean", domain=MS)
def qlinear_reduce_mean(n: NodeView) -> Any:
    axes = n.attr("axes") or tuple(range(n.ndim(0)))
    return coded(n, ops.mean(real(n, 0), tuple(axes), keepdims=bool(n.attr("keepdims", 1))), 3)


@reads("NhwcMaxPool", domain=MS)
def nhwc_max_pool(n: NodeView) -> Value:
    return _last(ops.max_pool(_first(n[0]), **pool_options(n)))


@reads("NhwcConv", domain=MS)
@reads("NhwcFusedConv", domain=MS)
def nhwc_conv(n: NodeView) -> Value:
    """x has its channels last, the filters theirs second, as everywhere."""
    out = _last(ops.conv(_first(n[0]), n[1], n[2], **conv_options(n, n.ndim(1) - 2)))
    return activated(n, out + n[3] if n.has(3) else out)


@reads("QEmbedLayerNormalization", domain=MS)
def quantised_embed_layer_normalization(n: NodeView) -> Any:
    """Sums of rows of three tables of codes, normalised."""
    ids, segments = n[0], n[1]
    tables = [(2, 8, 13), (3, 9, 14), (4, 10, 15)]
    gamma, beta = ((ops.cast(n[at], "f32") - ops.cast(n[at + 11], "f32")) * n[at + 6] for at in (5, 6))

    def rows(at: Value, table: tuple[int, int, int]) -> Value:
        codes, scale, zero = table
        return (ops.cast(ops.gather(n[codes], at, 0), "f32") - ops.cast(n[zero], "f32")) * n[scale]

    total = rows(ids, tables[0]) + rows(ops.insert_axis(ops.iota(ids.shape[1]), 0), tables[1])
    if segments is not None:
        total = total + rows(segments, tables[2])
    mask = n[7]
    kept = ops.zeros((ids.shape[0],), "i32") if mask is None else ops.sum(mask, 1, dtype=mask.dtype)
    return ops.layer_norm(total, gamma, beta, eps=n.attr("epsilon", 1e-12)), kept


@reads("Inverse", domain=MS)
def inverse(n: NodeView) -> Value:
    return ops.cast(ops.inv(n[0] if n[0].dtype.itemsize >= 4 else wide(n, 0)), n[0].dtype)


@reads("ExpandDims", domain=MS)
def expand_dims(n: NodeView) -> Value:
    axis = int(n.scalar(1))
    return ops.insert_axis(n[0], n.place(axis, n.ndim(0) + 1))


@reads("CDist", domain=MS)
def distances(n: NodeView) -> Value:
    gap = ops.insert_axis(n[0], 1) - ops.insert_axis(n[1], 0)
    square = ops.sum(gap * gap, 2)
    return (
        square if n.choice("metric", "sqeuclidean", ("sqeuclidean", "euclidean")) == "sqeuclidean" else ops.sqrt(square)
    )


@reads("GemmFastGelu", domain=MS)
def gemm_fast_gelu(n: NodeView) -> Value:
    made = ops.matmul(n[0], n[1])
    return ops.gelu(made if n[2] is None else made + n[2], approximate="tanh")


@reads("IsAllFinite", domain=MS)
def is_all_finite(n: NodeView) -> Value:
    def odd(x: Value) -> Value:
        if n.attr("isinf_only", 0):
            return ops.isinf(x)
        return ops.isnan(x) if n.attr("isnan_only", 0) else ops.logical_or(ops.isinf(x), ops.isnan(x))

    found = [ops.any(odd(x)) for x in n.values()]
    whole = found[0]
    for some in found[1:]:
        whole = ops.logical_or(whole, some)
    return ops.logical_not(whole)


@reads("BiasDropout", domain=MS)
@reads("BitmaskBiasDropout", domain=MS)
def bias_dropout(n: NodeView) -> Any:
    """As in inference: nothing is dropped."""
    total = n[0] + n[1]
    return _kept(n, total if n[2] is None else total + n[2], 3)


@reads("BitmaskDropout", domain=MS)
def bitmask_dropout(n: NodeView) -> Any:
    return _kept(n, n[0], 1)


def _kept(n: NodeView, made: Value, ratio: int) -> Any:
    """A result of which nothing is dropped, and a mask that says so."""
    if n.scalar(ratio + 1, default=False) and n.scalar(ratio, 0.5):
        raise LowerError(f"{n.label}: dropout in training is not supported", code="L500")
    if not n.wants(1):
        return made
    if n.op_type.startswith("Bitmask"):
        raise LowerError(f"{n.label}: masks of bits are not supported", code="L500")
    return made, ops.broadcast_to(ops.full((), True, "bool"), made.shape)


@reads("ComplexMul", domain=MS)
@reads("ComplexMulConj", domain=MS)
def complex_product(n: NodeView) -> Value:
    """Products of pairs along the last axis."""
    (a, b), (c, d) = (ops.split(x, 2, x.ndim - 1) for x in (n[0], n[1]))
    d = -d if n.op_type == "ComplexMulConj" else d
    return ops.concat([a * c - b * d, a * d + b * c], -1)


@reads("GroupNorm", domain=MS)
def group_norm(n: NodeView) -> Value:
    return _group_norm(n, n[0])


@reads("SkipGroupNorm", domain=MS)
def skip_group_norm(n: NodeView) -> Any:
    """The same of a sum; what is added may have one number a channel."""
    x, skip, bias = n[0], n[3], n[4]
    total = x + (_by_channel(n, skip) if skip.ndim == 2 else skip)
    total = total if bias is None else total + _by_channel(n, ops.insert_axis(bias, 0))
    return _group_norm(n, total), total


def _by_channel(n: NodeView, x: Value) -> Value:
    """[N or 1, C] beside images."""
    ones = (1,) * (n.ndim(0) - 2)
    return ops.reshape(x, (x.shape[0], *ones, x.shape[1]) if n.attr("channels_last", 1) else (*x.shape, *ones))


def _group_norm(n: NodeView, x: Value) -> Value:
    """Mean 0 and variance 1 over groups of channels, which are the last axis or the second; then gamma and beta."""
    last = bool(n.attr("channels_last", 1))
    y = _first(x) if last else x
    batch, channels = y.shape[:2]
    flat = ops.cast(ops.reshape(y, (batch, int(n.attr("groups")), -1)), "f32")
    gap = flat - ops.mean(flat, 2, keepdims=True)
    norm = gap / ops.sqrt(ops.mean(gap * gap, 2, keepdims=True) + n.attr("epsilon", 1e-5))
    shape = (1, channels, *(1,) * (y.ndim - 2))
    gamma, beta = (ops.reshape(ops.cast(n[i], "f32"), shape) for i in (1, 2))
    y = ops.reshape(norm, y.shape) * gamma + beta
    y = ops.cast(y * ops.sigmoid(y) if n.attr("activation", 0) else y, x.dtype)
    return _last(y) if last else y


@reads("RelativePositionBias", domain=MS)
def relative_position_bias(n: NodeView) -> Value:
    """A bias [1, H, Q, K] by buckets of distances, as T5 has it: near ones each their own, far ones by logarithms."""
    table, (queries, keys) = n[0], (n.dims(at)[0] for at in (1, 2))
    both, far = bool(n.attr("is_bidirectional", 0)), float(n.attr("max_distance"))
    count = int(n.shape(0)[0])
    gap = ops.insert_axis(ops.iota(queries), 1) - ops.insert_axis(ops.iota(keys), 0)
    start: Any = 0
    if both:
        count //= 2
        start = ops.where(gap < 0, count, 0)
        gap = abs(gap)
    else:
        gap = ops.maximum(gap, 0)
    exact = count // 2
    steps = ops.log(ops.cast(ops.maximum(gap, 1), "f32") / exact) / float(np.log(far / exact)) * (count - exact)
    distant = ops.minimum(exact + ops.cast(steps, "i64"), count - 1)
    bucket = ops.where(gap < exact, gap, distant) + start
    return ops.insert_axis(ops.transpose(ops.gather(table, bucket, 0), (2, 0, 1)), 0)


@reads("RemovePadding", domain=MS)
def remove_padding(n: NodeView) -> Any:
    """Tokens of sequences one after the other, and where each was; what is padded comes last."""
    x, counts = n.array(0), n.array(1).reshape(-1).astype(np.int64)
    batch, length = x.shape[:2]
    is_token = np.arange(length)[None] < counts[:, None]
    order = np.concatenate([np.flatnonzero(is_token), np.flatnonzero(~is_token)])
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = x.reshape(batch * length, *x.shape[2:])[order[: int(counts.sum())]]
    longest = np.array([counts.max(initial=0)], np.int32)
    return tuple(_data(v) for v in (tokens, order.astype(np.int32).reshape(batch, length), ends, longest))


def _data(x: np.ndarray) -> Any:
    from strata.io.onnx.items import Host

    return Host(x, fixed=False)


@reads("RestorePadding", domain=MS)
def restore_padding(n: NodeView) -> Value:
    """Tokens where they were; zeros for what was padded."""
    tokens, offset = n[0], n[1]
    batch, length = offset.shape
    flat = ops.zeros((batch * length, tokens.shape[1]), tokens.dtype)
    at = ops.narrow(ops.reshape(offset, (batch * length,)), 0, 0, tokens.shape[0])
    made = ops.scatter_nd(flat, ops.insert_axis(ops.cast(at, "i64"), 1), tokens, reduction="none")
    return ops.reshape(made, (batch, length, tokens.shape[1]))
