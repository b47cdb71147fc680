"""What values of graphs and of modules share: front-end functions as methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from strata.core import SymExpr
from strata.places import is_comparison, is_users

METHODS: dict[str, Callable[..., Any]] = {}


def is_operand(x: object) -> bool:
    """Whether a value can be compared with it element by element."""
    return isinstance(x, (Deferred, SymExpr, bool, int, float, complex, np.ndarray, np.generic, list, tuple))


class Deferred:
    """What the values of graphs and of modules share: comparisons, and what nobody can know before a run."""

    __slots__ = ()

    def same_as(self, other: object) -> bool:
        """Whether it is the same expression, which `==` does not ask: that compares elements."""
        raise NotImplementedError

    def _apply(self, function: str, *args: Any) -> Any:
        """A front-end function of it."""
        raise NotImplementedError

    def _unknown(self, what: str, fix: str) -> NoReturn:
        raise NotImplementedError

    def __eq__(self, other: object) -> Any:
        """Element by element where the user's program compares; for containers, whether it is the same expression."""
        if is_users[(frame := sys._getframe(1)).f_code.co_filename] and is_comparison(frame):
            return self._apply("equal", other) if is_operand(other) else NotImplemented
        return self.same_as(other)

    def __ne__(self, other: object) -> Any:
        if is_users[(frame := sys._getframe(1)).f_code.co_filename] and is_comparison(frame):
            return self._apply("not_equal", other) if is_operand(other) else NotImplemented
        return not self.same_as(other)

    def __hash__(self) -> int:
        raise NotImplementedError

    def __bool__(self) -> bool:  # noqa: PLE0304 - it never returns
        self._unknown("truth value", "where(condition, a, b), or cond(condition, f, g)")

    def __int__(self) -> int:
        self._unknown("number", "astype(x, 'i64') for whole numbers in the graph")

    def __float__(self) -> float:
        self._unknown("number", "astype(x, 'f32') for floats in the graph")

    def __complex__(self) -> complex:
        self._unknown("number", "astype(x, 'c64') for complex numbers in the graph")

    def __contains__(self, item: object) -> bool:
        self._unknown("known elements", "(x == item).any(), a value of the graph")
