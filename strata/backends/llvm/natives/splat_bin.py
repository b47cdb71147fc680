"""Splats by tile: spans of tiles under ellipses, counted, then put in the order of tiles (a counting sort)."""

from __future__ import annotations

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.float_ops import VectorMath
from strata.backends.llvm.ir.native import arguments, fill_zero, kernel, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.ir.registers import register_type
from strata.core import Target, TensorType
from strata.mir import Node, Op

SLACK = (1 + 1e-6) ** 0.5  # of an ellipse's half axes


def is_splat(op: Op, types: list[TensorType], target: Target) -> bool:
    return types[0].dtype.name in ("f32", "f64")


def within(m: VectorMath, x: Value, low: Value, high: Value) -> str:
    """A number that is not beyond two others; NaN becomes the lower one."""
    f = m.f
    return f.intrinsic("minnum", m.type, f.intrinsic("maxnum", m.type, x, low), high)


@override("splat_bin", instead_of_parts=is_splat)
def _splat_bin(node: Node, target: Target) -> NativeOp | None:
    op, dtype = node.op, node.inputs[0].dtype
    columns, rows, tiles, size = op.columns, op.rows, op.tiles, op.tile  # type: ignore[attr-defined]
    number, width = register_type(dtype), dtype.itemsize

    def emit(module: IrModule) -> None:
        f = kernel(module, "bin")
        outlines, order, seen, ids, ranges, places, starts, tags, following, count, most = arguments(f, "p" * 9 + "ii")
        m = VectorMath(f, number, target)
        fill_zero(f, ids, f.mul(most, 4))
        fill_zero(f, places, f.mul(most, 4))
        fill_zero(f, following, 8 * tiles)
        f.store("i32", 0, starts, 4)

        def each_splat(rank: str, carried: list[str]) -> list[str]:
            splat = _splat(f, order, rank)

            def visible() -> list[Value]:
                values = [
                    f.load(number, f.address(number, outlines, f.add(f.mul(splat, 5), i)), width) for i in range(5)
                ]
                return [_Spans(m, values, size, columns, rows).append(tags, following, most, carried[0])]

            is_known = f.compare("ult", "i64", splat, count)
            at = f.select("i64", is_known, splat, 0)
            is_seen = f.compare("ne", "i8", f.load("i8", f.address("i8", seen, at), 1), 0)
            (made,) = f.if_(f.binary("and", "i1", is_known, is_seen), visible, lambda: [carried[0]], ("i64",))
            f.store("i32", f.convert("trunc", "i64", made, "i32"), f.address("i32", starts, f.add(rank, 1)), 4)
            return [made]

        f.loop(0, count, 1, [("i64", 0)], each_splat)

        def each_tile(tile: str, carried: list[str]) -> list[str]:
            place = f.address("i64", following, tile)
            here = f.load("i64", place, 8)
            f.store("i64", carried[0], place, 8)
            end = f.add(carried[0], here)
            has_any = f.compare("ne", "i64", here, 0)
            for i, bound in enumerate((carried[0], end)):
                narrow = f.convert("trunc", "i64", f.select("i64", has_any, bound, 0), "i32")
                f.store("i32", narrow, f.address("i32", ranges, f.add(f.mul(tile, 2), i)), 4)
            return [str(end)]

        f.loop(0, tiles, 1, [("i64", 0)], each_tile)

        def place_splat(rank: str, _: list[str]) -> None:
            splat = f.convert("trunc", "i64", _splat(f, order, rank), "i32")
            begin, end = (_wide(f, starts, f.add(rank, i)) for i in range(2))

            def entry(e: str, _: list[str]) -> None:
                place = f.address("i64", following, _wide(f, tags, e))
                at = f.load("i64", place, 8)
                f.store("i64", f.add(at, 1), place, 8)
                f.store("i32", splat, f.address("i32", ids, at), 4)
                f.store("i32", f.convert("trunc", "i64", at, "i32"), f.address("i32", places, e), 4)

            f.loop(begin, end, 1, (), entry)

        f.loop(0, count, 1, (), place_splat)
        f.ret()

    def plan(sizes: Sizes) -> Planned:
        (count,) = numbers(node.inputs[1].shape, sizes)
        most = op.max_entries  # type: ignore[attr-defined]
        tags = 8 * tiles
        slots = [
            *(("input", i) for i in range(3)), *(("output", i) for i in range(4)), ("workspace", tags),
            ("workspace", 0), *number_slots(count, most),
        ]  # fmt: skip
        if count == 0:  # nothing may be read
            return Planned([NativeCall("nothing", [*slots[3:7], *number_slots(most)])])
        return Planned([NativeCall("bin", slots)], tags + 4 * most)

    def emit_both(module: IrModule) -> None:
        emit(module)
        f = kernel(module, "nothing")
        ids, ranges, places, starts, most = arguments(f, "ppppi")
        for array, size_ in ((ids, f.mul(most, 4)), (ranges, 8 * tiles), (places, f.mul(most, 4)), (starts, 4)):
            fill_zero(f, array, size_)
        f.ret()

    return NativeOp(f"splat_bin {dtype} {columns} {rows} {size}", emit_both, ("bin", "nothing"), plan)


