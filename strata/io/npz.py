"""NumPy's .npy and .npz files. Headers are checked before anything is allocated, and decompression is bounded."""

from __future__ import annotations

import ast
import os
import struct
import zipfile
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from strata.core import Meter, open_file
from strata.errors import FileError, StrataError, file_error
from strata.io.mapped import PathLike

MAX_MEMBERS = 1 << 16
MAX_RANK = 32
MAX_HEADER = 1 << 14  # bytes that describe one array
AT_ONCE = 1 << 24  # bytes that are read at a time
LENGTHS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}  # of the header, by version


def load_npy(path: PathLike) -> np.ndarray:
    """The array of an .npy file."""
    place = Path(path)
    with _opened(place) as file:
        return _array(file, os.fstat(file.fileno()).st_size, place.name)


def load_npz(path: PathLike) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; unpacked they may have `max_unpacked_bytes` beyond four times the file."""
    place = Path(path)
    with _opened(place) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                return _members(archive, size, place.name)
        except StrataError:
            raise
        except Exception as error:  # noqa: BLE001 - each way of packing has its own
            raise _bad(place.name, _first_line(error)) from None


def _opened(place: Path) -> IO[bytes]:
    try:
        return open_file(place)
    except OSError as error:
        raise file_error(place, error, code="F121", what="cannot be read") from None


def _members(archive: zipfile.ZipFile, size: int, name: str) -> dict[str, np.ndarray]:
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise _bad(name, f"it has {len(infos)} members")
    meter = Meter("max_unpacked_bytes", f"{name}: {size} bytes unpack to {sum(i.file_size for i in infos)}")
    meter.add(-4 * size)
    found: dict[str, np.ndarray] = {}
    for info in infos:
        key = info.filename.removesuffix(".npy")
        if key in found:
            raise _bad(name, f"it has the array {key!r} twice")
        meter.add(info.file_size)
        with archive.open(info) as member:
            found[key] = _array(member, info.file_size, f"{name}: {info.filename!r}")
    return found


def _array(file: IO[bytes], size: int, name: str) -> np.ndarray:
    """One array of at most `size` bytes: its type and shape are looked at before it is made."""
    try:
        shape, is_fortran, dtype = _header(file)
        count = prod(shape) * dtype.itemsize
        data = np.empty(count if count <= size else 0, np.uint8)
        found = _fill(file, data)
    except StrataError:
        raise
    except Exception as error:  # noqa: BLE001 - each way of packing has its own
        raise _bad(name, _first_line(error)) from None
    if found != count:
        raise _bad(name, f"{dtype}{list(shape)} has {count} bytes, there are {size if count > size else found}")
    flat = data.view(dtype) if count else np.zeros(prod(shape), dtype)
    return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


def _fill(file: IO[bytes], data: np.ndarray) -> int:
    """Read bytes into an array, some at a time: the whole is in memory once. Gives how many there were."""
    at = 0
    while at < len(data) and (part := file.read(min(len(data) - at, AT_ONCE))):
        data[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return at


def _header(file: IO[bytes]) -> tuple[tuple[Any, ...], bool, np.dtype[Any]]:
    """Shape, order and type, as the text in front of the data says."""
    version = npy.read_magic(file)
    if version not in LENGTHS:
        raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
    form = LENGTHS[version]
    (size,) = struct.unpack(form, file.read(struct.calcsize(form)).ljust(struct.calcsize(form), b"\0"))
    if size > MAX_HEADER:
        raise ValueError(f"its header has {size} bytes")
    text = file.read(size).decode("utf-8" if version == (3, 0) else "latin-1")
    found = ast.literal_eval(text.strip())
    if not isinstance(found, dict) or set(found) != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header does not say type, order and shape")
    shape, is_fortran, dtype = found["shape"], found["fortran_order"], npy.descr_to_dtype(found["descr"])
    is_shape = isinstance(shape, tuple) and len(shape) <= MAX_RANK and all(type(d) is int and d >= 0 for d in shape)
    if not is_shape or not isinstance(is_fortran, bool):
        raise ValueError(f"its header has the shape {str(shape)[:80]} and the order {str(is_fortran)[:20]}")
    if dtype.hasobject or dtype.kind not in "biufcV":
        raise ValueError(f"it holds {dtype}, not numbers")
    return shape, is_fortran, dtype


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _bad(name: str, message: str) -> FileError:
    return FileError(f"{name} cannot be read: {message}", code="F122")
