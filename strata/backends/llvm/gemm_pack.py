"""Packing: B into panels of columns, once for weights or per call, and blocks of A into tiles of rows.

Packed B is `[panel][k][panel columns]` over the whole of k, so any block of k is contiguous. The last panel is as wide as
its columns rounded up to whole vectors, and the columns past the end hold zeros.

    void pack(ptr args, i64 begin, i64 end)      args: source, packed, n, k, k stride, n stride, source batch, packed batch

hands out one panel of one batch per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.builder import Function, Module, Value
from strata.backends.llvm.gemm_arith import convert, llvm_type, mask_below
from strata.core import DType, Target

PACK_SLOTS: Final = ("source", "packed", "n", "k", "k_stride", "n_stride", "source_batch", "packed_batch")

# load(f, source, k, n, lanes, mask or None) -> vector in the packed dtype; replaces the plain strided load of B
LoadB = Callable[[Function, str, Value, Value, int, "str | None"], str]


@dataclass(frozen=True, slots=True)
class Panels:
    """How B is packed: element types, lanes of one vector and vectors of one panel."""

    source: DType
    packed: DType
    lanes: int
    vectors: int
    target: Target

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors

    @property
    def name(self) -> str:
        return f"pack_{self.source}_{self.packed}_{self.lanes}x{self.vectors}"

    def size(self, n: int, k: int) -> int:
        """Elements of one packed matrix."""
        return k * -(-n // self.lanes) * self.lanes

    def chunks(self, n: int, batch: int = 1) -> int:
        return batch * -(-n // self.columns)


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
    size = panels.packed.itemsize
    per_batch = f.op(f"udiv i64 {f.add(n, panels.columns - 1)}, {panels.columns}")

    def chunk(index: str, _: list[str]) -> None:
        batch = f.op(f"udiv i64 {index}, {per_batch}")
        column = f.mul(f.sub(index, f.mul(batch, per_batch)), panels.columns)
        origin = f.address(llvm_type(panels.source), source, f.mul(batch, source_batch))
        base = f.address("i8", packed, f.mul(f.add(f.mul(batch, packed_batch), f.mul(column, k)), size))
        left = f.smin(f.sub(n, column), panels.columns)
        width = f.round_down(f.add(left, panels.lanes - 1), panels.lanes)

        def vector_columns(at: str, _: list[str]) -> None:
            place = f.address("i8", base, f.mul(at, size))
            _pack_vector(f, panels, origin, place, f.add(column, at), f.sub(left, at), k, width, k_stride, n_stride, load)

        f.loop(0, left, panels.lanes, [], vector_columns)

    f.loop("%begin", "%end", 1, [], chunk)
    f.ret()
    return name


def _pack_vector(
    f: Function, panels: Panels, origin: str, place: str, column: Value, left: Value, k: Value, width: Value,
    k_stride: Value, n_stride: Value, load: LoadB | None,
) -> None:  # fmt: skip
    """One vector of columns over all of k."""
    lanes, target = panels.lanes, panels.target
    raw, kept = llvm_type(panels.source, lanes), llvm_type(panels.packed, lanes)
    element, size, align = llvm_type(panels.source), panels.packed.itemsize, panels.source.itemsize
    full = f.compare("sge", "i64", left, lanes)

    def put(at_k: Value, value: str) -> None:
        f.store(kept, value, f.address("i8", place, f.mul(f.mul(at_k, width), size)), size)

    def converted(value: str) -> str:
        return convert(f, value, panels.source, panels.packed, lanes, target)

    def by_expression() -> None:
        assert load is not None

        def one(masked: bool) -> None:
            mask = mask_below(f, lanes, left) if masked else None
            f.loop(0, k, 1, [], lambda kk, _: put(kk, load(f, origin, kk, column, lanes, mask)))

        f.if_(full, lambda: one(False), lambda: one(True))

    def along_columns() -> None:
        start = f.address(element, origin, column)

        def whole(kk: str, _: list[str]) -> None:
            put(kk, converted(f.load(raw, f.address(element, start, f.mul(kk, k_stride)), align)))

        def masked() -> None:
            mask = mask_below(f, lanes, left)
            f.loop(0, k, 1, [], lambda kk, _: put(kk, converted(
                f.masked_load(raw, f.address(element, start, f.mul(kk, k_stride)), align, mask))))  # fmt: skip

        f.if_(full, lambda: f.loop(0, k, 1, [], whole), masked)

    def by_elements(low: Value) -> None:
        start = f.address(element, origin, f.mul(column, n_stride))
        count = f.smin(left, lanes)

        def one_k(kk: str, _: list[str]) -> None:
            put(kk, "zeroinitializer")
            row = f.address(element, start, f.mul(kk, k_stride))
            to = f.address("i8", place, f.mul(f.mul(kk, width), size))

            def one(lane: str, _: list[str]) -> None:
                value = f.load(element, f.address(element, row, f.mul(lane, n_stride)), align)
                value = convert(f, value, panels.source, panels.packed, 1, target)
                f.store(llvm_type(panels.packed), value, f.address("i8", to, f.mul(lane, size)), size)

            f.loop(0, count, 1, [], one)

        f.loop(low, k, 1, [], one_k)

    def along_k() -> None:
        start = f.address(element, origin, f.mul(column, n_stride))
        squares = f.select("i64", full, f.round_down(k, lanes), 0)

        def square(kk: str, _: list[str]) -> None:
            corner = f.address(element, start, kk)
            rows = [f.load(raw, f.address(element, corner, f.mul(n_stride, i)), align) for i in range(lanes)]
            for i, value in enumerate(transpose(f, raw, rows)):
                put(f.add(kk, i), converted(value))

        f.loop(0, squares, lanes, [], square)
        by_elements(squares)

    if load is not None:
        by_expression()
        return
    if lanes == 1:
        by_elements(0)
        return
    unit_n, unit_k = f.compare("eq", "i64", n_stride, 1), f.compare("eq", "i64", k_stride, 1)
    f.if_(unit_n, along_columns, lambda: f.if_(unit_k, along_k, lambda: by_elements(0)))


def emit_pack_a(module: Module, source: DType, packed: DType, target: Target) -> str:
    """`void pack_a(source, row stride, k stride, packed, rows, k)`: one tile as [k][rows], four rows at a time."""
    name = f"pack_a_{source}_{packed}"
    if module.has(name):
        return name
    parameters = [
        ("ptr noalias", "source"), ("i64", "row_stride"), ("i64", "k_stride"), ("ptr noalias", "packed"), ("i64", "rows"),
        ("i64", "k"),
    ]  # fmt: skip
    f = module.function(name, parameters, attributes="nounwind noinline", linkage="internal")
    element, four = llvm_type(source), llvm_type(source, 4)
    kept, kept_four = llvm_type(packed), llvm_type(packed, 4)
    size, align = packed.itemsize, source.itemsize

    def place(k: Value, row: Value) -> str:
        return f.address("i8", "%packed", f.mul(f.add(f.mul(k, "%rows"), row), size))

    def one(row: Value, k: Value) -> None:
        at = f.address(element, f.address(element, "%source", f.mul(row, "%row_stride")), f.mul(k, "%k_stride"))
        f.store(kept, convert(f, f.load(element, at, align), source, packed, 1, target), place(k, row), size)

    def rest(row: Value, k_from: Value) -> None:
        f.loop(row, "%rows", 1, [], lambda r, _: f.loop(k_from, "%k", 1, [], lambda k, _: one(r, k)))

    fours = f.round_down("%rows", 4)

    def along_k() -> None:
        whole = f.round_down("%k", 4)

        def square(row: str, k: str) -> None:
            corner = f.address(element, f.address(element, "%source", f.mul(row, "%row_stride")), k)
            rows = [f.load(four, f.address(element, corner, f.mul("%row_stride", i)), align) for i in range(4)]
            for i, value in enumerate(transpose(f, four, rows)):
                f.store(kept_four, convert(f, value, source, packed, 4, target), place(f.add(k, i), row), size)

        def four_rows(row: str, _: list[str]) -> None:
            f.loop(0, whole, 4, [], lambda k, _: square(row, k))

            def one_k(k: str, _: list[str]) -> None:
                for i in range(4):
                    one(f.add(row, i), k)

            f.loop(whole, "%k", 1, [], one_k)

        f.loop(0, fours, 4, [], four_rows)
        rest(fours, 0)

    def along_rows() -> None:
        def one_k(k: str, _: list[str]) -> None:
            column = f.address(element, "%source", f.mul(k, "%k_stride"))

            def four_rows(row: str, _: list[str]) -> None:
                value = convert(f, f.load(four, f.address(element, column, row), align), source, packed, 4, target)
                f.store(kept_four, value, place(k, row), size)

            f.loop(0, fours, 4, [], four_rows)
            f.loop(fours, "%rows", 1, [], lambda row, _: one(row, k))

        f.loop(0, "%k", 1, [], one_k)

    unit_k, unit_row = f.compare("eq", "i64", "%k_stride", 1), f.compare("eq", "i64", "%row_stride", 1)
    f.if_(unit_k, along_k, lambda: f.if_(unit_row, along_rows, lambda: rest(0, 0)))
    f.ret()
    return name
