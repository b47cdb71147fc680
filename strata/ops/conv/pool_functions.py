"""Pooling functions with torch's names and ONNX's options: fixed, adaptive and global windows, and unpooling.

Windows slide over the last axes; whatever comes before them (batch, channels, or nothing) is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, dim_min, dim_prod, floordiv, i64
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Value, constant, function
from strata.ops.base.creation import iota, ones, zeros
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import concat, moveaxis, narrow, reshape
from strata.ops.conv.pool import PoolBackward, PoolIndex, PoolMax, PoolMin, PoolProd, PoolSum
from strata.ops.conv.windows import Pairs, Sizes, extent_of, padding_pairs, per_axis, same_padding, window_count

Fields = tuple[Sizes, Sizes, Pairs, Sizes]


def pool_fields(
    x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, rank: int | None, what: str
) -> tuple[Fields, Pairs]:
    """Windows of a pool, with what `ceil_mode` adds to the padding, and the padding as it was given."""
    if rank is None:
        rank = len(kernel) if isinstance(kernel, (list, tuple, np.ndarray)) else x.ndim - 2
    if rank < 1 or x.ndim < rank:
        raise ShapeError(f"{what}: needs at least {max(rank, 1)} axes to pool over, got {x.type}", code="S301")
    if kernel is None:
        raise OptionError(f"{what}: needs the size of its kernel, got None", code="O241")
    kernels = per_axis(kernel, rank, f"{what}: kernel")
    strides = (
        kernels
        if stride is None or (isinstance(stride, (list, tuple)) and not stride)
        else per_axis(stride, rank, f"{what}: stride")
    )
    dilations = per_axis(dilation, rank, f"{what}: dilation")
    sizes = x.shape[x.ndim - rank :]
    given = _given_padding(padding, sizes, kernels, strides, dilations, what)
    if not ceil_mode:
        return (kernels, strides, given, dilations), given
    pairs = []
    for size, k, s, (low, high), d in zip(sizes, kernels, strides, given, dilations, strict=True):
        room = size + low + high - extent_of(k, d)
        # a window must start in the input or before it
        count = dim_min(floordiv(room + s - 1, s), floordiv(size + low - 1, s)) + 1
        pairs.append((low, (count - 1) * s + extent_of(k, d) - size - low))
    return (kernels, strides, tuple(pairs), dilations), given


def _given_padding(
    padding: Any, sizes: Sequence[Dim], kernel: Sizes, stride: Sizes, dilation: Sizes, what: str
) -> Pairs:
    if not isinstance(padding, str):
        return padding_pairs(padding, len(kernel), what)
    if padding.lower() == "valid":
        return ((0, 0),) * len(kernel)
    if padding.lower() not in ("same_upper", "same_lower"):
        raise OptionError(f"{what}: padding {padding!r} is not one of valid, same_upper, same_lower", code="O242")
    return same_padding(sizes, kernel, stride, dilation, upper=padding.lower() == "same_upper")


@function()
def max_pool(
    x: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    rank: int | None = None,
    name: str = "max_pool",
) -> Any:
    """The maximum of each window; with `return_indices` also where it is, counted row-major over the pooled axes."""
    value = as_value(x)
    fields, _ = pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, rank, name)
    out = PoolMax(*fields)(value)
    return (out, PoolIndex(*fields, "max")(value)) if return_indices else out


@function()
def max_pool_with_indices(
    x: Operand,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    storage_order: int = 0,
) -> tuple[Value, Value]:
    """ONNX's MaxPool: indices count through the whole tensor; storage order 1 counts the pooled axes column-major."""
    value = as_value(x)
    fields, _ = pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, None, "max_pool")
    out, places = PoolMax(*fields)(value), PoolIndex(*fields, "max")(value)
    rank = len(fields[0])
    lead, sizes = value.shape[: value.ndim - rank], value.shape[value.ndim - rank :]
    if storage_order:
        rest, columns = places, constant(0, i64)
        for axis in reversed(range(rank)):
            rest, digit = _divide(rest, sizes[axis])
            columns = columns + digit * _count(dim_prod(sizes[:axis]))
        places = columns
    planes = reshape(iota((dim_prod(lead),)), (*lead, *(1,) * rank))
    return out, places + planes * _count(dim_prod(sizes))


def _count(size: Dim) -> Value:
    return METHODS["dim_size"](size)


def _divide(x: Value, size: Dim) -> tuple[Value, Value]:
    """Quotient and remainder of non-negative integers."""
    quotient = METHODS["trunc_divide"](x, _count(size))
    return quotient, x - quotient * _count(size)


