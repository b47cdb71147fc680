"""Quantisation: linear, by tensor, axis or block, and quantised matmuls and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata.core import Dim, as_dtype
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import in_graphs, largest, numpy_dtype
from strata.io.onnx.handlers.casting import convert_array
from strata.io.onnx.handlers.conv import conv_options
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

_RANGES = {
    "uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767), "uint4": (0, 15),
    "int4": (-8, 7), "uint2": (0, 3), "int2": (-2, 1),
}  # fmt: skip


def wide(n: NodeView, i: int, dtype: str = "f32") -> Value:
    """An input in a type that arithmetic has; types of the host are converted there."""
    if in_graphs(n.np_dtype(i)):
        return ops.cast(n[i], dtype)
    array = convert_array(n.array(i), np.dtype(np.float32))
    return ops.cast(n.tracer.value(Host(array, n.is_fixed(i))), dtype)


def numbers(n: NodeView, i: int, zero: int, shaped: Callable[[Value], Value] = lambda z: z) -> Value:
    """Codes less their zero point, input `zero`, as i32. Zero points that are known to be 0 are left out.

    Fixed u8 codes become i8 codes, with zero points 128 less, which most often are 0 then.
    """
    if not n.is_fixed(i) or n.np_dtype(i) != np.uint8 or not n.is_fixed(zero):
        codes = wide(n, i, "i32")
        known = n.optional_array(zero) if n.is_fixed(zero) else None
        is_zero = known is not None and not known.any()
        return codes - shaped(wide(n, zero, "i32")) if n.has(zero) and not is_zero else codes
    moved = (n.array(i).astype(np.int16) - 128).astype(np.int8)
    zeros = np.asarray(n.array(zero) if n.has(zero) else 0, np.int32) - 128
    codes = ops.cast(n.tracer.value(Host(moved, True, n.proto.input[i])), "i32")
    return codes - shaped(n.tracer.value(Host(zeros, True))) if zeros.any() else codes


def _spread(scale: Value, shape: tuple[Dim, ...], axis: int, block: int) -> Value:
    """A scale or zero point in a shape that broadcasts to the tensor: one, one a slice, or one a block."""
    if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1 and len(shape) != 1):
        return ops.reshape(scale, ())
    axis %= len(shape)
    if not block:
        if scale.ndim == len(shape) and scale.ndim > 1:
            return scale
        return ops.reshape(scale, tuple(-1 if i == axis else 1 for i in range(len(shape))))
    repeated = ops.repeat(scale, block, axis)
    return ops.narrow(repeated, axis, 0, shape[axis])


def to_codes(x: Value, zero: Value | None, target: np.dtype[Any], n: NodeView, *, saturate: bool = True) -> Any:
    """x, already divided by its scale, as codes: rounded, moved by the zero point, saturated."""
    if target.name in _RANGES:
        x = ops.round(x)
        x = x if zero is None else x + zero
        return ops.cast(x, as_dtype(target)) if in_graphs(target) else _stored(_within(x, target), target, n)
    x = x if zero is None else x + zero
    if saturate and target.name.startswith("float"):
        most = largest(target)
        x = ops.where(ops.isnan(x), x, ops.clip(x, -most, most))
    return _stored(x, target, n)


def _within(x: Value, target: np.dtype[Any]) -> Value:
    low, high = _RANGES[target.name]
    clipped: Value = ops.clip(x, float(low), float(high))
    return clipped


def _stored(x: Value, target: np.dtype[Any], n: NodeView) -> Any:
    if in_graphs(target):
        kind = as_dtype(target)
        return ops.cast(ops.cast(x, "i32"), kind) if kind.is_int else ops.cast(x, kind)
    return convert_array(n.tracer.array(x), target)


@reads("QuantizeLinear")
def quantize_linear(n: NodeView) -> Any:
    x = wide(n, 0)
    axis, block = n.attr("axis", 1), n.attr("block_size", 0)
    target = n.np_dtype(2) if n.has(2) else numpy_dtype(n.attr("output_dtype", 0) or 2)
    scale = _spread(wide(n, 1), x.shape, axis, block)
    zero = _spread(wide(n, 2), x.shape, axis, block) if n.has(2) else None
    return to_codes(x / scale, zero, target, n, saturate=bool(n.attr("saturate", 1)))


@reads("DequantizeLinear")
def dequantize_linear(n: NodeView) -> Value:
    axis, block = n.attr("axis", 1), n.attr("block_size", 0)
    dtype = numpy_dtype(n.attr("output_dtype", 0)) if n.attr("output_dtype", 0) else n.np_dtype(1)
    if n.np_dtype(0).kind in "iu" or n.np_dtype(0).name in ("int4", "uint4"):
        x = numbers(n, 0, 2, lambda z: _spread(z, n.shape(0), axis, block))
    else:
        x = wide(n, 0)
        x = x - _spread(wide(n, 2), x.shape, axis, block) if n.has(2) else x
    scale = _spread(wide(n, 1), x.shape, axis, block)
    kind = as_dtype(dtype if in_graphs(dtype) else np.dtype(np.float32))
    return ops.cast(ops.cast(x, "f32") * scale, kind)


@reads("DynamicQuantizeLinear")
def dynamic_quantize_linear(n: NodeView) -> tuple[Value, ...]:
    return dynamic_codes(n[0])


def dynamic_codes(x: Value) -> tuple[Value, Value, Value]:
    """u8 codes of x, their scale and zero point, all values of x and 0 in their range; where x is 0, the scale is 1."""
    if 0 in x.shape:
        low = high = ops.zeros((), x.dtype)
    else:
        low, high = ops.minimum(ops.min(x), 0.0), ops.maximum(ops.max(x), 0.0)
    scale = (high - low) / 255.0
    scale = ops.where(ops.equal(scale, 0.0), ops.ones_like(scale), scale)
    zero = ops.clip(ops.round(ops.negative(low) / scale), 0.0, 255.0)
    return ops.cast(ops.round(x / scale) + zero, "u8"), scale, ops.cast(zero, "u8")


def _is_code(n: NodeView, i: int) -> bool:
    return n.np_dtype(i).kind in "iu"


@reads("QLinearMatMul")
def qlinear_matmul(n: NodeView) -> Any:
    """Codes times codes: the exact integer matmul, scaled once."""
    if _is_code(n, 0) and _is_code(n, 3):
        a, b = numbers(n, 0, 2, _rows), numbers(n, 3, 5, _columns)
    else:
        a, b = wide(n, 0) - _rows(wide(n, 2)), wide(n, 3) - _columns(wide(n, 5))
    product = ops.cast(ops.matmul(a, b), "f32")
    scale = _rows(wide(n, 1)) * _columns(wide(n, 4)) / wide(n, 6)
    return to_codes(product * scale, wide(n, 7), n.np_dtype(7), n)


def _rows(x: Value) -> Value:
    return ops.insert_axis(x, 1) if x.ndim == 1 and x.shape[0] != 1 else x


def _columns(x: Value) -> Value:
    return ops.insert_axis(x, 0) if x.ndim == 1 and x.shape[0] != 1 else x


@reads("QLinearConv")
@reads("QLinearConv", domain="com.microsoft")
def qlinear_conv(n: NodeView) -> Any:
    """Codes convolved: the exact integer sums, scaled once. com.microsoft has x with channels last, too."""
    rank = n.ndim(3) - 2
    is_last = bool(n.attr("channels_last", 0))
    x = numbers(n, 0, 2, lambda z: z.reshape(()))
    x = ops.moveaxis(x, -1, 1) if is_last else x
    w = numbers(n, 3, 5, lambda z: _by_channel(z, rank + 2, 0))
    total = ops.conv(x, w, ops.cast(n[8], "i32") if n.has(8) else None, **conv_options(n, rank))
    scale = wide(n, 1).reshape(()) * _by_channel(wide(n, 4), w.ndim, 1) / wide(n, 6).reshape(())
    made = ops.cast(total, "f32") * scale
    made = ops.moveaxis(made, 1, -1) if is_last else made
    return to_codes(made, wide(n, 7).reshape(()), n.np_dtype(7), n)


@reads("MatMulInteger")
def matmul_integer(n: NodeView) -> Value:
    a = numbers(n, 0, 2, lambda z: ops.insert_axis(z, -1) if z.ndim and z.shape[0] != 1 else z)
    return ops.matmul(a, numbers(n, 1, 3))


@reads("ConvInteger")
def conv_integer(n: NodeView) -> Value:
    rank = n.ndim(1)
    options = conv_options(n, rank - 2)
    if not n.is_fixed(2) and _are_bytes(n, 1, 3) and not isinstance(options["padding"], str):
        return _conv_of_codes(n, options)
    x = numbers(n, 0, 2)
    w = numbers(n, 1, 3, lambda z: ops.reshape(z, (-1, *(1,) * (rank - 1))) if z.ndim else z)
    if n.is_fixed(2):
        return ops.conv(x, w, None, **options)
    # no kernel of bytes: f64 holds the same sums exactly
    return ops.cast(ops.conv(ops.cast(x, "f64"), ops.cast(w, "f64"), None, **options), "i32")


def _are_bytes(n: NodeView, i: int, zero: int) -> bool:
    return n.is_fixed(i) and n.is_fixed(zero) and n.np_dtype(i) in (np.uint8, np.int8)


def _conv_of_codes(n: NodeView, options: dict[str, Any]) -> Value:
    """Σ (x - a)·(w - b) = Σ x·w - b·Σ x - a·Σ (w - b) of codes as they are; a, which a run knows, is all around x."""
    codes = n.array(1).astype(np.int16)
    point = np.asarray(n.array(3) if n.has(3) else 0, np.int16).reshape(-1, *(1,) * (codes.ndim - 1))
    if n.np_dtype(1) == np.uint8:
        codes, point = codes - 128, point - 128
    groups = int(options["groups"])

    def held(array: np.ndarray, dtype: str) -> Value:
        return n.tracer.value(Host(array.astype(dtype), True))

    def summed(w: np.ndarray) -> Value:
        return ops.conv(ops.cast(x, "i32"), ops.cast(held(w, "int8"), "i32"), None, **{**options, "padding": 0})

    x, zero = n[0], n[2]
    if any(p for pair in options["padding"] for p in pair):
        widths = [(0, 0), (0, 0), *options["padding"]]
        inside = ops.pad(ops.ones((1, 1, *x.shape[2:]), "bool"), widths)
        x = ops.where(inside, ops.pad(x, widths), ops.reshape(zero, ()))
    total = summed(codes)
    shape = (1, -1, *(1,) * (codes.ndim - 2))
    if point.any():
        local = summed(np.ones((groups, *codes.shape[1:])))  # of each group
        factors = np.broadcast_to(point.reshape(-1), (len(codes),)).reshape(shape)
        total = total - ops.repeat(local, len(codes) // groups, 1) * held(factors, "int32")
    filters = (codes - point).astype(np.int32).sum(tuple(range(1, codes.ndim)))
    return total - held(filters.reshape(shape), "int32") * ops.cast(zero, "i32")


def _by_channel(x: Value, rank: int, axis: int) -> Value:
    if x.ndim == 0 or x.shape[0] == 1:
        return ops.reshape(x, ())
    return ops.reshape(x, tuple(-1 if i == axis else 1 for i in range(rank)))
