"""Pattern fusions: what is fused, what is not, and that every result stays what it was."""

import numpy as np
import pytest

from strata import ops
from strata.core import f32, f64
from strata.errors import OptionError
from strata.mir import Graph, evaluate
from strata.passes import (
    PASSES,
    FuseMatMulBiasAct,
    FuseSwiGLU,
    FuseSwiGLUDualMatmul,
    PassContext,
    ShareMatMul,
    default_passes,
    parse_passes,
    run_passes,
)

EVERYTHING = PassContext()
PATTERNS = [name for name in PASSES if name.startswith(("fuse_", "share_", "mark_", "find_", "legalize_"))]


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


def dense(act=None, *, also_result=None, bias_first=False) -> Graph:
    g = Graph("dense")
    x = g.input("x", f32[3, 4])
    if bias_first:
        b, w = g.param("b", f32[8]), g.param("w", f32[4, 8])
    else:
        w, b = g.param("w", f32[4, 8]), g.param("b", f32[8])
    product = x @ w
    total = product + b
    out = total if act is None else getattr(ops, act)(total)
    extra = {"product": [product], "sum": [total], None: []}[also_result]
    return g.outputs(out, *extra)


@pytest.mark.parametrize("act", [None, "gelu", "silu"])
def test_matmul_bias_act_is_one_op(act, rng):
    before = dense(act)
    after = run(before, FuseMatMulBiasAct())
    assert len(after.nodes()) == 4  # three leaves and the op
    assert after.results[0].node.op.act == act
    check_equal(before, after, rng)


def test_bias_may_be_declared_first(rng):
    after = run(dense("gelu", bias_first=True), FuseMatMulBiasAct())
    assert names(after).count("fused_matmul_bias_act") == 1


def test_other_activations_only_where_listed():
    assert len(run(dense("exp"), FuseMatMulBiasAct()).nodes()) == 5
    assert len(run(dense("exp"), FuseMatMulBiasAct("exp+gelu")).nodes()) == 4
    with pytest.raises(OptionError, match="'softmax' cannot be an epilogue"):
        FuseMatMulBiasAct("softmax")


@pytest.mark.parametrize("also_result", ["product", "sum"])
def test_intermediates_that_are_results_stay(also_result, rng):
    before = dense("gelu", also_result=also_result)
    after = run(before, FuseMatMulBiasAct())
    check_equal(before, after, rng)
    assert after.results[0].node.op.name == "gelu"


def test_bias_of_another_length_is_rejected():
    g = Graph("g")
    x, w, b = g.input("x", f32[3, 4]), g.param("w", f32[4, 8]), g.param("b", f32[1])
    assert "fused_matmul_bias_act" not in names(run(g.outputs(x @ w + b), FuseMatMulBiasAct()))


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


def swiglu(gate_first: bool) -> Graph:
    g = Graph("swiglu")
    x = g.input("x", f32[3, 4])
    up, gate, down = g.param("up", f32[4, 8]), g.param("gate", f32[4, 8]), g.param("down", f32[8, 4])
    a, b = (ops.silu(x @ gate), x @ up) if gate_first else (x @ up, ops.silu(x @ gate))
    return g.outputs(ops.multiply(a, b) @ down)


@pytest.mark.parametrize("gate_first", [False, True])
def test_swiglu_of_two_products(gate_first, rng):
    before = swiglu(gate_first)
    for passes in ([FuseSwiGLUDualMatmul()], [ShareMatMul(), FuseSwiGLU()]):
        after = run(before, *passes)
        assert names(after).count("fused_swiglu") == 1
        assert names(after).count("matmul") == 2
        check_equal(before, after, rng)


def test_swiglu_keeps_products_that_have_other_readers(rng):
    g = Graph("g")
    x, up, gate = g.input("x", f32[3, 4]), g.param("up", f32[4, 8]), g.param("gate", f32[4, 8])
    product = x @ up
    before = g.outputs(product * ops.silu(x @ gate), product)
    after = run(before, FuseSwiGLUDualMatmul())
    assert after is before


def test_swiglu_needs_weights_that_are_parameters():
    g = Graph("g")
    x, up, gate = g.input("x", f32[3, 4]), g.input("up", f32[4, 8]), g.input("gate", f32[4, 8])
    before = g.outputs((x @ up) * ops.silu(x @ gate))
    assert run(before, FuseSwiGLUDualMatmul()) is before


def test_feed_forward_of_an_encoder_shrinks(rng):
    g = Graph("ffn")
    x = g.input("x", f32[3, 8])
    h = ops.gelu(x @ g.param("w1", f32[8, 32]) + g.param("b1", f32[32]))
    y = ops.layer_norm(
        h @ g.param("w2", f32[32, 8]) + g.param("b2", f32[8]) + x, g.param("g", f32[8]), g.param("b", f32[8])
    )
    before = g.outputs(y)
    after = run(before, *default_passes(EVERYTHING))
    found = names(after)
    assert found.count("fused_matmul_bias_act") == 2
    assert found.count("fused_residual_layer_norm") == 1
    assert len(found) < len(before.nodes())
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


def test_double_precision_fuses_and_integers_do_not():
    for dtype, fused in ((f64, True), ("i32", False)):
        g = Graph("g")
        x, w, b = g.input("x", (3, 4), dtype), g.param("w", (4, 8), dtype), g.param("b", (8,), dtype)
        after = run(g.outputs(x @ w + b), FuseMatMulBiasAct())
        assert ("fused_matmul_bias_act" in names(after)) is fused
