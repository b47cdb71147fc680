"""Software pipelining across rows: the later loops of one row run beside the first loop of the next.

A row that is summed, read again and stored keeps memory busy in its first loop and its last one only. With all of them
in one loop, on three rows, reads and writes flow evenly, and the arithmetic hides behind them:

    sum of row r,  squares of row r - 1,  store of row r - 2

What one loop leaves to later ones, a mean, is carried from iteration to iteration. The prologue and the epilogue of the
pipeline, for the first and the last rows of a chunk, run the same loops one after the other.

What is kept of a row is in a ring of row buffers: where the last loop that needs it runs along with the one that keeps
it, the new row replaces it step by step.

Rows that caches hold are bound by latency, not by memory: each loop waits for the sums of the one before. Where they
are staggered, the loops of an iteration stay separate, each on another row, and one has work while another waits.

Processors mistake a load for one of what has just been stored where both have the same offset in a page (4K aliasing),
and wait. So row buffers are put half a page from what is loaded, and where results would be stored right before it and
nothing is kept, they are stored from another column on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from strata.backends.llvm.ir.builder import Typed, Value, constant
from strata.backends.llvm.ir.registers import Parts, register_bytes, register_type
from strata.backends.llvm.loops.loops import LoopSegment
from strata.backends.llvm.loops.reduce import joined_turns, order_of_loop, row_chains
from strata.kernel import (
    REGISTERS,
    STEPS,
    Axis,
    Compute,
    Expr,
    Load,
    MapLoop,
    Reduce,
    ReduceLoop,
    Scalar,
    Store,
    StoreStep,
    linear,
    postorder,
)

if TYPE_CHECKING:
    from strata.backends.llvm.loops.emit import LoopEmitter

Step = Compute | StoreStep | MapLoop | ReduceLoop
Buffers = tuple[dict[Expr, tuple[Axis, str]], frozenset[Expr]]  # row buffers, and those that are being filled
_LINE, _PAGE = 64, 4096  # bytes
_NEAR = 1024  # bytes of a page in which loads may follow stores too closely
_APART = 512  # columns from what is computed to what is stored, then


@dataclass(frozen=True, slots=True)
class _Row:
    """A row in one iteration of the pipeline."""

    stage: int
    index: Value
    known: dict[Expr, Parts] = field(default_factory=dict)  # what its earlier stages have left


def delayed(emitter: LoopEmitter, rows: MapLoop) -> Staggered | None:
    """How the rows of a loop are pipelined; None where they are done one after the other."""
    schedule, numbers = emitter.schedule, emitter.numbers
    if schedule.staggers(numbers[id(rows)]):
        return Staggered(emitter, rows, [s for s in rows.body.steps if isinstance(s, (MapLoop, ReduceLoop))])
    late = [s for s in rows.body.steps if isinstance(s, (MapLoop, ReduceLoop)) and schedule.delay(numbers[id(s)])]
    last = rows.body.steps[-1] if rows.body.steps else None
    if not late or late[-1] is not last or not isinstance(last, MapLoop):
        return None
    stores = [s.store for s in last.body.steps if isinstance(s, StoreStep)]
    past = [schedule.is_nontemporal(s.buffer.name) for s in stores]
    number = schedule.host(numbers[id(last)])
    extent, lanes = last.axis.extent, schedule.lanes(number)
    if not past or any(past) != all(past) or not isinstance(extent, int) or lanes == 1 or extent % lanes:
        return None
    host = next(s for s in rows.body.steps if isinstance(s, ReduceLoop) and numbers[id(s)] == number)
    loops = [host, *late]
    sums = [s for s in loops if isinstance(s, ReduceLoop) and order_of_loop(s)]
    if any(order_of_loop(s) not in REGISTERS for s in sums):
        return None
    chains = [row_chains(s, emitter.target) for s in sums]
    if any(lanes > n or extent % n or extent > n * STEPS for n in chains):
        return None
    return Delayed(emitter, rows, loops)


class Staggered:
    """One loop over rows. Each of `loops` is a row further behind than the one before.

    Stage k of a row is its k-th delayed loop and what is computed after it, stage 0 all that comes before the first."""

    def __init__(self, emitter: LoopEmitter, rows: MapLoop, loops: list[MapLoop | ReduceLoop]) -> None:
        self.emitter, self.rows, self.loops = emitter, rows, loops
        self.axis = loops[0].axis
        steps = rows.body.steps
        cuts = [0, *(steps.index(loop) for loop in loops[1:]), len(steps)]
        self.stages: list[Sequence[Step]] = [steps[a:b] for a, b in pairwise(cuts)]
        self.behind = len(loops) - 1
        self.kept = [self._kept(stage) for stage in range(1, len(self.stages))]
        self.types = [[register_type(n.dtype) for n in nodes for _ in range(_parts(n))] for nodes in self.kept]
        self.low: Value = 0
        self.high: Value = 0

    def _kept(self, stage: int) -> list[Expr]:
        """What a stage and later ones need of earlier ones, but for values along the row."""
        before = dict.fromkeys(n for steps in self.stages[:stage] for s in steps for n in _made(s))
        later = [s for steps in self.stages[stage:] for s in steps]
        needed = {n for s in later for n in _needed(s)} | _parts_of([i for s in later for i in _places(s)], before)
        return [n for n in before if n in needed and self.rows.axis in n.free]

    def emit(self, low: Value, high: Value) -> None:
        self.low, self.high = low, high
        with self.emitter._scope():
            self._turns(low, self.emitter.f.add(high, self.behind), self._nothing())

    def _nothing(self) -> list[Typed]:
        """What is carried before the first row."""
        return [(t, constant(t, 0)) for types in self.types for t in types]

    def _turns(self, low: Value, high: Value, carried: Sequence[Typed], *, last_first: bool = False) -> list[str]:
        """Each loop on its own row. In the first turns and the last ones, not every loop has one. Where the last loop
        is the first, it has read what is kept of its row before that of another is put there."""
        f = self.emitter.f

        def turn(index: str, values: list[str]) -> list[str]:
            rows, left = self._rows(index, values), [list[str]()] * len(self.stages)
            for row in reversed(rows) if last_first else rows:
                types = [*self.types, []][row.stage]
                is_one = f.compare("ult", "i64", f.sub(row.index, self.low), f.sub(self.high, self.low))
                stage = partial(self._alone, row)
                left[row.stage] = f.if_(is_one, stage, partial(list, [constant(t, 0) for t in types]), types)
            return [part for parts in left for part in parts]

        return f.loop(low, high, 1, carried, turn)

    def _rows(self, index: Value, carried: Sequence[str]) -> list[_Row]:
        """The row at an index and those before it, each with what its last turn has left."""
        rest = iter(carried)
        known = [{n: tuple(next(rest) for _ in range(_parts(n))) for n in nodes} for nodes in self.kept]
        return [_Row(stage, self.emitter.f.sub(index, stage), k) for stage, k in enumerate(({}, *known))]

    def _left(self, stage: int) -> list[str]:
        """What the row that has been worked on leaves to a stage."""
        nodes = self.kept[stage - 1] if stage <= self.behind else []
        return [part for n in nodes for part in self.emitter.value(n)]

    def _alone(self, row: _Row) -> list[str]:
        """One row in its stage. Returns what it leaves to the next one."""
        with self._names(row, self._buffers(row)):
            for step in self.stages[row.stage]:
                self.emitter._step(step, self._after(step))
            return self._left(row.stage + 1)

    def _after(self, step: Step) -> Sequence[Step]:
        steps = self.rows.body.steps
        return steps[steps.index(step) + 1 :]

    @contextmanager
    def _names(self, row: _Row, buffers: Buffers) -> Iterator[None]:
        """Inside, names mean what they do in one row."""
        e = self.emitter
        before = e.rows, e.filling, e.turn_of_row
        with e._scope(self.rows.axis):
            e.first[self.rows.axis], e.turn_of_row = row.index, e.f.sub(row.index, self.low)
            e.rows, e.filling = buffers
            e.values |= row.known
            yield
        e.rows, e.filling, e.turn_of_row = before

    def _buffers(self, row: _Row, *, fill: bool = False) -> Buffers:
        """The row buffers that earlier stages of a row have filled; with those that its own loop fills now."""
        e = self.emitter
        before = e.rows, e.filling, e.turn_of_row
        e.turn_of_row, e.filling = e.f.sub(row.index, self.low), frozenset()
        found = [(n, self.loops[stage].axis) for n, stage in self._kept_along() if stage < row.stage]
        e.rows = {n: (axis, e.row_buffer(n, e.turn_of_row)) for n, axis in found}
        loop = self.loops[row.stage] if fill else None
        if isinstance(loop, ReduceLoop):
            e._stage(loop, self._after(loop))
        made = e.rows, e.filling
        e.rows, e.filling, e.turn_of_row = before
        return made

    def _kept_along(self) -> list[tuple[Expr, int]]:
        """Values that are kept along the row, and the stages that compute them."""
        stages = {id(s): stage for stage, steps in enumerate(self.stages) for s in steps}
        return [(n, stages[loop]) for loop, nodes in self.emitter.fillers.items() if loop in stages for n in nodes]


class Delayed(Staggered):
    """The same with `loops` done together, as one loop over the columns of all their rows."""

    def __init__(self, emitter: LoopEmitter, rows: MapLoop, loops: list[MapLoop | ReduceLoop]) -> None:
        super().__init__(emitter, rows, loops)
        self.number = emitter.numbers[id(loops[0])]
        self.stores = [s.store for s in loops[-1].body.steps if isinstance(s, StoreStep)]
        self.past = tuple(s.buffer.name for s in self.stores if emitter.schedule.is_nontemporal(s.buffer.name))
        self.lanes = emitter.schedule.lanes(self.number)
        self.shift: Value = 0

    def emit(self, low: Value, high: Value) -> None:
        """Prologue and epilogue of the pipeline are the same code; so is all of it, with non-temporal stores, where
        rows do not begin with a line of them."""
        f = self.emitter.f
        self.low, self.high = low, high
        first, end = f.add(low, self.behind), f.add(high, self.behind)
        together = "0"
        for store in self.stores if self.past else ():
            together = f.binary("or", "i64", together, self._place(store, low))
        lines = f.compare("eq", "i64", f.binary("and", "i64", together, str(_LINE - 1)), 0)
        nodes = [s.node for s in self.loops[0].body.steps if isinstance(s, Compute)]
        load = next((n for n in nodes if isinstance(n, Load) and linear(n.index[0]).terms.get(self.axis) == 1), None)
        if load is not None:
            self._place_buffers(self._place(load, low))
            self.shift = self._shift(self._place(load, low))
        start = self._nothing()

        def part(number: str, carried: list[str]) -> list[str]:
            is_before = f.compare("eq", "i64", number, 0)
            since = f.select("i64", is_before, str(low), f.select("i64", lines, str(f.smax(first, high)), str(end)))
            until = f.select("i64", f.binary("and", "i1", is_before, lines), str(first), str(end))
            ends = self._turns(since, until, _typed(start, carried), last_first=True)
            most = f.select("i64", f.binary("and", "i1", is_before, lines), str(high), str(first))
            return f.loop(first, most, 1, _typed(start, ends), self._turn)

        with self.emitter._scope():
            f.loop(0, 2, 1, start, part)

    def _place(self, node: Load | Store, row: Value) -> str:
        """The address of the first element of a row that is loaded or stored."""
        e, f = self.emitter, self.emitter.f
        with e._scope(self.rows.axis, self.axis):
            e.first[self.rows.axis], e.first[self.axis] = row, 0
            return f.op(f"ptrtoint ptr {e._pointer(node.buffer, e.at_first(node.index[0]))} to i64")

    def _place_buffers(self, loaded: str) -> None:
        """Put row buffers half a page from what is loaded."""
        e, f = self.emitter, self.emitter.f
        for loop in (s for s in self.rows.body.steps if isinstance(s, ReduceLoop)):
            if e.schedule.stages(e.numbers[id(loop)]):
                for node in e.reserve(loop, self._after(loop), room=_PAGE):
                    ring = e.memory[node]
                    place = f.op(f"ptrtoint ptr {ring.start} to i64")
                    away = f.sub(f.add(loaded, _PAGE // 2), place)
                    start = f.address("i8", ring.start, f.binary("and", "i64", str(away), str(_PAGE - _LINE)))
                    e.memory[node] = replace(ring, start=start)

    def _shift(self, loaded: str) -> Value:
        """Columns from those that a row is read at to those that another is stored at meanwhile."""
        e, f = self.emitter, self.emitter.f
        if any(e.schedule.stages(e.numbers[id(loop)]) for loop in self.loops):
            return 0
        close = "false"
        for store in self.stores:
            stored = self._place(store, f.sub(self.low, self.behind))
            ahead = f.binary("and", "i64", str(f.sub(stored, loaded)), str(_PAGE - 1))
            close = f.binary("or", "i1", close, f.compare("ule", "i64", ahead, _NEAR))
        extent = self.axis.extent
        assert isinstance(extent, int), "only rows of known lengths are delayed"
        return f.select("i64", close, str(min(_APART, extent // 2) // self.lanes * self.lanes), "0")

    def _turn(self, index: str, carried: list[str]) -> list[str]:
        """The first stage of one row, with the later ones of the rows before it. Returns what they leave."""
        e = self.emitter
        host, *others = self._rows(index, carried)
        left: list[str] = []
        with self._names(host, self._buffers(host)):
            for step in self.stages[0]:
                if step is self.loops[0]:
                    found = self._together([host, *others])
                    e.values |= found[0]
                else:
                    e._step(step, self._after(step))
            left += self._left(1)
        for row in others[:-1]:
            with self._names(row, ({}, frozenset())):
                e.values |= found[row.stage]
                for step in self.stages[row.stage][1:]:
                    e._step(step, self._after(step))
                left += self._left(row.stage + 1)
        return left

    def _together(self, rows: list[_Row]) -> list[dict[Expr, Parts]]:
        """The loops that are done together, one for each row. Returns what each has reduced."""
        e, lanes = self.emitter, self.lanes
        reduces = [loop if isinstance(loop, ReduceLoop) else None for loop in self.loops]
        accumulators = [e._accumulators(loop) if loop else [] for loop in reduces]
        turns = [row_chains(loop, e.target) // lanes if loop and order_of_loop(loop) else 1 for loop in reduces]
        widths = [sum(a.parts for a in some) for some in accumulators]
        counts = [width * n for width, n in zip(widths, turns, strict=True)]
        buffers = [self._buffers(row, fill=True) for row in rows]
        splats = [self._splats(row) for row in rows]

        def body(values: list[str]) -> list[Value]:
            following: list[Value] = []
            e.replaced = {}
            for stage, loop in enumerate(self.loops):
                mine = values[len(following) :][: counts[stage]]
                with self._beside(rows[stage], buffers[stage]):
                    if stage:
                        e._ask(self.axis, e.numbers[id(loop)])
                    e.wide |= {(n, lanes): self._in_all_lanes(n, parts) for n, parts in splats[stage].items()}
                    if isinstance(loop, ReduceLoop):
                        first, others = mine[: widths[stage]], mine[widths[stage] :]
                        made = e._accumulate(loop, accumulators[stage], [lanes] * len(accumulators[stage]), first)
                        following += [*others, *made]
                    else:
                        e.block(loop.body)
            e.replaced = None
            return following

        pairs = zip(accumulators, turns, strict=True)
        start = [c for some, n in pairs for _ in range(n) for a in some for c in a.start(lanes)]
        rest = e._vector(self.axis, LoopSegment(0, e.size(self.axis.extent), lanes, False), start, body, self.number)
        found: list[dict[Expr, Parts]] = []
        for loop, some, count in zip(reduces, accumulators, counts, strict=True):
            states = joined_turns(some, rest[:count], lanes) if some else []
            ends = [a.finish(a.narrow(s, lanes, 1), 1) for a, s in zip(some, states, strict=True)]
            found.append(dict(zip(loop.reduces, ends, strict=True)) if loop else {})
            rest = rest[count:]
        return found

    # what names mean in a row

    @contextmanager
    def _beside(self, row: _Row, buffers: Buffers) -> Iterator[None]:
        """Inside a step of the loops that are done together, the row and the columns of one of them."""
        e, f = self.emitter, self.emitter.f
        if row.stage == 0:  # the row around the step
            e.rows, e.filling = buffers
            yield
            e.filling = frozenset()
            return
        is_last, column = row.stage == self.behind, e.first[self.axis]
        with self._names(row, buffers), e._scope(*((self.axis,) if is_last and self.shift != 0 else ())):
            e.values |= self._taken(row.stage)
            if is_last and self.shift != 0:
                column, extent = f.add(column, self.shift), e.size(self.axis.extent)
                beyond = f.compare("sge", "i64", column, extent)
                column = f.sub(column, f.select("i64", beyond, str(extent), "0"))
            e.first[self.axis] = column
            e.context = replace(e.context, past=self.past) if is_last else e.context
            yield

    def _splats(self, row: _Row) -> dict[Expr, Parts]:
        """What a loop needs of its row in every lane, in one register, before it begins: it would be made again at each
        step."""
        e, needed = self.emitter, set(_needed(self.loops[row.stage]))
        before = self.stages[0][: self.stages[0].index(self.loops[0])] if row.stage == 0 else ()
        known = row.known or {n: e.value(n) for s in before for n in _made(s) if n in needed}
        return {
            n: tuple(e.f.splat(register_type(n.dtype, self._register(n)), p) for p in parts)
            for n, parts in known.items()
            if n in needed and self.axis not in n.free
        }

    def _register(self, node: Expr) -> int:
        return min(self.lanes, self.emitter.target.lanes(register_bytes(node.dtype)))

    def _in_all_lanes(self, node: Expr, parts: Parts) -> Parts:
        lanes = self._register(node)
        picks, type_ = [i % lanes for i in range(self.lanes)], register_type(node.dtype, lanes)
        return parts if lanes == self.lanes else tuple(self.emitter.f.shuffle(type_, p, "poison", picks) for p in parts)

    # row buffers

    def _taken(self, stage: int) -> dict[Expr, Parts]:
        """What row buffers had where the current step has put values of a row that is a whole ring further on."""
        e = self.emitter
        replaced = e.replaced or {}
        return {n: replaced[n] for n, at in self._kept_along() if n in replaced and stage - at == e.memory[n].turns}


def _typed(like: Sequence[Typed], values: Sequence[str]) -> list[Typed]:
    return [(type_, value) for (type_, _), value in zip(like, values, strict=True)]


def _parts(node: Expr) -> int:
    return 2 if node.dtype.is_complex else 1


def _made(step: Step) -> list[Expr]:
    """What is known behind a step of a row."""
    if isinstance(step, Compute):
        return [step.node] if isinstance(step.node, (Scalar, Load)) else []
    return list(step.reduces) if isinstance(step, ReduceLoop) else []


def _places(step: Step) -> Iterator[Expr]:
    """Where a step loads and stores, with what is inside it."""
    if isinstance(step, Compute):
        yield from step.node.index if isinstance(step.node, Load) else ()
    elif isinstance(step, StoreStep):
        yield from step.store.index
    else:
        for inner in step.body.steps:
            yield from _places(inner)


def _parts_of(places: Sequence[Expr], known: Container[Expr]) -> set[Expr]:
    """The known values that addresses are made of, as they are written and as sums of steps; but for index arithmetic,
    which is done again."""
    stack = [n for place in places for n in (place, *linear(place).terms)]
    found: set[Expr] = set()
    seen: set[Expr] = set()
    while stack:
        node = stack.pop()
        if node in known and any(isinstance(n, (Load, Reduce)) for n in postorder((node,))):
            found.add(node)
        elif node not in seen:
            seen.add(node)
            stack += node.inputs
    return found


def _needed(step: Step) -> Iterator[Expr]:
    """What a step is made of, with what is inside it."""
    if isinstance(step, Compute):
        yield step.node
        yield from step.node.inputs
    elif isinstance(step, StoreStep):
        yield step.store.value
    else:
        yield from (r.body for r in (step.reduces if isinstance(step, ReduceLoop) else ()))
        for inner in step.body.steps:
            yield from _needed(inner)
