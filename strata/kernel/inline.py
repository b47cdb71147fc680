"""Inlining kernels into kernels: values at an index, other sizes, one more axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from strata.core import Dim, SymExpr, sym
from strata.kernel.build import Index, KernelBuilder, View
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
    Size,
    Store,
    all_axes,
    apply,
    bound_axes,
    postorder,
    size,
)
from strata.kernel.rewrite import load, rebuild
from strata.kernel.schedule import NonTemporal, Prefetch, Schedule, parse_schedule

SizeOf = Callable[[Dim], Dim]


def element(k: KernelBuilder, store: Store, index: Index, views: Mapping[str, View], size_of: SizeOf) -> Expr:
    """What a store that goes through its buffer in order writes at an index, as an expression of another kernel."""
    return _Scope(k, dict(zip(store.axes, index, strict=True)), views, size_of, {}).value(store.value)


class _Scope:
    """Expressions with axes and buffers replaced. Loops get the builder's own axes, so that no two are mixed up."""

    def __init__(
        self,
        k: KernelBuilder,
        axes: Mapping[Axis, Expr],
        views: Mapping[str, View],
        size_of: SizeOf,
        known: Mapping[Expr, Expr],
    ) -> None:
        self.k, self.axes, self.views, self.size_of = k, axes, views, size_of
        self.known = dict(known)

    def value(self, root: Expr) -> Expr:
        for node in self._order(root):
            if node not in self.known:
                self.known[node] = self._made(node)
        return self.known[root]

    def _order(self, root: Expr) -> list[Expr]:
        """What is computed in this scope, inputs first; of what is inside a loop, what the loop does not change."""
        done: set[Expr] = set()
        order: list[Expr] = []
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, is_open = stack.pop()
            if is_open:
                order.append(node)
            elif node not in done and node not in self.known:
                done.add(node)
                stack.append((node, True))
                stack += [(x, False) for x in reversed(_needs(node))]
        return order

    def _made(self, node: Expr) -> Expr:
        match node:
            case Const():
                return node
            case Axis():
                return self.axes[node]
            case Size(dim):
                return size(self.size_of(dim))
            case Load(buffer, index, where):
                at = tuple(self.known[i] for i in index)
                if where is None:
                    return self.views[buffer.name][at]
                return self.k.guard(self.known[where], lambda: self.views[buffer.name][at], Const(0, buffer.dtype))
            case Scalar(name, args):
                return apply(name, *(self.known[a] for a in args), dtype=node.dtype)
            case Reduce(kind, axes, body):
                return self.k.reduce(
                    kind, [self.size_of(a.extent) for a in axes], lambda *own: self._in(axes, own, body)
                )
            case Scan(kind, axis, body, position, exclusive):
                return self.k.scan(
                    kind, self.size_of(axis.extent), lambda own: self._in((axis,), (own,), body),
                    self.known[position], exclusive=exclusive,
                )  # fmt: skip
        raise AssertionError(node)

    def _in(self, axes: Sequence[Axis], own: Sequence[Expr], body: Expr) -> Expr:
        changed = frozenset(axes)
        known = {node: made for node, made in self.known.items() if not node.free & changed}
        return _Scope(
            self.k, {**self.axes, **dict(zip(axes, own, strict=True))}, self.views, self.size_of, known
        ).value(body)


def _needs(node: Expr) -> list[Expr]:
    bound = frozenset(bound_axes(node))
    if not bound:
        return list(node.inputs)
    body, *rest = node.inputs
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = [body]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if not x.free & bound:
            found[x] = None
        else:
            stack += x.inputs
    return [*found, *rest]


def with_sizes(kernel: Kernel, size_of: SizeOf) -> Kernel:
    """The kernel with other sizes in place of its symbols."""

    def axis(a: Axis) -> Axis:
        return Axis(a.name, size_of(a.extent))

    def change(node: Expr, inputs: tuple[Expr, ...]) -> Expr:
        match node:
            case Axis():
                return axis(node)
            case Size(dim):
                return size(size_of(dim))
            case Load(buffer, index, where):
                return load(buffers[buffer], inputs[: len(index)], inputs[-1] if where is not None else None)
            case Reduce(_, axes, _):
                return node.over(tuple(map(axis, axes)), inputs[0])
            case Scan(_, along, _, _, _):
                return node.over(axis(along), *inputs)
        return rebuild(node, inputs)

    buffers = {b: Buffer(b.name, b.dtype, tuple(map(size_of, b.shape))) for b in kernel.buffers}
    kernel = _apart(kernel, size_of)
    return _changed(kernel, buffers, change, lambda s: tuple(map(axis, s.axes)), lambda s, made: made)


