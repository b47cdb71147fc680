"""Images: resizing, sampling grids, boxes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, floordiv, require
from strata.errors import FileError, LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.io.onnx.trace import NeedsData
from strata.mir import Value, constant


@reads("Upsample")
def upsample(n: NodeView) -> Value:
    given = n.array(1) if n.has(1) else n.attr("scales")
    scales = _scales(n, (1.0, 1.0, n.attr("height_scale"), n.attr("width_scale")) if given is None else given)
    mode = {"nearest": "nearest", "linear": "linear", "bilinear": "linear"}[n.attr("mode", "nearest")]
    return _resize(n[0], scales=scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@reads("Resize")
def resize_first(n: NodeView) -> Value:
    mode = n.choice("mode", "nearest", ("nearest", "linear"))
    scales = _scales(n, n.array(1))
    return _resize(n[0], scales=scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@reads("Resize", since=11)
def resize(n: NodeView) -> Value:
    x = n[0]
    transformation = str(n.attr("coordinate_transformation_mode", "half_pixel"))
    options: dict[str, Any] = {
        "mode": n.choice("mode", "nearest", ("nearest", "linear", "cubic")),
        "coordinate_transformation_mode": transformation,
        "nearest_mode": str(n.attr("nearest_mode", "round_prefer_floor")),
        "cubic_coeff_a": n.attr("cubic_coeff_a", -0.75),
        "exclude_outside": bool(n.attr("exclude_outside", 0)),
        "extrapolation_value": n.attr("extrapolation_value", 0.0),
        "antialias": bool(n.attr("antialias", 0)),
        "keep_aspect_ratio_policy": str(n.attr("keep_aspect_ratio_policy", "stretch")),
    }
    if n.has_attr("axes"):
        options["axes"] = tuple(n.place(a) for a in n.attr("axes"))
    if transformation == "tf_crop_and_resize":
        options["roi"] = n.array(1).reshape(-1).tolist()
    if n.has(3) and n.shape(3) != (0,):
        sizes = n.dims(3)
        _require_room(n, sizes)
        if all(isinstance(d, int) for d in sizes):
            return _resize(x, sizes=sizes, **options)
        return _resize_to(x, sizes, options)
    return _resize(x, scales=_scales(n, n.array(2), options.get("axes")), **options)


def _scales(n: NodeView, given: Any, axes: Sequence[int] | None = None) -> list[float]:
    """Factors of sizes, if the sizes have room."""
    scales = np.asarray(given, np.float64).reshape(-1)
    if not np.isfinite(scales).all() or (scales <= 0).any():
        raise FileError(f"{n.label}: scales {scales.tolist()}", code="F504")
    dims = n.shape(0) if axes is None else [n.shape(0)[a] for a in axes]
    _require_room(n, [int(d * s) for d, s in zip(dims, scales.tolist(), strict=False) if isinstance(d, int)])
    return list(scales.tolist())


def _require_room(n: NodeView, sizes: Sequence[Dim]) -> None:
    """Places and weights of a resized axis are computed on the host."""
    for size in sizes:
        n.room(size, 64)


def _resize_to(x: Value, sizes: tuple[Dim, ...], options: dict[str, Any]) -> Value:
    """Symbolic sizes: those that are a whole multiple of the axis are a scale."""
    axes = options.get("axes") or tuple(range(x.ndim))
    scales = []
    for axis, size in zip(axes, sizes, strict=True):
        ratio = 1 if size == x.shape[axis] else floordiv(size, x.shape[axis])
        if isinstance(ratio, SymExpr) or ratio * x.shape[axis] != size:
            raise NeedsData(f"how to resize {x.type} to {list(sizes)}")
        scales.append(float(ratio))
    return _resize(x, scales=scales, **options)


def _resize(x: Value, **options: Any) -> Value:
    """Whole multiples by nearest neighbour, which symbolic sizes allow; the general form otherwise."""
    scales = options.get("scales")
    wanted = options.get("coordinate_transformation_mode")
    repeats = (
        scales is not None
        and not options.get("axes")
        and options.get("mode") == "nearest"
        and all(float(s).is_integer() and s >= 1 for s in scales)
        and (wanted == "half_pixel" or (wanted == "asymmetric" and options.get("nearest_mode") == "floor"))
    )
    if not repeats or all(isinstance(d, int) for d in x.shape):
        return _as_given(ops.resize(x, **options), x, options)
    assert scales is not None
    for axis, scale in enumerate(scales):
        x = x if scale == 1 else ops.repeat(x, int(scale), axis)
    return x


def _as_given(made: Value, x: Value, options: dict[str, Any]) -> Value:
    """Pixels of the type that was given: whole ones lose their fractions, as in ONNX Runtime; those of a
    cubic or a smoothed resize are rounded, as in ONNX's own evaluator."""
    if made.dtype == x.dtype:
        return made
    is_rounded = options.get("mode") == "cubic" or options.get("antialias")
    return ops.cast(ops.round(made) if is_rounded else made, x.dtype)


