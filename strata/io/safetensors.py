"""safetensors files: a JSON header of names, types and offsets, then the data. Read by mapping; nothing is copied.

Everything that the header says is checked before it is used: sizes, types, bounds, and that the tensors tile the data
without holes or overlaps, as the format asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from strata.arguments import own_checks
from strata.core import as_dtype, bf16, bool_, c64, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from strata.errors import FileError
from strata.io.mapped import PathLike, map_file, path_of, replace_file, typed_view
from strata.kinds import with_article

DTYPES = {
    "BOOL": bool_, "U8": u8, "I8": i8, "U16": u16, "I16": i16, "U32": u32, "I32": i32, "U64": u64, "I64": i64,
    "F8_E4M3": f8e4m3, "F8_E5M2": f8e5m2, "F16": f16, "BF16": bf16, "F32": f32, "F64": f64, "C64": c64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100 << 20  # bytes; the format's own limit
MAX_RANK = 32
MAX_ELEMENTS = 1 << 48


class TensorFile(Mapping[str, np.ndarray]):
    """Named arrays over mapped files, in the order of their headers, and the files' string metadata."""

    def __init__(self, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        self.tensors = tensors
        self.metadata = metadata

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def load_safetensors(path: PathLike) -> TensorFile:
    """The tensors of a file as read-only arrays over its mapping; bf16 and f16 stay what they are."""
    data = map_file(path, "safetensors")
    name = Path(path).name
    if len(data) < 8:
        raise _bad(name, f"has {len(data)} bytes, too few for a header")
    size = int.from_bytes(data[:8].tobytes(), "little")
    if size > min(MAX_HEADER, len(data) - 8):
        raise _bad(name, f"its header of {size} bytes does not fit the file's {len(data)}")
    header = _parse_header(name, data[8 : 8 + size].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(name, "its __metadata__ is not a map of strings")
    start, length = 8 + size, len(data) - 8 - size
    tensors = {}
    spans: list[tuple[int, int, str]] = []
    for key, entry in header.items():
        dtype, shape, first, last = _entry(name, key, entry, length)
        spans.append((first, last, key))
        tensors[key] = typed_view(data, start + first, dtype, shape)
    _check_tiling(name, spans, length)
    return TensorFile(tensors, metadata)


def _parse_header(name: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(name, pairs))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise _bad(name, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _bad(name, "its header is not a JSON object")
    return header


def _unique(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _bad(name, "its header names a tensor twice")
    return found


def _entry(name: str, key: str, entry: Any, length: int) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """The dtype, shape and span of one tensor, checked."""
    if not isinstance(entry, dict):
        raise _bad(name, f"tensor {key!r} has no description")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(name, f"tensor {key!r} has the unknown type {dtype!r}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise _bad(name, f"tensor {key!r} has no valid shape")
    if not _is_sizes(span) or len(span) != 2 or not span[0] <= span[1] <= length:
        raise _bad(name, f"tensor {key!r} lies at {span}, outside the {length} bytes of data")
    kind = DTYPES[dtype].np
    if prod(d for d in shape if d) > MAX_ELEMENTS:
        raise _bad(name, f"tensor {key!r} has the sizes {shape}")
    if prod(shape) * kind.itemsize != span[1] - span[0]:
        raise _bad(name, f"tensor {key!r} : {dtype}{shape} does not fill its {span[1] - span[0]} bytes")
    return kind, tuple(shape), span[0], span[1]


def _is_sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(d) is int and 0 <= d < 1 << 62 for d in x)


def _check_tiling(name: str, spans: list[tuple[int, int, str]], length: int) -> None:
    end = 0
    for first, last, key in sorted(spans):
        if first != end:
            raise _bad(name, f"tensor {key!r} starts at byte {first}, the one before it ends at {end}")
        end = last
    if end != length:
        raise _bad(name, f"its tensors end at byte {end} of {length}")


def _bad(name: str, message: str) -> FileError:
    return FileError(f"safetensors: {name}: {message}", code="F120")


@own_checks()
def save_safetensors(path: PathLike, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write named arrays, the widest elements first, so that every one is aligned."""
    if isinstance(path, Mapping) and not isinstance(tensors, Mapping):
        raise FileError(
            f"save_safetensors: the path comes first, got {with_article(type(path))}", code="F121",
            fix="save_safetensors(path, tensors)",
        )  # fmt: skip
    path_of(path, "save_safetensors")
    for what, given in (("tensors", tensors), ("metadata", metadata)):
        if not isinstance(given, Mapping) and (what == "tensors" or given is not None):
            kind = with_article(type(given))
            raise FileError(f"save_safetensors: {what} are a mapping by name, got {kind}", code="F120")
    if metadata and not all(isinstance(x, str) for pair in metadata.items() for x in pair):
        raise FileError("save_safetensors: metadata are texts by name", code="F120")
    unnamed = next((name for name in tensors if not isinstance(name, str)), None)
    if unnamed is not None:
        raise FileError(f"save_safetensors: {unnamed!r} is not the name of a tensor", code="F120")
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    arrays = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    order = sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n))
    for name in order:
        array = arrays[name]
        dtype = as_dtype(array.dtype)
        if dtype not in NAMES or name == "__metadata__":
            raise FileError(f"safetensors: {name!r} : {dtype} cannot be stored", code="F120")
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56 if len(text) % 64 else 56)  # 8 + header is a multiple of 64

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(arrays[name].view(np.uint8).data if arrays[name].ndim else arrays[name].tobytes())

    replace_file(path, "save_safetensors", write)
