"""Element types: their names, NumPy forms, classes and promotion."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np

from strata.arguments import hot
from strata.errors import DTypeError

if TYPE_CHECKING:
    from strata.core.dims import Dim
    from strata.core.types import TensorType


@hot
@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. `rank` orders types for promotion; `f32[4, 8]` makes a tensor type.

    The compiler asks for what follows from the kind at every element of every expression, so these are fields, too.
    """

    __tree_leaf__: ClassVar[bool] = True  # one object for each type

    name: str  # short, used in IR text: f32
    long_name: str  # NumPy's and torch's: float32
    kind: str  # bool, int, uint, float, complex
    bits: int
    rank: int
    np: np.dtype[Any]
    itemsize: int = field(init=False)
    is_bool: bool = field(init=False)
    is_float: bool = field(init=False)
    is_int: bool = field(init=False)
    is_signed: bool = field(init=False)
    is_complex: bool = field(init=False)
    is_inexact: bool = field(init=False)  # float or complex: the types that derivatives exist for

    def __post_init__(self) -> None:
        facts = {
            "itemsize": self.np.itemsize,
            "is_bool": self.kind == "bool",
            "is_float": self.kind == "float",
            "is_int": self.kind in ("int", "uint"),
            "is_signed": self.kind in ("int", "float", "complex"),
            "is_complex": self.kind == "complex",
            "is_inexact": self.kind in ("float", "complex"),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def accumulator(self) -> DType:
        """The type that sums of this type are kept in: f16, bf16 and f8 in f32, narrow integers in i32 or i64."""
        if self.is_float and self.bits < 32:
            return f32
        if self.is_int and self.bits < 32:
            return i32
        return self

    @property
    def real(self) -> DType:
        """The type of one component of a complex number; itself otherwise."""
        return {"c64": f32, "c128": f64}.get(self.name, self)

    @property
    def lowest(self) -> float:
        """Below every other number of a float type: minus infinity, or the least number where there is no infinity."""
        low = float(np.array(-math.inf, np.float32).astype(self.np))
        least: Any = ml_dtypes.finfo(self.np).min if math.isnan(low) else low  # type: ignore[no-untyped-call]
        return float(least)

    def __getitem__(self, shape: Dim | tuple[Dim, ...]) -> TensorType:
        from strata.core.types import TensorType  # types are made of dtypes: the one upward reference

        return TensorType(self, shape if isinstance(shape, tuple) else (shape,))

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return as_dtype, (self.name,)  # a copy is the same object, so `is` keeps working


def _make(name: str, long_name: str, kind: str, bits: int, rank: int, np_type: Any) -> DType:
    return DType(name, long_name, kind, bits, rank, np.dtype(np_type))


bool_ = _make("bool", "bool", "bool", 8, 0, np.bool_)
i4 = _make("i4", "int4", "int", 4, 1, ml_dtypes.int4)
u4 = _make("u4", "uint4", "uint", 4, 1, ml_dtypes.uint4)
u8 = _make("u8", "uint8", "uint", 8, 2, np.uint8)
i8 = _make("i8", "int8", "int", 8, 2, np.int8)
u16 = _make("u16", "uint16", "uint", 16, 3, np.uint16)
i16 = _make("i16", "int16", "int", 16, 3, np.int16)
u32 = _make("u32", "uint32", "uint", 32, 5, np.uint32)
i32 = _make("i32", "int32", "int", 32, 5, np.int32)
u64 = _make("u64", "uint64", "uint", 64, 6, np.uint64)
i64 = _make("i64", "int64", "int", 64, 6, np.int64)
f8e4m3 = _make("f8e4m3", "float8_e4m3fn", "float", 8, 1, ml_dtypes.float8_e4m3fn)
f8e5m2 = _make("f8e5m2", "float8_e5m2", "float", 8, 1, ml_dtypes.float8_e5m2)
bf16 = _make("bf16", "bfloat16", "float", 16, 3, ml_dtypes.bfloat16)
f16 = _make("f16", "float16", "float", 16, 4, np.float16)
f32 = _make("f32", "float32", "float", 32, 7, np.float32)
f64 = _make("f64", "float64", "float", 64, 8, np.float64)
c64 = _make("c64", "complex64", "complex", 64, 9, np.complex64)
c128 = _make("c128", "complex128", "complex", 128, 10, np.complex128)

ALL_DTYPES: tuple[DType, ...] = (
    bool_, i4, u4, u8, i8, u16, i16, u32, i32, u64, i64, f8e4m3, f8e5m2, bf16, f16, f32, f64, c64, c128,
)  # fmt: skip
_BY_NAME = {name: t for t in ALL_DTYPES for name in (t.name, t.long_name)} | {"bool_": bool_}
_BY_NUMPY = {t.np: t for t in ALL_DTYPES}
_PYTHON = {bool: bool_, int: i64, float: f32, complex: c64}

DTypeLike = DType | str | type | np.dtype[Any]


def as_dtype(x: Any) -> DType:
    """The strata dtype for a dtype, its name ("f32", "float32"), a NumPy dtype or a Python type."""
    if isinstance(x, DType):
        return x
    try:
        return _lookup(x)
    except (TypeError, KeyError, ValueError, SyntaxError):  # NumPy reads texts with commas and counts
        known = ", ".join(t.name for t in ALL_DTYPES)
        raise DTypeError(f"{x!r} is not an element type; known: {known}", code="D101") from None


@cache
def _lookup(x: Any) -> DType:
    if isinstance(x, str) and x in _BY_NAME:
        return _BY_NAME[x]
    if isinstance(x, type) and x in _PYTHON:
        return _PYTHON[x]
    if x is None:
        raise TypeError("NumPy reads None as float64")
    return _BY_NUMPY[np.dtype(x).newbyteorder("=")]


@cache
def promote(a: DType, b: DType) -> DType:
    """The common type of two operands; commutative.

    Equal types stay; two different half formats meet in f32; an integer with a float gives f64 if the float is f64 or
    the integer has 64 bits, else f32; signed with unsigned of the same width gives the next wider signed type.
    """
    if a is b:
        return a
    low, high = sorted((a, b), key=lambda t: (t.rank, t.bits))
    if high.is_complex:
        wide = high is c128 or low is f64 or low is c128 or (low.is_int and low.bits == 64)
        return c128 if wide else c64
    if a.is_float and b.is_float:
        return high if high.bits > 16 or low.bits < high.bits else f32
    if a.is_float or b.is_float:
        real, other = (a, b) if a.is_float else (b, a)
        if other.is_bool:
            return real
        return f64 if real is f64 or other.bits == 64 else f32
    if low.is_bool or low.kind == high.kind:
        return high if high.bits >= low.bits else low
    signed, unsigned = (a, b) if a.kind == "int" else (b, a)
    if signed.bits > unsigned.bits:
        return signed
    return {4: i8, 8: i16, 16: i32, 32: i64, 64: f64}[unsigned.bits]


def promote_all(dtypes: list[DType]) -> DType:
    """Promotion over one or more types."""
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = promote(result, dtype)
    return result


def check_unmasked(x: object) -> None:
    """Refuse a masked array: what lies under the mask would count like any other number."""
    if isinstance(x, np.ndarray) and type(x) is not np.ndarray and hasattr(x, "filled"):
        raise DTypeError("a masked array has elements without a value", code="D108", fix="x.filled(0)")
