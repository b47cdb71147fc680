"""sort, argsort and topk along any axis.

Rows are turned into unsigned integers with the order of their elements (see `radix_sort`), put in order in a workspace,
and written back: elements for sort, positions for argsort, the best ones of both for topk.
"""

from __future__ import annotations

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import (
    arguments,
    around,
    each_of_slot,
    each_point,
    kernel,
    number_slots,
    numbers,
    while_loop,
)
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.natives.radix_sort import Layout, emit_sort, emit_zeros, from_key, key_bits, order_key
from strata.backends.llvm.natives.sort_network import LONGEST, emit_groups, network_lanes, network_longest
from strata.core import DType, Target
from strata.errors import RunError
from strata.mir import Node

SLOTS = 16  # rows that can be in work at a time: each has its own place in the workspace
FEWER_SLOTS = 4  # for rows above this size
LONG_ROW = 1 << 16
LONGEST_ROW = (1 << 31) - 1  # counters and positions have 32 bits
FEW = 4  # topk keeps candidates while k is less than this part of a row; else the row is sorted
VERY_FEW = 16  # up to this many, the best so far are kept in order
MUCH_LONGER = 32  # than k is a row of which they are kept so, even where it is short enough for the network


class _Rows:
    """Emits the work on one row: element i of a row starting at `base` lies at base + i · stride."""

    def __init__(self, f: IrFunction, dtype: DType, layout: Layout, descending: bool) -> None:
        self.f, self.dtype, self.layout, self.descending = f, dtype, layout, descending
        self.raw = f"i{key_bits(dtype)}"
        self.one_zero = layout.shift > 0

    def key(self, raw: str, lanes: int) -> str:
        return order_key(self.f, self.dtype, raw, lanes, descending=self.descending, one_zero=self.one_zero)

    def element(self, key: str, index: Value) -> str:
        """A key and, where there is room for it, its position."""
        f, layout = self.f, self.layout
        if not layout.shift:
            return key
        high = f.binary(
            "shl", layout.type, f.convert("zext", self.raw, key, layout.type), constant(layout.type, layout.shift)
        )
        return f.binary("or", layout.type, high, f.convert("zext", "i64", index, layout.type))

    def read(self, source: Value, index: Value, stride: Value) -> str:
        return self.f.load(self.raw, self.f.address(self.raw, source, self.f.mul(index, stride)), self.dtype.itemsize)

    def load_row(self, source: Value, stride: Value, span: Value, n: Value, lanes: int) -> None:
        """All elements of a row, as they are sorted, to a span of the workspace."""
        f, layout = self.f, self.layout

        def one(i: str, _: list[str]) -> None:
            element = self.element(self.key(self.read(source, i, stride), 1), i)
            f.store(layout.type, element, f.address(layout.type, span, i), layout.align)

        def whole() -> None:
            type_ = vector(self.raw, lanes)
            end = f.round_down(n, lanes)

            def some(i: str, _: list[str]) -> None:
                raw = f.load(type_, f.address(self.raw, source, i), self.dtype.itemsize)
                f.store(type_, self.key(raw, lanes), f.address(self.raw, span, i), self.dtype.itemsize)

            f.loop(0, end, lanes, (), some)
            f.loop(end, n, 1, (), one)

        if layout.shift:
            f.loop(0, n, 1, (), one)
        else:
            f.if_(f.compare("eq", "i64", stride, 1), whole, lambda: f.loop(0, n, 1, (), one) and None)

    def store_keys(self, span: Value, to: Value, stride: Value, n: Value, lanes: int) -> None:
        f = self.f

        def one(i: str, _: list[str]) -> None:
            key = f.load(self.raw, f.address(self.raw, span, i), self.dtype.itemsize)
            value = from_key(f, self.dtype, key, 1, descending=self.descending)
            f.store(self.raw, value, f.address(self.raw, to, f.mul(i, stride)), self.dtype.itemsize)

        def whole() -> None:
            type_ = vector(self.raw, lanes)
            end = f.round_down(n, lanes)

            def some(i: str, _: list[str]) -> None:
                keys = f.load(type_, f.address(self.raw, span, i), self.dtype.itemsize)
                values = from_key(f, self.dtype, keys, lanes, descending=self.descending)
                f.store(type_, values, f.address(self.raw, to, i), self.dtype.itemsize)

            f.loop(0, end, lanes, (), some)
            f.loop(end, n, 1, (), one)

        f.if_(f.compare("eq", "i64", stride, 1), whole, lambda: f.loop(0, n, 1, (), one) and None)

    def position(self, span: Value, i: Value) -> str:
        f, layout = self.f, self.layout
        element = f.load(layout.type, f.address(layout.type, span, i), layout.align)
        low = f.convert("trunc", layout.type, element, "i64") if layout.bits > 64 else element
        return f.binary("and", "i64", low, (1 << layout.shift) - 1) if layout.shift < 64 else low


