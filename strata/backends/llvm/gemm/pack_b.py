"""Packing B into column panels: once for weights, otherwise in each call.

Packed B is `[panel][k / group][panel columns][group]` over the whole of k, so any block of k is contiguous. The last
panel is as wide as its columns rounded up to whole vectors; what lies past the end, in n or in k, is zero. A panel may
begin with a head, as large as a group of k's: what the sums of its columns start at.

A complex matrix is packed as the real one that multiplies interleaved rows: an element becomes [[re, im], [-im, re]].

    void pack(ptr args, i64 begin, i64 end)      args: PACK_SLOTS, sizes and strides in elements

hands out one panel of one batch per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.gemm.arith import GemmArithmetic, convert
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, element_of, lanes_of, vector
from strata.backends.llvm.ir.native import each_point, template
from strata.backends.llvm.ir.registers import memory_type
from strata.core import Dim, DType, Target, i32

ROWS_AHEAD: Final = 8  # of B that are fetched while one is packed
PACK_SLOTS: Final = ("source", "packed", "n", "k", "k_stride", "n_stride", "source_batch", "packed_batch")

# load(f, source, k, n, lanes, mask or None) -> vector of packed elements; replaces the plain strided load of B
LoadB = Callable[[IrFunction, str, Value, Value, int, "str | None"], str]


@dataclass(frozen=True, slots=True)
class Panels:
    """How B is packed: element types, lanes of one vector, vectors of one panel, k's side by side."""

    source: DType
    packed: DType
    lanes: int
    vectors: int
    group: int
    target: Target
    head: int = 0  # k's whose place a head takes

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors

    @property
    def is_plain(self) -> bool:
        """Whole numbers of elements, vectors that can be transposed."""
        is_same = self.group == 1 or self.source is self.packed
        return self.lanes >= 4 and is_same and self.parts == 1

    @property
    def word(self) -> str:
        """The type of a group of k's in memory."""
        return memory_type(self.source) if self.group == 1 else f"i{8 * self.source.itemsize * self.group}"

    @property
    def parts(self) -> int:
        """Real columns and k's that stand for one."""
        return 2 if self.source.is_complex else 1

    @property
    def name(self) -> str:
        group = (f"x{self.group}" if self.group > 1 else "") + ("_head" if self.head else "")
        return f"pack_{self.source}_{self.packed}_{self.lanes}x{self.vectors}{group}"

    def size(self, n: int, k: int) -> int:
        """Packed elements of one matrix of `n` by `k` source elements."""
        elements = self.elements(n, k)
        assert isinstance(elements, int)
        return elements

    def elements(self, n: Dim, k: Dim) -> Dim:
        """The same for sizes that may be symbols."""
        groups = (k * self.parts + (self.group - 1)) // self.group
        vectors = (n * self.parts + (self.lanes - 1)) // self.lanes
        return (groups * self.group + self.head) * vectors * self.lanes

    def chunks(self, n: int, batch: int = 1) -> int:
        return batch * -(-n * self.parts // self.columns)


def transpose(f: IrFunction, type_: str, rows: list[str]) -> list[str]:
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


def emit_pack_b(module: IrModule, panels: Panels, name: str | None = None, load: LoadB | None = None) -> str:
    """The kernel that packs B; with `load`, its values come from that expression instead of memory."""
    name = name or panels.name
    if module.has(name):
        return name
    f = template(module, name)
    source, packed = (f.load("ptr", f.address("i64", "%args", i), 8) for i in range(2))
    n, k, k_stride, n_stride, source_batch, packed_batch = (
        f.load("i64", f.address("i64", "%args", i), 8) for i in range(2, len(PACK_SLOTS))
    )
    real_n, real_k = f.mul(n, panels.parts), f.mul(k, panels.parts)
    size = panels.packed.itemsize
    whole_k = f.round_down(f.add(real_k, panels.group - 1), panels.group)
    per_batch = f.ceil_div(real_n, panels.columns)

    def chunk(index: str, _: list[str]) -> None:
        batch, panel = f.divided(index, per_batch)
        column = f.mul(panel, panels.columns)
        origin = f.address(memory_type(panels.source), source, f.mul(f.mul(batch, source_batch), panels.parts))
        before = f.mul(column, f.add(whole_k, panels.head))
        base = f.address("i8", packed, f.mul(f.add(f.mul(batch, packed_batch), before), size))
        pack_panel(f, panels, origin, base, column, real_n, real_k, k_stride, n_stride, load)

    each_point(f, chunk)
    return name


def pack_panel(
    f: IrFunction, panels: Panels, origin: str, base: str, column: Value, n: Value, k: Value, k_stride: Value,
    n_stride: Value, load: LoadB | None = None,
) -> None:  # fmt: skip
    """Emits the packing of the panel that starts at a column of an n by k matrix, to `base`."""
    left = f.smin(f.sub(n, column), panels.columns)
    width = f.round_down(f.add(left, panels.lanes - 1), panels.lanes)
    base = f.address("i8", base, f.mul(width, panels.head * panels.packed.itemsize))

    def each_vector(pack: Callable[[_Packer], None]) -> None:
        def one(at: str, _: list[str]) -> None:
            place = f.address("i8", base, f.mul(at, panels.packed.itemsize * panels.group))
            at_column, behind = f.add(column, at), f.sub(left, at)
            pack(_Packer(f, panels, origin, place, at_column, behind, k, width, k_stride, n_stride))

        f.loop(0, left, panels.lanes, [], one)

    def by_vectors() -> None:
        each_vector(lambda packer: packer.pack(load))

    def by_rows() -> None:
        if panels.group == 1:
            _copy_rows(f, panels, origin, base, column, k, k_stride)
            return
        woven = _interleave_rows(f, panels, origin, base, column, k, k_stride)
        each_vector(lambda packer: packer.by_elements(woven))

    if load is not None or not panels.is_plain:
        by_vectors()
    else:
        whole = f.compare("eq", "i64", left, panels.columns)
        f.if_(f.binary("and", "i1", whole, f.compare("eq", "i64", n_stride, 1)), by_rows, by_vectors)
    if panels.head:
        _write_head(f, panels, base, width, k)


def _write_head(f: IrFunction, panels: Panels, base: str, width: Value, k: Value) -> None:
    """What the sums of a packed panel's columns start at."""
    arithmetic = GemmArithmetic(panels.packed, panels.packed, i32, panels.target)
    steps = f.ceil_div(k, panels.group)
    step_bytes = f.mul(width, panels.group)

    def one(at: str, _: list[str]) -> None:
        start = f.address("i8", base, f.mul(at, panels.group))

        def add(step: str, sums: list[str]) -> list[Value]:
            b = arithmetic.load_b(f, f.address("i8", start, f.mul(step, step_bytes)))
            return [arithmetic.shift_step(f, b, sums[0])]

        (total,) = f.loop(0, steps, 1, [(arithmetic.type, "zeroinitializer")], add)
        f.store(arithmetic.type, arithmetic.start(f, total), f.address("i8", start, f.sub(0, step_bytes)), 1)

    f.loop(0, width, panels.lanes, [], one)


def _copy_rows(f: IrFunction, panels: Panels, origin: str, base: str, column: Value, k: Value, k_stride: Value) -> None:
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


def _interleave_rows(
    f: IrFunction, panels: Panels, origin: str, base: str, column: Value, k: Value, k_stride: Value
) -> Value:
    """As `_copy_rows`, the rows of a group element by element; returns the k's of whole groups, which it has packed."""
    element, align, group = memory_type(panels.source), panels.source.itemsize, panels.group
    raw, kept = memory_type(panels.source, panels.lanes), memory_type(panels.packed, panels.lanes * group)
    start, whole = f.address(element, origin, column), f.round_down(k, group)
    steps = [f.mul(k_stride, i) for i in range(ROWS_AHEAD + group)]

    def some(at: str, _: list[str]) -> None:
        row = f.address(element, start, f.mul(at, k_stride))
        to = f.address("i8", base, f.mul(at, panels.columns * align))
        for i in range(group):
            for line in range(0, panels.columns * align, 64):
                f.prefetch(f.address("i8", f.address(element, row, steps[i + ROWS_AHEAD]), line))
        for v in range(panels.vectors):
            places = [f.address(element, f.address(element, row, steps[i]), v * panels.lanes) for i in range(group)]
            value = weave(f, raw, [f.load(raw, place, align) for place in places])
            f.store(kept, value, f.address("i8", to, v * panels.lanes * group * align), align)

    f.loop(0, whole, group, [], some)
    return whole


def weave(f: IrFunction, type_: str, rows: list[str]) -> str:
    """The first elements of all rows, then the second ones, and so on; rows are as many as a power of two."""
    if len(rows) == 1:
        return rows[0]
    lanes, half = lanes_of(type_), vector(element_of(type_), lanes_of(type_) * len(rows) // 2)
    even, odd = weave(f, type_, rows[::2]), weave(f, type_, rows[1::2])
    count = lanes * len(rows) // 2
    return f.shuffle(half, even, odd, [x for i in range(count) for x in (i, count + i)])


@dataclass(frozen=True, slots=True)
class _Packer:
    """Packs one vector of columns over all of k."""

    f: IrFunction
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
        if load is not None or not panels.is_plain:
            self.by_elements(0, load)
            return
        unit_n, unit_k = f.compare("eq", "i64", self.n_stride, 1), f.compare("eq", "i64", self.k_stride, 1)
        f.if_(unit_n, self._along_columns, lambda: f.if_(unit_k, self._along_k, lambda: self.by_elements(0)))

    def _put(self, k: Value, value: str) -> None:
        """One step's vector; k is a multiple of the group."""
        f, panels = self.f, self.panels
        size = panels.packed.itemsize
        place = f.address("i8", self.place, f.mul(f.mul(k, self.width), size))
        f.store(memory_type(panels.packed, panels.lanes * panels.group), value, place, size)

    def _each_k(self, value: Callable[[Value, str | None], str]) -> None:
        """One vector per whole group of k's, masked when some of its columns are past the end."""
        f, lanes, group = self.f, self.panels.lanes, self.panels.group

        def all_k(mask: str | None) -> None:
            f.loop(0, f.round_down(self.k, group), group, [], lambda k, _: self._put(k, value(k, mask)))

        full = f.compare("sge", "i64", self.left, lanes)
        f.if_(full, lambda: all_k(None), lambda: all_k(f.mask_below(lanes, self.left)))

    def _along_columns(self) -> None:
        f, panels = self.f, self.panels
        element, align = memory_type(panels.source), panels.source.itemsize
        raw = memory_type(panels.source, panels.lanes)
        start = f.address(element, self.origin, self.column)

        def value(k: Value, mask: str | None) -> str:
            row = f.address(element, start, f.mul(k, self.k_stride))
            loaded = f.load(raw, row, align, mask)
            return convert(f, loaded, panels.source, panels.packed, panels.lanes, panels.target)

        if panels.group == 1:
            self._each_k(value)
            return
        self._each_k(lambda k, mask: weave(f, raw, [value(f.add(k, i), mask) for i in range(panels.group)]))
        self.by_elements(f.round_down(self.k, panels.group))

    def _along_k(self) -> None:
        """Squares of columns by groups, transposed in registers: whole lines of the source at a time, then fours."""
        f, panels = self.f, self.panels
        full = f.compare("sge", "i64", self.left, panels.lanes)
        groups = self.k if panels.group == 1 else f.op(f"udiv i64 {self.k}, {panels.group}")
        packed: Value = 0
        for side in dict.fromkeys((panels.lanes if panels.source is panels.packed else 4, 4)):
            end = f.select("i64", full, f.round_down(groups, side), 0)
            self._squares(side, packed, end)
            packed = end
        self.by_elements(f.mul(packed, panels.group))

    def _squares(self, side: int, low: Value, high: Value) -> None:
        """Groups from `low` to `high`."""
        f, panels = self.f, self.panels
        element, size = memory_type(panels.source), panels.packed.itemsize * panels.group
        raw = vector(panels.word, side)
        kept = memory_type(panels.packed, side) if panels.group == 1 else raw
        start = f.address(element, self.origin, f.mul(self.column, self.n_stride))
        columns = [f.mul(self.n_stride, i) for i in range(side)]  # distances in elements of the source
        steps = [f.mul(self.width, i * size) for i in range(side)]  # and of k's in bytes of what is packed

        def some_k(k: str, _: list[str]) -> None:
            source = f.address(element, start, f.mul(k, panels.group))
            to = f.address("i8", self.place, f.mul(k, steps[1]))

            def square(lane: str, _: list[str]) -> None:
                corner = f.address(element, source, f.mul(lane, self.n_stride))
                rows = [f.load(raw, f.address(element, corner, c), panels.source.itemsize) for c in columns]
                place = f.address("i8", to, f.mul(lane, size))
                for step, value in zip(steps, transpose(f, raw, rows), strict=True):
                    # groups of k's are packed from elements of their own type
                    packed = panels.packed if panels.group == 1 else panels.source
                    kept_value = convert(f, value, panels.source, packed, side, panels.target)
                    f.store(kept, kept_value, f.address("i8", place, step), panels.packed.itemsize)

            f.loop(0, panels.lanes, side, [], square)

        f.loop(low, high, side, [], some_k)

    def by_elements(self, low: Value, load: LoadB | None = None) -> None:
        """From a k on, the first of a group."""
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
