"""Rules of StableHLO's operations that move elements: shapes, slices, gathers, scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata import ops
from strata.core import Dim, dim_prod, i64
from strata.errors import LowerError
from strata.io.stablehlo.rules import (
    Item,
    ModuleReader,
    folded_sizes,
    known_sizes,
    op_named,
    rule,
    scalar,
    static_shape,
    static_type,
)
from strata.io.stablehlo.syntax import HloOp
from strata.mir import Value, constant

Sizes = Sequence[Dim]


def attribute(op: HloOp, *names: str, default: Any = None) -> Any:
    """An attribute under one of its names: the short and the general form do not agree on them."""
    for name in names:
        if name in op.attributes:
            return op.attributes[name]
    if default is None:
        raise LowerError(f"{op.name} has no {names[0]}", code="L510")
    return default


@rule("reshape")
def reshape(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    return Item(ops.reshape(given[0].value, static_shape(op)), folded_sizes("reshape", given))


@rule("dynamic_reshape")
def dynamic_reshape(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    shape = known_sizes(given[1], "the shape")
    return Item(ops.reshape(given[0].value, shape), folded_sizes("reshape", given[:1]))


@rule("get_dimension_size")
def get_dimension_size(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    axis = attribute(op, "dim", "dimension", default=0)
    size = given[0].shape[axis]
    return Item(ops.cast(ops.dim_size(size), static_type(op).dtype), (size,))


@rule("set_dimension_size")
def set_dimension_size(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    axis = attribute(op, "dim", "dimension", default=0)
    (size,) = known_sizes(given[1], "the size")
    made: Value = ops.narrow(given[0].value, axis, 0, size)
    return made


@rule("iota")
def iota(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    kind = static_type(op)
    return _iota(static_shape(op), attribute(op, "dim", "iota_dimension", default=0), kind.dtype)


@rule("dynamic_iota")
def dynamic_iota(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    shape = known_sizes(given[0], "the shape")
    return _iota(shape, attribute(op, "dim", "iota_dimension", default=0), static_type(op).dtype)


def _iota(shape: Sizes, axis: int, dtype: Any) -> Item:
    made = ops.iota(shape, axis, dtype) if dtype.is_int else ops.cast(ops.iota(shape, axis), dtype)
    static = [d for d in shape if isinstance(d, int)]
    small = len(static) == len(shape) == 1 and dtype.is_int and static[0] <= 32
    return Item(made, tuple(range(static[0])) if small else None)


@rule("broadcast_in_dim")
def broadcast_in_dim(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    shape = static_shape(op)
    made = _broadcast(given[0].value, shape, attribute(op, "dims", "broadcast_dimensions", default=[]))
    known = given[0].sizes if len(shape) <= 1 else None
    if known is not None and len(shape) == 1 and len(known) == 1 and shape[0] <= 32:
        known *= shape[0]
    return Item(made, known)


@rule("dynamic_broadcast_in_dim")
def dynamic_broadcast_in_dim(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    shape = known_sizes(given[1], "the shape")
    return _broadcast(given[0].value, shape, attribute(op, "dims", "broadcast_dimensions", default=[]))


def _broadcast(x: Value, shape: Sizes, dims: Sequence[int]) -> Value:
    """Axes of x at `dims` of the shape; axes of one element are repeated."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    x = ops.transpose(x, order) if order != list(range(len(dims))) else x
    placed: list[Dim] = [1] * len(shape)
    for at, axis in enumerate(sorted(dims)):
        placed[axis] = x.shape[at]
    made: Value = ops.broadcast_to(ops.reshape(x, placed), shape)
    return made


