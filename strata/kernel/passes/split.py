"""Long reductions split (split-k): one kernel becomes several, run in order.

A reduction over many terms that few other axes go around would keep one thread busy and leave the others idle. Here
its terms are split into parts, by their number alone; a first kernel reduces every part into scratch memory, and in
the kernel itself the reduction goes over the parts and over the few terms that are left:

    y = sum of x[i] over i in 1000003
    parts[p] = sum of x[p * 15616 + i] over i in 15616        for p in 64
    y = sum of parts[p] over p in 64 + sum of x[999424 + i] over i in 579

Where rounding counts, a part is a block of the order in which one thread sums the terms (`order.py`), so that the sum
has the same bits, split or not. Of a sum of fewer sums than a block has terms, each of those is a part.

Of an argmax, a part leaves the place of its best; the first of those with the best value is the place of all. Of
narrow integers, whose places are wider than they are, a part leaves its best only, and the first part with the best of
all is looked through again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod

from strata.core import Dim, bounds, dim_prod, i64
from strata.kernel.algebra import linear
from strata.kernel.contraction import ContractionForm
from strata.kernel.ir import Axis, Buffer, Const, Expr, Kernel, Load, Reduce, Scan, Store, apply, postorder, size
from strata.kernel.order import Machine, block_terms
from strata.kernel.passes.windows import JOINS
from strata.kernel.rewrite import substitute_axes, with_nodes

_PLACES = {"argmax": "gt", "argmin": "lt"}
_BEST = {"argmax": "max", "argmin": "min"}


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """When a reduction is split, and how far."""

    terms: int = 1 << 17  # fewer are not worth a second kernel
    lines: int = 8  # that are reduced independently: enough for threads without parts
    columns: int = 256  # that count as one line where the terms of a line do not lie side by side
    far: int = (
        4 << 20
    )  # bytes that no core's own cache holds: there, whole rows are read, and this many columns are a line
    far_columns: int = 4096
    far_rows: int = 64  # of a part, at least
    part_bytes: int = 128 << 10
    short_part_bytes: int = 16 << 10  # of a part that is looked through again
    parts: int = 64
    column_parts: int = 0  # of sums of columns; 0: as many as of others
    open_parts: int = 16  # of a reduction whose number of terms is not known


USUAL = SplitLimits()
_RUN = 64  # terms side by side that a part is a multiple of


@dataclass(frozen=True, slots=True)
class Phases:
    """Kernels to be run one after the other, the last under the name of the whole, and what they hand on."""

    kernels: tuple[Kernel, ...]
    scratch: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class _Split:
    """How the terms of a reduction are dealt out: `parts` of `length` each, then `rest`."""

    parts: Dim
    length: Dim
    rest: Dim


def split_reductions(
    kernel: Kernel, limits: SplitLimits = USUAL, *, machine: Machine | None = None, first: int = 0
) -> Phases:
    """A normalized kernel as the phases that compute it; with a machine, rounded terms keep their order on it. Scratch
    is numbered from `first`."""
    phases: list[Kernel] = []
    scratch: list[Buffer] = []
    done: set[Axis] = set()  # of reductions made here, which stay as they are
    while groups := _groups(kernel, limits, machine, done):
        change: dict[Expr, Expr] = {}
        for reduces, split in groups:
            buffers = [Buffer(f"part{first + len(scratch) + n}", r.dtype, ()) for n, r in enumerate(reduces)]
            made, change_here = _parted(kernel, reduces, split, buffers, f"{kernel.name}_{len(phases)}")
            phases.append(made)
            scratch += made.outputs
            change |= change_here
            done |= {a for n in postorder(change_here.values()) if isinstance(n, Reduce) for a in n.axes}
        kernel = with_nodes(kernel, change)
        known = tuple(b for b in scratch if b not in kernel.inputs)
        kernel = replace(kernel, inputs=(*kernel.inputs, *known))
    return Phases((*phases, kernel), tuple(scratch))


def _groups(
    kernel: Kernel, limits: SplitLimits, machine: Machine | None, done: set[Axis]
) -> list[tuple[list[Reduce], _Split]]:
    """Reductions to split now, those that can share a kernel together."""
    nodes = postorder(kernel.roots)
    if any(isinstance(n, Scan) for n in nodes):
        return []
    inside: dict[Expr, set[Axis]] = defaultdict(set)  # axes that are bound around a reduction
    for node in nodes:
        if isinstance(node, Reduce):
            for inner in postorder((node.body,)):
                inside[inner] |= set(node.axes)
    found: dict[Reduce, _Split] = {}
    for node in nodes:
        if isinstance(node, Reduce) and not node.free & inside[node] and not done & set(node.axes):
            split = _split_of(node, limits, machine)
            if split is not None and not any(n in found for n in postorder((node.body,))):
                found[node] = split
    groups: dict[tuple[object, ...], list[Reduce]] = defaultdict(list)
    for node, split in found.items():
        groups[node.axes, node.free, split].append(node)
    return [(reduces, found[reduces[0]]) for reduces in groups.values()]


def _split_of(node: Reduce, limits: SplitLimits, machine: Machine | None) -> _Split | None:
    (axis,) = node.axes
    block = block_terms(node.order, machine.lanes(node.dtype)) if machine is not None and node.is_rounded else 0
    narrow = node.dtype.is_float and node.dtype.itemsize < 4
    if node.kind not in (*JOINS, *_PLACES) or narrow or (node.kind == "sum" and node.dtype.is_bool):
        return None
    if node.order in ("products", "serial"):
        return None
    body = postorder((node.body,))
    loads = [linear(n.index[0]).terms for n in body if isinstance(n, Load)]
    own = [terms for terms in loads if node.free <= terms.keys()] or loads  # others are read by many lines
    along = any(terms.get(axis) == 1 for terms in own)
    if not isinstance(axis.extent, int):
        most = bounds(axis.extent)[1]
        if node.free or not along or node.kind in _PLACES or (most is not None and most <= limits.terms):
            return None
        if block:
            return _Split(axis.extent // block, block, axis.extent % block)
        unit = limits.open_parts * _RUN
        return _Split(limits.open_parts, axis.extent // unit * _RUN, axis.extent % unit)
    inner = [n for n in body if isinstance(n, Reduce) and axis in n.free]  # done again for every term
    extents = [a.extent for a in node.free] + [a.extent for n in inner for a in n.axes]
    if not all(isinstance(e, int) for e in extents):
        return None
    lines = prod(a.extent for a in node.free if isinstance(a.extent, int))
    terms = axis.extent * prod(e for e in extents if isinstance(e, int))
    far = not along and terms * node.body.dtype.itemsize > limits.far
    columns = 1 if along else limits.far_columns if far else limits.columns
    if terms <= limits.terms or lines // columns >= limits.lines:
        return None
    if block and 1 < axis.extent <= block and isinstance(node.body, Reduce):  # a few sums: each of them is a part
        return _Split(axis.extent, 1, 0)
    if block:
        return _Split(axis.extent // block, block, axis.extent % block) if axis.extent >= 2 * block else None
    run = _RUN if along else 1
    least = limits.far_rows if far and lines // limits.columns >= limits.lines else 2 * run
    part_bytes = limits.short_part_bytes if _looks_again(node) else limits.part_bytes
    most = limits.parts if along else limits.column_parts or limits.parts
    parts = min(terms * node.body.dtype.itemsize // part_bytes, most, axis.extent // least)
    if parts < 2:
        return None
    length = axis.extent // (parts * run) * run
    return _Split(parts, length, axis.extent - parts * length)


def _parted(
    kernel: Kernel, reduces: list[Reduce], split: _Split, names: list[Buffer], name: str
) -> tuple[Kernel, dict[Expr, Expr]]:
    """The kernel that reduces the parts, and what takes the place of the reductions."""
    (axis,) = reduces[0].axes
    part, term = Axis(f"{axis.name}_p", split.parts), Axis(f"{axis.name}_l", split.length)
    rest = Axis(f"{axis.name}_r", split.rest)
    order = list(dict.fromkeys(a for s in kernel.stores for a in s.axes))
    axes = (part, *sorted(reduces[0].free, key=order.index))
    place: Expr = Const(0, i64)
    for a in axes:
        place = place * size(a.extent) + a
    count = dim_prod([a.extent for a in axes])
    stores, buffers = [], []
    change: dict[Expr, Expr] = {}
    for reduce, named in zip(reduces, names, strict=True):
        buffer = replace(named, shape=(count,))
        first = part * size(split.length)
        at = substitute_axes((reduce.body,), {axis: first + term if split.length != 1 else part})[reduce.body]
        made: Expr = reduce.over((term,), at) if split.length != 1 else at
        if _looks_again(reduce):
            buffer = replace(buffer, dtype=reduce.body.dtype)
            stores.append(Store(buffer, axes, (place,), Reduce(_BEST[reduce.kind], (term,), at)))
            start = Reduce(reduce.kind, (part,), Load(buffer, (place,))) * size(split.length)
            again = Axis(f"{axis.name}_a", split.length)
            found = start + Reduce(reduce.kind, (again,), _value_at(reduce, start + again))
            change[reduce] = _with_the_rest(reduce, found, split, rest)
        elif reduce.kind in _PLACES:
            stores.append(Store(buffer, axes, (place,), first + made))
            places = Load(buffer, (place,))
            best = Reduce(reduce.kind, (part,), _value_at(reduce, places))
            found = substitute_axes((places,), {part: best})[places]
            change[reduce] = _with_the_rest(reduce, found, split, rest)
        buffers.append(buffer)
        if reduce.kind in _PLACES:
            continue
        stores.append(Store(buffer, axes, (place,), made))
        whole: Expr = Reduce(reduce.kind, (part,), Load(buffer, (place,)), "serial" if reduce.order else "")
        if split.rest != 0:
            first = size(split.parts * split.length)
            left = substitute_axes((reduce.body,), {axis: first + rest})[reduce.body]
            whole = apply(JOINS[reduce.kind], whole, reduce.over((rest,), left))
        change[reduce] = whole
    return Kernel(name, kernel.inputs, tuple(buffers), tuple(stores)), change


def _looks_again(node: Reduce) -> bool:
    return node.kind in _PLACES and node.body.dtype.is_int and node.body.dtype.itemsize <= 2


def _value_at(reduce: Reduce, place: Expr) -> Expr:
    (axis,) = reduce.axes
    return substitute_axes((reduce.body,), {axis: place})[reduce.body]


def _with_the_rest(reduce: Reduce, found: Expr, split: _Split, rest: Axis) -> Expr:
    """The first of the best: one that was found in the parts, or one of the terms that are left."""
    if split.rest == 0:
        return found
    first = size(split.parts * split.length)
    left = first + Reduce(reduce.kind, (rest,), _value_at(reduce, first + rest))
    mine, other = _value_at(reduce, found), _value_at(reduce, left)
    better = apply(_PLACES[reduce.kind], other, mine)
    if reduce.body.dtype.is_float:
        new = apply("and", apply("isnan", other), apply("not", apply("isnan", mine)))
        better = apply("or", better, new)
    return apply("select", better, left, found)


def split_terms(form: ContractionForm, parts: int, *, first: int = 0) -> Phases:
    """A contraction whose sums are made in parts (split-k) of the first axis of their terms, and then added up in the
    order of the parts: where there are few tiles, parts keep a device busy."""
    kernel, (outer, *inner) = form.kernel, form.sums[0].terms
    assert all(s.terms == form.sums[0].terms for s in form.sums)
    assert isinstance(outer.extent, int)
    assert outer.extent % parts == 0, f"{outer.extent} terms in {parts} parts"
    part, term = Axis(f"{outer.name}_p", parts), Axis(f"{outer.name}_l", outer.extent // parts)
    axes = (part, *kernel.stores[0].axes)
    place: Expr = Const(0, i64)
    for a in axes:
        place = place * size(a.extent) + a
    stores: list[Store] = []
    change: dict[Expr, Expr] = {}
    for number, one in enumerate(form.sums, first):
        buffer = Buffer(f"part{number}", one.node.dtype, (dim_prod([a.extent for a in axes]),))
        body: Expr = one.left * one.right
        body = substitute_axes((body,), {outer: part * size(outer.extent // parts) + term})[body]
        for axis in reversed((term, *inner)):
            body = Reduce("sum", (axis,), body)
        stores.append(Store(buffer, axes, (place,), body))
        total: Expr | None = None
        for at in range(parts):
            index = substitute_axes((place,), {part: Const(at, i64)})[place]
            total = Load(buffer, (index,)) if total is None else total + Load(buffer, (index,))
        assert total is not None
        change[one.node] = total
    scratch = tuple(s.buffer for s in stores)
    read = {n.buffer.name for n in postorder([s.value for s in stores]) if isinstance(n, Load)}
    made = Kernel(f"{kernel.name}_parts", tuple(b for b in kernel.inputs if b.name in read), scratch, tuple(stores))
    last = with_nodes(kernel, change)
    return Phases((made, replace(last, inputs=(*kernel.inputs, *scratch))), scratch)
