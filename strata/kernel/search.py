"""Beam search over schedules: small changes to the best ones so far, as long as they pay.

Every change keeps a schedule legal, so that the search needs no rules itself: what is handed out to threads and how
much at a time, which loop runs in vectors and how wide they are, which rows are kept, which stores are non-temporal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from strata.core import bounds
from strata.kernel.ir import Kernel
from strata.kernel.loop_values import register_lanes
from strata.kernel.nest import LoopBlock, ReduceLoop
from strata.kernel.order import Machine
from strata.kernel.runs import goes_along, runs_in_vectors
from strata.kernel.schedule import (
    Action,
    Delay,
    Exchange,
    Loop,
    NonTemporal,
    Parallel,
    Schedule,
    Stage,
    Stagger,
    Tile,
    Vectorise,
    number_loops,
    parallel_chain,
    row_values,
    walk_loops,
)

_GRAIN_STEP = 4
_MOST_REGISTERS = 8  # that one value of a vector loop takes


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule that was measured."""

    schedule: Schedule
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Where a search stops."""

    width: int = 4  # schedules whose changes are tried next
    trials: int = 40
    gain: float = 0.02  # a wave that gains less is the last


USUAL = SearchLimits()


def search(
    first: Schedule,
    changes: Callable[[Schedule], Iterator[Schedule]],
    measure: Callable[[Sequence[Schedule]], Sequence[float | None]],
    limits: SearchLimits = USUAL,
) -> list[Trial]:
    """Measured schedules, fastest first. `measure` gives None for one that must not be used.

    The first wave holds `first`, so that the answer is never slower than it.
    """
    seen = {first}
    (seconds,) = measure([first])
    if seconds is None:
        return []
    trials = [Trial(first, seconds)]
    beam = list(trials)
    while len(trials) < limits.trials:
        wave = list(dict.fromkeys(s for kept in beam for s in changes(kept.schedule) if s not in seen))
        wave = wave[: limits.trials - len(trials)]
        if not wave:
            break
        seen.update(wave)
        best = min(trials, key=lambda t: t.seconds).seconds
        trials += [Trial(s, t) for s, t in zip(wave, measure(wave), strict=True) if t is not None]
        trials.sort(key=lambda t: t.seconds)
        beam = trials[: limits.width]
        if beam[0].seconds > best * (1 - limits.gain):
            break
    return trials


class Changes:
    """The schedules one change away from another one of the same nest."""

    def __init__(self, kernel: Kernel, nest: LoopBlock, machine: Machine) -> None:
        self.kernel, self.nest, self.machine = kernel, nest, machine
        self.loops: list[Loop] = list(walk_loops(nest))
        self.numbers = number_loops(nest)
        self.chain = parallel_chain(nest)
        self.inside: dict[int, set[int]] = {}  # number of a loop -> numbers of the loops in it
        for number, loop in enumerate(self.loops):
            self.inside[number] = {self.numbers[id(x)] for x in walk_loops(loop.body)}

    def __call__(self, schedule: Schedule) -> Iterator[Schedule]:
        is_tiled = any(isinstance(a, Tile) for a in schedule.actions)
        yield from self._handed_out(schedule, is_tiled)
        if not is_tiled:  # a tile fixes the vectors around it
            yield from self._widths(schedule)
            yield from self._other_loops(schedule)
        yield from self._rows(schedule)
        yield from self._bypasses(schedule)

    def _handed_out(self, schedule: Schedule, is_tiled: bool) -> Iterator[Schedule]:
        now = schedule.parallel
        if not now.loops:
            return
        multiple = self._lanes_in_chain(schedule, now.loops)
        for grain in (now.grain * _GRAIN_STEP, now.grain // _GRAIN_STEP):
            fitted = max(multiple, grain - grain % multiple)
            if fitted != now.grain:
                yield _swap(schedule, now, Parallel(now.loops, fitted))
        for loops in range(1, len(self.chain) + 1):
            if loops != now.loops and not is_tiled:
                yield _swap(schedule, now, Parallel(loops, self._lanes_in_chain(schedule, loops)))

    def _lanes_in_chain(self, schedule: Schedule, loops: int) -> int:
        """What a chunk must be a multiple of: the vector of a loop that is handed out."""
        return max((schedule.lanes(self.numbers[id(loop)]) for loop in self.chain[:loops]), default=1)

    def _widths(self, schedule: Schedule) -> Iterator[Schedule]:
        """Other vectors of a loop, and of those that are done together with it."""
        for action in schedule.actions:
            if not isinstance(action, Vectorise) or schedule.delay(action.loop) is not None:
                continue
            loop = self.loops[action.loop]
            lanes = register_lanes(loop, self.machine)
            for width in (action.lanes * 2, action.lanes // 2):
                if lanes <= width <= min(_MOST_REGISTERS * lanes, self._extent(loop)):
                    yield self._fitted(_with_width(schedule, action.loop, width))

    def _extent(self, loop: Loop) -> int:
        high = bounds(loop.axis.extent)[1]
        return high if high is not None else 1 << 30

    def _other_loops(self, schedule: Schedule) -> Iterator[Schedule]:
        """Vectors along another loop, in place of those in it and around it."""
        for number, loop in enumerate(self.loops):
            lanes = register_lanes(loop, self.machine)
            if not runs_in_vectors(loop) or schedule.lanes(number) > 1 or not 1 < lanes <= self._extent(loop):
                continue
            near = self.inside[number] | {n for n, inner in self.inside.items() if number in inner}
            if any(goes_along(self.loops[n]) for n in near):
                continue  # those vectors are the order of a sum
            tied = (Vectorise, Stage, Exchange, Delay, Stagger)  # to the vectors of their loop
            kept = [a for a in schedule.actions if not (isinstance(a, tied) and a.loop in near | {number})]
            yield self._fitted(Schedule((*kept, Vectorise(number, lanes))))

    def _fitted(self, schedule: Schedule) -> Schedule:
        """With chunks that are whole vectors."""
        now = schedule.parallel
        multiple = self._lanes_in_chain(schedule, now.loops)
        grain = max(multiple, now.grain - now.grain % multiple)
        return schedule if grain == now.grain else _swap(schedule, now, Parallel(now.loops, grain))

    def _rows(self, schedule: Schedule) -> Iterator[Schedule]:
        """Keep the values of a row, or compute them again."""
        for number, loop in enumerate(self.loops):
            if schedule.stages(number):
                yield Schedule(tuple(a for a in schedule.actions if a != Stage(number)))
            elif isinstance(loop, ReduceLoop) and schedule.lanes(number) > 1 and self._keeps(loop, schedule):
                yield Schedule((*schedule.actions, Stage(number)))

    def _keeps(self, loop: ReduceLoop, schedule: Schedule) -> bool:
        later = [x for x in self.loops[self.numbers[id(loop)] + 1 :] if schedule.lanes(self.numbers[id(x)]) > 1]
        high = bounds(loop.axis.extent)[1]
        fits = high is not None and high * 8 <= self.machine.cache_bytes // 4
        return fits and any(row_values(loop, x) for x in later)

    def _bypasses(self, schedule: Schedule) -> Iterator[Schedule]:
        for buffer in self.kernel.outputs:
            action = NonTemporal(buffer.name)
            if action in schedule.actions:
                yield Schedule(tuple(a for a in schedule.actions if a != action))
            elif (bounds(buffer.type.nbytes)[1] or 0) >= self.machine.cache_bytes:
                yield Schedule((*schedule.actions, action))


def _with_width(schedule: Schedule, host: int, lanes: int) -> Schedule:
    """With other vectors of a loop and of those that are done together with it."""
    along = {a for a in schedule.actions if isinstance(a, Vectorise) and schedule.host(a.loop) == host}
    return Schedule(
        tuple(Vectorise(a.loop, lanes) if isinstance(a, Vectorise) and a in along else a for a in schedule.actions)
    )


def _swap(schedule: Schedule, old: Action, new: Action) -> Schedule:
    return Schedule(tuple(new if a == old else a for a in schedule.actions))
