"""Horizontal fusion: adjacent kernels that read the same value row by row and do not depend on each other.

A decoder's projections, for instance: the rotated queries, and the new rows of the KV cache, all come from one matmul.
One kernel goes through the rows and writes all of them, so a token takes one step instead of three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.core import Dim
from strata.kernel import Axis, Reduce, Scan, postorder
from strata.lir.fused import MOST_OPS, FusionGroup, KernelOf, Recipes, is_allowed
from strata.lir.traits import traits
from strata.mir import Constant, Input, Param, Value

if TYPE_CHECKING:
    from strata.passes import FusionLimits

MOST_ROOTS = 8  # values that one kernel stores
ROW = 1 << 14  # elements of a row of all of them: rows are what is handed out to threads, so one must not be long


def join_siblings(
    order: list[FusionGroup], stored: set[Value], fixed: set[Value], recipes: Recipes, limits: FusionLimits | None
) -> list[FusionGroup]:
    """The same steps in the same order, neighbours joined. What depends on parameters only is stepped over."""
    readers: dict[Value, int] = {}
    for group in order:
        for x in group.read_values:
            readers[x] = readers.get(x, 0) + 1
    made: list[FusionGroup] = []
    last: int | None = None  # the place of the last step that runs each time
    for group in order:
        if all(r in fixed for r in group.roots):  # it comes first, as what is joined before it may read it
            at = len(made) if last is None else last
            made.insert(at, group)
            last = None if last is None else at + 1
            continue
        joined = _joined(made[last], group, stored, readers, recipes, limits) if last is not None else None
        if joined is not None and last is not None:
            made[last] = joined
        else:
            last = len(made)
            made.append(group)
    return made


def _joined(
    first: FusionGroup, second: FusionGroup, stored: set[Value], readers: dict[Value, int], recipes: Recipes,
    limits: FusionLimits | None,
) -> FusionGroup | None:  # fmt: skip
    """Both as one kernel, where that is sound and worth it."""
    if first.is_closed or second.is_closed:
        return None
    if first.kernel is None or second.kernel is None or len(first.roots) + len(second.roots) > MOST_ROOTS:
        return None
    if len(first.nodes) + len(second.nodes) > MOST_OPS:
        return None
    reads = set(second.read_values)
    shared = [x for x in first.reads if x in reads and not isinstance(x.node.op, (Input, Param, Constant))]
    if not shared or any(root in reads for root in first.roots):
        return None
    rows = [_rows_of(group) for group in (first, second)]
    if rows[0] is None or rows[0][0] != (rows[1] or ((), 0))[0] or rows[1] is None or rows[0][1] + rows[1][1] > ROW:
        return None
    starts = [*first.updates.values(), *second.updates.values()]
    if any(readers[x] > 1 for x in starts):
        return None  # others read what is changed, and would have to come before all of the kernel
    group = FusionGroup([*first.roots, *second.roots])
    builder = KernelOf(stored, group, recipes)
    for root in group.roots:
        if root in first.updates or root in second.updates:
            builder.add_update(root)
        else:
            builder.add([root])
    if builder.problems() or not is_allowed(group, limits):
        return None
    group.kernel = builder.kernel()
    return group


def _rows_of(group: FusionGroup) -> tuple[tuple[Dim, ...], int] | None:
    """The sizes of all axes but the last, if all stores have the same, and the elements of a row."""
    assert group.kernel is not None
    if any(traits(n).contracts for n in group.nodes):
        return None
    stores = group.kernel.stores
    if any(isinstance(e, (Reduce, Scan)) for e in postorder(group.kernel.roots)):
        return None
    leads = {tuple(a.extent for a in s.axes[:-1]) for s in stores}
    last = [s.axes[-1].extent if s.axes and isinstance(s.axes[-1], Axis) else None for s in stores]
    if len(leads) != 1 or not all(isinstance(n, int) for n in last):
        return None
    return leads.pop(), sum(n for n in last if isinstance(n, int))
