"""Arrangements made of movement ops: roll, tile, repeat, triangles, diagonals, ramps, grids, every padding mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import (
    Dim,
    SymExpr,
    as_dtype,
    broadcast_shapes,
    dim_max,
    dim_min,
    f32,
    i64,
    known_le,
    mod,
    normalize_axis,
)
from strata.errors import OptionError, ShapeError
from strata.kinds import counted
from strata.mir import METHODS, Value, constant, function
from strata.ops.base.creation import dim_size, iota, zeros
from strata.ops.base.frontend import Operand, as_value, promoted
from strata.ops.base.movement import Pad, Slice, broadcast_to, concat, flatten, flip, insert_axis, narrow, reshape
from strata.ops.indexing.indexing import Gather

PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")
Numbers = int | float


# ------------------------------------------------------------------------------------------------------------ repeating


@function()
def roll(x: Operand, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Value:
    """Elements moved along axes, those that leave one end entering at the other; of the flat array by default."""
    value = as_value(x)
    if axis is None:
        return reshape(roll(flatten(value), shift, 0), value.shape)
    axes = [axis] if isinstance(axis, (int, np.integer)) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, (int, np.integer)) else list(shift)
    if len(shifts) == 1:
        shifts *= len(axes)
    if len(shifts) != len(axes):
        raise OptionError(f"roll: {counted(len(shifts), 'shift')} for {len(axes)} axes", code="O207")
    for by, a in zip(shifts, axes, strict=True):
        at = normalize_axis(a, value.ndim, "roll")
        size = value.shape[at]
        turned = mod(int(by), dim_max(size, 1))  # nothing turns where there is nothing
        if turned != 0:
            head, tail = narrow(value, at, 0, size - turned), narrow(value, at, size - turned, turned)
            value = concat([tail, head], at)
    return value


@function()
def tile(x: Operand, reps: int | Sequence[int]) -> Value:
    """x repeated as a whole along each axis."""
    value = as_value(x)
    counts = [reps] if isinstance(reps, (int, np.integer, SymExpr)) else list(reps)
    rank = max(value.ndim, len(counts))
    counts = [1] * (rank - len(counts)) + counts
    shape = (1,) * (rank - value.ndim) + value.shape
    wide = reshape(value, tuple(d for size in shape for d in (1, size)))
    spread = broadcast_to(wide, tuple(d for n, size in zip(counts, shape, strict=True) for d in (n, size)))
    return reshape(spread, tuple(n * size for n, size in zip(counts, shape, strict=True)))


@function()
def repeat(x: Operand, repeats: int | Sequence[int] | np.ndarray, axis: int | None = None) -> Value:
    """Each element repeated in place along an axis, of the flat array by default; one count, or one for each."""
    value = as_value(x)
    if axis is None:
        value, axis = flatten(value), 0
    at = normalize_axis(axis, value.ndim, "repeat")
    size = value.shape[at]
    if isinstance(repeats, (int, np.integer, SymExpr)):
        spread = broadcast_to(insert_axis(value, at + 1), (*value.shape[: at + 1], repeats, *value.shape[at + 1 :]))
        return reshape(spread, (*value.shape[:at], size * repeats, *value.shape[at + 1 :]))
    counts = np.asarray(repeats)
    if counts.ndim != 1 or len(counts) not in (1, size):
        raise ShapeError(f"repeat: {list(counts.shape)} counts for axis {at} of {value.type}", code="S217")
    if len(counts) == 1:
        return repeat(value, int(counts[0]), at)
    return Gather(at, False)(value, constant(np.repeat(np.arange(len(counts)), counts)))


@function()
def unstack(x: Operand, axis: int = 0) -> tuple[Value, ...]:
    """The slices of x along an axis, without it."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim, "unstack")
    count = value.shape[at].__index__()
    return tuple(reshape(narrow(value, at, i, 1), value.type.drop(at).shape) for i in range(count))


@function()
def ravel(x: Operand) -> Value:
    """All elements in one axis."""
    return flatten(x)


@function()
def full_like(x: Operand, fill: Any, dtype: Any = None) -> Value:
    """One number in the shape of x."""
    value = as_value(x)
    return broadcast_to(constant(fill, value.dtype if dtype is None else dtype), value.shape)


@function()
def diff(x: Operand, n: int = 1, axis: int = -1) -> Value:
    """The n-th differences of neighbours along an axis."""
    value = as_value(x)
    at = normalize_axis(axis, value.ndim, "diff")
    if n < 0:
        raise OptionError(f"diff: the order must not be negative, got {n}", code="O200")
    for _ in range(n):
        if value.shape[at] == 0:
            return value
        rest = dim_max(value.shape[at] - 1, 0)  # a symbol may be 0, which has no differences either
        value = METHODS["subtract"](narrow(value, at, value.shape[at] - rest, rest), narrow(value, at, 0, rest))
    return value


