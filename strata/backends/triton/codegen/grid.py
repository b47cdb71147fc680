"""Programs along a second axis of a grid: CUDA has at most 65,535 there, so that more of them go along a third."""

from __future__ import annotations

from strata.backends.triton.codegen.emit import TritonEmitter
from strata.backends.triton.schedules.schedule import known
from strata.core import Dim, dim_min

MOST = 65535
TURN = 1 << 15  # programs along the second axis, where there is a third


def programs_beside(count: Dim) -> tuple[Dim, ...]:
    """The grid behind its first axis."""
    if known(count) <= MOST:
        return (count,)
    return dim_min(count, TURN), (count + TURN - 1) // TURN


def place_beside(e: TritonEmitter, name: str, count: Dim) -> None:
    """The number of the program among them."""
    if known(count) <= MOST:
        e.write(f"{name} = tl.program_id(1)")
        return
    e.write(f"{name} = tl.program_id(1) + tl.program_id(2) * {TURN}")
    e.write(f"if {name} >= {e.size(count)}:")
    with e.indented():
        e.write("return")
