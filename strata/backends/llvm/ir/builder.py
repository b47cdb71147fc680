"""A builder of LLVM IR text: types, constants, functions, modules with their declarations.

Types are strings (`i64`, `ptr`, `float`, `<8 x float>`); values are strings (`%t3`, a constant) or, where the type is
`i64`, Python ints. Every method that makes a value returns its name. Nothing here knows a dtype, a kernel or a CPU.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

Value = str | int
Typed = tuple[str, Value]

_VECTOR: Final = re.compile(r"<(\d+) x (.+)>\Z")
_SUFFIX: Final = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}
FLOATS: Final = ("half", "bfloat", "float", "double")
BITS: Final = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
_of_types = lru_cache(maxsize=1024)  # a program has few types, and every instruction names some


@_of_types
def vector(element: str, lanes: int) -> str:
    """`<8 x float>`; the plain element for one lane."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


@_of_types
def element_of(type_: str) -> str:
    match = _VECTOR.match(type_)
    return match[2] if match else type_


@_of_types
def lanes_of(type_: str) -> int:
    match = _VECTOR.match(type_)
    return int(match[1]) if match else 1


@_of_types
def with_element(type_: str, element: str) -> str:
    """The type with as many lanes and another element."""
    return vector(element, lanes_of(type_))


@_of_types
def bits_of(type_: str) -> int:
    """Bits of one element."""
    element = element_of(type_)
    return BITS[element] if element in BITS else int(element[1:])


@_of_types
def integer_of(type_: str) -> str:
    """The integer type (or vector) with the bits of a float type."""
    return with_element(type_, f"i{bits_of(type_)}")


@_of_types
def suffix(type_: str) -> str:
    """How intrinsics spell a type: `v8f32`."""
    lanes, element = lanes_of(type_), element_of(type_)
    return (f"v{lanes}" if lanes > 1 else "") + _SUFFIX.get(element, element)


@_of_types
def is_float(type_: str) -> bool:
    return element_of(type_) in FLOATS


def constant(type_: str, value: float) -> str:
    """A constant of a scalar type, or the same value in every lane of a vector type."""
    element = element_of(type_)
    text = _scalar_constant(element, value)
    return text if element == type_ else f"splat ({element} {text})"


def _only_lane(mask: Value) -> int | None:
    """The one lane that is set in a mask which is written out."""
    lanes = str(mask).strip("<>").split(", ") if str(mask).startswith("<i1") else []
    return lanes.index("i1 true") if lanes.count("i1 true") == 1 else None


def vector_constant(element: str, values: Sequence[float | int]) -> str:
    if element in FLOATS:
        return _float_constants(element, struct.pack(f"{len(values)}d", *values))
    return "<" + ", ".join(f"{element} {_scalar_constant(element, v)}" for v in values) + ">"


@lru_cache(maxsize=256)
def _float_constants(element: str, numbers: bytes) -> str:
    """A vector of floats by the bits of its numbers, which tell 0 from -0: a table in registers is used many times."""
    values = struct.unpack(f"{len(numbers) // 8}d", numbers)
    return "<" + ", ".join(f"{element} {_scalar_constant(element, v)}" for v in values) + ">"


def _scalar_constant(element: str, value: float) -> str:
    match element:
        case "float":
            return f"0x{_float_as_double_bits(value):016X}"
        case "double":
            return f"0x{struct.pack('>d', value).hex().upper()}"
        case "half":
            return f"0xH{struct.pack('>e', value).hex().upper()}"
        case "bfloat":
            return f"0xR{struct.pack('>f', value)[:2].hex().upper()}"
        case "i1":
            return "true" if value else "false"
        case "ptr":
            return "null"
    bits = int(element[1:])
    whole = int(value) & ((1 << bits) - 1)
    return str(whole - (1 << bits) if whole >> (bits - 1) else whole)


def _float_as_double_bits(value: float) -> int:
    if math.isnan(value):
        return 0x7FF8000000000000
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    return int.from_bytes(struct.pack(">d", rounded), "big")


