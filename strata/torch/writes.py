"""Whether memory was written since: asked of the system, which knows of every write, whoever made it and however.

Linux (6.7 and later) protects pages and, at the first write to one, takes the protection away and notes it
(`userfaultfd` with write protection, asynchronous). Nothing is called, no thread waits, and a write costs a page fault
once. Where the system has no such thing, or does not allow it, `available` says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
from dataclasses import dataclass, field
from weakref import WeakSet

from strata.core import new_lock

if sys.platform != "win32":
    import fcntl

_CALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd
_USER_MODE_ONLY = 1
_API, _REGISTER, _SCAN = 0xC018AA3F, 0xC020AA00, 0xC0606610
_VERSION = 0xAA
_FEATURES = 1 << 0 | 1 << 12 | 1 << 13 | 1 << 15  # protection; of shared memory, of absent pages; asynchronous
_OF_WRITES = 2  # mode of a registration
_PROTECT, _MUST_BE_PROTECTED = 1, 2  # flags of a scan
_WRITTEN = 2  # a kind of page
_PAGE = mmap.PAGESIZE
_lock = new_lock()


@dataclass(slots=True)
class _System:
    """Two files: what protects pages of this process, and what tells of them."""

    process: int
    protector: int
    pages: int
    place: ctypes.Array[ctypes.c_char]  # of the first page found

    @classmethod
    def opened(cls) -> _System | None:
        """None where the system cannot do it, or does not let us."""
        number = _CALL.get(platform.machine())
        if not sys.platform.startswith("linux") or number is None:
            return None
        protector = ctypes.CDLL(None).syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if protector < 0:
            return None
        pages = -1
        try:
            fcntl.ioctl(protector, _API, bytearray(struct.pack("=3Q", _VERSION, _FEATURES, 0)))
            pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            made = cls(os.getpid(), protector, pages, ctypes.create_string_buffer(24))
            if made._works():
                return made
        except OSError:
            pass
        os.close(protector)
        if pages >= 0:
            os.close(pages)
        return None

    def _works(self) -> bool:
        """Whether it tells what happens to two pages of our own."""
        with mmap.mmap(-1, 2 * _PAGE) as own:
            at = ctypes.addressof(ctypes.c_char.from_buffer(own))
            own[0] = 1
            self.protect(at, 2 * _PAGE)
            before = self.is_written(at, 2 * _PAGE)
            own[_PAGE] = 1
            return not before and self.is_written(at, 2 * _PAGE) and not self.is_written(at, _PAGE)

    def protect(self, start: int, size: int) -> bool:
        """Forget all writes to some pages; whether there were any. OSError where their memory is of another kind."""
        fcntl.ioctl(self.protector, _REGISTER, bytearray(struct.pack("=4Q", start, size, _OF_WRITES, 0)))
        at, was_written = start, False
        while at < start + size:
            found, at = self._scan(at, start + size, _MUST_BE_PROTECTED | _PROTECT)
            was_written = was_written or found
        return was_written

    def is_written(self, start: int, size: int) -> bool:
        """Whether one of these pages was written since; OSError where one is no longer watched."""
        return self._scan(start, start + size, _MUST_BE_PROTECTED, most=1)[0]

    def _scan(self, start: int, end: int, flags: int, most: int = 0) -> tuple[bool, int]:
        """Whether there are written pages, and where the search ended: behind the first of them that are neighbours."""
        room = ctypes.addressof(self.place)
        asked = bytearray(struct.pack("=12Q", 96, flags, start, end, 0, room, 1, most, 0, _WRITTEN, 0, _WRITTEN))
        found = fcntl.ioctl(self.pages, _SCAN, asked)
        return found > 0, struct.unpack_from("=Q", asked, 32)[0]


_system: _System | None = None
_is_open = False


def _opened() -> _System | None:
    """The system's files; a forked process, whose memory is another one, opens its own."""
    global _system, _is_open
    if not _is_open or (_system is not None and _system.process != os.getpid()):
        with _lock:
            if not _is_open or (_system is not None and _system.process != os.getpid()):
                _system, _is_open = _System.opened(), True
    return _system


def available() -> bool:
    """Whether the system tells of writes."""
    return _opened() is not None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Watch:
    """Memory whose writes are noted from now on, page by page; the bytes beside its whole pages are compared."""

    process: int
    start: int
    end: int
    beside: tuple[tuple[memoryview, bytes], ...]
    was_written: bool = field(default=False, init=False)  # what the system forgot as another watch began

    @classmethod
    def of(cls, memory: memoryview, address: int) -> Watch | None:
        """Bytes and where they lie; None where nothing tells of writes to them."""
        system = _opened()
        first, last = -address % _PAGE, (address + len(memory)) // _PAGE * _PAGE - address
        if system is None or first >= last:
            return None
        made = cls(system.process, address + first, address + last, ())
        with _lock:
            try:
                is_known = system.protect(made.start, last - first)
            except OSError:
                return None
            for other in _watches if is_known else ():
                if other.start < made.end and made.start < other.end:
                    other.was_written = True
            _watches.add(made)
        made.beside = tuple((part, bytes(part)) for part in (memory[:first], memory[last:]))
        return made

    def is_written(self) -> bool:
        """Whether it was, or may have been."""
        system = _opened()
        if self.was_written or system is None or system.process != self.process:
            return True
        if any(now != then for now, then in self.beside):
            return True
        try:
            return system.is_written(self.start, self.end - self.start) or self.was_written
        except OSError:
            return True


_watches: WeakSet[Watch] = WeakSet()
