"""Gather: reading at positions computed at run time, along an axis, by element, by coordinates.

Ids are i32 or i64 in 0..n-1; with `wrap`, negative ids count from the end. An id that is out of range becomes the
nearest valid one; with the setting `check_indices` it is an IndexRangeError, from kernels (the pass of that name puts
`checked_ids` before them) as from the interpreter. Ids of experts, labels, pages and ids into an empty axis are always
errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.config import config
from strata.core import (
    Dim,
    DType,
    TensorType,
    as_dtype,
    bool_,
    bounds,
    broadcast_shapes,
    f16,
    f32,
    f64,
    i32,
    i64,
    known_le,
    normalize_axis,
)
from strata.errors import DTypeError, IndexRangeError, OptionError, ShapeError
from strata.mir import METHODS, Constant, Op, Sample, Value, draw, function, op
from strata.ops.base.creation import iota, zeros_like
from strata.ops.base.frontend import Operand, as_value
from strata.ops.base.movement import broadcast_to, flatten, reshape, transpose

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

Shape = tuple[Dim, ...]


# ------------------------------------------------------------------------------------------------------------------ ids


def positions(ids: np.ndarray, size: int, wrap: bool, what: str) -> np.ndarray:
    """Ids as positions 0..size-1: what `clamp_id` and `checked_ids` are to kernels."""
    if config().check_indices or not size:
        check_ids(ids, size, wrap, what)
    at = ids.astype(np.int64)
    return np.clip(np.where(at < 0, at + size, at) if wrap else at, 0, max(size - 1, 0))


def check_ids(ids: np.ndarray, size: int, wrap: bool, what: str, kind: str = "id", allowed: int | None = None) -> None:
    """The first id outside its range is an error, unless it is the one that is allowed; of kind `empty` only where
    nothing is in range."""
    if kind == "empty" and size:
        return
    low = -size if wrap else 0
    bad = ((ids < low) | (ids >= size)) & (True if allowed is None else ids != allowed)
    if bad.any():
        place = int(np.flatnonzero(bad)[0])
        raise id_error(what, kind, place, int(ids.flat[place]), low, size)


def id_error(what: str, kind: str, place: int, number: int, low: int, size: int) -> IndexRangeError:
    """The error for an id of any kind at a flat place."""
    match kind:
        case "expert":
            return IndexRangeError(f"{what}: row {place} asks for expert {number} of {size}", code="I220")
        case "label":
            return IndexRangeError(f"{what}: label {number} of row {place} is outside the {size} classes", code="I210")
        case "page":
            return IndexRangeError(f"{what}: page {number} is not among the {size} pages of the pool", code="I230")
        case "tokens":
            return IndexRangeError(
                f"{what}: {number} tokens come before the new ones of sequence {place}, and its table has room for "
                f"{size - 1}", code="I231",
            )  # fmt: skip
    return IndexRangeError(f"{what}: id {number} is outside {low}..{size - 1}", code="I200")


def clamp_id(k: KernelBuilder, at: Expr, size: Dim, wrap: bool) -> Expr:
    """An id as a position inside its axis, whatever its value."""
    position, n = k.index(at), k.index(size)
    if wrap:
        position = k.select(k.lt(position, k.index(0)), position + n, position)
    return k.max(k.min(position, n - k.index(1)), k.index(0))


def looked_up(k: KernelBuilder, table: View, index: tuple[Expr, ...], sizes: Sequence[Dim]) -> Expr:
    """The element of a table at clamped positions; nothing is read where an axis of these sizes is empty."""
    filled = k.all_of(*(k.lt(k.index(0), k.index(n)) for n in sizes if may_be_empty(n)))
    return k.guard(filled, lambda: table[index], 0)


def may_be_empty(size: Dim) -> bool:
    return bounds(size)[0] == 0


def as_ids(x: Any, what: str) -> Value:
    """Ids given by a user as i32 or i64; floats are truncated."""
    ids = as_value(x)
    if ids.dtype in (i32, i64):
        return ids
    if ids.dtype.is_bool or ids.dtype.is_complex:
        raise DTypeError(f"{what}: ids must be integers, got {ids.type}", code="D200")
    return METHODS["cast"](ids, i64)


def may_be_le(a: Dim, b: Dim) -> bool:
    """False only when a > b for every value of the symbols."""
    return not known_le(b + 1, a)


class Indexed(Op):
    """An op with ids among its inputs."""

    dtypes: ClassVar[str | tuple[DType, ...]] = "any"
    ids_at: ClassVar[int] = 1  # which input they are
    ids_read: ClassVar[bool] = True  # what is scattered into an empty axis goes nowhere; reading from one is an error
    ids_are: ClassVar[str] = "id"  # experts are always checked, not only where the setting asks for it

    looks_at_inputs: ClassVar[bool] = True

    def check_inputs(self, inputs: Sequence[Value], types: Sequence[TensorType]) -> None:
        """Ids that are known already are checked at once, whatever the setting."""
        ids = inputs[self.ids_at].node.op
        if isinstance(ids, Constant):
            self.check_known(ids.data.array, self.id_sizes(*types))

    def check_known(self, ids: np.ndarray, sizes: tuple[Dim, ...]) -> None:
        for j, size in enumerate(sizes):
            if isinstance(size, int):
                some = ids if len(sizes) == 1 else ids[..., j]
                check_ids(some, size, bool(getattr(self, "wrap", False)), self.name, self.ids_are)

    def may_find_nothing(self, *types: TensorType) -> bool:
        """Whether ids may read from an axis that is empty."""
        return self.ids_read and types[self.ids_at].size != 0 and any(map(may_be_empty, self.id_sizes(*types)))

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        """The sizes of what ids count: of one axis, or of one for each place in the last axis of the ids."""
        raise NotImplementedError

    def require_ids(self, ids: TensorType) -> None:
        self.require_dtype(ids.dtype in (i32, i64), f"ids must be i32 or i64, got {ids}", code="D200")

    def require_axis(self, axis: int, x: TensorType) -> None:
        self.require(0 <= axis < x.ndim, f"axis {axis} is not an axis of {x}", code="S103")

    def require_elements(self, x: TensorType, ids: TensorType, axis: int) -> None:
        """Ids that name one element each: as many axes as x, and no longer than x off the axis."""
        self.require_ids(ids)
        self.require_axis(axis, x)
        fits = ids.ndim == x.ndim and all(
            a == axis or may_be_le(n, d) for a, (n, d) in enumerate(zip(ids.shape, x.shape, strict=True))
        )
        self.require(fits, f"ids {ids} do not fit {x} off axis {axis}", code="S201")

    def require_coordinates(self, x: TensorType, ids: TensorType, batch_dims: int) -> tuple[Shape, Shape]:
        """The shape of the coordinate rows after the batch axes, and of what one row names."""
        self.require_ids(ids)
        ok = 0 <= batch_dims < ids.ndim and batch_dims <= x.ndim and isinstance(ids.shape[-1], int)
        self.require(ok, f"ids {ids} hold no coordinates into {x} after {batch_dims} batch axes", code="S202")
        same = x.shape[:batch_dims] == ids.shape[:batch_dims]
        self.require(same, f"{x} and ids {ids} differ in their {batch_dims} batch axes", code="S203")
        rest = x.ndim - batch_dims - int(ids.shape[-1])
        self.require(rest >= 0, f"coordinates of length {ids.shape[-1]} are too long for {x}", code="S204")
        return ids.shape[batch_dims:-1], x.shape[x.ndim - rest :]


def spread(x: Value, batched: bool, size: Dim) -> Value:
    """x with a batch axis."""
    return x if batched else broadcast_to(x, (size, *x.shape))


def move_group(x: Value, source: int, count: int, destination: int) -> Value:
    """`count` consecutive axes moved so that the first of them lands at `destination`."""
    group = list(range(source, source + count))
    others = [a for a in range(x.ndim) if a not in group]
    return transpose(x, [*others[:destination], *group, *others[destination:]])


@op("checked_ids")
class CheckedIds(Indexed):
    """Ids as they are, after an error for the first that `what` cannot take; with several sizes, one a coordinate."""

    sizes: tuple[Dim, ...]
    wrap: bool
    what: str
    kind: str = "id"  # or expert, label, page, tokens; empty: an error only where the axis has no elements
    allowed: int | None = None  # an id that may be out of range

    differentiable = False
    dtypes = (i32, i64)
    ids_at = 0

    def check_known(self, ids: np.ndarray, sizes: tuple[Dim, ...]) -> None:
        """Folding does so."""

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return self.sizes

    def infer(self, ids: TensorType) -> TensorType:
        self.require_ids(ids)
        fits = len(self.sizes) == 1 or (ids.ndim > 0 and ids.shape[-1] == len(self.sizes))
        self.require(fits, f"ids {ids} are not coordinates in {len(self.sizes)} axes", code="S202")
        return ids

    def numpy(self, ids: np.ndarray) -> np.ndarray:
        for j, size in enumerate(self.sizes):
            some = ids if len(self.sizes) == 1 else ids[..., j]
            check_ids(some, size.__index__(), self.wrap, self.what, self.kind, self.allowed)
        return ids.copy()

    def vmap(self, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(ids)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return inputs[0][index]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(i64[4], 0, 5), sizes=(5,), wrap=False, what="gather", grad=False),
            Sample(draw(i32[2, 3], -4, 4), sizes=(4,), wrap=True, what="gather", grad=False),
            Sample(draw(i64[3, 2], 0, 3), sizes=(3, 4), wrap=False, what="gather_nd", grad=False),
            Sample(draw(i64[0], 0, 3), sizes=(3,), wrap=False, what="gather", grad=False),
            Sample(
                np.array([0, -9, 2]), sizes=(3,), wrap=False, what="nll_loss", kind="label", allowed=-9, grad=False
            ),
        ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- gathers


@op("gather")
class Gather(Indexed):
    """Rows of a table: out = table[:axis] + ids.shape + table[axis+1:]."""

    axis: int
    wrap: bool

    def infer(self, table: TensorType, ids: TensorType) -> TensorType:
        self.require_ids(ids)
        self.require_axis(self.axis, table)
        return table.with_shape((*table.shape[: self.axis], *ids.shape, *table.shape[self.axis + 1 :]))

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (types[0].shape[self.axis],)

    def numpy(self, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.take(table, positions(ids, table.shape[self.axis], self.wrap, self.name), self.axis)

    def jvp(self, table: Value, ids: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0], ids)

    def vjp(self, table: Value, ids: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return gather_backward(ct, ids, table.shape[self.axis], self.axis, wrap=self.wrap), None

    def vmap(self, table: Value, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        if not batched[1]:
            return Gather(self.axis + 1, self.wrap)(table, ids)
        if not batched[0]:
            return move_group(self(table, ids), self.axis, 1, 0)
        rows = move_group(table, self.axis + 1, 1, 1)
        out = GatherND(1, self.wrap)(rows, reshape(ids, (*ids.shape, 1)))
        return move_group(out, 1, ids.ndim - 1, self.axis + 1)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        table, ids = inputs
        end = self.axis + len(ids.shape)
        row = clamp_id(k, ids[index[self.axis : end]], table.shape[self.axis], self.wrap)
        return looked_up(k, table, (*index[: self.axis], row, *index[end:]), [table.shape[self.axis]])

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[5, 3], draw(i64[4], 0, 5), axis=0, wrap=False),
            Sample(f32[2, 4, 3], draw(i32[2, 3], -4, 4), axis=1, wrap=True),
            Sample(f32[2, 4], draw(i64[()], 0, 4), axis=1, wrap=False),
            Sample(f16[3], draw(i64[0], 0, 3), axis=0, wrap=False),
            Sample(f64[3, 0], draw(i64[2], 0, 3), axis=0, wrap=False),
            Sample(bool_[4], draw(i32[2, 2], 0, 4), axis=0, wrap=False, grad=False),
        ]  # fmt: skip


@op("gather_elements")
class GatherElements(Indexed):
    """One element for each id, along an axis: out[.., i, ..] = x[.., ids[.., i, ..], ..]."""

    axis: int
    wrap: bool

    def infer(self, x: TensorType, ids: TensorType) -> TensorType:
        self.require_elements(x, ids, self.axis)
        return x.with_shape(ids.shape)

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (types[0].shape[self.axis],)

    def numpy(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        inside = x[tuple(slice(None) if a == self.axis else slice(n) for a, n in enumerate(ids.shape))]
        return np.take_along_axis(inside, positions(ids, x.shape[self.axis], self.wrap, self.name), self.axis)

    def jvp(self, x: Value, ids: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0], ids)

    def vjp(self, x: Value, ids: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return METHODS["scatter_elements"](zeros_like(x), ids, ct, self.axis, reduction="add", wrap=self.wrap), None

    def vmap(self, x: Value, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return GatherElements(self.axis + 1, self.wrap)(spread(x, batched[0], size), spread(ids, batched[1], size))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, ids = inputs
        at = clamp_id(k, ids[index], x.shape[self.axis], self.wrap)
        return looked_up(k, x, (*index[: self.axis], at, *index[self.axis + 1 :]), [x.shape[self.axis]])

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[5, 3], draw(i64[4, 3], 0, 5), axis=0, wrap=False),
            Sample(f32[2, 4, 3], draw(i32[2, 2, 2], -4, 4), axis=1, wrap=True),
            Sample(f32[3, 2], draw(i64[3, 0], 0, 2), axis=1, wrap=False),
            Sample(f64[1], draw(i64[4], 0, 1), axis=0, wrap=False),
            Sample(i32[3, 4], draw(i64[3, 2], 0, 4), axis=1, wrap=False, grad=False),
        ]  # fmt: skip


@op("gather_nd")
class GatherND(Indexed):
    """What coordinates name: table [*batch, *axes, *rest], ids [*batch, *rows, n] give [*batch, *rows, *rest]."""

    batch_dims: int
    wrap: bool

    def infer(self, table: TensorType, ids: TensorType) -> TensorType:
        rows, rest = self.require_coordinates(table, ids, self.batch_dims)
        return table.with_shape((*table.shape[: self.batch_dims], *rows, *rest))

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        x, ids = types[:2]
        return x.shape[self.batch_dims : self.batch_dims + ids.shape[-1].__index__()]

    def numpy(self, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        rows = coordinate_rows(table.shape, ids, self.batch_dims, self.wrap, self.name)
        return as_rows(table, self.batch_dims + ids.shape[-1])[rows]

    def jvp(self, table: Value, ids: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0], ids)

    def vjp(self, table: Value, ids: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        zero = zeros_like(table)
        return METHODS["scatter_nd"](zero, ids, ct, reduction="add", batch_dims=self.batch_dims, wrap=self.wrap), None

    def vmap(self, table: Value, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        if not batched[0] and not self.batch_dims:
            return self(table, ids)
        return GatherND(self.batch_dims + 1, self.wrap)(spread(table, batched[0], size), spread(ids, batched[1], size))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        table, ids = inputs
        row, rest = index[: len(ids.shape) - 1], index[len(ids.shape) - 1 :]
        count = len(table.shape) - self.batch_dims - len(rest)
        coordinates = [
            clamp_id(k, ids[(*row, k.index(j))], table.shape[self.batch_dims + j], self.wrap) for j in range(count)
        ]
        sizes = table.shape[self.batch_dims : self.batch_dims + count]
        return looked_up(k, table, (*row[: self.batch_dims], *coordinates, *rest), sizes)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4, 2], draw(i64[5, 2], 0, 3), batch_dims=0, wrap=False),
            Sample(f32[2, 3, 3], draw(i32[2, 4, 2], -3, 3), batch_dims=1, wrap=True),
            Sample(f32[2, 3], draw(i64[2, 1], 0, 3), batch_dims=1, wrap=False),
            Sample(f32[3, 2], draw(i64[2, 2, 0], 0, 1), batch_dims=0, wrap=False),
            Sample(f64[4], draw(i64[1], 0, 4), batch_dims=0, wrap=False),
            Sample(i64[3, 2], draw(i64[0, 1], 0, 3), batch_dims=0, wrap=False, grad=False),
        ]  # fmt: skip


def coordinate_rows(shape: Sequence[int], ids: np.ndarray, batch_dims: int, wrap: bool, what: str) -> np.ndarray:
    """Row-major positions in the batch and coordinate axes of `shape`, for coordinates in the last axis of `ids`."""
    position = np.zeros(ids.shape[:-1], np.int64)
    for a in range(batch_dims):
        ramp = np.arange(shape[a]).reshape([-1 if i == a else 1 for i in range(position.ndim)])
        position = position * shape[a] + ramp
    for j in range(ids.shape[-1]):
        size = shape[batch_dims + j]
        position = position * size + positions(ids[..., j], size, wrap, what)
    return position


def as_rows(x: np.ndarray, axes: int) -> np.ndarray:
    """The first axes of an array as one."""
    return x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:])


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def gather(table: Operand, ids: Operand, axis: int = 0, *, wrap: bool = False) -> Value:
    """Rows of a table along an axis: table[:axis] + ids.shape + table[axis+1:]."""
    value = as_value(table)
    return Gather(normalize_axis(axis, value.ndim, "gather"), wrap)(value, as_ids(ids, "gather"))


@function()
def take(x: Operand, ids: Operand, axis: int | None = None) -> Value:
    """Elements along an axis, of the flat array by default; negative ids count from the end."""
    value = as_value(x)
    return gather(flatten(value), ids, 0, wrap=True) if axis is None else gather(value, ids, axis, wrap=True)


@function()
def gather_elements(x: Operand, ids: Operand, axis: int = 0, *, wrap: bool = False) -> Value:
    """One element for each id along an axis: torch's gather."""
    value = as_value(x)
    return GatherElements(normalize_axis(axis, value.ndim, "gather_elements"), wrap)(
        value, as_ids(ids, "gather_elements")
    )


