"""Loops of a kernel: scalar or vector, with loop-carried values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from strata.backends.llvm.ir.builder import Value
from strata.backends.llvm.ir.registers import register_bytes
from strata.backends.llvm.loops.values import Context, Values
from strata.kernel import (
    Axis,
    Buffer,
    Compute,
    Expr,
    Load,
    LoopBlock,
    MapLoop,
    ReduceLoop,
    StoreStep,
    followed_place,
    walk_loops,
)


@dataclass(frozen=True, slots=True)
class LoopSegment:
    """A part of a vector loop: its bounds, how many points it does at once, and whether its last step is masked."""

    low: Value
    high: Value
    lanes: int
    masked: bool
    past: tuple[str, ...] = ()  # the buffers that it writes by non-temporal stores, from the start of a cache line on


class Loops(Values):
    """The loops around a place."""

    nest: LoopBlock
    numbers: dict[int, int]  # id of a loop -> its number in schedules

    def _followed(self, buffer: str, axis: Axis) -> tuple[Buffer, Expr] | None:
        """A buffer whose elements are read one after the other along an axis, or picked row by row, in whichever loop
        that is, and where: a place that the loops around this one have."""
        steps = (s for loop in walk_loops(self.nest) for s in loop.body.steps if isinstance(s, Compute))
        loads = (s.node for s in steps if isinstance(s.node, Load) and s.node.buffer.name == buffer)
        places = ((n.buffer, place) for n in loads if (place := followed_place(n, axis)) is not None)
        return next(((b, place) for b, place in places if place.free <= self.first.keys()), None)

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
        segment: LoopSegment,
        carried: Sequence[tuple[str, Value]],
        body: Callable[[list[str]], Sequence[Value]],
        number: int = -1,
    ) -> list[str]:
        f = self.f

        def inside(index: str, values: list[str]) -> Sequence[Value]:
            with self._scope(axis):
                self.first[axis] = index
                mask = None
                if segment.masked:
                    known = isinstance(segment.low, int) and isinstance(segment.high, int)  # then it is one turn
                    left = f.sub(segment.high, segment.low if known else index)
                    mask = f.mask_below(segment.lanes, f.smin(left, segment.lanes))
                self.context = Context(axis, segment.lanes, mask, number, segment.past)
                self._ask(axis, number)
                return body(values)

        return f.loop(segment.low, segment.high, segment.lanes, carried, inside)

    def _ask(self, axis: Axis, number: int) -> None:
        """Prefetch what comes a fixed distance after the place of a vector loop; at the ends of a row too: a line that
        is left out has to be waited for."""
        for asked in self.schedule.asks(number):
            followed = self._followed(asked.buffer, axis)
            if followed is not None:
                buffer, place = followed
                ahead = self.f.add(self.at_first(place), asked.ahead)
                self._ask_for(buffer, ahead, self.context.lanes, asked.cache)

    def _segments(
        self, loop: MapLoop | ReduceLoop, low: Value, high: Value, lanes: int, single: int | None = None
    ) -> list[LoopSegment]:
        """The range by whole steps, then what is left: masked where that is cheap, else by ones.

        What is left has `single` lanes; by default, those of one register of the widest element."""
        f = self.f
        single = min(lanes, single or self._single_lanes(loop))
        segments: list[LoopSegment] = []
        known = isinstance(low, int) and isinstance(high, int)
        widths = [lanes] if (self.target.has_avx512 and not known) or single == lanes else [lanes, single]
        for width in widths:
            middle = f.add(low, f.round_down(f.sub(high, low), width))
            if middle != low:
                segments.append(LoopSegment(low, middle, width, False))
            low = middle
        if low != high:
            masked = self.target.has_avx512
            segments.append(LoopSegment(low, high, single if masked else 1, masked))
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
