"""Convolution and pooling."""

from __future__ import annotations

from typing import Any

from strata.core import Dim
from strata.errors import FileError, LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.elementwise import accumulate_in
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

FAR = 1 << 20  # no window reaches further
_AUTO = {"VALID": "valid", "SAME_UPPER": "same_upper", "SAME_LOWER": "same_lower"}


def window_padding(n: NodeView, rank: int) -> Any:
    """(low, high) pairs, or the name of a rule that chooses them."""
    auto = n.choice("auto_pad", "NOTSET", ("NOTSET", *_AUTO))
    if auto != "NOTSET":
        return _AUTO[auto]
    pads = n.attr("pads", (0,) * (2 * rank))
    if len(pads) != 2 * rank or any(abs(p) > FAR for p in pads):
        raise FileError(f"{n.label}: pads {list(pads)} for {rank} axes", code="F504")
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


def _per_axis(n: NodeView, name: str, rank: int) -> tuple[int, ...]:
    found = n.attr(name) or (1,) * rank
    if len(found) != rank or not all(0 < v <= FAR for v in found):
        raise FileError(f"{n.label}: {name} {list(found)} for {rank} axes", code="F504")
    return tuple(found)


def conv_options(n: NodeView, rank: int) -> dict[str, Any]:
    """Static parameters of a convolution whose weights, the second input in floats, may say their sizes again."""
    said = n.attr("kernel_shape")
    if n.op_type in ("Conv", "ConvTranspose", "ConvInteger") and said is not None and len(said) == rank:
        held = n[1].shape[2:]
        if any(isinstance(d, int) and d != size for d, size in zip(held, said, strict=True)):
            raise FileError(f"{n.label}: kernel_shape is {list(said)}, its weights have {list(held)}", code="F504")
    return {
        "stride": _per_axis(n, "strides", rank),
        "padding": window_padding(n, rank),
        "dilation": _per_axis(n, "dilations", rank),
        "groups": n.attr("group", 1),
    }


@reads("Conv")
def conv(n: NodeView) -> Value:
    x, w = n[0], n[1]
    return ops.conv(x, w, n[2], **conv_options(n, w.ndim - 2))


@reads("ConvTranspose")
def conv_transpose(n: NodeView) -> Value:
    x, w = n[0], n[1]
    rank = w.ndim - 2
    options = conv_options(n, rank)
    extra = n.attr("output_padding") or (0,) * rank
    shape = n.attr("output_shape")
    if shape is not None and len(shape) == rank + 2:
        shape = shape[2:]
    if options["padding"] == "valid":
        options["padding"] = 0
    return ops.conv_transpose(x, w, n[2], output_padding=extra, output_shape=shape, **options)


@reads("CausalConvWithState")
def causal_conv_with_state(n: NodeView) -> Any:
    """A depth-wise convolution over [B, C, T] that looks back only, with the last inputs as its state.

    com.microsoft has it with channels last too, and with a window of the states after the last few tokens.
    """
    x, w, bias, past = n[0], n[1], n[2], n[3]
    is_last, window, shape = bool(n.attr("channels_last", 0)), int(n.attr("state_window", 0)), x.shape
    if n.attr("ndim", 1) != 1 or w.ndim != 3:
        raise LowerError(f"{n.label}: only one axis after the channels is supported", code="L500")
    if past is not None and window:
        past = ops.squeeze(ops.narrow(past, 0, window - 1, 1), 0)
    if is_last:
        x, past = (None if y is None else _sequence_last(y, w.shape[0]) for y in (x, past))
    reach = (w.shape[-1] - 1) * int(n.attr("dilation", 1))
    batch, channels, steps = x.shape
    before = past if past is not None else ops.zeros((batch, channels, reach), x.dtype)
    joined = ops.concat([ops.cast(before, x.dtype), x], 2)
    out = ops.conv(joined, w, bias, groups=channels, dilation=int(n.attr("dilation", 1)))
    if n.choice("activation", "none", ("none", "silu", "swish")) != "none":
        out = ops.silu(out)

    def shaped(y: Value) -> Value:
        return ops.reshape(ops.transpose(y, 0, 2, 1), (batch, y.shape[2], *shape[2:])) if is_last else y

    if not window:
        return shaped(out), shaped(ops.narrow(joined, 2, steps, reach))
    room = ops.concat([ops.zeros((batch, channels, window), x.dtype), joined], 2)
    states = [shaped(ops.narrow(room, 2, steps + j + 1, reach)) for j in range(window)]
    known = [ops.dim_size(steps) >= window - j for j in range(window)]  # a state of this call
    return shaped(out), ops.stack([ops.where(k, s, ops.zeros_like(s)) for k, s in zip(known, states, strict=True)], 0)


