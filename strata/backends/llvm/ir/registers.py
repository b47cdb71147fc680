"""Element types in memory and in registers, and conversion between the two.

Half-width floats are computed in f32 registers and rounded when stored or cast, to their own type as well; bool is i1
in registers and a byte in memory; a complex number is two registers. Everything works on any number of lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.ir.builder import IrFunction, constant, integer_of, lanes_of, suffix, vector
from strata.core import DType, Target

Parts = tuple[str, ...]  # one register per component: two for complex numbers

_REGISTER: Final = {
    "bool": "i1",
    "i4": "i8", "u4": "i8", "i8": "i8", "u8": "i8", "i16": "i16", "u16": "i16", "i32": "i32", "u32": "i32",
    "i64": "i64", "u64": "i64", "f8e4m3": "float", "f8e5m2": "float", "f16": "float", "bf16": "float", "f32": "float",
    "f64": "double", "c64": "float", "c128": "double",
}  # fmt: skip
_MEMORY: Final = {"bool": "i8", "f8e4m3": "i8", "f8e5m2": "i8", "bf16": "i16", "f16": "i16"}


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """The layout of a float type narrower than f32."""

    exponent: int
    mantissa: int
    has_infinity: bool

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


SMALL: Final = {
    "f16": SmallFloat(5, 10, True),
    "bf16": SmallFloat(8, 7, True),
    "f8e5m2": SmallFloat(5, 2, True),
    "f8e4m3": SmallFloat(4, 3, False),
}


def register_type(dtype: DType, lanes: int = 1) -> str:
    """The LLVM type of one component in a register."""
    return vector(_REGISTER[dtype.name], lanes)


def memory_type(dtype: DType, lanes: int = 1) -> str:
    """The LLVM type of one component in memory."""
    return vector(_MEMORY.get(dtype.name, _REGISTER[dtype.name]), lanes)


def component_bytes(dtype: DType) -> int:
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def register_bytes(dtype: DType) -> int:
    """Bytes of one element while it is computed with; decides how many fit a vector register."""
    return 4 if dtype.name in SMALL else 1 if dtype.is_bool else component_bytes(dtype)


def from_memory(f: IrFunction, dtype: DType, value: str, lanes: int, target: Target) -> str:
    """One component, as loaded, to its register form."""
    memory, register = memory_type(dtype, lanes), register_type(dtype, lanes)
    if dtype.is_bool:
        return f.compare("ne", memory, value, "0" if lanes == 1 else "zeroinitializer")
    if dtype.bits == 4:  # a byte each, whose upper half says nothing
        high = f.binary("shl", memory, value, constant(memory, 4))
        return f.binary("ashr" if dtype.kind == "int" else "lshr", memory, high, constant(memory, 4))
    if dtype.name not in SMALL:
        return value
    if dtype.name == "f16" and target.has_f16c:
        half = vector("half", lanes)
        made = f.convert("fpext", half, f.convert("bitcast", memory, value, half), register)
    else:
        made = _decode(f, SMALL[dtype.name], memory, value, register)
    f.same[made, dtype.name] = value  # stored again as it came
    return made


def to_memory(f: IrFunction, dtype: DType, value: str, lanes: int, target: Target) -> str:
    """One component from its register form to what is stored."""
    memory, register = memory_type(dtype, lanes), register_type(dtype, lanes)
    if dtype.is_bool:
        return f.convert("zext", register, value, memory)
    if dtype.bits == 4:
        return f.binary("and", memory, value, constant(memory, 15))
    if dtype.name not in SMALL:
        return value
    if (value, dtype.name) in f.same:
        return f.same[value, dtype.name]
    if dtype.name == "f16" and target.has_f16c:
        half = vector("half", lanes)
        return f.convert("bitcast", half, f.convert("fptrunc", register, value, half), memory)
    if dtype.name == "bf16":
        by_instruction = target.has("avx512bf16") and target.has_avx512 and lanes >= 4
        return _encode_bf16_by_instruction(f, value, lanes) if by_instruction else _encode_bf16(f, value, lanes)
    return _encode(f, SMALL[dtype.name], memory, value, register)


def round_through(f: IrFunction, dtype: DType, value: str, lanes: int, target: Target, *, is_own: bool = False) -> str:
    """A register rounded to what its type can hold; with `is_own`, one that was computed of numbers of that type."""
    if dtype.name not in SMALL:
        return value
    if is_own and dtype.name == "bf16":
        return _round_bf16(f, value, lanes)
    return from_memory(f, dtype, to_memory(f, dtype, value, lanes, target), lanes, target)


def _decode(f: IrFunction, form: SmallFloat, memory: str, value: str, register: str) -> str:
    wide = integer_of(register)
    bits = f.convert("zext", memory, value, wide)
    shift = 23 - form.mantissa
    if form.exponent == 8:
        return f.convert("bitcast", wide, f.binary("shl", wide, bits, constant(wide, 16)), register)
    magnitude = f.binary("and", wide, bits, constant(wide, (1 << (form.bits - 1)) - 1))
    sign = f.binary("shl", wide, f.binary("lshr", wide, bits, constant(wide, form.bits - 1)), constant(wide, 31))
    scaled = f.convert("bitcast", wide, f.binary("shl", wide, magnitude, constant(wide, shift)), register)
    number = f.binary("fmul", register, scaled, constant(register, 2.0 ** (127 - form.bias)))
    number = f.convert("bitcast", register, number, wide)
    top = ((1 << form.exponent) - 1) << form.mantissa
    if form.has_infinity:
        special = f.compare("uge", wide, magnitude, constant(wide, top))
        inf_or_nan = f.binary("or", wide, f.convert("bitcast", register, scaled, wide), constant(wide, 0x7F800000))
    else:
        special = f.compare("eq", wide, magnitude, constant(wide, (1 << (form.bits - 1)) - 1))
        inf_or_nan = constant(wide, 0x7FC00000)
    number = f.select(wide, special, inf_or_nan, number)
    return f.convert("bitcast", wide, f.binary("or", wide, number, sign), register)


def _encode(f: IrFunction, form: SmallFloat, memory: str, value: str, register: str) -> str:
    """Rounds to nearest, ties to even; overflow gives infinity, or NaN where there is none."""
    wide = integer_of(register)
    bits = f.convert("bitcast", register, value, wide)
    magnitude = f.binary("and", wide, bits, constant(wide, 0x7FFFFFFF))
    sign = f.binary("lshr", wide, f.binary("xor", wide, bits, magnitude), constant(wide, 32 - form.bits))
    shift = 23 - form.mantissa
    odd = f.binary("and", wide, f.binary("lshr", wide, magnitude, constant(wide, shift)), constant(wide, 1))
    rounded = f.binary("add", wide, f.binary("add", wide, magnitude, constant(wide, (1 << (shift - 1)) - 1)), odd)
    normal = f.binary("lshr", wide, rounded, constant(wide, shift))
    if form.exponent < 8:
        normal = f.binary("sub", wide, normal, constant(wide, (127 - form.bias) << form.mantissa))
        magic = 2.0 ** (1 - form.bias - form.mantissa + 23)
        small = f.binary("fadd", register, f.convert("bitcast", wide, magnitude, register), constant(register, magic))
        small = f.convert("bitcast", register, small, wide)
        base = f.convert("bitcast", register, constant(register, magic), wide)
        small = f.binary("sub", wide, small, base)
        least = constant(wide, (127 + 1 - form.bias) << 23)
        normal = f.select(wide, f.compare("ult", wide, magnitude, least), small, normal)
    top = ((1 << form.exponent) - 1) << form.mantissa
    largest, nan = (top, top | (1 << (form.mantissa - 1))) if form.has_infinity else (top | 7, top | 7)
    over = constant(wide, top if form.has_infinity else largest)
    normal = f.select(wide, f.compare("ugt", wide, normal, over), over, normal)
    is_nan = f.compare("ugt", wide, magnitude, constant(wide, 0x7F800000))
    normal = f.select(wide, is_nan, constant(wide, nan), normal)
    return f.convert("trunc", wide, f.binary("or", wide, normal, sign), memory)


def _round_bf16(f: IrFunction, value: str, lanes: int) -> str:
    """As `_encode_bf16`, in place: fewer steps than there and back. A NaN that was computed ends with zeros, as those
    of bf16 and those of processors do, and stays one."""
    wide, register = vector("i32", lanes), vector("float", lanes)
    bits = f.convert("bitcast", register, value, wide)
    odd = f.binary("and", wide, f.binary("lshr", wide, bits, constant(wide, 16)), constant(wide, 1))
    rounded = f.binary("add", wide, f.binary("add", wide, bits, constant(wide, 0x7FFF)), odd)
    return f.convert("bitcast", wide, f.binary("and", wide, rounded, constant(wide, -1 << 16)), register)


def _encode_bf16(f: IrFunction, value: str, lanes: int) -> str:
    """The upper half of an f32, rounded to nearest, ties to even; what rounds up from the largest is infinity."""
    wide, register = vector("i32", lanes), vector("float", lanes)
    bits = f.convert("bitcast", register, value, wide)
    odd = f.binary("and", wide, f.binary("lshr", wide, bits, constant(wide, 16)), constant(wide, 1))
    rounded = f.binary("add", wide, f.binary("add", wide, bits, constant(wide, 0x7FFF)), odd)
    nan = f.binary("or", wide, f.binary("and", wide, bits, constant(wide, 1 << 31)), constant(wide, 0x7FC00000))
    kept = f.select(wide, f.compare("uno", register, value, value), nan, rounded)
    return f.convert("trunc", wide, f.binary("lshr", wide, kept, constant(wide, 16)), vector("i16", lanes))


def _encode_bf16_by_instruction(f: IrFunction, value: str, lanes: int) -> str:
    """The same with the instruction for it, which takes denormals for zeros: they are rounded as 1 + a fraction."""
    register, memory = vector("float", lanes), vector("i16", lanes)
    if lanes > 16:
        return f.by_halves(register, value, memory, lambda half: _encode_bf16_by_instruction(f, half, lanes // 2))
    wide = vector("i32", lanes)
    bits = f.convert("bitcast", register, value, wide)
    exponent = f.binary("and", wide, bits, constant(wide, 0x7F800000))
    small = f.compare("eq", wide, exponent, constant(wide, 0))
    lifted = f.binary("or", wide, bits, constant(wide, 0x3F800000))
    taken = f.convert("bitcast", wide, f.select(wide, small, lifted, bits), register)
    if lanes == 4:  # the instruction for four fills its register with zeros
        made = f.call(
            "<8 x bfloat>", "llvm.x86.avx512bf16.mask.cvtneps2bf16.128",
            (register, taken), ("<8 x bfloat>", "zeroinitializer"), ("<4 x i1>", constant("<4 x i1>", 1)),
        )  # fmt: skip
        made = f.shuffle("<8 x bfloat>", made, "poison", range(4))
    else:
        made = f.call(vector("bfloat", lanes), f"llvm.x86.avx512bf16.cvtneps2bf16.{lanes * 32}", (register, taken))
    lift = f.select(memory, small, constant(memory, 0x3F80), constant(memory, 0))
    return f.binary("sub", memory, f.convert("bitcast", vector("bfloat", lanes), made, memory), lift)


def interleave(f: IrFunction, type_: str, parts: Parts, lanes: int) -> str:
    """Two registers as one vector in memory order: re im re im."""
    picks = [lane + lanes * part for lane in range(lanes) for part in range(2)]
    if lanes == 1:
        pair = vector(type_, 2)
        first = f.op(f"insertelement {pair} poison, {type_} {parts[0]}, i64 0")
        return f.op(f"insertelement {pair} {first}, {type_} {parts[1]}, i64 1")
    return f.shuffle(type_, parts[0], parts[1], picks)


def deinterleave(f: IrFunction, element: str, value: str, lanes: int) -> Parts:
    pair = vector(element, 2 * lanes)
    if lanes == 1:
        return f.extract(pair, value, 0), f.extract(pair, value, 1)
    return tuple(f.shuffle(pair, value, "poison", range(part, 2 * lanes, 2)) for part in range(2))


def picked(f: IrFunction, type_: str, registers: Sequence[str], places: Sequence[tuple[int, int]]) -> str:
    """A register of lanes (register, lane) of others."""
    lanes = len(places)
    made = registers[0]
    for number in range(1, max(2, len(registers))):
        other = registers[number] if number < len(registers) else "poison"
        picks = [
            lane if r < number and number > 1 else at if r == 0 else lanes + at if r == number else 0
            for lane, (r, at) in enumerate(places)
        ]
        made = f.shuffle(type_, made, other, picks)
    return made


def woven(f: IrFunction, type_: str, registers: Sequence[str]) -> list[str]:
    """The first lanes of all registers, then the second ones, and so on: as many registers again."""
    count, lanes = len(registers), lanes_of(type_)
    if count == 1:
        return list(registers)
    if count % 2:
        places = [divmod(n, count)[::-1] for n in range(count * lanes)]
        return [picked(f, type_, registers, places[at : at + lanes]) for at in range(0, count * lanes, lanes)]
    made = []
    for a, b in zip(woven(f, type_, registers[::2]), woven(f, type_, registers[1::2]), strict=True):
        pairs = [lane + part * lanes for lane in range(lanes) for part in range(2)]
        made += [f.shuffle(type_, a, b, pairs[:lanes]), f.shuffle(type_, a, b, pairs[lanes:])]
    return made


def columns_of(f: IrFunction, type_: str, registers: Sequence[str]) -> tuple[str, ...]:
    """Lanes that are as far apart as there are registers, which are a power of two: the reverse of `woven`."""
    if len(registers) == 1:
        return tuple(registers)
    pairs = list(zip(registers[::2], registers[1::2], strict=True))
    even, odd = (
        columns_of(f, type_, [f.shuffle(type_, a, b, range(part, 2 * lanes_of(type_), 2)) for a, b in pairs])
        for part in range(2)
    )
    return tuple(column for both in zip(even, odd, strict=True) for column in both)


def gather(f: IrFunction, type_: str, pointers: str, align: int, mask: str) -> str:
    """A load per lane through a vector of addresses; lanes that are masked out give 0 and are not read."""
    lanes = type_[1 : type_.index(" ")]
    arguments = (
        (f"<{lanes} x ptr>", f"align {align} {pointers}"),
        (f"<{lanes} x i1>", mask),
        (type_, "zeroinitializer"),
    )
    return f.call(type_, f"llvm.masked.gather.{suffix(type_)}.v{lanes}p0", *arguments)


def scatter(f: IrFunction, type_: str, value: str, pointers: str, align: int, mask: str) -> None:
    lanes = type_[1 : type_.index(" ")]
    arguments = ((type_, value), (f"<{lanes} x ptr>", f"align {align} {pointers}"), (f"<{lanes} x i1>", mask))
    f.call("void", f"llvm.masked.scatter.{suffix(type_)}.v{lanes}p0", *arguments)
