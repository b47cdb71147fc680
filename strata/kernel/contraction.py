"""Contractions found once for all backends: sums of products, with the axes of a matmul by role.

`y[b, m, n] = f(sum k : A(b, m, k) * B(b, k, n), …)`: axes that only one factor has are rows or columns, the others
are batches, and the axes of the sum are one axis of terms. Matmuls, convolutions (as matmuls of gathered windows),
products with a vector and their fusions all have this form; the factors may be any expression (a cast, dequantised
weights, a window with borders), and so may be what is done with the sums (the epilogue).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.core import Dim, DType, dim_prod, i64
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Const, Expr, Kernel, Load, Reduce, Scalar, Scan, apply, postorder, size
from strata.kernel.rewrite import rewritten, substitute_axes


@dataclass(frozen=True, slots=True)
class SumOfProducts:
    """One sum, as the kernel has it: `node` is the sum over `terms` of left * right."""

    node: Reduce
    terms: tuple[Axis, ...]
    left: Expr
    right: Expr

    @property
    def count(self) -> Dim:
        """Of its terms."""
        return dim_prod([a.extent for a in self.terms])

    @property
    def turned(self) -> SumOfProducts:
        """The same with its factors the other way round."""
        return SumOfProducts(self.node, self.terms, self.right, self.left)

    def across(self, axes: Sequence[Axis]) -> SumOfProducts:
        """The same with its columns where results lie side by side: along the last of these axes, if it is a factor's
        own."""
        return self.turned if axes and axes[-1] in self.left.free - self.right.free else self

    def narrowed(self, dtype: DType) -> tuple[Expr, Expr] | None:
        """Its factors where both are cast from a narrow type, as tensor cores take them."""
        left, right = (uncast(x, dtype) for x in (self.left, self.right))
        return None if left is None or right is None else (left, right)


@dataclass(frozen=True, slots=True)
class ContractionForm:
    """A kernel of sums of products over the same axes. Rows are none where a vector is multiplied by a matrix, and
    columns too where both factors have the same axes."""

    kernel: Kernel  # normalized
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    sums: tuple[SumOfProducts, ...]

    @property
    def repeats(self) -> bool:
        """Whether there are axes of the result that neither factor has: the same sums are made again along them."""
        return any(a not in s.left.free for s in self.sums for a in self.batch)

    @property
    def extents(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Batches, rows, columns, and the terms of the first sum."""
        batch, rows, columns = (dim_prod([a.extent for a in axes]) for axes in (self.batch, self.rows, self.columns))
        return batch, rows, columns, self.sums[0].count


def find_contraction(kernel: Kernel) -> ContractionForm | None:
    """A normalized kernel as a contraction, None where it is none: every reduction of it is part of the form."""
    if not kernel.stores or any(isinstance(n, Scan) for n in postorder(kernel.roots)):
        return None
    kernel = _with_own_terms(kernel)
    axes = kernel.stores[0].axes
    if any(set(s.axes) != set(axes) for s in kernel.stores):
        return None
    found = [sum_of_products(node) for node in _outermost(kernel)]
    sums = [p for p in found if p is not None]
    if not sums or len(sums) < len(found):
        return None
    first = sums[0].across(axes)
    roles = axis_roles(axes, first.left, first.right)
    turned = [first]
    for p in sums[1:]:
        fitting = next((x for x in (p, p.turned) if axis_roles(axes, x.left, x.right) == roles), None)
        if fitting is None:
            return None
        turned.append(fitting)
    return ContractionForm(kernel, *roles, tuple(turned))


def _with_own_terms(kernel: Kernel) -> Kernel:
    """The kernel with sums over axes that are not the store's: columns that no factor has can have as many elements
    as there are terms, and the normal form takes one axis for both."""
    taken = {a for s in kernel.stores for a in s.axes}

    def change(node: Expr) -> Expr:
        if not isinstance(node, Reduce) or taken.isdisjoint(node.axes):
            return node
        own: dict[Axis, Expr] = {a: Axis(f"{a.name}_terms", a.extent) if a in taken else a for a in node.axes}
        axes = tuple(a for a in own.values() if isinstance(a, Axis))
        return node.over(axes, substitute_axes((node.body,), own)[node.body])

    return rewritten(kernel, change)


