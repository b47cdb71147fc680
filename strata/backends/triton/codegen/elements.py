"""Element types in Triton: storage types and compute types.

Floats of less than 32 bits are computed with as f32 and rounded where they are stored or cast, as on the processor: to
their own type, too, where an op ends.
The 8-bit floats travel as their bits, so that every GPU and Triton's interpreter agree on what they are. So does bf16
in the interpreter, which has no such type: there, prelude functions stand between its bits and values. On a GPU a tile
of bf16 is of that type from the moment it is loaded, so that tensor cores read it from where it was put.
"""

from __future__ import annotations

import math
from typing import Final

from strata.core import DType

_REGISTER: Final = {
    "bool": "int1", "i4": "int8", "u4": "uint8", "u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16",
    "u32": "uint32", "i32": "int32", "u64": "uint64", "i64": "int64", "f8e4m3": "float32", "f8e5m2": "float32",
    "bf16": "float32", "f16": "float32", "f32": "float32", "f64": "float64",
}  # fmt: skip
_MEMORY: Final = {
    "bool": "uint8", "i4": "int8", "u4": "uint8", "f8e4m3": "uint8", "f8e5m2": "uint8",
    "bf16": "bfloat16", "f16": "float16",
}  # fmt: skip
_POINTER: Final = {
    "uint8": "*u8", "int8": "*i8", "uint16": "*u16", "int16": "*i16", "uint32": "*u32", "int32": "*i32",
    "uint64": "*u64", "int64": "*i64", "float16": "*fp16", "bfloat16": "*bf16",
    "float32": "*fp32", "float64": "*fp64",
}  # fmt: skip
BITS: Final = frozenset(("bf16", "f8e4m3", "f8e5m2"))  # types that prelude functions read and write


def register(dtype: DType) -> str:
    """The Triton type of a value."""
    return f"tl.{_REGISTER[dtype.name]}"


def memory(dtype: DType) -> str:
    """The Triton type of an element of a buffer."""
    return f"tl.{_memory(dtype)}"


def pointer(dtype: DType) -> str:
    """The type of a kernel's argument: `*fp32`."""
    return _POINTER[_memory(dtype)]


def _memory(dtype: DType) -> str:
    return _MEMORY.get(dtype.name, _REGISTER[dtype.name])


def is_small(dtype: DType) -> bool:
    """Floats that are computed with as f32."""
    return dtype.is_float and dtype.bits < 32


def number(value: float, dtype: DType) -> str:
    """A constant with its type."""
    return f"tl.full([], {literal(value, dtype)}, {register(dtype)})"


def literal(value: float, dtype: DType) -> str:
    """A constant as Python writes it."""
    if dtype.is_bool:
        return "1" if value else "0"
    if dtype.is_int:
        return str(int(value))
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(float(value))
