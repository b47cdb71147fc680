"""What every model has: named inputs and outputs, and `run` on arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.core import as_dtype
from strata.mir import Graph
from strata.models.weights import WeightBuilder, Weights
from strata.runtime import CompiledGraph, CompileOptions, Session, cast_to


@dataclass(frozen=True)
class Folder:
    """A folder of a model: what config.json says and the weights beside it."""

    path: Path
    settings: dict[str, Any]
    weights: Weights
    device: str = "cpu"
    context: int | None = None


def compile_built(builder: WeightBuilder, device: str, options: CompileOptions | None = None) -> CompiledGraph:
    """A built graph, compiled, with its weights bound.

    Weights of 16 bits are multiplied as they are where a device has matmuls for them; everything else is f32.
    """
    builder.check()
    return compile_bound(builder.graph, builder.bound, device, options)


def compile_bound(
    graph: Graph, bound: Mapping[str, np.ndarray], device: str, options: CompileOptions | None = None
) -> CompiledGraph:
    """A graph, compiled, with those of the weights bound that it has."""
    session = Session(device)
    held = {name: bound[name] for name in graph.param_names}
    if options is None:
        most = usual_type(held.values())
        narrow = most in session.backend.capabilities.narrow_matmuls
        options = CompileOptions(precision=f"compute={most}") if narrow else None
    made = session.compile(graph) if options is None else session.compile(graph, options)
    made.set_params(held)
    return made


def usual_type(weights: Iterable[np.ndarray]) -> str:
    """The type of most of the weights; nothing where there is none."""
    sizes: Counter[str] = Counter()
    for array in weights:
        sizes[as_dtype(array.dtype).name] += array.nbytes
    return next(iter(sizes.most_common(1)), ("", 0))[0]


class Model:
    """A compiled model. Families add `embed` or `generate`."""

    source: Path | None = None  # the file or folder that it was loaded from

    def __init__(self, graph: CompiledGraph, output_names: tuple[str, ...]) -> None:
        self.graph = graph
        self.outputs = output_names

    @property
    def inputs(self) -> dict[str, str]:
        """Input names and types."""
        return {name: str(kind) for name, kind in self.graph._inputs}

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run on arrays by input name; gives arrays by output name, of the library that the inputs come from."""
        kinds = dict(self.graph._inputs)
        cast = {n: cast_to(a, kinds[n].dtype.np) if n in kinds else a for n, a in arrays.items()}
        return dict(zip(self.outputs, self.graph.run(cast), strict=True))
