"""Splats composited tile by tile, and the gradient: rows of pixels fill the lanes of a vector.

A tile goes through its list front to back with the state of its pixels in memory that stays in the first cache; a splat
meets only the rows and vectors that its box covers. Gradients are written by entry of the lists, and then added up by
splat in one order, so that the sum does not depend on which thread had which tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.float_ops import VectorMath
from strata.backends.llvm.ir.native import arguments, each_point, fill_zero, kernel, number_slots, numbers, while_loop
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.ir.registers import register_type
from strata.backends.llvm.math import exponentials
from strata.backends.llvm.natives.splat_bin import is_splat, within
from strata.core import Target
from strata.mir import Node

COLUMNS = 16
CHECK_EVERY = 16  # splats between looks at whether any pixel of the tile still takes light
TINY = 1e-8
COLLECT = 64  # splats that a thread adds up at a time
FORWARD = ("through", "red", "green", "blue", "taken")
BACKWARD = ("through", "so_far", "whole", "red", "green", "blue", "behind", "taken")


@dataclass
class _Hit:
    """A splat at a vector of pixels."""

    dx: str
    dy: str
    q: str
    under: str
    fade: str
    alpha: str
    takes: str  # lanes that are covered and go on
    through: str
    taken: str


class _SplatTiles:
    """Emits what forward and backward share. Arrays: splats, boxes, ids, ranges; the state is a workspace."""

    def __init__(self, f: IrFunction, node: Node, target: Target, names: tuple[str, ...]) -> None:
        self.f, self.op, self.names = f, node.op, names
        op: Any = node.op
        dtype = node.inputs[0].dtype
        self.size, self.width, self.height, self.columns = op.tile, op.width, op.height, op.columns
        self.element, self.bytes = register_type(dtype), dtype.itemsize
        self.lanes = target.lanes(dtype.itemsize)
        self.type = vector(self.element, self.lanes)
        self.across = -(-self.size // self.lanes)  # vectors in a row of a tile
        self.pixels = self.size * self.across * self.lanes
        self.m, self.one = VectorMath(f, self.type, target), VectorMath(f, self.element, target)
        self.numbers = vector_constant(self.element, [float(i) for i in range(self.lanes)])

    @property
    def state_bytes(self) -> int:
        return self.pixels * len(self.names) * self.bytes

    def begin(self, tile: Value, state: Value) -> None:
        """Where a tile is, and its part of the workspace."""
        f = self.f
        self.left = f.mul(f.binary("urem", "i64", tile, self.columns), self.size)
        self.top = f.mul(f.binary("udiv", "i64", tile, self.columns), self.size)
        self.rows = f.smin(f.sub(self.height, self.top), self.size)
        self.across_stop = f.smin(f.sub(self.width, self.left), self.size)
        own = f.address("i8", state, f.mul(tile, self.state_bytes))
        self.place = {name: f.address(self.element, own, i * self.pixels) for i, name in enumerate(self.names)}
        self.left_f = f.convert("sitofp", "i64", self.left, self.element)
        self.top_f = f.convert("sitofp", "i64", self.top, self.element)

    def at(self, name: str, y: Value, v: Value) -> str:
        index = f_mul_add(self.f, y, self.across * self.lanes, v, self.lanes)
        return self.f.address(self.element, self.place[name], index)

    def load(self, name: str, y: Value, v: Value) -> str:
        return self.f.load(self.type, self.at(name, y, v), self.bytes)

    def store(self, name: str, value: Value, y: Value, v: Value) -> None:
        self.f.store(self.type, value, self.at(name, y, v), self.bytes)

    def each_vector(self, body: Callable[[str, str], None]) -> None:
        f = self.f
        f.loop(0, self.rows, 1, (), lambda y, _: f.loop(0, self.across, 1, (), lambda v, _: body(y, v)) and None)

    def each_pixel(self, body: Callable[[str, str], None]) -> None:
        f = self.f
        f.loop(0, self.rows, 1, (), lambda y, _: f.loop(0, self.across_stop, 1, (), lambda x, _: body(y, x)) and None)

    def pixel(self, name: str, y: Value, x: Value) -> str:
        """The address of one pixel's number."""
        index = f_mul_add(self.f, y, self.across * self.lanes, x, 1)
        return self.f.address(self.element, self.place[name], index)

    def lit(self, v: Value) -> str:
        """1 in lanes that are in the picture, 0 in others."""
        f = self.f
        inside = f.mask_below(self.lanes, f.sub(self.across_stop, f.mul(v, self.lanes)))
        return f.select(self.type, inside, constant(self.type, 1.0), constant(self.type, 0.0))

    def go_on(self, through: str, taken: str) -> str:
        m, op = self.m, self.op
        lit = m.test("oge", through, m.c(op.threshold))  # type: ignore[attr-defined]
        if op.max_steps == 0:  # type: ignore[attr-defined]
            return lit
        few = m.test("olt", taken, m.c(float(op.max_steps)))  # type: ignore[attr-defined]
        return self.f.binary("and", m.flag, lit, few)

    def any_goes_on(self) -> str:
        f, m = self.f, self.m

        def row(y: str, carried: list[str]) -> list[str]:
            def some(v: str, carried: list[str]) -> list[str]:
                goes = self.go_on(self.load("through", y, v), self._taken(y, v))
                return [f.binary("or", m.flag, carried[0], goes)]

            return f.loop(0, self.across, 1, [(m.flag, carried[0])], some)

        (found,) = f.loop(0, self.rows, 1, [(m.flag, constant(m.flag, 0))], row)
        if self.lanes == 1:
            return found
        return f.call("i1", f"llvm.vector.reduce.or.v{self.lanes}i1", (m.flag, found))

    def _taken(self, y: Value, v: Value) -> str:
        return self.load("taken", y, v) if self.op.max_steps else self.m.c(0.0)  # type: ignore[attr-defined]

    def splat(self, splats: Value, splat: Value) -> list[str]:
        row = self.f.address(self.element, splats, self.f.mul(splat, COLUMNS))
        return [self.f.load(self.element, self.f.address(self.element, row, i), self.bytes) for i in range(14)]

    def box(self, boxes: Value, splat: Value) -> tuple[Value, Value, Value, Value]:
        """Rows and vectors of the tile that a splat may cover."""
        f, one = self.f, self.one
        places = [
            f.load(self.element, f.address(self.element, boxes, f.add(f.mul(splat, 4), i)), self.bytes)
            for i in range(4)
        ]

        def whole(x: str, origin: str, more: float) -> str:
            inside = within(one, one.add(one.sub(x, origin), one.c(more)), one.c(0.0), one.c(float(self.size)))
            return f.convert("fptosi", self.element, inside, "i64")

        left, right = whole(places[0], self.left_f, 0.0), whole(places[1], self.left_f, 1.0)
        top, bottom = whole(places[2], self.top_f, 0.0), whole(places[3], self.top_f, 1.0)
        first = f.binary("udiv", "i64", left, self.lanes)
        stop = f.binary("udiv", "i64", f.add(right, self.lanes - 1), self.lanes)
        return top, f.smin(bottom, self.rows), first, stop

    def hit(self, s: list[str], y: Value, v: Value) -> _Hit:
        """A splat at the vector `v` of row `y`; `s` are its numbers."""
        f, m, one = self.f, self.m, self.one

        def spread(x: str) -> str:
            return f.splat(self.type, x)

        centre = one.sub(one.add(one.add(f.convert("sitofp", "i64", y, self.element), self.top_f), one.c(0.5)), s[1])
        start = one.sub(one.add(f.convert("sitofp", "i64", f.add(self.left, f.mul(v, self.lanes)), self.element),
                                one.c(0.5)), s[0])  # fmt: skip
        dx, dy = m.add(self.numbers, spread(start)), spread(centre)
        twice = one.mul(one.c(2.0), centre)
        over0, over1 = one.mul(s[4], one.mul(centre, centre)), one.mul(s[3], twice)
        over = m.fma(m.fma(spread(s[2]), dx, spread(over1)), dx, spread(over0))
        tilt0 = one.add(one.c(1.0), one.mul(s[6], centre))
        under0 = one.add(one.add(one.c(1.0), one.mul(s[6], twice)), one.mul(s[9], one.mul(centre, centre)))
        under1 = one.add(one.mul(one.c(2.0), s[5]), one.mul(s[8], twice))
        under = m.fma(m.fma(spread(s[7]), dx, spread(under1)), dx, spread(under0))
        q = m.div(over, under)
        fade = exponentials.exp(m, m.mul(q, m.c(-0.5)))
        alpha = m.mul(spread(s[10]), fade)
        front = m.test("ogt", m.fma(spread(s[5]), dx, spread(tilt0)), m.c(0.0))
        covers = f.binary("and", m.flag, front, m.test("oge", alpha, m.c(self.op.cutoff)))  # type: ignore[attr-defined]
        through, taken = self.load("through", y, v), self._taken(y, v)
        takes = f.binary("and", m.flag, covers, self.go_on(through, taken))
        return _Hit(dx, dy, q, under, fade, alpha, takes, through, taken)

    def note_taken(self, hit: _Hit, y: Value, v: Value) -> str:
        """Count one more splat of the lanes that took it."""
        if not self.op.max_steps:  # type: ignore[attr-defined]
            return hit.taken
        m = self.m
        counted = m.add(hit.taken, m.select(hit.takes, m.c(1.0), m.c(0.0)))
        self.store("taken", counted, y, v)
        return counted

    def each_entry(
        self, ids: Value, ranges: Value, tile: Value, entries: Value, splats: Value,
        body: Callable[[str, str], None],
    ) -> tuple[Value, Value]:  # fmt: skip
        """Entries of a tile while a pixel takes light: body(entry, splat). Returns where it stopped, and the end.

        Whatever the lists say, nothing outside the arrays is read.
        """
        f = self.f
        bounds = []
        entries = f.select("i64", f.compare("eq", "i64", splats, 0), 0, entries)
        for i in range(2):
            at = f.load("i32", f.address("i32", ranges, f.add(f.mul(tile, 2), i)), 4)
            bounds.append(f.smin(f.smax(f.convert("sext", "i32", at, "i64"), 0), entries))
        begin, end = bounds

        def chunk(state: list[str]) -> list[Value]:
            stop = f.smin(f.add(state[0], CHECK_EVERY), end)

            def one(e: str, _: list[str]) -> None:
                splat = f.convert("sext", "i32", f.load("i32", f.address("i32", ids, e), 4), "i64")
                body(e, str(f.smin(f.smax(splat, 0), f.sub(splats, 1))))

            f.loop(state[0], stop, 1, (), one)
            return [stop, self.any_goes_on()]

        def more(state: list[str]) -> str:
            return f.binary("and", "i1", f.compare("slt", "i64", state[0], end), state[1])

        stopped, _ = while_loop(f, [("i64", begin), ("i1", "true")], more, chunk)
        return stopped, end


