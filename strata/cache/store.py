"""A content-addressed store on disk that cannot hurt: checksummed, atomic, bounded, safe for many processes, no pickle.

An entry is one file, named by the SHA-256 of what it was made from:

    magic, SHA-256 of the rest, length of the description, description (JSON), payload

It is written to a temporary file and renamed into place, so that a reader sees all of it or nothing. It is not flushed
to the disk: what a power failure leaves of it is damaged, and a damaged entry is removed and counts as absent. A folder
that cannot be written, or a full disk, turns the store off for writing with one warning; programs then compile as if
there were no cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.config import logger
from strata.errors import FileError

MAGIC = b"strata-entry-1\n"
_HEAD = len(MAGIC) + 32 + 4
STALE_SECONDS = 3600  # temporary files older than this were left by a process that died
LOCK_SECONDS = 60  # to wait for another process that makes the same entry, before making it too
KEPT_EVENTS = 256  # of this process, to explain misses with
_TOUCH_SECONDS = 3600  # an entry's time of use is renewed at most this often

try:
    import fcntl
except ImportError:  # no file locks on this platform: an entry may be made twice, never wrongly
    fcntl = None  # type: ignore[assignment]


def digest(*parts: str | bytes) -> str:
    """A key from the parts that decide an entry; lengths are part of it, so that parts cannot run into each other."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store knows of one entry without reading its payload."""

    key: str
    size: int
    used: float
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an entry in this process."""

    what: str  # hit, miss, damaged, put, off
    key: str
    when: str
    reason: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


class DiskStore:
    """Entries under one folder of the user's cache directory."""

    def __init__(self, root: str | Path, limit: int = 4 << 30) -> None:
        self.root = Path(root)
        self.limit = limit
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._is_writable: bool | None = None
        # bytes since the folder was last walked; processes that add little start anywhere, so that some of them walk
        self._added = random.randrange(max(limit // 16, 1))

    # reading

    def get(self, key: str) -> bytes | None:
        """The payload of an entry, or None; a damaged entry is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            used = path.stat().st_mtime
        except OSError as error:
            self._note("miss", key, "" if isinstance(error, FileNotFoundError) else str(error))
            return None
        parsed = _parse(data)
        if parsed is None:
            self._note("damaged", key)
            logger.warning("cache entry %s is damaged and was removed", key[:12])
            self._remove(path)
            return None
        if abs(time.time() - used) > _TOUCH_SECONDS:  # a clock may have been wrong
            with suppress(OSError):
                os.utime(path)
        self._note("hit", key, about=parsed[0])
        return parsed[1]

    def _note(self, what: str, key: str, reason: str = "", about: Mapping[str, Any] | None = None) -> None:
        self.events.append(Event(what, key, time.strftime("%H:%M:%S"), reason, about or {}))

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def entries(self) -> Iterator[Entry]:
        """All readable entries."""
        for path in self._files():
            with suppress(OSError):
                with path.open("rb") as file:
                    about = _read_about(file.read(_HEAD + (64 << 10)))
                stat = path.stat()
                if about is not None:
                    yield Entry(path.stem, stat.st_size, stat.st_mtime, about)

    # writing

    def put(self, key: str, payload: bytes, about: Mapping[str, Any] | None = None) -> bool:
        """Add an entry; False where the folder cannot be written."""
        if not self._prepare():
            return False
        path = self._path(key)
        description = json.dumps(dict(about or {}), sort_keys=True).encode()
        rest = len(description).to_bytes(4, "little") + description + payload
        data = MAGIC + hashlib.sha256(rest).digest() + rest
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._give_up(error)
            return False
        self._note("put", key, about=about)
        self._added += len(data)
        if self._added > self.limit // 16:  # walking the folder now and then is enough to stay near the limit
            self._added = 0
            self.prune()
        return True

    @contextmanager
    def making(self, key: str) -> Iterator[None]:
        """Held while an entry is made, so that other processes wait for it instead of making it too.

        Each key has its own lock: making one entry may need others, and locks that unrelated entries shared would let
        two processes wait for each other.
        """
        if fcntl is None or not self._prepare():
            yield
            return
        path = self.root / "locks" / key
        try:
            handle = self._acquire(path)
        except OSError as error:
            self._give_up(error)
            yield
            return
        try:
            yield
        finally:
            if handle is not None:
                self._remove(path)
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough when a forked child has the file open too
                os.close(handle)

    def _acquire(self, path: Path) -> int | None:
        """An open, locked file; None after a long wait: better to compile twice than to wait for a stopped process.

        None at once on file systems without locks, such as some that are mounted over a network.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        pause = 0.001
        while time.monotonic() < deadline:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the first lock of all
                path.parent.mkdir(mode=0o700, exist_ok=True)
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
            except OSError:
                os.close(handle)
                return None
            else:
                if _is_same_file(handle, path):
                    return handle
                os.close(handle)  # its last holder removed it meanwhile
        return None

    # keeping order

    def prune(self, limit: int | None = None) -> int:
        """Remove entries, least recently used first, until the rest fits the limit; returns the bytes removed."""
        limit = self.limit if limit is None else limit
        files: list[tuple[float, int, Path]] = []
        for path in self._files(temporary=True):
            with suppress(OSError):
                stat = path.stat()
                if path.suffix != ".bin":  # half-written, or the lock of a process that died
                    if abs(time.time() - stat.st_mtime) > STALE_SECONDS:
                        self._remove(path)
                else:
                    files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        removed = 0
        for _, size, path in sorted(files):
            if total - removed <= limit:
                break
            if self._remove(path):
                removed += size
        return removed

    def verify(self) -> tuple[int, list[str]]:
        """Read every entry: the number of good ones, and the keys of damaged ones, which are removed."""
        good, bad = 0, []
        for path in self._files():
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if _parse(data) is None:
                bad.append(path.stem)
                self._remove(path)
            else:
                good += 1
        return good, bad

    def export(self, destination: str | Path) -> int:
        """Copy all entries into another folder, from which another machine can take them; returns their number."""
        other = DiskStore(destination, self.limit)
        count = 0
        for entry in self.entries():
            payload = self.get(entry.key)
            if payload is not None and other.put(entry.key, payload, entry.about):
                count += 1
        return count

    def _path(self, key: str) -> Path:
        if len(key) != 64 or not all(c in "0123456789abcdef" for c in key):
            raise FileError(f"{key!r} is not a cache key", code="F110")
        return self.root / key[:2] / f"{key}.bin"

    def _files(self, *, temporary: bool = False) -> Iterator[Path]:
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            yield from sorted(folder.glob("*.bin"))
            if temporary:
                yield from folder.glob(".new-*")
        if temporary:
            yield from (self.root / "locks").glob("*")

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError:
            return False
        return True

    def _prepare(self) -> bool:
        if self._is_writable is None:
            try:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._is_writable = os.access(self.root, os.W_OK)
                if not self._is_writable:
                    logger.warning("cache %s cannot be written: compiled code is not kept", self.root)
            except OSError as error:
                self._give_up(error)
        return bool(self._is_writable)

    def _give_up(self, error: OSError) -> None:
        if self._is_writable is not False:
            self._note("off", "", str(error))
            logger.warning("cache %s is off: %s", self.root, error)
        self._is_writable = False


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _parse(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Description and payload of an intact entry."""
    about = _read_about(data)
    if about is None or hashlib.sha256(data[len(MAGIC) + 32 :]).digest() != data[len(MAGIC) : len(MAGIC) + 32]:
        return None
    length = int.from_bytes(data[_HEAD - 4 : _HEAD], "little")
    return about, data[_HEAD + length :]


def _read_about(data: bytes) -> dict[str, Any] | None:
    if len(data) < _HEAD or not data.startswith(MAGIC):
        return None
    length = int.from_bytes(data[_HEAD - 4 : _HEAD], "little")
    try:
        about = json.loads(data[_HEAD : _HEAD + length])
    except ValueError:
        return None
    return about if isinstance(about, dict) else None
