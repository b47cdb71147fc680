"""Schedules: how the loops of a nest run, as data that can be printed, parsed, replayed and searched.

Loops are numbered in the order in which a nest prints them. A schedule is a tuple of actions:

    parallel 2 grain 4096    the two outermost loops are handed out to threads, 4096 points at a time
    vectorise 1 by 32        loop 1 runs 32 points at once, whatever number of registers that takes
    tile 0 by 16 blocks 512 x 256
                             loop 0 goes 16 points at a time around the vector loop inside it, and transposes loads
                             contiguous along loop 0 by shuffles. The vectors are 16 lanes or some times as
                             many, of tiles side by side. What is handed out to threads are blocks of 512 points of
                             loop 0 and 256 of the loop inside it; `prefetch` along loop 0 fetches the next block
    exchange 0 by 8          the reduction inside vector loop 0 goes around it, 8 of its steps at a time, its running
                             values in a row buffer: sums of columns
    stage 3                  loop 3 keeps values that later loops over its axis need again in a row buffer
    delay 3 beside 2         loop 3, the last of a row, runs with loop 2 of the next row (software pipelining)
    delay 2 beside 1; delay 3 beside 2
                             all three are one loop: over a row, the one before it, and the one before that. What loop 2
                             prefetches is further on in its own row
    stagger 0                the loops inside loop 0, over rows, each work on another row: one behind the loop before
    nontemporal out          stores to `out` are non-temporal: they bypass the caches
    prefetch x along 1       loop 1 prefetches the elements of `x` a block ahead, along several streams at once
    prefetch x along 2 ahead 1024
                             loop 2 prefetches the elements of `x` that are 1024 further on: those of the next row
    prefetch x along 2 ahead 8192 to 2
                             the same, into the core's second-level cache; loop 2 need not read `x`

Matmuls, convolutions and pools that a template takes have one action instead, with the template's parameters:

    matmul tile 6 x 2 chunk 96 x 8 k_block 0 prefetch 144
    pool chunk 4 x 16
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strata.core import Dim
from strata.errors import ParseError
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Expr, Load, Scalar, size
from strata.kernel.nest import Compute, LoopBlock, MapLoop, ReduceLoop
from strata.kernel.scalars import SCALARS

Loop = MapLoop | ReduceLoop
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
    rows: int  # of a block, along the loop
    columns: int  # along the loop inside it

    def __str__(self) -> str:
        return f"tile {self.loop} by {self.by} blocks {self.rows} x {self.columns}"

    def blocks(self, rows: Dim, columns: Dim) -> tuple[Dim, Dim]:
        """How many blocks each way. They may begin before the first point, so that they lie in lines: the last one
        then has a part of a tile more."""
        return (rows + self.rows - 1) // self.rows, (columns + self.columns - 1) // self.columns


@dataclass(frozen=True, slots=True)
class Exchange:
    loop: int
    by: int

    def __str__(self) -> str:
        return f"exchange {self.loop} by {self.by}"


@dataclass(frozen=True, slots=True)
class Stage:
    loop: int

    def __str__(self) -> str:
        return f"stage {self.loop}"


@dataclass(frozen=True, slots=True)
class Delay:
    loop: int
    beside: int

    def __str__(self) -> str:
        return f"delay {self.loop} beside {self.beside}"


@dataclass(frozen=True, slots=True)
class Stagger:
    loop: int

    def __str__(self) -> str:
        return f"stagger {self.loop}"


@dataclass(frozen=True, slots=True)
class NonTemporal:
    buffer: str

    def __str__(self) -> str:
        return f"nontemporal {self.buffer}"


@dataclass(frozen=True, slots=True)
class Prefetch:
    buffer: str
    loop: int
    ahead: int = 0  # elements; 0: a block of memory, in streams
    cache: int = 1  # the first or the second of the core's own

    def __str__(self) -> str:
        far = f" ahead {self.ahead}" + (f" to {self.cache}" if self.cache > 1 else "") if self.ahead else ""
        return f"prefetch {self.buffer} along {self.loop}{far}"


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """A matmul or convolution by a template: rows and vectors of a tile, rows and panels of a chunk, how much of k is
    summed at a time (0: all of it), and how many steps ahead is prefetched. The only action of its schedule."""

    height: int
    vectors: int
    rows: int
    panels: int
    k_block: int = 0
    prefetch: int = 0

    def __str__(self) -> str:
        tile, chunk = f"{self.height} x {self.vectors}", f"{self.rows} x {self.panels}"
        return f"matmul tile {tile} chunk {chunk} k_block {self.k_block} prefetch {self.prefetch}"


@dataclass(frozen=True, slots=True)
class PoolTiles:
    """A pool by a template: planes and lines of a chunk. The only action of its schedule."""

    planes: int
    lines: int

    def __str__(self) -> str:
        return f"pool chunk {self.planes} x {self.lines}"


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A whole schedule of a GPU, in the words of its backend: tiles, warps, stages. The only action of its schedule."""

    text: str

    def __str__(self) -> str:
        return self.text


