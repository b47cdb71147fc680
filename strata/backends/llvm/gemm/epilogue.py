"""The epilogue of a matmul: from accumulators to the output, with fused ops, conversion, tails and strides.

    void finish(ptr args, ptr sums, i64 sums_stride, i64 row, i64 column, i64 rows, i64 columns, i64 batch…)

It runs right after a tile's last k block, while the sums are in the first-level cache, in a loop that is not unrolled:
the epilogue's code exists once per kernel, whatever number of tile shapes the kernel has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strata.backends.llvm.gemm.arith import convert
from strata.backends.llvm.gemm.spec import Contraction
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType


@dataclass(frozen=True, slots=True)
class Site:
    """Where an epilogue is: one row, `lanes` columns from `column` on; `mask` has those inside the output, None all."""

    f: IrFunction
    spec: Contraction
    args: str
    row: Value
    column: Value
    batch: tuple[Value, ...]
    lanes: int
    mask: str | None
    second: str = ""  # of a pair: the sums of the other matmul at this place

    def pointer(self, name: str) -> str:
        return self.f.load("ptr", self.f.address("i64", self.args, self.spec.slot(name)), 8)

    def number(self, name: str) -> str:
        return self.f.load("i64", self.f.address("i64", self.args, self.spec.slot(name)), 8)

    def load(self, dtype: DType, base: Value, index: Value, *, broadcast: bool = False) -> str:
        """base[index + lane], or base[index] in every lane, in the accumulator's type."""
        spec, f = self.spec, self.f
        address = f.address(memory_type(dtype), base, index)
        if broadcast or self.lanes == 1:
            scalar = f.load(memory_type(dtype), address, dtype.itemsize)
            scalar = convert(f, scalar, dtype, spec.accumulator, 1, spec.target)
            return f.splat(memory_type(spec.accumulator, self.lanes), scalar)
        value = f.load(memory_type(dtype, self.lanes), address, dtype.itemsize, self.mask)
        return convert(f, value, dtype, spec.accumulator, self.lanes, spec.target)


# epilogue(site, sums) -> values to store: from `memory_type(accumulator, site.lanes)` to the same of the output's type
Epilogue = Callable[[Site, str], str]


def finished(site: Site, sums: str, epilogue: Epilogue | None) -> str:
    """A vector of sums as it is stored: through the epilogue, or converted."""
    spec = site.spec
    if epilogue is not None:
        return epilogue(site, sums)
    return convert(site.f, sums, spec.accumulator, spec.out, site.lanes, spec.target)


def put_vector(site: Site, sums: str, epilogue: Epilogue | None, out: str, out_row: Value) -> None:
    """A vector of sums through the epilogue to its place in an output whose columns are next to each other."""
    f, spec = site.f, site.spec
    value = finished(site, sums, epilogue)
    place = f.address(memory_type(spec.out), out, f.add(f.mul(site.row, out_row), site.column))
    f.store(memory_type(spec.out, site.lanes), value, place, spec.out.itemsize, site.mask)


def emit_finish(module: IrModule, spec: Contraction, name: str, epilogue: Epilogue | None) -> str:
    """Adds the function that stores a tile of sums and returns its name."""
    parameters = [
        ("ptr noalias", "args"), ("ptr", "sums"), ("i64", "sums_stride"), ("i64", "row"), ("i64", "column"),
        ("i64", "rows"), ("i64", "columns"), *(("i64", f"batch{axis}") for axis in range(spec.batch_rank)),
    ]  # fmt: skip
    f = module.outlined(name, parameters)
    batch = tuple(f"%batch{axis}" for axis in range(spec.batch_rank))
    probe = Site(f, spec, "%args", 0, 0, batch, 1, None)
    element, size = memory_type(spec.out), spec.out.itemsize
    out, out_row = probe.pointer("out"), f.mul(probe.number("out_row"), spec.parts)
    out_column = probe.number("out_column")
    for axis in range(spec.batch_rank):
        offset = f.mul(f.mul(batch[axis], probe.number(f"batch{axis}_out")), spec.parts)
        out = f.address(element, out, offset)
    lanes = spec.lanes if spec.unit_columns else 1

    def put(sums_row: str, out_base: str, row: Value, at: Value, mask: str | None) -> None:
        type_ = memory_type(spec.accumulator, lanes)
        sums = f.load(type_, f.address(memory_type(spec.accumulator), sums_row, at), spec.accumulator.itemsize)
        second = ""
        if spec.is_pair:
            place = f.address(memory_type(spec.accumulator), sums_row, f.add(at, spec.tile_elements))
            second = f.load(type_, place, spec.accumulator.itemsize)
        site = Site(f, spec, "%args", row, f.add("%column", at), batch, lanes, mask, second)
        value = finished(site, sums, epilogue)
        index = site.column if spec.unit_columns else _scattered(f, spec, site.column, out_column)
        place = f.address(element, out_base, index)
        f.store(memory_type(spec.out, lanes), value, place, size, mask)

    whole = f.round_down("%columns", lanes)
    rest = f.sub("%columns", whole)

    def one_row(i: str, _: list[str]) -> None:
        row = f.add("%row", i)
        sums_row = f.address(memory_type(spec.accumulator), "%sums", f.mul(i, "%sums_stride"))
        out_base = f.address(element, out, f.mul(row, out_row))
        f.loop(0, whole, lanes, [], lambda at, _: put(sums_row, out_base, row, at, None))
        if lanes > 1:
            partial = f.compare("sgt", "i64", rest, 0)
            f.if_(partial, lambda: put(sums_row, out_base, row, whole, f.mask_below(lanes, rest)))

    f.loop(0, "%rows", 1, [], one_row)
    f.ret()
    return name


def put_sums(site: Site, rows: Sequence[Sequence[str]], epilogue: Epilogue | None, columns: Value | None) -> None:
    """A tile of sums from registers through the epilogue to the output: rows of neighbouring vectors from a site on.

    Where `columns` are given, the last vector has lanes outside the output if those are fewer."""
    f, spec, lanes = site.f, site.spec, site.lanes
    assert spec.unit_columns
    element, size = memory_type(spec.out), spec.out.itemsize
    out, out_row = site.pointer("out"), site.number("out_row")
    for axis, index in enumerate(site.batch):
        out = f.address(element, out, f.mul(index, site.number(f"batch{axis}_out")))

    def put(last: str | None) -> None:
        for i, row in enumerate(rows):
            at_row = f.add(site.row, i)
            base = f.address(element, out, f.mul(at_row, out_row))
            for j, sums in enumerate(row):
                mask = last if j == len(row) - 1 else None
                here = replace(site, row=at_row, column=f.add(site.column, j * lanes), mask=mask)
                value = finished(here, sums, epilogue)
                f.store(memory_type(spec.out, lanes), value, f.address(element, base, here.column), size, mask)

    if columns is None:
        put(None)
        return
    before = (len(rows[0]) - 1) * lanes
    is_whole = f.compare("sge", "i64", columns, before + lanes)
    f.if_(is_whole, lambda: put(None), lambda: put(f.mask_below(lanes, f.sub(columns, before))))


def _scattered(f: IrFunction, spec: Contraction, column: Value, stride: Value) -> Value:
    """The place of a column in a row whose elements are not next to each other."""
    if not spec.is_complex:
        return f.mul(column, stride)
    element, part = f.op(f"lshr i64 {column}, 1"), f.op(f"and i64 {column}, 1")
    return f.add(f.mul(f.mul(element, stride), 2), part)
