"""com.microsoft: crops, windows, Fourier transforms, alignments, tokens seen before, integers as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import f32
from strata.errors import FileError, LowerError, ShapeError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.conv import conv_options
from strata.io.onnx.handlers.quant import numbers
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"


@reads("MatMulInteger16", domain=MS)
def matmul_integer_16(n: NodeView) -> Value:
    return ops.matmul(ops.cast(n[0], "i32"), ops.cast(n[1], "i32"))


@reads("MulInteger", domain=MS)
def mul_integer(n: NodeView) -> Value:
    return numbers(n, 0, 1) * numbers(n, 2, 3)


@reads("ReduceSumInteger", domain=MS)
def reduce_sum_integer(n: NodeView) -> Value:
    x = n[0]
    wide = "u32" if n.np_dtype(0) == np.uint8 else "i32"
    axes = tuple(n.attr("axes") or range(x.ndim))
    return ops.sum(ops.cast(x, wide), axes, keepdims=bool(n.attr("keepdims", 1)), dtype=wide)


# the sixteen numbers that codes of bitsandbytes stand for: fp4 (sign, exponent, mantissa), and quantiles of a normal
_FP4 = (0.0, 5.208333333e-03, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@reads("MatMulBnb4", domain=MS)
def matmul_bnb4(n: NodeView) -> Value:
    """x times a matrix [N, K] of codes that look up fp4 or nf4 numbers, with the largest of each block of them."""
    rows, columns, size = (int(n.attr(name)) for name in ("N", "K", "block_size"))
    packed, count = n.array(1).reshape(-1), rows * columns
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)[:count]
    if codes.size != count or size <= 0:
        raise FileError(f"{n.label}: {packed.size} bytes in blocks of {size} for {rows} × {columns}", code="F504")
    values = np.array((*_FP4, *(-v for v in _FP4)) if n.attr("quant_type") == 0 else _NF4, np.float32)
    held = n.tracer.value(Host(values[codes], n.is_fixed(1)))
    scale = ops.narrow(ops.repeat(ops.cast(n[2], "f32"), size, 0), 0, 0, count)
    matrix = ops.cast(ops.reshape(held * scale, (rows, columns)), n[0].dtype)
    return ops.matmul(n[0], ops.transpose(matrix, 1, 0) if n.attr("transB", 1) else matrix)


@reads("TorchEmbedding", domain=MS)
def torch_embedding(n: NodeView) -> Value:
    return ops.gather(n[0], n[1], 0)


@reads("Rfft", domain=MS)
def rfft(n: NodeView) -> Value:
    """The last axis transformed; real and imaginary parts are a new one."""
    _one_axis(n)
    return ops.onnx_dft(ops.insert_axis(n[0], n.ndim(0)), None, n.ndim(0) - 1, onesided=True)


@reads("Irfft", domain=MS)
def irfft(n: NodeView) -> Value:
    _one_axis(n)
    x = n[0]
    bins = x.shape[-2]
    whole = ops.onnx_dft(x, 2 * (bins - 1), x.ndim - 2, inverse=True, onesided=True)
    return ops.squeeze(whole, x.ndim - 1)


def _one_axis(n: NodeView) -> None:
    if n.attr("signal_ndim", 1) != 1 or n.attr("normalized", 0) or not n.attr("onesided", 1):
        raise LowerError(f"{n.label}: only one-sided transforms of one axis are supported", code="L500")


@reads("UnfoldTensor", domain=MS)
def unfold_tensor(n: NodeView) -> Value:
    """Windows along an axis, whose elements are a new last axis."""
    x, axis, size, step = n[0], n.axis("dim", -1), int(n.attr("size")), int(n.attr("step", 1))
    if size <= 0 or step <= 0:
        raise FileError(f"{n.label}: windows of {size} elements, {step} apart", code="F504")
    count = (x.shape[axis] - size) // step + 1
    at = ops.insert_axis(ops.iota(count) * step, 1) + ops.insert_axis(ops.iota(size), 0)
    return ops.moveaxis(ops.gather(x, at, axis), axis + 1, -1)


@reads("Unique", domain=MS)
def unique(n: NodeView) -> tuple[np.ndarray, ...]:
    """Values in the order in which they come, the place of each element among them, and how often they are there."""
    values, first, inverse, counts = np.unique(n.array(0).reshape(-1), True, True, True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    return values[order], place[inverse].astype(np.int64), counts[order].astype(np.int64)


@reads("DynamicTimeWarping", domain=MS)
def dynamic_time_warping(n: NodeView) -> np.ndarray:
    """The cheapest path through a matrix of costs [M, N] from its first to its last element: [2, steps]."""
    costs = n.array(0)
    costs = costs[0] if costs.ndim == 3 else costs
    if costs.ndim != 2 or 0 in costs.shape:
        raise ShapeError(f"{n.label}: costs {list(costs.shape)} are not a matrix", code="S500")
    rows, columns = costs.shape
    n.room(2 * (rows + 1) * (columns + 1))
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    came = np.full((rows + 1, columns + 1), 2, np.int8)
    came[:, 0] = 1
    for diagonal in range(rows + columns - 1):  # elements of a diagonal depend on the two before only
        r = np.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1)) + 1
        c = diagonal + 2 - r
        before = np.stack([total[r - 1, c - 1], total[r - 1, c], total[r, c - 1]])
        corner, up, left = before
        way = np.where((corner < up) & (corner < left), 0, np.where((up < corner) & (up < left), 1, 2))
        total[r, c] = costs[r - 1, c - 1] + before[way, np.arange(len(r))]
        came[r, c] = way
    path, r, c = [], rows, columns
    while r > 0 and c > 0:
        path.append((r - 1, c - 1))
        way = came[r, c]
        r, c = r - (way != 2), c - (way != 1)
    return np.array(path[::-1], np.int32).T


@reads("ConvTransposeWithDynamicPads", domain=MS)
def conv_transpose_with_dynamic_pads(n: NodeView) -> Value:
    rank = n.ndim(1) - 2
    options = conv_options(n, rank)
    if n.has(2):
        pads = n.ints(2)
        if len(pads) != 2 * rank:
            raise FileError(f"{n.label}: pads {list(pads)} for {rank} axes", code="F504")
        options["padding"] = tuple(zip(pads[:rank], pads[rank:], strict=True))
    extra = n.attr("output_padding") or (0,) * rank
    return ops.conv_transpose(n[0], n[1], n[3], output_padding=extra, **options)


@reads("CropAndResize", domain=MS)
def crop_and_resize(n: NodeView) -> Value:
    """Boxes [R, 4] of images, each resized to one size; corners of a box are centres of the first and last element."""
    x = n[0]
    kind = x.dtype if x.dtype.itemsize > 2 else f32
    boxes = ops.cast(n[1], kind)
    mode = n.choice("mode", "bilinear", ("bilinear", "nearest"))
    _, channels, height, width = x.shape
    sizes = n.ints(3)
    n.room(int(np.prod(sizes)))
    image = ops.reshape(ops.cast(n[2], "i64"), (-1, 1, 1))
    rows = ops.reshape(ops.transpose(x, 0, 2, 3, 1), (-1, channels))

    def places(axis: int) -> Value:
        """Where in the image the elements of the crop are, [R, size]."""
        low, high = (ops.narrow(boxes, 1, at, 1) for at in (axis, axis + 2))
        last = ops.cast(ops.dim_size((height, width)[axis] - 1), kind)
        if sizes[axis] == 1:
            return (low + high) * 0.5 * last
        step = (high - low) * last / float(sizes[axis] - 1)
        return low * last + step * ops.insert_axis(ops.cast(ops.iota(sizes[axis]), kind), 0)

    y, x_at = ops.insert_axis(places(0), 2), ops.insert_axis(places(1), 1)

    def inside(at: Value, size: Any) -> Value:
        return ops.logical_and(at >= 0.0, at <= ops.cast(ops.dim_size(size - 1), at.dtype))

    def taken(down: Value, across: Value) -> Value:
        at, by = (
            ops.cast(ops.clip(v, 0.0, ops.cast(ops.dim_size(s - 1), v.dtype)), "i64")
            for v, s in ((down, height), (across, width))
        )
        return ops.gather(rows, (image * height + at) * width + by, 0)

    if mode == "nearest":
        made = taken(ops.floor(y + 0.5), ops.floor(x_at + 0.5))
    else:
        top, left = ops.floor(y), ops.floor(x_at)
        down, across = (ops.insert_axis(v, 3) for v in (y - top, x_at - left))
        upper = taken(top, left) * (1.0 - across) + taken(top, ops.ceil(x_at)) * across
        lower = taken(ops.ceil(y), left) * (1.0 - across) + taken(ops.ceil(y), ops.ceil(x_at)) * across
        made = upper * (1.0 - down) + lower * down
    known = ops.insert_axis(ops.logical_and(inside(y, height), inside(x_at, width)), 3)
    made = ops.where(known, ops.cast(made, x.dtype), ops.full((), float(n.attr("extrapolation_value", 0.0)), x.dtype))
    return ops.transpose(made, 0, 3, 1, 2)


@reads("NGramRepeatBlock", domain=MS)
def ngram_repeat_block(n: NodeView) -> Value:
    """Scores [B, V] of which those of tokens that would repeat n tokens are -inf."""
    ids, scores, size = n[0], n[1], int(n.attr("ngram_size"))
    length = ids.shape[1]
    if size <= 0:
        raise FileError(f"{n.label}: ngram_size is {size}", code="F504")
    if isinstance(length, int) and length < size:
        return scores
    count = length - size + 1
    same = ops.full((ids.shape[0], count), True, "bool")
    for j in range(size - 1):
        last = ops.narrow(ids, 1, count + j, 1)
        same = ops.logical_and(same, ops.equal(ops.narrow(ids, 1, j, count), last))
    low = ops.where(same, ops.full((), -np.inf, scores.dtype), ops.full((), np.inf, scores.dtype))
    follows = ops.cast(ops.narrow(ids, 1, size - 1, count), "i64")
    return ops.scatter_elements(scores, follows, low, 1, reduction="min")
