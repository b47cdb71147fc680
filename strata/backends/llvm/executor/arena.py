"""Arenas: the memory that programs run in, and the addresses of arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from strata.core import HUGE_PAGE, Dim, new_pages
from strata.lir import LirBuffer

LINE = 64  # bytes of a cache line


class Arena:
    """Page-aligned memory, in huge pages where the system has them."""

    def __init__(self, size: int, alignment: int = LINE) -> None:
        self.size = max(size, 64)
        if self.size >= HUGE_PAGE:
            self.bytes = new_pages(self.size)
        else:
            raw = np.empty(self.size + alignment, np.uint8)
            start = -_slow_address(raw) % alignment
            self.bytes = raw[start : start + self.size]
        self.address = _slow_address(self.bytes)

    def part(self, offset: int, size: int) -> Arena:
        """Some bytes of it, from a multiple of a cache line on."""
        made = Arena.__new__(Arena)
        made.size, made.bytes = size, self.bytes[offset : offset + size]
        made.address = self.address + offset
        return made

    def view(self, offset: int, buffer: LirBuffer, binding: Mapping[str, Dim]) -> np.ndarray:
        kind = buffer.type.bind(binding)
        count = int(np.prod(kind.static_shape, dtype=np.int64)) * kind.dtype.itemsize
        return self.bytes[offset : offset + count].view(kind.dtype.np).reshape(kind.static_shape)


def _slow_address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _fast_address(array: np.ndarray) -> int:
    return ctypes.c_ssize_t.from_address(id(array) + _DATA_OFFSET).value


_DATA_OFFSET = object.__basicsize__  # NumPy's array object has its data pointer right after the object header
_PROBES: list[np.ndarray] = [np.empty(3), np.arange(7)[2:], np.zeros((2, 2), np.int8)]
# reading the field is five times as fast as asking for it; where the layout differs, ask
HAS_DATA_FIELD = all(_fast_address(p) == _slow_address(p) for p in _PROBES)
address_of = _fast_address if HAS_DATA_FIELD else _slow_address
DATA_FIELD = _DATA_OFFSET  # from `id(array)` to the field, where HAS_DATA_FIELD


class ArenaPool:
    """Arenas for callers at the same time, shared by all sizes that a program runs at: the largest serve them all."""

    def __init__(self, keep: int = 4, alignment: int = LINE) -> None:
        self._alignment = alignment
        self._free: list[Arena] = []  # appending and popping are atomic
        self._keep = keep
        self._largest = 0

    def take(self, size: int) -> Arena:
        try:
            arena = self._free.pop()
        except IndexError:
            arena = None
        if arena is None or arena.size < size:
            self._largest = max(self._largest, size)
            return Arena(self._largest, self._alignment)
        return arena

    def give(self, arena: Arena) -> None:
        if len(self._free) < self._keep:
            self._free.append(arena)
