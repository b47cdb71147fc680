"""A builder of StableHLO text: typed values, operations, regions, constants with exact bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from strata.core import DType, TensorType, bool_, i8, i64

SHORT = 16  # numbers that are written one by one
_ELEMENTS = {
    "bool": "i1", "u4": "ui4", "u8": "ui8", "u16": "ui16", "u32": "ui32", "u64": "ui64", "f8e4m3": "f8E4M3FN",
    "f8e5m2": "f8E5M2", "c64": "complex<f32>", "c128": "complex<f64>",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hlo:
    """A value of the text: its name, element type and sizes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def element(dtype: DType) -> str:
    """An element type as MLIR spells it."""
    return _ELEMENTS.get(dtype.name, dtype.name)


def kind_of(dtype: DType, shape: Sequence[int]) -> str:
    """A tensor type as MLIR spells it."""
    return f"tensor<{''.join(f'{n}x' for n in shape)}{element(dtype)}>"


def kind(x: Hlo) -> str:
    return kind_of(x.dtype, x.shape)


def numbers(values: Sequence[int]) -> str:
    """`[0, 2]`"""
    return f"[{', '.join(str(int(v)) for v in values)}]"


def array(values: Sequence[int]) -> str:
    """`array<i64: 0, 2>`"""
    return f"array<i64{': ' if len(values) else ''}{', '.join(str(int(v)) for v in values)}>"


@cache
def _literal(dtype: DType, data: bytes, shape: tuple[int, ...]) -> str:
    """The inside of `dense<…>`: plain where numbers say it all, else the bytes. One number is for all places."""
    values = np.frombuffer(data, dtype.np)
    if dtype.is_complex and values.size == 1:
        parts = np.frombuffer(data, dtype.real.np)
        return f"({', '.join(_number(dtype.real, p) for p in parts)})"
    if values.size == 1:
        return _number(dtype, values[0])
    if values.size <= SHORT and len(shape) == 1 and not dtype.is_complex:
        return f"[{', '.join(_number(dtype, v) for v in values)}]"
    return f'"0x{data.hex().upper()}"'


def _number(dtype: DType, value: Any) -> str:
    """A number, by its bits where digits would round it."""
    if dtype.is_bool:
        return str(bool(value)).lower()
    if dtype.is_int:
        return str(int(value))
    plain = float(value)
    if plain.is_integer() and 0 < abs(plain) < 1 << 24:
        return repr(plain)
    return (
        f"0x{int(np.asarray(value).view(f'u{dtype.itemsize}')):0{2 * dtype.itemsize}X}"
        if plain
        else ("-0.0" if np.signbit(plain) else "0.0")
    )


