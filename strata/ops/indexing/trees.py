"""Decision trees: which leaf of each tree every row of features reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.core import Dim, TensorType, f32, f64, i32, i64
from strata.mir import METHODS, Op, Sample, Value, function, op
from strata.ops.base.frontend import Operand, as_value
from strata.ops.base.movement import flatten, narrow, reshape
from strata.ops.indexing.indexing import clamp_id, looked_up

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


@op("tree_leaves")
class TreeLeaves(Op):
    """The leaf of each tree that rows x [B, F] reach, as i32 [B, T].

    Node n asks whether x[feature] <= splits[n]: links[n] is (feature, left), and the right child is left + 1. A leaf
    has the complement of its number for left. NaN goes right, or left where the feature is stored as its complement.
    Rows walk from roots [T], `depth` steps at most. Links that lead out of the tables end at their last entry.
    """

    depth: int

    differentiable = False
    dtypes = (f32, f64)

    def infer(self, x: TensorType, splits: TensorType, links: TensorType, roots: TensorType) -> TensorType:
        self.require(x.ndim == 2, f"rows of features have two axes, got {x}", code="S250")
        ok = splits.ndim == 1 and links.shape == (*splits.shape, 2) and roots.ndim == 1
        self.require(ok, f"splits {splits}, links {links} and roots {roots} are not [N], [N, 2] and [T]", code="S250")
        self.require_dtype(x.dtype in (f32, f64), f"takes rows of f32 or f64, got {x}", code="D250")
        self.require_dtype(splits.dtype is x.dtype, f"operands differ in dtype, {x} and {splits}", code="D103")
        whole = links.dtype is i32 and roots.dtype is i32
        self.require_dtype(whole, f"links {links} and roots {roots} are i32", code="D250")
        return TensorType(i32, (x.shape[0], roots.shape[0]))

    def numpy(self, x: np.ndarray, splits: np.ndarray, links: np.ndarray, roots: np.ndarray) -> np.ndarray:
        at = np.broadcast_to(roots, (len(x), len(roots))).astype(np.int64)
        if not at.size:
            return at.astype(np.int32)
        if not len(splits) or not x.shape[1]:
            return np.zeros(at.shape, np.int32)
        rows = np.arange(len(x))[:, None]
        at = np.clip(at, 0, len(splits) - 1)
        for _ in range(self.depth):
            feature, left = links[at, 0].astype(np.int64), links[at, 1].astype(np.int64)
            value = x[rows, np.clip(feature ^ (feature >> 63), 0, x.shape[1] - 1)]
            right = np.where(np.isnan(value), feature >= 0, value > splits[at])
            at = np.where(left < 0, at, np.clip(left + right, 0, len(splits) - 1))
        return np.maximum(~links[at, 1], 0)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        x, *tables = inputs
        if not any(batched[1:]):
            whole = reshape(x, (size * x.shape[1], x.shape[2]))
            found = self(whole, *tables)
            return reshape(found, (size, x.shape[1], found.shape[1]))
        if not isinstance(size, int):
            self.missing("vmap over a symbolic number of forests")

        def part(value: Value, at: int) -> Value:
            return reshape(narrow(value, 0, at, 1), value.shape[1:])

        each = [self(*(part(v, i) if b else v for v, b in zip(inputs, batched, strict=True))) for i in range(size)]
        return METHODS["stack"](each, 0)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, splits, links, roots = inputs
        nodes, width = splits.shape[0], x.shape[1]
        row, tree = index
        zero, low = k.index(0), k.index(-1)
        at = clamp_id(k, roots[(tree,)], nodes, wrap=False)
        for _ in range(self.depth):
            feature, left = (k.index(looked_up(k, links, (at, k.index(i)), [nodes])) for i in range(2))
            flipped = k.lt(feature, zero)
            place = clamp_id(k, k.select(flipped, low - feature, feature), width, wrap=False)
            value = looked_up(k, x, (row, place), [width])
            right = k.select(k.isnan(value), k.not_(flipped), k.lt(looked_up(k, splits, (at,), [nodes]), value))
            below = clamp_id(k, left + k.index(k.cast(right, i64)), nodes, wrap=False)
            at = k.select(k.lt(left, zero), at, below)
        leaf = low - k.index(looked_up(k, links, (at, k.index(1)), [nodes]))
        return k.cast(k.max(leaf, zero), i32)

    @classmethod
    def samples(cls) -> list[Sample]:
        splits = np.array([0.5, 0, 0, -1, 0, 0, 2, 0, 0], np.float32)
        links = np.array([[0, 1], [0, -1], [~1, 3], [2, 4], [0, -2], [0, -3], [1, 7], [0, -4], [0, -5]], np.int32)
        roots = np.array([0, 6, 2], np.int32)
        x = np.array([[0, 0, 0], [1, -1, 3], [1, np.nan, -2], [np.nan, 3, 0], [0.5, 2, -1]], np.float32)
        return [
            Sample(x, splits, links, roots, depth=3), Sample(x[:1], splits, links, roots, depth=3),
            Sample(x.astype(np.float64), splits.astype(np.float64), links, roots, depth=3),
            Sample(np.tile(x, (5, 1)), splits, links, np.tile(roots, 7), depth=2),
            Sample(x[:0], splits, links, roots, depth=3), Sample(x, splits, links, roots[:0], depth=1),
        ]  # fmt: skip


@function()
def tree_leaves(x: Operand, splits: Operand, links: Operand, roots: Operand, *, depth: int) -> Value:
    """The leaf of each tree that rows of features reach (see `TreeLeaves`); leading axes of x are rows, too."""
    value = as_value(x)
    if value.ndim == 1:
        return flatten(
            TreeLeaves(depth)(reshape(value, (1, *value.shape)), as_value(splits), as_value(links), as_value(roots))
        )
    return TreeLeaves(depth)(value, as_value(splits), as_value(links), as_value(roots))
