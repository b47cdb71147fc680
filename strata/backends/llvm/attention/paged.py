"""Paged attention: few queries over a paged KV cache, read in place; adjacent pages are read as one run.

Sums are taken in the order of the keys, so that results have the bits of attention over one long array.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Final

from strata.backends.llvm.attention.decode import Decode
from strata.backends.llvm.attention.form import SLOTS, AttentionSpec
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, vector
from strata.backends.llvm.ir.native import arguments, copy, each_point, kernel, template, while_loop
from strata.backends.llvm.ir.registers import memory_type

_AT: Final = SLOTS.index("batch")
PAGED_SLOTS: Final = (
    *SLOTS[:_AT], "table", "new_k", "new_v", "k_scale", "v_scale", *SLOTS[_AT:], "table_row", "pages", "new_batch",
    "new_row",
)  # fmt: skip


class PagedDecode(Decode):
    """Emits the attention of one query for all heads that share a key head, over pages of `page` tokens.

    Pages of 8 bits are unpacked one at a time.
    """

    def __init__(self, f: IrFunction, spec: AttentionSpec, page: int, *, packed: bool) -> None:
        super().__init__(f, spec, PAGED_SLOTS)
        self.page, self.packed = page, packed
        self.unpacked = f.alloca(self.given, page * spec.head_dim) if packed else ""

    def _shift(self, batch: Value) -> Value:
        return self.f.smax(super()._shift(batch), 0)

    def _score_block(self, q: str, batch: Value, head: Value, start: Value, count: Value) -> None:
        self._over_runs("k", batch, head, start, count, lambda *rows: self._score_rows(q, *rows))

    def _mix_block(self, batch: Value, head: Value, start: Value, count: Value) -> None:
        self._over_runs("v", batch, head, start, count, self._mix_rows)

    def _over_runs(
        self, operand: str, batch: Value, head: Value, start: Value, count: Value,
        body: Callable[[str, Value, Value, Value], None],
    ) -> None:  # fmt: skip
        """body(first row, number of rows, where they are among `count`, their distance) for rows that follow each
        other."""
        f, number, page = self.f, self.number, self.page
        past, row = self._shift(batch), number[f"{operand}_row"]
        base = self.at(operand, 0, head)
        table = f.address("i64", self.pointer["table"], f.mul(batch, number["table_row"]))
        old = f.smin(f.smax(f.sub(past, start), 0), count)
        last = f.sub(number["pages"], 1)

        def page_at(i: Value) -> str:
            """The page of row `start` + i; blocks of keys begin with a page."""
            at = f.op(f"udiv i64 {f.add(start, i)}, {page}")
            found = f.load("i64", f.address("i64", table, at), 8)
            return str(f.smin(f.smax(found, 0), last))

        def one(carried: list[str]) -> list[Value]:
            i = carried[0]
            first = page_at(i)
            if self.packed:
                rows = f.smin(page, f.sub(old, i))
                self._unpack(operand, f.mul(first, page), head, rows)
                body(self.unpacked, rows, i, self.spec.head_dim)
                return [f.add(i, page)]

            def goes_on(state: list[str]) -> str:
                """Whether the next page lies right after those so far."""
                length = state[0]
                then = f.add(i, length)
                behind = f.add(first, f.op(f"udiv i64 {length}, {page}"))
                here = f.compare("slt", "i64", then, old)
                near = f.compare("eq", "i64", page_at(f.smin(then, f.sub(old, 1))), behind)
                return f.binary("and", "i1", here, near)

            (length,) = while_loop(f, [("i64", page)], goes_on, lambda state: [f.add(state[0], page)])
            rows = f.smin(length, f.sub(old, i))
            body(f.address(self.given, base, f.mul(f.mul(first, page), row)), rows, i, row)
            return [f.add(i, length)]

        while_loop(f, [("i64", 0)], lambda state: f.compare("slt", "i64", state[0], old), one)
        fresh = f.add(f.mul(batch, number["new_batch"]), f.mul(head, number[f"{operand}_head"]))
        fresh = f.add(fresh, f.mul(f.sub(f.add(start, old), past), number["new_row"]))
        body(f.address(self.given, self.pointer[f"new_{operand}"], fresh), f.sub(count, old), old, number["new_row"])

    def _unpack(self, operand: str, first: Value, head: Value, rows: Value) -> None:
        """The numbers of one head in rows of a page."""
        f, spec = self.f, self.spec
        dim = spec.head_dim
        source = f.address("i8", self.pointer[operand], f.add(f.mul(first, spec.kv_heads * dim), f.mul(head, dim)))
        scales = f.address(self.given, self.pointer[f"{operand}_scale"], f.add(f.mul(first, spec.kv_heads), head))

        def one(i: str, _: list[str]) -> None:
            unpack_row(
                f, spec, f.address(self.given, self.unpacked, f.mul(i, dim)),
                f.address("i8", source, f.mul(i, spec.kv_heads * dim)),
                f.address(self.given, scales, f.mul(i, spec.kv_heads)),
            )  # fmt: skip

        f.loop(0, rows, 1, [], one)


def unpack_row(f: IrFunction, spec: AttentionSpec, to: str, source: str, scale: str) -> None:
    """The numbers of one head: integers of 8 bits times its scale."""
    element, size = memory_type(spec.dtype), spec.dtype.itemsize
    lanes = gcd(spec.head_dim, spec.lanes)
    type_ = vector(element, lanes)
    by = f.splat(type_, f.load(element, scale, size))

    def some(d: str, _: list[str]) -> None:
        whole = f.load(vector("i8", lanes), f.address("i8", source, d), 1)
        wide = f.convert("sext", vector("i8", lanes), whole, vector("i32", lanes))
        numbers = f.binary("fmul", type_, f.convert("sitofp", vector("i32", lanes), wide, type_), by)
        f.store(type_, numbers, f.address(element, to, d), size)

    f.loop(0, spec.head_dim, lanes, [], some)


def emit_paged_decode(module: IrModule, spec: AttentionSpec, page: int, name: str, *, packed: bool) -> None:
    f = template(module, name)
    decode = PagedDecode(f, spec, page, packed=packed)
    each_point(f, lambda chunk, _: decode.chunk(chunk))


def emit_paged_merge(module: IrModule, spec: AttentionSpec, page: int, name: str) -> None:
    f = template(module, name)
    decode = PagedDecode(f, spec, page, packed=False)  # what is merged is not a page
    each_point(f, lambda item, _: decode.merge(item))


COLLECT: Final = (
    "ppppppiiiii"  # to, pool, new, table, past, scales, pages of a sequence and of all, new rows, page, width
)


def emit_collect(module: IrModule, spec: AttentionSpec, name: str, *, packed: bool) -> None:
    """Adds the kernel that lays the rows of a sequence one after the other: one page a point."""
    f = kernel(module, name)
    to, pool, new, table, past, scales, mine, pages, count, page, width = arguments(f, COLLECT)
    element, size = memory_type(spec.dtype), spec.dtype.itemsize

    def one(point: str, _: list[str]) -> None:
        batch, local = f.divided(point, mine)
        first = f.mul(local, page)  # row of the sequence
        place = f.address(element, to, f.mul(f.mul(point, page), width))
        before = f.smax(f.load("i64", f.address("i64", past, batch), 8), 0)
        old = f.smin(f.smax(f.sub(before, first), 0), page)
        number = f.smin(f.smax(f.load("i64", f.address("i64", table, point), 8), 0), f.sub(pages, 1))
        first_row = f.mul(number, page)
        if packed:
            source = f.address("i8", pool, f.mul(first_row, width))
            by = f.address(element, scales, f.mul(first_row, spec.kv_heads))

            def unpack(i: str, _: list[str]) -> None:  # of rows, each head's
                unpack_row(
                    f, spec, f.address(element, place, f.mul(i, spec.head_dim)),
                    f.address("i8", source, f.mul(i, spec.head_dim)), f.address(element, by, i),
                )  # fmt: skip

            f.loop(0, f.mul(old, spec.kv_heads), 1, [], unpack)
        else:
            copy(f, place, f.address(element, pool, f.mul(first_row, width)), f.mul(f.mul(old, width), size))

        def fresh(row: str, _: list[str]) -> None:
            # rows after the last new one repeat it: no query reads them
            at = f.smin(f.sub(f.add(first, row), before), f.sub(count, 1))
            taken = f.address(element, new, f.mul(f.add(f.mul(batch, count), at), width))
            copy(f, f.address(element, place, f.mul(row, width)), taken, f.mul(width, size))

        f.loop(old, page, 1, [], fresh)

    each_point(f, one)
