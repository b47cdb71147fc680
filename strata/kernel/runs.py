"""How loops go through memory: what is around each, the rows that it reads, and where runs begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strata.core import Dim
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Buffer, Load, Store
from strata.kernel.nest import Block, Compute, MapLoop, ReduceLoop
from strata.kernel.schedule import Loop

_LINE = 64  # bytes of a cache line


def loops_with_outer(block: Block, around: tuple[Loop, ...] = ()) -> Iterator[tuple[Loop, tuple[Loop, ...]]]:
    for step in block.steps:
        if isinstance(step, (MapLoop, ReduceLoop)):
            yield step, around
            yield from loops_with_outer(step.body, (*around, step))


def rows_of(loops: Sequence[Loop], outer: Axis) -> dict[Buffer, tuple[int, int]]:
    """Buffers that loops read along their axis, a row for each point of an outer one: the first that does, and the
    elements from row to row."""
    found: dict[Buffer, tuple[int, int]] = {}
    for at, loop in enumerate(loops):
        for step in loop.body.steps:
            if isinstance(step, Compute) and isinstance(step.node, Load) and step.node.where is None:
                terms = linear(step.node.index[0]).terms
                row = terms.get(outer)
                plain = all(isinstance(atom, Axis) for atom in terms) and terms.get(loop.axis) == 1
                if plain and isinstance(row, int) and row > 1:
                    found.setdefault(step.node.buffer, (at, row))
    return found


def in_order(load: Load, loops: tuple[Loop, ...]) -> bool:
    """Whether the loops, innermost last, visit the elements one after the other."""
    terms = linear(load.index[0]).terms
    expected: Dim = 1
    for loop in reversed(loops):
        if loop.axis not in terms:
            continue
        if terms[loop.axis] != expected:
            return False
        expected = expected * loop.axis.extent
    return load.where is None and loops[-1].axis in terms and all(isinstance(atom, Axis) for atom in terms)


def lines_up(store: Store, axis: Axis) -> bool:
    """Whether all rows of a result along an axis begin and end where cache lines do, if the first one begins there."""
    form, item = linear(store.index[0]), store.buffer.dtype.itemsize
    steps = [axis.extent, form.constant, *(step for atom, step in form.terms.items() if atom is not axis)]
    return all(isinstance(step, int) and step * item % _LINE == 0 for step in steps)