def f_mul_add(f: IrFunction, a: Value, by: int, b: Value, times: int) -> Value:
    return f.add(f.mul(a, by), f.mul(b, times))


def _emit_forward(module: IrModule, node: Node, target: Target) -> None:
    f = kernel(module, "raster")
    splats, boxes, background, ids, ranges, out, state, count, entries = arguments(f, "p" * 7 + "ii")
    work = _SplatTiles(f, node, target, FORWARD)
    m, one = work.m, work.one
    shade = [f.load(work.element, f.address(work.element, background, i), work.bytes) for i in range(3)]

    def tile(t: str, _: list[str]) -> None:
        work.begin(t, state)

        def clear(y: str, v: str) -> None:
            work.store("through", work.lit(v), y, v)
            for name in FORWARD[1:]:
                work.store(name, m.c(0.0), y, v)

        work.each_vector(clear)

        def entry(e: str, splat: str) -> None:
            s = work.splat(splats, splat)
            top, bottom, first, stop = work.box(boxes, splat)

            def some(y: str, v: str) -> None:
                hit = work.hit(s, y, v)
                weight = m.select(hit.takes, m.mul(hit.through, hit.alpha), m.c(0.0))
                for name, colour in zip(("red", "green", "blue"), s[11:14], strict=True):
                    work.store(name, m.fma(weight, f.splat(work.type, colour), work.load(name, y, v)), y, v)
                work.store("through", m.sub(hit.through, weight), y, v)
                work.note_taken(hit, y, v)

            f.loop(top, bottom, 1, (), lambda y, _: f.loop(first, stop, 1, (), lambda v, _: some(y, v)) and None)

        work.each_entry(ids, ranges, t, entries, count, entry)

        def finish(y: str, x: str) -> None:
            through = f.load(work.element, work.pixel("through", y, x), work.bytes)
            at = f.add(f.mul(f.add(work.top, y), work.width), f.add(work.left, x))
            place = f.address(work.element, out, f.mul(at, 4))
            for i, name in enumerate(("red", "green", "blue")):
                light = f.load(work.element, work.pixel(name, y, x), work.bytes)
                f.store(work.element, one.fma(through, shade[i], light), f.address(work.element, place, i), work.bytes)
            f.store(work.element, one.sub(one.c(1.0), through), f.address(work.element, place, 3), work.bytes)

        work.each_pixel(finish)

    each_point(f, tile)


