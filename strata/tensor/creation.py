"""Tensors from Python data, NumPy arrays and DLPack; and filled tensors."""

from __future__ import annotations

import inspect
import mmap
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np

from strata import ops
from strata.backends import HOMES, DeviceArray, DeviceHome
from strata.config import config
from strata.core import (
    DType,
    TensorType,
    as_dtype,
    check_shape,
    check_unmasked,
    from_dlpack,
    here,
    no_memory,
    open_file,
    tree_map,
)
from strata.errors import DTypeError, FileError, file_error
from strata.mir import Value
from strata.tensor.data import Handle
from strata.tensor.placement import default_home, device_of, home_of
from strata.tensor.realize import realize_at
from strata.tensor.storage import bound_view, capacity
from strata.tensor.structure_key import is_traced
from strata.tensor.tensor import Tensor, lifted
from strata.tensor.variable import split_bound

PYTHON_DTYPES = {"f": "f32", "c": "c64", "i": "i64", "b": "bool"}  # of numbers and lists of numbers


def tensor(data: Any, dtype: Any = None, *, device: Any = None) -> Tensor:
    """A tensor with a copy of the data. Python floats are f32 and ints i64; arrays keep their dtype."""
    return asarray(data, dtype, copy=True, device=device)


def asarray(data: Any, dtype: Any = None, *, copy: bool | None = None, device: Any = None) -> Tensor:
    """A tensor of anything array-like, sharing memory where it can: `__dlpack__`, `__array__`, buffers, lists.

    It is on `device`; without one, where the data is, or, for arrays of NumPy and numbers, on the default device.
    """
    if not HOMES and device is None and config().device == "cpu":
        return _on_host(data, dtype, copy)
    if isinstance(data, (Tensor, Value)) or _has_tensors(data):
        made = _on_host(data, dtype, copy)
        return made if device is None else made.to(device)
    home = default_home() if device is None else home_of(device)
    found = None if isinstance(data, _PLAIN) else _adopted(data, home, device)
    if found is not None:
        made = Tensor.of(Handle(found.copy() if copy else found, is_open=not copy))
        return made if dtype is None else Tensor(made.value.cast(dtype))
    made = _on_host(data, dtype, copy if home is None else None)
    return made if home is None else made.to(home.name)


def open_array(path: Any, dtype: Any, shape: Any, offset: int = 0) -> Tensor:
    """A tensor over a part of a file on disk: nothing is read before it is used, and nothing is copied.

    Elements of `dtype` in row-major order begin `offset` bytes from the start. What does not lie at a multiple of its
    size is copied when it is used. The file must not get shorter while the tensor lives.
    """
    kind = as_dtype(dtype)
    sizes = TensorType(kind, check_shape(shape if isinstance(shape, (tuple, list)) else (shape,))).static_shape
    count = int(np.prod(sizes, dtype=np.int64))
    if not isinstance(offset, int) or offset < 0:
        raise FileError(f"open_array: the offset is a number of bytes, got {offset!r}", code="F123", place=here())
    try:
        with open_file(path) as file:
            have = os.fstat(file.fileno()).st_size
            wanted = offset + count * kind.itemsize
            if wanted > have:
                raise FileError(
                    f"open_array: {kind}{list(sizes)} at {offset} needs {wanted:,} bytes, the file has {have:,}",
                    code="F123", place=here(),
                )  # fmt: skip
            if count == 0:
                return asarray(np.zeros(sizes, kind.np))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error(path, error, code="F121", what="cannot be read", who="open_array", place=here()) from None
    view = np.frombuffer(mapped, np.uint8, count * kind.itemsize, offset)
    if offset % kind.itemsize:
        view = view.copy()
    return asarray(view.view(kind.np).reshape(sizes))


_PLAIN = (np.ndarray, np.generic, bool, int, float, complex, list, tuple)


