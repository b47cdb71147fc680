"""Stores split where predicates on their axes change, so that every part is a plain loop.

    y[i] = select(i < 128, a[i], b[i - 128])  over i in 256        y[i] = a[i], y[128 + i] = b[i]  over i in 128

Concatenations, paddings and rolls are written with conditions. As they stand, every element would read all sides under
masks, and a masked read outside of its buffer is slow on processors that look at the page before the mask. Parts whose
shared loops are too few to be handed out to threads become separate kernels, which run one after the other; so do
parts that are transposes, each of which runs in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from math import prod

from strata.core import Dim, i64, known_le
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Expr, Kernel, Load, Reduce, Scalar, Scan, Store, postorder, size
from strata.kernel.nest import known_bytes
from strata.kernel.order import USUAL, Machine
from strata.kernel.passes.normalize import address, divisions, split_store_axis
from strata.kernel.passes.windows import unroll_windows
from strata.kernel.rewrite import substitute_axes

_COMPARISONS = {"lt": 0, "ge": 0, "le": 1, "gt": 1}  # what is added to the place of equality where the answer changes
_MOST_PARTS = 64
_GROWTH = 4  # times the nodes of the kernel that its parts may have together
_FEW_NODES = 1024  # that any kernel's parts may have
_ENOUGH = 32  # points of shared loops that are handed out to threads
_SMALL = 1 << 13  # elements that one thread writes
_SHORT = 64  # elements of a part of a row
_TURNED = 1 << 10  # elements of a transpose that is worth its own kernel
_SQUARE = 8  # rows of one
_FAR = 8 << 20  # bytes of a result that may be written by non-temporal stores


class _TooManyPartsError(Exception):
    """Conditions along one axis alone make more parts than a kernel is cut in."""


Region = tuple[Store, ...]  # stores over the same axes


def cut_stores(kernel: Kernel, machine: Machine = USUAL) -> tuple[Kernel, ...]:
    """Kernels to be run one after the other that write what the kernel writes; itself where nothing is to be cut."""
    kernel = unroll_windows(kernel, machine)
    nodes = postorder(kernel.roots)
    axes = kernel.stores[0].axes if kernel.stores else ()
    uniform = all(s.axes == axes for s in kernel.stores)
    if not axes or not uniform or any(isinstance(n, (Reduce, Scan)) for n in nodes):
        return (kernel,)
    try:
        regions = list(islice(_regions(kernel, kernel.stores, 0), _MOST_PARTS + 1))  # each costs a walk of the kernel
    except _TooManyPartsError:
        return (kernel,)
    grown = sum(len(postorder(e for s in region for e in (*s.index, s.value))) for region in regions)
    if len(regions) == 1 or len(regions) > _MOST_PARTS or grown > max(_FEW_NODES, _GROWTH * len(nodes)):
        return (kernel,)
    groups = list(_apart(regions, 0))
    names = [f"{kernel.name}_{n}" for n in range(len(groups) - 1)] + [kernel.name]
    return tuple(
        replace(kernel, name=name, stores=tuple(s for region in group for s in region))
        for name, group in zip(names, groups, strict=True)
    )


def _regions(kernel: Kernel, stores: Region, at: int) -> Iterator[Region]:
    """Stores in parts along the axes from one on; a part is looked at anew for what is left of its conditions."""
    axes = stores[0].axes
    for number in range(at, len(axes)):
        axis = axes[number]
        points = _points(stores, axis)
        if len(points) >= _MOST_PARTS:
            raise _TooManyPartsError
        if points and not (number == len(axes) - 1 and _breaks_lines(stores, points)):
            for part, (start, end) in enumerate(pairwise([0, *points, axis.extent])):
                mark = f"{chr(97 + part % 26)}{part // 26 or ''}"
                yield from _regions(kernel, tuple(_part(s, axis, start, end, mark) for s in stores), number + 1)
            return
    opened = _opened(kernel, stores)
    if opened is stores:
        yield stores
    else:
        yield from _regions(kernel, opened, 0)


def _opened(kernel: Kernel, stores: Region) -> Region:
    """Stores with two axes for one whose quotient or remainder is in a condition."""
    conditions = [
        n
        for n in postorder(e for s in stores for e in (*s.index, s.value))
        if isinstance(n, Scalar) and n.name in _COMPARISONS
    ]
    for axis, by in divisions(conditions):
        if axis in stores[0].axes and by != axis.extent:
            return split_store_axis(replace(kernel, stores=stores), axis, by).stores
    return stores


def _breaks_lines(stores: Region, points: Sequence[Dim]) -> bool:
    """Whether short parts of rows would be written apart from the rest of cache lines of non-temporal stores.

    Only where every part reads elements in their order, of at least four bytes: others, under masks, cost more than
    lines in two pieces."""
    axis = stores[0].axes[-1]
    row = axis.extent
    masked = [n for n in postorder(s.value for s in stores) if isinstance(n, Load) and n.where is not None]
    in_order = (n.index and linear(n.index[-1]).terms.get(axis) == 1 for n in masked)
    if not all(in_order) or any(n.dtype.itemsize < 4 for n in masked):
        return False
    ends = [0, *points, row]
    short = not known_le(row, _SHORT) and any(known_le(b - a, _SHORT - 1) for a, b in pairwise(ends))
    return short and any(known_bytes(s.buffer) >= _FAR for s in stores)


def _part(store: Store, axis: Axis, start: Dim, end: Dim, mark: str) -> Store:
    """The points of a store between two places of an axis; that axis and those inside it are the part's own."""
    number = store.axes.index(axis)
    own = (Axis(axis.name + mark, end - start), *(Axis(a.name + mark, a.extent) for a in store.axes[number + 1 :]))
    change: dict[Axis, Expr] = dict(zip(store.axes[number:], own, strict=True))
    change[axis] = own[0] + size(start)
    done = substitute_axes((*store.index, store.value), change)
    return store.rebuilt(done, (*store.axes[:number], *own))


