"""Gather, scatter, sort, and ops whose result size depends on data."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import bool_
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import in_graphs, is_text
from strata.io.onnx.items import Labels, Sizes
from strata.io.onnx.node import NodeView
from strata.io.onnx.positions import by_position
from strata.io.onnx.registry import reads
from strata.mir import Value


@reads("Gather")
def gather(n: NodeView) -> Any:
    axis = n.axis("axis", 0)
    if not in_graphs(n.np_dtype(0)):
        held = n.array(0)
        if held.ndim == 1 and is_text(held.dtype) and not n.is_fixed(1):
            return Labels(n[1], held)
        return np.take(held, n.array(1), axis)
    return ops.gather(n[0], n[1], axis, wrap=True)


@reads("GatherElements")
@by_position
def gather_elements(n: NodeView) -> Any:
    return ops.gather_elements(n[0], n[1], n.axis("axis", 0), wrap=True)


@reads("GatherND")
@by_position
def gather_nd(n: NodeView) -> Any:
    return ops.gather_nd(n[0], n[1], n.attr("batch_dims", 0), wrap=True)


@reads("Scatter")
@reads("ScatterElements")
@by_position
def scatter_elements(n: NodeView) -> Any:
    return ops.scatter_elements(n[0], n[1], n[2], n.axis("axis", 0), reduction=_reduction(n), wrap=True)


@reads("ScatterND")
@by_position
def scatter_nd(n: NodeView) -> Any:
    return ops.scatter_nd(n[0], n[1], n[2], reduction=_reduction(n), wrap=True)


def _reduction(n: NodeView) -> str:
    """How updates of one place are put together; truth values are added by `or` and multiplied by `and`."""
    chosen = n.choice("reduction", "none", ("none", "add", "mul", "max", "min"))
    return {"add": "max", "mul": "min"}.get(chosen, chosen) if n[0].dtype is bool_ else chosen


@reads("TensorScatter")
def tensor_scatter(n: NodeView) -> Value:
    """A cache [B, .., S, ..] with `update` written along an axis at a position for each batch entry."""
    past, update = n[0], n[1]
    axis = n.axis("axis", -2)
    batch, length, count = past.shape[0], past.shape[axis], update.shape[axis]
    write = n[2] if n.has(2) else ops.zeros((batch,), "i64")
    at = ops.insert_axis(write, 1) + ops.insert_axis(ops.iota(count), 0)
    if n.choice("mode", "linear", ("linear", "circular")) == "circular":
        at = ops.remainder(at, ops.dim_size(length))
    shape = [1] * past.ndim
    shape[0], shape[axis] = batch, count
    ids = ops.broadcast_to(ops.reshape(at, shape), update.shape)
    return ops.scatter_elements(past, ids, update, axis)


@reads("OneHot")
def one_hot(n: NodeView) -> Value:
    depth = n.dims(1)[0] if isinstance(n.item(1), Sizes) else int(n.scalar(1))  # any kind of number, by the standard
    values = n[2]
    ids = ops.cast(n[0], "i64")
    axis = n.attr("axis", -1) % (ids.ndim + 1)
    ids = ops.where(ids < 0, ids + depth, ids)
    hot = ops.cast(ops.one_hot(ids, depth, axis=axis, dtype="i8"), "bool")
    return ops.where(hot, values[1], values[0])


@reads("TopK")
def top_k(n: NodeView) -> tuple[Value, ...]:
    k = int(n.scalar(1)) if n.has(1) else n.attr("k")
    axis = n.axis("axis", -1)
    values, ids = ops.topk(n[0], k, axis, largest=bool(n.attr("largest", 1)))
    return values, ops.cast(ids, "i64")


@reads("ReverseSequence")
@by_position
def reverse_sequence(n: NodeView) -> Any:
    x, lengths = n[0], n[1]
    batch, time = n.axis("batch_axis", 1), n.axis("time_axis", 0)
    steps = x.shape[time]
    place = [1] * x.ndim
    place[time] = steps
    at = ops.reshape(ops.iota(steps), place)
    place = [1] * x.ndim
    place[batch] = x.shape[batch]
    size = ops.reshape(ops.cast(lengths, "i64"), place)
    ids = ops.where(at < size, size - 1 - at, at)
    return ops.take_along_axis(x, ops.broadcast_to(ids, x.shape), time)


# What follows gives as many elements as the data say: computed on the host.


@reads("NonZero")
def nonzero(n: NodeView) -> np.ndarray:
    x = n.array(0)
    found = np.array(np.nonzero(x if x.ndim else x.reshape(1)), np.int64)
    return found if x.ndim else np.empty((0, found.shape[1]), np.int64)  # a scalar has no axis to name


@reads("Compress")
def compress(n: NodeView) -> Any:
    keep = np.nonzero(n.array(1).reshape(-1))[0]
    if not in_graphs(n.np_dtype(0)):
        return np.take(n.array(0), keep, n.attr("axis"))
    if not n.has_attr("axis"):
        return ops.take(ops.reshape(n[0], (-1,)), keep, 0)
    return ops.take(n[0], keep, n.axis("axis", 0))


@reads("Unique")
def unique(n: NodeView) -> tuple[np.ndarray, ...]:
    x = n.array(0)
    axis = n.attr("axis")
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not n.attr("sorted", 1):
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        values = np.take(values, order, axis or 0)
        first, counts, inverse = first[order], counts[order], place[inverse]
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)
