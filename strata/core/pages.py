"""Page-aligned memory: huge pages where the system has them, not shared with forked children."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np

from strata.errors import OutOfMemoryError

HUGE_PAGE = 2 << 20


def new_pages(size: int) -> np.ndarray:
    """So many bytes, all 0, given back with the last array over them.

    What is as long as a huge page starts where one can. The end that does not fill one stays in small pages: a huge
    page would take all of its memory. OutOfMemoryError where the system has none.
    """
    spare = HUGE_PAGE if size >= HUGE_PAGE else 0
    try:
        memory = _private(size + spare)
    except (OSError, OverflowError, ValueError) as error:
        raise no_memory(size, error) from None
    raw = np.frombuffer(memory, np.uint8)
    if not spare:
        return raw[:size]
    start = -int(raw.__array_interface__["data"][0]) % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    return raw[start : start + size]


def no_memory(size: int, error: Exception) -> OutOfMemoryError:
    return OutOfMemoryError(f"the system has no {size:,} bytes: {error}", code="X121")


def give_back() -> None:
    """Give memory that was freed back to the system, where the C library would keep it for later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_pages(array: np.ndarray) -> bool:
    """Let go of the memory behind part of a file that is mapped for reading; it is read again if it is touched.

    True if the array is part of such a file.
    """
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    whole = np.frombuffer(mapping, np.uint8)  # an array over it may begin later
    if whole.flags.writeable:  # what was written is nowhere else
        return False
    first = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (first + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        mapping.madvise(mmap.MADV_DONTNEED, start, length)
    return True


def _private(size: int) -> mmap.mmap:
    """Python maps memory as shared unless told otherwise: a child could write into it, and it has no huge pages."""
    if hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)
