"""Convolution functions: padding by name, bias, unbatched images, 1 to 3 dimensions, transposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.core import Dim, dim_max, floordiv
from strata.errors import OptionError, ShapeError
from strata.mir import Value, function
from strata.ops.base.frontend import Operand, promoted
from strata.ops.base.movement import reshape
from strata.ops.conv.conv import Conv, ConvBackwardInput, ConvBackwardWeight, swap_channels
from strata.ops.conv.windows import Pairs, Sizes, padding_pairs, per_axis, same_padding


def _with_bias(out: Value, bias: Operand | None, what: str) -> Value:
    if bias is None:
        return out
    value, b = promoted(out, bias)
    if b.shape != (out.shape[1],):
        raise ShapeError(f"{what}: the bias is {b.type}, the output has {out.shape[1]} channels", code="S308")
    return value + reshape(b, (b.shape[0], *(1,) * (out.ndim - 2)))


def _operands(x: Operand, weight: Operand, what: str, rank: int | None) -> tuple[Value, Value, bool]:
    """Promoted operands, and whether x has no batch axis."""
    a, w = promoted(x, weight)
    rank = w.ndim - 2 if rank is None else rank
    if rank < 1 or w.ndim != rank + 2 or a.ndim not in (rank + 1, rank + 2):
        raise ShapeError(
            f"{what}: needs x [N, C, {rank} sizes] and w of {rank + 2} axes, got {a.type} and {w.type}", code="S304"
        )
    single = a.ndim == rank + 1
    return (reshape(a, (1, *a.shape)) if single else a), w, single


@function()
def conv(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Dim = 1,
    *,
    rank: int | None = None,
    name: str = "conv",
) -> Value:
    """Cross-correlation of [N, C, *sizes] (or one image without N) with [O, C / groups, *kernel].

    `padding` is a number, one for each axis, (low, high) pairs, "valid", torch's "same" (stride 1 only), or ONNX's
    "same_upper" and "same_lower".
    """
    a, w, single = _operands(x, weight, name, rank)
    axes = w.ndim - 2
    strides, dilations = per_axis(stride, axes, f"{name}: stride"), per_axis(dilation, axes, f"{name}: dilation")
    pairs = _resolve_padding(padding, a.shape[2:], w.shape[2:], strides, dilations, name)
    out = _with_bias(Conv(strides, pairs, dilations, groups, (1,) * axes)(a, w), bias, name)
    return reshape(out, out.shape[1:]) if single else out


def _resolve_padding(
    padding: Any, sizes: Sequence[Dim], kernel: Sequence[Dim], stride: Sizes, dilation: Sizes, what: str
) -> Pairs:
    if not isinstance(padding, str):
        return padding_pairs(padding, len(stride), what)
    match padding.lower():
        case "valid":
            return ((0, 0),) * len(stride)
        case "same" if any(s != 1 for s in stride):
            raise OptionError(
                f'{what}: padding "same" needs stride 1, got {stride}', code="O242", fix='padding="same_upper"'
            )
        case "same" | "same_upper":
            return same_padding(sizes, kernel, stride, dilation)
        case "same_lower":
            return same_padding(sizes, kernel, stride, dilation, upper=False)
    raise OptionError(f"{what}: padding {padding!r} is not one of valid, same, same_upper, same_lower", code="O242")


def _conv_of_rank(rank: int) -> Any:
    name = f"conv{rank}d"

    def apply(
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: Dim = 1,
    ) -> Value:
        return conv(x, weight, bias, stride, padding, dilation, groups, rank=rank, name=name)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"Convolution over {rank} trailing axes, with torch's arguments; see conv."
    return function()(apply)


conv1d, conv2d, conv3d = _conv_of_rank(1), _conv_of_rank(2), _conv_of_rank(3)


@function()
def conv_transpose(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: Dim = 1,
    dilation: Any = 1,
    *,
    output_shape: Sequence[Dim] | None = None,
    rank: int | None = None,
    name: str = "conv_transpose",
) -> Value:
    """The transpose of convolution: [N, C, *sizes] with [C, O / groups, *kernel].

    Size: (size − 1) · stride − padding + dilation · (kernel − 1) + output_padding + 1. ONNX's `output_shape`, or
    padding "same_upper" and "same_lower" (size · stride), choose the padding instead.
    """
    a, w, single = _operands(x, weight, name, rank)
    axes = w.ndim - 2
    strides, dilations = per_axis(stride, axes, f"{name}: stride"), per_axis(dilation, axes, f"{name}: dilation")
    extra = per_axis(output_padding, axes, f"{name}: output_padding", 0)
    if a.shape[1] != w.shape[0]:
        raise ShapeError(f"{name}: {a.type} has {a.shape[1]} channels, {w.type} takes {w.shape[0]}", code="S305")
    for e, s, d in zip(extra, strides, dilations, strict=True):
        if not 0 <= e < max(s, d):
            raise OptionError(f"{name}: output_padding {e} must be less than stride {s} or dilation {d}", code="O243")
    reach = [(k - 1) * d for k, d in zip(w.shape[2:], dilations, strict=True)]
    full = [(n - 1) * s + r + 1 + e for n, s, r, e in zip(a.shape[2:], strides, reach, extra, strict=True)]
    cut = _transposed_padding(padding, output_shape, a.shape[2:], full, strides, name)
    pairs = tuple((r - low, r - high + e) for r, (low, high), e in zip(reach, cut, extra, strict=True))
    out = Conv((1,) * axes, pairs, dilations, groups, strides)(a, swap_channels(w, groups, first=name))
    out = _with_bias(out, bias, name)
    return reshape(out, out.shape[1:]) if single else out


def _transposed_padding(
    padding: Any,
    output_shape: Sequence[Dim] | None,
    sizes: Sequence[Dim],
    full: Sequence[Dim],
    stride: Sizes,
    what: str,
) -> Pairs:
    """What is cut off the full result; where that is too small, it grows at its end."""
    if output_shape is None:
        if not isinstance(padding, str) or padding.lower() == "valid":
            return padding_pairs(0 if isinstance(padding, str) else padding, len(stride), what)
        if padding.lower() not in ("same_upper", "same_lower"):
            raise OptionError(f"{what}: padding {padding!r} is not one of valid, same_upper, same_lower", code="O242")
        output_shape = [n * s for n, s in zip(sizes, stride, strict=True)]
    upper = isinstance(padding, str) and padding.lower() == "same_upper"
    pairs = []
    for have, want in zip(full, output_shape, strict=True):
        total = have - want
        start = dim_max(floordiv(total if upper else total + 1, 2), 0)
        pairs.append((start, total - start))
    return tuple(pairs)


def _conv_transpose_of_rank(rank: int) -> Any:
    name = f"conv_transpose{rank}d"

    def apply(
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: Dim = 1,
        dilation: Any = 1,
    ) -> Value:
        return conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation, rank=rank, name=name)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"Transposed convolution over {rank} trailing axes, with torch's arguments; see conv_transpose."
    return function()(apply)


conv_transpose1d, conv_transpose2d, conv_transpose3d = (_conv_transpose_of_rank(rank) for rank in (1, 2, 3))


def _fields(what: str, rank: int, stride: Any, padding: Any, dilation: Any) -> tuple[Sizes, Pairs, Sizes]:
    return per_axis(stride, rank, what), padding_pairs(padding, rank, what), per_axis(dilation, rank, what)


@function("conv2d_backward_input")
def conv_backward_input(
    dy: Operand,
    weight: Operand,
    shape: Sequence[Dim],
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Dim = 1,
) -> Value:
    """The gradient of a convolution in its input, which has this shape."""
    a, w = promoted(dy, weight)
    fields = _fields("conv_backward_input", w.ndim - 2, stride, padding, dilation)
    return ConvBackwardInput(*fields, groups, tuple(shape))(a, w)


@function("conv2d_backward_weight")
def conv_backward_weight(
    x: Operand, dy: Operand, shape: Sequence[Dim], stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Dim = 1
) -> Value:
    """The gradient of a convolution in its weight, which has this shape."""
    a, b = promoted(x, dy)
    fields = _fields("conv_backward_weight", a.ndim - 2, stride, padding, dilation)
    return ConvBackwardWeight(*fields, groups, tuple(shape))(a, b)
