"""Which schedules are legal for a nest: those of users, files and searches are checked here."""

from __future__ import annotations

from collections.abc import Callable

from strata.errors import CompileError
from strata.kernel.ir import Kernel
from strata.kernel.loop_values import row_is_kept
from strata.kernel.nest import LoopBlock, MapLoop, ReduceLoop
from strata.kernel.passes.normalize import normalize
from strata.kernel.passes.pipeline import loops_of
from strata.kernel.runs import may_run_in_vectors
from strata.kernel.schedule import (
    Action,
    Delay,
    Exchange,
    Loop,
    MatmulTiles,
    NonTemporal,
    OnDevice,
    Parallel,
    PoolTiles,
    Prefetch,
    Schedule,
    Stage,
    Stagger,
    Tile,
    Vectorise,
    number_loops,
    parallel_chain,
    parse_schedule,
    walk_loops,
)

_MOST_LANES = 1024
_MOST = 1 << 48  # of counts that become numbers of the code


def check_own_schedule(kernel: Kernel) -> None:
    """CompileError where the schedule that a kernel's text has does not fit it."""
    if kernel.schedule:
        check_schedule(parse_schedule(kernel.schedule), *loops_of(normalize(kernel)))


def check_schedule(schedule: Schedule, kernel: Kernel, nest: LoopBlock) -> None:
    """CompileError for the first action that does not fit a normalized kernel and its nest."""
    fits = _Fits(schedule, kernel, nest)
    seen: set[object] = set()
    for action in schedule.actions:
        reason = fits(action)
        place = type(action), getattr(action, "loop", None) if not isinstance(action, Tile) else None
        if reason is None and place in seen and not isinstance(action, (NonTemporal, Prefetch)):
            reason = "there is another one before it"
        if reason is not None:
            raise CompileError(f"kernel {kernel.name}: `{action}` does not fit: {reason}", code="C142")
        seen.add(place)


def _is_power(count: int) -> bool:
    return 1 <= count <= _MOST_LANES and not count & (count - 1)


