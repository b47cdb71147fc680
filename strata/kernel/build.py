"""Building kernels by pulling: an op says what its output is at an index, in terms of its inputs at indices.

    k = KernelBuilder("softmax")
    x = k.input("x", f32[rows, columns])
    def value(index):
        r, c = index
        high = k.reduce("max", (columns,), lambda j: x[r, j])
        total = k.reduce("sum", (columns,), lambda j: k.exp(x[r, j] - high))
        return k.exp(x[r, c] - high) / total
    k.output("y", f32[rows, columns], value)
    kernel = k.build()

Inputs of an operation are views: a buffer, or another operation that is evaluated in place. Select evaluates both of
its sides, so an index that may leave its buffer is read inside `k.guard(condition, lambda: value, otherwise)`: there,
loads give 0 without touching memory wherever the condition is false."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strata.core import Dim, DType, Shape, TensorType, bool_, i64
from strata.errors import LowerError
from strata.kernel.algebra import interval
from strata.kernel.ir import (
    REDUCTIONS,
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Reduce,
    Scan,
    Store,
    apply,
    as_data,
    as_index,
    is_product,
    narrowed,
    size,
    widened,
)
from strata.kernel.one_hot_sum import picked
from strata.kernel.rewrite import load
from strata.kernel.scalars import SCALARS

Index = tuple[Expr, ...]


class View:
    """A tensor inside a kernel: a type, and the value at an index. Equal indices give the same expression."""

    __slots__ = ("_builder", "_known", "_read", "type")

    def __init__(self, builder: KernelBuilder, type_: TensorType, read: Callable[[Index], Expr]) -> None:
        self.type = type_
        self._builder = builder
        self._read = read
        self._known: dict[tuple[Any, ...], Expr] = {}

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def __getitem__(self, index: Any) -> Expr:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != self.ndim:
            raise LowerError(f"a view of {self.type} is read at {len(parts)} indices", code="L110")
        made = tuple(as_index(self._builder.index(i)) for i in parts)
        key = (*made, self._builder.condition)
        if key not in self._known:
            value = as_data(self._read(made))
            if value.dtype is not self.dtype:
                raise LowerError(f"a view of {self.type} gives values of type {value.dtype}", code="L111")
            self._known[key] = value
        return self._known[key]


class KernelBuilder:
    """Makes expressions and collects buffers and stores. Scalar functions are methods: k.exp(x), k.select(c, a, b)."""

    def __init__(self, name: str = "kernel") -> None:
        self.name = name
        self.condition: Expr | None = None  # of the guards around the expression being built
        self._depth = 0
        self._inputs: list[Buffer] = []
        self._outputs: list[Buffer] = []
        self._stores: list[Store] = []

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        function = name.rstrip("_")  # and_, or_, not_: the words Python keeps
        if function not in SCALARS:
            raise AttributeError(f"{name!r} is neither a builder method nor a scalar function")
        return lambda *values: apply(function, *values)

    # buffers and outputs

    def input(self, name: str, type_: TensorType) -> View:
        """A buffer that the kernel reads."""
        buffer = Buffer(name, type_.dtype, type_.shape)
        self._inputs.append(buffer)
        return self.view(type_, lambda index: load(buffer, index, self.condition))

    def view(self, type_: TensorType, read: Callable[[Index], Expr]) -> View:
        """A tensor given by a function of the index: an operation evaluated in place."""
        return View(self, type_, read)

    def output(self, name: str, type_: TensorType, value: Callable[[Index], Expr] | View) -> Buffer:
        """A buffer that the kernel writes, in full, from a function of the index."""
        buffer = Buffer(name, type_.dtype, type_.shape)
        self._outputs.append(buffer)
        axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(type_.shape))
        self.store(buffer, axes, axes, value[axes] if isinstance(value, View) else value(axes))
        return buffer

    def output_buffer(self, name: str, type_: TensorType) -> Buffer:
        """A buffer that explicit stores write, part by part."""
        buffer = Buffer(name, type_.dtype, type_.shape)
        self._outputs.append(buffer)
        return buffer

    def store(self, buffer: Buffer, axes: tuple[Axis, ...], index: Sequence[Any], value: Expr) -> None:
        """buffer[index] = value over the axes."""
        if value.dtype is not buffer.dtype:
            raise LowerError(f"output {buffer} is given values of type {value.dtype}", code="L112")
        self._stores.append(Store(buffer, axes, tuple(as_index(self.index(i)) for i in index), as_data(value)))

    def axes(self, extents: Sequence[Dim]) -> tuple[Axis, ...]:
        """The axes of an index space; equal positions and extents give the same axes, so that stores share loops."""
        return tuple(Axis(f"i{n}", extent) for n, extent in enumerate(extents))

    def build(self) -> Kernel:
        return Kernel(self.name, tuple(self._inputs), tuple(self._outputs), tuple(self._stores))

    # expressions

    def const(self, value: Any, dtype: DType) -> Expr:
        return Const(value, dtype)

    def index(self, value: Any) -> Expr:
        """An int, a size or an integer expression as i64; a view that is read at data takes it as an index."""
        if isinstance(value, Expr):
            return value.cast(i64)
        return size(value)

    def cast(self, x: Expr, dtype: DType) -> Expr:
        """Floats to integers truncate and saturate, NaN gives 0; anything to bool tests for non-zero."""
        return x.cast(dtype)

    def rounded(self, x: Expr) -> Expr:
        """As it is read back from memory: a cast to its own type, where that has fewer digits than registers."""
        return apply("cast", x, dtype=x.dtype)

    def rounded_product(self, x: Expr) -> Expr:
        """As it is read back from memory by a sum, which adds other products with one rounding. Adding -0.0 changes no
        number, and takes no instruction."""
        return apply("add", x, Const(-0.0, x.dtype)) if is_product(x) else x

    def bitcast(self, x: Expr, dtype: DType) -> Expr:
        return apply("bitcast", x, dtype=dtype)

    def accumulate(self, x: Expr) -> Expr:
        """In the type that sums of this type are kept in: f16 and bf16 in f32, narrow integers in i32."""
        return x.cast(x.dtype.accumulator)

    def all_of(self, *conditions: Expr) -> Expr:
        result: Expr = Const(True, bool_)
        for condition in conditions:
            result = apply("and", result, condition)
        return result

    def guard(self, condition: Expr, value: Callable[[], Expr], otherwise: Any) -> Expr:
        """`value()` where the condition holds, else `otherwise`; loads made by `value` happen only where it holds."""
        if isinstance(condition, Const):
            inside = value() if condition.value else None
            return inside if inside is not None else _constant_like(otherwise, value)
        with self._under(condition):
            inside = value()
        return apply("select", condition, inside, otherwise)

    @contextmanager
    def _under(self, condition: Expr) -> Iterator[None]:
        before = self.condition
        self.condition = condition if before is None else apply("and", before, condition)
        try:
            yield
        finally:
            self.condition = before

    def reduce(self, kind: str, extents: Sequence[Dim] | Dim, body: Callable[..., Expr], *, order: str = "") -> Expr:
        """`body` of one index per extent, reduced. An empty space gives the identity of the kind.

        Rounded terms are joined in the order that follows from how they lie in memory, unless one is given (see
        `order.py`)."""
        if kind not in REDUCTIONS:
            raise LowerError(f"{kind!r} is not a reduction; known: {', '.join(REDUCTIONS)}", code="L113")
        spans = tuple(extents) if isinstance(extents, (tuple, list)) else (extents,)
        if not spans:
            return body()
        # names by nesting depth, so that equal reductions built in different places are one expression
        axes = tuple(Axis(f"r{self._depth}{chr(97 + n)}", extent) for n, extent in enumerate(spans))
        self._depth += 1
        try:
            value = body(*axes)
            made = picked(axes, widened(value)) if kind == "sum" else None
            made = Reduce(kind, axes, widened(value), order) if made is None else made
            return made if kind in ("argmax", "argmin") else narrowed(made, value.dtype)
        finally:
            self._depth -= 1

    def scan(
        self, kind: str, extent: Dim, body: Callable[[Expr], Expr], position: Expr, *, exclusive: bool = False
    ) -> Expr:
        """The running reduction of `body` along one axis, read at `position`."""
        axis = Axis(f"r{self._depth}a", extent)
        self._depth += 1
        try:
            value = body(axis)
            return narrowed(Scan(kind, axis, widened(value), self.index(position), exclusive), value.dtype)
        finally:
            self._depth -= 1

    def flatten(self, index: Sequence[Expr], shape: Shape) -> Expr:
        """The row-major position of an index."""
        total: Expr = Const(0, i64)
        for i, extent in zip(index, shape, strict=True):
            total = total * size(extent) + as_index(self.index(i)) if extent != 1 else total
        return total

    def broadcast(self, index: Sequence[Expr], shape: Shape) -> Index:
        """The index into an operand of a shape for one of the output: right-aligned, 0 where an element is used again.
        Axes of one element stay: sums are ordered as where sizes are not known."""
        last = index[len(index) - len(shape) :]
        return tuple(Const(0, i64) if d == 1 and interval(i) != (0, 0) else i for i, d in zip(last, shape, strict=True))

    def reshape(self, index: Sequence[Expr], shape: Shape, other: Shape) -> Index:
        """The index into another shape of the same elements. Axes that are in both stay as they are."""
        first, shape, other, index = _same_axes(shape, other, index)
        last, shape, other, index = _same_axes(shape[::-1], other[::-1], index[::-1])
        return (*first, *self.unflatten(self.flatten(index[::-1], shape[::-1]), other[::-1]), *last[::-1])

    def unflatten(self, position: Expr, shape: Shape) -> Index:
        """The index at a row-major position: the inverse of flatten."""
        parts: list[Expr] = []
        rest = position
        for extent in reversed(shape[1:]):
            step = size(extent if extent != 0 else 1)  # an empty tensor is never read
            parts.append(rest % step)
            rest = rest // step
        return tuple(reversed([*parts, rest][: len(shape)]))


def _same_axes(shape: Shape, other: Shape, index: Sequence[Expr]) -> tuple[list[Expr], Shape, Shape, Sequence[Expr]]:
    """The index of axes of another shape that are first in both, and what is after them. Of axes of one element, some
    are in one shape alone; those that are read at an axis count first."""
    found: list[Expr] = []
    at = 0
    while at < len(shape) and len(found) < len(other):
        same, is_one = shape[at] == other[len(found)], other[len(found)] == 1
        if shape[at] == 1 and (not same or (not index[at].free and shape[at + 1 : at + 2] == (1,))):
            at += 1
        elif same or is_one:
            found.append(index[at] if same else Const(0, i64))
            at += same
        else:
            break
    return found, shape[at:], other[len(found) :], index[at:]


def _constant_like(otherwise: Any, value: Callable[[], Expr]) -> Expr:
    return otherwise if isinstance(otherwise, Expr) else Const(otherwise, value().dtype)
