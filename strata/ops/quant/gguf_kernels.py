"""GGUF block formats inside kernels: one element of a block as an expression of its bytes.

It is read from the description in gguf_blocks, and rounded in the same order as by the decoders on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from strata.core import f16, f32, i8, i32, u16, u32
from strata.ops.quant.gguf_blocks import BitField, Bits, BlockFormat, Factor

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder


class BlockReader:
    """Fields of one block: `read` gives the u8 at an offset."""

    def __init__(self, k: KernelBuilder, read: Callable[[Expr], Expr]) -> None:
        self.k, self.read = k, read

    def factor(self, field: Factor) -> Expr:
        """A float of the block, in f32."""
        k, (count, word, dtype) = self.k, {"<f2": (2, u16, f16), "<f4": (4, u32, f32)}[field.dtype]
        parts = [k.cast(self.read(k.index(field.byte + n)), word) for n in range(count)]
        whole = parts[0]
        for n, part in enumerate(parts[1:], 1):
            whole = k.or_(whole, k.shl(part, k.const(8 * n, word)))
        return k.cast(k.bitcast(whole, dtype), f32)

    def number(self, field: BitField, index: Expr) -> Expr:
        """A number of a field, in f32."""
        k = self.k
        if field.is_signed:
            return k.cast(k.bitcast(self.read(self._place(field.bits[0], index)[0]), i8), f32)
        halves = {part.digits[0][0] for part in field.bits} == {2}
        if len(field.bits) > 1 and halves and any(part.digits[0][2] for part in field.bits):
            early = k.lt(index, k.index(field.count // 2))  # loops are cut here: halves have their bits elsewhere
            found = k.select(early, *(self._code(field, index, half) for half in range(2)))
        else:
            found = self._code(field, index)
        return k.cast(found, f32) - float(-field.add) if field.add else k.cast(found, f32)

    def _code(self, field: BitField, index: Expr, half: int | None = None) -> Expr:
        """The bits of a number, as i32."""
        k, found, to = self.k, None, 0
        for part in field.bits:
            place, first = self._place(part, index, half)
            moved = k.shr(k.cast(self.read(place), i32), k.cast(first, i32))
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
        return byte, bit


def block_element(k: KernelBuilder, form: BlockFormat, read: Callable[[Expr], Expr], at: Expr) -> Expr:
    """Element `at` of a block of the format, in f32."""
    block, group = BlockReader(k, read), at // k.index(form.group)
    scale = block.factor(form.d)
    if form.scales:
        scale = scale * block.number(form.scales, group)
    found = scale * block.number(form.q, at)
    if form.m and form.minima:
        return found - block.factor(form.m) * block.number(form.minima, group)
    return found + block.factor(form.m) if form.m else found
