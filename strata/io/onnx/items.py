"""What a name of an ONNX graph can stand for during tracing.

Value     a node of the graph that is being built
Host      an array that is known: an initializer or what follows from it (`fixed`), or data of this run
Sizes     integers that are known up to symbolic sizes: what Shape gives, and arithmetic on it
Labels    texts of a table, by ids that the graph computes
Maps      a list of maps from keys to the numbers of a row
list      a sequence of items
NOTHING   an optional without an element
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr
from strata.mir import Value


@dataclass(frozen=True, eq=False, slots=True)
class Host:
    """An array. `fixed` ones are the same in every run; `name` is the initializer's, if it is one."""

    array: np.ndarray
    fixed: bool = True
    name: str | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Sizes:
    """An integer array, some of whose elements are symbolic. `array` has dtype object: ints and SymExprs."""

    array: np.ndarray

    @property
    def flat(self) -> tuple[Dim, ...]:
        return tuple(self.array.reshape(-1).tolist())


@dataclass(frozen=True, eq=False, slots=True)
class Labels:
    """Texts by ids: the graph has the ids, the texts are looked up once it has run."""

    value: Value
    table: np.ndarray

    def finished(self, ids: np.ndarray) -> np.ndarray:
        size = len(self.table)
        return self.table[np.clip(np.where(ids < 0, ids + size, ids), 0, size - 1)]


@dataclass(frozen=True, eq=False, slots=True)
class Maps:
    """A map for each row of a value [B, C], made once the graph has run."""

    value: Value
    keys: tuple[int | str, ...]

    def finished(self, rows: np.ndarray) -> list[dict[int | str, float]]:
        return [dict(zip(self.keys, row, strict=False)) for row in rows.tolist()]


class Nothing:
    """An optional without an element."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()
Item = Value | Host | Sizes | Labels | Maps | list[Any] | Nothing


def sizes(dims: Sequence[Dim] | np.ndarray, shape: tuple[int, ...] | None = None) -> Host | Sizes:
    """Dims as an item: an ordinary i64 array where all of them are numbers."""
    array = np.empty(len(dims), object)
    array[:] = list(dims)
    if shape is not None:
        array = array.reshape(shape)
    return settled(array)


def settled(dims: Any) -> Host | Sizes:
    """An array of dims, or one dim (NumPy hands out elements of object arrays bare); plain once no symbol is left."""
    array = np.empty((), object)
    if isinstance(dims, np.ndarray):
        array = dims
    else:
        array[()] = dims
    if any(isinstance(d, SymExpr) for d in array.reshape(-1)):
        return Sizes(array)
    return Host(array.astype(np.int64))
