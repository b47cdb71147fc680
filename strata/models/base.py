"""What every model has: named inputs and outputs, and `run` on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.models.weights import WeightBuilder
from strata.runtime import CompiledGraph, CompileOptions, Session


def compile_built(builder: WeightBuilder, device: str, options: CompileOptions | None = None) -> CompiledGraph:
    """A built graph, compiled, with its weights bound."""
    builder.check()
    made = (
        Session(device).compile(builder.graph, options)
        if options is not None
        else Session(device).compile(builder.graph)
    )
    made.set_params(builder.bound)
    return made


class Model:
    """A compiled model. Families add `embed` or `generate`."""

    def __init__(self, graph: CompiledGraph, output_names: tuple[str, ...]) -> None:
        self.graph = graph
        self.outputs = output_names

    @property
    def inputs(self) -> dict[str, str]:
        """Input names and types."""
        return {name: str(kind) for name, kind in self.graph._inputs}

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run on arrays by input name; gives arrays by output name."""
        kinds = dict(self.graph._inputs)
        cast = {n: np.asarray(a, kinds[n].dtype.np) if n in kinds else a for n, a in arrays.items()}
        return dict(zip(self.outputs, self.graph.run(cast), strict=True))