def _sequence_last(x: Value, channels: int) -> Value:
    """[B, T, ...] as [B, C, T]."""
    return ops.transpose(ops.reshape(x, (*x.shape[:2], channels)), 0, 2, 1)


# pooling


def pool_options(n: NodeView) -> dict[str, Any]:
    kernel = n.attr("kernel_shape")
    if kernel is None or not all(0 < k <= FAR for k in kernel):
        raise FileError(f"{n.label}: kernel_shape is {kernel}", code="F504")
    rank = len(kernel)
    return {
        "kernel_size": tuple(kernel),
        "stride": _per_axis(n, "strides", rank),
        "padding": window_padding(n, rank),
        "dilation": _per_axis(n, "dilations", rank),
        "ceil_mode": bool(n.attr("ceil_mode", 0)),
    }


@reads("MaxPool")
def max_pool(n: NodeView) -> Any:
    options = pool_options(n)
    if n.wants(1):
        return ops.max_pool_with_indices(n[0], storage_order=n.attr("storage_order", 0), **options)
    return ops.max_pool(n[0], **options)


@reads("AveragePool")
def average_pool(n: NodeView) -> Value:
    x = n[0]
    wide = accumulate_in(x)
    return ops.cast(
        ops.avg_pool(wide, count_include_pad=bool(n.attr("count_include_pad", 0)), **pool_options(n)), x.dtype
    )


@reads("LpPool")
def lp_pool(n: NodeView) -> Value:
    return ops.lp_pool(n[0], float(n.attr("p", 2)), **pool_options(n))


@reads("MaxUnpool")
def max_unpool(n: NodeView) -> Value:
    shape = n.ints(2) if n.has(2) else None
    return ops.onnx_max_unpool(
        n[0], n[1], shape, kernel_shape=n.attr("kernel_shape"), pads=n.attr("pads"), strides=n.attr("strides")
    )


@reads("GlobalAveragePool")
def global_average_pool(n: NodeView) -> Value:
    return ops.global_avg_pool(n[0])


@reads("GlobalMaxPool")
def global_max_pool(n: NodeView) -> Value:
    return ops.global_max_pool(n[0])


@reads("GlobalLpPool")
def global_lp_pool(n: NodeView) -> Value:
    return ops.global_lp_pool(n[0], n.attr("p", 2))


@reads("Col2Im")
def col2im(n: NodeView) -> Value:
    """[N, C · kernel, windows] → [N, C, *image], windows added up."""
    x, image, kernel = n[0], n.ints(1), n.ints(2)
    rank = len(image)
    count = 1
    for k in kernel:
        count *= k
    channels: Dim = x.shape[1] // count
    pads = n.attr("pads") or (0,) * (2 * rank)
    rows = ops.transpose(x, 0, 2, 1).reshape((x.shape[0] * x.shape[2], x.shape[1]))
    return ops.col2im(
        rows, image, channels, kernel, _per_axis(n, "strides", rank), tuple(zip(pads[:rank], pads[rank:], strict=True)),
        _per_axis(n, "dilations", rank),
    )  # fmt: skip
