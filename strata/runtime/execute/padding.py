"""Whether zero padding after the real rows changes their results, and masks for graphs where it would."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from strata.core import here, sym
from strata.errors import OptionError, StrataError
from strata.mir import Graph
from strata.runtime.compile.pipeline import CompilePipeline
from strata.runtime.execute.arrays import signature
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.rows import ROWS, places, row_obstacles, with_open_rows


class Padding:
    """What rows of zeros after the real ones of some inputs do to a graph made for `upper` rows."""

    def __init__(self, compiled: CompiledGraph, padded: Mapping[str, int], upper: int) -> None:
        """`padded` names inputs, with the elements of a row where rows lie in one flat axis."""
        self._compiled, self._upper = compiled, upper
        self._graph: Graph | None = None
        self._reason, self._rows = "", ROWS
        while self._rows in compiled.source.symbols():
            self._rows += "_"
        try:
            rows = sym(self._rows, 1, max(upper, 2))
            self._graph = with_open_rows(compiled.source, padded, upper, rows)
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

    def cut(self, number: int, out: np.ndarray, actual: int, inner: int, *, asked: bool) -> np.ndarray:
        """An output without the rows of padding, along whichever axis they are; of rows in one flat axis, their part.

        Where the caller asked for it, or nothing is known, an output with as many rows as the bucket is cut, too.
        """
        if asked and inner > 1 and out.ndim == 1 and out.shape[0] == self._upper * inner:
            return out[: actual * inner]
        found = () if self._graph is None else places(self._graph.results[number].type, self._rows)
        if not found and (asked or self._graph is None) and out.ndim and out.shape[0] == self._upper:
            found = (0,)
        return out[tuple(slice(actual) if i in found else slice(None) for i in range(out.ndim))] if found else out


def row_mask(compiled: CompiledGraph, name: str, actual: int, upper: int) -> np.ndarray:
    """The value of a mask input: which of the `upper` places are real."""
    kind = compiled.inputs.get(name)
    if kind is None or not kind.is_static or upper not in kind.shape:
        raise OptionError(
            f"run_padded: mask {name!r} has no axis of {upper}; the signature is {signature(compiled)}",
            code="O408", place=here(),
        )  # fmt: skip
    axis = max(i for i, d in enumerate(kind.shape) if d == upper)
    keep = np.arange(upper) < actual
    values = np.where(keep, 0.0, -1e9) if kind.dtype.is_inexact else keep
    shape = [upper if i == axis else 1 for i in range(kind.ndim)]
    return np.ascontiguousarray(np.broadcast_to(values.reshape(shape), kind.static_shape)).astype(kind.dtype.np)
