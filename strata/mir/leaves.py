"""Leaves of graphs: inputs, parameters and constants."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from strata.core import Dim, DType, TensorType, as_dtype, check_unmasked
from strata.errors import DTypeError
from strata.mir.ir import METHODS, Leaf, Op, Value, op


class Input(Leaf):
    """A named input. `scope` tells the inputs of different graphs apart."""

    key: str
    type: TensorType
    scope: int
    name: ClassVar[str] = "input"

    def infer(self) -> TensorType:
        return self.type


class Param(Leaf):
    """A named parameter: bound once, kept across runs."""

    key: str
    type: TensorType
    scope: int
    name: ClassVar[str] = "param"

    def infer(self) -> TensorType:
        return self.type


class Literal:
    """An immutable array that can be a field of an op: equal when dtype, shape and bytes are."""

    __slots__ = ("_hash", "array")

    def __init__(self, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array).reshape(array.shape)
        if _may_change(array):
            array = array.copy()
            array.flags.writeable = False
        self.array = array
        self._hash = hash((array.dtype.str, array.shape, array.tobytes()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Literal)
            and self._hash == other._hash
            and self.array.dtype == other.array.dtype
            and self.array.shape == other.array.shape
            and self.array.tobytes() == other.array.tobytes()
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Literal({self.array.dtype}, {self.array.shape})"


def _may_change(array: Any) -> bool:
    """Whether somebody can write to the memory: an array that is read-only may be a view of one that is not."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return False


@op("constant")
class Constant(Op):
    """A value known when the graph is built."""

    data: Literal

    differentiable = False

    def infer(self) -> TensorType:
        return TensorType(as_dtype(self.data.array.dtype), self.data.array.shape)

    def numpy(self, *arrays: np.ndarray) -> np.ndarray:
        return self.data.array

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Any:
        return METHODS["broadcast_to"](self(), (size, *self.infer().shape))


@lru_cache(1024, typed=True)
def _number(number: float, dtype: DType) -> Constant:
    """The constant of a Python number."""
    return Constant(Literal(_fitting(number, dtype)))


def _fitting(number: float, dtype: DType) -> np.ndarray:
    """One Python number as an array; a whole number is never wrapped around."""
    try:
        array = np.asarray(number).astype(dtype.np)
    except OverflowError:
        array = None
    if array is None or (dtype.is_int and type(number) is int and int(array) != number):
        raise DTypeError(f"{number} is not a number of {dtype}", code="D107")
    return array


def constant(data: Any, dtype: Any = None) -> Value:
    """A constant value from anything NumPy can read. Python floats become f32 and ints i64 unless a dtype is given."""
    if type(data) is int and dtype is not None:
        return _number(data, as_dtype(dtype))()
    if type(data) is float and type(dtype) is DType and data:  # not for 0.0, which is equal to -0.0
        return _number(data, dtype)()
    if dtype is None and not isinstance(data, (np.ndarray, np.generic)):
        probe = np.asarray(data)
        dtype = {"f": "f32", "c": "c64", "i": "i64", "b": "bool"}.get(probe.dtype.kind)
        array = probe
    else:
        check_unmasked(data)
        array = np.asarray(data)
    if dtype is not None:
        array = array.astype(as_dtype(dtype).np)
    as_dtype(array.dtype)
    return Constant(Literal(array))()


_scopes = itertools.count(1)


def fresh_scope() -> int:
    return next(_scopes)


def placeholder(name: str, type: TensorType, scope: int | None = None) -> Value:
    """An input that belongs to no graph yet; rules and traces build on these."""
    return Input(name, type, fresh_scope() if scope is None else scope)()


def leaf_name(x: Value) -> str:
    """The name of an input or parameter."""
    leaf = x.node.op
    assert isinstance(leaf, (Input, Param))
    return leaf.key
