"""tree_leaves: rows walk down decision trees, eight walks side by side, so that no step waits for memory.

A task is a block of rows and a few trees, whose nodes stay in the nearest cache while all rows pass. Blocks of few rows
walk through eight trees at a time instead. Leaves are numbers: no split of the work changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.native import arguments, kernel, number_slots, numbers, while_loop
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.core import DType, Target
from strata.mir import Node

WALKS = 8  # side by side
ROWS = 256  # of a task
TREES = 8  # of a task


class _Walks:
    """Emits walks of rows down trees."""

    def __init__(self, f: IrFunction, dtype: DType, tables: Sequence[Value], width: Value, nodes: Value) -> None:
        self.f, self.dtype = f, dtype
        self.kind = "float" if dtype.itemsize == 4 else "double"
        self.x, self.splits, self.links, self.roots, self.out = tables
        self.last_feature, self.last_node = f.sub(width, 1), f.sub(nodes, 1)

    def within(self, number: Value, last: Value) -> str:
        return self.f.op(f"call i64 @llvm.umin.i64(i64 {number}, i64 {last})")

    def go(self, rows: Sequence[Value], trees: Sequence[Value], outs: Sequence[Value], depth: int) -> None:
        """Walk each row (the place of its first feature) down its tree, and write the leaf."""
        f = self.f
        starts = [f.load("i32", f.address("i32", self.roots, tree), 4) for tree in trees]
        places = [self.within(f.convert("zext", "i32", at, "i64"), self.last_node) for at in starts]

        def step(state: list[str]) -> list[Value]:
            left_steps, _, *at = state
            below, lefts = [], []
            for row, here in zip(rows, at, strict=True):
                place, left = self.step(row, here)
                below.append(place)
                lefts.append(left)
            inner = lefts[0]  # its sign: whether all are leaves
            for left in lefts[1:]:
                inner = f.binary("and", "i64", inner, left)
            return [f.sub(left_steps, 1), inner, *below]

        def goes_on(state: list[str]) -> str:
            more = f.compare("sgt", "i64", state[0], 0)
            return f.binary("and", "i1", more, f.compare("sge", "i64", state[1], 0))

        carried: list[tuple[str, Value]] = [("i64", depth), ("i64", 0), *(("i64", p) for p in places)]
        _, _, *ends = while_loop(f, carried, goes_on, step)
        for at, out in zip(ends, outs, strict=True):
            address = f.address("i32", self.links, f.add(f.mul(at, 2), 1))
            leaf = f.binary("xor", "i32", f.load("i32", address, 4), -1)
            f.store("i32", f.op(f"call i32 @llvm.smax.i32(i32 {leaf}, i32 0)"), f.address("i32", self.out, out), 4)

    def step(self, row: Value, at: str) -> tuple[str, str]:
        """The node below one, and what its link says of its left child."""
        f, kind, size = self.f, self.kind, self.dtype.itemsize
        link = f.load("i64", f.address("i64", self.links, at), 4)
        left = f.binary("ashr", "i64", link, 32)
        feature = f.binary("ashr", "i64", f.binary("shl", "i64", link, 32), 32)
        sign = f.binary("ashr", "i64", feature, 63)
        place = self.within(f.binary("xor", "i64", feature, sign), self.last_feature)
        value = f.load(kind, f.address(kind, self.x, f.add(row, place)), size)
        split = f.load(kind, f.address(kind, self.splits, at), size)
        above = f.op(f"fcmp ogt {kind} {value}, {split}")
        lost = f.binary("and", "i1", f.op(f"fcmp uno {kind} {value}, {value}"), f.compare("sge", "i64", feature, 0))
        right = f.convert("zext", "i1", f.binary("or", "i1", above, lost), "i64")
        below = self.within(f.add(left, right), self.last_node)
        return f.select("i64", f.compare("slt", "i64", left, 0), at, below), left


@override("tree_leaves", whole=True)
def _tree_leaves(node: Node, target: Target) -> NativeOp:
    x, splits, _, roots = node.inputs
    depth = node.op.depth  # type: ignore[attr-defined]

    def emit(module: IrModule) -> None:
        for name, bits in (("llvm.umin.i64", 64), ("llvm.smax.i32", 32)):
            module.declare(name, f"i{bits}", [f"i{bits}", f"i{bits}"])
        f = kernel(module, "walk")
        *tables, count, width, nodes, trees, depth_ = arguments(f, "pppppiiiii")
        work = _Walks(f, x.dtype, tables, width, nodes)
        chunks = f.binary("sdiv", "i64", f.add(trees, TREES - 1), TREES)

        def task(p: str, _: list[str]) -> None:
            block = f.binary("sdiv", "i64", p, chunks)
            first, tree = f.mul(block, ROWS), f.mul(f.sub(p, f.mul(block, chunks)), TREES)
            end, last_tree = f.smin(f.add(first, ROWS), count), f.smin(f.add(tree, TREES), trees)

            def together(rows: Sequence[Value], own: Sequence[Value]) -> None:
                places = [f.mul(r, width) for r in rows]
                work.go(places, own, [f.add(f.mul(r, trees), t) for r, t in zip(rows, own, strict=True)], depth_)  # type: ignore[arg-type]

            def by_rows() -> None:
                def one_tree(t: str, _: list[str]) -> None:
                    def some(r: str, _: list[str]) -> None:
                        together([f.smin(f.add(r, i), f.sub(end, 1)) for i in range(WALKS)], [t] * WALKS)

                    f.loop(first, end, WALKS, (), some)

                f.loop(tree, last_tree, 1, (), one_tree)

            def by_trees() -> None:
                def one_row(r: str, _: list[str]) -> None:
                    def some(t: str, _: list[str]) -> None:
                        together([r] * WALKS, [f.smin(f.add(t, i), f.sub(last_tree, 1)) for i in range(WALKS)])

                    f.loop(tree, last_tree, WALKS, (), some)

                f.loop(first, end, 1, (), one_row)

            f.if_(f.compare("sge", "i64", f.sub(end, first), WALKS), by_rows, by_trees)

        def walk() -> None:
            f.loop("%begin", "%end", 1, (), task)

        def nothing() -> None:
            end = f.smin(f.mul("%end", ROWS), count)

            def clear(i: str, _: list[str]) -> None:
                f.store("i32", 0, f.address("i32", tables[4], i), 4)

            f.loop(f.mul(f.mul("%begin", ROWS), trees), f.mul(end, trees), 1, (), clear)

        empty = f.compare("eq", "i64", f.mul(width, nodes), 0)
        f.if_(f.binary("xor", "i1", empty, "true"), walk, nothing)
        f.ret()

    def plan(sizes: Sizes) -> Planned:
        (count, width), (nodes,), (trees,) = (numbers(v.shape, sizes) for v in (x, splits, roots))
        slots = [("input", 0), ("input", 1), ("input", 2), ("input", 3), ("output", 0)]
        blocks = -(-count // ROWS)
        points = blocks * (-(-trees // TREES) if width * nodes else 1)
        call = NativeCall("walk", [*slots, *number_slots(count, width, nodes, trees, depth)], points, 4)
        return Planned([call] if points else [])

    return NativeOp(f"trees {x.dtype}", emit, ("walk",), plan)
