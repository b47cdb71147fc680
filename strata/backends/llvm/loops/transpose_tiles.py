"""Transposes in tiles: squares of elements are transposed in registers, blocks of them are the chunks of work.

A tile reads whole runs along the outer loop and writes whole runs along the inner one; several side by side along the
inner loop are transposed before they are written, as vectors of as many lanes. The tiles of a block start where cache
lines of what is read begin, and, for non-temporal stores, where lines of the result begin; so the first and last tiles
of a row or column may be partly outside, and use masks for the lanes that are inside.

What a block reads is prefetched while the block before it is transposed, row after row: each row is some lines side by
side, which memory delivers sooner than lines of many rows in turns. Blocks follow each other along what is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

from strata.backends.llvm.ir.builder import Value, vector, vector_constant
from strata.backends.llvm.ir.registers import Parts, memory_type, register_bytes, register_type
from strata.backends.llvm.loops.reduce import Reductions
from strata.backends.llvm.loops.values import Context
from strata.core import dim_prod
from strata.kernel import Buffer, Compute, Expr, Load, LoopBlock, MapLoop, Store, StoreStep, Tile, linear, turns

_LINE = 64  # bytes of a cache line
_LONG_ROW = 3 << 10  # bytes
_SHORT_RUN = 1 << 8  # the same of what is read in lines
_BESIDE = 4  # rows that are read between hints
_LANE = 16  # bytes within which processors move elements most quickly


class TransposeTiles(Reductions):
    """Loops around tiles."""

    def _enter(self, loops: Sequence[MapLoop], position: Value) -> None:
        """Give nested loops their values at a flat position, and do what they do before the loop inside them."""
        raise NotImplementedError

    def _steps_before(self, block: LoopBlock) -> None:
        """What a block does before the one loop in it that is handed out."""
        raise NotImplementedError

    def _tiles(self, chain: list[MapLoop], tile: Tile) -> None:
        """The blocks begin … end - 1. Those that are asked for are counted along the outer loop first, others along the
        inner one: what a thread writes then lies together."""
        f = self.f
        *around, outer, inner = chain
        extents = outer.axis.extent, inner.axis.extent
        counts = tile.blocks(*extents)
        rows, columns = (self.size(d) for d in counts)
        last = f.sub(self.size(dim_prod([*counts, *(loop.axis.extent for loop in around)])), 1)

        squares = _Squares(self, outer, inner, tile, (rows, columns))
        first, second = (rows, columns) if squares.asked else (columns, rows)

        @contextmanager
        def at(position: Value) -> Iterator[tuple[str, str]]:
            """Row and column of a block, with the loops around it at their indices."""
            rest = f.op(f"sdiv i64 {position}, {first}")
            found = f.op(f"srem i64 {position}, {first}"), f.op(f"srem i64 {rest}, {second}")
            with self._scope(*(loop.axis for loop in around)):
                self._enter(around, f.op(f"sdiv i64 {rest}, {second}"))
                yield found if squares.asked else found[::-1]

        def blocks(squares: _Squares) -> None:
            def block(position: str, _: list[str]) -> None:
                asked: list[str] = []
                if squares.asked:
                    with at(f.smin(f.add(position, 1), last)) as (row, column):
                        asked = squares.starts(row, column)
                with at(position) as (row, column):
                    squares.emit(row, column, asked)

            f.loop("%begin", "%end", 1, (), block)

        if squares.past is None or not squares.has_short_rows:
            blocks(squares)
            return
        near = _Squares(self, outer, inner, tile, (rows, columns))
        near.past = None
        place = f.op(f"ptrtoint ptr {self.pointers[squares.past.buffer.name]} to i64")
        aligned = f.compare("eq", "i64", f.binary("and", "i64", place, str(_LINE - 1)), 0)
        f.if_(aligned, lambda: blocks(squares), lambda: blocks(near))


class _Squares:
    """The tiles of a block."""

    def __init__(
        self, tiles: TransposeTiles, outer: MapLoop, inner: MapLoop, tile: Tile, blocks: tuple[Value, Value]
    ) -> None:
        self.tiles, self.outer, self.inner, self.tile, self.blocks = tiles, outer, inner, tile, blocks
        self.f, self.by = tiles.f, tile.by
        self.wide = tiles.schedule.lanes(tiles.numbers[id(inner)])
        computed = [s.node for s in inner.body.steps if isinstance(s, Compute)]
        self.turned = [n for n in computed if isinstance(n, Load) and turns(n, outer.axis, inner.axis)]
        stores = [s.store for s in inner.body.steps if isinstance(s, StoreStep)]
        self.past = next(
            (s for s in stores if tiles.schedule.is_nontemporal(s.buffer.name) and self._lines_up(s)), None
        )
        number = tiles.numbers[id(outer)]
        self.asked = [n for n in self.turned if tiles.schedule.streams(n.buffer.name, number)]
        self.ahead = {a.buffer: a.ahead for a in tiles.schedule.asks(number)}
        self.asks: list[str] = []  # where lines begin that are prefetched while tiles are read
        self.high = tiles.size(outer.axis.extent), tiles.size(inner.axis.extent)

    @property
    def has_short_rows(self) -> bool:
        """Whether rows of a result are so short that lines at their ends, which are not stored whole where it begins
        inside a line, would take more time than those between them save."""
        extent = self.inner.axis.extent
        size = self.past.buffer.dtype.itemsize if self.past is not None else 1
        return isinstance(extent, int) and extent * size < _LONG_ROW

    @property
    def _follows_lines(self) -> bool:
        """Whether tiles are to begin where lines of what is read do: they are the same for all rows, and a part of a
        tile at both ends of a row is little."""
        if not self.turned:
            return False
        size, extent = self.turned[0].buffer.dtype.itemsize, self.outer.axis.extent
        steps = [s for atom, s in linear(self.turned[0].index[0]).terms.items() if atom is not self.outer.axis]
        lines = all(isinstance(s, int) and s * size % _LINE == 0 for s in steps)
        return lines and not (isinstance(extent, int) and extent * size < _SHORT_RUN)

    def _lines_up(self, store: Store) -> bool:
        """Whether rows of a result begin at the same place of a cache line, and tiles write whole lines."""
        terms, size = linear(store.index[0]).terms, store.buffer.dtype.itemsize
        steps = [step for atom, step in terms.items() if atom is not self.inner.axis]
        whole = self.wide * size % _LINE == 0 and not store.buffer.dtype.is_complex
        lines = all(isinstance(s, int) and s * size % _LINE == 0 for s in steps)
        return whole and terms.get(self.inner.axis) == 1 and lines

    def starts(self, row: Value, column: Value) -> list[str]:
        """Where a block begins in each of the prefetched buffers."""
        first_row, first_column = self._first(row, column)
        tiles = self.tiles
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis], tiles.first[self.inner.axis] = first_row, first_column
            return [tiles._pointer(n.buffer, tiles.at_first(n.index[0])) for n in self.asked]

    def emit(self, row: Value, column: Value, asked: list[str]) -> None:
        """One block; what begins at `asked` is prefetched meanwhile."""
        f, by, wide = self.f, self.by, self.wide
        firsts = self._first(row, column)
        sizes = self.tile.rows, self.tile.columns
        ends = [
            f.select("i64", f.compare("eq", "i64", at, f.sub(count, 1)), high, f.add(first, size))
            for at, count, high, first, size in zip((row, column), self.blocks, self.high, firsts, sizes, strict=True)
        ]
        points = self.tile.rows * self.tile.columns

        def columns(i: str, done: list[str]) -> list[str]:
            inside = self._is_inside(i, by, self.high[0])

            def square(j: str, done: list[str]) -> list[Value]:
                self.asks = [
                    place
                    for node, start in zip(self.asked, asked, strict=True)
                    for place in self._lines(node, start, done[0])
                ]
                whole = f.binary("and", "i1", inside, self._is_inside(j, wide, self.high[1]))
                f.if_(whole, lambda: self._whole(i, j), lambda: self._edge(i, j))
                return [f.smin(f.add(done[0], by * wide), points)]

            return f.loop(firsts[1], ends[1], wide, [("i64", done[0])], square)

        f.loop(firsts[0], ends[0], by, [("i64", 0)], columns)

    def _first(self, row: Value, column: Value) -> tuple[Value, Value]:
        """The point where a block begins."""
        f, by = self.f, self.by
        down = self._behind_line(self.turned[0].buffer, self.turned[0].index[0], by) if self._follows_lines else 0
        across = 0 if self.past is None else self._behind_line(self.past.buffer, self.past.index[0], self.wide)
        return f.sub(f.mul(row, self.tile.rows), down), f.sub(f.mul(column, self.tile.columns), across)

    def _lines(self, node: Load, start: str, done: Value) -> Iterator[str]:
        """Addresses of the row starts that one tile loads."""
        tiles, f, size = self.tiles, self.f, node.buffer.dtype.itemsize
        stride = f.mul(tiles.size(linear(node.index[0]).terms[self.inner.axis]), size)
        row, behind = f.op(f"udiv i64 {done}, {self.tile.rows}"), f.op(f"urem i64 {done}, {self.tile.rows}")
        whole, length = divmod(self.by * self.wide, self.tile.rows)
        start = f.address("i8", start, f.mul(behind, size)) if not whole else start
        for at in range(max(1, whole)):
            place = f.address("i8", start, f.mul(f.add(row, at), stride))
            yield from (
                f.address("i8", place, x) for x in range(0, (self.tile.rows if whole else length) * size, _LINE)
            )

    def _behind_line(self, buffer: Buffer, index: Expr, width: int) -> Value:
        """Elements from the start of a line (or of this many elements, if fewer) to where the first row begins."""
        tiles, f = self.tiles, self.f
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis] = tiles.first[self.inner.axis] = 0
            address = f.op(f"ptrtoint ptr {tiles._pointer(buffer, tiles.at_first(index))} to i64")
        size = buffer.dtype.itemsize
        return f.op(f"udiv i64 {f.binary('and', 'i64', address, str(min(_LINE, width * size) - 1))}, {size}")

    def _is_inside(self, start: Value, width: int, high: Value) -> str:
        f = self.f
        return f.binary(
            "and", "i1", f.compare("sge", "i64", start, 0), f.compare("sle", "i64", f.add(start, width), high)
        )

    def _whole(self, i: str, j: str) -> None:
        tiles = self.tiles
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis], tiles.first[self.inner.axis] = i, j
            tiles.tiles = {n: self._turned(n, None, None) for n in self.turned}
            past = (self.past.buffer.name,) if self.past is not None else ()
            tiles.context = Context(self.inner.axis, self.wide, None, tiles.numbers[id(self.inner)], past)
            for turn in range(self.by):
                self._row(i, turn)
            tiles.tiles = {}

    def _row(self, i: str, turn: int) -> None:
        """One row of the result, from a transposed tile."""
        tiles = self.tiles
        with tiles._scope(self.outer.axis):
            tiles.turn = turn
            tiles.first[self.outer.axis] = self.f.add(i, turn)
            tiles._steps_before(self.outer.body)
            tiles.block(self.inner.body)

    def _edge(self, i: str, j: str) -> None:
        """A tile that is partly outside."""
        tiles, f, widths = self.tiles, self.f, (self.by, self.wide)
        lows = [f.smax(f.sub(0, at), 0) for at in (i, j)]
        highs = [f.smin(f.sub(high, at), w) for at, high, w in zip((i, j), self.high, widths, strict=True)]
        if not tiles.target.has_avx512:
            f.loop(f.add(i, lows[0]), f.add(i, highs[0]), 1, (), lambda row, _: self._points(row, j, lows[1], highs[1]))
            return
        masks = [self._between(*of) for of in zip(widths, lows, highs, strict=True)]
        with tiles._scope(self.outer.axis, self.inner.axis):
            tiles.first[self.outer.axis], tiles.first[self.inner.axis] = i, j
            tiles.tiles = {n: self._turned(n, masks[0], (lows[1], highs[1])) for n in self.turned}
            tiles.context = Context(self.inner.axis, self.wide, masks[1], tiles.numbers[id(self.inner)])
            for turn in range(self.by):
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

    def _between(self, width: int, low: Value, high: Value) -> str:
        """A mask of the lanes from one number to another."""
        f = self.f
        lanes, place = vector("i64", width), vector_constant("i64", range(width))
        behind = f.compare("sge", lanes, place, f.splat(lanes, low))
        return f.binary("and", vector("i1", width), behind, f.compare("slt", lanes, place, f.splat(lanes, high)))

    def _is_between(self, at: int, low: Value, high: Value) -> str:
        f = self.f
        return f.binary("and", "i1", f.compare("sle", "i64", low, at), f.compare("sgt", "i64", high, at))

    def _turned(self, node: Load, mask: str | None, rows: tuple[Value, Value] | None) -> list[Parts]:
        """Tiles of a strided load: rows loaded whole, then interleaved into columns, and those of all tiles joined.

        At an edge, `mask` has the lanes that are inside, and `rows` the first row that is and the first that is not."""
        tiles, f, by = self.tiles, self.f, self.by
        stride = tiles.size(linear(node.index[0]).terms[self.inner.axis])
        start = tiles._pointer(node.buffer, tiles.at_first(node.index[0]))
        element, parts = memory_type(node.dtype), 2 if node.dtype.is_complex else 1
        flags = vector("i1", by)
        hints = list(self.asks) if node is self.turned[0] else []
        some = -(-len(hints) // self.wide)
        squares: list[list[Parts]] = []
        for first in range(0, self.wide, by):  # one after the other: there are registers for one and the columns of all
            loaded: list[Parts] = []
            for lane in range(first, first + by):
                pointer = f.address(element, start, f.mul(f.mul(stride, lane), parts))
                alive = mask
                if mask is not None and rows is not None:
                    alive = f.binary("and", flags, mask, f.splat(flags, self._is_between(lane, *rows)))
                loaded.append(tiles._read(node.dtype, pointer, by, alive))
                if node.buffer.name in self.ahead:
                    f.prefetch(f.address(element, pointer, self.ahead[node.buffer.name] * parts), locality=2)
                for place in hints[some * lane : some * (lane + 1)]:
                    f.prefetch(place, locality=2)
                if lane % _BESIDE == _BESIDE - 1 and (hints or self.ahead):
                    f.keep_order()  # many hints at once would keep reads waiting
            squares.append(_interleaved(self, node, loaded))
        return [self._joined(node, [square[turn] for square in squares]) for turn in range(by)]

    def _joined(self, node: Load, pieces: list[Parts]) -> Parts:
        """Vectors one after the other as one; they are as many as a power of two."""
        lanes = self.by
        while len(pieces) > 1:
            kind = register_type(node.dtype, lanes)
            lanes *= 2
            pieces = [
                tuple(self.f.shuffle(kind, a, b, range(lanes)) for a, b in zip(*pair, strict=True))
                for pair in zip(pieces[::2], pieces[1::2], strict=True)
            ]
        return pieces[0]


def _interleaved(squares: _Squares, node: Load, rows: list[Parts]) -> list[Parts]:
    """Rows of a tile into columns, by as many rounds as its size has bits: see `turning_rounds`."""
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
