"""The bytes of a model file: hashed once, read on demand, parts of them as arrays."""

from __future__ import annotations

import hashlib
import io
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from strata.core import here, new_lock, open_handle
from strata.errors import FileError, file_error
from strata.kinds import shown
from strata.runtime import StoredArray

BLOCK = 1 << 16  # bytes that are looked through at a time


class ModelFile:
    """A file, or bytes in memory. A file stays open: one that is moved into its place later is another file."""

    def __init__(self, source: Any) -> None:
        self.folder: Path | None = None
        self.name = ""
        self._data: bytes | None = None
        self._lock = new_lock()
        if not isinstance(source, (str, os.PathLike)):
            if not isinstance(source, (bytes, bytearray, memoryview)):
                raise FileError(
                    f"a model is a path, bytes or a ModelProto, got {shown(source)}", code="F500", place=here()
                )
            self._data = bytes(source)
            self.digest, self.size = hashlib.sha256(self._data).hexdigest(), len(self._data)
            return
        self._path = Path(source)
        self.name = self._path.name
        try:
            handle = open_handle(self._path)
            weakref.finalize(self, os.close, handle)
            self._file = io.FileIO(handle, closefd=False)
            self._state = self._now()
            self.digest, self.size = hashlib.file_digest(self._file, "sha256").hexdigest(), self._state[0]
        except OSError as error:
            raise file_error(self._path, error, code="F500") from None
        self.folder = self._path.resolve().parent

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def read(self) -> bytes:
        """All of it."""
        if self._data is not None:
            return self._data
        with self._lock:
            self._file.seek(0)
            data = self._file.readall()
            self._check(len(data) == self.size)
        return data

    def find(self, part: bytes, start: int) -> int:
        """Where some bytes are, from `start` on; -1 if they do not occur. The file is never in memory as a whole."""
        if self._data is not None:
            return self._data.find(part, start)
        while start + len(part) <= self.size:
            with self._lock:
                self._file.seek(start)
                at = self._file.read(BLOCK + len(part)).find(part)
            if at >= 0:
                return start + at
            start += BLOCK
        return -1

    def array(self, at: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> StoredArray:
        """Elements that lie one after the other in it; they are read each time that somebody asks for them."""
        return StoredArray(partial(self._elements, at, dtype, shape))

    def _elements(self, at: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return self._part(at, size).view(dtype).reshape(shape)

    def _part(self, at: int, size: int) -> np.ndarray:
        """A copy of some bytes, at an address that fits any element."""
        made = np.empty(size, np.uint8)
        if self._data is not None:
            made[:] = np.frombuffer(self._data, np.uint8, size, at)
            return made
        view = memoryview(made.data)
        with self._lock:
            self._file.seek(at)
            while view and (count := self._file.readinto(view)):
                view = view[count:]
            self._check(not view)
        return made

    def _check(self, is_whole: bool) -> None:
        if not is_whole or self._now() != self._state:
            raise FileError(f"{str(self._path)!r} changed while the model was in use", code="F500")
