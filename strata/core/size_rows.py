"""Symbolic sizes as rows of JSON: common subexpressions once, reading needs no arithmetic.

A row is a symbol, a function of two sizes, or a sum of products of rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.core.dims import Atom, Dim, Symbol, SymExpr, make_call
from strata.errors import ParseError

Written = int | list[int]  # a number, or the place of a row
_KINDS = ("floordiv", "mod", "min", "max")


class SizeWriter:
    """Collects rows; `add` gives what stands for a size in them."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._places: dict[Atom | SymExpr, int] = {}

    def add(self, dim: Dim) -> Written:
        if not isinstance(dim, SymExpr):
            return int(dim)
        if dim not in self._places:
            row = ["sum", *([factor, *(self._atom(a) for a in atoms)] for atoms, factor in dim.terms)]
            self._put(dim, row)
        return [self._places[dim]]

    def _atom(self, atom: Atom) -> int:
        if atom not in self._places:
            if isinstance(atom, Symbol):
                self._put(atom, ["symbol", atom.name, atom.lo, atom.hi])
            else:
                self._put(atom, [atom.kind, self.add(atom.a), self.add(atom.b)])
        return self._places[atom]

    def _put(self, key: Atom | SymExpr, row: list[Any]) -> None:
        self._places[key] = len(self.rows)
        self.rows.append(row)


class SizeReader:
    """The sizes that a writer's rows stand for."""

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._made: list[Any] = []
        for kind, *rest in rows:
            self._made.append(self._read(kind, rest))

    def _read(self, kind: str, row: list[Any]) -> Atom | SymExpr:
        if kind == "sum":
            return SymExpr(tuple((tuple(self._made[i] for i in atoms), int(factor)) for factor, *atoms in row))
        if kind == "symbol":
            name, lo, hi = row
            return Symbol(str(name), lo, hi)
        if kind not in _KINDS:
            raise ParseError(f"{kind!r} is not a kind of size", code="P110")
        a, b = row
        return make_call(kind, self(a), self(b))

    def __call__(self, written: Written) -> Dim:
        if isinstance(written, int):
            return written
        found = self._made[written[0]]
        if not isinstance(found, SymExpr):
            raise ParseError(f"row {written[0]} is not a size", code="P110")
        return found
