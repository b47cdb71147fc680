"""The container format of bundles: a checked header, then named parts with checksums, aligned for mapping.

    magic, SHA-256 of the header, length of the header, header (JSON), padding, parts

Nothing in it is executed by reading it, and no length is believed before it is checked against the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strata.core import here, open_file
from strata.errors import FileError, file_error

MAGIC = b"strata-bundle-1\n"
ALIGNMENT = 64
_HEAD = len(MAGIC) + 32 + 8
_MOST_HEADER = 64 << 20

Part = bytes | memoryview


def write_container(path: str | os.PathLike[str], about: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Write all parts, or leave what was there before."""
    if not isinstance(path, (str, os.PathLike)):
        raise FileError(f"{path!r} is not a path", code="F403", place=here())
    table: list[list[Any]] = []
    at = 0
    for name, data in parts.items():
        table.append([name, at, len(data), hashlib.sha256(data).hexdigest()])
        at += -(-len(data) // ALIGNMENT) * ALIGNMENT
    header = json.dumps({"about": dict(about), "parts": table}).encode()
    header += b" " * (-(_HEAD + len(header)) % ALIGNMENT)
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header)
                for data in parts.values():
                    file.write(data)
                    file.write(b"\0" * (-len(data) % ALIGNMENT))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise file_error(path, error, code="F403", what="cannot be written", place=here()) from None


class Container:
    """A file that was written by `write_container`, mapped. Parts are checked when they are first read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise FileError(f"{path!r} is not a path", code="F404", place=here())
        self.path = str(path)
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise file_error(self.path, error, code="F404", what="cannot be read", place=here()) from None
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        header = self._header()
        about, parts = header.get("about"), header.get("parts")
        if not isinstance(about, dict) or not isinstance(parts, list):
            raise self.damaged("its header does not say what it holds")
        self.about: dict[str, Any] = about
        self._parts: dict[str, tuple[int, int, str]] = {}
        for row in parts:
            name, at, length, checksum = self._part(row)
            if name in self._parts:
                raise self.damaged(f"it has the part {name!r} twice")
            if at < 0 or length < 0 or self._start + at + length > len(self._view):
                raise self.damaged(f"part {name!r}, {length} bytes at {at}, is outside of the file's {len(self._view)}")
            self._parts[name] = (self._start + at, length, checksum)

    def _part(self, row: Any) -> tuple[str, int, int, str]:
        kinds = (str, int, int, str)
        if not isinstance(row, list) or [type(x) for x in row] != list(kinds):
            raise self.damaged(f"{str(row)[:80]} is not the name, place, length and checksum of a part")
        name, at, length, checksum = row
        return name, at, length, checksum

    def _header(self) -> dict[str, Any]:
        view = self._view
        if len(view) < _HEAD or bytes(view[: len(MAGIC)]) != MAGIC:
            raise FileError(f"{self.path!r} is not a strata bundle", code="F404", place=here())
        length = int.from_bytes(view[_HEAD - 8 : _HEAD], "little")
        if length > _MOST_HEADER or _HEAD + length > len(view):
            raise self.damaged("its header is cut off")
        data = bytes(view[_HEAD : _HEAD + length])
        if hashlib.sha256(data).digest() != bytes(view[len(MAGIC) : len(MAGIC) + 32]):
            raise self.damaged("its header does not match its checksum")
        self._start = _HEAD + length
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            raise self.damaged("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self.damaged("its header is not a JSON object")
        return header

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def size(self, name: str) -> int:
        return self._parts[name][1]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def view(self, name: str) -> memoryview:
        """One part, where it lies in the file, not checked."""
        if name not in self._parts:
            raise self.damaged(f"part {name!r} is missing")
        begin, length, _ = self._parts[name]
        return self._view[begin : begin + length]

    def read(self, name: str) -> memoryview:
        """One part, where it lies in the file."""
        data = self.view(name)
        if hashlib.sha256(data).hexdigest() != self._parts[name][2]:
            raise self.damaged(f"part {name!r} does not match its checksum")
        return data

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Check some parts, or all."""
        for name in self._parts if names is None else names:
            self.read(name)

    def damaged(self, reason: str) -> FileError:
        """The error of a file that says other things than its writer would."""
        return FileError(f"{self.path!r} is damaged: {reason}", code="F405", place=here())
