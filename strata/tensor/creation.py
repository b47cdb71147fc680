"""Tensors from Python data, NumPy arrays and DLPack; and filled tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from strata import ops
from strata.core import DType, TensorType, as_dtype, check_shape, check_unmasked, from_dlpack, no_memory
from strata.errors import DTypeError
from strata.mir import Value
from strata.tensor.data import Handle
from strata.tensor.storage import bound_view, capacity
from strata.tensor.tensor import Tensor, lifted
from strata.tensor.variable import split_bound

PYTHON_DTYPES = {"f": "f32", "c": "c64", "i": "i64", "b": "bool"}  # of numbers and lists of numbers


def tensor(data: Any, dtype: Any = None) -> Tensor:
    """A tensor with a copy of the data. Python floats are f32 and ints i64; arrays keep their dtype."""
    return asarray(data, dtype, copy=True)


def asarray(data: Any, dtype: Any = None, *, copy: bool | None = None) -> Tensor:
    """A tensor of anything array-like, sharing memory where it can: `__dlpack__`, `__array__`, buffers, lists."""
    if isinstance(data, Tensor):
        made = data if dtype is None else Tensor(data.value.cast(dtype))
        return made.__copy__() if copy else made
    if isinstance(data, Value):
        return Tensor(data)
    if isinstance(data, (list, tuple)) and any(isinstance(x, Tensor) for x in data):
        stacked: Tensor = lifted(ops.stack)([asarray(x) for x in data])
        return stacked if dtype is None else Tensor(stacked.value.cast(dtype))
    if dtype is not None and as_dtype(dtype).is_int and isinstance(data, (int, list, tuple)):
        return Tensor.of(Handle(_whole(data, as_dtype(dtype))))
    array = given = _as_array(data)
    if dtype is None and not hasattr(data, "dtype"):
        dtype = PYTHON_DTYPES.get(array.dtype.kind)
    if dtype is not None:
        array = array.astype(as_dtype(dtype).np, copy=False)
    as_dtype(array.dtype)
    if copy and array is given:  # what was converted is a copy already
        array = array.copy()
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return Tensor.of(Handle(array, is_open=array is given and not isinstance(data, (list, tuple))))


def _whole(data: Any, dtype: DType) -> np.ndarray:
    """Numbers of Python in an integer type: they are never wrapped around, and 64 bits are not read as floats."""
    array = _as_array(data)
    if array.dtype.kind == "f" and np.any(np.abs(array) > 1 << 53):
        array = np.asarray(data, object)  # whole numbers of both signs that NumPy has no one type for
    limits = np.iinfo if dtype.bits > 4 else ml_dtypes.iinfo
    low, high = int(limits(dtype.np).min), int(limits(dtype.np).max)
    if array.dtype.kind != "f":
        lost = array[(array < low) | (array > high)]
        if lost.size:
            raise DTypeError(f"{lost[0]} is not a number of {dtype}", code="D107")
    return array.astype(dtype.np, copy=False)


def _as_array(data: Any) -> np.ndarray:
    check_unmasked(data)
    try:
        if hasattr(data, "__dlpack__") and not isinstance(data, (np.ndarray, np.generic)):
            return from_dlpack(data)
        array = np.asarray(data)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        raise DTypeError(f"a {_kind(data)} cannot become a tensor: {error}", code="T207") from error
    if array.dtype.kind in "OUSMm":
        raise DTypeError(f"a {_kind(data)} cannot become a tensor: its elements are {array.dtype}", code="T207")
    return array


def _kind(data: Any) -> str:
    kind = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def empty(shape: Any, dtype: Any = "f32") -> Tensor:
    """A tensor with memory of its own whose elements do not matter; they are zeros.

    Sizes may be variables, free or bound: there is memory for the largest sizes, and `x.data(N=7)` is the part in use.
    """
    dims, binding = split_bound(shape if isinstance(shape, (tuple, list)) else (shape,))
    kind = TensorType(as_dtype(dtype), check_shape(dims))
    try:
        memory = np.zeros(capacity(kind), kind.dtype.np)
    except (MemoryError, OverflowError, ValueError) as error:
        raise no_memory(capacity(kind) * kind.dtype.itemsize, error) from None
    if kind.is_static:
        return Tensor.of(Handle(memory.reshape(kind.static_shape), is_own=True))
    known = set(kind.symbols()) <= set(binding)
    array = bound_view(memory, kind, binding) if known else memory
    return Tensor.of(Handle(array, kind, binding if known else None))


full = lifted(ops.full)
zeros = lifted(ops.zeros)
ones = lifted(ops.ones)
arange = lifted(ops.arange)
linspace = lifted(ops.linspace)
eye = lifted(ops.eye)
tri = lifted(ops.tri)
iota = lifted(ops.iota)


def full_like(x: Any, value: Any, dtype: Any = None) -> Tensor:
    """One number in the shape, and by default the dtype, of x."""
    like = asarray(x)
    result: Tensor = full(like.shape, value, like.dtype if dtype is None else dtype)
    return result


def empty_like(x: Any, dtype: Any = None) -> Tensor:
    """A tensor like x whose elements do not matter."""
    return full_like(x, 0, dtype)