class _Fits:
    """Says of each action why it does not fit; None where it does."""

    def __init__(self, schedule: Schedule, kernel: Kernel, nest: LoopBlock) -> None:
        self.schedule, self.kernel = schedule, kernel
        self.loops: list[Loop] = list(walk_loops(nest))
        self.numbers = number_loops(nest)
        self.chain = parallel_chain(nest)

    def __call__(self, action: Action) -> str | None:
        if isinstance(action, (Vectorise, Tile, Exchange, Stage, Delay, Stagger, Prefetch)) and action.loop >= len(
            self.loops
        ):
            return f"there are {len(self.loops)} loops"
        if isinstance(action, (MatmulTiles, OnDevice, PoolTiles)):
            return "it is of a template, and this kernel is loops"
        rules: dict[type, Callable[..., str | None]] = {
            Parallel: self._parallel, Vectorise: self._vectorise, Tile: self._tile, Exchange: self._exchange,
            Stage: self._stage, Delay: self._delay, Stagger: self._stagger, NonTemporal: self._past,
            Prefetch: self._prefetch,
        }  # fmt: skip
        return rules[type(action)](action)

    def _parallel(self, action: Parallel) -> str | None:
        if action.loops > len(self.chain):
            return f"{len(self.chain)} loops can be handed out"
        return None if 1 <= action.grain < _MOST else "a grain is a positive number"

    def _vectorise(self, action: Vectorise) -> str | None:
        if not _is_power(action.lanes):
            return f"lanes are a power of two up to {_MOST_LANES}"
        return (
            None if may_run_in_vectors(self.loops[action.loop]) else "the points of this loop come one after the other"
        )

    def _tile(self, action: Tile) -> str | None:
        handed = self.chain[: self.schedule.parallel.loops]
        if len(handed) < 2 or self.numbers[id(handed[-2])] != action.loop:
            return "it is not the last but one of the loops that are handed out"
        inner = handed[-1]
        if any(isinstance(s, (MapLoop, ReduceLoop)) for s in inner.body.steps):
            return "there are loops inside the square"
        if action.by < 2 or self.schedule.lanes(self.numbers[id(inner)]) % action.by:
            return "the loop inside it does not run in vectors of this length, or of some times it"
        most = _MOST if action.rows >= action.by and action.columns >= action.by else 0
        return None if max(action.rows, action.columns) < most else "a block holds a square or more"

    def _exchange(self, action: Exchange) -> str | None:
        loop = self.loops[action.loop]
        inner = [s for s in loop.body.steps if isinstance(s, (MapLoop, ReduceLoop))]
        if not isinstance(loop, MapLoop) or self.schedule.lanes(action.loop) < 2:
            return "it is not a loop over elements that runs in vectors"
        if len(inner) != 1 or not isinstance(inner[0], ReduceLoop):
            return "it has no reduction inside, or more"
        if any(isinstance(s, (MapLoop, ReduceLoop)) for s in inner[0].body.steps):
            return "there are loops inside the reduction"
        if any(r.body.dtype.is_bool for r in inner[0].reduces):
            return "truth values are reduced"
        return None if _is_power(action.by) else "steps are a power of two"

    def _stage(self, action: Stage) -> str | None:
        loop = self.loops[action.loop]
        if not isinstance(loop, ReduceLoop):
            return "it is not a reduction"
        return None if row_is_kept(loop.axis) else "its rows are too long to be kept"

    def _delay(self, action: Delay) -> str | None:
        late, beside = self.loops[action.loop], self.loops[min(action.beside, len(self.loops) - 1)]
        rows = next((x for x in self.loops if late in x.body.steps), None)
        after = [s for s in rows.body.steps if isinstance(s, (MapLoop, ReduceLoop))] if rows is not None else []
        at = next((at for at, s in enumerate(after) if s is late), 0)
        last = after[-1] if after else None
        if rows is None or not isinstance(last, MapLoop) or rows.body.steps[-1] is not last:
            return "it is in no row that ends with a loop over elements"
        if last.scans:
            return "the last loop of the row goes through it in order"
        if not isinstance(beside, ReduceLoop) or beside not in after[:at] or beside.axis is not late.axis:
            return "the loop beside it is not a reduction over the same row before it"
        if any(self.schedule.delay(self.numbers[id(s)]) is None for s in after[at:]):
            return "a loop after it is not delayed"
        before = self.schedule.delay(self.numbers[id(after[at - 1])]) is not None
        if (before or self.schedule.delay(action.beside) is not None) and beside is not after[at - 1]:
            return "the loop before it is delayed, and it is not beside that one"
        same = self.schedule.lanes(action.loop) == self.schedule.lanes(action.beside)
        return None if same or late is last else "the two do not run in vectors of the same length"

    def _stagger(self, action: Stagger) -> str | None:
        rows = self.loops[action.loop]
        inside = [s for s in rows.body.steps if isinstance(s, (MapLoop, ReduceLoop))]
        if not isinstance(rows, MapLoop) or rows.scans or self.schedule.lanes(action.loop) > 1:
            return "it is not a loop over rows, one at a time"
        if len(inside) < 2:
            return "it does not go through each row several times"
        if any(isinstance(s, (MapLoop, ReduceLoop)) for loop in inside for s in loop.body.steps):
            return "there are loops inside those of a row"
        if any(isinstance(s, MapLoop) and s.scans for s in inside):
            return "a loop goes through its row in order"
        if not any(loop is rows for loop in self.chain) or any(isinstance(a, Delay) for a in self.schedule.actions):
            return "its rows do not contain everything, or loops of theirs are delayed"
        return None

    def _past(self, action: NonTemporal) -> str | None:
        return None if action.buffer in [b.name for b in self.kernel.outputs] else "it is not an output"

    def _prefetch(self, action: Prefetch) -> str | None:
        if action.buffer not in [b.name for b in self.kernel.buffers]:
            return "there is no such buffer"
        return None if action.ahead < _MOST else "that is too far ahead"
