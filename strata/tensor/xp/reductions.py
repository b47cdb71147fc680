"""Reductions, searching, sorting and sets of the standard."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import strata.tensor as tensors
from strata.core import DType, as_dtype, here, i64, normalize_axis, u64
from strata.errors import DTypeError, OptionError
from strata.tensor.creation import asarray
from strata.tensor.tensor import Tensor
from strata.tensor.xp.dtypes import result_type

_ops: Any = tensors


def _sum_dtype(x: Tensor, dtype: Any) -> DType:
    """Small integers add up in 64 bits; floats stay as they are."""
    if dtype is not None:
        return as_dtype(dtype)
    if x.dtype.kind == "uint":
        return u64
    return i64 if x.dtype.is_int or x.dtype.is_bool else x.dtype


def sum(x: Tensor, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.sum(x.cast(_sum_dtype(x, dtype)), axis, keepdims)
    return made.cast(_sum_dtype(x, dtype))


def prod(x: Tensor, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.prod(x.cast(_sum_dtype(x, dtype)), axis, keepdims)
    return made.cast(_sum_dtype(x, dtype))


def max(x: Tensor, /, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.max(x, axis, keepdims)
    return made


def min(x: Tensor, /, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.min(x, axis, keepdims)
    return made


def _empty(x: Tensor, axis: Any, keepdims: bool) -> Tensor | None:
    """nan, where a mean has nothing to average."""
    axes = range(x.ndim) if axis is None else [a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
    if 0 not in [x.shape[a] for a in axes]:
        return None
    shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape) if keepdims or i not in axes)
    made: Tensor = _ops.full(shape, float("nan"), x.dtype)
    return made


def mean(x: Tensor, /, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    nothing = _empty(x, axis, keepdims)
    if nothing is not None:
        return nothing
    made: Tensor = _ops.mean(x, axis, keepdims)
    return made


def std(x: Tensor, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    nothing = _empty(x, axis, keepdims)
    if nothing is not None:
        return nothing
    made: Tensor = _ops.std(x, axis, keepdims, float(correction))
    return made


def var(x: Tensor, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    nothing = _empty(x, axis, keepdims)
    if nothing is not None:
        return nothing
    made: Tensor = _ops.var(x, axis, keepdims, float(correction))
    return made


def all(x: Tensor, /, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.all(x, axis, keepdims)
    return made


def any(x: Tensor, /, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.any(x, axis, keepdims)
    return made


def _cumulative(name: str, start: int, x: Tensor, axis: int | None, dtype: Any, include_initial: bool) -> Tensor:
    if axis is None and x.ndim != 1:
        raise OptionError(f"{name}: an axis is needed in {x.ndim} dimensions", code="O120", place=here())
    at = normalize_axis(0 if axis is None else axis, x.ndim, name)
    kind = _sum_dtype(x, dtype)
    run: Tensor = getattr(_ops, name)(x.cast(kind), at)
    if include_initial:
        first = _ops.full((*x.shape[:at], 1, *x.shape[at + 1 :]), start, kind)
        run = _ops.concat([first, run.cast(kind)], axis=at)
    return run.cast(kind)


def cumulative_sum(
    x: Tensor, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Tensor:
    return _cumulative("cumsum", 0, x, axis, dtype, include_initial)


def cumulative_prod(
    x: Tensor, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Tensor:
    return _cumulative("cumprod", 1, x, axis, dtype, include_initial)


def diff(
    x: Tensor, /, *, axis: int = -1, n: int = 1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    parts = [p for p in (prepend, x, append) if p is not None]
    whole = _ops.concat(parts, axis=axis) if len(parts) > 1 else x
    made: Tensor = _ops.diff(whole, n, axis)
    return made


def count_nonzero(x: Tensor, /, *, axis: Any = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.sum((x != 0).cast(i64) if not x.dtype.is_bool else x.cast(i64), axis, keepdims)
    return made


# ------------------------------------------------------------------------------------------------ searching and sorting


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.argmax(x, axis, keepdims)
    return made.cast(i64)


def argmin(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    made: Tensor = _ops.argmin(x, axis, keepdims)
    return made.cast(i64)


def argsort(x: Tensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    made: Tensor = _ops.argsort(x, axis, descending=descending, stable=stable)
    return made.cast(i64)


def sort(x: Tensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    made: Tensor = _ops.sort(x, axis, descending=descending, stable=stable)
    return made


def searchsorted(x1: Tensor, x2: Tensor | float, /, *, side: str = "left", sorter: Tensor | None = None) -> Tensor:
    numbers = x1 if sorter is None else _ops.take(x1, sorter, 0)
    wanted = x2 if isinstance(x2, Tensor) else asarray(x2, x1.dtype)
    made: Tensor = _ops.searchsorted(numbers, wanted, side)
    return made.cast(i64)


def where(condition: Tensor, x1: Any, x2: Any, /) -> Tensor:
    made: Tensor = _ops.where(condition, x1, x2)
    return made


def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    return tuple(asarray(a) for a in np.nonzero(x.numpy()))


# ----------------------------------------------------------------------------------------------------------------- sets


FEW = 64  # elements that are compared one by one


def isin(x1: Tensor | int, x2: Tensor | int, /, *, invert: bool = False) -> Tensor:
    """For each element of x1 whether x2 has it (with `invert`, whether it has not)."""
    if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
        raise DTypeError("isin: one of the operands must be an array", code="D380", place=here())
    kind = result_type(x1, x2)
    a, b = (x.cast(kind) if isinstance(x, Tensor) else asarray(x, kind) for x in (x1, x2))
    b = b.reshape((-1,))
    found: Tensor
    if not b.size:
        found = _ops.zeros(a.shape, "bool")
    elif kind.is_complex or kind.is_bool or b.size <= FEW:
        found = _ops.any(_ops.equal(_ops.expand_dims(a, -1), b), -1)
    else:
        ordered = sort(b)
        places = _ops.searchsorted(ordered, a.reshape((-1,)), "left").reshape(a.shape)
        found = _ops.equal(_ops.take(ordered, _ops.minimum(places, b.size - 1), 0), a)
    return _ops.logical_not(found) if invert else found


class UniqueAll(NamedTuple):
    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    values: Tensor
    inverse_indices: Tensor


def unique_all(x: Tensor, /) -> UniqueAll:
    array = x.numpy()
    if x.dtype.is_complex:  # which have no order here
        found = np.unique(array, return_index=True, return_inverse=True, return_counts=True, equal_nan=False)
        values, indices, inverse, counts = found
    else:
        order = argsort(x.reshape((-1,))).numpy()
        numbers = array.reshape(-1)[order]
        starts = _starts(numbers)
        values, indices, counts = numbers[starts], order[starts], _lengths(starts)
        inverse = np.empty(array.size, np.int64)
        inverse[order] = np.cumsum(starts) - 1
    return UniqueAll(asarray(values), asarray(indices), asarray(inverse.reshape(array.shape)), asarray(counts))


def unique_counts(x: Tensor, /) -> UniqueCounts:
    if x.dtype.is_complex:
        found = unique_all(x)
        return UniqueCounts(found.values, found.counts)
    numbers = sort(x.reshape((-1,))).numpy()
    starts = _starts(numbers)
    return UniqueCounts(asarray(numbers[starts]), asarray(_lengths(starts)))


def unique_inverse(x: Tensor, /) -> UniqueInverse:
    found = unique_all(x)
    return UniqueInverse(found.values, found.inverse_indices)


def unique_values(x: Tensor, /) -> Tensor:
    if x.dtype.is_complex:
        return unique_all(x).values
    numbers = sort(x.reshape((-1,))).numpy()
    return asarray(numbers[_starts(numbers)])


def _starts(numbers: np.ndarray) -> np.ndarray:
    """Where sorted numbers differ from those before them; every NaN does."""
    found = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=found[1:])
    return found


def _lengths(starts: np.ndarray) -> np.ndarray:
    """How many numbers there are from each start to the next."""
    return np.diff(np.append(np.flatnonzero(starts), len(starts)))