class StableHloBuilder:
    """Appends operations to the block that is being written. Values of outer blocks can be read in inner ones."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0
        self._depth = 2
        self._constants: list[dict[Any, Hlo]] = [{}]  # by block, innermost last

    # operations

    def fresh(self, dtype: DType, shape: Sequence[int]) -> Hlo:
        self._count += 1
        return Hlo(f"%{self._count - 1}", dtype, tuple(int(n) for n in shape))

    def line(self, text: str) -> None:
        self.lines.append("  " * self._depth + text)

    def op(self, text: str, dtype: DType, shape: Sequence[int]) -> Hlo:
        """A line with one result."""
        made = self.fresh(dtype, shape)
        self.line(f"{made.name} = {text}")
        return made

    def same(self, name: str, *xs: Hlo) -> Hlo:
        """An operation whose operands and result have one type."""
        return self.op(f"stablehlo.{name} {_list(xs)} : {kind(xs[0])}", xs[0].dtype, xs[0].shape)

    def to(self, name: str, xs: Sequence[Hlo], dtype: DType, shape: Sequence[int], rest: str = "") -> Hlo:
        """An operation whose result has its own type."""
        operands = ", ".join(kind(x) for x in xs)
        return self.op(f"{name} {_list(xs)}{rest} : ({operands}) -> {kind_of(dtype, shape)}", dtype, shape)

    def many(
        self, name: str, xs: Sequence[Hlo], attributes: str, results: Sequence[tuple[DType, Sequence[int]]],
        regions: Sequence[tuple[Sequence[tuple[DType, Sequence[int]]], Callable[..., Sequence[Hlo]]]] = (),
    ) -> tuple[Hlo, ...]:  # fmt: skip
        """An operation in its generic form, with regions: for each, the types of its arguments and what it returns."""
        made = tuple(self.fresh(dtype, shape) for dtype, shape in results)
        head = f"{', '.join(v.name for v in made)} = " if made else ""
        self.line(
            f'{head}"{name}"({_list(xs)}) {f"<{{{attributes}}}> " if attributes else ""}{"({" if regions else ""}'
        )
        for at, (arguments, body) in enumerate(regions):
            if at:
                self.line("}, {")
            with self._block():
                formals = [self.fresh(dtype, shape) for dtype, shape in arguments]
                if formals:
                    self.line(f"^bb0({', '.join(f'{x.name}: {kind(x)}' for x in formals)}):")
                given = body(*formals)
                self.line(f"stablehlo.return {_list(given)} : {', '.join(map(kind, given))}")
        operands, kinds = ", ".join(map(kind, xs)), ", ".join(map(kind, made))
        tail = f": ({operands}) -> {kinds if len(made) == 1 else f'({kinds})'}"
        if regions:
            self.line(f"}}) {tail}")
        else:
            self.lines[-1] = f"{self.lines[-1].rstrip()} {tail}"
        return made

    @contextmanager
    def _block(self) -> Iterator[None]:
        self._depth += 1
        self._constants.append({})
        try:
            yield
        finally:
            self._depth -= 1
            self._constants.pop()

    # constants

    def const(self, value: Any, dtype: DType, shape: Sequence[int] = ()) -> Hlo:
        """A number at every place."""
        data = np.asarray(value).astype(dtype.np).tobytes()
        return self._constant(dtype, tuple(int(n) for n in shape), data)

    def dense(self, values: np.ndarray, dtype: DType) -> Hlo:
        """An array."""
        if values.size and values.tobytes() == values.reshape(-1)[:1].tobytes() * values.size:
            return self._constant(dtype, values.shape, values.reshape(-1)[:1].tobytes())
        if dtype.bits == 4:  # how these and booleans lie in the bytes of an attribute changes between versions
            return self.convert(self.dense(values.astype(np.int8), i8), dtype)
        if dtype.is_bool and (values.ndim != 1 or values.size > SHORT):
            bits = self.dense(values.astype(np.int8), i8)
            return self.compare("NE", bits, self.like(0, bits))
        return self._constant(dtype, values.shape, np.ascontiguousarray(values).tobytes())

    def _constant(self, dtype: DType, shape: tuple[int, ...], data: bytes) -> Hlo:
        key = (dtype, shape, data)
        for known in self._constants:
            if key in known:
                return known[key]
        inside = _literal(dtype, data, shape) if 0 not in shape else ""
        made = self.op(f"stablehlo.constant dense<{inside}> : {kind_of(dtype, shape)}", dtype, shape)
        self._constants[-1][key] = made
        return made

    def like(self, value: Any, x: Hlo) -> Hlo:
        return self.const(value, x.dtype, x.shape)

    # shapes

    def reshape(self, x: Hlo, shape: Sequence[int]) -> Hlo:
        return x if x.shape == tuple(shape) else self.to("stablehlo.reshape", [x], x.dtype, shape)

    def transpose(self, x: Hlo, perm: Sequence[int]) -> Hlo:
        if list(perm) == list(range(x.ndim)):
            return x
        return self.to("stablehlo.transpose", [x], x.dtype, [x.shape[p] for p in perm], f", dims = {numbers(perm)}")

    def spread(self, x: Hlo, shape: Sequence[int], dims: Sequence[int]) -> Hlo:
        """x with its axis i at `dims[i]` of a larger shape."""
        if x.shape == tuple(shape) and list(dims) == list(range(x.ndim)):
            return x
        return self.to("stablehlo.broadcast_in_dim", [x], x.dtype, shape, f", dims = {numbers(dims)}")

    def trailing(self, x: Hlo, shape: Sequence[int]) -> Hlo:
        """NumPy's broadcasting."""
        return self.spread(x, shape, range(len(shape) - x.ndim, len(shape)))

    def slice(self, x: Hlo, start: Sequence[int], stop: Sequence[int], step: Sequence[int] | None = None) -> Hlo:
        steps = tuple(step) if step is not None else (1,) * x.ndim
        shape = tuple(max(0, -(-(b - a) // s)) for a, b, s in zip(start, stop, steps, strict=True))
        if shape == x.shape:
            return x
        ranges = [f"{a}:{b}" + (f":{s}" if s != 1 else "") for a, b, s in zip(start, stop, steps, strict=True)]
        return self.to("stablehlo.slice", [x], x.dtype, shape, f" [{', '.join(ranges)}]")

    def cut(self, x: Hlo, axis: int, start: int, stop: int) -> Hlo:
        """A range along one axis."""
        low, high = [0] * x.ndim, list(x.shape)
        low[axis], high[axis] = start, stop
        return self.slice(x, low, high)

    def reverse(self, x: Hlo, axes: Sequence[int]) -> Hlo:
        return self.op(f"stablehlo.reverse {x.name}, dims = {numbers(axes)} : {kind(x)}", x.dtype, x.shape)

    def pad(
        self, x: Hlo, value: Any, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None
    ) -> Hlo:
        """`value` is a number or a scalar of the text; negative amounts take away."""
        between = tuple(interior) if interior is not None else (0,) * x.ndim
        if not any((*low, *high, *between)):
            return x
        shape = [a + b + n + max(n - 1, 0) * i for a, b, n, i in zip(low, high, x.shape, between, strict=True)]
        fill = value if isinstance(value, Hlo) else self.const(value, x.dtype)
        rest = f", low = {numbers(low)}, high = {numbers(high)}, interior = {numbers(between)}"
        return self.to("stablehlo.pad", [x, fill], x.dtype, shape, rest)

    def concat(self, xs: Sequence[Hlo], axis: int) -> Hlo:
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        return self.to("stablehlo.concatenate", xs, xs[0].dtype, shape, f", dim = {axis}")

    def iota(self, dtype: DType, shape: Sequence[int], axis: int) -> Hlo:
        return self.op(f"stablehlo.iota dim = {axis} : {kind_of(dtype, shape)}", dtype, shape)

    # elements

    def convert(self, x: Hlo, dtype: DType) -> Hlo:
        """As StableHLO converts; `scalars.cast` is what a program means."""
        return x if x.dtype is dtype else self.to("stablehlo.convert", [x], dtype, x.shape)

    def bitcast(self, x: Hlo, dtype: DType) -> Hlo:
        return x if x.dtype is dtype else self.to("stablehlo.bitcast_convert", [x], dtype, x.shape)

    def compare(self, direction: str, x: Hlo, y: Hlo) -> Hlo:
        how = "FLOAT" if x.dtype.is_inexact else "SIGNED" if x.dtype.kind == "int" else "UNSIGNED"
        text = f"stablehlo.compare {direction}, {x.name}, {y.name}, {how} : ({kind(x)}, {kind(y)})"
        return self.op(f"{text} -> {kind_of(bool_, x.shape)}", bool_, x.shape)

    def select(self, condition: Hlo, x: Hlo, y: Hlo) -> Hlo:
        text = f"stablehlo.select {condition.name}, {x.name}, {y.name} : {kind(condition)}, {kind(x)}"
        return self.op(text, x.dtype, x.shape)

    # reductions

    def reduce(
        self, xs: Sequence[Hlo], starts: Sequence[Hlo], axes: Sequence[int], body: Callable[..., Sequence[Hlo]]
    ) -> tuple[Hlo, ...]:
        shape = [n for a, n in enumerate(xs[0].shape) if a not in axes]
        scalars = [(s.dtype, ()) for s in starts]
        return self.many(
            "stablehlo.reduce", [*xs, *starts], f"dimensions = {array(axes)}", [(x.dtype, shape) for x in xs],
            [([*scalars, *scalars], body)],
        )  # fmt: skip

    def reduce_window(
        self, x: Hlo, start: Hlo, body: Callable[[Hlo, Hlo], Hlo], *, window: Sequence[int], stride: Sequence[int],
        dilation: Sequence[int], padding: Sequence[tuple[int, int]], shape: Sequence[int],
    ) -> Hlo:  # fmt: skip
        pairs = ", ".join(f"[{low}, {high}]" for low, high in padding)
        attributes = (
            f"window_dimensions = {array(window)}, window_strides = {array(stride)}, "
            f"window_dilations = {array(dilation)}, padding = dense<[{pairs}]> : tensor<{len(padding)}x2xi64>"
        )
        scalar: tuple[DType, tuple[int, ...]] = (x.dtype, ())
        region = ([scalar, scalar], lambda a, b: (body(a, b),))
        return self.many("stablehlo.reduce_window", [x, start], attributes, [(x.dtype, shape)], [region])[0]

    def while_(
        self, starts: Sequence[Hlo], test: Callable[..., Hlo], body: Callable[..., Sequence[Hlo]]
    ) -> tuple[Hlo, ...]:
        """Values that a body changes as long as a test of them is true."""
        kinds = [(x.dtype, x.shape) for x in starts]
        regions = [(kinds, lambda *xs: (test(*xs),)), (kinds, body)]
        return self.many("stablehlo.while", starts, "", kinds, regions)

    def repeat(self, count: int, starts: Sequence[Hlo], body: Callable[..., Sequence[Hlo]]) -> tuple[Hlo, ...]:
        """`body(step, *values)` for each step below a count."""
        zero = self.const(0, i64)

        def test(step: Hlo, *_: Hlo) -> Hlo:
            return self.compare("LT", step, self.const(count, i64))

        def once(step: Hlo, *values: Hlo) -> Sequence[Hlo]:
            return [self.same("add", step, self.const(1, i64)), *body(step, *values)]

        return self.while_([zero, *starts], test, once)[1:]

    def row(self, x: Hlo, at: Hlo, axis: int = 0) -> Hlo:
        """x at a place along an axis, which is dropped."""
        zero = self.const(0, at.dtype)
        starts = [at if a == axis else zero for a in range(x.ndim)]
        sizes = [1 if a == axis else n for a, n in enumerate(x.shape)]
        return self.reshape(self.dynamic_slice(x, starts, sizes), [n for a, n in enumerate(x.shape) if a != axis])

    def set_row(self, x: Hlo, row: Hlo, at: Hlo, axis: int = 0) -> Hlo:
        """x with another row at a place along an axis."""
        zero = self.const(0, at.dtype)
        update = self.reshape(row, [1 if a == axis else n for a, n in enumerate(x.shape)])
        return self.dynamic_update(x, update, [at if a == axis else zero for a in range(x.ndim)])

    def dynamic_slice(self, x: Hlo, starts: Sequence[Hlo], sizes: Sequence[int]) -> Hlo:
        return self.to("stablehlo.dynamic_slice", [x, *starts], x.dtype, sizes, f", sizes = {numbers(sizes)}")

    def dynamic_update(self, x: Hlo, update: Hlo, starts: Sequence[Hlo]) -> Hlo:
        return self.to("stablehlo.dynamic_update_slice", [x, update, *starts], x.dtype, x.shape)


def value_type(x: Hlo) -> TensorType:
    return TensorType(x.dtype, x.shape)


def _list(xs: Sequence[Hlo]) -> str:
    return ", ".join(x.name for x in xs)