class IrModule:
    """Functions, constants and the declarations they need, printed as one LLVM module."""

    def __init__(self, triple: str = "") -> None:
        self.triple = triple
        self.declarations: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._functions: dict[str, IrFunction | str] = {}

    def function(
        self,
        name: str,
        parameters: Sequence[tuple[str, str]],
        result: str = "void",
        *,
        attributes: str = "nounwind",
        linkage: str = "",
    ) -> IrFunction:
        """A new function; parameters are (type with attributes, name without %)."""
        made = IrFunction(self, name, tuple(parameters), result, attributes, linkage)
        self._functions[name] = made
        return made

    def outlined(self, name: str, parameters: Sequence[tuple[str, str]]) -> IrFunction:
        """A new function for other functions of this module, which is never inlined: its code exists once."""
        return self.function(name, parameters, attributes="nounwind noinline", linkage="internal")

    def add_text(self, name: str, text: str) -> None:
        """A function written out by hand; adding the same name again changes nothing."""
        self._functions.setdefault(name, text)

    def has(self, name: str) -> bool:
        return name in self._functions

    def declare(self, name: str, result: str, arguments: Sequence[str], *, variadic: bool = False) -> None:
        """Declares an outside function, unless that was done before."""
        if name not in self.declarations:
            tail = ["..."] if variadic else []
            self.declarations[name] = f"declare {result} @{name}({', '.join([*arguments, *tail])})"

    def table(self, element: str, values: Sequence[float | int]) -> str:
        """A private constant array; equal arrays are shared. Returns its address."""
        body = ", ".join(f"{element} {_scalar_constant(element, v)}" for v in values)
        key = f"[{len(values)} x {element}] [{body}]"
        return self._globals.setdefault(key, f"@table{len(self._globals)}")

    def text(self) -> str:
        parts = [f'target triple = "{self.triple}"'] if self.triple else []
        parts += [f"{name} = private unnamed_addr constant {body}, align 64" for body, name in self._globals.items()]
        parts += [text for name, text in self.declarations.items() if name not in self._functions]
        parts += [f if isinstance(f, str) else f.text() for f in self._functions.values()]
        return "\n".join(parts) + "\n"


