"""Conditions that a run looks at when it ends: a device notes what does not hold, and the host raises the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from strata.backends.bodies import LaunchedCopies
from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.recipe import Action, Launch, Operand, number
from strata.core import bool_, i64
from strata.errors import StrataError
from strata.kernel import Axis, Buffer, Const, Kernel, Load, Store, apply, size
from strata.mir import Node

_NOTED = "noted"
NUMBERS = 4  # of 8 bytes, that a device notes: whether a condition failed, and what its error tells


@dataclass(frozen=True, slots=True)
class RunCheck:
    """What is raised where a condition did not hold."""

    failure: Callable[[np.ndarray], StrataError]
    place: Any
    waits: bool
    """Whether a run waits for it; else it is looked at when something is read."""

    def error(self, noted: np.ndarray) -> StrataError:
        made = self.failure(noted)
        made.place = made.place or self.place
        return made


class CheckedValue(Launchable):
    """The step of an op that ensures something: a copy, and numbers that stay on the device and are set once the
    condition fails."""

    def __init__(self, node: Node, driver: DeviceDriver) -> None:
        self.node, self.driver = node, driver
        self.copies = LaunchedCopies(driver)
        self.constants: Mapping[str, np.ndarray] = {_NOTED: np.zeros(NUMBERS, np.int64)}
        make, failure, waits = CHECKS[node.op.name]
        self.note = make()
        check = RunCheck(partial(failure, node.op), node.origin.place, waits)
        self.checks: Mapping[str, RunCheck] = {_NOTED: check}

    def scratch(self, sizes: Mapping[str, int]) -> Sequence[int]:
        return ()

    def actions(
        self, operands: tuple[Operand, ...], sizes: Mapping[str, int], kept: Mapping[str, Operand]
    ) -> list[Action]:
        x, condition, out = operands
        note = Launch(self.driver.made(self.note), (condition, kept[_NOTED], kept[_NOTED]), {})
        return [note, *self.copies.copy(x, out, number(self.node.types[0].nbytes, sizes))]


def _note() -> Kernel:
    """Set a number where a flag is not set, else leave it as it was."""
    ok, was, noted = Buffer("ok", bool_, (1,)), Buffer("was", i64, (1,)), Buffer("noted", i64, (1,))
    at = (size(0),)
    value = apply("select", Load(ok, at), Load(was, at), Const(1, i64))
    return Kernel("note", (ok, was), (noted,), (Store(noted, (), at, value),))


def _note_ids() -> Kernel:
    """Keep what was found, where something was."""
    found, was, noted = (Buffer(name, i64, (NUMBERS,)) for name in ("found", "was", "noted"))
    axis = (Axis("i", NUMBERS),)
    is_bad = apply("ne", Load(found, (size(0),)), Const(0, i64))
    value = apply("select", is_bad, Load(found, axis), Load(was, axis))
    return Kernel("note_ids", (found, was), (noted,), (Store(noted, axis, axis, value),))


CHECKS: dict[str, tuple[Callable[[], Kernel], Callable[[Any, np.ndarray], StrataError], bool]] = {
    "ensure": (_note, lambda op, noted: op.failure(), True),
    "ensure_ids": (_note_ids, lambda op, noted: op.failure(noted), False),
}
"""By op: the kernel that notes a failure, the error that it stands for, and whether a run waits for it."""
