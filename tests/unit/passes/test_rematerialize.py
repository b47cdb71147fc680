"""Values computed again: less memory, the same bits."""

import numpy as np
import pytest

from strata import ops
from strata.errors import MemoryLimitError
from strata.mir import Graph, evaluate
from strata.passes import PassContext, SplitBarriers, run_passes
from strata.runtime import CompileOptions, CompilePipeline, Session
from strata.transforms import value_and_grad


def perceptron(layers: int = 6, batch: int = 32, width: int = 32, *, checkpointed: bool = False) -> Graph:
    g = Graph("perceptron")
    x = g.input("x", (batch, width))
    for i in range(layers):
        given = (
            g.param(f"w{i}", (width, 4 * width)),
            g.param(f"b{i}", (4 * width,)),
            g.param(f"v{i}", (4 * width, width)),
        )

        def block(h, w, b, v):
            return ops.gelu(h @ w + b) @ v

        x = x + (ops.checkpoint(block) if checkpointed else block)(x, *given)
    return g.outputs(ops.mean(ops.square(x)))


def run(graph: Graph, options: CompileOptions | None, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds = {x.node.op.key: (rng.standard_normal(x.shape) * 0.1).astype("f4") for x in (*graph.inputs, *graph.params)}
    compiled = Session("cpu").compile(graph, options)
    compiled.set_params({n: feeds[n] for n in graph.param_names})
    results = list(compiled.run({n: feeds[n] for n in graph.input_names}))
    for got, want in zip(results, evaluate(graph, feeds, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    return results


def peak(graph: Graph, options: CompileOptions | None = None) -> int:
    return CompilePipeline("cpu", options).compile(graph).lir.arena_size


def test_training_takes_less_memory_and_gives_the_same_bits():
    graph = value_and_grad(perceptron())
    again = CompileOptions(rematerialize=True)
    assert peak(graph, again) < 0.7 * peak(graph)
    for a, b in zip(run(graph, None), run(graph, again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_memory_limit_asks_for_it():
    """Values are kept while they fit; a limit makes the plan compute them again, or is refused."""
    graph = value_and_grad(perceptron())
    kept, least = peak(graph), peak(graph, CompileOptions(rematerialize=True))
    assert peak(graph, CompileOptions(memory_limit=kept)) == kept
    limited = CompileOptions(memory_limit=(kept + least) // 2)
    assert peak(graph, limited) == least
    for a, b in zip(run(graph, None), run(graph, limited), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(MemoryLimitError, match=f"needs {kept:,} bytes of scratch memory, the limit is {least - 1:,}"):
        peak(graph, CompileOptions(memory_limit=least - 1))


def test_inference_is_left_alone():
    graph = perceptron()
    _, report = CompilePipeline("cpu", CompileOptions(rematerialize=True)).optimize(graph)
    assert not next(p for p in report.passes if p.name == "rematerialize").changed


def test_checkpoints_need_no_copies():
    plain, saved = value_and_grad(perceptron()), value_and_grad(perceptron(checkpointed=True))
    lir = CompilePipeline("cpu").compile(saved).lir
    assert not any(n.op.name == "barrier" for s in lir.schedule for n in s.nodes)
    assert not any(s.label == "fence" for s in lir.schedule)
    assert lir.arena_size < 0.7 * peak(plain)
    run(saved, None)


def test_barriers_keep_computations_apart():
    g = Graph("g")
    x = g.input("x", (4,))
    (behind,) = ops.Barrier()(x)
    after, _ = run_passes([SplitBarriers()], g.outputs(ops.exp(x), ops.exp(behind)), PassContext())
    assert sum(n.op.name == "exp" for n in after.nodes()) == 2


@pytest.mark.parametrize("layers", [2, 5])
def test_gradients_of_weights_are_computed_when_they_can_be(layers):
    """In the order of the graph they come last, and everything they need is held until then."""
    lir = CompilePipeline("cpu").compile(value_and_grad(perceptron(layers))).lir
    written = [name for s in lir.schedule for name in s.outputs]
    last = [int(n.removeprefix("out")) for n in written if n.startswith("out")]
    assert last != sorted(last)  # gradients of the last layer come first
    assert lir.arena_size == lir.placement().lower_bound
