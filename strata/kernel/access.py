"""Memory access of kernels that users write: what is proved in bounds, and what is clamped.

A store of such a kernel writes every element of its buffer once, alone or together with others: then results never
depend on memory that nothing wrote, nor on which of two threads came last. A load stays inside its buffer: an index of
which that cannot be shown is clamped to it, as ids of a gather are; one that is known to leave it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, permutations
from math import gcd

from strata.core import Dim, bool_, dim_prod, i64, known_le
from strata.errors import VerifyError
from strata.kernel.algebra import LinearIndex, interval, linear, linear_interval
from strata.kernel.ir import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Store,
    apply,
    as_index,
    describe,
    postorder,
    size,
)
from strata.kernel.rewrite import load, rebuild_with

_MOST_TERMS = 5  # of a store's index along one axis of its buffer
_MOST_NESTED = 16  # reductions inside each other


def check_access(kernel: Kernel) -> None:
    """VerifyError where stores do not write every element once, or a load is known to leave its buffer."""
    for buffer in kernel.outputs:
        _check_stores(kernel, buffer, [s for s in kernel.stores if s.buffer == buffer])
    for store in kernel.stores:
        _check_scans(kernel, store)
    for found in _loads(kernel):
        low, high = interval(found.index)
        if found.is_reached and _is_surely_outside(low, high, found.extent):
            raise _broken(
                kernel,
                f"{describe(found.load)} reads at {low}..{high}, {found.load.buffer} ends at {found.extent - 1}",
                fix="a load may have a condition: `x[%1] where %2` is 0 where %2 is false",
            )  # fmt: skip
    if _nesting(kernel) > _MOST_NESTED:
        raise _broken(kernel, f"more than {_MOST_NESTED} reductions are inside each other")


def is_plain(kernel: Kernel) -> bool:
    """Whether there is one store for each output, which goes through it in order: the kernel can be part of another."""
    if [s.buffer for s in kernel.stores] != list(kernel.outputs):
        return False
    return all(s.index == s.axes and tuple(a.extent for a in s.axes) == s.buffer.shape for s in kernel.stores)


def contained(kernel: Kernel) -> Kernel:
    """The kernel with every index of a load clamped to its buffer, unless it is known to lie inside."""
    made: dict[Expr, Expr] = {}
    for node in postorder(kernel.roots):
        again = rebuild_with(node, made)
        made[node] = _clamped(again) if isinstance(again, Load) else again
    stores = tuple(replace(s, value=made[s.value]) for s in kernel.stores)
    return kernel if stores == kernel.stores else replace(kernel, stores=stores)


def unproven(kernel: Kernel) -> list[tuple[Load, int]]:
    """Loads, and which of their indices cannot be shown to lie inside the buffer."""
    return [(found.load, found.place) for found in _loads(kernel) if not found.is_inside]


NOT_READ = -(1 << 62)  # an index where the condition of a load is false


def numbered_reads(kernel: Kernel) -> tuple[Kernel, tuple[Dim, ...], Kernel] | None:
    """A kernel that computes every index that may leave its buffer, what they must stay below, and the kernel itself
    with these indices as further inputs; None where there are none. So they can be checked in between."""
    found = unproven(kernel)
    if not found:
        return None
    made: dict[tuple[Load, int], Expr] = {}
    stores, extents = [], []
    for number, (node, place) in enumerate(found):
        index = node.index[place]
        axes = tuple(sorted(node.free if node.where is not None else index.free, key=lambda a: (a.name, str(a.extent))))
        buffer = Buffer(f"index{number}", i64, tuple(a.extent for a in axes))
        value = index if node.where is None else apply("select", node.where, index, Const(NOT_READ, i64))
        stores.append(Store(buffer, axes, axes, value))
        extents.append(node.buffer.shape[place])
        made[node, place] = Load(buffer, axes)
    buffers = tuple(s.buffer for s in stores)
    names = {b.name for b in kernel.buffers} & {b.name for b in buffers}
    if names:
        raise _broken(kernel, f"a buffer is called {min(names)}, which checked kernels need")
    indices = Kernel(f"{kernel.name}_indices", kernel.inputs, buffers, tuple(stores))
    done: dict[Expr, Expr] = {}
    for old in postorder(kernel.roots):
        again = rebuild_with(old, done)
        if isinstance(old, Load) and isinstance(again, Load):
            at = tuple(made.get((old, place), i) for place, i in enumerate(again.index))
            again = Load(again.buffer, at, again.where)
        done[old] = again
    written = tuple(replace(s, value=done[s.value]) for s in kernel.stores)
    return indices, tuple(extents), replace(kernel, inputs=(*kernel.inputs, *buffers), stores=written, schedule="")


def _clamped(node: Load) -> Expr:
    index, empty = list(node.index), []
    for found in _parts(node):
        if not found.is_inside:
            last = size(found.extent - 1)
            index[found.place] = apply("max", apply("min", found.index, last), Const(0, i64))
            if not known_le(1, found.extent):
                empty.append(apply("lt", Const(0, i64), size(found.extent)))
    where = node.where
    for condition in empty:  # there is nothing to clamp to
        where = condition if where is None else apply("and", where, condition)
    return load(node.buffer, tuple(index), where)


# ---------------------------------------------------------------------------------------------------------------- loads


@dataclass(frozen=True, slots=True)
class _AccessPart:
    """One index of a load."""

    load: Load
    place: int

    @property
    def index(self) -> Expr:
        return self.load.index[self.place]

    @property
    def extent(self) -> Dim:
        return self.load.buffer.shape[self.place]

    @property
    def is_reached(self) -> bool:
        """Whether the index takes its greatest and its least value, and something is read there."""
        return self.load.where is None and all(isinstance(atom, Axis) for atom in linear(self.index).terms)

    @property
    def is_inside(self) -> bool:
        form = linear(self.index)
        facts = list(_facts(self.load.where)) if self.load.where is not None else []
        above = _plus(LinearIndex({}, self.extent - 1), form, -1)
        return _is_never_negative(form, facts) and _is_never_negative(above, facts)


def _parts(node: Load) -> list[_AccessPart]:
    return [_AccessPart(node, place) for place in range(len(node.index))]


def _loads(kernel: Kernel) -> Iterator[_AccessPart]:
    for node in postorder(kernel.roots):
        if isinstance(node, Load):
            yield from _parts(node)


def _plus(a: LinearIndex, b: LinearIndex, factor: int) -> LinearIndex:
    terms = dict(a.terms)
    for atom, coefficient in b.terms.items():
        total = terms.pop(atom, 0) + coefficient * factor
        if total != 0:
            terms[atom] = total
    return LinearIndex(terms, a.constant + b.constant * factor)


def _is_never_negative(form: LinearIndex, facts: list[LinearIndex]) -> bool:
    """Whether a form is 0 or more where all facts are."""
    low, _ = linear_interval(form)
    if low is not None and known_le(0, low):
        return True
    for fact in facts:
        low, _ = linear_interval(_plus(form, fact, -1))
        if low is not None and known_le(0, low):
            return True
    return False


def _facts(condition: Expr) -> Iterator[LinearIndex]:
    """Forms that are 0 or more where a condition holds."""
    match condition:
        case Scalar("and", (a, b)) if condition.dtype is bool_:
            yield from _facts(a)
            yield from _facts(b)
        case Scalar("lt" | "gt" | "le" | "ge" as name, (a, b)) if a.dtype is i64:
            less, more = (a, b) if name in ("lt", "le") else (b, a)
            gap = _plus(linear(as_index(more)), linear(as_index(less)), -1)
            yield LinearIndex(gap.terms, gap.constant - (name in ("lt", "gt")))
        case Scalar("eq", (a, b)) if a.dtype is i64:
            gap = _plus(linear(as_index(a)), linear(as_index(b)), -1)
            yield from (gap, _plus(LinearIndex({}, 0), gap, -1))
        case Scalar("not", (Scalar("lt" | "gt" | "le" | "ge" as name, (a, b)),)) if a.dtype is i64:
            yield from _facts(Scalar({"lt": "ge", "gt": "le", "le": "gt", "ge": "lt"}[name], (a, b), bool_))


def _is_surely_outside(low: Dim | None, high: Dim | None, extent: Dim) -> bool:
    """Whether some point of an affine index is outside, whatever the sizes are: its bounds are reached."""
    below = low is not None and known_le(low, -1)
    above = high is not None and known_le(extent, high)
    return below or above


# --------------------------------------------------------------------------------------------------------------- stores


def _check_stores(kernel: Kernel, buffer: Buffer, stores: list[Store]) -> None:
    for store in stores:
        forms = [linear(i) for i in store.index]
        for form, extent in zip(forms, buffer.shape, strict=True):
            low, high = linear_interval(form)
            points = [atom for atom in form.terms if not isinstance(atom, Axis)]
            if points:
                raise _broken(
                    kernel, f"a store to {buffer} is at {describe(points[0])}: not a sum of axes times numbers",
                    fix="write where an axis says, and read from where a number says",
                )  # fmt: skip
            if low is None or high is None or not known_le(0, low) or not known_le(high, extent - 1):
                raise _broken(kernel, f"a store to {buffer} goes to {low}..{high} of 0..{extent - 1}")
        if not _is_one_to_one(store, forms):
            axes = ", ".join(a.name for a in store.axes) or "no axis"
            raise _broken(
                kernel, f"a store to {buffer} over {axes} may write one element several times: "
                f"[{', '.join(map(describe, store.index))}]",
            )  # fmt: skip
    for a, b in combinations(stores, 2):
        if not _are_apart(a, b):
            raise _broken(kernel, f"two stores to {buffer} may write the same element")
    written: Dim = 0
    for store in stores:
        written = written + dim_prod([a.extent for a in store.axes])
    if written != dim_prod(buffer.shape):
        raise _broken(kernel, f"stores write {written} of the {dim_prod(buffer.shape)} elements of {buffer}")


def _is_one_to_one(store: Store, forms: list[LinearIndex]) -> bool:
    """Whether different points write different elements: each axis moves one index, by more than those inside it."""
    left = {a for a in store.axes if a.extent != 1}
    for form in forms:
        terms = {a: c for a, c in form.terms.items() if isinstance(a, Axis) and a.extent != 1}
        if not terms.keys() <= left or len(terms) > _MOST_TERMS:
            return False
        left -= terms.keys()
        if not any(map(_goes_outwards, permutations(terms.items()))):
            return False
    return not left


def _goes_outwards(terms: tuple[tuple[Axis, Dim], ...]) -> bool:
    """Whether every term steps over all that the terms before it reach."""
    reach: Dim = 0
    for axis, coefficient in terms:
        step = coefficient if known_le(0, coefficient) else coefficient * -1
        if not known_le(reach + 1, step):
            return False
        reach = reach + step * (axis.extent - 1)
    return True


def _are_apart(a: Store, b: Store) -> bool:
    """Whether two stores never meet: along one axis of the buffer their ranges, or what they leave out, differ."""
    for first, second in zip(map(linear, a.index), map(linear, b.index), strict=True):
        (low_a, high_a), (low_b, high_b) = linear_interval(first), linear_interval(second)
        for high, low in ((high_a, low_b), (high_b, low_a)):
            if high is not None and low is not None and known_le(high + 1, low):
                return True
        steps = [*first.terms.values(), *second.terms.values()]
        start, other = first.constant, second.constant
        if steps and isinstance(start, int) and isinstance(other, int) and all(isinstance(s, int) for s in steps):
            by = reduce(gcd, [s for s in steps if isinstance(s, int)])
            if (start - other) % by:
                return True
    return False


def _check_scans(kernel: Kernel, store: Store) -> None:
    """A running reduction is read along an axis of its store, from the start or from the end."""
    for node in postorder((store.value,)):
        if isinstance(node, Scan):
            extent = node.axis.extent
            ways = [e for a in store.axes if a.extent == extent for e in (a, size(extent - 1) - a)]
            if node.position not in ways:
                raise _broken(kernel, f"{describe(node)} is not read along an axis of its store, of its extent")
            if node.position.free & node.body.free:
                raise _broken(kernel, f"{describe(node)} depends on the axis along which it is read")


def _nesting(kernel: Kernel) -> int:
    depth: dict[Expr, int] = {}
    for node in postorder(kernel.roots):
        inside = max((depth[x] for x in node.inputs), default=0)
        depth[node] = inside + isinstance(node, (Reduce, Scan))
    return max(depth.values(), default=0)


def _broken(kernel: Kernel, reason: str, *, fix: str | None = None) -> VerifyError:
    return VerifyError(f"kernel {kernel.name}: {reason}", code="V115", fix=fix)
