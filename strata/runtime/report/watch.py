"""Watching for NaN and infinity: the first op that makes one is named, with its source line."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Place
from strata.errors import RunError, StrataError
from strata.mir import Graph, Input, Node, Param, Value, infer_binding, leaf_name, run_node
from strata.runtime.report.observe import OBSERVERS, operand

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


@contextmanager
def watch_finite(*, nan: bool = True, inf: bool = True) -> Iterator[None]:
    """Inside the block, an op that makes a NaN or an infinity from finite numbers raises RunError.

    An infinity that comes from an input, as in a mask of -inf, is not held against the op that passes it on. Runs are
    slow.
    """
    watcher = _Watcher(nan, inf)
    OBSERVERS.append(watcher)
    try:
        yield
    finally:
        OBSERVERS.remove(watcher)


class _Watcher:
    def __init__(self, nan: bool, inf: bool) -> None:
        self._nan, self._inf = nan, inf
        self._run = threading.local()  # the inputs of a thread's run: others go on beside it

    def begin(self, compiled: CompiledGraph, binding: Mapping[str, int], arrays: Sequence[np.ndarray]) -> None:
        self._run.arrays = arrays
        if not compiled._executable.observes_steps:
            self._search(compiled, None)

    def step(self, compiled: CompiledGraph, at: int, begin: int, end: int, spans: Sequence[Any], read: Any) -> None:
        step = compiled._lir.schedule[at]
        given = [a for a in (operand(compiled, name, read) for name in step.read_buffers) if a is not None]
        if any(self._is_bad(read(name), given) for name in step.outputs):
            self._search(compiled, step.label)

    def end(self, compiled: CompiledGraph, begin: int, end: int) -> None:
        pass

    def _is_bad(self, made: np.ndarray, given: Sequence[np.ndarray]) -> bool:
        if self._nan and _any(made, np.isnan) and not any(_any(a, np.isnan) for a in given):
            return True
        return self._inf and _any(made, np.isinf) and not any(_any(a, _is_not_finite) for a in given)

    def _search(self, compiled: CompiledGraph, label: str | None) -> None:
        """Run the program as it was written, op by op, up to the one that is to blame."""
        feeds = {name: a for (name, _), a in zip(compiled._inputs, self._run.arrays, strict=True)}
        params = {name: np.asarray(value) for name, value in compiled._param_values.items()}
        found = first_bad(compiled.source, {**params, **feeds}, self._is_bad)
        if found is not None:
            node, made = found
            kind = "NaN" if _any(made, np.isnan) else "an infinity"
            at = [int(i) for i in np.argwhere(~np.isfinite(made.astype(np.complex128)))[0]]
            raise _error(f"{node.op.name} makes {kind} at {at} of {node.types[0]}", node.origin.place)
        if label is not None:
            raise _error(f"the step {label!r} makes a number that is not finite", None)


def _error(message: str, place: Place | None) -> RunError:
    return RunError(message, code="X402", place=place)


def first_bad(graph: Graph, feeds: Mapping[str, np.ndarray], is_bad: Any) -> tuple[Node, np.ndarray] | None:
    """The first op of a graph whose result is bad for its inputs, and the result."""
    table: dict[Value, np.ndarray] = {x: feeds[leaf_name(x)] for x in (*graph.inputs, *graph.params)}
    binding = infer_binding({x: a.shape for x, a in table.items()})
    for node in graph.nodes():
        if isinstance(node.op, (Input, Param)):
            continue
        given = [table[x] for x in node.inputs]
        try:
            outs = run_node(node, given, binding)
        except StrataError:
            return None
        for value, made in zip(node.outputs, outs, strict=True):
            table[value] = made
            if given and is_bad(made, given):
                return node, made
    return None


def _is_not_finite(array: np.ndarray) -> np.ndarray:
    return ~np.isfinite(array)


def _any(array: np.ndarray, test: Any) -> bool:
    if array.dtype.kind in "biu":
        return False
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:  # bf16 and the like
        try:
            array = array.astype(np.float32)
        except (TypeError, ValueError):
            return False
    return bool(test(array).any())
