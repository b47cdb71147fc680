"""Active extents: runs that process only the first places along a named axis and leave the rest as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import SymExpr, bounds, here
from strata.errors import OptionError, UnknownNameError
from strata.mir import near
from strata.runtime.rows import places, row_obstacles

if TYPE_CHECKING:
    from strata.runtime.compiled import CompiledGraph


class Extents:
    """The extents that are active on a compiled graph. Its owner holds a lock while it is used.

    A graph compiled with symbolic sizes runs at the smaller size itself. One compiled for fixed sizes has a second
    program, with the axis left open, compiled when an extent is first set.
    """

    def __init__(self, owner: CompiledGraph) -> None:
        self._owner = owner
        self._programs: dict[frozenset[str], CompiledGraph] = {}
        self._reasons: dict[str, list[str]] = {}
        self.active: dict[str, int] = {}

    def set(self, axis: str, actual: int | None) -> bool:
        """Make an extent active, or end it; returns whether runs can use it."""
        self._check(axis)
        if actual is None:
            self.active.pop(axis, None)
            return not self.reasons(axis)
        upper = self._upper(axis)
        if (
            not isinstance(actual, int)
            or isinstance(actual, bool)
            or actual < 0
            or (upper is not None and actual > upper)
        ):
            limit = "" if upper is None else f" to {upper}"
            raise OptionError(
                f"the active extent of {axis} is a number from 0{limit}, got {actual!r}", code="O402", place=here()
            )
        self.active[axis] = actual
        return not self.reasons(axis)

    def reasons(self, axis: str) -> list[str]:
        """What keeps the axis from having an active extent."""
        self._check(axis)
        if axis not in self._reasons:
            self._reasons[axis] = row_obstacles(self._program(frozenset([axis])).lir, axis)
        return self._reasons[axis]

    def run(self, arrays: Sequence[np.ndarray], outputs: Sequence[np.ndarray], threads: int | None) -> bool:
        """Run at the active extents; False where the whole must be run instead."""
        if any(self.reasons(axis) for axis in self.active):
            return False
        program = self._program(frozenset(self.active))
        kinds = [t for _, t in program._inputs]
        for axis, actual in self.active.items():
            given = [a.shape[i] for a, t in zip(arrays, kinds, strict=True) for i in places(t, axis)]
            if given and actual > given[0]:
                raise OptionError(
                    f"the active extent of {axis} is {actual}, the arrays have {given[0]}", code="O402", place=here()
                )
        if 0 in self.active.values():
            return True
        sliced = [np.ascontiguousarray(self._front(a, t)) for a, t in zip(arrays, kinds, strict=True)]
        fronts = [self._front(a, t) for a, t in zip(outputs, program._outputs, strict=True)]
        written = [a if a.flags.c_contiguous else np.empty(a.shape, a.dtype) for a in fronts]
        binding, _ = program.sized(sliced)
        program._run(sliced, written, binding, threads)
        for front, array in zip(fronts, written, strict=True):
            if front is not array:
                front[...] = array
        return True

    def keep_tails(self, outputs: Sequence[np.ndarray], last: Sequence[np.ndarray]) -> None:
        """Fill new outputs with what the last run gave, so that what is not processed stays as it was."""
        for i, out in enumerate(outputs):
            if i < len(last) and last[i].shape == out.shape:
                out[...] = last[i]
            else:
                out[...] = np.zeros((), out.dtype)

    def set_param(self, name: str, array: np.ndarray) -> None:
        for program in self._programs.values():
            if program is not self._owner:
                program.set_param(name, array)

    def _front(self, array: np.ndarray, kind: Any) -> np.ndarray:
        """The active part of an array."""
        cut: list[slice] = [slice(None)] * array.ndim
        for axis, actual in self.active.items():
            for i in places(kind, axis):
                cut[i] = slice(actual)
        return array[tuple(cut)]

    def _program(self, axes: frozenset[str]) -> CompiledGraph:
        """The program with these axes open."""
        owner = self._owner
        if axes <= set(owner._lir.symbols):
            return owner
        if axes not in self._programs:
            from strata.runtime.session import Session

            fixed = {n: size for n, size in (owner.options.dim_binding or {}).items() if n not in axes}
            made = Session(owner.device).compile(owner.source, replace(owner.options, dim_binding=fixed or None))
            made.set_params(owner._param_values)
            self._programs[axes] = made
        return self._programs[axes]

    def _check(self, axis: str) -> None:
        known = self._owner.source.symbols()
        if axis not in known:
            raise UnknownNameError(
                f"{self._owner.name!r} has no symbolic size {axis!r}; "
                f"it has {', '.join(known) or 'none'}{near(axis, known)}",
                code="N113", place=here(),
            )  # fmt: skip

    def _upper(self, axis: str) -> int | None:
        fixed = (self._owner.options.dim_binding or {}).get(axis)
        return fixed if fixed is not None else bounds(SymExpr((((self._owner.source.symbols()[axis],), 1),)))[1]
