"""Resizing along axes: each output element is a weighted sum of a few input elements, by ONNX's and torch's rules.

A resize is separable, so it is one op per axis; where its taps lie and what they weigh follow from static sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, TensorType, f16, f32, f64, floordiv, normalize_axis
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Sample, UnaryOp, Value, constant, function, op
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import Slice, broadcast_to, concat, narrow, reshape, stack, transpose

MODES = ("nearest", "linear", "cubic")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
TRANSFORMS = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
)  # fmt: skip
POLICIES = ("stretch", "not_larger", "not_smaller")

MOST_PHASES = 8  # outputs that are computed side by side and put between each other
MOST_STEP = 4  # elements from one output of a phase to the next
MOST_TERMS = 16
FEWEST_PERIODS = 4

Table = tuple[np.ndarray, np.ndarray]


@op("resize_axis")
class ResizeAxis(UnaryOp):
    """One axis resampled to `size` elements.

    `scale` is output elements per input element as the user gave it, 0 for size / input size. `region` is the part of
    the axis that tf_crop_and_resize samples; what lies outside the axis is then `fill`.
    """

    axis: int
    size: int
    scale: float
    mode: str
    transform: str
    rounding: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool
    region: tuple[float, float]
    fill: float

    dtypes = "float"

    def infer(self, x: TensorType) -> TensorType:
        self.require(0 <= self.axis < x.ndim, f"axis {self.axis} is not an axis of {x}", code="S103")
        for given, known, what in (
            (self.mode, MODES, "mode"),
            (self.transform, TRANSFORMS, "coordinate transform"),
            (self.rounding, ROUNDINGS, "nearest rounding"),
        ):
            self.require(
                given in known, f"{what} {given!r} is not one of {', '.join(known)}", code="O247", error=OptionError
            )
        size = x.shape[self.axis]
        self.require(not isinstance(size, SymExpr), f"axis {self.axis} of {x} must have a known size", code="S311")
        self.require(size != 0 and self.size >= 1, f"cannot resize axis {self.axis} of {x} to {self.size}", code="S312")
        self.require_dtype(
            x.dtype.is_inexact or self.mode == "nearest", f"{self.mode} needs floats, got {x}", code="D104"
        )
        return x.with_shape([*x.shape[: self.axis], self.size, *x.shape[self.axis + 1 :]])

    def coordinates(self, size: int) -> np.ndarray:
        """Where each output element lies on the input axis."""
        at = np.arange(self.size, dtype=np.float64)
        scale = self.scale or self.size / size

        def scaled(x: np.ndarray) -> np.ndarray:  # a product before a quotient is exact where the answer is
            return x / self.scale if self.scale else x * size / self.size

        match self.transform:
            case "half_pixel":
                return scaled(at + 0.5) - 0.5
            case "half_pixel_symmetric":
                offset = size / 2 * (1 - self.size / (scale * size))
                return offset + scaled(at + 0.5) - 0.5
            case "pytorch_half_pixel":
                return scaled(at + 0.5) - 0.5 if self.size > 1 else np.zeros(1)
            case "align_corners":
                width = scale * size if self.scale else self.size  # ONNX does not round it down when scales are given
                return at * (size - 1) / (width - 1) if width != 1 else np.zeros(self.size)
            case "asymmetric":
                return scaled(at)
        start, end = self.region
        if self.size > 1:
            return start * (size - 1) + at * (end - start) * (size - 1) / (self.size - 1)
        return np.full(1, 0.5 * (start + end) * (size - 1))

    def table(self, size: int) -> Table:
        """Input elements and their weights, [output size, taps] both; elements outside are the nearest inside."""
        at = self.coordinates(size)
        if self.mode == "nearest":
            rounded = {
                "round_prefer_floor": np.ceil(at - 0.5), "round_prefer_ceil": np.floor(at + 0.5), "floor": np.floor(at),
                "ceil": np.ceil(at),
            }[self.rounding]  # fmt: skip
            taps, weights = rounded[:, None], np.ones((self.size, 1))
        else:
            shrink = min(self.scale or self.size / size, 1.0) if self.antialias else 1.0
            reach = math.ceil((1 if self.mode == "linear" else 2) / shrink)
            taps = np.floor(at)[:, None] + np.arange(1 - reach, reach + 1)
            distance = np.abs(taps - at[:, None]) * shrink
            weights = np.maximum(1 - distance, 0) if self.mode == "linear" else cubic_weight(distance, self.cubic_a)
            if self.exclude_outside:
                weights = np.where((taps < 0) | (taps >= size), 0, weights)
            if self.exclude_outside or self.antialias:
                weights = weights / weights.sum(1, keepdims=True)
        if self.transform == "tf_crop_and_resize":
            weights = np.where(self.outside(size)[:, None], 0, weights)
        return np.clip(taps, 0, size - 1).astype(np.int64), weights

    def outside(self, size: int) -> np.ndarray:
        """Which output elements lie outside the axis, and are filled; only a cropping resize has any."""
        at = self.coordinates(size)
        return ((at < 0) | (at > size - 1)) & (self.transform == "tf_crop_and_resize")

    def numpy(self, x: np.ndarray) -> np.ndarray:
        size = x.shape[self.axis]
        taps, weights = self.table(size)
        last = np.moveaxis(x, self.axis, -1)
        if self.mode == "nearest":
            out = last[..., taps[:, 0]]
        else:
            dense = np.zeros((size, self.size))
            np.add.at(dense, (taps, np.arange(self.size)[:, None]), weights)
            out = last @ dense.astype(x.dtype)
        return np.moveaxis(np.where(self.outside(size), np.asarray(self.fill, x.dtype), out), -1, self.axis)

    def decompose(self, x: Value) -> Value:
        size = x.shape[self.axis].__index__()
        if self.mode != "nearest" and x.dtype.accumulator is not x.dtype:  # halves are weighed in f32
            return METHODS["cast"](self(METHODS["cast"](x, x.dtype.accumulator)), x.dtype)
        out = apply_taps(x, self.axis, self.table(size), exact=self.mode == "nearest")
        outside = self.outside(size)
        if not outside.any():
            return out
        mask = constant(outside.reshape(-1, *(1,) * (x.ndim - self.axis - 1)))
        return METHODS["where"](mask, constant(self.fill, x.dtype), out)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return ResizeAxis(**(self.static_fields() | {"fill": 0.0}))(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        size = x.shape[self.axis].__index__()
        return apply_taps(ct, self.axis, transposed_table(self.table(size), size))

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return ResizeAxis(**(self.static_fields() | {"axis": self.axis + 1}))(x)

    @classmethod
    def samples(cls) -> list[Sample]:
        plain: dict[str, Any] = {
            "axis": 1, "size": 7, "scale": 0.0, "mode": "linear", "transform": "half_pixel", "rounding": "floor",
            "cubic_a": -0.75, "exclude_outside": False, "antialias": False, "region": (0.0, 1.0), "fill": 0.0,
        }  # fmt: skip
        cases: list[tuple[TensorType, dict[str, Any]]] = [
            (f32[2, 4, 3], {}), (f32[2, 4], {"mode": "cubic", "size": 9, "exclude_outside": True}),
            (f32[2, 9], {"mode": "cubic", "size": 4, "antialias": True}), (f32[2, 9], {"size": 4, "antialias": True}),
            (f32[1, 5], {"mode": "nearest", "transform": "asymmetric"}), (f32[0, 4], {}),
            (f32[2, 1], {"mode": "cubic"}),
            (f32[3, 4], {"transform": "tf_crop_and_resize", "region": (-0.3, 1.2), "fill": 5.0, "mode": "cubic"}),
            (f64[2, 6], {"transform": "align_corners", "size": 1}), (f16[2, 3], {"scale": 2.5, "size": 7}),
            (f32[2, 6], {"transform": "half_pixel_symmetric", "scale": 0.9, "size": 5}),
        ]  # fmt: skip
        return [Sample(x, grad=x.dtype is not f16, **(plain | fields)) for x, fields in cases]


def cubic_weight(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel."""
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def transposed_table(table: Table, size: int) -> Table:
    """The table of the transposed sum: for each input element the outputs that it weighs on, padded with weight 0."""
    taps, weights = table
    rows: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for out in range(taps.shape[0]):
        for tap, weight in zip(taps[out], weights[out], strict=True):
            if weight:
                rows[tap].append((out, weight))
    width = max(1, *(len(row) for row in rows))
    padded = [row + [(0, 0.0)] * (width - len(row)) for row in rows]
    grid = np.array(padded, np.float64).reshape(size, width, 2)
    return grid[..., 0].astype(np.int64), grid[..., 1]