@override("splat_raster", instead_of_parts=is_splat)
def _splat_raster(node: Node, target: Target) -> NativeOp | None:
    op: Any = node.op
    dtype = node.inputs[0].dtype

    def plan(sizes: Sizes) -> Planned:
        (count, _), (entries,) = numbers(node.inputs[0].shape, sizes), numbers(node.inputs[3].shape, sizes)
        work = _SplatTiles(kernel(IrModule(), "sizes"), node, target, FORWARD)
        slots = [
            *(("input", i) for i in range(5)), ("output", 0), ("workspace", 0),
            *number_slots(count, entries if count else 0),
        ]  # fmt: skip
        return Planned([NativeCall("raster", slots, op.tiles)], work.state_bytes * op.tiles)

    key = f"splat_raster {dtype} {sorted(op.static_fields().items())}"
    return NativeOp(key, lambda module: _emit_forward(module, node, target), ("raster",), plan)


# ------------------------------------------------------------------------------------------------------------- gradient

_MOMENTS = 15  # sums that one splat's row comes from


def _emit_backward(module: IrModule, node: Node, target: Target) -> None:
    f = kernel(module, "raster_backward")
    splats, boxes, background, ids, ranges, out, ct, state, rows, count, entries = arguments(f, "p" * 9 + "ii")
    work = _SplatTiles(f, node, target, BACKWARD)
    m, one, size = work.m, work.one, work.bytes
    shade = [f.load(work.element, f.address(work.element, background, i), size) for i in range(3)]

    def tile(t: str, _: list[str]) -> None:
        work.begin(t, state)

        def clear(y: str, v: str) -> None:
            work.store("through", work.lit(v), y, v)
            for name in BACKWARD[1:]:
                work.store(name, m.c(0.0), y, v)

        work.each_vector(clear)

        def start(y: str, x: str) -> None:
            at = f.mul(f.add(f.mul(f.add(work.top, y), work.width), f.add(work.left, x)), 4)
            light, g = (
                [f.load(work.element, f.address(work.element, array, f.add(at, i)), size) for i in range(4)]
                for array in (out, ct)
            )
            behind = one.neg(g[3])
            whole = one.neg(one.mul(g[3], one.sub(one.c(1.0), light[3])))
            for i, name in enumerate(("red", "green", "blue")):
                behind = one.fma(g[i], shade[i], behind)
                whole = one.fma(g[i], light[i], whole)
                f.store(work.element, g[i], work.pixel(name, y, x), size)
            f.store(work.element, behind, work.pixel("behind", y, x), size)
            f.store(work.element, whole, work.pixel("whole", y, x), size)

        work.each_pixel(start)

        def entry(e: str, splat: str) -> None:
            s = work.splat(splats, splat)
            top, bottom, first, stop = work.box(boxes, splat)
            zero = [(work.type, m.c(0.0))] * _MOMENTS

            def row(y: str, carried: list[str]) -> list[str]:
                sums = [(work.type, x) for x in carried]
                return f.loop(first, stop, 1, sums, lambda v, now: _moments(work, s, y, v, now))

            sums = f.loop(top, bottom, 1, zero, row)
            _store_row(work, s, [_total(work, x) for x in sums], f.address(work.element, rows, f.mul(e, COLUMNS)))

        stopped, end = work.each_entry(ids, ranges, t, entries, count, entry)
        rest = f.smax(f.sub(end, stopped), 0)
        fill_zero(f, f.address(work.element, rows, f.mul(stopped, COLUMNS)), f.mul(rest, COLUMNS * size))

    each_point(f, tile)


