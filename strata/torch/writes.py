"""Whether memory was written since: asked of the system, which knows of every write, whoever made it and however.

Linux (6.7 and later) protects pages and, at the first write to one, takes the protection away and notes it
(`userfaultfd` with write protection, asynchronous). Nothing is called, no thread waits, and a write costs a page fault
once. Where the system has no such thing, or does not allow it, `available` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import struct
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from strata.core import call_in_children, new_lock

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
_MOST_MAPPINGS = 32_000  # half of what Linux lets a process have: a watch may split one in three
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)
_lock = new_lock()
_Spans = list[tuple[int, int]]  # of memory: in order and apart


@dataclass(slots=True, eq=False, weakref_slot=True)
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
        if not sys.platform.startswith("linux") or number is None or _is_filtered():
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
                call_in_children(made._close)
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
            middle, end = at + _PAGE, at + 2 * _PAGE
            own[0] = 1
            self.register(at, end)
            self.protect(at, end)
            before = self.is_written(at, end)
            own[_PAGE] = 1
            return not before and self.is_written(middle, end) and not self.is_written(at, middle)

    def _close(self) -> None:
        """In a forked child, which opens its own: once, since its numbers may belong to other files later."""
        for file in (self.protector, self.pages):
            with contextlib.suppress(OSError):  # the program closed all that it had, or it was closed here
                os.close(file)
        self.protector = self.pages = -1

    def register(self, start: int, end: int) -> None:
        """Have the system watch some pages; OSError where their memory is of another kind."""
        fcntl.ioctl(self.protector, _REGISTER, bytearray(struct.pack("=4Q", start, end - start, _OF_WRITES, 0)))

    def protect(self, start: int, end: int) -> bool:
        """Forget all writes to some pages; whether there were any. OSError where one is not watched."""
        at, was_written = start, False
        while at < end:
            found, at = self._scan(at, end, _MUST_BE_PROTECTED | _PROTECT)
            was_written = was_written or found
        return was_written

    def is_written(self, start: int, end: int) -> bool:
        """Whether one of these pages was written since; OSError where one is no longer watched."""
        return self._scan(start, end, _MUST_BE_PROTECTED, most=1)[0]

    def _scan(self, start: int, end: int, flags: int, most: int = 0) -> tuple[bool, int]:
        """Whether there are written pages, and where the search ended: behind the first of them that are neighbours."""
        room = ctypes.addressof(self.place)
        asked = bytearray(struct.pack("=12Q", 96, flags, start, end, 0, room, 1, most, 0, _WRITTEN, 0, _WRITTEN))
        found = fcntl.ioctl(self.pages, _SCAN, asked)
        return found > 0, struct.unpack_from("=Q", asked, 32)[0]


def _is_filtered() -> bool:
    """Whether calls of this process go through a filter (seccomp): some end a process for a call that they refuse."""
    try:
        told = re.search(rb"^Seccomp:\s*(\d+)", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    except OSError:
        return True
    return told is not None and told[1] != b"0"


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

    def is_written(self) -> bool:
        """Whether it was, or may have been."""
        system = _opened()
        if system is None or system.process != self.process:
            return True
        if any(now != then for now, then in self.beside):
            return True
        with _lock:  # no other watch begins
            try:
                return self.was_written or system.is_written(self.start, self.end)
            except OSError:
                return True


_watches: WeakSet[Watch] = WeakSet()


def watch(memories: Sequence[tuple[memoryview, int]]) -> list[Watch | None]:
    """Watches of bytes, each given with where they lie; None for those to which writes may go unseen.

    Those are: memory that another process may map too, less than a page, and what the system refuses to watch.
    """
    system = _opened()
    if system is None:
        return [None] * len(memories)
    spans = [(-(-at // _PAGE) * _PAGE, (at + len(memory)) // _PAGE * _PAGE) for memory, at in memories]
    around = [(at // _PAGE * _PAGE, -(-(at + len(memory)) // _PAGE) * _PAGE) for memory, at in memories]
    with _lock:
        known = _registered(system, _merged(around))
        watched, forgotten = _protected(system, [s for s in _merged(spans) if _meets(known, *s)])
        for other in _watches if forgotten else ():
            other.was_written = other.was_written or _meets(forgotten, other.start, other.end)
        made = [Watch(system.process, start, end, ()) if _meets(watched, start, end) else None for start, end in spans]
        _watches.update(w for w in made if w is not None)
    for (memory, at), new in zip(memories, made, strict=True):
        if new is not None:
            new.beside = tuple((part, bytes(part)) for part in (memory[: new.start - at], memory[new.end - at :]))
    return made


def _registered(system: _System, spans: _Spans) -> _Spans:
    """Those of some spans of pages that the system watches.

    They contain pages that other data shares: mappings that are watched and touch are one, and a process may have only
    so many.
    """
    try:
        mappings = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    shared = [(int(start, 16), int(end, 16)) for start, end in _SHARED.findall(mappings)]
    room = (_MOST_MAPPINGS - mappings.count(b"\n")) // 2
    known: _Spans = []
    for span in spans:
        if len(known) < room and not _meets(shared, *span):
            with contextlib.suppress(OSError):
                system.register(*span)
                known.append(span)
    return known


def _protected(system: _System, spans: _Spans) -> tuple[_Spans, _Spans]:
    """Of spans of pages, those that are watched from now on, and those of which writes were forgotten."""
    watched: _Spans = []
    forgotten: _Spans = []
    for span in spans:
        was_written = True
        with contextlib.suppress(OSError):
            was_written = system.protect(*span)
            watched.append(span)
        if was_written:
            forgotten.append(span)
    return watched, forgotten


def _merged(spans: _Spans) -> _Spans:
    """Spans in order; those that overlap as one, without those of no page."""
    made: _Spans = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if made and start < made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((start, end))
    return made


def _meets(spans: _Spans, start: int, end: int) -> bool:
    """Whether a span overlaps one of some that are in order and apart."""
    at = bisect_left(spans, (end,))
    return start < end and at > 0 and spans[at - 1][1] > start