def apply_taps(x: Value, axis: int, table: Table, *, exact: bool = False) -> Value:
    """Weighted sums of gathered elements along an axis; `exact` says that every sum is one element of weight 1."""
    taps, weights = table
    regular = _regular(table, x.shape[axis].__index__())
    if regular is not None:
        return _by_phases(x, axis, *regular)
    if exact and taps.shape[1] == 1 and (weights == 1).all():
        return METHODS["gather"](x, constant(taps[:, 0]), axis)
    seen = METHODS["gather"](x, constant(taps), axis)
    factors = constant(weights.reshape(*weights.shape, *(1,) * (x.ndim - axis - 1)), x.dtype)
    return METHODS["reduce_sum"](seen * factors, (axis + 1,))


def _regular(table: Table, size: int) -> tuple[int, Table] | None:
    """(step, table of one period) where every few outputs the taps move on by a step and weigh the same."""
    taps, weights = table
    periods = math.gcd(len(taps), size)
    phases, step = len(taps) // periods, size // periods
    few = phases <= MOST_PHASES and step <= MOST_STEP and phases * taps.shape[1] <= MOST_TERMS
    if periods < FEWEST_PERIODS or not few:
        return None
    middle = periods // 2
    first = taps.reshape(periods, phases, -1)[middle] - middle * step
    moved = np.clip(first + step * np.arange(periods)[:, None, None], 0, size - 1)
    factors = weights.reshape(periods, phases, -1)
    same = np.allclose(factors, factors[middle], rtol=0, atol=1e-9) and (moved.reshape(taps.shape) == taps).all()
    return (step, (first, factors[middle])) if same else None


