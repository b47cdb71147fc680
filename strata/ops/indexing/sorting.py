"""Order along an axis: sort, argsort, top-k, argmax, argmin, searchsorted.

NaN counts as the largest number, and equal elements keep their order, in both directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from strata.core import Dim, TensorType, bool_, f16, f32, f64, i32, i64, known_le, normalize_axis
from strata.errors import OptionError
from strata.mir import METHODS, Op, Sample, Value, draw, function, op
from strata.ops.base.along_axis import AlongAxis
from strata.ops.base.creation import zeros_like
from strata.ops.base.elementwise import accepts
from strata.ops.base.frontend import Operand, as_value, promoted
from strata.ops.base.movement import flatten, insert_axis, reshape
from strata.ops.indexing.indexing import GatherElements, spread

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


def order_of(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """The stable order of elements along an axis, NaN as the largest."""
    if not descending:
        return np.argsort(x, axis, kind="stable")
    backwards = np.argsort(np.flip(x, axis), axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(backwards, axis)


class Ordering(AlongAxis):
    """An op that compares the elements along one axis."""

    allowed = "ordered"
    dtypes = "ordered"


@op("sort")
class Sort(Ordering):
    """Elements in order along an axis. Equal ones stay in their order, as zeros of both signs, and argsort, show."""

    descending: bool
    stable: bool

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, order_of(x, self.axis, self.descending), self.axis)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return GatherElements(self.axis, False)(dx, self._order(x))

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        back = Argsort(self.axis, False, True)(self._order(x))
        return GatherElements(self.axis, False)(ct, back)

    def _order(self, x: Value) -> Value:
        return Argsort(self.axis, self.descending, self.stable)(x)

    @classmethod
    def samples(cls) -> list[Sample]:
        up, down = {"descending": False, "stable": True}, {"descending": True, "stable": True}
        return [
            Sample(draw(f32[3, 4], distinct=True), axis=1, **up),
            Sample(draw(f64[4, 3], distinct=True), axis=0, **down), Sample(f32[0, 2], axis=0, **up),
            Sample(f16[2, 1], axis=1, **down), Sample(i32[2, 6], axis=1, grad=False, **down),
            Sample(np.array([2, np.nan, -np.inf, 1, np.nan, np.inf, 0.0, -0.0], np.float32), axis=0, grad=False, **up),
            Sample(np.array([2, np.nan, -np.inf, 1, np.nan, np.inf], np.float32), axis=0, grad=False, **down),
            Sample(bool_[5], axis=0, grad=False, **up),
        ]  # fmt: skip


@op("argsort")
class Argsort(Sort):
    """Where the sorted elements were: ids along the axis."""

    differentiable = False

    def infer(self, x: TensorType) -> TensorType:
        return super().infer(x).with_dtype(i64)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return order_of(x, self.axis, self.descending)


@op("topk")
class TopK(Ordering):
    """The k largest (or smallest) elements along an axis, best first, and their ids; ties go to the smaller id."""

    k: int
    largest: bool

    multi_output = True

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        super().infer(x)
        size = x.shape[self.axis]
        ok = self.k >= 0 and not known_le(size + 1, self.k)
        self.require(ok, f"k = {self.k} elements of axis {self.axis} of {x}, which has {size}", code="S210")
        values = x.with_shape((*x.shape[: self.axis], self.k, *x.shape[self.axis + 1 :]))
        return values, values.with_dtype(i64)

    def numpy(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        self.require(self.k <= x.shape[self.axis], f"k = {self.k} exceeds the size {x.shape[self.axis]}", code="S210")
        ids = np.take(order_of(x, self.axis, self.largest), np.arange(self.k), self.axis)
        return np.take_along_axis(x, ids, self.axis), ids

    def jvp(self, x: Value, *, out: tuple[Value, ...], dx: Value) -> tuple[Value | None, ...]:
        return GatherElements(self.axis, False)(dx, out[1]), None

    def vjp(self, x: Value, *, out: tuple[Value, ...], ct: tuple[Value | None, ...]) -> Value | None:
        if ct[0] is None:
            return None
        return METHODS["scatter_elements"](zeros_like(x), out[1], ct[0], self.axis, reduction="add")

    @classmethod
    def samples(cls) -> list[Sample]:
        special = np.array([[1, 1, np.nan, 1], [-np.inf, -np.inf, 2, -np.inf]], np.float32)
        return [
            Sample(draw(f32[3, 5], distinct=True), axis=1, k=2, largest=True),
            Sample(draw(f64[4, 3], distinct=True), axis=0, k=4, largest=False),
            Sample(f32[2, 3], axis=1, k=0, largest=True), Sample(f32[0, 3], axis=1, k=2, largest=True),
            Sample(special, axis=1, k=3, largest=True, grad=False),
            Sample(special, axis=1, k=2, largest=False, grad=False),
            Sample(i32[2, 6], axis=1, k=3, largest=False, grad=False),
        ]  # fmt: skip


class ArgExtremum(Ordering):
    """The id of the best element along an axis: the first one, or the last with `select_last`. NaN is the best."""

    select_last: bool

    kind: ClassVar[str]
    differentiable = False

    def infer(self, x: TensorType) -> TensorType:
        super().infer(x)
        empty = x.shape[self.axis] == 0
        self.require(not empty, f"axis {self.axis} of {x} is empty, and an empty {self.name} has no value", code="S124")
        return x.drop(self.axis).with_dtype(i64)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        find = getattr(np, self.kind)
        if self.select_last:
            return x.shape[self.axis] - 1 - find(np.flip(x, self.axis), self.axis)
        return find(x, self.axis)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        last = k.index(x.shape[self.axis] - 1)

        def read(j: Expr) -> Expr:
            return x[(*index[: self.axis], last - j if self.select_last else j, *index[self.axis :])]

        found = k.reduce(self.kind, (x.shape[self.axis],), read)
        return last - found if self.select_last else found

    @classmethod
    def samples(cls) -> list[Sample]:
        special = np.array([[1, np.nan, 3, np.nan], [2, 5, 5, 2]], np.float32)
        return [
            Sample(f32[3, 4], axis=1, select_last=False), Sample(f64[3, 4, 2], axis=1, select_last=True),
            Sample(special, axis=1, select_last=False), Sample(special, axis=1, select_last=True),
            Sample(i32[5], axis=0, select_last=False), Sample(f32[0, 2], axis=1, select_last=False),
            Sample(bool_[4], axis=0, select_last=True),
        ]  # fmt: skip


@op("argmax")
class Argmax(ArgExtremum):
    """The id of the largest element along an axis."""

    kind = "argmax"


@op("argmin")
class Argmin(ArgExtremum):
    """The id of the smallest element along an axis."""

    kind = "argmin"


@op("searchsorted")
class SearchSorted(Op):
    """Where each x belongs among sorted numbers [*batch, n]: before equal ones, or after them with `right`."""

    right: bool

    differentiable = False
    dtypes = "ordered"

    def infer(self, numbers: TensorType, x: TensorType) -> TensorType:
        batch = numbers.ndim - 1
        self.require_dtype(numbers.dtype is x.dtype, f"operands differ in dtype, {numbers} and {x}", code="D103")
        self.require_dtype(accepts("ordered", x.dtype), f"does not take {x}, only ordered types", code="D104")
        ok = batch >= 0 and x.ndim >= batch and numbers.shape[:-1] == x.shape[:batch]
        self.require(ok, f"sorted numbers {numbers} and {x} differ in their leading axes", code="S211")
        return x.with_dtype(i64)

    def numpy(self, numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
        side = "right" if self.right else "left"
        out = np.empty(x.shape, np.int64)
        for at in np.ndindex(numbers.shape[:-1]):
            out[at] = np.searchsorted(numbers[at], x[at], side)  # type: ignore[call-overload]
        return out

    def vmap(self, numbers: Value, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        if not batched[0] and numbers.ndim == 1:
            return self(numbers, x)
        return self(spread(numbers, batched[0], size), spread(x, batched[1], size))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        numbers, x = inputs
        batch, wanted = index[: len(numbers.shape) - 1], x[index]

        def before(j: Expr) -> Expr:
            number = numbers[(*batch, j)]
            in_front = k.le(number, wanted) if self.right else k.lt(number, wanted)
            if wanted.dtype.is_float:  # NaN is the largest
                number_is_less = k.const(True, bool_) if self.right else k.not_(k.isnan(number))
                in_front = k.or_(in_front, k.and_(k.isnan(wanted), number_is_less))
            return k.cast(in_front, i64)

        return k.reduce("sum", (numbers.shape[-1],), before)

    @classmethod
    def samples(cls) -> list[Sample]:
        marks = np.array([-1, 0, 0, 2, np.nan], np.float32)
        rows = np.array([[0, 1, 1, 2], [1, 2, 3, 3]], np.float32)
        return [
            Sample(marks, np.array([[0, 3], [-2, np.nan]], np.float32), right=False),
            Sample(marks, np.array([[0, 3], [-2, np.nan]], np.float32), right=True),
            Sample(rows, np.array([[1, 0, 5], [3, 2, 0]], np.float32), right=True), Sample(f32[0], f32[3], right=False),
            Sample(np.array([1, 3, 5], np.int64), np.int64(3), right=False),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


def _line(x: Operand, axis: int | None, what: str) -> tuple[Value, int]:
    """A value and the axis to work along; all of it in a row when no axis is given."""
    value = as_value(x)
    return (flatten(value), 0) if axis is None else (value, normalize_axis(axis, value.ndim, what))


@function()
def sort(x: Operand, axis: int | None = -1, *, descending: bool = False, stable: bool = True) -> Value:
    """In order along an axis, of the flat array when it is None; NaN is the largest."""
    value, at = _line(x, axis, "sort")
    return Sort(at, descending, stable)(value)


@function()
def argsort(x: Operand, axis: int | None = -1, *, descending: bool = False, stable: bool = True) -> Value:
    """The ids that put an axis in order; equal elements keep theirs."""
    value, at = _line(x, axis, "argsort")
    return Argsort(at, descending, stable)(value)


@function("top_k")
def topk(x: Operand, k: int, axis: int = -1, *, largest: bool = True) -> tuple[Value, Value]:
    """The k largest (or smallest) elements along an axis, best first, and their ids."""
    value, at = _line(x, axis, "topk")
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise OptionError(f"topk: k is an int, got {k!r}", code="O202")
    return TopK(at, int(k), largest)(value)


def _best(cls: type[ArgExtremum], x: Operand, axis: int | None, keepdims: bool, select_last: bool) -> Value:
    value = as_value(x)
    line, at = _line(value, axis, cls.name)
    found = cls(at, select_last)(line)
    if not keepdims:
        return found
    return reshape(found, (1,) * value.ndim) if axis is None else insert_axis(found, at)


@function()
def argmax(x: Operand, axis: int | None = None, keepdims: bool = False, *, select_last: bool = False) -> Value:
    """The id of the largest element along an axis, of the flat array by default; NaN wins."""
    return _best(Argmax, x, axis, keepdims, select_last)


@function()
def argmin(x: Operand, axis: int | None = None, keepdims: bool = False, *, select_last: bool = False) -> Value:
    """The id of the smallest element along an axis, of the flat array by default; NaN wins."""
    return _best(Argmin, x, axis, keepdims, select_last)


@function()
def searchsorted(numbers: Operand, x: Operand, side: str = "left") -> Value:
    """Where each x belongs among sorted numbers; leading axes of the numbers are batch axes of both."""
    if side not in ("left", "right"):
        raise OptionError(f"searchsorted: side is 'left' or 'right', got {side!r}", code="O203")
    return SearchSorted(side == "right")(*promoted(numbers, x))
