"""Ops that move elements without computing: reshape, transpose, broadcast, slice, concat, pad, flip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import (
    Dim,
    TensorType,
    as_dtype,
    bool_,
    broadcast_dims,
    c64,
    dim_prod,
    dim_spread,
    divide_exactly,
    f16,
    f32,
    floordiv,
    i32,
    i64,
    known_le,
    normalize_axes,
    normalize_axis,
    show_shape,
)
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Op, Sample, UnaryOp, Value, function, op
from strata.ops.base.elementwise import lift, unbroadcast
from strata.ops.base.frontend import Operand, as_value, full_shape, promoted

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


class Movement(UnaryOp):
    """A linear op that only moves elements: any dtype, and its tangent is itself applied to the tangent."""

    dtypes = "any"

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return self(dx)


@op("reshape")
class Reshape(Movement):
    """The same elements in row-major order under another shape."""

    shape: tuple[Dim, ...]

    def infer(self, x: TensorType) -> TensorType:
        self.require(
            x.size == dim_prod(self.shape),
            f"{x} has {x.size} elements, the shape {show_shape(self.shape)} has {dim_prod(self.shape)}",
            code="S110",
        )
        return x.with_shape(self.shape)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.shape)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return Reshape(x.shape)(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return Reshape((size, *self.shape))(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        return x[k.reshape(index, self.shape, x.shape)]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], shape=(2, 6)), Sample(f32[()], shape=(1, 1)), Sample(f32[0, 3], shape=(3, 0)),
            Sample(bool_[4], shape=(2, 2)), Sample(c64[4], shape=(2, 2), grad=False),
            Sample(f16[2, 3, 4], shape=(6, 4)),
        ]  # fmt: skip


@op("transpose")
class Transpose(Movement):
    """Axes in another order: output axis i is input axis perm[i]."""

    perm: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        self.require(
            sorted(self.perm) == list(range(x.ndim)),
            f"{self.perm} is not a permutation of the axes of {x}",
            code="S111",
        )
        return x.with_shape([x.shape[p] for p in self.perm])

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(self.perm)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return Transpose(inverse_permutation(self.perm))(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return Transpose((0, *(p + 1 for p in self.perm)))(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return inputs[0][tuple(index[i] for i in inverse_permutation(self.perm))]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 4], perm=(1, 0)), Sample(f32[2, 3, 4], perm=(2, 0, 1)), Sample(f32[()], perm=()),
                Sample(f16[0, 3], perm=(1, 0)), Sample(i64[2, 3], perm=(1, 0), grad=False)]  # fmt: skip


def inverse_permutation(perm: Sequence[int]) -> tuple[int, ...]:
    inverse = [0] * len(perm)
    for i, p in enumerate(perm):
        inverse[p] = i
    return tuple(inverse)


@op("broadcast_to")
class BroadcastTo(Movement):
    """NumPy broadcasting to a shape."""

    shape: tuple[Dim, ...]

    def infer(self, x: TensorType) -> TensorType:
        fits = x.ndim <= len(self.shape) and all(
            broadcast_dims(a, b) == b for a, b in zip(x.shape[::-1], self.shape[::-1], strict=False)
        )
        self.require(fits, f"{x} does not broadcast to {show_shape(self.shape)}", code="S112")
        return x.with_shape(self.shape)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, self.shape)  # type: ignore[arg-type]

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return unbroadcast(ct, x.shape)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return BroadcastTo((size, *self.shape))(lift(x, len(self.shape)))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return inputs[0][k.broadcast(index, inputs[0].shape)]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 1], shape=(2, 3, 4)), Sample(f32[()], shape=(2, 2)), Sample(f32[1], shape=(0,)),
                Sample(bool_[1, 3], shape=(2, 3), grad=False)]  # fmt: skip


@op("slice")
class Slice(Movement):
    """Elements start, start + step, … below stop, on every axis; steps are positive."""

    start: tuple[Dim, ...]
    stop: tuple[Dim, ...]
    step: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        self.require(
            len(self.start) == len(self.stop) == len(self.step) == x.ndim,
            f"{x} needs a range for each axis",
            code="S113",
        )
        shape: list[Dim] = []
        for axis, (size, start, stop, step) in enumerate(zip(x.shape, self.start, self.stop, self.step, strict=True)):
            bad = step < 1 or not _may_be_le(0, start) or not _may_be_le(start, stop) or not _may_be_le(stop, size)
            self.require(not bad, f"range {start}:{stop}:{step} does not lie within axis {axis} of {x}", code="S114")
            shape.append(floordiv(stop - start + (step - 1), step))
        return x.with_shape(shape)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x[tuple(slice(a, b, s) for a, b, s in zip(self.start, self.stop, self.step, strict=True))]

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        interior = tuple(s - 1 for s in self.step)
        spread = [dim_spread(n, s) for n, s in zip(out.shape, self.step, strict=True)]
        high = tuple(size - start - n for size, start, n in zip(x.shape, self.start, spread, strict=True))
        return Pad(self.start, high, interior, 0.0)(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return Slice((0, *self.start), (size, *self.stop), (1, *self.step))(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return inputs[0][
            tuple(i * step + k.index(start) for i, start, step in zip(index, self.start, self.step, strict=True))
        ]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[5, 6], start=(1, 0), stop=(4, 6), step=(1, 2)), Sample(f32[5], start=(2,), stop=(2,), step=(1,)),
            Sample(f32[7, 1], start=(0, 0), stop=(7, 1), step=(3, 1)),
            Sample(i32[4], start=(1,), stop=(3,), step=(1,), grad=False),
        ]  # fmt: skip


def _may_be_le(a: Dim, b: Dim) -> bool:
    """False only when a > b for every value of the symbols."""
    return not known_le(b + 1, a)


@op("pad")
class Pad(Movement):
    """A constant around (low, high) and between (interior) the elements of each axis."""

    low: tuple[Dim, ...]
    high: tuple[Dim, ...]
    interior: tuple[int, ...]
    value: float

    def infer(self, x: TensorType) -> TensorType:
        self.require(
            len(self.low) == len(self.high) == len(self.interior) == x.ndim,
            f"{x} needs padding for each axis",
            code="S115",
        )
        shape: list[Dim] = []
        for axis, (size, low, high, interior) in enumerate(
            zip(x.shape, self.low, self.high, self.interior, strict=True)
        ):
            bad = not _may_be_le(0, low) or not _may_be_le(0, high) or interior < 0
            self.require(not bad, f"negative padding ({low}, {high}, {interior}) on axis {axis} of {x}", code="S116")
            shape.append(low + dim_spread(size, interior + 1) + high)
        return x.with_shape(shape)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        out = np.full(self.infer(TensorType(as_dtype(x.dtype), x.shape)).static_shape, self.value, x.dtype)
        out[tuple(self._inside(x.shape))] = x
        return out

    def _inside(self, shape: Sequence[int]) -> list[slice]:
        return [
            slice(low, low + (n - 1) * (interior + 1) + 1 if n else low, interior + 1)
            for n, low, interior in zip(shape, self.low, self.interior, strict=True)
        ]

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return Pad(self.low, self.high, self.interior, 0.0)(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        stops = [
            low + dim_spread(n, interior + 1) for n, low, interior in zip(x.shape, self.low, self.interior, strict=True)
        ]
        return Slice(self.low, tuple(stops), tuple(i + 1 for i in self.interior))(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return Pad((0, *self.low), (0, *self.high), (0, *self.interior), self.value)(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        inside, source = k.const(True, bool_), []
        for i, size, low, high, interior in zip(index, x.shape, self.low, self.high, self.interior, strict=True):
            at = i - k.index(low) if low != 0 else i
            if low != 0:
                inside = k.and_(inside, k.ge(at, k.index(0)))
            if interior:
                inside = k.and_(inside, k.eq(k.mod(at, k.index(interior + 1)), k.index(0)))
                at = k.floordiv(at, k.index(interior + 1))
            if high != 0 or interior:
                inside = k.and_(inside, k.lt(at, k.index(size)))
            source.append(at)
        return k.guard(inside, lambda: x[tuple(source)], k.const(self.value, x.dtype))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], low=(1, 0), high=(0, 2), interior=(0, 1), value=0.0),
            Sample(f32[0, 2], low=(1, 1), high=(1, 0), interior=(0, 0), value=2.0),
            Sample(f32[()], low=(), high=(), interior=(), value=0.0),
            Sample(i32[3], low=(2,), high=(1,), interior=(2,), value=7.0, grad=False),
        ]  # fmt: skip


@op("flip")
class Flip(Movement):
    """Elements in reverse order along axes."""

    axes: tuple[int, ...]

    def infer(self, x: TensorType) -> TensorType:
        self.require(all(0 <= a < x.ndim for a in self.axes), f"axes {self.axes} are not axes of {x}", code="S103")
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.flip(x, self.axes)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return self(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return Flip(tuple(a + 1 for a in self.axes))(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        return x[
            tuple(
                k.index(n - 1) - i if axis in self.axes else i
                for axis, (i, n) in enumerate(zip(index, x.shape, strict=True))
            )
        ]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 4], axes=(1,)), Sample(f32[2, 3], axes=(0, 1)), Sample(f32[0], axes=(0,))]


@op("concat")
class Concat(Op):
    """Values one after the other along an axis."""

    axis: int

    dtypes = "any"
    many: ClassVar[int] = 32  # inputs that one kernel is made for: with more, each element asks too many whose it is

    def infer(self, *xs: TensorType) -> TensorType:
        self.require(len(xs) > 0, "needs at least one value", code="S117")
        first = xs[0]
        self.require(0 <= self.axis < max(first.ndim, 1), f"axis {self.axis} is not an axis of {first}", code="S103")
        for x in xs[1:]:
            self.require_dtype(x.dtype is first.dtype, f"values differ in dtype, {first} and {x}", code="D103")
            same = x.ndim == first.ndim and x.drop(self.axis).shape == first.drop(self.axis).shape
            self.require(same, f"{first} and {x} differ off axis {self.axis}", code="S118")
        total: Dim = 0
        for x in xs:
            total = total + x.shape[self.axis]
        return first.with_shape([*first.shape[: self.axis], total, *first.shape[self.axis + 1 :]])

    def numpy(self, *xs: np.ndarray) -> np.ndarray:
        return np.concatenate(xs, self.axis)

    def jvp(self, *xs: Value, out: Value, dx: tuple[Value | None, ...]) -> Value:
        return self(*(METHODS["zeros_like"](x) if t is None else t for x, t in zip(xs, dx, strict=True)))

    def vjp(self, *xs: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        parts, start = [], 0
        for x in xs:
            parts.append(narrow(ct, self.axis, start, x.shape[self.axis]))
            start = start + x.shape[self.axis]  # type: ignore[assignment]
        return tuple(parts)

    def vmap(self, *xs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        spread = (x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(xs, batched, strict=True))
        return Concat(self.axis + 1)(*spread)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        at = index[self.axis]
        ends: list[Dim] = []
        for x in inputs:
            ends.append((ends[-1] if ends else 0) + x.shape[self.axis])

        def part(i: int) -> Expr:
            start = ends[i - 1] if i else 0
            inner = at - k.index(start) if start != 0 else at
            return inputs[i][(*index[: self.axis], inner, *index[self.axis + 1 :])]

        result = k.const(0, inputs[0].dtype)
        for i in reversed(range(len(inputs))):
            inside = k.lt(at, k.index(ends[i])) if i + 1 < len(inputs) else k.const(True, bool_)
            if i:
                inside = k.and_(inside, k.ge(at, k.index(ends[i - 1])))
            result = k.guard(inside, partial(part, i), result)
        return result

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 3], f32[2, 1], axis=1), Sample(f32[2], axis=0),
            Sample(f32[0, 3], f32[2, 3], f32[1, 3], axis=0), Sample(bool_[2], bool_[3], axis=0, grad=False),
            Sample(i64[1, 2], i64[1, 2], axis=0, grad=False),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function("view")
def reshape(x: Operand, shape: Any, *rest: Any) -> Value:
    """The same elements under another shape; one size may be -1."""
    value = as_value(x)
    sizes = list(shape) if isinstance(shape, (tuple, list)) else [shape, *rest]
    unknown = [i for i, d in enumerate(sizes) if isinstance(d, (int, np.integer)) and d == -1]
    if len(unknown) > 1:
        raise ShapeError(f"reshape: {sizes} has more than one -1", code="S119")
    if unknown:
        known = [d for i, d in enumerate(sizes) if i != unknown[0]]
        missing = _missing_size(value.shape, known)
        if missing is None:
            raise ShapeError(
                f"reshape: {value.type} has {value.type.size} elements, which {dim_prod(known)} does not divide",
                code="S120",
            )
        sizes[unknown[0]] = missing
    target = full_shape(sizes)
    return value if target == value.shape else Reshape(target)(value)


def _missing_size(shape: Sequence[Dim], known: Sequence[Dim]) -> Dim | None:
    """What is left of a shape beside known sizes. Sizes of 0 cancel each other, as a symbol does that may be 0: so
    [0, 3, 4] as [0, -1] is [0, 12]. None where it does not divide."""
    empty, other = (sum(d == 0 for d in sizes) for sizes in (shape, known))
    if empty > other:
        return 0
    if empty < other:
        return None
    return divide_exactly(dim_prod([d for d in shape if d != 0]), dim_prod([d for d in known if d != 0]))


@function("permute_dims", "permute")
def transpose(x: Operand, *axes: Any) -> Value:
    """Axes in another order; reversed when none are given."""
    value = as_value(x)
    flat = list(axes[0]) if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else list(axes)
    if flat in ([], [None]):
        flat = list(reversed(range(value.ndim)))
    perm = tuple(normalize_axis(a, value.ndim, "transpose") for a in flat)
    return value if perm == tuple(range(value.ndim)) else Transpose(perm)(value)


@function()
def swapaxes(x: Operand, axis1: int, axis2: int) -> Value:
    """Two axes exchanged."""
    value = as_value(x)
    perm = list(range(value.ndim))
    a, b = normalize_axis(axis1, value.ndim, "swapaxes"), normalize_axis(axis2, value.ndim, "swapaxes")
    perm[a], perm[b] = perm[b], perm[a]
    return transpose(value, perm)


@function()
def moveaxis(x: Operand, source: int, destination: int) -> Value:
    """One axis moved to another place."""
    value = as_value(x)
    a, b = normalize_axis(source, value.ndim, "moveaxis"), normalize_axis(destination, value.ndim, "moveaxis")
    perm = [i for i in range(value.ndim) if i != a]
    perm.insert(b, a)
    return transpose(value, perm)


@function("expand")
def broadcast_to(x: Operand, shape: Any) -> Value:
    """Broadcast to a shape; -1 keeps a size."""
    value = as_value(x)
    sizes = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    lead = len(sizes) - value.ndim
    sizes = [value.shape[i - lead] if isinstance(d, int) and d == -1 and i >= lead else d for i, d in enumerate(sizes)]
    target = full_shape(sizes)
    return value if target == value.shape else BroadcastTo(target)(value)


@function("expand_dims", "unsqueeze")
def insert_axis(x: Operand, axis: int) -> Value:
    """A new axis of size 1."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim + 1, "insert_axis")
    return Reshape((*value.shape[:at], 1, *value.shape[at:]))(value)


