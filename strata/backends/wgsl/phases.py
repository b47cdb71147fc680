"""A kernel as a sequence of dispatches: reductions that every point would repeat get their own dispatch."""

from __future__ import annotations

from dataclasses import replace

from strata.backends.wgsl.scans import split_scan
from strata.backends.wgsl.tiles import find_product, flat_sums
from strata.core import i64
from strata.kernel import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    MapLoop,
    Phases,
    Reduce,
    SplitLimits,
    Store,
    StoreStep,
    device_form,
    make_nest,
    postorder,
    split_reductions,
    with_names,
    with_nodes,
)

LIMITS = SplitLimits(terms=1 << 15, lines=32, part_bytes=32 << 10, parts=128, open_parts=64)


def phases_of(kernel: Kernel) -> Phases:
    """Normalized kernels, to be dispatched one after the other, and the buffers between them."""
    normal = device_form(kernel)
    flat = _flat_product(normal)
    product = find_product(make_nest(flat))
    if product is not None and product.fills_a_device:
        return Phases((flat,))
    parted = split_scan(normal) or split_reductions(normal, LIMITS)
    made: list[Kernel] = []
    scratch = list(parted.scratch)
    for phase in parted.kernels:
        before, rest, buffers = _hoisted(phase, len(scratch))
        scratch += buffers
        for one in (*before, rest):
            made += [_flat_product(part) for part in _apart(one)]
    return Phases(tuple(made), tuple(scratch))


def phases_of_all(given: Phases) -> tuple[Kernel, Phases]:
    """The same for kernels that run one after the other, and a kernel with the buffers of them all."""
    made: list[Kernel] = []
    between = list(given.scratch)
    for number, kernel in enumerate(given.kernels):
        parts = phases_of(kernel)
        names = {b.name: f"part{1000 * (number + 1) + n}" for n, b in enumerate(parts.scratch)}
        for part in parts.kernels:
            known = {b.name: names.get(b.name, b.name) for b in part.buffers}
            made.append(with_names(part, known))
        between += [replace(b, name=names[b.name]) for b in parts.scratch]
    outer = {b.name for b in given.scratch}
    written = [b for k in given.kernels for b in k.outputs if b.name not in outer]
    read = {b.name: b for k in given.kernels for b in k.inputs if b.name not in outer and b not in written}
    return Kernel("own", tuple(read.values()), tuple(written), ()), Phases(tuple(made), tuple(between))


def _hoisted(kernel: Kernel, number: int) -> tuple[list[Kernel], Kernel, list[Buffer]]:
    """Reductions that depend on no axis of the stores around them, computed once into a buffer of one element."""
    if not any(s.axes for s in kernel.stores):
        return [], kernel, []
    nodes = postorder(kernel.roots)
    inside: set[Expr] = set()  # nodes below a reduction, which are computed with it
    for node in nodes:
        if isinstance(node, Reduce) and not node.free:
            inside.update(postorder((node.body,)))
    found = [n for n in nodes if isinstance(n, Reduce) and not n.free and n not in inside]
    if not found:
        return [], kernel, []
    buffers = [Buffer(f"whole{number + i}", node.dtype, (1,)) for i, node in enumerate(found)]
    zero = Const(0, i64)
    change: dict[Expr, Expr] = {n: Load(b, (zero,)) for n, b in zip(found, buffers, strict=True)}
    stores = tuple(Store(b, (), (zero,), n) for n, b in zip(found, buffers, strict=True))
    first = Kernel(f"{kernel.name}_whole", _read(stores, kernel.inputs), tuple(buffers), stores)
    rest = with_nodes(kernel, change)
    return [first], replace(rest, inputs=_read(rest.stores, (*kernel.inputs, *buffers))), buffers


def _read(stores: tuple[Store, ...], inputs: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    used = {n.buffer for n in postorder([e for s in stores for e in (*s.index, s.value)]) if isinstance(n, Load)}
    return tuple(b for b in inputs if b in used)


def _apart(kernel: Kernel) -> list[Kernel]:
    """Stores that share no loop, each with those that do, in their own kernel: a grid is over one space."""
    roots = [s for s in make_nest(kernel).steps if isinstance(s, (MapLoop, StoreStep))]
    if len(roots) < 2:
        return [kernel]
    groups: dict[Axis | None, list[Store]] = {}
    for store in kernel.stores:
        groups.setdefault(_outermost(store, roots), []).append(store)
    made = []
    for number, stores in enumerate(groups.values()):
        part = tuple(stores)
        written = {s.buffer for s in part}
        outputs = tuple(b for b in kernel.outputs if b in written)
        made.append(Kernel(f"{kernel.name}_{number}", _read(part, kernel.inputs), outputs, part))
    return made


def _outermost(store: Store, roots: list[MapLoop | StoreStep]) -> Axis | None:
    return next((r.axis for r in roots if isinstance(r, MapLoop) and r.axis in store.axes), None)


def _flat_product(kernel: Kernel) -> Kernel:
    """The kernel with the terms of its sums counted through, where that makes it a matmul for tiles."""
    flat = flat_sums(kernel)
    return flat if flat is not kernel and find_product(make_nest(flat)) is not None else kernel
