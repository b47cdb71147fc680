"""Kernels as text, a line per value; `parse_kernel(show_kernel(k))` is `k`. The text is a kernel's cache key.

kernel @softmax(x: f32[R, 8]) -> y: f32[R, 8] {
  size R in 1..
  axis i0 in R
  axis i1 in 8
  axis r0a in 8
  %0 = x[i0, i1]
  %1 = x[i0, r0a]
  %2 = max %1 over r0a
  %3 = sub(%0, %2)
  store y[i0, i1] = %3 over i0, i1
}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from strata.core import Dim, DType, Symbol, as_dtype, i64, parse_dim, sym, symbols
from strata.errors import DTypeError, OptionError, ParseError
from strata.kernel.ir import (
    REDUCTIONS,
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Size,
    Store,
    all_axes,
    postorder,
)
from strata.kernel.order import ORDERS
from strata.kernel.scalars import SCALARS
from strata.kernel.schedule import parse_schedule


def show_kernel(kernel: Kernel) -> str:
    """The text of a kernel, written once."""
    if not kernel._text:
        object.__setattr__(kernel, "_text", _shown(kernel))
    return kernel._text


def _shown(kernel: Kernel) -> str:
    lines = [f"{kernel.signature} {{"]
    for symbol in kernel.symbols().values():
        lines.append(f"  size {symbol.name} in {symbol.lo}..{'' if symbol.hi is None else symbol.hi}")
    axes = dict.fromkeys(a for s in kernel.stores for a in s.axes) | dict.fromkeys(all_axes(kernel.roots))
    names = _axis_names(axes)
    lines += [f"  axis {names[axis]} in {axis.extent}" for axis in axes]
    lines += [f"  schedule {kernel.schedule}"] if kernel.schedule else []
    printer = _Printer(names)
    for node in postorder(kernel.roots):
        printer.add(node)
    lines += printer.lines
    for store in kernel.stores:
        index = ", ".join(printer.name(i) for i in store.index)
        over = f" over {', '.join(names[a] for a in store.axes)}" if store.axes else ""
        lines.append(f"  store {store.buffer.name}[{index}] = {printer.name(store.value)}{over}")
    return "\n".join([*lines, "}"])


def _axis_names(axes: Iterable[Axis]) -> dict[Axis, str]:
    """Axes of one name and different extents get a number after the name."""
    names: dict[Axis, str] = {}
    taken: set[str] = set()
    for axis in axes:
        name, count = axis.name, 1
        while name in taken:
            count += 1
            name = f"{axis.name}.{count}"
        taken.add(name)
        names[axis] = name
    return names


class _Printer:
    def __init__(self, axes: dict[Axis, str]) -> None:
        self.axes = axes
        self.numbers: dict[Expr, int] = {}
        self.lines: list[str] = []

    def name(self, node: Expr) -> str:
        match node:
            case Const(value, dtype):
                return _show_number(value, dtype.name)
            case Axis():
                return self.axes[node]
            case Size(dim):
                return f"({dim})"
            case _:
                return f"%{self.numbers[node]}"

    def add(self, node: Expr) -> None:
        match node:
            case Const() | Axis() | Size():
                return
            case Load(buffer, index, where):
                tail = f" where {self.name(where)}" if where is not None else ""
                text = f"{buffer.name}[{', '.join(map(self.name, index))}]{tail}"
            case Scalar(name, args):
                head = f"{name}.{node.dtype}" if SCALARS[name].result == "given" else name
                text = f"{head}({', '.join(map(self.name, args))})"
            case Reduce(kind, axes, body):
                head = f"{kind}.{node.order}" if node.order else kind
                text = f"{head} {self.name(body)} over {', '.join(self.axes[a] for a in axes)}"
            case Scan(kind, axis, body, position, exclusive):
                word = "before" if exclusive else "through"
                text = f"scan {kind} {self.name(body)} over {self.axes[axis]} {word} {self.name(position)}"
            case _:
                raise AssertionError(node)
        self.numbers[node] = len(self.numbers)
        self.lines.append(f"  %{self.numbers[node]} = {text}")


def _show_number(value: object, dtype: str) -> str:
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "i64":
        return str(value)
    return f"{value!r}:{dtype}".replace("(", "").replace(")", "")


_HEAD = re.compile(r"kernel @([\w.]+)\((.*)\) -> (.*) \{\Z", re.ASCII)
_BUFFER = re.compile(r"(\w[\w.]*): (\w+)\[([^\]]*)\]", re.ASCII)
_SIZE = re.compile(r"size ([\w.]+) in (\d{1,18})\.\.(\d{0,18})\Z")
_AXIS = re.compile(r"axis ([\w.]+) in (.+)\Z")
_SCHEDULE = re.compile(r"schedule (.+)\Z")
_VALUE = re.compile(r"%(\d+) = (.+)\Z")
_LOAD = re.compile(r"(\w[\w.]*)\[([^\]]*)\](?: where (.+))?\Z")
_REDUCE = re.compile(rf"({'|'.join(REDUCTIONS)})(?:\.({'|'.join(ORDERS)}))? (\S+) over (.+)\Z")
_SCAN = re.compile(r"scan (\w+) (\S+) over ([\w.]+) (before|through) (.+)\Z")
_CALL = re.compile(r"(\w+)(?:\.(\w+))?\((.*)\)\Z")
_STORE = re.compile(r"store (\w[\w.]*)\[([^\]]*)\] = (\S+)(?: over (.+))?\Z")
_NUMBER = re.compile(r"(.+):(\w+)\Z")
_MOST_DIGITS = 400  # of a number: the largest of the floats, written out, has 309
_REDUCES = re.compile(rf"= (?:{'|'.join(REDUCTIONS)})(?:\.\w+)? \S+ over ")


def parse_kernel(text: str) -> Kernel:
    """Reads what `show_kernel` prints; an error names the line."""
    return _Parser(text).kernel()


class StoredKernel(Kernel):
    """A kernel of which the text is at hand. It is read when somebody looks inside: to run stored code nobody does."""

    __slots__ = ()

    @staticmethod
    def of(text: str) -> StoredKernel:
        """A kernel by what `show_kernel` printed."""
        head = _HEAD.match(text.partition("\n")[0])
        if not head:
            raise ParseError("kernel text, line 1: expected `kernel @name(inputs) -> outputs {`", code="P121")
        made = StoredKernel.__new__(StoredKernel)
        object.__setattr__(made, "name", head[1])
        object.__setattr__(made, "_text", text)
        object.__setattr__(made, "_symbols", None)
        return made

    def __getattr__(self, name: str) -> Any:  # of a field that was not read yet
        if name not in _INSIDE:
            raise AttributeError(name)
        whole = parse_kernel(self._text)
        for part in _INSIDE:
            object.__setattr__(self, part, getattr(whole, part))
        return getattr(whole, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and _parts(self) == _parts(other)

    def __hash__(self) -> int:
        return hash(_parts(self))

    def renamed(self, name: str) -> Kernel:
        if self.name == name or not self._text:
            return super().renamed(name)
        return StoredKernel.of(self._text.replace(f"@{self.name}(", f"@{name}(", 1))

    @property
    def input_names(self) -> tuple[str, ...]:
        return self._names(2) if self._text else super().input_names

    @property
    def output_names(self) -> tuple[str, ...]:
        return self._names(3) if self._text else super().output_names

    @property
    def has_reductions(self) -> bool:
        return _REDUCES.search(self._text) is not None if self._text else super().has_reductions

    def _names(self, group: int) -> tuple[str, ...]:
        head = _HEAD.match(self._text.partition("\n")[0])
        assert head is not None
        return tuple(name for name, _, _ in _BUFFER.findall(head[group]))


_INSIDE = ("inputs", "outputs", "stores", "schedule")


def _parts(kernel: Kernel) -> tuple[Any, ...]:
    return kernel.name, kernel.inputs, kernel.outputs, kernel.stores, kernel.schedule


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = [line.split("#")[0].strip() for line in text.strip().split("\n")]
        self.symbols: dict[str, Symbol] = {}
        self.axes: dict[str, Axis] = {}
        self.buffers: dict[str, Buffer] = {}
        self.values: dict[str, Expr] = {}
        self.stores: list[Store] = []
        self.schedule = ""
        self.at = 0

    def fail(self, reason: str) -> ParseError:
        return ParseError(f"kernel text, line {self.at + 1}: {reason}", code="P121", operands=(self.lines[self.at],))

    def kernel(self) -> Kernel:
        self._require_short_numbers()
        try:
            return self._kernel()
        except (ParseError, OptionError, DTypeError) as error:  # of a size, an element type or a schedule in a line
            if error.code == "P121":
                raise
            raise self.fail(error.summary) from None
        except RecursionError:
            raise self.fail("a size is nested too deeply") from None

    def _require_short_numbers(self) -> None:
        for at, line in enumerate(self.lines):
            if re.search(rf"\d{{{_MOST_DIGITS}}}", line):
                self.at = at
                raise self.fail(f"a number has {_MOST_DIGITS} digits or more")

    def _kernel(self) -> Kernel:
        told = [at for at, line in enumerate(self.lines) if line] or [0]
        first, last = told[0], told[-1]
        self.at = first
        head = _HEAD.match(self.lines[first])
        if not head:
            raise self.fail("expected `kernel @name(inputs) -> outputs {`")
        if self.lines[last] != "}":
            self.at = last
            raise self.fail("expected `}`")
        body = self.lines[first + 1 : last]
        for self.at, line in enumerate(body, first + 1):
            match = _SIZE.match(line)
            if match:
                self._require_new(match[1], self.symbols, "size")
                made = sym(match[1], int(match[2]), int(match[3]) if match[3] else None)
                self.symbols[match[1]] = next(a for m, _ in made.terms for a in m if isinstance(a, Symbol))
        self.at = first
        inputs, outputs = self._buffers(head[2]), self._buffers(head[3])
        for self.at, line in enumerate(body, first + 1):
            if line and not _SIZE.match(line):
                self._line(line)
        return Kernel(head[1], inputs, outputs, tuple(self.stores), self.schedule)

    def _require_new(self, name: str, known: Mapping[str, object], what: str) -> None:
        if name in known:
            raise self.fail(f"a second {what} is called {name!r}")

    def _dim(self, text: str) -> Dim:
        made = parse_dim(text, self.symbols)
        unknown = [name for name in symbols(made) if name not in self.symbols]
        if unknown:
            raise self.fail(f"no size is called {unknown[0]!r}: add `size {unknown[0]} in 1..`")
        if isinstance(made, int) and made < 0:
            raise self.fail(f"{made} is not a size")
        return made

    def _buffers(self, text: str) -> tuple[Buffer, ...]:
        made = []
        for part in _split(text):
            match = _BUFFER.fullmatch(part)
            if not match:
                raise self.fail(f"expected `name: type[sizes]`, found {part!r}")
            name, dtype, shape = match.groups()
            self._require_new(name, self.buffers, "buffer")
            extents = tuple(self._dim(part) for part in _split(shape))
            self.buffers[name] = Buffer(name, as_dtype(dtype), extents)
            made.append(self.buffers[name])
        return tuple(made)

    def _line(self, line: str) -> None:
        if match := _AXIS.match(line):
            name = match[1]
            self._require_new(name, self.axes, "axis")
            base = re.sub(r"\.\d+\Z", "", name)
            made = Axis(base, self._dim(match[2]))
            twin = next((n for n, a in self.axes.items() if a is made), None)
            if twin is not None:
                raise self.fail(f"{name} and {twin} have one name and one extent: they are one axis")
            self.axes[name] = made
        elif match := _VALUE.match(line):
            self._require_new(f"%{match[1]}", self.values, "value")
            self.values[f"%{match[1]}"] = self._value(match[2])
        elif match := _STORE.match(line):
            axes = tuple(self._axis(a) for a in _split(match[4] or ""))
            index = tuple(self._operand(i) for i in _split(match[2]))
            self.stores.append(Store(self._buffer(match[1]), axes, index, self._operand(match[3])))
        elif match := _SCHEDULE.match(line):
            if self.schedule:
                raise self.fail("there is a schedule already")
            self.schedule = str(parse_schedule(match[1]))
        else:
            raise self.fail("expected size, axis, schedule, a value or store")

    def _value(self, text: str) -> Expr:
        if match := _SCAN.match(text):
            axis, body, position = self._axis(match[3]), self._operand(match[2]), self._operand(match[5])
            return Scan(match[1], axis, body, position, match[4] == "before")
        if match := _REDUCE.match(text):
            axes = tuple(self._axis(a) for a in _split(match[4]))
            return Reduce(match[1], axes, self._operand(match[3]), match[2] or "")
        if match := _CALL.match(text):
            if match[1] not in SCALARS:
                raise self.fail(f"{match[1]!r} is not a scalar function")
            args = tuple(self._operand(a) for a in _split(match[3]))
            given = as_dtype(match[2]) if match[2] else None
            function = SCALARS[match[1]]
            if len(args) != function.arity:
                raise self.fail(f"{match[1]} takes {function.arity} arguments, got {len(args)}")
            if given is None and function.result == "given":
                raise self.fail(f"{match[1]} needs a type: {match[1]}.f32(…)")
            if given is not None and function.result != "given":
                raise self.fail(f"{match[1]} takes no type, got {given}")
            return Scalar(match[1], args, function.result_dtype(tuple(a.dtype for a in args), given))
        if match := _LOAD.match(text):
            where = self._operand(match[3]) if match[3] else None
            return Load(self._buffer(match[1]), tuple(self._operand(i) for i in _split(match[2])), where)
        raise self.fail("expected a load, a call, a reduction or a scan")

    def _buffer(self, name: str) -> Buffer:
        if name not in self.buffers:
            raise self.fail(f"no buffer is called {name!r}")
        return self.buffers[name]

    def _axis(self, name: str) -> Axis:
        if name not in self.axes:
            raise self.fail(f"no axis is called {name!r}")
        return self.axes[name]

    def _operand(self, text: str) -> Expr:
        if text in self.values:
            return self.values[text]
        if text in self.axes:
            return self.axes[text]
        if text in ("true", "false"):
            return Const(text == "true", as_dtype("bool"))
        if re.fullmatch(r"-?\d+", text):
            return self._number(text, i64)
        if match := _NUMBER.match(text):
            return self._number(match[1], as_dtype(match[2]))
        if text.startswith("(") and text.endswith(")"):
            return Size(parse_dim(text[1:-1], self.symbols))
        raise self.fail(f"{text!r} is not a value")

    def _number(self, text: str, dtype: DType) -> Expr:
        try:
            value = complex(text) if dtype.is_complex else int(text) if dtype.is_int else float(text)
            with np.errstate(all="ignore"):  # a float that is too large for its type is infinite
                return Const(np.asarray(value), dtype)
        except (ValueError, OverflowError):
            raise self.fail(f"{text!r} is not a number of type {dtype}") from None


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]
