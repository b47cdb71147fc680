"""Active extents: runs that process only the first places along a named axis and leave the rest unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import SymExpr, TensorType, bounds, here, sym
from strata.errors import OptionError, StrataError, UnknownNameError
from strata.mir import Graph, leaf_name, near, substitute_values
from strata.runtime.execute.arrays import signature
from strata.runtime.execute.rows import ROWS, places, row_obstacles, with_open_rows

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


REMEMBERED_BYTES = 16 << 20


class Extents:
    """The extents that are active on a compiled graph. Its owner holds a lock while it is used.

    A graph compiled with symbolic sizes runs at the smaller size itself. One compiled for fixed sizes has a second
    program, with the axis symbolic, compiled when an extent is first set.
    """

    def __init__(self, owner: CompiledGraph) -> None:
        self._owner = owner
        self._programs: dict[tuple[frozenset[str], tuple[int, ...]], CompiledGraph] = {}
        self._reasons: dict[str, list[str]] = {}
        self._opened: tuple[str, int, Graph | None] | None = None  # a plain size that became a symbol
        self._kept: Sequence[np.ndarray] = ()
        self.active: dict[str, int] = {}

    def set_rows(self, actual: int, upper: int) -> bool:
        """Make an extent active along the first axes of inputs that have `upper` places, in a graph of plain sizes."""
        owner, name = self._owner, ROWS
        while name in owner.source.symbols():
            name += "_"
        rows = {n: 1 for n, kind in owner._inputs if kind.shape[:1] == (upper,)}
        if not rows or not isinstance(upper, int) or upper < 1:
            raise OptionError(
                f"no input of {owner.name!r} has {upper!r} places along its first axis; the signature is "
                f"{signature(owner)}", code="O402", place=here(),
            )  # fmt: skip
        if self._opened is None or self._opened[:2] != (name, upper):
            self.active.pop(name, None)
            self._programs.clear()
            self._reasons.pop(name, None)
            try:
                graph = with_open_rows(owner.source, rows, upper, sym(name, 1, max(upper, 2)))
            except StrataError as error:
                self._opened = name, upper, None
                self._reasons[name] = [f"it cannot be shown to keep rows apart ({error.summary})"]
            else:
                self._opened = name, upper, graph
        return self.set(name, actual)

    def choose(self, axis: str | tuple[int, int] | None, actual: int | None) -> bool:
        """An extent by the name of a symbol, or as (actual, upper); None ends all."""
        if axis is None:
            self.active.clear()
            return True
        return self.set(axis, actual) if isinstance(axis, str) else self.set_rows(*axis)

    def set(self, axis: str, actual: int | None) -> bool:
        """Make an extent active, or end it; returns whether runs can use it."""
        self._check(axis)
        if actual is None:
            self.active.pop(axis, None)
            return not self.reasons(axis)
        upper = self._upper(axis)
        is_count = isinstance(actual, (int, np.integer)) and not isinstance(actual, bool) and actual >= 0
        if not is_count or (upper is not None and actual > upper):
            limit = "" if upper is None else f" to {upper}"
            raise OptionError(
                f"the active extent of {axis} is a number from 0{limit}, got {actual!r}", code="O402", place=here()
            )
        self.active[axis] = int(actual)
        self._keep()
        return not self.reasons(axis)

    def reasons(self, axis: str) -> list[str]:
        """What keeps the axis from having an active extent."""
        self._check(axis)
        if axis not in self._reasons:
            self._reasons[axis] = row_obstacles(self._program(frozenset([axis])).lir, axis)
        return self._reasons[axis]

    @property
    def is_used(self) -> bool:
        """Whether runs are of the active extents alone; False where the whole must be run."""
        return bool(self.active) and not any(self.reasons(axis) for axis in self.active)

    def run(self, arrays: Sequence[np.ndarray], outputs: Sequence[np.ndarray], threads: int | None) -> None:
        """Run at the active extents: what lies after them in the outputs stays."""
        axes = frozenset(self.active)
        kinds = self._program(axes)._outputs
        empty = [axis for axis, actual in self.active.items() if not actual]
        left = tuple(i for i, kind in enumerate(kinds) if not any(places(kind, axis) for axis in empty))
        self._check_fits(arrays)
        if not left:
            return
        # what does not lie along an axis of which nothing is processed is a separate program
        program = self._program(axes, left) if empty else self._program(axes)
        run_at = {axis: max(actual, self._least(axis)) for axis, actual in self.active.items() if actual}
        sliced = [np.ascontiguousarray(_front(a, t, run_at)) for a, (_, t) in zip(arrays, program._inputs, strict=True)]
        binding, makers = program.sized(sliced)
        fronts = [_front(outputs[i], t, self.active) for i, t in zip(left, program._outputs, strict=True)]
        written = [
            a if a.flags.c_contiguous and a.shape == shape else np.empty(shape, dtype)
            for a, (_, shape, dtype) in zip(fronts, makers, strict=True)
        ]
        program._run(sliced, written, binding, threads)
        for front, array, kind in zip(fronts, written, program._outputs, strict=True):
            if front is not array:
                front[...] = _front(array, kind, self.active)

    def run_kept(self, arrays: Sequence[np.ndarray], makers: Sequence[Any], threads: int | None) -> list[np.ndarray]:
        """Run into what the last run gave, and give copies of it: the caller may do with them anything."""
        kept = self._keep()
        shaped = [
            kept[i] if i < len(kept) and kept[i].shape == shape else np.zeros(shape, dtype)
            for i, (_, shape, dtype) in enumerate(makers)
        ]
        self.run(arrays, shaped, threads)
        self._kept = self._owner._last = shaped
        return [a.copy() for a in shaped]

    def _keep(self) -> Sequence[np.ndarray]:
        """What the last run gave, in arrays that nobody else has."""
        owner = self._owner
        if owner._last is not self._kept:
            self._kept = owner._last = [np.array(a) for a in owner._last or ()]
        return self._kept

    def set_param(self, name: str, array: np.ndarray) -> None:
        for program in self._programs.values():
            program.set_param(name, array)

    def _check_fits(self, arrays: Sequence[np.ndarray]) -> None:
        kinds = [t for _, t in self._program(frozenset(self.active))._inputs]
        for axis, actual in self.active.items():
            given = [a.shape[i] for a, t in zip(arrays, kinds, strict=True) for i in places(t, axis)]
            if given and actual > given[0]:
                raise OptionError(
                    f"the active extent of {axis} is {actual}, the arrays have {given[0]}", code="O402", place=here()
                )

    def _program(self, axes: frozenset[str], results: tuple[int, ...] | None = None) -> CompiledGraph:
        """The program with these axes symbolic, and of these results only."""
        owner = self._owner
        every = tuple(range(len(owner._outputs)))
        key = axes, every if results is None else results
        if axes <= set(owner._lir.symbols) and key[1] == every:
            return owner
        if key not in self._programs:
            fixed = {n: size for n, size in (owner.options.dim_binding or {}).items() if n not in axes}
            opened = self._opened
            source = opened[2] if opened is not None and opened[0] in axes else owner.source
            assert source is not None
            graph = source if key[1] == every else _with_results(source, key[1])
            made = owner._remakers[0](graph, replace(owner.options, dim_binding=fixed or None))
            made.set_params(owner._param_values)
            self._programs[key] = made
        return self._programs[key]

    def _check(self, axis: str) -> None:
        known = [*self._owner.source.symbols(), *(() if self._opened is None else (self._opened[0],))]
        if axis not in known:
            raise UnknownNameError(
                f"{self._owner.name!r} has no symbolic size {axis!r}; "
                f"it has {', '.join(known) or 'none'}{near(axis, known)}",
                code="N113", place=here(),
            )  # fmt: skip

    def _upper(self, axis: str) -> int | None:
        if self._opened is not None and self._opened[0] == axis:
            return self._opened[1]
        fixed = (self._owner.options.dim_binding or {}).get(axis)
        return fixed if fixed is not None else bounds(SymExpr((((self._owner.source.symbols()[axis],), 1),)))[1]

    def _least(self, axis: str) -> int:
        if self._opened is not None and self._opened[0] == axis:
            return 1
        return bounds(SymExpr((((self._owner.source.symbols()[axis],), 1),)))[0] or 0


def is_remembered(graph: CompiledGraph) -> bool:
    """Whether a graph keeps what its last run gave, for an extent that is set later: of results with a first axis,
    and unless they are large, with fixed sizes. Graphs with symbols keep it always."""
    sizes = [t.nbytes for t in graph._outputs if t.ndim]
    if not graph._is_static or graph.options.dim_binding:
        return True
    return bool(sizes) and sum(size for size in sizes if isinstance(size, int)) <= REMEMBERED_BYTES


def _front(array: np.ndarray, kind: TensorType, sizes: Mapping[str, int]) -> np.ndarray:
    """The first places of an array, as many along each axis as are given for its symbol."""
    cut: list[slice] = [slice(None)] * array.ndim
    for axis, size in sizes.items():
        for i in places(kind, axis):
            cut[i] = slice(size)
    return array[tuple(cut)]


def _with_results(graph: Graph, numbers: Sequence[int]) -> Graph:
    """The graph with some of its results; inputs and parameters are the same."""
    made = Graph(graph.name)
    known = {x: made.input(leaf_name(x), x.type) for x in graph.inputs}
    known |= {x: made.param(leaf_name(x), x.type) for x in graph.params}
    return made.outputs(*substitute_values([graph.results[i] for i in numbers], known))