@function()
def broadcast_arrays(*xs: Operand) -> tuple[Value, ...]:
    """Values broadcast to their common shape."""
    values = [as_value(x) for x in xs]
    shape = broadcast_shapes(*(v.shape for v in values), what="broadcast_arrays")
    return tuple(broadcast_to(v, shape) for v in values)


@function()
def meshgrid(*xs: Operand, indexing: str = "xy") -> tuple[Value, ...]:
    """Coordinate grids of vectors; "xy" swaps the first two axes, "ij" keeps them."""
    if indexing not in ("xy", "ij"):
        raise OptionError(f"meshgrid: indexing is 'xy' or 'ij', got {indexing!r}", code="O208")
    values = [flatten(as_value(x)) for x in xs]
    rank = len(values)
    order = [1, 0, *range(2, rank)] if indexing == "xy" and rank > 1 else list(range(rank))
    shape = tuple(values[order[a]].shape[0] for a in range(rank))
    grids = []
    for i, v in enumerate(values):
        at = order.index(i)
        grids.append(broadcast_to(reshape(v, tuple(v.shape[0] if a == at else 1 for a in range(rank))), shape))
    return tuple(grids)


# ---------------------------------------------------------------------------------------------- triangles and diagonals


def _below(rows: Dim, columns: Dim, offset: int) -> Value:
    """Whether column ≤ row + offset."""
    shape = (rows, columns)
    return iota(shape, 1) <= iota(shape, 0) + offset


def _matrix(x: Operand, what: str) -> Value:
    value = as_value(x)
    if value.ndim < 2:
        raise ShapeError(f"{what}: needs a matrix or a stack of matrices, got {value.type}", code="S218")
    return value


@function()
def tril(x: Operand, k: int = 0) -> Value:
    """The part on and below the k-th diagonal of the last two axes, zeros elsewhere."""
    value = _matrix(x, "tril")
    return METHODS["where"](_below(value.shape[-2], value.shape[-1], k), value, constant(0, value.dtype))


@function()
def triu(x: Operand, k: int = 0) -> Value:
    """The part on and above the k-th diagonal of the last two axes, zeros elsewhere."""
    value = _matrix(x, "triu")
    return METHODS["where"](_below(value.shape[-2], value.shape[-1], k - 1), constant(0, value.dtype), value)


def eye(n: Dim, m: Dim | None = None, k: int = 0, dtype: Any = f32) -> Value:
    """Ones on the k-th diagonal, zeros elsewhere."""
    return METHODS["cast"](_on_diagonal(n, n if m is None else m, k), as_dtype(dtype))


def tri(n: Dim, m: Dim | None = None, k: int = 0, dtype: Any = f32) -> Value:
    """Ones on and below the k-th diagonal, zeros elsewhere."""
    return METHODS["cast"](_below(n, n if m is None else m, k), as_dtype(dtype))


def _on_diagonal(rows: Dim, columns: Dim, offset: int) -> Value:
    shape = (rows, columns)
    return METHODS["equal"](iota(shape, 1), iota(shape, 0) + offset)


