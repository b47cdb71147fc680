"""Fields of GGUF blocks: where the bits of whole numbers lie, and what they stand for.

A number is its bits, or a value that they name: of a short list, of a row of a codebook, or a digit in base three.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import ml_dtypes
import numpy as np

from strata.ops.quant.gguf_codebooks import BOOKS, codebook

Array = np.ndarray
Digit = tuple[int, int, int]
FLOAT8_UNIT = 2.0**-9  # the smallest step of an 8-bit float with three bits after the point
THREES = (1, 3, 9, 27, 81)


@dataclass(frozen=True)
class Bits:
    """Some bits of every number of a field.

    Those of number 0 begin at a bit of a byte. The index of a number is unpacked into digits, the first of which
    counts most: each is its size, and by how many bytes and bits the place moves where it is one more.
    """

    width: int
    byte: int
    digits: tuple[Digit, ...]
    bit: int = 0

    @cached_property
    def is_wide(self) -> bool:
        """Whether bits of a number lie after the byte that it begins in."""
        return self.bit + sum((size - 1) * bits for size, _, bits in self.digits) + self.width > 8

    def place(self, number: int) -> tuple[int, int]:
        """The byte of a number, and the bit in it at which its bits begin."""
        byte, bit = self.byte, self.bit
        for size, bytes_, bits in reversed(self.digits):
            number, digit = divmod(number, size)
            byte, bit = byte + digit * bytes_, bit + digit * bits
        return byte + bit // 8, bit % 8

    def places(self, numbers: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bytes of some numbers, and their bits."""
        return _places(self, numbers)

    def read(self, blocks: Array) -> Array:
        """The bits of every number, u8[blocks, count]."""
        sizes, bytes_, bits = zip(*self.digits, strict=True)
        mask = (1 << self.width) - 1
        if self.is_wide:
            byte, bit = map(np.array, self.places(range(prod(sizes))))
            after = np.minimum(byte + 1, blocks.shape[1] - 1)
            both = blocks[:, byte].astype(np.uint16) | blocks[:, after].astype(np.uint16) << 8
            return (both >> bit.astype(np.uint16) & mask).astype(np.uint8)
        view = np.lib.stride_tricks.as_strided(
            blocks[:, self.byte :], (len(blocks), *sizes), (blocks.strides[0], *bytes_), writeable=False
        )
        moves = sum(step * place for step, place in zip(bits, np.ogrid[*map(slice, sizes)], strict=True))
        if any(bits) or self.bit:
            view = view >> (moves + self.bit).astype(np.uint8)
        return (view & mask if self.width < 8 else view).reshape(len(blocks), -1)


@cache
def _places(bits: Bits, numbers: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
    byte, bit = zip(*map(bits.place, numbers), strict=True)
    return byte, bit


@dataclass(frozen=True)
class BitField:
    """Whole numbers: their bits, the lowest first.

    They have a sign; or each is taken `times` a number, and a constant is added; or each names one of `values`, which
    may be no whole numbers; or each is an 8-bit float, where it has no sign counted in its smallest steps.
    """

    bits: tuple[Bits, ...]
    add: int = 0
    is_signed: bool = False
    times: int = 1
    values: tuple[float, ...] = ()
    float8: str = ""  # ue4m3, e4m3, e5m2

    @cached_property
    def count(self) -> int:
        return prod(size for size, *_ in self.bits[0].digits)

    @cached_property
    def levels(self) -> int:
        """How many different numbers it can hold."""
        return 1 << sum(part.width for part in self.bits)

    @cached_property
    def is_whole(self) -> bool:
        """Whether its numbers are whole and small."""
        return not self.float8 and all(float(value).is_integer() for value in self.values)

    def codes(self, blocks: Array) -> Array:
        """The bits of numbers, [blocks, count]."""
        found, to = self.bits[0].read(blocks), self.bits[0].width
        for part in self.bits[1:]:
            codes = part.read(blocks)
            if to + part.width > 8:
                found, codes = found.astype(np.uint16), codes.astype(np.uint16)
            found, to = found | codes << to, to + part.width
        return found

    def read(self, blocks: Array) -> Array:
        """Numbers [blocks, count] in f32."""
        found = self.codes(blocks)
        if self.values:
            return np.array(self.values, np.float32)[found]
        if self.float8:
            return _FLOAT8[self.float8][found]
        numbers = (found.view(np.int8) if self.is_signed else found).astype(np.float32)
        if self.times != 1:
            numbers *= np.float32(self.times)
        return numbers + np.float32(self.add) if self.add else numbers

    def write(self, blocks: Array, codes: Array) -> None:
        """Puts codes, which are numbers less what is added to them, into blocks of zeros."""
        rest = codes.reshape(len(blocks), -1)
        for part in self.bits:
            byte, bit = map(np.array, part.places(range(self.count)))
            for start in set(bit.tolist()):  # no two numbers have the same bits, so that here are no two of a byte
                those = bit == start
                some = (rest[:, those] & ((1 << part.width) - 1)).astype(np.uint16) << start
                blocks[:, byte[those]] |= some.astype(np.uint8)
                if start + part.width > 8:
                    blocks[:, byte[those] + 1] |= (some >> 8).astype(np.uint8)
            rest = rest >> part.width


def float8_steps(code: int) -> int:
    """An 8-bit float without sign, of four bits before and three after, in its smallest steps; its NaN is 0."""
    power, rest = code >> 3 & 15, code & 7
    return 0 if code == 127 else rest if power == 0 else (8 + rest) << power - 1


_CODES = np.arange(256, dtype=np.uint8)
_FLOAT8 = {
    "ue4m3": np.array([float8_steps(code) for code in range(256)], np.float32),
    "e4m3": _CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": _CODES.view(ml_dtypes.float8_e5m2).astype(np.float32),
}


@dataclass(frozen=True)
class BookField:
    """Numbers in rows of a codebook: which row, and with which signs, or which of two distances from their place.

    Signs are a bit for each number; or seven for each eight, the last of which is what makes all of them
    even. Where there are distances, a number is eight times that of the book, and one more, or one less.
    """

    index: BitField
    book: str
    signs: BitField | None = None
    shifts: BitField | None = None

    @property
    def width(self) -> int:
        return BOOKS[self.book].width

    @cached_property
    def count(self) -> int:
        return self.index.count * self.width

    def read(self, blocks: Array) -> Array:
        """Numbers [blocks, count] in f32."""
        found = codebook(self.book)[self.index.codes(blocks)].reshape(len(blocks), -1).astype(np.float32)
        if self.shifts:
            each = self.count // self.shifts.count
            found = found * np.float32(8) + np.repeat(1 - 2 * self.shifts.read(blocks), each, axis=1)
        if self.signs:
            found *= 1 - 2 * self._signs(blocks).astype(np.float32)
        return found

    def _signs(self, blocks: Array) -> Array:
        assert self.signs
        bits = self.signs.codes(blocks)
        if self.signs.count == self.count:
            return bits
        eights = SIGNS[bits][..., None] >> np.arange(8, dtype=np.uint8) & 1
        return eights.reshape(len(blocks), -1)


# eight signs from seven: an even number of them
SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)


