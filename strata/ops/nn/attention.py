"""Scaled dot-product attention in every layout, with its one-pass backward op.

Query row i stands at the absolute position `a = i + max(Sk - Sq, 0)`, or `i + offset` where an offset is given (a cache
of keys longer than what has been written). Scores of dropped keys are replaced by -1e9, so that a row without a key is
the plain average of V and never NaN; a bias below -1e9 (such as -inf) drops too. Where `dropped` says otherwise, they
are replaced by that number, and every other score counts however low it is: with -inf, a row without a key is what
softmax makes of it, NaN, or zero where `zero_rows` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from strata.core import (
    Dim,
    DType,
    TensorType,
    bool_,
    dim_max,
    divide_exactly,
    f16,
    f32,
    i32,
    i64,
    known_le,
)
from strata.errors import OptionError
from strata.kinds import counted
from strata.mir import Op, Sample, Value, constant, draw, op
from strata.ops.base.creation import dim_size, iota, zeros
from strata.ops.base.elementwise import unbroadcast
from strata.ops.base.frontend import same_shape, same_size
from strata.ops.base.movement import broadcast_to, insert_axis, reshape, swapaxes, transpose
from strata.ops.elementwise.logic import cast, equal, logical_and, logical_not, logical_or, where
from strata.ops.elementwise.math import tanh
from strata.ops.linalg.matmul import MatMul
from strata.ops.reduce.reduce import max_, reduce_sum, sum_
from strata.ops.reduce.softmax import LogSumExp, softmax

T = TypeVar("T")
DROPPED = -1e9
LAYOUTS = {"bhsd": 4, "bshd": 4, "bsd": 3, "sd": 2}
MASKS = ("none", "custom", "bias")


class AttentionSizes(NamedTuple):
    """The extents of one attention, whatever the layout."""

    batch: Dim
    queries: Dim
    keys: Dim
    value_dim: Dim


class AttentionFamily(Op):
    """What attention and its backward share: the fields, the checks, and the way to and from [B, H, S, D].

    `mask` says what the optional mask input [B|1, H|1, Sq|1, Sk|1] is: booleans that keep (custom), or numbers that are
    added (bias). `causal` keeps j ≤ a, `window` keeps a - window ≤ j ≤ a; both combine with a mask. `has_offset` says
    that the last input is an integer vector [B|1] of query offsets. `dropped` and `zero_rows` say what a row without a
    key gives; keys that positions drop are not read, so that what is not finite in their values has no part.
    """

    num_heads: Dim
    kv_heads: Dim
    head_dim: Dim
    layout: str = "bhsd"
    causal: bool = False
    window: int | None = None
    mask: str = "none"
    has_offset: bool = False
    score_scale: float | None = None
    softcap: float | None = None
    dropped: float | None = None
    zero_rows: bool = False

    @property
    def mask_kind(self) -> str:
        """The mask in one word: what is passed in wins, then the window, then causality."""
        return (
            self.mask
            if self.mask != "none"
            else "window"
            if self.window is not None
            else "causal"
            if self.causal
            else "none"
        )

    @property
    def scale(self) -> float:
        if self.score_scale is not None:
            return self.score_scale
        return max(1, self.head_dim.__index__()) ** -0.5  # heads of no width have scores of 0

    @property
    def dropped_score(self) -> float:
        return DROPPED if self.dropped is None else self.dropped

    @property
    def group(self) -> Dim:
        """How many query heads share a key head."""
        found = divide_exactly(self.num_heads, self.kv_heads)
        assert found is not None
        return found

    def sizes(self, q: TensorType, k: TensorType, v: TensorType) -> AttentionSizes:
        match self.layout:
            case "bhsd":
                return AttentionSizes(q.shape[0], q.shape[2], k.shape[2], v.shape[3])
            case "bshd":
                return AttentionSizes(q.shape[0], q.shape[1], k.shape[1], v.shape[3])
        wide = divide_exactly(v.shape[-1], self.kv_heads)
        self.require(wide is not None, f"{v} does not divide into {self.kv_heads} heads", code="S262")
        assert wide is not None
        return AttentionSizes(q.shape[0] if self.layout == "bsd" else 1, q.shape[-2], k.shape[-2], wide)

    def packed(self, batch: Dim, heads: Dim, length: Dim, dim: Dim) -> tuple[Dim, ...]:
        """The shape of a tensor in this op's layout."""
        match self.layout:
            case "bhsd":
                return batch, heads, length, dim
            case "bshd":
                return batch, length, heads, dim
            case "bsd":
                return batch, length, heads * dim
        return length, heads * dim

    def check(self, q: TensorType, k: TensorType, v: TensorType, extra: tuple[TensorType, ...]) -> AttentionSizes:
        def option(ok: bool, message: str, code: str) -> None:
            self.require(ok, message, code=code, error=OptionError)

        option(self.layout in LAYOUTS, f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}", "O220")
        option(self.mask in MASKS, f"mask {self.mask!r} is not one of {', '.join(MASKS)}", "O221")
        some = not known_le(self.kv_heads, 0) and not known_le(self.num_heads, 0)
        heads_fit = some and divide_exactly(self.num_heads, self.kv_heads) is not None
        option(heads_fit, f"{self.num_heads} query heads cannot share {self.kv_heads} key heads", "O222")
        option(self.window is None or self.window >= 0, f"window {self.window} is negative", "O223")
        option(self.softcap is None or self.softcap > 0, f"softcap {self.softcap} is not positive", "O224")
        low = self.dropped is None or self.dropped < 0
        option(low, f"the score of dropped keys, {self.dropped}, is not below 0", "O221")
        alone = self.dropped in (None, -np.inf) or (self.mask == "custom" and not self.causal and self.window is None)
        option(alone, f"keys that score {self.dropped} are dropped by a custom mask and nothing else", "O221")
        option(not self.zero_rows or self.dropped == -np.inf, "rows of zeros need dropped=-inf", "O221")
        for name, t in (("q", q), ("k", k), ("v", v)):
            rank = LAYOUTS[self.layout]
            self.require(t.ndim == rank, f"layout {self.layout} needs rank {rank}, {name} is {t}", code="S260")
            self.require_dtype(t.dtype is q.dtype and t.dtype.is_float, f"{name} is {t}, q is {q}", code="D103")
        sizes = self.sizes(q, k, v)
        wanted = {
            "q": (q, self.packed(sizes.batch, self.num_heads, sizes.queries, self.head_dim)),
            "k": (k, self.packed(sizes.batch, self.kv_heads, sizes.keys, self.head_dim)),
            "v": (v, self.packed(sizes.batch, self.kv_heads, sizes.keys, sizes.value_dim)),
        }
        for name, (t, shape) in wanted.items():
            self.require(same_shape(t.shape, shape), f"{name} is {t}, expected {t.with_shape(shape)}", code="S261")
        count = (self.mask != "none") + self.has_offset
        takes = counted(count, "input")
        self.require(len(extra) == count, f"takes {takes} beside q, k and v, got {len(extra)}", code="S263")
        self._check_extra(sizes, q, extra)
        return sizes

    def _check_extra(self, sizes: AttentionSizes, q: TensorType, extra: tuple[TensorType, ...]) -> None:
        if self.mask != "none":
            mask = extra[0]
            wanted = bool_ if self.mask == "custom" else q.dtype
            self.require_dtype(mask.dtype is wanted, f"a {self.mask} mask is {wanted}, got {mask}", code="D220")
            full = (sizes.batch, self.num_heads, sizes.queries, sizes.keys)
            fits = mask.ndim == 4 and all(m == 1 or same_size(m, d) for m, d in zip(mask.shape, full, strict=True))
            self.require(
                fits, f"the mask {mask} does not broadcast to {q.dtype}[{', '.join(map(str, full))}]", code="S264"
            )
        if self.has_offset:
            offset = extra[-1]
            self.require_dtype(offset.dtype in (i32, i64), f"the offset must be i32 or i64, got {offset}", code="D221")
            fits = offset.ndim == 1 and (offset.shape[0] == 1 or same_size(offset.shape[0], sizes.batch))
            self.require(
                fits, f"the offset {offset} must have one number, or one for each of {sizes.batch} rows", code="S265"
            )

    def spread_shapes(self, *inputs: TensorType) -> list[tuple[Sequence[Dim], Sequence[Dim]]]:
        q, k, v, *rest = inputs
        sizes = self.sizes(q, k, v)
        found: list[tuple[Sequence[Dim], Sequence[Dim]]] = []
        extra = rest[len(rest) - (self.mask != "none") - self.has_offset :]
        if self.mask != "none":
            found.append((extra[0].shape, (sizes.batch, self.num_heads, sizes.queries, sizes.keys)))
        if self.has_offset:
            found.append((extra[-1].shape, (sizes.batch,)))
        return found

    # ------------------------------------------------------------------------------------------------- graph building

    def split_heads(self, x: Value, heads: Dim) -> Value:
        """From this layout to [B, heads, S, d], in the accumulator's dtype."""
        x = cast(x, x.dtype.accumulator)
        if self.layout == "bhsd":
            return x
        if self.layout != "bshd":
            d = divide_exactly(x.shape[-1], heads)
            if d is None:  # q or k, whose width is a symbol that must turn out to be this
                d = self.head_dim
            x = reshape(x, (x.shape[0] if self.layout == "bsd" else 1, x.shape[-2], heads, d))
        return transpose(x, (0, 2, 1, 3))

    def join_heads(self, x: Value, dtype: DType) -> Value:
        """From [B, heads, S, d] to this layout."""
        b, heads, s, d = x.shape
        if self.layout != "bhsd":
            x = transpose(x, (0, 2, 1, 3))
        return cast(reshape(x, self.packed(b, heads, s, d)), dtype)

    def grouped(self, x: Value) -> Value:
        """[B, H, S, d] as [B, Hk, G·S, d]: the query heads that share a key head become more rows of one product."""
        b, _, s, d = x.shape
        return x if self.group == 1 else reshape(x, (b, self.kv_heads, self.group * s, d))

    def ungrouped(self, x: Value, length: Dim) -> Value:
        """The inverse of `grouped`."""
        return reshape(x, (x.shape[0], self.num_heads, length, x.shape[3]))

    def keeps(self, sizes: AttentionSizes, extra: tuple[Value, ...]) -> Value | None:
        """Which scores stay, as booleans that broadcast to [B, H, Sq, Sk]; None when all do."""
        found = extra[0] if self.mask == "custom" else None
        if self.causal or self.window is not None:
            row = reshape(iota((sizes.queries,), 0, i32), (1, 1, sizes.queries, 1))
            column = reshape(iota((sizes.keys,), 0, i32), (1, 1, 1, sizes.keys))
            if self.has_offset:
                row = row + reshape(cast(extra[-1], i32), (extra[-1].shape[0], 1, 1, 1))
            else:
                row = row + cast(dim_size(dim_max(sizes.keys - sizes.queries, 0)), i32)
            near = column <= row
            if self.window is not None:
                near = logical_and(near, column >= row - constant(self.window, i32))
            found = near if found is None else logical_and(found, near)
        return found

    def probabilities(
        self, q: Value, k: Value, sizes: AttentionSizes, extra: tuple[Value, ...]
    ) -> tuple[Value, Value, Value | None]:
        """P [B, H, Sq, Sk] from q and k in [B, heads, S, D]; the capped scores, and which of them are dropped."""
        final, scores, dropped = self.final_scores(q, k, sizes, extra)
        p = softmax(final, -1)
        if self.zero_rows:
            lost = equal(max_(final, -1, keepdims=True), constant(-np.inf, final.dtype))
            p = where(lost, constant(0, p.dtype), p)
        return p, scores, dropped

    def final_scores(
        self, q: Value, k: Value, sizes: AttentionSizes, extra: tuple[Value, ...]
    ) -> tuple[Value, Value, Value | None]:
        """What the softmax is of, the capped scores, and which of them are dropped (None: none of them)."""
        scores = self.ungrouped(MatMul()(self.grouped(q), swapaxes(k, -1, -2)), sizes.queries) * self.scale
        if self.softcap is not None:
            scores = tanh(scores / self.softcap) * self.softcap
        biased = scores + cast(extra[0], scores.dtype) if self.mask == "bias" else scores
        dropped = biased < DROPPED if self.dropped is None else None
        keep = self.keeps(sizes, extra)
        if keep is not None:
            dropped = logical_not(keep) if dropped is None else logical_or(dropped, logical_not(keep))
        if dropped is None:
            return biased, scores, None
        return where(dropped, constant(self.dropped_score, scores.dtype), biased), scores, dropped

    # --------------------------------------------------------------------------------------------------------- batching

    def fold(self, x: Value, is_batched: bool, size: Dim) -> Value:
        """q, k, v or dy with the vmap axis folded into the batch axis."""
        if not is_batched:
            x = broadcast_to(x, (size, *x.shape))
        return x if self.layout == "sd" else reshape(x, (size * x.shape[1], *x.shape[2:]))

    def fold_extra(self, x: Value, is_batched: bool, size: Dim, batch: Dim) -> Value:
        """The mask or the offset with the vmap axis folded into its leading axis; size 1 stays where it can."""
        if not is_batched and x.shape[0] == 1:
            return x
        tail = x.shape[2:] if is_batched else x.shape[1:]
        spread = x if is_batched else insert_axis(x, 0)
        return reshape(broadcast_to(spread, (size, batch, *tail)), (size * batch, *tail))

    @property
    def folded(self) -> dict[str, Any]:
        """The fields of this op on inputs with a folded batch axis."""
        return self.static_fields() | {"layout": "bsd" if self.layout == "sd" else self.layout}

    def unfold(self, x: Value, size: Dim) -> Value:
        if self.layout == "sd":
            return x
        batch = divide_exactly(x.shape[0], size)
        assert batch is not None
        return reshape(x, (size, batch, *x.shape[1:]))

    # ------------------------------------------------------------------------------------------------------------ numpy

    def numpy_heads(self, x: np.ndarray, count: Dim) -> np.ndarray:
        heads = count.__index__()
        if self.layout == "bhsd":
            return x
        shape = (-1 if self.layout == "bshd" else x.shape[0], x.shape[-2], heads, x.shape[-1] // heads)
        if self.layout == "sd":
            shape = (1, *shape[1:])
        return (x if self.layout == "bshd" else x.reshape(shape)).transpose(0, 2, 1, 3)

    def numpy_rows(self, q: np.ndarray, k: np.ndarray, extra: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Scores (capped), dropped flags and probabilities [B, H, Sq, Sk] by a loop over batch rows and heads."""
        batch, _, queries, _ = q.shape
        keys, group = k.shape[2], self.group.__index__()
        shape = (*q.shape[:3], keys)
        scores, dropped = np.empty(shape, np.float64), np.zeros(shape, bool)
        for b in range(batch):
            shift = int(np.broadcast_to(extra[-1], (batch,))[b]) if self.has_offset else max(keys - queries, 0)
            for h in range(self.num_heads.__index__()):
                s = np.einsum("id,jd->ij", q[b, h], k[b, h // group], dtype=np.float64) * self.scale
                scores[b, h] = s if self.softcap is None else self.softcap * np.tanh(s / self.softcap)
                distance = np.arange(queries)[:, None] + shift - np.arange(keys)[None, :]
                if self.causal or self.window is not None:
                    dropped[b, h] |= distance < 0
                if self.window is not None:
                    dropped[b, h] |= distance > self.window
        biased = scores
        if self.mask == "custom":
            dropped |= ~np.broadcast_to(extra[0], shape)
        elif self.mask == "bias":
            biased = scores + extra[0]
        if self.dropped is None:
            dropped |= biased < DROPPED
        final = np.where(dropped, self.dropped_score, biased)
        highest = final.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(final - highest)
        p = weights / weights.sum(-1, keepdims=True)
        return scores, dropped, np.where(highest == -np.inf, 0, p) if self.zero_rows else p


@op("attention")
class Attention(AttentionFamily):
    """softmax(cap(scale · Q·Kᵀ) + mask) · V; query head h reads key head h · kv_heads // num_heads."""

    def infer(self, q: TensorType, k: TensorType, v: TensorType, *extra: TensorType) -> TensorType:
        sizes = self.check(q, k, v, extra)
        return q.with_shape(self.packed(sizes.batch, self.num_heads, sizes.queries, sizes.value_dim))

    def numpy(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *extra: np.ndarray) -> np.ndarray:
        heads = self.numpy_heads(v, self.kv_heads)
        _, _, p = self.numpy_rows(self.numpy_heads(q, self.num_heads), self.numpy_heads(k, self.kv_heads), extra)
        out = np.einsum("bhij,bhjd->bhid", p, np.repeat(heads, self.group.__index__(), axis=1))
        return self._numpy_join(out).astype(q.dtype)

    def _numpy_join(self, x: np.ndarray) -> np.ndarray:
        b, heads, s, d = x.shape
        return (x if self.layout == "bhsd" else x.transpose(0, 2, 1, 3)).reshape(self.packed(b, heads, s, d))

    def decompose(self, q: Value, k: Value, v: Value, *extra: Value) -> Value:
        return self.weighed(q, k, v, extra)

    def weighed(self, q: Value, k: Value, v: Value, extra: Sequence[Value], skip: float = 0.0) -> Value:
        """Attention in parts; weights below `skip` are none."""
        sizes = self.check(q.type, k.type, v.type, tuple(x.type for x in extra))
        if sizes.keys == 0:
            return zeros(self.infer(q.type, k.type, v.type, *(x.type for x in extra)).shape, q.dtype)
        queries, keys, values = (
            self.split_heads(q, self.num_heads),
            self.split_heads(k, self.kv_heads),
            self.split_heads(v, self.kv_heads),
        )
        p, _, _ = self.probabilities(queries, keys, sizes, tuple(extra))
        if skip:
            p = where(p < skip, constant(0, p.dtype), p)
        return self.join_heads(self.ungrouped(MatMul()(self.grouped(p), values), sizes.queries), q.dtype)

    def vjp(self, *inputs: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        q, k, v, *extra = inputs
        grads = AttentionBackward(**self.static_fields())(q, k, v, ct, *extra)
        return (*grads, *(None,) * (len(inputs) - len(grads)))

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        plain = [x.type.with_shape(x.shape[1:]) if b else x.type for x, b in zip(inputs, batched, strict=True)]
        batch = self.check(plain[0], plain[1], plain[2], tuple(plain[3:])).batch
        main = [self.fold(x, b, size) for x, b in zip(inputs[:3], batched, strict=False)]
        rest = [self.fold_extra(x, b, size, batch) for x, b in zip(inputs[3:], batched[3:], strict=True)]
        return self.unfold(Attention(**self.folded)(*main, *rest), size)

    @classmethod
    def samples(cls) -> list[Sample]:
        return attention_samples(backward=False)


@op("attention_lse")
class AttentionLse(AttentionFamily):
    """Attention, and the logarithm of the sum of exponentials of each row's scores: what a backward pass reads."""

    multi_output = True

    def infer(self, q: TensorType, k: TensorType, v: TensorType, *extra: TensorType) -> tuple[TensorType, TensorType]:
        sizes = self.check(q, k, v, extra)
        out = q.with_shape(self.packed(sizes.batch, self.num_heads, sizes.queries, sizes.value_dim))
        return out, TensorType(q.dtype.accumulator, (sizes.batch, self.num_heads, sizes.queries))

    def numpy(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *extra: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out = Attention(**self.static_fields()).numpy(q, k, v, *extra)
        scores, dropped, _ = self.numpy_rows(
            self.numpy_heads(q, self.num_heads), self.numpy_heads(k, self.kv_heads), extra
        )
        final = np.where(dropped, self.dropped_score, scores + extra[0] if self.mask == "bias" else scores)
        level = np.logaddexp.reduce(final, -1)
        return out, level.astype(np.float64 if q.dtype == np.float64 else np.float32)

    def decompose(self, q: Value, k: Value, v: Value, *extra: Value) -> tuple[Value, Value]:
        sizes = self.check(q.type, k.type, v.type, tuple(x.type for x in extra))
        out = Attention(**self.static_fields())(q, k, v, *extra)
        queries, keys = self.split_heads(q, self.num_heads), self.split_heads(k, self.kv_heads)
        return out, LogSumExp(3)(self.final_scores(queries, keys, sizes, extra)[0])

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> tuple[Value, Value]:
        plain = [x.type.with_shape(x.shape[1:]) if b else x.type for x, b in zip(inputs, batched, strict=True)]
        batch = self.check(plain[0], plain[1], plain[2], tuple(plain[3:])).batch
        main = [self.fold(x, b, size) for x, b in zip(inputs[:3], batched, strict=False)]
        rest = [self.fold_extra(x, b, size, batch) for x, b in zip(inputs[3:], batched[3:], strict=True)]
        out, level = AttentionLse(**self.folded)(*main, *rest)
        return self.unfold(out, size), reshape(level, (size, batch, *level.shape[1:]))

    @classmethod
    def samples(cls) -> list[Sample]:
        found = attention_samples(backward=False)
        for sample in found:
            some = sample.inputs[1].type.shape[-2] != 0 and not sample.fields.get("zero_rows", False)
            sample.grad = sample.grad and some  # no keys: -inf, which has no slope
        return found


@op("attention_backward")
class AttentionBackward(AttentionFamily):
    """Cotangents of q, k, v, and of the bias when there is one, from one recomputation of the probabilities.

    With `has_lse`, what `attention_lse` gave comes after dy: kernels then need not go through the keys for it again.
    """

    has_lse: bool = False

    multi_output = True

    def given(self, extra: Sequence[T]) -> tuple[T, ...]:
        """The mask and the offset, without what the forward pass gave."""
        return tuple(extra[2:] if self.has_lse else extra)

    def infer(
        self, q: TensorType, k: TensorType, v: TensorType, dy: TensorType, *extra: TensorType
    ) -> tuple[TensorType, ...]:
        sizes = self.check(q, k, v, self.given(extra))
        wanted = q.with_shape(self.packed(sizes.batch, self.num_heads, sizes.queries, sizes.value_dim))
        fits = dy.dtype is q.dtype and same_shape(dy.shape, wanted.shape)
        if fits and self.layout in ("bsd", "sd"):
            # heads are side by side: a symbol that may be their width will not do
            fits = divide_exactly(dy.shape[-1], self.num_heads) is not None
        self.require(fits, f"dy is {dy}, expected {wanted}", code="S266")
        if self.has_lse:
            level = TensorType(q.dtype.accumulator, (sizes.batch, self.num_heads, sizes.queries))
            for name, got, made in (("out", extra[0], wanted), ("lse", extra[1], level)):
                fits = got.dtype is made.dtype and same_shape(got.shape, made.shape)
                self.require(fits, f"{name} is {got}, expected {made}", code="S266")
        return (q, k, v, *self.given(extra)[:1]) if self.mask == "bias" else (q, k, v)

    def numpy(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray, *extra: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        group, dtype, extra = self.group.__index__(), q.dtype, self.given(extra)
        split = [
            self.numpy_heads(x, h)
            for x, h in ((q, self.num_heads), (k, self.kv_heads), (v, self.kv_heads), (dy, self.num_heads))
        ]
        queries, keys, values, upstream = split
        scores, dropped, p = self.numpy_rows(queries, keys, extra)
        dq, dk, dv = np.zeros(queries.shape), np.zeros(keys.shape), np.zeros(values.shape)
        ds = np.zeros(scores.shape)
        for b, h in np.ndindex(*scores.shape[:2]):
            shared = h // group
            dv[b, shared] += p[b, h].T @ upstream[b, h]
            dp = upstream[b, h] @ values[b, shared].T
            ds[b, h] = np.where(dropped[b, h], 0, p[b, h] * (dp - (p[b, h] * dp).sum(-1, keepdims=True)))
            slope = 1 - (scores[b, h] / self.softcap) ** 2 if self.softcap is not None else 1.0
            dq[b, h] = self.scale * (ds[b, h] * slope) @ keys[b, shared]
            dk[b, shared] += self.scale * (ds[b, h] * slope).T @ queries[b, h]

        def join(x: np.ndarray, like: np.ndarray) -> np.ndarray:
            return (x if self.layout == "bhsd" else x.transpose(0, 2, 1, 3)).reshape(like.shape).astype(dtype)

        grads = join(dq, q), join(dk, k), join(dv, v)
        if self.mask != "bias":
            return grads
        axes = tuple(a for a, d in enumerate(extra[0].shape) if d == 1)
        return (*grads, ds.sum(axes, keepdims=True).astype(dtype))

    def decompose(self, q: Value, k: Value, v: Value, dy: Value, *extra: Value) -> tuple[Value, ...]:
        extra = self.given(extra)
        sizes = self.check(q.type, k.type, v.type, tuple(x.type for x in extra))
        if sizes.keys == 0:
            return tuple(zeros(x.shape, x.dtype) for x in (q, k, v, *extra[:1])[: 4 if self.mask == "bias" else 3])
        queries, upstream = self.split_heads(q, self.num_heads), self.split_heads(dy, self.num_heads)
        keys, values = self.split_heads(k, self.kv_heads), self.split_heads(v, self.kv_heads)
        p, scores, dropped = self.probabilities(queries, keys, sizes, extra)
        dv = MatMul()(swapaxes(self.grouped(p), -1, -2), self.grouped(upstream))
        dp = self.ungrouped(MatMul()(self.grouped(upstream), swapaxes(values, -1, -2)), sizes.queries)
        ds = p * (dp - sum_(p * dp, -1, keepdims=True))
        ds = ds if dropped is None else where(dropped, constant(0, ds.dtype), ds)
        to_scores = ds * self.scale
        if self.softcap is not None:
            relative = scores / self.softcap
            to_scores = to_scores * (1 - relative * relative)
        rows = self.grouped(to_scores)
        dq = self.ungrouped(MatMul()(rows, keys), sizes.queries)
        dk = MatMul()(swapaxes(rows, -1, -2), self.grouped(queries))
        grads = tuple(self.join_heads(x, q.dtype) for x in (dq, dk, dv))
        return (*grads, cast(unbroadcast(ds, extra[0].shape), q.dtype)) if self.mask == "bias" else grads

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> tuple[Value, ...]:
        plain = [x.type.with_shape(x.shape[1:]) if b else x.type for x, b in zip(inputs, batched, strict=True)]
        plain = plain[:4] + list(self.given(plain[4:]))
        batch = self.check(plain[0], plain[1], plain[2], tuple(plain[4:])).batch
        main = [self.fold(x, b, size) for x, b in zip(inputs[:4], batched, strict=False)]
        others = list(self.given(list(zip(inputs[4:], batched[4:], strict=True))))
        rest = [self.fold_extra(x, b, size, batch) for x, b in others]
        if self.mask == "bias":  # each row of the vmap has its own cotangent of the bias
            tail = plain[4].shape[1:]
            rest[0] = broadcast_to(rest[0], (size * batch, *tail)) if rest[0].shape[0] == 1 else rest[0]
        grads = AttentionBackward(**self.folded | {"has_lse": False})(*main, *rest)
        outs = [self.unfold(x, size) for x in grads[:3]]
        if self.mask == "bias":
            parts = reshape(grads[3], (size, batch, *plain[4].shape[1:]))
            outs.append(
                parts if plain[4].shape[0] == batch else reshape(reduce_sum(parts, (1,)), (size, *plain[4].shape))
            )
        return tuple(outs)

    @classmethod
    def samples(cls) -> list[Sample]:
        return attention_samples(backward=True)


def attention_samples(*, backward: bool) -> list[Sample]:
    """The same cases for both directions; the backward op takes dy after v."""

    def case(
        q: TensorType, k: TensorType, v: TensorType, *extra: Any, out: TensorType | None = None, **fields: Any
    ) -> Sample:
        middle = (out or q,) if backward else ()
        return Sample(q, k, v, *middle, *extra, **fields)

    bias = draw(f32[2, 1, 3, 5], -1.0, 1.0)
    hole = np.ones((2, 1, 1, 5), bool)
    hole[0] = False  # all keys of the first row are dropped
    return [
        case(f32[2, 2, 3, 4], f32[2, 2, 5, 4], f32[2, 2, 5, 4], num_heads=2, kv_heads=2, head_dim=4),
        case(f32[2, 3, 4, 2], f32[2, 5, 2, 2], f32[2, 5, 2, 2], bias, num_heads=4, kv_heads=2, head_dim=2,
             layout="bshd", mask="bias", causal=True, softcap=2.0),
        case(f32[2, 3, 4], f32[2, 5, 2], f32[2, 5, 6], hole, out=f32[2, 3, 12], num_heads=2, kv_heads=1, head_dim=2,
             layout="bsd", mask="custom"),
        case(f32[4, 6], f32[4, 6], f32[4, 6], num_heads=3, kv_heads=3, head_dim=2, layout="sd", window=1,
             score_scale=0.7),
        case(f32[2, 2, 2, 3], f32[2, 1, 6, 3], f32[2, 1, 6, 3], np.array([1, 3]), num_heads=2, kv_heads=1, head_dim=3,
             causal=True, has_offset=True),
        case(f32[3, 4], f32[2, 4], f32[2, 4], f32[1, 2, 1, 1], np.array([0]), num_heads=2, kv_heads=2, head_dim=2,
             layout="sd", mask="bias", window=2, has_offset=True),
        case(f32[1, 1, 1, 1], f32[1, 1, 1, 1], f32[1, 1, 1, 1], num_heads=1, kv_heads=1, head_dim=1),
        case(f32[0, 1, 2, 2], f32[0, 1, 2, 2], f32[0, 1, 2, 2], num_heads=1, kv_heads=1, head_dim=2, causal=True),
        case(f32[2, 1, 0, 2], f32[2, 1, 2, 2], f32[2, 1, 2, 2], num_heads=1, kv_heads=1, head_dim=2),
        case(f32[1, 1, 2, 2], f32[1, 1, 0, 2], f32[1, 1, 0, 2], num_heads=1, kv_heads=1, head_dim=2),
        case(f16[1, 2, 2, 4], f16[1, 2, 2, 4], f16[1, 2, 2, 4], num_heads=2, kv_heads=2, head_dim=4, grad=False),
        case(f32[2, 1, 3, 8], f32[2, 1, 5, 8], f32[2, 1, 5, 8], hole, num_heads=1, kv_heads=1, head_dim=8,
             mask="custom", dropped=-np.inf, grad=False),
        case(f32[2, 2, 3, 4], f32[2, 1, 5, 4], f32[2, 1, 5, 4], hole, num_heads=2, kv_heads=1, head_dim=4,
             mask="custom", dropped=-np.inf, zero_rows=True),
        case(f32[2, 1, 3, 4], f32[2, 1, 5, 4], f32[2, 1, 5, 4], hole, num_heads=1, kv_heads=1, head_dim=4,
             mask="custom", dropped=-2.0),
        case(f32[2, 2, 3, 4], f32[2, 2, 5, 4], f32[2, 2, 5, 4], np.where(hole, np.float32(0.5), np.float32(-np.inf)),
             num_heads=2, kv_heads=2, head_dim=4, mask="bias", dropped=-np.inf, zero_rows=True, grad=False),
    ]  # fmt: skip
