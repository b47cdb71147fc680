"""Find attention written as two matmuls and a softmax, and make it one op without a score matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from strata.mir import REGISTRY, Constant, Graph, Value
from strata.ops import reshape, transpose, where, zeros
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import Uses, constant_number, rewrite_each

SWAP = (0, 2, 1, 3)  # between heads before tokens and tokens before heads
MASKED = -1e4  # numbers from here down stand for minus infinity in a mask


@register
@dataclass(frozen=True)
class FindAttention(Pass):
    """softmax(q kᵀ scale + mask) v becomes attention, where the backend takes that op as it is.

    Rounding differs: the op adds up its softmax as it goes.
    """

    name: ClassVar[str] = "find_attention"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite_each(graph, lambda value, uses: _found(value, uses, ctx), self.name)


@dataclass(frozen=True)
class _Scores:
    """q kᵀ times a number, plus a mask of numbers."""

    q: Value
    keys: Value  # transposed: [.., D, S]
    scale: float
    mask: Value | None


def _found(value: Value, uses: Uses, ctx: PassContext) -> Value | None:
    if value.node.op.name != "matmul" or value.ndim not in (3, 4) or not value.dtype.is_float:
        return None
    weights, v = value.node.inputs
    op = weights.node.op
    if op.name != "softmax" or op.axis != value.ndim - 1 or uses.of(weights) != 1 or v.ndim != value.ndim:  # type: ignore[attr-defined]
        return None
    scores = _scores(weights.node.inputs[0], uses)
    if scores is None or not (scores.q.ndim == scores.keys.ndim == v.ndim) or scores.q.shape[:-2] != v.shape[:-2]:
        return None
    if scores.keys.shape[:-2] != v.shape[:-2] or not isinstance(v.shape[-3] if v.ndim == 4 else 1, int):
        return None
    q, keys = scores.q, scores.keys
    if v.ndim == 3:
        q, keys, v = (reshape(x, (x.shape[0], 1, *x.shape[1:])) for x in (q, keys, v))
    sizes = (*q.shape[:3], keys.shape[3])
    if not isinstance(q.shape[-1], int):
        return None
    mask = _as_four_axes(scores.mask, sizes) if scores.mask is not None else None
    if scores.mask is not None and mask is None:
        return None
    made = _attention(q, keys, v, scores.scale, mask, ctx)
    return made if made is None or value.ndim == 4 else reshape(made, value.shape)


def _attention(q: Value, keys: Value, v: Value, scale: float, mask: Value | None, ctx: PassContext) -> Value | None:
    """The op over [B, H, S, D], or over [B, S, H, D] where that is how the values were before they were transposed."""
    causal = mask is not None and is_causal(mask)
    extra = (mask,) if mask is not None and not causal else ()
    heads_last = v.node.op.name == "transpose" and v.node.op.perm == SWAP  # type: ignore[attr-defined]
    attention: Any = REGISTRY["attention"]
    made = attention(
        num_heads=q.shape[1], kv_heads=q.shape[1], head_dim=q.shape[-1], layout="bshd" if heads_last else "bhsd",
        causal=causal, mask="bias" if extra else "none", score_scale=scale,
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
    """Read scores from the outside in: a mask, a factor, the product."""
    mask: Value | None = None
    if uses.of(value) != 1:
        return None
    if value.node.op.name == "add":
        a, b = value.node.inputs
        value, mask = (a, b) if a.type == value.type and _is_product(a) else (b, a)
    elif value.node.op.name == "where":
        keep, scored, low = value.node.inputs
        number = constant_number(low)
        if number is None or number > MASKED:
            return None
        value, mask = scored, where(keep, zeros((), scored.dtype), low)
    if uses.of(value) != 1:
        return None
    scale = 1.0
    if value.node.op.name in ("multiply", "divide"):
        a, b = value.node.inputs
        factor, other = constant_number(b), a
        if factor is None and value.node.op.name == "multiply":
            factor, other = constant_number(a), b
        if factor is None or factor == 0 or other.type != value.type:
            return None
        scale = factor if value.node.op.name == "multiply" else 1.0 / factor
        value = other
    if value.node.op.name != "matmul" or uses.of(value) != 1:
        return None
    q, keys = value.node.inputs
    return _Scores(q, keys, scale, mask)


def _is_product(value: Value) -> bool:
    if value.node.op.name in ("multiply", "divide"):
        return any(x.node.op.name == "matmul" for x in value.node.inputs)
    return value.node.op.name == "matmul"


def _as_four_axes(mask: Value, scores: tuple[object, ...]) -> Value | None:
    """A mask with one size or the full one on each of the four axes; None where it has others."""
    if mask.ndim > 4:
        return None
    if mask.ndim == 3 and mask.shape[0] == scores[0] and scores[1] == 1:
        mask = reshape(mask, (mask.shape[0], 1, *mask.shape[1:]))
    shape = (*(1,) * (4 - mask.ndim), *mask.shape)
    if any(m not in (1, s) for m, s in zip(shape, scores, strict=True)):
        return None
    return mask if mask.ndim == 4 else reshape(mask, shape)


def is_causal(mask: Value) -> bool:
    """Whether a constant mask keeps exactly the keys up to the query."""
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
    return bool(np.all(square[keep] == 0) and np.all(square[~keep] <= MASKED))
