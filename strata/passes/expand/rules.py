"""The table of expansions: functions that build an op from others, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strata.mir import Value

Expansion = Callable[..., Sequence[Value] | None]
EXPANSIONS: dict[str, Expansion] = {}
LOOPS: set[str] = set()
"""Names of ops whose expansions have loops over graphs."""


def expands(*names: str, loops: bool = False) -> Callable[[Expansion], Expansion]:
    """Register how an op is built; the function gives None where it cannot be."""

    def keep(build: Expansion) -> Expansion:
        EXPANSIONS.update(dict.fromkeys(names, build))
        if loops:
            LOOPS.update(names)
        return build

    return keep


def is_static(*values: Any) -> bool:
    """Whether the sizes of all values are known."""
    return all(isinstance(d, int) for x in values for d in x.shape)
