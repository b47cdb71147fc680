"""Dynamic slices: windows of fixed size at a run-time position, as a KV cache reads and writes them.

A start that would let the window leave x is clamped to the nearest one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, TensorType, bool_, f16, f32, f64, i32, i64, show_shape
from strata.errors import DTypeError, ShapeError
from strata.kinds import counted
from strata.mir import METHODS, Op, Sample, Value, constant, draw, function, op
from strata.ops.base.creation import iota, zeros, zeros_like
from strata.ops.base.frontend import Operand, as_value, full_shape
from strata.ops.base.movement import reshape, stack, transpose
from strata.ops.indexing.indexing import GatherND, may_be_le, spread
from strata.ops.indexing.scattering import ScatterND

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


class Window(Op):
    """An op on a window of x; one start, an i64 or i32 scalar, for each axis."""

    dtypes = "any"

    def require_window(self, x: TensorType, sizes: Sequence[Dim], starts: Sequence[TensorType]) -> None:
        self.require(
            len(starts) == len(sizes) == x.ndim,
            f"{x} needs a size and a start for each axis, got {show_shape(sizes)} and {counted(len(starts), 'start')}",
            code="S213",
        )
        for s in starts:
            self.require_dtype(s.dtype in (i32, i64), f"a start must be i32 or i64, got {s}", code="D202")
            self.require(s.ndim == 0, f"a start must be a scalar, got {s}", code="S214")
        fits = all(may_be_le(n, d) for n, d in zip(sizes, x.shape, strict=True))
        self.require(fits, f"a window {show_shape(sizes)} does not fit into {x}", code="S215")


def window_slices(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    first = [min(max(int(s), 0), d - n) for s, d, n in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))


def clamped_start(k: KernelBuilder, start: View, size: Dim, window: Dim) -> Expr:
    return k.index(0) if size == window else k.max(k.min(k.index(start[()]), k.index(size - window)), k.index(0))


def window_coordinates(
    starts: Sequence[Value], shape: Sequence[Dim], sizes: Sequence[Dim], batch: Dim
) -> tuple[list[int], Value]:
    """The axes along which the window is smaller than x, and coordinates [batch, *sizes of them, number of them]."""
    cut = [a for a, (d, n) in enumerate(zip(shape, sizes, strict=True)) if d != n]
    if not cut:
        return cut, zeros((batch, 0), i64)
    box = (batch, *(sizes[a] for a in cut))
    columns = []
    for i, a in enumerate(cut):
        last = METHODS["dim_size"](shape[a] - sizes[a])
        first = METHODS["maximum"](METHODS["minimum"](METHODS["cast"](starts[a], i64), last), constant(0, i64))
        columns.append(iota(box, i + 1) + reshape(first, (first.shape[0] if first.ndim else 1, *(1,) * len(cut))))
    return cut, stack(columns, -1)


def _cut_first(rank: int, cut: Sequence[int]) -> tuple[list[int], list[int]]:
    """The permutation of a batched value that brings the cut axes after the batch axis, and its inverse."""
    perm = [0, *(a + 1 for a in cut), *(a + 1 for a in range(rank) if a not in cut)]
    return perm, sorted(range(rank + 1), key=perm.__getitem__)


@op("dynamic_slice")
class DynamicSlice(Window):
    """A window of x of fixed sizes, from starts known at run time."""

    sizes: tuple[Dim, ...]

    def infer(self, x: TensorType, *starts: TensorType) -> TensorType:
        self.require_window(x, self.sizes, starts)
        return x.with_shape(self.sizes)

    def numpy(self, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
        return x[window_slices(x.shape, [int(n) for n in self.sizes], starts)]

    def jvp(self, x: Value, *starts: Value, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[0] is None else self(dx[0], *starts)

    def vjp(self, x: Value, *starts: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return DynamicUpdateSlice()(zeros_like(x), ct, *starts), *(None for _ in starts)

    def vmap(self, x: Value, *starts: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        x = spread(x, batched[0], size)
        if not any(batched[1:]):
            return DynamicSlice((size, *self.sizes))(x, constant(0, i64), *starts)
        cut, coordinates = window_coordinates(starts, x.shape[1:], self.sizes, size)
        perm, back = _cut_first(x.ndim - 1, cut)
        return transpose(GatherND(1, False)(transpose(x, perm), coordinates), back)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, *starts = inputs
        sizes = zip(index, starts, x.shape, self.sizes, strict=True)
        return x[tuple(i + clamped_start(k, s, d, n) for i, s, d, n in sizes)]

    @classmethod
    def samples(cls) -> list[Sample]:
        start = draw(i64[()], -1, 5)
        return [
            Sample(f32[5, 3], start, start, sizes=(2, 2)), Sample(f64[2, 4, 3], start, start, start, sizes=(2, 1, 3)),
            Sample(f32[()], sizes=()), Sample(f16[3], draw(i32[()], 0, 9), sizes=(0,)),
            Sample(f32[3], start, sizes=(3,)), Sample(bool_[4], start, sizes=(2,), grad=False),
            Sample(f32[0, 2], start, start, sizes=(0, 1)),
        ]  # fmt: skip


@op("dynamic_update_slice")
class DynamicUpdateSlice(Window):
    """x with a window replaced by the update, from starts known at run time."""

    def infer(self, x: TensorType, update: TensorType, *starts: TensorType) -> TensorType:
        self.require_dtype(x.dtype is update.dtype, f"{x} and the update {update} differ in dtype", code="D103")
        self.require_window(x, update.shape, starts)
        return x

    def numpy(self, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
        out = np.array(x)
        out[window_slices(x.shape, update.shape, starts)] = update
        return out

    def jvp(self, x: Value, update: Value, *starts: Value, out: Value, dx: tuple[Value | None, ...]) -> Value:
        moved = [zeros_like(v) if t is None else t for v, t in zip((x, update), dx[:2], strict=True)]
        return self(*moved, *starts)

    def vjp(self, x: Value, update: Value, *starts: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        to_update = DynamicSlice(update.shape)(ct, *starts)
        return self(ct, zeros_like(update), *starts), to_update, *(None for _ in starts)

    def vmap(self, x: Value, update: Value, *starts: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        x, update = spread(x, batched[0], size), spread(update, batched[1], size)
        if not any(batched[2:]):
            return self(x, update, constant(0, i64), *starts)
        cut, coordinates = window_coordinates(starts, x.shape[1:], update.shape[1:], size)
        perm, back = _cut_first(x.ndim - 1, cut)
        return transpose(ScatterND("none", False, 1)(transpose(x, perm), coordinates, transpose(update, perm)), back)

    def lower_into(self, k: KernelBuilder, out: Any, *inputs: View) -> None:
        update, *starts = inputs
        axes = k.axes(update.shape)
        places = zip(axes, starts, out.shape, update.shape, strict=True)
        k.store(out, axes, [i + clamped_start(k, s, d, n) for i, s, d, n in places], update[axes])

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, update, *starts = inputs
        inner: list[Expr] = []
        tests: list[Expr] = []
        for i, s, d, n in zip(index, starts, x.shape, update.shape, strict=True):
            at = i - clamped_start(k, s, d, n) if d != n else i
            inner.append(at)
            tests += [k.ge(at, k.index(0)), k.lt(at, k.index(n))] if d != n else []
        return k.guard(k.all_of(*tests), lambda: update[tuple(inner)], x[index])

    @classmethod
    def samples(cls) -> list[Sample]:
        start = draw(i64[()], -1, 5)
        return [
            Sample(f32[5, 3], f32[2, 2], start, start), Sample(f64[2, 4, 3], f64[2, 1, 3], start, start, start),
            Sample(f32[()], f32[()]), Sample(f16[3], f16[0], draw(i32[()], 0, 9)), Sample(f32[3], f32[3], start),
            Sample(bool_[4], bool_[2], start, grad=False), Sample(f32[0, 2], f32[0, 1], start, start),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


def _starts(x: Value, starts: Any, what: str) -> list[Value]:
    """Starts given one by one or as a vector, as i32 or i64 scalars."""
    if isinstance(starts, Value) and starts.ndim == 1:
        starts = [starts[i] for i in range(len(starts))]
    values = [as_value(s) for s in (starts if isinstance(starts, (tuple, list, np.ndarray)) else [starts])]
    if len(values) != x.ndim:
        raise ShapeError(f"{what}: {counted(len(values), 'start')} for {x.type}, which has {x.ndim} axes", code="S213")
    for v in values:
        if not v.dtype.is_int:
            raise DTypeError(f"{what}: a start must be an integer, got {v.type}", code="D202")
    return [v if v.dtype in (i32, i64) else METHODS["cast"](v, i64) for v in values]


@function()
def dynamic_slice(x: Operand, starts: Any, sizes: Any) -> Value:
    """A window of fixed sizes from starts known at run time, clamped so that it stays inside."""
    value = as_value(x)
    return DynamicSlice(full_shape(sizes))(value, *_starts(value, starts, "dynamic_slice"))


@function()
def dynamic_update_slice(x: Operand, update: Operand, starts: Any) -> Value:
    """A copy of x with a window replaced, from starts known at run time, clamped so that it stays inside."""
    value = as_value(x)
    given = METHODS["cast"](as_value(update), value.dtype)
    return DynamicUpdateSlice()(value, given, *_starts(value, starts, "dynamic_update_slice"))
