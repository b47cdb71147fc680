"""How loops walk through memory: contiguous runs, rows, and where they begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strata.core import Dim
from strata.kernel.algebra import linear
from strata.kernel.ir import Axis, Buffer, Load, Reduce, Scan, Store
from strata.kernel.nest import Compute, LoopBlock, MapLoop, ReduceLoop
from strata.kernel.order import REGISTERS, Machine
from strata.kernel.schedule import Loop, walk_loops

_LINE = 64  # bytes of a cache line
_SCANNED = ("sum", "prod", "max", "min")  # whose running form may go over the lanes of a register


def loops_with_outer(block: LoopBlock, around: tuple[Loop, ...] = ()) -> Iterator[tuple[Loop, tuple[Loop, ...]]]:
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


def _rounded(loop: Loop) -> Reduce | Scan | None:
    """The first reduction of a loop, or the first that runs along it, whose terms have an order."""
    found: Sequence[Reduce | Scan] = loop.reduces if isinstance(loop, ReduceLoop) else loop.scans
    return next((r for r in found if r.order), None)


def goes_along(loop: Loop) -> bool:
    """Whether a loop goes in vectors, whatever is known of its length: it sums rows."""
    found = _rounded(loop)
    return found is not None and found.order in REGISTERS and may_run_in_vectors(loop)


def chains_of(loop: Loop, machine: Machine) -> int:
    """The chains of the sums of rows in a loop; 0 where there are none."""
    found = _rounded(loop)
    is_row = isinstance(found, Reduce) and found.order in REGISTERS
    return REGISTERS[found.order] * machine.lanes(found.dtype) if found is not None and is_row else 0


def lanes_along(loop: Loop, machine: Machine) -> int:
    """Lanes of one register of what runs along a loop; 0 where nothing does."""
    found = _rounded(loop)
    return machine.lanes(found.dtype) if isinstance(found, Scan) else 0


def runs_in_vectors(loop: Loop) -> bool:
    """Whether the points of a loop may be done side by side: neither its own terms nor those of a loop inside it would
    then be joined in another order."""
    found = _rounded(loop)
    is_in_order = found is not None and found.order not in REGISTERS
    return may_run_in_vectors(loop) and not is_in_order and not any(map(goes_along, walk_loops(loop.body)))


def may_run_in_vectors(loop: Loop) -> bool:
    """Whether the points of a loop can be done side by side, in whatever order its terms are joined then."""
    scans = loop.scans if isinstance(loop, MapLoop) else ()
    inner = any(isinstance(s, (MapLoop, ReduceLoop)) for s in loop.body.steps)
    return not scans or (not inner and all(s.kind in _SCANNED and not s.dtype.is_bool for s in scans))
