"""Sorting networks: many short rows sorted at once, one in each vector lane.

The network is Batcher's merge exchange, for any length (Knuth, volume 3, algorithm 5.2.2M). A group of rows lies in
the workspace as [element][lane]; keys of 64 bits with positions, as [element][key, position][lane]. The last group
starts early enough to be full; rows that two groups sort get equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from strata.backends.llvm.fft.transforms import transposed
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.native import arguments, each_of_slot, each_point, kernel, while_loop
from strata.backends.llvm.ir.registers import Parts, gather, scatter
from strata.backends.llvm.natives.radix_sort import Layout, emit_zeros, from_key, key_bits, order_key
from strata.core import DType, Target

# rows for which the network beats sorting row by row, by bits, with vectors of 64 bytes; and workspace stays small
LONGEST = {8: 2048, 16: 4096, 32: 4096, 64: 4096, 128: 2048}
UNROLL = 4
BLOCK = 8  # elements that are put in order in registers
LAST = 4  # the first of the distances that are done in one pass


def network_lanes(layout: Layout, target: Target) -> int:
    return target.lanes(min(max(layout.size, 4), 8))


def network_longest(layout: Layout, target: Target) -> int:
    """The longest row that the network takes; 0 where there is none for the layout."""
    return LONGEST.get(layout.bits, 0) * target.vector_bytes // 64


def _words(layout: Layout) -> int:
    """Vectors of an element: what is wider than a lane has its key in one, its position in another."""
    return max(1, layout.bits // 64)


def _lane_type(layout: Layout) -> str:
    return f"i{min(layout.bits, 64)}"


def merge_pairs(length: int) -> list[tuple[int, int]]:
    """The exchanges that put a power of two of elements in order."""
    pairs, p = [], 1
    while p < length:
        k = p
        while k:
            starts = range(0 if k == p else k, length - k, 2 * k)
            pairs += [
                (j + i, j + i + k) for j in starts for i in range(k) if (j + i) // (2 * p) == (j + i + k) // (2 * p)
            ]
            k //= 2
        p *= 2
    return pairs


class _Network:
    """Emits exchanges of elements, which are one vector or two: in registers, or in memory."""

    def __init__(self, f: IrFunction, layout: Layout, lanes: int) -> None:
        self.f, self.words, self.lanes = f, _words(layout), lanes
        self.align = 8 if self.words == 2 else layout.align
        self.type = vector(_lane_type(layout), lanes)

    def load(self, at: Value) -> Parts:
        return tuple(self.f.load(self.type, cell, self.align) for cell in self._cells(at))

    def store(self, element: Parts, at: Value) -> None:
        for part, cell in zip(element, self._cells(at), strict=True):
            self.f.store(self.type, part, cell, self.align)

    def _cells(self, at: Value) -> list[str]:
        start = self.f.address(self.type, "%rows", self.f.mul(at, self.words))
        return [self.f.address(self.type, start, word) if word else start for word in range(self.words)]

    def sorted(self, x: Parts, y: Parts) -> tuple[Parts, Parts]:
        f, type_ = self.f, self.type
        if self.words == 1:
            return (f.intrinsic("umin", type_, x[0], y[0]),), (f.intrinsic("umax", type_, x[0], y[0]),)
        flag = vector("i1", self.lanes)
        behind = f.binary("and", flag, f.compare("eq", type_, x[0], y[0]), f.compare("ugt", type_, x[1], y[1]))
        turn = f.binary("or", flag, f.compare("ugt", type_, x[0], y[0]), behind)
        pairs = list(zip(x, y, strict=True))
        low, high = (tuple(f.select(type_, turn, *pair[::way]) for pair in pairs) for way in (-1, 1))
        return low, high

    def exchange(self, low: Value, high: Value) -> None:
        for element, at in zip(self.sorted(self.load(low), self.load(high)), (low, high), strict=True):
            self.store(element, at)

    def sort_block(self, start: Value) -> None:
        """BLOCK elements, in registers."""
        places = [self.f.add(start, i) for i in range(BLOCK)]
        elements = [self.load(at) for at in places]
        for i, j in merge_pairs(BLOCK):
            elements[i], elements[j] = self.sorted(elements[i], elements[j])
        for element, at in zip(elements, places, strict=True):
            self.store(element, at)

    def at_distance(self, start: Value, count: Value, k: Value) -> None:
        """Pairs (start + i, start + i + k)."""
        f = self.f
        whole = f.round_down(count, UNROLL)

        def four(i: str, _: list[str]) -> None:
            for u in range(UNROLL):
                at = f.add(f.add(start, i), u)
                self.exchange(at, f.add(at, k))

        def one(i: str, _: list[str]) -> None:
            at = f.add(start, i)
            self.exchange(at, f.add(at, k))

        f.loop(0, whole, UNROLL, (), four)
        f.loop(whole, count, 1, (), one)

    def at_last_distances(self, base: Value, count: Value) -> None:
        """Distances 4, 2 and 1 in one pass: pairs of a distance k start at k, 3k, 5k …, so each pass is k behind the
        one before it, and three elements wait for the next eight."""
        f, n = self.f, 2 * LAST

        def flat(elements: Sequence[Parts]) -> list[Value]:
            return [part for element in elements for part in element]

        def element(values: Sequence[str], at: int) -> Parts:
            return tuple(values[at * self.words : (at + 1) * self.words])

        def window(i: str, waiting: list[str]) -> list[Value]:
            e = [element(waiting, j) for j in range(3)] + [self.load(f.add(i, j)) for j in range(n)]
            for low, high in _WINDOW:
                e[low], e[high] = self.sorted(e[low], e[high])
            for j in range(n):
                self.store(e[j], f.add(i, j - 3))
            return flat(e[n:])

        first, end = f.add(base, LAST), f.add(base, count)
        whole = f.add(first, f.round_down(f.sub(count, LAST), n))
        carried = [(self.type, part) for part in flat([self.load(f.add(base, j)) for j in range(1, 4)])]
        waiting = f.loop(first, whole, n, carried, window)
        for j in range(3):
            self.store(element(waiting, j), f.add(whole, j - 3))
        for low, high in (*_WINDOW, (8, 9)):  # what is left, where there is any, and the pair that waits for no more
            places = f.add(whole, low - 3), f.add(whole, high - 3)
            f.if_(f.compare("slt", "i64", places[1], end), partial(self.exchange, *places))


# exchanges of three elements that wait and eight that come, at distances 4, 2 and 1
_WINDOW = (
    *((j, j + 4) for j in range(3, 7)),
    *((j, j + 2) for j in (1, 2, 5, 6)),
    *((j, j + 1) for j in (0, 2, 4, 6)),
)


def emit_network(module: IrModule, layout: Layout, lanes: int) -> str:
    """Adds `void network(ptr rows, i64 n)`: blocks in registers, then pairs of blocks merged, and pairs of those."""
    name = f"network_{layout.bits}"
    if module.has(name):
        return name
    f = module.function(name, (("ptr", "rows"), ("i64", "n")), linkage="internal")
    work = _Network(f, layout, lanes)
    f.loop(0, f.round_down("%n", BLOCK), BLOCK, (), lambda start, _: work.sort_block(start))

    def merge_all(low: Value, first: int, last: int | None, distances_until: int) -> None:
        """Runs of p, 2p, 4p … elements from a place on, until there is one; distances as far down as is said."""

        def phase(state: list[str]) -> list[Value]:
            (p,) = state
            double = f.mul(p, 2)

            def block(b: str, _: list[str]) -> None:
                count = f.smin(double, f.sub("%n", b))

                def merge() -> None:
                    work.at_distance(b, f.sub(count, p), p)

                    def distance(inner: list[str]) -> list[Value]:
                        (k,) = inner

                        def run(j: str, _: list[str]) -> None:
                            work.at_distance(f.add(b, j), f.smin(k, f.sub(f.sub(count, j), k)), k)

                        f.loop(k, f.sub(count, k), f.mul(k, 2), (), run)
                        return [f.binary("lshr", "i64", k, 1)]

                    half = f.binary("lshr", "i64", p, 1)
                    while_loop(f, [("i64", half)], lambda s: f.compare("sge", "i64", s[0], distances_until), distance)
                    if distances_until > 1:
                        work.at_last_distances(b, count)

                f.if_(f.compare("sgt", "i64", count, p), merge)

            f.loop(low, "%n", double, (), block)
            return [double]

        def more(state: list[str]) -> str:
            return f.compare("slt", "i64", state[0], "%n" if last is None else last)

        while_loop(f, [("i64", first)], more, phase)

    merge_all(f.round_down("%n", BLOCK), 1, BLOCK, 1)  # the last few
    merge_all(0, BLOCK, None, 2 * LAST)
    f.ret()
    return name


class _Group:
    """Emits the way of a group of rows into the workspace and out of it."""

    def __init__(self, f: IrFunction, dtype: DType, layout: Layout, lanes: int, descending: bool) -> None:
        self.f, self.dtype, self.layout, self.lanes, self.descending = f, dtype, layout, lanes, descending
        self.raw = f"i{key_bits(dtype)}"
        self.raws, self.type = vector(self.raw, lanes), vector(_lane_type(layout), lanes)
        self.words = _words(layout)
        self.tracks = dtype.is_float and not layout.shift  # whether a -0 comes by: positions are not there to tell

    def put(self, raw: str, planes: Value, i: Value) -> None:
        f, layout = self.f, self.layout
        key = order_key(f, self.dtype, raw, self.lanes, descending=self.descending, one_zero=layout.shift > 0)
        place = f.address(self.type, planes, f.mul(i, self.words))
        if self.words == 2:
            f.store(self.type, f.splat(self.type, i), f.address(self.type, place, 1), layout.align)
        elif layout.shift:
            wide = f.convert("zext", self.raws, key, self.type)
            key = f.binary("shl", self.type, wide, constant(self.type, layout.shift))
            key = f.binary("or", self.type, key, f.splat(self.type, i))
        f.store(self.type, key, place, layout.align)

    def get(self, planes: Value, i: Value) -> str:
        """Sorted elements, or positions where there are any."""
        f, layout = self.f, self.layout
        last = f.add(f.mul(i, self.words), self.words - 1)
        key = f.load(self.type, f.address(self.type, planes, last), layout.align)
        if self.words == 2:
            return key
        if layout.shift:
            return f.binary("and", self.type, key, constant(self.type, (1 << layout.shift) - 1))
        return from_key(f, self.dtype, key, self.lanes, descending=self.descending)

    def reorder_zeros(
        self, zeros: str, least: Value, source: Value, to: Value, n: Value, inner: Value, step: Value
    ) -> None:
        """Zeros of both signs in their order, where a row of the group has a -0; rows begin `step` elements apart."""
        f = self.f
        lowest = f.call(self.raw, f"llvm.vector.reduce.umin.v{self.lanes}{self.raw}", (self.raws, least))

        def row(lane: str, _: list[str]) -> None:
            ends = [f.address(self.raw, base, f.mul(lane, step)) for base in (source, to)]
            f.call("void", zeros, ("ptr", ends[0]), ("ptr", ends[1]), ("i64", n), ("i64", inner))

        some = f.compare("eq", self.raw, lowest, constant(self.raw, 0))
        f.if_(some, lambda: f.loop(0, self.lanes, 1, (), row) and None)

    def _with(self, least: list[str], raw: str) -> list[Value]:
        """The least element with its sign turned so far: 0 where a -0 has come by."""
        if not least:
            return []
        turned = self.f.binary("xor", self.raws, raw, constant(self.raws, 1 << (key_bits(self.dtype) - 1)))
        name = f"llvm.umin.v{self.lanes}{self.raw}"
        return [self.f.call(self.raws, name, (self.raws, least[0]), (self.raws, turned))]

    def load(self, source: Value, planes: Value, n: Value, inner: Value, even: Value) -> list[str]:
        """The group's elements to the workspace; gives what `_with` knows at the end, if it is tracked."""
        f, lanes = self.f, self.lanes
        carried: list[tuple[str, Value]] = [(self.raws, constant(self.raws, -1))] if self.tracks else []
        types = [t for t, _ in carried]

        def rows() -> list[str]:
            def one(i: str, least: list[str]) -> list[Value]:
                raw = f.load(self.raws, f.address(self.raw, source, f.mul(i, inner)), self.dtype.itemsize)
                self.put(raw, planes, i)
                return self._with(least, raw)

            return f.loop(0, n, 1, carried, one)

        def columns() -> list[str]:
            def tile(start: Value, least: list[str]) -> list[Value]:
                places = [f.address(self.raw, source, f.add(f.mul(n, lane), start)) for lane in range(lanes)]
                square = [f.load(self.raws, place, self.dtype.itemsize) for place in places]
                known: list[Any] = list(least)
                for i, raw in enumerate(transposed(f, self.raws, square)):
                    self.put(raw, planes, f.add(start, i))
                    known = self._with(known, raw)
                return known

            return self._tiles(n, carried, tile)

        def short() -> list[str]:
            def one(i: str, least: list[str]) -> list[Value]:
                everywhere = constant(vector("i1", lanes), 1)
                raw = gather(f, self.raws, self._across(self.raw, source, n, i), self.dtype.itemsize, everywhere)
                self.put(raw, planes, i)
                return self._with(least, raw)

            return f.loop(0, n, 1, carried, one)

        def uneven() -> list[str]:
            return f.if_(f.compare("slt", "i64", n, lanes), short, columns, types)

        return f.if_(even, rows, uneven, types)

    def _across(self, element: str, base: Value, n: Value, i: Value) -> str:
        """Addresses of the element i of each row; rows have n of them."""
        f, index = self.f, vector("i64", self.lanes)
        starts = f.binary("mul", index, vector_constant("i64", range(self.lanes)), f.splat(index, n))
        return f.op(f"getelementptr {element}, ptr {base}, {index} {f.binary('add', index, starts, f.splat(index, i))}")

    def store(self, planes: Value, to: Value, n: Value, inner: Value, even: Value) -> None:
        f, lanes = self.f, self.lanes
        element, align = (_lane_type(self.layout), 8) if self.layout.shift else (self.raw, self.dtype.itemsize)
        type_ = vector(element, lanes)

        def rows() -> None:
            def one(i: str, _: list[str]) -> None:
                f.store(type_, self.get(planes, i), f.address(element, to, f.mul(i, inner)), align)

            f.loop(0, n, 1, (), one)

        def columns() -> None:
            def tile(start: Value, _: list[str]) -> list[Value]:
                square = [self.get(planes, f.add(start, i)) for i in range(lanes)]
                for lane, value in enumerate(transposed(f, type_, square)):
                    f.store(type_, value, f.address(element, to, f.add(f.mul(n, lane), start)), align)
                return []

            self._tiles(n, [], tile)

        def short() -> None:
            def one(i: str, _: list[str]) -> None:
                everywhere = constant(vector("i1", lanes), 1)
                scatter(f, type_, self.get(planes, i), self._across(element, to, n, i), align, everywhere)

            f.loop(0, n, 1, (), one)

        f.if_(even, rows, lambda: f.if_(f.compare("slt", "i64", n, lanes), short, columns) and None)

    def _tiles(
        self, n: Value, carried: list[tuple[str, Value]], tile: Callable[[Value, list[str]], list[Value]]
    ) -> list[str]:
        """Squares of elements and lanes; the last one starts early enough to be full."""
        f, lanes = self.f, self.lanes
        state = f.loop(0, f.round_down(n, lanes), lanes, carried, tile)
        ragged = f.compare("ne", "i64", f.binary("and", "i64", n, lanes - 1), 0)
        types = [t for t, _ in carried]
        return f.if_(ragged, lambda: tile(f.sub(n, lanes), state), lambda: state, types)


