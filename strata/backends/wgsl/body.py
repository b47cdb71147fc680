"""The body of a shader: statements of a loop nest, values from the table, memory as 32-bit words.

Elements of fewer than 32 bits lie packed in words of memory. A store of one clears and sets its own bits of the word
by two atomic operations, so that neighbours of other invocations stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

from strata.backends.wgsl.bounds import Bounds
from strata.backends.wgsl.values import (
    JOINS,
    TYPES,
    bits_of,
    convert,
    fitted,
    from_bits,
    identity,
    kind_of,
    literal,
    scalar,
)
from strata.core import Dim, DType, bool_, f16, f32, i64
from strata.kernel import (
    Axis,
    Buffer,
    Compute,
    Const,
    Expr,
    Kernel,
    Load,
    LoopBlock,
    MapLoop,
    Reduce,
    ReduceLoop,
    Scalar,
    Scan,
    Size,
    Store,
    StoreStep,
)

_OWN_NAMES = re.compile(r"(in|out|part|whole)\d+")
ELEMENTS = {"f32": "f32", "i32": "i32", "u32": "u32", "i64": "vec2<u32>", "u64": "vec2<u32>"}


class WgslBody:
    """Statements in the order in which they are made; `lanes` is how many invocations share a loop."""

    def __init__(self, kernel: Kernel, lanes: int, halves: bool) -> None:
        self.kernel, self.lanes, self.halves = kernel, lanes, halves
        self.bounds = Bounds(kernel.roots)
        self.lines: list[str] = []
        self.indent = 1
        self.scopes: list[dict[Expr, str]] = [{}]
        self.axes: dict[Axis, str] = {}
        self.states: dict[Scan, str] = {}
        self.sizes: dict[Dim, int] = {}
        self.extents: dict[Dim, None] = {}
        self.used: dict[str, Buffer] = {}
        self.shared: dict[str, None] = {}
        self.count = 0
        self.words: dict[Store, list[str]] = {}  # where an invocation has whole words: their names
        self.part = 0  # which of their elements this is

    # lines and names

    def _line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def _fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def _name_axis(self, axis: Axis) -> str:
        self.extents[axis.extent] = None
        self.axes[axis] = self._fresh(f"{axis.name}_")
        return self.axes[axis]

    def _unfold(self, number: str, axes: tuple[Axis, ...]) -> None:
        """The axes at a number that counts through all of them, the last the fastest."""
        rest = number
        for at in range(len(axes) - 1, -1, -1):
            name, extent = self._name_axis(axes[at]), self._size(axes[at].extent)
            if at == 0:
                self._line(f"let {name} = {rest};")
            else:
                self._line(f"let {name} = {rest} % {extent};")
                self._line(f"let {name}_rest = {rest} / {extent};")
                rest = f"{name}_rest"

    def _memory(self, buffer: Buffer) -> str:
        """What a buffer is called in the text: people may call theirs as WGSL calls something else."""
        self.used[buffer.name] = buffer
        if _OWN_NAMES.fullmatch(buffer.name):
            return buffer.name
        return f"buffer{self.kernel.buffers.index(buffer)}"

    @contextmanager
    def _scope(self, head: str) -> Iterator[None]:
        self._line(head + " {")
        self.indent += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.indent -= 1
        self._line("}")

    @contextmanager
    def _loop(self, axis: Axis, *, lanes: bool = False) -> Iterator[None]:
        """A loop over an axis; one that lanes share takes every so-manieth point."""
        before = dict(self.axes)
        variable = self._fresh(f"{axis.name}_")
        extent = self._size(axis.extent)
        self.extents[axis.extent] = None
        self.axes[axis] = variable
        start, step = ("i32(lane)", self.lanes) if lanes else ("0", 1)
        with self._scope(f"for (var {variable} = {start}; {variable} < {extent}; {variable} += {step})"):
            yield
        self.axes = before

    def _size(self, dim: Dim) -> str:
        if isinstance(dim, int):
            return str(dim)
        at = self.sizes.setdefault(dim, len(self.sizes))
        return f"sizes[{at // 4}][{at % 4}]"

    # blocks

    def _block(self, block: LoopBlock) -> None:
        for step in block.steps:
            self._step(step)

    def _step(self, step: Compute | ReduceLoop | MapLoop | StoreStep) -> None:
        match step:
            case Compute(node):
                self._value(node)
            case ReduceLoop():
                self._reduce(step)
            case MapLoop():
                self._map(step)
            case StoreStep(store):
                self._store(store)
            case _:
                assert_never(step)

    def _row(self, block: LoopBlock) -> None:
        """A block whose loops the invocations of a workgroup share."""
        for step in block.steps:
            match step:
                case ReduceLoop():
                    self._reduce(step, lanes=True)
                case MapLoop():
                    self._map(step, lanes=True)
                case StoreStep(store):
                    with self._scope("if (lane == 0u)"):
                        self._store(store)
                case Compute(node):
                    self._value(node)

    def _map(self, loop: MapLoop, *, lanes: bool = False) -> None:
        for scan in loop.scans:
            name = self._fresh("state")
            kind = self._scan_kind(scan)
            self._line(f"var {name}: {TYPES[kind]} = {literal(identity(scan.kind, scan.dtype), kind)};")
            self.states[scan] = name
        with self._loop(loop.axis, lanes=lanes):
            self._block(loop.body)

    def _scan_kind(self, scan: Scan) -> str:
        return kind_of(scan.dtype)

    def _scan(self, scan: Scan) -> str:
        state, kind = self.states[scan], self._scan_kind(scan)
        wide = f32 if scan.dtype.is_float else scan.dtype
        step = scalar(JOINS[scan.kind], kind, wide, [state, self._as(scan.body, kind)])
        name = self._fresh()
        read = f"let {name} = {fitted(state, scan.dtype)};"
        lines = [read, f"{state} = {step};"]
        for line in lines if scan.exclusive else lines[::-1]:
            self._line(line)
        return name

    # reductions

    def _reduce(self, loop: ReduceLoop, *, lanes: bool = False) -> None:
        parts = {r: self._begin(r) for r in loop.reduces}
        with self._loop(loop.axis, lanes=lanes):
            self._block(loop.body)
            for reduce, (value, place) in parts.items():
                self._accumulate(reduce, value, place)
        for reduce, (value, place) in parts.items():
            if lanes:
                self._share(reduce, value, place)
            if place:
                self.scopes[-1][reduce] = place
            elif reduce.dtype.is_float and reduce.dtype.bits < 32:
                name = self._fresh()
                self._line(f"let {name} = {fitted(value, reduce.dtype)};")
                self.scopes[-1][reduce] = name
            else:
                self.scopes[-1][reduce] = value

    def _body_kind(self, reduce: Reduce) -> str:
        """The class of registers that a reduction is kept in: in full, unless it is a place or a best one."""
        return self._kind(reduce.body) if reduce.kind.startswith("arg") else kind_of(reduce.body.dtype)

    def _begin(self, reduce: Reduce) -> tuple[str, str]:
        kind, dtype = self._body_kind(reduce), reduce.body.dtype
        start = identity(reduce.kind, dtype)
        if dtype is i64 and kind == "i":
            start = max(-(1 << 31), min((1 << 31) - 1, int(start)))
        value = self._fresh("acc")
        self._line(f"var {value}: {TYPES[kind]} = {literal(start, kind)};")
        place = ""
        if reduce.kind.startswith("arg"):
            place = self._fresh("at")
            self._line(f"var {place}: i32 = 0;")
        return value, place

    def _better(self, kind: str, reduce: Reduce, a: str, b: str) -> str:
        best = reduce.kind.removeprefix("arg")
        if kind == "f":
            return f"better_{best}_f({a}, {b})"
        return scalar("gt" if best == "max" else "lt", kind, bool_, [a, b])

    def _accumulate(self, reduce: Reduce, value: str, place: str) -> None:
        kind = self._body_kind(reduce)
        body = self._as(reduce.body, kind)
        if place:
            with self._scope(f"if ({self._better(kind, reduce, body, value)})"):
                self._line(f"{value} = {body};")
                self._line(f"{place} = {self.axes[reduce.axes[0]]};")
            return
        self._line(f"{value} = {self._joined(reduce, value, body)};")

    def _joined(self, reduce: Reduce, a: str, b: str) -> str:
        wide = f32 if reduce.dtype.is_float else reduce.dtype
        return scalar(JOINS[reduce.kind], self._body_kind(reduce), wide, [a, b])

    def _share(self, reduce: Reduce, value: str, place: str) -> None:
        """Join what the invocations of a workgroup have, by halves, and give the result to all of them."""
        kind = self._body_kind(reduce)
        self.shared[kind] = None
        array = f"shared_{kind}"
        if place:
            self.shared["i"] = None
        # places have their own array, unless the values are i32 as well: then those go to u32
        values, places = (array, "shared_i") if kind != "i" else ("shared_u", "shared_i")
        if place and kind == "i":
            self.shared["u"] = None
        half = self._fresh("half")
        put, get = _through(kind, values)
        self._line(f"{values}[lane] = {put.format(value)};")
        if place:
            self._line(f"{places}[lane] = {place};")
        self._line("workgroupBarrier();")
        with self._scope(f"for (var {half} = {self.lanes // 2}u; {half} > 0u; {half} = {half} / 2u)"):
            with self._scope(f"if (lane < {half})"):
                mine, other = get.format(f"{values}[lane]"), get.format(f"{values}[lane + {half}]")
                if place:
                    better = self._better(kind, reduce, "theirs", "mine")
                    worse = self._better(kind, reduce, "mine", "theirs")
                    self._line(f"let mine = {mine};")
                    self._line(f"let theirs = {other};")
                    same = f"!{worse} && {places}[lane + {half}] < {places}[lane]"
                    with self._scope(f"if ({better} || ({same}))"):
                        self._line(f"{values}[lane] = {values}[lane + {half}];")
                        self._line(f"{places}[lane] = {places}[lane + {half}];")
                else:
                    self._line(f"{values}[lane] = {put.format(self._joined(reduce, mine, other))};")
            self._line("workgroupBarrier();")
        self._line(f"{value} = {get.format(f'{values}[0]')};")
        if place:
            self._line(f"{place} = {places}[0];")
        self._line("workgroupBarrier();")

    # values

    def _kind(self, node: Expr) -> str:
        """The class of registers that holds a value."""
        if node.dtype is i64:
            return "i" if self.bounds.fits(node) else "q"
        return kind_of(node.dtype)

    def _value(self, node: Expr) -> str:
        """The text of a value, computed here if it is not known yet."""
        match node:
            case Const(value, _):
                return literal(value, self._kind(node))
            case Axis():
                return self.axes[node]
            case Size(dim):
                return self._size(dim)
            case Scalar("index" | "data", (x,)):
                return self._value(x)
        for scope in reversed(self.scopes):
            if node in scope:
                return scope[node]
        match node:
            case Load():
                made = self._load(node)
            case Scan():
                made = self._scan(node)
            case Scalar():
                made = self._fresh()
                text = self._scalar(node)
                self._line(f"let {made} = {text};")
            case _:
                raise AssertionError(f"{node!r} is computed by a loop")
        self.scopes[-1][node] = made
        return made

    def _as(self, node: Expr, kind: str) -> str:
        """A value in registers of a class: i64 values come in two."""
        text, own = self._value(node), self._kind(node)
        if own == kind or node.dtype is not i64:
            return text
        return f"i64_of_i32({text})" if kind == "q" else f"bitcast<i32>({text}.x)"

    def _scalar(self, node: Scalar) -> str:
        kind = self._kind(node)
        match node.name:
            case "select":
                condition, yes, no = node.args
                return f"select({self._as(no, kind)}, {self._as(yes, kind)}, {self._value(condition)})"
            case "cast":
                (x,) = node.args
                return convert(self._value(x), self._kind(x), kind, node.dtype)
            case "bitcast":
                (x,) = node.args
                return from_bits(bits_of(self._as(x, kind_of(x.dtype)), x.dtype), node.dtype)
        if node.args[0].dtype is i64:
            return self._whole(node, kind)
        own = kind_of(node.args[0].dtype)
        special = self._unusual(node) if own == "f" else None
        if special is not None:
            return fitted(special, node.dtype)
        text = scalar(node.name, own, node.dtype, [self._as(a, own) for a in node.args])
        return text if kind == own or node.dtype.is_bool else convert(text, own, kind, node.dtype)

    def _whole(self, node: Scalar, kind: str) -> str:
        """A function of i64 values, in registers of 32 bits where that gives the same."""
        small = all(self.bounds.fits(a) for a in node.args) and kind != "q"
        own = "i" if small else "q"
        args = [self._as(a, own) for a in node.args]
        if small and node.name in ("floordiv", "mod") and self._is_plain(node):
            return f"({args[0]} {'/' if node.name == 'floordiv' else '%'} {args[1]})"
        text = scalar(node.name, own, node.dtype, args)
        return f"bitcast<i32>({text}.x)" if own == "q" and kind == "i" else text

    def _is_plain(self, node: Scalar) -> bool:
        a, b = (self.bounds.range(x) for x in node.args)
        return a is not None and b is not None and a[0] >= 0 and b[0] > 0

    def _unusual(self, node: Scalar) -> str | None:
        """Forms of arithmetic that compilers shorten as if no number were infinite or NaN."""
        match node.name, node.args:
            case "sub", (a, b) if a is b:
                return f"sub_self({self._value(a)})"
            case "div", (a, b) if a is b:
                return f"div_self({self._value(a)})"
            case "sub", (Const(0.0, _), b):
                return f"sub_from_zero({self._value(b)})"
            case "mul", (a, Const(0.0, _) as zero):
                return f"mul_zero({self._value(a)}, {self._value(zero)})"
            case "mul", (Const(0.0, _) as zero, b):
                return f"mul_zero({self._value(b)}, {self._value(zero)})"
        return None

    # memory

    def _is_half(self, buffer: Buffer) -> bool:
        """Whether elements are f16 in memory, and converted by the device."""
        return self.halves and buffer.dtype is f16

    def _is_packed(self, buffer: Buffer) -> bool:
        """Whether several elements share a word."""
        return buffer.dtype.itemsize < 4 and not self._is_half(buffer)

    def _address(self, node: Expr) -> str:
        """An index modulo 2^32, which is all of it: buffers are not longer."""
        match node:
            case Const(value, _):
                return literal(_wrapped(int(value.real)), "i")
            case Scalar("add" | "sub" | "mul" as name, (a, b)) if node.dtype is i64 and not self._is_known(node):
                sign = {"add": "+", "sub": "-", "mul": "*"}[name]
                return f"({self._address(a)} {sign} {self._address(b)})"
        return self._as(node, "i")

    def _is_known(self, node: Expr) -> bool:
        return any(node in scope for scope in self.scopes)

    def _load(self, node: Load) -> str:
        name, kind = self._fresh(), kind_of(node.dtype)
        if node.where is None:
            self._line(f"let {name} = {self._element(node.buffer, node.index[0])};")
            return name
        condition = self._value(node.where)
        self._line(f"var {name}: {TYPES[kind]} = {literal(0, kind)};")
        with self._scope(f"if ({condition})"):
            self._line(f"{name} = {self._element(node.buffer, node.index[0])};")
        return name

    def _element(self, buffer: Buffer, index: Expr) -> str:
        memory = self._memory(buffer)
        at = self._address(index)
        if not self._is_packed(buffer):
            return f"f32({memory}[{at}])" if self._is_half(buffer) else f"{memory}[{at}]"
        place = self._fresh("at")
        self._line(f"let {place} = {at};")
        word, shift = _split(place, buffer.dtype)
        mask = (1 << (8 * buffer.dtype.itemsize)) - 1
        return from_bits(f"(({memory}[{word}] >> {shift}) & {mask}u)", buffer.dtype)

    def _store(self, store: Store) -> None:
        buffer, memory = store.buffer, self._memory(store.buffer)
        value = self._as(store.value, kind_of(buffer.dtype))
        if self._is_packed(buffer) and self.words:
            start = self.part * buffer.dtype.itemsize
            word = self.words[store][start // 4]
            self._line(f"{word} = {word} | ({bits_of(value, buffer.dtype)} << {start % 4 * 8}u);")
            return
        at = self._address(store.index[0])
        if not self._is_packed(buffer):
            self._line(f"{memory}[{at}] = {f'f16({value})' if self._is_half(buffer) else value};")
            return
        place = self._fresh("at")
        self._line(f"let {place} = {at};")
        word, shift = _split(place, buffer.dtype)
        mask = (1 << (8 * buffer.dtype.itemsize)) - 1
        self._line(f"atomicAnd(&{memory}[{word}], ~({mask}u << {shift}));")
        self._line(f"atomicOr(&{memory}[{word}], {bits_of(value, buffer.dtype)} << {shift});")


def _wrapped(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _split(place: str, dtype: DType) -> tuple[str, str]:
    """The word that an element lies in, and where in it."""
    if dtype.itemsize == 1:
        return f"{place} >> 2u", f"(u32({place} & 3) * 8u)"
    return f"{place} >> 1u", f"(u32({place} & 1) * 16u)"


def _through(kind: str, array: str) -> tuple[str, str]:
    """How a value goes into an array that invocations share, and how it comes out."""
    if kind == "b":
        return "select(0u, 1u, {})", "({} != 0u)"
    if kind == "i" and array == "shared_u":
        return "bitcast<u32>({})", "bitcast<i32>({})"
    return "{}", "{}"
