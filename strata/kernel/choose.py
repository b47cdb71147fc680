"""The default schedule of a kernel: heuristics over extents, strides and the processor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from strata.core import Dim, bounds
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Expr, Kernel, Load, Reduce, Scalar, Scan, Store, postorder
from strata.kernel.loop_values import loop_values, register_lanes, row_is_kept
from strata.kernel.nest import Compute, LoopBlock, MapLoop, ReduceLoop, StoreStep, known_bytes
from strata.kernel.order import Machine
from strata.kernel.passes.interleave import SPREADS, combs
from strata.kernel.runs import (
    chains_of,
    goes_along,
    in_order,
    lanes_along,
    lines_up,
    loops_with_outer,
    rows_of,
    runs_in_vectors,
)
from strata.kernel.scalars import SCALARS
from strata.kernel.schedule import (
    Action,
    Delay,
    Exchange,
    Loop,
    NonTemporal,
    Parallel,
    Prefetch,
    Schedule,
    Stage,
    Stagger,
    Tile,
    Vectorise,
    followed_place,
    number_loops,
    parallel_chain,
    row_values,
    turns,
    walk_loops,
)

_GUESS = 1024  # the extent of an axis of which nothing is known
_SHORT_ROW = 32  # elements of an innermost loop that is not handed out on its own
_WHOLE_ROW = 256  # the same, where a chunk has enough such rows to be handed out by rows
_ROWS_OF_CHUNK = 16
_CHUNK_COST = 1 << 13  # vector operations in one chunk: a microsecond or more, large against handing it out
_AGAIN = 8  # part of a chunk's cost that may be spent on what every chunk does again
_LANE_COST = 2.0  # one lane of an access that is not contiguous, in contiguous vector accesses
_WEAVE_COST = 3  # a store of a register that is put between others first
_PREFIX_COST = 10  # a running reduction over the lanes of a register
_LIGHT = 12  # scalar work of a loop that leaves it waiting for memory
_DEAR = 40  # scalar work of a loop that takes longer than memory does
_CHAIN = 24  # scalar work whose steps mostly wait for each other, so that more registers are worked on side by side
_STREAM_CACHES = 2  # a core's own caches that a buffer must exceed to be read as a stream
_FOLLOWING = 64  # bytes of vectors of processors that are quick along one stream: they need no more than a hint
_AHEAD = 4 << 10  # bytes from what is read to that hint
_AHEAD_OF_PAST = 2 << 10  # the same beside non-temporal stores; a single stream comes into the nearest cache
_AHEAD_OF_WORK = 2560  # and in those of them that take longer than memory does; into the nearest cache
_ROWS_AHEAD = 8 << 10  # bytes from a row that is worked on to the one that is prefetched meanwhile
_ROWS_LEAST = 2 << 10  # bytes of a row for which that pays
_ROWS_SHARE = 16  # part of a core's own cache that rows between the two may take
_STREAM_CHUNK = 1 << 20  # bytes of a chunk that streams: what one core prefetches, it should use
_LEAST_CHUNKS = 32  # of a kernel that goes through much memory
_STREAM_ROW = 3 << 10  # bytes of a row that is worth its own start and end with non-temporal stores
_STREAM_LINES = 1 << 8  # the same of one that begins and ends with a cache line
_LINE = 64  # bytes of a cache line
_MANY_REGISTERS = 32  # of vectors: enough to do all loops of a row as one, and to transpose wide tiles
_SQUARE = 16  # the widest tile that is transposed in registers; twice as wide where there are many
_LEAST_SQUARE = 4  # the narrowest
_SQUARES_LEAST = 1 << 14  # points that are transposed in one chunk
_TURNED_BLOCK = 256, 512, 2 << 10  # of a transpose: bytes to read in a row; rows to read, or bytes to write, if fewer
_NEAR_BLOCK = 256, 32  # points of one that caches hold
_NEAR_HINT = 2 * _LINE  # bytes ahead that it prefetches
_TURNED_ROW = 2 << 10  # bytes of rows along which hints are given
_STREAM_TURNED = 4 << 20  # bytes that a chunk of such blocks reads and writes: the first of them waits for memory
_EXCHANGED_STEPS = 8  # rows that are added up before their sum joins the running one in memory
_EXCHANGED_LEAST = 256  # columns of a chunk
_DELAYED_BYTES = 128 << 10  # the longest row of which several are kept
_WOVEN_WIDTH = 2  # registers of such a loop: there is enough to be done side by side
_WOVEN_AHEAD = 9 << 10  # bytes from what it reads to what it prefetches, into the second-level cache
_WOVEN_APART = 3 << 10  # bytes that it is further ahead in each next buffer: a bank of memory serves one at a time
_WOVEN_NEAR = 2 << 10  # bytes from what it reads to what it prefetches again, into the first-level cache
_STAGGERED = 1024  # elements of the longest row that waits for its sums longer than it takes to add them up


def choose_schedule(kernel: Kernel, nest: LoopBlock, machine: Machine) -> Schedule:
    """The default schedule of a normalized kernel and its nest."""
    return _Chooser(kernel, machine).choose(nest)


class _Chooser:
    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel = kernel
        self.machine = machine
        self.kept: set[Expr] = set()  # values that a row buffer has
        self.lanes = 1  # of the vector loop whose cost is estimated
        self.widths: dict[int, int] = {}  # of loops that are pipelined together
        self.end_of_rows: Loop | None = None  # the last loop of rows that might be

    def choose(self, nest: LoopBlock) -> Schedule:
        numbers = number_loops(nest)
        cost, vectorised = self._best(nest)
        actions: list[Action] = []
        chain = parallel_chain(nest)
        before = LoopBlock(tuple(s for s in nest.steps if isinstance(s, ReduceLoop)))
        again, _ = self._best(before)
        if again > _CHUNK_COST / _AGAIN:
            chain = []  # every chunk would do those reductions
        tiled = self._tiled(chain)
        if tiled:
            return self._transpose(chain, tiled, numbers)
        while len(chain) > 1 and self._stays_whole(chain, cost):
            chain = chain[:-1]  # finding the place of each row in the range would cost more than the row
        if chain and self.machine.vector_registers >= _MANY_REGISTERS:
            self.end_of_rows = next((s for s in chain[-1].body.steps[-1:] if isinstance(s, MapLoop)), None)
        staged = list(self._staged(nest, vectorised))
        self.kept = {n for first in staged for s in walk_loops(nest) if s is not first for n in row_values(first, s)}
        exchanged = chain[-1] if chain and self._exchanges(chain[-1], vectorised) else None
        streams = self._streams(nest, vectorised, numbers, exchanged)
        ahead = self._rows_ahead(chain, vectorised, numbers) or (
            [] if streams else self._next_rows(staged, chain, numbers)
        )
        delay = self._delayed(chain, vectorised, numbers)
        ahead = self._woven(chain, numbers) if self.widths else ahead
        followed = {a.buffer for a in ahead}
        streams = [*(a for a in streams if not isinstance(a, Prefetch) or a.buffer not in followed), *delay, *ahead]
        if chain:
            points = prod(_guess(loop.axis.extent) for loop in chain)
            each = max(cost / max(1, points), 1e-3)
            lanes = max([self._width(loop) for loop in chain if id(loop) in vectorised], default=1)
            grain = max(1, int(_CHUNK_COST / each))
            if self._traffic() > _STREAM_CACHES * self.machine.cache_bytes:
                share = max(_LEAST_CHUNKS, self._traffic() // _STREAM_CHUNK)
                grain = max(grain, points // share)
            unit = lanes
            if exchanged is not None:
                row = _guess(exchanged.axis.extent)
                unit = row if len(chain) > 1 else lanes  # whole rows: a part of one would be all of its reads
                grain = max(grain, _EXCHANGED_LEAST, row // _LEAST_CHUNKS)
            actions.append(Parallel(len(chain), max(unit, grain - grain % unit)))
        for loop in walk_loops(nest):
            if id(loop) in vectorised:
                actions.append(Vectorise(numbers[id(loop)], self.widths.get(id(loop)) or self._width(loop)))
        if exchanged is not None:
            actions.append(Exchange(numbers[id(exchanged)], _EXCHANGED_STEPS))
        actions += [Stage(numbers[id(loop)]) for loop in staged]
        if chain and not (delay or exchanged or staged) and self._staggers(chain[-1], vectorised):
            actions.append(Stagger(numbers[id(chain[-1])]))
        return Schedule((*actions, *streams))

    def _stays_whole(self, chain: list[MapLoop], cost: float) -> bool:
        """Whether the innermost loop is never handed out in parts: it is short, or a chunk has many turns of it."""
        loop = chain[-1]
        if _is_short(loop.axis.extent):
            return True
        if any(isinstance(s, (MapLoop, ReduceLoop)) for s in loop.body.steps) or not isinstance(loop.axis.extent, int):
            return False
        rows = prod(_guess(outer.axis.extent) for outer in chain[:-1])
        return loop.axis.extent <= _WHOLE_ROW and _ROWS_OF_CHUNK * cost / max(1, rows) <= _CHUNK_COST

    # memory

    def _traffic(self) -> int:
        """Bytes that a kernel reads and writes if it does so once; 0 where that is not known."""
        return sum(map(known_bytes, self.kernel.buffers))

    def _streams(
        self, nest: LoopBlock, vectorised: frozenset[int], numbers: dict[int, int], exchanged: MapLoop | None
    ) -> list[Action]:
        """Large buffers: results that no cache holds are written by non-temporal stores; what is read once is
        prefetched."""
        loops = [(loop, around) for loop, around in loops_with_outer(nest) if id(loop) in vectorised]
        passing = {
            id(loop): stores for loop, _ in loops if isinstance(loop, MapLoop) and (stores := self._going_past(loop))
        }
        follows = self.machine.vector_bytes >= _FOLLOWING
        steps = [s for loop in walk_loops(nest) for s in loop.body.steps]
        places = Counter(s.node.buffer for s in steps if isinstance(s, Compute) and isinstance(s.node, Load))
        asked: list[Action] = []
        for loop, around in loops:
            order, body = (*around, loop), loop.body
            if loop is exchanged:
                reduction = next(s for s in loop.body.steps if isinstance(s, ReduceLoop))
                order, body = (*around, reduction, loop), reduction.body
            loads = [s.node for s in body.steps if isinstance(s, Compute) and isinstance(s.node, Load)]
            # a row that is read several times has its own rhythm: prefetches get in its way
            once = [n.buffer for n in loads if places[n.buffer] == 1 and in_order(n, order)]
            large = [b for b in once if known_bytes(b) > _STREAM_CACHES * self.machine.cache_bytes]
            far, cache = (_AHEAD, 2) if follows and loop is not exchanged else (0, 1)
            if passing and self._scalar_cost(loop) > _LIGHT:
                far, cache = _AHEAD_OF_WORK, 1
            elif passing:
                far, cache = _AHEAD_OF_PAST, 1 if len(large) == 1 else 2
            if not passing or (follows and id(loop) in passing):
                number = numbers[id(loop)]
                asked += [Prefetch(b.name, number, far // b.dtype.itemsize, cache) for b in large]
            asked += [
                Prefetch(n.buffer.name, numbers[id(loop)], ahead, 1)
                for n in loads
                if places[n.buffer] == 1 and (ahead := self._picked_rows_ahead(n, order))
            ]
        return [*(NonTemporal(s.buffer.name) for stores in passing.values() for s in stores), *asked]

    def _picked_rows_ahead(self, load: Load, order: Sequence[Loop]) -> int:
        """How far ahead a loop prefetches rows of a large buffer from which it picks about as many elements as they
        have, in an order that no processor guesses; 0 where it does not."""
        if len(order) < 2 or known_bytes(load.buffer) <= _STREAM_CACHES * self.machine.cache_bytes:
            return 0
        (*_, rows, picks), terms = order, linear(load.index[0]).terms
        row, count, itemsize = terms.get(rows.axis), picks.axis.extent, load.buffer.dtype.itemsize
        if terms.get(picks.axis) or load.where is not None or followed_place(load, picks.axis) is None:
            return 0
        if not isinstance(row, int) or not isinstance(count, int) or not row <= 2 * count <= 4 * row:
            return 0
        near = row * itemsize * _ROWS_SHARE <= self.machine.cache_bytes
        return -(-_ROWS_AHEAD // (row * itemsize)) * row if near else 0

    def _delayed(self, chain: list[MapLoop], vectorised: frozenset[int], numbers: dict[int, int]) -> list[Delay]:
        """Software pipelining of rows: their loops are one, each a row behind the one before. Where registers are few,
        and results are non-temporal stores, those alone run beside the dearest loop of the next row."""
        loops = [s for s in chain[-1].body.steps if isinstance(s, (MapLoop, ReduceLoop))] if chain else []
        last = loops[-1] if loops else None
        if not isinstance(last, MapLoop) or last.scans or chain[-1].body.steps[-1] is not last:
            return []
        past = self._going_past(last)
        stores = past or [s.store for s in last.body.steps if isinstance(s, StoreStep)]
        length = last.axis.extent
        loads = [n for n in loop_values(last) if isinstance(n, Load)]
        plain = all(isinstance(a, Axis) for n in loads for a in linear(n.index[0]).terms)
        lines = bool(stores) and all(lines_up(s, last.axis) for s in stores)
        near = max(map(known_bytes, self.kernel.buffers)) <= _STREAM_CACHES * self.machine.cache_bytes
        if not lines or not (past or near) or not plain or not isinstance(length, int):
            return []
        inner = [s for s in loops if isinstance(s, ReduceLoop) and s.axis is last.axis and id(s) in vectorised]
        if not inner or len(inner) < len(loops) - 1 or length * 8 > _DELAYED_BYTES:
            return []
        nested = any(isinstance(s, (MapLoop, ReduceLoop)) for loop in loops for s in loop.body.steps)
        if self.machine.vector_registers >= _MANY_REGISTERS and not nested:
            lanes = max(map(self._register_lanes, loops))
            width = min(_WOVEN_WIDTH * lanes, *map(self._width, loops))
            while length % width:
                width //= 2
            chains = [chains_of(s, self.machine) for s in loops if goes_along(s)]
            whole = all(length % n == 0 for n in chains) and (past or length >= 2 * max(chains, default=length))
            if width >= lanes and whole:
                self.widths = {id(loop): width for loop in loops}
                return [Delay(numbers[id(b)], numbers[id(a)]) for a, b in pairwise(loops)]
        beside = max(inner, key=self._scalar_cost)
        long = self._scalar_cost(beside) > _LIGHT  # else it reads from memory, and both have to wait
        return (
            [Delay(numbers[id(last)], numbers[id(beside)])]
            if past and long and length % self._width(beside) == 0
            else []
        )

    def _staggers(self, rows: MapLoop, vectorised: frozenset[int]) -> bool:
        """Whether each loop of a row is to work while others wait for their sums: rows that are not long."""
        loops = [s for s in rows.body.steps if isinstance(s, (MapLoop, ReduceLoop))]
        if len(loops) < 2 or _guess(rows.axis.extent) <= len(loops):
            return False
        if any(id(s) not in vectorised or (isinstance(s, MapLoop) and s.scans) for s in loops):
            return False
        if any(self._scalar_cost(s) > _LIGHT for s in loops):
            return False
        nested = any(isinstance(s, (MapLoop, ReduceLoop)) for loop in loops for s in loop.body.steps)
        return not nested and _guess(loops[0].axis.extent) <= _STAGGERED

    def _woven(self, chain: list[MapLoop], numbers: dict[int, int]) -> list[Prefetch]:
        """What pipelined rows read of large buffers is prefetched twice: into the second-level cache, then into the
        first."""
        loops = [s for s in chain[-1].body.steps if isinstance(s, (MapLoop, ReduceLoop)) and id(s) in self.widths]
        length = _guess(loops[0].axis.extent)
        rows = rows_of(loops, chain[-1].axis).items()
        large = [(b, *found) for b, found in rows if known_bytes(b) > _STREAM_CACHES * self.machine.cache_bytes]
        asked: list[Prefetch] = []
        for number, (buffer, first, step) in enumerate(large):
            far = (_WOVEN_AHEAD + number * _WOVEN_APART) // buffer.dtype.itemsize
            far = far if step == length else -(-far // length) * step  # whole rows where others lie between them
            loop = numbers[id(loops[first])]
            near = _WOVEN_NEAR // buffer.dtype.itemsize
            asked += [Prefetch(buffer.name, loop, far, 2), Prefetch(buffer.name, loop, near)]
        return asked

    def _rows_ahead(self, chain: list[MapLoop], vectorised: frozenset[int], numbers: dict[int, int]) -> list[Prefetch]:
        """Rows of large buffers that several loops go through: all but the first find them in a cache. Where those have
        much to do, or where several rows are read, memory would be idle meanwhile: they ask for rows to come, each for
        those of other buffers."""
        loops = [s for s in chain[-1].body.steps if isinstance(s, (MapLoop, ReduceLoop))] if chain else []
        if not loops or not all(id(s) in vectorised and s.axis is loops[0].axis for s in loops):
            return []
        most = self.machine.cache_bytes // _ROWS_SHARE
        large = {
            buffer: (loops[at + 1 :], step)
            for buffer, (at, step) in rows_of(loops, chain[-1].axis).items()
            if _ROWS_LEAST <= step * buffer.dtype.itemsize <= most
            and known_bytes(buffer) > _STREAM_CACHES * self.machine.cache_bytes
        }
        work = sum(self._scalar_cost(s) for s in loops[1:])
        asked: list[Prefetch] = []
        for number, (buffer, (later, step)) in enumerate(large.items()):
            if later and (work > _LIGHT or len(large) > 1):
                rows = -(-_ROWS_AHEAD // (step * buffer.dtype.itemsize))
                asked.append(Prefetch(buffer.name, numbers[id(later[number % len(later)])], rows * step, 2))
        return asked

    def _next_rows(self, staged: list[ReduceLoop], chain: list[MapLoop], numbers: dict[int, int]) -> list[Prefetch]:
        """While a loop works on a row, prefetch the next one: the loop after it that only reads has to wait less."""
        asked: list[Prefetch] = []
        for loop in staged if chain else ():
            if self._scalar_cost(loop) <= _LIGHT:
                continue
            loads = [s.node for s in loop.body.steps if isinstance(s, Compute) and isinstance(s.node, Load)]
            for load in loads:
                terms = linear(load.index[0]).terms
                row = terms.get(chain[-1].axis)
                if terms.get(loop.axis) == 1 and isinstance(row, int) and row > 1 and load.where is None:
                    asked.append(Prefetch(load.buffer.name, numbers[id(loop)], row))
        return list(dict.fromkeys(asked))

    def _going_past(self, loop: MapLoop, around: MapLoop | None = None) -> list[Store]:
        """The stores of a loop that should be non-temporal: one alone, or all at the end of pipelined rows."""
        stores = [s.store for s in loop.body.steps if isinstance(s, StoreStep)]
        together = loop is self.end_of_rows and all(lines_up(s, loop.axis) for s in stores)
        one_by_one = len(stores) == 1 or together
        return stores if one_by_one and all(self._goes_past(s, loop, around) for s in stores) else []

    def _goes_past(self, store: Store, loop: MapLoop, around: MapLoop | None) -> bool:
        """Whether a result is large, and stored in long runs that cost little. Rows that follow each other along the
        loop around are one run."""
        last = self.machine.last_cache_bytes
        terms = linear(store.index[0]).terms
        plain = terms.get(loop.axis) == 1 and not any(loop.axis in a.free for a in terms if a is not loop.axis)
        beyond = 2 * known_bytes(store.buffer) >= last and 2 * self._traffic() >= 3 * last
        lines = lines_up(store, loop.axis)
        run = _guess(loop.axis.extent) * store.buffer.dtype.itemsize
        if around is not None and terms.get(around.axis) == loop.axis.extent:
            run *= _guess(around.axis.extent)
        long = run >= (_STREAM_LINES if lines else _STREAM_ROW)
        most = _DEAR if lines else _LIGHT
        return plain and long and beyond and self._scalar_cost(loop) <= most

    def _transpose(self, chain: list[MapLoop], by: int, numbers: dict[int, int]) -> Schedule:
        """Tiles of the two innermost loops, in blocks that a core's own cache holds more than twice.

        A block is prefetched while the one before it is transposed, row by row. Where it has whole rows of the result,
        which then is written from one end to the other, memory does better with hints along long rows that are read; so
        do caches that hold all of it."""
        outer, inner = chain[-2:]
        past = next(iter(self._going_past(inner, outer)), None)
        loads = [n for n in loop_values(inner) if isinstance(n, Load) and turns(n, outer.axis, inner.axis)]
        size = max(n.buffer.dtype.itemsize for n in loads)
        read, most, written = _TURNED_BLOCK
        columns = max(by, min(most, written // size))
        rows, ahead = max(by, read // size), 0
        large = self._traffic() > _STREAM_CACHES * self.machine.cache_bytes
        if not large:
            (rows, columns), ahead = _NEAR_BLOCK, _NEAR_HINT // size
        elif _guess(inner.axis.extent) <= columns and _guess(outer.axis.extent) * size >= _TURNED_ROW:
            ahead = rows
            rows *= columns // _guess(inner.axis.extent)  # the fewer there are, the more of each
        rows = min(rows, -(-_guess(outer.axis.extent) // by) * by)
        points = rows * min(columns, _guess(inner.axis.extent))
        grain = _SQUARES_LEAST // points
        if large:
            each = 2 * points * size
            grain = max(grain, min(_STREAM_TURNED // each, self._traffic() // (each * _LEAST_CHUNKS)))
        actions: list[Action] = [
            Parallel(len(chain), max(1, grain)),
            Vectorise(numbers[id(inner)], self._squares(past, outer, inner, by)),
            Tile(numbers[id(outer)], by, rows, columns),
        ]
        if past is not None:
            actions.append(NonTemporal(past.buffer.name))
        names = dict.fromkeys(n.buffer.name for n in loads)
        actions += [Prefetch(name, numbers[id(outer)], ahead, 2 if ahead else 1) for name in names]
        return Schedule(tuple(actions))

    def _squares(self, store: Store | None, outer: MapLoop, inner: MapLoop, by: int) -> int:
        """Lanes of tiles that are transposed side by side: those that write two lines by non-temporal stores, or one
        where they are small, or where rows that are read are short."""
        if store is None or not lines_up(store, inner.axis):
            return by
        lanes, size = by, store.buffer.dtype.itemsize
        most = 2 * _LINE if by * size >= _LINE and _guess(outer.axis.extent) * size >= _TURNED_ROW else _LINE
        while lanes * size < most and 2 * lanes <= _guess(inner.axis.extent):
            lanes *= 2
        return lanes

    def _tiled(self, chain: list[MapLoop]) -> int:
        """Lanes of a transpose: the innermost loop reads along the loop around it. 0 where there is none, or where half
        of its tiles would be outside."""
        if len(chain) < 2 or any(isinstance(s, (MapLoop, ReduceLoop)) for s in chain[-1].body.steps):
            return 0
        outer, inner = chain[-2:]
        nodes = list(loop_values(inner))
        turned = [n for n in nodes if isinstance(n, Load) and turns(n, outer.axis, inner.axis)]
        widest = 2 * _SQUARE if self.machine.vector_registers >= _MANY_REGISTERS else _SQUARE
        lanes = min(widest, self._register_lanes(inner))
        known = [a.extent for a in (outer.axis, inner.axis) if isinstance(a.extent, int)]

        def is_filled() -> bool:
            return 2 * prod(known) >= prod(-(-n // lanes) * lanes for n in known)

        while any(lanes > extent for extent in known) or (lanes > _SQUARE and not is_filled()):
            lanes //= 2
        worth = turned and lanes >= _LEAST_SQUARE and self._scalar_cost(inner) <= 16
        return lanes if worth and is_filled() else 0

    def _exchanges(self, loop: MapLoop, vectorised: frozenset[int]) -> bool:
        """Whether the elements of a vector loop lie in rows that its only reduction strides over."""
        inner = [s for s in loop.body.steps if isinstance(s, (MapLoop, ReduceLoop))]
        reduction = inner[0] if len(inner) == 1 else None
        if id(loop) not in vectorised or not isinstance(reduction, ReduceLoop):
            return False
        if any(isinstance(s, (MapLoop, ReduceLoop)) for s in reduction.body.steps):
            return False
        before = loop.body.steps[: loop.body.steps.index(reduction)]
        cheap = all(isinstance(s, Compute) and self._node_cost(s.node, loop.axis) <= 2 for s in before)
        loads = [s.node for s in reduction.body.steps if isinstance(s, Compute) and isinstance(s.node, Load)]
        rows = any(
            linear(n.index[0]).terms.get(loop.axis) == 1
            and linear(n.index[0]).terms.get(reduction.axis, 0) not in (0, 1)
            for n in loads
        )
        long = _guess(reduction.axis.extent) >= 2 * _EXCHANGED_STEPS
        wide = _guess(loop.axis.extent) > self._width(loop)
        numbers = not any(r.body.dtype.is_bool for r in reduction.reduces)
        return cheap and rows and long and wide and numbers

    def _staged(self, block: LoopBlock, vectorised: frozenset[int]) -> Iterator[ReduceLoop]:
        """Vector reductions that compute something dear which a later vector loop over their axis needs again."""
        for at, step in enumerate(block.steps):
            if isinstance(step, (MapLoop, ReduceLoop)):
                yield from self._staged(step.body, vectorised)
            if isinstance(step, ReduceLoop) and id(step) in vectorised and row_is_kept(step.axis):
                later = [s for s in block.steps[at + 1 :] if id(s) in vectorised]
                if any(row_values(step, s) for s in later if isinstance(s, (MapLoop, ReduceLoop))):
                    yield step

    def _best(self, block: LoopBlock, vector: Axis | None = None) -> tuple[float, frozenset[int]]:
        """The estimated cost of a block and the loops to vectorise in it."""
        total, chosen = 0.0, frozenset[int]()
        woven = _woven(block, vector)
        for step in block.steps:
            match step:
                case Compute(node):
                    total += self._node_cost(node, vector)
                case StoreStep(store) if store in woven:
                    total += _WEAVE_COST
                case StoreStep(store):
                    total += self._access_cost(store.index[0], vector, store.buffer.dtype.itemsize)
                case _:
                    cost, picks = self._loop(step, vector)
                    total += cost
                    chosen |= picks
        return total, chosen

    def _loop(self, loop: MapLoop | ReduceLoop, vector: Axis | None) -> tuple[float, frozenset[int]]:
        trips = _guess(loop.axis.extent)
        serial, picks = self._best(loop.body, vector)
        serial_cost = trips * (serial + 1)
        if vector is not None or not runs_in_vectors(loop):
            return serial_cost, picks
        lanes = self.lanes = self._register_lanes(loop)
        body, _ = self._best(loop.body, loop.axis)
        if isinstance(loop, MapLoop):
            body += _PREFIX_COST * len(loop.scans)
        fold = 12 if isinstance(loop, ReduceLoop) else 0
        vector_cost = -(-trips // lanes) * (body + 1) + fold
        if (vector_cost < serial_cost and trips > 1) or goes_along(loop):
            return vector_cost, frozenset((id(loop),))
        return serial_cost, picks

    def _node_cost(self, node: Expr, vector: Axis | None) -> float:
        match node:
            case Load(buffer, index, where):
                if vector is not None and where is None and _spread(index[0], vector):
                    return 2.0 * _spread(index[0], vector)
                return self._access_cost(index[0], vector, buffer.dtype.itemsize)
            case Scalar(name, _):
                return float(SCALARS[name].cost)
            case Scan():
                return 2.0
        return 0.0

    def _access_cost(self, address: Expr, vector: Axis | None, itemsize: int) -> float:
        form = linear(address)
        found = float(sum(SCALARS[n.name].cost for n in postorder(form.terms) if isinstance(n, Scalar)))  # by its id
        if vector is None or vector not in address.free:
            return 0.5 + found
        others = any(vector in atom.free for atom in form.terms if atom is not vector)
        if not others and form.terms.get(vector) in (1, -1):
            return 1.0 if form.terms.get(vector) == 1 else 2.0
        return found + _LANE_COST * max(1, min(self.lanes, self.machine.vector_bytes // max(4, itemsize)))

    def _register_lanes(self, loop: Loop) -> int:
        return register_lanes(loop, self.machine)

    def _scalar_cost(self, loop: Loop) -> int:
        """Of what a loop computes, but for what it finds in a row buffer."""
        inside: set[Expr] = set()
        if isinstance(loop, MapLoop):
            found = [n for n in loop_values(loop) if n in self.kept]
            inside = {n for n in postorder(found) if not isinstance(n, Reduce)}
        nodes = dict.fromkeys(loop_values(loop))  # once, though what is stored is computed, too
        return sum(SCALARS[n.name].cost for n in nodes if isinstance(n, Scalar) and n not in inside)

    def _width(self, loop: Loop) -> int:
        """Lanes of a vectorised loop: several registers at once where the work on each is small."""
        lanes = self._register_lanes(loop)
        nodes, cost = list(loop_values(loop)), self._scalar_cost(loop)
        live = sum(isinstance(n, (Load, Reduce)) for n in nodes)
        chains = (
            cost >= _CHAIN and live <= 3 and self.machine.vector_registers >= _MANY_REGISTERS
        )  # of steps that wait for another
        registers = 2 if cost <= _DEAR and live <= 12 else 1
        if (cost <= _LIGHT and live <= 6) or (chains and cost <= _DEAR):
            registers = 4
        if isinstance(loop, MapLoop) and (_woven(loop.body, loop.axis) or _spreads(loop)):
            registers = 1
        extent = loop.axis.extent
        row = chains_of(loop, self.machine)
        if row:
            return min(lanes * registers, row)
        if goes_along(loop):
            lanes = lanes_along(loop, self.machine)
        if isinstance(extent, int):
            masks = self.machine.masks  # then one masked step does what is more than half a register
            least = 1 if masks or not goes_along(loop) else lanes
            while lanes > least and (lanes if not masks else lanes // 2) > extent - masks:
                lanes //= 2
            while registers > 1 and lanes * registers > extent:
                registers //= 2
        return lanes * registers


def _woven(block: LoopBlock, axis: Axis | None) -> set[Store]:
    """Stores of a block that are interleaved where a vector runs along an axis."""
    stores = [s.store for s in block.steps if isinstance(s, StoreStep)] if axis is not None else []
    return {s for comb in combs(stores, axis) for s in comb} if axis is not None and len(stores) > 1 else set()


def _spread(address: Expr, axis: Axis) -> int:
    """How far apart loads along an axis are where whole registers are loaded and shuffled; else 0."""
    terms = linear(address).terms
    step = terms.get(axis)
    alone = not any(axis in atom.free for atom in terms if atom is not axis)
    return step if isinstance(step, int) and step in SPREADS and alone else 0


def _spreads(loop: Loop) -> bool:
    """Whether a loop loads elements that are a few apart."""
    return any(isinstance(n, Load) and _spread(n.index[0], loop.axis) for n in loop_values(loop))


def _is_short(extent: Dim) -> bool:
    return isinstance(extent, int) and extent < _SHORT_ROW


def _guess(extent: Dim) -> int:
    if isinstance(extent, int):
        return extent
    low, high = bounds(extent)
    return max(low, _GUESS if high is None else min(high, _GUESS))
