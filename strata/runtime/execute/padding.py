"""Whether zero padding behind the real rows changes their results, and masks for graphs where it would."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from strata.core import Dim, here, sym
from strata.errors import OptionError, StrataError
from strata.mir import Graph, Op, leaf_name, substitute_values
from strata.runtime.compile.pipeline import CompilePipeline
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.rows import places, row_obstacles

ROWS = "rows"


class Padding:
    """What rows of zeros behind the real ones of some inputs do to a graph made for `upper` rows."""

    def __init__(self, compiled: CompiledGraph, padded: Collection[str], upper: int) -> None:
        self._compiled, self._upper = compiled, upper
        self._graph: Graph | None = None
        self._reason, self._rows = "", ROWS
        while self._rows in compiled.source.symbols():
            self._rows += "_"
        try:
            self._graph = _with_rows(compiled.source, padded, upper, sym(self._rows, 1, max(upper, 2)))
        except StrataError as error:
            self._reason = error.summary

    @cached_property
    def obstacles(self) -> list[str]:
        """Why results may be others for padded inputs; empty where they cannot."""
        compiled, reason = self._compiled, self._reason
        if self._graph is not None:
            try:
                lir = CompilePipeline(compiled.device, compiled.options).compile(self._graph).lir
            except StrataError as error:
                reason = error.summary
            else:
                return row_obstacles(lir, self._rows, attention=False)
        return [f"it cannot be shown to keep rows apart ({reason})"]

    def cut(self, number: int, out: np.ndarray, actual: int, *, asked: bool) -> np.ndarray:
        """An output without the rows of padding, along whichever axis they are.

        Where the caller asked for it, or nothing is known, an output with as many rows as the bucket is cut, too.
        """
        found = () if self._graph is None else places(self._graph.results[number].type, self._rows)
        if not found and (asked or self._graph is None) and out.ndim and out.shape[0] == self._upper:
            found = (0,)
        return out[tuple(slice(actual) if i in found else slice(None) for i in range(out.ndim))] if found else out


def _with_rows(graph: Graph, padded: Collection[str], upper: int, rows: Dim) -> Graph:
    """The graph with a symbolic number of rows, also in ops that name the shape of their result."""
    try:
        return _rebuilt(graph, padded, upper, rows, None)
    except StrataError:
        return _rebuilt(graph, padded, upper, rows, lambda op: _leading(op, upper, rows))


def _rebuilt(graph: Graph, padded: Collection[str], upper: int, rows: Dim, change: Any) -> Graph:
    made = Graph(graph.name)
    known = {}
    for x in graph.inputs:
        open_axis = leaf_name(x) in padded and x.type.ndim > 0 and x.type.shape[0] == upper
        kind = x.type.with_shape((rows, *x.type.shape[1:])) if open_axis else x.type
        known[x] = made.input(leaf_name(x), kind)
    for x in graph.params:
        known[x] = made.param(leaf_name(x), x.type)
    return made.outputs(*substitute_values(graph.results, known, change))


def _leading(op: Op, upper: int, rows: Dim) -> Op:
    """An op that names a result's shape, with the rows in front symbolic."""
    shape = op.static_fields().get("shape")
    if isinstance(shape, tuple) and shape and shape[0] == upper:
        return type(op)(**{**op.static_fields(), "shape": (rows, *shape[1:])})
    return op


def row_mask(compiled: CompiledGraph, name: str, actual: int, upper: int) -> np.ndarray:
    """The value of a mask input: which of the `upper` places are real."""
    kind = compiled.inputs.get(name)
    if kind is None or not kind.is_static or upper not in kind.shape:
        raise OptionError(
            f"run_padded: mask {name!r} is no input with an axis of {upper}; the signature is {compiled.signature}",
            code="O408", place=here(),
        )  # fmt: skip
    axis = max(i for i, d in enumerate(kind.shape) if d == upper)
    keep = np.arange(upper) < actual
    values = np.where(keep, 0.0, -1e9) if kind.dtype.is_inexact else keep
    shape = [upper if i == axis else 1 for i in range(kind.ndim)]
    return np.ascontiguousarray(np.broadcast_to(values.reshape(shape), kind.static_shape)).astype(kind.dtype.np)
