"""Many short rows sorted at once: a row in each lane, and a network of minima and maxima that does not look at the
data.

The network is Batcher's merge exchange, for any length (Knuth, volume 3, algorithm 5.2.2M). A group of rows lies in
the workspace as [element][lane]; keys of 64 bits with positions, as [element][key, position][lane]. The last group
starts early enough to be full; rows that two groups sort get equal values.
"""

from __future__ import annotations

from strata.backends.llvm.builder import Function, Module, Value, constant, vector
from strata.backends.llvm.fft import transposed
from strata.backends.llvm.native import arguments, kernel, while_loop
from strata.backends.llvm.sorter import Layout, from_key, key_bits, order_key
from strata.core import DType, Target

LONGEST = {
    8: 1024,
    16: 2048,
    32: 2048,
    64: 1024,
    128: 512,
}  # rows for which the network beats sorting row by row, by bits
UNROLL = 4


def network_lanes(layout: Layout, target: Target) -> int:
    return target.lanes(min(max(layout.size, 4), 8))


def _words(layout: Layout) -> int:
    """Vectors of an element: what is wider than a lane has its key in one, its position in another."""
    return max(1, layout.bits // 64)


def _lane_type(layout: Layout) -> str:
    return f"i{min(layout.bits, 64)}"


def emit_network(module: Module, layout: Layout, lanes: int) -> str:
    """Adds `void network(ptr rows, i64 n)`."""
    name = f"network_{layout.bits}"
    if module.has(name):
        return name
    type_, words = vector(_lane_type(layout), lanes), _words(layout)
    f = module.function(name, (("ptr", "rows"), ("i64", "n")), linkage="internal")

    def exchange(low: Value, gap: Value) -> None:
        cells = [f.address(type_, "%rows", f.mul(at, words)) for at in (low, f.add(low, gap))]
        if words == 2:
            exchange_pairs(cells)
            return
        a, b = (f.load(type_, cell, layout.align) for cell in cells)
        f.store(type_, f.intrinsic("umin", type_, a, b), cells[0], layout.align)
        f.store(type_, f.intrinsic("umax", type_, a, b), cells[1], layout.align)

    def exchange_pairs(cells: list[str]) -> None:
        seconds = [f.address(type_, cell, 1) for cell in cells]
        (a, b), (i, j) = ([f.load(type_, cell, 8) for cell in pair] for pair in (cells, seconds))
        flag = vector("i1", lanes)
        behind = f.binary("and", flag, f.compare("eq", type_, a, b), f.compare("ugt", type_, i, j))
        turn = f.binary("or", flag, f.compare("ugt", type_, a, b), behind)
        for pair, (x, y) in ((cells, (a, b)), (seconds, (i, j))):
            f.store(type_, f.select(type_, turn, y, x), pair[0], 8)
            f.store(type_, f.select(type_, turn, x, y), pair[1], 8)

    def phase(state: list[str]) -> list[Value]:
        (p,) = state
        block = f.mul(p, 2)

        def distance(inner: list[str]) -> list[Value]:
            (k,) = inner
            start = f.select("i64", f.compare("eq", "i64", k, p), 0, k)

            def run(j: str, _: list[str]) -> None:
                other = f.add(j, k)
                inside = f.compare("ne", "i64", f.binary("and", "i64", other, f.sub(block, 1)), 0)

                def each() -> None:
                    count = f.smin(k, f.sub("%n", other))
                    whole = f.round_down(count, UNROLL)

                    def four(i: str, _: list[str]) -> None:
                        for u in range(UNROLL):
                            exchange(f.add(f.add(j, i), u), k)

                    f.loop(0, whole, UNROLL, (), four)
                    f.loop(whole, count, 1, (), lambda i, _: exchange(f.add(j, i), k))

                f.if_(inside, each)

            f.loop(start, f.sub("%n", k), f.mul(k, 2), (), run)
            return [f.binary("lshr", "i64", k, 1)]

        while_loop(f, [("i64", p)], lambda s: f.compare("sgt", "i64", s[0], 0), distance)
        return [block]

    while_loop(f, [("i64", 1)], lambda s: f.compare("slt", "i64", s[0], "%n"), phase)
    f.ret()
    return name


class _Group:
    """Emits the way of a group of rows into the workspace and out of it."""

    def __init__(self, f: Function, dtype: DType, layout: Layout, lanes: int, descending: bool) -> None:
        self.f, self.dtype, self.layout, self.lanes, self.descending = f, dtype, layout, lanes, descending
        self.raw = f"i{key_bits(dtype)}"
        self.raws, self.type = vector(self.raw, lanes), vector(_lane_type(layout), lanes)
        self.words = _words(layout)

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

    def load(self, source: Value, planes: Value, n: Value, inner: Value, even: Value) -> None:
        f, lanes = self.f, self.lanes

        def rows() -> None:
            def one(i: str, _: list[str]) -> None:
                self.put(
                    f.load(self.raws, f.address(self.raw, source, f.mul(i, inner)), self.dtype.itemsize), planes, i
                )

            f.loop(0, n, 1, (), one)

        def columns() -> None:
            def tile(start: Value) -> None:
                places = [f.address(self.raw, source, f.add(f.mul(n, lane), start)) for lane in range(lanes)]
                square = [f.load(self.raws, place, self.dtype.itemsize) for place in places]
                for i, raw in enumerate(transposed(f, self.raws, square)):
                    self.put(raw, planes, f.add(start, i))

            self._tiles(n, tile)

        f.if_(even, rows, columns)

    def store(self, planes: Value, to: Value, n: Value, inner: Value, even: Value) -> None:
        f, lanes = self.f, self.lanes
        element, align = (_lane_type(self.layout), 8) if self.layout.shift else (self.raw, self.dtype.itemsize)
        type_ = vector(element, lanes)

        def rows() -> None:
            def one(i: str, _: list[str]) -> None:
                f.store(type_, self.get(planes, i), f.address(element, to, f.mul(i, inner)), align)

            f.loop(0, n, 1, (), one)

        def columns() -> None:
            def tile(start: Value) -> None:
                square = [self.get(planes, f.add(start, i)) for i in range(lanes)]
                for lane, value in enumerate(transposed(f, type_, square)):
                    f.store(type_, value, f.address(element, to, f.add(f.mul(n, lane), start)), align)

            self._tiles(n, tile)

        f.if_(even, rows, columns)

    def _tiles(self, n: Value, tile) -> None:  # type: ignore[no-untyped-def]
        """Squares of elements and lanes; the last one starts early enough to be full."""
        f, lanes = self.f, self.lanes
        f.loop(0, f.round_down(n, lanes), lanes, (), lambda i, _: tile(i))
        ragged = f.compare("ne", "i64", f.binary("and", "i64", n, lanes - 1), 0)
        f.if_(ragged, lambda: tile(f.sub(n, lanes)))


def emit_groups(module: Module, dtype: DType, target: Target, what: str, descending: bool) -> None:
    """Groups of rows: brought into lanes, sorted by the network, written as elements, positions or the best of both."""
    layout = Layout.of(dtype, with_position=what != "sort")
    lanes = network_lanes(layout, target)
    network = emit_network(module, layout, lanes)
    f = kernel(module, f"{what}_network")
    source, out, ids, workspace, slot_bytes, n, inner, rows, slots, k, groups, per_outer = arguments(f, "ppppiiiiiiii")
    work = _Group(f, dtype, layout, lanes, descending)
    even = f.compare("sgt", "i64", inner, 1)

    def slot(point: str, _: list[str]) -> None:
        planes = f.address("i8", workspace, f.mul(point, slot_bytes))
        first = f.binary("udiv", "i64", f.mul(point, groups), slots)
        last = f.binary("udiv", "i64", f.mul(f.add(point, 1), groups), slots)

        def group(g: str, _: list[str]) -> None:
            outer = f.binary("udiv", "i64", g, per_outer)
            lane = f.smin(f.mul(f.binary("urem", "i64", g, per_outer), lanes), f.sub(rows, lanes))
            step = f.select("i64", even, 1, n)
            begin = f.add(f.mul(f.mul(outer, n), inner), f.mul(lane, step))
            at = f.address(work.raw, source, begin)
            work.load(at, planes, n, inner, even)
            f.call("void", network, ("ptr", planes), ("i64", n))
            if what == "sort":
                work.store(planes, f.address(work.raw, out, begin), n, inner, even)
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

        f.loop(first, last, 1, (), group)

    f.loop("%begin", "%end", 1, (), slot)
    f.ret()
