"""Paged attention: attention over a paged KV cache, for many sequences at once."""

from __future__ import annotations

import numpy as np

from strata.core import Dim, TensorType, f32, f64, i64
from strata.mir import Op, Sample, Value, function, op
from strata.ops.base.creation import dim_size, iota, zeros
from strata.ops.base.frontend import Operand, as_value, same_shape
from strata.ops.base.movement import concat, reshape
from strata.ops.elementwise.logic import where
from strata.ops.elementwise.numeric import clip
from strata.ops.indexing.indexing import CheckedIds, check_ids, may_be_empty, take
from strata.ops.nn.attention import Attention


@op("paged_attention")
class PagedAttention(Op):
    """Causal attention of new tokens to themselves and to what came before them, which is in a paged KV cache.

    q is [B, S, H·D]; pools of keys and values are [P, T, W] with pages of T tokens; the new tokens' own rows are
    [B, S, W]. Token j of sequence b lies in row j % T of page table[b, j // T] while j < past[b], and is new from there
    on: query i stands at past[b] + i. Rows of pages behind that are not read. A page that is needed and is not in the
    pool is always an error, and so is a table without room for all the tokens.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    score_scale: float | None = None
    softcap: float | None = None

    @property
    def dense(self) -> Attention:
        """The same attention over keys and values that lie one behind the other."""
        return Attention(
            num_heads=self.num_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, layout="bsd", causal=True,
            window=self.window, has_offset=True, score_scale=self.score_scale, softcap=self.softcap,
        )  # fmt: skip

    def infer(self, *inputs: TensorType) -> TensorType:
        q, keys, values, new_keys, new_values, table, past = inputs
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
        for t in (keys, values, new_keys, new_values):
            self.require_dtype(
                t.dtype is q.dtype and t.dtype.is_float, f"{t} and q {q} are not equal floats", code="D103"
            )
        for t in (table, past):
            self.require_dtype(t.dtype is i64, f"pages and positions are i64, got {t}", code="D221")
        return self.dense.infer(q, *(q.with_shape((batch, table.shape[1] * keys.shape[1], width)),) * 2, past)

    def decompose(self, *inputs: Value) -> Value:
        q, keys, values, new_keys, new_values, table, past = inputs
        table, past = self.checked(keys, new_keys, table, past)
        together = (_together(keys, new_keys, table, past), _together(values, new_values, table, past))
        return self.dense(q, *together, past)

    def numpy(self, *inputs: np.ndarray) -> np.ndarray:
        q, keys, values, new_keys, new_values, table, past = inputs
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
        *arrays, table, past = inputs
        if isinstance(past.node.op, CheckedIds) and past.node.op.what == self.name:
            return None
        return (self(*arrays, *self.checked(arrays[1], arrays[3], table, past)),)

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
        ]  # fmt: skip


def _together(pool: Value, new: Value, table: Value, past: Value) -> Value:
    """The rows of each sequence, [B, N·T, W]: from its pages, then the new ones."""
    batch, count = new.shape[:2]
    rows: Dim = table.shape[1] * pool.shape[1]
    old = reshape(take(pool, table, axis=0), (batch, rows, pool.shape[2]))
    behind = reshape(iota((rows,), 0, i64), (1, rows)) - reshape(past, (batch, 1))
    # rows behind the last new one repeat it: no query reads them
    at = clip(behind, 0, dim_size(count - 1)) + reshape(iota((batch,), 0, i64) * dim_size(count), (batch, 1))
    flat = reshape(new, (batch * count, pool.shape[2]))
    if may_be_empty(count):  # there is a row to read, where no query reads it
        flat = concat([flat, zeros((1, pool.shape[2]), pool.dtype)], 0)
    return where(reshape(behind < 0, (batch, rows, 1)), old, take(flat, at, axis=0))


@function()
def paged_attention(
    q: Operand, keys: Operand, values: Operand, new_keys: Operand, new_values: Operand, table: Operand, past: Operand,
    *, num_heads: int, kv_heads: int | None = None, window: int | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> Value:  # fmt: skip
    """Causal attention of new tokens [B, S, H·D] to themselves and to pages [P, T, W] that a table [B, N] names."""
    query = as_value(q)
    rest = [as_value(x) for x in (keys, values, new_keys, new_values, table, past)]
    return PagedAttention(
        num_heads=num_heads, kv_heads=kv_heads or num_heads, head_dim=query.shape[-1].__index__() // num_heads,
        window=window, score_scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
    )(query, *rest)  # fmt: skip
