"""What rules of StableHLO's operations work with: values, sizes that are known, and the table of rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from strata.core import Dim, SymExpr, dim_max, dim_min, floordiv, mod
from strata.errors import LowerError
from strata.io.stablehlo.syntax import HloFunction, HloOp, HloRegion, HloType
from strata.mir import REGISTRY, Value, constant


@dataclass(frozen=True, slots=True)
class Item:
    """A value of the module: a graph value, and its integers where they are known as sizes."""

    value: Any
    sizes: tuple[Dim, ...] | None = None
    equality: tuple[Dim, Dim] | None = None  # of a comparison of two sizes

    @property
    def shape(self) -> tuple[Dim, ...]:
        found: tuple[Dim, ...] = self.value.shape
        return found


class ModuleReader(Protocol):
    """What a rule may ask of the module that its operation is in."""

    functions: Any

    def call(self, function: HloFunction, arguments: Sequence[Item]) -> list[Item]: ...

    def apply_region(self, region: HloRegion, arguments: Sequence[Any]) -> list[Any]: ...


Rule = Callable[[ModuleReader, HloOp, list[Item]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """The meaning of operations."""

    def add(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return add


class SizesAreOne(Exception):  # noqa: N818 - a word from inside, not a mistake
    """Two sizes are one."""

    def __init__(self, name: str, size: Dim) -> None:
        super().__init__(name)
        self.name, self.size = name, size


def known_sizes(item: Item, what: str) -> tuple[Dim, ...]:
    """The elements of a shape that comes as data."""
    if item.sizes is None:
        raise LowerError(f"{what} depends on data, not on sizes of the inputs", code="L512")
    return item.sizes


def static_type(op: HloOp, at: int = 0) -> HloType:
    """The type of a result."""
    found = op.types[at] if at < len(op.types) else None
    if found is None:
        raise LowerError("the type of a result is missing", code="L510")
    return found


def static_shape(op: HloOp) -> tuple[int, ...]:
    found = static_type(op)
    if not found.is_static:
        raise LowerError("the text leaves the sizes of the result open", code="L512")
    return tuple(d for d in found.shape if d is not None)


# ------------------------------------------------------------------------------------------------------ sizes as values


def folded_sizes(name: str, given: Sequence[Item]) -> tuple[Dim, ...] | None:
    """What an operation makes of integers that are known."""
    parts = [x.sizes for x in given]
    if any(p is None for p in parts) or not parts:
        return None
    known = [p for p in parts if p is not None]
    length = max(map(len, known))
    rows = [p if len(p) == length else p * length for p in known]
    if any(len(p) != length for p in rows):
        return None
    function = _SIZES.get(name)
    try:
        return None if function is None else tuple(function(*column) for column in zip(*rows, strict=True))
    except (ZeroDivisionError, TypeError):
        return None


def _divided(a: Dim, b: Dim) -> Dim:
    return floordiv(a, b)


_SIZES: dict[str, Callable[..., Dim]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": _divided,
    "remainder": mod,
    "maximum": dim_max,
    "minimum": dim_min,
    "convert": lambda a: a,
    "reshape": lambda a: a,
    "negate": lambda a: -a,
}


def equality_of(op: HloOp, given: Sequence[Item]) -> tuple[Dim, Dim] | None:
    """The two sizes that a comparison compares."""
    a, b = given[0].sizes, given[1].sizes
    return (
        (a[0], b[0]) if direction_of(op) == "EQ" and a is not None and b is not None and len(a) == len(b) == 1 else None
    )


def assert_equal(pair: tuple[Dim, Dim] | None) -> None:
    """The module says that two sizes are one: where one of them is an open size, it is the other."""
    if pair is None or pair[0] == pair[1]:
        return
    for one, other in (pair, pair[::-1]):
        if isinstance(one, SymExpr) and re.fullmatch(r"arg\d+_\d+", str(one)) and str(one) not in str(other):
            raise SizesAreOne(str(one), other)


def op_named(name: str, **fields: Any) -> Any:
    """An op of the graph by its name and fields."""
    kind: Any = REGISTRY[name]
    return kind(**fields)


def direction_of(op: HloOp) -> str:
    """How a comparison compares."""
    return str(op.words[0] if op.words else op.attributes.get("comparison_direction"))


def scalar(value: Any, like: Value) -> Value:
    """A number in the type of a value."""
    return constant(np.asarray(value, like.dtype.np))