@function()
def squeeze(x: Operand, axis: int | Sequence[int] | None = None) -> Value:
    """Without axes of size 1."""
    value = as_value(x)
    axes = (
        normalize_axes(axis, value.ndim, "squeeze")
        if axis is not None
        else tuple(i for i, d in enumerate(value.shape) if d == 1)
    )
    for a in axes:
        if value.shape[a] != 1:
            raise ShapeError(f"squeeze: axis {a} of {value.type} has size {value.shape[a]}, not 1", code="S121")
    return reshape(value, value.type.drop(*axes).shape)


@function()
def flatten(x: Operand, start_axis: int = 0, end_axis: int = -1) -> Value:
    """Consecutive axes as one."""
    value = as_value(x)
    if value.ndim == 0:
        return reshape(value, (1,))
    a, b = normalize_axis(start_axis, value.ndim, "flatten"), normalize_axis(end_axis, value.ndim, "flatten")
    return reshape(value, (*value.shape[:a], dim_prod(value.shape[a : b + 1]), *value.shape[b + 1 :]))


@function()
def narrow(x: Operand, axis: int, start: Dim, length: Dim) -> Value:
    """`length` elements from `start` along one axis."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim, "narrow")
    if start == 0 and length == value.shape[at]:
        return value
    if known_le(value.shape[at] + 1, start + length):
        raise ShapeError(f"narrow: {start}..{start + length} is outside axis {at} of {value.type}", code="S122")
    starts = tuple(start if i == at else 0 for i in range(value.ndim))
    stops = tuple(start + length if i == at else d for i, d in enumerate(value.shape))
    return Slice(starts, stops, (1,) * value.ndim)(value)


@function()
def pad_constant(x: Operand, widths: Sequence[tuple[Dim, Dim]], value: float = 0.0) -> Value:
    """A constant around each axis: (before, after) pairs."""
    operand = as_value(x)
    if len(widths) != operand.ndim:
        raise ShapeError(f"pad: {len(widths)} pairs for {operand.type}", code="S115")
    if all(w == (0, 0) for w in map(tuple, widths)):
        return operand
    low, high = tuple(w[0] for w in widths), tuple(w[1] for w in widths)
    return Pad(low, high, (0,) * operand.ndim, float(value))(operand)


@function()
def flip(x: Operand, axis: int | Sequence[int] | None = None) -> Value:
    """Reversed along axes; all of them by default."""
    value = as_value(x)
    axes = normalize_axes(axis, value.ndim, "flip")
    return Flip(axes)(value) if axes else value


@function("concatenate", "cat")
def concat(xs: Sequence[Operand], axis: int = 0) -> Value:
    """Values one after the other along an axis, promoted to one dtype."""
    if isinstance(xs, Value) or not len(xs):
        raise OptionError("concat: needs a sequence of at least one value", code="S117")
    values = promoted(*xs)
    at = normalize_axis(axis, values[0].ndim, "concat")
    return values[0] if len(values) == 1 else Concat(at)(*values)


@function()
def stack(xs: Sequence[Operand], axis: int = 0) -> Value:
    """Values along a new axis."""
    return concat([insert_axis(x, axis) for x in promoted(*xs)], axis)


@function()
def split(x: Operand, parts: int | Sequence[Dim], axis: int = 0) -> tuple[Value, ...]:
    """Equal parts, or parts of given sizes, along an axis."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim, "split")
    if isinstance(parts, int):
        size = divide_exactly(value.shape[at], parts)
        if size is None:
            raise ShapeError(f"split: axis {at} of {value.type} does not divide into {parts} equal parts", code="S123")
        parts = [size] * parts
    if sum(parts) != value.shape[at]:
        raise ShapeError(f"split: sizes {list(parts)} do not add up to {value.shape[at]}", code="S123")
    pieces, start = [], 0
    for size in parts:
        pieces.append(narrow(value, at, start, size))
        start = start + size  # type: ignore[assignment]
    return tuple(pieces)
