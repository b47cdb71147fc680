"""The thinnest whole path: gelu(x @ w + b) as a graph, printed, differentiated, fused, planned, compiled, run."""

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.core import sym
from strata.mir import Graph, evaluate, parse
from strata.runtime import CompilePipeline, Session


def dense_graph(batch) -> Graph:
    g = Graph("dense")
    x = g.input("x", (batch, 64))
    w = g.param("w", (64, 48))
    b = g.param("b", (48,))
    return g.outputs((x @ w + b).gelu())


def arrays(batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (batch, 64), "w": (64, 48), "b": (48,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_prints_and_reads_back() -> None:
    g = dense_graph(4)
    assert parse(str(g)) == g


def test_is_one_kernel() -> None:
    lir = CompilePipeline("cpu").compile(dense_graph(4)).lir
    assert [step.label for step in lir.schedule] == ["matmul + add + gelu"]
    assert lir.arena_size == 0


@pytest.mark.parametrize("batch", [1, 3, 17, 64])
def test_symbolic_batch_serves_every_size_with_one_compile(batch: int) -> None:
    feeds = arrays(batch)
    compiled = Session("cpu").compile(dense_graph(sym("B", 1, 64)))
    compiled.set_params({"w": feeds["w"], "b": feeds["b"]})
    (out,) = compiled.run(x=feeds["x"])
    (expected,) = evaluate(dense_graph(batch), feeds, wide=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_threads_or_batch() -> None:
    feeds = arrays(64)
    compiled = Session("cpu").compile(dense_graph(sym("B", 1, 64)))
    compiled.set_params({"w": feeds["w"], "b": feeds["b"]})
    outs = []
    for threads in (1, 2, 7):
        out = np.empty((64, 48), np.float32)
        compiled._executable.run([feeds["x"]], [out], {"B": 64}, threads)
        outs.append(out)
    assert all(np.array_equal(outs[0], other) for other in outs[1:])
    (one,) = compiled.run(x=feeds["x"][5:6])
    np.testing.assert_array_equal(one[0], outs[0][5])
