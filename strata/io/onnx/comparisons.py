"""Comparisons of sizes by name: what shape guards are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from strata.core import Dim, known_positive
from strata.errors import SymbolError

Comparison = Callable[[Any, Any], bool]


def equal_sizes(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal, where bounds decide."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if a == b:
        return True
    if isinstance(a, int) and a <= 0 and known_positive(b):
        return False
    if isinstance(b, int) and b <= 0 and known_positive(a):
        return False
    raise SymbolError(f"whether {a} equals {b} is not known")


def less(a: Dim, b: Dim) -> bool:
    return bool(a < b)


def less_or_equal(a: Dim, b: Dim) -> bool:
    return bool(a <= b)


def greater(a: Dim, b: Dim) -> bool:
    return bool(a > b)


def greater_or_equal(a: Dim, b: Dim) -> bool:
    return bool(a >= b)


COMPARISONS: Final[dict[str, Comparison]] = {
    f.__name__: f for f in (equal_sizes, less, less_or_equal, greater, greater_or_equal)
}
