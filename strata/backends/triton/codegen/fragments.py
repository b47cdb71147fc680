"""Quantised blocks as operands of tensor cores, for few rows: weights of 16 rows times up to eight rows of x.

Every lane of a warp makes the part of a tile that one instruction (`mma.m16n8k16`) wants of it: four weights that are
neighbours in memory, of each of two rows, and the same four terms of a row of x. Which of them an instruction calls
the first term matters to neither side, so that bytes stay where they lie. Numbers of up to seven bits are put in the
last bits of a float of 16 bits whose exponent makes them what they are and a constant more; the sum of x, times the
constant, is taken off again. Products are exact, sums are in f32, and the numbers of a group meet their scale once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from strata.backends.triton.codegen.blocks import BlockShape, Part
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.codegen.words import BitPlace, WordTile, is_words
from strata.backends.triton.target import Gpu
from strata.core import DType, bf16, f16
from strata.ops import gguf_fields

ROWS = 16  # of weights in a tile
COLUMNS = 8  # rows of x
LANES = 32
QUAD = 4  # lanes that share a row
_TERMS = 16
CARRIERS = {bf16: 128.0, f16: 1024.0}  # floats whose last bit is one
WHOLE = 0x4B000000  # the float of 32 bits whose last bit is one
_WIDEST = 7
_OLDEST = 80  # has the instruction
_GROUP_WORD = 4  # numbers of groups that are unpacked at once


def is_fragments(shape: BlockShape, dtype: DType, gpu: Gpu) -> bool:
    """Whether the words of a block are numbers of few bits, or names of whole numbers, and x has 16."""
    q = shape.form.q
    if gpu.kind != "cuda" or int(gpu.arch) < _OLDEST or not is_words(shape) or dtype not in CARRIERS:
        return False
    assert isinstance(q, gguf_fields.BitField)
    return not q.is_signed and sum(part.width for part in q.bits) <= _WIDEST


def pair(value: float, dtype: DType) -> int:
    """The bits of a number of 16 bits, twice."""
    return int(np.array([value, value], dtype.np).view(np.uint32)[0])


@dataclass
class Columns:
    """A row of x for each column of a tile: pairs of terms as lanes hold them."""

    e: TritonEmitter
    address: str  # of the block's first term, in units of eight bytes
    mask: str
    _known: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    def pairs(self, element: int, step: int, *, crossed: bool) -> tuple[str, str]:
        """Terms 0 and 2, 1 and 3 of four neighbours; or 0 and 1, 2 and 3."""
        if (element, step) not in self._known:
            e, size = self.e, 2
            moved = f" + quad * {step * size // 8}"
            four = e.name(f"tl.load({self.address}{moved} + {element * size // 8}{self.mask})", "x")
            low, high = e.name(f"{four}.to(tl.uint32)", "h"), e.name(f"({four} >> 32).to(tl.uint32)", "h")
            if crossed:
                picked = e.needs("picked")
                both = [e.name(f"{picked}({low}, {high}, {which})", "b") for which in (0x5410, 0x7632)]
                low, high = both[0], both[1]
            self._known[element, step] = low, high
        return self._known[element, step]


@dataclass(frozen=True, slots=True)
class Piece:
    """Four neighbouring elements of each lane of four: where the words are, and which bits of them."""

    run: int
    word: int
    bit: int
    element: int  # the first one of the first lane


def table_of(shape: BlockShape, dtype: DType) -> list[int]:
    """Named numbers as 16 bits: their lower bytes in four words, then their upper ones; none where nothing is named."""
    q = shape.form.q
    assert isinstance(q, gguf_fields.BitField)
    if not q.values:
        return []
    data = np.array(q.values, dtype.np).view(np.uint8).reshape(-1, 2)
    return [int(word) for half in range(2) for word in np.ascontiguousarray(data[:, half]).view(np.uint32)]


def pieces_of(shape: BlockShape) -> dict[int, list[Piece]]:
    """The pieces of a block by the group that they are in."""
    found: dict[int, list[Piece]] = {}
    for run, first in enumerate(_runs(shape)):
        for bit, further in shape.elements_of_a_byte():
            for word in range(shape.run // _TERMS):
                element = first + further + word * 4
                found.setdefault((first + further) // shape.form.group, []).append(Piece(run, word, bit, element))
    return found


def _runs(shape: BlockShape) -> list[int]:
    """First elements of the runs of a block."""
    starts = [0]
    for size, step in [*((size, step) for size, _, step in shape.outer), (shape.splits, shape.run)]:
        starts = [start + digit * step for start in starts for digit in range(size)]
    return starts


def run_bytes(shape: BlockShape) -> list[int]:
    """First bytes of the runs of a block, from the first byte of the numbers on."""
    starts = [0]
    for size, step in [*((size, bytes_) for size, bytes_, _ in shape.outer), (shape.splits, shape.run)]:
        starts = [start + digit * step for start in starts for digit in range(size)]
    return starts


@dataclass
class RowTile(WordTile):
    """The weights of the row of a lane; `quad` is the number of the lane among the four that share it."""

    dtype: DType = bf16

    def pairs(self, piece: Piece) -> tuple[str, str]:
        """Weights 0 and 2, 1 and 3 of the lane's four, with what carries them; named ones 0 and 1, 2 and 3."""
        q = self.form.q
        assert isinstance(q, gguf_fields.BitField)
        first, *others = q.bits
        step = self.shape.run // QUAD
        at = BitPlace(first.byte + run_bytes(self.shape)[piece.run], (("quad", QUAD, step),), 0, ())
        raw = self._words(at, self.count)[piece.word]
        if q.values:
            low, high = self._named_pairs(raw, 0, q), self._named_pairs(raw, 16, q)
            return low[piece.bit // 4], high[piece.bit // 4]
        width, shift = first.width, first.bit + piece.bit
        if others:
            raw, shift = self._masked(raw, str(shift) if shift else "", width), 0
        begin = piece.element - piece.word * 4
        for part in others:
            raw = self._once(f"({raw} | ({self._spread(part, begin, piece.word)} << {width}))", "code")
            width += part.width
        mask = ((1 << width) - 1) * 0x00010001
        even, odd = (f"({raw} >> {by})" if by else raw for by in (shift, shift + 8))
        carried = self.e.needs("carried")
        return self._once(f"{carried}({even}, {mask}, carrier)", "a"), self._once(
            f"{carried}({odd}, {mask}, carrier)", "a"
        )

    def _named_pairs(self, word: str, shift: int, q: gguf_fields.BitField) -> tuple[str, str]:
        """What the lower nibbles of two bytes name, and the upper ones."""
        key = f"{self.e.needs('halves_of_nibbles')}({f'({word} >> {shift})' if shift else word}, table)"
        if key not in self._known:
            self._known[key] = names = f"{self.e.fresh('a')}, {self.e.fresh('a')}"
            self.e.write(f"{names} = {key.replace('table', ', '.join(f'table{i}' for i in range(8)))}")
        low, high = self._known[key].split(", ")
        return low, high

    @property
    def count(self) -> int:
        return self.shape.run // _TERMS

    @property
    def offset(self) -> float:
        """What the numbers that `pairs` gives have to be less of."""
        q = self.form.q
        assert isinstance(q, gguf_fields.BitField)
        return 0.0 if q.values else CARRIERS[self.dtype] - q.add

    @staticmethod
    def _place(bits: gguf_fields.Bits, parts: list[Part], further: int) -> BitPlace:
        """Digits that are the lane's number times something move by that much more."""
        place = WordTile._place(bits, parts, further)
        moves = []
        for text, size, step in place.bytes:
            name, _, times = text.partition(" * ")
            whole = name == "quad" and times.isdigit()
            moves.append(("quad", QUAD, step * int(times)) if whole else (text, size, step))
        return replace(place, bytes=tuple(moves))

    def group_number(self, numbers: gguf_fields.BitField, group: int) -> str:
        """The number of a group, in f32."""
        count = self.form.elements // self.form.group
        word = self._group_word(numbers, group // _GROUP_WORD * _GROUP_WORD, count)
        if word is None:
            return replace(self, parts=[], moves=[]).scaled("1.0", numbers, group * self.form.group)
        add = (-128 if numbers.is_signed else 0) + numbers.add
        helper = self.e.needs("byte_number")
        number = self._once(f"{helper}({word}, whole, {0x7440 + group % _GROUP_WORD})", "number")
        less = 8388608.0 - add
        number = self._once(f"({number} - {less})", "number")
        return number if numbers.times == 1 else self._once(f"({number} * {float(numbers.times)})", "number")

    def _group_word(self, numbers: gguf_fields.BitField, first: int, count: int) -> str | None:
        """Four numbers as the bytes of a word, where they lie side by side; otherwise none."""
        if numbers.float8 or first + _GROUP_WORD > count:
            return None
        parts = []
        for part in numbers.bits:
            places = [self._place(part, [], first + at) for at in range(_GROUP_WORD)]
            start = places[0]
            beside = all((p.byte, p.bit) == (start.byte + at, start.bit) for at, p in enumerate(places))
            if not beside or part.is_wide:
                return None
            parts.append((start, part.width))
        text, to = "", 0
        for start, width in parts:
            word = self._words(BitPlace(start.byte, (), 0, ()), 1)[0] if self.form.bytes % 4 or start.byte % 4 else (
                self._word(start.byte // 4))  # fmt: skip
            if width == 8:
                found = word
            else:
                found = self._masked(word, str(start.bit) if start.bit else "", width)
            text += f" | ({found} << {to})" if to else found
            to += width
        return self._once(f"({text} ^ {0x80808080})" if numbers.is_signed else f"({text})", "code")


def add_tiles(tiles: list[RowTile], x: Columns, sums: list[list[str]]) -> None:
    """Adds the products of a block: `tiles` are those of rows 0 to 7, 8 to 15, and so on; so are their sums."""
    e, form, shape = tiles[0].e, tiles[0].form, tiles[0].shape
    dtype = tiles[0].dtype
    mma = e.needs(f"mma_{dtype.name}")
    step = shape.run // QUAD
    factors = [(tile.factor(form.d), tile.factor(form.m) if form.m else "") for tile in tiles]
    totals = [["" for _ in own] for own in sums]  # of numbers times those of their groups
    others = [["" for _ in own] for own in sums]
    offset = tiles[0].offset
    is_named = bool(table_of(shape, dtype))
    constant = pair(1.0 if form.m else -offset, dtype)
    ones = e.name(f"lane.to(tl.uint32) * 0 + {constant}", "ones")
    zero = e.name("lane.to(tl.float32) * 0.0", "zero")

    def call(a: tuple[str, str, str, str], b: tuple[str, str], c: list[str]) -> list[str]:
        names = [e.fresh("c") for _ in range(4)]
        e.write(f"{', '.join(names)} = {mma}({', '.join((*a, *b, *c))})")
        return names

    def added(before: str, text: str) -> str:
        return e.name(f"{before} + {text}" if before else text, "t")

    for group, pieces in pieces_of(shape).items():
        terms = [x.pairs(piece.element, step, crossed=not is_named) for piece in pieces]
        plain = [zero, zero, zero, zero]  # what every row gets: the sum of x, or what is too much of it
        for b in terms if offset or form.m else ():
            plain = call((ones, ones, ones, ones), b, plain)
        for at in range(0, len(tiles), 2):
            c = [zero, zero, zero, zero] if form.m else plain
            for piece, b in zip(pieces, terms, strict=True):
                (a0, a2), (a1, a3) = (tile.pairs(piece) for tile in tiles[at : at + 2])
                c = call((a0, a1, a2, a3), b, c)
            for half in range(2):
                tile = tiles[at + half]
                scale = tile.group_number(form.scales, group) if form.scales else ""
                least = tile.group_number(form.minima, group) if form.minima else ""
                for column in range(len(sums[at + half])):
                    found = c[2 * half + column]
                    if form.m and offset:
                        found = e.name(f"{found} - {plain[column]} * {offset}", "t")
                    text = f"{scale} * {found}" if scale else found
                    totals[at + half][column] = added(totals[at + half][column], text)
                    if form.m:
                        text = f"{least} * {plain[column]}" if least else plain[column]
                        others[at + half][column] = added(others[at + half][column], text)
    for i, own in enumerate(sums):
        scale, least = factors[i]
        for column, name in enumerate(own):
            text = f"{name} + {scale} * {totals[i][column]}"
            if form.m:
                text += f" {'-' if form.minima else '+'} {least} * {others[i][column]}"
            e.write(f"{name} = {text}")
