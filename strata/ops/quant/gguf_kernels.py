"""GGUF block formats inside kernels: one element of a block as an expression of its bytes.

The same formulas as in gguf_blocks, in the same order of rounding, read at one position rather than over whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strata.core import f16, f32, i8, i32, u16, u32

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder

Read = Callable[["Expr"], "Expr"]


class BlockReader:
    """Fields of one block: `read` gives the u8 at an offset, `at` is the element wanted."""

    def __init__(self, k: KernelBuilder, read: Read, at: Expr) -> None:
        self.k, self.read, self.at = k, read, at

    def i(self, value: int) -> Expr:
        return self.k.index(value)

    def byte(self, offset: int, index: Expr | None = None) -> Expr:
        """A byte as i32."""
        place = self.i(offset) if index is None else index + self.i(offset)
        return self.k.cast(self.read(place), i32)

    def signed(self, offset: int, index: Expr) -> Expr:
        return self.real(self.k.bitcast(self.read(index + self.i(offset)), i8))

    def real(self, x: Expr) -> Expr:
        return self.k.cast(x, f32)

    def half(self, offset: int) -> Expr:
        """An f16 field as f32."""
        low, high = (self.k.cast(self.read(self.i(offset + n)), u16) for n in (0, 1))
        return self.real(self.k.bitcast(self.k.or_(low, self.k.shl(high, self.k.const(8, u16))), f16))

    def single(self, offset: int) -> Expr:
        """An f32 field."""
        word = self.k.const(0, u32)
        for n in range(4):
            part = self.k.cast(self.read(self.i(offset + n)), u32)
            word = self.k.or_(word, self.k.shl(part, self.k.const(8 * n, u32)))
        return self.k.bitcast(word, f32)

    def bits(self, x: Expr, shift: Expr | int, mask: int) -> Expr:
        """(x >> shift) & mask."""
        count = self.k.const(shift, i32) if isinstance(shift, int) else self.k.cast(shift, i32)
        return self.k.and_(self.k.shr(x, count), self.k.const(mask, i32))

    def raised(self, x: Expr, shift: int) -> Expr:
        return self.k.shl(x, self.k.const(shift, i32))

    # ---------------------------------------------------------------------------------------- parts of the formats

    def nibble32(self, offset: int) -> Expr:
        """Element e of 32: the low half of byte e mod 16 for the first 16, else the high half."""
        return self.bits(self.byte(offset, self.at % self.i(16)), (self.at // self.i(16)) * self.i(4), 15)

    def fifth_bit(self, offset: int) -> Expr:
        return self.raised(self.bits(self.byte(offset, self.at // self.i(8)), self.at % self.i(8), 1), 4)

    def nibble256(self, offset: int) -> Expr:
        group, lane = self.at // self.i(32), self.at % self.i(32)
        place = (group // self.i(2)) * self.i(32) + lane
        return self.bits(self.byte(offset, place), (group % self.i(2)) * self.i(4), 15)

    def pair(self, offset: int) -> Expr:
        """The 2-bit number of an element of 256."""
        half, rest = self.at // self.i(128), self.at % self.i(128)
        place = half * self.i(32) + rest % self.i(32)
        return self.bits(self.byte(offset, place), (rest // self.i(32)) * self.i(2), 3)

    def scale_and_min(self, offset: int) -> tuple[Expr, Expr]:
        k = self.k
        group = self.at // self.i(32)
        first, second, third = (self.byte(offset + 4 * n, group % self.i(4)) for n in range(3))
        early = k.lt(group, self.i(4))
        scale = k.or_(self.bits(third, 0, 15), self.raised(self.bits(first, 6, 3), 4))
        least = k.or_(self.bits(third, 4, 15), self.raised(self.bits(second, 6, 3), 4))
        pairs = (self.bits(first, 0, 63), scale), (self.bits(second, 0, 63), least)
        return tuple(self.real(k.select(early, a, b)) for a, b in pairs)  # type: ignore[return-value]

    def affine(self, q: Expr) -> Expr:
        scale, least = self.scale_and_min(4)
        return (self.half(0) * scale) * self.real(q) - self.half(2) * least

    # ---------------------------------------------------------------------------------------- formats

    def q4_0(self) -> Expr:
        return self.half(0) * (self.real(self.nibble32(2)) - 8.0)

    def q4_1(self) -> Expr:
        return self.half(0) * self.real(self.nibble32(4)) + self.half(2)

    def q5_0(self) -> Expr:
        return self.half(0) * (self.real(self.k.or_(self.nibble32(6), self.fifth_bit(2))) - 16.0)

    def q5_1(self) -> Expr:
        return self.half(0) * self.real(self.k.or_(self.nibble32(8), self.fifth_bit(4))) + self.half(2)

    def q8_0(self) -> Expr:
        return self.half(0) * self.signed(2, self.at)

    def q4k(self) -> Expr:
        return self.affine(self.nibble256(16))

    def q5k(self) -> Expr:
        top = self.bits(self.byte(16, self.at % self.i(32)), self.at // self.i(32), 1)
        return self.affine(self.k.or_(self.nibble256(48), self.raised(top, 4)))

    def q6k(self) -> Expr:
        half, rest = self.at // self.i(128), self.at % self.i(128)
        group, lane = rest // self.i(32), rest % self.i(32)
        low = self.byte(0, half * self.i(64) + (group % self.i(2)) * self.i(32) + lane)
        high = self.byte(128, half * self.i(32) + lane)
        q = self.k.or_(
            self.bits(low, (group // self.i(2)) * self.i(4), 15), self.raised(self.bits(high, group * self.i(2), 3), 4)
        )
        return (self.half(208) * self.signed(192, self.at // self.i(16))) * (self.real(q) - 32.0)

    def q8k(self) -> Expr:
        return self.single(0) * self.signed(4, self.at)

    def q2k(self) -> Expr:
        packed = self.byte(0, self.at // self.i(16))
        scale, least = self.real(self.bits(packed, 0, 15)), self.real(self.bits(packed, 4, 15))
        return (self.half(80) * scale) * self.real(self.pair(16)) - self.half(82) * least

    def q3k(self) -> Expr:
        group = self.at // self.i(16)
        low = self.bits(self.byte(96, group % self.i(8)), (group // self.i(8)) * self.i(4), 15)
        high = self.bits(self.byte(104, group % self.i(4)), (group // self.i(4)) * self.i(2), 3)
        scale = self.real(self.k.or_(low, self.raised(high, 4))) - 32.0
        top = self.bits(self.byte(0, self.at % self.i(32)), self.at // self.i(32), 1)
        q = self.real(self.pair(32)) + (self.real(top) * 4.0 - 4.0)
        return (self.half(108) * scale) * q


def block_element(k: KernelBuilder, name: str, read: Read, at: Expr) -> Expr:
    """Element `at` of a block of the format, in f32."""
    value: Expr = getattr(BlockReader(k, read, at), name)()
    return value