def axis_roles(
    axes: Sequence[Axis], left: Expr, right: Expr
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]:
    """Axes of a result by role: batches, the rows that only the left factor has, and the columns of the right one."""
    rows = tuple(a for a in axes if a in left.free and a not in right.free)
    columns = tuple(a for a in axes if a in right.free and a not in left.free)
    return tuple(a for a in axes if a not in rows and a not in columns), rows, columns


def sum_of_products(node: Reduce) -> SumOfProducts | None:
    """A sum, or a sum of sums, of products in which nothing else is reduced."""
    axes: list[Axis] = []
    body: Expr = node
    while isinstance(body, Reduce) and body.kind == "sum":
        axes += body.axes
        body = body.body
    if len(set(axes)) < len(axes) or not isinstance(body, Scalar) or body.name != "mul":
        return None
    if any(isinstance(n, Reduce) for n in postorder((body,))):
        return None
    return _merged(SumOfProducts(node, tuple(axes), *body.args))


def _merged(one: SumOfProducts) -> SumOfProducts:
    """Neighbouring axes of terms as one, where both factors step through memory as if they were: heads and their
    elements, after a reshape that moves nothing."""
    terms, left, right = list(one.terms), one.left, one.right
    at = 0
    while at + 1 < len(terms):
        outer, inner = terms[at : at + 2]
        if not (_is_one_axis(left, outer, inner) and _is_one_axis(right, outer, inner)):
            at += 1
            continue
        whole = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
        change: dict[Axis, Expr] = {outer: Const(0, i64), inner: whole}
        left, right = (substitute_axes((x,), change)[x] for x in (left, right))
        terms[at : at + 2] = [whole]
        at = max(at - 1, 0)
    return SumOfProducts(one.node, tuple(terms), left, right)


def _is_one_axis(factor: Expr, outer: Axis, inner: Axis) -> bool:
    """Whether one axis goes on where the other ends, in everything that a factor reads."""
    pair, stack = {outer, inner}, [factor]
    if not isinstance(outer.extent, int) or not isinstance(inner.extent, int):
        return False
    while stack:
        node = stack.pop()
        if not isinstance(node, Load):
            if node in pair:
                return False
            stack += node.inputs
            continue
        steps = [linear(index).terms for index in node.index if index.free & pair]
        if (node.where is not None and node.where.free & pair) or len(steps) > 1:
            return False
        for found in steps:
            if any(atom not in pair and atom.free & pair for atom in found):
                return False
            if found.get(outer, 0) != found.get(inner, 0) * inner.extent:
                return False
    return True


def uncast(node: Expr, dtype: DType) -> Expr | None:
    """What a cast from a narrow type is of."""
    match node:
        case Scalar("cast", (x,)) if x.dtype is dtype:
            return x
        case Scalar("select", (condition, x, Const(0))):  # borders of windows
            inner = uncast(x, dtype)
            if isinstance(inner, Load) and inner.where is condition:
                return inner
            return None if inner is None else apply("select", condition, inner, Const(0, dtype))
    return None


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A factor that lies in memory as matrices: element (row, column) of one is at start + row * step + column."""

    load: Load
    start: Expr | None  # of the matrix of a batch, in elements; None where there is one
    step: Dim
    is_turned: bool  # terms are the rows of what lies in memory


def matrix_view(factor: Expr, outer: Sequence[Axis], terms: Sequence[Axis]) -> MatrixView | None:
    """A factor over one axis of rows or columns and one of terms as a matrix in memory, the batch axes apart."""
    if not isinstance(factor, Load) or factor.where is not None or len(outer) != 1 or len(terms) != 1:
        return None
    form = linear(factor.index[0])
    steps = {atom: step for atom, step in form.terms.items() if isinstance(atom, Axis)}
    if len(steps) < len(form.terms):
        return None
    along, down = steps.pop(terms[0], 0), steps.pop(outer[0], 0)
    is_turned = along != 1
    if is_turned:
        along, down = down, along
    if along != 1 or down in (0, 1):
        return None
    start: Expr | None = None
    for atom, step in steps.items():
        start = atom * size(step) if start is None else start + atom * size(step)
    if form.constant != 0:
        start = size(form.constant) if start is None else start + size(form.constant)
    return MatrixView(factor, start, down, is_turned)


def _outermost(kernel: Kernel) -> list[Reduce]:
    """Reductions that no other one holds."""
    found: dict[Reduce, None] = {}
    seen: set[Expr] = set()
    stack = list(reversed(kernel.roots))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Reduce):
            found[node] = None
        else:
            stack += reversed(node.inputs)
    return list(found)
