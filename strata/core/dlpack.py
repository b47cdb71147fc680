"""DLPack both ways: arrays of the host by NumPy where it can, memory of devices by their addresses."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from strata.core.dtypes import as_dtype

_NAMES = {(4, 16): "bf16", (10, 8): "f8e4m3", (12, 8): "f8e5m2"}  # by DLPack's kind and bits
_CPU = 1


class _Tensor(ctypes.Structure):
    """DLTensor, which DLManagedTensor begins with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def from_dlpack(x: Any) -> np.ndarray:
    """The array behind `x.__dlpack__()`; what cannot be one raises as np.from_dlpack does."""
    try:
        return np.from_dlpack(x)
    except (RuntimeError, BufferError) as error:
        made = _copied(x)
        if made is None:
            raise error from None
        return made


def _copied(x: Any) -> np.ndarray | None:
    """A copy of elements that NumPy has no type for; None where they are no such elements, or not in memory."""
    if int(x.__dlpack_device__()[0]) != _CPU:
        return None
    capsule = x.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    found = _Tensor.from_address(pointer(capsule, b"dltensor"))
    name = _NAMES.get((found.kind, found.bits))
    if name is None or found.lanes != 1:
        return None
    dtype = as_dtype(name).np
    shape = tuple(found.shape[i] for i in range(found.ndim))
    if 0 in shape:
        return np.empty(shape, dtype)
    strides = None if not found.strides else tuple(found.strides[i] * dtype.itemsize for i in range(found.ndim))
    if strides is not None and any(s < 0 for s in strides):
        return None
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides else 0
    size = last + dtype.itemsize if strides else int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(found.data + found.byte_offset)
    raw = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    return np.ndarray(shape, dtype, raw, strides=strides).copy()  # the capsule, which owns it, lives until here


# memory of devices

_BY_KIND = {(0, 8): "i8", (0, 16): "i16", (0, 32): "i32", (0, 64): "i64", (1, 8): "u8", (1, 16): "u16", (1, 32): "u32",
            (1, 64): "u64", (2, 16): "f16", (2, 32): "f32", (2, 64): "f64", (5, 64): "c64", (5, 128): "c128",
            (6, 8): "bool", **_NAMES}  # fmt: skip
_CODES = {name: code for code, name in _BY_KIND.items()}


class ForeignMemory(NamedTuple):
    """Memory of another library: what keeps it, where it is, and what lies there."""

    owner: Any
    device: tuple[int, int]
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: in order

    @property
    def is_dense(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides or ()), strict=False):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


class _Managed(ctypes.Structure):
    """DLManagedTensor"""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def foreign_memory(x: Any, stream: int | None) -> ForeignMemory | None:
    """What `x.__dlpack__()` gives, ordered before what comes on a stream; None for elements that have no type here."""
    capsule = x.__dlpack__(stream=stream)
    found = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    name = _BY_KIND.get((found.kind, found.bits))
    if name is None or found.lanes != 1:
        return None
    shape = tuple(found.shape[i] for i in range(found.ndim))
    strides = tuple(found.strides[i] for i in range(found.ndim)) if found.strides else None
    address = (found.data or 0) + found.byte_offset
    return ForeignMemory(capsule, (found.device[0], found.device[1]), address, as_dtype(name).np, shape, strides)


def device_capsule(address: int, dtype: Any, shape: Sequence[int], device: tuple[int, int], owner: Any) -> Any:
    """A capsule over a device's memory, which belongs to `owner` until whoever takes it is done."""
    code = _CODES.get(str(as_dtype(dtype)))
    if code is None:
        raise BufferError(f"DLPack has no elements of type {as_dtype(dtype)}")
    managed = _Managed()
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = (ctypes.c_int64 * max(len(shape), 1))()
    step = 1
    for i in reversed(range(len(shape))):
        steps[i] = step
        step *= shape[i]
    tensor = managed.tensor
    tensor.data, tensor.ndim, tensor.lanes, tensor.byte_offset = address, len(shape), 1, 0
    tensor.device[0], tensor.device[1] = device
    tensor.kind, tensor.bits = code
    tensor.shape, tensor.strides = sizes, steps
    managed.deleter = ctypes.cast(_ended, ctypes.c_void_p)
    drop_refused_capsules()
    capsule = _new_capsule(ctypes.addressof(managed), _NAME, None)
    _lent[ctypes.addressof(managed)] = _LentCapsule(capsule, (managed, sizes, steps, owner))
    return capsule


class _LentCapsule(NamedTuple):
    """What is behind a capsule, and the capsule itself.

    A destructor of the capsule would run while the error of whoever refused it is on its way, which no Python code can
    do without losing the error. So the capsule is kept, and looked at later.
    """

    capsule: Any
    memory: Any


_NAME = b"dltensor"  # capsules keep a pointer to it
_lent: dict[int, _LentCapsule] = {}  # by address


def drop_refused_capsules() -> int:
    """Give up the memory of capsules that nobody took, and nobody can take any more; how many there were."""
    refused = [
        address for address, lent in list(_lent.items())
        if _is_capsule(lent.capsule, _NAME) and _references(lent) <= _ALONE
    ]  # fmt: skip
    for address in refused:
        _lent.pop(address, None)
    return len(refused)


def _references(lent: _LentCapsule) -> int:
    return sys.getrefcount(lent.capsule)


def _end(address: int) -> None:
    """Whoever took the memory is done with it."""
    _lent.pop(address, None)


_ALONE = _references(_LentCapsule(object(), None))
_ended = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_end)


def _api(name: str, result: Any, *kinds: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *kinds)((name, ctypes.pythonapi))


_pointer = _api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_is_capsule = _api("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_new_capsule = _api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
