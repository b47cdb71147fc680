"""searchsorted: branch-free binary search for many numbers at once.

A span that may hold the place is a start and a length; all numbers have the same lengths, so that only starts differ.
"""

from __future__ import annotations

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import arguments, kernel, number_slots, numbers, while_loop
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.ir.registers import gather
from strata.backends.llvm.natives.radix_sort import key_bits, order_key
from strata.core import DType, Target
from strata.mir import Node

TOGETHER = 2  # registers of positions that are looked for side by side
CHUNK = 512  # numbers that one thread takes at a time


class _Search:
    """Emits the search for one number or several next to each other; -0 and 0 are equal, NaN is the largest."""

    def __init__(self, f: IrFunction, dtype: DType, right: bool) -> None:
        self.f, self.dtype, self.right = f, dtype, right
        self.raw = f"i{key_bits(dtype)}"

    def key(self, raw: str, lanes: int) -> str:
        return order_key(self.f, self.dtype, raw, lanes, descending=False, one_zero=True)

    def find(self, row: Value, n: Value, wanted: Value, out: Value, lanes: int) -> None:
        """Places in a row of n > 0 sorted elements of the numbers at an address, written to another."""
        f, size = self.f, self.dtype.itemsize
        type_, index = vector(self.raw, lanes), vector("i64", lanes)
        key = self.key(f.load(type_, wanted, size), lanes)

        def everywhere(number: Value) -> str:
            return f.splat(index, number) if lanes > 1 else str(number)

        def comes_before(at: str) -> str:
            """Whether elements at places belong before the numbers."""
            if lanes == 1:
                here = f.load(self.raw, f.address(self.raw, row, at), size)
            else:
                places = f.op(f"getelementptr {self.raw}, ptr {row}, {index} {at}")
                here = gather(f, type_, places, size, constant(vector("i1", lanes), 1))
            return f.compare("ule" if self.right else "ult", type_, self.key(here, lanes), key)

        def halve(state: list[str]) -> list[Value]:
            start, length = state
            half = f.binary("lshr", "i64", length, 1)
            behind = f.binary("add", index, start, everywhere(half))
            last = f.binary("sub", index, behind, constant(index, 1))
            return [f.select(index, comes_before(last), behind, start), f.sub(length, half)]

        spans: list[tuple[str, Value]] = [(index, constant(index, 0)), ("i64", n)]
        start, _ = while_loop(f, spans, lambda s: f.compare("sgt", "i64", s[1], 1), halve)
        one_more = f.convert("zext", vector("i1", lanes), comes_before(start), index)
        f.store(index, f.binary("add", index, start, one_more), out, 8)


@override("searchsorted", whole=True)
def _searchsorted(node: Node, target: Target) -> NativeOp:
    table, x = node.inputs
    right = node.op.right  # type: ignore[attr-defined]
    lanes = TOGETHER * target.lanes(8) if target.vector_bytes >= 32 else 1  # narrower ones have no gathers

    def emit(module: IrModule) -> None:
        f = kernel(module, "search")
        sorted_, wanted, out, n, per_batch = arguments(f, "pppii")
        work = _Search(f, x.dtype, right)

        def batch(b: str, _: list[str]) -> None:
            row = f.address(work.raw, sorted_, f.mul(b, n))
            first = f.mul(b, per_batch)
            low = f.smax(first, "%begin")
            high = f.smin(f.add(first, per_batch), "%end")
            whole = f.add(low, f.round_down(f.sub(high, low), lanes))

            def some(width: int, start: Value, end: Value) -> None:
                def each(i: str, _: list[str]) -> None:
                    work.find(row, n, f.address(work.raw, wanted, i), f.address("i64", out, i), width)

                f.loop(start, end, width, (), each)

            some(lanes, low, whole)
            if lanes > 1:
                some(1, whole, high)

        def search() -> None:
            last = f.add(f.binary("udiv", "i64", f.sub("%end", 1), per_batch), 1)
            f.loop(f.binary("udiv", "i64", "%begin", per_batch), last, 1, (), batch)

        def nothing() -> None:
            f.loop("%begin", "%end", 1, (), lambda i, _: f.store("i64", 0, f.address("i64", out, i), 8))

        f.if_(f.compare("sgt", "i64", n, 0), search, nothing)
        f.ret()

    def plan(sizes: Sizes) -> Planned:
        *batch, n = numbers(table.shape, sizes)
        shape = numbers(x.shape, sizes)
        per_batch = 1
        for size in shape[len(batch) :]:
            per_batch *= size
        count = per_batch
        for size in batch:
            count *= size
        slots = [("input", 0), ("input", 1), ("output", 0), *number_slots(n, max(per_batch, 1))]
        return Planned([NativeCall("search", slots, count, CHUNK)])

    return NativeOp(f"search {x.dtype} {right}", emit, ("search",), plan)
