"""Kernel IR: scalar expressions over index axes, and the stores that make a kernel of them.

A kernel says, for every point of an index space, which scalar goes where: `out[i, j] = expression`. Expressions are
immutable and interned, so equal expressions are one object and `is` is equality. How the points are visited is no
part of a kernel: that is its schedule.

    Const  Axis  Size            leaves: a number, an index variable, the value of a symbolic size
    Load                         an element of a buffer; with `where`, 0 wherever that is false, without touching memory
    Scalar                       a function of the table in scalars.py; `index` and `data` leave a number as it is, and
                                 say whether it counts elements (and never wraps) or is one (and wraps as i64 does)
    Reduce                       sum, prod, max, min, all, any, argmax, argmin of a body over bound axes
    Scan                         the running reduction of a body along its axis, read at a position
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from strata.core import Dim, DType, Shape, Symbol, TensorType, bool_, dim_prod, i8, i64, new_rlock, symbols, u8
from strata.kernel.scalars import SCALARS

REDUCTIONS: Final = ("sum", "prod", "max", "min", "all", "any", "argmax", "argmin")

_nodes: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
_first = new_rlock()  # of several threads that make the same node, one is first
_NO_AXES: Final[frozenset[Axis]] = frozenset()
Node = TypeVar("Node", bound="Expr")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named block of memory: row-major elements of one type."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)

    @property
    def strides(self) -> tuple[Dim, ...]:
        """In elements."""
        return tuple(dim_prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


class Expr:
    """A scalar expression. `free` is the set of axes that its value depends on.

    `is_index` tells index arithmetic from data. An index is made of axes, sizes and constants, or of data that `index`
    declares to be a place in a buffer: it never wraps, and is kept in normal form. Whatever else an expression is made
    of makes it data, which wraps as its type does: the algebra of indices takes it as it is. Constants are either.
    """

    __slots__ = ("__weakref__", "dtype", "free")
    __array_priority__: ClassVar[int] = 1000
    dtype: DType
    free: frozenset[Axis]
    is_index: bool = False
    inputs: tuple[Expr, ...] = ()  # direct subexpressions, the body of a reduction included

    def __add__(self, other: Any) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return apply("div", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return apply("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return apply("floordiv", other, self)

    def __mod__(self, other: Any) -> Expr:
        return apply("mod", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return apply("mod", other, self)

    def __pow__(self, other: Any) -> Expr:
        return apply("pow", self, other)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __abs__(self) -> Expr:
        return apply("abs", self)

    def __and__(self, other: Any) -> Expr:
        return apply("and", self, other)

    def __or__(self, other: Any) -> Expr:
        return apply("or", self, other)

    def __xor__(self, other: Any) -> Expr:
        return apply("xor", self, other)

    def __invert__(self) -> Expr:
        return apply("not", self)

    def __lshift__(self, other: Any) -> Expr:
        return apply("shl", self, other)

    def __rshift__(self, other: Any) -> Expr:
        return apply("shr", self, other)

    def __lt__(self, other: Any) -> Expr:
        return apply("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return apply("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return apply("gt", self, other)

    def __ge__(self, other: Any) -> Expr:
        return apply("ge", self, other)

    def eq(self, other: Any) -> Expr:
        """Elementwise equality; `==` is identity of expressions."""
        return apply("eq", self, other)

    def ne(self, other: Any) -> Expr:
        return apply("ne", self, other)

    def cast(self, dtype: DType) -> Expr:
        return self if self.dtype is dtype else apply("cast", self, dtype=dtype)

    def __bool__(self) -> bool:
        raise TypeError("a kernel expression has no truth value: use select or guard")

    def __repr__(self) -> str:
        return describe(self)


def _intern(cls: type[Node], key: tuple[Any, ...], dtype: DType, free: frozenset[Axis], **fields: Any) -> Node:
    place = (cls, *key)
    found = _nodes.get(place)
    if found is not None:
        return found  # type: ignore[return-value]
    node = object.__new__(cls)
    node.dtype = dtype
    node.free = free
    for name, value in fields.items():
        setattr(node, name, value)
    with _first:
        return _nodes.setdefault(place, node)  # type: ignore[return-value]


class Const(Expr):
    """A number."""

    __slots__ = ("value",)
    __match_args__ = ("value", "dtype")
    value: bool | int | float | complex
    is_index = True

    def __new__(cls, value: Any, dtype: DType) -> Self:
        if dtype is i64 and type(value) is int:  # most are
            value = wrapped(value, i64)
            return _intern(cls, (i64, value.to_bytes(8, sys.byteorder, signed=True)), i64, _NO_AXES, value=value)
        array = np.asarray(wrapped(value, dtype) if type(value) is int else value).astype(dtype.np)
        return _intern(cls, (dtype, array.tobytes()), dtype, _NO_AXES, value=_python(array, dtype))


def wrapped(value: int, dtype: DType) -> int:
    """A whole number as an integer type has it; other types take it as it is."""
    if not dtype.is_int:
        return value
    low = -(1 << (dtype.bits - 1)) if dtype.kind == "int" else 0
    return (value - low) % (1 << dtype.bits) + low


def _python(array: Any, dtype: DType) -> bool | int | float | complex:
    if dtype.is_bool:
        return bool(array)
    if dtype.is_int:
        return int(array)
    return complex(array) if dtype.is_complex else float(array)


class Axis(Expr):
    """An index variable that runs over 0 … extent - 1."""

    __slots__ = ("extent", "name")
    __match_args__ = ("name", "extent")
    name: str
    extent: Dim
    is_index = True

    def __new__(cls, name: str, extent: Dim) -> Self:
        found = _intern(cls, (name, extent), i64, _NO_AXES, name=name, extent=extent)
        if not found.free:
            found.free = frozenset((found,))
        return found


class Size(Expr):
    """The run-time value of a symbolic size."""

    __slots__ = ("dim",)
    __match_args__ = ("dim",)
    dim: Dim
    is_index = True

    def __new__(cls, dim: Dim) -> Self:
        return _intern(cls, (dim,), i64, _NO_AXES, dim=dim)


def size(dim: Dim) -> Expr:
    """A size as an i64 expression."""
    return Const(dim, i64) if isinstance(dim, int) else Size(dim)


class Load(Expr):
    """buffer[index]; where `where` is false the value is 0 and the index may be anything."""

    __slots__ = ("buffer", "index", "inputs", "where")
    __match_args__ = ("buffer", "index", "where")
    buffer: Buffer
    index: tuple[Expr, ...]
    where: Expr | None

    def __new__(cls, buffer: Buffer, index: tuple[Expr, ...], where: Expr | None = None) -> Self:
        index = tuple(map(as_index, index))
        inputs = index if where is None else (*index, where)
        fields = {"buffer": buffer, "index": index, "where": where}
        return _intern(cls, tuple(fields.values()), buffer.dtype, _union(inputs), inputs=inputs, **fields)


class Scalar(Expr):
    """A function of the scalar table."""

    __slots__ = ("args", "inputs", "is_index", "name")
    __match_args__ = ("name", "args")
    name: str
    args: tuple[Expr, ...]
    is_index: bool

    def __new__(cls, name: str, args: tuple[Expr, ...], dtype: DType) -> Self:
        is_index = dtype is i64 and _makes_index(name, args)
        fields = {"name": name, "args": args, "inputs": args, "is_index": is_index}
        return _intern(cls, (name, args, dtype), dtype, _union(args), **fields)


def is_product(x: Expr) -> bool:
    """Whether it is a product of floats, which can be multiplied and added to something with one rounding."""
    return isinstance(x, Scalar) and x.name == "mul" and x.dtype.is_float


def _makes_index(name: str, args: tuple[Expr, ...]) -> bool:
    """Whether a function of i64 values gives an index."""
    if name in ("index", "data", "cast", "bitcast"):
        return name == "index"
    return all(a.is_index for a in (args[1:] if name == "select" else args))


class _Fold(Expr):
    """Terms along axes that it binds, joined."""

    __slots__ = ("body", "inputs", "kind", "order")
    kind: str
    body: Expr
    order: str  # in which rounded terms are joined (see `order.py`); "" until it is found

    @property
    def is_rounded(self) -> bool:
        """Whether the order of its terms changes what it ends with."""
        return self.kind in ("sum", "prod") and self.dtype.is_inexact


class Reduce(_Fold):
    """A body reduced over its bound axes; argmax and argmin give the i64 position of the first best, NaN being best."""

    __slots__ = ("axes",)
    __match_args__ = ("kind", "axes", "body")
    axes: tuple[Axis, ...]

    def __new__(cls, kind: str, axes: tuple[Axis, ...], body: Expr, order: str = "") -> Self:
        dtype = i64 if kind in ("argmax", "argmin") else body.dtype
        free, fields = body.free - frozenset(axes), {"kind": kind, "axes": axes, "body": body, "order": order}
        return _intern(cls, tuple(fields.values()), dtype, free, inputs=(body,), **fields)

    @property
    def sums_products(self) -> bool:
        """Whether its terms are products, each of which may be added with one rounding."""
        return self.kind == "sum" and is_product(self.body)

    def over(self, axes: tuple[Axis, ...], body: Expr) -> Reduce:
        """The same reduction of another body, in the same order."""
        return Reduce(self.kind, axes, body, self.order)


class Scan(_Fold):
    """kind over body[0 … position] (up to position - 1 when exclusive) along one bound axis."""

    __slots__ = ("axis", "exclusive", "position")
    __match_args__ = ("kind", "axis", "body", "position", "exclusive")
    axis: Axis
    position: Expr
    exclusive: bool

    def __new__(
        cls, kind: str, axis: Axis, body: Expr, position: Expr, exclusive: bool = False, order: str = ""
    ) -> Self:
        position = as_index(position)
        free = (body.free - frozenset((axis,))) | position.free
        fields = {"kind": kind, "axis": axis, "body": body, "position": position, "exclusive": exclusive}
        return _intern(cls, (*fields.values(), order), body.dtype, free, inputs=(body, position), order=order, **fields)

    def over(self, axis: Axis, body: Expr, position: Expr) -> Scan:
        """The same running reduction of another body, in the same order."""
        return Scan(self.kind, axis, body, position, self.exclusive, self.order)


def _union(parts: Iterable[Expr]) -> frozenset[Axis]:
    free = _NO_AXES
    for part in parts:
        if part.free and part.free is not free:
            free = free | part.free if free else part.free
    return free


@dataclass(frozen=True, slots=True)
class Store:
    """buffer[index] = value at every point of the axes. Different points must write different elements."""

    buffer: Buffer
    axes: tuple[Axis, ...]
    index: tuple[Expr, ...]
    value: Expr

    def rebuilt(self, done: Mapping[Expr, Expr], axes: tuple[Axis, ...] | None = None) -> Store:
        """The store with other expressions, and over other axes where they are given."""
        index = tuple(done[i] for i in self.index)
        return Store(self.buffer, self.axes if axes is None else axes, index, done[self.value])


@dataclass(frozen=True, slots=True)
class Kernel:
    """A name, the buffers it reads and writes, and its stores. The text of a kernel is its identity.

    `schedule` is the text of one that was found for this kernel; without it, a target's heuristic chooses.
    """

    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    stores: tuple[Store, ...]
    schedule: str = ""
    _text: str = field(init=False, default="", repr=False, compare=False)  # once it has been written
    _symbols: dict[str, Symbol] | None = field(init=False, default=None, repr=False, compare=False)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (*self.inputs, *self.outputs)

    def renamed(self, name: str) -> Kernel:
        return self if self.name == name else replace(self, name=name)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.outputs)

    @property
    def has_reductions(self) -> bool:
        return any(isinstance(e, Reduce) for e in postorder(self.roots))

    @property
    def roots(self) -> tuple[Expr, ...]:
        """Every expression that a store uses directly."""
        return tuple(e for s in self.stores for e in (*s.index, s.value))

    def symbols(self) -> dict[str, Symbol]:
        """The symbolic sizes, in the order of their names, so that every form of a kernel takes them alike."""
        if self._symbols is None:
            object.__setattr__(self, "_symbols", dict(sorted(self._found_symbols().items())))
        return dict(self._symbols or {})

    def _found_symbols(self) -> dict[str, Symbol]:
        found: dict[str, Symbol] = {}
        for buffer in self.buffers:
            found |= buffer.type.symbols()
        for store in self.stores:
            for axis in store.axes:
                found |= symbols(axis.extent)
        for node in postorder(self.roots):
            match node:
                case Size(dim):
                    found |= symbols(dim)
                case Axis(_, extent):
                    found |= symbols(extent)
                case Reduce(_, axes):  # their bodies need not mention them
                    for axis in axes:
                        found |= symbols(axis.extent)
                case Scan(_, axis):
                    found |= symbols(axis.extent)
        return found

    @property
    def signature(self) -> str:
        return f"kernel @{self.name}({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}"

    def __str__(self) -> str:
        from strata.kernel.text import show_kernel

        return show_kernel(self)


def postorder(roots: Iterable[Expr]) -> list[Expr]:
    """Every node below the roots, inputs first, without recursion (chains may be thousands of nodes deep)."""
    seen: set[Expr] = set()
    order: list[Expr] = []
    stack: list[Expr | None] = list(roots)
    stack.reverse()
    while stack:
        node = stack.pop()
        if node is None:  # what is below the next one is done
            order.append(stack.pop())  # type: ignore[arg-type]
        elif node not in seen:
            seen.add(node)
            inputs = node.inputs
            if not inputs:
                order.append(node)
                continue
            stack += (node, None)
            stack += inputs[::-1]
    return order


def bound_axes(node: Expr) -> tuple[Axis, ...]:
    match node:
        case Reduce():
            return node.axes
        case Scan():
            return (node.axis,)
        case _:
            return ()


def all_axes(roots: Iterable[Expr]) -> Iterator[Axis]:
    """Free and bound axes below the roots, each once."""
    seen: set[Axis] = set()
    for node in postorder(roots):
        for axis in (node,) if isinstance(node, Axis) else bound_axes(node):
            if axis not in seen:
                seen.add(axis)
                yield axis


def describe(node: Expr) -> str:
    """A short nested form for messages; deep expressions are cut."""
    return _describe(node, 6)


def _describe(node: Expr, depth: int) -> str:
    if depth == 0:
        return "…"
    match node:
        case Const(value, dtype):
            return str(value) if dtype is i64 else f"{value}:{dtype}"
        case Axis(name, _):
            return name
        case Size(dim):
            return f"size({dim})"
        case Load(buffer, index, where):
            tail = f" where {_describe(where, depth - 1)}" if where is not None else ""
            return f"{buffer.name}[{', '.join(_describe(i, depth - 1) for i in index)}{tail}]"
        case Scalar(name, args):
            head = f"{name}.{node.dtype}" if SCALARS[name].result == "given" else name
            return f"{head}({', '.join(_describe(a, depth - 1) for a in args)})"
        case Reduce(kind, axes, body):
            return f"({kind} {', '.join(a.name for a in axes)} : {_describe(body, depth - 1)})"
        case Scan(kind, axis, body, position, _):
            return f"(scan {kind} {axis.name} : {_describe(body, depth - 1)} at {_describe(position, depth - 1)})"
    return object.__repr__(node)


def as_expr(value: Any, like: DType) -> Expr:
    """An expression as it is, a size as i64, a Python number as a constant of the given type."""
    if isinstance(value, Expr):
        return value
    if not isinstance(value, (bool, int, float, complex, np.generic)):
        return Size(value)
    return Const(value, like)


def as_index(node: Expr) -> Expr:
    """An i64 expression as a place in a buffer, which never wraps."""
    return node if node.is_index or node.dtype is not i64 else apply("index", node)


def as_data(node: Expr) -> Expr:
    """An expression as a number of a tensor: what is computed with it wraps."""
    return apply("data", node) if node.is_index and node.dtype is i64 else node


def widened(node: Expr) -> Expr:
    """A number of four bits in a byte, which is what is computed with; others as they are."""
    return node.cast({"i4": i8, "u4": u8}.get(node.dtype.name, node.dtype))


def narrowed(node: Expr, dtype: DType) -> Expr:
    """What was computed of widened numbers, as the function gives it: four bits wrap like any other type."""
    return node.cast(dtype) if dtype.bits == 4 else node


def apply(name: str, *values: Any, dtype: DType | None = None) -> Expr:
    """A scalar function with constants folded, trivial identities removed and index arithmetic in normal form."""
    like = next(
        (v.dtype for v in reversed(values) if isinstance(v, Expr) and not (name == "select" and v is values[0])), i64
    )
    args = tuple(as_expr(v, bool_ if name == "select" and i == 0 else like) for i, v in enumerate(values))
    function = SCALARS[name]
    assert len(args) == function.arity, f"{name} takes {function.arity} arguments, got {len(args)}"
    checked = args[1:] if name == "select" else args
    assert all(a.dtype is checked[0].dtype for a in checked), f"{name}: types differ: {[a.dtype for a in args]}"
    if checked[0].dtype.bits == 4 and not function.takes(checked[0].dtype):
        return narrowed(apply(name, *map(widened, args)), function.result_dtype(tuple(a.dtype for a in args), dtype))
    result = function.result_dtype(tuple(a.dtype for a in args), dtype)
    simpler = algebra.simplify_scalar(name, args, result)
    return simpler if simpler is not None else Scalar(name, args, result)


from strata.kernel import algebra  # noqa: E402 - algebra needs the classes above, and only calls need algebra
