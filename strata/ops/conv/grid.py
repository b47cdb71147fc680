"""Sampling images at computed positions: grid_sample, affine_grid, roi_align.

All are compositions of gathers and weights that are differentiable in the image and in the places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from strata.core import Dim, dim_prod, i64
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Value, constant, function
from strata.ops.base.creation import iota
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.base.movement import broadcast_to, moveaxis, narrow, reshape, stack, transpose

Tap = tuple[Value, Value]  # an index that is inside, and a weight that is 0 where the true index is not

_MODES = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic"}
_CUBIC_A = -0.75


def _size(n: Dim, like: Value) -> Value:
    return METHODS["cast"](METHODS["dim_size"](n), like.dtype)


def _number(value: float, like: Value) -> Value:
    return constant(value, like.dtype)


def _clip(x: Value, high: Value) -> Value:
    return METHODS["minimum"](METHODS["maximum"](x, _number(0, x)), high)


def _reflect(x: Value, size: Value, align_corners: bool) -> Value:
    """Coordinates mirrored at the first and last element (align_corners) or at the edges of their cells."""
    low = _number(0.0 if align_corners else -0.5, x)
    span = size - 1.0 if align_corners else size
    safe = METHODS["maximum"](span, _number(0.5, x))  # an axis of one aligned element has no span: everything is 0
    away = METHODS["abs"](x - low)
    turns = METHODS["stop_gradient"](METHODS["floor"](away / safe))
    rest = away - turns * safe
    odd = METHODS["equal"](METHODS["remainder"](turns, 2.0), _number(1, x))
    mirrored = METHODS["where"](odd, safe - rest, rest) + low
    return METHODS["where"](METHODS["equal"](span, _number(0, x)), _number(0, x), mirrored)


def _inside(x: Value, size: Value, padding_mode: str, align_corners: bool) -> Value:
    if padding_mode == "zeros":
        return x
    return _clip(_reflect(x, size, align_corners) if padding_mode == "reflection" else x, size - 1.0)


def _tap(at: Value, weight: Value, n: Dim) -> Tap:
    """The element at a whole coordinate; weight 0 where there is none."""
    size = _size(n, at)
    exists = METHODS["logical_and"](at >= 0.0, at <= size - 1.0)
    index = METHODS["cast"](METHODS["stop_gradient"](_clip(at, size - 1.0)), i64)
    return index, METHODS["where"](exists, weight, _number(0, weight))


def _cubic(distance: Value) -> Value:
    d, a = distance, _CUBIC_A
    near = ((a + 2) * d - (a + 3)) * d * d + 1.0
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return METHODS["where"](d <= 1.0, near, METHODS["where"](d < 2.0, far, _number(0, d)))


def _axis_taps(at: Value, n: Dim, mode: str, padding_mode: str, align_corners: bool) -> list[Tap]:
    """The elements of one axis that a coordinate draws on."""
    size = _size(n, at)
    if mode == "cubic":
        base = METHODS["stop_gradient"](METHODS["floor"](at))
        places = [base + float(offset) for offset in (-1, 0, 1, 2)]
        return [_tap(_inside(p, size, padding_mode, align_corners), _cubic(METHODS["abs"](at - p)), n) for p in places]
    at = _inside(at, size, padding_mode, align_corners)
    if mode == "nearest":
        return [_tap(METHODS["round"](at), METHODS["ones_like"](at), n)]
    base = METHODS["stop_gradient"](METHODS["floor"](at))
    return [_tap(base, base + 1.0 - at, n), _tap(base + 1.0, at - base, n)]


def _weighted_sum(rows: Value, axes: Sequence[Sequence[Tap]], sizes: Sequence[Dim]) -> Value:
    """Σ weight · element over all combinations of taps; rows is [N, C, elements], taps are [N, places]."""
    total: Value | None = None
    for taps in itertools.product(*axes):
        index, weight = taps[0]
        for (i, w), n in zip(taps[1:], sizes[1:], strict=True):
            index, weight = index * METHODS["dim_size"](n) + i, weight * w
        seen = METHODS["take_along_axis"](rows, METHODS["insert_axis"](index, 1), axis=2)
        term = seen * METHODS["insert_axis"](weight, 1)
        total = term if total is None else total + term
    assert total is not None
    return total


@function()
def grid_sample(
    x: Operand, grid: Operand, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Value:
    """[N, C, *sizes] sampled at grid[N, *places, rank], whose last axis names the axes of x from the last to the first.

    Coordinates run from -1 to 1 across the image: between the centres of the corner elements when `align_corners`, else
    between their outer edges. Modes: nearest, bilinear (linear), bicubic (cubic). Padding: zeros, border, reflection.
    """
    value, places = promoted(x, grid)
    value, places = to_inexact(value), to_inexact(places)
    rank = value.ndim - 2
    if rank < 1 or places.ndim != value.ndim or places.shape[-1] != rank or places.shape[0] != value.shape[0]:
        wanted = f"x[N, C, *sizes] and grid[N, *places, {rank}]"
        raise ShapeError(f"grid_sample: needs {wanted}, got {value.type} and {places.type}", code="S314")
    if mode not in _MODES:
        raise OptionError(f"grid_sample: mode {mode!r} is not one of {', '.join(_MODES)}", code="O247")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise OptionError(f"grid_sample: padding {padding_mode!r} is not one of zeros, border, reflection", code="O247")
    batch, sizes, out = value.shape[0], value.shape[2:], places.shape[1:-1]
    flat = reshape(places, (batch, dim_prod(out), rank))
    axes = []
    for axis, n in enumerate(sizes):
        where = reshape(METHODS["narrow"](flat, 2, rank - 1 - axis, 1), (batch, dim_prod(out)))
        size = _size(n, where)
        at = (where + 1.0) * 0.5 * (size - 1.0) if align_corners else ((where + 1.0) * size - 1.0) * 0.5
        axes.append(_axis_taps(at, n, _MODES[mode], padding_mode, align_corners))
    rows = reshape(value, (batch, value.shape[1], dim_prod(sizes)))
    return reshape(_weighted_sum(rows, axes, sizes), (batch, value.shape[1], *out))


@function()
def affine_grid(theta: Operand, size: Sequence[Dim], align_corners: bool = False) -> Value:
    """The grid of grid_sample for theta[N, rank, rank + 1] and an output [N, C, *size[2:]]."""
    matrix = to_inexact(as_value(theta))
    rank = len(size) - 2
    if matrix.ndim != 3 or matrix.shape[1:] != (rank, rank + 1):
        raise ShapeError(
            f"affine_grid: needs [N, {rank}, {rank + 1}] for the output {tuple(size)}, got {matrix.type}", code="S314"
        )
    out = tuple(size[2:])
    lines = []
    for axis in reversed(range(rank)):
        n = _size(out[axis], matrix)
        ramp = METHODS["cast"](iota((out[axis],)), matrix.dtype)
        if align_corners:
            line = ramp * 2.0 / METHODS["maximum"](n - 1.0, _number(1, n)) - METHODS["where"](n > 1.0, 1.0, 0.0)
        else:
            line = (ramp * 2.0 + 1.0) / n - 1.0
        lines.append(broadcast_to(reshape(line, (out[axis], *(1,) * (rank - 1 - axis))), out))
    lines.append(METHODS["ones_like"](lines[0]))
    points = reshape(stack([METHODS["cast"](line, matrix.dtype) for line in lines], -1), (dim_prod(out), rank + 1))
    moved = METHODS["matmul"](points, transpose(matrix, [0, 2, 1]))
    return reshape(moved, (matrix.shape[0], *out, rank))


# ------------------------------------------------------------------------------------------------------------ roi align


def _roi_axis(
    start: Value, end: Value, n: Dim, bins: int, sampling_ratio: int, at_least_one: bool
) -> tuple[Value, Value, Value, int]:
    """Coordinates [R, bins, samples], whether each sample counts, how many count [R], and the number of samples."""
    length = end - start
    if at_least_one:
        length = METHODS["maximum"](length, _number(1, length))
    rois = length.shape[0]
    step = length / float(bins)
    if sampling_ratio > 0:
        samples, used = sampling_ratio, broadcast_to(_number(sampling_ratio, length), (rois,))
    else:  # as many as there are elements in a bin; never more than the whole axis has
        samples = math.ceil(n.__index__() / bins) + 1
        wanted = METHODS["ceil"](METHODS["stop_gradient"](step))
        used = METHODS["minimum"](METHODS["maximum"](wanted, _number(1, length)), _number(samples, length))
    bin_at = constant(np.arange(bins).reshape(1, bins, 1), length.dtype)
    sample_at = constant(np.arange(samples).reshape(1, 1, samples) + 0.5, length.dtype)

    def spread(v: Value) -> Value:
        return reshape(v, (rois, 1, 1))

    at = spread(start) + bin_at * spread(step) + sample_at * spread(step) / spread(used)
    return at, sample_at < spread(used), used, samples


def _roi_taps(at: Value, n: Dim, counts: Value) -> list[Tap]:
    """The two elements around a coordinate; nothing beyond one element outside the axis."""
    size = _size(n, at)
    exists = METHODS["logical_and"](METHODS["logical_and"](at >= -1.0, at <= size), counts)
    inner = _clip(at, size - 1.0)
    base = METHODS["stop_gradient"](METHODS["floor"](inner))
    taps = []
    for place, weight in ((base, base + 1.0 - inner), (_clip(base + 1.0, size - 1.0), inner - base)):
        taps.append((METHODS["cast"](place, i64), METHODS["where"](exists, weight, _number(0, weight))))
    return taps


@function()
def roi_align(
    x: Operand,
    rois: Operand,
    batch_indices: Operand,
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    mode: str = "avg",
    coordinate_transformation_mode: str = "half_pixel",
) -> Value:
    """ONNX's RoiAlign: boxes [R, (x1, y1, x2, y2)] of images [N, C, H, W], averaged into bins [R, C, height, width].

    With sampling_ratio 0 a bin takes as many samples as it has elements, up to what the whole image would give.
    """
    value, boxes = promoted(x, rois)
    if value.ndim != 4 or boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ShapeError(
            f"roi_align: needs x[N, C, H, W] and rois[R, 4], got {value.type} and {boxes.type}", code="S315"
        )
    if mode not in ("avg", "max") or coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise OptionError(f"roi_align: unknown mode {mode!r} or {coordinate_transformation_mode!r}", code="O247")
    half = coordinate_transformation_mode == "half_pixel"
    count, channels, height, width = value.shape
    total_rois = boxes.shape[0]
    corners = boxes * float(spatial_scale) - (0.5 if half else 0.0)
    x1, y1, x2, y2 = (reshape(METHODS["narrow"](corners, 1, i, 1), (total_rois,)) for i in range(4))
    ys, y_counts, y_used, y_samples = _roi_axis(y1, y2, height, output_height, sampling_ratio, not half)
    xs, x_counts, x_used, x_samples = _roi_axis(x1, x2, width, output_width, sampling_ratio, not half)
    rows = reshape(moveaxis(value, 1, 3), (count * height * width, channels))
    image = reshape(METHODS["cast"](as_value(batch_indices), i64), (total_rois, 1, 1, 1, 1))
    terms = []
    for (yi, yw), (xi, xw) in itertools.product(_roi_taps(ys, height, y_counts), _roi_taps(xs, width, x_counts)):
        down = reshape(yi, (total_rois, output_height, y_samples, 1, 1))
        across = reshape(xi, (total_rois, 1, 1, output_width, x_samples))
        index = (image * METHODS["dim_size"](height) + down) * METHODS["dim_size"](width) + across
        weight = reshape(yw, (*down.shape, 1)) * reshape(xw, (*across.shape, 1))
        terms.append(METHODS["gather"](rows, index, 0) * weight)
    out = _reduce_samples(terms, mode, reshape(y_used * x_used, (total_rois, 1, 1, 1)), y_counts, x_counts)
    return moveaxis(out, 3, 1)


def _reduce_samples(terms: list[Value], mode: str, used: Value, y_counts: Value, x_counts: Value) -> Value:
    """[R, bins, samples, bins, samples, C] terms of all corners → [R, bins, bins, C]."""
    if mode == "avg":
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return METHODS["reduce_sum"](total, (2, 4)) / used
    best = terms[0]
    for term in terms[1:]:  # ONNX takes the largest weighted corner, not the largest interpolated sample
        best = METHODS["maximum"](best, term)
    counted = METHODS["logical_and"](
        reshape(y_counts, (*y_counts.shape[:1], 1, y_counts.shape[2], 1, 1, 1)),
        reshape(x_counts, (*x_counts.shape[:1], 1, 1, 1, x_counts.shape[2], 1)),
    )
    return METHODS["max"](METHODS["where"](counted, best, _number(best.dtype.lowest, best)), (2, 4))


@function()
def max_roi_pool(x: Operand, rois: Operand, pooled_shape: Sequence[int], spatial_scale: float = 1.0) -> Value:
    """ONNX's MaxRoiPool: boxes [R, (image, x1, y1, x2, y2)] of [N, C, H, W] → maxima [R, C, *bins]; 0 where empty."""
    value, boxes = promoted(x, rois)
    if value.ndim != 4 or boxes.ndim != 2 or boxes.shape[1] != 5:
        raise ShapeError(
            f"max_roi_pool: needs x[N, C, H, W] and rois[R, 5], got {value.type} and {boxes.type}", code="S315"
        )
    total_rois = boxes.shape[0]
    image, x1, y1, x2, y2 = (reshape(narrow(boxes, 1, i, 1), (total_rois,)) for i in range(5))
    out = METHODS["gather"](value, METHODS["cast"](image, i64), 0)
    lowest = _number(out.dtype.lowest, out)
    for axis, bins, start, end in ((3, pooled_shape[1], x1, x2), (2, pooled_shape[0], y1, y2)):
        inside = _roi_bins(start, end, value.shape[axis], bins, spatial_scale)
        if axis == 3:  # [R, C, H, bins, W]
            mask = reshape(inside, (total_rois, 1, 1, bins, value.shape[3]))
            cells = METHODS["insert_axis"](out, 3)
        else:  # [R, C, bins, H, bins]
            mask = reshape(inside, (total_rois, 1, bins, value.shape[2], 1))
            cells = METHODS["insert_axis"](out, 2)
        out = METHODS["max"](METHODS["where"](mask, cells, lowest), axis + 1 if axis == 3 else 3)
    return METHODS["where"](METHODS["equal"](out, lowest), _number(0, out), out)


def _roi_bins(start: Value, end: Value, n: Dim, bins: int, scale: float) -> Value:
    """Which elements of an axis lie in which bin of a box, [R, bins, n]; boxes are rounded to whole elements."""
    first = METHODS["floor"](start * float(scale) + 0.5)
    last = METHODS["floor"](end * float(scale) + 0.5)
    length = METHODS["maximum"](last - first + 1.0, _number(1, first))
    step = reshape(length / float(bins), (first.shape[0], 1, 1))
    ramp = constant(np.arange(bins).reshape(1, bins, 1), first.dtype)
    offset = reshape(first, (first.shape[0], 1, 1))
    low, high = METHODS["floor"](ramp * step) + offset, METHODS["ceil"]((ramp + 1.0) * step) + offset
    at = METHODS["cast"](reshape(iota((n,)), (1, 1, n)), first.dtype)
    return METHODS["logical_and"](at >= low, at < high)
