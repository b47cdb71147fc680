"""Cast and CastLike, including element types that only exist on the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from strata.core import as_dtype
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import in_graphs, is_text, largest
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads

_FLOAT8 = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}


@reads("Cast")
def cast(n: NodeView) -> Any:
    target = n.dtype_attr("to", 1)
    assert target is not None
    return _convert(n, target)


@reads("CastLike")
def cast_like(n: NodeView) -> Any:
    return _convert(n, n.np_dtype(1))


def _convert(n: NodeView, target: np.dtype[Any]) -> Any:
    source = n.np_dtype(0)
    saturate = bool(n.attr("saturate", 1))
    if source == target:
        return n.item(0)
    if not in_graphs(source) or not in_graphs(target):
        return convert_array(n.array(0), target, saturate, str(n.attr("round_mode", "up")))
    x = n[0]
    if target.name in _FLOAT8 and saturate and as_dtype(source).is_float:
        high = largest(target)
        x = ops.where(ops.isnan(x), x, ops.clip(x, -high, high)) if as_dtype(source).bits > 8 or source != target else x
    if as_dtype(target).bits == 4 and as_dtype(source).is_float:
        x = ops.cast(x, "i32")
    if as_dtype(target).is_bool:
        return ops.not_equal(x, ops.zeros_like(x))
    return ops.cast(x, as_dtype(target))


def convert_array(x: np.ndarray, target: np.dtype[Any], saturate: bool = True, round_mode: str = "up") -> np.ndarray:
    """An array in another type of ONNX, strings included."""
    if is_text(x.dtype):
        return _from_text(x, target)
    if is_text(target):
        return _to_text(x)
    if target.name in _FLOAT8 and saturate and x.dtype.kind not in "iub":
        high = largest(target)
        wide = x.astype(np.float32)
        return np.where(np.isnan(wide), wide, np.clip(wide, -high, high)).astype(target)
    if target.name == "float8_e8m0fnu":
        return _to_scale(x.astype(np.float32), saturate, round_mode)
    if target.name in ("int4", "uint4", "int2", "uint2"):
        whole = x.astype(np.float32).astype(np.int32) if x.dtype.kind not in "iu" else x.astype(np.int32)
        bits = int(target.name[-1])
        codes = whole & ((1 << bits) - 1)
        if target.name.startswith("int"):
            half = 1 << (bits - 1)
            codes = (codes ^ half) - half
        return codes.astype(np.int8).astype(target)
    if x.dtype.kind == "V" or x.dtype.name.startswith(("float8", "float4", "bfloat", "int4", "uint4", "int2", "uint2")):
        x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        return x.astype(target)


def _from_text(x: np.ndarray, target: np.dtype[Any]) -> np.ndarray:
    if target.kind in "iu":
        return np.array([int(float(s)) for s in x.reshape(-1)], target).reshape(x.shape)
    if target.kind == "b":
        return np.array([bool(float(s)) for s in x.reshape(-1)], bool).reshape(x.shape)
    return np.array([float(s) for s in x.reshape(-1)], np.float64).astype(target).reshape(x.shape)


def _to_text(x: np.ndarray) -> np.ndarray:
    found = np.empty(x.size, object)
    if x.dtype.kind not in "iub":
        x = x.astype(np.float32) if x.dtype != np.float64 else x
    found[:] = [str(v) for v in x.reshape(-1)]
    return found.reshape(x.shape)


def _to_scale(x: np.ndarray, saturate: bool, round_mode: str) -> np.ndarray:
    """Powers of two of 8 bits: the exponent of x, rounded up, down, or to the nearest."""
    codes = np.abs(x).view(np.uint32)
    exponent, rest = (codes >> 23).astype(np.int32), codes & 0x7FFFFF
    if round_mode == "up":
        exponent = exponent + (rest > 0)
    elif round_mode == "nearest":
        exponent = exponent + ((rest > 0x400000) | ((rest == 0x400000) & (exponent % 2 == 1)))
    if saturate:
        exponent = np.minimum(exponent, 254)
    exponent = np.where(np.isfinite(x), exponent, 255)
    return np.minimum(exponent, 255).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
