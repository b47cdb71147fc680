"""x[index] and its functional counterpart: NumPy's basic and advanced indexing on values of a graph.

An index is first read as a list of entries, one for each axis of x it consumes and each axis it adds. Slices and ints
become movement ops; arrays of ids become a gather. Axes of ids stand where NumPy puts them: in the place of the ids
when these (ints included) are side by side, else in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import (
    Dim,
    SymExpr,
    bool_,
    broadcast_shapes,
    dim_max,
    dim_min,
    dim_prod,
    dim_spread,
    floordiv,
    i64,
    known_le,
    known_positive,
)
from strata.errors import DTypeError, IndexRangeError, OptionError, SymbolError, TraceError
from strata.mir import METHODS, Value, constant, function
from strata.ops.base.creation import iota, ones
from strata.ops.base.frontend import Operand, as_value
from strata.ops.base.movement import Flip, Pad, Slice, broadcast_to, insert_axis, reshape, stack, transpose
from strata.ops.indexing.indexing import Gather, GatherND, move_group
from strata.ops.indexing.scattering import ScatterND

UPDATES = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


@dataclass(frozen=True, slots=True)
class NewAxis:
    """None: an axis of size 1."""


@dataclass(frozen=True, slots=True)
class Range:
    """`count` elements from `first` on, `step` apart; the step may be negative."""

    first: Dim
    count: Dim
    step: int

    @property
    def lowest(self) -> Dim:
        if self.step > 0:
            return self.first
        lowest = self.first + (self.count - 1) * self.step
        return lowest if known_positive(self.count) else dim_max(dim_min(lowest, self.first), 0)  # none may be left

    @property
    def extent(self) -> Dim:
        """From the lowest element to the highest, both included."""
        return dim_spread(self.count, abs(self.step))


@dataclass(frozen=True, slots=True)
class Point:
    """One element: the axis goes away."""

    at: Dim


@dataclass(frozen=True, slots=True)
class Ids:
    """The elements that ids name. `wrap` is off when they are known to count from the front; `added`: on a new axis."""

    value: Value
    wrap: bool
    added: bool = False


Entry = NewAxis | Range | Point | Ids


# -------------------------------------------------------------------------------------------------------------- reading


def read_index(x: Value, index: Any) -> tuple[list[Entry], bool]:
    """The entries of an index, with full ranges for the axes it does not mention; and whether ids are side by side."""
    items = [_plain(item) for item in (index if isinstance(index, tuple) else (index,))]
    if sum(item is Ellipsis for item in items) > 1:
        raise OptionError("getitem: an index holds '...' more than once", code="O205")
    used = sum(_consumes(item) for item in items)
    if used > x.ndim:
        raise IndexRangeError(f"getitem: {used} indices for {x.type}, which has {x.ndim} axes", code="I202")
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    entries: list[Entry] = []
    axis = 0
    for item in items:
        if item is Ellipsis:
            entries += [Range(0, size, 1) for size in x.shape[axis : axis + x.ndim - used]]
            axis += x.ndim - used
        else:
            entries += _entries(item, x, axis)
            axis += _consumes(item)
    advanced = [i for i, item in enumerate(items) if not (item is None or item is Ellipsis or isinstance(item, slice))]
    return entries, not advanced or advanced[-1] - advanced[0] == len(advanced) - 1


def _plain(item: Any) -> Any:
    """An item as an int, size, slice, None, '...', value or array."""
    if item is None or item is Ellipsis or isinstance(item, (slice, Value, SymExpr)):
        return item
    if isinstance(item, (list, tuple)) and any(isinstance(i, Value) for i in item):
        return stack(list(item))
    array = np.asarray(item)
    if array.size == 0 and not isinstance(item, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise DTypeError(
            f"getitem: an index is made of ints, slices and arrays of ints or bools, got {item!r}", code="D201"
        )
    return int(array) if array.ndim == 0 and array.dtype.kind != "b" else array


def _consumes(item: Any) -> int:
    """How many axes of x an item takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype.kind == "b" else 1


def _entries(item: Any, x: Value, axis: int) -> list[Entry]:
    if item is None:
        return [NewAxis()]
    if isinstance(item, np.ndarray) and item.dtype.kind == "b":
        return _mask_entries(item, x, axis)
    size = x.shape[axis]
    if isinstance(item, slice):
        return [read_slice(item, size)]
    if isinstance(item, (int, SymExpr)):
        return [Point(_point(item, size, axis, x))]
    if isinstance(item, Value):
        return [_runtime_ids(item)]
    return [_constant_ids(item, size, axis, x)]


def _point(at: Dim, size: Dim, axis: int, x: Value) -> Dim:
    position = size + at if isinstance(at, int) and at < 0 else at
    if known_le(size, position) or known_le(position, -1):
        raise IndexRangeError(f"getitem: index {at} is outside axis {axis} of {x.type}", code="I201")
    return position


