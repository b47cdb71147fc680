"""The register micro-kernel of every contraction: a few rows times a few panels of packed B, over all of one k block.

    void micro(ptr a, i64 a_stride, ptr b, i64 panel_stride, ptr c, i64 c_stride, i64 k, i64 resume)

C is a buffer of the accumulator's type. The sums start at zero, or at what C holds when `resume` is not 0, and each one takes
its products in order of k. A block of k can therefore end anywhere without a change in a single bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.llvm.builder import Function, Module, Value
from strata.backends.llvm.gemm_arith import Arithmetic


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, vectors in one panel, and how many panels are read side by side."""

    rows: int
    vectors: int
    streams: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.vectors}" + (f"x{self.streams}" if self.streams > 1 else "")

    @property
    def sums(self) -> int:
        """Vector registers that hold sums."""
        return self.rows * self.vectors * self.streams


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-kernel: its tile, how A lies (`packed`: tiles of [k][rows]; else rows with unit k stride)."""

    arithmetic: Arithmetic
    tile: Tile
    packed: bool
    prefetch: int = 0  # k's ahead in B; 0 leaves it to the processor

    @property
    def unroll(self) -> int:
        """k's in one turn of the loop: enough that its control hides behind a dozen multiplications, no more code than that."""
        return 4 if self.tile.sums <= 4 else 2 if self.tile.sums <= 8 else 1

    @property
    def name(self) -> str:
        types = "_".join(d.name for d in (self.arithmetic.a, self.arithmetic.b, self.arithmetic.accumulator))
        ahead = f"_ahead{self.prefetch}" if self.prefetch else ""
        return f"micro_{types}_{self.tile}_{'packed' if self.packed else 'rows'}{ahead}"

    def emit(self, module: Module) -> str:
        """Adds the function once and returns its name."""
        if not module.has(self.name):
            self._emit(module)
        return self.name

    def call(
        self, f: Function, a: Value, a_stride: Value, b: Value, panel_stride: Value, c: Value, c_stride: Value, k: Value,
        resume: Value,
    ) -> None:  # fmt: skip
        name = self.emit(f.module)
        f.call(
            "void", name, ("ptr", a), ("i64", a_stride), ("ptr", b), ("i64", panel_stride), ("ptr", c), ("i64", c_stride),
            ("i64", k), ("i64", resume),
        )  # fmt: skip

    def _emit(self, module: Module) -> None:
        arithmetic, tile = self.arithmetic, self.tile
        parameters = [
            ("ptr noalias", "a"), ("i64", "a_stride"), ("ptr noalias", "b"), ("i64", "panel_stride"), ("ptr noalias", "c"),
            ("i64", "c_stride"), ("i64", "k"), ("i64", "resume"),
        ]  # fmt: skip
        f = module.function(self.name, parameters, attributes="nounwind noinline", linkage="internal")
        row_bytes = f.mul("%c_stride", arithmetic.size)
        rows = [f.address("i8", "%c", f.mul(i, row_bytes)) for i in range(tile.rows)]
        start = self._initial(f, rows)
        a_steps = self._row_steps(f)
        panel_bytes = f.mul("%panel_stride", arithmetic.b.itemsize)
        panels = [f.address("i8", "%b", f.mul(s, panel_bytes)) for s in range(tile.streams)]
        whole = f.round_down("%k", self.unroll)
        body = self._body(f, panels, a_steps)
        sums = f.loop(0, whole, self.unroll, start, lambda k, sums: body(k, sums, self.unroll))
        if self.unroll > 1:
            sums = f.loop(whole, "%k", 1, [(arithmetic.type, s) for s in sums], lambda k, sums: body(k, sums, 1))
        for (row, place), value in zip(self._places(), sums, strict=True):
            f.store(arithmetic.type, value, f.address("i8", rows[row], place), arithmetic.size)
        f.ret()

    def _places(self) -> list[tuple[int, int]]:
        """(row, byte offset in the row) of each sum."""
        step = self.arithmetic.lanes * self.arithmetic.size
        across = self.tile.vectors * self.tile.streams
        return [(row, column * step) for row in range(self.tile.rows) for column in range(across)]

    def _initial(self, f: Function, rows: list[str]) -> list[tuple[str, Value]]:
        type_, size = self.arithmetic.type, self.arithmetic.size

        def resumed() -> list[Value]:
            return [f.load(type_, f.address("i8", rows[row], place), size) for row, place in self._places()]

        count = self.tile.sums
        values = f.if_(
            f.compare("ne", "i64", "%resume", 0), resumed, lambda: ["zeroinitializer"] * count, types=[type_] * count
        )
        return [(type_, value) for value in values]

    def _row_steps(self, f: Function) -> list[Value]:
        """Odd multiples of A's row stride in bytes: with the processor's scales 1, 2, 4, 8 they reach every row."""
        if self.packed:
            return []
        stride = f.mul("%a_stride", self.arithmetic.a.itemsize)
        return [f.mul(stride, odd) for odd in range(1, self.tile.rows, 2)]

    def _body(self, f: Function, panels: list[str], a_steps: list[Value]):  # noqa: ANN202
        arithmetic, tile = self.arithmetic, self.tile
        b_size = arithmetic.b.itemsize
        width = tile.vectors * arithmetic.lanes * b_size  # bytes of one k in a panel
        a_size = arithmetic.a.itemsize

        def a_address(base: str, k: int, row: int) -> str:
            if self.packed:
                return f.address("i8", base, (k * tile.rows + row) * a_size)
            if row == 0:
                return f.address("i8", base, k * a_size)
            scale = row & -row
            step = a_steps[(row // scale) // 2]
            offset = step if scale == 1 else f.op(f"shl i64 {step}, {scale.bit_length() - 1}")
            return f.address("i8", f.address("i8", base, offset), k * a_size)

        def body(k: str, sums: list[str], unroll: int) -> list[Value]:
            a_base = f.address("i8", "%a", f.mul(k, tile.rows * a_size if self.packed else a_size))
            b_bases = [f.address("i8", panel, f.mul(k, width)) for panel in panels]
            totals = list(sums)
            for u in range(unroll):
                if self.prefetch:
                    for base in b_bases:
                        for line in range(0, width, 64):
                            f.prefetch(f.address("i8", base, (u + self.prefetch) * width + line))
                b = [
                    arithmetic.load_b(f, f.address("i8", base, u * width + j * arithmetic.lanes * b_size))
                    for base in b_bases
                    for j in range(tile.vectors)
                ]
                for row in range(tile.rows):
                    a = arithmetic.load_a(f, a_address(a_base, u, row))
                    for j, value in enumerate(b):
                        at = row * len(b) + j
                        totals[at] = arithmetic.step(f, a, value, totals[at])
            return list(totals)

        return body
