"""A content-addressed disk store: checksummed, atomic, bounded, safe for many processes, no pickle.

An entry is one file, named by its key, the SHA-256 of what it was made from:

    magic, SHA-256 of the rest, key, length of the description, description (JSON), payload

It holds its key, and the checksum covers it: under any other name, however it came there, it counts as absent. So does
an entry of an older format. A folder or a file that another user could have written is not read: entries hold machine
code, and reading one means running it.

An entry is written to a temporary file and renamed into place, so that a reader sees all of it or nothing. It is not
flushed to the disk: what a power failure leaves of it is damaged, and a damaged entry is removed and counts as absent.
A folder that cannot be written, or a full disk, turns the store off for writing with one warning; programs then compile
as if there were no cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from strata.config import logger
from strata.core import open_handle
from strata.errors import FileError

FAMILY = b"strata-entry-"  # what entries of every format begin with
MAGIC = FAMILY + b"2\n"
_SUM = len(MAGIC)
_KEY = _SUM + 32
_LENGTH = _KEY + 32
_HEAD = _LENGTH + 4
_KEY_FORM = re.compile("[0-9a-f]{64}")
_PROBE = 1 << 20  # bytes that are written to find out whether there is room
STALE_SECONDS = 3600  # temporary files older than this were left by a process that died
LOCK_SECONDS = 60  # to wait for another process that makes the same entry, before making it too
KEPT_EVENTS = 256  # of this process, to explain misses with
_TOUCH_SECONDS = 3600  # an entry's time of use is renewed at most this often

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_LOCK_FLAGS |= getattr(os, "O_NOFOLLOW", 0)
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)

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
    trouble: str = ""  # why it is not used, where that shows without reading all of it


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an entry in this process."""

    what: str  # hit, miss, damaged, misplaced, put, off
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
        self._distrust: str | None = None  # None: not looked at, or not there yet; "": nothing to say
        # bytes since the folder was last walked; processes that add little start anywhere, so that some of them walk
        self._added = random.randrange(max(limit // 16, 1))

    # reading

    def get(self, key: str) -> bytes | None:
        """The payload of an entry, or None; an entry that is damaged, or that belongs to another name, is removed."""
        path = self._path(key)
        if self.distrust:
            self._note("miss", key, "the cache is off")
            return None
        try:
            data, used = _read(path)
        except OSError as error:
            self._note("miss", key, "" if isinstance(error, FileNotFoundError) else error.strerror or str(error))
            return None
        fault = _fault(data, key)
        if fault is not None:
            what, reason = fault
            self._note(what, key, reason)
            if what != "miss":
                logger.warning("cache entry %s is %s and was removed: %s", key[:12], what, reason)
                self._remove(path)
            return None
        about, payload = _parts(data)
        if abs(time.time() - used) > _TOUCH_SECONDS:  # a clock may have been wrong
            with suppress(OSError):
                os.utime(path)
        self._note("hit", key, about=about)
        return payload

    def _note(self, what: str, key: str, reason: str = "", about: Mapping[str, Any] | None = None) -> None:
        self.events.append(Event(what, key, time.strftime("%H:%M:%S"), reason, about or {}))

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry, by its first bytes: its content is checked when it is read."""
        path = self._path(key)
        try:
            return not self.distrust and not _look(path, key).trouble
        except OSError:
            return False

    def entries(self) -> Iterator[Entry]:
        """All entries, with those that are not used and why."""
        if not self.distrust:
            for path in self._files():
                with suppress(FileNotFoundError):  # another process prunes
                    try:
                        yield _look(path, path.stem if self._is_place(path) else "")
                    except OSError as error:
                        found = path.lstat()
                        yield Entry(path.stem, found.st_size, found.st_mtime, {}, error.strerror or str(error))

    # writing

    def put(self, key: str, payload: bytes, about: Mapping[str, Any] | None = None) -> bool:
        """Add an entry; False where the folder cannot be written."""
        if not self._prepare():
            return False
        path = self._path(key)
        description = json.dumps(dict(about or {}), sort_keys=True).encode()
        rest = bytes.fromhex(key) + len(description).to_bytes(4, "little") + description + payload
        data = MAGIC + hashlib.sha256(rest).digest() + rest
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with _temporary(path.parent) as (file, temporary):
                file.write(data)
                file.close()
                _replace(temporary, path)
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
                handle = os.open(path, _LOCK_FLAGS, 0o600)
            except FileNotFoundError:  # the first lock of all
                path.parent.mkdir(mode=0o700, exist_ok=True)
                continue
            except OSError as error:
                if error.errno in _NO_FILE:  # something else is in its place
                    return None
                raise
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
                found = path.lstat()
                if path.suffix != ".bin":  # half-written, or the lock of a process that died
                    if abs(time.time() - found.st_mtime) > STALE_SECONDS:
                        self._remove(path)
                else:
                    files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        removed = 0
        for _, size, path in sorted(files):
            if total - removed <= limit:
                break
            if self._remove(path):
                removed += size
        return removed

    def verify(self) -> tuple[int, list[str]]:
        """Read every entry: the number of good ones, and the names of those that are not, which are removed.

        An entry under another name than its own is not good. Entries of other formats are left to the version of strata
        that wrote them, and are neither.
        """
        good, bad = 0, list[str]()
        if self.distrust:
            return good, bad
        for path in self._files():
            try:
                data, _ = _read(path)
                fault = _fault(data, path.stem if self._is_place(path) else "")
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (*_NO_FILE, errno.EINVAL, errno.EPERM, errno.EACCES):
                    continue  # too many open files, a disk that fails
                fault = ("damaged", "")  # a pipe, a link, a file of another user
            if fault is None:
                good += 1
            elif fault[0] != "miss":
                bad.append(path.stem)
                self._remove(path)
        return good, bad

    def trouble(self) -> str | None:
        """Why entries are not kept, or not even read; None where a megabyte could be written just now."""
        if self.distrust:
            return self.distrust
        try:
            self._make_folder()
            with _temporary(self.root) as (file, _):
                file.write(b"\xa5" * _PROBE)
                file.flush()
                os.fsync(file.fileno())  # some file systems find out late that they are full
        except OSError as error:
            return error.strerror or str(error)
        return None

    def export(self, destination: str | Path) -> int:
        """Copy all entries into another folder, from which another machine can take them; returns their number."""
        other = DiskStore(destination, self.limit)
        count = 0
        for entry in self.entries():
            payload = None if entry.trouble else self.get(entry.key)
            if payload is not None and other.put(entry.key, payload, entry.about):
                count += 1
        return count

    def _path(self, key: str) -> Path:
        if not _is_key(key):
            raise FileError(f"{key!r} is not a cache key", code="F110")
        return self.root / key[:2] / f"{key}.bin"

    def _is_place(self, path: Path) -> bool:
        """Whether a file is where an entry of its name is looked for."""
        return path.parent.name == path.stem[:2] and _is_key(path.stem)

    def _files(self, *, temporary: bool = False) -> Iterator[Path]:
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            yield from sorted(folder.glob("*.bin"))
            if temporary:
                yield from folder.glob(".new-*")
        if temporary:
            yield from (self.root / "locks").glob("*")

    def _remove(self, path: Path) -> bool:
        try:
            try:
                path.unlink()
            except IsADirectoryError:  # in an entry's place
                path.rmdir()
        except OSError:
            return False
        return True

    @property
    def distrust(self) -> str | None:
        """How somebody else could have written here; None where only this user, and the system's, can."""
        if self._distrust is None:
            reason = _stranger(self.root)
            if reason is not None:
                self._note("off", "", reason)
                logger.warning("cache %s is off: %s", self.root, reason)
            if reason is not None or self.root.exists():
                self._distrust = reason or ""
        return self._distrust or None

    def _prepare(self) -> bool:
        if self._is_writable is None:
            try:
                self._make_folder()
                if self.distrust:
                    self._is_writable = False
                    return False
                self._is_writable = os.access(self.root, os.W_OK)
                if not self._is_writable:
                    logger.warning("cache %s cannot be written: compiled code is not kept", self.root)
            except OSError as error:
                self._give_up(error)
        return bool(self._is_writable)

    def _make_folder(self) -> None:
        for folder in (self.root.parent, self.root):  # `parents` alone would leave the outer one to the umask
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

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


def _is_key(text: str) -> bool:
    return _KEY_FORM.fullmatch(text) is not None


def _stranger(root: Path) -> str | None:
    """How another user could have put something into a folder that entries are kept in; None where none could.

    The folder around it counts too, where its own could be exchanged; in a sticky one, such as that of temporary files,
    it cannot.
    """
    if not hasattr(os, "geteuid"):
        return None
    for folder in (root.parent, root):
        try:
            found = folder.stat()
        except OSError:
            continue
        reason = _hands(found)
        if reason is not None and not (folder == root.parent and _is_safe_among_others(found)):
            return f"{folder} {reason}"
    return None


def _is_safe_among_others(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_ISVTX) and found.st_uid in (0, os.geteuid())


def _hands(found: os.stat_result) -> str | None:
    """Who else can write a file or folder."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if found.st_mode & 0o002 or (found.st_mode & 0o020 and not _is_own_group(found.st_gid)):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o}, not {found.st_mode & 0o755:o})"
    return None


def _is_own_group(group: int) -> bool:
    """Whether this user alone is in a group: many systems make one for each user, who then shares all files with it."""
    import grp
    import pwd

    try:
        me, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_personal = me.pw_uid != 0 and me.pw_gid == group and found.gr_name == me.pw_name
    return is_personal and set(found.gr_mem) <= {me.pw_name}


def _open(path: Path) -> tuple[int, os.stat_result]:
    """An entry's file; OSError where it is not a plain file that this user alone can write, in such a folder."""
    handle = open_handle(path, follow=False)
    found = os.fstat(handle)
    if hasattr(os, "geteuid"):
        reason = _hands(found) or _hands(path.parent.stat())
        if reason is not None:
            os.close(handle)
            raise PermissionError(errno.EPERM, reason, str(path))
    return handle, found


def _read(path: Path) -> tuple[bytes, float]:
    """An entry's file and when it was used last."""
    handle, found = _open(path)
    with os.fdopen(handle, "rb", buffering=0) as file:
        return file.readall(), found.st_mtime


def _look(path: Path, name: str) -> Entry:
    """An entry by its first bytes."""
    handle, found = _open(path)
    with os.fdopen(handle, "rb") as file:
        data = file.read(_HEAD)
        data += file.read(min(int.from_bytes(data[_LENGTH:_HEAD], "little"), found.st_size))
    fault = _fault_of_head(data, name)
    about = _about(data) if fault is None or fault[0] == "misplaced" else None
    if fault is None and about is None:
        fault = ("damaged", "its description cannot be read")
    return Entry(path.stem, found.st_size, found.st_mtime, about or {}, fault[1] if fault else "")


def _fault_of_head(data: bytes, name: str) -> tuple[str, str] | None:
    """What is wrong with the first bytes of an entry that was found under a name."""
    if data.startswith(FAMILY) and not data.startswith(MAGIC) and b"\n" in data[: len(FAMILY) + 8]:
        return "miss", "it has another format"
    if len(data) < _HEAD or not data.startswith(MAGIC):
        return "damaged", "it does not begin as an entry does"
    key = data[_KEY:_LENGTH].hex()
    return ("misplaced", f"it is the entry of {key[:12]}") if key != name else None


def _fault(data: bytes, name: str) -> tuple[str, str] | None:
    """What is wrong with an entry that was found under a name; None where it can be used."""
    fault = _fault_of_head(data, name)
    if fault is not None and fault[0] != "misplaced":
        return fault
    if hashlib.sha256(memoryview(data)[_KEY:]).digest() != data[_SUM:_KEY]:
        return "damaged", "its checksum is wrong"
    return fault if fault is not None or _about(data) is not None else ("damaged", "its description cannot be read")


def _about(data: bytes) -> dict[str, Any] | None:
    length = int.from_bytes(data[_LENGTH:_HEAD], "little")
    try:
        about = json.loads(data[_HEAD : _HEAD + length])
    except ValueError:
        return None
    return about if isinstance(about, dict) else None


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Description and payload of an entry without faults."""
    return _about(data) or {}, data[_HEAD + int.from_bytes(data[_LENGTH:_HEAD], "little") :]


@contextmanager
def _temporary(folder: Path) -> Iterator[tuple[BinaryIO, str]]:
    """A new file that is gone at the end, unless it was renamed."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, name
    finally:
        with suppress(OSError):
            os.unlink(name)


def _replace(temporary: str, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except IsADirectoryError:  # somebody made a folder there
        os.rmdir(path)
        os.replace(temporary, path)