def _runtime_ids(ids: Value) -> Ids:
    if ids.dtype.is_bool:
        raise TraceError(
            f"getitem: a {ids.type} mask is not known while the graph is built, so neither is the size of the result",
            code="T210", fix="where(mask, x, other), or a NumPy array as the mask",
        )  # fmt: skip
    if not ids.dtype.is_int:
        raise DTypeError(f"getitem: ids must be integers, got {ids.type}", code="D200")
    return Ids(ids if ids.dtype.bits >= 32 and ids.dtype.is_signed else METHODS["cast"](ids, i64), wrap=True)


def _constant_ids(ids: np.ndarray, size: Dim, axis: int, x: Value) -> Ids:
    ids = ids.astype(np.int64)
    if isinstance(size, SymExpr):
        return Ids(constant(ids), wrap=bool((ids < 0).any()))
    bad = (ids < -size) | (ids >= size)
    if bad.any():
        raise IndexRangeError(f"getitem: index {ids[bad].flat[0]} is outside axis {axis} of {x.type}", code="I201")
    return Ids(constant(np.where(ids < 0, ids + size, ids)), wrap=False)


def _mask_entries(mask: np.ndarray, x: Value, axis: int) -> list[Entry]:
    if mask.ndim == 0:
        return [Ids(constant(np.zeros(int(mask), np.int64)), wrap=False, added=True)]
    for i, (n, size) in enumerate(zip(mask.shape, x.shape[axis:], strict=False)):
        if isinstance(size, int) and n != size:
            raise IndexRangeError(
                f"getitem: a mask of shape {list(mask.shape)} does not fit {x.type}: "
                f"size {n} against {size} on axis {axis + i}",
                code="I203",
            )
    return [Ids(constant(found), wrap=False) for found in np.nonzero(mask)]


def read_slice(item: slice, size: Dim) -> Range:
    """Python's meaning of a slice on an axis of a known or symbolic size."""
    for bound in (item.start, item.stop, item.step):
        if isinstance(bound, Value):
            raise TraceError(
                f"getitem: a slice bound is a {bound.type} value, which is not known while the graph is built",
                code="T211", fix="dynamic_slice(x, starts, sizes)",
            )  # fmt: skip
        if bound is not None and not isinstance(bound, (int, np.integer, SymExpr)):
            raise DTypeError(f"getitem: a slice bound is an int, got {bound!r}", code="D203")
    step = 1 if item.step is None else item.step
    if isinstance(step, SymExpr) or step == 0:
        raise OptionError(f"getitem: a slice needs a step that is a non-zero int, got {step}", code="O204")
    step = int(step)
    if isinstance(size, int) and not isinstance(item.start, SymExpr) and not isinstance(item.stop, SymExpr):
        found = range(*item.indices(size))
        return Range(found.start if found else 0, len(found), step)
    if step > 0:
        start, stop = _bound(item.start, 0, 0, size, size), _bound(item.stop, size, 0, size, size)
        span = stop - start
    else:
        start, stop = _bound(item.start, size - 1, -1, size - 1, size), _bound(item.stop, -1, -1, size - 1, size)
        span = start - stop
    return Range(start, floordiv(dim_max(span, 0) + (abs(step) - 1), abs(step)), step)


def _bound(bound: Any, default: Dim, low: Dim, high: Dim, size: Dim) -> Dim:
    if bound is None:
        return default
    if known_le(bound, -1):
        bound = size + bound
    elif not known_le(0, bound):
        raise SymbolError(f"getitem: the slice bound {bound} may be negative or not", code="S212")
    return dim_max(dim_min(bound, high), low)


# -------------------------------------------------------------------------------------------------------------- getting


@function()
def getitem(x: Operand, index: Any) -> Value:
    """x[index] as in NumPy: ints, slices, None, '...', arrays and values of ids, constant masks."""
    value = as_value(x)
    entries, together = read_index(value, index)
    part = _reshaped(_cut(value, entries), entries)
    if not any(isinstance(e, Ids) for e in entries):
        return part
    return _gathered(part, entries, together)


def _on_axes(entries: Sequence[Entry]) -> list[Range | Point | Ids]:
    """The entries that consume an axis of x, in order."""
    return [e for e in entries if not isinstance(e, NewAxis) and not (isinstance(e, Ids) and e.added)]


def _window(x: Value, entries: Sequence[Entry]) -> tuple[list[Dim], list[Dim], list[int], list[int]]:
    """For each axis of x: lowest element, extent, stride; and the axes that run backwards."""
    low: list[Dim] = []
    extent: list[Dim] = []
    stride: list[int] = []
    backwards: list[int] = []
    for axis, entry in enumerate(_on_axes(entries)):
        match entry:
            case Range():
                low.append(entry.lowest if entry.count != 0 else 0)
                extent.append(entry.extent)
                stride.append(abs(entry.step))
                if entry.step < 0 and entry.count != 1:
                    backwards.append(axis)
            case Point():
                low.append(entry.at)
                extent.append(1)
                stride.append(1)
            case Ids():
                low.append(0)
                extent.append(x.shape[axis])
                stride.append(1)
    return low, extent, stride, backwards