@function()
def take_along_axis(x: Operand, ids: Operand, axis: int = -1) -> Value:
    """One element for each id along an axis; the other axes broadcast, and negative ids count from the end."""
    value, positions = as_value(x), as_ids(ids, "take_along_axis")
    at = normalize_axis(axis, value.ndim, "take_along_axis")
    value, positions = aligned(value, positions, at, "take_along_axis")
    return GatherElements(at, True)(value, positions)


def aligned(x: Value, ids: Value, axis: int, what: str) -> tuple[Value, Value]:
    """x and ids broadcast against each other off one axis."""
    if x.ndim != ids.ndim:
        raise ShapeError(f"{what}: {x.type} and ids {ids.type} differ in rank", code="S205")
    shape = list(broadcast_shapes(x.type.drop(axis).shape, ids.type.drop(axis).shape, what=what))
    targets = [(*shape[:axis], v.shape[axis], *shape[axis:]) for v in (x, ids)]
    return broadcast_to(x, targets[0]), broadcast_to(ids, targets[1])


@function()
def gather_nd(table: Operand, ids: Operand, batch_dims: int = 0, *, wrap: bool = False) -> Value:
    """What the coordinates in the last axis of ids name, after the batch axes."""
    return GatherND(batch_dims, wrap)(as_value(table), as_ids(ids, "gather_nd"))


