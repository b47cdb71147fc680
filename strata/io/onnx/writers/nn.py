"""ONNX export: convolutions, pools, normalisation, orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import DType, dim_prod, f16, f32, f64, i8, i32, i64, known_le, u8, u64
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import NUMBER
from strata.io.onnx.exporter import Exporter, fields, spells, writes
from strata.mir import REGISTRY, Node, Value, as_tuple

PAD: Any = REGISTRY["pad"]
WINDOWS: Any = REGISTRY["windows"]
POOL_INDEX: Any = REGISTRY["pool_index"]
POOL_MAX: Any = REGISTRY["pool_max"]


@writes("layer_norm", since=17)
def _layer_norm(e: Exporter, node: Node, xs: list[str]) -> str | Any:
    axes, rank = fields(node)["axes"], node.inputs[0].ndim
    if tuple(axes) != tuple(range(rank - len(axes), rank)) or len(xs) < 2:
        parts = as_tuple(node.op.decompose(*node.inputs))
        e.write(parts)
        return [e.names[p] for p in parts]
    return str(e.add("LayerNormalization", xs, axis=-len(axes), epsilon=fields(node)["eps"]))


def _summed(e: Exporter, node: Node, xs: list[str], floats: str, codes: str, **attributes: Any) -> str:
    """A contraction: one op of ONNX for floats, another for codes of 8 bits whose sums are i32."""
    out = node.types[0].dtype
    if out == i32 and all(x.dtype in (u8, i8) for x in node.inputs[:2]):
        return str(e.add(codes, xs[:2], **attributes))
    held = f64 if floats == "Conv" and out.is_int else out  # ONNX has no Conv of integers; a double holds the sums
    if held != node.inputs[0].dtype:
        xs = [e.add("Cast", [x], to=NUMBER[held.np]) for x in xs]
    made = str(e.add(floats, xs, **attributes))
    return made if held == out else str(e.add("Cast", [made], to=NUMBER[out.np]))


@writes("matmul")
def _matmul(e: Exporter, node: Node, xs: list[str]) -> str:
    return _summed(e, node, xs, "MatMul", "MatMulInteger")


@writes("conv", "conv_first")
def _conv(e: Exporter, node: Node, xs: list[str]) -> str:
    f = fields(node)
    x, rank = xs[0], len(f["stride"])
    lows, highs = zip(*f["padding"], strict=True)
    gaps = tuple(d - 1 for d in f["input_dilation"])
    if any(gaps):
        none = (0,) * (rank + 2)
        (x,) = e.composed([PAD(none, none, (0, 0, *gaps), 0.0)(node.inputs[0])])
    if not all(known_le(0, p) for p in (*lows, *highs)) or not all(isinstance(p, int) for p in (*lows, *highs)):
        zero = e.array(0, node.inputs[0].dtype.np)
        x, lows, highs = e.add("Pad", [x, e.dims((0, 0, *lows, 0, 0, *highs)), zero]), (0,) * rank, (0,) * rank
    return _summed(
        e, node, [x, *xs[1:]], "Conv", "ConvInteger", strides=list(f["stride"]), pads=[*lows, *highs],
        dilations=list(f["dilation"]), group=f["groups"], kernel_shape=list(node.inputs[1].shape[2:]),
    )  # fmt: skip


def _pooled(e: Exporter, node: Node, x: str, outputs: int) -> tuple[Any, list[Any]]:
    """MaxPool of x with its leading axes as one, and the shape of what comes out with them apart."""
    f = fields(node)
    given, rank = node.inputs[0].shape, len(f["kernel"])
    lead = given[: len(given) - rank]
    lows, highs = zip(*f["padding"], strict=True)
    joined = e.add("Reshape", [x, e.dims([1, dim_prod(lead), *given[len(lead) :]])], allowzero=1)
    made = e.add("MaxPool", [joined], outputs, kernel_shape=list(f["kernel"]), strides=list(f["stride"]),
                 pads=[*lows, *highs], dilations=list(f["dilation"]))  # fmt: skip
    return made, list(node.types[0].shape)


def _is_plain_pool(node: Node) -> bool:
    """Whether MaxPool takes it: floats, and padding that is less than a window."""
    f = fields(node)
    pads = zip(f["padding"], f["kernel"], strict=True)
    fits = all(isinstance(p, int) and 0 <= p < k for pair, k in pads for p in pair)
    return fits and node.inputs[0].dtype in (f16, f32, f64)


def _worst(dtype: DType, *, most: bool) -> float:
    """What no element is worse than: the largest number of a type, or the least."""
    if dtype.is_float:
        return -dtype.lowest if most else dtype.lowest
    return int(np.iinfo(dtype.np).max if most else np.iinfo(dtype.np).min)


@writes("pool_max", "pool_min")
def _pool_extreme(e: Exporter, node: Node, xs: list[str]) -> str | Sequence[str]:
    is_min = node.op.name == "pool_min"
    if not _is_plain_pool(node):
        f, x = fields(node), node.inputs[0]
        if is_min and x.dtype.is_int:  # the largest integer may be none of those that padding is said in
            last = -1 if x.dtype.is_signed else int(np.iinfo(x.dtype.np).max)
            most = POOL_MAX(f["kernel"], f["stride"], f["padding"], f["dilation"])(ops.full_like(x, last) - x)
            return e.composed([ops.full_like(most, last) - most])
        axes = tuple(range(x.ndim, x.ndim + len(f["kernel"])))
        worst = _worst(x.dtype, most=is_min)
        held = WINDOWS(f["kernel"], f["stride"], f["padding"], f["dilation"], worst)(x)
        return e.composed([ops.min(held, axes) if is_min else ops.max(held, axes)])
    given = e.add("Neg", xs[:1]) if is_min else xs[0]
    made, shape = _pooled(e, node, given, 1)
    made = e.add("Neg", [made]) if is_min else made
    return str(e.add("Reshape", [made, e.dims(shape)], allowzero=1))


@writes("pool_index")
def _pool_index(e: Exporter, node: Node, xs: list[str]) -> str | Sequence[str]:
    """MaxPool counts places over all axes; ours begin anew with each plane."""
    dtype = node.inputs[0].dtype
    x = xs[0]
    if dtype.is_int and dtype.bits <= 32:  # a double holds all of them
        x = e.add("Cast", [x], to=NUMBER[np.dtype(np.float64)])
    elif not dtype.is_float:
        return e.miss(node)
    x = e.add("Neg", [x]) if fields(node)["kind"] == "min" else x
    (_, at), shape = _pooled(e, node, x, 2)
    plane = dim_prod(node.inputs[0].shape[node.inputs[0].ndim - len(fields(node)["kernel"]) :])
    return str(e.add("Reshape", [e.add("Mod", [at, e.size(plane)]), e.dims(shape)], allowzero=1))


def _places(op: Any, x: Value) -> tuple[Value, tuple[Any, ...], Any]:
    """Where the extremes of windows are, as rows of places in planes."""
    lead = x.shape[: x.ndim - op.rank]
    at = POOL_INDEX(op.kernel, op.stride, op.padding, op.dilation, op.kind)(x)
    return ops.reshape(at, (*lead, dim_prod(at.shape[len(lead) :]))), lead, dim_prod(x.shape[len(lead) :])


@spells("pool_select")
def _pool_select(op: Any, x: Value, y: Value) -> Value:
    at, lead, plane = _places(op, x)
    found = ops.gather_elements(ops.reshape(y, (*lead, plane)), at, len(lead))
    return ops.reshape(found, op.pooled(x.type).shape)


@spells("pool_backward")
def _pool_backward(op: Any, x: Value, dy: Value) -> Value:
    at, lead, plane = _places(op, x)
    total = ops.zeros((*lead, plane), dy.dtype)
    return ops.reshape(ops.scatter_elements(total, at, ops.reshape(dy, at.shape), len(lead), reduction="add"), x.shape)


@writes("argmax", "argmin")
def _arg(e: Exporter, node: Node, xs: list[str]) -> str:
    f = fields(node)
    op = "ArgMax" if node.op.name == "argmax" else "ArgMin"
    found = e.add(op, xs, axis=f["axis"], keepdims=0, select_last_index=int(f["select_last"]))
    return str(e.add("Cast", [found], to=NUMBER[node.types[0].dtype.np]))


@writes("topk")
def _topk(e: Exporter, node: Node, xs: list[str]) -> Sequence[str]:
    f = fields(node)
    values, ids = e.add("TopK", [xs[0], e.array([f["k"]], np.int64)], 2, axis=f["axis"], largest=int(f["largest"]))
    return [values, str(e.add("Cast", [ids], to=NUMBER[node.types[1].dtype.np]))]


@writes("cumsum")
def _cumsum(e: Exporter, node: Node, xs: list[str]) -> str:
    f = fields(node)
    axis = e.array(f["axis"], np.int64)
    return str(e.add("CumSum", [xs[0], axis], exclusive=int(f["exclusive"]), reverse=int(f["reverse"])))


@writes("sort", "argsort")
def _sort(e: Exporter, node: Node, xs: list[str]) -> str | Sequence[str]:
    """TopK of all; equal elements come in their order."""
    f, x = fields(node), node.inputs[0]
    if x.dtype == u64:  # which onnxruntime does not order: the same order in i64, as sums wrap
        least = ops.full((), np.iinfo(np.int64).min, "i64")
        found = type(node.op)(**f)(ops.cast(x, "i64") + least)
        return e.composed([found if node.op.name == "argsort" else ops.cast(found - least, "u64")])
    wide = {8: np.int32, 16: np.int32, 32: np.int64}.get(x.dtype.bits, np.int64) if not x.dtype.is_float else np.float32
    is_known = x.dtype in (f32, f64, i32, i64)
    given = xs[0] if is_known else e.add("Cast", [xs[0]], to=NUMBER[np.dtype(wide)])
    found, at = e.add("TopK", [given, e.size(x.shape[f["axis"]])], 2, axis=f["axis"], largest=int(f["descending"]))
    if node.op.name == "argsort":
        return str(at)
    return str(found if is_known else e.add("Cast", [found], to=NUMBER[x.dtype.np]))


@writes("det")
def _det(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Det", xs))


@spells("slogdet")
def _slogdet(op: Any, x: Value) -> tuple[Value, Value]:
    found = ops.det(x)
    return ops.sign(found), ops.log(abs(found))


@spells("grouped_matmul")
def _grouped_matmul(op: Any, x: Value, w: Value, ids: Value) -> Value:
    return ops.squeeze(ops.matmul(ops.insert_axis(x, 1), ops.gather(w, ids, 0)), 1)


@spells("grouped_outer")
def _grouped_outer(op: Any, x: Value, y: Value, ids: Value) -> Value:
    hits = ops.cast(ops.equal(ops.insert_axis(ids, 1), ops.cast(ops.iota(op.experts), ids.dtype)), x.dtype)
    rows = ops.insert_axis(hits, 2) * ops.insert_axis(x, 1)  # [M, E, K]
    flat = ops.reshape(rows, (x.shape[0], op.experts * x.shape[1]))
    return ops.reshape(ops.matmul(ops.transpose(flat, (1, 0)), y), (op.experts, x.shape[1], y.shape[1]))
