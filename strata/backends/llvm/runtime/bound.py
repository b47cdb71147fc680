"""Programs of a plan for given sizes, and the parts of a plan that host steps separate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.backends.llvm.runtime.calls import ProgramCall
from strata.backends.llvm.runtime.program import BoundProgram
from strata.lir import Step


@dataclass(frozen=True)
class PlanSegment:
    """Kernels in a row, or one step that runs in Python."""

    steps: tuple[int, ...]
    host: Step | None


@dataclass(frozen=True)
class BoundPlan:
    """A program for one set of sizes, the addresses that stay the same between runs, and calls that are free."""

    programs: list[BoundProgram | None]
    single: BoundProgram | None  # the program, when no host step splits it
    offsets: dict[str, int]
    arena: int
    addresses: list[int]
    free: list[ProgramCall]
    keep: list[Any]  # tables that native ops read, and the arrays behind the addresses
    ranges: dict[int, tuple[int, int]]  # steps of the program that an entry of the schedule became
    is_direct: bool  # one native call does it all
