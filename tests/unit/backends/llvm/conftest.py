"""What the tests of hand-written kernels share: a function of values compiled for the cpu and run on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from strata.core import Dim, TensorType, as_dtype
from strata.mir import Graph
from strata.runtime import CompileOptions, Session

Native = Callable[..., tuple[np.ndarray, ...]]


@pytest.fixture
def native() -> Native:
    """native(function, *arrays, shapes=None, threads=(1, 2, 7)): results, equal bits for every number of threads."""

    def run(
        function: Callable[..., Any],
        *arrays: np.ndarray,
        shapes: Sequence[tuple[Dim, ...]] | None = None,
        threads: tuple[int, ...] = (1, 2, 7),
    ) -> tuple[np.ndarray, ...]:
        graph = Graph("case")
        declared = shapes or [a.shape for a in arrays]
        inputs = [
            graph.input(f"x{i}", TensorType(as_dtype(a.dtype), tuple(shape)))
            for i, (a, shape) in enumerate(zip(arrays, declared, strict=True))
        ]
        made = function(*inputs)
        graph.outputs(*(made if isinstance(made, (tuple, list)) else (made,)))
        first: tuple[np.ndarray, ...] | None = None
        for count in threads:
            compiled = Session("cpu").compile(graph, CompileOptions(threads=count))
            assert not compiled.host_steps
            results = compiled.run({f"x{i}": a for i, a in enumerate(arrays)})
            if first is None:
                first = results
            for a, b in zip(first, results, strict=True):
                assert a.tobytes() == b.tobytes(), f"{count} threads give other bits"
        assert first is not None
        return first

    return run
