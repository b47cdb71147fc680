"""Quantised blocks (GGUF) in Triton: tiles of bytes whose numbers become weights in registers.

A tile is rows of weights x runs of bytes x bytes of a run. The elements of a run share a scale, which is worked out
for rows x runs, and bits of several elements lie in one byte: a byte is loaded once, and each of its elements is a tile
of its own. Where bits lie is read from the description of the format, which decoders on arrays have too; what is
computed is rounded in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from strata.backends.triton.codegen.emit import TritonEmitter
from strata.ops import gguf_blocks, gguf_fields

_LONGEST = 32  # bytes of a run
_WORD = 4  # bytes of a word
_WIDER = "[:, :, None]"  # rows x runs for each byte of a run


@dataclass(frozen=True, slots=True)
class Part:
    """What a part of a tile adds to the number of an element in its block: a digit of a place, times a step."""

    text: str
    size: int
    step: int


@dataclass(frozen=True)
class BlockShape:
    """How the bytes with the elements' first bits are a tile: runs of a block, and bytes of a run."""

    form: gguf_blocks.BlockFormat
    outer: tuple[tuple[int, int, int], ...]  # digits that move the byte: size, bytes, elements
    inner: tuple[tuple[int, int, int], ...]  # digits inside a byte: size, bits, elements
    run: int
    splits: int  # runs that lie side by side

    @staticmethod
    def of(form: gguf_blocks.BlockFormat) -> BlockShape | None:
        """None for what is no bits of neighbouring bytes: codebooks, digits in base three, bits of two bytes."""
        fields = [field for field in (form.q, form.scales, form.minima) if field is not None]
        factors = [factor for factor in (form.d, form.m) if factor is not None]
        if not isinstance(form.q, gguf_fields.BitField) or not all(map(_is_read, fields)):
            return None
        digits = form.q.bits[0].digits
        if digits[-1][1:] != (1, 0) or any(f.nibbles or f.dtype == "e8m0" for f in factors):
            return None
        steps = [prod(size for size, *_ in digits[at + 1 :]) for at in range(len(digits))]
        *before, (length, _, _) = digits
        outer = [(size, bytes_, step) for (size, bytes_, _), step in zip(before, steps, strict=False) if bytes_]
        inner = [(size, bits, step) for (size, bytes_, bits), step in zip(before, steps, strict=False) if not bytes_]
        run = min(length, form.group, _LONGEST)
        made = BlockShape(form, tuple(outer), tuple(inner), run, length // run)
        return made if is_power_of_two(made.runs) and is_power_of_two(run) else None

    @property
    def runs(self) -> int:
        """Of one block."""
        return prod(size for size, *_ in self.outer) * self.splits

    def parts(self, e: TritonEmitter) -> tuple[list[Part], list[int]]:
        """Digits of the number of a lane `run`, the same in every step of a loop, and the bytes that each moves by."""
        rest, parts = f"run % {self.runs}", []
        sizes = [size for size, *_ in self.outer] + [self.splits]
        steps = [step for *_, step in self.outer] + [self.run]
        for i, (size, step) in enumerate(zip(sizes, steps, strict=True)):
            below = prod(sizes[i + 1 :])
            text = f"({rest}) // {below}" if below > 1 else f"({rest})"
            parts.append(Part(e.name(f"{text} % {size}", "part"), size, step) if size > 1 else Part("0", 1, step))
        return parts, [bytes_ for _, bytes_, _ in self.outer] + [self.run]

    def elements_of_a_byte(self) -> Iterator[tuple[int, int]]:
        """The first bit of each, and how much further than the first one it is in the block."""
        for digits in product(*(range(size) for size, *_ in self.inner)):
            pairs = list(zip(digits, self.inner, strict=True))
            yield sum(d * bits for d, (_, bits, _) in pairs), sum(d * step for d, (_, _, step) in pairs)


def _is_read(field: object) -> bool:
    """Whether a field is bits, none of which lie in two bytes; 8-bit floats without a sign are left to others."""
    if not isinstance(field, gguf_fields.BitField) or any(part.is_wide for part in field.bits):
        return False
    return field.float8 != "ue4m3" and (not field.float8 or field.bits[0].width == 8)


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@dataclass
class BlockTile:
    """Writes the weights of a tile with the lanes `run` and `byte`; `at` names where blocks begin, of rows x runs."""

    e: TritonEmitter
    shape: BlockShape
    codes: str
    at: str
    mask: str  # of rows x runs; empty where all are inside
    _loads: dict[str, str] = field(default_factory=dict)
    _parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts, self._moves = self.shape.parts(self.e)

    @property
    def element(self) -> str:
        """The number of the first element of each byte in its block: 1 x runs x bytes."""
        return " + ".join([*(f"{p.text}{_WIDER} * {p.step}" for p in self._parts if p.size > 1), "byte"])

    def weights(self) -> Iterator[tuple[int, str]]:
        """How far elements are from the first ones of their bytes, and their values, a tile each."""
        form = self.shape.form
        assert not isinstance(form.scales, gguf_fields.Ternary | gguf_fields.BookField)
        scale = self._factor(form.d)
        least = self._factor(form.m) if form.m else ""
        for bit, further in self.shape.elements_of_a_byte():
            factor = scale
            if form.scales:
                factor = self.e.name(f"{scale} * {self._of_group(form.scales, further)}", "scale")
            value = f"{factor}{_WIDER} * {self._code(bit, further)}"
            if form.m and form.minima:
                value += f" - {self.e.name(f'{least} * {self._of_group(form.minima, further)}', 'least')}{_WIDER}"
            elif form.m:
                value += f" + {least}{_WIDER}"
            yield further, self.e.name(value, "weight")

    def _load(self, place: str, wider: str = "") -> str:
        """A byte for each run, or each byte of a run; one load for all who ask for the same place."""
        if place not in self._loads:
            mask = f", mask={self.mask}{wider}, other=0" if self.mask else ""
            self._loads[place] = self.e.name(f"tl.load({self.codes} + {self.at}{wider} + {place}{mask})", "code")
        return self._loads[place]

    def _factor(self, field: gguf_fields.Factor) -> str:
        """A float of the block."""
        if field.dtype == "one":
            return self.e.name(f"tl.full([1, 1], {field.times!r}, tl.float32)", "factor")
        kind, up = ("16", 0) if field.dtype == "<f2" else ("32", 16 if field.dtype == "bf16" else 0)
        parts = [f"({self._load(str(field.byte + n))}.to(tl.uint{kind}) << {8 * n + up})" for n in range(field.bytes)]
        text = f"({' | '.join(parts)}).to(tl.float{kind}, bitcast=True).to(tl.float32)"
        return self.e.name(text if field.times == 1 else f"{text} * {field.times!r}", "factor")

    def _code(self, bit: int, further: int) -> str:
        """The number of an element, in f32."""
        q = self.shape.form.q
        assert isinstance(q, gguf_fields.BitField)
        first, *others = q.bits
        moves = [f"{p.text}{_WIDER} * {m}" for p, m in zip(self._parts, self._moves, strict=True) if p.size > 1]
        code = self._load(" + ".join([str(first.byte), *moves, "byte"]), _WIDER)
        if q.is_signed or q.float8:
            return self._whole(q, code)
        shift = first.bit + bit
        text = f"({code} >> {shift})" if shift else code
        text = f"({text} & {(1 << first.width) - 1})" if first.width + shift < 8 else text
        text, to = f"{text}.to(tl.int32)" if others else text, first.width
        parts = [*(replace(p, text=p.text + _WIDER) for p in self._parts), Part("byte", self.shape.run, 1)]
        for part in others:
            text += f" | ({self._bits(part, parts, further, _WIDER)} << {to})"
            to += part.width
        return self._number(q, self.e.name(text, "number"))

    def _of_group(self, field: gguf_fields.BitField, further: int) -> str:
        """The number of the group of an element, in f32."""
        group = self.shape.form.group
        parts = [Part(p.text, p.size, p.step // group) for p in self._parts if p.step % group == 0]
        assert all(p.step % group == 0 or p.step * p.size <= group for p in self._parts)
        if field.is_signed or field.float8:
            return self._whole(field, self._load(self._place(field.bits[0], parts, further // group)[0]))
        text, to = "", 0
        for part in field.bits:
            found = self._bits(part, parts, further // group)
            text += f" | ({found} << {to})" if to else found
            to += part.width
        return self._number(field, self.e.name(text, "number"))

    def _whole(self, field: gguf_fields.BitField, code: str) -> str:
        """A number that is a byte: with a sign, or a float."""
        if field.float8:
            return f"{self.e.needs(f'from_f8{field.float8}')}({code})"
        return f"{code}.to(tl.int8, bitcast=True).to(tl.float32)"

    def _named(self, code: str, values: Sequence[float]) -> str:
        """The value that a code names. Values that are bytes, or a power of two of them, are bytes of words, of which
        the upper bits of a code choose one; others are chosen bit by bit."""
        times = next(
            (n for n in (1, 2, 4, 8) if all(float(v * n).is_integer() and -128 <= v * n < 128 for v in values)), 0
        )
        if not times or len(values) < _WORD:
            return self._chosen(code, 0, [f"{float(value)!r}" for value in values], "0.0")
        data = [int(v * times) & 0xFF for v in values] + [0] * (-len(values) % _WORD)
        words = [
            sum(byte << 8 * i for i, byte in enumerate(data[at : at + _WORD])) for at in range(0, len(data), _WORD)
        ]
        number = self.e.name(f"{code}.to(tl.uint32)", "number")
        word = self._chosen(number, 2, [f"tl.full([1, 1, 1], {word}, tl.uint32)" for word in words], "0")
        byte = f"({word} >> (({number} & 3) << 3)).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)"
        return self.e.name(byte if times == 1 else f"{byte} * {1 / times!r}", "value")

    def _chosen(self, code: str, bit: int, level: list[str], nothing: str) -> str:
        """One of some values by bits of a code: a tree of selections, one bit at a time."""
        while len(level) > 1:
            one = self.e.name(f"(({code} >> {bit}) & 1) != 0", "bit")
            level = level + [nothing] * (len(level) % 2)
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [a if a == b else self.e.name(f"tl.where({one}, {b}, {a})", "value") for a, b in pairs]
            bit += 1
        return level[0]

    def _number(self, field: gguf_fields.BitField, code: str) -> str:
        """What a code stands for, in f32."""
        if field.values:
            return self._named(code, field.values)
        text = f"{code}.to(tl.float32)" if field.times == 1 else f"({code}.to(tl.int32) * {field.times}).to(tl.float32)"
        return f"({text} - {float(-field.add)})" if field.add else text

    def _bits(self, part: gguf_fields.Bits, parts: list[Part], further: int, wider: str = "") -> str:
        place, bit = self._place(part, parts, further)
        text = f"{self._load(place, wider)}.to(tl.int32)"
        return (
            f"(({text} >> ({bit})) & {(1 << part.width) - 1})" if bit != "0" else f"({text} & {(1 << part.width) - 1})"
        )

    @staticmethod
    def _place(bits: gguf_fields.Bits, parts: list[Part], further: int) -> tuple[str, str]:
        """The byte of a number, and its first bit: the number is the sum of what parts add, and further ones."""
        byte, bit = [str(bits.byte)], [str(bits.bit)] if bits.bit else []
        for at, (size, bytes_, moved) in enumerate(bits.digits):
            step = prod(inner for inner, *_ in bits.digits[at + 1 :])
            digit = digit_of(parts, further, step, size)
            if digit != "0":
                byte += [f"{digit} * {bytes_}"] if bytes_ else []
                bit += [f"{digit} * {moved}"] if moved else []
        return " + ".join(byte), " + ".join(bit) or "0"


def digit_of(parts: list[Part], further: int, step: int, size: int) -> str:
    """The digit of a number that is a sum of parts: `number // step % size`, without what cannot change it."""
    high = [p for p in parts if p.step % step == 0 and p.size > 1]
    low = [p for p in parts if p.step % step and p.size > 1]
    if sum((p.size - 1) * p.step for p in low) + further % step >= step:
        whole = " + ".join([*(f"{p.text} * {p.step}" for p in parts if p.size > 1), str(further)])
        return f"(({whole}) // {step} % {size})"
    kept = [(p.text, p.step // step % size, p.size) for p in high if p.step // step % size]
    rest = further // step % size
    most = sum(factor * (count - 1) for _, factor, count in kept) + rest
    terms = [f"{text} * {factor}" if factor > 1 else text for text, factor, _ in kept]
    terms += [str(rest)] if rest else []
    text = " + ".join(terms) or "0"
    if len(terms) > 1:
        text = f"({text})"
    return f"({text} % {size})" if most >= size else text
