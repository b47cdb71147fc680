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
from collections.abc import Iterable
from typing import Any

import numpy as np

from strata.core import Dim, Symbol, as_dtype, i64, parse_dim, sym
from strata.errors import ParseError
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
                text = f"{kind} {self.name(body)} over {', '.join(self.axes[a] for a in axes)}"
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


_HEAD = re.compile(r"kernel @([\w.]+)\((.*)\) -> (.*) \{\Z")
_BUFFER = re.compile(r"(\w[\w.]*): (\w+)\[([^\]]*)\]")
_SIZE = re.compile(r"size ([\w.]+) in (\d+)\.\.(\d*)\Z")
_AXIS = re.compile(r"axis ([\w.]+) in (.+)\Z")
_SCHEDULE = re.compile(r"schedule (.+)\Z")
_VALUE = re.compile(r"%(\d+) = (.+)\Z")
_LOAD = re.compile(r"(\w[\w.]*)\[([^\]]*)\](?: where (.+))?\Z")
_REDUCE = re.compile(rf"({'|'.join(REDUCTIONS)}) (\S+) over (.+)\Z")
_SCAN = re.compile(r"scan (\w+) (\S+) over ([\w.]+) (before|through) (.+)\Z")
_CALL = re.compile(r"(\w+)(?:\.(\w+))?\((.*)\)\Z")
_STORE = re.compile(r"store (\w[\w.]*)\[([^\]]*)\] = (\S+)(?: over (.+))?\Z")
_NUMBER = re.compile(r"(.+):(\w+)\Z")
_REDUCES = re.compile(rf"= (?:{'|'.join(REDUCTIONS)}) \S+ over ")


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
        self.lines = [line.split("#")[0].strip() for line in text.strip().splitlines()]
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
        head = _HEAD.match(self.lines[0])
        if not head:
            raise self.fail("expected `kernel @name(inputs) -> outputs {`")
        if self.lines[-1] != "}":
            self.at = len(self.lines) - 1
            raise self.fail("expected `}`")
        body = self.lines[1:-1]
        for self.at, line in enumerate(body, 1):
            match = _SIZE.match(line)
            if match:
                made = sym(match[1], int(match[2]), int(match[3]) if match[3] else None)
                self.symbols[match[1]] = next(a for m, _ in made.terms for a in m if isinstance(a, Symbol))
        self.at = 0
        inputs, outputs = self._buffers(head[2]), self._buffers(head[3])
        for self.at, line in enumerate(body, 1):
            if line and not _SIZE.match(line):
                self._line(line)
        return Kernel(head[1], inputs, outputs, tuple(self.stores), self.schedule)

    def _dim(self, text: str) -> Dim:
        return parse_dim(text, self.symbols)

    def _buffers(self, text: str) -> tuple[Buffer, ...]:
        made = []
        for name, dtype, shape in _BUFFER.findall(text):
            extents = tuple(self._dim(part) for part in _split(shape))
            self.buffers[name] = Buffer(name, as_dtype(dtype), extents)
            made.append(self.buffers[name])
        return tuple(made)

    def _line(self, line: str) -> None:
        if match := _AXIS.match(line):
            name = match[1]
            base = re.sub(r"\.\d+\Z", "", name)
            self.axes[name] = Axis(base, self._dim(match[2]))
        elif match := _VALUE.match(line):
            self.values[f"%{match[1]}"] = self._value(match[2])
        elif match := _STORE.match(line):
            axes = tuple(self._axis(a) for a in _split(match[4] or ""))
            index = tuple(self._operand(i) for i in _split(match[2]))
            self.stores.append(Store(self._buffer(match[1]), axes, index, self._operand(match[3])))
        elif match := _SCHEDULE.match(line):
            self.schedule = str(parse_schedule(match[1]))
        else:
            raise self.fail("expected size, axis, schedule, a value or store")

    def _value(self, text: str) -> Expr:
        if match := _SCAN.match(text):
            axis, body, position = self._axis(match[3]), self._operand(match[2]), self._operand(match[5])
            return Scan(match[1], axis, body, position, match[4] == "before")
        if match := _REDUCE.match(text):
            axes = tuple(self._axis(a) for a in _split(match[3]))
            return Reduce(match[1], axes, self._operand(match[2]))
        if match := _CALL.match(text):
            if match[1] not in SCALARS:
                raise self.fail(f"{match[1]!r} is not a scalar function")
            args = tuple(self._operand(a) for a in _split(match[3]))
            given = as_dtype(match[2]) if match[2] else None
            function = SCALARS[match[1]]
            if len(args) != function.arity:
                raise self.fail(f"{match[1]} takes {function.arity} arguments, got {len(args)}")
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
            return Const(int(text), i64)
        if match := _NUMBER.match(text):
            dtype = as_dtype(match[2])
            value = complex(match[1]) if dtype.is_complex else int(match[1]) if dtype.is_int else float(match[1])
            return Const(np.asarray(value), dtype)
        if text.startswith("(") and text.endswith(")"):
            return Size(self._dim(text[1:-1]))
        raise self.fail(f"{text!r} is not a value")


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