@function()
def diagonal(x: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """The elements of a diagonal of two axes, as a last axis."""
    value = _matrix(x, "diagonal")
    a, b = normalize_axis(axis1, value.ndim, "diagonal"), normalize_axis(axis2, value.ndim, "diagonal")
    if a == b:
        raise OptionError(f"diagonal: axes {axis1} and {axis2} are the same", code="O209")
    moved = METHODS["transpose"](value, [*(i for i in range(value.ndim) if i not in (a, b)), a, b])
    rows, columns = moved.shape[-2:]
    top, left = max(-offset, 0), max(offset, 0)
    count = dim_max(dim_min(rows - top, columns - left), 0)
    if count == 0:
        return zeros((*moved.shape[:-2], 0), value.dtype)
    if isinstance(columns, int) and known_le(1, count):  # in row-major order the diagonal is a stride
        flat = flatten(moved, -2, -1)
        lead, start = (0,) * (flat.ndim - 1), top * columns + left
        stop = start + (count - 1) * (columns + 1) + 1
        return Slice((*lead, start), (*flat.shape[:-1], stop), (*(1 for _ in lead), columns + 1))(flat)
    steps = iota((count,))
    return METHODS["getitem"](moved, (..., steps + top, steps + left))


@function()
def diag(x: Operand, k: int = 0) -> Value:
    """The k-th diagonal of a matrix, or a matrix with a vector on its k-th diagonal."""
    value = as_value(x)
    if value.ndim == 2:
        return diagonal(value, k)
    if value.ndim != 1:
        raise ShapeError(f"diag: needs a vector or a matrix, got {value.type}", code="S218")
    size = value.shape[0] + abs(k)
    line = pad(value, (0, abs(k)))
    spread = reshape(line, (size, 1) if k >= 0 else (1, size))
    return METHODS["where"](_on_diagonal(size, size, k), spread, constant(0, value.dtype))


@function()
def trace(x: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """The sum of a diagonal of two axes."""
    return METHODS["sum"](diagonal(x, offset, axis1, axis2), -1)


# ---------------------------------------------------------------------------------------------------------------- ramps


def arange(start: Any, stop: Any = None, step: Numbers = 1, dtype: Any = None) -> Value:
    """start, start + step, … below stop; from 0 when only a stop is given. Ints give i64, floats f32."""
    if stop is None:
        start, stop = 0, start
    start, stop, step = (int(v) if isinstance(v, np.integer) else v for v in (start, stop, step))
    if step == 0:
        raise OptionError("arange: the step must not be 0", code="O204")
    whole = all(isinstance(v, (int, SymExpr)) for v in (start, stop, step))
    wanted = as_dtype(dtype) if dtype is not None else i64 if whole else f32
    if whole:
        count = dim_max((stop - start + (step - (1 if step > 0 else -1))) // step, 0)
        ramp = iota((count,))
        if step != 1:
            ramp = ramp * step
        offset = dim_size(start) if isinstance(start, SymExpr) else start
        return METHODS["cast"](ramp if start == 0 else ramp + offset, wanted)
    count = max(math.ceil((stop - start) / step), 0)
    return constant(start + np.arange(count, dtype=np.float64) * step, wanted)


def linspace(start: Numbers, stop: Numbers, num: int = 50, endpoint: bool = True, dtype: Any = f32) -> Value:
    """`num` numbers evenly spaced from start to stop, which is included unless `endpoint` is false."""
    if num < 0:
        raise OptionError(f"linspace: the number of samples must not be negative, got {num}", code="O200")
    return constant(np.linspace(start, stop, num, endpoint), as_dtype(dtype))


# -------------------------------------------------------------------------------------------------------------- padding


@function()
def pad(x: Operand, widths: Any, mode: str = "constant", constant_values: Numbers = 0) -> Value:
    """Elements added before and after each axis.

    `widths` is one number, one (before, after) pair, or a pair for each axis; a negative width cuts. Modes: constant,
    edge (the outermost element), reflect (mirrored, without the outermost), symmetric (mirrored, with it), wrap. More
    may be added than the axis has.
    """
    value = as_value(x)
    if mode not in PAD_MODES:
        raise OptionError(f"pad: mode {mode!r} is not one of {', '.join(PAD_MODES)}", code="O201")
    pairs = _pairs(value, widths)
    for axis, (before, after) in enumerate(pairs):
        value = _cropped(value, axis, before, after)
    pairs = [(dim_max(before, 0), dim_max(after, 0)) for before, after in pairs]
    if mode == "constant":
        if all(w == 0 for pair in pairs for w in pair):
            return value
        low, high = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
        return Pad(low, high, (0,) * value.ndim, float(constant_values))(value)
    for axis, (before, after) in enumerate(pairs):
        if before != 0 or after != 0:
            value = _extended(value, axis, before, after, mode)
    return value


def _pairs(x: Value, widths: Any) -> list[tuple[Dim, Dim]]:
    found = _given_pairs(x, widths)
    return [(int(a) if isinstance(a, np.integer) else a, int(b) if isinstance(b, np.integer) else b) for a, b in found]


def _given_pairs(x: Value, widths: Any) -> list[tuple[Any, Any]]:
    def is_size(w: Any) -> bool:
        return isinstance(w, (int, np.integer, SymExpr)) and not isinstance(w, bool)

    if is_size(widths):
        return [(widths, widths)] * x.ndim
    rows = widths.tolist() if isinstance(widths, np.ndarray) else list(widths)
    if rows and all(is_size(w) for w in rows) and len(rows) in (1, 2):
        return [(rows[0], rows[-1])] * x.ndim
    pairs = [tuple(w) if isinstance(w, (tuple, list)) else (w, w) for w in rows]
    if len(pairs) == 1:
        pairs *= x.ndim
    if len(pairs) != x.ndim or not all(len(p) == 2 and is_size(p[0]) and is_size(p[1]) for p in pairs):
        raise ShapeError(f"pad: {widths!r} are not (before, after) widths for {x.type}", code="S115")
    return pairs


def _cropped(x: Value, axis: int, before: Dim, after: Dim) -> Value:
    start = -before if known_le(before, -1) else 0
    end = -after if known_le(after, -1) else 0
    if start == 0 and end == 0:
        return x
    if known_le(x.shape[axis] + 1, start + end):
        raise ShapeError(f"pad: cutting {start} and {end} from axis {axis} of {x.type} cuts too much", code="S219")
    return narrow(x, axis, start, x.shape[axis] - start - end)


def _extended(x: Value, axis: int, before: Dim, after: Dim, mode: str) -> Value:
    size = x.shape[axis]
    if size == 0:
        raise ShapeError(f"pad: axis {axis} of {x.type} is empty and cannot be extended by {mode}", code="S220")
    if mode == "edge":
        ends = [
            broadcast_to(narrow(x, axis, at, 1), (*x.shape[:axis], n, *x.shape[axis + 1 :]))
            for at, n in ((0, before), (size - 1, after))
        ]
        return _joined(ends[0], x, ends[1], axis)
    reach = size - 1 if mode == "reflect" else size
    if not (known_le(before, reach) and known_le(after, reach)):
        head = Gather(axis, False)(x, _places(-before, before, size, mode))
        tail = Gather(axis, False)(x, _places(size, after, size, mode))
        return _joined(head, x, tail, axis)
    match mode:
        case "wrap":
            head, tail = narrow(x, axis, size - before, before), narrow(x, axis, 0, after)
        case "reflect":
            head, tail = flip(narrow(x, axis, 1, before), axis), flip(narrow(x, axis, size - 1 - after, after), axis)
        case _:
            head, tail = flip(narrow(x, axis, 0, before), axis), flip(narrow(x, axis, size - after, after), axis)
    return _joined(head, x, tail, axis)


def _places(first: Dim, count: Dim, size: Dim, mode: str) -> Value:
    """Where places from the first one on lie, of an axis that is repeated by a mode without end."""
    if isinstance(first, int) and isinstance(count, int) and isinstance(size, int):
        before, after = max(-first, 0), max(first + count - size, 0)
        return constant(np.pad(np.arange(size), (before, after), mode)[first + before :][:count])  # type: ignore[call-overload]
    period = size if mode == "wrap" else dim_max(2 * size - 2, 1) if mode == "reflect" else 2 * size
    zero = narrow(iota((size,)), 0, 0, 1)  # the first place, which is refused where a symbol is 0
    at = METHODS["remainder"](zero + iota((count,)) + dim_size(first), dim_size(dim_max(period, 1)))
    if mode == "wrap":
        return at
    return METHODS["minimum"](at, dim_size(period - (1 if mode == "symmetric" else 0)) - at)


def _joined(head: Value, x: Value, tail: Value, axis: int) -> Value:
    return concat([part for part in (head, x, tail) if part.shape[axis] != 0], axis)


# ------------------------------------------------------------------------------------------------------------- products


@function()
def outer(x: Operand, y: Operand) -> Value:
    """Every product of an element of x and one of y, both taken flat."""
    a, b = (flatten(v) for v in promoted(x, y))
    return insert_axis(a, 1) * insert_axis(b, 0)


@function()
def kron(x: Operand, y: Operand) -> Value:
    """The Kronecker product: each element of x times the whole of y."""
    a, b = promoted(x, y)
    rank = max(a.ndim, b.ndim)
    sizes_a, sizes_b = ((1,) * (rank - v.ndim) + v.shape for v in (a, b))
    wide_a = reshape(a, tuple(d for n in sizes_a for d in (n, 1)))
    wide_b = reshape(b, tuple(d for n in sizes_b for d in (1, n)))
    return reshape(wide_a * wide_b, tuple(n * m for n, m in zip(sizes_a, sizes_b, strict=True)))


@function()
def cross(x: Operand, y: Operand, axis: int = -1) -> Value:
    """The cross product of vectors of three numbers along an axis."""
    a, b = broadcast_arrays(*promoted(x, y))
    at = normalize_axis(axis, a.ndim, "cross")
    if a.shape[at] != 3:
        raise ShapeError(f"cross: axis {at} must have size 3, got {a.type}", code="S221")
    return roll(a, -1, at) * roll(b, 1, at) - roll(a, 1, at) * roll(b, -1, at)