Template = MatmulTiles | PoolTiles | OnDevice
Action = Parallel | Vectorise | Tile | Exchange | Stage | Delay | Stagger | NonTemporal | Prefetch | Template


@dataclass(frozen=True, slots=True)
class Schedule:
    actions: tuple[Action, ...] = ()

    @property
    def parallel(self) -> Parallel:
        return next((a for a in self.actions if isinstance(a, Parallel)), Parallel(0, 1))

    def lanes(self, loop: int) -> int:
        """1 for a loop that is not vectorised."""
        return next((a.lanes for a in self.actions if isinstance(a, Vectorise) and a.loop == loop), 1)

    @property
    def tile(self) -> Tile | None:
        return next((a for a in self.actions if isinstance(a, Tile)), None)

    def exchanged(self, loop: int) -> int:
        """Steps of the reduction at a time; 0 for a loop that keeps its place."""
        return next((a.by for a in self.actions if isinstance(a, Exchange) and a.loop == loop), 0)

    def stages(self, loop: int) -> bool:
        return any(isinstance(a, Stage) and a.loop == loop for a in self.actions)

    def delay(self, loop: int) -> Delay | None:
        """Where a loop is done if not in its place."""
        return next((a for a in self.actions if isinstance(a, Delay) and a.loop == loop), None)

    def host(self, loop: int) -> int:
        """The loop that a loop is done together with, which is in its place."""
        delay = self.delay(loop)
        return loop if delay is None else self.host(delay.beside)

    def rows_behind(self, loop: int) -> int:
        """How many rows a loop is behind those that are."""
        around = self._around(loop)
        if around is not None:
            return loop - around - 1
        delay = self.delay(loop)
        return 0 if delay is None else 1 + self.rows_behind(delay.beside)

    def staggers(self, loop: int) -> bool:
        """Whether the loops inside a loop over rows each work on another row."""
        return any(isinstance(a, Stagger) and a.loop == loop for a in self.actions)

    def _around(self, loop: int) -> int | None:
        return next((a.loop for a in self.actions if isinstance(a, Stagger) and a.loop < loop), None)

    def is_nontemporal(self, buffer: str) -> bool:
        return any(isinstance(a, NonTemporal) and a.buffer == buffer for a in self.actions)

    def streams(self, buffer: str, loop: int) -> bool:
        """Whether a loop prefetches what it reads from a buffer a block ahead, along several streams."""
        return any(a.buffer == buffer and not a.ahead for a in self._prefetches(loop))

    def asks(self, loop: int) -> list[Prefetch]:
        """What a loop prefetches at a fixed distance."""
        return [a for a in self._prefetches(loop) if a.ahead]

    def _prefetches(self, loop: int) -> list[Prefetch]:
        return [a for a in self.actions if isinstance(a, Prefetch) and a.loop == loop]

    def __str__(self) -> str:
        return "; ".join(map(str, self.actions))


_ACTIONS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Action]], ...] = (
    (re.compile(r"((?:lanes|rows|squares|product|attention) [\w ]{1,200})\Z"), lambda m: OnDevice(m[1])),
    (re.compile(r"parallel (\d{1,18}) grain (\d{1,18})\Z"), lambda m: Parallel(int(m[1]), int(m[2]))),
    (re.compile(r"vectorise (\d{1,18}) by (\d{1,18})\Z"), lambda m: Vectorise(int(m[1]), int(m[2]))),
    (
        re.compile(r"tile (\d{1,18}) by (\d{1,18}) blocks (\d{1,18}) x (\d{1,18})\Z"),
        lambda m: Tile(int(m[1]), int(m[2]), int(m[3]), int(m[4])),
    ),
    (re.compile(r"exchange (\d{1,18}) by (\d{1,18})\Z"), lambda m: Exchange(int(m[1]), int(m[2]))),
    (re.compile(r"stage (\d{1,18})\Z"), lambda m: Stage(int(m[1]))),
    (re.compile(r"delay (\d{1,18}) beside (\d{1,18})\Z"), lambda m: Delay(int(m[1]), int(m[2]))),
    (re.compile(r"stagger (\d{1,18})\Z"), lambda m: Stagger(int(m[1]))),
    (re.compile(r"nontemporal ([\w.]+)\Z"), lambda m: NonTemporal(m[1])),
    (
        re.compile(r"prefetch ([\w.]+) along (\d{1,18})(?: ahead (\d{1,18})(?: to ([12]))?)?\Z"),
        lambda m: Prefetch(m[1], int(m[2]), int(m[3] or 0), int(m[4] or 1)),
    ),
    (
        re.compile(
            r"matmul tile (\d{1,9}) x (\d{1,9}) chunk (\d{1,9}) x (\d{1,9}) k_block (\d{1,9}) prefetch (\d{1,9})\Z"
        ),
        lambda m: MatmulTiles(*map(int, m.groups())),
    ),
    (re.compile(r"pool chunk (\d{1,9}) x (\d{1,9})\Z"), lambda m: PoolTiles(int(m[1]), int(m[2]))),
)


