"""Reductions over the few terms of a pooling window, unrolled.

    y[i] = max of x[2 i + k] over k in 3        y[i] = max(max(x[2 i], x[2 i + 1]), x[2 i + 2])

Written out, a window has no loop inside the vectors along its outputs, and its conditions at borders are conditions on
the axes of the store, at which that can be cut."""

from __future__ import annotations

from functools import reduce
from itertools import product
from math import prod

from strata.core import i64
from strata.kernel.ir import Axis, Const, Expr, Kernel, Load, Reduce, Scan, apply, postorder
from strata.kernel.order import REGISTERS, Machine, groups_of, order_of, written_out
from strata.kernel.passes.normalize import sums_of_sums
from strata.kernel.rewrite import rebuild_with, substitute_axes, with_roots

JOINS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "all": "and", "any": "or"}
MOST_TERMS = 32
_MOST_NODES = 1024


def unroll_windows(kernel: Kernel, machine: Machine) -> Kernel:
    """The kernel without reductions, where all of them are over a few terms; else the kernel."""
    nodes = postorder(kernel.roots)
    reduces = [n for n in nodes if isinstance(n, Reduce)]
    if not reduces or any(isinstance(n, Scan) for n in nodes) or not all(map(_is_short, reduces)):
        return kernel
    done: dict[Expr, Expr] = {}
    for node in nodes:
        done[node] = rebuild_with(node, done)
        if isinstance(node, Reduce):
            done[node] = _written_out(done[node], order_of(node), machine)
            if len(postorder((done[node],))) > _MOST_NODES:
                return kernel
    return with_roots(kernel, done)


def _is_short(node: Reduce) -> bool:
    """Whether a reduction is over a few terms, in a type that running values are kept in, and around no other one."""
    extents = [a.extent for a in node.axes]
    if node.kind not in JOINS or not all(isinstance(e, int) and e > 0 for e in extents):
        return False
    order = order_of(node)
    if order and len(node.axes) > 1 and (order in REGISTERS or node.sums_products):
        return False
    if order and any(axis in node.axes for axis, _ in sums_of_sums(node)):
        return False  # it is a sum of sums
    inside = postorder((node.body,))
    narrow = node.dtype.is_float and node.dtype.itemsize < 4
    counted = node.kind == "sum" and node.dtype.is_bool
    reads = any(isinstance(n, Load) for n in inside)
    count = prod(e for e in extents if isinstance(e, int))
    return (
        count <= MOST_TERMS and reads and not narrow and not counted and not any(isinstance(n, Reduce) for n in inside)
    )


def _written_out(node: Expr, order: str, machine: Machine) -> Expr:
    assert isinstance(node, Reduce)
    terms: list[Expr] = []
    for place in product(*(range(a.extent.__index__()) for a in node.axes)):
        here: dict[Axis, Expr] = {a: Const(at, i64) for a, at in zip(node.axes, place, strict=True)}
        terms.append(substitute_axes((node.body,), here)[node.body])
    if not order:
        return reduce(lambda total, term: apply(JOINS[node.kind], total, term), terms)
    for group in reversed(groups_of(node)[1:]):  # a sum of sums, as loops would have it
        count = prod(axis.extent.__index__() for axis in group)
        runs = [terms[at : at + count] for at in range(0, len(terms), count)]
        terms = [reduce(lambda total, term: apply(JOINS[node.kind], total, term), run) for run in runs]
    return written_out(node, order, terms, machine)