class IrFunction:
    """One function under construction. Statements go to the current block; `alloca` goes to the entry block."""

    def __init__(
        self,
        module: IrModule,
        name: str,
        parameters: tuple[tuple[str, str], ...],
        result: str,
        attributes: str,
        linkage: str,
    ) -> None:
        self.module = module
        self.name = name
        self.block = "entry"
        self._parameters = parameters
        self._result = result
        self._attributes = attributes
        self._linkage = linkage
        self._count = 0
        self._entry: list[str] = []
        self._lines: list[str] = []
        self.same: dict[tuple[str, str], str] = {}  # other forms of values, by value and form, that were made before

    def fresh(self, prefix: str = "t") -> str:
        """A name not used before, without the %."""
        self._count += 1
        return f"{prefix}{self._count}"

    def op(self, text: str) -> str:
        """Adds `%t = text` and returns `%t`."""
        self._count += 1
        result = f"%t{self._count}"
        self._lines.append(f"  {result} = {text}")
        return result

    def statement(self, text: str) -> None:
        self._lines.append("  " + text)

    def label(self, name: str) -> None:
        """Starts a block; the one before must have ended in a terminator."""
        self._lines.append(f"{name}:")
        self.block = name

    def branch(self, target: str) -> None:
        self.statement(f"br label %{target}")

    def branch_if(self, condition: Value, then: str, otherwise: str) -> None:
        self.statement(f"br i1 {condition}, label %{then}, label %{otherwise}")

    def ret(self, type_: str = "void", value: Value = "") -> None:
        self.statement(f"ret {type_} {value}".rstrip())

    # index arithmetic on i64, folded when both sides are known

    def add(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0:
            return b
        return a if b == 0 else self.op(f"add nsw i64 {a}, {b}")

    def sub(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if b == 0 else self.op(f"sub nsw i64 {a}, {b}")

    def mul(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 0 or b == 0:
            return 0
        if a == 1:
            return b
        return a if b == 1 else self.op(f"mul nsw i64 {a}, {b}")

    def smin(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return self.intrinsic("smin", "i64", a, b)

    def smax(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return self.intrinsic("smax", "i64", a, b)

    def divided(self, value: Value, by: Value) -> tuple[Value, Value]:
        """Quotient and remainder of numbers that are not negative."""
        quotient = self.op(f"udiv i64 {value}, {by}")
        return quotient, self.sub(value, self.mul(quotient, by))

    def ceil_div(self, value: Value, by: Value) -> str:
        """The quotient of numbers that are not negative, rounded up."""
        return self.op(f"udiv i64 {self.add(value, self.sub(by, 1))}, {by}")

    def digits(self, number: Value, sizes: Sequence[Value]) -> list[Value]:
        """The number of an element as its place along each axis, the last one fastest; before them, what is left."""
        places: list[Value] = []
        for size in reversed(sizes):
            number, place = self.divided(number, size)
            places.insert(0, place)
        return [number, *places]

    def round_down(self, a: Value, multiple: int) -> Value:
        """The largest multiple of a power of two that is at most `a` (a ≥ 0)."""
        assert multiple & (multiple - 1) == 0
        return a - a % multiple if isinstance(a, int) else self.op(f"and i64 {a}, {-multiple}")

    # memory

    def address(self, element: str, base: Value, index: Value) -> str:
        """The address of base[index]."""
        return str(base) if index == 0 else self.op(f"getelementptr inbounds {element}, ptr {base}, i64 {index}")

    # A mask that is known to have one lane: LLVM 22 would store all bytes of what was narrowed to the element type.

    def load(
        self, type_: str, address: Value, align: int, mask: Value | None = None, otherwise: str = "zeroinitializer", *,
        flags: str = "",
    ) -> str:  # fmt: skip
        """What lies at an address; lanes outside the mask are not read, and are as `otherwise`."""
        if mask is None:
            return self.op(f"load {type_}, ptr {address}, align {align}{flags}")
        if (lane := _only_lane(mask)) is not None:
            element = element_of(type_)
            return self.insert(type_, otherwise, self.load(element, self.address(element, address, lane), align), lane)
        arguments = (("ptr", f"align {align} {address}"), (f"<{lanes_of(type_)} x i1>", mask), (type_, otherwise))
        return self.call(type_, f"llvm.masked.load.{suffix(type_)}.p0", *arguments)

    def store(
        self, type_: str, value: Value, address: Value, align: int, mask: Value | None = None, *,
        nontemporal: bool = False,
    ) -> None:  # fmt: skip
        """Writes a value; lanes outside the mask are left as they are."""
        if mask is None:
            tail = ", !nontemporal !{i32 1}" if nontemporal else ""
            self.statement(f"store {type_} {value}, ptr {address}, align {align}{tail}")
        elif (lane := _only_lane(mask)) is not None:
            element = element_of(type_)
            self.store(element, self.extract(type_, value, lane), self.address(element, address, lane), align)
        else:
            arguments = ((type_, value), ("ptr", f"align {align} {address}"), (f"<{lanes_of(type_)} x i1>", mask))
            self.call("void", f"llvm.masked.store.{suffix(type_)}.p0", *arguments)

    def mask_below(self, lanes: int, count: Value) -> str:
        """Lanes whose number is less than `count`."""
        if isinstance(count, int):
            return vector_constant("i1", [lane < count for lane in range(lanes)])
        word = vector("i32", lanes)
        limit = self.splat(word, self.convert("trunc", "i64", count, "i32"))
        return self.compare("slt", word, vector_constant("i32", range(lanes)), limit)

    def prefetch(self, address: Value, *, locality: int = 3, write: bool = False) -> None:
        arguments = (("ptr", address), ("i32", int(write)), ("i32", locality), ("i32", 1))
        self.call("void", "llvm.prefetch.p0", *arguments)

    def keep_order(self) -> None:
        """Reads and hints that come before it stay before it. LLVM gathers hints at the end of a block."""
        self.statement('fence syncscope("singlethread") seq_cst')  # no instruction

    def alloca(self, element: str, count: int = 1, align: int = 64) -> str:
        """Stack memory for the whole call, whatever loop asks for it."""
        name = "%" + self.fresh("stack")
        self._entry.append(f"  {name} = alloca {element}, i64 {count}, align {align}")
        return name

    # calls

    def call(self, result: str, name: str, *arguments: Typed, flags: str = "") -> str:
        """A call by name; intrinsics and outside functions are declared on the way. `void` returns ''."""
        if name not in self.module.declarations:
            self.module.declare(name, result, [t for t, _ in arguments])
        text = f"call {flags + ' ' if flags else ''}{result} @{name}({', '.join(f'{t} {v}' for t, v in arguments)})"
        if result == "void":
            self.statement(text)
            return ""
        return self.op(text)

    def call_address(self, result: str, address: Value, *arguments: Typed) -> str:
        """A call through a pointer."""
        text = f"call {result} {address}({', '.join(f'{t} {v}' for t, v in arguments)})"
        if result == "void":
            self.statement(text)
            return ""
        return self.op(text)

    def intrinsic(self, name: str, type_: str, *arguments: Value, flags: str = "") -> str:
        """`llvm.<name>.<type>` whose operands and result all have one type."""
        return self.call(type_, f"llvm.{name}.{suffix(type_)}", *((type_, a) for a in arguments), flags=flags)

    def fma(self, type_: str, a: Value, b: Value, c: Value) -> str:
        """a * b + c, rounded once."""
        return self.intrinsic("fma", type_, a, b, c)

    # arithmetic on values of any type

    def binary(self, operation: str, type_: str, a: Value, b: Value) -> str:
        """One instruction with two operands of one type: `fadd`, `mul nsw`, `lshr`…"""
        return self.op(f"{operation} {type_} {a}, {b}")

    def both(self, a: str, b: str) -> str:
        """Whether two conditions hold, of which the first may be none."""
        return b if a == "true" else self.binary("and", "i1", a, b)

    def compare(self, predicate: str, type_: str, a: Value, b: Value) -> str:
        """`olt`-like predicates compare floats, `slt`-like ones integers and pointers."""
        return self.op(f"{'fcmp' if is_float(type_) else 'icmp'} {predicate} {type_} {a}, {b}")

    def select(self, type_: str, condition: Value, then: Value, otherwise: Value, *, uniform: bool = False) -> str:
        """Lane by lane; `uniform` says that the condition is a single i1."""
        mask = "i1" if uniform else with_element(type_, "i1")
        return self.op(f"select {mask} {condition}, {type_} {then}, {type_} {otherwise}")

    def convert(self, operation: str, from_type: str, value: Value, to_type: str) -> str:
        """`sitofp`, `fptrunc`, `bitcast`…; the value itself when the types are equal."""
        return str(value) if from_type == to_type else self.op(f"{operation} {from_type} {value} to {to_type}")

    # vectors

    def splat(self, type_: str, scalar: Value) -> str:
        """One scalar in every lane of the vector type."""
        lanes, element = lanes_of(type_), element_of(type_)
        if lanes == 1:
            return str(scalar)
        first = self.op(f"insertelement {type_} poison, {element} {scalar}, i64 0")
        return self.op(f"shufflevector {type_} {first}, {type_} poison, <{lanes} x i32> zeroinitializer")

    def extract(self, type_: str, value: Value, lane: Value) -> str:
        return self.op(f"extractelement {type_} {value}, i64 {lane}")

    def insert(self, type_: str, value: Value, scalar: Value, lane: Value) -> str:
        return self.op(f"insertelement {type_} {value}, {element_of(type_)} {scalar}, i64 {lane}")

    def shuffle(self, type_: str, a: Value, b: Value, lanes: Sequence[int]) -> str:
        picks = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.op(f"shufflevector {type_} {a}, {type_} {b}, <{len(lanes)} x i32> <{picks}>")

    def by_halves(self, type_: str, value: Value, result: str, make: Callable[[str], str]) -> str:
        """A vector of type `result` made from the two halves of another, each by itself."""
        half = lanes_of(type_) // 2
        picks = (range(half), range(half, 2 * half))
        low, high = (make(self.shuffle(type_, value, "poison", lanes)) for lanes in picks)
        return self.shuffle(vector(element_of(result), half), low, high, range(2 * half))

    def fold_lanes(self, type_: str, value: Value, combine: Callable[[str, str, str], str]) -> str:
        """All lanes combined into one scalar by halving; combine(type, a, b) -> value. The order is fixed."""
        lanes, element = lanes_of(type_), element_of(type_)
        current = str(value)
        while lanes > 1:
            half = lanes // 2
            whole, part = vector(element, lanes), f"<{half} x {element}>"
            low = self.shuffle(whole, current, "poison", range(half))
            high = self.shuffle(whole, current, "poison", range(half, lanes))
            if half == 1:
                low, high = self.extract(part, low, 0), self.extract(part, high, 0)
            current = combine(vector(element, half), low, high)
            lanes = half
        return current

    # control

    def loop(
        self,
        low: Value,
        high: Value,
        step: Value,
        carried: Sequence[Typed],
        body: Callable[[str, list[str]], Sequence[Value] | None],
    ) -> list[str]:
        """`for i in range(low, high, step)` with carried values; body(i, values) -> next values. Returns the last."""
        if isinstance(low, int) and isinstance(high, int) and isinstance(step, int) and low < high <= low + step:
            results = list(body(str(low), [str(start) for _, start in carried]) or ())  # one turn
            assert len(results) == len(carried), "a loop body returns one value for each carried one"
            return [str(result) for result in results]
        head, inside, done = self.fresh("head"), self.fresh("body"), self.fresh("done")
        index, following = "%" + self.fresh("i"), "%" + self.fresh("i")
        names = ["%" + self.fresh("c") for _ in carried]
        before = self.block
        self.branch(head)
        self.label(head)
        position = len(self._lines)
        self._lines.append("")
        self.branch_if(self.op(f"icmp slt i64 {index}, {high}"), inside, done)
        self.label(inside)
        results = list(body(index, names) or ())
        assert len(results) == len(carried), "a loop body returns one value for each carried one"
        self.statement(f"{following} = add nsw i64 {index}, {step}")
        last = self.block
        self.branch(head)
        phis = [f"  {index} = phi i64 [ {low}, %{before} ], [ {following}, %{last} ]"]
        phis += [
            f"  {name} = phi {type_} [ {start}, %{before} ], [ {result}, %{last} ]"
            for name, (type_, start), result in zip(names, carried, results, strict=True)
        ]
        self._lines[position] = "\n".join(phis)
        self.label(done)
        return names

    def vectors(self, count: Value, lanes: int, some: Callable[[Value, str | None], None]) -> None:
        """some(at, mask) for this many elements: whole vectors in a loop, then what is left under a mask."""
        whole = self.round_down(count, lanes)
        self.loop(0, whole, lanes, [], lambda at, _: some(at, None))
        rest = self.sub(count, whole)
        if isinstance(rest, int):
            if rest:
                some(whole, self.mask_below(lanes, rest))
        elif lanes > 1:
            self.if_(self.compare("sgt", "i64", rest, 0), lambda: some(whole, self.mask_below(lanes, rest)))

    def fill(self, type_: str, to: Value, count: Value, value: Value) -> None:
        """The same element, or vector of them, at `count` elements from an address on."""
        element, size = element_of(type_), bits_of(type_) // 8

        def one(at: str, _: list[str]) -> None:
            self.store(type_, value, self.address(element, to, at), size)

        self.loop(0, count, lanes_of(type_), [], one)

    def if_(
        self,
        condition: Value,
        then: Callable[[], Sequence[Value] | None],
        otherwise: Callable[[], Sequence[Value] | None] | None = None,
        types: Sequence[str] = (),
    ) -> list[str]:
        """Runs one of two bodies; with `types`, both return values of those types, and the result is those chosen."""
        yes, no, done = self.fresh("then"), self.fresh("else"), self.fresh("endif")
        self.branch_if(condition, yes, no if otherwise else done)
        self.label(yes)
        then_values = list(then() or ())
        then_block = self.block
        self.branch(done)
        else_values: list[Value] = []
        else_block = ""
        if otherwise:
            self.label(no)
            else_values = list(otherwise() or ())
            else_block = self.block
            self.branch(done)
        self.label(done)
        assert len(then_values) == len(else_values) == len(types) or not types
        return [
            self.op(f"phi {type_} [ {a}, %{then_block} ], [ {b}, %{else_block} ]")
            for type_, a, b in zip(types, then_values, else_values, strict=True)
        ]

    def text(self) -> str:
        parameters = ", ".join(f"{type_} %{name}" for type_, name in self._parameters)
        linkage = self._linkage + " " if self._linkage else ""
        head = f"define {linkage}{self._result} @{self.name}({parameters}) {self._attributes} {{"
        return "\n".join([head, "entry:", *self._entry, *self._lines, "}"])