@rule("transpose")
def transpose(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    made: Value = ops.transpose(given[0].value, attribute(op, "dims", "permutation", default=[]))
    return made


@rule("reverse")
def reverse(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    axes = attribute(op, "dims", "dimensions", default=[])
    made: Value = ops.flip(given[0].value, tuple(axes)) if axes else given[0].value
    return made


@rule("concatenate")
def concatenate(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    known = [x.sizes for x in given]
    joined = tuple(d for part in known if part is not None for d in part) if None not in known else None
    return Item(ops.concat([x.value for x in given], attribute(op, "dim", "dimension", default=0)), joined)


@rule("slice")
def slice_(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    if "ranges" in op.attributes:
        start, stop, step = zip(*op.attributes["ranges"], strict=True) if op.attributes["ranges"] else ((), (), ())
    else:
        start, stop, step = (op.attributes[k] for k in ("start_indices", "limit_indices", "strides"))
    known = given[0].sizes
    if known is not None and len(start) == 1 and len(known) > 1:
        known = known[start[0] : stop[0] : step[0]]
    return Item(_slice(given[0].value, start, stop, step), known)


def _slice(x: Value, start: Sizes, stop: Sizes, step: Sequence[int]) -> Value:
    made: Value = op_named("slice", start=tuple(start), stop=tuple(stop), step=tuple(step))(x)
    return made


@rule("real_dynamic_slice")
def real_dynamic_slice(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    start, stop, step = (known_sizes(x, "the range") for x in given[1:])
    if any(not isinstance(s, int) for s in step):
        raise LowerError("steps of a slice are numbers", code="L512")
    return _slice(given[0].value, start, stop, [int(s) for s in step])


@rule("dynamic_slice")
def dynamic_slice(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    starts = [ops.cast(x.value, i64) for x in given[1:]]
    made: Value = ops.dynamic_slice(given[0].value, starts, attribute(op, "sizes", "slice_sizes", default=[]))
    return made


@rule("dynamic_update_slice")
def dynamic_update_slice(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    starts = [ops.cast(x.value, i64) for x in given[2:]]
    made: Value = ops.dynamic_update_slice(given[0].value, given[1].value, starts)
    return made


@rule("pad")
def pad(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    low, high = attribute(op, "low", "edge_padding_low"), attribute(op, "high", "edge_padding_high")
    return padded(given[0].value, low, high, attribute(op, "interior", "interior_padding"), given[1].value)


@rule("dynamic_pad")
def dynamic_pad(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    low, high, interior = (known_sizes(x, "the padding") for x in given[2:])
    return padded(given[0].value, low, high, [int(i) for i in interior], given[1].value)


def padded(x: Value, low: Sizes, high: Sizes, interior: Sequence[int], value: Value | float) -> Value:
    """Padding with any value; less than nothing takes elements away."""
    more = [tuple(0 if isinstance(d, int) and d < 0 else d for d in side) for side in (low, high)]
    made = _filled(x, more[0], more[1], interior, value)
    cut = [[-d if isinstance(d, int) and d < 0 else 0 for d in side] for side in (low, high)]
    if any(map(any, cut)):
        stop = [d - c for d, c in zip(made.shape, cut[1], strict=True)]
        made = _slice(made, cut[0], stop, [1] * made.ndim)
    return made


def _filled(x: Value, low: Sizes, high: Sizes, interior: Sequence[int], value: Value | float) -> Value:
    fields = {"low": tuple(low), "high": tuple(high), "interior": tuple(interior)}
    if not isinstance(value, Value):
        made: Value = op_named("pad", **fields, value=value)(x)
        return made
    held = value.node.op.static_fields().get("data") if value.node.op.name == "constant" else None
    if held is not None and not x.dtype.is_complex and not x.dtype.is_bool:
        return op_named("pad", **fields, value=float(held.array))(x)
    inside = op_named("pad", **fields, value=0.0)(ops.broadcast_to(constant(np.uint8(1)), x.shape))
    zero = ops.cast(x, "u8") if x.dtype.is_bool else x
    made = op_named("pad", **fields, value=0.0)(zero)
    made = ops.cast(made, x.dtype) if x.dtype.is_bool else made
    filled: Value = ops.where(ops.not_equal(inside, scalar(0, inside)), made, value)
    return filled


# --------------------------------------------------------------------------------------------------- gather and scatter


def _numbers(op: HloOp, key: str) -> dict[str, Any]:
    found = op.attributes[key]
    return found if isinstance(found, dict) else {}


@rule("gather", "dynamic_gather")
def gather(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    """Windows at starts: a row of a table where that is all of it, else each element by its number."""
    numbers = _numbers(op, "dimension_numbers")
    table, ids = given[0].value, given[1].value
    sizes = known_sizes(given[2], "the size of slices") if len(given) > 2 else tuple(op.attributes["slice_sizes"])
    offsets = numbers.get("offset_dims", [])
    collapsed, batching = numbers.get("collapsed_slice_dims", []), numbers.get("operand_batching_dims", [])
    start_map, start_batching = numbers.get("start_index_map", []), numbers.get("start_indices_batching_dims", [])
    vector = numbers.get("index_vector_dim", 0)
    rows, ids = _start_rows(ids, vector)
    kept = [a for a in range(table.ndim) if a not in collapsed and a not in batching]
    rank = len(rows) + len(offsets)
    row_axes = [a for a in range(rank) if a not in offsets]
    whole = all(a in start_map or sizes[a] == table.shape[a] for a in range(table.ndim))
    if len(start_map) == 1 and collapsed == start_map and not batching and whole and sizes[start_map[0]] == 1:
        axis = start_map[0]
        made = ops.gather(table, ops.reshape(ids, rows), axis)
        # axes of the result: those of the table before the axis, the rows, those after it
        order = [0] * rank
        for at, place in enumerate(row_axes):
            order[place] = axis + at
        rest = [*range(axis), *range(axis + len(rows), rank)]
        for place, source in zip(sorted(offsets), rest, strict=True):
            order[place] = source
        moved: Value = made if order == list(range(rank)) else ops.transpose(made, order)
        return moved
    shape: list[Dim] = [0] * rank
    for place, size in zip(row_axes, rows, strict=True):
        shape[place] = size
    for place, axis in zip(sorted(offsets), kept, strict=True):
        shape[place] = sizes[axis]
    place_of = dict(zip(kept, sorted(offsets), strict=True))
    starts = {
        axis: _clamped(_along(ids, n, rows, row_axes, shape), table.shape[axis], sizes[axis])
        for n, axis in enumerate(start_map)
    }
    batch_axes = [a for a in range(len(rows) + 1) if a != vector]
    for axis, source in zip(batching, start_batching, strict=True):
        starts[axis] = ops.iota(shape, row_axes[batch_axes.index(source)])
    flat = _flat_index(table.shape, shape, starts, place_of)
    picked: Value = ops.take(ops.reshape(table, (dim_prod(table.shape),)), flat)
    return picked


def _start_rows(ids: Value, vector: int) -> tuple[list[Dim], Value]:
    """The axes of starts but that of coordinates, and starts with coordinates last."""
    if vector == ids.ndim:
        return list(ids.shape), ops.reshape(ids, (*ids.shape, 1))
    return [d for a, d in enumerate(ids.shape) if a != vector], ops.moveaxis(ids, vector, -1)


def _along(ids: Value, n: int, rows: Sizes, row_axes: Sequence[int], shape: Sizes) -> Value:
    """Coordinate n of each start, spread over a shape whose `row_axes` are those of starts."""
    column = ops.cast(ops.reshape(ops.narrow(ids, -1, n, 1), tuple(rows)), i64)
    return _broadcast(column, shape, row_axes)


def _clamped(start: Value, size: Dim, window: Dim) -> Value:
    made: Value = ops.maximum(ops.minimum(start, ops.dim_size(size - window)), constant(np.int64(0)))
    return made


def _flat_index(table: Sizes, shape: Sizes, starts: dict[int, Value], place_of: dict[int, int]) -> Value:
    """The number of the element of a table for each element of a shape."""
    flat: Value = ops.zeros(tuple(shape), i64)
    stride: Dim = 1
    for axis in reversed(range(len(table))):
        at: Value | None = starts.get(axis)
        if axis in place_of:
            offset = ops.iota(tuple(shape), place_of[axis])
            at = offset if at is None else at + offset
        if at is not None:
            flat = flat + at * ops.dim_size(stride)
        stride = stride * table[axis]
    return flat


@rule("scatter")
def scatter(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    """Elements of updates at their numbers; those outside go to a place after the end, which is dropped."""
    count = (len(given) - 1) // 2
    ids = given[count].value
    numbers = _numbers(op, "scatter_dimension_numbers")
    windows = numbers.get("update_window_dims", [])
    inserted, batching = numbers.get("inserted_window_dims", []), numbers.get("input_batching_dims", [])
    start_map = numbers.get("scatter_dims_to_operand_dims", [])
    start_batching = numbers.get("scatter_indices_batching_dims", [])
    vector = numbers.get("index_vector_dim", 0)
    rows, ids = _start_rows(ids, vector)
    found = []
    reduction = _reduction(op) if count == 1 else None
    if reduction is None:
        raise LowerError("scatter combines by add, multiply, maximum, minimum, or takes the update", code="L511")
    for at in range(count):
        table, updates = given[at].value, given[count + 1 + at].value
        shape = updates.shape
        row_axes = [a for a in range(len(shape)) if a not in windows]
        kept = [a for a in range(table.ndim) if a not in inserted and a not in batching]
        place_of = dict(zip(kept, sorted(windows), strict=True))
        starts = {axis: _along(ids, n, rows, row_axes, shape) for n, axis in enumerate(start_map)}
        batch_axes = [a for a in range(len(rows) + 1) if a != vector]
        for axis, source in zip(batching, start_batching, strict=True):
            starts[axis] = ops.iota(tuple(shape), row_axes[batch_axes.index(source)])
        inside: Value | None = None
        for axis, start in starts.items():
            here = start + ops.iota(tuple(shape), place_of[axis]) if axis in place_of else start
            fits = ops.logical_and(here >= constant(np.int64(0)), here < ops.dim_size(table.shape[axis]))
            inside = fits if inside is None else ops.logical_and(inside, fits)
        flat = _flat_index(table.shape, shape, starts, place_of)
        total = dim_prod(table.shape)
        flat = flat if inside is None else ops.where(inside, flat, ops.dim_size(total))
        longer = ops.concat([ops.reshape(table, (total,)), ops.zeros((1,), table.dtype)], 0)
        amount = dim_prod(shape)
        put = ops.scatter_elements(
            longer, ops.reshape(flat, (amount,)), ops.reshape(updates, (amount,)), 0, reduction=reduction
        )
        found.append(ops.reshape(ops.narrow(put, 0, 0, total), table.shape))
    return found


REDUCTIONS = {"add": "add", "multiply": "mul", "maximum": "max", "minimum": "min", "or": "max", "and": "min"}


def _reduction(op: HloOp) -> str | None:
    """How a body of two numbers combines them, where it is one operation."""
    (region,) = op.regions
    *body, end = region.body
    (old, _), (new, _) = region.arguments
    if not body and end.operands == [new]:
        return "none"
    if len(body) == 1 and end.operands == body[0].results and sorted(body[0].operands) == sorted([old, new]):
        return REDUCTIONS.get(body[0].name.removeprefix("stablehlo."))
    return None
