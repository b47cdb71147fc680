"""Scatter: updates are applied in index order, so results never depend on threads.

By rows (scatter_add, scatter_nd): an update is a row of `width` elements; points are blocks of columns, each of which
walks all ids. By elements (scatter_elements): points are blocks of lines off the axis. Sums and products of types
narrower than f32 are kept in f32 until all updates are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import (
    arguments,
    around,
    copy,
    each_point,
    fill_zero,
    kernel,
    load_element,
    number_slots,
    numbers,
    store_element,
)
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.backends.llvm.ir.registers import SMALL, Parts, memory_type
from strata.backends.llvm.math import scalars
from strata.core import DType, Shape, Target, f32
from strata.mir import Node
from strata.mir import Value as MirValue

COLUMN_BLOCKS = 8  # at most: ids are read once by each
LEAST_BLOCK = 64  # columns: fewer cost less than their ids
FEW = 4  # elements of a short row that go together
LINES = 256  # neighbouring lines that one point of a scatter by elements takes
CHUNK = 1 << 15  # elements that one point of a copy or conversion takes
KINDS = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}


@dataclass(frozen=True)
class _Scatter:
    """What decides the code of a scatter."""

    dtype: DType
    ids: DType
    reduction: str
    wrap: bool
    coordinates: int
    width: int  # of rows, where it is known and small, else 0
    target: Target

    @property
    def kept(self) -> DType:
        """The type that elements have while updates come in."""
        return f32 if self.dtype.name in SMALL and self.reduction in ("add", "mul") else self.dtype

    @property
    def key(self) -> str:
        return f"scatter {self.dtype} {self.ids} {self.reduction} {self.wrap} {self.coordinates} {self.width}"

    @property
    def lanes(self) -> int:
        return self.target.lanes(max(4, self.dtype.itemsize))

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements of a row that go together, the most first."""
        return tuple(lanes for lanes in (self.lanes, FEW, 1) if lanes <= self.lanes)

    @property
    def together(self) -> int:
        """Ids that are looked at together."""
        lanes = self.target.lanes(8)
        return lanes if lanes >= FEW else 1

    def positions(self, f: IrFunction, ids: Value, index: Value, size: Value, count: int = 1) -> list[str]:
        """Ids as positions inside their axis, whatever their values."""
        element = memory_type(self.ids)
        kind, wide = vector(element, count), vector("i64", count)
        at = f.load(kind, f.address(element, ids, index), self.ids.itemsize)
        if element != "i64":
            at = f.convert("sext", kind, at, wide)
        zero = constant(wide, 0)
        if self.wrap:
            behind = f.binary("add", wide, at, f.splat(wide, size))
            at = f.select(wide, f.compare("slt", wide, at, zero), behind, at)
        at = f.intrinsic("smin", wide, at, f.splat(wide, f.sub(size, 1)))
        at = f.intrinsic("smax", wide, at, zero)
        return [f.extract(wide, at, i) for i in range(count)] if count > 1 else [at]

    def each(
        self, f: IrFunction, ids: Value, start: Value, span: tuple[Value, Value], size: Value,
        body: Callable[[Value, Value], None],
    ) -> None:  # fmt: skip
        """body(i, position of ids[start + i]) for each i of a span, in order."""
        low, high = span
        for count in dict.fromkeys((self.together, 1)):

            def some(i: str, _: list[str], count: int = count) -> None:
                for k, at in enumerate(self.positions(f, ids, f.add(start, i), size, count)):
                    body(f.add(i, k), at)

            end = high if count == 1 else f.add(low, f.round_down(f.sub(high, low), count))
            f.loop(low, end, count, (), some)
            low = end

    def combine(self, f: IrFunction, out: Value, at: Value, updates: Value, source: Value, lanes: int) -> None:
        new = load_element(f, self.dtype, updates, source, lanes, self.target)
        if self.reduction != "none":
            old = load_element(f, self.kept, out, at, lanes, self.target)
            # a narrow float is an f32 in registers already
            new = _joined(f, KINDS[self.reduction], self.kept, lanes, old, new, self.target)
        store_element(f, self.kept, new, out, at, lanes, self.target)

    # code

    def emit(self, module: IrModule) -> None:
        self._emit_rows(module)
        self._emit_elements(module)
        self._emit_moves(module)

    def _emit_rows(self, module: IrModule) -> None:
        """Of out, updates, ids, updates of a batch, width, rows of a batch, blocks, block, (size, stride)s."""
        f = kernel(module, "rows")
        names = arguments(f, "pppiiiii" + "ii" * self.coordinates)
        out, updates, ids, count, width, rows, blocks, block = names[:8]
        sizes, strides = names[8::2], names[9::2]

        def point(p: str, _: list[str]) -> None:
            batch, part = f.binary("udiv", "i64", p, blocks), f.binary("urem", "i64", p, blocks)
            first = f.mul(part, block)
            last = f.smin(f.add(first, block), width)

            def place(i: str) -> tuple[Value, Value]:
                """Which row an update goes to, and which update it is."""
                number = f.add(f.mul(batch, count), i)
                row: Value = f.mul(batch, rows)
                for c, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
                    (at,) = self.positions(f, ids, f.add(f.mul(number, self.coordinates), c), size)
                    row = f.add(row, at if self.coordinates == 1 else f.mul(at, stride))
                return row, number

            def known(i: str, _: list[str]) -> None:
                move_known(*place(i))

            def move_known(row: Value, number: Value) -> None:
                to, source, at = f.mul(row, self.width), f.mul(number, self.width), 0
                for lanes in self.steps:
                    while at + lanes <= self.width:
                        self.combine(f, out, f.add(to, at), updates, f.add(source, at), lanes)
                        at += lanes

            def one(i: str, _: list[str]) -> None:
                row, number = place(i)
                to, source, low = f.mul(row, width), f.mul(number, width), first
                for lanes in self.steps:
                    high = f.add(low, f.round_down(f.sub(last, low), lanes))

                    def move(j: str, _: list[str], lanes: int = lanes) -> None:
                        self.combine(f, out, f.add(to, j), updates, f.add(source, j), lanes)

                    f.loop(low, high, lanes, (), move)
                    low = high

            if self.width and self.coordinates == 1:
                before, first_row = f.mul(batch, count), f.mul(batch, rows)
                span, (size,) = (0, count), sizes
                self.each(f, ids, before, span, size, lambda i, at: move_known(f.add(first_row, at), f.add(before, i)))
            else:
                f.loop(0, count, 1, (), known if self.width else one)

        each_point(f, point)

    def _emit_elements(self, module: IrModule) -> None:
        """Lines of updates [pre, n, post] into out [.., size, behind]; tables, if given, say where they start."""
        f = kernel(module, "elements")
        names = arguments(f, "pppppiiiii")
        out, updates, ids, before, after, n, post, size, behind, blocks = names

        def start(table: str, line: Value, otherwise: Value) -> str:
            def look() -> list[Value]:
                return [f.load("i64", f.address("i64", table, line), 8)]

            return f.if_(f.compare("ne", "ptr", table, "null"), look, lambda: [otherwise], ["i64"])[0]

        def point(p: str, _: list[str]) -> None:
            line, part = f.binary("udiv", "i64", p, blocks), f.binary("urem", "i64", p, blocks)
            base = start(before, line, f.mul(line, f.mul(size, behind)))
            first = f.mul(part, LINES)
            last = f.smin(f.add(first, LINES), post)

            def last_axis() -> None:
                row = f.mul(line, n)

                def one(j: Value, at: Value) -> None:
                    self.combine(f, out, f.add(base, at), updates, f.add(row, j), 1)

                self.each(f, ids, row, (0, n), size, one)

            def along(j: str, _: list[str]) -> None:
                row = f.mul(f.add(f.mul(line, n), j), post)

                def one(q: Value, at: Value) -> None:
                    to = f.add(f.add(base, f.mul(at, behind)), start(after, q, q))
                    self.combine(f, out, to, updates, f.add(row, q), 1)

                self.each(f, ids, row, (first, last), size, one)

            plain = f.compare("eq", "ptr", after, "null")
            is_last = f.binary("and", "i1", f.compare("eq", "i64", f.smax(post, behind), 1), plain)
            f.if_(is_last, last_axis, lambda: f.loop(0, n, 1, (), along))

        each_point(f, point)

    def _emit_moves(self, module: IrModule) -> None:
        """Chunks of elements: copied and widened, narrowed again, or zeroed."""
        self._emit_move(module, "enter", self.dtype, self.kept)
        self._emit_move(module, "leave", self.kept, self.dtype)
        f = kernel(module, "zero")
        to, count = arguments(f, "pi")
        low, high = f.mul("%begin", CHUNK), f.smin(f.mul("%end", CHUNK), count)
        size = self.kept.itemsize
        fill_zero(f, f.address("i8", to, f.mul(low, size)), f.mul(f.sub(high, low), size))
        f.ret()

    def _emit_move(self, module: IrModule, name: str, before: DType, after: DType) -> None:
        f = kernel(module, name)
        to, source, count = arguments(f, "ppi")
        low, high = f.mul("%begin", CHUNK), f.smin(f.mul("%end", CHUNK), count)

        def convert(lanes: int, begin: Value, end: Value) -> None:
            def move(i: str, _: list[str]) -> None:
                value = load_element(f, before, source, i, lanes, self.target)
                store_element(f, after, value, to, i, lanes, self.target)

            f.loop(begin, end, lanes, (), move)

        if before is after:
            size = self.dtype.itemsize
            places = [f.address("i8", p, f.mul(low, size)) for p in (to, source)]
            copy(f, places[0], places[1], f.mul(f.sub(high, low), size))
        else:
            wide = f.add(low, f.round_down(f.sub(high, low), self.lanes))
            convert(self.lanes, low, wide)
            convert(1, wide, high)
        f.ret()

    # calls

    def native(self, plan_into: object, x: MirValue | None, out: MirValue) -> NativeOp:
        """`plan_into(sizes, out slot)` gives the calls that bring the updates in; x is where the output starts from."""

        def plan(sizes: Sizes) -> Planned:
            total = math.prod(numbers(out.shape, sizes))
            if total == 0:
                return Planned(())
            points = -(-total // CHUNK)
            narrow = self.kept is not self.dtype
            place: Slot = ("workspace", 0) if narrow else ("output", 0)
            if x is None:
                calls = [NativeCall("zero", [place, ("number", total)], points)]
            else:
                calls = [NativeCall("enter", [place, ("input", 0), ("number", total)], points)]
            calls += plan_into(sizes, place)  # type: ignore[operator]
            if narrow:
                calls.append(NativeCall("leave", [("output", 0), place, ("number", total)], points))
            return Planned(calls, 4 * total if narrow else 0)

        return NativeOp(self.key, self.emit, ("rows", "elements", "enter", "leave", "zero"), plan)

    def row_calls(
        self, out: Slot, updates: int, ids: int, batches: int, count: int, width: int, sizes: list[int]
    ) -> list[NativeCall]:
        if batches * count * width == 0:
            return []
        block = max(-(-width // COLUMN_BLOCKS), LEAST_BLOCK)
        block = -(-block // self.lanes) * self.lanes
        blocks = -(-width // block)
        strides = [math.prod(sizes[c + 1 :]) for c in range(len(sizes))]
        pairs = [n for pair in zip(sizes, strides, strict=True) for n in pair]
        slots = [
            out,
            ("input", updates),
            ("input", ids),
            *number_slots(count, width, math.prod(sizes), blocks, block, *pairs),
        ]
        return [NativeCall("rows", slots, batches * blocks)]


def _joined(f: IrFunction, kind: str, dtype: DType, lanes: int, old: Parts, new: Parts, target: Target) -> Parts:
    return scalars.combine(f, kind, dtype, lanes, old, new, target)


def _small(shape: Shape) -> int:
    """The number of elements of a known shape of few, else 0."""
    width = math.prod(d for d in shape if isinstance(d, int))
    return width if width <= LEAST_BLOCK and all(isinstance(d, int) for d in shape) else 0


@override("scatter_add", whole=True)
def _scatter_add(node: Node, target: Target) -> NativeOp:
    updates, ids = node.inputs
    width = _small(updates.shape[ids.ndim :])
    made = _Scatter(updates.dtype, ids.dtype, "add", node.op.wrap, 1, width, target)  # type: ignore[attr-defined]

    def into(sizes: Sizes, out: Slot) -> list[NativeCall]:
        rows, *rest = numbers(node.types[0].shape, sizes)
        return made.row_calls(out, 0, 1, 1, math.prod(numbers(ids.shape, sizes)), math.prod(rest), [rows])

    return made.native(into, None, node.outputs[0])


@override("scatter_nd", whole=True)
def _scatter_nd(node: Node, target: Target) -> NativeOp:
    x, ids, _ = node.inputs
    op = node.op
    batch, count = op.batch_dims, int(ids.shape[-1])  # type: ignore[attr-defined]
    width = _small(x.shape[batch + count :])
    made = _Scatter(x.dtype, ids.dtype, op.reduction, op.wrap, count, width, target)  # type: ignore[attr-defined]

    def into(sizes: Sizes, out: Slot) -> list[NativeCall]:
        shape, places = numbers(x.shape, sizes), numbers(ids.shape, sizes)
        named, rest = shape[batch : batch + count], shape[batch + count :]
        updates = math.prod(places[batch:-1])
        return made.row_calls(out, 2, 1, math.prod(shape[:batch]), updates, math.prod(rest), named)

    return made.native(into, x, node.outputs[0])


@override("scatter_elements", whole=True)
def _scatter_elements(node: Node, target: Target) -> NativeOp:
    x, ids, _ = node.inputs
    op = node.op
    axis = op.axis  # type: ignore[attr-defined]
    made = _Scatter(x.dtype, ids.dtype, op.reduction, op.wrap, 1, 0, target)  # type: ignore[attr-defined]

    def into(sizes: Sizes, out: Slot) -> list[NativeCall]:
        shape, places = numbers(x.shape, sizes), numbers(ids.shape, sizes)
        _, size, behind = around(x.shape, axis, sizes)
        pre, n, post = around(ids.shape, axis, sizes)
        if pre * n * post == 0:
            return []
        before = _starts(places[:axis], shape[:axis], size * behind)
        after = _starts(places[axis + 1 :], shape[axis + 1 :], 1)
        blocks = -(-post // LINES)
        slots = [out, ("input", 2), ("input", 1), before, after, *number_slots(n, post, size, behind, blocks)]
        return [NativeCall("elements", slots, pre * blocks)]

    return made.native(into, x, node.outputs[0])


def _starts(ids: list[int], x: list[int], unit: int) -> Slot:
    """Where lines of the ids start in x, as a table; none where the shapes agree, as lines then follow each other."""
    if ids == x:
        return ("pointer", 0)
    offsets = np.zeros((), np.int64)
    for a, size in enumerate(ids):
        offsets = offsets[..., None] + np.arange(size) * (math.prod(x[a + 1 :]) * unit)
    return ("table", np.ascontiguousarray(offsets.reshape(-1), np.int64))
