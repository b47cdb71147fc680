"""The register micro-kernel of every matmul: a tile of rows times panels of packed B, over one k block.

    void micro(ptr a, i64 a_stride, ptr b, i64 panel_stride, ptr c, i64 c_stride, i64 k, i64 resume)

C is a buffer of the accumulator's type. The sums start at zero (or what the head of a panel says), or at what C holds
when `resume` is not 0, and each one takes its products in order of k. A block of k can therefore end anywhere without a
change in a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Typed, Value

# body(step index, carried values, steps to take, k's in the only step when it is not whole)
_Body = Callable[[Value, list[str], int, "Value | None"], list[Value]]
# address(step index) -> (step within the turn, row) -> where a row's values are
_Rows = Callable[[Value], Callable[[int, int], str]]


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

    @property
    def unroll(self) -> int:
        """Steps in one turn of the loop: enough that its control hides behind the arithmetic, and no more code."""
        return 2 if self.tile.sums <= 4 else 1

    @property
    def name(self) -> str:
        types = "_".join(d.name for d in (self.arithmetic.a, self.arithmetic.b, self.arithmetic.accumulator))
        ahead = f"_ahead{self.prefetch}" if self.prefetch else ""
        return f"micro_{types}_{self.tile}_{self.layout}{ahead}{'_strided' if self.strided_b else ''}"

    def emit(self, module: IrModule) -> str:
        """Adds the function once and returns its name."""
        if not module.has(self.name):
            self._emit(module)
        return self.name

    def _emit(self, module: IrModule) -> None:
        arithmetic, tile = self.arithmetic, self.tile
        parameters = [*_OPERANDS, ("ptr noalias", "c"), ("i64", "c_stride"), ("i64", "k"), ("i64", "resume")]
        f = module.function(self.name, parameters, attributes="nounwind noinline", linkage="internal")
        row_bytes = f.mul("%c_stride", arithmetic.size)
        rows = [f.address("i8", "%c", f.mul(i, row_bytes)) for i in range(tile.rows)]
        sums = self._sums(f, self._initial(f, rows))
        for (row, place, type_), value in zip(self._places(), sums, strict=True):
            f.store(type_, value, f.address("i8", rows[row], place), arithmetic.size)
        f.ret()

    def emit_ended(
        self,
        module: IrModule,
        name: str,
        parameters: Sequence[tuple[str, str]],
        end: Callable[[IrFunction, list[list[str]]], None],
    ) -> None:
        """Adds a function of A, B, k and more parameters that gives all sums, row by row, to `end` in registers."""
        every = [*_OPERANDS, ("i64", "k"), *parameters]
        f = module.function(name, every, attributes="nounwind noinline", linkage="internal")
        sums = self._sums(f, [(self.arithmetic.type, value) for value in self._begun(f)])
        across = self.tile.across
        end(f, [sums[row * across : (row + 1) * across] for row in range(self.tile.rows)])
        f.ret()

    def _sums(self, f: IrFunction, start: list[Typed]) -> list[str]:
        """All sums, each from its start on."""
        plain = self.layout != "pointers"
        return self._all_steps(f, start, "%k", self._plain_body(f)) if plain else self._runs(f, start)

    def _at(self, column: int) -> GemmArithmetic:
        """What is computed for a vector of columns."""
        return self._of_last if column == self.tile.across - 1 else self.arithmetic

    @cached_property
    def _of_last(self) -> GemmArithmetic:
        """For the last vector of a row, which may be half as wide."""
        if not self.tile.is_half:
            return self.arithmetic
        target = self.arithmetic.target
        return replace(self.arithmetic, target=replace(target, vector_bytes=target.vector_bytes // 2))

    def _places(self) -> list[tuple[int, int, str]]:
        """(row, byte offset in the row, type) of each sum."""
        step, columns = self.arithmetic.lanes * self.arithmetic.size, range(self.tile.across)
        return [(row, column * step, self._at(column).type) for row in range(self.tile.rows) for column in columns]

    def _initial(self, f: IrFunction, rows: list[str]) -> list[Typed]:
        size, places = self.arithmetic.size, self._places()
        types = [type_ for _, _, type_ in places]

        def resumed() -> list[Value]:
            return [f.load(type_, f.address("i8", rows[row], place), size) for row, place, type_ in places]

        values = f.if_(f.compare("ne", "i64", "%resume", 0), resumed, lambda: self._begun(f), types=types)
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

    def _runs(self, f: IrFunction, start: list[Typed]) -> list[str]:
        """All runs of A, each over its part of B; a run is whole groups."""
        arithmetic, tile = self.arithmetic, self.tile
        count = f.op(f"udiv i64 %k, {f.smax('%a_stride', 1)}")
        run_bytes = f.mul("%a_stride", tile.vectors * arithmetic.lanes * arithmetic.b.itemsize)

        def one(run: str, carried: list[str]) -> list[Value]:
            table = f.address("ptr", "%a", f.mul(run, tile.rows))
            rows = [f.load("ptr", f.address("ptr", table, i), 8) for i in range(tile.rows)]
            panel = f.address("i8", "%b", f.mul(run, run_bytes))

            def addresses(index: Value) -> Callable[[int, int], str]:
                offset = f.mul(index, arithmetic.a_bytes)
                return lambda step, row: f.address("i8", f.address("i8", rows[row], offset), step * arithmetic.a_bytes)

            def whole() -> list[Value]:
                body = self._body(f, [panel], addresses)
                current: list[Typed] = [(type_, c) for (type_, _), c in zip(start, carried, strict=True)]
                return list(self._all_steps(f, current, "%a_stride", body))

            def zero() -> list[Value]:
                return self._run_of_zeros(f, panel, carried) if arithmetic.head else list(carried)

            present = f.compare("ne", "ptr", rows[0], "null")
            return list(f.if_(present, whole, zero, types=[type_ for type_, _ in start]))

        return f.loop(0, count, 1, start, one)

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

    def _all_steps(self, f: IrFunction, start: list[Typed], k: Value, body: _Body) -> list[str]:
        group, types = self.arithmetic.group, [type_ for type_, _ in start]
        steps: Value = k if group == 1 else f.op(f"udiv i64 {k}, {group}")
        unrolled = f.round_down(steps, self.unroll)
        values = f.loop(0, unrolled, self.unroll, start, lambda i, carried: body(i, carried, self.unroll, None))
        if self.unroll > 1:
            start = list(zip(types, values, strict=True))
            values = f.loop(unrolled, steps, 1, start, lambda i, carried: body(i, carried, 1, None))
        if group > 1:
            left = f.sub(k, f.mul(steps, group))
            start = list(zip(types, values, strict=True))
            end = f.add(steps, f.op(f"udiv i64 {f.add(left, group - 1)}, {group}"))
            values = f.loop(steps, end, 1, start, lambda i, carried: body(i, carried, 1, left))
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
                    self._at(stream * tile.vectors + j).load_b(f, f.address("i8", line, j * arithmetic.b_bytes))
                    for stream, line in enumerate(lines)
                    for j in range(tile.vectors)
                ]
                for row in range(tile.rows):
                    a = arithmetic.load_a(f, a_address(step, row), None if padded else valid)
                    for j, value in enumerate(b):
                        at, used = row * len(b) + j, self._at(j)
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
class TileSet:
    """Micro-kernels of several heights: how rows split into tiles, and which kernel a tile takes."""

    heights: tuple[int, ...]  # tallest first, the last one 1
    vectors: int
    layout: Layout = "rows"
    strided_b: bool = False

    def by_vectors(self, f: IrFunction, arithmetic: GemmArithmetic, vectors: Value) -> list[Value]:
        """For each height, the address of the kernel for panels of so many vectors."""
        result: list[Value] = []
        for height in self.heights:
            kernel: Value = self._micro(f, arithmetic, height, vectors if isinstance(vectors, int) else self.vectors)
            for count in range(1, 1 if isinstance(vectors, int) else self.vectors):
                name = self._micro(f, arithmetic, height, count)
                kernel = f.select("ptr", f.compare("eq", "i64", vectors, count), name, kernel)
            result.append(kernel)
        return result

    def _micro(self, f: IrFunction, arithmetic: GemmArithmetic, height: int, vectors: int) -> str:
        micro = Micro(arithmetic, RegisterTile(height, vectors), self.layout, strided_b=self.strided_b)
        return "@" + micro.emit(f.module)

    def by_height(self, f: IrFunction, left: Value, type_: str, choices: Sequence[Value]) -> Value:
        """The choice that belongs to the tallest height that fits into the rows left."""
        result = choices[-1]
        for height, choice in reversed(list(zip(self.heights[:-1], choices[:-1], strict=True))):
            result = f.select(type_, f.compare("sge", "i64", left, height), choice, result)
        return result

    def count(self, f: IrFunction, rows: Value) -> Value:
        """Tiles of so many rows."""
        total: Value = 0
        for height in self.heights:
            tiles = f.op(f"udiv i64 {rows}, {height}")
            total, rows = f.add(total, tiles), f.sub(rows, f.mul(tiles, height))
        return total

    def over_rows(self, f: IrFunction, rows: Value, body: Callable[[Value, Value], None]) -> None:
        """Tiles of the tallest height, then what is left by the shorter ones: body(first row, height)."""

        def one(_: str, carried: list[str]) -> list[Value]:
            row = carried[0]
            height = self.by_height(f, f.sub(rows, row), "i64", self.heights)
            body(row, height)
            return [f.add(row, height)]

        f.loop(0, self.count(f, rows), 1, [("i64", 0)], one)