@function("max_pool2d_backward")
def max_pool_backward(
    x: Operand, dy: Operand, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1
) -> Value:
    """dy added to the first maximum of each window of x."""
    value, ct = as_value(x), as_value(dy)
    fields, _ = pool_fields(value, kernel_size, stride, padding, dilation, False, None, "max_pool_backward")
    return PoolBackward(*fields, "max")(value, ct)


@function()
def min_pool(
    x: Operand, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Value:
    """The minimum of each window."""
    value = as_value(x)
    return PoolMin(*pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, None, "min_pool")[0])(value)


@function()
def sum_pool(
    x: Operand, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Value:
    """The sum of each window."""
    value = as_value(x)
    return PoolSum(*pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, None, "sum_pool")[0])(value)


@function()
def prod_pool(
    x: Operand, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Value:
    """The product of each window."""
    value = as_value(x)
    return PoolProd(*pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, None, "prod_pool")[0])(value)


@function()
def avg_pool(
    x: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    dilation: Any = 1,
    *,
    rank: int | None = None,
    name: str = "avg_pool",
) -> Value:
    """The mean of each window; padding counts as zeros when `count_include_pad`, what `ceil_mode` adds never does."""
    given_value = to_inexact(as_value(x))
    value = METHODS["cast"](given_value, given_value.dtype.accumulator)  # the sum of a window may be too large for f16
    fields, given = pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, rank, name)
    total = PoolSum(*fields)(value)
    if divisor_override is not None:
        if divisor_override == 0:
            raise OptionError(f"{name}: divisor_override must not be 0", code="O244")
        return METHODS["cast"](total / constant(divisor_override, value.dtype), given_value.dtype)
    sizes = value.shape[value.ndim - len(fields[0]) :]
    counted = given if count_include_pad else ((0, 0),) * len(given)
    mean = total / METHODS["cast"](_cells(sizes, fields, counted), value.dtype)
    return METHODS["cast"](mean, given_value.dtype)