def _points(stores: Region, axis: Axis) -> list[Dim]:
    """Where conditions on an axis alone change, in order; none where their order is not known."""
    found: list[Dim] = []
    for node in postorder(e for s in stores for e in (*s.index, s.value)):
        place = _turning_point(node, axis)
        if place is None or place in found or known_le(place, 0) or known_le(axis.extent, place):
            continue
        if not (known_le(0, place) and known_le(place, axis.extent)):
            return []
        before = [p for p in found if known_le(p, place)]
        if not all(known_le(place, p) for p in found if p not in before):
            return []
        found.insert(len(before), place)
    return found


def _turning_point(node: Expr, axis: Axis) -> Dim | None:
    """The first index at which a comparison, minimum or maximum has another answer than before it."""
    if not isinstance(node, Scalar) or node.name not in (*_COMPARISONS, "min", "max") or axis not in node.free:
        return None
    if node.args[0].dtype is not i64:
        return None
    form = linear(node.args[0] - node.args[1])
    step = form.terms.get(axis)
    if len(form.terms) != 1 or not isinstance(step, int):
        return None
    start, after = form.constant, _COMPARISONS.get(node.name, 0)
    if step < 0:  # the opposite comparison of the opposite
        start, step, after = -start, -step, 1 - after
    if step == 1:
        return after - start
    return -((start - after) // step) if isinstance(start, int) else None


def _apart(regions: Sequence[Region], depth: int) -> Iterator[Sequence[Region]]:
    """Regions that share a kernel: those of few elements, and those whose outer loops are the same and long. One that
    is a transpose has its own."""
    if depth == 0 and any(_is_turned(region) for region in regions):
        turned = [region for region in regions if _is_turned(region)]
        yield from ([region] for region in turned)
        regions = [region for region in regions if region not in turned]
        if not regions:
            return
    axes = [region[0].axes for region in regions]
    while all(len(a) > depth and a[depth] is axes[0][depth] for a in axes):
        depth += 1
    shared = _points_of(axes[0][:depth])
    total = sum(_points_of(a) for a in axes)
    if len(regions) == 1 or shared >= _ENOUGH or total <= _SMALL:
        yield regions
        return
    by_axis: dict[Axis, list[Region]] = {}
    for region in regions:
        by_axis.setdefault(region[0].axes[depth], []).append(region)
    for group in by_axis.values():
        yield from _apart(group, depth + 1)


def _is_turned(region: Region) -> bool:
    """Whether elements are written one after the other that are read from rows, along another axis than the last."""
    if _points_of(region[0].axes) < _TURNED:
        return False
    for store in region:
        *others, last = store.axes
        if linear(address(store.index, store.buffer)).terms.get(last) != 1:
            return False
        loads = [n for n in postorder((store.value,)) if isinstance(n, Load)]
        terms = [linear(address(n.index, n.buffer)).terms for n in loads]
        long = [a for a in others if not isinstance(a.extent, int) or a.extent >= _SQUARE]
        if not any(of.get(last, 0) not in (0, 1) and of.get(a) == 1 for of in terms for a in long):
            return False
    return True


def _points_of(axes: Sequence[Axis]) -> int:
    """How many points axes have; a size that is not known counts as large."""
    return prod(a.extent if isinstance(a.extent, int) else _SMALL + 1 for a in axes)
