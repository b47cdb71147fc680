"""Gated layers: the halves of a product that meet element by element are one kernel with it."""

from typing import Any

import numpy as np
import pytest

from strata import ops as functions
from strata.core import Target, bf16, f16, f32, f64, sym
from strata.mir import Graph, Value, evaluate
from strata.runtime import CompiledGraph, CompileOptions, Session

ops: Any = functions
CLOSE = {"f64": 1e-12, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}
SIZES = [(1, 64, 48), (3, 17, 40), (7, 33, 9), (130, 64, 100), (1, 256, 1408), (2, 1, 8), (0, 8, 16)]


def gated(rows: object, k: int, n: int, form: str = "two", dtype=f32, act: str = "silu") -> Graph:
    """act(x a) * (x b), from two weights, from two with biases, or from one whose columns are halved."""
    g = Graph("gated")
    x = g.input("x", (rows, k), dtype)
    if form == "halves":
        both = x @ ops.transpose(g.param("w", (2 * n, k), dtype), (1, 0))
        a, b = ops.narrow(both, -1, 0, n), ops.narrow(both, -1, n, n)
    else:
        a, b = x @ g.param("w0", (k, n), dtype), x @ g.param("w1", (k, n), dtype)
    if form == "biases":
        a, b = a + g.param("b0", (n,), dtype), b + g.param("b1", (n,), dtype)
    if form == "swapped":
        a, b = b, a
    return g.outputs(getattr(ops, act)(a) * b)


def checked(graph: Graph, *rows: int, threads: int | None = None) -> tuple[CompiledGraph, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    compiled = Session("cpu").compile(graph, CompileOptions(threads=threads))
    results = []
    for count in rows:
        feeds = {
            x.node.op.key: (
                rng.standard_normal([d if isinstance(d, int) else count for d in x.shape]) * 0.3
            ).astype(x.dtype.np)
            for x in (*graph.inputs, *graph.params)
        }  # fmt: skip
        compiled.set_params({n: feeds[n] for n in graph.param_names})
        results += compiled.run({n: feeds[n] for n in graph.input_names})
        (want,) = evaluate(graph, feeds, wide=True)
        close = CLOSE[graph.results[0].dtype.name]
        np.testing.assert_allclose(
            results[-1].astype(np.float64), np.asarray(want, np.float64), rtol=close, atol=close * 8
        )
    return compiled, results


def steps(compiled: CompiledGraph) -> list[str]:
    return [s.label for s in compiled.lir.schedule if s.phase != "prologue"]


@pytest.mark.parametrize("form", ["two", "swapped", "biases", "halves"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_kernel(size: tuple[int, int, int], form: str) -> None:
    m, k, n = size
    compiled, _ = checked(gated(m, k, n, form), m)
    assert len(steps(compiled)) == bool(m), steps(compiled)


@pytest.mark.parametrize("dtype", [f64, f16, bf16], ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu", "sigmoid"])
def test_other_types_and_activations(dtype, act: str) -> None:
    for m in (1, 9):
        compiled, _ = checked(gated(m, 40, 24, dtype=dtype, act=act), m)
        assert len(steps(compiled)) == 1


@pytest.mark.parametrize("form", ["two", "halves"])
def test_rows_of_any_number(form: str) -> None:
    compiled, _ = checked(gated(sym("N", 0, 200), 33, 50, form), 0, 1, 2, 7, 97, 200)
    assert len(steps(compiled)) == 1


def test_weights_that_are_inputs() -> None:
    """Packed by every run."""
    g = Graph("open")
    x, w = g.input("x", (5, 16)), g.input("w", (16, 64))
    both = x @ w
    graph = g.outputs(ops.silu(ops.narrow(both, -1, 32, 32)) * ops.narrow(both, -1, 0, 32))
    compiled, _ = checked(graph, 5)
    assert steps(compiled) == ["matmul + slice + silu + multiply"]


def test_batches_of_rows() -> None:
    g = Graph("batches")
    both = g.input("x", (2, 3, 5, 16)) @ g.param("w", (16, 64))
    graph = g.outputs(ops.gelu(ops.narrow(both, -1, 0, 32)) * ops.narrow(both, -1, 32, 32))
    compiled, _ = checked(graph, 1)
    assert len(steps(compiled)) == 1


def test_columns_of_x_are_packed() -> None:
    """A transposed left side goes through blocks of k, whose sums wait."""
    g = Graph("transposed")
    x = ops.transpose(g.input("x", (700, 130)), (1, 0))
    both = x @ g.param("w", (700, 96))
    graph = g.outputs(ops.silu(ops.narrow(both, -1, 0, 48)) * ops.narrow(both, -1, 48, 48))
    compiled, _ = checked(graph, 1)
    assert len(steps(compiled)) == 1


def test_threads_do_not_change_the_bits() -> None:
    wanted = [checked(gated(37, 64, 100), 37, threads=n)[1][0] for n in (1, 2, 7)]
    for other in wanted[1:]:
        np.testing.assert_array_equal(other, wanted[0])


@pytest.mark.parametrize("name", ["baseline", "avx2"])
def test_older_processors(name: str) -> None:
    from strata.backends.llvm.runtime.executable import CpuExecutable
    from strata.lir import plan
    from strata.passes import PassContext, default_passes, run_passes

    graph, _ = run_passes(default_passes(PassContext(claims=frozenset())), gated(7, 33, 50), PassContext())
    target = Target.named(name)
    executable = CpuExecutable(plan(graph, target), target)
    rng = np.random.default_rng(0)
    feeds = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (7, 33)), ("w0", (33, 50)), ("w1", (33, 50)))
    }
    for n in ("w0", "w1"):
        executable.set_param(n, feeds[n])
    out = np.empty((7, 50), np.float32)
    executable.run([feeds["x"]], [out], {})
    np.testing.assert_allclose(out, evaluate(gated(7, 33, 50), feeds, wide=True)[0], rtol=1e-5, atol=1e-5)


def apart(build) -> list[str]:
    g = Graph("apart")
    both: Value = g.input("x", (4, 16)) @ g.param("w", (16, 64))
    compiled, _ = checked(g.outputs(build(both)), 1)
    return steps(compiled)


def test_halves_that_do_not_meet_alone() -> None:
    """Other readers, other parts, or ops between that are not element by element: the product is stored."""
    first, second = (lambda x: ops.narrow(x, -1, 0, 32)), (lambda x: ops.narrow(x, -1, 32, 32))
    assert len(apart(lambda x: ops.silu(first(x)) * second(x) + ops.sum(x))) > 1
    assert len(apart(lambda x: ops.silu(ops.narrow(x, -1, 0, 16)) * ops.narrow(x, -1, 48, 16))) == 2
    assert len(apart(lambda x: ops.softmax(first(x), axis=-1) * second(x))) == 2
    assert len(apart(lambda x: ops.silu(first(x)) * ops.flip(second(x), -1))) == 2
