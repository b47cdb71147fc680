"""Packing: B into panels of columns, once for weights or per call, and blocks of A into tiles of rows.

Packed B is `[panel][k / group][panel columns][group]` over the whole of k, so any block of k is contiguous. The last
panel is as wide as its columns rounded up to whole vectors; what lies past the end, in n or in k, is zero.

A complex matrix is packed as the real one that multiplies interleaved rows: an element becomes [[re, im], [-im, re]].

    void pack(ptr args, i64 begin, i64 end)      args: PACK_SLOTS, sizes and strides in elements

hands out one panel of one batch per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.builder import Function, Module, Value, vector
from strata.backends.llvm.gemm_arith import convert
from strata.backends.llvm.registers import memory_type
from strata.core import DType, Target

ROWS_AHEAD: Final = 8  # of B that are fetched while one is packed
PACK_SLOTS: Final = ("source", "packed", "n", "k", "k_stride", "n_stride", "source_batch", "packed_batch")

# load(f, source, k, n, lanes, mask or None) -> vector of packed elements; replaces the plain strided load of B
LoadB = Callable[[Function, str, Value, Value, int, "str | None"], str]


@dataclass(frozen=True, slots=True)
class Panels:
    """How B is packed: element types, lanes of one vector, vectors of one panel, k's side by side."""

    source: DType
    packed: DType
    lanes: int
    vectors: int
    group: int
    target: Target

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors

    @property
    def is_plain(self) -> bool:
        """A k at a time, whole numbers of elements, vectors that can be transposed."""
        return self.lanes >= 4 and self.group == 1 and self.parts == 1

    @property
    def parts(self) -> int:
        """Real columns and k's that stand for one."""
        return 2 if self.source.is_complex else 1

    @property
    def name(self) -> str:
        group = f"x{self.group}" if self.group > 1 else ""
        return f"pack_{self.source}_{self.packed}_{self.lanes}x{self.vectors}{group}"

    def size(self, n: int, k: int) -> int:
        """Packed elements of one matrix of `n` by `k` source elements."""
        return -(-k * self.parts // self.group) * self.group * -(-n * self.parts // self.lanes) * self.lanes

    def chunks(self, n: int, batch: int = 1) -> int:
        return batch * -(-n * self.parts // self.columns)


def transpose(f: Function, type_: str, rows: list[str]) -> list[str]:
    """As many vectors as lanes, transposed by halving distances."""
    lanes = len(rows)
    distance = lanes // 2
    result = list(rows)
    while distance:
        for i in range(lanes):
            if i & distance:
                continue
            low, high = result[i], result[i + distance]
            first = [lanes + lane - distance if lane & distance else lane for lane in range(lanes)]
            second = [lanes + lane if lane & distance else lane + distance for lane in range(lanes)]
            result[i] = f.shuffle(type_, low, high, first)
            result[i + distance] = f.shuffle(type_, low, high, second)
        distance //= 2
    return result


def emit_pack_b(module: Module, panels: Panels, name: str | None = None, load: LoadB | None = None) -> str:
    """The kernel that packs B; with `load`, its values come from that expression instead of memory."""
    name = name or panels.name
    if module.has(name):
        return name
    f = module.function(name, [("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")])
    source, packed = (f.load("ptr", f.address("i64", "%args", i), 8) for i in range(2))
    n, k, k_stride, n_stride, source_batch, packed_batch = (
        f.load("i64", f.address("i64", "%args", i), 8) for i in range(2, len(PACK_SLOTS))
    )
    real_n, real_k = f.mul(n, panels.parts), f.mul(k, panels.parts)
    size = panels.packed.itemsize
    whole_k = f.round_down(f.add(real_k, panels.group - 1), panels.group)
    per_batch = f.op(f"udiv i64 {f.add(real_n, panels.columns - 1)}, {panels.columns}")

    def chunk(index: str, _: list[str]) -> None:
        batch = f.op(f"udiv i64 {index}, {per_batch}")
        column = f.mul(f.sub(index, f.mul(batch, per_batch)), panels.columns)
        origin = f.address(memory_type(panels.source), source, f.mul(f.mul(batch, source_batch), panels.parts))
        base = f.address("i8", packed, f.mul(f.add(f.mul(batch, packed_batch), f.mul(column, whole_k)), size))
        pack_panel(f, panels, origin, base, column, real_n, real_k, k_stride, n_stride, load)

    f.loop("%begin", "%end", 1, [], chunk)
    f.ret()
    return name


def pack_panel(
    f: Function, panels: Panels, origin: str, base: str, column: Value, n: Value, k: Value, k_stride: Value,
    n_stride: Value, load: LoadB | None = None,
) -> None:  # fmt: skip
    """Emits the packing of the panel that starts at a column of an n by k matrix, to `base`."""
    left = f.smin(f.sub(n, column), panels.columns)
    width = f.round_down(f.add(left, panels.lanes - 1), panels.lanes)

    def vector_columns(at: str, _: list[str]) -> None:
        place = f.address("i8", base, f.mul(at, panels.packed.itemsize * panels.group))
        at_column, behind = f.add(column, at), f.sub(left, at)
        _Packer(f, panels, origin, place, at_column, behind, k, width, k_stride, n_stride).pack(load)

    def by_vectors() -> None:
        f.loop(0, left, panels.lanes, [], vector_columns)

    if load is not None or not panels.is_plain:
        by_vectors()
        return
    whole = f.compare("eq", "i64", left, panels.columns)
    in_rows = f.binary("and", "i1", whole, f.compare("eq", "i64", n_stride, 1))
    f.if_(in_rows, lambda: _copy_rows(f, panels, origin, base, column, k, k_stride), by_vectors)


def _copy_rows(f: Function, panels: Panels, origin: str, base: str, column: Value, k: Value, k_stride: Value) -> None:
    """A whole panel of a matrix whose columns are next to each other: its part of each row, fetched ahead."""
    element, align = memory_type(panels.source), panels.source.itemsize
    raw, kept = memory_type(panels.source, panels.lanes), memory_type(panels.packed, panels.lanes)
    start, size = f.address(element, origin, column), panels.packed.itemsize
    steps = [f.mul(k_stride, i) for i in range(ROWS_AHEAD + 4)]

    def some(at: str, count: int) -> None:
        row = f.address(element, start, f.mul(at, k_stride))
        to = f.address("i8", base, f.mul(at, panels.columns * size))
        for i in range(count):
            for line in range(0, panels.columns * align, 64):
                f.prefetch(f.address("i8", f.address(element, row, steps[i + ROWS_AHEAD]), line))
            for v in range(panels.vectors):
                place = f.address(element, f.address(element, row, steps[i]), v * panels.lanes)
                value = convert(f, f.load(raw, place, align), panels.source, panels.packed, panels.lanes, panels.target)
                f.store(kept, value, f.address("i8", to, (i * panels.columns + v * panels.lanes) * size), size)

    fours = f.round_down(k, 4)
    f.loop(0, fours, 4, [], lambda at, _: some(at, 4))
    f.loop(fours, k, 1, [], lambda at, _: some(at, 1))


@dataclass(frozen=True, slots=True)
class _Packer:
    """Packs one vector of columns over all of k."""

    f: Function
    panels: Panels
    origin: str
    place: str
    column: Value
    left: Value  # columns from here to the end, perhaps more than one vector
    k: Value
    width: Value  # of the panel
    k_stride: Value
    n_stride: Value

    def pack(self, load: LoadB | None) -> None:
        f, panels = self.f, self.panels
        if load is not None and panels.group == 1:
            self._each_k(lambda k, mask: load(f, self.origin, k, self.column, panels.lanes, mask))
            return
        if not panels.is_plain:
            self._by_elements(0, load)
            return
        unit_n, unit_k = f.compare("eq", "i64", self.n_stride, 1), f.compare("eq", "i64", self.k_stride, 1)
        f.if_(unit_n, self._along_columns, lambda: f.if_(unit_k, self._along_k, lambda: self._by_elements(0)))

    def _put(self, k: Value, value: str) -> None:
        """One step's vector; k is a multiple of the group."""
        f, panels = self.f, self.panels
        size = panels.packed.itemsize
        place = f.address("i8", self.place, f.mul(f.mul(k, self.width), size))
        f.store(memory_type(panels.packed, panels.lanes * panels.group), value, place, size)

    def _each_k(self, value: Callable[[Value, str | None], str]) -> None:
        """One vector per k, masked when some of its columns are past the end."""
        f, lanes = self.f, self.panels.lanes

        def all_k(mask: str | None) -> None:
            f.loop(0, self.k, 1, [], lambda k, _: self._put(k, value(k, mask)))

        full = f.compare("sge", "i64", self.left, lanes)
        f.if_(full, lambda: all_k(None), lambda: all_k(f.mask_below(lanes, self.left)))

    def _along_columns(self) -> None:
        f, panels = self.f, self.panels
        element, align = memory_type(panels.source), panels.source.itemsize
        raw = memory_type(panels.source, panels.lanes)
        start = f.address(element, self.origin, self.column)

        def value(k: Value, mask: str | None) -> str:
            row = f.address(element, start, f.mul(k, self.k_stride))
            loaded = f.load(raw, row, align) if mask is None else f.masked_load(raw, row, align, mask)
            return convert(f, loaded, panels.source, panels.packed, panels.lanes, panels.target)

        self._each_k(value)

    def _along_k(self) -> None:
        """Squares of columns by k's, transposed in registers: whole lines of the source at a time, then fours."""
        f, panels = self.f, self.panels
        full = f.compare("sge", "i64", self.left, panels.lanes)
        packed: Value = 0
        for side in dict.fromkeys((panels.lanes if panels.source is panels.packed else 4, 4)):
            end = f.select("i64", full, f.round_down(self.k, side), 0)
            self._squares(side, packed, end)
            packed = end
        self._by_elements(packed)

    def _squares(self, side: int, low: Value, high: Value) -> None:
        f, panels = self.f, self.panels
        element, size = memory_type(panels.source), panels.packed.itemsize
        raw, kept = memory_type(panels.source, side), memory_type(panels.packed, side)
        start = f.address(element, self.origin, f.mul(self.column, self.n_stride))
        columns = [f.mul(self.n_stride, i) for i in range(side)]  # distances in elements of the source
        steps = [f.mul(self.width, i * size) for i in range(side)]  # and of k's in bytes of what is packed

        def some_k(k: str, _: list[str]) -> None:
            source, to = f.address(element, start, k), f.address("i8", self.place, f.mul(k, steps[1]))

            def square(lane: str, _: list[str]) -> None:
                corner = f.address(element, source, f.mul(lane, self.n_stride))
                rows = [f.load(raw, f.address(element, corner, c), panels.source.itemsize) for c in columns]
                place = f.address("i8", to, f.mul(lane, size))
                for step, value in zip(steps, transpose(f, raw, rows), strict=True):
                    packed = convert(f, value, panels.source, panels.packed, side, panels.target)
                    f.store(kept, packed, f.address("i8", place, step), size)

            f.loop(0, panels.lanes, side, [], square)

        f.loop(low, high, side, [], some_k)

    def _by_elements(self, low: Value, load: LoadB | None = None) -> None:
        f, panels = self.f, self.panels
        kept, size = memory_type(panels.packed), panels.packed.itemsize
        count = f.smin(self.left, panels.lanes)

        def step(k: str, _: list[str]) -> None:
            self._put(k, "zeroinitializer" if panels.lanes * panels.group > 1 else "0.0")
            to = f.address("i8", self.place, f.mul(f.mul(k, self.width), size))

            def one_k(inner: str, _: list[str]) -> None:
                def one(lane: str, _: list[str]) -> None:
                    at_k, column = f.add(k, inner), f.add(self.column, lane)
                    value = load(f, self.origin, at_k, column, 1, None) if load else self._element(at_k, column)
                    index = f.add(f.mul(lane, panels.group), inner)
                    f.store(kept, value, f.address("i8", to, f.mul(index, size)), size)

                f.loop(0, count, 1, [], one)

            f.loop(0, f.smin(panels.group, f.sub(self.k, k)), 1, [], one_k)

        f.loop(low, self.k, panels.group, [], step)

    def _element(self, k: Value, n: Value) -> str:
        f, panels = self.f, self.panels
        element, size = memory_type(panels.source), panels.source.itemsize // panels.parts
        if panels.parts == 1:
            index = f.add(f.mul(k, self.k_stride), f.mul(n, self.n_stride))
            value = f.load(element, f.address(element, self.origin, index), size)
            return convert(f, value, panels.source, panels.packed, 1, panels.target)
        k_part, n_part = f.op(f"and i64 {k}, 1"), f.op(f"and i64 {n}, 1")
        k_index, n_index = f.op(f"lshr i64 {k}, 1"), f.op(f"lshr i64 {n}, 1")
        index = f.add(f.mul(k_index, self.k_stride), f.mul(n_index, self.n_stride))
        part = f.op(f"xor i64 {k_part}, {n_part}")
        value = f.load(element, f.address(element, self.origin, f.add(f.mul(index, 2), part)), size)
        negated = f.compare("sgt", "i64", k_part, n_part)
        return f.select(element, negated, f.op(f"fneg {element} {value}"), value, uniform=True)


@dataclass(frozen=True, slots=True)
class TilePacker:
    """`void pack_a(source, row stride, k stride, packed, rows, k)`: one tile of A as [k / group][rows][group]."""

    source: DType
    packed: DType
    group: int
    target: Target

    def emit(self, module: Module) -> str:
        """Adds the function once and returns its name."""
        name = f"pack_a_{self.source}_{self.packed}" + (f"x{self.group}" if self.group > 1 else "")
        if not module.has(name):
            parameters = [
                ("ptr noalias", "source"), ("i64", "row_stride"), ("i64", "k_stride"), ("ptr noalias", "packed"),
                ("i64", "rows"), ("i64", "k"),
            ]  # fmt: skip
            self._emit(module.function(name, parameters, attributes="nounwind noinline", linkage="internal"))
        return name

    def emit_block(self, module: Module, height: int) -> str:
        """`void pack_a(source, row stride, k stride, packed, tiles, k)`: tiles of one height, one behind the other."""
        tile = self.emit(module)
        name = f"{tile}_{height}_rows"
        if module.has(name):
            return name
        parameters = [
            ("ptr noalias", "source"), ("i64", "row_stride"), ("i64", "k_stride"), ("ptr noalias", "packed"),
            ("i64", "tiles"), ("i64", "k"),
        ]  # fmt: skip
        f = module.function(name, parameters, attributes="nounwind noinline", linkage="internal")
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

    def _block_along_rows(self, f: Function, height: int) -> None:
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

    def _emit(self, f: Function) -> None:
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

    def _place(self, f: Function, k: Value, row: Value) -> str:
        return f.address("i8", "%packed", f.mul(f.add(f.mul(k, "%rows"), row), self.packed.itemsize))

    def _one(self, f: Function, row: Value, k: Value) -> None:
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

    def _by_elements(self, f: Function, first_row: Value) -> None:
        f.loop(first_row, "%rows", 1, [], lambda row, _: f.loop(0, "%k", 1, [], lambda k, _: self._one(f, row, k)))

    def _by_groups(self, f: Function) -> None:
        group = vector("i8", self.group)

        def step(k: str, _: list[str]) -> None:
            count = f.smin(self.group, f.sub("%k", k))

            def one_row(row: str, _: list[str]) -> None:
                place = f.address("i8", "%packed", f.add(f.mul(k, "%rows"), f.mul(row, self.group)))
                f.store(group, "zeroinitializer", place, 1)

                def one(inner: str, _: list[str]) -> None:
                    index = f.add(f.mul(row, "%row_stride"), f.mul(f.add(k, inner), "%k_stride"))
                    f.store("i8", f.load("i8", f.address("i8", "%source", index), 1), f.address("i8", place, inner), 1)

                f.loop(0, count, 1, [], one)

            f.loop(0, "%rows", 1, [], one_row)

        f.loop(0, "%k", self.group, [], step)

    def _along_k(self, f: Function) -> None:
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

    def _along_rows(self, f: Function) -> None:
        element, four, align = memory_type(self.source), memory_type(self.source, 4), self.source.itemsize
        fours = f.round_down("%rows", 4)

        def one_k(k: str, _: list[str]) -> None:
            column = f.address(element, "%source", f.mul(k, "%k_stride"))

            def four_rows(row: str, _: list[str]) -> None:
                self._put_four(f, f.load(four, f.address(element, column, row), align), k, row)

            f.loop(0, fours, 4, [], four_rows)
            f.loop(fours, "%rows", 1, [], lambda row, _: self._one(f, row, k))

        f.loop(0, "%k", 1, [], one_k)

    def _put_four(self, f: Function, value: str, k: Value, row: Value) -> None:
        value = convert(f, value, self.source, self.packed, 4, self.target)
        f.store(memory_type(self.packed, 4), value, self._place(f, k, row), self.packed.itemsize)
