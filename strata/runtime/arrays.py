"""Arrays of callers: anything with `__array__`, `__dlpack__` or a buffer, checked against declared types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import TensorType, as_dtype, from_dlpack, here
from strata.errors import DTypeError, OptionError, ShapeError, StrataError

USABLE = 0x101  # flags of an array whose elements lie one after the other, each at a multiple of its size


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array that is kept elsewhere, in a file: it is read each time that somebody asks for it."""

    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)


def read_array(name: str, kind: TensorType, value: Any, what: str) -> np.ndarray:
    """The value as a contiguous array of the declared type, without a copy where that is possible."""
    array = to_numpy(value, name, what)
    is_python = isinstance(value, (bool, int, float, complex, list, tuple))
    if array.dtype != kind.dtype.np and not is_python:
        raise DTypeError(f"{what} {name!r} is {kind}, got {describe(array)}", code="D102", place=here())
    fits = len(array.shape) == kind.ndim and all(
        not isinstance(d, int) or d == n for d, n in zip(kind.shape, array.shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"{what} {name!r} is {kind}, got {describe(array)}", code="S107", place=here())
    if array.flags.num & USABLE == USABLE and array.dtype == kind.dtype.np:
        return array
    return np.array(array, kind.dtype.np, order="C").reshape(array.shape)


def to_numpy(value: Any, name: str, what: str) -> np.ndarray:
    """NumPy's view of an array-like object."""
    if isinstance(value, np.ndarray):
        return value
    try:
        if not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
        elif not hasattr(value, "__array__"):
            return from_dlpack(value)
        else:
            try:
                array = np.asarray(value)
            except TypeError:  # elements that NumPy has no type for
                return from_dlpack(value)
    except StrataError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DTypeError(
            f"{what} {name!r}: {type(value).__name__} cannot be read as an array: {error}", code="D401", place=here()
        ) from None
    if array.dtype.kind in "OUSV" and array.dtype.isbuiltin == 1:
        raise DTypeError(
            f"{what} {name!r}: {type(value).__name__} cannot be read as an array of numbers", code="D401", place=here()
        )
    return array


def kept_apart(arrays: list[np.ndarray], outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The inputs, copied where an output lies over them. Outputs that lie over each other are refused."""
    for i, y in enumerate(outputs):
        for j in range(i):
            if _overlap(y, outputs[j]):
                raise OptionError(f"outputs {j} and {i} lie over each other", code="O151", place=here())
        for x in arrays:
            if _overlap(x, y):
                return [x.copy() if any(_overlap(x, y) for y in outputs) else x for x in arrays]
    return arrays


def _overlap(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays may share memory; two that have memory of their own do not, which is known at once."""
    return (x is y or x.base is not None or y.base is not None) and np.may_share_memory(x, y)


def check_output(number: int, kind: TensorType, array: Any) -> None:
    """Refuse an array that results cannot be written into."""
    if not isinstance(array, np.ndarray) or array.dtype != kind.dtype.np:
        found = describe(array) if isinstance(array, np.ndarray) else type(array).__name__
        raise DTypeError(f"output {number} is {kind}, got {found}", code="D102", place=here())
    reason = ""
    if not array.flags.c_contiguous:
        reason = " that is not contiguous"
    elif not array.flags.writeable:
        reason = " that cannot be written"
    if reason or array.shape != kind.shape:
        raise ShapeError(f"output {number} is {kind}, got {describe(array)}{reason}", code="S107", place=here())


def describe(array: np.ndarray) -> str:
    """`f32[2, 3]`"""
    return f"{as_dtype(array.dtype)}{list(array.shape)}"
