"""Find attention written as two matmuls and a softmax, and make it one op without a score matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from strata.core import Dim
from strata.mir import REGISTRY, Constant, Graph, Value
from strata.ops import broadcast_to, expand_dims, reshape, transpose
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import Uses, constant_number, rewrite_each

SWAP = (0, 2, 1, 3)  # between heads before tokens and tokens before heads
HIDES = -1e30  # numbers from here down leave nothing of a score that they are added to


@register
@dataclass(frozen=True)
class FindAttention(Pass):
    """softmax(q kᵀ scale + mask) v becomes attention, where the backend takes that op as it is.

    Rounding differs: the op adds up its softmax as it goes. A row without a key stays what softmax makes of it.
    """

    name: ClassVar[str] = "find_attention"
    seeks: ClassVar[frozenset[str]] = frozenset({"softmax"})

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite_each(graph, lambda value, uses: _found(value, uses, ctx), self.name)


@dataclass(frozen=True)
class _Scores:
    """q kᵀ times a number, plus a mask of numbers; or where a mask of booleans does not keep it, another number."""

    q: Value
    keys: Value  # transposed: [.., D, S]
    scale: float
    mask: Value | None
    dropped: float = -math.inf  # the score of what a mask of booleans does not keep


def _found(value: Value, uses: Uses, ctx: PassContext) -> Value | None:
    if value.node.op.name != "matmul" or value.ndim not in (3, 4) or not value.dtype.is_float:
        return None
    weights, v = value.node.inputs
    op = weights.node.op
    if op.name != "softmax" or op.axis != value.ndim - 1 or uses.of(weights) != 1 or v.ndim != value.ndim:  # type: ignore[attr-defined]
        return None
    scores = _scores(weights.node.inputs[0], uses)
    if scores is None or not (scores.q.ndim == scores.keys.ndim == v.ndim):
        return None
    batch, (rows, columns), width = value.shape[:-2], weights.shape[-2:], scores.q.shape[-1]
    shapes = (*batch, rows, width), (*batch, width, columns), (*batch, columns, v.shape[-1])
    if 0 in shapes[0][:-1] or not all(map(_spreads, (scores.q, scores.keys, v), shapes)):
        return None
    q, keys, v = (
        x if x.shape == shape else broadcast_to(x, shape)
        for x, shape in zip((scores.q, scores.keys, v), shapes, strict=True)
    )
    mask = scores.mask
    if v.ndim == 3:
        q, keys, v = (expand_dims(x, 1) for x in (q, keys, v))
        mask = expand_dims(mask, 1) if mask is not None and mask.ndim == 3 else mask
    if mask is not None:
        mask = _as_four_axes(mask, (*q.shape[:3], columns))
        if mask is None:
            return None
    made = _attention(q, keys, v, replace(scores, mask=mask), ctx)
    return made if made is None or value.ndim == 4 else reshape(made, value.shape)


def _spreads(x: Value, shape: tuple[Dim, ...]) -> bool:
    return all(d in (1, wanted) for d, wanted in zip(x.shape, shape, strict=True))


def _attention(q: Value, keys: Value, v: Value, scores: _Scores, ctx: PassContext) -> Value | None:
    """The op over [B, H, S, D], or over [B, S, H, D] where that is how the values were before they were transposed."""
    mask, dropped = scores.mask, scores.dropped
    causal = mask is not None and is_causal(mask) and (not mask.dtype.is_bool or dropped <= HIDES)
    extra = (mask,) if mask is not None and not causal else ()
    kind = "none" if not extra else "custom" if extra[0].dtype.is_bool else "bias"
    heads_last = v.node.op.name == "transpose" and v.node.op.perm == SWAP  # type: ignore[attr-defined]
    attention: Any = REGISTRY["attention"]
    made = attention(
        num_heads=q.shape[1], kv_heads=q.shape[1], head_dim=q.shape[-1], layout="bshd" if heads_last else "bhsd",
        causal=causal, mask=kind, score_scale=scores.scale, dropped=dropped if kind == "custom" else -math.inf,
    )  # fmt: skip
    if heads_last:
        q, k, v = transpose(q, SWAP), transpose(keys, (0, 3, 1, 2)), v.node.inputs[0]
    else:
        k = transpose(keys, (0, 1, 3, 2))
    if not ctx.takes(made, [x.type for x in (q, k, v, *extra)]):
        return None
    result: Value = made(q, k, v, *extra)
    return transpose(result, SWAP) if heads_last else result


def _scores(value: Value, uses: Uses) -> _Scores | None:
    """Read scores from the outside in: a mask, a factor, the matmul."""
    mask: Value | None = None
    dropped = -math.inf
    if uses.of(value) != 1:
        return None
    if value.node.op.name == "add":
        a, b = value.node.inputs
        value, mask = (a, b) if _is_product(a) else (b, a)
    elif value.node.op.name == "where":
        keep, scored, low = value.node.inputs
        number = constant_number(low)
        if number is None or not number < 0:
            return None
        value, mask, dropped = scored, keep, number
    if uses.of(value) != 1:
        return None
    scale = 1.0
    if value.node.op.name in ("multiply", "divide"):
        a, b = value.node.inputs
        factor, other = constant_number(b), a
        if factor is None and value.node.op.name == "multiply":
            factor, other = constant_number(a), b
        if factor is None or factor == 0 or other.ndim != value.ndim:
            return None
        scale = factor if value.node.op.name == "multiply" else 1.0 / factor
        value = other
    if value.node.op.name != "matmul" or uses.of(value) != 1:
        return None
    q, keys = value.node.inputs
    return _Scores(q, keys, scale, mask, dropped)


def _is_product(value: Value) -> bool:
    if value.node.op.name in ("multiply", "divide"):
        return any(x.node.op.name == "matmul" for x in value.node.inputs)
    return value.node.op.name == "matmul"


def _as_four_axes(mask: Value, scores: tuple[Dim, ...]) -> Value | None:
    """A mask with one size or the full one on each of the four axes; None where it has others."""
    if mask.ndim > 4:
        return None
    whole = reshape(mask, (*(1,) * (4 - mask.ndim), *mask.shape))
    return whole if _spreads(whole, scores) else None


def is_causal(mask: Value) -> bool:
    """Whether a constant mask, of booleans or of numbers to add, keeps exactly the keys up to the query."""
    while mask.node.op.name in ("reshape", "broadcast_to"):
        mask = mask.node.inputs[0]
    if not isinstance(mask.node.op, Constant):
        return False
    array = mask.node.op.data.array
    sizes: tuple[int, ...] = array.shape[-2:]
    if len(sizes) < 2 or sizes[0] != sizes[1] or array.size != sizes[0] ** 2:
        return False
    square = array.reshape(sizes)
    keep = np.tri(len(square), dtype=bool)
    if square.dtype == bool:
        return bool(np.array_equal(square, keep))
    return bool(np.all(square[keep] == 0) and np.all(square[~keep] <= HIDES))