def _by_phases(x: Value, axis: int, step: int, period: Table) -> Value:
    """Outputs of every phase from slices of x with its ends repeated, put between each other."""
    first, weights = period
    size = x.shape[axis].__index__()
    periods = size // step
    before = max(0, -int(first.min()))
    after = max(0, step * (periods - 1) + int(first.max()) - (size - 1))
    ends = [
        broadcast_to(narrow(x, axis, at, 1), (*x.shape[:axis], count, *x.shape[axis + 1 :]))
        for at, count in ((0, before), (size - 1, after))
    ]
    wide = concat([part for part in (ends[0], x, ends[1]) if part.shape[axis] != 0], axis)
    seen: dict[int, Value] = {}
    phases = []
    for taps, factors in zip(first, weights, strict=True):
        total: Value | None = None
        for tap, factor in zip(taps, factors, strict=True):
            if factor == 0 and total is None and tap is not taps[-1]:
                continue
            if tap not in seen:
                seen[int(tap)] = every(wide, axis, before + int(tap), periods, step)
            term = seen[int(tap)]
            term = term if factor == 1 else term * constant(factor, x.dtype)
            total = term if total is None else total + term
        assert total is not None, "a phase has a tap"
        phases.append(total)
    if len(phases) == 1:
        return phases[0]
    return reshape(stack(phases, axis + 1), (*x.shape[:axis], periods * len(phases), *x.shape[axis + 1 :]))


