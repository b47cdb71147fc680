"""Work in counts: what a test can pin on a machine that is busy with something else."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType


def codes(fn: Callable[[], object]) -> list[CodeType]:
    """The Python functions that a call enters in this thread, in their order; none of what the collector ends."""
    found: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(frame.f_code)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return found


def calls(fn: Callable[[], object]) -> int:
    """How many Python functions a call enters: a measure of work that does not flicker."""
    return len(codes(fn))