def _emit(module: IrModule, dtype: DType, target: Target, what: str, descending: bool) -> None:
    """Slots of rows. Arguments: source, out, ids, workspace, bytes of a slot, n, inner, rows, slots, k."""
    layout = Layout.of(dtype, with_position=what != "sort")
    sort = emit_sort(module, layout, key_bits(dtype))
    zeros = emit_zeros(module, dtype, descending, looks=True) if what == "sort" and dtype.is_float else None
    lanes = target.lanes(dtype.itemsize)
    f = kernel(module, what)
    source, out, ids, workspace, slot_bytes, n, inner, rows, slots, k = arguments(f, "ppppiiiiii")
    work = _Rows(f, dtype, layout, descending)

    def slot(point: str, _: list[str]) -> None:
        a = f.address("i8", workspace, f.mul(point, slot_bytes))

        def row(r: str, _: list[str]) -> None:
            outer, column = f.binary("udiv", "i64", r, inner), f.binary("urem", "i64", r, inner)
            begin = f.address(work.raw, source, f.add(f.mul(f.mul(outer, n), inner), column))
            start = f.add(f.mul(f.mul(outer, k), inner), column)
            if what == "topk_few":
                result = _candidates(
                    f, work, sort, begin, inner, n, k, a, f.binary("lshr", "i64", slot_bytes, 1), lanes
                )
            elif what == "topk_very_few":
                result = _best(f, work, begin, inner, n, k, a, lanes)
            else:
                b = f.address("i8", a, f.binary("lshr", "i64", slot_bytes, 1))
                work.load_row(begin, inner, a, n, lanes)
                result = f.call("ptr", sort, ("ptr", a), ("ptr", b), ("i64", n))
            if what == "sort":
                to = f.address(work.raw, out, start)
                work.store_keys(result, to, inner, k, lanes)
                if zeros is not None:
                    f.call("void", zeros, ("ptr", begin), ("ptr", to), ("i64", n), ("i64", inner))
                return

            def one(i: str, _: list[str]) -> None:
                position = work.position(result, i)
                at = f.add(start, f.mul(i, inner))
                f.store("i64", position, f.address("i64", ids, at), 8)
                if what != "argsort":
                    value = work.read(begin, position, inner)
                    f.store(work.raw, value, f.address(work.raw, out, at), dtype.itemsize)

            f.loop(0, k, 1, (), one)

        each_of_slot(f, point, rows, slots, row)

    each_point(f, slot)


