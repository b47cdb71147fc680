"""The register micro-kernel of every matmul: a tile of rows times panels of packed B, over one k block.

    void micro(ptr a, i64 a_stride, ptr b, i64 panel_stride, ptr c, i64 c_stride, i64 k, i64 resume)

C is a buffer of the accumulator's type. Each sum takes its products in order of k. With `blocks`, it does so in blocks,
each from zero, which are added to each other in C, and to what C holds when `resume` is not 0: a call that resumes then
starts where a block does. Without, the sums start at zero (or what the head of a panel says), or at what C holds: a
call can end anywhere without a change in a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Typed, Value, element_of
from strata.kernel import ProductBlocks

# body(step index, carried values, steps to take, k's in the only step when it is not whole)
_Body = Callable[[Value, list[str], int, "Value | None"], list[Value]]
# address(step index) -> (step within the turn, row) -> where a row's values are
_Rows = Callable[[Value], Callable[[int, int], str]]

Place = tuple[str, str]  # the address of a vector of sums, and its type

_OPERANDS: Final = (("ptr noalias", "a"), ("i64", "a_stride"), ("ptr noalias", "b"), ("i64", "panel_stride"))


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """Rows, vectors in one panel, and how many panels are read side by side."""

    rows: int
    vectors: int
    streams: int = 1
    is_half: bool = False  # the last vector is half as wide; there is one panel then

    def __str__(self) -> str:
        tail = "_half" if self.is_half else f"x{self.streams}" if self.streams > 1 else ""
        return f"{self.rows}x{self.vectors}{tail}"

    @property
    def across(self) -> int:
        """Vectors of B in one step."""
        return self.vectors * self.streams

    @property
    def sums(self) -> int:
        """Vector registers that hold sums."""
        return self.rows * self.across


Layout = Literal["rows", "packed", "columns", "pointers"]


@dataclass(frozen=True)
class Micro:
    """One micro-kernel: its tile, and how A lies.

    `rows`: rows of unit k stride, `a_stride` apart. `packed`: a tile of [k][rows]. `columns`: [k][rows] with `a_stride`
    from k to k. `pointers`: a table of [run][rows] addresses, each of `a_stride` consecutive k's; a run whose first
    address is null is zero in all rows.
    """

    arithmetic: GemmArithmetic
    tile: RegisterTile
    layout: Layout
    prefetch: int = 0  # steps ahead in B, into the second cache; 0 leaves it to the processor
    strided_b: bool = False  # B is a row-major matrix: panels side by side, whose k's are `panel_stride` apart
    blocks: ProductBlocks | None = None  # that rounded sums are made of
    run: int = 0  # k's of a run of `pointers`, where there are blocks

    @cached_property
    def unroll(self) -> int:
        """Steps in one turn of the loop: enough that its control hides behind the arithmetic, and no more code."""
        return 2 if self.tile.sums <= 4 else 1

    @cached_property
    def name(self) -> str:
        types = "_".join(d.name for d in (self.arithmetic.a, self.arithmetic.b, self.arithmetic.accumulator))
        ahead = f"_ahead{self.prefetch}" if self.prefetch else ""
        cut = f"_by{self.blocks.terms}_{self.blocks.run}_{self.run}" if self.blocks is not None else ""
        return f"micro_{types}_{self.tile}_{self.layout}{ahead}{'_strided' if self.strided_b else ''}{cut}"

    def emit(self, module: IrModule) -> str:
        """Adds the function once and returns its name."""
        if not module.has(self.name):
            self._emit(module)
        return self.name

    def _emit(self, module: IrModule) -> None:
        arithmetic, tile = self.arithmetic, self.tile
        parameters = [*_OPERANDS, ("ptr noalias", "c"), ("i64", "c_stride"), ("i64", "k"), ("i64", "resume")]
        f = module.outlined(self.name, parameters)
        row_bytes = f.mul("%c_stride", arithmetic.size)
        rows = [f.address("i8", "%c", f.mul(i, row_bytes)) for i in range(tile.rows)]
        places = [(f.address("i8", rows[row], place), type_) for row, place, type_ in self._places]
        if self.blocks is not None:
            self._in_blocks(f, places, "%resume")
        else:
            self._store(f, places, self._sums(f, self._initial(f, places)))
        f.ret()

    def _store(self, f: IrFunction, places: list[Place], sums: list[str]) -> None:
        for (place, type_), value in zip(places, sums, strict=True):
            f.store(type_, value, place, self.arithmetic.size)

    def _load(self, f: IrFunction, places: list[Place]) -> list[str]:
        return [f.load(type_, place, self.arithmetic.size) for place, type_ in places]

    def emit_ended(
        self,
        module: IrModule,
        name: str,
        parameters: Sequence[tuple[str, str]],
        end: Callable[[IrFunction, list[list[str]]], None],
    ) -> None:
        """Adds a function of A, B, k and more parameters that gives all sums, row by row, to `end` in registers."""
        every = [*_OPERANDS, ("i64", "k"), *parameters]
        f = module.outlined(name, every)
        if self.blocks is None:
            sums = self._sums(f, [(self.arithmetic.type, value) for value in self._begun(f)])
        else:
            sums = self._ended_blocks(f)
        across = self.tile.across
        end(f, [sums[row * across : (row + 1) * across] for row in range(self.tile.rows)])
        f.ret()

    def _sums(self, f: IrFunction, start: list[Typed]) -> list[str]:
        """All sums, each from its start on."""
        if self.layout != "pointers":
            return self._steps(f, start, 0, "%k", self._plain_body(f))
        return self._runs(f, start, 0, self._count_of_runs(f))

    def _in_blocks(self, f: IrFunction, places: list[Place], resume: Value) -> None:
        """All sums, block by block, added up at their places."""
        goes_on = "false" if resume == 0 else f.compare("ne", "i64", resume, 0)

        def join(at: Value, sums: list[str]) -> None:
            """The block that starts at a place joins those before it."""
            is_later = f.binary("or", "i1", goes_on, f.compare("ne", "i64", at, 0))
            self._store(f, places, self._joined(f, places, is_later, sums))

        block, end, unit = self._blocks_of(f)
        if block is None:
            self._cut_runs(f, join)
        else:
            self._cut(f, end, lambda low, high: join(low, block(low, high)), unit)

    def _ended_blocks(self, f: IrFunction) -> list[str]:
        """All sums, block by block, added up on the stack; the last block is added in registers."""
        lanes, element = self.arithmetic.lanes, element_of(self.arithmetic.type)
        memory = f.alloca(self.arithmetic.type, self.tile.sums)
        places = [(f.address(element, memory, at * lanes), self.arithmetic.type) for at in range(self.tile.sums)]
        block, end, unit = self._blocks_of(f)
        assert self.blocks is not None
        if block is None or self.blocks.run:
            self._in_blocks(f, places, 0)
            return self._load(f, places)
        terms = self.blocks.terms // unit
        last = f.mul(f.op(f"udiv i64 {f.sub(end, 1)}, {terms}"), terms)

        def some(low: Value, high: Value) -> None:
            self._store(f, places, self._joined(f, places, f.compare("ne", "i64", low, 0), block(low, high)))

        self._cut(f, last, some, unit)
        return self._joined(f, places, f.compare("ne", "i64", last, 0), block(last, end))

    def _joined(self, f: IrFunction, places: list[Place], is_later: str, sums: list[str]) -> list[str]:
        """The sums of a block, with those at their places where there are blocks before it."""

        def added() -> list[Value]:
            olds = self._load(f, places)
            return [f.binary("fadd", t, old, new) for (_, t), old, new in zip(places, olds, sums, strict=True)]

        return f.if_(is_later, added, lambda: list(sums), types=[type_ for _, type_ in places])

    def _blocks_of(self, f: IrFunction) -> tuple[Callable[[Value, Value], list[str]] | None, Value, int]:
        """The sums of a block, from one place to another, where all places end, and how many k's one is: k's, or runs.
        None where a run has several blocks."""
        assert self.blocks is not None
        zeros = self._zeros()
        if self.layout != "pointers":
            body = self._plain_body(f)
            return lambda low, high: self._steps(f, zeros, low, f.smin(high, "%k"), body), f.smax("%k", 1), 1
        if self.blocks.terms < self.run:
            return None, 0, 0
        return lambda low, high: self._runs(f, zeros, low, high), self._count_of_runs(f), self.run

    def _zeros(self) -> list[Typed]:
        return [(type_, "zeroinitializer") for _, _, type_ in self._places]

    def _cut(self, f: IrFunction, end: Value, block: Callable[[Value, Value], None], unit: int = 1) -> None:
        """All blocks up to an end: block(begin, end), counted in units of k."""
        assert self.blocks is not None
        terms, run = self.blocks.terms // unit, self.blocks.run // unit

        def some(begin: Value, end: Value) -> None:
            f.loop(begin, end, terms, [], lambda low, _: block(low, f.smin(f.add(low, terms), end)))

        if run:
            f.loop(0, end, run, [], lambda begin, _: some(begin, f.smin(f.add(begin, run), end)))
        else:
            some(0, end)

    def _cut_runs(self, f: IrFunction, join: Callable[[Value, list[str]], None]) -> None:
        """All blocks of runs that are longer than a block; a run of zeros is one block."""
        assert self.blocks is not None
        terms, zeros = self.blocks.terms, self._zeros()
        types = [type_ for type_, _ in zeros]

        def one(run: str, _: list[str]) -> None:
            body, present = self._run(f, run)[:2]

            def block(low: str, _: list[str]) -> None:
                high = f.smin(f.add(low, terms), "%a_stride")
                sums = f.if_(
                    present,
                    lambda: list(self._steps(f, zeros, low, high, body)),
                    lambda: [value for _, value in zeros],
                    types=types,
                )
                join(f.add(run, low), sums)

            f.loop(0, f.select("i64", present, "%a_stride", 1), terms, [], block)

        f.loop(0, self._count_of_runs(f), 1, [], one)

    @cached_property
    def _across(self) -> tuple[GemmArithmetic, ...]:
        """What is computed for each vector of a row; the last one may be half as wide."""
        *others, last = [self.arithmetic] * self.tile.across
        if self.tile.is_half:
            target = last.target
            last = replace(last, target=replace(target, vector_bytes=target.vector_bytes // 2))
        return (*others, last)

    @cached_property
    def _places(self) -> list[tuple[int, int, str]]:
        """(row, byte offset in the row, type) of each sum."""
        step = self.arithmetic.lanes * self.arithmetic.size
        row = [(at * step, arithmetic.type) for at, arithmetic in enumerate(self._across)]
        return [(number, place, type_) for number in range(self.tile.rows) for place, type_ in row]

    def _initial(self, f: IrFunction, places: list[Place]) -> list[Typed]:
        types = [type_ for _, type_ in places]
        is_resumed = f.compare("ne", "i64", "%resume", 0)
        values = f.if_(is_resumed, lambda: list(self._load(f, places)), lambda: self._begun(f), types=types)
        return list(zip(types, values, strict=True))

    def _begun(self, f: IrFunction) -> list[Value]:
        """What sums start at: zero, or what the heads of the panels say."""
        arithmetic, vectors = self.arithmetic, self.tile.vectors
        if not arithmetic.head:
            return ["zeroinitializer"] * self.tile.sums
        step = arithmetic.lanes * arithmetic.size
        heads = [f.address("i8", panel, -vectors * step) for panel in self._panels(f)]
        first = [f.load(arithmetic.type, f.address("i8", h, v * step), 1) for h in heads for v in range(vectors)]
        return [*first] * self.tile.rows

    def _panels(self, f: IrFunction) -> list[str]:
        """Where the panels start that are read side by side."""
        arithmetic, tile = self.arithmetic, self.tile
        apart: Value = tile.vectors * arithmetic.b_bytes
        if not self.strided_b:
            apart = f.mul("%panel_stride", arithmetic.b.itemsize)
        return [f.address("i8", "%b", f.mul(s, apart)) for s in range(tile.streams)]

    def _count_of_runs(self, f: IrFunction) -> str:
        return f.op(f"udiv i64 %k, {f.smax('%a_stride', 1)}")

    def _run(self, f: IrFunction, run: Value) -> tuple[_Body, str, str]:
        """What a run does over its part of B, whether it is there, and that part."""
        arithmetic, tile = self.arithmetic, self.tile
        run_bytes = f.mul("%a_stride", tile.vectors * arithmetic.lanes * arithmetic.b.itemsize)
        table = f.address("ptr", "%a", f.mul(run, tile.rows))
        rows = [f.load("ptr", f.address("ptr", table, i), 8) for i in range(tile.rows)]
        panel = f.address("i8", "%b", f.mul(run, run_bytes))

        def addresses(index: Value) -> Callable[[int, int], str]:
            offset = f.mul(index, arithmetic.a_bytes)
            return lambda step, row: f.address("i8", f.address("i8", rows[row], offset), step * arithmetic.a_bytes)

        return self._body(f, [panel], addresses), f.compare("ne", "ptr", rows[0], "null"), panel

    def _runs(self, f: IrFunction, start: list[Typed], first: Value, end: Value) -> list[str]:
        """Some runs of A, each over its part of B; a run is whole groups."""

        def one(run: str, carried: list[str]) -> list[Value]:
            body, present, panel = self._run(f, run)

            def whole() -> list[Value]:
                current: list[Typed] = [(type_, c) for (type_, _), c in zip(start, carried, strict=True)]
                return list(self._steps(f, current, 0, "%a_stride", body))

            def zero() -> list[Value]:
                return self._run_of_zeros(f, panel, carried) if self.arithmetic.head else list(carried)

            return list(f.if_(present, whole, zero, types=[type_ for type_, _ in start]))

        return f.loop(first, end, 1, start, one)

    def _run_of_zeros(self, f: IrFunction, panel: str, carried: list[str]) -> list[Value]:
        """What the head of a panel takes off for a run, though its rows are zero, is added again."""
        arithmetic, vectors = self.arithmetic, self.tile.vectors
        step_bytes = vectors * arithmetic.b_bytes

        def add(step: str, sums: list[str]) -> list[Value]:
            line = f.address("i8", panel, f.mul(step, step_bytes))
            b = [arithmetic.load_b(f, f.address("i8", line, j * arithmetic.b_bytes)) for j in range(vectors)]
            return [arithmetic.shift_step(f, x, total) for x, total in zip(b, sums, strict=True)]

        start = [(arithmetic.type, "zeroinitializer")] * vectors
        b_sums = f.loop(0, f.op(f"udiv i64 %a_stride, {arithmetic.group}"), 1, start, add)
        taken = [arithmetic.start(f, total) for total in b_sums]
        return [f.binary("sub", arithmetic.type, c, taken[i % vectors]) for i, c in enumerate(carried)]

    def _plain_body(self, f: IrFunction) -> _Body:
        arithmetic, tile = self.arithmetic, self.tile
        panels = self._panels(f)
        row_address = self._row_address(f)
        step_bytes: Value = arithmetic.a_bytes * (tile.rows if self.layout == "packed" else 1)
        if self.layout == "columns":
            assert arithmetic.group == 1
            step_bytes = f.mul("%a_stride", arithmetic.a_bytes)

        def addresses(index: Value) -> Callable[[int, int], str]:
            base = f.address("i8", "%a", f.mul(index, step_bytes))
            return lambda step, row: row_address(base, step, row)

        apart = f.mul("%panel_stride", arithmetic.b.itemsize) if self.strided_b else None
        return self._body(f, panels, addresses, apart)

    def _steps(self, f: IrFunction, start: list[Typed], low: Value, high: Value, body: _Body) -> list[str]:
        """The steps from one place of k, which begins a group, to another."""
        group, types = self.arithmetic.group, [type_ for type_, _ in start]
        first = low if group == 1 or low == 0 else f.op(f"udiv i64 {low}, {group}")
        end: Value = high if group == 1 else f.op(f"udiv i64 {high}, {group}")
        unrolled = end if self.unroll == 1 else f.add(first, f.round_down(f.sub(end, first), self.unroll))
        values = f.loop(first, unrolled, self.unroll, start, lambda i, carried: body(i, carried, self.unroll, None))
        if self.unroll > 1:
            start = list(zip(types, values, strict=True))
            values = f.loop(unrolled, end, 1, start, lambda i, carried: body(i, carried, 1, None))
        if group > 1:
            left = f.sub(high, f.mul(end, group))
            start = list(zip(types, values, strict=True))
            last = f.add(end, f.ceil_div(left, group))
            values = f.loop(end, last, 1, start, lambda i, carried: body(i, carried, 1, left))
        return values

    def _row_address(self, f: IrFunction) -> Callable[[str, int, int], str]:
        """Where a row's values of a step are, from the address of row 0 at step 0 of the turn."""
        size, rows = self.arithmetic.a_bytes, self.tile.rows
        if self.layout == "packed":
            return lambda base, step, row: f.address("i8", base, (step * rows + row) * size)
        stride = f.mul("%a_stride", self.arithmetic.a.itemsize)
        if self.layout == "columns":
            return lambda base, step, row: f.address("i8", f.address("i8", base, f.mul(stride, step)), row * size)
        # odd multiples of the stride: with the processor's scales 1, 2, 4, 8 they reach every row
        odd = [f.mul(stride, multiple) for multiple in range(1, rows, 2)]

        def address(base: str, step: int, row: int) -> str:
            if row == 0:
                return f.address("i8", base, step * size)
            scale = row & -row
            offset = odd[row // scale // 2]
            if scale > 1:
                offset = f.op(f"shl i64 {offset}, {scale.bit_length() - 1}")
            return f.address("i8", f.address("i8", base, offset), step * size)

        return address

    def _body(self, f: IrFunction, panels: list[str], addresses: _Rows, b_stride: Value | None = None) -> _Body:
        arithmetic, tile = self.arithmetic, self.tile
        width: Value = tile.vectors * arithmetic.b_bytes if b_stride is None else b_stride
        padded = self.layout == "packed"  # with zeros, to whole groups

        def body(index: Value, carried: list[str], steps: int, valid: Value | None) -> list[Value]:
            a_address = addresses(index)
            b_bases = [f.address("i8", panel, f.mul(index, width)) for panel in panels]
            totals = list(carried)
            for step in range(steps):
                lines = [f.address("i8", base, f.mul(width, step)) for base in b_bases]
                if self.prefetch:
                    for base in b_bases:
                        ahead = f.address("i8", base, f.mul(width, step + self.prefetch))
                        for line in range(0, tile.vectors * arithmetic.b_bytes, 64):
                            f.prefetch(f.address("i8", ahead, line), locality=2)
                b = [
                    self._across[stream * tile.vectors + j].load_b(f, f.address("i8", line, j * arithmetic.b_bytes))
                    for stream, line in enumerate(lines)
                    for j in range(tile.vectors)
                ]
                for row in range(tile.rows):
                    a = arithmetic.load_a(f, a_address(step, row), None if padded else valid)
                    for j, value in enumerate(b):
                        at, used = row * len(b) + j, self._across[j]
                        mine = a if used is arithmetic else f.shuffle(arithmetic.type, a, "poison", range(used.lanes))
                        totals[at] = used.step(f, mine, value, totals[at])
            return list(totals)

        return body


def call_micro(
    f: IrFunction, kernel: Value, a: Value, a_stride: Value, b: Value, panel_stride: Value, c: Value, c_stride: Value,
    k: Value, resume: Value,
) -> None:  # fmt: skip
    """Runs a micro-kernel given by its address."""
    f.call_address(
        "void", kernel, ("ptr", a), ("i64", a_stride), ("ptr", b), ("i64", panel_stride), ("ptr", c),
        ("i64", c_stride), ("i64", k), ("i64", resume),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TileHeights:
    """How rows split into tiles: as many of the tallest as fit, then what is left by the shorter ones."""

    heights: tuple[int, ...]  # tallest first, the last one 1

    def by_height(self, f: IrFunction, left: Value, type_: str, choices: Sequence[Value]) -> Value:
        """The choice that belongs to the tallest height that fits into the rows left."""
        result = choices[-1]
        for height, choice in reversed(list(zip(self.heights[:-1], choices[:-1], strict=True))):
            result = f.select(type_, f.compare("sge", "i64", left, height), choice, result)
        return result

    def count(self, f: IrFunction, rows: Value) -> Value:
        """Tiles of this many rows."""
        total: Value = 0
        for height in self.heights:
            tiles = f.op(f"udiv i64 {rows}, {height}")
            total, rows = f.add(total, tiles), f.sub(rows, f.mul(tiles, height))
        return total

    def over_rows(
        self, f: IrFunction, rows: Value, body: Callable[[Value, Value], None], *, count: Value | None = None,
        skipped: Value = 0,
    ) -> None:  # fmt: skip
        """body(first row, height) for each tile. Their count may be known, and this many of the tallest be skipped."""

        def one(_: str, carried: list[str]) -> list[Value]:
            row = carried[0]
            height = self.by_height(f, f.sub(rows, row), "i64", self.heights)
            body(row, height)
            return [f.add(row, height)]

        tiles = self.count(f, rows) if count is None else count
        f.loop(skipped, tiles, 1, [("i64", f.mul(skipped, self.heights[0]))], one)


@dataclass(frozen=True, slots=True)
class TileSet(TileHeights):
    """Micro-kernels of several heights."""

    vectors: int
    layout: Layout = "rows"
    strided_b: bool = False
    blocks: ProductBlocks | None = None

    def by_vectors(self, f: IrFunction, arithmetic: GemmArithmetic, vectors: Value) -> list[Value]:
        """For each height, the address of the kernel for panels of this many vectors."""
        result: list[Value] = []
        for height in self.heights:
            kernel: Value = self._micro(f, arithmetic, height, vectors if isinstance(vectors, int) else self.vectors)
            for count in range(1, 1 if isinstance(vectors, int) else self.vectors):
                name = self._micro(f, arithmetic, height, count)
                kernel = f.select("ptr", f.compare("eq", "i64", vectors, count), name, kernel)
            result.append(kernel)
        return result

    def _micro(self, f: IrFunction, arithmetic: GemmArithmetic, height: int, vectors: int) -> str:
        micro = Micro(
            arithmetic, RegisterTile(height, vectors), self.layout, strided_b=self.strided_b, blocks=self.blocks
        )
        return "@" + micro.emit(f.module)
