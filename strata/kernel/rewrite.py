"""Expressions of kernels with other inputs or axes, simplified again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace as changed

from strata.kernel.ir import Axis, Buffer, Const, Expr, Kernel, Load, Reduce, Scalar, Scan, apply, bound_axes, postorder


def as_stored(node: Expr) -> Expr:
    """A value without the rounding that a store does anyway."""
    match node:
        case Scalar("cast", (x,)) if x.dtype is node.dtype:
            return x
    return node


def rebuild(node: Expr, inputs: tuple[Expr, ...]) -> Expr:
    """The node with other inputs, simplified again."""
    match node:
        case Load():
            count = len(node.index)
            return load(node.buffer, inputs[:count], inputs[count] if node.where is not None else None)
        case Scalar():
            return apply(node.name, *inputs, dtype=node.dtype)
        case Reduce():
            return node.over(node.axes, inputs[0])
        case Scan():
            return node.over(node.axis, *inputs)
        case _:
            return node


def load(buffer: Buffer, index: tuple[Expr, ...], where: Expr | None = None) -> Expr:
    """buffer[index]; a condition that is known disappears."""
    match where:
        case Const(value, _):
            return Load(buffer, index) if value else Const(0, buffer.dtype)
        case _:
            return Load(buffer, index, where)


def substitute_axes(roots: Iterable[Expr], replace: dict[Axis, Expr]) -> dict[Expr, Expr]:
    """A map from every node below the roots to the node with free axes replaced. Bound axes are left alone."""
    done: dict[Expr, Expr] = {}
    names = frozenset(replace)
    for node in postorder(roots):
        if not (node.free & names):
            done[node] = node
        elif isinstance(node, Axis):
            done[node] = replace[node]
        elif isinstance(node, (Reduce, Scan)) and names & frozenset(bound_axes(node)):
            inner = {a: e for a, e in replace.items() if a not in bound_axes(node)}
            body = substitute_axes((node.body,), inner)[node.body]
            rest = tuple(done[x] for x in node.inputs[1:])
            done[node] = rebuild(node, (body, *rest))
        else:
            done[node] = rebuild(node, tuple(done.get(x, x) for x in node.inputs))
    return done


def rebuild_with(node: Expr, done: Mapping[Expr, Expr]) -> Expr:
    """The node with what its inputs have become."""
    inputs = tuple(done[x] for x in node.inputs)
    return node if inputs == node.inputs else rebuild(node, inputs)


def replaced(roots: Iterable[Expr], change: Mapping[Expr, Expr]) -> dict[Expr, Expr]:
    """A map from every node below the roots to the node with other expressions in place of some, axes too."""
    done: dict[Expr, Expr] = {}
    for node in postorder(roots):
        done[node] = change[node] if node in change else rebuild_with(node, done)
    return done


def rewritten(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with every node rebuilt from changed inputs, then changed."""
    done: dict[Expr, Expr] = {}
    for node in postorder(kernel.roots):
        done[node] = change(rebuild_with(node, done))
    return with_roots(kernel, done)


def with_nodes(kernel: Kernel, change: Mapping[Expr, Expr]) -> Kernel:
    """The kernel with other expressions in place of some; itself where they are the same."""
    return with_roots(kernel, replaced(kernel.roots, change))


def with_roots(kernel: Kernel, done: Mapping[Expr, Expr]) -> Kernel:
    """The kernel with what its roots have become; itself where they are the same."""
    stores = tuple(s.rebuilt(done) for s in kernel.stores)
    return kernel if stores == kernel.stores else changed(kernel, stores=stores)
