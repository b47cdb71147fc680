"""Sums whose order changes when a symbolic size turns out to be 1, or small: broadcasts and slices then do nothing.

Axes that are merged with others between them lie side by side then, too.

    x[n, 5] * y[1, 5], summed over both     rows of the second axis, for each of the first, which y does not have
    the same where n is 1                   one row: what is multiplied has one shape
    x[5, :3] of x[5, n], summed over both   rows of three, for each of the first axis
    the same where n is at most 3           one row: all of x
    x[5 * n] * y[5 * n] of x[5, n]          a sum of n products, for each of the first axis
    the same where n is 1                   one sum of five products

A program whose sizes were known has the second form, whatever it was made from. So a kernel with symbols has loops for
such a case beside it, where its own order is another one. A sum of one product of bf16 is such a case, too: loops keep
the smallest numbers, which instructions that multiply pairs take for zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.gemm.match import MatrixKernel, along_kernel, find_matmul, read_along, single_terms
from strata.core import Dim, SizeCall, Symbol, SymExpr, Target, bf16, dim_max, dim_min, dim_prod, substitute, sym
from strata.kernel import Axis, Const, Expr, Kernel, Load, Reduce, all_axes, ordered, postorder, with_nodes, with_sizes

MOST_CASES = 9  # of all sizes together: others keep the order that they have


def single_sizes(kernel: Kernel, kept: frozenset[str], target: Target) -> list[tuple[Dim, Kernel]]:
    """Where a case holds (1, else 0), and the kernel for it, for all cases in which it sums in another order."""
    if kernel.schedule or not kernel.symbols() or not (_may_differ(kernel) or _has_pairs(kernel, target)):
        return []
    cases = [_cases(kernel, s) for s in kernel.symbols().values()]
    if prod(map(len, cases)) > MOST_CASES:
        return []
    found = []
    for chosen in product(*cases):
        sizes = {c.name: c.size for c in chosen}
        if all(c.is_general for c in chosen):
            continue
        other = _spread(with_sizes(kernel, lambda d, sizes=sizes: substitute(d, sizes)))  # type: ignore[misc]
        if _orders(kernel, kept, target, sizes) != _orders(other, kept, target, {}):
            found.append((dim_prod([c.where for c in chosen]), _in_its_order(other, kept)))
    return found


@dataclass(frozen=True, slots=True)
class _Case:
    """Values of a symbol: 1 where it has one of them, else 0; and what stands for it then."""

    name: str
    where: Dim
    size: Dim
    is_general: bool = False


def _cases(kernel: Kernel, symbol: Symbol) -> list[_Case]:
    """1; what slices leave whole; the rest."""
    size = sym(symbol.name, symbol.lo, symbol.hi)
    most = 1 << 62 if symbol.hi is None else symbol.hi
    made, low, below = [], symbol.lo, 0
    for end in sorted({1, *_slices(kernel, symbol)}):
        if max(low, 1) > end or end >= most:
            continue
        first = max(low, 1, below + 1)
        where = _at_most(size, end) - _at_most(size, first - 1)
        made.append(_Case(symbol.name, where, 1 if end == 1 else sym(symbol.name, first, end)))
        below = end
    rest = 1 - sum((c.where for c in made), 0)
    return [*made, _Case(symbol.name, rest, size, is_general=True)]


def _slices(kernel: Kernel, symbol: Symbol) -> set[int]:
    """Numbers that the extents of axes are the least of, beside the symbol."""
    extents = [a.extent for a in all_axes(kernel.roots) if isinstance(a.extent, SymExpr)]
    calls = [atom for e in extents for term, _ in e.terms for atom in term if isinstance(atom, SizeCall)]
    pairs = [(c.a, c.b) for c in calls if c.kind == "min"] + [(c.b, c.a) for c in calls if c.kind == "min"]
    return {a for a, b in pairs if isinstance(a, int) and str(b) == symbol.name}


def _may_differ(kernel: Kernel) -> bool:
    """Whether what is summed is broadcast, sliced or reshaped, which is cheaper to see than what becomes of it."""
    for node in postorder(kernel.roots):
        if not isinstance(node, Reduce) or not node.is_rounded:
            continue
        if any(not isinstance(a.extent, int) and str(a.extent) not in kernel.symbols() for a in node.axes):
            return True
        for load in postorder((node.body,)):
            if isinstance(load, Load) and load.free & frozenset(node.axes):
                places = zip(load.index, load.buffer.shape, strict=True)
                if not load.free.issuperset(node.axes) or any(isinstance(i, Const) and d == 1 for i, d in places):
                    return True
                if any(i.free & frozenset(node.axes) and not isinstance(i, Axis) for i in load.index):
                    return True
    return False


def _has_pairs(kernel: Kernel, target: Target) -> bool:
    """Whether it multiplies bf16 in pairs, of which there is one where a symbolic size is 1."""
    matrix = find_matmul(kernel)
    return matrix is not None and not isinstance(matrix.inner.extent, int) and _multiplies_pairs(matrix, target)


def _multiplies_pairs(matrix: MatrixKernel, target: Target) -> bool:
    is_bf16 = matrix.a.dtype is bf16 and matrix.b.dtype is bf16
    return is_bf16 and GemmArithmetic(bf16, bf16, matrix.sums.dtype, target).is_half_dot


def _orders(
    kernel: Kernel, kept: frozenset[str], target: Target, sizes: Mapping[str, Dim]
) -> list[tuple[str, Dim, bool]]:
    """The orders of its sums, how many terms each has, and whether these are products, which are not rounded by
    themselves as sums of one product are: for some sizes, if they are given."""
    matrix = find_matmul(kernel)
    if matrix is not None and matrix.columns is not None and matrix.sums.sums_products:
        along, count = (substitute(d, sizes) for d in (read_along(matrix, kept), matrix.inner.extent))
        order = "dot" if along == 1 else "products"
        return [(order, count, True)] if count != 1 or _multiplies_pairs(matrix, target) else []
    sums = [n for n in postorder(ordered(kernel).roots) if isinstance(n, Reduce) and n.order]
    terms = [(n.order, substitute(dim_prod([a.extent for a in n.axes]), sizes), n.sums_products) for n in sums]
    return [(order, count, of_products) for order, count, of_products in terms if count != 1]


def _in_its_order(kernel: Kernel, kept: frozenset[str]) -> Kernel:
    matrix = find_matmul(kernel)
    if matrix is not None and matrix.columns is not None and matrix.sums.sums_products:
        return along_kernel(matrix, "dot" if read_along(matrix, kept) == 1 else "products")
    single = single_terms(kernel, kept)
    if single is None:
        return kernel
    along, dots, products = single
    return dots if along == 1 else products


def _at_most(size: Dim, most: int) -> Dim:
    return dim_max(0, dim_min(1, most + 1 - size))


def _spread(kernel: Kernel) -> Kernel:
    """What is broadcast along an axis of one element is read along it, as where that was known."""
    loads = [n for n in postorder(kernel.roots) if isinstance(n, Load)]
    made: dict[Expr, Expr] = {}
    for load in loads:
        index = tuple(_along(load, at, loads) for at in range(len(load.index)))
        if index != load.index and not any(isinstance(n, Load) for i in index for n in postorder((i,))):
            made[load] = Load(load.buffer, index, load.where)
    return with_nodes(kernel, made)


def _along(load: Load, at: int, loads: list[Load]) -> Expr:
    """The index of a load on one of its axes, or that of another load which has an axis of one element there."""
    behind = len(load.index) - at
    if not isinstance(load.index[at], Const) or load.buffer.shape[at] != 1:
        return load.index[at]
    others = [other.index[-behind] for other in loads if len(other.index) >= behind and other is not load]
    return next((i for i in others if isinstance(i, Axis) and i.extent == 1), load.index[at])
