"""Sliding windows and pooling as StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from strata.backends.stablehlo.build import Hlo, StableHloBuilder
from strata.backends.stablehlo.kernels import lowered
from strata.backends.stablehlo.reductions import arg_reduce, combiner, reduce, wide
from strata.backends.stablehlo.table import Results, Writer, rule, types_of
from strata.core import bool_, i32, i64
from strata.kernel import identity

MANY = 512  # taps from which windows are gathered, as a slice for each would make a long module


@rule("windows")
def _windows(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    (made,) = types_of(op, xs)
    if prod(op.kernel) > MANY:
        return lowered(w.b, op, xs)
    return unfolded(w.b, op, x, op.value, made.static_shape)


def unfolded(b: StableHloBuilder, op: Any, x: Hlo, fill: Any, shape: Sequence[int]) -> Hlo:
    """[*lead, *counts, *kernel]: a slice for each tap, put side by side."""
    rank = len(op.kernel)
    lead = x.ndim - rank
    counts = shape[lead : lead + rank]
    if 0 in shape:
        return b.const(0, x.dtype, shape)
    padded = b.pad(x, fill, [0] * lead + [p[0] for p in op.padding], [0] * lead + [p[1] for p in op.padding])
    seen = []
    for tap in product(*(range(n) for n in op.kernel)):
        start = [0] * lead + [j * d for j, d in zip(tap, op.dilation, strict=True)]
        stop = [*padded.shape[:lead]]
        stop += [s + (n - 1) * step + 1 for s, n, step in zip(start[lead:], counts, op.stride, strict=True)]
        part = b.slice(padded, start, stop, [1] * lead + list(op.stride))
        seen.append(b.reshape(part, (*part.shape, 1)))
    return b.reshape(b.concat(seen, x.ndim), shape)


@rule("fold_windows")
def _fold_windows(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    if prod(op.kernel) > MANY:
        return lowered(w.b, op, xs)
    return folded(w.b, op, x, types_of(op, xs)[0].static_shape)


def folded(b: StableHloBuilder, op: Any, x: Hlo, shape: Sequence[int]) -> Hlo:
    """Every tap spread out to where its windows lie, and all of them added up."""
    rank = len(op.kernel)
    lead = len(shape) - rank
    if 0 in shape or x.size == 0:
        return b.const(0, x.dtype, shape)
    given = b.convert(x, wide(x.dtype))
    total: Hlo | None = None
    for tap in product(*(range(n) for n in op.kernel)):
        start, stop = [0] * (lead + rank) + list(tap), [*x.shape[: lead + rank], *(j + 1 for j in tap)]
        part = b.reshape(b.slice(given, start, stop), x.shape[: lead + rank])
        low, high = [0] * lead, [0] * lead
        for j, d, s, (first, _), count, size in zip(
            tap, op.dilation, op.stride, op.padding, x.shape[lead:], shape[lead:], strict=False
        ):
            low.append(j * d - first)
            high.append(size - (low[-1] + (count - 1) * s + 1))
        placed = b.pad(part, 0, low, high, [0] * lead + [s - 1 for s in op.stride])
        total = placed if total is None else b.same("add", total, placed)
    assert total is not None
    return b.convert(total, x.dtype)


@rule("pool_sum", "pool_prod", "pool_max", "pool_min")
def _pool(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    b, kind = w.b, op.name.removeprefix("pool_")
    shape = types_of(op, xs)[0].static_shape
    if 0 in shape:
        return b.const(0, x.dtype, shape)
    dtype = wide(x.dtype) if kind in ("sum", "prod") else x.dtype
    lead = x.ndim - len(op.kernel)
    given = b.convert(x, dtype)
    start = b.const(identity(kind, dtype), dtype)
    # what padding takes away is cut off first: windows only ever reach further
    given = b.pad(given, start, [0] * lead + [min(p, 0) for p, _ in op.padding],
                  [0] * lead + [min(p, 0) for _, p in op.padding])  # fmt: skip
    made = b.reduce_window(
        given, start, combiner(b, kind), window=[1] * lead + list(op.kernel), stride=[1] * lead + list(op.stride),
        dilation=[1] * lead + list(op.dilation),
        padding=[(0, 0)] * lead + [(max(p, 0), max(q, 0)) for p, q in op.padding], shape=shape,
    )  # fmt: skip
    return b.convert(made, x.dtype)


def _first_taps(b: StableHloBuilder, op: Any, x: Hlo, counts: Sequence[int]) -> Hlo:
    """[*lead, *counts]: the number of the tap that holds the extreme of each window first; padding never does."""
    rank, kind = len(op.kernel), op.extreme_kind()
    lead = x.ndim - rank
    taps = prod(op.kernel)
    seen = unfolded(b, op, x, identity(kind, x.dtype), (*counts, *op.kernel))
    inside = unfolded(
        b,
        op,
        b.const(True, bool_, x.shape[lead:]),
        False,
        (*counts[lead:], *op.kernel),
    )
    flat = b.reshape(seen, (*counts, taps))
    best = reduce(b, kind, flat, [len(counts)])
    spread = b.spread(best, flat.shape, range(len(counts)))
    hit = b.compare("EQ", flat, spread)
    if x.dtype.is_float:
        nans = b.same("and", b.compare("NE", flat, flat), b.compare("NE", spread, spread))
        hit = b.same("or", hit, nans)
    there = b.spread(b.reshape(inside, (*counts[lead:], taps)), flat.shape, range(lead, len(flat.shape)))
    return arg_reduce(b, True, b.convert(b.same("and", hit, there), i32), len(counts))


@rule("pool_backward")
def _pool_backward(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, dy = xs
    b, shape = w.b, types_of(op, xs)[0].static_shape
    if prod(op.kernel) > MANY:
        return lowered(b, op, xs)
    if 0 in (x.size, dy.size):
        return b.const(0, dy.dtype, shape)
    first = _first_taps(b, op, x, dy.shape)
    taps = (*dy.shape, prod(op.kernel))
    mine = b.compare("EQ", b.spread(first, taps, range(dy.ndim)), b.iota(i64, taps, dy.ndim))
    shares = b.select(mine, b.spread(dy, taps, range(dy.ndim)), b.const(0, dy.dtype, taps))
    return folded(b, op, b.reshape(shares, (*dy.shape, *op.kernel)), shape)
