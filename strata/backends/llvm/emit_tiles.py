"""Transposes: two loops in squares that are turned in registers, handed out in blocks of squares.

A square reads whole runs along the outer loop and writes whole runs along the inner one. The squares of a block start
where cache lines of what is read begin, and, where results go past the caches, where lines of the result begin; so the
first and last squares of a row or column may be partly outside, and take the lanes that are inside by masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from strata.backends.llvm.builder import Value, vector, vector_constant
from strata.backends.llvm.emit_reduce import Reductions
from strata.backends.llvm.emit_values import Context
from strata.backends.llvm.registers import Parts, memory_type, register_bytes, register_type
from strata.kernel import Block, Buffer, Compute, Expr, Load, MapLoop, Store, StoreStep, Tile, linear, turns

_LINE = 64  # bytes of a cache line
_LANE = 16  # bytes within which processors move elements most quickly
_AHEAD = 2  # squares from one that is turned to the one that is asked for


class Tiles(Reductions):
    """Loops around squares."""

    def _enter(self, loops: Sequence[MapLoop], position: Value) -> None:
        """Give nested loops their values at a flat position, and do what they do before the loop inside them."""
        raise NotImplementedError

    def _steps_before(self, block: Block) -> None:
        """What a block does before the one loop in it that is handed out."""
        raise NotImplementedError

    def _tiles(self, chain: list[MapLoop], tile: Tile) -> None:
        """The blocks begin … end - 1, counted along the inner loop first."""
        f = self.f
        *around, outer, inner = chain
        extents = outer.axis.extent, inner.axis.extent
        rows, columns = (self.size(d) for d in tile.blocks(*extents))

        def block(position: str, _: list[str]) -> None:
            column = f.op(f"srem i64 {position}, {columns}")
            rest = f.op(f"sdiv i64 {position}, {columns}")
            row = f.op(f"srem i64 {rest}, {rows}")
            with self._scope(*(loop.axis for loop in around)):
                self._enter(around, f.op(f"sdiv i64 {rest}, {rows}"))
                _Squares(self, outer, inner, tile).emit(row, column)

        f.loop("%begin", "%end", 1, (), block)


class _Squares:
    """One block of squares."""

    def __init__(self, tiles: Tiles, outer: MapLoop, inner: MapLoop, tile: Tile) -> None:
        self.tiles, self.outer, self.inner, self.tile = tiles, outer, inner, tile
        self.f, self.by = tiles.f, tile.by
        computed = [s.node for s in inner.body.steps if isinstance(s, Compute)]
        self.turned = [n for n in computed if isinstance(n, Load) and turns(n, outer.axis, inner.axis)]
        stores = [s.store for s in inner.body.steps if isinstance(s, StoreStep)]
        self.past = next(
            (s for s in stores if tiles.schedule.is_nontemporal(s.buffer.name) and self._lines_up(s)), None
        )
        self.high = tiles.size(outer.axis.extent), tiles.size(inner.axis.extent)

    def _lines_up(self, store: Store) -> bool:
        """Whether rows of a result begin at the same place of a cache line, and a square writes whole lines."""
        terms = linear(store.index[0]).terms
        steps = [step for atom, step in terms.items() if atom is not self.inner.axis]
        whole = self.by * store.buffer.dtype.itemsize % _LINE == 0 and not store.buffer.dtype.is_complex
        return whole and terms.get(self.inner.axis) == 1 and all(isinstance(s, int) and s % self.by == 0 for s in steps)

    def emit(self, row: Value, column: Value) -> None:
        f, by = self.f, self.by
        down = self._behind_line(self.turned[0].buffer, self.turned[0].index[0]) if self.turned else 0
        across = self._behind_line(self.past.buffer, self.past.index[0]) if self.past is not None else 0
        first_row = f.sub(f.mul(row, self.tile.rows), down)
        first_column = f.sub(f.mul(column, self.tile.columns), across)
        end_row = f.smin(f.add(first_row, self.tile.rows), self.high[0])
        end_column = f.smin(f.add(first_column, self.tile.columns), self.high[1])

        def columns(i: str, _: list[str]) -> None:
            inside = self._is_inside(i, self.high[0])

            def square(j: str, _: list[str]) -> None:
                whole = f.binary("and", "i1", inside, self._is_inside(j, self.high[1]))
                f.if_(whole, lambda: self._whole(i, j), lambda: self._edge(i, j))

            f.loop(first_column, end_column, by, (), square)

        f.loop(first_row, end_row, by, (), columns)

    def _behind_line(self, buffer: Buffer, index: Expr) -> Value:
        """Elements from the start of a line (of the width of a square) to where the first row begins."""
        tiles, f = self.tiles, self.f
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis] = tiles.first[self.inner.axis] = 0
            address = f.op(f"ptrtoint ptr {tiles._pointer(buffer, tiles.at_first(index))} to i64")
        size = buffer.dtype.itemsize
        return f.op(f"udiv i64 {f.binary('and', 'i64', address, str(self.by * size - 1))}, {size}")

    def _is_inside(self, start: Value, high: Value) -> str:
        f = self.f
        return f.binary(
            "and", "i1", f.compare("sge", "i64", start, 0), f.compare("sle", "i64", f.add(start, self.by), high)
        )

    def _whole(self, i: str, j: str) -> None:
        tiles = self.tiles
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis], tiles.first[self.inner.axis] = i, j
            tiles.tiles = {n: self._turned(n, None, None) for n in self.turned}
            past = self.past.buffer.name if self.past is not None else ""
            tiles.context = Context(self.inner.axis, self.by, None, tiles.numbers[id(self.inner)], past)
            for turn in range(self.by):
                self._row(i, turn)
            tiles.tiles = {}

    def _row(self, i: str, turn: int) -> None:
        """One row of the result, from a turned square."""
        tiles = self.tiles
        with tiles._scope(self.outer.axis):
            tiles.turn = turn
            tiles.first[self.outer.axis] = self.f.add(i, turn)
            tiles._steps_before(self.outer.body)
            tiles.block(self.inner.body)

    def _edge(self, i: str, j: str) -> None:
        """A square that is partly outside."""
        tiles, f, by = self.tiles, self.f, self.by
        lows = [f.smax(f.sub(0, at), 0) for at in (i, j)]
        highs = [f.smin(f.sub(high, at), by) for at, high in zip((i, j), self.high, strict=True)]
        if not tiles.target.has_avx512:
            f.loop(f.add(i, lows[0]), f.add(i, highs[0]), 1, (), lambda row, _: self._points(row, j, lows[1], highs[1]))
            return
        lanes, flags = vector("i64", by), vector("i1", by)
        place = vector_constant("i64", range(by))
        masks = [
            f.binary(
                "and",
                flags,
                f.compare("sge", lanes, place, f.splat(lanes, low)),
                f.compare("slt", lanes, place, f.splat(lanes, high)),
            )
            for low, high in zip(lows, highs, strict=True)
        ]
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis], tiles.first[self.inner.axis] = i, j
            tiles.tiles = {n: self._turned(n, masks[0], (lows[1], highs[1])) for n in self.turned}
            tiles.context = Context(self.inner.axis, by, masks[1], tiles.numbers[id(self.inner)])
            for turn in range(by):
                f.if_(self._is_between(turn, lows[0], highs[0]), partial(self._row, i, turn))
            tiles.tiles = {}

    def _points(self, row: str, j: str, low: Value, high: Value) -> None:
        """Points of a row one by one."""
        tiles = self.tiles

        def point(column: str, _: list[str]) -> None:
            with tiles._scope(self.outer.axis, self.inner.axis):
                tiles.first[self.outer.axis], tiles.first[self.inner.axis] = row, column
                tiles.context = Context()
                tiles._steps_before(self.outer.body)
                tiles.block(self.inner.body)

        self.f.loop(self.f.add(j, low), self.f.add(j, high), 1, (), point)

    def _is_between(self, at: int, low: Value, high: Value) -> str:
        f = self.f
        return f.binary("and", "i1", f.compare("sle", "i64", low, at), f.compare("sgt", "i64", high, at))

    def _turned(self, node: Load, mask: str | None, rows: tuple[Value, Value] | None) -> list[Parts]:
        """A square of a strided load: rows loaded whole, then interleaved into columns.

        At an edge, `mask` has the lanes that are inside, and `rows` the first row that is and the first that is not."""
        tiles, f, by = self.tiles, self.f, self.by
        stride = tiles.size(linear(node.index[0]).terms[self.inner.axis])
        start = tiles._pointer(node.buffer, tiles.at_first(node.index[0]))
        element, parts = memory_type(node.dtype), 2 if node.dtype.is_complex else 1
        flags = vector("i1", by)
        asks = mask is None and tiles.schedule.streams(node.buffer.name, tiles.numbers[id(self.outer)])
        turned: list[Parts] = []
        for lane in range(by):
            pointer = f.address(element, start, f.mul(f.mul(stride, lane), parts))
            alive = mask
            if mask is not None and rows is not None:
                alive = f.binary("and", flags, mask, f.splat(flags, self._is_between(lane, *rows)))
            turned.append(tiles._read(node.dtype, pointer, by, alive))
            if asks:
                f.prefetch(f.address(element, pointer, _AHEAD * by * parts), locality=2)
        return _interleaved(self, node, turned)


def _interleaved(squares: _Squares, node: Load, rows: list[Parts]) -> list[Parts]:
    """Rows of a square into columns, by as many rounds as its size has bits: see `turning_rounds`."""
    f, by = squares.f, squares.by
    type_ = register_type(node.dtype, by)
    for distance, picks in turning_rounds(by, register_bytes(node.dtype)):
        made = list(rows)
        for first in range(by):
            if not first & distance:
                pair = list(zip(rows[first], rows[first + distance], strict=True))
                for at, pick in zip((first, first + distance), picks, strict=True):
                    made[at] = tuple(f.shuffle(type_, a, b, pick) for a, b in pair)
        rows = made
    return [rows[at] for at in _places(by, register_bytes(node.dtype))]


@cache
def turning_rounds(by: int, itemsize: int) -> tuple[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]], ...]:
    """Each round joins registers that are a distance apart, and says what the first and the second of them become:
    picks of the elements of both. Processors do each in one instruction, as elements move within 16 bytes, or all 16 at
    once:

        a0 a1 a2 a3, b0 b1 b2 b3  ->  a0 b0 a1 b1, a2 b2 a3 b3      the halves of each 16 bytes, in turns
        A0 A1 A2 A3, B0 B1 B2 B3  ->  A0 A2 B0 B2, A1 A3 B1 B3      every other 16 bytes
    """
    run = min(by, max(1, _LANE // itemsize))
    rounds: list[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]] = []
    step = 1
    while step < run:  # pieces of `step` elements from the first and the second half of each run
        rounds.append((step, (_turns(by, run, step, 0), _turns(by, run, step, run // 2))))
        step *= 2
    while step < by:
        rounds.append((step, (_every_other(by, run, 0), _every_other(by, run, run))))
        step *= 2
    return tuple(rounds)


def _turns(by: int, run: int, step: int, half: int) -> tuple[int, ...]:
    pieces = [
        (start + half + at, other)
        for start in range(0, by, run)
        for at in range(0, run // 2, step)
        for other in (0, by)
    ]
    return tuple(other + first + at for first, other in pieces for at in range(step))


def _every_other(by: int, run: int, first: int) -> tuple[int, ...]:
    return tuple(start + at for start in range(first, 2 * by, 2 * run) for at in range(run))


@cache
def _places(by: int, itemsize: int) -> tuple[int, ...]:
    """Where the rounds leave each column."""
    names = [[(row, column) for column in range(by)] for row in range(by)]
    for distance, picks in turning_rounds(by, itemsize):
        names = [
            [(names[at & ~distance] + names[at | distance])[pick] for pick in picks[bool(at & distance)]]
            for at in range(by)
        ]
    return tuple(names.index([(row, column) for row in range(by)]) for column in range(by))
