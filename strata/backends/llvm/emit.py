"""Kernels as LLVM IR: a nest and its schedule become one function `void kernel(ptr arguments, i64 begin, i64 end)`.

`arguments` is a block of pointers to the inputs, then the outputs, then the symbolic sizes as i64. The function does
the points begin … end - 1 of the parallel loops, taken as one flat index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from strata.backends.llvm.builder import Module, Value, vector, vector_constant
from strata.backends.llvm.emit_reduce import Accumulator
from strata.backends.llvm.emit_values import Context, Values
from strata.backends.llvm.registers import (
    Parts,
    register_bytes,
    register_type,
)
from strata.core import Dim, Target, bounds, dim_prod
from strata.kernel import (
    Axis,
    Block,
    Compute,
    Expr,
    Kernel,
    Load,
    MapLoop,
    ReduceLoop,
    Scalar,
    Schedule,
    StoreStep,
    linear,
    number_loops,
    parallel_chain,
    row_values,
    turns,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a vector loop: its bounds, how many points it does at once, and whether its last step is masked."""

    low: Value
    high: Value
    lanes: int
    masked: bool


RunRange = Callable[[Value, Value, Sequence[tuple[str, Value]]], list[str]]
_BLOCK_STEPS = 256  # terms that one lane adds up before they join the total


def emit_kernel(module: Module, kernel: Kernel, nest: Block, schedule: Schedule, target: Target) -> str:
    """Adds the function of a kernel to a module and returns its name."""
    _Emitter(module, kernel, nest, schedule, target).emit()
    return kernel.name


