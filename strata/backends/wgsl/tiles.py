"""Tiled matmul: a workgroup computes a tile of results from strips of both operands in shared memory.

Of `sum k : a * b`, the axes of the result that only `a` depends on are rows, those that only `b` depends on are
columns, and the rest are of a batch. Rows and columns are counted through, whatever number of axes they are, and so is
k: a convolution is then a matmul whose factor is read through its window. Every result adds up its terms in the order
of k, one by one, as it would without tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.wgsl.bounds import extent_range
from strata.core import Dim, dim_prod, i64
from strata.kernel import (
    Axis,
    Compute,
    Expr,
    Kernel,
    Load,
    LoopBlock,
    MapLoop,
    Reduce,
    ReduceLoop,
    Scalar,
    Scan,
    axis_roles,
    linear,
    parallel_chain,
    postorder,
    rewritten,
    size,
    substitute_axes,
    sum_of_products,
)

SIDE = 16  # invocations along rows, and along columns
DEPTH = 16  # terms of a strip
LARGE = 64  # rows and columns from which an invocation computes a tile of results
LEAST = 16  # rows, columns and terms below which tiles are mostly empty
MANY = 4096  # results that keep a device busy
LONG = 1 << 14  # terms of a sum that is worth parts, where there are few results
TYPICAL = 128  # stands in for a size that is not known


@dataclass(frozen=True, slots=True)
class WgslTiles:
    """`each` x `each` results an invocation."""

    loops: int
    each: int

    @property
    def size(self) -> int:
        return SIDE * SIDE

    @property
    def side(self) -> int:
        return SIDE * self.each

    def __str__(self) -> str:
        return f"tiles {self.side} x {self.side} x {DEPTH} by {self.size}"


@dataclass(frozen=True, slots=True)
class TileProduct:
    """sum over `axis` of left * right, and which loops of the result go where."""

    reduce: Reduce
    axis: Axis
    left: Expr
    right: Expr
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]

    @property
    def tiles(self) -> WgslTiles:
        large = all(_typical(_count(axes)) >= LARGE for axes in (self.rows, self.columns))
        return WgslTiles(len(self.batch) + len(self.rows) + len(self.columns), 4 if large else 1)

    @property
    def fills_a_device(self) -> bool:
        """Whether there are enough results, or few enough terms, to leave the sums whole."""
        results = _typical(_count((*self.batch, *self.rows, *self.columns)))
        return results >= MANY or _typical(self.axis.extent) < LONG


def find_product(nest: LoopBlock) -> TileProduct | None:
    """The matmul that a nest computes; None where it is something else, or too small for tiles."""
    chain = parallel_chain(nest)
    if not chain:
        return None
    loops = [s for s in chain[-1].body.steps if isinstance(s, (ReduceLoop, MapLoop))]
    loop = loops[0] if len(loops) == 1 else None
    if any(isinstance(s, ReduceLoop) for s in nest.steps) or not isinstance(loop, ReduceLoop):
        return None
    if len(loop.reduces) != 1 or not all(isinstance(s, Compute) for s in loop.body.steps):
        return None
    (reduce,) = loop.reduces
    product = sum_of_products(reduce)
    if product is None or product.terms != (loop.axis,) or reduce.dtype.bits != 32:
        return None
    left, right = product.left, product.right
    if any(isinstance(n, Scan) for n in postorder((left, right))) or not _reads(left) or not _reads(right):
        return None
    batch, rows, columns = axis_roles([one.axis for one in chain], left, right)
    if not rows or not columns or loop.axis not in left.free or loop.axis not in right.free:
        return None
    if min(_typical(_count(rows)), _typical(_count(columns)), _typical(loop.axis.extent)) < LEAST:
        return None
    return TileProduct(reduce, loop.axis, left, right, batch, rows, columns)


def _reads(node: Expr) -> bool:
    return any(isinstance(n, Load) for n in postorder((node,)))


def _count(axes: tuple[Axis, ...]) -> Dim:
    return dim_prod([a.extent for a in axes])


def _typical(dim: Dim) -> int:
    low, high = extent_range(dim)
    return high if isinstance(dim, int) else max(low, min(high, TYPICAL))


def runs_along(factor: Expr, axis: Axis) -> bool:
    """Whether neighbours along an axis lie side by side where a factor is read."""
    loads = [n for n in postorder((factor,)) if isinstance(n, Load)]
    return any(linear(n.index[0]).terms.get(axis) == 1 for n in loads)


def flat_sums(kernel: Kernel) -> Kernel:
    """A kernel whose sums of sums of products count through all their terms: the terms of a window are one axis."""
    return rewritten(kernel, _flat)


def _flat(node: Expr) -> Expr:
    match node:
        case Reduce("sum", (outer,), Reduce("sum", (inner,), body)) if isinstance(body, Scalar) and body.name == "mul":
            if isinstance(inner.extent, int) and inner.extent == 0:
                return node
            merged = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
            by = size(inner.extent)
            change: dict[Axis, Expr] = {
                outer: Scalar("floordiv", (merged, by), i64), inner: Scalar("mod", (merged, by), i64)
            }  # fmt: skip
            return _flat(Reduce("sum", (merged,), substitute_axes((body,), change)[body]))
    return node