def _apart(kernel: Kernel, size_of: SizeOf) -> Kernel:
    """The kernel with other names for axes of one name that would get one extent: they would be one axis."""
    axes = dict.fromkeys((*(a for s in kernel.stores for a in s.axes), *all_axes(kernel.roots)))
    taken: set[tuple[str, Dim]] = set()
    names: dict[Axis, str] = {}
    for a in axes:
        name, count = a.name, 1
        while (name, size_of(a.extent)) in taken:
            count += 1
            name = f"{a.name}_{count}"
        taken.add((name, size_of(a.extent)))
        names[a] = name
    if all(a.name == name for a, name in names.items()):
        return kernel

    def change(node: Expr, inputs: tuple[Expr, ...]) -> Expr:
        match node:
            case Axis():
                return Axis(names[node], node.extent)
            case Reduce(_, own, _):
                return node.over(tuple(Axis(names[a], a.extent) for a in own), inputs[0])
            case Scan(_, along, _, _, _):
                return node.over(Axis(names[along], along.extent), *inputs)
        return rebuild(node, inputs)

    same = {b: b for b in kernel.buffers}
    return _changed(
        kernel, same, change, lambda s: tuple(Axis(names[a], a.extent) for a in s.axes), lambda s, made: made
    )


def with_batch(kernel: Kernel, batched: Sequence[bool]) -> tuple[Kernel, str]:
    """The kernel over one axis more, the first of all outputs and of some inputs, and the name of that axis's size."""
    names = {*kernel.symbols(), *(a.name for s in kernel.stores for a in s.axes)}
    names |= {a.name for a in all_axes(kernel.roots)}
    name = next(f"rows{n}" for n in range(len(names) + 1) if f"rows{n}" not in names)
    extent: SymExpr = sym(name, 0)
    row = Axis(name, extent)
    has_rows = {b.name for b, one in zip(kernel.inputs, batched, strict=True) if one} | set(kernel.output_names)
    buffers = {b: Buffer(b.name, b.dtype, (extent, *b.shape)) if b.name in has_rows else b for b in kernel.buffers}

    def change(node: Expr, inputs: tuple[Expr, ...]) -> Expr:
        match node:
            case Load(buffer, index, where):
                first = (row,) if buffer.name in has_rows else ()
                condition = inputs[-1] if where is not None else None
                return load(buffers[buffer], (*first, *inputs[: len(index)]), condition)
        return rebuild(node, inputs)

    made = _changed(kernel, buffers, change, lambda s: (row, *s.axes), lambda s, index: (row, *index))
    return replace(made, schedule=""), name


def with_names(kernel: Kernel, names: Mapping[str, str]) -> Kernel:
    """The kernel with other names for its buffers, in its schedule too."""
    buffers = {b: replace(b, name=names[b.name]) for b in kernel.buffers}

    def change(node: Expr, inputs: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Load):
            count = len(node.index)
            return load(buffers[node.buffer], inputs[:count], inputs[count] if node.where is not None else None)
        return rebuild(node, inputs)

    actions = [
        replace(a, buffer=names.get(a.buffer, a.buffer)) if isinstance(a, (NonTemporal, Prefetch)) else a
        for a in parse_schedule(kernel.schedule).actions
    ]
    made = _changed(kernel, buffers, change, lambda s: s.axes, lambda s, index: index)
    return replace(made, schedule=str(Schedule(tuple(actions))))


def _changed(
    kernel: Kernel,
    buffers: Mapping[Buffer, Buffer],
    change: Callable[[Expr, tuple[Expr, ...]], Expr],
    axes_of: Callable[[Store], tuple[Axis, ...]],
    index_of: Callable[[Store, tuple[Expr, ...]], tuple[Expr, ...]],
) -> Kernel:
    done: dict[Expr, Expr] = {}
    for node in postorder(kernel.roots):
        done[node] = change(node, tuple(done[x] for x in node.inputs))
    stores = tuple(
        Store(buffers[s.buffer], axes_of(s), index_of(s, tuple(done[i] for i in s.index)), done[s.value])
        for s in kernel.stores
    )
    inputs, outputs = (tuple(buffers[b] for b in part) for part in (kernel.inputs, kernel.outputs))
    return Kernel(kernel.name, inputs, outputs, stores, kernel.schedule)
