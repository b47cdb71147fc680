"""Data leaves of tensor expressions: arrays by identity, never part of a graph's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from strata.backends import DeviceArray
from strata.core import TensorType, as_dtype
from strata.errors import RunError
from strata.mir import Leaf, Node, Origin, UnaryOp, Value


class Handle:
    """Storage of one tensor. Two handles are never equal, whatever they hold.

    A tensor with symbolic sizes has a `type` of its own; `binding` says what the sizes are now. Its array is flat and
    has room for the largest sizes while they are not bound. The array is NumPy's, or one in the memory of a device.
    """

    __slots__ = ("__weakref__", "_array", "binding", "is_open", "is_own", "is_shared", "type")

    def __init__(
        self,
        array: Any,
        kind: TensorType | None = None,
        binding: Mapping[str, int] | None = None,
        *,
        is_own: bool = False,
        is_open: bool = False,
    ) -> None:
        self._array: Any = array
        self.type = TensorType(as_dtype(array.dtype), array.shape) if kind is None else kind
        self.binding = binding
        self.is_own = is_own  # nobody else has seen the array: no other handle, view or program has its memory
        self.is_open = is_open  # somebody outside can write to the array
        self.is_shared = False  # an expression or a program keeps this array: it is not for writing

    @property
    def array(self) -> Any:
        if self._array is None:
            raise RunError(
                f"a tensor {self.type} was donated to a jitted function, which has used its memory", code="X210"
            )
        return self._array

    @property
    def hosted(self) -> np.ndarray:
        """The array, or a copy on the host."""
        array = self.array
        found: np.ndarray = array.numpy() if type(array) is DeviceArray else array
        return found

    @property
    def storage(self) -> Any:
        """All of the memory, also what lies after the sizes of the moment."""
        array = self.array
        if type(array) is DeviceArray:
            return array.source if type(array.source) is DeviceArray else array
        base = array.base
        return base if isinstance(base, np.ndarray) and not self.type.is_static else array

    def for_writing(self) -> Any:
        """The array, copied first if something that is not to change has its memory too."""
        if type(self.array) is DeviceArray:
            self._array = self.array.copy() if self.is_shared else self.array
            self.is_shared = False
        elif self.is_shared or not self.array.flags.writeable:
            shape = self.array.shape
            self._array = self.storage.copy().reshape(-1)[: self.array.size].reshape(shape)
            self.is_shared = False
        self.is_own, self.is_open = False, True
        return self.array

    def for_keeping(self) -> Any:
        """The array as it is now and stays, whatever happens to the tensor; copied only if others may write to it."""
        array = self.array
        if self.is_open:
            return array.copy()
        self.is_shared, self.is_own = True, False
        return array

    def copied(self) -> Handle:
        """The same elements in their own memory."""
        made = Handle(self.array, self.type, self.binding)
        made.is_shared = True
        made.for_writing()
        made.is_own, made.is_open = True, False
        return made

    def rebind(self, array: Any, binding: Mapping[str, int] | None) -> None:
        """Other sizes, and the array that they give."""
        self._array, self.binding = array, binding

    @property
    def is_released(self) -> bool:
        return self._array is None

    def release(self) -> None:
        """Give the array up: whoever asks for it gets an error."""
        self._array = None

    def __repr__(self) -> str:
        return f"Handle({self.type})"


class LooseHandle(Handle):
    """Of an array that goes wherever the tensors are that it is used with."""

    __slots__ = ()


class Data(Leaf):
    """An array that exists."""

    handle: Handle
    name: ClassVar[str] = "data"

    def __init__(self, handle: Handle) -> None:
        self.__dict__["handle"] = handle  # many are made in every call of a jitted function: the plain way is slow

    def infer(self) -> TensorType:
        return self.handle.type

    def numpy(self, *arrays: np.ndarray) -> np.ndarray:
        return self.handle.hosted


class CopyTo(UnaryOp):
    """The same elements in the memory of a device. Never part of a program: programs end and start where it is."""

    device: str
    name: ClassVar[str] = "copy_to"

    def infer(self, x: TensorType) -> TensorType:
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x


_NOWHERE = Origin()
_realized: WeakKeyDictionary[Node, dict[int, Handle]] = WeakKeyDictionary()


def handle_value(handle: Handle) -> Value:
    """A value that is what the handle holds. A handle is like no other, so its node needs no interning."""
    return Value(Node(Data(handle), (), (handle.type,), _NOWHERE), 0)


def apart(handle: Handle) -> Handle:
    """A new handle for the array of an expression: equal expressions are one value, tensors are not.

    What happens to the tensor, that it is given up or written to, does not happen to the expression.
    """
    made = Handle(handle.array, handle.type, handle.binding)
    made.is_shared = True
    return made


def data_apart(value: Value) -> Value:
    """The array of a tensor as another tensor's: written to, or given up, it is so for one of them only."""
    op = value.node.op
    assert isinstance(op, Data)
    handle = op.handle
    if handle.is_released or not handle.type.is_static:
        return value
    made = Handle(handle.for_keeping(), handle.type, handle.binding)
    made.is_shared = True
    return handle_value(made)


def handle_of(x: Value) -> Handle | None:
    """The storage behind a value: of a leaf, or of an expression that has been realized."""
    if type(x.node.op) is Data:
        return x.node.op.handle
    known: Any = _realized.get(x.node) if _realized else None
    found: Handle | None = None if known is None else known.get(x.index)
    return None if found is None or found.is_released else found  # what was given up is computed anew


def remember(x: Value, handle: Handle) -> None:
    """Expressions that were built on `x` before it was realized start from its array from now on."""
    known = _realized.get(x.node)
    if known is None:
        _realized[x.node] = {x.index: handle}
    else:
        known[x.index] = handle
