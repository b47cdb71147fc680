"""Leaves of tensor expressions: arrays that exist. The array is a handle of identity, never part of a graph's text."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from strata.core import TensorType, as_dtype
from strata.mir import Leaf, Node, Value


class Handle:
    """Storage of one tensor. Two handles are never equal, whatever they hold."""

    __slots__ = ("__weakref__", "array", "type")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.type = TensorType(as_dtype(array.dtype), array.shape)

    def __repr__(self) -> str:
        return f"Handle({self.type})"


class Data(Leaf):
    """An array that exists."""

    handle: Handle
    name: ClassVar[str] = "data"

    def infer(self) -> TensorType:
        return self.handle.type

    def numpy(self, *arrays: np.ndarray) -> np.ndarray:
        return self.handle.array


_realized: WeakKeyDictionary[Node, dict[int, Handle]] = WeakKeyDictionary()


def data_value(array: np.ndarray) -> Value:
    """A value that is this array; no copy is made."""
    value: Value = Data(Handle(array))()
    return value


def handle_of(x: Value) -> Handle | None:
    """The storage behind a value: of a leaf, or of an expression that has been realized."""
    if isinstance(x.node.op, Data):
        return x.node.op.handle
    known: Any = _realized.get(x.node)
    return None if known is None else known.get(x.index)


def remember(x: Value, handle: Handle) -> None:
    """Expressions that were built on `x` before it was realized start from its array from now on."""
    _realized.setdefault(x.node, {})[x.index] = handle
