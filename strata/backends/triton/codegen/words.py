"""Quantised blocks in Triton by words: what few rows of x are multiplied with, at the bandwidth of memory.

Every lane has a run of the blocks of some rows of weights, whose bytes it reads as words, and reads x once for all of
these rows. Numbers of up to eight bits become floats two at a time, where they stand in their word: with the bits around
them cleared, each half of it is an f16 without exponent. The elements of a run that share a scale are added up first, and are
multiplied with it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

from strata.backends.triton.codegen.blocks import BlockShape, Part, digit_of
from strata.backends.triton.codegen.emit import TritonEmitter
from strata.core import DType, f16, f32
from strata.ops import gguf_blocks, gguf_fields

_WORD = 4  # bytes of a word, and elements that lie in it
_MIDDLE = 128  # of the numbers of a byte
_SMALLEST = 24  # the smallest number of f16 is two to the power of less that
_TABLE = 16  # values that four bits name
_WORDS = {1: "tl.uint8", 2: "tl.uint16", 4: "tl.uint32", 8: "tl.uint64"}


def is_words(shape: BlockShape) -> bool:
    """Whether four neighbouring elements lie in one word: bits of neighbouring bytes, or neighbouring bits of one."""
    q = shape.form.q
    assert isinstance(q, gguf_fields.BitField)
    if shape.run % _WORD or q.float8 or q.times != 1 or sum(part.width for part in q.bits) > 8:
        return False
    if q.values:
        nibbles = [(bit, further > 0) for bit, further in shape.elements_of_a_byte()]
        return nibbles == [(0, False), (4, True)] and len(q.bits) == 1 and bool(_table(q))
    return all(_is_spread(p) or (p.digits[-1][1:] == (1, 0) and not p.digits[-1][0] % _WORD) for p in q.bits)


def _is_spread(part: gguf_fields.Bits) -> bool:
    """Whether the elements of a word have neighbouring bits of one byte."""
    return part.width == 1 and part.digits[-1] == (8, 0, 1) and not part.bit


def _table(q: gguf_fields.BitField) -> list[int]:
    """Values of four bits as bytes, 128 more than they are; none where they are no such bytes."""
    whole = len(q.values) == _TABLE and all(float(v).is_integer() and -_MIDDLE <= v < _MIDDLE for v in q.values)
    return [int(v) + _MIDDLE for v in q.values] if whole else []


@dataclass(frozen=True, slots=True)
class Place:
    """Where some bits are: a byte of the block and a bit of it, numbers and digits times numbers."""

    byte: int
    bytes: tuple[tuple[str, int, int], ...]  # digit, size, step
    bit: int
    bits: tuple[tuple[str, int], ...]

    @property
    def shift(self) -> str:
        return " + ".join([*(f"{text} * {step}" for text, step in self.bits), *([str(self.bit)] if self.bit else [])])


@dataclass
class Terms:
    """Rows of x in f32: lanes `place` are where a block begins, in units of eight bytes."""

    e: TritonEmitter
    parts: list[Part]  # of the number of a run
    dtype: DType
    rows: list[tuple[str, str]]  # address of a row, and the mask of what is loaded of it
    _known: dict[str, str] = field(default_factory=dict)

    def four(self, row: int, further: int) -> list[str]:
        """Four neighbouring elements."""
        size, halves = self.dtype.itemsize, []
        address, mask = self.rows[row]
        moves = [f"{p.text} * {p.step * size // 8}" for p in self.parts if p.size > 1]
        for piece in range(size // 2):
            place = " + ".join([address, str(further * size // 8 + piece), *moves])
            both = self._once(f"tl.load({place}{mask})", "x")
            halves += [self._once(f"{both}.to(tl.uint32)", "h"), self._once(f"({both} >> 32).to(tl.uint32)", "h")]
        if self.dtype is f32:
            return [self._once(f"{half}.to(tl.float32, bitcast=True)", "t") for half in halves]
        if self.dtype is f16:
            parts = [part for half in halves for part in (f"({half} & 65535)", f"({half} >> 16)")]
            texts = [f"{part}.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)" for part in parts]
        else:
            parts = [part for half in halves for part in (f"({half} << 16)", f"({half} & {0xFFFF0000})")]
            texts = [f"{part}.to(tl.float32, bitcast=True)" for part in parts]
        return [self._once(text, "t") for text in texts]

    def _once(self, text: str, prefix: str) -> str:
        if text not in self._known:
            self._known[text] = self.e.name(text, prefix)
        return self._known[text]


def add_products(tiles: list[WordTile], terms: Terms, sums: list[list[str]]) -> None:
    """Adds products with rows of x to their sums, one for each row of weights and row of x."""
    e, form = tiles[0].e, tiles[0].form
    factors = [(tile.factor(form.d), tile.factor(form.m) if form.m else "") for tile in tiles]
    rows = range(len(terms.rows))

    def add(before: str, text: str) -> str:
        return e.name(f"{before} + {text}" if before else text, "s")

    for at, (bit, further) in enumerate(tiles[0].shape.elements_of_a_byte()):
        dots = [["" for _ in rows] for _ in tiles]
        plain = ["" for _ in rows]
        for word in range(tiles[0].shape.run // _WORD):
            given = [terms.four(i, further + word * _WORD) for i in rows]
            for i in rows if form.m or tiles[0].added else ():
                for term in given[i]:
                    plain[i] = add(plain[i], term)
            for tile, own in zip(tiles, dots, strict=True):
                for byte, number in enumerate(tile.numbers(at, bit, further, word)):
                    for i in rows:
                        own[i] = add(own[i], f"{number} * {given[i][byte]}")
        for tile, own, names, (scale, least) in zip(tiles, dots, sums, factors, strict=True):
            factor = tile.scaled(scale, form.scales, further)
            unit = e.name(f"{factor} * {tile.unit(bit)}", "unit")
            others = [f"{factor} * {float(tile.added)}"] if tile.added else []
            if least:
                sign = "-" if form.minima else ""
                others.append(f"{sign}{tile.scaled(least, form.minima, further)}")
            other = e.name(" + ".join(others).replace("+ -", "- "), "other") if others else ""
            for i, name in enumerate(names):
                text = f"{name} + {unit} * {own[i]}"
                e.write(f"{name} = {text} + {other} * {plain[i]}" if other else f"{name} = {text}")


@dataclass
class WordTile:
    """Writes the numbers of the runs of a row of weights: `block` and what `first` names are lanes."""

    e: TritonEmitter
    shape: BlockShape
    parts: list[Part]  # of the number of a run
    moves: list[int]  # bytes that each of them moves by
    first: str  # the first byte of the row
    mask: str  # empty where all are inside
    is_cuda: bool
    _known: dict[str, str] = field(default_factory=dict)

    @property
    def form(self) -> gguf_blocks.BlockFormat:
        return self.shape.form

    # numbers of elements

    @property
    def added(self) -> int:
        """What is added to what `numbers` gives."""
        q = self.form.q
        assert isinstance(q, gguf_fields.BitField)
        return -_MIDDLE if q.values else q.add - (_MIDDLE if q.is_signed else 0)

    def numbers(self, at: int, bit: int, further: int, word: int) -> list[str]:
        """The numbers of four neighbouring elements, in f32, times a power of two that `unit` takes back."""
        q = self.form.q
        assert isinstance(q, gguf_fields.BitField)
        raw = self._words(Place(q.bits[0].byte, self._of_runs(), 0, ()), self.shape.run // _WORD)[word]
        if q.values:
            named = [self._named(raw, half, q) for half in range(2)]
            words = [self._once(f"({code} >> 8)", "code") if at else code for code in named]
            return [number for code in words for number in self._halves(code, 8, 0)]
        if q.is_signed:
            raw = self._once(f"({raw} ^ {0x80808080})", "code")
        shift, width = self._shift(bit), q.bits[0].width
        if len(q.bits) > 1:
            raw = self._masked(raw, str(q.bits[0].bit + bit) if q.bits[0].bit + bit else "", width)
        for part in q.bits[1:]:
            raw = self._once(f"({raw} | ({self._spread(part, further, word)} << {width}))", "code")
            width += part.width
        even = self._halves(raw, width, shift)
        odd = self._halves(self._once(f"({raw} >> 8)", "code"), width, shift)
        return [even[0], odd[0], even[1], odd[1]]

    def unit(self, bit: int) -> float:
        """What a number of `numbers` is in units of: those are the smallest numbers of f16."""
        return float(2 ** (_SMALLEST - self._shift(bit)))

    def _shift(self, bit: int) -> int:
        """The bit of its byte at which the number of an element begins."""
        q = self.form.q
        assert isinstance(q, gguf_fields.BitField)
        return 0 if len(q.bits) > 1 or q.values else q.bits[0].bit + bit

    def _halves(self, word: str, width: int, bit: int) -> tuple[str, str]:
        """The same bits of the two halves of a word as numbers: they are the last ones of an f16 without exponent."""
        mask = (((1 << width) - 1) << bit) * 0x00010001
        helper = self.e.needs("halves" if self.is_cuda else "halves_plain")
        key = f"{helper}({word}, {mask})"
        if key not in self._known:
            self._known[key] = names = f"{self.e.fresh('n')}, {self.e.fresh('n')}"
            self.e.write(f"{names} = {key}")
        low, high = self._known[key].split(", ")
        return low, high

    def _masked(self, word: str, shift: str, width: int) -> str:
        """The same bits of every byte of a word, moved to its first ones."""
        moved = f"({word} >> ({shift}))" if shift else word
        return self._once(f"({moved} & {((1 << width) - 1) * 0x01010101})", "code")

    def _spread(self, part: gguf_fields.Bits, further: int, word: int) -> str:
        """Further bits of four elements, as the first ones of the bytes of a word."""
        if _is_spread(part):
            place = self._place(part, self.parts, further + word * _WORD)
            code = f"{self._byte(place)}.to(tl.uint32)"
            moved = f"(({code} >> ({place.shift})) & 15)" if place.shift else f"({code} & 15)"
            return self._once(f"(({moved} * {0x00204081}) & {0x01010101})", "code")
        place = self._place(part, self.parts, further)
        found = self._words(place, self.shape.run // _WORD)[word]
        return self._masked(found, f"({place.shift}).to(tl.uint32)" if place.bits else place.shift, part.width)

    def _named(self, word: str, half: int, q: gguf_fields.BitField) -> str:
        """The bytes that four of the eight nibbles of a word name."""
        table = _table(q)
        words = [sum(byte << 8 * i for i, byte in enumerate(table[at : at + 4])) for at in range(0, _TABLE, 4)]
        helper = self.e.needs("bytes_of_nibbles" if self.is_cuda else "bytes_of_nibbles_plain")
        code = self._once(f"({word} >> 16)", "code") if half else word
        return self._once(f"{helper}({code}, {', '.join(map(str, words))})", "code")

    # what groups share

    def scaled(self, factor: str, numbers: gguf_fields.BitField | None, further: int) -> str:
        """A float of the block, times the number of the group of an element."""
        if not numbers:
            return factor
        group = self.form.group
        parts = [Part(p.text, p.size, p.step // group) for p in self.parts if p.step % group == 0]
        assert all(p.step % group == 0 or p.step * p.size <= group for p in self.parts)
        if numbers.is_signed or numbers.float8:
            code = self._byte(self._place(numbers.bits[0], parts, further // group))
            number = f"{code}.to(tl.int8, bitcast=True).to(tl.float32)"
            if numbers.float8:
                number = f"{self.e.needs(f'from_f8{numbers.float8}')}({code})"
            return self._once(f"{factor} * {number}", "scale")
        text, to = "", 0
        for part in numbers.bits:
            place = self._place(part, parts, further // group)
            found = self._bits(place, part.width)
            text += f" | ({found} << {to})" if to else found
            to += part.width
        number = f"({text}).to(tl.float32)"
        if numbers.times != 1:
            number = f"({number} * {float(numbers.times)})"
        if numbers.add:
            number = f"({number} - {float(-numbers.add)})"
        return self._once(f"{factor} * {number}", "scale")

    def factor(self, field: gguf_fields.Factor) -> str:
        """A float of the block."""
        if field.dtype == "one":
            return self.e.name(f"tl.full([1], {field.times!r}, tl.float32)", "factor")
        kind, up = ("16", 0) if field.dtype == "<f2" else ("32", 16 if field.dtype == "bf16" else 0)
        least = gcd(field.bytes, self.form.bytes, field.byte)
        parts = []
        for byte in range(0, field.bytes, least):
            found = self._loaded(least, f"{self._from(least)} + {(field.byte + byte) // least}")
            parts.append(f"({found}.to(tl.uint{kind}) << {8 * byte + up})" if byte or up else
                         f"{found}.to(tl.uint{kind})")  # fmt: skip
        text = f"({' | '.join(parts)}).to(tl.float{kind}, bitcast=True).to(tl.float32)"
        return self.e.name(text if field.times == 1 else f"{text} * {field.times!r}", "factor")

    # memory

    def _bits(self, place: Place, width: int) -> str:
        """Some bits of a byte, of words where the block has them."""
        mask, shift = (1 << width) - 1, place.shift
        in_word = self._byte_in_word(place)
        if in_word is None:
            code = self._once(f"{self._byte(place)}.to(tl.uint32)", "code")
        else:
            code, *moves = in_word
            shift = " + ".join([*moves, *([shift] if shift else [])])
        moved = f"({code} >> ({shift}).to(tl.uint32))" if not shift.isdigit() and shift else f"({code} >> {shift})"
        return self._once(f"({moved if shift else code} & {mask})", "code")

    def _byte_in_word(self, place: Place) -> list[str] | None:
        """The word of a byte, and what it has to be moved by; None where that is not worth it."""
        if self.form.bytes % _WORD:
            return None
        steps = [(text, size, step) for text, size, step in place.bytes if step % _WORD]
        jumps = [(text, size, step) for text, size, step in place.bytes if not step % _WORD]
        inside = place.byte % _WORD
        if inside + sum((size - 1) * step for _, size, step in steps) >= _WORD:
            return None
        if len(jumps) > 1 or any(size > 2 for _, size, _ in jumps):
            return None
        index = place.byte // _WORD
        word = self._word(index)
        for text, _, step in jumps:
            word = self._once(f"tl.where({text} != 0, {self._word(index + step // _WORD)}, {word})", "code")
        return [word, *(f"{text} * {8 * step}" for text, _, step in steps), *([str(8 * inside)] if inside else [])]

    def _word(self, index: int) -> str:
        """A word of the block by its number."""
        place = Place(index * _WORD, (), 0, ())
        if self.form.bytes % 8 == 0:
            return self._words(Place(index // 2 * 8, (), 0, ()), 2)[index % 2]
        return self._words(place, 1)[0]

    def _byte(self, place: Place) -> str:
        return self._loaded(1, f"{self._from(1)} + {self._moved(place, 1)}")

    def _words(self, place: Place, count: int) -> list[str]:
        """Neighbouring words from a byte on, which may lie in two words of memory each."""
        least = gcd(8, self.form.bytes, place.byte, *(step for *_, step in place.bytes))
        if least == 8 and count % 2 == 0:
            found = []
            for i in range(count // 2):
                both = self._loaded(8, f"{self._from(8)} + {self._moved(place, 8)} + {i}")
                found += [f"{both}.to(tl.uint32)", f"({both} >> 32).to(tl.uint32)"]
            return [self._once(text, "word") for text in found]
        if least % _WORD == 0:
            return [self._loaded(4, f"{self._from(4)} + {self._moved(place, 4)} + {i}") for i in range(count)]
        at = self._once(f"{self.first} + block * {self.form.bytes} + {self._moved(place, 1)}", "at")
        begin = f"{self._pointer(4)} + ({at} >> 2)"
        shift = self._once(f"(({at} & 3) << 3).to(tl.uint64)", "shift")
        loaded = [self._loaded(4, f"{begin} + {i}") for i in range(count)]
        loaded.append(self._loaded(4, f"{self._pointer(4)} + (({at} + 3) >> 2) + {count - 1}"))
        pairs = zip(loaded, loaded[1:], strict=False)
        return [self._once(f"((({b}.to(tl.uint64) << 32) | {a}) >> {shift}).to(tl.uint32)", "word") for a, b in pairs]

    def _loaded(self, size: int, place: str) -> str:
        """What lies at a place; one load for all who ask for it."""
        mask = f", mask={self.mask}, other=0" if self.mask else ""
        return self._once(f"tl.load({place}{mask})", "code")

    def _pointer(self, size: int) -> str:
        return "codes" if size == 1 else self._once(f"codes.to(tl.pointer_type({_WORDS[size]}))", "codes")

    def _from(self, size: int) -> str:
        """The address of the block, in units of so many bytes."""
        text = f"{self._pointer(size)} + ({self.first} // {size} + block * {self.form.bytes // size})"
        return self._once(text if size > 1 else f"codes + ({self.first} + block * {self.form.bytes})", "begin")

    @staticmethod
    def _moved(place: Place, size: int) -> str:
        return " + ".join([str(place.byte // size), *(f"{text} * {step // size}" for text, _, step in place.bytes)])

    def _of_runs(self) -> tuple[tuple[str, int, int], ...]:
        pairs = zip(self.parts, self.moves, strict=True)
        return tuple((part.text, part.size, move) for part, move in pairs if part.size > 1)

    @staticmethod
    def _place(bits: gguf_fields.Bits, parts: list[Part], further: int) -> Place:
        """Where the bits of a number are: the number is the sum of what parts add, and further ones."""
        byte, bit = bits.byte, bits.bit
        bytes_, moves = [], []
        step = 1
        for size, by, moved in reversed(bits.digits):
            digit = digit_of(parts, further, step, size)
            step *= size
            if digit.isdigit():
                byte, bit = byte + int(digit) * by, bit + int(digit) * moved
                continue
            bytes_ += [(digit, size, by)] if by else []
            moves += [(digit, moved)] if moved else []
        return Place(byte, tuple(bytes_), bit, tuple(moves))

    def _once(self, text: str, prefix: str) -> str:
        if text not in self._known:
            self._known[text] = self.e.name(text, prefix)
        return self._known[text]
