"""Ops without a lowering, written for shaders: sorts by rank, running extremes in two passes.

An element's rank is the number of elements that come before it: as many comparisons as there are pairs, all of them
independent, which is what a GPU has too many of. From `MOST` elements on a row is left to the host.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.backends.wgsl.bounds import extent_range
from strata.backends.wgsl.values import HELD
from strata.core import Dim, DType, TensorType, bool_, i64
from strata.kernel import Axis, Buffer, Const, Expr, Kernel, Load, Phases, Reduce, Scan, Store, apply, size
from strata.lir import Spacing
from strata.mir import Op

MOST = 8192


def own_phases(op: Op, types: tuple[TensorType, ...]) -> Phases | None:
    """The kernels of an op that has no lowering, over buffers in0 …, out0 …; None where it runs on the host."""
    make = _OWN.get(op.name)
    if make is None or any(t.dtype.name not in HELD or t.dtype.bits < 8 for t in types):
        return None
    return make(op, *types)


def is_plain(view: Spacing, kind: TensorType) -> bool:
    """Whether a step reads a buffer as it lies."""
    steps: list[Dim] = []
    step: Dim = 1
    for extent in reversed(kind.shape):
        steps.insert(0, step)
        step = step * extent
    pairs = zip(view.strides, steps, kind.shape, strict=True)
    return view.start == 0 and all(a == b or extent == 1 for a, b, extent in pairs)


def _buffer(name: str, dtype: DType, shape: tuple[Dim, ...]) -> Buffer:
    return Buffer(name, dtype, shape)


def _nan(x: Expr) -> Expr:
    return apply("isnan", x) if x.dtype.is_float else Const(False, bool_)


def _any(*conditions: Expr) -> Expr:
    found: Expr = Const(False, bool_)
    for one in conditions:
        found = apply("or", found, one)
    return found


def _comes_before(a: Expr, b: Expr, descending: bool) -> Expr:
    """Whether an element's place is before another's, whatever their numbers; NaN counts as the largest."""
    if descending:
        return _any(apply("gt", a, b), apply("and", _nan(a), apply("not", _nan(b))))
    return _any(apply("lt", a, b), apply("and", _nan(b), apply("not", _nan(a))))


def _ranks(x: Buffer, axis: int, descending: bool) -> tuple[tuple[Axis, ...], Expr]:
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(x.shape))
    other = Axis("j", x.shape[axis])
    mine, theirs = Load(x, axes), Load(x, (*axes[:axis], other, *axes[axis + 1 :]))
    first, last = _comes_before(theirs, mine, descending), _comes_before(mine, theirs, descending)
    tie = apply("and", apply("not", last), apply("lt", other, axes[axis]))
    return axes, Reduce("sum", (other,), _any(first, tie).cast(i64))


def _ordered(op: Op, x: TensorType) -> Phases | None:
    """sort and argsort: each element, or its number, goes where its rank says."""
    axis: int = op.axis  # type: ignore[attr-defined]
    if extent_range(x.shape[axis])[1] > MOST:
        return None
    source = _buffer("in0", x.dtype, x.shape)
    axes, rank = _ranks(source, axis, op.descending)  # type: ignore[attr-defined]
    value: Expr = axes[axis] if op.name == "argsort" else Load(source, axes)
    out = _buffer("out0", value.dtype, x.shape)
    store = Store(out, axes, (*axes[:axis], rank, *axes[axis + 1 :]), value)
    return Phases((Kernel(op.name, (source,), (out,), (store,)),))


def _best(op: Op, x: TensorType) -> Phases | None:
    """topk: all numbers by rank, then the first of them and what they are of."""
    axis: int = op.axis  # type: ignore[attr-defined]
    count: int = op.k  # type: ignore[attr-defined]
    if extent_range(x.shape[axis])[1] > MOST or not isinstance(x.shape[axis], int):
        return None
    source, order = _buffer("in0", x.dtype, x.shape), _buffer("part0", i64, x.shape)
    axes, rank = _ranks(source, axis, op.largest)  # type: ignore[attr-defined]
    first = Kernel("ranks", (source,), (order,), (
        Store(order, axes, (*axes[:axis], rank, *axes[axis + 1 :]), axes[axis]),
    ))  # fmt: skip
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    values, ids = _buffer("out0", x.dtype, shape), _buffer("out1", i64, shape)
    at = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(shape))
    number = Load(order, at)
    picked = Load(source, (*at[:axis], number, *at[axis + 1 :]))
    stores = (Store(values, at, at, picked), Store(ids, at, at, number))
    return Phases((first, Kernel("topk", (source, order), (values, ids), stores)), (order,))


def _running(op: Op, x: TensorType) -> Phases | None:
    """cummax and cummin: the best so far; then the last number at which it changed."""
    axis: int = op.axis  # type: ignore[attr-defined]
    if x.dtype.is_bool:
        return None
    kind, better = ("max", "gt") if op.name == "cummax" else ("min", "lt")
    source, values, ids = (_buffer(n, d, x.shape) for n, d in (("in0", x.dtype), ("out0", x.dtype), ("out1", i64)))
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(x.shape))
    along = Axis("j", x.shape[axis])
    here = (*axes[:axis], along, *axes[axis + 1 :])
    running = Scan(kind, along, Load(source, here), axes[axis])
    first = Kernel("best", (source,), (values,), (Store(values, axes, axes, running),))
    later = apply("gt", along, Const(0, i64))
    mine = Load(source, here)
    before = Load(values, (*axes[:axis], along - 1, *axes[axis + 1 :]), later)
    fresh = _any(apply(better, mine, before), apply("and", _nan(mine), apply("not", _nan(before))))
    changed = apply("select", apply("and", later, fresh), along, size(0))
    second = Kernel("where", (source, values), (ids,), (
        Store(ids, axes, axes, Scan("max", along, changed, axes[axis])),
    ))  # fmt: skip
    return Phases((first, second))


_OWN: dict[str, Callable[..., Phases | None]] = {
    "sort": _ordered, "argsort": _ordered, "topk": _best, "cummax": _running, "cummin": _running,
}  # fmt: skip
