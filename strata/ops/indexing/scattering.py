"""Scatter: writing at positions computed at run time, by element and by coordinates, with reductions.

Ids follow the rules of strata.ops.indexing. Updates that meet on one element are combined in index order; without a
reduction the last of them stays. Derivatives are exact for every reduction, also where ids repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strata.core import Dim, TensorType, bool_, dim_prod, f16, f32, f64, i32, i64, normalize_axis, show_shape
from strata.errors import OptionError
from strata.mir import METHODS, Constant, Sample, Value, constant, draw, function, op
from strata.ops.base.creation import iota, ones_like, zeros, zeros_like
from strata.ops.base.elementwise import accepts
from strata.ops.base.frontend import Operand, as_value, promoted
from strata.ops.base.movement import broadcast_to, flatten, narrow, reshape
from strata.ops.indexing.indexing import (
    Gather,
    GatherElements,
    GatherND,
    Indexed,
    aligned,
    as_ids,
    as_rows,
    clamp_id,
    coordinate_rows,
    gather_elements,
    move_group,
    positions,
    spread,
)
from strata.ops.reduce.cumulative import LinearRecurrence, conjugate, shifted

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

REDUCTIONS = {"none": "any", "add": "numeric", "mul": "numeric", "max": "ordered", "min": "ordered"}
UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
KERNELS = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}


class Scatter(Indexed):
    """A scatter into x. Subclasses say how to read what ids name (`pick`) and how to write it."""

    reduction: str
    wrap: bool

    ids_read = False

    def require_reduction(self, x: TensorType, updates: TensorType) -> None:
        known = self.reduction in REDUCTIONS
        self.require(
            known, f"reduction {self.reduction!r} is not one of {', '.join(REDUCTIONS)}", code="O201", error=OptionError
        )
        self.require_dtype(x.dtype is updates.dtype, f"{x} and updates {updates} differ in dtype", code="D103")
        allowed = REDUCTIONS[self.reduction]
        self.require_dtype(
            accepts(allowed, x.dtype), f"{self.reduction} does not take {x}, only {allowed} types", code="D104"
        )

    def with_reduction(self, reduction: str) -> Scatter:
        self.missing("vjp")

    def pick(self, x: Value, ids: Value) -> Value:
        """The element of x that each update goes to."""
        self.missing("vjp")

    def others(self, x: Value, ids: Value, updates: Value) -> Value:
        """For each update, the product of the other updates of the same element."""
        self.missing("vjp")

    def jvp(self, x: Value, ids: Value, updates: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        to_x = zeros_like(x) if dx[0] is None else dx[0]
        to_updates = zeros_like(updates) if dx[2] is None else dx[2]
        add = self.with_reduction("add")
        match self.reduction:
            case "none" | "add":
                return self(to_x, ids, to_updates)
            case "mul":
                factors = self(ones_like(x), ids, updates)
                return to_x * factors + x * add(zeros_like(x), ids, to_updates * self.others(x, ids, updates))
            case _:
                from_x, from_updates, count = self._shares(x, ids, updates, out)
                zero = constant(0, x.dtype)
                kept = METHODS["where"](from_x, to_x, zero)
                return add(kept, ids, METHODS["where"](from_updates, to_updates, zero)) / count

    def vjp(self, x: Value, ids: Value, updates: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        match self.reduction:
            case "add":
                return ct, None, self.pick(ct, ids)
            case "none":
                taken = self.pick(ct, ids)
                if not self._distinct(ids):
                    taken = METHODS["where"](self._stays(x, ids, updates), taken, constant(0, ct.dtype))
                return self(ct, ids, zeros_like(updates)), None, taken
            case "mul":
                factors = self(ones_like(x), ids, updates)
                slope = conjugate(self.others(x, ids, updates))
                return ct * conjugate(factors), None, self.pick(ct * conjugate(x), ids) * slope
            case _:
                from_x, from_updates, count = self._shares(x, ids, updates, out)
                zero, share = constant(0, ct.dtype), ct / count
                to_updates = METHODS["where"](from_updates, self.pick(share, ids), zero)
                return METHODS["where"](from_x, share, zero), None, to_updates

    def _shares(self, x: Value, ids: Value, updates: Value, out: Value) -> tuple[Value, Value, Value]:
        """Where x and the updates attain the extremum, and how many do: they share the derivative equally."""
        from_x = METHODS["equal"](x, out)
        from_updates = METHODS["equal"](updates, self.pick(out, ids))
        count = self.with_reduction("add")(
            METHODS["cast"](from_x, x.dtype), ids, METHODS["cast"](from_updates, x.dtype)
        )
        return from_x, from_updates, count

    def _stays(self, x: Value, ids: Value, updates: Value) -> Value:
        """Whether an update is the last of its element."""
        order = reshape(iota((dim_prod(updates.shape),)), updates.shape)
        return METHODS["equal"](self.pick(self(zeros_like(x, i64), ids, order), ids), order)

    def _distinct(self, ids: Value) -> bool:
        """Whether ids are known not to repeat."""
        return False


@op("scatter_elements")
class ScatterElements(Scatter):
    """x with out[.., ids[.., i, ..], ..] combined with updates[.., i, ..] along an axis."""

    axis: int

    def infer(self, x: TensorType, ids: TensorType, updates: TensorType) -> TensorType:
        self.require_elements(x, ids, self.axis)
        self.require(ids.shape == updates.shape, f"ids {ids} and updates {updates} differ in shape", code="S207")
        self.require_reduction(x, updates)
        return x

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (types[0].shape[self.axis],)

    def numpy(self, x: np.ndarray, ids: np.ndarray, updates: np.ndarray) -> np.ndarray:
        if not x.size:
            return x.copy()
        index: list[np.ndarray] = list(np.indices(ids.shape, sparse=True))
        index[self.axis] = positions(ids, x.shape[self.axis], self.wrap, self.name)
        out = x.copy()
        if self.reduction == "none":
            out[tuple(index)] = updates
        else:
            UFUNCS[self.reduction].at(out, tuple(index), updates)
        return out

    def with_reduction(self, reduction: str) -> ScatterElements:
        return ScatterElements(reduction, self.wrap, self.axis)

    def pick(self, x: Value, ids: Value) -> Value:
        return picked(GatherElements(self.axis, self.wrap), x, ids, self.id_sizes(x.type, ids.type))

    def others(self, x: Value, ids: Value, updates: Value) -> Value:
        return products_of_others(updates, non_negative(ids, x.shape[self.axis], self.wrap), self.axis)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        wide = (spread(x, b, size) for x, b in zip(inputs, batched, strict=True))
        return ScatterElements(self.reduction, self.wrap, self.axis + 1)(*wide)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, ids, updates = inputs
        off_axis = [(a, n) for a, n in enumerate(ids.shape) if a != self.axis]
        inside = k.all_of(*(k.lt(index[a], k.index(n)) for a, n in off_axis if n != x.shape[a]))

        def at(j: Expr) -> tuple[Expr, ...]:
            return (*index[: self.axis], j, *index[self.axis + 1 :])

        def hit(j: Expr) -> Expr:
            return k.eq(clamp_id(k, ids[at(j)], x.shape[self.axis], self.wrap), index[self.axis])

        return k.guard(
            inside,
            lambda: combine(k, self.reduction, x[index], ids.shape[self.axis], hit, lambda j: updates[at(j)]),
            x[index],
        )

    @classmethod
    def samples(cls) -> list[Sample]:
        found = [
            sample
            for r in REDUCTIONS
            for sample in (
                Sample(f32[4, 3], draw(i64[5, 3], 0, 4), f32[5, 3], axis=0, reduction=r, wrap=False),
                Sample(f64[2, 4, 3], draw(i32[2, 2, 2], -4, 4), f64[2, 2, 2], axis=1, reduction=r, wrap=True),
            )
        ]
        repeated = np.array([[0, 0, 1], [2, 2, 2]])
        zeros_inside = np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 1.5]], np.float32)
        return [
            *found, Sample(f32[2, 3], repeated, zeros_inside, axis=1, reduction="mul", wrap=False),
            Sample(f32[3], draw(i64[0], 0, 3), f32[0], axis=0, reduction="add", wrap=False),
            Sample(i32[4], draw(i64[6], 0, 4), i32[6], axis=0, reduction="max", wrap=False, grad=False),
            Sample(bool_[4], draw(i64[2], 0, 4), bool_[2], axis=0, reduction="none", wrap=False, grad=False),
        ]  # fmt: skip


@op("scatter_nd")
class ScatterND(Scatter):
    """x with updates combined at coordinates: the shapes of gather_nd, with updates in the place of its output."""

    batch_dims: int

    def infer(self, x: TensorType, ids: TensorType, updates: TensorType) -> TensorType:
        rows, rest = self.require_coordinates(x, ids, self.batch_dims)
        shape = (*x.shape[: self.batch_dims], *rows, *rest)
        self.require(updates.shape == shape, f"updates must have shape {show_shape(shape)}, got {updates}", code="S208")
        self.require_reduction(x, updates)
        return x

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        x, ids = types[:2]
        return x.shape[self.batch_dims : self.batch_dims + ids.shape[-1].__index__()]

    def numpy(self, x: np.ndarray, ids: np.ndarray, updates: np.ndarray) -> np.ndarray:
        if not x.size:
            return x.copy()
        rows = coordinate_rows(x.shape, ids, self.batch_dims, self.wrap, self.name)
        out = as_rows(x, self.batch_dims + ids.shape[-1]).copy()
        if self.reduction == "none":
            out[rows] = updates
        else:
            UFUNCS[self.reduction].at(out, rows, updates)
        return out.reshape(x.shape)

    def with_reduction(self, reduction: str) -> ScatterND:
        return ScatterND(reduction, self.wrap, self.batch_dims)

    def pick(self, x: Value, ids: Value) -> Value:
        return picked(GatherND(self.batch_dims, self.wrap), x, ids, self.id_sizes(x.type, ids.type))

    def others(self, x: Value, ids: Value, updates: Value) -> Value:
        lead = ids.ndim - 1
        position = zeros(ids.shape[:-1], i64)
        sizes = x.shape[: self.batch_dims + ids.shape[-1].__index__()]
        for a, size in enumerate(sizes):
            if a < self.batch_dims:
                step = iota(ids.shape[:-1], a)
            else:
                column = reshape(narrow(ids, -1, a - self.batch_dims, 1), ids.shape[:-1])
                step = non_negative(column, size, self.wrap)
            position = position * METHODS["dim_size"](size) + METHODS["cast"](step, i64)
        flat = reshape(updates, (dim_prod(updates.shape[:lead]), *updates.shape[lead:]))
        keys = reshape(position, (flat.shape[0], *(1,) * (flat.ndim - 1)))
        return reshape(products_of_others(flat, broadcast_to(keys, flat.shape), 0), updates.shape)

    def _distinct(self, ids: Value) -> bool:
        if not isinstance(ids.node.op, Constant) or self.batch_dims or self.wrap or ids.shape[-1] == 0:
            return False
        rows = ids.node.op.data.array.reshape(-1, ids.shape[-1])
        return len(np.unique(rows, axis=0)) == len(rows)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        wide = (spread(x, b, size) for x, b in zip(inputs, batched, strict=True))
        return ScatterND(self.reduction, self.wrap, self.batch_dims + 1)(*wide)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, ids, updates = inputs
        lead = len(ids.shape) - 1
        count = len(x.shape) - (len(updates.shape) - lead) - self.batch_dims
        batch, rows = index[: self.batch_dims], ids.shape[self.batch_dims : -1]
        here, rest = index[self.batch_dims : self.batch_dims + count], index[self.batch_dims + count :]

        def row(j: Expr) -> tuple[Expr, ...]:
            return (*batch, *k.unflatten(j, rows))

        def hit(j: Expr) -> Expr:
            sizes = x.shape[self.batch_dims :]
            return k.all_of(*(
                k.eq(clamp_id(k, ids[(*row(j), k.index(c))], sizes[c], self.wrap), here[c]) for c in range(count)
            ))  # fmt: skip

        return combine(k, self.reduction, x[index], dim_prod(rows), hit, lambda j: updates[(*row(j), *rest)])

    @classmethod
    def samples(cls) -> list[Sample]:
        found = [
            Sample(
                draw(f32[3, 4, 2], distinct=True),
                draw(i64[6, 2], 0, 3),
                f32[6, 2],
                batch_dims=0,
                reduction=r,
                wrap=False,
            )
            for r in REDUCTIONS
        ]
        for r in REDUCTIONS:
            found.append(
                Sample(f64[2, 3, 3], draw(i32[2, 4, 1], -3, 3), f64[2, 4, 3], batch_dims=1, reduction=r, wrap=True)
            )
        return [
            *found, Sample(f32[3], np.array([[1], [1], [1], [0]]), np.array([0, 2, 0, 3], np.float32),
                           batch_dims=0, reduction="mul", wrap=False),
            Sample(f32[3, 2], draw(i64[2, 0], 0, 1), f32[2, 3, 2], batch_dims=0, reduction="add", wrap=False),
            Sample(f16[3], draw(i64[0, 1], 0, 3), f16[0], batch_dims=0, reduction="none", wrap=False),
            Sample(i64[3, 2], draw(i64[2, 2], 0, 2), i64[2], batch_dims=0, reduction="min", wrap=False, grad=False),
        ]  # fmt: skip


def combine(
    k: KernelBuilder, reduction: str, x: Expr, count: Dim, hit: Callable[[Expr], Expr], update: Callable[[Expr], Expr]
) -> Expr:
    """One output element: every update is asked whether it goes here. Backends scatter directly where they can."""
    if reduction == "none":
        last = k.reduce("max", (count,), lambda j: k.select(hit(j), k.index(j), k.index(-1)))
        found = k.ge(last, k.index(0))
        return k.guard(found, lambda: update(k.max(last, k.index(0))), x)
    kind = KERNELS[reduction]
    if kind in ("max", "min"):
        # x stands in for updates that go elsewhere: it takes part anyway
        best = k.reduce(kind, (count,), lambda j: k.select(hit(j), update(j), x))
        return getattr(k, kind)(x, best) if count != 0 else x
    neutral = 0 if kind == "sum" else 1
    total = k.reduce(kind, (count,), lambda j: k.select(hit(j), update(j), k.const(neutral, x.dtype)))
    return x + total if kind == "sum" else x * total


def picked(gather: Indexed, x: Value, ids: Value, sizes: Sequence[Dim]) -> Value:
    """What updates of these ids reach; those of an empty axis go nowhere."""
    if all(n != 0 for n in sizes):
        made: Value = gather(x, ids)
        return made
    (kind,) = gather.infer_types([x.type, ids.type])
    return zeros(kind.shape, kind.dtype)


def non_negative(ids: Value, size: Dim, wrap: bool) -> Value:
    """Ids that count from the front."""
    if not wrap:
        return ids
    return METHODS["where"](ids < 0, ids + METHODS["cast"](METHODS["dim_size"](size), ids.dtype), ids)


def products_of_others(x: Value, keys: Value, axis: int) -> Value:
    """For each element, the product of the other elements on its line along the axis that have the same key.

    Sorted by key, the elements of a group lie side by side, and the products before and after each one are recurrences
    that start again with each group: nothing is divided, so zeros are exact, in every order of differentiation.
    """
    order = METHODS["argsort"](keys, axis)
    groups, factors = gather_elements(keys, order, axis), gather_elements(x, order, axis)

    def running(reverse: bool) -> Value:
        near = shifted(groups, axis, -1, reverse=reverse)
        first = METHODS["not_equal"](groups, near)
        zero, one = constant(0, x.dtype), constant(1, x.dtype)
        rate = METHODS["where"](first, zero, shifted(factors, axis, 0.0, reverse=reverse))
        return LinearRecurrence(axis, reverse)(rate, METHODS["where"](first, one, broadcast_to(zero, x.shape)))

    return gather_elements(running(False) * running(True), METHODS["argsort"](order, axis), axis)


@op("scatter_add")
class ScatterAdd(Indexed):
    """Zeros [rows, *rest] with updates [*ids.shape, *rest] added at rows: the transpose of gather."""

    rows: Dim
    wrap: bool

    dtypes = "numeric"
    ids_read = False

    def infer(self, updates: TensorType, ids: TensorType) -> TensorType:
        self.require_ids(ids)
        self.require_dtype(
            accepts("numeric", updates.dtype), f"does not take {updates}, only numeric types", code="D104"
        )
        fits = updates.ndim >= ids.ndim and updates.shape[: ids.ndim] == ids.shape
        self.require(fits, f"updates {updates} do not begin with the shape of ids {ids}", code="S209")
        return updates.with_shape((self.rows, *updates.shape[ids.ndim :]))

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (self.rows,)

    def numpy(self, updates: np.ndarray, ids: np.ndarray) -> np.ndarray:
        rows = self.rows.__index__()
        out = np.zeros((rows, *updates.shape[ids.ndim :]), updates.dtype)
        if out.size:
            np.add.at(out, positions(ids, rows, self.wrap, self.name), updates)
        return out

    def jvp(self, updates: Value, ids: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0], ids)

    def vjp(self, updates: Value, ids: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return picked(Gather(0, self.wrap), ct, ids, (self.rows,)), None

    def vmap(self, updates: Value, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        if not batched[1]:
            return move_group(self(move_group(updates, 0, 1, ids.ndim), ids), 1, 1, 0)
        updates = spread(updates, batched[0], size)
        blank = zeros((size, self.rows, *updates.shape[ids.ndim :]), updates.dtype)
        return ScatterND("add", self.wrap, 1)(blank, reshape(ids, (*ids.shape, 1)), updates)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        updates, ids = inputs

        def part(*at: Expr) -> Expr:
            hit = k.eq(clamp_id(k, ids[at], self.rows, self.wrap), index[0])
            return k.select(hit, updates[(*at, *index[1:])], k.const(0, updates.dtype))

        return k.reduce("sum", ids.shape, part)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[5, 3], draw(i64[5], 0, 4), rows=4, wrap=False),
            Sample(f32[2, 3, 2, 2], draw(i32[2, 3], -4, 4), rows=4, wrap=True),
            Sample(f32[2], draw(i64[()], 0, 3), rows=3, wrap=False),
            Sample(f64[0, 2], draw(i64[0], 0, 3), rows=3, wrap=False),
            Sample(i32[6], draw(i64[6], 0, 2), rows=2, wrap=False, grad=False),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def scatter_elements(
    x: Operand, ids: Operand, updates: Operand, axis: int = 0, *, reduction: str = "none", wrap: bool = False
) -> Value:
    """x with one element combined for each id along an axis; reduction is none, add, mul, max or min."""
    value, changes = promoted(x, updates)
    at = normalize_axis(axis, value.ndim, "scatter_elements")
    return ScatterElements(reduction, wrap, at)(value, as_ids(ids, "scatter_elements"), changes)


@function()
def put_along_axis(x: Operand, ids: Operand, updates: Operand, axis: int = -1) -> Value:
    """x with one element replaced for each id along an axis; ids and updates broadcast, negative ids wrap."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim, "put_along_axis")
    _, positions = aligned(value, as_ids(ids, "put_along_axis"), at, "put_along_axis")
    changes = METHODS["cast"](as_value(updates), value.dtype)
    return ScatterElements("none", True, at)(value, positions, broadcast_to(changes, positions.shape))


@function()
def scatter_nd(
    x: Operand, ids: Operand, updates: Operand, *, reduction: str = "none", batch_dims: int = 0, wrap: bool = False
) -> Value:
    """x with updates combined at the coordinates in the last axis of ids."""
    value, changes = promoted(x, updates)
    return ScatterND(reduction, wrap, batch_dims)(value, as_ids(ids, "scatter_nd"), changes)


@function()
def scatter_add(updates: Operand, ids: Operand, rows: Dim, *, wrap: bool = False) -> Value:
    """Zeros [rows, …] with updates added at rows; they add up where ids repeat."""
    return ScatterAdd(rows, wrap)(as_value(updates), as_ids(ids, "scatter_add"))


@function()
def index_add(x: Operand, axis: int, ids: Operand, updates: Operand) -> Value:
    """x with updates added to the rows that ids name along an axis; negative ids count from the end."""
    value, changes = promoted(x, updates)
    at = normalize_axis(axis, value.ndim, "index_add")
    positions = flatten(as_ids(ids, "index_add"))
    rows = ScatterND("add", True, 0)(
        move_group(value, at, 1, 0), reshape(positions, (*positions.shape, 1)), move_group(changes, at, 1, 0)
    )
    return move_group(rows, 0, 1, at)
