"""Loop nests: in which loop each value of a kernel is computed.

A nest is a tree of blocks. A block computes values once per iteration of the loops around it, in order: scalars, loops
that reduce or scan, stores, and loops over further axes of the stores. A value sits in the outermost block where all
of its axes are known; so a softmax is a block per row with two reduction loops and one map loop, computed by no rule
about softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strata.core import dim_prod
from strata.kernel.algebra import linear
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
    bound_axes,
    postorder,
)
from strata.kernel.order import REGISTERS, sum_bytes

_SQUARE = 4  # points along an axis that make it worth transposing in tiles
_FAR = 4 << 20  # bytes of a result that does not stay in a core's own cache


@dataclass(frozen=True, slots=True)
class Compute:
    """One value, needed by later steps or by loops inside."""

    node: Expr


@dataclass(frozen=True, slots=True)
class ReduceLoop:
    """Reductions over one axis, done in one loop; the body computes what they reduce."""

    axis: Axis
    reduces: tuple[Reduce, ...]
    body: LoopBlock


@dataclass(frozen=True, slots=True)
class MapLoop:
    """A loop over an axis of stores; one that carries running reductions along goes through it in order."""

    axis: Axis
    body: LoopBlock
    scans: tuple[Scan, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStep:
    store: Store


@dataclass(frozen=True, slots=True)
class LoopBlock:
    steps: tuple[Compute | ReduceLoop | MapLoop | StoreStep, ...]


def make_nest(kernel: Kernel) -> LoopBlock:
    """The nest of a normalized kernel, loops in the order of `loop_order`."""
    order = loop_order(kernel)
    stores = [(tuple(sorted(s.axes, key=order.index)), s) for s in kernel.stores]
    return _block(stores, (), frozenset())


def loop_order(kernel: Kernel) -> list[Axis]:
    """All store axes, outermost first: those that reductions depend on, then the rest, each in the stores' order.

    In a transpose, the axis along which loads are contiguous goes right around the innermost one: the two are turned
    in tiles, whatever is between them in memory. Rows that only change places are moved in the order of the reads."""
    axes = list(dict.fromkeys(a for s in kernel.stores for a in s.axes))
    reductions = [n for n in postorder(kernel.roots) if isinstance(n, (Reduce, Scan))]
    scanned = {n.position for n in reductions if isinstance(n, Scan)}
    shared = {a for a in axes if a not in scanned and any(a in n.free for n in reductions)}
    inner = {a for n in reductions for a in bound_axes(n)} if len(shared) < len(axes) else set()
    ranked = sorted(axes, key=lambda a: (a not in shared, a in inner, axes.index(a)))
    return ranked if reductions else _with_squares(kernel, axes)


def _with_squares(kernel: Kernel, axes: list[Axis]) -> list[Axis]:
    """Store axes in an order in which loads can be transposed in tiles."""
    if len(axes) < 3 or any(len(s.axes) < len(axes) for s in kernel.stores):
        return axes
    *outer, last = axes
    loads = [linear(n.index[0]).terms for n in postorder(kernel.roots) if isinstance(n, Load)]
    for axis in outer[:-1]:
        is_long = not isinstance(axis.extent, int) or axis.extent >= _SQUARE
        if is_long and any(terms.get(axis) == 1 and terms.get(last, 0) not in (0, 1) for terms in loads):
            return [*(a for a in outer if a is not axis), axis, last]
    return _as_read(kernel, axes)


def _as_read(kernel: Kernel, axes: list[Axis]) -> list[Axis]:
    """Rows of large arrays are moved in the order in which they lie where they are read: memory is quick along them,
    and whole lines can be written anywhere."""
    *outer, last = axes
    if any(known_bytes(s.buffer) < _FAR for s in kernel.stores):
        return axes
    loads = [linear(n.index[0]).terms for n in postorder(kernel.roots) if isinstance(n, Load)]
    whole = [terms for terms in loads if all(isinstance(terms.get(a), int) for a in axes)]
    orders = [sorted(outer, key=lambda a: terms[a], reverse=True) for terms in whole]
    rows = all(terms[last] == 1 and len(terms) == len(axes) for terms in whole)
    return [*orders[0], last] if whole and rows and all(o == orders[0] for o in orders) else axes


def known_bytes(buffer: Buffer) -> int:
    """The size of a buffer, 0 where it is symbolic."""
    count = dim_prod(buffer.shape)
    return count * buffer.dtype.itemsize if isinstance(count, int) else 0


def _is_leaf(node: Expr) -> bool:
    return isinstance(node, (Const, Axis, Size))


def _invariants(roots: Iterable[Expr], varying: frozenset[Axis], scope: frozenset[Axis]) -> list[Expr]:
    """The largest subexpressions that do not depend on the varying axes and are known in the scope."""
    found: dict[Expr, None] = {}
    seen: set[tuple[Expr, frozenset[Axis]]] = set()
    stack = [(root, varying) for root in roots]
    while stack:
        node, blocked = stack.pop()
        if _is_leaf(node) or (node, blocked) in seen:
            continue
        seen.add((node, blocked))
        if not (node.free & blocked) and node.free <= scope:
            found[node] = None
            continue
        bound = bound_axes(node)
        if bound:
            body, *rest = node.inputs
            stack.append((body, blocked | frozenset(bound)))
            stack += [(x, blocked) for x in rest]
        else:
            stack += [(x, blocked) for x in node.inputs]
    return list(found)


def _needs(node: Expr, scope: frozenset[Axis]) -> tuple[Expr, ...]:
    """What a block must have computed before a node; addresses are worked out where used, but for loops in them."""
    match node:
        case Load(_, index, where):
            loops = _outermost_loops(index)
            return loops if where is None else (*loops, where)
        case Scalar(_, args):
            return args
        case Reduce(_, axes, body):
            return tuple(_invariants((body,), frozenset(axes), scope))
        case Scan(_, _, body, _, _):
            return (body,)
        case _:
            return ()


def _outermost_loops(roots: Iterable[Expr]) -> tuple[Expr, ...]:
    """Reductions and scans below the roots that are not inside another one's body."""
    found: dict[Expr, None] = {}
    stack, seen = list(roots), set[Expr]()
    while stack:
        node = stack.pop()
        if isinstance(node, (Reduce, Scan)):
            found[node] = None
        elif node not in seen:  # what is used twice is one node, and chains of them have many ways through
            seen.add(node)
            stack += node.inputs
    return tuple(found)


