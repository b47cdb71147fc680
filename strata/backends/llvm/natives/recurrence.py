"""Sequential scans along an axis: linear recurrences, running extrema, log-sum-exp.

Rows that lie side by side fill the lanes of a vector: contiguous where the axis is not the last one, gathered where
it is. A block of rows is one point. The last block starts early enough to be full; rows that two blocks compute get
equal values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.backends.llvm.fft.transforms import transposed
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector, vector_constant, with_element
from strata.backends.llvm.ir.native import (
    arguments,
    around,
    each_point,
    kernel,
    load_element,
    number_slots,
    store_element,
)
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.ir.registers import (
    Parts,
    component_bytes,
    deinterleave,
    from_memory,
    gather,
    interleave,
    memory_type,
    register_bytes,
    register_type,
    scatter,
    to_memory,
)
from strata.backends.llvm.math import exponentials, logs
from strata.backends.llvm.math.scalars import ScalarCall, emit_scalar
from strata.core import Dim, DType, Target, i64
from strata.mir import Node

GATHERED_ROWS = 16  # rows at a time when they do not lie side by side

# (function, target, lanes, index of the step, state, inputs) -> (state, outputs)
Step = Callable[[IrFunction, Target, int, Value, list[str], list[Parts]], tuple[list[str], list[Parts]]]


@dataclass(frozen=True)
class Recurrence:
    """Input and output types, the state's register types and start values by lanes, and one step."""

    name: str
    inputs: tuple[DType, ...]
    outputs: tuple[DType, ...]
    state: Callable[[int], list[tuple[str, str]]]
    step: Step
    reverse: bool = False
    emit_whole_rows: Callable[[IrModule, Target], None] | None = None  # a kernel "whole_rows" for few rows in one piece

    @property
    def can_tile(self) -> bool:
        """Whether elements are integers that a vector can hold."""
        return all(d.itemsize <= 8 for d in (*self.inputs, *self.outputs))

    def tile(self, target: Target) -> int:
        """Rows and columns of a tile that is transposed in registers."""
        return max(8, target.lanes(max(4, *(d.itemsize for d in self.inputs))))

    def emit(self, module: IrModule, target: Target) -> None:
        lanes = target.lanes(max(register_bytes(d) for d in self.inputs))
        self._emit_rows(module, "rows_wide", 4 * lanes, target, together=True)
        self._emit_rows(module, "rows", lanes, target, together=True)
        self._emit_rows(module, "rows_gathered", GATHERED_ROWS, target, together=False)
        if self.can_tile:
            self._emit_tiles(module, self.tile(target), target)
        self._emit_rows(module, "rows_single", 1, target, together=True)
        if self.emit_whole_rows is not None:
            self.emit_whole_rows(module, target)

    def _emit_rows(self, module: IrModule, name: str, lanes: int, target: Target, *, together: bool) -> None:
        """Blocks of `lanes` rows. Arguments: arrays, length, distance of elements, rows, blocks of an outer row."""
        f = kernel(module, name)
        arrays = len(self.inputs) + len(self.outputs)
        *pointers, length, inner, rows, blocks = arguments(f, "p" * arrays + "iiii")

        def block(point: str, _: list[str]) -> None:
            if together:
                outer = f.binary("udiv", "i64", point, blocks)
                first = f.mul(f.binary("urem", "i64", point, blocks), lanes)
                if lanes > 1:
                    first = f.smin(first, f.sub(rows, lanes))
                base = f.add(f.mul(outer, f.mul(length, inner)), first)
                self._row(f, target, lanes, pointers, length, inner, base, None)
            else:
                first = f.smin(f.mul(point, lanes), f.sub(rows, lanes))
                steps = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
                wide = vector("i64", lanes)
                row = f.binary("add", wide, f.splat(wide, first), steps)
                outer = f.binary("udiv", wide, row, f.splat(wide, inner))
                column = f.binary("urem", wide, row, f.splat(wide, inner))
                span = f.splat(wide, f.mul(length, inner))
                offsets = f.binary("add", wide, f.binary("mul", wide, outer, span), column)
                self._row(f, target, lanes, pointers, length, inner, 0, offsets)

        each_point(f, block)

    def _row(
        self, f: IrFunction, target: Target, lanes: int, pointers: list[str], length: Value, inner: Value, base: Value,
        offsets: str | None, begin: Value = 0, state: list[tuple[str, str]] | None = None,
    ) -> None:  # fmt: skip
        sources, results = pointers[: len(self.inputs)], pointers[len(self.inputs) :]
        bases = [
            _pointers(f, p, d, offsets, lanes) for p, d in zip(pointers, (*self.inputs, *self.outputs), strict=True)
        ]

        def turn(index: str, state: list[str]) -> list[str]:
            at = f.sub(f.sub(length, 1), index) if self.reverse else index
            element = f.add(base, f.mul(at, inner))
            read = []
            for i, (pointer, dtype) in enumerate(zip(sources, self.inputs, strict=True)):
                if offsets is None:
                    read.append(load_element(f, dtype, pointer, element, lanes, target))
                else:
                    read.append(_gathered(f, dtype, bases[i], element, lanes, target))
            after, out = self.step(f, target, lanes, index, state, read)
            for i, (pointer, dtype, parts) in enumerate(zip(results, self.outputs, out, strict=True)):
                if offsets is None:
                    store_element(f, dtype, parts, pointer, element, lanes, target)
                else:
                    _scattered(f, dtype, parts, bases[len(sources) + i], element, lanes, target)
            return after

        f.loop(begin, length, 1, state or self.state(lanes), turn)

    def _emit_tiles(self, module: IrModule, lanes: int, target: Target) -> None:
        """Blocks of whole rows: tiles are transposed, so that a line of memory is read once. Arguments as before."""
        f = kernel(module, "rows_tiled")
        kinds = (*self.inputs, *self.outputs)
        *pointers, length, _inner, rows, _blocks = arguments(f, "p" * len(kinds) + "iiii")
        wide = vector("i64", lanes)
        lane_numbers = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
        whole = f.round_down(length, lanes)

        def row(pointer: str, dtype: DType, first: Value, lane: int, at: Value) -> str:
            return f.address(f"i{8 * dtype.itemsize}", pointer, f.add(f.mul(f.add(first, lane), length), at))

        def block(point: str, _: list[str]) -> None:
            first = f.smin(f.mul(point, lanes), f.sub(rows, lanes))

            def tile(index: str, state: list[str]) -> list[str]:
                at = f.sub(f.sub(length, lanes), index) if self.reverse else index
                columns = []
                for pointer, dtype in zip(pointers, self.inputs, strict=False):
                    square = vector(f"i{8 * dtype.itemsize}", lanes)
                    places = [row(pointer, dtype, first, lane, at) for lane in range(lanes)]
                    turned = transposed(f, square, [f.load(square, place, dtype.itemsize) for place in places])
                    columns.append([_opened(f, dtype, c, lanes, target) for c in turned])
                made: list[list[Parts]] = [[] for _ in self.outputs]
                order = range(lanes - 1, -1, -1) if self.reverse else range(lanes)
                for number, column in enumerate(order):
                    state, out = self.step(f, target, lanes, f.add(index, number), state, [c[column] for c in columns])
                    for results, parts in zip(made, out, strict=True):
                        results.append(parts)
                for pointer, dtype, results in zip(pointers[len(self.inputs) :], self.outputs, made, strict=True):
                    square = vector(f"i{8 * dtype.itemsize}", lanes)
                    closed = [_closed(f, dtype, results[column], lanes, target) for column in order]
                    for lane, value in enumerate(transposed(f, square, closed)):
                        f.store(square, value, row(pointer, dtype, first, lane, at), dtype.itemsize)
                return state

            state = f.loop(0, whole, lanes, self.state(lanes), tile)
            span = f.splat(wide, length)
            offsets = f.binary("mul", wide, f.binary("add", wide, f.splat(wide, first), lane_numbers), span)
            carried = [(type_, value) for (type_, _), value in zip(self.state(lanes), state, strict=True)]
            self._row(f, target, lanes, pointers, length, 1, 0, offsets, whole, carried)

        each_point(f, block)

    def native(self, target: Target, shape: tuple[Dim, ...], axis: int) -> NativeOp:
        lanes = target.lanes(max(register_bytes(d) for d in self.inputs))

        def plan(sizes: Sizes) -> Planned:
            outer, length, inner = around(shape, axis, sizes)
            if outer * length * inner == 0:
                return Planned(())
            arrays = [("input", i) for i in range(len(self.inputs))] + [("output", i) for i in range(len(self.outputs))]
            for name, width in (("rows_wide", 4 * lanes), ("rows", lanes)):
                if inner >= width:
                    blocks = -(-inner // width)
                    slots = [*arrays, *number_slots(length, inner, inner, blocks)]
                    return Planned([NativeCall(name, slots, outer * blocks)])
            rows = outer * inner
            square = self.tile(target)
            if self.can_tile and inner == 1 and rows >= square and length >= square:
                slots = [*arrays, *number_slots(length, inner, rows, 1)]
                return Planned([NativeCall("rows_tiled", slots, -(-rows // square))])
            if self.emit_whole_rows is not None and inner == 1:
                return Planned([NativeCall("whole_rows", [*arrays, *number_slots(length, inner, rows, 1)], rows)])
            if rows >= GATHERED_ROWS:
                slots = [*arrays, *number_slots(length, inner, rows, 1)]
                return Planned([NativeCall("rows_gathered", slots, -(-rows // GATHERED_ROWS))])
            return Planned([NativeCall("rows_single", [*arrays, *number_slots(length, inner, inner, inner)], rows)])

        names = ("rows_wide", "rows", "rows_gathered", "rows_single", *(("rows_tiled",) if self.can_tile else ()))
        names += ("whole_rows",) if self.emit_whole_rows is not None else ()
        key = f"recurrence {self.name} {self.inputs} {self.reverse}"
        return NativeOp(key, lambda module: self.emit(module, target), names, plan)


def _opened(f: IrFunction, dtype: DType, bits: str, lanes: int, target: Target) -> Parts:
    """Elements as integers to registers."""
    source, memory = vector(f"i{8 * dtype.itemsize}", lanes), memory_type(dtype)
    if dtype.is_complex:
        return deinterleave(f, memory, f.convert("bitcast", source, bits, vector(memory, 2 * lanes)), lanes)
    return (from_memory(f, dtype, f.convert("bitcast", source, bits, vector(memory, lanes)), lanes, target),)


def _closed(f: IrFunction, dtype: DType, parts: Parts, lanes: int, target: Target) -> str:
    """Registers to elements as integers."""
    result, memory = vector(f"i{8 * dtype.itemsize}", lanes), memory_type(dtype)
    if dtype.is_complex:
        both = interleave(f, vector(memory, lanes), parts, lanes)
        return f.convert("bitcast", vector(memory, 2 * lanes), both, result)
    return f.convert("bitcast", vector(memory, lanes), to_memory(f, dtype, parts[0], lanes, target), result)


def _pointers(f: IrFunction, base: str, dtype: DType, offsets: str | None, lanes: int) -> str:
    """Addresses of the first elements of rows that do not lie side by side."""
    if offsets is None:
        return base
    wide = vector("i64", lanes)
    bytes_ = f.binary("mul", wide, offsets, constant(wide, dtype.itemsize))
    return f.op(f"getelementptr i8, ptr {base}, {wide} {bytes_}")


def _lane_addresses(f: IrFunction, dtype: DType, bases: str, element: Value, lanes: int, component: int) -> str:
    wide = vector("i64", lanes)
    step = f.add(f.mul(element, dtype.itemsize), component * component_bytes(dtype))
    return f.op(f"getelementptr i8, <{lanes} x ptr> {bases}, {wide} {f.splat(wide, step)}")


def _gathered(f: IrFunction, dtype: DType, bases: str, element: Value, lanes: int, target: Target) -> Parts:
    memory, mask = memory_type(dtype, lanes), constant(vector("i1", lanes), 1)
    parts = []
    for component in range(2 if dtype.is_complex else 1):
        addresses = _lane_addresses(f, dtype, bases, element, lanes, component)
        loaded = gather(f, memory, addresses, component_bytes(dtype), mask)
        parts.append(from_memory(f, dtype, loaded, lanes, target))
    return tuple(parts)


def _scattered(
    f: IrFunction, dtype: DType, parts: Parts, bases: str, element: Value, lanes: int, target: Target
) -> None:
    memory, mask = memory_type(dtype, lanes), constant(vector("i1", lanes), 1)
    for component, part in enumerate(parts):
        addresses = _lane_addresses(f, dtype, bases, element, lanes, component)
        scatter(f, memory, to_memory(f, dtype, part, lanes, target), addresses, component_bytes(dtype), mask)


# the ops


@override("linear_recurrence")
def _linear_recurrence(node: Node, target: Target) -> NativeOp:
    (kind,) = node.types
    dtype, op = kind.dtype, node.op
    parts = 2 if dtype.is_complex else 1

    def step(
        f: IrFunction, target: Target, lanes: int, index: Value, state: list[str], read: list[Parts]
    ) -> tuple[list[str], list[Parts]]:
        factor, term = read
        type_ = register_type(dtype, lanes)
        if parts == 1 and target.has_fma:
            after: Parts = (f.fma(type_, factor[0], state[0], term[0]),)
        else:
            product = emit_scalar(ScalarCall(f, target, "mul", (factor, tuple(state)), (dtype, dtype), dtype, lanes))
            after = emit_scalar(ScalarCall(f, target, "add", (product, term), (dtype, dtype), dtype, lanes))
        return list(after), [after]

    def state(lanes: int) -> list[tuple[str, str]]:
        type_ = register_type(dtype, lanes)
        return [(type_, constant(type_, 0.0))] * parts

    made = Recurrence("linear", (dtype, dtype), (dtype,), state, step, op.reverse)  # type: ignore[attr-defined]
    return made.native(target, kind.shape, op.axis)  # type: ignore[attr-defined]


@override("cummax", "cummin")
def _running_extremum(node: Node, target: Target) -> NativeOp:
    dtype, op = node.types[0].dtype, node.op
    largest = op.name == "cummax"
    predicate = (
        ("ogt" if largest else "olt")
        if dtype.is_float
        else ("s" if dtype.kind == "int" else "u") + ("gt" if largest else "lt")
    )

    def step(
        f: IrFunction, target: Target, lanes: int, index: Value, state: list[str], read: list[Parts]
    ) -> tuple[list[str], list[Parts]]:
        type_ = register_type(dtype, lanes)
        flag, ids = with_element(type_, "i1"), vector("i64", lanes)
        best, at = state
        ((x,),) = read
        better = f.compare(predicate, type_, x, best)
        if dtype.is_float:
            first_nan = f.binary("and", flag, f.compare("uno", type_, x, x), f.compare("ord", type_, best, best))
            better = f.binary("or", flag, better, first_nan)
        first = f.splat(flag, f.compare("eq", "i64", index, 0))
        better = f.binary("or", flag, better, first)
        best = f.select(type_, better, x, best)
        at = f.select(ids, better, f.splat(ids, index), at)
        return [best, at], [(best,), (at,)]

    def state(lanes: int) -> list[tuple[str, str]]:
        type_, ids = register_type(dtype, lanes), vector("i64", lanes)
        return [(type_, constant(type_, 0)), (ids, constant(ids, 0))]

    def emit_whole_rows(module: IrModule, target: Target) -> None:
        """Vectors without a new extremum, as most are, store the old one; in others it goes element by element."""
        f = kernel(module, "whole_rows")
        source, values, places, length, _inner, _rows, _blocks = arguments(f, "pppiiii")
        lanes = target.lanes(register_bytes(dtype))
        type_, ids = register_type(dtype, lanes), vector("i64", lanes)
        one = register_type(dtype)

        def row(point: str, _: list[str]) -> None:
            base = f.mul(point, length)

            def by_element(i: str, carried: list[str]) -> list[str]:
                at = f.add(base, i)
                after, out = step(f, target, 1, i, carried, [load_element(f, dtype, source, at, 1, target)])
                store_element(f, dtype, out[0], values, at, 1, target)
                store_element(f, i64, out[1], places, at, 1, target)
                return after

            def some(i: str, carried: list[str]) -> list[str]:
                best, place = carried
                at = f.add(base, i)
                (x,) = load_element(f, dtype, source, at, lanes, target)
                better = f.compare(predicate.replace("o", "u"), type_, x, f.splat(type_, best))
                found = f.call("i1", f"llvm.vector.reduce.or.v{lanes}i1", (vector("i1", lanes), better))
                if dtype.is_float:  # all numbers are beside NaN, which stays
                    found = f.binary("and", "i1", found, f.compare("ord", one, best, best))
                found = f.binary("or", "i1", found, f.compare("eq", "i64", i, 0))

                def same() -> list[str]:
                    store_element(f, dtype, (f.splat(type_, best),), values, at, lanes, target)
                    store_element(f, i64, (f.splat(ids, place),), places, at, lanes, target)
                    return [best, place]

                def each() -> list[str]:
                    start = list(zip((one, "i64"), carried, strict=True))
                    return f.loop(i, f.add(i, lanes), 1, start, by_element)

                return f.if_(found, each, same, (one, "i64"))

            whole = f.round_down(length, lanes)
            carried = f.loop(0, whole, lanes, state(1), some)
            f.loop(whole, length, 1, list(zip((one, "i64"), carried, strict=True)), by_element)

        each_point(f, row)

    made = Recurrence(op.name, (dtype,), (dtype, i64), state, step, emit_whole_rows=emit_whole_rows)
    return made.native(target, node.types[0].shape, op.axis)  # type: ignore[attr-defined]


@override("logcumsumexp")
def _log_cumsum_exp(node: Node, target: Target) -> NativeOp:
    (kind,) = node.types
    dtype = kind.dtype

    def step(
        f: IrFunction, target: Target, lanes: int, index: Value, state: list[str], read: list[Parts]
    ) -> tuple[list[str], list[Parts]]:
        type_ = register_type(dtype, lanes)
        m = exponentials.VectorMath(f, type_, target)
        (total,), ((x,),) = state, read
        high = f.select(type_, f.compare("ogt", type_, total, x), total, x)
        # equal numbers may both be infinite: their difference is 0
        gap = m.select(m.test("oeq", total, x), m.c(0.0), m.neg(m.abs(m.sub(total, x))))
        after = m.add(high, logs.log1p(m, exponentials.exp(m, gap)))
        after = m.select(m.test("uno", total, x), m.add(total, x), after)
        return [after], [(after,)]

    def state(lanes: int) -> list[tuple[str, str]]:
        type_ = register_type(dtype, lanes)
        return [(type_, constant(type_, float("-inf")))]

    def emit_whole_rows(module: IrModule, target: Target) -> None:
        """A register at a time: rounds double the runs of lanes that are done, then all take in what came before."""
        f = kernel(module, "whole_rows")
        source, sums, length, _inner, _rows, _blocks = arguments(f, "ppiiii")
        lanes = target.lanes(register_bytes(dtype))
        type_, one = register_type(dtype, lanes), register_type(dtype)

        def joined(width: int, before: str, x: str) -> str:
            return step(f, target, width, 0, [before], [(x,)])[0][0]

        def row(point: str, _: list[str]) -> None:
            base = f.mul(point, length)

            def some(i: str, carried: list[str]) -> list[str]:
                at = f.add(base, i)
                (x,) = load_element(f, dtype, source, at, lanes, target)
                by = 1
                while by < lanes:
                    last = f.shuffle(type_, x, "poison", [n - n % (2 * by) + by - 1 for n in range(lanes)])
                    upper = vector_constant("i1", [int(n % (2 * by) >= by) for n in range(lanes)])
                    x = f.select(type_, upper, joined(lanes, last, x), x)
                    by *= 2
                x = joined(lanes, f.splat(type_, carried[0]), x)
                store_element(f, dtype, (x,), sums, at, lanes, target)
                return [f.extract(type_, x, lanes - 1)]

            def by_element(i: str, carried: list[str]) -> list[str]:
                at = f.add(base, i)
                (x,) = load_element(f, dtype, source, at, 1, target)
                after = joined(1, carried[0], x)
                store_element(f, dtype, (after,), sums, at, 1, target)
                return [after]

            whole = f.round_down(length, lanes)
            carried = f.loop(0, whole, lanes, state(1), some)
            f.loop(whole, length, 1, [(one, carried[0])], by_element)

        each_point(f, row)

    made = Recurrence("logcumsumexp", (dtype,), (dtype,), state, step, emit_whole_rows=emit_whole_rows)
    return made.native(target, kind.shape, node.op.axis)  # type: ignore[attr-defined]
