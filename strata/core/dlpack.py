"""Arrays from DLPack: by NumPy where it can, copied for element types that NumPy lacks."""

from __future__ import annotations

import ctypes
from typing import Any

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
