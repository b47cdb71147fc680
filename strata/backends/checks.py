"""Conditions that a run looks at when it ends: a device notes what does not hold, and the host raises the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.backends.bodies import LaunchedCopies
from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.recipe import Action, Launch, Operand, number
from strata.core import bool_, u64
from strata.errors import RunError
from strata.kernel import Buffer, Const, Kernel, Load, Store, apply, size
from strata.mir import Node

_NOTED = "noted"


@dataclass(frozen=True, slots=True)
class RunCheck:
    """What is raised where a condition did not hold."""

    message: str
    code: str
    place: Any

    def error(self) -> RunError:
        return RunError(self.message, code=self.code, place=self.place)


class CheckedValue(Launchable):
    """The step of `ensure`: a copy, and a word that stays on the device and is set once the condition fails."""

    def __init__(self, node: Node, driver: DeviceDriver) -> None:
        self.node, self.driver = node, driver
        self.copies = LaunchedCopies(driver)
        self.constants: Mapping[str, np.ndarray] = {_NOTED: np.zeros(2, np.uint64)}
        op: Any = node.op
        self.checks: Mapping[str, RunCheck] = {_NOTED: RunCheck(op.message, op.code, node.origin.place)}

    def scratch(self, sizes: Mapping[str, int]) -> Sequence[int]:
        return ()

    def actions(
        self, operands: tuple[Operand, ...], sizes: Mapping[str, int], kept: Mapping[str, Operand]
    ) -> list[Action]:
        x, ok, out = operands
        note = Launch(self.driver.made(_note()), (ok, kept[_NOTED], kept[_NOTED]), {})
        return [note, *self.copies.copy(x, out, number(self.node.types[0].nbytes, sizes))]


def _note() -> Kernel:
    """Set a word where a flag is not set, else leave it as it was."""
    ok, was, word = Buffer("ok", bool_, (1,)), Buffer("was", u64, (1,)), Buffer("word", u64, (1,))
    at = (size(0),)
    value = apply("select", Load(ok, at), Load(was, at), Const(1, u64))
    return Kernel("note", (ok, was), (word,), (Store(word, (), at, value),))
