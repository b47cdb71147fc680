"""Attention: what torch's `scaled_dot_product_attention` becomes on the host and on a GPU, and the derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from strata import ops
from strata.core import TensorType, i64
from strata.mir import Value
from strata.torch.aten.backward import derivative
from strata.torch.aten.promotion import floating, value
from strata.torch.table import Later, Unsupported, aten


def _sdpa(q: Value, k: Value, v: Value, causal: bool, mask: Value | None, scale: float | None) -> Value:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return ops.scaled_dot_product_attention(q, k, v, mask, causal, scale, q.shape[-3] != k.shape[-3])


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise Unsupported("attention with dropout")


def _attended(
    out: Any, q: Value, k: Value, v: Value, mask: Value | None, dropout_p: float, causal: bool, scale: float | None
) -> tuple[Any, ...]:
    """The output and the log sums, then what else the overload gives: sizes, and random numbers' state, which is zero.

    Sums that were not asked for are of no elements; those of whole blocks of queries end in infinities.
    """
    _refuse_dropout(dropout_p)
    y = _sdpa(q, k, v, causal, mask, scale)
    sums = Later(lambda: _sums_as(out[1], _log_sums(q, k, causal, mask, scale)))
    if len(out) <= 4:
        return y, sums, *(_zeros(kind) for kind in out[2:])
    return y, sums, None, None, q.shape[-2], k.shape[-2], *(_zeros(kind) for kind in out[6:])


def _zeros(kind: TensorType | None) -> Any:
    return None if kind is None else Later(lambda: ops.full(kind.shape, 0, kind.dtype))


def _sums_as(kind: TensorType, sums: Value) -> Value:
    if 0 in kind.shape:
        return ops.full(kind.shape, 0, kind.dtype)
    if len(kind.shape) > sums.ndim:
        return ops.expand_dims(sums, sums.ndim)
    more = kind.shape[-1] - sums.shape[-1]
    if isinstance(more, int) and more == 0:
        return sums
    return ops.concat([sums, ops.full((*sums.shape[:-1], more), math.inf, sums.dtype)], axis=-1)


def _log_sums(q: Value, k: Value, causal: bool, mask: Value | None, scale: float | None) -> Value:
    """log ∑ exp of the scores of each query."""
    q, k = floating(q), floating(k)
    if q.shape[-3] != k.shape[-3]:  # several heads of queries for one of keys
        k = ops.repeat(k, q.shape[-3] // k.shape[-3], axis=k.ndim - 3)
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) * value(
        1 / math.sqrt(q.shape[-1]) if scale is None else scale, q.dtype
    )
    if mask is not None:
        scores = scores + value(mask, q.dtype)
    if causal:
        shape = (q.shape[-2], k.shape[-2])
        seen = ops.greater_equal(ops.iota(shape, 0, i64), ops.iota(shape, 1, i64))
        scores = ops.where(seen, scores, value(-math.inf, q.dtype))
    return ops.logsumexp(scores, axis=-1)


@aten("_scaled_dot_product_flash_attention_for_cpu")
def host(
    out: Any, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return _attended(out, q, k, v, attn_mask, dropout_p, is_causal, scale)


@aten("_scaled_dot_product_flash_attention")
def flash(
    out: Any, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if return_debug_mask:
        raise Unsupported("the weights of attention")
    return _attended(out, q, k, v, None, dropout_p, is_causal, scale)


@aten("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
def biased(
    out: Any, q: Value, k: Value, v: Value, attn_bias: Value | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if return_debug_mask:
        raise Unsupported("the weights of attention")
    return _attended(out, q, k, v, attn_bias, dropout_p, is_causal, scale)


# ----------------------------------------------------------------------------------------------------------- backward
# None of them reads the output or the sums of the forward pass: our derivative makes again what it needs.


def _pulled(
    ct: Value, q: Value, k: Value, v: Value, mask: Value | None, dropout_p: float, causal: bool, scale: float | None,
    with_mask: bool = False,
) -> list[Value]:  # fmt: skip
    _refuse_dropout(dropout_p)
    wanted = [q, k, v, mask] if with_mask and mask is not None else [q, k, v]
    return derivative([_sdpa(q, k, v, causal, mask, scale)], [ct], [x for x in wanted if x is not None])


@aten("_scaled_dot_product_flash_attention_for_cpu_backward")
def host_backward(
    out: Any, ct: Value, q: Value, k: Value, v: Value, y: Any, lse: Any, dropout_p: float, is_causal: bool, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return _pulled(ct, q, k, v, attn_mask, dropout_p, is_causal, scale)


@aten("_scaled_dot_product_flash_attention_backward")
def flash_backward(
    out: Any, ct: Value, q: Value, k: Value, v: Value, y: Any, lse: Any, starts_q: Any, starts_k: Any, max_q: Any,
    max_k: Any, dropout_p: float, is_causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _pulled(ct, q, k, v, None, dropout_p, is_causal, scale)


@aten("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    out: Any, ct: Value, q: Value, k: Value, v: Value, attn_bias: Value | None, y: Any, lse: Any, seed: Any,
    offset: Any, dropout_p: float, wanted: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    found = _pulled(ct, q, k, v, attn_bias, dropout_p, is_causal, scale, wanted[3])
    return [found[i] if is_wanted and i < len(found) else None for i, is_wanted in enumerate(wanted)]


@aten("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(
    out: Any, ct: Value, q: Value, k: Value, v: Value, y: Any, lse: Any, seed: Any, offset: Any,
    attn_bias: Value | None, starts_q: Any, starts_k: Any, max_q: Any, max_k: Any, dropout_p: float, is_causal: bool,
    *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _pulled(ct, q, k, v, attn_bias, dropout_p, is_causal, scale)


@aten("scaled_dot_product_attention")
def sdpa(
    out: TensorType, q: Value, k: Value, v: Value, attn_mask: Value | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    _refuse_dropout(dropout_p)
    return _sdpa(q, k, v, is_causal, attn_mask, scale)
