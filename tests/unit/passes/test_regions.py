"""Element-wise regions: marking, limits, taking apart."""

import numpy as np

from strata import ops
from strata.core import f32
from strata.mir import Graph, evaluate
from strata.passes import MarkElementwiseRegions, PassContext, UnfuseElementwiseRegions, run_passes


def run(graph, *passes):
    return run_passes(passes, graph, PassContext())[0]


def regions(graph):
    return [n for n in graph.nodes() if n.op.name == "elementwise_region"]


def three_inputs():
    g = Graph("g")
    return g, [g.input(n, f32[4]) for n in "abc"]


def test_a_chain_is_one_region():
    g, (a, b, c) = three_inputs()
    (region,) = regions(run(g.outputs(ops.relu((a + b) * c)), MarkElementwiseRegions()))
    assert len(region.inputs) == 3
    assert region.op.chain == (("add", (0, 1)), ("multiply", (3, 2)), ("relu", (4,)))


def test_a_value_with_two_readers_ends_a_region():
    g, (a, b, c) = three_inputs()
    shared = a + b
    before = g.outputs(shared * c, ops.exp(shared))
    assert run(before, MarkElementwiseRegions()) is before


def test_one_op_is_no_region():
    g, (a, b, _) = three_inputs()
    before = g.outputs(a + b)
    assert run(before, MarkElementwiseRegions()) is before


def test_comparison_and_selection_are_steps():
    g, (a, b, c) = three_inputs()
    (region,) = regions(run(g.outputs(ops.where(a > b, a, b) + c), MarkElementwiseRegions()))
    assert [step[0] for step in region.op.chain] == ["greater", "where", "add"]


def test_two_branches_join():
    g, (a, b, c) = three_inputs()
    (region,) = regions(run(g.outputs((a + b) * ops.exp(c)), MarkElementwiseRegions()))
    assert len(region.op.chain) == 3


def test_taking_apart_restores_the_ops():
    g, (a, b, c) = three_inputs()
    before = g.outputs(ops.where(a > b, ops.relu((a + b) * c), c))
    marked = run(before, MarkElementwiseRegions())
    assert regions(marked)
    assert run(marked, UnfuseElementwiseRegions()) == before
    assert run(before, UnfuseElementwiseRegions()) is before


def test_limits():
    g = Graph("long")
    x = g.input("x", f32[4])
    y = x
    for _ in range(40):
        y = ops.sin(y)
    before = g.outputs(y)
    marked = run(before, MarkElementwiseRegions())
    assert [len(r.op.chain) for r in regions(marked)] == [32, 8]
    whole = run(before, MarkElementwiseRegions(max_steps=64))
    assert [len(r.op.chain) for r in regions(whole)] == [40]
    assert not regions(run(whole, UnfuseElementwiseRegions(32, 16)))


def test_at_most_so_many_inputs():
    g = Graph("wide")
    total = g.input("x", f32[4])
    for i in range(30):
        total = total + g.input(f"x{i}", f32[4])
    found = regions(run(g.outputs(total), MarkElementwiseRegions()))
    assert all(len(r.inputs) <= 16 for r in found)
    assert len(found) == 2


def test_inner_ones_broadcast_as_numpy_does(rng):
    g = Graph("g")
    a, b, c = g.input("a", f32[8, 1]), g.input("b", f32[8, 4]), g.input("c", f32[1, 4])
    before = g.outputs(ops.tanh(a + b) * c)
    after = run(before, MarkElementwiseRegions())
    feeds = {n: rng.standard_normal(s).astype("f4") for n, s in (("a", (8, 1)), ("b", (8, 4)), ("c", (1, 4)))}
    (got,) = evaluate(after, feeds)
    np.testing.assert_allclose(got, np.tanh(feeds["a"] + feeds["b"]) * feeds["c"], rtol=1e-6)
