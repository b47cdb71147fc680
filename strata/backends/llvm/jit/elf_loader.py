"""An ELF loader: object files into memory without LLVM, so that a warm start is small and fast.

Objects of x86-64 Linux that hold what our own modules hold: code, constants, calls between them, and calls of functions
of the process. Anything else is left to the code generator's linker, which knows everything and is a large library.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELOCATION: Final = struct.Struct("<QQq")
_PROGBITS, _SYMBOLS, _RELA = 1, 2, 4  # kinds of sections
_ALLOC, _WRITE, _THREAD_LOCAL = 2, 1, 1024  # flags of sections
_X86_64 = 62
_PC32, _PLT32 = 2, 4  # kinds of relocations: 32 bits relative to the place
_THROUGH_SLOT = (9, 41, 42)  # the same, of a word that holds the address
_JUMP: Final = b"\xff\x25\x02\x00\x00\x00\xcc\xcc"  # jmp [rip + 2]; the address follows
_STUB_BYTES = 16


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Linked:
    """Code in memory; it stays there as long as this object lives."""

    addresses: dict[str, int]

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


class _Foreign(Exception):  # noqa: N818 - not an error: another linker takes the object
    """The object holds something that our modules do not."""


def is_able() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64" and _library() is not None


def link(data: bytes, names: Sequence[str], known: Mapping[str, int] | None = None) -> Linked | None:
    """The object in memory, with the addresses of the named functions; None where another linker must do it.

    `known` are addresses of functions that it calls; others are looked for in the process.
    """
    if not is_able():
        return None
    try:
        return _Object(data).placed(names, known or {})
    except (_Foreign, struct.error, IndexError, ValueError):
        return None


@cache
def _library() -> Any:
    """The process' own functions, among them those that map memory."""
    try:
        found = ctypes.CDLL(None)
        found.mmap.restype = ctypes.c_void_p
        found.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t,
        )  # fmt: skip
        found.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        found.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    except (OSError, AttributeError):
        return None
    return found


def _address_in_process(name: str) -> int:
    try:
        function = getattr(_library(), name)
    except AttributeError:
        raise _Foreign(name) from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Object:
    """A relocatable ELF file, parsed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        ident, _, machine, *rest = _HEADER.unpack_from(data)
        if ident[:6] != b"\x7fELF\x02\x01" or machine != _X86_64:
            raise _Foreign("another kind of object")
        start, count = rest[3], rest[9]
        self.sections = [_SECTION.unpack_from(data, start + _SECTION.size * i) for i in range(count)]
        tables = [s for s in self.sections if s[1] == _SYMBOLS]
        if len(tables) != 1:
            raise _Foreign("no single table of symbols")
        table, names = tables[0], self.sections[tables[0][6]]
        self.symbols = [self._symbol(table[4] + at, names[4]) for at in range(0, table[5], _SYMBOL.size)]
        self.offsets = self._layout()

    def _symbol(self, at: int, names: int) -> tuple[str, int, int]:
        """Name, section and value."""
        name, _, _, section, value, _ = _SYMBOL.unpack_from(self.data, at)
        end = self.data.index(b"\0", names + name)
        return self.data[names + name : end].decode("ascii"), section, value

    def _layout(self) -> dict[int, int]:
        """Where each section that is kept in memory goes: one after the other."""
        offsets, at = {}, 0
        for i, (_, kind, flags, _, _, size, _, _, align, _) in enumerate(self.sections):
            if not flags & _ALLOC or not size:
                continue
            if kind != _PROGBITS or flags & (_WRITE | _THREAD_LOCAL):
                raise _Foreign("memory that is written")
            at = -(-at // max(align, 1)) * max(align, 1)
            offsets[i] = at
            at += size
        self.end = -(-at // _STUB_BYTES) * _STUB_BYTES
        return offsets

    def _relocations(self) -> Iterator[tuple[int, int, int, int]]:
        """Place in memory, kind, symbol, addend."""
        for _, kind, _, _, start, size, _, target, _, _ in self.sections:
            if kind != _RELA or target not in self.offsets:
                continue
            for at in range(start, start + size, _RELOCATION.size):
                offset, info, addend = _RELOCATION.unpack_from(self.data, at)
                yield self.offsets[target] + offset, info & 0xFFFFFFFF, info >> 32, addend

    def placed(self, names: Sequence[str], known: Mapping[str, int]) -> Linked:
        relocations = list(self._relocations())
        if any(kind not in (_PC32, _PLT32, *_THROUGH_SLOT) for _, kind, _, _ in relocations):
            raise _Foreign("a relocation that our modules do not have")
        through = {symbol for _, kind, symbol, _ in relocations if kind in _THROUGH_SLOT or not self.symbols[symbol][1]}
        stubs = {symbol: self.end + _STUB_BYTES * i for i, symbol in enumerate(sorted(through))}
        image = bytearray(self.end + _STUB_BYTES * len(stubs))
        for i, offset in self.offsets.items():
            start, size = self.sections[i][4], self.sections[i][5]
            image[offset : offset + size] = self.data[start : start + size]
        for place, kind, symbol, addend in relocations:
            _, section, value = self.symbols[symbol]
            to = stubs[symbol] + 8 * (kind in _THROUGH_SLOT) if symbol in stubs else self._at(section, value)
            struct.pack_into("<i", image, place, to + addend - place)
        exported = {n: self._at(section, value) for n, section, value in self.symbols if n in names and section}
        if len(exported) != len(set(names)):
            raise _Foreign("a name that is not there")
        outside = {s: known.get(n) or _address_in_process(n) for s, (n, i, _) in enumerate(self.symbols)
                   if s in stubs and i == 0}  # fmt: skip
        base = _reserved(len(image))
        for symbol, offset in stubs.items():
            _, section, value = self.symbols[symbol]
            address = outside[symbol] if symbol in outside else base + self._at(section, value)
            image[offset : offset + _STUB_BYTES] = _JUMP + struct.pack("<Q", address)
        _make_executable(base, bytes(image))
        made = Linked({name: base + offset for name, offset in exported.items()})
        weakref.finalize(made, _library().munmap, base, _pages(len(image))).atexit = False
        return made

    def _at(self, section: int, value: int) -> int:
        if section not in self.offsets:
            raise _Foreign(f"section {section}")
        return self.offsets[section] + value


def _pages(size: int) -> int:
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserved(size: int) -> int:
    """The address of fresh memory."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _library().mmap(None, _pages(size), mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if base is None or base == ctypes.c_void_p(-1).value:
        raise _Foreign("no memory")
    return int(base)


def _make_executable(base: int, image: bytes) -> None:
    """Fills memory, which can then be run, but no longer written."""
    ctypes.memmove(base, image, len(image))
    if _library().mprotect(base, _pages(len(image)), mmap.PROT_READ | mmap.PROT_EXEC):
        _library().munmap(base, _pages(len(image)))
        raise _Foreign("memory that may not be run")
