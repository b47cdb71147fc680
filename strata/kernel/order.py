"""The order of rounding in sums: it depends on the problem, not on what is known at compile time.

A float sum has the same bits whether its sizes are numbers or symbols, on any number of threads, alone or beside other
rows. So its order is found from the way its terms lie in memory, and never from an extent, unless its op names one:

    rows       the terms lie side by side: term k goes to chain k % CHAINS, the chains are joined by halves
    dot        the same with fewer chains: many such sums are done beside each other
    columns    other elements lie between them, of sums that are done side by side: one term after the other
    products   how matmuls and convolutions are summed: one term after the other, in blocks of PRODUCTS terms
    serial     one term after the other, without blocks: how sums of blocks are joined

CHAINS is a number of registers (REGISTERS) times the lanes of one. Rows and columns are summed in blocks of a fixed
number of terms, each from zero, whose sums are joined in order. One thread sums at least one block, and rounding grows
with the number of blocks, not of terms. The rest of a row after the last CHAINS terms goes to as many chains as a
register has lanes; the rest after those goes to the first of these chains where lanes can be switched off, and
otherwise to their sum, term by term.

A block of a matmul is PRODUCTS terms from the first on. A block of a convolution is as many whole lines of taps as have
that many terms; where a line has more, taps of a line; where a tap has more channels, channels of a tap. So blocks end
where loops over taps do, whichever template computes the convolution (`ProductBlocks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strata.core import Dim, DType
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Const, Expr, Load, Reduce, Scalar, Scan, apply, bound_axes, postorder

ORDERS = ("rows", "dot", "columns", "products", "serial")
REGISTERS = {"rows": 4, "dot": 1}  # of the chains of a sum
_MASKED = 64  # bytes of vectors of processors whose lanes can be switched off
STEPS = 256  # terms of a block that one chain, or one column, joins
PRODUCTS = 128  # terms of a block of a matmul or a convolution: in f32, 2048 of them are off by 2e-7 of their length


@dataclass(frozen=True, slots=True)
class Machine:
    """What is to be known of a processor: vector registers, a core's own cache, the last one."""

    vector_bytes: int
    vector_registers: int
    cache_bytes: int = 1 << 20
    last_cache_bytes: int = 8 << 20
    fuses: bool = True  # multiplies and adds with one rounding

    @property
    def masks(self) -> bool:
        """Whether lanes can be switched off."""
        return self.vector_bytes >= _MASKED

    def lanes(self, dtype: DType) -> int:
        """Numbers of a type that a register holds; narrow floats are summed as f32."""
        return max(1, self.vector_bytes // sum_bytes(dtype))


USUAL = Machine(64, 32)


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """How sums of products are cut: into blocks of `terms` products, none of which goes past a multiple of `run`
    (0: they go on). A block starts from zero, takes its products one after the other, and is added to those before."""

    terms: int = PRODUCTS
    run: int = 0

    def __str__(self) -> str:
        return f"{self.terms}" + (f" of {self.run}" if self.run else "")

    def begins(self, term: int) -> bool:
        """Whether a block begins with a term."""
        return (term % self.run if self.run else term) % self.terms == 0

    @classmethod
    def of_matmul(cls, k: int, parts: int = 1) -> ProductBlocks | None:
        """Of at most k products, each of `parts` numbers that are added by themselves; None: one block."""
        return cls(PRODUCTS * parts) if k > PRODUCTS * parts else None

    @classmethod
    def of_convolution(cls, channels: int, kernel: Sequence[int], *, beside: bool = False) -> ProductBlocks | None:
        """Of a convolution by a kernel of taps, each with some channels; None: one block. Narrow groups side by side
        go through the taps of a line for one channel after the other."""
        line, inner = channels * kernel[-1], kernel[-1] if beside else channels
        if channels * math.prod(kernel) <= PRODUCTS:
            return None
        if line <= PRODUCTS:
            return cls(PRODUCTS // line * line)
        return cls(PRODUCTS // inner * inner, line) if inner <= PRODUCTS else cls(PRODUCTS, inner)


def sum_bytes(dtype: DType) -> int:
    """Of one running sum, or of one part of a complex one."""
    return max(4, dtype.itemsize // (2 if dtype.is_complex else 1))


def order_of(node: Reduce | Scan) -> str:
    """The order of a reduction, or of a running one; "" where any will do. Its loads still have an index for each axis
    of their buffers."""
    if not node.is_rounded:
        return ""
    if node.order:
        return node.order
    mine = frozenset(bound_axes(node))
    several = frozenset(a for a in mine if a.extent != 1) or mine
    found = False
    for load in postorder((node.body,)):
        if isinstance(load, Load) and load.index and load.free & several:
            places = zip(reversed(load.index), reversed(load.buffer.shape), strict=True)
            last = next((i for i, d in places if _moves(i, d)), None)
            if last is None:  # one element, which a condition puts into some of the terms
                continue
            near = [atom for atom, step in linear(last).terms.items() if step in (1, -1) and atom.free]  # no start
            if any(not atom.free & mine for atom in near):
                return "columns"
            found = found or bool(last.free & mine)
    return "rows" if found else "columns"


def groups_of(node: Reduce) -> list[tuple[Axis, ...]]:
    """The axes of a rounded reduction, in order: neighbours are together where they are neighbours in every buffer,
    whole ones. That they are in memory, because an axis between them has one element, is not enough."""
    loads = [n for n in postorder((node.body,)) if isinstance(n, Load)]
    groups: list[tuple[Axis, ...]] = []
    for axis in node.axes:
        if groups and all(_follows(load, groups[-1][-1], axis) for load in loads):
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    return groups


def _moves(index: Expr, extent: Dim) -> bool:
    """Whether an index goes along an axis: of a flat sum, it does not where that has one element."""
    return extent != 1 or bool(index.free)


def _follows(load: Load, outer: Axis, inner: Axis) -> bool:
    """Whether a load has one axis right after the other."""
    places = [(i, d) for i, d in zip(load.index, load.buffer.shape, strict=True) if _moves(i, d)]
    mine = [at for at, (i, _) in enumerate(places) if i.free & {outer, inner}]
    if len(mine) < 2 and all(places[at][1] == 1 for at in mine):  # it is used again, all but surely
        return not (load.where is not None and load.where.free & {outer, inner})
    if len(mine) != 2 or mine[1] != mine[0] + 1:
        return False
    (first, _), (second, extent) = (places[at] for at in mine)
    return first is outer and second is inner and extent == inner.extent


def nested(node: Reduce, order: str) -> Reduce:
    """A rounded reduction as one inside the other for each group of its axes; rows are of the terms that lie side by
    side, and other terms are joined one after the other."""
    groups = groups_of(node)
    if len(groups) == 1:
        return Reduce(node.kind, node.axes, node.body, order)
    near, body = along(node), node.body
    for group in reversed(groups):
        body = Reduce(node.kind, group, body, "columns" if order in REGISTERS and near not in group else order)
    assert isinstance(body, Reduce)
    return body


def along(node: Reduce) -> Axis:
    """Of the axes of a sum in rows, the one along which its terms lie side by side."""
    loads = [linear(n.index[-1]).terms for n in postorder((node.body,)) if isinstance(n, Load) and n.index]
    for steps in ((1,), (1, -1), None):
        for axis in reversed(node.axes):
            if any(axis in terms and (steps is None or terms[axis] in steps) for terms in loads):
                return axis
    return node.axes[-1]


def block_terms(order: str, lanes: int) -> int:
    """Terms of a block; `lanes` fill a register."""
    if order == "products":
        return PRODUCTS
    return STEPS * REGISTERS.get(order, 0) * lanes or STEPS


def alone(node: Reduce, term: Expr) -> Expr:
    """A reduction over one term: a sum that starts from zero is never -0.0, but for a product that is too small to be
    told from it and is added with one rounding, to no other chain."""
    if node.kind != "sum" or not node.is_rounded:
        return term
    zero = Const(0, term.dtype)
    if node.order not in REGISTERS and node.sums_products and isinstance(term, Scalar) and term.name == "mul":
        return apply("fma", *term.args, zero)
    return apply("add", term, zero)


def written_out(node: Reduce, order: str, terms: Sequence[Expr], machine: Machine) -> Expr:
    """A rounded reduction over a few terms, in its order, as one expression. Products are added with one rounding.

    Only the first chain starts from zero: what the others end with is joined to it, and so need not be told from -0.0.
    """
    kind, first = node.kind, Const(1 if node.kind == "prod" else 0, node.dtype)
    fuses = machine.fuses and node.sums_products

    def added(total: Expr, term: Expr) -> Expr:
        if fuses and isinstance(term, Scalar) and term.name == "mul":
            return apply("fma", *term.args, total)
        return _joined(kind, total, term)

    chains: list[Expr] = []
    done = 0
    if order in REGISTERS:
        single = machine.lanes(terms[0].dtype)
        for width in (REGISTERS[order] * single, single):
            chains = _halved(kind, chains, width)
            end = len(terms) if machine.masks and width == single else len(terms) - (len(terms) - done) % width
            for at, term in enumerate(terms[done:end]):
                if at % width < len(chains):
                    chains[at % width] = added(chains[at % width], term)
                else:
                    chains.append(term if chains else added(first, term))
            done = end
        if fuses and 0 < len(chains) < single:
            chains.append(Const(0, node.dtype))  # of what has no term: a product too small to be told from -0.0 is 0.0
        chains = _halved(kind, chains, 1)
    total: Expr = chains[0] if chains else first
    for term in terms[done:]:
        total = added(total, term)
    return total


def _halved(kind: str, chains: list[Expr], width: int) -> list[Expr]:
    """At most `width` chains, by joining halves; those without a term are left out."""
    half = 1
    while half < len(chains):
        half *= 2
    while len(chains) > width:
        half //= 2
        pairs = [_joined(kind, a, b) for a, b in zip(chains, chains[half:], strict=False)]
        chains = [*pairs, *chains[len(pairs) : half]]
    return chains


def _joined(kind: str, a: Expr, b: Expr) -> Expr:
    return apply("mul" if kind == "prod" else "add", a, b)
