"""Short reductions unrolled, so that vectors run along the rows and not within one.

    y[i] = max j in 4 : x[4 i + j]        y[i] = max(max(x[4 i], x[4 i + 1]), max(x[4 i + 2], x[4 i + 3]))

Rounded terms are joined in the order that a row of them has.

Only rows that lie behind each other are: where lanes run along a kept axis already, nothing is gained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from strata.core import f32, f64, i32, i64
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Const, Expr, Kernel, Load, Reduce, Scan, apply, postorder
from strata.kernel.order import USUAL, Machine, written_out
from strata.kernel.rewrite import substitute_axes, with_nodes

_MOST = 8  # elements of a row
_LEAST = 64  # rows
_WIDENED = 4  # times as wide as loaded are elements that are reduced, at most: wide lanes are few
_JOINS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "all": "and", "any": "or"}


def unroll_short_reductions(kernel: Kernel, machine: Machine = USUAL) -> Kernel:
    """A normalized kernel without reductions over a few neighbouring elements of many rows."""
    last = {s.axes[-1] for s in kernel.stores if s.axes}
    nodes = postorder(kernel.roots)
    inner = {n for n in nodes if isinstance(n, Reduce) and _is_plain(n) and any(_lies_in_rows(n, a) for a in last)}
    if not inner or any(isinstance(n, Scan) for n in nodes):
        return kernel
    return with_nodes(kernel, {n: _written_out(n, machine) for n in inner})


def _is_plain(node: Reduce) -> bool:
    """Whether all axes are short, elements are not rounded on the way, and nothing else is reduced inside."""
    extents = [a.extent for a in node.axes]
    if not all(isinstance(e, int) for e in extents) or not 2 <= prod(e for e in extents if isinstance(e, int)) <= _MOST:
        return False
    dtype = node.body.dtype
    kinds = dtype in (f32, f64) or dtype.is_int or (dtype.is_bool and node.kind in ("all", "any"))
    return kinds and dtype.bits >= 8 and not any(isinstance(n, (Reduce, Scan)) for n in postorder((node.body,)))


def _lies_in_rows(node: Reduce, kept: Axis) -> bool:
    """Whether all that is loaded lies side by side along the reduction, row behind row along the kept axis."""
    if kept not in node.free or (isinstance(kept.extent, int) and kept.extent < _LEAST):
        return False
    count = prod(a.extent for a in node.axes if isinstance(a.extent, int))
    loads = [n for n in postorder((node.body,)) if isinstance(n, Load) and kept in n.free]

    def fits(load: Load) -> bool:
        terms = linear(load.index[0]).terms
        near = terms.get(kept) == count and terms.get(node.axes[-1]) == 1 and load.where is None
        return near and load.dtype.itemsize * _WIDENED >= node.body.dtype.itemsize

    return bool(loads) and all(map(fits, loads)) and all(len(n.index) == 1 for n in loads)


def _written_out(node: Reduce, machine: Machine) -> Expr:
    ranges = [range(a.extent) for a in node.axes if isinstance(a.extent, int)]
    elements = []
    for places in product(*ranges):
        here: dict[Axis, Expr] = {a: Const(j, i64) for a, j in zip(node.axes, places, strict=True)}
        elements.append(substitute_axes((node.body,), here)[node.body])
    if node.is_rounded:
        return written_out(node, node.order, elements, machine)
    return _joined(_JOINS[node.kind], elements) if node.kind in _JOINS else _first_best(node.kind, elements)


def _joined(name: str, elements: Sequence[Expr]) -> Expr:
    """Neighbours first, then pairs of them."""
    while len(elements) > 1:
        pairs = [apply(name, a, b) for a, b in zip(elements[::2], elements[1::2], strict=False)]
        elements = [*pairs, *(elements[-1:] if len(elements) % 2 else ())]
    return elements[0]


def _first_best(kind: str, elements: Sequence[Expr]) -> Expr:
    best, at = elements[0], apply("cast", Const(0, i32), dtype=i32)
    for j, x in enumerate(elements[1:], 1):
        if x.dtype.is_float:  # NaN is better than any number, the first one the best
            worse = apply("le" if kind == "argmax" else "ge", x, best)
            better = apply("and", apply("not", worse), apply("eq", best, best))
        else:
            better = apply("gt" if kind == "argmax" else "lt", x, best)
        best, at = apply("select", better, x, best), apply("select", better, Const(j, i32), at)
    return apply("cast", at, dtype=i64)
