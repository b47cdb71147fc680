"""Ops beyond core ATen that models reach: experts, histograms, regions of pictures, quantised weights."""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.core import TensorType, f32, i64
from strata.mir import Value
from strata.torch.aten.promotion import value
from strata.torch.table import Unsupported, aten


@aten("transformers::grouped_mm_fallback")
def grouped_by_offsets(out: TensorType, x: Value, weight: Value, offsets: Value) -> Value:
    """Rows of x in groups that end at offsets, each times the matrix of its group; rows behind the last are zero."""
    rows = ops.iota((x.shape[0],), 0, i64)
    ends = value(offsets, i64)
    group = ops.searchsorted(ends, rows, side="right")
    inside = ops.less(group, value(weight.shape[0], i64))
    made = ops.grouped_matmul(x, weight, ops.minimum(value(group, i64), value(weight.shape[0] - 1, i64)))
    return ops.where(ops.reshape(inside, (x.shape[0], 1)), made, value(0, made.dtype))


@aten("_grouped_mm")
def grouped_mm(
    out: TensorType,
    x: Value,
    weight: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: Any = None,
) -> Value:
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        raise Unsupported("a grouped matmul that is not rows by matrices")
    return grouped_by_offsets(out, x, weight, offs)


@aten("histc")
def histc(out: TensorType, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """How many elements are in each of `bins` intervals; the last one has both its ends."""
    if low >= high:
        raise Unsupported("a histogram between the least and the greatest element")
    flat = ops.reshape(x, (-1,))
    wide = value(flat, f32 if not x.dtype.is_float else x.dtype)
    inside = ops.logical_and(
        ops.greater_equal(wide, value(low, wide.dtype)), ops.less_equal(wide, value(high, wide.dtype))
    )
    at = ops.floor((wide - value(low, wide.dtype)) * value(bins, wide.dtype) / value(high - low, wide.dtype))
    ids = value(ops.minimum(ops.maximum(at, value(0, wide.dtype)), value(bins - 1, wide.dtype)), i64)
    counts = ops.scatter_add(
        ops.where(inside, value(1, i64), value(0, i64)), ops.where(inside, ids, value(0, i64)), bins
    )
    return value(counts, out.dtype)


@aten("torchvision::roi_align")
def roi_align(
    out: TensorType, x: Value, rois: Value, scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Value:
    batch = value(ops.reshape(ops.narrow(rois, 1, 0, 1), (rois.shape[0],)), i64)
    boxes = ops.narrow(rois, 1, 1, 4)
    mode = "half_pixel" if aligned else "output_half_pixel"
    return ops.roi_align(x, boxes, batch, height, width, max(sampling_ratio, 0), scale, "avg", mode)


@aten("_weight_int8pack_mm")
def int8_matmul(out: TensorType, x: Value, weight: Value, scales: Value) -> Value:
    """Weights as whole numbers with a scale for each row."""
    wide = value(x, f32)
    return ops.matmul(wide, ops.swapaxes(value(weight, f32), 0, 1)) * value(scales, f32)