def _splat(f: IrFunction, order: Value, rank: Value) -> str:
    return f.load("i64", f.address("i64", order, rank), 8)


def _wide(f: IrFunction, array: Value, at: Value) -> str:
    return f.convert("sext", "i32", f.load("i32", f.address("i32", array, at), 4), "i64")


class _Spans:
    """The tiles that one ellipse meets: in each row of tiles one span of columns."""

    def __init__(self, m: VectorMath, outline: list[str], size: int, columns: int, rows: int) -> None:
        self.m, self.size, self.columns, self.rows = m, size, columns, rows
        self.cx, self.cy, xx, xy, yy = outline
        grown = m.c(SLACK)
        root = m.sqrt(xx)
        self.high, self.wide = m.mul(m.sqrt(yy), grown), m.mul(root, grown)
        self.lean = m.div(xy, yy)
        left_over = m.f.intrinsic("maxnum", m.type, m.sub(xx, m.mul(xy, self.lean)), m.c(0.0))
        self.narrow = m.mul(m.sqrt(left_over), grown)
        self.tip = m.mul(m.div(xy, root), grown)

    def _floor(self, x: str, high: int) -> str:
        """The number of the row or column of tiles that holds a place, from -1 to `high`."""
        m = self.m
        scaled = m.f.intrinsic("floor", m.type, m.div(x, m.c(float(self.size))))
        return m.f.convert("fptosi", m.type, within(m, scaled, m.c(-1.0), m.c(float(high))), "i64")

    def append(self, tags: Value, following: Value, most: Value, made: Value) -> Value:
        """Note the tile of each entry, and count entries by tile; returns how many there are now."""
        m, f = self.m, self.m.f
        first = f.smax(self._floor(m.sub(self.cy, self.high), self.rows), 0)
        last = f.smin(self._floor(m.add(self.cy, self.high), self.rows), self.rows - 1)

        def row(r: str, carried: list[str]) -> list[str]:
            top = m.mul(f.convert("sitofp", "i64", r, m.type), m.c(float(self.size)))
            low = f.intrinsic("maxnum", m.type, m.sub(top, self.cy), m.neg(self.high))
            bottom = m.sub(m.add(top, m.c(float(self.size))), self.cy)
            high = f.intrinsic("minnum", m.type, bottom, self.high)
            left, right = self._end(-1.0, low, high), self._end(1.0, low, high)
            start = f.smax(self._floor(m.add(self.cx, left), self.columns), 0)
            stop = f.smin(self._floor(m.add(self.cx, right), self.columns), self.columns - 1)
            is_met = m.test("ole", low, high)
            stop = f.select("i64", is_met, f.add(stop, 1), start)

            def column(c: str, carried: list[str]) -> list[str]:
                at = carried[0]

                def take() -> list[Value]:
                    tile = f.add(f.mul(r, self.columns), c)
                    f.store("i32", f.convert("trunc", "i64", tile, "i32"), f.address("i32", tags, at), 4)
                    place = f.address("i64", following, tile)
                    f.store("i64", f.add(f.load("i64", place, 8), 1), place, 8)
                    return [f.add(at, 1)]

                return f.if_(f.compare("slt", "i64", at, most), take, lambda: [at], ("i64",))

            return f.loop(start, stop, 1, [("i64", carried[0])], column)

        return f.loop(first, f.add(last, 1), 1, [("i64", made)], row)[0]

    def _end(self, sign: float, low: str, high: str) -> str:
        """How far a strip of the ellipse goes to one side."""
        m = self.m
        y = within(m, m.mul(self.tip, m.c(sign)), low, high)
        part = m.div(y, self.high)
        rest = m.f.intrinsic("maxnum", m.type, m.sub(m.c(1.0), m.mul(part, part)), m.c(0.0))
        reach = m.mul(m.mul(self.narrow, m.sqrt(rest)), m.c(sign))
        end = m.add(m.mul(self.lean, y), reach)
        bound = m.mul(self.wide, m.c(sign))
        return m.f.intrinsic("maxnum" if sign < 0 else "minnum", m.type, end, bound)
