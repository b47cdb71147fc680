"""Sort and scatter as StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.backends.stablehlo.build import Hlo, StableHloBuilder
from strata.backends.stablehlo.kernels import gather, scatter
from strata.backends.stablehlo.reductions import better, wide
from strata.backends.stablehlo.scalars import any_of
from strata.backends.stablehlo.table import Results, Writer, rule, types_of
from strata.core import i64

_COMBINE = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


def _ordered(b: StableHloBuilder, x: Hlo, axis: int, *, descending: bool) -> tuple[Hlo, Hlo]:
    """Elements in a stable order along an axis, and where they were. NaN is the largest number."""
    places = b.iota(i64, x.shape, axis)
    if x.size == 0:
        return x, places
    key = b.convert(x, wide(x.dtype))

    def in_front(p: Hlo, q: Hlo, _i: Hlo, _j: Hlo) -> list[Hlo]:
        if descending or not p.dtype.is_float:
            return [better(b, descending, p, q)]
        both = b.same("and", b.compare("EQ", p, p), b.compare("NE", q, q))
        return [b.same("or", b.compare("LT", p, q), both)]

    values, order = b.many(
        "stablehlo.sort", [key, places], f"dimension = {axis} : i64, is_stable = true",
        [(key.dtype, x.shape), (i64, x.shape)], [([(key.dtype, ()), (key.dtype, ()), (i64, ()), (i64, ())], in_front)],
    )  # fmt: skip
    return b.convert(values, x.dtype), order


@rule("sort")
def _sort(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return _ordered(w.b, xs[0], op.axis, descending=op.descending)[0]


@rule("argsort")
def _argsort(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return _ordered(w.b, xs[0], op.axis, descending=op.descending)[1]


@rule("topk")
def _topk(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    values, order = _ordered(w.b, xs[0], op.axis, descending=op.largest)
    return w.b.cut(values, op.axis, 0, op.k), w.b.cut(order, op.axis, 0, op.k)


# ------------------------------------------------------------------------------------------------------------- scatters


def _position(b: StableHloBuilder, ids: Hlo, size: int, *, wrap: bool) -> Hlo:
    """Ids as positions inside an axis, whatever their value."""
    at = b.convert(ids, i64)
    if wrap:
        at = b.select(b.compare("LT", at, b.like(0, at)), b.same("add", at, b.like(size, at)), at)
    return b.same("maximum", b.same("minimum", at, b.like(size - 1, at)), b.like(0, at))


def _combined(w: Writer, reduction: str, x: Hlo, places: Hlo, updates: Hlo, window: int) -> Hlo:
    """x with updates combined at places. Without a reduction the last of those that meet stays."""
    b = w.b
    if reduction != "none":
        dtype = wide(x.dtype)

        def body(old: Hlo, new: Hlo) -> Hlo:
            return b.same(_COMBINE[reduction], old, new)

        made = scatter(b, b.convert(x, dtype), places, b.convert(updates, dtype), body, window)
        return b.convert(made, x.dtype)
    rows = places.shape[:-1]
    lead = x.shape[: x.ndim - window]
    flat = b.reshape(updates, (int(np.prod(rows)), *updates.shape[len(rows) :]))
    order = b.reshape(b.iota(i64, (flat.shape[0],), 0), rows)

    def later(old: Hlo, new: Hlo) -> Hlo:
        return b.same("maximum", old, new)

    last = scatter(b, b.const(-1, i64, lead), places, order, later)
    taken = gather(b, flat, b.reshape(last, (*lead, 1)), [0])
    hit = b.spread(b.compare("GE", last, b.like(0, last)), x.shape, range(len(lead)))
    return b.select(hit, taken, x)


@rule("scatter_nd")
def _scatter_nd(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, ids, updates = xs
    b, count, batch = w.b, xs[1].shape[-1], op.batch_dims
    if 0 in (x.size, updates.size):
        return x
    rows = ids.shape[:-1]
    columns = [b.iota(i64, (*rows, 1), a) for a in range(batch)]
    for c in range(count):
        part = b.slice(ids, [0] * len(rows) + [c], [*rows, c + 1])
        columns.append(_position(b, part, x.shape[batch + c], wrap=op.wrap))
    places = b.concat(columns, len(rows)) if columns else b.const(0, i64, (*rows, 0))
    return _combined(w, op.reduction, x, places, updates, x.ndim - batch - count)


@rule("paged_update")
def _paged_update(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    pool, new, table, past = xs
    b, (batch, mine), page = w.b, table.shape, pool.shape[1]
    if new.size == 0:
        return pool
    rows = new.shape[:2]
    token = b.same("add", b.spread(past, rows, [0]), b.iota(i64, rows, 1))
    token = _position(b, token, mine * page, wrap=False)
    at = b.same("divide", token, b.like(page, token))
    first = b.same("multiply", b.iota(i64, rows, 0), b.like(mine, token))
    flat = b.reshape(table, (batch * mine,))
    number = gather(b, flat, b.reshape(b.same("add", first, at), (*rows, 1)), [0])
    row = b.same("remainder", token, b.like(page, token))
    columns = [b.reshape(x, (*rows, 1)) for x in (_position(b, number, pool.shape[0], wrap=False), row)]
    return scatter(b, pool, b.concat(columns, 2), new, lambda _, later: later, window=1)


@rule("scatter_elements")
def _scatter_elements(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, ids, updates = xs
    b = w.b
    if 0 in (x.size, updates.size):
        return x
    at = _position(b, ids, x.shape[op.axis], wrap=op.wrap)
    columns = [at if a == op.axis else b.iota(i64, ids.shape, a) for a in range(x.ndim)]
    places = b.concat([b.reshape(c, (*ids.shape, 1)) for c in columns], x.ndim)
    return _combined(w, op.reduction, x, places, updates, 0)


@rule("scatter_add")
def _scatter_add(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    updates, ids = xs
    b, (made,) = w.b, types_of(op, xs)
    start = b.const(0, made.dtype, made.static_shape)
    if 0 in (start.size, updates.size):
        return start
    places = b.reshape(_position(b, ids, int(op.rows), wrap=op.wrap), (*ids.shape, 1))
    return _combined(w, "add", start, places, updates, start.ndim - 1)


@rule("checked_ids")
def _checked_ids(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """Ids as they are; those out of range make the run fail."""
    (ids,) = xs
    b = w.b
    if ids.size == 0 or (op.kind == "empty" and 0 not in op.sizes):
        return ids
    many = len(op.sizes) > 1
    for c, size in enumerate(op.sizes):
        if op.kind == "empty" and size:
            continue
        part = b.cut(ids, ids.ndim - 1, c, c + 1) if many else ids
        low = b.compare("LT", part, b.like(-size if op.wrap else 0, part))
        bad = b.same("or", low, b.compare("GE", part, b.like(size, part)))
        if op.allowed is not None:
            bad = b.same("and", bad, b.compare("NE", part, b.like(op.allowed, part)))
        w.fail_if(any_of(b, bad) if bad.ndim else bad)
    return ids


@rule("ensure")
def _ensure(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """A value as it is; the run fails where the condition does not hold."""
    x, holds = xs
    w.fail_if(w.b.same("not", holds))
    return x


@rule("ensure_ids")
def _ensure_ids(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """Ids as they are; the run fails where what was found tells of one."""
    ids, found = xs
    first = w.b.cut(found, 0, 0, 1)
    w.fail_if(any_of(w.b, w.b.compare("NE", first, w.b.like(0, first))))
    return ids