def _candidates(
    f: IrFunction,
    work: _Rows,
    sort: str,
    begin: Value,
    stride: Value,
    n: Value,
    k: Value,
    a: Value,
    half: Value,
    lanes: int,
) -> str:
    """The k first elements in order: those that beat the k-th so far are kept, and thinned out when there are many."""
    layout, raw = work.layout, work.raw
    b = f.address("i8", a, half)
    room = f.sub(f.binary("lshr", "i64", half, layout.size.bit_length() - 1), lanes)
    most = constant(layout.type, -1)

    def thin(count: Value) -> tuple[str, str]:
        """Keep the best k of the span; returns how many there are, and the one to beat."""
        result = f.call("ptr", sort, ("ptr", a), ("ptr", b), ("i64", count))
        kept = f.smin(count, k)

        def back() -> None:
            f.call(
                "void",
                "llvm.memcpy.p0.p0.i64",
                ("ptr", a),
                ("ptr", result),
                ("i64", f.mul(kept, layout.size)),
                ("i1", "false"),
            )

        f.if_(f.compare("ne", "ptr", result, a), back)

        def worst() -> list[str]:
            return [f.load(layout.type, f.address(layout.type, a, f.sub(k, 1)), layout.align)]

        (limit,) = f.if_(f.compare("eq", "i64", kept, k), worst, lambda: [most], [layout.type])
        return str(kept), limit

    def push(i: Value, state: list[str]) -> list[str]:
        count, limit = state
        element = work.element(work.key(work.read(begin, i, stride), 1), i)
        f.store(layout.type, element, f.address(layout.type, a, count), layout.align)
        kept = f.convert("zext", "i1", f.compare("ult", layout.type, element, limit), "i64")
        return [str(f.add(count, kept)), limit]

    def full(state: list[str]) -> list[str]:
        return f.if_(
            f.compare("sge", "i64", state[0], room), lambda: list(thin(state[0])), lambda: state, ["i64", layout.type]
        )

    carried: list[tuple[str, Value]] = [("i64", 0), (layout.type, most)]

    def scattered() -> list[str]:
        return f.loop(0, n, 1, carried, lambda i, state: full(push(i, state)))

    def together() -> list[str]:
        type_ = vector(raw, lanes)
        end = f.round_down(n, lanes)

        def some(i: str, state: list[str]) -> list[str]:
            keys = work.key(f.load(type_, f.address(raw, begin, i), work.dtype.itemsize), lanes)
            bound = f.convert(
                "trunc", layout.type, f.binary("lshr", layout.type, state[1], constant(layout.type, layout.shift)), raw
            )
            hits = f.compare("ule", type_, keys, f.splat(type_, bound))
            found = f.call("i1", f"llvm.vector.reduce.or.v{lanes}i1", (f"<{lanes} x i1>", hits))

            def each() -> list[str]:
                return full(f.loop(i, f.add(i, lanes), 1, list(zip(("i64", layout.type), state, strict=True)), push))

            return f.if_(found, each, lambda: state, ["i64", layout.type])

        state = f.loop(0, end, lanes, carried, some)
        return f.loop(end, n, 1, list(zip(("i64", layout.type), state, strict=True)), lambda i, s: full(push(i, s)))

    count, _ = f.if_(f.compare("eq", "i64", stride, 1), together, scattered, ["i64", layout.type])
    thin(count)
    return str(a)


def _best(f: IrFunction, work: _Rows, begin: Value, stride: Value, n: Value, k: Value, best: Value, lanes: int) -> str:
    """The k first elements in order, kept so all the time: one that beats the last of them is put in its place."""
    layout, raw, type_ = work.layout, work.raw, vector(work.raw, lanes)
    last = f.sub(k, 1)

    def cell(i: Value) -> str:
        return f.address(layout.type, best, i)

    def limit() -> str:
        return f.load(layout.type, cell(last), layout.align)

    most = constant(layout.type, -1)
    f.loop(0, k, 1, (), lambda i, _: f.store(layout.type, most, cell(i), layout.align))

    def take(i: Value) -> None:
        element = work.element(work.key(work.read(begin, i, stride), 1), i)

        def insert() -> None:
            def above(state: list[str]) -> str:
                inside = f.compare("sgt", "i64", state[0], 0)
                before = f.load(layout.type, cell(f.smax(f.sub(state[0], 1), 0)), layout.align)
                return f.binary("and", "i1", inside, f.compare("ugt", layout.type, before, element))

            def move(state: list[str]) -> list[Value]:
                j = f.sub(state[0], 1)
                f.store(layout.type, f.load(layout.type, cell(j), layout.align), cell(state[0]), layout.align)
                return [j]

            (place,) = while_loop(f, [("i64", last)], above, move)
            f.store(layout.type, element, cell(place), layout.align)

        f.if_(f.compare("ult", layout.type, element, limit()), insert)

    def some(start: str, _: list[str]) -> None:
        keys = work.key(f.load(type_, f.address(raw, begin, start), work.dtype.itemsize), lanes)
        high = f.binary("lshr", layout.type, limit(), constant(layout.type, layout.shift))
        bound = f.convert("trunc", layout.type, high, raw)
        hits = f.compare("ule", type_, keys, f.splat(type_, bound))
        mask = f.convert("bitcast", f"<{lanes} x i1>", hits, f"i{lanes}")
        mask = f.convert("zext", f"i{lanes}", mask, "i64") if lanes < 64 else mask

        def next_hit(state: list[str]) -> list[Value]:
            lane = f.call("i64", "llvm.cttz.i64", ("i64", state[0]), ("i1", "true"))
            take(f.add(start, lane))
            return [f.binary("and", "i64", state[0], f.sub(state[0], 1))]

        while_loop(f, [("i64", mask)], lambda state: f.compare("ne", "i64", state[0], 0), next_hit)

    def together() -> None:
        end = f.round_down(n, lanes)
        f.loop(0, end, lanes, (), some)
        f.loop(end, n, 1, (), lambda i, _: take(i))

    f.if_(f.compare("eq", "i64", stride, 1), together, lambda: f.loop(0, n, 1, (), lambda i, _: take(i)) and None)
    return str(best)


