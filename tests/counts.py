"""Work in counts: what a test can pin on a machine that is busy with something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType


def codes(fn: Callable[[], object]) -> list[CodeType]:
    """The Python functions that a call enters in this thread, in their order."""
    found: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return found


def calls(fn: Callable[[], object]) -> int:
    """How many Python functions a call enters: a measure of work that does not flicker."""
    count = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count
