"""Sorts and running extremes as kernels, for devices: no element waits for another.

An element's rank is the number of elements that come before it: as many comparisons as there are pairs, all of them
independent, which is what a GPU has too many of. Longer rows are runs that are sorted so, and then merged in pairs: an
element goes as far after its place as the other run has elements that come before it, which a binary search tells.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.core import Dim, DType, TensorType, bool_, i32, i64, u8
from strata.kernel import Axis, Buffer, Const, Expr, Kernel, Load, Phases, Reduce, Scan, Store, apply, size
from strata.lir import Spacing
from strata.mir import Op

RUN = 256  # elements that are sorted by rank
DIRECT = 1024  # of a row that is one run


def is_own(op: Op) -> bool:
    """Whether an op has kernels here."""
    return op.name in _OWN


def own_phases(op: Op, types: tuple[TensorType, ...]) -> Phases | None:
    """The kernels of an op that has no lowering, over buffers in0 …, out0 …; None where it has none, or where a row is
    of a size that is not known."""
    make = _OWN.get(op.name)
    return None if make is None else make(op, *types)


def is_plain(view: Spacing, kind: TensorType) -> bool:
    """Whether a step reads a buffer as it lies."""
    steps: list[Dim] = []
    step: Dim = 1
    for extent in reversed(kind.shape):
        steps.insert(0, step)
        step = step * extent
    pairs = zip(view.strides, steps, kind.shape, strict=True)
    return view.start == 0 and all(a == b or extent == 1 for a, b, extent in pairs)


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


class _RowOrder:
    """The rows of a tensor along an axis, and the kernels that put them in order."""

    def __init__(self, x: TensorType, axis: int, descending: bool) -> None:
        self.x, self.axis, self.descending = x, axis, descending
        self.axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(x.shape))
        self.here = self.axes[axis]
        self.count = x.shape[axis]

    def at(self, place: Expr) -> tuple[Expr, ...]:
        return (*self.axes[: self.axis], place, *self.axes[self.axis + 1 :])

    def stores(self, outs: dict[Buffer, Expr], place: Expr) -> tuple[Store, ...]:
        return tuple(Store(out, self.axes, self.at(place), value) for out, value in outs.items())

    def ranks(self, source: Buffer, width: Dim) -> Expr:
        """Where an element goes in its run of `width` elements."""
        other = Axis("j", width)
        start: Expr = size(0) if width == self.count else self.here // size(width) * size(width)
        theirs = start + other
        inside = None if width == self.count else apply("lt", theirs, size(self.count))
        mine, value = Load(source, self.axes), Load(source, self.at(theirs), inside)
        first, last = _comes_before(value, mine, self.descending), _comes_before(mine, value, self.descending)
        tie = apply("and", apply("not", last), apply("lt", theirs, self.here))
        found = _any(first, tie)
        found = found if inside is None else apply("and", inside, found)
        return start + Reduce("sum", (other,), found.cast(i32)).cast(i64)

    def merged(self, keys: Buffer, width: int) -> Expr:
        """Where an element of a sorted run of `width` goes when its run and the one beside it become one."""
        here, count = self.here, size(self.count)
        base = here // size(2 * width) * size(2 * width)
        is_right = apply("ge", here - base, size(width))
        start = apply("select", is_right, base, base + size(width))
        others = apply("max", apply("min", count - start, size(width)), size(0))
        mine = Load(keys, self.axes)
        found: Expr = size(0)
        step = width
        while step:
            probe = found + size(step)
            inside = apply("le", probe, others)
            value = Load(keys, self.at(start + probe - size(1)), inside)
            before = apply(
                "select", is_right,
                apply("not", _comes_before(mine, value, self.descending)),
                _comes_before(value, mine, self.descending),
            )  # fmt: skip
            found = apply("select", apply("and", inside, before), probe, found)
            step //= 2
        own = apply("select", is_right, here - size(width), here)
        return own + found


def _ordered(op: Op, x: TensorType) -> Phases | None:
    """sort and argsort: elements, or their numbers, in order."""
    ids = op.name == "argsort"
    out = Buffer("out0", i64 if ids else x.dtype, x.shape)
    return _sorted(x, op.axis, op.descending, None if ids else out, out if ids else None)  # type: ignore[attr-defined]


def _sorted(x: TensorType, axis: int, descending: bool, values: Buffer | None, ids: Buffer | None) -> Phases | None:
    """Kernels that write the elements in order to one buffer, and what they were the numbers of to another."""
    row = _RowOrder(x, axis, descending)
    source = Buffer("in0", x.dtype, x.shape)
    count = row.count
    if not isinstance(count, int):
        return None

    def kernel(name: str, read: tuple[Buffer, ...], outs: dict[Buffer | None, Expr], place: Expr) -> Kernel:
        wanted = {out: value for out, value in outs.items() if out is not None}
        return Kernel(name, read, tuple(wanted), row.stores(wanted, place))

    mine = Load(source, row.axes)
    if count <= DIRECT:
        return Phases((kernel("ranks", (source,), {values: mine, ids: row.here}, row.ranks(source, count)),))
    widths = [RUN]
    while 2 * widths[-1] < count:
        widths.append(2 * widths[-1])
    keys = [Buffer(f"keys{n}", x.dtype, x.shape) for n in range(2)]
    places = [Buffer(f"places{n}", i64, x.shape) if ids is not None else None for n in range(2)]
    made = [kernel("ranks", (source,), {keys[0]: mine, places[0]: row.here}, row.ranks(source, RUN))]
    for n, width in enumerate(widths):
        last = n == len(widths) - 1
        before, numbers = keys[n % 2], places[n % 2]
        outs: dict[Buffer | None, Expr] = {values if last else keys[1 - n % 2]: Load(before, row.axes)}
        if numbers is not None:
            outs[ids if last else places[1 - n % 2]] = Load(numbers, row.axes)
        read = (before,) if numbers is None else (before, numbers)
        made.append(kernel(f"merge{width}", read, outs, row.merged(before, width)))
    return Phases(tuple(made), (*keys, *(p for p in places if p is not None)))


def _best(op: Op, x: TensorType) -> Phases | None:
    """topk: all in order, then the first of them."""
    axis: int = op.axis  # type: ignore[attr-defined]
    whole, numbers = Buffer("whole0", x.dtype, x.shape), Buffer("whole1", i64, x.shape)
    made = _sorted(x, axis, op.largest, whole, numbers)  # type: ignore[attr-defined]
    if made is None:
        return None
    shape = (*x.shape[:axis], op.k, *x.shape[axis + 1 :])  # type: ignore[attr-defined]
    values, ids = Buffer("out0", x.dtype, shape), Buffer("out1", i64, shape)
    at = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(shape))
    stores = (Store(values, at, at, Load(whole, at)), Store(ids, at, at, Load(numbers, at)))
    picked = Kernel("topk", (whole, numbers), (values, ids), stores)
    return Phases((*made.kernels, picked), (*made.scratch, whole, numbers))


def _running(op: Op, x: TensorType) -> Phases | None:
    """cummax and cummin: the best so far; then the last number at which it changed."""
    axis: int = op.axis  # type: ignore[attr-defined]
    kind, better = ("max", "gt") if op.name == "cummax" else ("min", "lt")
    held: DType = u8 if x.dtype.is_bool else x.dtype
    source, values, ids = (Buffer(n, d, x.shape) for n, d in (("in0", x.dtype), ("out0", x.dtype), ("out1", i64)))
    axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(x.shape))
    along = Axis("j", x.shape[axis])
    here = (*axes[:axis], along, *axes[axis + 1 :])
    running = Scan(kind, along, Load(source, here).cast(held), axes[axis]).cast(x.dtype)
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