def _moments(work: _SplatTiles, s: list[str], y: Value, v: Value, now: list[str]) -> list[str]:
    """Sums so far with one vector of pixels more, whose state goes on."""
    f, m = work.f, work.m
    hit = work.hit(s, y, v)
    g = [work.load(name, y, v) for name in ("red", "green", "blue")]
    colour = m.mul(g[0], f.splat(work.type, s[11]))
    for i in (1, 2):
        colour = m.fma(g[i], f.splat(work.type, s[11 + i]), colour)
    alpha = m.select(hit.takes, hit.alpha, m.c(0.0))
    weight = m.mul(hit.through, alpha)
    after = m.fma(weight, colour, work.load("so_far", y, v))
    then = m.sub(hit.through, weight)
    work.store("so_far", after, y, v)
    work.store("through", then, y, v)
    taken = work.note_taken(hit, y, v)
    left = m.sub(m.c(1.0), alpha)
    left = m.select(m.test("ogt", left, m.c(TINY)), left, m.c(TINY))
    rest = m.select(
        work.go_on(then, taken),
        m.div(m.sub(work.load("whole", y, v), after), left),
        m.mul(hit.through, work.load("behind", y, v)),
    )
    d_alpha = m.select(hit.takes, m.sub(m.mul(hit.through, colour), rest), m.c(0.0))
    d_over = m.div(m.mul(m.mul(alpha, d_alpha), m.c(-0.5)), hit.under)
    d_over = m.select(hit.takes, d_over, m.c(0.0))
    d_under = m.select(hit.takes, m.neg(m.mul(d_over, hit.q)), m.c(0.0))
    over_x, over_y = m.mul(d_over, hit.dx), m.mul(d_over, hit.dy)
    under_x, under_y = m.mul(d_under, hit.dx), m.mul(d_under, hit.dy)
    fade = m.select(hit.takes, hit.fade, m.c(0.0))
    return [
        m.add(now[0], over_x), m.add(now[1], over_y), m.fma(over_x, hit.dx, now[2]), m.fma(over_x, hit.dy, now[3]),
        m.fma(over_y, hit.dy, now[4]), m.add(now[5], d_under), m.add(now[6], under_x), m.add(now[7], under_y),
        m.fma(under_x, hit.dx, now[8]), m.fma(under_x, hit.dy, now[9]), m.fma(under_y, hit.dy, now[10]),
        m.fma(d_alpha, fade, now[11]), *(m.fma(weight, g[i], now[12 + i]) for i in range(3)),
    ]  # fmt: skip


