"""Matrix products, convolutions, pools, norms, softmax, resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata import ops
from strata.core import TensorType, dim_prod, i64
from strata.mir import METHODS, Value, constant
from strata.torch.aten.backward import derivative
from strata.torch.aten.promotion import floating, value
from strata.torch.table import Unsupported, aten

# ------------------------------------------------------------------------------------------------------------ products


@aten("mm", "bmm", "mv", "dot", "matmul")
def matmul(out: TensorType, x: Value, y: Value) -> Value:
    return _product(x, y)


def _product(x: Value, y: Value) -> Value:
    if x.dtype.is_int and x.dtype.bits < 64:  # whole numbers wrap around in their own type
        return value(ops.matmul(value(x, i64), value(y, i64)), x.dtype)
    return ops.matmul(x, y)


@aten("addmm", "baddbmm", "addmv", "addbmm")
def addmm(out: TensorType, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    product = _product(x, y)
    if x.ndim == 3 and len(out.shape) == 2:
        product = ops.sum(product, axis=0)
    if alpha != 1:
        product = product * value(alpha, product.dtype)
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * value(beta, bias.dtype))


@aten("linear")
def linear(out: TensorType, x: Value, weight: Value, bias: Value | None = None) -> Value:
    y = ops.matmul(x, ops.swapaxes(weight, 0, 1) if weight.ndim == 2 else weight)
    return y if bias is None else y + bias


# ------------------------------------------------------------------------------------------------------- convolutions


def _conv(
    x: Value, weight: Value, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int
) -> Value:
    rank = weight.ndim - 2

    def spread(n: Any) -> tuple[Any, ...]:
        return tuple(n) * (rank if len(n) == 1 else 1)

    stride, padding, dilation = spread(stride), spread(padding), spread(dilation)
    if not transposed:
        return ops.conv(x, weight, None, stride, padding, dilation, groups, rank=rank)
    return ops.conv_transpose(x, weight, None, stride, padding, spread(extra), groups, dilation, rank=rank)


@aten("convolution")
def convolution(
    out: TensorType, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Value:  # fmt: skip
    if x.ndim < weight.ndim:  # without a batch
        x = ops.reshape(x, (1, *x.shape))
    y = _conv(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if bias is not None:
        y = y + ops.reshape(bias, (bias.shape[0], *(1,) * (weight.ndim - 2)))
    return ops.reshape(y, out.shape) if y.ndim != len(out.shape) else y


@aten("convolution_backward")
def convolution_backward(
    out: Any, ct: Value, x: Value, weight: Value, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    y = _conv(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    leaves = [v for v, is_wanted in ((x, wanted[0]), (weight, wanted[1])) if is_wanted]
    found = iter(derivative([y], [ct], leaves) if leaves else [])
    dx = next(found) if wanted[0] else None
    dw = next(found) if wanted[1] else None
    db = ops.sum(ct, axis=(0, *range(2, ct.ndim))) if wanted[2] else None
    return dx, dw, db


# --------------------------------------------------------------------------------------------------------------- pools


def _pool(out: Any, x: Value, rank: int, apply: Any) -> Any:
    """Pools of tensors with or without a batch."""
    if x.ndim == rank + 2:
        return apply(x)
    made = apply(ops.reshape(x, (1, *x.shape)))
    if isinstance(made, tuple):
        return tuple(ops.reshape(y, kind.shape) for y, kind in zip(made, out, strict=True))
    return ops.reshape(made, out.shape)


def _max_pool(rank: int) -> Any:
    def rule(
        out: Any, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        return _pool(out, x, rank, lambda v: ops.max_pool(
            v, tuple(kernel), _each(stride, rank) or None, _each(padding, rank), _each(dilation, rank), ceil_mode, True,
            rank=rank,
        ))  # fmt: skip

    rule.__module__ = __name__
    return rule


def _each(n: Any, rank: int) -> Any:
    if isinstance(n, int):
        return (n,) * rank
    return tuple(n) * (rank if len(n) == 1 else 1)


aten("max_pool2d_with_indices")(_max_pool(2))
aten("max_pool3d_with_indices")(_max_pool(3))


@aten("max_pool2d_with_indices_backward")
def max_pool_backward(
    out: TensorType, ct: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Value,
) -> Value:  # fmt: skip
    """Each cotangent goes to the place of its maximum."""
    lead = x.shape[:-2]
    flat = ops.full((*lead, x.shape[-2] * x.shape[-1]), 0, ct.dtype)
    ids, cts = (ops.reshape(v, (*lead, v.shape[-2] * v.shape[-1])) for v in (indices, ct))
    return ops.reshape(ops.scatter_elements(flat, ids, cts, len(lead), reduction="add"), out.shape)


def _avg(
    x: Value, rank: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, counts: bool, divisor: Any
) -> Value:
    return ops.avg_pool(
        x, _each(kernel, rank), _each(stride, rank) or None, _each(padding, rank), ceil_mode, counts, divisor, rank=rank
    )


def _avg_pool(rank: int) -> Any:
    def rule(
        out: TensorType, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        return _pool(out, x, rank, lambda v: _avg(
            v, rank, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
        ))  # fmt: skip

    rule.__module__ = __name__
    return rule


for _rank in (1, 2, 3):
    aten(f"avg_pool{_rank}d")(_avg_pool(_rank))


@aten("avg_pool2d_backward")
def avg_pool_backward(
    out: TensorType, ct: Value, x: Value, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, counts: bool,
    divisor: Any,
) -> Value:  # fmt: skip
    return _pool_backward(ct, x, 2, lambda v: _avg(v, 2, kernel, stride, padding, ceil_mode, counts, divisor))


def _pool_backward(ct: Value, x: Value, rank: int, apply: Any) -> Value:
    if x.ndim == rank + 2:
        return derivative([apply(x)], [ct], [x])[0]
    wide = ops.reshape(x, (1, *x.shape))
    return ops.reshape(derivative([apply(wide)], [ops.reshape(ct, (1, *ct.shape))], [wide])[0], x.shape)


def _adaptive(rank: int) -> Any:
    def rule(out: TensorType, x: Value, size: Any) -> Any:
        return _pool(out, x, rank, lambda v: ops.adaptive_avg_pool(v, _each(size, rank)))

    rule.__module__ = __name__
    return rule


aten("adaptive_avg_pool1d")(_adaptive(1))
aten("_adaptive_avg_pool2d")(_adaptive(2))
aten("_adaptive_avg_pool3d")(_adaptive(3))


@aten("_adaptive_avg_pool2d_backward")
def adaptive_backward(out: TensorType, ct: Value, x: Value) -> Value:
    size = ct.shape[-2:]
    return _pool_backward(ct, x, 2, lambda v: ops.adaptive_avg_pool(v, size))


@aten("adaptive_max_pool2d")
def adaptive_max(out: Any, x: Value, size: Any) -> Any:
    return _pool(out, x, 2, lambda v: ops.adaptive_max_pool(v, _each(size, 2), True))


@aten("col2im")
def col2im(out: TensorType, x: Value, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    if x.ndim == 2:
        folded = ops.fold(ops.reshape(x, (1, *x.shape)), tuple(size), kernel, dilation, padding, stride)
        return ops.reshape(folded, out.shape)
    return ops.fold(x, tuple(size), tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))


@aten("im2col")
def im2col(out: TensorType, x: Value, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    if x.ndim == 3:
        made = ops.unfold(ops.reshape(x, (1, *x.shape)), kernel, dilation, padding, stride)
        return ops.reshape(made, out.shape)
    return ops.unfold(x, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))


# --------------------------------------------------------------------------------------------------------------- norms


@aten("native_layer_norm")
def layer_norm(out: Any, x: Value, shape: Any, weight: Value | None, bias: Value | None, eps: float) -> Any:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = floating(x)
    centre = ops.mean(wide, axis=axes, keepdims=True)
    spread = ops.rsqrt(ops.var(wide, axis=axes, keepdims=True) + value(eps, wide.dtype))
    return _affine(ops.layer_norm(x, axis=axes, eps=eps), x, weight, bias, axes, eps), centre, spread


def _affine(
    plain: Value, x: Value, weight: Value | None, bias: Value | None, axes: tuple[int, ...], eps: float
) -> Value:
    if len(axes) == 1 and weight is not None and bias is not None and weight.dtype is bias.dtype is x.dtype:
        return ops.layer_norm(x, weight, bias, axis=axes, eps=eps)
    y = plain if weight is None else plain * value(weight, plain.dtype)
    return y if bias is None else y + value(bias, y.dtype)


@aten("native_group_norm")
def group_norm(
    out: Any, x: Value, weight: Value | None, bias: Value | None, n: Any, c: Any, rest: Any, groups: int, eps: float
) -> Any:
    y, centre, spread = _grouped(x, weight, bias, n, groups, eps)
    return ops.reshape(y, x.shape), centre, spread


def _grouped(x: Value, weight: Value | None, bias: Value | None, n: Any, groups: int, eps: float) -> Any:
    wide = ops.reshape(floating(x), (n, groups, -1))
    centre = ops.mean(wide, axis=2)
    spread = ops.rsqrt(ops.var(wide, axis=2) + value(eps, wide.dtype))
    if x.ndim > 2 and (weight is None) == (bias is None):
        return ops.group_norm(x, groups, weight, bias, eps=eps), centre, spread
    y = ops.reshape((wide - ops.expand_dims(centre, 2)) * ops.expand_dims(spread, 2), x.shape)
    shape = (x.shape[1], *(1,) * (x.ndim - 2))
    y = y if weight is None else y * ops.reshape(value(weight, y.dtype), shape)
    return (y if bias is None else y + ops.reshape(value(bias, y.dtype), shape)), centre, spread


@aten("native_group_norm_backward")
def group_norm_backward(
    out: Any, ct: Value, x: Value, mean: Value, rstd: Value, weight: Value | None, n: Any, c: Any, rest: Any,
    groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """By the statistics that the forward pass kept."""
    wide = floating(x)
    cells = (n, groups, c // groups, rest)
    normal = (ops.reshape(wide, cells) - ops.reshape(mean, (n, groups, 1, 1))) * ops.reshape(rstd, (n, groups, 1, 1))
    dy = ops.reshape(value(ct, wide.dtype), cells)
    scale = None if weight is None else ops.reshape(value(weight, wide.dtype), (1, groups, cells[2], 1))
    dn = dy if scale is None else dy * scale
    dx = (dn - _cell_mean(dn) - normal * _cell_mean(dn * normal)) * ops.reshape(rstd, (n, groups, 1, 1))
    dw = ops.reshape(ops.sum(dy * normal, axis=(0, 3)), (c,))
    db = ops.reshape(ops.sum(dy, axis=(0, 3)), (c,))
    return (
        ops.reshape(dx, x.shape) if wanted[0] else None,
        dw if wanted[1] else None,
        db if wanted[2] else None,
    )


def _cell_mean(x: Value) -> Value:
    return ops.mean(x, axis=(2, 3), keepdims=True)


def _channels(x: Value) -> tuple[Any, ...]:
    return (x.shape[1], *(1,) * (x.ndim - 2))


def _normalised(x: Value, mean: Value, rstd: Value, weight: Value | None, bias: Value | None) -> Value:
    """(x - mean)·rstd·weight + bias with one factor and one term for each channel."""
    scale = rstd if weight is None else rstd * value(weight, rstd.dtype)
    shift = -mean * scale
    if bias is not None:
        shift = shift + value(bias, shift.dtype)
    return floating(x) * ops.reshape(scale, _channels(x)) + ops.reshape(shift, _channels(x))


@aten("_native_batch_norm_legit_no_training")
def batch_norm_inference(
    out: Any, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value, momentum: float, eps: float
) -> Any:
    wide = floating(x).dtype
    rstd = ops.rsqrt(value(var, wide) + value(eps, wide))
    y = _normalised(x, value(mean, wide), rstd, weight, bias)
    if out[1].shape == (0,):  # torch's kernel of the host says nothing of what it normalised with
        none = ops.full((0,), 0, wide)
        return y, none, none
    return y, mean, rstd


def _training_norm(x: Value, weight: Value | None, bias: Value | None, eps: float) -> tuple[Value, Value, Value, Value]:
    wide = floating(x)
    axes = (0, *range(2, x.ndim))
    mean, var = ops.mean(wide, axis=axes), ops.var(wide, axis=axes)
    rstd = ops.rsqrt(var + value(eps, wide.dtype))
    centred = (wide - ops.reshape(mean, _channels(x))) * ops.reshape(rstd, _channels(x))
    y = centred if weight is None else centred * ops.reshape(value(weight, wide.dtype), _channels(x))
    return (y if bias is None else y + ops.reshape(value(bias, wide.dtype), _channels(x))), mean, rstd, var


@aten(
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit",
    "native_batch_norm",
)
def batch_norm(out: Any, x: Value, weight: Value | None, bias: Value | None, *args: Any) -> Any:
    """The output, what it was normalised with, and the running statistics where they are kept."""
    if len(args) == 3:  # no statistics are kept
        y, mean, rstd, _ = _training_norm(x, weight, bias, args[2])
        return y, mean, rstd
    running_mean, running_var, training, momentum, eps = args
    if not training:
        y = batch_norm_inference(out, x, weight, bias, running_mean, running_var, momentum, eps)
        return (*y, running_mean, running_var)[: len(out)]
    y, mean, rstd, var = _training_norm(x, weight, bias, eps)
    if len(out) == 3:
        if running_mean is not None:
            raise Unsupported("statistics that are changed in place")
        return y, mean, rstd
    count = dim_prod((x.shape[0], *x.shape[2:]))
    n = value(count, var.dtype)
    unbiased = var * ops.divide(n, n - value(1, var.dtype))
    keep = value(1 - momentum, running_mean.dtype)
    moved = [
        old * keep + value(new * value(momentum, new.dtype), old.dtype)
        for old, new in ((running_mean, mean), (running_var, unbiased))
    ]
    return (y, mean, rstd, *moved)


@aten("_fused_rms_norm", "rms_norm")
def rms_norm(out: Any, x: Value, shape: Any, weight: Value | None = None, eps: float | None = None) -> Any:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = floating(x)
    small = value(eps if eps is not None else _epsilon(x), wide.dtype)
    rstd = ops.rsqrt(ops.mean(wide * wide, axis=axes, keepdims=True) + small)
    y = wide * rstd
    y = y if weight is None else y * value(weight, wide.dtype)
    return (y, rstd) if isinstance(out, tuple) else y


def _epsilon(x: Value) -> float:
    return {16: 2.0**-7 if x.dtype.name == "bf16" else 2.0**-10, 32: 2.0**-23, 64: 2.0**-52}[x.dtype.bits]


# ------------------------------------------------------------------------------------------------------------- softmax


@aten("_softmax", "softmax.int")
def softmax(out: TensorType, x: Value, dim: int, *args: Any, **options: Any) -> Value:
    x = value(x, out.dtype)
    return ops.softmax(x, axis=dim % x.ndim) if x.ndim else ops.full((), 1, out.dtype)


@aten("_safe_softmax")
def safe_softmax(out: TensorType, x: Value, dim: int, dtype: Any = None) -> Value:
    """Zero where a whole row is minus infinity."""
    x = value(x, out.dtype)
    if not x.ndim:
        return ops.full((), 1, out.dtype)
    hidden = ops.all(ops.equal(x, value(-math.inf, x.dtype)), axis=dim % x.ndim, keepdims=True)
    return ops.where(hidden, value(0, x.dtype), ops.softmax(x, axis=dim % x.ndim))


@aten("_log_softmax", "log_softmax.int")
def log_softmax(out: TensorType, x: Value, dim: int, *args: Any, **options: Any) -> Value:
    x = value(x, out.dtype)
    return ops.log_softmax(x, axis=dim % x.ndim) if x.ndim else ops.full((), 0, out.dtype)


# ------------------------------------------------------------------------------------------------------------ resizing


def _resized(mode: str) -> Any:
    def rule(out: TensorType, x: Value, size: Any, *args: Any) -> Value:
        flags = [a for a in args if isinstance(a, bool)]
        scales = next((a for a in args if a is not None and not isinstance(a, bool)), None)
        sizes = out.shape[2:]
        if any(not isinstance(n, int) for n in (*sizes, *x.shape[2:])):
            raise Unsupported("resizing to sizes that are symbols")
        if scales is not None and len(scales):
            return ops.upsample(x, scale_factor=tuple(scales), mode=mode, align_corners=flags[0] if flags else None)
        return ops.upsample(x, size=sizes, mode=mode, align_corners=flags[0] if flags else None)

    rule.__module__ = __name__
    return rule


for _name, _mode in {
    "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "nearest-exact", "_upsample_nearest_exact2d": "nearest-exact",
    "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_trilinear3d": "trilinear",
    "upsample_bicubic2d": "bicubic",
}.items():  # fmt: skip
    aten(f"{_name}.vec")(_resized(_mode))


@aten("grid_sampler_2d")
def grid_sample(out: TensorType, x: Value, grid: Value, mode: int, padding: int, align_corners: bool) -> Value:
    return ops.grid_sample(
        x, grid, ("bilinear", "nearest", "bicubic")[mode], ("zeros", "border", "reflection")[padding], align_corners
    )


@aten("grid_sampler_2d_backward")
def grid_sample_backward(
    out: Any, ct: Value, x: Value, grid: Value, mode: int, padding: int, align_corners: bool, wanted: Sequence[bool]
) -> Any:
    y = ops.grid_sample(
        x, grid, ("bilinear", "nearest", "bicubic")[mode], ("zeros", "border", "reflection")[padding], align_corners
    )
    return tuple(derivative([y], [ct], [x, grid]))


@aten("pixel_shuffle")
def pixel_shuffle(out: TensorType, x: Value, factor: int) -> Value:
    return ops.reshape(ops.pixel_shuffle(ops.reshape(x, (-1, *x.shape[-3:])), factor), out.shape)


@aten("_pdist_forward")
def pdist(out: TensorType, x: Value, p: float = 2.0) -> Value:
    """Distances between each row and those behind it."""
    first, second = np.triu_indices(x.type.static_shape[0], 1)
    rows = [ops.gather(x, constant(at.astype(np.int64)), 0) for at in (first, second)]
    return ops.reshape(cdist(out, *(ops.expand_dims(r, 1) for r in rows), p), out.shape)


@aten("_cdist_forward")
def cdist(out: TensorType, x: Value, y: Value, p: float, mode: Any = None) -> Value:
    """Distances between all pairs of rows."""
    apart = ops.abs(ops.expand_dims(x, x.ndim - 1) - ops.expand_dims(y, y.ndim - 2))
    if p == 2:
        return ops.sqrt(ops.sum(apart * apart, axis=-1))
    if p == 1:
        return ops.sum(apart, axis=-1)
    if p == math.inf:
        return ops.max(apart, axis=-1)
    if p == 0:
        return ops.sum(value(ops.not_equal(apart, value(0, apart.dtype)), apart.dtype), axis=-1)
    return ops.power(ops.sum(ops.power(apart, value(p, apart.dtype)), axis=-1), value(1 / p, apart.dtype))


# ----------------------------------------------------------------------------------------------------------------- FFT


@aten("_fft_r2c")
def fft_real(out: TensorType, x: Value, dims: Sequence[int], normalization: int, onesided: bool) -> Value:
    axes = [d % x.ndim for d in dims]
    if not onesided:
        return fft_complex(out, value(x, out.dtype), dims, normalization, True)
    y = METHODS["rfft"](x, None, axes[-1], "backward")
    for axis in axes[:-1]:
        y = METHODS["fft"](y, None, axis, "backward")
    return y * value(_fft_scale(x, axes, normalization), y.dtype)


def _fft_scale(x: Any, axes: Sequence[int], normalization: int, shape: Any = None) -> float:
    n = dim_prod([(shape or x.shape)[a] for a in axes])
    if not isinstance(n, int):
        raise Unsupported("a Fourier transform of a size that is a symbol")
    return {0: 1.0, 1: 1 / math.sqrt(n), 2: 1 / n}[normalization]


@aten("_fft_c2c")
def fft_complex(out: TensorType, x: Value, dims: Sequence[int], normalization: int, forward: bool) -> Value:
    axes = [d % x.ndim for d in dims]
    y = x
    for axis in axes:
        y = METHODS["fft" if forward else "ifft"](y, None, axis, "backward" if forward else "forward")
    return y * value(_fft_scale(x, axes, normalization), y.dtype)


@aten("_fft_c2r")
def fft_to_real(out: TensorType, x: Value, dims: Sequence[int], normalization: int, last: Any) -> Value:
    axes = [d % x.ndim for d in dims]
    y = x
    for axis in axes[:-1]:
        y = METHODS["ifft"](y, None, axis, "forward")
    y = METHODS["irfft"](y, last, axes[-1], "forward")
    return y * value(_fft_scale(x, axes, normalization, out.shape), y.dtype)
