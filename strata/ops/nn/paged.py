"""A paged KV cache of many sequences: attention that reads its pages, and the op that writes new tokens to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, TensorType, bounds, dim_prod, f16, f32, f64, i8, i64
from strata.mir import Op, Sample, Value, function, op
from strata.ops.base.creation import dim_size, iota, zeros, zeros_like
from strata.ops.base.frontend import Operand, as_value, same_shape
from strata.ops.base.movement import concat, reshape
from strata.ops.elementwise.logic import cast, where
from strata.ops.elementwise.numeric import clip
from strata.ops.indexing.ensure_ids import EnsureIds
from strata.ops.indexing.indexing import CheckedIds, check_ids, clamp_id, may_be_empty, spread, take, take_along_axis
from strata.ops.indexing.scattering import combine
from strata.ops.nn.attention import Attention

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


@op("paged_attention")
class PagedAttention(Op):
    """Causal attention of new tokens to themselves and to what came before them, which is in a paged KV cache.

    q is [B, S, H·D]; pools of keys and values are [P, T, W] with pages of T tokens; the new tokens' own rows are
    [B, S, W]. Token j of sequence b lies in row j % T of page table[b, j // T] while j < past[b], and is new from there
    on: query i stands at past[b] + i. Rows of pages after that are not read. A page that is needed and is not in the
    pool is always an error, and so is a table without room for all the tokens.

    Pools of i8 come with two more inputs, scales [P, T, kv_heads] of keys and of values: the numbers of a row are its
    integers times the scale of their head.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    score_scale: float | None = None
    softcap: float | None = None

    @property
    def dense(self) -> Attention:
        """The same attention over keys and values that lie one after the other."""
        return Attention(
            num_heads=self.num_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, layout="bsd", causal=True,
            window=self.window, has_offset=True, score_scale=self.score_scale, softcap=self.softcap,
        )  # fmt: skip

    def infer(self, *inputs: TensorType) -> TensorType:
        q, keys, values, new_keys, new_values, table, past, *scales = inputs
        ok = q.ndim == 3 and keys.ndim == 3 and table.ndim == 2
        self.require(ok, f"q, pages and table have 3, 3 and 2 axes, got {q}, {keys}, {table}", code="S610")
        batch, count = q.shape[:2]
        width = self.kv_heads * self.head_dim
        wanted = {
            "keys": (keys, (keys.shape[0], keys.shape[1], width)), "values": (values, keys.shape),
            "new_keys": (new_keys, (batch, count, width)), "new_values": (new_values, (batch, count, width)),
            "table": (table, (batch, table.shape[1])), "past": (past, (batch,)),
        }  # fmt: skip
        for name, (t, shape) in wanted.items():
            self.require(same_shape(t.shape, shape), f"{name} is {t}, expected {t.with_shape(shape)}", code="S610")
        for t in scales:
            shape = (*keys.shape[:2], self.kv_heads)
            self.require(same_shape(t.shape, shape), f"scales are {t}, expected {t.with_shape(shape)}", code="S610")
        pools = () if scales else (keys, values)
        for t in (*pools, new_keys, new_values, *scales):
            self.require_dtype(
                t.dtype is q.dtype and t.dtype.is_float, f"{t} and q {q} are not equal floats", code="D103"
            )
        for t in (keys, values) if scales else ():
            self.require_dtype(t.dtype is i8, f"pools with scales are i8, got {t}", code="D103")
        for t in (table, past):
            self.require_dtype(t.dtype is i64, f"pages and positions are i64, got {t}", code="D221")
        return self.dense.infer(q, *(q.with_shape((batch, table.shape[1] * keys.shape[1], width)),) * 2, past)

    def decompose(self, *inputs: Value) -> Value:
        q, keys, values, new_keys, new_values, table, past, *scales = inputs
        table, past = self.checked(keys, new_keys, table, past)
        by = scales or (None, None)
        together = (
            _together(keys, new_keys, table, past, by[0]),
            _together(values, new_values, table, past, by[1]),
        )
        return self.dense(q, *together, past)

    def numpy(self, *inputs: np.ndarray) -> np.ndarray:
        q, keys, values, new_keys, new_values, table, past, *scales = inputs
        if scales:
            keys, values = (
                (pool.reshape(*by.shape, self.head_dim).astype(q.dtype) * by[..., None]).reshape(pool.shape)
                for pool, by in zip((keys, values), scales, strict=True)
            )
        page, room = keys.shape[1], table.shape[1] * keys.shape[1]
        check_ids(past, room - q.shape[1] + 1, False, self.name, "tokens")
        table = np.where(np.arange(0, room, page or 1) < past[:, None], table, 0)
        check_ids(table, keys.shape[0], False, self.name, "page")
        out = np.zeros(q.shape, q.dtype)
        for b, at in enumerate(past):
            k, v = (
                np.concatenate([pool[table[b]].reshape(-1, pool.shape[2])[:at], new[b]])[None]
                for pool, new in ((keys, new_keys), (values, new_values))
            )
            out[b] = self.dense.numpy(q[b : b + 1], k, v, past[b : b + 1])[0]
        return out

    def checked(self, keys: Value, new_keys: Value, table: Value, past: Value) -> tuple[Value, Value]:
        """A table and positions with an error for what does not exist; pages that are not needed become page 0."""
        (pages, page, _), (batch, mine) = keys.shape, table.shape
        past = CheckedIds((mine * page - new_keys.shape[1] + 1,), False, self.name, "tokens")(past)
        first = reshape(iota((mine,), 0, i64) * dim_size(page), (1, mine))
        table = where(first < reshape(past, (batch, 1)), table, 0)
        return CheckedIds((pages,), False, self.name, "page")(table), past

    def with_checks(self, *inputs: Value) -> tuple[Value, ...] | None:
        """The same with its table and positions checked, where they are not yet."""
        *arrays, table, past = inputs[:7]
        if isinstance(past.node.op, CheckedIds | EnsureIds) and past.node.op.what == self.name:
            return None
        return (self(*arrays, *self.checked(arrays[1], arrays[3], table, past), *inputs[7:]),)

    @classmethod
    def samples(cls) -> list[Sample]:
        two = np.array([[2, 0], [1, 3]])
        return [
            Sample(f32[2, 1, 8], f32[4, 3, 4], f32[4, 3, 4], f32[2, 1, 4], f32[2, 1, 4], two, np.array([4, 2]),
                   num_heads=4, kv_heads=2, head_dim=2, grad=False),
            Sample(f32[2, 3, 32], f32[4, 4, 16], f32[4, 4, 16], f32[2, 3, 16], f32[2, 3, 16], two, np.array([5, 0]),
                   num_heads=2, kv_heads=1, head_dim=16, window=2, softcap=3.0, grad=False),
            Sample(f32[2, 6, 32], f32[4, 4, 32], f32[4, 4, 32], f32[2, 6, 32], f32[2, 6, 32], two, np.array([2, 0]),
                   num_heads=2, kv_heads=2, head_dim=16, score_scale=0.3, grad=False),
            Sample(f64[1, 1, 2], f64[2, 2, 2], f64[2, 2, 2], f64[1, 1, 2], f64[1, 1, 2], np.array([[1]]), np.array([1]),
                   num_heads=1, kv_heads=1, head_dim=2, grad=False),
            Sample(f32[0, 1, 16], f32[1, 2, 16], f32[1, 2, 16], f32[0, 1, 16], f32[0, 1, 16],
                   np.zeros((0, 1), np.int64), np.zeros(0, np.int64), num_heads=1, kv_heads=1, head_dim=16, grad=False),
            Sample(f32[2, 1, 64], i8[4, 4, 32], i8[4, 4, 32], f32[2, 1, 32], f32[2, 1, 32], two, np.array([5, 0]),
                   f32[4, 4, 2], f32[4, 4, 2], num_heads=4, kv_heads=2, head_dim=16, grad=False),
            Sample(f32[2, 6, 12], i8[4, 4, 6], i8[4, 4, 6], f32[2, 6, 6], f32[2, 6, 6], two, np.array([2, 0]),
                   f32[4, 4, 2], f32[4, 4, 2], num_heads=4, kv_heads=2, head_dim=3, grad=False),
        ]  # fmt: skip


@op("paged_update")
class PagedUpdate(Op):
    """A pool of pages [P, T, W] in which the rows [B, S, W] of new tokens are written to their places.

    Row i of sequence b is token j = past[b] + i, and goes to row j % T of page table[b, j // T]. No two of them go to
    one place. A page that is needed and is not in the pool is always an error, and so is a table without room for all
    the tokens. Where nobody else needs the old pool, it is changed in place.
    """

    dtypes = "any"

    def infer(self, pool: TensorType, new: TensorType, table: TensorType, past: TensorType) -> TensorType:
        ok = pool.ndim == 3 and new.ndim == 3 and table.ndim == 2
        self.require(ok, f"pages, rows and table have 3, 3 and 2 axes, got {pool}, {new}, {table}", code="S610")
        batch = new.shape[0]
        wanted = {
            "new": (new, (*new.shape[:2], pool.shape[2])), "table": (table, (batch, table.shape[1])),
            "past": (past, (batch,)),
        }  # fmt: skip
        for name, (t, shape) in wanted.items():
            self.require(same_shape(t.shape, shape), f"{name} is {t}, expected {t.with_shape(shape)}", code="S610")
        some = all(bounds(n)[0] > 0 for n in (*pool.shape[:2], table.shape[1]))
        self.require(some, f"a pool has pages, pages have rows, a table has pages; got {pool}, {table}", code="S610")
        self.require_dtype(pool.dtype is new.dtype, f"{pool} and the new rows {new} differ in dtype", code="D103")
        for t in (table, past):
            self.require_dtype(t.dtype is i64, f"pages and positions are i64, got {t}", code="D221")
        return pool

    def numpy(self, pool: np.ndarray, new: np.ndarray, table: np.ndarray, past: np.ndarray) -> np.ndarray:
        page, count = pool.shape[1], new.shape[1]
        check_ids(past, table.shape[1] * page - count + 1, False, self.name, "tokens")
        out = pool.copy()
        at = past[:, None] + np.arange(count)
        pages = np.take_along_axis(table, at // page, 1)
        check_ids(pages, pool.shape[0], False, self.name, "page")
        out[pages, at % page] = new
        return out

    def jvp(self, *inputs: Value, out: Value, dx: tuple[Value | None, ...]) -> Value:
        moved = [zeros_like(v) if t is None else t for v, t in zip(inputs[:2], dx[:2], strict=True)]
        return self(*moved, *inputs[2:])

    def vjp(self, *inputs: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        (pages, page, width), (batch, count, _), (table, past) = out.shape, inputs[1].shape, inputs[2:]
        token = reshape(past, (batch, 1)) + reshape(iota((count,), 0, i64), (1, count))
        rows = take_along_axis(table, token // dim_size(page), 1) * dim_size(page) + token % dim_size(page)
        to_new = take(reshape(ct, (pages * page, width)), rows, axis=0)
        return self(ct, zeros_like(inputs[1]), table, past), to_new, None, None

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        """More pages and more sequences."""
        pool, new, table, past = (spread(x, b, size) for x, b in zip(inputs, batched, strict=True))
        first = reshape(iota((size,), 0, i64) * dim_size(pool.shape[1]), (size, 1, 1))
        flat = [reshape(x, (size * x.shape[1], *x.shape[2:])) for x in (pool, new, table + first, past)]
        return reshape(self(*flat), pool.shape)

    def with_checks(self, *inputs: Value) -> tuple[Value, ...] | None:
        """The same with its table and positions checked, where they are not yet."""
        pool, new, table, past = inputs
        if isinstance(past.node.op, CheckedIds | EnsureIds) and past.node.op.what == self.name:
            return None
        (pages, page, _), (batch, mine), count = pool.shape, table.shape, new.shape[1]
        past = CheckedIds((mine * page - count + 1,), False, self.name, "tokens")(past)
        first = reshape(iota((mine,), 0, i64) * dim_size(page), (1, mine))
        start = reshape(past, (batch, 1))
        is_needed = (first < start + dim_size(count)) & (start < first + dim_size(page))
        table = CheckedIds((pages,), False, self.name, "page")(where(is_needed, table, 0))
        return (self(pool, new, table, past),)

    def _place(self, k: KernelBuilder, pool: Any, at: tuple[Expr, ...], table: View, past: View) -> tuple[Expr, Expr]:
        """The page, and the row in it, of a new row, whatever the table says."""
        b, i = at
        page = pool.shape[1]
        token = clamp_id(k, past[(b,)] + i, table.shape[1] * page, False)
        return clamp_id(k, table[(b, token // k.index(page))], pool.shape[0], False), token % k.index(page)

    def lower_into(self, k: KernelBuilder, out: Any, *inputs: View) -> None:
        new, table, past = inputs
        axes = k.axes(new.shape)
        place = self._place(k, out, axes[:2], table, past)
        k.store(out, axes, [*place, axes[2]], new[axes])

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        pool, new, table, past = inputs
        rows = new.shape[:2]

        def hit(j: Expr) -> Expr:
            place = self._place(k, pool, k.unflatten(j, rows), table, past)
            return k.all_of(*(k.eq(a, b) for a, b in zip(place, index[:2], strict=True)))

        def update(j: Expr) -> Expr:
            return new[(*k.unflatten(j, rows), index[2])]

        return combine(k, "none", pool[index], dim_prod(rows), hit, update)

    @classmethod
    def samples(cls) -> list[Sample]:
        two = np.array([[2, 0], [1, 3]])
        return [
            Sample(f32[4, 3, 4], f32[2, 1, 4], two, np.array([4, 2])),
            Sample(f16[4, 4, 3], f16[2, 3, 3], two, np.array([5, 0])),
            Sample(i8[4, 4, 8], i8[2, 6, 8], two, np.array([2, 0]), grad=False),
            Sample(f64[2, 2, 2], f64[1, 1, 2], np.array([[1]]), np.array([1])),
            Sample(f32[1, 2, 4], f32[0, 1, 4], np.zeros((0, 1), np.int64), np.zeros(0, np.int64)),
        ]  # fmt: skip


def _together(pool: Value, new: Value, table: Value, past: Value, scales: Value | None = None) -> Value:
    """The rows of each sequence, [B, N·T, W]: from its pages, then the new ones."""
    batch, count = new.shape[:2]
    rows: Dim = table.shape[1] * pool.shape[1]
    old = reshape(take(pool, table, axis=0), (batch, rows, pool.shape[2]))
    if scales is not None:
        heads = scales.shape[2].__index__()
        by = reshape(take(scales, table, axis=0), (batch, rows, heads, 1))
        whole = cast(reshape(old, (batch, rows, heads, pool.shape[2].__index__() // heads)), new.dtype)
        old = reshape(whole * by, (batch, rows, pool.shape[2]))
    behind = reshape(iota((rows,), 0, i64), (1, rows)) - reshape(past, (batch, 1))
    # rows after the last new one repeat it: no query reads them
    at = clip(behind, 0, dim_size(count - 1)) + reshape(iota((batch,), 0, i64) * dim_size(count), (batch, 1))
    flat = reshape(new, (batch * count, pool.shape[2]))
    if may_be_empty(count):  # there is a row to read, where no query reads it
        flat = concat([flat, zeros((1, pool.shape[2]), new.dtype)], 0)
    return where(reshape(behind < 0, (batch, rows, 1)), old, take(flat, at, axis=0))


@function()
def paged_attention(
    q: Operand, keys: Operand, values: Operand, new_keys: Operand, new_values: Operand, table: Operand, past: Operand,
    *scales: Operand, num_heads: int, kv_heads: int | None = None, window: int | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> Value:  # fmt: skip
    """Causal attention of new tokens [B, S, H·D] to themselves and to pages [P, T, W] that a table [B, N] names.

    Pages of i8 come with the scales [P, T, kv_heads] of their keys and of their values.
    """
    query = as_value(q)
    rest = [as_value(x) for x in (keys, values, new_keys, new_values, table, past, *scales)]
    return PagedAttention(
        num_heads=num_heads, kv_heads=kv_heads or num_heads, head_dim=query.shape[-1].__index__() // num_heads,
        window=window, score_scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
    )(query, *rest)  # fmt: skip


@function()
def paged_update(pool: Operand, new: Operand, table: Operand, past: Operand) -> Value:
    """Pages [P, T, W] with the rows [B, S, W] of new tokens at the places that a table [B, N] and positions [B] say."""
    return PagedUpdate()(*(as_value(x) for x in (pool, new, table, past)))
