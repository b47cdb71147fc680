"""The normal form of kernels: flat addresses, one axis per reduction, as few axes as possible.

After `normalize`, every buffer is one-dimensional, every load and store has one index (its address in elements), every
reduction binds one axis, neighbouring axes that no address tells apart are one axis, and an axis that is only used
through `// d` and `% d` is two. Reductions reuse the store's own axis where they can, so that a value needed in
several loops over one axis is one expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from strata.core import Dim, dim_prod, divide_exactly, i64
from strata.errors import LowerError
from strata.kernel.algebra import is_divisor, linear, strided
from strata.kernel.interp import identity
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
    bound_axes,
    describe,
    postorder,
    size,
)
from strata.kernel.order import REGISTERS, alone, along, nested, order_of
from strata.kernel.rewrite import load, rewritten, substitute_axes, with_roots

_SMALLEST_SPLIT = 8  # an inner axis shorter than a vector is worse than division


@lru_cache(maxsize=64)  # those that look for a matmul, a convolution and loops in one kernel all ask
def normalize(kernel: Kernel) -> Kernel:
    """The same kernel in the form that nests are made from."""
    kernel = replace(kernel, stores=tuple(s for s in kernel.stores if all(a.extent != 0 for a in s.axes)))
    kernel = _flatten(ordered(kernel))
    kernel = _drop_single(kernel)
    kernel = _split_axes(kernel)
    kernel = _merge_store_axes(kernel)
    if not _has_folds(kernel):
        return kernel
    kernel = rewritten(kernel, _merge_reduce_axes)
    kernel = rewritten(kernel, _one_axis_each)
    return _straighten_scans(_share_axes(kernel))


def ordered(kernel: Kernel) -> Kernel:
    """The kernel with an order for every sum that is rounded."""
    return rewritten(rewritten(kernel, _split_lying_apart), _ordered) if _has_folds(kernel) else kernel


def _ordered(node: Expr) -> Expr:
    """Reductions know their order while their loads still have an index for each axis."""
    order = order_of(node) if isinstance(node, (Reduce, Scan)) else ""
    if not order:
        return node
    if isinstance(node, Reduce):
        return nested(node, order)
    assert isinstance(node, Scan)
    return Scan(node.kind, node.axis, node.body, node.position, node.exclusive, order)


def _has_folds(kernel: Kernel) -> bool:
    return any(isinstance(e, (Reduce, Scan)) for e in postorder(kernel.roots))


def address(index: tuple[Expr, ...], buffer: Buffer) -> Expr:
    """The position of an element, counted in elements."""
    return strided(index, buffer.strides)


def _flat(buffer: Buffer) -> Buffer:
    return Buffer(buffer.name, buffer.dtype, (dim_prod(buffer.shape),))


def _flatten(kernel: Kernel) -> Kernel:
    def change(node: Expr) -> Expr:
        if isinstance(node, Load):
            return load(_flat(node.buffer), (address(node.index, node.buffer),), node.where)
        return node

    flat = rewritten(kernel, change)
    stores = tuple(Store(_flat(s.buffer), s.axes, (address(s.index, s.buffer),), s.value) for s in flat.stores)
    inputs, outputs = tuple(map(_flat, kernel.inputs)), tuple(map(_flat, kernel.outputs))
    return Kernel(kernel.name, inputs, outputs, stores)


def _substitute(
    kernel: Kernel, change: dict[Axis, Expr], rename: Callable[[tuple[Axis, ...]], tuple[Axis, ...]]
) -> Kernel:
    done = substitute_axes(kernel.roots, change)
    moved = with_roots(kernel, done)
    return replace(moved, stores=tuple(replace(s, axes=rename(s.axes)) for s in moved.stores))


def _drop_single(kernel: Kernel) -> Kernel:
    """Axes of extent 1 are the constant 0."""
    single = {a: Const(0, i64) for s in kernel.stores for a in s.axes if a.extent == 1}
    if single:
        kernel = _substitute(kernel, dict(single), lambda axes: tuple(a for a in axes if a not in single))
    if not _has_folds(kernel):
        return kernel

    def change(node: Expr) -> Expr:
        if isinstance(node, Reduce) and node.kind not in ("argmax", "argmin"):
            ones = {a: Const(0, i64) for a in node.axes if a.extent == 1}
            if ones:
                body = substitute_axes((node.body,), dict(ones))[node.body]
                rest = tuple(a for a in node.axes if a not in ones)
                return node.over(rest, body) if rest else alone(node, body)
        if isinstance(node, Scan) and node.axis.extent == 1:
            if node.exclusive:
                return Const(identity(node.kind, node.dtype), node.dtype)
            return substitute_axes((node.body,), {node.axis: Const(0, i64)})[node.body]
        return node

    return rewritten(kernel, change)


# splitting


def _split_axes(kernel: Kernel) -> Kernel:
    for _ in range(16):
        found = _store_split(kernel)
        if found is None:
            break
        kernel = split_store_axis(kernel, *found)
    return rewritten(kernel, _split_reduction)


def split_store_axis(kernel: Kernel, axis: Axis, by: Dim) -> Kernel:
    """The kernel with two axes in place of one of its stores, the inner one of a size that divides it."""
    halves = outer, inner = _halves(axis, by)
    return _substitute(
        kernel,
        {axis: outer * size(by) + inner},
        lambda axes: tuple(x for y in axes for x in (halves if y is axis else (y,))),
    )


def _halves(axis: Axis, by: Dim) -> tuple[Axis, Axis]:
    whole = divide_exactly(axis.extent, by)
    assert whole is not None
    return Axis(f"{axis.name}_o", whole), Axis(f"{axis.name}_i", by)


def _store_split(kernel: Kernel) -> tuple[Axis, Dim] | None:
    copies = all(isinstance(s.value, Load) for s in kernel.stores)  # there is nothing to compute in vectors
    last = {s.axes[-1] for s in kernel.stores if s.axes and not copies}
    last -= _of_products(kernel)  # a reshaped matmul is one however few columns it has: its sums have one order
    axes = {a for s in kernel.stores for a in s.axes}
    for node in postorder(kernel.roots):
        if isinstance(node, Scan):
            axes -= node.position.free  # it is read along a whole axis
    for axis, by in divisions(kernel.roots):
        if axis in axes and (axis not in last or not isinstance(by, int) or by >= _SMALLEST_SPLIT):
            return axis, by
    return None


def _of_products(kernel: Kernel) -> set[Axis]:
    """Axes that are divided where rounded sums of products read their factors."""
    sums = [n for n in postorder(kernel.roots) if isinstance(n, Reduce) and n.is_rounded and n.sums_products]
    return {axis for axis, _ in divisions(n.body for n in sums)}


def _split_reduction(node: Expr, is_kept: Callable[[Expr, Axis, Axis], bool] | None = None) -> Expr:
    """The reduction with two axes in place of each that is divided, but for those that are to be kept."""
    if not isinstance(node, Reduce) or node.kind in ("argmax", "argmin"):
        return node
    for axis, by in sums_of_sums(node) if node.is_rounded else divisions((node.body,)):
        if axis in node.axes and (node.is_rounded or not isinstance(by, int) or by >= _SMALLEST_SPLIT):
            outer, inner = _halves(axis, by)
            body = substitute_axes((node.body,), {axis: outer * size(by) + inner})[node.body]
            if is_kept is not None and is_kept(body, outer, inner):
                continue
            axes = tuple(x for y in node.axes for x in ((outer, inner) if y is axis else (y,)))
            return _split_reduction(node.over(axes, body), is_kept)
    return node


def _split_lying_apart(node: Expr) -> Expr:
    """A matmul whose terms a reshape has put together has the order of one without the reshape, where they lie one
    after the other in both factors: it is the same matmul."""
    if isinstance(node, Reduce) and node.is_rounded and node.sums_products:
        return _split_reduction(node, _lies_as_one)
    return _split_reduction(node)


def _lies_as_one(body: Expr, outer: Axis, inner: Axis) -> bool:
    loads = [n for n in postorder((body,)) if isinstance(n, Load)]
    if len({n.buffer for n in loads}) != 2 or any(n.where is not None for n in loads):
        return False
    return _contiguous([load(_flat(n.buffer), (address(n.index, n.buffer),)) for n in loads], outer, inner)


def sums_of_sums(node: Reduce) -> list[tuple[Axis, Dim]]:
    """Divided axes of a rounded sum: those of what is read. Random numbers are drawn in fours, which a symbolic size
    may or may not be a multiple of."""
    return divisions(i for n in postorder((node.body,)) if isinstance(n, Load) for i in n.index)


def divisions(roots: Iterable[Expr]) -> list[tuple[Axis, Dim]]:
    """Axes that are divided by a size which divides their extent."""
    found = []
    for node in postorder(roots):
        if isinstance(node, Scalar) and node.name in ("floordiv", "mod") and node.dtype is i64:
            axis, divisor = node.args
            by = linear(divisor)
            if not by.is_constant or not is_divisor(by.constant):
                continue
            if isinstance(axis, Axis) and divide_exactly(axis.extent, by.constant) is not None:
                found.append((axis, by.constant))
    return found


# merging


def _merge_store_axes(kernel: Kernel) -> Kernel:
    for store in kernel.stores:
        for at in range(len(store.axes) - 2, -1, -1):
            outer, inner = store.axes[at], store.axes[at + 1]
            together = all(_adjacent(s.axes, outer, inner) for s in kernel.stores)
            if together and _contiguous(kernel.roots, outer, inner):
                merged = _merge_pair(kernel, outer, inner)
                if merged is not None:
                    return _merge_store_axes(merged)
    return kernel


def _adjacent(axes: tuple[Axis, ...], outer: Axis, inner: Axis) -> bool:
    if outer not in axes and inner not in axes:
        return True
    return any(a is outer and b is inner for a, b in pairwise(axes))


def _contiguous(roots: Iterable[Expr], outer: Axis, inner: Axis) -> bool:
    """Whether every address steps over the inner axis as if both were one."""
    if inner.extent == 0:
        return False
    for node in postorder(roots):
        if isinstance(node, Load):
            terms = linear(node.index[0]).terms
            if terms.get(outer, 0) != terms.get(inner, 0) * inner.extent:
                return False
    return True


def _merge_pair(kernel: Kernel, outer: Axis, inner: Axis) -> Kernel | None:
    merged, change = _joined(outer, inner)
    result = _substitute(
        kernel, change, lambda axes: tuple(merged if a is outer else a for a in axes if a is not inner)
    )
    return None if _is_divided(result.roots, merged) else result


def _joined(outer: Axis, inner: Axis) -> tuple[Axis, dict[Axis, Expr]]:
    merged = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
    extent = size(inner.extent)
    return merged, {outer: Scalar("floordiv", (merged, extent), i64), inner: Scalar("mod", (merged, extent), i64)}


def _is_divided(roots: Iterable[Expr], axis: Axis) -> bool:
    return any(
        isinstance(n, Scalar) and n.name in ("floordiv", "mod") and axis in n.args[0].free for n in postorder(roots)
    )


def _merge_reduce_axes(node: Expr) -> Expr:
    if not isinstance(node, Reduce) or len(node.axes) < 2:
        return node
    for at in range(len(node.axes) - 2, -1, -1):
        outer, inner = node.axes[at], node.axes[at + 1]
        if _contiguous((node.body,), outer, inner):
            merged, change = _joined(outer, inner)
            body = substitute_axes((node.body,), change)[node.body]
            if not _is_divided((body,), merged):
                axes = (*node.axes[:at], merged, *node.axes[at + 2 :])
                return _merge_reduce_axes(node.over(axes, body))
    return node


def _one_axis_each(node: Expr) -> Expr:
    """sum over (a, b) as sum over a of sum over b; positions of argmax count over all of its axes."""
    if not isinstance(node, Reduce) or len(node.axes) == 1:
        return node
    if node.kind in ("argmax", "argmin"):
        return _flat_argument(node)
    body, near = node.body, along(node) if node.order in REGISTERS else None
    for axis in reversed(node.axes):
        body = Reduce(node.kind, (axis,), body, "columns" if node.order and axis is not near else node.order)
    return body


def _flat_argument(node: Reduce) -> Expr:
    merged, body = node.axes[0], node.body
    for inner in node.axes[1:]:
        outer = merged
        merged, change = _joined(outer, inner)
        body = substitute_axes((body,), change)[body]
    return Reduce(node.kind, (merged,), body)


# sharing


def _share_axes(kernel: Kernel) -> Kernel:
    """Reductions bind the innermost store axis of their extent instead of their own axis."""
    inner = {s.axes[-1].extent: s.axes[-1] for s in kernel.stores if s.axes}

    def change(node: Expr) -> Expr:
        match node:
            case Reduce(_, (axis,), body) if axis.extent in inner:
                target = inner[axis.extent]
                if target is not axis and _can_rename(body, axis, target):
                    return node.over((target,), substitute_axes((body,), {axis: target})[body])
        return node

    return rewritten(kernel, change)


def _straighten_scans(kernel: Kernel) -> Kernel:
    """Every scan is read at a store axis and bound to that axis; a store that reads from the end is turned around."""
    stores = []
    for store in kernel.stores:
        change: dict[Axis, Expr] = {}
        for node in postorder((store.value,)):
            if isinstance(node, Scan) and not isinstance(node.position, Axis):
                change |= {a: size(a.extent - 1) - a for a in store.axes if node.position is size(a.extent - 1) - a}
        done = substitute_axes((*store.index, store.value), change)
        stores.append(store.rebuilt(done))

    def bind(node: Expr) -> Expr:
        if not isinstance(node, Scan):
            return node
        if not isinstance(node.position, Axis) or node.position.extent != node.axis.extent:
            raise LowerError(f"{describe(node)} is not read along an axis of its store", code="L120")
        if node.position in node.body.free and node.position is not node.axis:
            raise LowerError(f"{describe(node)} depends on the axis along which it is read", code="L120")
        body = substitute_axes((node.body,), {node.axis: node.position})[node.body]
        return node.over(node.position, body, node.position)

    return rewritten(replace(kernel, stores=tuple(stores)), bind)


def _can_rename(body: Expr, axis: Axis, target: Axis) -> bool:
    if target in body.free:
        return False
    return not any(target in bound_axes(n) and axis in n.free for n in postorder((body,)))