def _cells(sizes: Sequence[Dim], fields: Fields, counted: Pairs) -> Value:
    """How many cells of each window lie in the input or in the padding that counts."""
    kernel, stride, padding, dilation = fields
    result = constant(1.0, "f64")
    for axis, (size, (low, high)) in enumerate(zip(sizes, counted, strict=True)):
        left, right = padding[axis][0] - low, padding[axis][1] - high
        tail = (1,) * (len(sizes) - axis - 1)
        if left == 0 and right == 0:  # every cell counts
            result = result * float(kernel[axis])
            continue
        if isinstance(size, SymExpr):
            line = ones((size + low + high,), "f64")
            cells = PoolSum((kernel[axis],), (stride[axis],), ((left, right),), (dilation[axis],))(line)
        else:
            count: Any = window_count(size, kernel[axis], stride[axis], padding[axis], dilation[axis])
            first: Any = padding[axis][0]
            below: Any = -low
            above: Any = size + high
            start = np.arange(count) * stride[axis] - first
            ends = (np.clip(-((start - end) // dilation[axis]), 0, kernel[axis]) for end in (above, below))
            cells = constant(np.subtract(*ends).astype(np.float64))  # taps before the end, less those before the start
        result = result * reshape(cells, (*cells.shape, *tail))
    return result


@function()
def lp_pool(
    x: Operand,
    norm_type: float,
    kernel_size: Any,
    stride: Any = None,
    ceil_mode: bool = False,
    padding: Any = 0,
    dilation: Any = 1,
    *,
    rank: int | None = None,
    name: str = "lp_pool",
) -> Value:
    """(Σ |x|ᵖ)^(1/p) of each window; its derivative is 0 where a window is all zeros."""
    given = to_inexact(as_value(x))
    value = METHODS["cast"](given, given.dtype.accumulator)  # a square may be too large for f16
    fields, _ = pool_fields(value, kernel_size, stride, padding, dilation, ceil_mode, rank, name)
    return METHODS["cast"](_lp_norm(value, float(norm_type), PoolSum(*fields), name), given.dtype)


def _lp_norm(x: Value, p: float, total: Any, what: str) -> Value:
    if p < 1:
        raise OptionError(f"{what}: the norm must be at least 1, got {p}", code="O245")
    size = METHODS["abs"](x)
    if p == 1:
        return total(size)
    powers = total(x * x if p == 2 else size**p)
    zero, one = constant(0, x.dtype), constant(1, x.dtype)
    empty = METHODS["equal"](powers, zero)
    safe = METHODS["where"](empty, one, powers)
    return METHODS["where"](empty, zero, METHODS["sqrt"](safe) if p == 2 else safe ** (1 / p))


def _of_rank(base: Any, rank: int, signature: str) -> Any:
    name = f"{base.__name__}{rank}d"

    def apply(x: Operand, *args: Any, **options: Any) -> Any:
        return base(x, *args, rank=rank, name=name, **options)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"{base.__name__} over the last {rank} axes: {name}{signature}."
    return function()(apply)


_MAX = "(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)"
_AVG = "(x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None)"
_LP = "(x, norm_type, kernel_size, stride=None, ceil_mode=False)"
max_pool1d, max_pool2d, max_pool3d = (_of_rank(max_pool, rank, _MAX) for rank in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (_of_rank(avg_pool, rank, _AVG) for rank in (1, 2, 3))
lp_pool1d, lp_pool2d, lp_pool3d = (_of_rank(lp_pool, rank, _LP) for rank in (1, 2, 3))


# ------------------------------------------------------------------------------------------------------------ unpooling


@function("max_unpool1d", "max_unpool2d", "max_unpool3d")
def max_unpool(
    x: Operand,
    indices: Operand,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Sequence[Dim] | None = None,
) -> Value:
    """Elements put back where `indices` of max_pool say they came from, zeros elsewhere."""
    value, places = as_value(x), as_value(indices)
    rank = len(kernel_size) if isinstance(kernel_size, (list, tuple, np.ndarray)) else value.ndim - 2
    kernel = per_axis(kernel_size, rank, "max_unpool: kernel")
    strides = kernel if stride is None else per_axis(stride, rank, "max_unpool: stride")
    pairs = padding_pairs(padding, rank, "max_unpool")
    lead = value.shape[: value.ndim - rank]
    if output_size is None:
        sizes: tuple[Dim, ...] = tuple(
            (n - 1) * s + k - low - high
            for n, s, k, (low, high) in zip(value.shape[value.ndim - rank :], strides, kernel, pairs, strict=True)
        )
    else:
        sizes = tuple(output_size)[-rank:]
    if places.shape != value.shape:
        raise ShapeError(f"max_unpool: values are {value.type}, indices {places.type}", code="S310")
    flat = (*lead, dim_prod(value.shape[value.ndim - rank :]))
    empty = zeros((*lead, dim_prod(sizes)), value.dtype)
    filled = METHODS["put_along_axis"](empty, reshape(places, flat), reshape(value, flat), axis=-1)
    return reshape(filled, (*lead, *sizes))


@function()
def onnx_max_unpool(
    x: Operand,
    indices: Operand,
    output_shape: Sequence[int] | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Value:
    """ONNX's MaxUnpool: indices count through the whole tensor; a larger output shape adds zeros at the ends."""
    value, places = as_value(x), METHODS["cast"](as_value(indices), i64)
    rank = len(kernel_shape)
    ends = tuple(pads or (0,) * (2 * rank))
    steps = tuple(strides or (1,) * rank)
    sizes = [
        (n - 1) * s + k - low - high
        for n, s, k, low, high in zip(value.shape[2:], steps, kernel_shape, ends[:rank], ends[rank:], strict=True)
    ]
    _, inner = _divide(places, dim_prod(sizes))
    out = max_unpool(value, inner, tuple(kernel_shape), steps, output_size=sizes)
    if output_shape is None:
        return out
    return METHODS["pad_constant"](out, [(0, int(n) - d) for n, d in zip(output_shape, out.shape, strict=True)])


# --------------------------------------------------------------------------------------------------------- global pools


def _spatial(x: Value, what: str) -> tuple[int, ...]:
    if x.ndim < 3:
        raise ShapeError(f"{what}: needs [N, C, *sizes], got {x.type}", code="S301")
    return tuple(range(2, x.ndim))


@function()
def global_avg_pool(x: Operand) -> Value:
    """The mean of each channel's image, sizes kept as 1."""
    value = as_value(x)
    return METHODS["mean"](value, _spatial(value, "global_avg_pool"), keepdims=True)


@function()
def global_max_pool(x: Operand) -> Value:
    """The maximum of each channel's image, sizes kept as 1; ties share the derivative."""
    value = as_value(x)
    return METHODS["max"](value, _spatial(value, "global_max_pool"), keepdims=True)


@function()
def global_lp_pool(x: Operand, p: float = 2) -> Value:
    """The p-norm of each channel's image, sizes kept as 1."""
    given = to_inexact(as_value(x))
    value = METHODS["cast"](given, given.dtype.accumulator)
    axes = _spatial(value, "global_lp_pool")
    norm = _lp_norm(value, float(p), lambda v: METHODS["sum"](v, axes, keepdims=True), "global_lp_pool")
    return METHODS["cast"](norm, given.dtype)


# ------------------------------------------------------------------------------------------------------- adaptive pools


def _adaptive_sizes(x: Value, output_size: Any, rank: int | None, what: str) -> list[tuple[int, int, int]]:
    """(axis, size, output size) of each pooled axis; None keeps a size."""
    if rank is None:
        rank = x.ndim - 2 if output_size is None or isinstance(output_size, (int, np.integer)) else len(output_size)
    wanted = output_size if isinstance(output_size, (list, tuple)) else (output_size,) * rank
    if len(wanted) != rank or x.ndim < rank:
        raise OptionError(f"{what}: output size {output_size} for {rank} axes of {x.type}", code="O241")
    rows = []
    for axis, want in enumerate(wanted, x.ndim - rank):
        size = x.shape[axis].__index__()
        target = size if want is None else int(want)
        if target < 1 or size < 1:
            raise OptionError(f"{what}: cannot pool axis {axis} of {x.type} to {target}", code="O246")
        rows.append((axis, size, target))
    return rows


def adaptive_bounds(size: int, count: int) -> list[tuple[int, int]]:
    """The windows ⌊i·n/m⌋ up to ⌈(i+1)·n/m⌉."""
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


@function("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(x: Operand, output_size: Any) -> Value:
    """Means of windows that divide each of the last axes into the given number of parts."""
    value = to_inexact(as_value(x))
    for axis, size, count in _adaptive_sizes(value, output_size, None, "adaptive_avg_pool"):
        if size % count == 0:
            split = reshape(value, (*value.shape[:axis], count, size // count, *value.shape[axis + 1 :]))
            value = METHODS["mean"](split, axis + 1)
            continue
        weights = np.zeros((size, count))
        for i, (start, stop) in enumerate(adaptive_bounds(size, count)):
            weights[start:stop, i] = 1 / (stop - start)
        moved = METHODS["matmul"](moveaxis(value, axis, -1), constant(weights, value.dtype))
        value = moveaxis(moved, -1, axis)
    return value


@function("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Operand, output_size: Any, return_indices: bool = False) -> Any:
    """Maxima of windows that divide each of the last axes into the given number of parts."""
    value = as_value(x)
    rows = _adaptive_sizes(value, output_size, None, "adaptive_max_pool")
    rank = len(rows)
    out = value
    for axis, size, count in reversed(rows):  # the last axis first: the winner is then the first in row-major order
        kept = out.ndim - axis
        parts = []
        for start, stop in adaptive_bounds(size, count):
            kernel = (stop - start, *(1,) * (kept - 1))
            window = (kernel, kernel, ((0, 0),) * kept, (1,) * kept)
            parts.append(PoolMax(*window)(narrow(out, axis, start, stop - start)))
        out = concat(parts, axis)
    if not return_indices:
        return out
    sizes = [size for _, size, _ in rows]
    pieces = np.empty([count for _, _, count in rows], object)
    for at in np.ndindex(*pieces.shape):
        cut, place = value, np.zeros((), np.int64)
        bounds = [adaptive_bounds(size, count)[i] for i, (_, size, count) in zip(at, rows, strict=True)]
        for (axis, _, _), (start, stop) in zip(rows, bounds, strict=True):
            cut = narrow(cut, axis, start, stop - start)
        kernel = tuple(stop - start for start, stop in bounds)
        inner = PoolIndex(kernel, kernel, ((0, 0),) * rank, (1,) * rank, "max")(cut)
        for i, (start, stop) in enumerate(bounds):
            step = int(np.prod([b - a for a, b in bounds[i + 1 :]]))
            _, digit = _divide(_divide(inner, step)[0], stop - start)
            place = place + (digit + start) * int(np.prod(sizes[i + 1 :]))
        pieces[at] = place
    return out, _assemble(pieces, value.ndim - rank)


def _assemble(pieces: np.ndarray, lead: int) -> Value:
    """Blocks of size 1 put together along the axes after `lead`."""
    if pieces.ndim == 0:
        return pieces.item()
    return concat([_assemble(np.asarray(part, object), lead + 1) if pieces.ndim > 1 else part for part in pieces], lead)
