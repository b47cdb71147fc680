"""Rows whose last loop, which stores their result past the caches, is done beside a loop of the row after them.

Such stores wait for memory, and a loop that does nothing else waits with them. Beside a loop that computes, they cost
nothing. The first row is done without a row before it, and the last is stored on its own:

    row 0:  max, sum        row 1:  max, sum + store row 0        …        store row n - 1

What the loop keeps for the last one is in one row buffer: at each step, the row before is taken out and the new one put
in. Two of them, with the rows that are read, would leave little of the nearest cache to what all rows share.

Processors take a load for one of what has just been stored where both are as far from the start of a page, and wait.
Where that would happen all along the row and nothing is kept, the row before is stored from another column on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from strata.backends.llvm.builder import Value
from strata.backends.llvm.registers import register_type
from strata.kernel import Compute, Expr, Load, MapLoop, Reduce, Scalar, StoreStep, linear, walk_loops

if TYPE_CHECKING:
    from strata.backends.llvm.emit import Emitter

_LINE, _PAGE = 64, 4096  # bytes
_NEAR = 1024  # bytes of a page in which loads may follow stores too closely
_APART = 512  # columns from what is computed to what is stored, then


class Delayed:
    """One loop over rows."""

    def __init__(self, emitter: Emitter, rows: MapLoop, last: MapLoop, beside: int) -> None:
        self.emitter, self.rows, self.last, self.number = emitter, rows, last, beside
        self.store = next(s.store for s in last.body.steps if isinstance(s, StoreStep))
        self.kept = self._kept()

    def _kept(self) -> list[Expr]:
        """What the last loop needs of its row, but for the values along it."""
        inside = [s.node for s in self.last.body.steps if isinstance(s, Compute)]
        needed = [x for node in (*inside, self.store.value) if isinstance(node, Scalar) for x in (node, *node.args)]
        return [x for x in dict.fromkeys(needed) if isinstance(x, (Scalar, Reduce)) and self.last.axis not in x.free]

    def emit(self, low: Value, high: Value) -> None:
        """Rows that do not begin with a cache line are done one after the other."""
        e, f = self.emitter, self.emitter.f
        with e._scope(self.rows.axis, self.last.axis):
            e.first[self.rows.axis], e.first[self.last.axis] = low, 0
            start = e._pointer(self.store.buffer, e.at_first(self.store.index[0]))
        over = f.binary("and", "i64", f.op(f"ptrtoint ptr {start} to i64"), str(_LINE - 1))
        self.shift = self._shift(low)
        f.if_(f.compare("eq", "i64", over, 0), lambda: self._delayed(low, high), lambda: self._plain(low, high))

    def _shift(self, low: Value) -> Value:
        """Columns from those that a row works on to those of the row before that are stored beside them."""
        e, f = self.emitter, self.emitter.f
        if e.schedule.stages(self.number):
            return 0
        load = next((n for n in self._loads() if linear(n.index[0]).terms.get(self.last.axis) == 1), None)
        if load is None:
            return 0
        places = []
        for node, row in ((self.store, f.sub(low, 1)), (load, low)):
            with e._scope(self.rows.axis, self.last.axis):
                e.first[self.rows.axis], e.first[self.last.axis] = row, 0
                places.append(f.op(f"ptrtoint ptr {e._pointer(node.buffer, e.at_first(node.index[0]))} to i64"))
        ahead = f.binary("and", "i64", str(f.sub(*places)), str(_PAGE - 1))
        close = f.compare("ule", "i64", ahead, _NEAR)
        lanes, extent = e.schedule.lanes(self.number), self.last.axis.extent
        assert isinstance(extent, int), "only rows of known lengths are delayed"
        return f.select("i64", close, str(min(_APART, extent // 2) // lanes * lanes), "0")

    def _loads(self) -> list[Load]:
        """What the loop beside which rows are stored reads."""
        e = self.emitter
        loop = next(s for s in walk_loops(e.nest) if e.numbers[id(s)] == self.number)
        return [s.node for s in loop.body.steps if isinstance(s, Compute) and isinstance(s.node, Load)]

    def _plain(self, low: Value, high: Value) -> None:
        e = self.emitter
        with e._scope():
            e._serial(self.rows.axis, low, high, (), e._running_block(self.rows.body))

    def _delayed(self, low: Value, high: Value) -> None:
        e, f = self.emitter, self.emitter.f

        def row(index: str, values: list[str]) -> list[str]:
            e.turn_of_row = f.binary("and", "i64", str(f.sub(index, low)), "1")
            return self._front(index, values)

        with e._scope():
            first = self._front(low, None)
            types = [register_type(x.dtype) for x in self.kept]
            final = f.loop(f.add(low, 1), high, 1, list(zip(types, first, strict=True)), row)
            end = f.sub(high, 1)
            e.turn_of_row = f.binary("and", "i64", str(f.sub(end, low)), "1")
            with self._row(end, final, e.turn_of_row):
                e._map(self.last, 0, e.size(self.last.axis.extent))
            e.turn_of_row = 0

    def _front(self, index: Value, before: list[str] | None) -> list[str]:
        """All loops of a row but the last, with the last one of the row before."""
        e = self.emitter
        with e._scope(self.rows.axis):
            e.first[self.rows.axis] = index
            if before is not None:
                e.beside, e.replaced = {self.number: lambda: self._beside(index, before)}, {}
            steps = self.rows.body.steps
            for at, step in enumerate(steps[:-1]):
                e._step(step, steps[at + 1 :])
            e.beside, e.replaced = {}, None
            return [part for node in self.kept for part in e.value(node)]

    @contextmanager
    def _row(self, index: Value, values: list[str], turn: Value) -> Iterator[None]:
        """Inside, names mean what they do in another row, of which some values are known."""
        e = self.emitter
        filling, rows = e.filling, e.rows
        with e._scope(self.rows.axis):
            e.first[self.rows.axis] = index
            e.values |= {node: (value,) for node, value in zip(self.kept, values, strict=True)}
            e.filling = frozenset()
            e.rows = {node: (axis, e.row_buffer(node, turn)) for node, (axis, _) in rows.items()}
            yield
        e.filling, e.rows = filling, rows

    def _beside(self, index: Value, before: list[str]) -> None:
        """Stores the row before, as far as a step of the loop has just taken its place."""
        e, f, axis = self.emitter, self.emitter.f, self.last.axis
        taken = {node: parts for node, parts in (e.replaced or {}).items() if node in e.filling}
        column: Value = e.first[axis]
        if self.shift != 0:
            column = f.add(column, self.shift)
            beyond = f.compare("sge", "i64", column, e.size(axis.extent))
            column = f.sub(column, f.select("i64", beyond, str(e.size(axis.extent)), "0"))
        with self._row(f.sub(index, 1), before, f.sub(1, e.turn_of_row)), e._scope(axis):
            e.first[axis] = column
            e.values |= taken
            e.context = replace(e.context, past=self.store.buffer.name)
            e.block(self.last.body)
