"""ONNX export: reshapes, slices, padding, ids: what moves elements and computes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import NUMBER
from strata.io.onnx.exporter import Exporter, fields, spells, writes
from strata.mir import Node, Value


@writes("reshape")
def _reshape(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Reshape", [xs[0], e.dims(node.types[0].shape)], allowzero=1))


@writes("broadcast_to")
def _broadcast(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Expand", [xs[0], e.dims(node.types[0].shape)]))


@writes("transpose")
def _transpose(e: Exporter, node: Node, xs: list[str]) -> str:
    perm = list(fields(node)["perm"])
    return str(e.add("Transpose", xs, perm=perm)) if perm else xs[0]


@writes("concat")
def _concat(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Concat", xs, axis=fields(node)["axis"]))


@writes("slice")
def _slice(e: Exporter, node: Node, xs: list[str]) -> str:
    f, axes = fields(node), e.array(range(node.inputs[0].ndim), np.int64)
    return str(e.add("Slice", [xs[0], e.dims(f["start"]), e.dims(f["stop"]), axes, e.dims(f["step"])]))


@writes("flip")
def _flip(e: Exporter, node: Node, xs: list[str]) -> str:
    axes = fields(node)["axes"]
    ends = [[-1] * len(axes), [np.iinfo(np.int64).min] * len(axes), axes, [-1] * len(axes)]
    return str(e.add("Slice", [xs[0], *(e.array(x, np.int64) for x in ends)]))


@writes("pad")
def _pad(e: Exporter, node: Node, xs: list[str]) -> str:
    f = fields(node)
    fill, shape, x = e.array(f["value"], node.inputs[0].dtype.np), list(node.inputs[0].shape), xs[0]
    for axis, gap in enumerate(f["interior"]):
        if gap != 0:
            x, shape[axis] = _spread(e, x, shape, axis, gap, fill)
    if any(d != 0 for d in (*f["low"], *f["high"])):
        x = e.add("Pad", [x, e.dims((*f["low"], *f["high"])), fill])
    return x


def _spread(e: Exporter, x: str, shape: list[Any], axis: int, gap: Any, fill: str) -> tuple[str, Any]:
    """Elements with a gap after each but the last along an axis: columns are added, and fall into line."""
    size, step = shape[axis], gap + 1
    apart = e.add("Reshape", [x, e.dims([*shape[: axis + 1], 1, *shape[axis + 1 :]])], allowzero=1)
    column = [0] * (2 * len(shape) + 2)
    column[len(shape) + 2 + axis] = gap
    wide = e.add("Pad", [apart, e.dims(column), fill])
    line = e.add("Reshape", [wide, e.dims([*shape[:axis], size * step, *shape[axis + 1 :]])], allowzero=1)
    ends = [e.dims([n]) for n in (0, size * step - gap, axis, 1)]
    return str(e.add("Slice", [line, *ends])), size * step - gap


@writes("iota")
def _iota(e: Exporter, node: Node, xs: list[str]) -> str:
    kind, axis = node.types[0], fields(node)["axis"]
    one = [e.add("Squeeze", [x]) for x in (e.array([0], np.int64), e.size(kind.shape[axis]), e.array([1], np.int64))]
    counted = e.add("Cast", [e.add("Range", one)], to=NUMBER[kind.dtype.np])
    placed = [-1 if i == axis else 1 for i in range(kind.ndim)]
    return str(e.add("Expand", [e.add("Reshape", [counted, e.array(placed, np.int64)]), e.dims(kind.shape)]))


@writes("dim_size")
def _dim_size(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Squeeze", [e.size(fields(node)["dim"])]))


@writes("gather", "gather_elements")
def _gather(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Gather" if node.op.name == "gather" else "GatherElements", xs, axis=fields(node)["axis"]))


@writes("scatter_elements")
def _scatter_elements(e: Exporter, node: Node, xs: list[str]) -> str:
    f = fields(node)
    return str(e.add("ScatterElements", xs, axis=f["axis"], reduction=f["reduction"]))


@writes("gather_nd")
def _gather_nd(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("GatherND", [xs[0], _long(e, xs[1])], batch_dims=fields(node)["batch_dims"]))


@writes("scatter_nd")
def _scatter_nd(e: Exporter, node: Node, xs: list[str]) -> str | Sequence[str]:
    op: Any = node.op
    if op.batch_dims:
        x, ids, updates = node.inputs
        rows = ids.shape[:-1]
        lead = [ops.cast(ops.insert_axis(ops.iota(rows, a), len(rows)), ids.dtype) for a in range(op.batch_dims)]
        whole = ops.concat([*lead, ids], -1)
        return e.composed([ops.scatter_nd(x, whole, updates, reduction=op.reduction, wrap=op.wrap)])
    return str(e.add("ScatterND", [xs[0], _long(e, xs[1]), xs[2]], reduction=op.reduction))


def _long(e: Exporter, ids: str) -> str:
    return str(e.add("Cast", [ids], to=NUMBER[np.dtype(np.int64)]))


@spells("scatter_add")
def _scatter_add(op: Any, updates: Value, ids: Value) -> Value:
    zero = ops.zeros((op.rows, *updates.shape[ids.ndim :]), updates.dtype)
    return ops.scatter_nd(zero, ops.insert_axis(ids, ids.ndim), updates, reduction="add", wrap=op.wrap)


@writes("dynamic_slice")
def _dynamic_slice(e: Exporter, node: Node, xs: list[str]) -> str:
    x, *starts = xs
    if not starts:
        return x
    sizes = fields(node)["sizes"]
    one = e.array([1], np.int64)
    given = e.add("Concat", [e.add("Reshape", [_long(e, s), one]) for s in starts], axis=0)
    room = e.dims([d - n for d, n in zip(node.inputs[0].shape, sizes, strict=True)])
    first = e.add("Max", [e.add("Min", [given, room]), e.array([0], np.int64)])
    return str(e.add("Slice", [x, first, e.add("Add", [first, e.dims(sizes)])]))


@spells("dynamic_update_slice")
def _dynamic_update_slice(op: Any, x: Value, update: Value, *starts: Value) -> Value:
    if not starts:
        return update
    columns = []
    for axis, (start, d, n) in enumerate(zip(starts, x.shape, update.shape, strict=True)):
        first = ops.maximum(ops.minimum(ops.cast(start, "i64"), ops.dim_size(d - n)), 0)
        columns.append(ops.iota(update.shape, axis) + first)
    return ops.scatter_nd(x, ops.stack(columns, -1), update, reduction="none")


@spells("windows")
def _windows(op: Any, x: Value) -> Value:
    """Every window, gathered along one axis after the other."""
    rank, lead = op.rank, x.ndim - op.rank
    x = ops.pad(x, [(0, 0)] * lead + list(op.padding), constant_values=op.value)
    for i, (size, stride, dilation) in enumerate(zip(op.kernel, op.stride, op.dilation, strict=True)):
        axis = lead + 2 * i
        count = (x.shape[axis] - (size - 1) * dilation - 1) // stride + 1
        at = ops.insert_axis(ops.iota(count) * stride, 1) + ops.iota(size) * dilation
        x = ops.gather(x, at, axis)
    return ops.transpose(x, (*range(lead), *range(lead, lead + 2 * rank, 2), *range(lead + 1, lead + 2 * rank, 2)))


@spells("fold_windows")
def _fold_windows(op: Any, x: Value) -> Value:
    """Each axis is a product with the matrix that says which tap of which window lies where."""
    rank, lead = op.rank, x.ndim - 2 * op.rank
    x = ops.cast(x, "i32") if x.dtype.is_bool else x
    order = [lead + i + rank * j for i in range(rank) for j in (0, 1)]
    x = ops.transpose(x, (*range(lead), *order))  # [*lead, count, tap, count, tap, …]
    for i, size in enumerate(op.size):
        count, taps = x.shape[lead + i : lead + i + 2]
        place = ops.insert_axis(ops.iota(count) * op.stride[i], 1) + ops.iota(taps) * op.dilation[i] - op.padding[i][0]
        hits = ops.equal(ops.reshape(place, (count * taps, 1)), ops.iota(size))
        rest = x.shape[lead + i + 2 :]
        joined = ops.reshape(x, (*x.shape[: lead + i], count * taps, *rest))
        last = (*(a for a in range(joined.ndim) if a != lead + i), lead + i)
        moved = ops.matmul(ops.transpose(joined, last), ops.cast(hits, x.dtype))
        x = ops.transpose(moved, (*range(lead + i), moved.ndim - 1, *range(lead + i, moved.ndim - 1)))
    return x


@spells("tree_leaves")
def _tree_leaves(op: Any, x: Value, splits: Value, links: Value, roots: Value) -> Value:
    """One step of every row in every tree after the other."""
    rows, trees, last = x.shape[0], roots.shape[0], splits.shape[0] - 1
    at = ops.clip(ops.broadcast_to(ops.cast(roots, "i64"), (rows, trees)), 0, last)
    features, lefts = (ops.cast(ops.squeeze(ops.narrow(links, 1, i, 1), 1), "i64") for i in (0, 1))
    for _ in range(op.depth):
        feature, left = ops.gather(features, at), ops.gather(lefts, at)
        column = ops.clip(ops.where(feature < 0, -1 - feature, feature), 0, x.shape[1] - 1)
        value = ops.gather_elements(x, column, 1)
        right = ops.where(ops.isnan(value), feature >= 0, value > ops.gather(splits, at))
        at = ops.where(left < 0, at, ops.clip(left + ops.cast(right, "i64"), 0, last))
    return ops.cast(ops.maximum(-1 - ops.gather(lefts, at), 0), "i32")
