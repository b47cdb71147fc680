"""Schedules: how the loops of a nest are run, as data that can be printed, parsed, replayed and searched over.

Loops are numbered in the order in which a nest prints them. A schedule is a tuple of actions:

    parallel 2 grain 4096    the two outermost loops are handed out to threads, 4096 points at a time
    vectorise 1 by 32        loop 1 runs 32 points at once, whatever number of registers that takes
    tile 0 by 16             loop 0 goes 16 points at a time around the vector loop inside it, and turns loads that are
                             contiguous along loop 0 by shuffles: transposes
    stage 3                  loop 3 keeps values that later loops over its axis need again in a row buffer
    nontemporal out          stores to `out` bypass the caches
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from strata.core import Dim, bounds
from strata.errors import ParseError
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Expr, Kernel, Load, Reduce, Scalar, Scan
from strata.kernel.nest import Block, Compute, MapLoop, ReduceLoop, StoreStep
from strata.kernel.scalars import SCALARS

Loop = MapLoop | ReduceLoop
_GUESS = 1024  # the extent of an axis of which nothing is known
_SHORT_ROW = 32  # elements of an innermost loop that is not handed out on its own
_CHUNK_COST = 1 << 13  # vector operations in one chunk: a microsecond or more, large against handing it out
_LANE_COST = 2.0  # one lane of an access that is not contiguous, in contiguous vector accesses
_ROW_BYTES = 256 << 10  # the longest row kept on a thread's stack
_DEAR = 10  # a function that costs more than storing and loading its value


@dataclass(frozen=True, slots=True)
class Parallel:
    """The outermost loops whose points are handed out to threads, and how many at a time."""

    loops: int
    grain: int

    def __str__(self) -> str:
        return f"parallel {self.loops} grain {self.grain}"


@dataclass(frozen=True, slots=True)
class Vectorise:
    loop: int
    lanes: int

    def __str__(self) -> str:
        return f"vectorise {self.loop} by {self.lanes}"


@dataclass(frozen=True, slots=True)
class Tile:
    loop: int
    by: int

    def __str__(self) -> str:
        return f"tile {self.loop} by {self.by}"


@dataclass(frozen=True, slots=True)
class Stage:
    loop: int

    def __str__(self) -> str:
        return f"stage {self.loop}"


@dataclass(frozen=True, slots=True)
class NonTemporal:
    buffer: str

    def __str__(self) -> str:
        return f"nontemporal {self.buffer}"


Action = Parallel | Vectorise | Tile | Stage | NonTemporal


@dataclass(frozen=True, slots=True)
class Schedule:
    actions: tuple[Action, ...] = ()

    @property
    def parallel(self) -> Parallel:
        return next((a for a in self.actions if isinstance(a, Parallel)), Parallel(0, 1))

    def lanes(self, loop: int) -> int:
        """1 for a loop that is not vectorised."""
        return next((a.lanes for a in self.actions if isinstance(a, Vectorise) and a.loop == loop), 1)

    def tile(self, loop: int) -> int:
        """1 for a loop that is not tiled."""
        return next((a.by for a in self.actions if isinstance(a, Tile) and a.loop == loop), 1)

    def stages(self, loop: int) -> bool:
        return any(isinstance(a, Stage) and a.loop == loop for a in self.actions)

    def is_nontemporal(self, buffer: str) -> bool:
        return any(isinstance(a, NonTemporal) and a.buffer == buffer for a in self.actions)

    def __str__(self) -> str:
        return "; ".join(map(str, self.actions))


_ACTIONS = (
    (re.compile(r"parallel (\d+) grain (\d+)\Z"), lambda m: Parallel(int(m[1]), int(m[2]))),
    (re.compile(r"vectorise (\d+) by (\d+)\Z"), lambda m: Vectorise(int(m[1]), int(m[2]))),
    (re.compile(r"tile (\d+) by (\d+)\Z"), lambda m: Tile(int(m[1]), int(m[2]))),
    (re.compile(r"stage (\d+)\Z"), lambda m: Stage(int(m[1]))),
    (re.compile(r"nontemporal (\w+)\Z"), lambda m: NonTemporal(m[1])),
)


def parse_schedule(text: str) -> Schedule:
    """Reads what `str(schedule)` prints."""
    return Schedule(tuple(_parse_action(part.strip()) for part in text.split(";") if part.strip()))


def _parse_action(text: str) -> Action:
    for pattern, make in _ACTIONS:
        match = pattern.match(text)
        if match:
            return make(match)
    raise ParseError(f"{text!r} is not a schedule action", code="P120")


def number_loops(block: Block) -> dict[int, int]:
    """id of a loop -> its number, outermost and first come first."""
    return {id(loop): number for number, loop in enumerate(walk_loops(block))}


def walk_loops(block: Block) -> Iterator[Loop]:
    for step in block.steps:
        if isinstance(step, (MapLoop, ReduceLoop)):
            yield step
            yield from walk_loops(step.body)


def parallel_chain(block: Block) -> list[MapLoop]:
    """The outermost loops that contain everything, so that their points can be handed out."""
    chain: list[MapLoop] = []
    while True:
        loops = [s for s in block.steps if not isinstance(s, Compute)]
        if len(loops) != 1 or not isinstance(loops[0], MapLoop) or loops[0].scans:
            return chain
        chain.append(loops[0])
        block = loops[0].body


@dataclass(frozen=True, slots=True)
class Machine:
    """What schedule choices need to know of a processor: bytes in a vector register, and how many of those."""

    vector_bytes: int
    vector_registers: int
    cache_bytes: int = 1 << 20


def choose_schedule(kernel: Kernel, nest: Block, machine: Machine) -> Schedule:
    """The default schedule of a normalized kernel and its nest."""
    return _Chooser(kernel, machine).choose(nest)


class _Chooser:
    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel = kernel
        self.machine = machine

    def choose(self, nest: Block) -> Schedule:
        numbers = number_loops(nest)
        cost, vectorised = self._best(nest)
        actions: list[Action] = []
        chain = parallel_chain(nest)
        tiled = self._tiled(chain)
        if tiled:
            vectorised = frozenset((id(chain[-1]),))
            chain = chain[:-1]
        while not tiled and len(chain) > 1 and _is_short(chain[-1].axis.extent):
            chain = chain[:-1]  # finding the place of each row in the range would cost more than the row
        if chain:
            points = prod(_guess(loop.axis.extent) for loop in chain)
            each = max(cost / max(1, points), 1e-3)
            lanes = max([self._width(loop) for loop in chain if id(loop) in vectorised], default=max(1, tiled))
            grain = max(1, int(_CHUNK_COST / each))
            actions.append(Parallel(len(chain), max(lanes, grain - grain % lanes)))
        for loop in walk_loops(nest):
            if id(loop) in vectorised:
                actions.append(Vectorise(numbers[id(loop)], tiled or self._width(loop)))
        if tiled:
            actions.append(Tile(numbers[id(chain[-1])], tiled))
        actions += [Stage(numbers[id(loop)]) for loop in self._staged(nest, vectorised)]
        return Schedule(tuple(actions))

    def _tiled(self, chain: list[MapLoop]) -> int:
        """Lanes of a transpose: the innermost loop reads along the loop around it. 0 where there is none."""
        if len(chain) < 2 or any(isinstance(s, (MapLoop, ReduceLoop)) for s in chain[-1].body.steps):
            return 0
        outer, inner = chain[-2:]
        nodes = list(_values(inner))
        turned = [n for n in nodes if isinstance(n, Load) and turns(n, outer.axis, inner.axis)]
        cost = sum(SCALARS[n.name].cost for n in nodes if isinstance(n, Scalar))
        lanes = self._register_lanes(inner)
        small = [a.extent for a in (outer.axis, inner.axis) if isinstance(a.extent, int) and a.extent < lanes]
        return lanes if turned and not small and cost <= 16 and 4 <= lanes <= 16 else 0

    def _staged(self, block: Block, vectorised: frozenset[int]) -> Iterator[ReduceLoop]:
        """Vector reductions that compute something dear which a later vector loop over their axis needs again."""
        for at, step in enumerate(block.steps):
            if isinstance(step, (MapLoop, ReduceLoop)):
                yield from self._staged(step.body, vectorised)
            if isinstance(step, ReduceLoop) and id(step) in vectorised and _row_bytes(step.axis) <= _ROW_BYTES:
                later = [s for s in block.steps[at + 1 :] if id(s) in vectorised]
                if any(row_values(step, s) for s in later if isinstance(s, (MapLoop, ReduceLoop))):
                    yield step

    def _best(self, block: Block, vector: Axis | None = None) -> tuple[float, frozenset[int]]:
        """The estimated cost of a block and the loops to vectorise in it."""
        total, chosen = 0.0, frozenset[int]()
        for step in block.steps:
            match step:
                case Compute(node):
                    total += self._node_cost(node, vector)
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
        if vector is not None or (isinstance(loop, MapLoop) and loop.scans):
            return serial_cost, picks
        lanes = self._register_lanes(loop)
        body, _ = self._best(loop.body, loop.axis)
        fold = 12 if isinstance(loop, ReduceLoop) else 0
        vector_cost = -(-trips // lanes) * (body + 1) + fold
        if vector_cost < serial_cost and trips > 1:
            return vector_cost, frozenset((id(loop),))
        return serial_cost, picks

    def _node_cost(self, node: Expr, vector: Axis | None) -> float:
        match node:
            case Load(buffer, index, _):
                return self._access_cost(index[0], vector, buffer.dtype.itemsize)
            case Scalar(name, _):
                return float(SCALARS[name].cost)
            case Scan():
                return 2.0
        return 0.0

    def _access_cost(self, address: Expr, vector: Axis | None, itemsize: int) -> float:
        if vector is None or vector not in address.free:
            return 0.5
        form = linear(address)
        others = any(vector in atom.free for atom in form.terms if atom is not vector)
        if not others and form.terms.get(vector) == 1:
            return 1.0
        return _LANE_COST * max(1, self.machine.vector_bytes // max(4, itemsize))

    def _register_lanes(self, loop: Loop) -> int:
        return register_lanes(loop, self.machine)

    def _width(self, loop: Loop) -> int:
        """Lanes of a vectorised loop: several registers at once where the work on each is small."""
        lanes = self._register_lanes(loop)
        nodes = list(_values(loop))
        cost = sum(SCALARS[n.name].cost for n in nodes if isinstance(n, Scalar))
        live = sum(isinstance(n, (Load, Reduce)) for n in nodes)
        registers = 4 if cost <= 12 and live <= 6 else 2 if cost <= 40 and live <= 12 else 1
        extent = loop.axis.extent
        if isinstance(extent, int):
            while lanes > 1 and lanes > extent:
                lanes //= 2
            while registers > 1 and lanes * registers > extent:
                registers //= 2
        return lanes * registers


def register_lanes(loop: Loop, machine: Machine) -> int:
    """Elements of the widest type computed in a loop that fill one register."""
    widest = max((_bytes(n) for n in _values(loop)), default=4)
    return max(1, machine.vector_bytes // widest)


def _values(loop: Loop) -> Iterator[Expr]:
    """What a loop computes, inner loops included."""
    if isinstance(loop, ReduceLoop):
        yield from loop.reduces
    stack = [loop.body]
    while stack:
        for step in stack.pop().steps:
            match step:
                case Compute(node):
                    yield node
                case StoreStep(store):
                    yield store.value
                case ReduceLoop():
                    yield from step.reduces
                    stack.append(step.body)
                case MapLoop():
                    stack.append(step.body)


def _bytes(node: Expr) -> int:
    size = node.dtype.itemsize // (2 if node.dtype.is_complex else 1)
    return 4 if node.dtype.is_float and size < 4 else size


def _is_short(extent: Dim) -> bool:
    return isinstance(extent, int) and extent < _SHORT_ROW


def _guess(extent: Dim) -> int:
    if isinstance(extent, int):
        return extent
    low, high = bounds(extent)
    return max(low, _GUESS if high is None else min(high, _GUESS))


def _row_bytes(axis: Axis) -> int:
    high = bounds(axis.extent)[1]
    return _ROW_BYTES + 1 if high is None else high * 8


def row_values(first: ReduceLoop, later: Loop) -> list[Expr]:
    """Dear values that two loops over one axis both compute, and that are not just part of another such value."""
    if first.axis is not later.axis:
        return []
    again = {s.node: None for s in later.body.steps if isinstance(s, Compute)}
    both = [s.node for s in first.body.steps if isinstance(s, Compute) and s.node in again]
    dear = [n for n in both if isinstance(n, Scalar) and SCALARS[n.name].cost >= _DEAR and n.dtype.is_float]
    inside = {x for n in both for x in n.inputs}
    return [n for n in dear if n not in inside and first.axis in n.free]


def turns(load: Load, outer: Axis, inner: Axis) -> bool:
    """Whether a load is contiguous along the outer axis and strided along the inner one."""
    terms = linear(load.index[0]).terms
    plain = all(atom is outer or not (atom.free & {outer, inner}) for atom in terms if atom is not inner)
    return plain and load.where is None and terms.get(outer) == 1 and terms.get(inner, 0) not in (0, 1)
