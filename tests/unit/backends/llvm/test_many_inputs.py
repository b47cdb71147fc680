"""Ops of very many inputs: their values, and code that does not grow with their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.core import DType, as_dtype, f32, sym
from strata.mir import Graph
from strata.runtime import Session

COUNT = 100


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["f32", "i4", "bool", "c128", "f16"])
def test_concat_of_all_types(dtype: str, axis: int, rng: np.random.Generator) -> None:
    kind: DType = as_dtype(dtype)
    g = Graph("many")
    arrays = {}
    for i in range(COUNT):
        shape = [2, 3, 4]
        shape[axis] = i % 5
        arrays[f"x{i}"] = rng.integers(0, 2, shape).astype(kind.np)
    program = Session("cpu").compile(
        g.outputs(ops.concat([g.input(n, a.shape, kind) for n, a in arrays.items()], axis))
    )
    (found,) = program.run(arrays)
    assert np.array_equal(found, np.concatenate(list(arrays.values()), axis))


@pytest.mark.parametrize("n", [0, 1, 7])
def test_concat_of_open_sizes(n: int, rng: np.random.Generator) -> None:
    g, size = Graph("many"), sym("n", 0)
    inputs = [g.input(f"x{i}", (3, size), f32) for i in range(COUNT)]
    program = Session("cpu").compile(g.outputs(ops.relu(ops.concat(inputs, 1)), ops.stack(inputs, 2)))
    arrays = {f"x{i}": rng.standard_normal((3, n)).astype(np.float32) for i in range(COUNT)}
    joined, stacked = program.run(arrays)
    assert np.array_equal(joined, np.maximum(np.concatenate(list(arrays.values()), 1), 0))
    assert np.array_equal(stacked, np.stack(list(arrays.values()), 2))


def test_computed_inputs_are_grouped(rng: np.random.Generator) -> None:
    def graph() -> Graph:
        g = Graph("many")
        inputs: list[Any] = [g.input(f"x{i}", (2, 8), f32) for i in range(COUNT)]
        return g.outputs(ops.concat([x * 2.0 if i % 50 else x for i, x in enumerate(inputs)], 0))

    arrays = {f"x{i}": rng.standard_normal((2, 8)).astype(np.float32) for i in range(COUNT)}
    program = Session("cpu").compile(graph())
    wanted = np.concatenate([a * (1 if i % 50 == 0 else 2) for i, a in enumerate(arrays.values())], 0)
    assert np.array_equal(program.run(arrays)[0], wanted)
    assert len(program.lir.schedule) < 12
