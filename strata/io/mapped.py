"""Memory-mapped files: pages are read when touched, typed views copy nothing."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from strata.core import forget_pages, open_file
from strata.errors import FileError, file_error
from strata.kinds import with_article

PathLike = str | os.PathLike[str]


def path_of(path: Any, what: str) -> Path:
    """A path, where it is one."""
    try:
        is_name = isinstance(path, (str, os.PathLike)) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair
        is_name = False
    if not is_name:
        shown = repr(path) if isinstance(path, str) else f"{with_article(type(path))}"
        raise FileError(f"{what}: {shown} is not a path", code="F121")
    return Path(path)


def map_file(path: PathLike, what: str) -> np.ndarray:
    """The bytes of a file as a read-only array over its mapping."""
    place = path_of(path, what)
    try:
        with open_file(place) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FileError(f"{what}: {place.name} is empty", code="F120")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error(place, error, code="F121", what="cannot be read", who=what) from None
    return np.frombuffer(mapping, np.uint8)


def typed_view(data: np.ndarray, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Elements at a byte offset that the caller has checked; unaligned ones are copied."""
    count = prod(shape) * dtype.itemsize
    part = data[start : start + count]
    address = part.__array_interface__["data"][0]
    if address % dtype.itemsize and count:
        part = part.copy()
    return part.view(dtype).reshape(shape)


def release_pages(array: np.ndarray) -> bool:
    """Let go of the memory behind part of a mapped file that has been copied; it is read again if it is touched.

    True if the array is part of such a file.
    """
    return forget_pages(array)


def replace_file(path: PathLike, what: str, write: Callable[[BinaryIO], None]) -> None:
    """Write a file beside its place and move it there whole: a reader never sees half of it."""
    place = path_of(path, what)
    if not place.name:
        raise FileError(f"{what}: {str(path)!r} is not a name for a file", code="F121")
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(place)
    except OSError as error:
        raise file_error(place, error, code="F121", what="cannot be written") from None
    finally:
        partial.unlink(missing_ok=True)
