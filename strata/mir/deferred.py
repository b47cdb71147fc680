"""What values of graphs and of modules share: operators, and front-end functions as methods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np

from strata.core import Dim, DType, SymExpr, TensorType, here
from strata.errors import ShapeError
from strata.modules import LateTable, imported
from strata.places import is_comparison, is_users

METHODS: LateTable[Callable[..., Any]] = LateTable(lambda: imported("strata.ops.families").load())


def is_operand(x: object) -> bool:
    """Whether a value can be compared with it element by element."""
    return isinstance(x, (Deferred, SymExpr, bool, int, float, complex, np.ndarray, np.generic, list, tuple))


# Python's operators, by the front-end functions that they are
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
UNARY = {"neg": "negative", "abs": "abs", "invert": "bitwise_not"}


class Operators:
    """Python's operators, each by the front-end function that it is."""

    __slots__ = ()
    __array_priority__: ClassVar[int] = 1000
    __array_ufunc__ = None  # NumPy defers to our reflected operators

    def _call(self, function: str, *args: Any) -> Any:
        """A front-end function."""
        raise NotImplementedError

    if TYPE_CHECKING:  # set below, from the tables

        def __add__(self, other: Any) -> Self: ...
        def __radd__(self, other: Any) -> Self: ...
        def __sub__(self, other: Any) -> Self: ...
        def __rsub__(self, other: Any) -> Self: ...
        def __mul__(self, other: Any) -> Self: ...
        def __rmul__(self, other: Any) -> Self: ...
        def __truediv__(self, other: Any) -> Self: ...
        def __rtruediv__(self, other: Any) -> Self: ...
        def __floordiv__(self, other: Any) -> Self: ...
        def __rfloordiv__(self, other: Any) -> Self: ...
        def __mod__(self, other: Any) -> Self: ...
        def __rmod__(self, other: Any) -> Self: ...
        def __pow__(self, other: Any) -> Self: ...
        def __rpow__(self, other: Any) -> Self: ...
        def __matmul__(self, other: Any) -> Self: ...
        def __rmatmul__(self, other: Any) -> Self: ...
        def __and__(self, other: Any) -> Self: ...
        def __rand__(self, other: Any) -> Self: ...
        def __or__(self, other: Any) -> Self: ...
        def __ror__(self, other: Any) -> Self: ...
        def __xor__(self, other: Any) -> Self: ...
        def __rxor__(self, other: Any) -> Self: ...
        def __lshift__(self, other: Any) -> Self: ...
        def __rlshift__(self, other: Any) -> Self: ...
        def __rshift__(self, other: Any) -> Self: ...
        def __rrshift__(self, other: Any) -> Self: ...
        def __lt__(self, other: Any) -> Self: ...
        def __le__(self, other: Any) -> Self: ...
        def __gt__(self, other: Any) -> Self: ...
        def __ge__(self, other: Any) -> Self: ...
        def __neg__(self) -> Self: ...
        def __abs__(self) -> Self: ...
        def __invert__(self) -> Self: ...


def _operator(dunder: str, method: str) -> None:
    setattr(Operators, f"__{dunder}__", lambda self, *other: self._call(method, self, *other))


def _reflected(dunder: str, method: str) -> None:
    setattr(Operators, f"__r{dunder}__", lambda self, other: self._call(method, other, self))


for _dunder, _method in (BINARY | COMPARISONS | UNARY).items():
    _operator(_dunder, _method)
for _dunder, _method in BINARY.items():
    _reflected(_dunder, _method)


class Deferred(Operators):
    """What the values of graphs and of modules share: comparisons, and what nobody can know before a run."""

    __slots__ = ()

    @property
    def type(self) -> TensorType:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    @property
    def T(self) -> Self:
        return self._call("transpose", self)

    def __getitem__(self, index: Any) -> Self:
        return self._call("getitem", self, index)

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a rank-0 value has no length", code="S105", place=here())
        return self.shape[0].__index__()

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def same_as(self, other: object) -> bool:
        """Whether it is the same expression, which `==` does not ask: that compares elements."""
        raise NotImplementedError

    def _unknown(self, what: str, fix: str) -> NoReturn:
        raise NotImplementedError

    def __eq__(self, other: object) -> Any:
        """Element by element where the user's program compares; for containers, whether it is the same expression."""
        if is_users[(frame := sys._getframe(1)).f_code.co_filename] and is_comparison(frame):
            return self._call("equal", self, other) if is_operand(other) else NotImplemented
        return self.same_as(other)

    def __ne__(self, other: object) -> Any:
        if is_users[(frame := sys._getframe(1)).f_code.co_filename] and is_comparison(frame):
            return self._call("not_equal", self, other) if is_operand(other) else NotImplemented
        return not self.same_as(other)

    def __hash__(self) -> int:
        raise NotImplementedError

    def __bool__(self) -> bool:  # noqa: PLE0304 - it never returns
        self._unknown("truth value", "where(condition, a, b), or cond(condition, f, g)")

    def __int__(self) -> int:
        self._unknown("number", "astype(x, 'i64') for whole numbers in the graph")

    def __float__(self) -> float:
        self._unknown("number", "astype(x, 'f32') for floats in the graph")

    def __complex__(self) -> complex:
        self._unknown("number", "astype(x, 'c64') for complex numbers in the graph")

    def __contains__(self, item: object) -> bool:
        self._unknown("known elements", "(x == item).any(), a value of the graph")