@function()
def gather_backward(ct: Operand, ids: Operand, rows: Dim, axis: int = 0, *, wrap: bool = False) -> Value:
    """The cotangent of gather's table of `rows` rows along an axis: rows add up where ids repeat."""
    value, positions = as_value(ct), as_ids(ids, "gather_backward")
    at = normalize_axis(axis, value.ndim - positions.ndim + 1, "gather_backward")
    first = move_group(value, at, positions.ndim, 0)
    return move_group(METHODS["scatter_add"](first, positions, rows, wrap=wrap), 0, 1, at)


@function()
def embedding(ids: Operand, table: Operand) -> Value:
    """Rows of a [vocabulary, width] table: ids.shape + [width]."""
    weights = as_value(table)
    if weights.ndim != 2:
        raise ShapeError(f"embedding: the table must be [vocabulary, width], got {weights.type}", code="S206")
    return gather(weights, as_ids(ids, "embedding"), 0)


@function()
def one_hot(ids: Operand, classes: Dim, axis: int = -1, dtype: Any = f32) -> Value:
    """1 at each id along a new axis and 0 elsewhere; an id outside 0..classes-1 gives zeros only."""
    positions = as_ids(ids, "one_hot")
    if isinstance(classes, int) and classes < 0:
        raise OptionError(f"one_hot: the number of classes must not be negative, got {classes}", code="O200")
    at = normalize_axis(axis, positions.ndim + 1, "one_hot")
    ramp = reshape(iota((classes,), 0, positions.dtype), (classes, *(1,) * (positions.ndim - at)))
    return METHODS["cast"](METHODS["equal"](METHODS["insert_axis"](positions, at), ramp), as_dtype(dtype))