@dataclass(frozen=True)
class Ternary:
    """Numbers -1, 0 and 1, five to a byte: the first digits of a fraction in base three, of 256ths.

    Runs are of this many bytes, with this many digits each: first all numbers of the first digits, then the others.
    """

    runs: tuple[tuple[int, int, int], ...]  # first byte, bytes, digits

    @cached_property
    def count(self) -> int:
        return sum(size * digits for _, size, digits in self.runs)

    def place(self, number: int) -> tuple[int, int]:
        """The byte of a number, and the power of three that its digit follows."""
        for first, size, digits in self.runs:
            if number < size * digits:
                return first + number % size, THREES[number // size]
            number -= size * digits
        raise IndexError(number)

    def read(self, blocks: Array) -> Array:
        """Numbers [blocks, count] in f32."""
        byte, power = map(np.array, zip(*map(self.place, range(self.count)), strict=True))
        rest = blocks[:, byte] * power.astype(np.uint8)
        return (rest.astype(np.uint16) * 3 >> 8).astype(np.float32) - 1

    def write(self, blocks: Array, codes: Array) -> None:
        """Puts codes 0 to 2 into blocks of zeros."""
        whole = codes.reshape(len(blocks), -1).astype(np.int64)
        for first, size, digits in self.runs:
            some, whole = whole[:, : size * digits], whole[:, size * digits :]
            powers = np.array(THREES[::-1][:digits])
            number = (some.reshape(len(blocks), digits, size) * powers[None, :, None]).sum(1)
            blocks[:, first : first + size] = ((number * 256 + 242) // 243).astype(np.uint8)


@dataclass(frozen=True)
class Factor:
    """A float of a block, times a power of two: f16 unless told, or a power of two in 8 bits, or 1.

    With `nibbles`, the four bits of an f16 are the upper halves of these bytes, the lowest first.
    """

    byte: int
    dtype: str = "<f2"  # <f2, <f4, bf16, e8m0, or one
    times: float = 1.0
    nibbles: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return {"<f2": 2, "<f4": 4, "bf16": 2, "e8m0": 1, "one": 0}[self.dtype]

    def read(self, blocks: Array) -> Array:
        """In f32 [blocks, 1]."""
        if self.dtype == "one":
            return np.full((len(blocks), 1), self.times, np.float32)
        if self.nibbles:
            upper = (blocks[:, self.nibbles] >> 4).astype(np.uint16)
            whole = (upper << np.arange(0, 16, 4, dtype=np.uint16)).sum(1, keepdims=True, dtype=np.uint16)
            found = whole.view(np.float16).astype(np.float32)
        else:
            raw = np.ascontiguousarray(blocks[:, self.byte : self.byte + self.bytes])
            found = _widened(raw, self.dtype)
        return found * np.float32(self.times) if self.times != 1 else found

    def write(self, blocks: Array, x: Array) -> None:
        wide = np.asarray(x, np.float32).reshape(-1, 1) / np.float32(self.times)
        if self.dtype == "one":
            return
        if self.nibbles:
            whole = wide.astype(np.float16).view(np.uint16)
            for at, byte in enumerate(self.nibbles):
                blocks[:, byte] = blocks[:, byte] & 15 | ((whole[:, 0] >> 4 * at & 15) << 4).astype(np.uint8)
            return
        if self.dtype == "e8m0":
            with np.errstate(divide="ignore"):
                power = np.where(wide > 0, np.floor(np.log2(np.abs(wide))) + 128, 0)
            found = np.clip(power, 0, 254).astype(np.uint8)
        elif self.dtype == "bf16":
            bits = wide.view(np.uint32)
            found = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
        else:
            found = wide.astype(self.dtype).view(np.uint8)
        blocks[:, self.byte : self.byte + self.bytes] = found


def _widened(raw: Array, dtype: str) -> Array:
    if dtype == "e8m0":
        code = raw.astype(np.uint32)  # half of the power of two: the numbers of its blocks are doubled
        return np.where(code < 2, np.uint32(0x00200000) << code, (code - 1) << 23).astype(np.uint32).view(np.float32)
    if dtype == "bf16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype).astype(np.float32)