def _scans_along(axis: Axis, roots: Iterable[Expr]) -> tuple[Scan, ...]:
    """Running reductions that are read where the loop over an axis stands."""
    return tuple(n for n in postorder(roots) if isinstance(n, Scan) and n.position is axis)


def _block(
    stores: list[tuple[tuple[Axis, ...], Store]],
    roots: tuple[Expr, ...],
    known: frozenset[Expr],
    scope: frozenset[Axis] = frozenset(),
) -> LoopBlock:
    """A block that has the roots at its end and performs the stores, each with the axes it has still to loop over."""
    here = [s for axes, s in stores if not axes]
    inner: dict[Axis, list[tuple[tuple[Axis, ...], Store]]] = {}
    for axes, store in stores:
        if axes:
            inner.setdefault(axes[0], []).append((axes[1:], store))
    wanted: dict[Expr, None] = dict.fromkeys(roots)
    for store in here:
        wanted[store.value] = None
        wanted |= dict.fromkeys(_outermost_loops(store.index))
    for axis, below in inner.items():
        targets = [e for _, s in below for e in (*s.index, s.value)]
        wanted |= dict.fromkeys(_invariants(targets, frozenset((axis,)), scope))
    ordered = _ordered(wanted, known, scope)
    available = known | frozenset(n for n in ordered)
    steps = _in_levels(ordered, available, scope)
    steps += [StoreStep(s) for s in here]
    for axis, below in inner.items():
        visible = frozenset(n for n in available if axis not in n.free)
        scans = _scans_along(axis, [e for _, s in below for e in (*s.index, s.value)])
        steps.append(MapLoop(axis, _block(below, scans, visible, scope | {axis}), scans))
    return LoopBlock(tuple(steps))


def _ordered(wanted: Iterable[Expr], known: frozenset[Expr], scope: frozenset[Axis]) -> list[Expr]:
    """Postorder over what the block computes, without recursion."""
    done: dict[Expr, None] = {}
    for root in wanted:
        if root in done or root in known or _is_leaf(root):
            continue
        stack = [(root, iter(_needs(root, scope)))]
        while stack:
            node, rest = stack[-1]
            for child in rest:
                if child not in done and child not in known and not _is_leaf(child):
                    stack.append((child, iter(_needs(child, scope))))
                    break
            else:
                done[node] = None
                stack.pop()
    return list(done)


def _sharing(reduces: Iterable[Reduce]) -> list[list[Reduce]]:
    """Reductions that share a loop: over one axis and, where they are rounded, in one order and in as many chains."""
    loops: dict[Axis, dict[tuple[str, int], list[Reduce]]] = {}
    for node in reduces:
        place = (node.order, sum_bytes(node.dtype) if node.order in REGISTERS else 0)
        loops.setdefault(node.axes[0], {}).setdefault(place, []).append(node)
    for found in loops.values():
        free = found.pop(("", 0), None) if len(found) > 1 else None
        if free is not None:
            next(iter(found.values())).extend(free)
    return [nodes for found in loops.values() for nodes in found.values()]


def _in_levels(
    ordered: list[Expr], available: frozenset[Expr], scope: frozenset[Axis]
) -> list[Compute | ReduceLoop | MapLoop | StoreStep]:
    """Independent reductions over one axis share a loop: a level holds values that depend on as many loops in a row."""
    level: dict[Expr, int] = {}
    for node in ordered:
        below = max((level.get(n, 0) for n in _needs(node, scope)), default=0)
        level[node] = below + isinstance(node, Reduce)
    steps: list[Compute | ReduceLoop | MapLoop | StoreStep] = []
    for depth in range(max(level.values(), default=0) + 1):
        for nodes in _sharing(n for n in ordered if level[n] == depth and isinstance(n, Reduce)):
            axis = nodes[0].axes[0]
            visible = frozenset(n for n in available if axis not in n.free and n not in nodes)
            bodies = tuple(dict.fromkeys(n.body for n in nodes))
            steps.append(ReduceLoop(axis, tuple(nodes), _block([], bodies, visible, scope | {axis})))
        steps += [Compute(n) for n in ordered if level[n] == depth and not isinstance(n, Reduce)]
    return steps
