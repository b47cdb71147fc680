"""Interleaving: short rows filled from several places become a store for each column, interleaved in registers.

    y[i, j] = x[j, i]  over i in 50176, j in 3        y[3 i] = x[i], y[3 i + 1] = x[50176 + i], y[3 i + 2] = …  over i

Such stores form a comb: side by side, they fill the result without gaps. A vector loop over i computes as many points
of each as a register holds, and shuffles put them between each other. Channels of images, pairs of numbers and repeated
elements are moved in this way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata.core import i64
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Const, Kernel, Load, Reduce, Scan, Store, postorder
from strata.kernel.passes.normalize import divisions, split_store_axis
from strata.kernel.rewrite import substitute_axes

MOST_TEETH = 8
SPREADS = (2, 3, 4, 5, 6, 7, 8)  # elements from one lane to the next that whole registers are loaded for
_EVEN = (0, 1, 2, 3, 4)  # the same, of several loads whose results are interleaved
_LONG = 16  # points of the loop around a short row


def unroll_short_rows(kernel: Kernel) -> Kernel:
    """A normalized kernel whose innermost loop, or that over a remainder of its index, is unrolled if it is short."""
    made = _unrolled(kernel)
    if made is not kernel:
        return made
    last = {s.axes[-1] for s in kernel.stores if s.axes}
    for axis, by in divisions(kernel.roots):
        if axis in last and isinstance(by, int) and 2 <= by <= MOST_TEETH:
            opened = split_store_axis(kernel, axis, by)
            made = _unrolled(opened)
            if made is not opened:
                return made
    return kernel


def _unrolled(kernel: Kernel) -> Kernel:
    axes = kernel.stores[0].axes if kernel.stores else ()
    if len(axes) < 2 or any(s.axes != axes for s in kernel.stores):
        return kernel
    *_, outer, inner = axes
    short = isinstance(inner.extent, int) and 2 <= inner.extent <= MOST_TEETH
    if not short or (isinstance(outer.extent, int) and outer.extent < _LONG):
        return kernel
    assert isinstance(inner.extent, int)
    nodes = postorder(kernel.roots)
    if any(isinstance(n, (Reduce, Scan)) for n in nodes):
        return kernel
    if not all(_fills(s, outer, inner) for s in kernel.stores):
        return kernel
    if not all(_is_even(n, outer, inner) for n in nodes if isinstance(n, Load)):
        return kernel
    return replace(kernel, stores=tuple(_tooth(s, j) for s in kernel.stores for j in range(inner.extent)))


def _fills(store: Store, outer: Axis, inner: Axis) -> bool:
    terms = linear(store.index[0]).terms
    return terms.get(inner) == 1 and terms.get(outer) == inner.extent and not store.buffer.dtype.is_complex


def _is_even(load: Load, outer: Axis, inner: Axis) -> bool:
    """Whether a load is contiguous along the outer axis, or nearly, or does not depend on it."""
    terms = linear(load.index[0]).terms
    plain = all(isinstance(atom, Axis) for atom in terms if outer in atom.free or inner in atom.free)
    return plain and terms.get(outer, 0) in _EVEN and load.where is None


def _tooth(store: Store, j: int) -> Store:
    inner = store.axes[-1]
    done = substitute_axes((*store.index, store.value), {inner: Const(j, i64)})
    return store.rebuilt(done, store.axes[:-1])


def combs(stores: Sequence[Store], axis: Axis) -> list[tuple[Store, ...]]:
    """Groups of stores that fill a buffer without gaps along an axis: as many of them as their step is long."""
    found: dict[tuple[object, int, object], dict[int, Store]] = {}
    for store in stores:
        form = linear(store.index[0])
        by = form.terms.get(axis)
        alone = not any(axis in atom.free for atom in form.terms if atom is not axis)
        if isinstance(by, int) and 2 <= by <= MOST_TEETH and alone and isinstance(form.constant, int):
            rest = frozenset((atom, n) for atom, n in form.terms.items() if atom is not axis)
            found.setdefault((store.buffer, by, rest), {})[form.constant] = store
    groups = []
    for (_, step, _), teeth in found.items():
        first = min(teeth)
        if len(teeth) == step and all(first + j in teeth for j in range(step)):
            groups.append(tuple(teeth[first + j] for j in range(step)))
    return [g for g in groups if not g[0].buffer.dtype.is_complex]