def _cut(x: Value, entries: Sequence[Entry]) -> Value:
    """x cut down to its ranges and points, every axis still there."""
    low, extent, stride, backwards = _window(x, entries)
    if any(a != 0 for a in low) or any(s != 1 for s in stride) or tuple(extent) != x.shape:
        stop = tuple(a + n for a, n in zip(low, extent, strict=True))
        x = Slice(tuple(low), stop, tuple(stride))(x)
    return Flip(tuple(backwards))(x) if backwards else x


def _reshaped(x: Value, entries: Sequence[Entry]) -> Value:
    """Without the axes of points, and with new axes."""
    sizes = iter(x.shape)
    shape: list[Dim] = []
    for entry in entries:
        if isinstance(entry, NewAxis) or (isinstance(entry, Ids) and entry.added):
            shape.append(1)
            continue
        size = next(sizes)
        if not isinstance(entry, Point):
            shape.append(size)
    return reshape(x, tuple(shape))


def _gathered(x: Value, entries: Sequence[Entry], together: bool) -> Value:
    kept = [e for e in entries if not isinstance(e, Point)]
    axes = [a for a, e in enumerate(kept) if isinstance(e, Ids)]
    found = [e for e in kept if isinstance(e, Ids)]
    first_id = next(i for i, e in enumerate(entries) if isinstance(e, (Ids, Point)))
    place = sum(isinstance(e, (Range, NewAxis)) for e in entries[:first_id]) if together else 0
    if len(axes) == 1:
        out = Gather(axes[0], found[0].wrap)(x, found[0].value)
        return move_group(out, axes[0], found[0].value.ndim, place)
    coordinates = stacked_ids(found)
    first = transpose(x, [*axes, *(a for a in range(x.ndim) if a not in axes)])
    out = GatherND(0, any(e.wrap for e in found))(first, coordinates)
    return move_group(out, 0, coordinates.ndim - 1, place)


def stacked_ids(found: Sequence[Ids]) -> Value:
    """Ids of several axes broadcast against each other, as coordinates in a last axis."""
    shape = broadcast_shapes(*(e.value.shape for e in found), what="getitem")
    return stack([broadcast_to(METHODS["cast"](e.value, i64), shape) for e in found], -1)


# ------------------------------------------------------------------------------------------------------------- updating


@function("setitem")
def index_update(x: Operand, index: Any, value: Operand, *, reduction: str = "none") -> Value:
    """A copy of x in which x[index] is replaced by a value, or combined with it: add, mul, max or min.

    Where ids repeat, the last value stays; with a reduction all of them are combined.
    """
    target = as_value(x)
    if reduction not in ("none", *UPDATES):
        known = ", ".join(("none", *UPDATES))
        raise OptionError(f"index_update: reduction {reduction!r} is not one of {known}", code="O201")
    entries, _ = read_index(target, index)
    given = METHODS["cast"](as_value(value), target.dtype)
    if not any(isinstance(e, Ids) for e in entries):
        return _updated_window(target, entries, given, reduction)
    ids = [e for e in entries if isinstance(e, Ids)]
    if entries[: len(ids)] == ids and not any(e.added for e in ids) and _is_whole(target, entries, len(ids)):
        coordinates = stacked_ids(ids)
        updates = broadcast_to(given, (*coordinates.shape[:-1], *target.shape[len(ids) :]))
        return ScatterND(reduction, any(e.wrap for e in ids), 0)(target, coordinates, updates)
    count = dim_prod(target.shape)
    positions = getitem(reshape(iota((count,)), target.shape), index)
    updates = broadcast_to(given, positions.shape)
    flat = ScatterND(reduction, False, 0)(reshape(target, (count,)), insert_axis(positions, -1), updates)
    return reshape(flat, target.shape)


def _is_whole(x: Value, entries: Sequence[Entry], start: int) -> bool:
    return list(entries[start:]) == [Range(0, size, 1) for size in x.shape[start:]]


def _updated_window(x: Value, entries: Sequence[Entry], given: Value, reduction: str) -> Value:
    """An update of ranges and points: the value, spread to the shape of x, chosen where it belongs."""
    low, extent, stride, backwards = _window(x, entries)
    counts = tuple(e.count if isinstance(e, Range) else 1 for e in _on_axes(entries))
    shape = tuple(e.count if isinstance(e, Range) else 1 for e in entries if isinstance(e, (Range, NewAxis)))
    spread = reshape(broadcast_to(given, shape), counts)
    if 0 in counts:
        return x
    if backwards:
        spread = Flip(tuple(backwards))(spread)
    high = tuple(size - a - n for size, a, n in zip(x.shape, low, extent, strict=True))
    place = Pad(tuple(low), high, tuple(s - 1 for s in stride), 0.0)
    whole = counts == x.shape
    changed = spread if whole else place(spread)
    if reduction == "add":
        return x + changed
    if reduction != "none":
        changed = METHODS[UPDATES[reduction]](x, changed)
    return changed if whole else METHODS["where"](place(ones(counts, bool_)), changed, x)
