"""Sorting integers in memory: insertion sort for short spans, merge sort, radix sort.

What is sorted are unsigned integers of `bits` bits whose high `key` bits decide and whose low bits, where there are
any, are positions that keep equal keys in order. A radix sort is stable, so it only looks at the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import copy, fill_zero, while_loop
from strata.backends.llvm.ir.registers import SMALL
from strata.core import DType

RUN = 16  # elements that insertion puts in order before runs are merged
RADIX_FROM = 768  # elements: below, clearing and adding up counters costs more than merging


@dataclass(frozen=True)
class Layout:
    """Elements as sorted: their bits, and how far up the key is."""

    bits: int
    shift: int

    @staticmethod
    def of(dtype: DType, *, with_position: bool) -> Layout:
        key = 8 * dtype.itemsize
        if not with_position:
            return Layout(key, 0)
        return Layout(64, 32) if key <= 32 else Layout(128, 64)

    @property
    def type(self) -> str:
        return f"i{self.bits}"

    @property
    def size(self) -> int:
        return self.bits // 8

    @property
    def align(self) -> int:
        return min(8, self.size)

    @property
    def name(self) -> str:
        return f"sort_{self.bits}_{self.shift}"


def key_bits(dtype: DType) -> int:
    return 8 * dtype.itemsize


def order_key(f: IrFunction, dtype: DType, raw: str, lanes: int, *, descending: bool, one_zero: bool) -> str:
    """Bits of an element as an unsigned integer with the same order: NaN last; `one_zero` makes -0 equal to 0."""
    bits = key_bits(dtype)
    type_ = vector(f"i{bits}", lanes)
    sign = 1 << (bits - 1)
    if dtype.bits == 4:  # the upper half of its byte says nothing
        raw = f.binary("and", type_, raw, constant(type_, 15))
        sign = 8
    if dtype.is_float:
        if one_zero:
            raw = f.select(type_, f.compare("eq", type_, raw, constant(type_, sign)), constant(type_, 0), raw)
        magnitude = f.binary("and", type_, raw, constant(type_, sign - 1))
        is_nan = f.compare("ugt", type_, magnitude, constant(type_, _infinity(dtype)))
        negative = f.binary("ashr", type_, raw, constant(type_, bits - 1))
        flipped = f.binary("xor", type_, raw, f.binary("or", type_, negative, constant(type_, sign)))
        raw = f.select(type_, is_nan, constant(type_, -1), flipped)
    elif dtype.kind == "int":
        raw = f.binary("xor", type_, raw, constant(type_, sign))
    return f.binary("xor", type_, raw, constant(type_, -1)) if descending else raw


def from_key(f: IrFunction, dtype: DType, key: str, lanes: int, *, descending: bool) -> str:
    """The element of a key that was made without `one_zero`."""
    bits = key_bits(dtype)
    type_ = vector(f"i{bits}", lanes)
    sign = 8 if dtype.bits == 4 else 1 << (bits - 1)
    if descending:
        key = f.binary("xor", type_, key, constant(type_, -1))
    if dtype.is_float:
        positive = f.binary("ashr", type_, key, constant(type_, bits - 1))
        mask = f.binary("or", type_, f.binary("xor", type_, positive, constant(type_, -1)), constant(type_, sign))
        return f.binary("xor", type_, key, mask)
    return f.binary("xor", type_, key, constant(type_, sign)) if dtype.kind == "int" else key


def emit_zeros(module: IrModule, dtype: DType, descending: bool, *, looks: bool) -> str:
    """Adds `void zeros(ptr source, ptr out, i64 n, i64 stride)`, which puts zeros of both signs in their order.

    `out` has the elements of `source` sorted by keys that tell -0 from 0. They are equal, so they stay as they came.
    Looking for a row's zeros takes two searches in order; where there are both, the row is read again. Where another
    thread may write the same row, what `out` has says nothing about the signs: then it does not look.
    """
    raw, name = f"i{key_bits(dtype)}", f"zeros_{dtype.name}_{'down' if descending else 'up'}{'_looking' * looks}"
    if module.has(name):
        return name
    parameters = (("ptr", "source"), ("ptr", "out"), ("i64", "n"), ("i64", "stride"))
    f = module.function(name, parameters, linkage="internal")
    sign = 1 << (key_bits(dtype) - 1)
    zero = sign - 1 if descending else sign  # the key of 0

    def load(base: str, i: Value) -> str:
        return f.load(raw, f.address(raw, base, f.mul(i, "%stride")), dtype.itemsize)

    def before(limit: int) -> str:
        """How many elements come before a key."""

        def halve(state: list[str]) -> list[Value]:
            low, high = state
            middle = f.binary("lshr", "i64", f.add(low, high), 1)
            key = order_key(f, dtype, load("%out", middle), 1, descending=descending, one_zero=True)
            less = f.compare("ult", raw, key, constant(raw, limit))
            return [f.select("i64", less, f.add(middle, 1), low), f.select("i64", less, high, middle)]

        return while_loop(f, (("i64", 0), ("i64", "%n")), lambda s: f.compare("slt", "i64", s[0], s[1]), halve)[0]

    first = before(zero)

    def rewrite() -> None:
        def one(i: str, state: list[str]) -> list[Value]:
            value = load("%source", i)
            is_zero = f.compare("eq", raw, f.binary("and", raw, value, constant(raw, sign - 1)), constant(raw, 0))
            to = f.address(raw, "%out", f.mul(state[0], "%stride"))
            f.if_(is_zero, lambda: f.store(raw, value, to, dtype.itemsize))
            return [f.add(state[0], f.convert("zext", "i1", is_zero, "i64"))]

        f.loop(0, "%n", 1, (("i64", first),), one)

    def several() -> None:
        end = before(zero + 1)

        def look() -> None:
            both = f.compare("ne", raw, load("%out", first), load("%out", f.sub(end, 1)))
            f.if_(both, rewrite)

        f.if_(f.compare("sgt", "i64", f.sub(end, first), 1), look if looks else rewrite)

    f.if_(f.compare("slt", "i64", first, "%n"), several)
    f.ret()
    return name


def _infinity(dtype: DType) -> int:
    """The largest magnitude that is not NaN."""
    if dtype.name in SMALL:
        form = SMALL[dtype.name]
        top = ((1 << form.exponent) - 1) << form.mantissa
        return top if form.has_infinity else top | ((1 << form.mantissa) - 2)
    return {32: 0x7F800000, 64: 0x7FF0000000000000}[dtype.bits]


def emit_sort(module: IrModule, layout: Layout, key: int) -> str:
    """Adds `ptr sort(ptr elements, ptr spare, i64 n)`, which returns the one of its two spans that holds the result."""
    name = f"{layout.name}_{key}"
    if module.has(name):
        return name
    _emit_insertion(module, layout)
    _emit_merge(module, layout)
    _emit_radix(module, layout, key)
    f = module.function(name, (("ptr", "a"), ("ptr", "b"), ("i64", "n")), "ptr", linkage="internal")
    spans = (("ptr", "%a"), ("ptr", "%b"), ("i64", "%n"))

    def short() -> list[str]:
        f.call("void", f"{layout.name}_insertion", ("ptr", "%a"), ("i64", "%n"))
        return ["%a"]

    def merged() -> list[str]:
        return [f.call("ptr", f"{layout.name}_merge", *spans)]

    def by_digits() -> list[str]:
        return [f.call("ptr", f"{layout.name}_radix{key}", *spans)]

    def longer() -> list[str]:
        return f.if_(f.compare("slt", "i64", "%n", RADIX_FROM), merged, by_digits, ["ptr"])

    (result,) = f.if_(f.compare("sle", "i64", "%n", 2 * RUN), short, longer, ["ptr"])
    f.ret("ptr", result)
    return name


def _load(f: IrFunction, layout: Layout, base: Value, index: Value) -> str:
    return f.load(layout.type, f.address(layout.type, base, index), layout.align)


def _store(f: IrFunction, layout: Layout, value: Value, base: Value, index: Value) -> None:
    f.store(layout.type, value, f.address(layout.type, base, index), layout.align)


def _emit_insertion(module: IrModule, layout: Layout) -> None:
    f = module.function(f"{layout.name}_insertion", (("ptr", "a"), ("i64", "n")), linkage="internal")

    def insert(i: str, _: list[str]) -> None:
        value = _load(f, layout, "%a", i)
        hole, moving, test, done = f.fresh("hole"), f.fresh("moving"), f.fresh("test"), f.fresh("done")
        before = f.block
        j, below = "%" + f.fresh("j"), "%" + f.fresh("j")
        f.branch(hole)
        f.label(hole)
        f.statement(f"{j} = phi i64 [ {i}, %{before} ], [ {below}, %{moving} ]")
        f.branch_if(f.compare("sgt", "i64", j, 0), test, done)
        f.label(test)
        f.statement(f"{below} = sub i64 {j}, 1")
        other = _load(f, layout, "%a", below)
        f.branch_if(f.compare("ugt", layout.type, other, value), moving, done)
        f.label(moving)
        _store(f, layout, other, "%a", j)
        f.branch(hole)
        f.label(done)
        _store(f, layout, value, "%a", j)

    f.loop(1, "%n", 1, (), insert)
    f.ret()


def _emit_merge(module: IrModule, layout: Layout) -> None:
    """Runs in order, then pairs of runs merged between the two spans until one is left."""
    _emit_merge_pair(module, layout)
    f = module.function(f"{layout.name}_merge", (("ptr", "a"), ("ptr", "b"), ("i64", "n")), "ptr", linkage="internal")

    def run(start: str, _: list[str]) -> None:
        count = f.smin(f.sub("%n", start), RUN)
        f.call("void", f"{layout.name}_insertion", ("ptr", f.address(layout.type, "%a", start)), ("i64", count))

    f.loop(0, "%n", RUN, (), run)

    def round_(state: list[str]) -> list[Value]:
        source, target, width = state

        def pair(start: str, _: list[str]) -> None:
            middle = f.smin(f.add(start, width), "%n")
            end = f.smin(f.add(middle, width), "%n")
            spans = [f.address(layout.type, p, at) for p, at in ((source, start), (source, middle), (target, start))]
            lengths = [f.sub(middle, start), f.sub(end, middle)]
            f.call("void", f"{layout.name}_pair", *(("ptr", p) for p in spans), *(("i64", n) for n in lengths))

        double = f.mul(width, 2)
        f.loop(0, "%n", double, (), pair)
        return [target, source, double]

    carried = (("ptr", "%a"), ("ptr", "%b"), ("i64", RUN))
    result, _, _ = while_loop(f, carried, lambda s: f.compare("slt", "i64", s[2], "%n"), round_)
    f.ret("ptr", result)


def _emit_merge_pair(module: IrModule, layout: Layout) -> None:
    parameters = (("ptr", "left"), ("ptr", "right"), ("ptr", "out"), ("i64", "nl"), ("i64", "nr"))
    f = module.function(f"{layout.name}_pair", parameters, linkage="internal")

    def both_left(state: list[str]) -> str:
        return f.binary("and", "i1", f.compare("slt", "i64", state[0], "%nl"), f.compare("slt", "i64", state[1], "%nr"))

    def take(state: list[str]) -> list[Value]:
        i, j = state
        a, b = _load(f, layout, "%left", i), _load(f, layout, "%right", j)
        right = f.compare("ult", layout.type, b, a)
        _store(f, layout, f.select(layout.type, right, b, a), "%out", f.add(i, j))
        step = f.convert("zext", "i1", right, "i64")
        return [f.sub(f.add(i, 1), step), f.add(j, step)]

    i, j = while_loop(f, (("i64", 0), ("i64", 0)), both_left, take)
    rest = f.address(layout.type, "%out", f.add(i, j))
    copy(f, rest, f.address(layout.type, "%left", i), f.mul(f.sub("%nl", i), layout.size))
    copy(f, rest, f.address(layout.type, "%right", j), f.mul(f.sub("%nr", j), layout.size))
    f.ret()


def digits_of(key: int) -> list[tuple[int, int]]:
    """(lowest bit, bits) of each digit: 11 bits, whose counters fit the first cache, or 8 for narrow keys."""
    width = 11 if key >= 32 else 8
    return [(at, min(width, key - at)) for at in range(0, key, width)]


def _emit_radix(module: IrModule, layout: Layout, key: int) -> None:
    """One pass counts all digits; then one pass a digit moves the elements, unless they all have the same one."""
    digits = digits_of(key)
    f = module.function(
        f"{layout.name}_radix{key}", (("ptr", "a"), ("ptr", "b"), ("i64", "n")), "ptr", linkage="internal"
    )
    places = [sum(1 << width for _, width in digits[:i]) for i in range(len(digits) + 1)]
    counters = f.alloca("i32", places[-1])
    fill_zero(f, counters, 4 * places[-1])

    def digit(value: str, at: int, width: int) -> str:
        shifted = (
            f.binary("lshr", layout.type, value, constant(layout.type, layout.shift + at))
            if layout.shift + at
            else value
        )
        word = f.convert("trunc" if layout.bits > 64 else "zext", layout.type, shifted, "i64")
        return f.binary("and", "i64", word, (1 << width) - 1)

    def count(i: str, _: list[str]) -> None:
        value = _load(f, layout, "%a", i)
        for place, (at, width) in zip(places, digits, strict=False):
            cell = f.address("i32", counters, f.add(digit(value, at, width), place))
            f.store("i32", f.binary("add", "i32", f.load("i32", cell, 4), 1), cell, 4)

    f.loop(0, "%n", 1, (), count)
    source, target = "%a", "%b"
    total = f.convert("trunc", "i64", "%n", "i32")
    for place, (at, width) in zip(places, digits, strict=False):
        table = f.address("i32", counters, place)
        first = f.address("i32", table, digit(_load(f, layout, source, 0), at, width))
        same = f.compare("eq", "i32", f.load("i32", first, 4), total)

        def stay(source: str = source, target: str = target) -> list[str]:
            return [source, target]

        def move(
            source: str = source, target: str = target, table: str = table, at: int = at, width: int = width
        ) -> list[str]:
            def start(i: str, state: list[str]) -> list[str]:
                cell = f.address("i32", table, i)
                number = f.load("i32", cell, 4)
                f.store("i32", state[0], cell, 4)
                return [f.binary("add", "i32", state[0], number)]

            f.loop(0, 1 << width, 1, (("i32", 0),), start)

            def place_one(i: str, _: list[str]) -> None:
                value = _load(f, layout, source, i)
                cell = f.address("i32", table, digit(value, at, width))
                to = f.load("i32", cell, 4)
                f.store("i32", f.binary("add", "i32", to, 1), cell, 4)
                _store(f, layout, value, target, f.convert("zext", "i32", to, "i64"))

            f.loop(0, "%n", 1, (), place_one)
            return [target, source]

        source, target = f.if_(same, stay, move, ["ptr", "ptr"])
    f.ret("ptr", source)
