"""scan, while and cond on a device: launches of their bodies, over memory that takes turns.

A scan of known length is its turns one after the other, one CUDA graph where that is not too long, or blocks of turns
that the host hands over without waiting. The launches of a branch are guarded by a flag in memory, so that only the one
that is taken does anything. A while loop is blocks of guarded turns: the host reads flags after each block.

Carries go from one buffer to another and back, or stay where a body updates them in place. Rows of inputs and of
stacked results lie where a turn's number says; those that do not begin at whole lines are put further apart first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from strata.backends.bodies import Body, launches_in, round_up
from strata.backends.driver import Launchable
from strata.backends.recipe import Action, MovingRow, Operand, RepeatedBlock, Turns, guarded, number
from strata.mir import Node

UNROLLED = 4096  # launches of a scan that are one sequence
BLOCK = 1024  # launches of a block of turns, where it is longer
TURNS = 16  # of a while loop between two looks at its flags
LOOK = 256  # launches between two looks

Sizes = Mapping[str, int]


class Control(Launchable):
    """An op over bodies."""

    def __init__(self, node: Node, bodies: Sequence[Body]) -> None:
        self.op: Any = node.op
        self.node, self.bodies = node, bodies
        self.mover = bodies[0].mover
        self.alignment = self.mover.driver.alignment  # of rows and of flags, which kernels take as arguments
        self.constants: Mapping[str, np.ndarray] = {
            f"{i}:{name}": array for i, body in enumerate(bodies) for name, array in body.constants.items()
        }

        self.checks = {f"{i}:{name}": check for i, body in enumerate(bodies) for name, check in body.checks.items()}

    def scratch(self, sizes: Sizes) -> Sequence[int]:
        layout = _StepMemory(None)
        self.place(layout, sizes)
        return [max(layout.top, self.alignment)]

    def actions(self, operands: tuple[Operand, ...], sizes: Sizes, kept: Mapping[str, Operand]) -> list[Action]:
        count = len(self.node.inputs)
        inputs, outputs, layout = operands[:count], operands[count:-1], _StepMemory(operands[-1])
        inner = [
            {n.partition(":")[2]: place for n, place in kept.items() if n.startswith(f"{i}:")}
            for i in range(len(self.bodies))
        ]
        return self.expanded(inputs, outputs, self.place(layout, sizes), sizes, inner)

    @abstractmethod
    def place(self, layout: _StepMemory, sizes: Sizes) -> Any:
        """Take what is needed of the scratch memory."""

    @abstractmethod
    def expanded(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand], memory: Any, sizes: Sizes, kept: Sequence[Any]
    ) -> list[Action]: ...

    def bytes_of(self, types: Sequence[Any], sizes: Sizes) -> list[int]:
        return [number(t.nbytes, sizes) for t in types]


class _StepMemory:
    """Places in the scratch memory of a step, one after the other."""

    def __init__(self, area: Operand | None) -> None:
        self.area = area or (0, 0)
        self.top = 0

    def take(self, count: int) -> Operand:
        at = (self.area[0], self.area[1] + self.top)
        self.top += round_up(max(count, 1))
        return at


class _TurnRows:
    """Rows of an array along its first axis, one for each turn."""

    def __init__(self, place: Operand, count: int, width: int, stride: int, spread: Operand | None) -> None:
        self.place, self.count, self.width, self.stride, self.spread = place, count, width, stride, spread

    def at(self, row: int) -> Operand:
        base = self.place if self.spread is None else self.spread
        return base[0], base[1] + row * self.stride


class ScanLoop(Control):
    """Turns over the rows of arrays."""

    def place(self, layout: _StepMemory, sizes: Sizes) -> Any:
        (body,), op = self.bodies, self.op
        length = number(op.length, sizes)
        area = layout.take(body.layout(sizes).room)
        pairs = []
        for size in self.bytes_of([x.type for x in op.body.results[: op.num_carry]], sizes):
            pairs.append((layout.take(size), layout.take(size)))
        first = op.num_carry + op.num_consts
        spread = []
        for width in self.bytes_of(
            [x.type for x in (*op.body.inputs[first:], *op.body.results[op.num_carry :])], sizes
        ):
            stride = round_up(width, self.alignment)
            spread.append(layout.take(length * stride) if width != stride and length > 1 else None)
        return area, pairs, spread

    def expanded(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand], memory: Any, sizes: Sizes, kept: Sequence[Any]
    ) -> list[Action]:
        (body,), op = self.bodies, self.op
        area, pairs, spread = memory
        length, carries, first = number(op.length, sizes), op.num_carry, op.num_carry + op.num_consts
        carry_sizes = self.bytes_of([x.type for x in op.body.results[:carries]], sizes)
        if not length:
            return [a for i in range(carries) for a in self.mover.copy(inputs[i], outputs[i], carry_sizes[i])]
        varies = len(op.body.inputs) > op.num_consts
        consts = list(inputs[carries:first])
        widths = self.bytes_of([x.type for x in (*op.body.inputs[first:], *op.body.results[carries:])], sizes)
        places = [*inputs[first:], *outputs[carries:]]
        rows = [
            _TurnRows(p, length, w, w if s is None else round_up(w, self.alignment), s)
            for p, w, s in zip(places, widths, spread, strict=True)
        ]
        given = len(inputs) - first
        start: list[Action] = [self._moved(row, out=False) for row in rows[:given] if row.spread is not None]
        end: list[Action] = [self._moved(row, out=True) for row in rows[given:] if row.spread is not None]
        start += body.begin(sizes, area, consts if varies else (), kept[0])
        stays = [body.is_kept(i) if varies else False for i in range(carries)]
        over = [varies and not stays[i] and body.takes_over(i) for i in range(carries)]

        def turn(enter: Sequence[Operand], leave: Sequence[Operand], at: Any) -> list[Action]:
            row = [at(r) for r in rows]
            moving = [*enter, *row[:given]] if varies else consts
            return body.turn(sizes, area, moving, consts if varies else (), [*leave, *row[given:]], kept[0])

        def place_of(i: int, t: int, *, ends: bool) -> Operand:
            """Where carry i lies after t turns; with `ends`, as the first values and the results have it."""
            if stays[i] or (ends and t == 0):
                return inputs[i]
            if over[i]:
                return outputs[i]
            return outputs[i] if ends and (length - t) % 2 == 0 else pairs[i][t % 2]

        def row_number(t: int) -> int:
            return length - 1 - t if op.reverse else t

        def turns(begin: int, stop: int, *, ends: bool) -> list[Action]:
            made: list[Action] = []
            for t in range(begin, stop):
                enter, leave = ([place_of(i, n, ends=ends) for i in range(carries)] for n in (t, t + 1))
                made += turn(enter, leave, lambda r, t=t: r.at(row_number(t)))
            return made

        each = max(1, launches_in(turns(0, 1, ends=True)))
        if each * length <= UNROLLED or length < 4:
            start += turns(0, length, ends=True)
            start += [
                a for i in range(carries) if stays[i] for a in self.mover.copy(inputs[i], outputs[i], carry_sizes[i])
            ]
            return start + end
        block = max(2, min(BLOCK // each, length) // 2 * 2)
        for i in range(carries):
            start += self.mover.copy(
                inputs[i], place_of(i, 0, ends=False) if not stays[i] else inputs[i], carry_sizes[i]
            )
        step = -1 if op.reverse else 1
        moving = {id(r): MovingRow(r.at(row_number(0)), step * block * r.stride) for r in rows}
        inside: list[Action] = []
        for t in range(block):
            enter, leave = ([place_of(i, n, ends=False) for i in range(carries)] for n in (t, t + 1))
            inside += turn(enter, leave, lambda r, t=t: (moving[id(r)], step * t * r.stride))
        start.append(RepeatedBlock(inside, length // block, list(moving.values())))
        start += turns(length // block * block, length, ends=False)
        for i in range(carries):
            start += self.mover.copy(place_of(i, length, ends=False), outputs[i], carry_sizes[i])
        return start + end

    def _moved(self, rows: _TurnRows, *, out: bool) -> Action:
        assert rows.spread is not None
        if out:
            return self.mover.rows(rows.spread, rows.place, rows.count, rows.width, (rows.stride, rows.width))
        return self.mover.rows(rows.place, rows.spread, rows.count, rows.width, (rows.width, rows.stride))


class WhileLoop(Control):
    """Turns until a test fails."""

    def place(self, layout: _StepMemory, sizes: Sizes) -> Any:
        areas = [layout.take(body.layout(sizes).room) for body in self.bodies]
        pairs = []
        for size in self.bytes_of(self.node.types, sizes):
            pairs.append((layout.take(size), layout.take(size)))
        return areas, pairs, layout.take((TURNS + 1) * self.alignment)

    def expanded(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand], memory: Any, sizes: Sizes, kept: Sequence[Any]
    ) -> list[Action]:
        (test, body), op, carries = self.bodies, self.op, self.op.num_carry
        areas, pairs, flags = memory
        counts = self.bytes_of(self.node.types, sizes)
        consts = list(inputs[carries:])
        params = consts if carries else ()
        stays = [body.is_kept(i) for i in range(carries)]
        over = [not stays[i] and body.takes_over(i) for i in range(carries)]

        def flag(t: int) -> Operand:
            return flags[0], flags[1] + t * self.alignment

        def carried(t: int) -> list[Operand]:
            found = []
            for i in range(carries):
                found.append(inputs[i] if stays[i] else pairs[i][0 if over[i] else t % 2])
            return found

        def asked(t: int, to: int) -> list[Action]:
            given = carried(t) if carries else consts
            return test.turn(sizes, areas[0], given, params, [flag(to)], kept[0])

        def turn(t: int) -> list[Action]:
            given = carried(t) if carries else consts
            made = body.turn(sizes, areas[1], given, params, carried(t + 1), kept[1]) + asked(t + 1, t + 1)
            return [guarded(a, flag(t)) for a in made]

        start: list[Action] = [self.mover.clear(flags, (TURNS + 1) * self.alignment)]
        for i, place in enumerate(carried(0)):
            start += self.mover.copy(inputs[i], place, counts[i])
        start += test.begin(sizes, areas[0], params, kept[0]) + body.begin(sizes, areas[1], params, kept[1])
        start += asked(0, 0)
        limit = op.max_iterations
        each = max(1, launches_in(turn(0)))
        count = max(2, min(TURNS, LOOK // each) // 2 * 2)
        if limit is not None and limit < count:
            count = max(limit, 1)
        tail = 0 if limit is None else limit % count
        block = [a for t in range(count) for a in turn(t)]
        again = [
            _settled(self.mover.copy(flag(count), flag(0), 8)[0]),
            self.mover.clear(flag(1), count * self.alignment),
        ]
        ends = [
            [a for i, place in enumerate(carried(parity)) for a in self.mover.copy(place, outputs[i], counts[i])]
            for parity in (0, 1)
        ]
        rest = [a for t in range(tail) for a in turn(t)]
        return [Turns(start, block, again, rest, ends[0], ends[1], count, limit, flags)]


def _settled(action: Any) -> Action:
    """A launch that runs whatever guards there are."""
    made: Action = replace(action, is_settled=True)
    return made


class GuardedBranches(Control):
    """One of two bodies, by a flag."""

    def place(self, layout: _StepMemory, sizes: Sizes) -> Any:
        return layout.take(max(body.layout(sizes).room for body in self.bodies)), layout.take(2 * self.alignment)

    def expanded(
        self, inputs: Sequence[Operand], outputs: Sequence[Operand], memory: Any, sizes: Sizes, kept: Sequence[Any]
    ) -> list[Action]:
        area, flags = memory
        sides = (flags, (flags[0], flags[1] + self.alignment))
        made: list[Action] = [self.mover.clear(flags, 2 * self.alignment), self.mover.sides(inputs[0], *sides)]
        for body, flag, known in zip(self.bodies, sides, kept, strict=True):
            branch = body.begin(sizes, area, (), known) + body.turn(sizes, area, inputs[1:], (), outputs, known)
            made += [guarded(a, flag) for a in branch]
        return made


KINDS: dict[str, type[Control]] = {"scan": ScanLoop, "while": WhileLoop, "cond": GuardedBranches}
