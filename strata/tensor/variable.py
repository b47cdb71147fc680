"""Variables: named sizes with bounds, free or bound to a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strata.arguments import own_checks
from strata.core import Dim, SymExpr, here, sym
from strata.errors import SymbolError
from strata.kinds import whole_number


class Variable(SymExpr):
    """A symbolic size: `Variable("N", 1, 4096)`. Both bounds are included; the name is its identity."""

    __slots__ = ("hi", "lo", "name")

    def __init__(self, name: str, lo: int = 1, hi: int | None = None) -> None:
        super().__init__(sym(name, lo, hi).terms)
        self.name, self.lo, self.hi = name, lo, hi

    @own_checks("value")
    def bind(self, value: int) -> BoundSize:
        """The variable with a value, usable as a size of `empty` and of data."""
        return BoundSize(self, check_range(self.name, value, self.lo, self.hi))


@dataclass(frozen=True, slots=True)
class BoundSize:
    """A variable with a value."""

    variable: Variable
    value: int

    def as_var_val(self) -> tuple[str, int]:
        return self.variable.name, self.value

    def __index__(self) -> int:
        return self.value


def check_range(name: str, value: int, lo: int, hi: int | None) -> int:
    """A value for a size, which any integer is that lies in its range."""
    number = whole_number(value)
    if number is None or number < lo or (hi is not None and number > hi):
        raise SymbolError(
            f"the size {name} is {lo}..{'' if hi is None else hi}, it cannot be {value!r}", code="S153", place=here()
        )
    return number


def split_bound(shape: Iterable[object]) -> tuple[list[Dim], dict[str, int]]:
    """A shape without values, and the values that variables in it are bound to."""
    dims: list[Dim] = []
    binding: dict[str, int] = {}
    for d in shape:
        if isinstance(d, BoundSize):
            name, value = d.as_var_val()
            if binding.setdefault(name, value) != value:
                raise SymbolError(f"the size {name} is bound to {binding[name]} and to {value}", code="S154")
            dims.append(d.variable)
        else:
            dims.append(d)  # type: ignore[arg-type]
    return dims, binding
