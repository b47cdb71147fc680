"""Packing blocks of A into row tiles, where a matmul cannot read A in place."""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.llvm.gemm.arith import convert
from strata.backends.llvm.gemm.pack_b import transpose, weave
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target


@dataclass(frozen=True, slots=True)
class TilePacker:
    """`void pack_a(source, row stride, k stride, packed, rows, k)`: one tile of A as [k / group][rows][group]."""

    source: DType
    packed: DType
    group: int
    target: Target

    def emit(self, module: IrModule) -> str:
        """Adds the function once and returns its name."""
        name = f"pack_a_{self.source}_{self.packed}" + (f"x{self.group}" if self.group > 1 else "")
        if not module.has(name):
            parameters = [
                ("ptr noalias", "source"), ("i64", "row_stride"), ("i64", "k_stride"), ("ptr noalias", "packed"),
                ("i64", "rows"), ("i64", "k"),
            ]  # fmt: skip
            self._emit(module.outlined(name, parameters))
        return name

    def emit_block(self, module: IrModule, height: int) -> str:
        """`void pack_a(source, row stride, k stride, packed, tiles, k)`: tiles of one height, one after the other."""
        tile = self.emit(module)
        name = f"{tile}_{height}_rows"
        if module.has(name):
            return name
        parameters = [
            ("ptr noalias", "source"), ("i64", "row_stride"), ("i64", "k_stride"), ("ptr noalias", "packed"),
            ("i64", "tiles"), ("i64", "k"),
        ]  # fmt: skip
        f = module.outlined(name, parameters)
        whole_k = f.round_down(f.add("%k", self.group - 1), self.group)

        def one_by_one() -> None:
            def one(index: str, _: list[str]) -> None:
                element = memory_type(self.source)
                row = f.mul(f.mul(index, height), 2 if self.source.is_complex else 1)
                source = f.address(element, "%source", f.mul(row, "%row_stride"))
                place = f.address("i8", "%packed", f.mul(f.mul(index, f.mul(whole_k, height)), self.packed.itemsize))
                f.call(
                    "void", tile, ("ptr", source), ("i64", "%row_stride"), ("i64", "%k_stride"), ("ptr", place),
                    ("i64", height), ("i64", "%k"),
                )  # fmt: skip

            f.loop(0, "%tiles", 1, [], one)

        if self.group > 1 or self.source.is_complex:
            one_by_one()
        else:
            f.if_(f.compare("eq", "i64", "%row_stride", 1), lambda: self._block_along_rows(f, height), one_by_one)
        f.ret()
        return name

    def _block_along_rows(self, f: IrFunction, height: int) -> None:
        """A few k's of all tiles, then the next few: each line of the source is read once, while it is near."""
        element, size = memory_type(self.source), self.source.itemsize
        widths = (8, 4, 2, 1) if self.source is self.packed else (8, 4, 1)
        pieces = []  # (first row, rows) that one vector takes
        row = 0
        while row < height:
            rows = next(n for n in widths if n <= height - row)
            pieces.append((row, rows))
            row += rows
        tile_size = f.mul("%k", height)

        def some(k: str, steps: int) -> None:
            columns = [f.address(element, "%source", f.mul(f.add(k, i), "%k_stride")) for i in range(steps)]

            def one_tile(tile: str, _: list[str]) -> None:
                first = f.add(f.mul(tile, tile_size), f.mul(k, height))
                place = f.address("i8", "%packed", f.mul(first, self.packed.itemsize))
                start = f.mul(tile, height)
                for step, column in enumerate(columns):
                    for row, rows in pieces:
                        address = f.address(element, f.address(element, column, start), row)
                        value = f.load(memory_type(self.source, rows), address, size)
                        value = convert(f, value, self.source, self.packed, rows, self.target)
                        to = f.address("i8", place, (step * height + row) * self.packed.itemsize)
                        f.store(memory_type(self.packed, rows), value, to, self.packed.itemsize)

            f.loop(0, "%tiles", 1, [], one_tile)

        whole = f.round_down("%k", 4)
        f.loop(0, whole, 4, [], lambda k, _: some(k, 4))
        f.loop(whole, "%k", 1, [], lambda k, _: some(k, 1))

    def _emit(self, f: IrFunction) -> None:
        if self.group > 1:
            self._by_groups(f)
        elif self.source.is_complex:
            self._by_elements(f, 0)
        else:
            unit_k, unit_row = f.compare("eq", "i64", "%k_stride", 1), f.compare("eq", "i64", "%row_stride", 1)
            f.if_(
                unit_k,
                lambda: self._along_k(f),
                lambda: f.if_(unit_row, lambda: self._along_rows(f), lambda: self._by_elements(f, 0)),
            )
        f.ret()

    def _place(self, f: IrFunction, k: Value, row: Value) -> str:
        return f.address("i8", "%packed", f.mul(f.add(f.mul(k, "%rows"), row), self.packed.itemsize))

    def _one(self, f: IrFunction, row: Value, k: Value) -> None:
        element, size = memory_type(self.source), self.source.itemsize
        if self.source.is_complex:  # k counts components
            index = f.add(f.mul(row, "%row_stride"), f.mul(f.op(f"lshr i64 {k}, 1"), "%k_stride"))
            index, size = f.add(f.mul(index, 2), f.op(f"and i64 {k}, 1")), size // 2
            value = f.load(element, f.address(element, "%source", index), size)
        else:
            index = f.add(f.mul(row, "%row_stride"), f.mul(k, "%k_stride"))
            value = f.load(element, f.address(element, "%source", index), size)
            value = convert(f, value, self.source, self.packed, 1, self.target)
        f.store(memory_type(self.packed), value, self._place(f, k, row), self.packed.itemsize)

    def _by_elements(self, f: IrFunction, first_row: Value) -> None:
        f.loop(first_row, "%rows", 1, [], lambda row, _: f.loop(0, "%k", 1, [], lambda k, _: self._one(f, row, k)))

    def _by_groups(self, f: IrFunction) -> None:
        """Whole groups as words, or rows interleaved, eight at a time; what is left, element by element."""
        whole = f.round_down("%k", self.group)
        unit_k, unit_row = f.compare("eq", "i64", "%k_stride", 1), f.compare("eq", "i64", "%row_stride", 1)
        eights = f.round_down("%rows", 8)
        f.if_(
            unit_k,
            lambda: self._group_words(f, whole),
            lambda: f.if_(unit_row, lambda: self._woven_rows(f, eights, whole)),
        )
        woven = f.select("i64", unit_k, "%rows", f.select("i64", unit_row, eights, 0))
        self._group_elements(f, woven, 0, whole)
        self._group_elements(f, 0, whole, "%k")

    def _group_place(self, f: IrFunction, k: Value, row: Value) -> str:
        return f.address("i8", "%packed", f.mul(f.add(f.mul(k, "%rows"), f.mul(row, self.group)), self.source.itemsize))

    def _group_words(self, f: IrFunction, whole: Value) -> None:
        element, word, size = (
            memory_type(self.source),
            f"i{8 * self.group * self.source.itemsize}",
            self.source.itemsize,
        )

        def one_row(row: str, _: list[str]) -> None:
            start = f.address(element, "%source", f.mul(row, "%row_stride"))

            def one(k: str, _: list[str]) -> None:
                f.store(word, f.load(word, f.address(element, start, k), size), self._group_place(f, k, row), size)

            f.loop(0, whole, self.group, [], one)

        f.loop(0, "%rows", 1, [], one_row)

    def _woven_rows(self, f: IrFunction, rows: Value, whole: Value) -> None:
        element, eight, size = memory_type(self.source), memory_type(self.source, 8), self.source.itemsize

        def step(k: str, _: list[str]) -> None:
            columns = [f.address(element, "%source", f.mul(f.add(k, i), "%k_stride")) for i in range(self.group)]

            def some(row: str, _: list[str]) -> None:
                value = weave(f, eight, [f.load(eight, f.address(element, c, row), size) for c in columns])
                f.store(memory_type(self.source, 8 * self.group), value, self._group_place(f, k, row), size)

            f.loop(0, rows, 8, [], some)

        f.loop(0, whole, self.group, [], step)

    def _group_elements(self, f: IrFunction, first_row: Value, low: Value, high: Value) -> None:
        element, size = memory_type(self.source), self.source.itemsize

        def step(k: str, _: list[str]) -> None:
            count = f.smin(self.group, f.sub("%k", k))

            def one_row(row: str, _: list[str]) -> None:
                place = self._group_place(f, k, row)
                f.store(memory_type(self.source, self.group), "zeroinitializer", place, size)

                def one(inner: str, _: list[str]) -> None:
                    index = f.add(f.mul(row, "%row_stride"), f.mul(f.add(k, inner), "%k_stride"))
                    value = f.load(element, f.address(element, "%source", index), size)
                    f.store(element, value, f.address(element, place, inner), size)

                f.loop(0, count, 1, [], one)

            f.loop(first_row, "%rows", 1, [], one_row)

        f.loop(low, high, self.group, [], step)

    def _along_k(self, f: IrFunction) -> None:
        element, four, align = memory_type(self.source), memory_type(self.source, 4), self.source.itemsize
        whole, fours = f.round_down("%k", 4), f.round_down("%rows", 4)

        def square(row: str, k: str) -> None:
            corner = f.address(element, f.address(element, "%source", f.mul(row, "%row_stride")), k)
            rows = [f.load(four, f.address(element, corner, f.mul("%row_stride", i)), align) for i in range(4)]
            for i, value in enumerate(transpose(f, four, rows)):
                self._put_four(f, value, f.add(k, i), row)

        def four_rows(row: str, _: list[str]) -> None:
            def one_k(k: str, _: list[str]) -> None:
                for i in range(4):
                    self._one(f, f.add(row, i), k)

            f.loop(0, whole, 4, [], lambda k, _: square(row, k))
            f.loop(whole, "%k", 1, [], one_k)

        f.loop(0, fours, 4, [], four_rows)
        self._by_elements(f, fours)

    def _along_rows(self, f: IrFunction) -> None:
        element, four, align = memory_type(self.source), memory_type(self.source, 4), self.source.itemsize
        fours = f.round_down("%rows", 4)

        def one_k(k: str, _: list[str]) -> None:
            column = f.address(element, "%source", f.mul(k, "%k_stride"))

            def four_rows(row: str, _: list[str]) -> None:
                self._put_four(f, f.load(four, f.address(element, column, row), align), k, row)

            f.loop(0, fours, 4, [], four_rows)
            f.loop(fours, "%rows", 1, [], lambda row, _: self._one(f, row, k))

        f.loop(0, "%k", 1, [], one_k)

    def _put_four(self, f: IrFunction, value: str, k: Value, row: Value) -> None:
        value = convert(f, value, self.source, self.packed, 4, self.target)
        f.store(memory_type(self.packed, 4), value, self._place(f, k, row), self.packed.itemsize)
