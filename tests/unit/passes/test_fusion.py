"""Passes that join and find ops: products of one left side, attention; every result stays what it was."""

import numpy as np
import pytest

from strata import ops
from strata.core import f32
from strata.mir import Graph, evaluate
from strata.passes import PASSES, PassContext, ShareMatMul, parse_passes, run_passes

EVERYTHING = PassContext()
PATTERNS = [name for name in PASSES if name.startswith(("share_", "find_", "legalize_"))]


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes()]


def run(graph: Graph, *passes) -> Graph:
    return run_passes(passes, graph, EVERYTHING)[0]


def check_equal(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    feeds = {
        x.node.op.key: rng.standard_normal(x.type.static_shape).astype(x.dtype.np)
        for x in (*before.inputs, *before.params)
    }
    for old, new in zip(evaluate(before, feeds), evaluate(after, feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5)


def test_shared_products_become_slices(rng):
    g = Graph("qkv")
    x = g.input("x", f32[3, 4])
    weights = [g.param(f"w{i}", f32[4, n]) for i, n in enumerate((8, 8, 16))]
    before = g.outputs(*(x @ w for w in weights))
    after = run(before, ShareMatMul())
    assert names(after).count("matmul") == 1
    assert names(after).count("slice") == 3
    assert len(after.nodes()) == 9
    check_equal(before, after, rng)


def test_four_products_of_a_mixture_share(rng):
    g = Graph("experts")
    x = g.input("x", f32[3, 4])
    before = g.outputs(sum((x @ g.param(f"w{i}", f32[4, 8])).tanh() for i in range(4)))
    after = run(before, ShareMatMul())
    assert names(after).count("slice") == 4
    check_equal(before, after, rng)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_intermediate_may_be_a_result(name, rng):
    """All values of a program are results at once: no pass may lose or change one."""
    g = Graph("all")
    x = g.input("x", f32[2, 3, 8])
    w, b, gamma, beta = g.param("w", f32[8, 8]), g.param("b", f32[8]), g.param("g", f32[8]), g.param("h", f32[8])
    v, up = g.param("v", f32[8, 8]), g.param("up", f32[8, 16])
    product = x @ w
    total = product + b
    act = ops.gelu(total)
    residual = act + x
    normal = ops.layer_norm(residual, gamma, beta)
    rms = ops.rms_norm(normal + x, gamma, beta)
    flat = ops.reshape(rms, (6, 8))
    left, right = x @ v, ops.silu(x @ w)
    gated = left * right
    wide = x @ up
    halves = [ops.narrow(wide, -1, i * 8, 8) for i in (0, 1)]
    glu = halves[0] * ops.silu(halves[1])
    weights = ops.softmax(x @ ops.transpose(x, (0, 2, 1)), axis=-1)
    mixed = weights @ x
    before = g.outputs(
        product, total, act, residual, normal, rms, flat, left, right, gated, wide, *halves, glu, weights, mixed
    )
    after = run(before, *parse_passes(name))
    check_equal(before, after, rng)
