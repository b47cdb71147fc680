"""tree_leaves: rows walk down decision trees, many walks side by side, so that no step waits for memory.

A node is 16 bytes: its split, its feature and its left child, so that a step reads one cache line. Tables that stay the
same from run to run are put into that form once; others at the start of each run. A task is a block of rows that fits
into a cache and a few trees, whose nodes are read from memory once for all of them. Of few rows, each walks down many
trees at a time instead. Leaves are numbers: no split of the work changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.native import arguments, each_point, kernel, number_slots, numbers, while_loop
from strata.backends.llvm.ir.overrides import Holding, NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import DType, Target
from strata.mir import Node

ROW_WALKS, TREE_WALKS = 8, 16  # side by side: of rows in a tree, and of a row in trees
LEAST_ROWS, MOST_ROWS, ROW_BYTES = 256, 4096, 256 << 10  # of a task
TREES = 16  # of a task
MANY = 32  # rows, which walk down one tree after the other
NODE = 16  # bytes: split (f32 or f64), feature and left child (i32) at its end
CHUNK = 1 << 12  # nodes that one point of packing takes


def _kind(dtype: DType) -> str:
    return "float" if dtype.itemsize == 4 else "double"


class _Walks:
    """Emits walks of rows down trees of packed nodes. With `lost`, some nodes send NaN to the left."""

    def __init__(self, f: IrFunction, dtype: DType, tables: Sequence[Value], nodes: Value, *, lost: bool) -> None:
        self.f, self.kind, self.size, self.lost = f, _kind(dtype), dtype.itemsize, lost
        self.x, self.nodes, self.roots, self.out = tables
        self.last_node = f.sub(nodes, 1)

    def word(self, at: Value, offset: int) -> Value:
        """The place of a part of a node."""
        return self.f.address("i8", self.nodes, self.f.add(at, offset))

    def go(self, rows: Sequence[Value], trees: Sequence[Value], outs: Sequence[Value], depth: int) -> None:
        """Walk each row (the place of its first feature) down its tree, and write the leaf."""
        f = self.f
        starts = [f.load("i32", f.address("i32", self.roots, tree), 4) for tree in trees]
        known = [f.convert("zext", "i32", at, "i64") for at in starts]
        places = [f.mul(f.op(f"call i64 @llvm.umin.i64(i64 {at}, i64 {self.last_node})"), NODE) for at in known]

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
            leaf = f.binary("xor", "i32", f.load("i32", self.word(at, NODE - 4), 4), -1)
            f.store("i32", f.op(f"call i32 @llvm.smax.i32(i32 {leaf}, i32 0)"), f.address("i32", self.out, out), 4)

    def step(self, row: Value, at: str) -> tuple[str, str]:
        """The place of the node below one, and what that says of its left child."""
        f, kind = self.f, self.kind
        left = f.convert("sext", "i32", f.load("i32", self.word(at, NODE - 4), 4), "i64")
        feature = f.convert("sext", "i32", f.load("i32", self.word(at, NODE - 8), 4), "i64")
        column = f.binary("xor", "i64", feature, f.binary("ashr", "i64", feature, 63)) if self.lost else feature
        value = f.load(kind, f.address(kind, self.x, f.add(row, column)), self.size)
        split = f.load(kind, self.word(at, 0), self.size)
        above = f.op(f"fcmp ugt {kind} {value}, {split}")
        if self.lost:
            sent = f.binary("and", "i1", f.op(f"fcmp uno {kind} {value}, {value}"), f.compare("slt", "i64", feature, 0))
            above = f.binary("and", "i1", above, f.binary("xor", "i1", sent, "true"))
        below = f.mul(f.add(left, f.convert("zext", "i1", above, "i64")), NODE)
        return f.select("i64", f.compare("slt", "i64", left, 0), at, below), left


def _emit_walk(module: IrModule, name: str, dtype: DType, *, lost: bool) -> None:
    f = kernel(module, name)
    *tables, count, width, nodes, trees, depth, block_rows = arguments(f, "ppppiiiiii")
    work = _Walks(f, dtype, tables, nodes, lost=lost)
    chunks = f.binary("sdiv", "i64", f.add(trees, TREES - 1), TREES)

    def task(p: str, _: list[str]) -> None:
        block = f.binary("sdiv", "i64", p, chunks)
        first, tree = f.mul(block, block_rows), f.mul(f.sub(p, f.mul(block, chunks)), TREES)
        end, last_tree = f.smin(f.add(first, block_rows), count), f.smin(f.add(tree, TREES), trees)

        def together(rows: Sequence[Value], own: Sequence[Value]) -> None:
            places = [f.mul(r, width) for r in rows]
            work.go(places, own, [f.add(f.mul(r, trees), t) for r, t in zip(rows, own, strict=True)], depth)  # type: ignore[arg-type]

        def by_rows() -> None:
            def one_tree(t: str, _: list[str]) -> None:
                def some(r: str, _: list[str]) -> None:
                    together([f.smin(f.add(r, i), f.sub(end, 1)) for i in range(ROW_WALKS)], [t] * ROW_WALKS)

                f.loop(first, end, ROW_WALKS, (), some)

            f.loop(tree, last_tree, 1, (), one_tree)

        def by_trees() -> None:
            def one_row(r: str, _: list[str]) -> None:
                def some(t: str, _: list[str]) -> None:
                    together([r] * TREE_WALKS, [f.smin(f.add(t, i), f.sub(last_tree, 1)) for i in range(TREE_WALKS)])

                f.loop(tree, last_tree, TREE_WALKS, (), some)

            f.loop(first, end, 1, (), one_row)

        f.if_(f.compare("sge", "i64", f.sub(end, first), MANY), by_rows, by_trees)

    each_point(f, task)


def _emit_pack(module: IrModule, dtype: DType) -> None:
    """Nodes from tables that a run brings. What leads out of them ends at their last entry, which is there twice."""
    f = kernel(module, "pack")
    splits, links, out, width, nodes = arguments(f, "pppii")
    kind, size = _kind(dtype), dtype.itemsize
    last_feature, last_node = f.convert("trunc", "i64", f.sub(width, 1), "i32"), f.sub(nodes, 1)
    limit = f.convert("trunc", "i64", last_node, "i32")

    def one(i: str, _: list[str]) -> None:
        source, to = f.smin(i, last_node), f.address("i8", out, f.mul(i, NODE))
        f.store(kind, f.load(kind, f.address(kind, splits, source), size), to, size)
        feature, left = (f.load("i32", f.address("i32", links, f.add(f.mul(source, 2), j)), 4) for j in (0, 1))
        sign = f.binary("ashr", "i32", feature, 31)
        column = f.op(f"call i32 @llvm.umin.i32(i32 {f.binary('xor', 'i32', feature, sign)}, i32 {last_feature})")
        f.store("i32", f.binary("xor", "i32", column, sign), f.address("i8", to, NODE - 8), 4)
        f.store("i32", f.op(f"call i32 @llvm.smin.i32(i32 {left}, i32 {limit})"), f.address("i8", to, NODE - 4), 4)

    f.loop(f.mul("%begin", CHUNK), f.smin(f.mul("%end", CHUNK), f.add(nodes, 1)), 1, (), one)
    f.ret()


class _Forest:
    """The tables of a forest, once they are known, as packed nodes."""

    def __init__(self, dtype: DType, held: dict[int, np.ndarray] | None = None) -> None:
        self.dtype, self.tables = dtype, dict(held or {})
        self._nodes: np.ndarray | None = None

    def hold(self, number: int, array: np.ndarray) -> None:
        if number in (1, 2):
            self.tables[number], self._nodes = array, None

    @property
    def bytes(self) -> int:
        return 0 if self._nodes is None else self._nodes.nbytes

    def packed(self, width: int) -> np.ndarray | None:
        """The nodes for rows of a width; None where tables are not known."""
        if len(self.tables) < 2:
            return None
        if self._nodes is None:
            splits, links = self.tables[1], self.tables[2]
            kind = np.dtype(
                {"names": ["split", "feature", "left"], "formats": [self.dtype.np, "i4", "i4"],
                 "offsets": [0, NODE - 8, NODE - 4], "itemsize": NODE}
            )  # fmt: skip
            nodes = np.zeros(len(splits) + 1, kind)
            nodes["split"][:-1], nodes["feature"][:-1] = splits, links[:, 0]
            nodes["left"][:-1] = np.minimum(links[:, 1], len(splits) - 1)
            nodes[-1] = nodes[-2]
            self._nodes = nodes
        feature = self._nodes["feature"]
        sign = feature >> 31
        if (feature ^ sign).max() < width:
            return self._nodes
        narrow = self._nodes.copy()
        narrow["feature"] = np.minimum(feature ^ sign, width - 1) ^ sign
        return narrow


@override("tree_leaves", whole=True)
def _tree_leaves(node: Node, target: Target) -> NativeOp:
    return _walks_of(node, _Forest(node.inputs[0].dtype))


def _walks_of(node: Node, forest: _Forest) -> NativeOp:
    x, splits, _, roots = node.inputs
    depth = node.op.depth  # type: ignore[attr-defined]

    def emit(module: IrModule) -> None:
        for name, bits in (("umin.i64", 64), ("smax.i32", 32), ("umin.i32", 32), ("smin.i32", 32)):
            module.declare(f"llvm.{name}", f"i{bits}", [f"i{bits}", f"i{bits}"])
        _emit_walk(module, "walk", x.dtype, lost=False)
        _emit_walk(module, "walk_lost", x.dtype, lost=True)
        _emit_pack(module, x.dtype)
        f = kernel(module, "clear")
        each_point(f, lambda i, _: f.store("i32", 0, f.address("i32", arguments(f, "p")[0], i), 4))

    def plan(sizes: Sizes) -> Planned:
        (count, width), (nodes,), (trees,) = (numbers(v.shape, sizes) for v in (x, splits, roots))
        if not count * trees:
            return Planned([])
        if not width * nodes:
            return Planned([NativeCall("clear", [("output", 0)], count * trees, CHUNK)])
        table = forest.packed(width)
        calls: list[NativeCall] = []
        place: Slot = ("workspace", 0)
        if table is not None:
            place = ("table", table)
        else:
            tables: list[Slot] = [("input", 1), ("input", 2), place]
            calls.append(NativeCall("pack", [*tables, *number_slots(width, nodes)], -(-(nodes + 1) // CHUNK)))
        name = "walk" if table is not None and (table["feature"] >= 0).all() else "walk_lost"
        slots: list[Slot] = [("input", 0), place, ("input", 3), ("output", 0)]
        rows = min(max(ROW_BYTES // (width * x.dtype.itemsize), LEAST_ROWS), MOST_ROWS)
        points = -(-count // rows) * -(-trees // TREES)
        counts = number_slots(count, width, nodes, trees, depth, rows)
        calls.append(NativeCall(name, [*slots, *counts], points, 4 if rows >= count else 1))
        return Planned(calls, 0 if table is not None else (nodes + 1) * NODE)

    holding = Holding(forest.hold, frozenset({1, 2}), lambda: forest.bytes)
    return NativeOp(
        f"trees {x.dtype}", emit, ("walk", "walk_lost", "pack", "clear"), plan, holding,
        lambda: _walks_of(node, _Forest(forest.dtype, forest.tables)),
    )  # fmt: skip