@reads("GridSample")
def grid_sample(n: NodeView) -> Value:
    mode = {
        "bilinear": "bilinear",
        "linear": "bilinear",
        "nearest": "nearest",
        "bicubic": "bicubic",
        "cubic": "bicubic",
    }
    return ops.grid_sample(
        n[0], n[1], mode[n.choice("mode", "linear", list(mode))],
        n.choice("padding_mode", "zeros", ("zeros", "border", "reflection")),
        align_corners=bool(n.attr("align_corners", 0)),
    )  # fmt: skip


@reads("AffineGrid")
def affine_grid(n: NodeView) -> Value:
    return ops.affine_grid(n[0], n.dims(1), align_corners=bool(n.attr("align_corners", 0)))


@reads("RoiAlign")
def roi_align(n: NodeView) -> Value:
    n.room(max(int(n.attr(name, 0)) for name in ("output_height", "output_width", "sampling_ratio")), 64)
    default = "half_pixel" if n.version >= 16 else "output_half_pixel"
    return ops.roi_align(
        n[0], n[1], n[2], n.attr("output_height", 1), n.attr("output_width", 1), n.attr("sampling_ratio", 0),
        n.attr("spatial_scale", 1.0), n.choice("mode", "avg", ("avg", "max")),
        n.choice("coordinate_transformation_mode", default, ("half_pixel", "output_half_pixel")),
    )  # fmt: skip


@reads("MaxRoiPool")
def max_roi_pool(n: NodeView) -> Value:
    n.room(max(n.attr("pooled_shape")), 64)
    return ops.max_roi_pool(n[0], n[1], n.attr("pooled_shape"), n.attr("spatial_scale", 1.0))


# boxes


@reads("NonMaxSuppression")
def non_max_suppression(n: NodeView) -> np.ndarray:
    """The best boxes of each class of which none overlaps a better one too much: [selected, (batch, class, box)]."""
    boxes, scores = n.array(0).astype(np.float64), n.array(1)
    most = int(n.scalar(2, 0))
    overlap, least = float(n.scalar(3, 0.0)), n.scalar(4)
    if n.attr("center_point_box", 0):
        x, y, w, h = (boxes[..., i] for i in range(4))
        corners = np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    else:
        a, b = boxes[..., :2], boxes[..., 2:]
        corners = np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)
    found = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            kept = _suppress(corners[batch], scores[batch, kind], most, overlap, least)
            found += [(batch, kind, box) for box in kept]
    return np.array(found, np.int64).reshape(-1, 3)


def _suppress(corners: np.ndarray, scores: np.ndarray, most: int, overlap: float, least: float | None) -> list[int]:
    order = np.argsort(-scores, kind="stable")
    if least is not None:
        order = order[scores[order] > least]
    area = np.prod(corners[:, 2:] - corners[:, :2], -1)
    kept: list[int] = []
    while order.size and len(kept) < most:
        best, order = int(order[0]), order[1:]
        kept.append(best)
        low = np.maximum(corners[best, :2], corners[order, :2])
        high = np.minimum(corners[best, 2:], corners[order, 2:])
        common = np.prod(np.maximum(high - low, 0), -1)
        union = area[best] + area[order] - common
        share = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
        order = order[share <= overlap]
    return kept


# deformable convolution


