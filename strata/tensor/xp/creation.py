"""Arrays of the standard: creation functions, with its names and its positional-only arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

import strata.tensor as tensors
from strata.core import as_dtype, f32, here, i64
from strata.core import from_dlpack as dlpack_array
from strata.errors import BufferTypeError, DTypeError, OptionError
from strata.tensor import creation
from strata.tensor.tensor import Tensor

_ops: Any = tensors


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Tensor:
    if copy is False and not isinstance(obj, (Tensor, np.ndarray)) and not hasattr(obj, "__dlpack__"):
        raise OptionError("asarray: a Python object cannot be used without a copy", code="O380", place=here())
    if isinstance(obj, Tensor):
        same = dtype is None or as_dtype(dtype) is obj.dtype
        if copy is False and not same:
            raise OptionError(f"asarray: {obj.dtype} becomes {as_dtype(dtype)} by a copy", code="O380", place=here())
        made = obj if same else creation.asarray(obj, dtype)
        made = made if device is None else made.to(device)
        return made.__copy__() if copy and made is obj else made
    if isinstance(obj, (list, tuple)) and dtype is None:
        flat = np.asarray(_plain(obj)) if _has_tensors(obj) else np.asarray(obj)
        if flat.dtype == np.uint64 or (flat.dtype.kind == "O"):
            raise DTypeError("asarray: a number is too large for a 64-bit integer", code="T207", place=here())
    return creation.asarray(_plain(obj) if _has_tensors(obj) else obj, dtype, copy=copy, device=device)


def _has_tensors(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(v, Tensor) or _has_tensors(v) for v in x)


def _plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.tolist()
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Tensor:
    where = getattr(x, "__dlpack_device__", None)
    if where is not None and int(where()[0]) != 1:  # not in memory of the host
        return creation.asarray(x, copy=copy, device=device)
    try:
        array = np.from_dlpack(x, copy=copy) if copy is not None else dlpack_array(x)
    except BufferError as error:
        kind = type(x).__name__
        raise BufferTypeError(f"from_dlpack: {kind} gives no elements: {error}", code="D401", place=here()) from None
    return creation.asarray(array, device=device)


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Tensor:
    if stop is None:
        start, stop = 0, start
    whole = all(isinstance(v, int) for v in (start, stop, step))
    kind = as_dtype(dtype) if dtype is not None else i64 if whole else f32
    return creation.asarray(np.arange(start, stop, step, dtype=kind.np), device=device)


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
) -> Tensor:
    is_complex = isinstance(start, complex) or isinstance(stop, complex)
    kind = as_dtype(dtype) if dtype is not None else as_dtype("c64") if is_complex else f32
    return creation.asarray(np.linspace(start, stop, num, endpoint=endpoint, dtype=kind.np), device=device)


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Tensor:
    return creation.asarray(np.eye(n_rows, n_cols, k, dtype=as_dtype(dtype or f32).np), device=device)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    kind = as_dtype(dtype) if dtype is not None else creation.asarray(fill_value).dtype
    made: Tensor = creation.full(tuple(sizes), fill_value, kind, device=device)
    return made


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return full(shape, 0, dtype=dtype or f32, device=device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return full(shape, 1, dtype=dtype or f32, device=device)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Tensor, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.device)


def zeros_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    return full_like(x, 0, dtype=dtype, device=device)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> tuple[Tensor, ...]:
    return tuple(_ops.meshgrid(*arrays, indexing=indexing)) if arrays else ()


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    made: Tensor = _ops.tril(x, k)
    return made


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    made: Tensor = _ops.triu(x, k)
    return made
