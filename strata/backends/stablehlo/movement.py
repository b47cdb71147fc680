"""Movement and creation as StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.backends.stablehlo.build import Hlo
from strata.backends.stablehlo.table import Results, Writer, rule
from strata.core import i64


@rule("reshape")
def _reshape(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.reshape(xs[0], op.shape)


@rule("transpose")
def _transpose(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.transpose(xs[0], op.perm)


@rule("broadcast_to")
def _broadcast_to(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.trailing(xs[0], op.shape)


@rule("slice")
def _slice(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    (x,) = xs
    stop = [max(a, min(b, n)) for a, b, n in zip(op.start, op.stop, x.shape, strict=True)]
    return w.b.slice(x, op.start, stop, op.step)


@rule("pad")
def _pad(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.pad(xs[0], op.value, op.low, op.high, op.interior)


@rule("flip")
def _flip(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.reverse(xs[0], op.axes)


@rule("concat")
def _concat(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.concat(xs, op.axis)


@rule("iota")
def _iota(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    if op.dtype.is_float and op.dtype.bits < 32:
        return w.b.convert(w.b.iota(i64, op.shape, op.axis), op.dtype)
    return w.b.iota(op.dtype, op.shape, op.axis)


@rule("constant")
def _constant(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.dense(np.asarray(op.data.array), op.infer().dtype)


@rule("stop_gradient", "fence")
def _same(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return xs[0]


@rule("barrier")
def _barrier(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return w.b.many("stablehlo.optimization_barrier", xs, "", [(x.dtype, x.shape) for x in xs])


@rule("dynamic_slice")
def _dynamic_slice(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, *starts = xs
    return w.b.dynamic_slice(x, _alike(w, starts), op.sizes) if x.ndim else x


@rule("dynamic_update_slice")
def _dynamic_update_slice(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, update, *starts = xs
    return w.b.dynamic_update(x, update, _alike(w, starts)) if x.ndim else update


def _alike(w: Writer, starts: Sequence[Hlo]) -> list[Hlo]:
    """Starts of one type, as StableHLO wants them."""
    return [w.b.convert(s, i64) for s in starts]