def _total(work: _SplatTiles, x: str) -> str:
    if work.lanes == 1:
        return x
    return work.f.fold_lanes(work.type, x, lambda type_, a, b: work.f.binary("fadd", type_, a, b))


def _store_row(work: _SplatTiles, s: list[str], sums: list[str], place: str) -> None:
    """The gradient of a splat's row, of the sums over the pixels of one tile."""
    f, one = work.f, work.one
    over_x, over_y, over_xx, over_xy, over_yy = sums[:5]
    under, under_x, under_y, under_xx, under_xy, under_yy = sums[5:11]

    def combined(*pairs: tuple[str, str]) -> str:
        total = one.c(0.0)
        for a, b in pairs:
            total = one.fma(a, b, total)
        return one.mul(one.c(-2.0), total)

    def twice(x: str) -> str:
        return one.add(x, x)

    du = combined((s[2], over_x), (s[3], over_y), (s[5], under), (s[7], under_x), (s[8], under_y))
    dv = combined((s[3], over_x), (s[4], over_y), (s[6], under), (s[8], under_x), (s[9], under_y))
    values = [
        du, dv, over_xx, twice(over_xy), over_yy, twice(under_x), twice(under_y), under_xx, twice(under_xy), under_yy,
        *sums[11:15], one.c(0.0), one.c(0.0),
    ]  # fmt: skip
    for i, value in enumerate(values):
        f.store(work.element, value, f.address(work.element, place, i), work.bytes)


