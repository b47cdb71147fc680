"""What a loop computes, and what that takes: elements in a register, bytes of a row."""

from __future__ import annotations

from collections.abc import Iterator

from strata.core import bounds, i64
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Expr, Reduce, Scalar, Scan
from strata.kernel.nest import Compute, MapLoop, ReduceLoop, StoreStep
from strata.kernel.order import Machine
from strata.kernel.schedule import Loop, walk_loops

_ROW_BYTES = 256 << 10  # the longest row kept on a thread's stack


def register_lanes(loop: Loop, machine: Machine) -> int:
    """Elements of the widest type computed in a loop that fill one register. Places are counted in one register for
    all lanes: what is added up to find an element takes none."""
    values = list(loop_values(loop))
    places = {n for n in values if _is_place(n)}
    used = {x for n in values if n not in places and isinstance(n, (Scalar, Reduce, Scan)) for x in n.inputs}
    stored = {
        s.store.value for inner in (loop, *walk_loops(loop.body)) for s in inner.body.steps if isinstance(s, StoreStep)
    }
    widest = max((element_bytes(n) for n in values if n not in places or n in used or n in stored), default=4)
    return max(1, machine.vector_bytes // widest)


def _is_place(node: Expr) -> bool:
    """A sum of axes and multiples of them."""
    is_sum = isinstance(node, Scalar) and node.dtype is i64 and node.name in ("add", "sub", "mul")
    return is_sum and all(isinstance(atom, Axis) for atom in linear(node).terms)


def loop_values(loop: Loop) -> Iterator[Expr]:
    """What a loop computes, inner loops included."""
    if isinstance(loop, ReduceLoop):
        yield from loop.reduces
    stack = [loop.body]
    while stack:
        for step in stack.pop().steps:
            match step:
                case Compute(node):
                    yield node
                case StoreStep(store):
                    yield store.value
                case ReduceLoop():
                    yield from step.reduces
                    stack.append(step.body)
                case MapLoop():
                    stack.append(step.body)


def element_bytes(node: Expr) -> int:
    if isinstance(node, Reduce) and node.kind in ("argmax", "argmin"):  # positions are carried in four bytes
        return max(4, element_bytes(node.body))
    size = node.dtype.itemsize // (2 if node.dtype.is_complex else 1)
    return 4 if node.dtype.is_float and size < 4 else size


def row_is_kept(axis: Axis) -> bool:
    """Whether a row along an axis is short enough to be kept on a thread's stack, in elements of any type."""
    high = bounds(axis.extent)[1]
    return high is not None and high * 8 <= _ROW_BYTES
