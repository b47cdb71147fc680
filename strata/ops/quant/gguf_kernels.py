"""GGUF block formats inside kernels: one element of a block as an expression of its bytes.

It is read from the description in gguf_blocks, and rounded in the same order as by the decoders on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from strata.core import f8e4m3, f8e5m2, f16, f32, i8, i32, u16, u32
from strata.ops.quant.gguf_blocks import BlockFormat
from strata.ops.quant.gguf_fields import THREES, BitField, Bits, BookField, Factor, Ternary

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


class BlockReader:
    """Fields of one block: `read` gives the u8 at an offset."""

    def __init__(self, k: KernelBuilder, read: Callable[[Expr], Expr]) -> None:
        self.k, self.read = k, read

    def factor(self, field: Factor) -> Expr:
        """A float of the block, in f32."""
        k = self.k
        if field.dtype == "one":
            return k.const(field.times, f32)
        if field.dtype == "e8m0":
            code = k.cast(self.read(k.index(field.byte)), i32)
            small = k.shl(k.const(0x00200000, i32), k.min(code, k.const(1, i32)))
            bits = k.select(k.lt(code, k.const(2, i32)), small, k.shl(code - k.const(1, i32), k.const(23, i32)))
            return k.bitcast(bits, f32)
        if field.nibbles:
            parts = [k.shr(k.cast(self.read(k.index(byte)), u16), k.const(4, u16)) for byte in field.nibbles]
            step, word = 4, u16
        else:
            step, word = 8, u32 if field.dtype == "<f4" else u16
            parts = [k.cast(self.read(k.index(field.byte + n)), word) for n in range(field.bytes)]
        whole = parts[0]
        for n, part in enumerate(parts[1:], 1):
            whole = k.or_(whole, k.shl(part, k.const(step * n, word)))
        if field.dtype == "bf16":
            found = k.bitcast(k.shl(k.cast(whole, u32), k.const(16, u32)), f32)
        else:
            found = k.cast(k.bitcast(whole, f32 if field.dtype == "<f4" else f16), f32)
        return found * k.const(field.times, f32) if field.times != 1 else found

    def number(self, field: BitField, index: Expr) -> Expr:
        """A number of a field, in f32."""
        k = self.k
        if field.is_signed:
            return k.cast(k.bitcast(self.read(self._place(field.bits[0], index)[0]), i8), f32)
        if field.float8 and field.float8 != "ue4m3":
            kind = f8e4m3 if field.float8 == "e4m3" else f8e5m2
            return k.cast(k.bitcast(self.read(self._place(field.bits[0], index)[0]), kind), f32)
        halves = {part.digits[0][0] for part in field.bits} == {2}
        if len(field.bits) > 1 and halves and any(part.digits[0][2] for part in field.bits):
            early = k.lt(index, k.index(field.count // 2))  # loops are cut here: halves have their bits elsewhere
            found = k.select(early, *(self._code(field, index, half) for half in range(2)))
        else:
            found = self._code(field, index)
        if field.values:
            return self._value(found, field.values)
        if field.float8:
            return self._steps(found)
        if field.times != 1:
            found = found * k.const(field.times, i32)
        return k.cast(found, f32) - float(-field.add) if field.add else k.cast(found, f32)

    def _value(self, code: Expr, values: tuple[float, ...]) -> Expr:
        """The value that a code names: a chain of selections."""
        k = self.k
        found = k.const(float(values[0]), f32)
        for at, value in enumerate(values[1:], 1):
            found = k.select(k.eq(code, k.const(at, i32)), k.const(float(value), f32), found)
        return found

    def _steps(self, code: Expr) -> Expr:
        """An 8-bit float without sign, in its smallest steps."""
        k = self.k
        power, rest = k.and_(k.shr(code, k.const(3, i32)), k.const(15, i32)), k.and_(code, k.const(7, i32))
        up = k.max(power - k.const(1, i32), k.const(0, i32))
        large = k.shl(rest + k.const(8, i32), up)
        found = k.select(k.eq(power, k.const(0, i32)), rest, large)
        return k.cast(k.select(k.eq(code, k.const(127, i32)), k.const(0, i32), found), f32)

    def ternary(self, field: Ternary, index: Expr) -> Expr:
        """A number of -1, 0 and 1, in f32."""
        k, start, found = self.k, 0, None
        for first, size, digits in field.runs:
            at = index - k.index(start)
            byte = k.cast(self.read(k.index(first) + k.mod(at, k.index(size))), i32)
            digit, power = k.cast(k.floordiv(at, k.index(size)), i32), k.const(THREES[0], i32)
            for n, three in enumerate(THREES[1:digits], 1):
                power = k.select(k.eq(digit, k.const(n, i32)), k.const(three, i32), power)
            rest = k.and_(byte * power, k.const(255, i32))
            number = k.shr(rest * k.const(3, i32), k.const(8, i32))
            found = number if found is None else k.select(k.lt(index, k.index(start)), found, number)
            start += size * digits
        assert found is not None
        return k.cast(found, f32) - 1.0

    def grid(self, field: BookField, index: Expr, book: Callable[[Expr, Expr], Expr]) -> Expr:
        """A number of a row of a codebook, in f32."""
        k = self.k
        row = self._code(field.index, k.floordiv(index, k.index(field.width)))
        found = k.cast(book(row, k.mod(index, k.index(field.width))), f32)
        if field.shifts:
            shift = self._code(field.shifts, k.floordiv(index, k.index(field.count // field.shifts.count)))
            found = found * 8.0 + k.cast(k.const(1, i32) - shift * k.const(2, i32), f32)
        if field.signs:
            found = found * k.cast(k.const(1, i32) - self._sign(field.signs, index, field.count) * k.const(2, i32), f32)
        return found

    def _sign(self, signs: BitField, index: Expr, count: int) -> Expr:
        """A bit: its own, or one of eight that are even together."""
        k = self.k
        if signs.count == count:
            return self._code(signs, index)
        seven = self._code(signs, k.floordiv(index, k.index(8)))
        folded = seven
        for step in (4, 2, 1):
            folded = k.xor(folded, k.shr(folded, k.const(step, i32)))
        eight = k.or_(seven, k.shl(k.and_(folded, k.const(1, i32)), k.const(7, i32)))
        return k.and_(k.shr(eight, k.cast(k.mod(index, k.index(8)), i32)), k.const(1, i32))

    def _code(self, field: BitField, index: Expr, half: int | None = None) -> Expr:
        """The bits of a number, as i32."""
        k, found, to = self.k, None, 0
        for part in field.bits:
            place, first = self._place(part, index, half)
            raw = k.cast(self.read(place), i32)
            if part.is_wide:  # the last number ends with its byte
                raw = k.or_(raw, k.shl(k.cast(self.read(self._after(part, place)), i32), k.const(8, i32)))
            moved = k.shr(raw, k.cast(first, i32))
            bits = k.and_(moved, k.const((1 << part.width) - 1, i32))
            found = k.or_(found, k.shl(bits, k.const(to, i32))) if found is not None else bits
            to += part.width
        assert found is not None
        return found

    def _place(self, part: Bits, index: Expr, half: int | None = None) -> tuple[Expr, Expr]:
        """The byte of a number and the first of its bits; where its half is known, so is its first digit."""
        i = self.k.index
        byte, bit = i(part.byte), i(part.bit)
        for at, (size, bytes_, bits) in enumerate(part.digits):
            digit = index // i(prod(inner for inner, *_ in part.digits[at + 1 :]))
            digit = i(half) if not at and half is not None else digit % i(size) if at else digit
            byte, bit = byte + digit * i(bytes_), bit + digit * i(bits)
        if part.is_wide:
            return byte + bit // i(8), bit % i(8)
        return byte, bit

    def _after(self, part: Bits, place: Expr) -> Expr:
        """The byte after one of a field, which may be its last."""
        places = zip(*part.places(range(prod(size for size, *_ in part.digits))), strict=True)
        last = max((8 * byte + bit + part.width - 1) // 8 for byte, bit in places)
        return self.k.min(place + self.k.index(1), self.k.index(last))


def block_element(
    k: KernelBuilder, form: BlockFormat, read: Callable[[Expr], Expr], at: Expr, book: Callable[[Expr, Expr], Expr]
) -> Expr:
    """Element `at` of a block of the format, in f32; `book` gives a number of the format's codebook."""
    block, group = BlockReader(k, read), at // k.index(form.group)
    scale = block.factor(form.d)
    if form.scales:
        scale = scale * block.number(form.scales, group)
    if isinstance(form.q, BookField):
        number = block.grid(form.q, at, book)
    elif isinstance(form.q, Ternary):
        number = block.ternary(form.q, at)
    else:
        number = block.number(form.q, at)
    found = scale * number
    if form.m and form.minima:
        return found - block.factor(form.m) * block.number(
            form.minima, at // k.index(form.elements // form.minima.count)
        )
    return found + block.factor(form.m) if form.m else found