class _Emitter(Values):
    """The function of one kernel: its loops, around the values that they compute."""

    def __init__(self, module: Module, kernel: Kernel, nest: Block, schedule: Schedule, target: Target) -> None:
        parameters = (("ptr noalias readonly", "arguments"), ("i64", "begin"), ("i64", "end"))
        self.nest, self.schedule = nest, schedule
        self.numbers = number_loops(nest)
        self.start(module.function(kernel.name, parameters), kernel, target)

    def emit(self) -> None:
        f = self.f
        for slot, buffer in enumerate(self.kernel.buffers):
            address = f.address("ptr", "%arguments", slot)
            self.pointers[buffer.name] = f.load("ptr", address, 8, flags=", !invariant.load !{}")
        base = len(self.kernel.buffers)
        for slot, name in enumerate(self.kernel.symbols()):
            self.sizes[name] = f.load("i64", f.address("i64", "%arguments", base + slot), 8)
        chain = parallel_chain(self.nest)[: self.schedule.parallel.loops]
        self._parallel(chain)
        f.ret()

    # loops

    def _parallel(self, chain: list[MapLoop]) -> None:
        """The handed-out loops: whole rows of the last one, and parts of a row at both ends of the range."""
        f = self.f
        if not chain:
            self.block(self.nest)
            return
        for loop, outer in zip(chain, [self.nest, *(c.body for c in chain)], strict=False):
            if loop is chain[0]:
                self._steps_before(outer)
        if len(chain) == 1:
            self._map(chain[0], "%begin", "%end")
            return
        *outer_loops, last = chain
        width = self.size(last.axis.extent)
        first_row = f.op(f"sdiv i64 %begin, {width}")
        end_row = f.op(f"sdiv i64 {f.add(f.sub('%end', 1), width)}, {width}")

        def row(position: str, _: list[str]) -> None:
            with self._scope(*(loop.axis for loop in outer_loops)):
                rest: Value = position
                for loop in reversed(outer_loops[1:]):
                    extent = self.size(loop.axis.extent)
                    self.first[loop.axis] = f.op(f"srem i64 {rest}, {extent}")
                    rest = f.op(f"sdiv i64 {rest}, {extent}")
                self.first[outer_loops[0].axis] = rest
                for loop in outer_loops:
                    self._steps_before(loop.body)
                start = f.mul(position, width)
                low = f.smax(f.sub("%begin", start), 0)
                high = f.smin(f.sub("%end", start), width)
                self._map(last, low, high)

        f.loop(first_row, end_row, 1, (), row)

    def _running_block(self, block: Block) -> Callable[[list[str]], tuple[Value, ...]]:
        """A block as the body of a loop that carries nothing."""

        def body(_: list[str]) -> tuple[Value, ...]:
            self.block(block)
            return ()

        return body

    def _steps_before(self, block: Block) -> None:
        for step in block.steps:
            if isinstance(step, Compute):
                self.value(step.node)

    def block(self, block: Block) -> None:
        for at, step in enumerate(block.steps):
            match step:
                case Compute(node):
                    self.value(node)
                case StoreStep(store):
                    self.store(store)
                case MapLoop():
                    self._map(step, 0, self.size(step.axis.extent))
                case ReduceLoop():
                    self._stage(step, block.steps[at + 1 :])
                    self._reduce(step)
                    self.filling = frozenset()

    @contextmanager
    def _scope(self, *axes: Axis) -> Iterator[None]:
        """Inside, the axes have new values, and what depends on them is forgotten; at the end, all of it is."""
        before = self.values, self.first, self.wide, self.context
        bound = frozenset(axes)
        self.values = {n: v for n, v in self.values.items() if not (n.free & bound)}
        self.first = {n: v for n, v in self.first.items() if not (n.free & bound)}
        self.wide = {k: v for k, v in self.wide.items() if not (k[0].free & bound)}
        try:
            yield
        finally:
            self.values, self.first, self.wide, self.context = before

    def _map(self, loop: MapLoop, low: Value, high: Value) -> None:
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        if loop.scans:
            self._scan(loop, low, high)
            return
        if self.schedule.tile(self.numbers[id(loop)]) > 1:
            self._tile(loop, low, high)
            return
        if lanes == 1 or self.context.axis is not None:
            self._serial(loop.axis, low, high, (), self._running_block(loop.body))
            return
        for segment in self._segments(loop, low, high, lanes):
            self._vector(loop.axis, segment, (), self._running_block(loop.body))

    def _tile(self, loop: MapLoop, low: Value, high: Value) -> None:
        """Squares of both loops, each turned in registers; what is left goes the plain way."""
        f, by = self.f, self.schedule.tile(self.numbers[id(loop)])
        inner = next(s for s in loop.body.steps if isinstance(s, MapLoop))
        loads = [s.node for s in inner.body.steps if isinstance(s, Compute) and isinstance(s.node, Load)]
        turned = [n for n in loads if isinstance(n, Load) and turns(n, loop.axis, inner.axis)]
        middle = f.add(low, f.round_down(f.sub(high, low), by))
        whole, *rest = self._segments(inner, 0, self.size(inner.axis.extent), by)

        def square(first: str) -> tuple[Value, ...]:
            with self._scope(loop.axis):
                self.first[loop.axis] = first
                self.tiles = {n: self._turned(n, inner.axis, by) for n in turned}
            each(first)
            self.tiles = {}
            return ()

        def each(first: str) -> tuple[Value, ...]:
            for self.turn in range(by):
                with self._scope(loop.axis):
                    self.first[loop.axis] = f.add(first, self.turn)
                    self._steps_before(loop.body)
                    self.block(inner.body)
            return ()

        def column(first: str, _: list[str]) -> None:
            self._vector(inner.axis, whole, (), lambda _: square(first))
            for segment in rest:
                self._vector(inner.axis, segment, (), lambda _: each(first))

        f.loop(low, middle, by, (), column)
        self._serial(loop.axis, middle, high, (), self._running_block(loop.body))

    def _turned(self, node: Load, axis: Axis, by: int) -> list[Parts]:
        """A square of a strided load: rows loaded whole, then interleaved into columns."""
        f = self.f
        stride = self.size(linear(node.index[0]).terms[axis])
        start = self.at_first(node.index[0])
        rows = [
            self._read(node.dtype, self._pointer(node.buffer, f.add(start, f.mul(stride, lane))), by, None)
            for lane in range(by)
        ]
        type_ = register_type(node.dtype, by)
        low = [lane // 2 + (lane % 2) * by for lane in range(by)]
        high = [by // 2 + pick for pick in low]
        count = by
        while count > 1:
            half = by // 2
            rows = [
                tuple(f.shuffle(type_, a, b, picks) for a, b in zip(rows[n], rows[n + half], strict=True))
                for n in range(half)
                for picks in (low, high)
            ]
            count //= 2
        return rows

    def _scan(self, loop: MapLoop, low: Value, high: Value) -> None:
        """A loop in order, with running reductions carried along."""
        accumulators = [Accumulator(self.f, s.kind, s.dtype, self.target) for s in loop.scans]
        widths = [self.context.lanes_of(s) for s in loop.scans]
        carried = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]

        def body(values: list[str]) -> list[Value]:
            before = self.running
            shares = _shares(accumulators, values)
            self.running = dict(zip(loop.scans, zip(accumulators, shares, strict=True), strict=True))
            self.block(loop.body)
            following = [part for scan in loop.scans for part in self.running[scan][1]]
            self.running = before
            return list(following)

        self._serial(loop.axis, low, high, carried, body)

    def _serial(
        self,
        axis: Axis,
        low: Value,
        high: Value,
        carried: Sequence[tuple[str, Value]],
        body: Callable[[list[str]], Sequence[Value]],
    ) -> list[str]:
        def inside(index: str, values: list[str]) -> Sequence[Value]:
            with self._scope(axis):
                self.first[axis] = index
                if self.context.axis is axis:  # a loop over the same axis inside a vector loop: lanes mean nothing here
                    self.context = Context()
                return body(values)

        return self.f.loop(low, high, 1, carried, inside)

    def _vector(
        self,
        axis: Axis,
        segment: Segment,
        carried: Sequence[tuple[str, Value]],
        body: Callable[[list[str]], Sequence[Value]],
    ) -> list[str]:
        f = self.f

        def inside(index: str, values: list[str]) -> Sequence[Value]:
            with self._scope(axis):
                self.first[axis] = index
                mask = None
                if segment.masked:
                    ids = vector("i32", segment.lanes)
                    left = f.op(f"trunc i64 {f.smin(f.sub(segment.high, index), segment.lanes)} to i32")
                    iota = vector_constant("i32", range(segment.lanes))
                    mask = f.compare("ult", ids, iota, f.splat(ids, left))
                self.context = Context(axis, segment.lanes, mask)
                return body(values)

        return f.loop(segment.low, segment.high, segment.lanes, carried, inside)

    def _segments(self, loop: MapLoop | ReduceLoop, low: Value, high: Value, lanes: int) -> list[Segment]:
        """The range by whole steps, then what is left: masked where that is cheap, else by ones."""
        f = self.f
        single = min(lanes, self._single_lanes(loop))
        segments: list[Segment] = []
        widths = [lanes] if self.target.has_avx512 or single == lanes else [lanes, single]
        for width in widths:
            middle = f.add(low, f.round_down(f.sub(high, low), width))
            if middle != low:
                segments.append(Segment(low, middle, width, False))
            low = middle
        if low != high:
            masked = self.target.has_avx512
            segments.append(Segment(low, high, single if masked else 1, masked))
        return segments

    def _single_lanes(self, loop: MapLoop | ReduceLoop) -> int:
        """Lanes that fill one register with the widest element that the loop touches."""
        widest = 1
        stack = [loop.body]
        nodes: list[Expr] = list(loop.reduces) if isinstance(loop, ReduceLoop) else []
        while stack:
            for step in stack.pop().steps:
                match step:
                    case Compute(node):
                        nodes.append(node)
                    case StoreStep(store):
                        nodes.append(store.value)
                    case MapLoop():
                        stack.append(step.body)
                    case ReduceLoop():
                        nodes += step.reduces
                        stack.append(step.body)
        widest = max((register_bytes(n.dtype) for n in nodes), default=4)
        return self.target.lanes(widest)

    def _stage(self, loop: ReduceLoop, later: Sequence[object]) -> None:
        """Row buffers for what a reduction computes and later loops need again."""
        if not self.schedule.stages(self.numbers[id(loop)]) or self.context.axis is not None:
            return
        nodes = [n for step in later if isinstance(step, (MapLoop, ReduceLoop)) for n in row_values(loop, step)]
        length = bounds(loop.axis.extent)[1]
        assert length is not None, "only bounded rows are staged"
        for node in nodes:
            if node not in self.rows:
                # a masked last step stores a whole register
                size = length + self.target.vector_bytes
                self.rows[node] = loop.axis, self.f.alloca(register_type(node.dtype), size)
                self.fillers.setdefault(id(loop), set()).add(node)
        self.filling = frozenset(self.fillers.get(id(loop), ()))

    def _reduce(self, loop: ReduceLoop) -> None:
        accumulators = [Accumulator(self.f, r.kind, r.body.dtype, self.target) for r in loop.reduces]
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        high = self.size(loop.axis.extent)
        if lanes == 1 or self.context.axis is not None:
            results = self._serial_reduce(loop, accumulators, high)
        else:
            results = self._vector_reduce(loop, accumulators, high, lanes)
        for reduce, parts in zip(loop.reduces, results, strict=True):
            self.values[reduce] = parts

    def _serial_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value) -> list[Parts]:
        widths = [self.context.lanes_of(r) for r in loop.reduces]
        carried = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]

        def body(values: list[str]) -> list[Value]:
            return self._accumulate(loop, accumulators, widths, values)

        def run(low: Value, end: Value, state: Sequence[tuple[str, Value]]) -> list[str]:
            return self._serial(loop.axis, low, end, state, body)

        final = self._in_blocks(loop, accumulators, widths, (0, high), carried, 1, run)
        return [a.finish(p, n) for a, p, n in zip(accumulators, _shares(accumulators, final), widths, strict=True)]

    def _reducing(self, loop: ReduceLoop, accumulators: list[Accumulator], segment: Segment) -> RunRange:
        """Runs a part of a vector reduction's range."""
        widths = [segment.lanes] * len(accumulators)

        def run(low: Value, high: Value, state: Sequence[tuple[str, Value]]) -> list[str]:
            part = replace(segment, low=low, high=high)
            return self._vector(loop.axis, part, state, lambda v: self._accumulate(loop, accumulators, widths, v))

        return run

    def _in_blocks(
        self,
        loop: ReduceLoop,
        accumulators: list[Accumulator],
        widths: list[int],
        ends: tuple[Value, Value],
        carried: Sequence[tuple[str, Value]],
        step: int,
        run: RunRange,
    ) -> list[str]:
        """Long float sums block by block, each from zero, so that rounding grows with the blocks and not the terms."""
        most = bounds(loop.axis.extent)[1]
        block = step * _BLOCK_STEPS
        long = step > 0 and (most is None or most > 4 * block)
        if not long or not any(a.kind == "sum" and a.dtype.is_inexact for a in accumulators):
            return run(*ends, carried)

        def one(start: str, totals: list[str]) -> list[Value]:
            fresh = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]
            stop = self.f.smin(self.f.add(start, block), ends[1])
            made = _shares(accumulators, run(start, stop, fresh))
            olds = _shares(accumulators, totals)
            joined = [a.join(o, m, n) for a, o, m, n in zip(accumulators, olds, made, widths, strict=True)]
            return [part for parts in joined for part in parts]

        return self.f.loop(*ends, block, carried, one)

    def _accumulate(
        self, loop: ReduceLoop, accumulators: list[Accumulator], widths: list[int], values: Sequence[str]
    ) -> list[Value]:
        """The body of a reduction loop; returns the next values of all accumulators."""
        self.block(loop.body)
        following: list[Value] = []
        for reduce, accumulator, width, state in zip(
            loop.reduces, accumulators, widths, _shares(accumulators, values), strict=True
        ):
            mask = self.context.mask if width > 1 else None
            if accumulator.is_argument:
                position = self.widened(loop.axis, width)
                following += accumulator.step(state, self.widened(reduce.body, width), width, mask, position)
            elif accumulator.takes_products and _is_product(reduce.body, self.values):
                assert isinstance(reduce.body, Scalar)
                a, b = (self.widened(x, width) for x in reduce.body.args)
                following += accumulator.step_product(state, a, b, width, mask)
            else:
                following += accumulator.step(state, self.widened(reduce.body, width), width, mask)
        return following

    def _vector_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value, lanes: int) -> list[Parts]:
        current: list[Parts] = []
        width = 0
        for segment in self._segments(loop, 0, high, lanes):
            n = segment.lanes
            if not current:
                states = [a.start(n) for a in accumulators]
            else:
                narrowed = [a.narrow(s, width, n) for a, s in zip(accumulators, current, strict=True)]
                states = [a.typed(s, n) for a, s in zip(accumulators, narrowed, strict=True)]
            carried = [c for s in states for c in s]
            widths = [n] * len(accumulators)
            run = self._reducing(loop, accumulators, segment)
            ends = segment.low, segment.high
            final = self._in_blocks(loop, accumulators, widths, ends, carried, 0 if segment.masked else n, run)
            current, width = _shares(accumulators, final), n
        if not current:
            current, width = [tuple(str(v) for _, v in a.start(1)) for a in accumulators], 1
        return [a.finish(a.narrow(s, width, 1), 1) for a, s in zip(accumulators, current, strict=True)]


def _shares(accumulators: list[Accumulator], values: Sequence[str]) -> list[Parts]:
    """Loop-carried values dealt out to the accumulators they belong to."""
    result, at = [], 0
    for accumulator in accumulators:
        result.append(tuple(values[at : at + accumulator.parts]))
        at += accumulator.parts
    return result


def _is_product(node: Expr, known: dict[Expr, Parts]) -> bool:
    return isinstance(node, Scalar) and node.name == "mul"


def points(kernel: Kernel, nest: Block, schedule: Schedule) -> Dim:
    """How many points the parallel loops have in all."""
    return dim_prod([loop.axis.extent for loop in parallel_chain(nest)[: schedule.parallel.loops]])
