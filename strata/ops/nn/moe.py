"""Mixture of experts: grouped matmul, where each row has the id of its weights, and the router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.core import Dim, TensorType, f16, f32, f64, i32, i64
from strata.errors import OptionError
from strata.mir import Sample, Value, constant, draw, function, op
from strata.ops.base.creation import dim_size, iota
from strata.ops.base.frontend import Operand, as_value, promoted, same_size, to_inexact
from strata.ops.base.movement import broadcast_to, insert_axis, reshape, swapaxes
from strata.ops.elementwise.logic import cast, rounded_once
from strata.ops.elementwise.math import sigmoid
from strata.ops.indexing.indexing import Indexed, as_ids, check_ids, clamp_id, one_hot, take_along_axis
from strata.ops.indexing.sorting import topk
from strata.ops.quant.dequant import DequantWeights, used_sides
from strata.ops.quant.schemes import Scheme, as_scheme
from strata.ops.reduce.reduce import mean, sum_
from strata.ops.reduce.softmax import softmax

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


class Grouped(Indexed):
    """What the grouped matmuls share: rows with an expert id each."""

    dtypes = "float"
    ids_at = 2
    ids_are = "expert"

    def require_rows(self, rows: TensorType, ids: TensorType) -> None:
        self.require_dtype(ids.dtype in (i32, i64), f"expert ids must be i32 or i64, got {ids}", code="D226")
        ok = rows.ndim == 2 and ids.ndim == 1 and same_size(ids.shape[0], rows.shape[0])
        self.require(ok, f"rows [M, K] and ids [M] are {rows} and {ids}", code="S280")


def rows_by_expert(ids: np.ndarray, experts: int, what: str) -> list[np.ndarray]:
    """The row numbers of each expert, in order: a stable counting sort."""
    check_ids(ids, experts, False, what, "expert")
    order = np.argsort(ids, kind="stable")
    return np.split(order, np.cumsum(np.bincount(ids, minlength=experts))[:-1]) if experts else []


@op("grouped_matmul")
class GroupedMatMul(Grouped):
    """y[i] = x[i] · W[ids[i]] for x [M, K], W [E, K, N], ids [M]."""

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (types[1].shape[0],)

    def infer(self, x: TensorType, w: TensorType, ids: TensorType) -> TensorType:
        self.require_rows(x, ids)
        self.require_dtype(
            x.dtype is w.dtype and x.dtype.is_float, f"x and w must be equal floats, {x} and {w}", code="D103"
        )
        self.require(w.ndim == 3 and same_size(w.shape[1], x.shape[1]), f"w [E, K, N] for x {x} is {w}", code="S281")
        self.require(w.shape[0] != 0 or x.shape[0] == 0, f"there are rows {x} and no experts, {w}", code="S281")
        return x.with_shape((x.shape[0], w.shape[2]))

    def numpy(self, x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
        out = np.zeros((x.shape[0], w.shape[2]), x.dtype)
        for expert, rows in enumerate(rows_by_expert(ids, w.shape[0], self.name)):
            out[rows] = x[rows] @ w[expert]
        return out

    def jvp(self, x: Value, w: Value, ids: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        first = None if dx[0] is None else self(dx[0], w, ids)
        second = None if dx[1] is None else self(x, dx[1], ids)
        return first + second if first is not None and second is not None else second if first is None else first

    def vjp(self, x: Value, w: Value, ids: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return self(ct, swapaxes(w, 1, 2), ids), GroupedOuter(w.shape[0])(x, ct, ids), None

    def vmap(self, x: Value, w: Value, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        rows, experts = fold_rows(x, batched[0], size), w.shape[1 if batched[1] else 0]
        chosen = fold_ids(ids, batched[2], size, experts if batched[1] else None)
        weights = reshape(w, (size * experts, *w.shape[2:])) if batched[1] else w
        out = self(rows, weights, chosen)
        return reshape(out, (size, x.shape[1 if batched[0] else 0], out.shape[1]))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, w, ids = inputs
        row, column = index
        expert = clamp_id(k, k.index(ids[row,]), w.shape[0], False)
        wide = x.dtype.accumulator

        def term(j: Expr) -> Expr:
            return k.cast(x[row, j], wide) * k.cast(w[expert, j, column], wide)

        return k.cast(k.reduce("sum", (x.shape[1],), term, order="products"), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[5, 3], f32[4, 3, 2], draw(i64[5], 0, 4)),
            Sample(f64[3, 2], f64[2, 2, 2], np.array([1, 1, 1], np.int32)),
            Sample(f32[0, 2], f32[3, 2, 1], np.zeros(0, np.int64)),
            Sample(f32[2, 0], f32[1, 0, 2], np.zeros(2, np.int64)),
            Sample(f16[2, 3], f16[2, 3, 1], np.array([1, 0]), grad=False),
        ]  # fmt: skip


@op("grouped_outer")
class GroupedOuter(Grouped):
    """W[e] = Σ x[i] ⊗ y[i] over the rows i with ids[i] = e: the transpose of the grouped matmul, [E, K, N]."""

    experts: Dim

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (self.experts,)

    def infer(self, x: TensorType, y: TensorType, ids: TensorType) -> TensorType:
        self.require_rows(x, ids)
        self.require_dtype(
            x.dtype is y.dtype and x.dtype.is_float, f"operands must be equal floats, {x} and {y}", code="D103"
        )
        self.require(y.ndim == 2 and same_size(y.shape[0], x.shape[0]), f"rows differ, {x} and {y}", code="S281")
        return x.with_shape((self.experts, x.shape[1], y.shape[1]))

    def numpy(self, x: np.ndarray, y: np.ndarray, ids: np.ndarray) -> np.ndarray:
        groups = rows_by_expert(ids, self.experts.__index__(), self.name)
        found = [x[rows].T @ y[rows] for rows in groups]
        return np.stack(found) if found else np.zeros((0, x.shape[1], y.shape[1]), x.dtype)

    def jvp(self, x: Value, y: Value, ids: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        first = None if dx[0] is None else self(dx[0], y, ids)
        second = None if dx[1] is None else self(x, dx[1], ids)
        return first + second if first is not None and second is not None else second if first is None else first

    def vjp(self, x: Value, y: Value, ids: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return GroupedMatMul()(y, swapaxes(ct, 1, 2), ids), GroupedMatMul()(x, ct, ids), None

    def vmap(self, x: Value, y: Value, ids: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        rows, others = fold_rows(x, batched[0], size), fold_rows(y, batched[1], size)
        out = GroupedOuter(size * self.experts)(rows, others, fold_ids(ids, batched[2], size, self.experts))
        return reshape(out, (size, self.experts, *out.shape[1:]))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, y, ids = inputs
        expert, row, column = index
        wide = x.dtype.accumulator

        def term(i: Expr) -> Expr:
            product = k.cast(x[i, row], wide) * k.cast(y[i, column], wide)
            return k.select(k.eq(k.index(ids[i,]), expert), product, k.const(0.0, wide))

        return k.cast(k.reduce("sum", (x.shape[0],), term), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[5, 3], f32[5, 2], draw(i64[5], 0, 4), experts=4),
            Sample(f32[0, 3], f32[0, 2], np.zeros(0, np.int64), experts=2),
            Sample(f64[2, 1], f64[2, 1], np.array([0, 0], np.int32), experts=1),
        ]  # fmt: skip


def fold_rows(x: Value, is_batched: bool, size: Dim) -> Value:
    spread = x if is_batched else broadcast_to(x, (size, *x.shape))
    return reshape(spread, (size * spread.shape[1], spread.shape[2]))


def fold_ids(ids: Value, is_batched: bool, size: Dim, experts: Dim | None) -> Value:
    """Ids of all batch rows; each row has its own range of experts when `experts` is given."""
    spread = ids if is_batched else broadcast_to(ids, (size, *ids.shape))
    if experts is not None:
        spread = spread + reshape(iota((size,), 0, ids.dtype), (size, 1)) * cast(dim_size(experts), ids.dtype)
    return reshape(spread, (size * spread.shape[1],))


@op("dequant_grouped_matmul")
class DequantGroupedMatMul(Grouped):
    """y[i] = x[i] · W[ids[i]] with E quantised matrices [K, N] stored one after the other."""

    scheme: Scheme
    n: int

    def weights(self, x: TensorType, codes: TensorType) -> DequantWeights:
        k = x.shape[1].__index__()
        slab, total = self.scheme.code_count(k, self.n), codes.size.__index__()
        whole = slab > 0 and total % slab == 0
        self.require(whole, f"{codes} does not hold whole {self.scheme} matrices [{k}, {self.n}]", code="S282")
        return DequantWeights(self.scheme, k, self.n, total // slab)

    def id_sizes(self, *types: TensorType) -> tuple[Dim, ...]:
        return (self.weights(*types[:2]).experts,)

    def infer(self, x: TensorType, codes: TensorType, ids: TensorType, *sides: TensorType) -> TensorType:
        self.require_rows(x, ids)
        self.require_dtype(x.dtype.is_float, f"x must be a float, got {x}", code="D104")
        self.weights(x, codes).infer(codes, *sides)
        return x.with_shape((x.shape[0], self.n))

    def numpy(self, x: np.ndarray, codes: np.ndarray, ids: np.ndarray, *sides: np.ndarray) -> np.ndarray:
        k = x.shape[1]
        slabs = codes.reshape(-1, self.scheme.code_count(k, self.n))
        out = np.zeros((x.shape[0], self.n), x.dtype)
        for expert, rows in enumerate(rows_by_expert(ids, len(slabs), self.name)):
            if len(rows):  # an expert without rows is never decoded
                w = self.scheme.decode(slabs[expert], *(s[expert] for s in sides), k=k, n=self.n)
                out[rows] = x[rows].astype(np.float64) @ w
        return out

    def decompose(self, x: Value, codes: Value, ids: Value, *sides: Value) -> Value:
        wide = x.dtype.accumulator
        if x.dtype is not wide:
            return cast(self(cast(x, wide), codes, ids, *sides), x.dtype)
        w = cast(self.weights(x.type, codes.type)(codes, *sides), wide)
        return GroupedMatMul()(x, w, ids)

    @classmethod
    def samples(cls) -> list[Sample]:
        rng = np.random.default_rng(3)
        blocks, small = Scheme("gguf_q8_0"), Scheme("int4", 2)
        packed = np.concatenate([blocks.encode(rng.standard_normal((32, 2)))[0] for _ in range(3)])
        parts = [np.stack(p) for p in zip(*(small.encode(rng.standard_normal((4, 3))) for _ in range(2)), strict=True)]
        return [
            Sample(f32[4, 32], packed, draw(i64[4], 0, 3), scheme=blocks, n=2),
            Sample(f32[3, 4], parts[0], np.array([1, 0, 1]), *parts[1:], scheme=small, n=3),
            Sample(f32[0, 32], packed, np.zeros(0, np.int64), scheme=blocks, n=2),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def grouped_matmul(x: Operand, w: Operand, ids: Operand) -> Value:
    """x[i] · w[ids[i]] for every row: x [M, K], w [E, K, N], ids [M]."""
    a, b = (to_inexact(v) for v in promoted(x, w))
    return GroupedMatMul()(a, b, as_ids(ids, "grouped_matmul"))


@function()
def dequant_grouped_matmul(
    x: Operand, codes: Operand, ids: Operand, *sides: Operand, scheme: Scheme | str, n: int
) -> Value:
    """x[i] · W[ids[i]] with quantised matrices [K, n], one slab an expert."""
    kind = as_scheme(scheme)
    inputs = (to_inexact(as_value(x)), as_value(codes), as_ids(ids, "dequant_grouped_matmul"))
    return DequantGroupedMatMul(kind, n)(*inputs, *used_sides(kind, sides))


@function()
def dequant_moe_weights(codes: Operand, *sides: Operand, scheme: Scheme | str, k: int, n: int) -> Value:
    """The f32 weights [E, K, N] of E quantised matrices."""
    kind, packed = as_scheme(scheme), as_value(codes)
    slab, total = kind.code_count(k, n), packed.type.size.__index__()
    if not slab or total % slab:
        raise OptionError(
            f"dequant_moe_weights: {packed.type} does not hold whole {kind} matrices [{k}, {n}]", code="S282"
        )
    return DequantWeights(kind, k, n, total // slab)(packed, *used_sides(kind, sides))


@function()
def route_top_k(
    logits: Operand,
    k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias: Operand | None = None,
) -> tuple[Value, Value]:
    """The k experts of each token and their weights, from router logits [.., E]: (weights [.., k], ids [.., k]).

    `score` is softmax or sigmoid; weights add up to `scale` when renormalised. `bias` [E] takes part in the choice
    only.
    """
    values = to_inexact(as_value(logits))
    wide = cast(values, values.dtype.accumulator)
    if score not in ("softmax", "sigmoid"):
        raise OptionError(f"route_top_k: score {score!r} is neither softmax nor sigmoid", code="O239")
    scores = softmax(wide, -1) if score == "softmax" else sigmoid(wide)
    _, ids = topk(scores if bias is None else scores + cast(as_value(bias), wide.dtype), k)
    weights = take_along_axis(scores, ids)
    if renormalize:
        weights = weights / (sum_(weights, -1, keepdims=True) + constant(1e-20, wide.dtype))
    return cast(weights * scale if scale != 1.0 else weights, values.dtype), ids


@function()
def combine_experts(outputs: Operand, weights: Operand) -> Value:
    """Expert outputs [M·k, N], token by token, as the weighted sums [M, N]: weights are [M, k]."""
    y, w = promoted(outputs, weights)
    tokens, k = w.shape
    return sum_(reshape(y, (tokens, k, y.shape[-1])) * insert_axis(w, -1), 1)


@function()
@rounded_once
def load_balance_loss(logits: Operand, ids: Operand) -> Value:
    """E · Σ (share of assignments)·(mean probability) over experts: 1 when the router spreads tokens evenly."""
    values = to_inexact(as_value(logits))
    experts = values.shape[-1]
    flat = reshape(values, (-1, experts))
    chosen = reshape(as_ids(ids, "load_balance_loss"), (-1,))
    share = mean(one_hot(chosen, experts, dtype=flat.dtype), 0)
    return sum_(share * mean(softmax(flat, -1), 0)) * cast(dim_size(experts), flat.dtype)
