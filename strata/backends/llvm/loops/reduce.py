"""Reductions and scans of a kernel: scalar, vectorised along the reduction, or vectorised across it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from strata.backends.llvm.ir.builder import IrFunction, Value, bits_of, constant, vector, vector_constant
from strata.backends.llvm.ir.native import while_loop
from strata.backends.llvm.ir.registers import Parts, register_type
from strata.backends.llvm.loops.accumulate import Accumulator
from strata.backends.llvm.loops.loops import Loops, LoopSegment
from strata.core import DType, Target, bounds, i32, i64
from strata.kernel import REGISTERS, STEPS, Axis, LoopBlock, MapLoop, ReduceLoop, Scalar, block_terms, sum_bytes

RunRange = Callable[[Value, Value, Sequence[tuple[str, Value]]], list[str]]
_EXCHANGE_BYTES = 16 << 10  # of running values in memory: half of the nearest cache
_SCAN_STEPS = 256  # registers of a running sum that start from zero
_MOST_STEPS = 256  # between two looks at whether a result is decided


class Reductions(Loops):
    """Loops that carry accumulators."""

    def block(self, block: LoopBlock) -> None:
        """The steps of a block, in order."""
        raise NotImplementedError

    def _aligned_segments(
        self, loop: MapLoop, low: Value, high: Value, lanes: int, single: int | None = None
    ) -> list[LoopSegment]:
        """Segments of a map; before non-temporal stores, a first one up to the start of a cache line."""
        raise NotImplementedError

    def _scan(self, loop: MapLoop, low: Value, high: Value) -> None:
        """A loop in order, with running reductions carried along."""
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        if lanes > 1 and self.context.axis is None:
            self._vector_scan(loop, low, high, lanes)
            return
        accumulators = [Accumulator(self.f, s.kind, s.dtype, self.target, keeps_sign=True) for s in loop.scans]
        widths = [self.context.lanes_of(s) for s in loop.scans]
        starts = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]

        def body(values: list[str]) -> list[Value]:
            before = self.running
            shares = dealt(accumulators, values)
            self.running = dict(zip(loop.scans, zip(accumulators, shares, strict=True), strict=True))
            self.block(loop.body)
            following = [part for scan in loop.scans for part in self.running[scan][1]]
            self.running = before
            return list(following)

        def run(first: Value, end: Value, state: Sequence[tuple[str, Value]]) -> list[str]:
            return self._serial(loop.axis, first, end, state, body)

        if _goes_in_blocks(loop, accumulators, _SCAN_STEPS):
            self._scan_blocks(loop, (low, high), _SCAN_STEPS, starts, starts * 2, run)
        else:
            run(low, high, starts)

    def _vector_scan(self, loop: MapLoop, low: Value, high: Value, lanes: int) -> None:
        """The same in vectors: carried are the values before a step, in every lane of one register."""
        accumulators = [Accumulator(self.f, s.kind, s.dtype, self.target, keeps_sign=True) for s in loop.scans]
        wide = next((self.target.lanes(sum_bytes(s.dtype)) for s in loop.scans if s.order), self._single_lanes(loop))
        single = min(lanes, wide)
        block = wide * _SCAN_STEPS

        def run(first: Value, end: Value, _: Sequence[tuple[str, Value]]) -> list[str]:
            return self._scan_segments(loop, accumulators, (first, end), lanes, single)

        starts = [c for a in accumulators for c in a.start(1)]
        if _goes_in_blocks(loop, accumulators, block):
            self._scan_blocks(loop, (low, high), block, starts, starts * 2, run)
        else:
            run(low, high, starts)

    def _scan_segments(
        self, loop: MapLoop, accumulators: list[Accumulator], ends: tuple[Value, Value], lanes: int, single: int
    ) -> list[str]:
        """One block of a vector scan, from nothing; what it ends with."""
        before, outside = self.running, self.scan_bases
        states, width = [tuple(str(v) for _, v in a.start(single)) for a in accumulators], single
        for segment in self._aligned_segments(loop, *ends, lanes, single):
            following = min(segment.lanes, single)
            if following != width:
                pairs = zip(accumulators, states, strict=True)
                states = [self._in_every_lane(a, s, width, following) for a, s in pairs]
                width = following
            carried = [c for a, s in zip(accumulators, states, strict=True) for c in a.typed(s, width)]
            types = {scan: a.start(width)[0][0] for scan, a in zip(loop.scans, accumulators, strict=True)}
            mine = {scan: outside[scan][0] for scan in loop.scans if scan in outside} if width > 1 else {}
            self.scan_bases = outside | {scan: (self.f.splat(types[scan], base),) for scan, base in mine.items()}
            self.scan_lanes = width
            states = dealt(
                accumulators, self._scanning(loop, accumulators, segment)(segment.low, segment.high, carried)
            )
        self.running, self.scan_lanes, self.scan_bases = before, 0, outside
        if width > 1:
            states = [self._in_every_lane(a, s, width, 1) for a, s in zip(accumulators, states, strict=True)]
        return [part for state in states for part in state]

    def _scanning(self, loop: MapLoop, accumulators: list[Accumulator], segment: LoopSegment) -> RunRange:
        """Runs a part of a vector scan's range."""

        def body(values: list[str]) -> list[Value]:
            shares = dealt(accumulators, values)
            self.running = dict(zip(loop.scans, zip(accumulators, shares, strict=True), strict=True))
            self.block(loop.body)
            return [part for scan in loop.scans for part in self.running[scan][1]]

        def run(low: Value, high: Value, state: Sequence[tuple[str, Value]]) -> list[str]:
            part = replace(segment, low=low, high=high)
            return self._vector(loop.axis, part, state, body, self.numbers[id(loop)])

        return run

    def _scan_blocks(
        self, loop: MapLoop, ends: tuple[Value, Value], block: int, starts: Sequence[tuple[str, Value]],
        carried: Sequence[tuple[str, Value]], run: RunRange,
    ) -> list[str]:  # fmt: skip
        """Long running sums block by block, each from zero; what the sum of the blocks before lacks goes along, so that
        rounding does not grow with their number."""
        f = self.f

        def one(first: str, values: list[str]) -> list[Value]:
            bases, lacks = values[: len(starts)], values[len(starts) :]
            outside = self.scan_bases
            self.scan_bases = outside | {scan: (base,) for scan, base in zip(loop.scans, bases, strict=True)}
            sums = run(first, f.smin(f.add(first, block), ends[1]), starts)
            self.scan_bases = outside
            joined = [
                _with_rest(f, type_, base, f.binary("fadd", type_, made, lack))
                for (type_, _), base, lack, made in zip(starts, bases, lacks, sums, strict=True)
            ]
            return [*(total for total, _ in joined), *(rest for _, rest in joined)]

        return f.loop(*ends, block, carried, one)

    def _in_every_lane(self, accumulator: Accumulator, state: Parts, have: int, want: int) -> Parts:
        """A state that is the same in every lane, in another number of them; one of the numbers is 1."""
        if want == 1:
            return tuple(self.f.extract(t, p, 0) for t, p in accumulator.typed(state, have))
        return tuple(self.f.splat(t, p) for (t, _), p in zip(accumulator.start(want), state, strict=True))

    def _reduce(self, loop: ReduceLoop) -> None:
        accumulators = self._accumulators(loop)
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        high = self.size(loop.axis.extent)
        if lanes == 1 or self.context.axis is not None:
            results = self._serial_reduce(loop, accumulators, high)
        elif order_of_loop(loop) in REGISTERS:
            results = self._row_reduce(loop, accumulators, high, lanes)
        else:
            results = self._vector_reduce(loop, accumulators, high, lanes)
        for reduce, parts in zip(loop.reduces, results, strict=True):
            self.values[reduce] = parts

    def _accumulators(self, loop: ReduceLoop) -> list[Accumulator]:
        most = bounds(loop.axis.extent)[1]
        positions = i32 if most is not None and most < 1 << 31 else i64
        return [
            Accumulator(self.f, r.kind, r.body.dtype, self.target, positions, leaves_nan=r in self.leave_nan)
            for r in loop.reduces
        ]

    def _position(self, axis: Axis, lanes: int, dtype: DType) -> Parts:
        """Where the lanes are on an axis, as accumulators carry it."""
        if dtype is i64:
            return self.widened(axis, lanes)
        type_ = register_type(dtype, lanes)
        first = self.f.splat(type_, self.f.convert("trunc", "i64", self.first[axis], register_type(dtype)))
        if self.context.lanes_of(axis) == 1:
            return (first,)
        return (self.f.binary("add", type_, first, vector_constant(register_type(dtype), range(lanes))),)

    def _serial_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value) -> list[Parts]:
        widths = [self.context.lanes_of(r) for r in loop.reduces]
        carried = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]

        def body(values: list[str]) -> list[Value]:
            return self._accumulate(loop, accumulators, widths, values)

        def run(low: Value, end: Value, state: Sequence[tuple[str, Value]]) -> list[str]:
            return self._serial(loop.axis, low, end, state, body)

        def block(low: Value, end: Value) -> list[Parts]:
            return dealt(accumulators, run(low, end, carried))

        final = self._in_blocks(loop, accumulators, widths, high, block_of_loop(loop), block)
        return [a.finish(p, n) for a, p, n in zip(accumulators, final, widths, strict=True)]

    def _reducing(self, loop: ReduceLoop, accumulators: list[Accumulator], segment: LoopSegment) -> RunRange:
        """Runs a part of a vector reduction's range."""
        widths = [segment.lanes] * len(accumulators)

        def run(low: Value, high: Value, state: Sequence[tuple[str, Value]]) -> list[str]:
            part = replace(segment, low=low, high=high)
            return self._vector(
                loop.axis,
                part,
                state,
                lambda v: self._accumulate(loop, accumulators, widths, v),
                self.numbers[id(loop)],
            )

        return run

    def _in_blocks(
        self,
        loop: ReduceLoop,
        accumulators: list[Accumulator],
        widths: list[int],
        high: Value,
        length: int,
        block: Callable[[Value, Value], list[Parts]],
    ) -> list[Parts]:
        """Long float sums block by block, each from zero, so that rounding grows with the blocks and not the terms."""
        if not is_long(loop, length):
            return block(0, high)

        def one(start: str, totals: list[str]) -> list[Value]:
            made = block(start, self.f.smin(self.f.add(start, length), high))
            olds = dealt(accumulators, totals)
            joined = [a.join(o, m, n) for a, o, m, n in zip(accumulators, olds, made, widths, strict=True)]
            return [part for parts in joined for part in parts]

        starts = accumulators
        if order_of_loop(loop) == "products":  # a sum of one block is that block, though it be -0.0
            starts = [replace(a, keeps_sign=True) for a in accumulators]
        carried = [c for a, n in zip(starts, widths, strict=True) for c in a.start(n)]
        final = self.f.loop(0, high, length, carried, one)
        if starts is accumulators or isinstance(high, int):
            return dealt(accumulators, final)
        none = self.f.compare("eq", "i64", high, 0)
        empty = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]
        pairs = zip(empty, final, strict=True)
        return dealt(accumulators, [self.f.select(t, none, zero, value, uniform=True) for (t, zero), value in pairs])

    def _row_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value, lanes: int) -> list[Parts]:
        """Sums of rows, in the order that rows have: chains of whole steps, then of single registers, then the rest."""
        f, chains = self.f, row_chains(loop, self.target)
        single = chains // REGISTERS[order_of_loop(loop)]
        lanes = min(max(lanes, single), chains)
        totals, accumulators = accumulators, [replace(a, keeps_sign=True) for a in accumulators]

        def block(low: Value, end: Value) -> list[Parts]:
            whole = f.add(low, f.round_down(f.sub(end, low), chains))
            states, width = [tuple(v for _, v in a.start(single)) for a in accumulators], single
            if whole != low:
                segment = LoopSegment(low, whole, lanes, False)
                states = self._chained(loop, accumulators, segment, chains // lanes)
                states = [a.narrow(s, lanes, single) for a, s in zip(accumulators, states, strict=True)]
            for part in self._rest_of_row(whole, end, single):
                if part.lanes < width:
                    states = [a.narrow(s, width, part.lanes) for a, s in zip(accumulators, states, strict=True)]
                    width = part.lanes
                carried = [c for a, s in zip(accumulators, states, strict=True) for c in a.typed(s, width)]
                run = self._reducing(loop, accumulators, part)
                states = dealt(accumulators, run(part.low, part.high, carried))
            return [a.narrow(s, width, 1) for a, s in zip(accumulators, states, strict=True)]

        final = self._in_blocks(loop, totals, [1] * len(totals), high, chains * STEPS, block)
        return [a.finish(a.from_zero(s, 1), 1) for a, s in zip(totals, final, strict=True)]

    def _rest_of_row(self, low: Value, high: Value, single: int) -> list[LoopSegment]:
        """What is left of a row after its whole steps: single registers, then a masked one or one by one. Where the
        length is not known, all of them under masks."""
        if low == high:
            return []
        known = isinstance(low, int) and isinstance(high, int)
        if self.target.has_avx512 and not known:
            return [LoopSegment(low, high, single, True)]
        middle = self.f.add(low, self.f.round_down(self.f.sub(high, low), single))
        parts = [LoopSegment(low, middle, single, False)] if middle != low else []
        if known:  # one turn each, so no loop
            parts = [LoopSegment(at, at + single, single, False) for at in range(int(low), int(middle), single)]
        if middle != high:
            parts.append(LoopSegment(middle, high, single if self.target.has_avx512 else 1, self.target.has_avx512))
        return parts

    def _chained(
        self, loop: ReduceLoop, accumulators: list[Accumulator], segment: LoopSegment, turns: int
    ) -> list[Parts]:
        """The chains of a row. Several steps take turns, each with its own; these are joined by halves into one set."""
        lanes = segment.lanes
        start = [c for a in accumulators for c in a.start(lanes)]

        def body(values: list[str]) -> list[Value]:
            mine, others = values[: len(start)], values[len(start) :]
            return [*others, *self._accumulate(loop, accumulators, [lanes] * len(accumulators), mine)]

        final = self._vector(loop.axis, segment, start * turns, body, self.numbers[id(loop)])
        return joined_turns(accumulators, final, lanes)

    def _until_decided(
        self, accumulator: Accumulator, width: int, ends: tuple[Value, Value], carried: Sequence[tuple[str, Value]],
        step: int, run: RunRange,
    ) -> list[str]:  # fmt: skip
        """A block after the other, each twice as long as the last, while the result may still change."""
        f, (low, high) = self.f, ends

        def undecided(values: list[str]) -> str:
            left = f.compare("slt", "i64", values[0], high)
            return f.binary("and", "i1", left, accumulator.may_change(values[2], width))

        def block(values: list[str]) -> Sequence[Value]:
            start, length, *state = values
            stop = f.smin(f.add(start, length), high)
            longer = f.smin(f.mul(length, 2), step * _MOST_STEPS)
            return [stop, longer, *run(start, stop, accumulator.typed(state, width))]

        return while_loop(f, [("i64", low), ("i64", step), *carried], undecided, block)[2:]

    def _accumulate(
        self, loop: ReduceLoop, accumulators: list[Accumulator], widths: list[int], values: Sequence[str]
    ) -> list[Value]:
        """The body of a reduction loop; returns the next values of all accumulators."""
        self.block(loop.body)
        following: list[Value] = []
        for reduce, accumulator, width, state in zip(
            loop.reduces, accumulators, widths, dealt(accumulators, values), strict=True
        ):
            mask = self.context.mask if width > 1 else None
            if accumulator.is_argument:
                position = self._position(loop.axis, width, accumulator.positions)
                following += accumulator.step(state, self.widened(reduce.body, width), width, mask, position)
            elif accumulator.takes_products and reduce.sums_products:
                assert isinstance(reduce.body, Scalar)
                a, b = (self.widened(x, width) for x in reduce.body.args)
                following += accumulator.step_product(state, a, b, width, mask)
            else:
                following += accumulator.step(state, self.widened(reduce.body, width), width, mask)
        return following

    def _vector_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value, lanes: int) -> list[Parts]:
        """Reductions whose result is the same in any order. Whether any or all are true is known after the first that
        decides it."""
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
            run = self._reducing(loop, accumulators, segment)
            ends = segment.low, segment.high
            one = accumulators[0]
            if n > 1 and not segment.masked and len(accumulators) == 1 and one.ends_early and not self.filling:
                final = self._until_decided(one, n, ends, carried, n, run)
            else:
                final = run(*ends, carried)
            current, width = dealt(accumulators, final), n
        if not current:
            current, width = [tuple(str(v) for _, v in a.start(1)) for a in accumulators], 1
        return [a.finish(a.narrow(s, width, 1), 1) for a, s in zip(accumulators, current, strict=True)]

    def _exchange(self, loop: MapLoop, low: Value, high: Value) -> None:
        """A map whose reduction goes around it: blocks of columns, rows of them added to running values in memory."""
        f, number = self.f, self.numbers[id(loop)]
        reduction = next(s for s in loop.body.steps if isinstance(s, ReduceLoop))
        accumulators = self._accumulators(reduction)
        lanes, by = self.schedule.lanes(number), self.schedule.exchanged(number)
        count, block = self.size(reduction.axis.extent), block_of_loop(reduction)
        in_blocks = is_long(reduction, block)
        width = sum(bits_of(t) // 8 for a in accumulators for t, _ in a.start(1)) * (1 + in_blocks)
        columns = _EXCHANGE_BYTES // width // lanes * lanes or lanes
        totals = _ReduceRow(self, loop, accumulators, columns + lanes)  # the last step may store a whole register
        running = _ReduceRow(self, loop, accumulators, columns + lanes) if in_blocks else totals
        at = loop.body.steps.index(reduction)
        before, after = LoopBlock(loop.body.steps[:at]), LoopBlock(loop.body.steps[at + 1 :])

        def add(start: Value, row: Value, steps: int) -> None:
            self.block(before)
            n = self.context.lanes
            values = [part for state in running.states(start) for part in state]
            for turn in range(steps):
                with self._scope(reduction.axis):
                    self.first[reduction.axis] = f.add(row, turn)
                    values = [
                        str(v) for v in self._accumulate(reduction, accumulators, [n] * len(accumulators), values)
                    ]
            running.keep(start, dealt(accumulators, values))

        def finish(start: Value) -> None:
            self.block(before)
            n = self.context.lanes
            for reduce, a, state in zip(reduction.reduces, accumulators, totals.states(start), strict=True):
                self.values[reduce] = a.finish(state, n)
            self.block(after)

        def columns_from(start: str, _: list[str]) -> None:
            segments = self._segments(loop, start, f.smin(f.add(start, columns), high), lanes)

            def each(body: Callable[[], None]) -> None:
                def inside(_: list[str]) -> tuple[Value, ...]:
                    body()
                    return ()

                for segment in segments:
                    self._vector(loop.axis, segment, (), inside, number)

            def rows(first: Value, end: Value) -> None:
                whole = f.add(first, f.round_down(f.sub(end, first), by))
                f.loop(first, whole, by, (), lambda row, _: each(lambda: add(start, row, by)))
                f.loop(whole, end, 1, (), lambda row, _: each(lambda: add(start, row, 1)))

            def rows_from(first: str, _: list[str]) -> None:
                each(lambda: running.begin(start))
                rows(first, f.smin(f.add(first, block), count))
                each(lambda: totals.join(start, running.states(start)))

            each(lambda: totals.begin(start))
            if in_blocks:
                f.loop(0, count, block, (), rows_from)
            else:
                rows(0, count)
            each(lambda: finish(start))

        f.loop(low, high, columns, (), columns_from)


def _goes_in_blocks(loop: MapLoop, accumulators: list[Accumulator], block: int) -> bool:
    """Whether all that runs along a loop are long sums of real numbers."""
    most = bounds(loop.axis.extent)[1]
    plain = all(_is_rounded(a) and not a.dtype.is_complex for a in accumulators)
    return plain and (most is None or most > block)


def _with_rest(f: IrFunction, type_: str, a: str, b: str) -> tuple[str, str]:
    """a + b as it is rounded, and what was lost by that (Knuth); nothing, -0.0, where there is no number."""
    total = f.binary("fadd", type_, a, b)
    of_b = f.binary("fsub", type_, total, a)
    of_a = f.binary("fsub", type_, total, of_b)
    lost = f.binary("fadd", type_, f.binary("fsub", type_, a, of_a), f.binary("fsub", type_, b, of_b))
    is_some = f.compare("one", type_, lost, constant(type_, 0.0))
    return total, f.select(type_, is_some, lost, constant(type_, -0.0))


class _ReduceRow:
    """Accumulators of the columns of a block, in memory."""

    def __init__(self, loops: Loops, loop: MapLoop, accumulators: list[Accumulator], length: int) -> None:
        self.loops, self.loop, self.accumulators = loops, loop, accumulators
        self.types = [type_ for a in accumulators for type_, _ in a.start(1)]
        self.memory = [loops.f.alloca(t, length) for t in self.types]

    def _places(self, start: Value) -> list[str]:
        offset = self.loops.f.sub(self.loops.first[self.loop.axis], start)
        return [self.loops.f.address(t, m, offset) for t, m in zip(self.types, self.memory, strict=True)]

    def states(self, start: Value) -> list[Parts]:
        """Of the columns at the place, of a block that begins at `start`."""
        f, lanes = self.loops.f, self.loops.context.lanes
        pairs = zip(self.types, self._places(start), strict=True)
        return dealt(self.accumulators, [f.load(vector(t, lanes), p, bits_of(t) // 8) for t, p in pairs])

    def keep(self, start: Value, states: Sequence[Parts]) -> None:
        f, lanes = self.loops.f, self.loops.context.lanes
        parts = [p for state in states for p in state]
        for type_, place, part in zip(self.types, self._places(start), parts, strict=True):
            f.store(vector(type_, lanes), part, place, bits_of(type_) // 8)

    def begin(self, start: Value) -> None:
        lanes = self.loops.context.lanes
        self.keep(start, [tuple(v for _, v in a.start(lanes)) for a in self.accumulators])

    def join(self, start: Value, others: Sequence[Parts]) -> None:
        lanes = self.loops.context.lanes
        mine = self.states(start)
        self.keep(start, [a.join(o, m, lanes) for a, o, m in zip(self.accumulators, mine, others, strict=True)])


def dealt(accumulators: list[Accumulator], values: Sequence[str]) -> list[Parts]:
    """Loop-carried values dealt out to the accumulators they belong to."""
    result, at = [], 0
    for accumulator in accumulators:
        result.append(tuple(values[at : at + accumulator.parts]))
        at += accumulator.parts
    return result


def is_long(loop: ReduceLoop, block: int) -> bool:
    """Whether a reduction may have more terms than a block; 0: it has no blocks."""
    most = bounds(loop.axis.extent)[1]
    return block > 0 and (most is None or most > block)


def order_of_loop(loop: ReduceLoop) -> str:
    """The order of the rounded reductions of a loop; "" where there are none."""
    return next((r.order for r in loop.reduces if r.order), "")


def block_of_loop(loop: ReduceLoop) -> int:
    """Terms of a block of the sums of a loop that adds them one after the other; 0: they have no blocks."""
    order = order_of_loop(loop)
    return 0 if order in ("", "serial") else block_terms(order, 0)


def row_chains(loop: ReduceLoop, target: Target) -> int:
    """The chains of sums of rows in a loop."""
    return next(REGISTERS[r.order] * target.lanes(sum_bytes(r.dtype)) for r in loop.reduces if r.order)


def joined_turns(accumulators: list[Accumulator], values: Sequence[str], lanes: int) -> list[Parts]:
    """The states of several turns, by halves into one."""
    count = sum(a.parts for a in accumulators)
    turns = [dealt(accumulators, values[at : at + count]) for at in range(0, len(values), count)]
    while len(turns) > 1:
        half = len(turns) // 2
        pairs = zip(turns[:half], turns[half:], strict=True)
        turns = [[a.join(x, y, lanes) for a, x, y in zip(accumulators, xs, ys, strict=True)] for xs, ys in pairs]
    return turns[0]


def _is_rounded(accumulator: Accumulator) -> bool:
    """Whether the order of its terms changes what it ends with."""
    return accumulator.kind == "sum" and accumulator.dtype.is_inexact
