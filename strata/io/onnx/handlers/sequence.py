"""Sequences and optionals: lists of items, kept on the host while a model is traced."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import IndexRangeError, ShapeError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import is_text
from strata.io.onnx.items import NOTHING, Host, Item, Nothing
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.io.onnx.trace import NeedsData

MANY = 64  # parts of an array that are split on the host: each would be an op of the graph otherwise


def _list(n: NodeView, i: int) -> list[Any]:
    item = n.item(i)
    if not isinstance(item, list):
        raise IndexRangeError(f"{n.label}: input {i} is not a sequence", code="I500")
    return item


def _place(n: NodeView, i: int, length: int, *, last: int) -> int:
    """A position in a sequence; negative ones count from the end."""
    if not n.has(i):
        return last
    at = int(n.scalar(i))
    if not -length <= at <= length:
        raise IndexRangeError(f"{n.label}: position {at} of a sequence of {length}", code="I500")
    return at + length if at < 0 else at


@reads("SequenceEmpty")
def sequence_empty(n: NodeView) -> list[Any]:
    return []


@reads("SequenceConstruct")
def sequence_construct(n: NodeView) -> list[Any]:
    return [n.item(i) for i in range(len(n))]


@reads("SequenceInsert")
def sequence_insert(n: NodeView) -> list[Any]:
    items = list(_list(n, 0))
    items.insert(_place(n, 2, len(items), last=len(items)), n.item(1))
    return items


@reads("SequenceErase")
def sequence_erase(n: NodeView) -> list[Any]:
    items = list(_list(n, 0))
    at = _place(n, 1, len(items), last=len(items) - 1)
    return items[:at] + items[at + 1 :]


@reads("SequenceAt")
def sequence_at(n: NodeView) -> Item:
    items = _list(n, 0)
    at = _place(n, 1, len(items), last=0)
    if at >= len(items):
        raise IndexRangeError(f"{n.label}: position {at} of a sequence of {len(items)}", code="I500")
    return items[at]


@reads("SequenceLength")
def sequence_length(n: NodeView) -> np.ndarray:
    return np.array(len(_list(n, 0)), np.int64)


@reads("ConcatFromSequence")
def concat_from_sequence(n: NodeView) -> Any:
    items, new = _list(n, 0), bool(n.attr("new_axis", 0))
    if not items:
        raise IndexRangeError(f"{n.label}: the sequence is empty", code="I500")
    if all(isinstance(x, Host) for x in items):
        arrays = [x.array for x in items]
        fixed = all(x.fixed for x in items)
        n.room(sum(x.size for x in arrays) if fixed else 0, arrays[0].dtype.itemsize)
        return Host((np.stack if new else np.concatenate)(arrays, n.attr("axis", 0)), fixed)
    values = [n.tracer.value(x) for x in items]
    axis = n.attr("axis", 0) % (values[0].ndim + new)
    return ops.stack(values, axis) if new else ops.concat(values, axis)


@reads("SplitToSequence")
def split_to_sequence(n: NodeView) -> list[Any]:
    axis = n.axis("axis", 0)
    size = n.shape(0)[axis]
    if not isinstance(size, int):
        raise NeedsData(f"the number of parts of {n.label}")
    if not n.has(1):
        n.tracer.limits.nodes(size)
        parts, keep = [1] * size, bool(n.attr("keepdims", 1))
    else:
        keep, given = True, n.array(1)
        if given.ndim:
            parts = [int(p) for p in given]
        else:
            each = int(given)
            if each <= 0:
                raise ShapeError(f"{n.label}: parts of size {each}", code="S500")
            n.tracer.limits.nodes(size // each)
            parts = [min(each, size - at) for at in range(0, size, each)]
    if is_text(n.np_dtype(0)):
        pieces: list[Any] = [Host(p, n.is_fixed(0)) for p in np.split(n.array(0), np.cumsum(parts)[:-1], axis)]
        return pieces
    if len(parts) > MANY and n.tracer.reads_data:
        return _split_array(n, parts, axis, keep)
    pieces = list(ops.split(n[0], parts, axis))
    return pieces if keep else [ops.squeeze(p, axis) for p in pieces]


def _split_array(n: NodeView, parts: list[int], axis: int, keep: bool) -> list[Any]:
    """Views of an array of the host."""
    array = n.array(0)
    if min(parts, default=0) < 0 or sum(parts) != array.shape[axis]:
        raise ShapeError(f"{n.label}: parts of sizes {parts[:8]}… of an axis of {array.shape[axis]}", code="S500")
    found, at = [], 0
    for size in parts:
        index: Any = (slice(None),) * axis + ((slice(at, at + size) if keep else at),)
        found.append(Host(array[index], n.is_fixed(0)))
        at += size
    return found


@reads("SequenceMap")
def sequence_map(n: NodeView) -> Any:
    body = n.attr("body")
    results: list[list[Any]] = [[] for _ in body.output]
    for i in range(len(_list(n, 0))):
        inputs = [x[i] if isinstance(x, list) else x for x in n.items]
        for column, item in zip(results, n.tracer.run_graph(body, inputs), strict=True):  # type: ignore[arg-type]
            column.append(item)
    return tuple(results)


@reads("Optional")
def optional(n: NodeView) -> Item:
    return n.item(0) if n.has(0) else NOTHING


@reads("OptionalHasElement")
def optional_has_element(n: NodeView) -> Item:
    return Host(np.array(n.has(0) and not isinstance(n.item(0), Nothing)))


@reads("OptionalGetElement")
def optional_get_element(n: NodeView) -> Item:
    item = n.item(0)
    if isinstance(item, Nothing):
        raise IndexRangeError(f"{n.label}: the optional has no element", code="I500")
    return item