def parse_schedule(text: str) -> Schedule:
    """Reads what `str(schedule)` prints."""
    actions = tuple(_parse_action(part.strip()) for part in text.split(";") if part.strip())
    if len(actions) > 1 and any(isinstance(a, (MatmulTiles, PoolTiles)) for a in actions):
        raise ParseError(f"{text!r}: a template's action stands alone", code="P120")
    return Schedule(actions)


def template_in(schedule: str) -> Template | None:
    """What a kernel's schedule says of a template; None where it is about loops, or there is none."""
    if not schedule.startswith(("matmul ", "pool ")):
        return None
    (found,) = parse_schedule(schedule).actions
    assert isinstance(found, (MatmulTiles, PoolTiles))
    return found


def _parse_action(text: str) -> Action:
    for pattern, make in _ACTIONS:
        match = pattern.match(text)
        if match:
            return make(match)
    raise ParseError(f"{text!r} is not a schedule action", code="P120")


def number_loops(block: LoopBlock) -> dict[int, int]:
    """id of a loop -> its number, outermost and first come first."""
    return {id(loop): number for number, loop in enumerate(walk_loops(block))}


def walk_loops(block: LoopBlock) -> Iterator[Loop]:
    for step in block.steps:
        if isinstance(step, (MapLoop, ReduceLoop)):
            yield step
            yield from walk_loops(step.body)


def parallel_chain(block: LoopBlock) -> list[MapLoop]:
    """The outermost loops that contain everything, so that their points can be handed out.

    Reductions before the first of them would be done again with every chunk."""
    chain: list[MapLoop] = []
    while True:
        light = Compute if chain else (Compute, ReduceLoop)
        loops = [s for s in block.steps if not isinstance(s, light)]
        if len(loops) != 1 or not isinstance(loops[0], MapLoop) or loops[0].scans:
            return chain
        chain.append(loops[0])
        block = loops[0].body


def row_values(first: ReduceLoop, later: Loop) -> list[Expr]:
    """Dear values that two loops over one axis both compute, and that are not just part of another such value."""
    if first.axis is not later.axis:
        return []
    again = {s.node: None for s in later.body.steps if isinstance(s, Compute)}
    both = [s.node for s in first.body.steps if isinstance(s, Compute) and s.node in again]
    rows = _rows_below(both, first.axis)
    dear = [n for n in both if isinstance(n, Scalar) and n.dtype.is_float and _is_dear(n, rows)]
    inside = {x for n in both for x in n.inputs}
    return [n for n in dear if n not in inside and first.axis in n.free]


def _is_dear(node: Scalar, rows: dict[Expr, frozenset[Load]]) -> bool:
    """Whether a value costs more to compute, or to read the parts of, than to store and to load."""
    if SCALARS[node.name].cost >= _DEAR:
        return True
    return len(rows[node]) > 1 and all(len(rows.get(x, ())) < 2 for x in node.args)  # where several rows first meet


def _rows_below(nodes: list[Expr], axis: Axis) -> dict[Expr, frozenset[Load]]:
    """The rows that each value is made of, which a loop over an axis reads in full; two where there are more."""
    found: dict[Expr, frozenset[Load]] = {}
    for node in nodes:
        if isinstance(node, Load):
            found[node] = frozenset((node,) if axis in node.free and len(node.free) > 1 else ())
        elif isinstance(node, Scalar):
            below = dict.fromkeys(load for x in node.args for load in found.get(x, ()))
            found[node] = frozenset(list(below)[:2])
    return found


def turns(load: Load, outer: Axis, inner: Axis) -> bool:
    """Whether a load is contiguous along the outer axis and strided along the inner one."""
    terms = linear(load.index[0]).terms
    plain = all(atom is outer or not (atom.free & {outer, inner}) for atom in terms if atom is not inner)
    return plain and load.where is None and terms.get(outer) == 1 and terms.get(inner, 0) not in (0, 1)


def followed_place(load: Load, axis: Axis) -> Expr | None:
    """Where a load along an axis reads, or, where it picks elements of rows by ids, the same place of their row."""
    form = linear(load.index[0])
    if form.terms.get(axis) == 1:
        return load.index[0]
    picked = [atom for atom in form.terms if axis in atom.free]
    if len(picked) != 1 or picked[0] is axis or form.terms[picked[0]] != 1:
        return None
    place = size(form.constant) + axis
    for atom, step in form.terms.items():
        if atom is not picked[0]:
            place = place + atom * size(step)
    return place
