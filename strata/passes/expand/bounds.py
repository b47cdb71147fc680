"""Bounds checks of ids from plain ops: the first id that is out of range is found on the device, and noted there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from strata.core import Dim, i32, i64, known_le
from strata.mir import METHODS, Value, constant
from strata.ops import EnsureIds, broadcast_to, cast, concat, dim_size, gather, iota, reshape, where
from strata.passes.expand.rules import expands

_NONE = (1 << 63) - 1


@expands("checked_ids")
def _checked(op: Any, ids: Value) -> Sequence[Value]:
    if 0 in ids.shape or (len(op.sizes) == 1 and _are_in(ids, op.sizes[0])):
        return [ids]
    return [_noted(op, ids) if ids.ndim else reshape(_noted(op, reshape(ids, (1,))), ())]


def _noted(op: Any, ids: Value) -> Value:
    count = prod(ids.shape)
    wide = cast(ids, i64)
    sizes = concat([reshape(dim_size(n), (1,)) for n in op.sizes], 0)  # one, or one a coordinate
    if op.kind == "empty":
        bad = broadcast_to(METHODS["equal"](sizes, constant(0, i64)), ids.shape)
    else:
        low = METHODS["negative"](sizes) if op.wrap else constant(0, i64)
        bad = METHODS["logical_or"](METHODS["less"](wide, low), METHODS["greater_equal"](wide, sizes))
    if op.allowed is not None:
        bad = METHODS["logical_and"](bad, METHODS["not_equal"](wide, constant(op.allowed, i64)))
    places = reshape(iota((count,), dtype=i64), ids.shape)
    first = METHODS["min"](where(bad, places, constant(_NONE, i64)))
    is_bad = METHODS["not_equal"](first, constant(_NONE, i64))
    at = reshape(where(is_bad, first, constant(0, i64)), (1,))
    size = sizes if len(op.sizes) == 1 else gather(sizes, METHODS["remainder"](at, constant(len(op.sizes), i64)))
    parts = [reshape(cast(is_bad, i64), (1,)), at, gather(reshape(wide, (count,)), at), size]
    made: Value = EnsureIds(op.wrap, op.what, op.kind)(ids, concat(parts, 0))
    return made


def _are_in(ids: Value, size: Dim) -> bool:
    """Whether ids are positions that an op found along an axis of no more elements: experts, as a rule."""
    while ids.node.op.name in _ARRANGED or (ids.node.op.name == "cast" and ids.dtype in (i32, i64)):
        (ids,) = ids.node.inputs
    op = ids.node.op
    if op.name not in _FOUND or (op.name == "topk" and ids.index != 1):
        return False
    return known_le(ids.node.inputs[0].shape[op.axis], size)  # type: ignore[attr-defined]


_ARRANGED = ("reshape", "transpose", "broadcast_to", "slice", "flip")
_FOUND = ("topk", "argsort", "argmax", "argmin")
