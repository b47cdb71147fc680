"""Reading and writing at positions that are computed. Ids out of range are errors, as in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata import ops
from strata.core import TensorType, bool_, i64
from strata.mir import Value
from strata.torch.aten.promotion import as_truth, common, value
from strata.torch.table import Checked, Unsupported, aten


@aten("index.Tensor", "_unsafe_index.Tensor")
def index(out: TensorType, x: Value, ids: Sequence[Value | None]) -> Value:
    return ops.getitem(x, _index(ids))


def _index(ids: Sequence[Value | None]) -> tuple[Any, ...]:
    if any(i is not None and i.dtype is bool_ for i in ids):
        raise Unsupported("a mask as an index: how many elements it picks depends on data")
    return tuple(slice(None) if i is None else value(i, i64) for i in ids)


@aten("index_put", "_unsafe_index_put", "index_put_")
def index_put(out: TensorType, x: Value, ids: Sequence[Value | None], updates: Value, accumulate: bool = False) -> Any:
    masks = [i for i in ids if i is not None and i.dtype is bool_]
    if masks:
        if len(ids) != 1:
            raise Unsupported("a mask beside other indices")
        return _masked_put(x, masks[0], value(updates, x.dtype), accumulate)
    return ops.setitem(x, _index(ids), value(updates, x.dtype), reduction="add" if accumulate else "none")


def _masked_put(x: Value, mask: Value, updates: Value, accumulate: bool) -> Any:
    """Where the mask is set, elements or rows of the updates: the same everywhere, or one after the other."""
    rest = x.shape[mask.ndim :]
    set_ = ops.reshape(mask, (*mask.shape, *(1,) * len(rest)))
    if updates.ndim == len(rest) + 1 and updates.shape[0] == 1:
        updates = ops.reshape(updates, updates.shape[1:])
    if updates.ndim <= len(rest):
        return ops.where(set_, x + updates if accumulate else updates, x)
    rows = updates.shape[0]
    if updates.ndim > len(rest) + 1 or not isinstance(rows, int) or not rows:
        raise Unsupported("writing several numbers through a mask")
    flat = value(ops.reshape(mask, (-1,)), i64)
    at = ops.reshape(ops.cumsum(flat, axis=0), mask.shape) - value(1, i64)
    taken = ops.gather(updates, ops.minimum(ops.maximum(at, value(0, i64)), value(rows - 1, i64)), 0)
    made = ops.where(set_, x + taken if accumulate else taken, x)
    count = f"shape mismatch: value tensor of shape {list(updates.shape)} cannot be broadcast to indexing result"
    return Checked(made, ops.not_equal(ops.sum(flat), value(rows, i64)), count, needed=True)


@aten("index_select")
def index_select(out: TensorType, x: Value, dim: int, ids: Value) -> Value:
    if not x.ndim:
        return ops.reshape(x, out.shape)
    return ops.gather(x, ops.reshape(ids, (-1,)), dim % x.ndim)


@aten("embedding")
def embedding(
    out: TensorType, table: Value, ids: Value, padding_idx: Any = -1, scale: bool = False, sparse: bool = False
) -> Value:
    return ops.gather(table, ids, 0)


@aten("embedding_dense_backward")
def embedding_backward(
    out: TensorType, ct: Value, ids: Value, rows: Any, padding_idx: Any, scale_by_freq: bool
) -> Value:
    if scale_by_freq:
        raise Unsupported("gradients divided by how often a row is used")
    flat, width = ops.reshape(ids, (-1,)), ct.shape[-1]
    updates = ops.reshape(ct, (flat.shape[0], width))
    if padding_idx >= 0:
        keep = ops.not_equal(flat, value(padding_idx, flat.dtype))
        updates = ops.where(ops.reshape(keep, (flat.shape[0], 1)), updates, value(0, updates.dtype))
    return ops.scatter_add(updates, flat, rows)


def _cut(x: Value, ids: Value, dim: int | None) -> Value:
    """x as far as the ids reach along all other axes."""
    for axis, size in enumerate(ids.shape):
        if axis != dim and x.shape[axis] != size:
            x = ops.narrow(x, axis, 0, size)
    return x


@aten("gather")
def gather(out: TensorType, x: Value, dim: int, ids: Value, *, sparse_grad: bool = False) -> Value:
    if not x.ndim or not ids.ndim:
        return ops.reshape(ops.gather(ops.reshape(x, (-1,)), ops.reshape(ids, (-1,)), 0), out.shape)
    axis = dim % x.ndim
    return ops.gather_elements(_cut(x, ids, axis), ids, axis)


def _scatter(x: Value, dim: int, ids: Value, updates: Value, reduction: str) -> Value:
    if not x.ndim:
        made = _scatter(ops.reshape(x, (1,)), 0, ops.reshape(ids, (1,)), ops.reshape(updates, (1,)), reduction)
        return ops.reshape(made, ())
    axis = dim % x.ndim
    if not ids.ndim:
        ids, updates = ops.reshape(ids, (1,)), ops.reshape(updates, (1,))
    updates = value(_cut(updates, ids, None), x.dtype)
    if ids.type.size == 0:
        return x
    if x.dtype is bool_:
        number = _scatter(value(x, i64), dim, ids, value(updates, i64), reduction)
        return as_truth(number)
    return ops.scatter_elements(x, ids, updates, axis, reduction=reduction)


_REDUCTIONS = {None: "none", "add": "add", "sum": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min"}


@aten("scatter.src", "scatter.reduce")
def scatter(out: TensorType, x: Value, dim: int, ids: Value, source: Value, *, reduce: str | None = None) -> Value:
    return _scatter(x, dim, ids, source, _REDUCTIONS[reduce])


@aten("scatter.value", "scatter.value_reduce")
def scatter_value(out: TensorType, x: Value, dim: int, ids: Value, number: Any, *, reduce: str | None = None) -> Value:
    return _scatter(x, dim, ids, ops.broadcast_to(value(number, x.dtype), ids.shape), _REDUCTIONS[reduce])


@aten("scatter_add")
def scatter_add(out: TensorType, x: Value, dim: int, ids: Value, source: Value) -> Value:
    return _scatter(x, dim, ids, source, "add")


@aten("scatter_reduce.two")
def scatter_reduce(
    out: TensorType, x: Value, dim: int, ids: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if reduce == "mean":
        one = ops.full(ids.shape, 1, x.dtype)
        start = ops.full(x.shape, int(include_self), x.dtype)
        count = _scatter(start, dim, ids, one, "add")
        base = x if include_self else _emptied(x, dim, ids, 0)
        total = _scatter(base, dim, ids, source, "add")
        count = ops.maximum(count, value(1, x.dtype))
        return ops.divide(total, count) if x.dtype.is_inexact else ops.floor_divide(total, count)
    if not include_self:
        x = _emptied(x, dim, ids, {"sum": 0, "prod": 1, "amax": None, "amin": None}[reduce], reduce)
    return _scatter(x, dim, ids, source, _REDUCTIONS[reduce])


def _emptied(x: Value, dim: int, ids: Value, neutral: float | None, reduce: str = "") -> Value:
    """x with the elements that are written to set to what changes nothing."""
    if neutral is None:
        if x.dtype.is_float:
            neutral = x.dtype.lowest if reduce == "amax" else -x.dtype.lowest
        else:
            high = (1 << (x.dtype.bits - (x.dtype.kind == "int"))) - 1
            neutral = (-high - 1 if x.dtype.kind == "int" else 0) if reduce == "amax" else high
    return _scatter(x, dim, ids, ops.broadcast_to(value(neutral, x.dtype), ids.shape), "none")


@aten("masked_scatter")
def masked_scatter(out: TensorType, x: Value, mask: Value, source: Value) -> Value:
    """Where the mask is set, the elements of the source one after the other."""
    if source.type.size == 0:
        return ops.broadcast_to(x, out.shape)
    wide = ops.reshape(ops.broadcast_to(mask, out.shape), (-1,))
    at = ops.cumsum(value(wide, i64), axis=0) - value(1, i64)
    taken = ops.gather(ops.reshape(source, (-1,)), ops.where(wide, at, value(0, i64)), 0)
    return ops.where(mask, ops.reshape(taken, out.shape), x)


@aten("index_add")
def index_add(out: TensorType, x: Value, dim: int, ids: Value, source: Value, *, alpha: Any = 1) -> Value:
    updates = source if alpha == 1 else source * value(alpha, source.dtype)
    if not x.ndim:
        return x + ops.reshape(updates, ())
    return ops.index_add(x, dim % x.ndim, ids, value(updates, common(x, updates)))


@aten("take")
def take(out: TensorType, x: Value, ids: Value) -> Value:
    return ops.gather(ops.reshape(x, (-1,)), ids, 0, wrap=True)


@aten("one_hot")
def one_hot(out: TensorType, ids: Value, classes: int = -1) -> Value:
    return ops.one_hot(ids, out.shape[-1], dtype=i64)