def _adopted(data: Any, home: DeviceHome | None, device: Any) -> DeviceArray | None:
    """An array of another library that is on a device, without a copy. What is in the host's memory is on the host."""
    homes = [h for h in HOMES if h.dlpack_device[0] != 1] if device is None else [] if home is None else [home]
    return next((x for x in (h.adopt(data) for h in homes) if x is not None), None)


def _has_tensors(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and any(isinstance(x, Tensor) for x in data)


def _on_host(data: Any, dtype: Any, copy: bool | None) -> Tensor:
    if isinstance(data, Tensor):
        made = data if dtype is None else Tensor(data.value.cast(dtype))
        return made.__copy__() if copy else made
    if isinstance(data, Value):
        return Tensor(data)
    if _has_tensors(data):
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


def empty(shape: Any, dtype: Any = "f32", *, device: Any = None) -> Tensor:
    """A tensor with its own memory whose elements do not matter; they are zeros.

    Sizes may be variables, free or bound: there is memory for the largest sizes, and `x.data(N=7)` is the part in use.
    """
    dims, binding = split_bound(shape if isinstance(shape, (tuple, list)) else (shape,))
    kind = TensorType(as_dtype(dtype), check_shape(dims))
    if device is not None or config().device != "cpu":
        home = default_home() if device is None else home_of(device)
        if home is not None:
            return _empty_at(home, kind, binding)
    try:
        memory = np.zeros(capacity(kind), kind.dtype.np)
    except (MemoryError, OverflowError, ValueError) as error:
        raise no_memory(capacity(kind) * kind.dtype.itemsize, error) from None
    if kind.is_static:
        return Tensor.of(Handle(memory.reshape(kind.static_shape), is_own=True))
    known = set(kind.symbols()) <= set(binding)
    array = bound_view(memory, kind, binding) if known else memory
    return Tensor.of(Handle(array, kind, binding if known else None))


def _empty_at(home: DeviceHome, kind: TensorType, binding: Mapping[str, int]) -> Tensor:
    """The same in the memory of a device."""
    memory = home.upload(np.zeros(capacity(kind) if not kind.is_static else kind.static_shape, kind.dtype.np))
    if kind.is_static:
        return Tensor.of(Handle(memory, is_own=True))
    known = set(kind.symbols()) <= set(binding)
    array = bound_view(memory, kind, binding) if known else memory
    return Tensor.of(Handle(array, kind, binding if known else None))


def created(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes values out of numbers as one that makes tensors, on a device."""
    make = lifted(fn)

    @wraps(fn)
    def apply(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        return made if device is None and config().device == "cpu" else tree_map(lambda t: _placed(t, device), made)

    shown = inspect.signature(fn)
    device = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    apply.__signature__ = shown.replace(parameters=[*shown.parameters.values(), device])  # type: ignore[attr-defined]
    return apply


def _placed(made: Any, device: Any) -> Any:
    """A tensor that is not computed yet on a device, or on the default one."""
    if not isinstance(made, Tensor) or is_traced(made.value):
        return made
    home = default_home() if device is None else home_of(device)
    if device is not None and device_of(made.value) is not None:
        return made.to(device)
    if home is None or device_of(made.value) is not None or not made.type.is_static:
        return made
    return Tensor.of(realize_at(made.value, home))


full = created(ops.full)
zeros = created(ops.zeros)
ones = created(ops.ones)
arange = created(ops.arange)
linspace = created(ops.linspace)
eye = created(ops.eye)
tri = created(ops.tri)
iota = created(ops.iota)


def full_like(x: Any, value: Any, dtype: Any = None, *, device: Any = None) -> Tensor:
    """One number in the shape, and by default the dtype and the device, of x."""
    like = asarray(x)
    where = device or (like.device if HOMES and not is_traced(like.value) else None)
    result: Tensor = full(like.shape, value, like.dtype if dtype is None else dtype, device=where)
    return result


def empty_like(x: Any, dtype: Any = None, *, device: Any = None) -> Tensor:
    """A tensor like x whose elements do not matter."""
    return full_like(x, 0, dtype, device=device)
