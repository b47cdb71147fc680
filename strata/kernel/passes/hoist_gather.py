"""Gathers along rows: column addresses are computed once for several rows.

    y[i, j] = x[i, t[j]]  over i in 1792, j in 28
    y[16 o + i, j] = x[16 o + i, t[j]]  over o in 112, j in 28, i in 16

Vectors run along columns in either order. In the second, what the table says, and all that is computed from it, stays
in registers while rows go by: resizing an image by any factor, for one. Where elements are only moved, from memory that
no cache holds, rows one after the other are better: they can be prefetched."""

from __future__ import annotations

from dataclasses import replace

from strata.core import divide_exactly
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Expr, Kernel, Load, Reduce, Scan, postorder
from strata.kernel.nest import known_bytes
from strata.kernel.passes.normalize import split_store_axis

_ROWS = (16, 24, 12, 20, 28, 14, 18, 10, 8)  # that go by, the best first: fewer than what is handed out to threads
_FEWEST_COLUMNS = 8
_FAR = 4 << 20  # bytes that no core's own cache holds
_NEAR = 128 << 10  # bytes of rows that go by: a part of any core's own cache


def columns_first(kernel: Kernel) -> Kernel:
    """A normalized kernel whose innermost axis goes around some rows if tables alone say where its columns are."""
    axes = kernel.stores[0].axes if kernel.stores else ()
    if len(axes) < 2 or any(s.axes != axes for s in kernel.stores):
        return kernel
    *_, rows, columns = axes
    nodes = postorder(kernel.roots)
    if any(isinstance(n, (Reduce, Scan)) for n in nodes) or not isinstance(columns.extent, int):
        return kernel
    by = next((n for n in _ROWS if divide_exactly(rows.extent, n) is not None), 0)
    if not by or columns.extent < _FEWEST_COLUMNS:
        return kernel
    gathers = {n: places for n in nodes if isinstance(n, Load) and (places := _looked_up(n, columns))}
    if not gathers or any(a in p.free for places in gathers.values() for p in places for a in axes[:-1]):
        return kernel
    if not all(_is_near(n, rows, by) for n in gathers):
        return kernel
    if any(n in gathers and _is_far(n, rows) for n in (s.value for s in kernel.stores) if isinstance(n, Load)):
        return kernel
    made = split_store_axis(kernel, rows, by)
    *lead, outer, inner, last = made.stores[0].axes
    return replace(made, stores=tuple(replace(s, axes=(*lead, outer, last, inner)) for s in made.stores))


def _is_near(load: Load, rows: Axis, by: int) -> bool:
    """Whether a cache holds what is read of the rows that go by."""
    step = linear(load.index[0]).terms.get(rows, 0)
    return isinstance(step, int) and abs(step) * by * load.dtype.itemsize <= _NEAR


def _is_far(load: Load, rows: Axis) -> bool:
    """Whether rows one after the other are read of what no cache holds."""
    return known_bytes(load.buffer) >= _FAR and rows in linear(load.index[0]).terms


def _looked_up(load: Load, columns: Axis) -> list[Expr]:
    """Parts of the place of a load that come from memory and change from column to column."""
    atoms = [a for a in linear(load.index[0]).terms if columns in a.free and not isinstance(a, Axis)]
    return [a for a in atoms if any(isinstance(n, Load) for n in postorder((a,)))]
