"""Whether rows of zeros behind the real ones change the real ones' results, and masks for graphs where they would."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from strata.core import Dim, here, sym
from strata.errors import OptionError, StrataError
from strata.mir import Graph, Op, leaf_name, substitute_values
from strata.runtime.compiled import CompiledGraph
from strata.runtime.pipeline import CompilePipeline
from strata.runtime.rows import row_obstacles

ROWS = "rows"


def padding_obstacles(compiled: CompiledGraph, padded: Collection[str], upper: int) -> list[str]:
    """Why a graph made for `upper` rows may give other results for padded inputs; empty where it cannot."""
    rows = sym(ROWS, 1, max(upper, 2))
    try:
        graph = _with_rows(compiled.source, padded, upper, rows)
        lir = CompilePipeline(compiled.device, compiled.options).compile(graph).lir
    except StrataError as error:
        return [f"it cannot be shown to keep rows apart ({error.summary})"]
    return row_obstacles(lir, ROWS, attention=False)


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
    """An op that names a result's shape, with the rows in front left open."""
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
