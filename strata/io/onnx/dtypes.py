"""ONNX's element types and NumPy's: which exist in graphs, and which only as host arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from strata.core import ALL_DTYPES
from strata.errors import FileError

FLOAT, STRING, INT64 = 1, 8, 7

NUMPY: dict[int, np.dtype[Any]] = {
    number: np.dtype(kind)
    for number, kind in {
        1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 8: object,
        9: np.bool_, 10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64, 14: np.complex64, 15: np.complex128,
        16: ml_dtypes.bfloat16, 17: ml_dtypes.float8_e4m3fn, 18: ml_dtypes.float8_e4m3fnuz, 19: ml_dtypes.float8_e5m2,
        20: ml_dtypes.float8_e5m2fnuz, 21: ml_dtypes.uint4, 22: ml_dtypes.int4, 23: ml_dtypes.float4_e2m1fn,
        24: ml_dtypes.float8_e8m0fnu, 25: ml_dtypes.uint2, 26: ml_dtypes.int2,
    }.items()
}  # fmt: skip
_NAMES = (
    "float", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "double", "uint32",
    "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
    "uint4", "int4", "float4e2m1", "float8e8m0", "uint2", "int2",
)  # fmt: skip
NAMES = dict(enumerate(_NAMES, 1))  # of element types, in ONNX's words
NUMBER = {dtype: number for number, dtype in NUMPY.items()}
_GRAPH = {t.np for t in ALL_DTYPES}


def numpy_dtype(number: int) -> np.dtype[Any]:
    """NumPy's type for a value of TensorProto.DataType."""
    if number not in NUMPY:
        raise FileError(f"element type {number} is not one of ONNX's", code="F501")
    return NUMPY[number]


TEXT = np.dtype(object)  # strings


def is_text(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "O"


def as_texts(array: np.ndarray) -> np.ndarray:
    """An array of strings: bytes are read as UTF-8, other objects as what `str` makes of them."""
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8").astype(object)
    held = array.astype(object)
    if all(type(x) is str for x in held.flat):
        return held
    made = np.empty(held.shape, object)
    made.flat[:] = [str(x) for x in held.flat]
    return made


def largest(dtype: np.dtype[Any]) -> float:
    """The largest finite number of a float type."""
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def in_graphs(dtype: np.dtype[Any]) -> bool:
    """Whether graphs have this element type; arrays of others stay on the host."""
    return dtype in _GRAPH


def type_name(proto: Any) -> str:
    """A TypeProto in ONNX's words: tensor(float), seq(map(int64,tensor(float))), optional(tensor(int64))."""
    match proto.WhichOneof("value"):
        case "tensor_type":
            return f"tensor({NAMES.get(proto.tensor_type.elem_type, 'undefined')})"
        case "sparse_tensor_type":
            return f"sparse_tensor({NAMES.get(proto.sparse_tensor_type.elem_type, 'undefined')})"
        case "sequence_type":
            return f"seq({type_name(proto.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({type_name(proto.optional_type.elem_type)})"
        case "map_type":
            return f"map({NAMES.get(proto.map_type.key_type, 'undefined')},{type_name(proto.map_type.value_type)})"
        case _:
            return ""