def every(x: Value, axis: int, start: int, count: int, step: int) -> Value:
    """`count` elements along an axis, `step` apart."""
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[axis], stops[axis], steps[axis] = start, start + (count - 1) * step + 1, step
    return Slice(tuple(starts), tuple(stops), tuple(steps))(x)


@op("resize_nearest_2x")
class ResizeNearest2x(UnaryOp):
    """[..., H, W] → [..., 2H, 2W]: every element four times."""

    dtypes = "any"

    def infer(self, x: TensorType) -> TensorType:
        self.require(x.ndim >= 2, f"needs two axes to double, got {x}", code="S301")
        return x.with_shape([*x.shape[:-2], x.shape[-2] * 2, x.shape[-1] * 2])

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x.repeat(2, -1).repeat(2, -2)

    def decompose(self, x: Value) -> Value:
        return repeat_axis(repeat_axis(x, x.ndim - 1, 2), x.ndim - 2, 2)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 2, 2, 3]), Sample(f32[1, 1]), Sample(f32[0, 2, 2]), Sample(f64[2, 0])]


def repeat_axis(x: Value, axis: int, times: int) -> Value:
    """Every element of an axis repeated in place."""
    shape = list(x.shape)
    spread = broadcast_to(
        reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :])), (*shape[: axis + 1], times, *shape[axis + 1 :])
    )
    return reshape(spread, (*shape[:axis], shape[axis] * times, *shape[axis + 1 :]))


# ------------------------------------------------------------------------------------------------------------ functions


def _resample(
    x: Value,
    axis: int,
    size: int,
    *,
    scale: float = 0.0,
    mode: str = "linear",
    transform: str = "half_pixel",
    rounding: str = "round_prefer_floor",
    cubic_a: float = -0.75,
    exclude_outside: bool = False,
    antialias: bool = False,
    region: tuple[float, float] = (0.0, 1.0),
    fill: float = 0.0,
) -> Value:
    if size == x.shape[axis] and scale in (0.0, 1.0) and transform != "tf_crop_and_resize":
        return x
    if size == x.shape[axis] == 0 and mode == "nearest":
        return x  # whole multiples of nothing, as where the size is a symbol
    return ResizeAxis(
        axis, int(size), float(scale), mode, transform, rounding, float(cubic_a), exclude_outside, antialias, region,
        float(fill),
    )(x)  # fmt: skip


@function()
def resize(
    x: Operand,
    scales: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
    *,
    axes: Sequence[int] | None = None,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: bool = False,
    extrapolation_value: float = 0.0,
    antialias: bool = False,
    roi: Sequence[float] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
) -> Value:
    """ONNX's Resize: scales or sizes for all axes, or for `axes`; roi is starts then ends, as fractions of the axes."""
    value = as_value(x)
    value = to_inexact(value) if mode != "nearest" else value
    where = [normalize_axis(a, value.ndim, "resize") for a in (range(value.ndim) if axes is None else axes)]
    if (scales is None) == (sizes is None):
        raise OptionError("resize: needs scales or sizes, and not both", code="O248")
    given = scales if scales is not None else sizes
    assert given is not None
    if len(given) != len(where):
        raise OptionError(f"resize: {len(given)} scales or sizes for {len(where)} axes", code="O241")
    if keep_aspect_ratio_policy not in POLICIES:
        raise OptionError(
            f"resize: policy {keep_aspect_ratio_policy!r} is not one of {', '.join(POLICIES)}", code="O247"
        )
    plan = _plan_of_sizes(value, where, sizes, keep_aspect_ratio_policy) if sizes is not None else None
    for i, axis in enumerate(where):
        if plan is None:
            scale = float(given[i])
            repeat = int(scale) if scale == int(scale) else 0
            if isinstance(value.shape[axis], SymExpr):
                value = _symbolic_nearest(value, axis, repeat, mode, coordinate_transformation_mode, nearest_mode)
                continue
            size = math.floor(value.shape[axis].__index__() * scale)
        else:
            size, scale = plan[i]
        region = (float(roi[i]), float(roi[i + len(where)])) if roi is not None and len(roi) else (0.0, 1.0)
        value = _resample(
            value, axis, size, scale=scale, mode=mode, transform=coordinate_transformation_mode, rounding=nearest_mode,
            cubic_a=cubic_coeff_a, exclude_outside=exclude_outside, antialias=antialias, region=region,
            fill=extrapolation_value,
        )  # fmt: skip
    return value