def _emit_collect(module: IrModule, node: Node) -> None:
    """The rows of a splat's entries added up, in the order in which they were made."""
    f = kernel(module, "collect")
    rows, places, starts, order, made, count, entries = arguments(f, "pppppii")
    dtype = node.inputs[0].dtype
    element, size = register_type(dtype), dtype.itemsize
    row_type = vector(element, COLUMNS)

    def splat(rank: str, _: list[str]) -> None:
        bounds = []
        for i in range(2):
            at = f.load("i32", f.address("i32", starts, f.add(rank, i)), 4)
            bounds.append(f.smin(f.smax(f.convert("sext", "i32", at, "i64"), 0), entries))

        def entry(e: str, carried: list[str]) -> list[str]:
            at = f.convert("sext", "i32", f.load("i32", f.address("i32", places, e), 4), "i64")
            at = str(f.smin(f.smax(at, 0), f.sub(entries, 1)))
            row = f.load(row_type, f.address(element, rows, f.mul(at, COLUMNS)), size)
            return [f.binary("fadd", row_type, carried[0], row)]

        (total,) = f.loop(bounds[0], bounds[1], 1, [(row_type, constant(row_type, 0.0))], entry)
        at = f.load("i64", f.address("i64", order, rank), 8)

        def put() -> None:
            f.store(row_type, total, f.address(element, made, f.mul(at, COLUMNS)), size)

        f.if_(f.compare("ult", "i64", at, count), put)

    each_point(f, splat)


@override("splat_raster_backward", instead_of_parts=is_splat)
def _splat_raster_backward(node: Node, target: Target) -> NativeOp | None:
    op: Any = node.op
    dtype = node.inputs[0].dtype

    def emit(module: IrModule) -> None:
        _emit_backward(module, node, target)
        _emit_collect(module, node)
        f = kernel(module, "clear")
        to, size = arguments(f, "pi")
        fill_zero(f, to, size)
        f.ret()

    def plan(sizes: Sizes) -> Planned:
        (count, _), (entries,) = numbers(node.inputs[0].shape, sizes), numbers(node.inputs[3].shape, sizes)
        if count == 0:
            return Planned(())
        work = _SplatTiles(kernel(IrModule(), "sizes"), node, target, BACKWARD)
        row = COLUMNS * dtype.itemsize
        state = row * entries
        raster = [
            *(("input", i) for i in range(5)), ("input", 8), ("input", 9), ("workspace", state), ("workspace", 0),
            *number_slots(count, entries),
        ]  # fmt: skip
        collect = [
            ("workspace", 0), ("input", 5), ("input", 6), ("input", 7), ("output", 0), *number_slots(count, entries),
        ]  # fmt: skip
        calls = [
            NativeCall("clear", [("output", 0), *number_slots(row * count)]),
            NativeCall("raster_backward", raster, op.tiles),
            NativeCall("collect", collect, count, COLLECT),
        ]
        return Planned(calls, state + work.state_bytes * op.tiles)

    key = f"splat_raster_backward {dtype} {sorted(op.static_fields().items())}"
    return NativeOp(key, emit, ("raster_backward", "collect", "clear"), plan)
