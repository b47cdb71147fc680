"""Front-end functions of attention: users' layouts and masks, brought to the form that the op takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from strata.config import config
from strata.core import Dim, DType, bool_, divide_exactly, f32, i32, i64
from strata.errors import DTypeError, OptionError, ShapeError
from strata.mir import Value, constant, function
from strata.ops.base.creation import dim_size, iota
from strata.ops.base.frontend import Operand, as_value, promoted
from strata.ops.base.movement import broadcast_to, reshape
from strata.ops.elementwise.logic import cast, isnan, logical_and, where
from strata.ops.nn.attention import LAYOUTS, Attention, AttentionBackward

EMPTY = ("mean", "zero", "nan")


def _infer_layout(q: Value, num_heads: int | None, what: str) -> str:
    if q.ndim in (2, 3):
        return "sd" if q.ndim == 2 else "bsd"
    if q.ndim != 4:
        raise ShapeError(f"{what}: q must have 2 to 4 axes, got {q.type}", code="S260")
    head_major, token_major = (num_heads is not None and q.shape[axis] == num_heads for axis in (1, 2))
    if head_major == token_major:
        raise OptionError(
            f"{what}: {q.type} with num_heads={num_heads} may be [B, H, S, D] or [B, S, H, D]", code="O225",
            fix='layout="bhsd" or layout="bshd"',
        )  # fmt: skip
    return "bhsd" if head_major else "bshd"


def _heads(x: Value, layout: str, given: int | None, head_dim: Dim | None, name: str, what: str) -> int:
    if layout in ("bhsd", "bshd"):
        found = x.shape[1 if layout == "bhsd" else 2]
        if given is not None and found != given:
            raise ShapeError(
                f"{what}: {name} is {x.type} in layout {layout}, which has {found} heads, not {given}", code="S261"
            )
        return found.__index__()
    if given is not None:
        return given
    heads = None if head_dim is None else divide_exactly(x.shape[-1], head_dim)
    if heads is None:
        raise OptionError(f"{what}: layout {layout} needs the number of heads of {name} : {x.type}", code="O226")
    return heads.__index__()


def _mask_operand(mask: Operand, kind: str | None, dtype: DType, what: str) -> tuple[Value, str]:
    """The mask with its kind, as rank 4. Custom masks of rank 2 are [B, Sk]; everything else aligns to the right."""
    value = as_value(mask)
    if kind is None:
        if value.dtype.is_float and value.ndim == 2:
            raise OptionError(
                f"{what}: a float mask {value.type} may be key flags [B, Sk] or a bias [Sq, Sk]", code="O227",
                fix='mask_kind="custom" or mask_kind="bias"',
            )  # fmt: skip
        kind = "bias" if value.dtype.is_float else "custom"
    if value.ndim > 4:
        raise ShapeError(f"{what}: the mask {value.type} has more than 4 axes", code="S264")
    if kind == "bias":
        lost = value if value.dtype.is_float and math.isfinite(value.dtype.lowest) else None
        value = cast(value, f32 if math.isfinite(dtype.lowest) else dtype)
        if lost is not None:  # what minus infinity becomes where there is none
            value = where(isnan(lost), constant(-np.inf, value.dtype), value)
    elif not value.dtype.is_bool:
        value = value >= config().attention_mask_threshold if value.dtype.is_float else cast(value, bool_)
    if kind == "custom" and value.ndim in (2, 3):  # [B, Sk] and [B, Sq, Sk]
        middle = (1,) * (4 - value.ndim)
        return reshape(value, (value.shape[0], *middle, *value.shape[1:])), kind
    return reshape(value, (*(1,) * (4 - value.ndim), *value.shape)), kind


def _build(
    q: Operand, k: Operand, v: Operand, mask: Operand | None, *, num_heads: int | None, kv_heads: int | None,
    mask_kind: str | None, causal: bool, window: int | None, scale: float | None, softcap: float | None,
    layout: str | None, offset: Any, lengths: Any, empty: str, what: str,
) -> tuple[dict[str, Any], list[Value], list[Value]]:  # fmt: skip
    """The fields of the op, (q, k, v), and the extra inputs.

    Where a mask is added to numbers of a type without infinities, all of them are f32: minus infinity would be NaN.
    """
    query, key, value = promoted(q, k, v)
    if not query.dtype.is_float:
        raise DTypeError(f"{what}: needs floats, got {query.type}", code="D104")
    known = (None, "none", "causal", "window", "sliding_window", "custom", "bias")
    if mask_kind not in known:
        raise OptionError(
            f"{what}: mask_kind {mask_kind!r} is not one of {', '.join(map(repr, known[1:]))}", code="O221"
        )
    if mask_kind in ("custom", "bias") and mask is None:
        raise OptionError(f"{what}: mask_kind {mask_kind!r} needs a mask", code="O221")
    if mask_kind in ("window", "sliding_window") and window is None:
        raise OptionError(f"{what}: mask_kind {mask_kind!r} needs window=", code="O223")
    if empty not in EMPTY:
        raise OptionError(f"{what}: empty {empty!r} is not one of {', '.join(map(repr, EMPTY))}", code="O221")
    layout = layout or _infer_layout(query, num_heads, what)
    if layout not in LAYOUTS or query.ndim != LAYOUTS[layout]:
        raise OptionError(f"{what}: layout {layout!r} does not fit q : {query.type}", code="O220")
    num_heads = _heads(query, layout, num_heads, None, "q", what)
    head_dim = query.shape[-1] if LAYOUTS[layout] == 4 else divide_exactly(query.shape[-1], num_heads)
    if head_dim is None:
        raise ShapeError(f"{what}: q : {query.type} does not divide into {num_heads} heads", code="S262")
    kv_heads = _heads(key, layout, kv_heads, head_dim, "k", what)
    causal = causal or mask_kind == "causal"
    extra: list[Value] = []
    kind = "none"
    if mask is not None:
        operand, kind = _mask_operand(mask, mask_kind if mask_kind in ("custom", "bias") else None, query.dtype, what)
        query, key, value = (cast(x, operand.dtype) if kind == "bias" else x for x in (query, key, value))
        extra.append(operand)
    keys_axis, queries_axis = (2, 2) if layout == "bhsd" else (-3, -3) if layout == "bshd" else (-2, -2)
    if lengths is not None:
        count = reshape(as_value(lengths), (-1,))
        column = iota((key.shape[keys_axis],), 0, count.dtype)
        inside = reshape(column, (1, 1, 1, column.shape[0])) < reshape(count, (count.shape[0], 1, 1, 1))
        if kind == "custom":
            extra[0] = logical_and(extra[0], inside)
        elif kind == "bias":
            extra[0] = where(inside, extra[0], constant(-np.inf, query.dtype))
        else:
            extra, kind = [inside], "custom"
        if offset is None:
            offset = count - cast(dim_size(query.shape[queries_axis]), count.dtype)
    has_offset = offset is not None and (causal or window is not None)
    if has_offset:
        shift = as_value(offset)
        shift = shift if shift.dtype in (i32, i64) else cast(shift, i32)
        extra.append(reshape(shift, (-1,)))
    fields = {
        "num_heads": num_heads, "kv_heads": kv_heads, "head_dim": head_dim.__index__(), "layout": layout,
        "causal": causal, "window": window, "mask": kind, "has_offset": has_offset,
        "score_scale": None if scale is None else float(scale),
        "softcap": None if softcap is None else float(softcap),
        "dropped": None if empty == "mean" else -math.inf, "zero_rows": empty == "zero",
    }  # fmt: skip
    return fields, [query, key, value], extra


@function()
def attention(
    q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *, num_heads: int | None = None,
    kv_heads: int | None = None, mask_kind: str | None = None, causal: bool = False, window: int | None = None,
    scale: float | None = None, softcap: float | None = None, layout: str | None = None, offset: Operand | None = None,
    lengths: Operand | None = None, empty: str = "mean",
) -> Value:  # fmt: skip
    """softmax(cap(scale · Q·Kᵀ) + mask) · V in q's layout.

    layout: "bhsd", "bshd", "bsd" or "sd"; taken from the shapes when they are clear. `mask` drops keys where false or
    below the setting `attention_mask_threshold`, 0.5 (mask_kind "custom": [B, Sk], [B, Sq, Sk] or [B, H, Sq, Sk]), or
    is added to the scores ("bias").
    `causal` and `window` combine with it. `offset` is the absolute position of query 0, for each batch row or for all;
    `lengths` is the number of keys that count, and puts the last query at the last of them. `empty` is what a query
    that keeps no key gives: the "mean" of V, "zero", or "nan", which is what softmax makes of a row of -inf.
    """
    fields, main, extra = _build(
        q, k, v, mask, num_heads=num_heads, kv_heads=kv_heads, mask_kind=mask_kind, causal=causal, window=window,
        scale=scale, softcap=softcap, layout=layout, offset=offset, lengths=lengths, empty=empty, what="attention",
    )  # fmt: skip
    op, skip = Attention(**fields), config().attention_score_skip
    made = op.weighed(main[0], main[1], main[2], extra, skip) if skip else op(*main, *extra)
    return cast(made, promoted(q, k, v)[0].dtype)


@function()
def attention_backward(
    q: Operand, k: Operand, v: Operand, dy: Operand, mask: Operand | None = None, *, wrt: str | None = None,
    num_heads: int | None = None, kv_heads: int | None = None, mask_kind: str | None = None, causal: bool = False,
    window: int | None = None, scale: float | None = None, softcap: float | None = None, layout: str | None = None,
    offset: Operand | None = None, lengths: Operand | None = None, empty: str = "mean",
) -> Value | tuple[Value, ...]:  # fmt: skip
    """Cotangents (dq, dk, dv[, dbias]) of `attention`, or the one that `wrt` names: query, key, value or bias."""
    fields, main, extra = _build(
        q, k, v, mask, num_heads=num_heads, kv_heads=kv_heads, mask_kind=mask_kind, causal=causal, window=window,
        scale=scale, softcap=softcap, layout=layout, offset=offset, lengths=lengths, empty=empty,
        what="attention_backward",
    )  # fmt: skip
    dtype = promoted(q, k, v)[0].dtype
    made = AttentionBackward(**fields)(*main, cast(as_value(dy), main[0].dtype), *extra)
    grads: tuple[Value, ...] = tuple(cast(x, dtype) for x in made)
    if wrt is None:
        return grads
    names = ("query", "key", "value", "bias")[: len(grads)]
    if wrt.lower() not in names:
        raise OptionError(f"attention_backward: wrt {wrt!r} is not one of {', '.join(names)}", code="O228")
    return grads[names.index(wrt.lower())]


@function()
def scaled_dot_product_attention(
    q: Operand, k: Operand, v: Operand, attn_mask: Operand | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    """torch's function on [.., H, S, D]: a boolean mask keeps, a float mask is added; axes align to the right.

    `is_causal` lets query i see keys 0..i, also when there are more keys than queries, where `attention` lets the last
    query see all of them. A query that a mask leaves without a key gives zeros.
    """
    query, key, value = promoted(q, k, v)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ShapeError(
            f"scaled_dot_product_attention: needs [.., S, D], got {query.type}, {key.type}, {value.type}", code="S260"
        )
    lead, rank = query.shape[:-2], max(query.ndim, key.ndim, value.ndim, 4)

    def widen(x: Value) -> Value:
        return reshape(x, (*(1,) * (rank - x.ndim), *x.shape))

    query, key, value = widen(query), widen(key), widen(value)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads and not enable_gqa:
        raise OptionError(
            f"scaled_dot_product_attention: q has {heads} heads and k has {kv_heads}",
            code="O222",
            fix="enable_gqa=True",
        )
    mask = None if attn_mask is None else as_value(attn_mask)
    batch = query.shape[:-3]
    if (
        mask is not None and mask.ndim > 3 and rank > 4
    ):  # several batch axes: spread the mask over them, then fold all alike
        mask = broadcast_to(mask, (*batch, *mask.shape[-3:]))
    flat = [reshape(x, (-1, *x.shape[-3:])) if rank > 4 else x for x in (query, key, value)]
    if mask is not None:
        mask = (
            reshape(mask, (*(1,) * (4 - mask.ndim), *mask.shape))
            if mask.ndim < 4
            else reshape(mask, (-1, *mask.shape[-3:]))
        )
    kind = None if mask is None else "bias" if mask.dtype.is_float else "custom"
    offset = 0 if is_causal and query.shape[-2] != key.shape[-2] else None
    out = attention(
        flat[0], flat[1], flat[2], mask, layout="bhsd", mask_kind=kind, causal=is_causal, scale=scale, offset=offset,
        empty="mean" if mask is None else "zero",  # every query sees the first key where no mask hides it
    )  # fmt: skip
    return reshape(out, (*lead, *out.shape[-2:]))