def emit_groups(module: IrModule, dtype: DType, target: Target, what: str, descending: bool) -> None:
    """Groups of rows: brought into lanes, sorted by the network, written as elements, positions or the best of both."""
    layout = Layout.of(dtype, with_position=what != "sort")
    lanes = network_lanes(layout, target)
    network = emit_network(module, layout, lanes)
    zeros = emit_zeros(module, dtype, descending, looks=False) if what == "sort" and dtype.is_float else None
    f = kernel(module, f"{what}_network")
    source, out, ids, workspace, slot_bytes, n, inner, rows, slots, k, groups, per_outer = arguments(f, "ppppiiiiiiii")
    work = _Group(f, dtype, layout, lanes, descending)
    even = f.compare("sgt", "i64", inner, 1)

    def slot(point: str, _: list[str]) -> None:
        planes = f.address("i8", workspace, f.mul(point, slot_bytes))

        def group(g: str, _: list[str]) -> None:
            outer = f.binary("udiv", "i64", g, per_outer)
            lane = f.smin(f.mul(f.binary("urem", "i64", g, per_outer), lanes), f.sub(rows, lanes))
            step = f.select("i64", even, 1, n)
            begin = f.add(f.mul(f.mul(outer, n), inner), f.mul(lane, step))
            at = f.address(work.raw, source, begin)
            least = work.load(at, planes, n, inner, even)
            f.call("void", network, ("ptr", planes), ("i64", n))
            if what == "sort":
                to = f.address(work.raw, out, begin)
                work.store(planes, to, n, inner, even)
                if zeros is not None:
                    work.reorder_zeros(zeros, least[0], at, to, n, inner, step)
            elif what == "argsort":
                work.store(planes, f.address("i64", ids, begin), n, inner, even)
            else:
                to_step = f.select("i64", even, 1, k)
                start = f.add(f.mul(f.mul(outer, k), inner), f.mul(lane, to_step))

                def best(i: str, _: list[str]) -> None:
                    positions = work.get(planes, i)
                    for number in range(lanes):
                        position = f.extract(work.type, positions, number)
                        to = f.add(f.add(start, f.mul(to_step, number)), f.mul(i, inner))
                        from_ = f.add(f.mul(step, number), f.mul(position, inner))
                        f.store("i64", position, f.address("i64", ids, to), 8)
                        value = f.load(work.raw, f.address(work.raw, at, from_), dtype.itemsize)
                        f.store(work.raw, value, f.address(work.raw, out, to), dtype.itemsize)

                f.loop(0, k, 1, (), best)

        each_of_slot(f, point, groups, slots, group)

    each_point(f, slot)