def _ordered(node: Node, target: Target, what: str, descending: bool) -> NativeOp:
    (x,) = node.inputs
    dtype, axis = x.dtype, node.op.axis  # type: ignore[attr-defined]
    layout = Layout.of(dtype, with_position=what != "sort")
    names = ("topk", "topk_few", "topk_very_few") if what == "topk" else (what,)
    lanes = target.lanes(dtype.itemsize)
    together = network_lanes(layout, target)

    def plan(sizes: Sizes) -> Planned:
        outer, n, inner = around(x.shape, axis, sizes)
        (k,) = numbers((node.op.k,), sizes) if what == "topk" else (n,)  # type: ignore[attr-defined]
        rows = outer * inner
        if rows * n * k == 0:
            return Planned(())
        if n > LONGEST_ROW:
            raise RunError(f"{what}: {n} elements in a row, at most {LONGEST_ROW} can be sorted", code="X130")
        outputs = {"sort": (0, 0), "argsort": (0, 0), "topk": (0, 1)}[what]
        arrays = [("input", 0), *(("output", i) for i in outputs), ("workspace", 0)]
        side_by_side = inner if inner > 1 else outer
        very_few = what == "topk" and k <= VERY_FEW and k * FEW < n
        row_by_row = very_few and inner == 1 and n >= max(k * MUCH_LONGER, 128)
        if 2 <= n <= network_longest(layout, target) and side_by_side >= together and not row_by_row:
            per_outer = -(-side_by_side // together)
            groups = per_outer * (outer if inner > 1 else 1)
            slots, bytes_ = min(groups, SLOTS), n * together * layout.size
            given = number_slots(bytes_, n, inner, side_by_side, slots, k, groups, per_outer)
            return Planned([NativeCall(f"{what}_network", [*arrays, *given], slots)], bytes_ * slots)
        few = what == "topk" and k * FEW < n
        slots = min(rows, SLOTS if n < LONG_ROW else FEWER_SLOTS)
        span = (max(4 * k, 256) + 2 * lanes if few else n) * layout.size
        bytes_ = 2 * (-(-span // 64) * 64)
        name = "topk_very_few" if very_few else "topk_few" if few else what
        call = NativeCall(name, [*arrays, *number_slots(bytes_, n, inner, rows, slots, k)], slots)
        return Planned([call], bytes_ * slots)

    def emit(module: IrModule) -> None:
        for name in names:
            _emit(module, dtype, target, name, descending)
        if layout.bits in LONGEST:
            emit_groups(module, dtype, target, what, descending)

    functions = (*names, f"{what}_network") if layout.bits in LONGEST else names
    return NativeOp(f"order {what} {dtype} {descending}", emit, functions, plan)


@override("sort")
def _sort(node: Node, target: Target) -> NativeOp:
    return _ordered(node, target, "sort", node.op.descending)  # type: ignore[attr-defined]


@override("argsort")
def _argsort(node: Node, target: Target) -> NativeOp:
    return _ordered(node, target, "argsort", node.op.descending)  # type: ignore[attr-defined]


@override("topk")
def _topk(node: Node, target: Target) -> NativeOp:
    return _ordered(node, target, "topk", node.op.largest)  # type: ignore[attr-defined]
