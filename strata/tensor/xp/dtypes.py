"""Data types of the standard: what there is, how they combine, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.config import config
from strata.core import ALL_DTYPES, DType, as_dtype, here, promote_all
from strata.errors import DTypeError
from strata.runtime import devices as found_devices
from strata.tensor.placement import HOST, home_of
from strata.tensor.tensor import Tensor

STANDARD = {
    "bool": "bool", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float32": "f32", "float64": "f64", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
KINDS = {
    "bool": ("bool",),
    "signed integer": ("int8", "int16", "int32", "int64"),
    "unsigned integer": ("uint8", "uint16", "uint32", "uint64"),
    "real floating": ("float32", "float64"),
    "complex floating": ("complex64", "complex128"),
}
KINDS["integral"] = KINDS["signed integer"] + KINDS["unsigned integer"]
KINDS["numeric"] = KINDS["integral"] + KINDS["real floating"] + KINDS["complex floating"]
_BY_NAME: dict[str, DType] = {name: as_dtype(short) for name, short in STANDARD.items()}


@dataclass(frozen=True)
class FloatInfo:
    """Limits of a floating type."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntInfo:
    """Limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


def _dtype(x: Any) -> DType:
    return x.dtype if isinstance(x, Tensor) else as_dtype(x)


def finfo(type: Any, /) -> FloatInfo:
    """Limits of a float type; of a complex one, those of its parts."""
    dtype = _dtype(type)
    if not dtype.is_inexact:
        raise DTypeError(f"finfo: {dtype} is not a floating type", code="D380", place=here())
    info = np.finfo(dtype.real.np)
    return FloatInfo(
        info.bits, float(info.eps), float(info.max), float(info.min), float(info.smallest_normal), dtype.real
    )


def iinfo(type: Any, /) -> IntInfo:
    """Limits of an integer type."""
    dtype = _dtype(type)
    if not dtype.is_int:
        raise DTypeError(f"iinfo: {dtype} is not an integer type", code="D380", place=here())
    low = -(1 << (dtype.bits - 1)) if dtype.is_signed else 0
    return IntInfo(dtype.bits, low + (1 << dtype.bits) - 1, low, dtype)


def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether a type is one of a kind, or one of several."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise DTypeError(f"isdtype: there is no kind {kind!r}", code="D380", place=here())
        return any(_BY_NAME[name] is dtype for name in KINDS[kind])
    return as_dtype(kind) is as_dtype(dtype)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The type that operands are promoted to; Python numbers adapt."""
    strong = [_dtype(x) for x in arrays_and_dtypes if not isinstance(x, (bool, int, float, complex))]
    if not strong:
        raise DTypeError("result_type: needs an array or a type", code="D380", place=here())
    return promote_all(strong)


def can_cast(from_: Any, to: Any, /) -> bool:
    """Whether promotion would lead from one type to the other."""
    source, target = _dtype(from_), as_dtype(to)
    ranks = {"bool": 0, "uint": 1, "int": 1, "float": 2, "complex": 3}
    if source is target:
        return True
    if ranks[source.kind] > ranks[target.kind]:
        return False
    return bool(np.can_cast(source.np, target.np))


def astype(x: Tensor, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """Elements in another type."""
    if x.dtype.is_complex and not as_dtype(dtype).is_complex:
        raise DTypeError(f"astype: {x.dtype} has no order in {as_dtype(dtype)}", code="D380", place=here())
    result: Tensor = x.cast(dtype)
    return result if device is None else result.to(device)


def check_device(device: Any) -> None:
    """Refuse a device that is not there."""
    if device is not None:
        home_of(device)


def devices() -> tuple[str, ...]:
    """Where tensors can live, by the names that `device=` takes."""
    return ("cpu", *(name for name in found_devices() if home_of(name) is not None))


class Info:
    """What the namespace has."""

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        home = home_of(config().device)
        return HOST if home is None else home.name

    def devices(self) -> tuple[str, ...]:
        return devices()

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        check_device(device)
        return {
            "real floating": _BY_NAME["float32"], "complex floating": _BY_NAME["complex64"],
            "integral": _BY_NAME["int64"], "indexing": _BY_NAME["int64"],
        }  # fmt: skip

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        check_device(device)
        return {name: d for name, d in _BY_NAME.items() if kind is None or isdtype(d, kind)}


def __array_namespace_info__() -> Info:  # noqa: N807 - the standard's name
    return Info()


assert all(d in ALL_DTYPES for d in _BY_NAME.values())