@reads("DeformConv")
def deform_conv(n: NodeView) -> Value:
    """Convolution of [N, C, H, W] whose taps read at places moved by an offset, by bilinear interpolation."""
    x, w, offset, bias, mask = (n[i] for i in range(5))
    if x.ndim != 4:
        raise LowerError(f"{n.label}: only images with two axes are supported, got {x.type}", code="L500")
    batch, channels, height, width = x.shape
    out_channels, _, kh, kw = w.shape
    oh, ow = offset.shape[2:]
    groups, moved = n.attr("group", 1), n.attr("offset_group", 1)
    stride, dilation = n.attr("strides", (1, 1)), n.attr("dilations", (1, 1))
    pads = n.attr("pads", (0, 0, 0, 0))
    taps = kh * kw
    shift = ops.reshape(offset, (batch, moved, taps, 2, oh, ow))
    places = []
    for axis, count in ((0, oh), (1, ow)):
        base = np.arange(count) * stride[axis] - pads[axis]
        tap = np.arange(taps) // kw if axis == 0 else np.arange(taps) % kw
        along = (-1, 1) if axis == 0 else (1, -1)
        grid = (tap * dilation[axis]).reshape(-1, 1, 1) + base.reshape(1, *along)
        delta = ops.squeeze(ops.narrow(shift, 3, axis, 1), 3)
        places.append(delta + constant(np.broadcast_to(grid, (taps, oh, ow)).astype(np.float32)))
    sampled = _bilinear(
        ops.reshape(x, (batch, moved, channels // moved, height * width)), places[0], places[1], height, width
    )
    if mask is not None:
        sampled = sampled * ops.reshape(mask, (batch, moved, 1, taps, oh, ow))
    columns = ops.reshape(sampled, (batch, groups, channels // groups * taps, oh * ow))
    weights = ops.reshape(w, (1, groups, out_channels // groups, channels // groups * taps))
    out = ops.reshape(ops.matmul(weights, columns), (batch, out_channels, oh, ow))
    return out if bias is None else out + ops.reshape(bias, (out_channels, 1, 1))


def _bilinear(x: Value, y: Value, at: Value, height: int, width: int) -> Value:
    """x[B, G, C, H·W] at places [B, G, taps, oh, ow]; nothing outside counts."""
    batch, groups, channels, _ = x.shape
    places = y.shape[2:]
    total: Value | None = None
    for dy in (0, 1):
        for dx in (0, 1):
            row, column = ops.floor(y) + float(dy), ops.floor(at) + float(dx)
            weight = (1.0 - ops.abs(y - row)) * (1.0 - ops.abs(at - column))
            inside = ops.logical_and(
                ops.logical_and(row >= 0.0, row <= float(height - 1)),
                ops.logical_and(column >= 0.0, column <= float(width - 1)),
            )
            ids = ops.cast(
                ops.clip(row, 0.0, float(height - 1)) * float(width) + ops.clip(column, 0.0, float(width - 1)), "i64"
            )
            flat = ops.reshape(ids, (batch, groups, 1, -1))
            spread = ops.broadcast_to(flat, (batch, groups, channels, flat.shape[-1]))
            taken = ops.reshape(ops.gather_elements(x, spread, 3), (batch, groups, channels, *places))
            part = taken * ops.insert_axis(ops.where(inside, weight, ops.zeros_like(weight)), 2)
            total = part if total is None else total + part
    assert total is not None
    return total


# decoding


@reads("ImageDecoder")
def image_decoder(n: NodeView) -> np.ndarray:
    """An encoded image as [H, W, channels] bytes, read by Pillow where it is installed."""
    try:
        from PIL import Image
    except ImportError:
        raise LowerError(f"{n.label} needs Pillow: pip install pillow", code="L500") from None
    form = n.choice("pixel_format", "RGB", ("RGB", "BGR", "Grayscale"))
    try:
        image = Image.open(io.BytesIO(n.array(0).tobytes()))
        needed, given = 4 * image.width * image.height, n.array(0).nbytes
        require("max_unpacked_bytes", needed - 4 * given, f"{n.label}: {image.width} x {image.height} pixels")
        pixels = np.array(image.convert("L" if form == "Grayscale" else "RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise FileError(f"{n.label}: the image cannot be read: {error}", code="F504") from None
    if form == "Grayscale":
        return pixels[:, :, None]
    return pixels if form == "RGB" else np.ascontiguousarray(pixels[:, :, ::-1])