def _plan_of_sizes(x: Value, axes: Sequence[int], sizes: Sequence[int], policy: str) -> list[tuple[int, float]]:
    """The size and scale of each axis (scale 0: follow the size)."""
    if policy == "stretch":
        return [(int(size), 0.0) for size in sizes]
    have = [x.shape[a].__index__() for a in axes]
    ratios = [size / n for size, n in zip(sizes, have, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [(math.floor(n * scale + 0.5), scale) for n in have]


def _symbolic_nearest(x: Value, axis: int, times: int, mode: str, transform: str, rounding: str) -> Value:
    """Whole multiples repeat elements in place, whatever the size; anything else needs to know it."""
    if times == 1:
        return x
    repeats = (transform == "asymmetric" and rounding == "floor") or (
        transform in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel") and rounding.startswith("round")
    )
    if mode != "nearest" or times < 1 or not repeats:
        raise ShapeError(f"resize: axis {axis} of {x.type} must have a known size", code="S311")
    return repeat_axis(x, axis, times)


_TORCH_MODES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2, "nearest": 0, "nearest-exact": 0, "area": 0}


@function("upsample")
def interpolate(
    x: Operand,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Value:
    """torch's interpolate over the axes after [N, C]."""
    value = as_value(x)
    rank = value.ndim - 2
    if mode not in _TORCH_MODES or _TORCH_MODES[mode] not in (0, rank):
        raise OptionError(f"interpolate: mode {mode!r} does not apply to {value.type}", code="O247")
    if (size is None) == (scale_factor is None):
        raise OptionError("interpolate: needs size or scale_factor, and not both", code="O248")
    if antialias and mode not in ("bilinear", "bicubic"):
        raise OptionError(f"interpolate: antialias needs bilinear or bicubic, got {mode!r}", code="O247")
    value = value if mode.startswith("nearest") else to_inexact(value)
    given = size if size is not None else scale_factor
    wanted: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * rank
    if len(wanted) != rank:
        raise OptionError(f"interpolate: {len(wanted)} sizes or scales for {rank} axes", code="O241")
    if mode == "area":
        if size is None:
            wanted = [math.floor(n.__index__() * s) for n, s in zip(value.shape[2:], wanted, strict=True)]
        return METHODS["adaptive_avg_pool"](value, tuple(wanted))
    for axis, want in enumerate(wanted, 2):
        have = value.shape[axis]
        if isinstance(have, SymExpr):
            times = int(want) if size is None and want == int(want) else 0
            value = _symbolic_nearest(value, axis, times, mode.removesuffix("-exact"), "asymmetric", "floor")
            continue
        target = int(want) if size is not None else math.floor(have * want)
        given_scale = None if size is not None or recompute_scale_factor else float(want)
        value = _resample(
            value, axis, target, scale=_torch_scale(have, target, given_scale, mode, rank, align_corners, antialias),
            **_torch_rule(mode, align_corners, antialias),
        )  # fmt: skip
    return value


def _torch_scale(
    have: int, target: int, given: float | None, mode: str, rank: int, align_corners: bool | None, antialias: bool
) -> float:
    """By how much an axis grows, 0 where its sizes say so: torch takes a given factor where something changes."""
    if align_corners:  # with antialias, torch takes the step between corners and keeps the centres of elements
        return 0.0 if not antialias else (target - 1) / (have - 1) if min(have, target) > 1 else math.inf
    kept = target == have and (mode in ("linear", "bilinear", "trilinear") or antialias)
    doubled = mode == "nearest" and rank == 2 and target in (have, 2 * have)
    return 0.0 if given is None or kept or doubled else given


def _torch_rule(mode: str, align_corners: bool | None, antialias: bool) -> dict[str, Any]:
    if mode == "nearest":
        return {"mode": "nearest", "transform": "asymmetric", "rounding": "floor"}
    if mode == "nearest-exact":
        return {"mode": "nearest", "transform": "half_pixel", "rounding": "round_prefer_ceil"}
    return {
        "mode": "cubic" if mode == "bicubic" else "linear",
        "transform": "align_corners" if align_corners and not antialias else "half_pixel",
        "cubic_a": -0.5 if antialias else -0.75,
        "exclude_outside": antialias,
        "antialias": antialias,
    }


@function()
def resize_nearest_2x(x: Operand) -> Value:
    """The last two axes doubled by repeating every element."""
    return ResizeNearest2x()(as_value(x))


@function()
def depth_to_space(x: Operand, blocksize: int, mode: str = "DCR") -> Value:
    """[N, C·b·b, H, W] → [N, C, H·b, W·b]; channels are (b, b, C) in mode DCR and (C, b, b) in mode CRD."""
    value, b = as_value(x), blocksize
    if value.ndim != 4 or (isinstance(value.shape[1], int) and value.shape[1] % (b * b)):
        raise ShapeError(f"depth_to_space: {value.type} does not divide into blocks of {b} by {b}", code="S313")
    if mode not in ("DCR", "CRD"):
        raise OptionError(f"depth_to_space: mode {mode!r} is neither DCR nor CRD", code="O247")
    n, c, h, w = value.shape
    depth = floordiv(c, b * b)
    parts = reshape(value, (n, b, b, depth, h, w) if mode == "DCR" else (n, depth, b, b, h, w))
    moved = transpose(parts, [0, 3, 4, 1, 5, 2] if mode == "DCR" else [0, 1, 4, 2, 5, 3])
    return reshape(moved, (n, depth, h * b, w * b))


@function()
def space_to_depth(x: Operand, blocksize: int, mode: str = "DCR") -> Value:
    """[N, C, H·b, W·b] → [N, C·b·b, H, W]; channels are (b, b, C) in mode DCR and (C, b, b) in mode CRD."""
    value, b = as_value(x), blocksize
    if mode not in ("DCR", "CRD"):
        raise OptionError(f"space_to_depth: mode {mode!r} is neither DCR nor CRD", code="O247")
    n, c, h, w = _blocks(value, b, "space_to_depth")
    moved = transpose(reshape(value, (n, c, h, b, w, b)), [0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4])
    return reshape(moved, (n, c * b * b, h, w))


def _blocks(x: Value, b: int, what: str) -> tuple[Dim, ...]:
    if x.ndim != 4 or any(isinstance(d, int) and d % b for d in x.shape[2:]):
        raise ShapeError(f"{what}: {x.type} does not divide into blocks of {b} by {b}", code="S313")
    return x.shape[0], x.shape[1], floordiv(x.shape[2], b), floordiv(x.shape[3], b)


@function()
def pixel_shuffle(x: Operand, upscale_factor: int) -> Value:
    """[N, C·r·r, H, W] → [N, C, H·r, W·r]."""
    return depth_to_space(x, upscale_factor, "CRD")


@function()
def pixel_unshuffle(x: Operand, downscale_factor: int) -> Value:
    """[N, C, H·r, W·r] → [N, C·r·r, H, W]: the inverse of pixel_shuffle."""
    return space_to_depth(x, downscale_factor, "CRD")
