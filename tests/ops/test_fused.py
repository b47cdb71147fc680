"""Fused ops mean what their parts mean; the parts are what the specification says."""

from collections import Counter

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import f16, f32, f64
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, constant, evaluate, evaluate_values, parse, placeholder, pullback
from strata.ops.nn.fused import ElementwiseRegion, FusedMatMulBiasAct, FusedResidualRmsNorm, FusedSwiGLU
from strata.ops.nn.fused_blocks import FusedTransformerLayer
from strata.testing.check import type_of

F = torch.nn.functional


def run(fn, *arrays):
    inputs = [placeholder(f"x{i}", type_of(a)) for i, a in enumerate(arrays)]
    return evaluate_values([fn(*inputs)], dict(zip(inputs, arrays, strict=True)), {})[0]


def test_7_lora_matmul(rng) -> None:
    x, w, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8), (8, 6), (8, 2), (2, 6)))
    got = run(lambda *v: ops.lora_matmul(*v, scale=0.5), x, w, a, b)
    np.testing.assert_allclose(got, x @ w + 0.5 * (x @ a) @ b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("act", [None, "gelu", "relu", "silu", "mish", "gelu_approx"])
def test_the_epilogue_honours_every_activation(act: str | None, rng) -> None:
    x, w, b = (rng.standard_normal(s) for s in ((2, 3, 4), (4, 5), (5,)))
    got = run(lambda *v: ops.fused_matmul_bias_act(*v, act=act), x, w, b)
    reference = {"gelu_approx": lambda t: F.gelu(t, approximate="tanh"), None: lambda t: t}
    want = reference.get(act, getattr(F, str(act), None))(torch.tensor(x @ w + b))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-10)


def test_residual_norms_equal_torch(rng) -> None:
    x, res, bias, gamma, beta = (rng.standard_normal(s) for s in ((2, 3, 4), (2, 3, 4), (4,), (4,), (4,)))
    got = run(lambda x, r, b, g, t: ops.fused_residual_layer_norm(x, r, g, t, bias=b), x, res, bias, gamma, beta)
    want = F.layer_norm(torch.tensor(x + res + bias), (4,), torch.tensor(gamma), torch.tensor(beta))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-9)
    got = run(lambda x, r, g, t: ops.fused_residual_rms_norm(x, r, g, t, eps=1e-6), x, res, gamma, beta)
    want = F.rms_norm(torch.tensor(x + res), (4,), torch.tensor(gamma), eps=1e-6) + torch.tensor(beta)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-9)


def test_swiglu_has_up_first_unless_told() -> None:
    x = np.float64([[2, 3, 1, -1]])
    silu = lambda v: v / (1 + np.exp(-v))
    np.testing.assert_allclose(run(ops.fused_swiglu, x), [[2 * silu(1), 3 * silu(-1)]])
    np.testing.assert_allclose(run(lambda v: ops.fused_swiglu(v, gate_first=True), x), [[silu(2), -silu(3)]])
    assert FusedSwiGLU(gate_first=False, cast_to=f16)(placeholder("x", f32[3, 4])).type == f16[3, 2]


def encoder_arrays(rng, has_bias: bool):
    shapes = {
        "hidden": (2, 3, 4),
        "qkv_w": (4, 12),
        "qkv_b": (12,),
        "out_w": (4, 4),
        "out_b": (4,),
        "ln1_g": (4,),
        "ln1_b": (4,),
        "fc1_w": (4, 6),
        "fc1_b": (6,),
        "fc2_w": (6, 4),
        "fc2_b": (4,),
        "ln2_g": (4,),
        "ln2_b": (4,),
    }
    names = [n for n in shapes if has_bias or n not in ("qkv_b", "out_b", "fc1_b", "fc2_b")]
    return {n: rng.standard_normal(shapes[n]) for n in names}


@pytest.mark.parametrize("has_bias", [True, False])
def test_86_a_transformer_layer_decomposes_and_differentiates(has_bias: bool, rng) -> None:
    given = encoder_arrays(rng, has_bias)
    inputs = {n: placeholder(n, type_of(a)) for n, a in given.items()}
    mask = constant(np.float64([[1, 1, 0], [1, 1, 1]]))
    y = ops.fused_transformer_layer(*inputs.values(), mask, num_heads=2, head_dim=2)
    assert isinstance(y.node.op, FusedTransformerLayer)
    assert len(y.node.inputs) == (14 if has_bias else 10)
    g = Graph("parts")
    leaves = [g.input(n, x.type) for n, x in inputs.items()]
    g.outputs(y.node.op.decompose(*leaves, mask))
    count = Counter(node.op.name for node in g.nodes())
    assert count["matmul"] >= 4
    assert count["attention"] == 1
    assert count["layer_norm"] == 2
    assert count["slice"] >= 3
    assert count["gelu"] == 1
    grads = pullback([y], [ops.ones_like(y)], list(inputs.values()))
    assert all(x is not None for x in grads)
    known = dict(zip(inputs.values(), given.values(), strict=True))
    for x, d in zip(inputs.values(), evaluate_values(grads, known, {}), strict=True):
        assert np.isfinite(d).all(), x


def test_a_transformer_layer_equals_torch(rng) -> None:
    given = encoder_arrays(rng, has_bias=True)
    keep = np.array([[True, True, False], [True, True, True]])
    got = run(
        lambda *v: ops.fused_transformer_layer(*v, constant(keep), num_heads=2, head_dim=2, act="relu"), *given.values()
    )
    layer = torch.nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    t = {n: torch.tensor(a) for n, a in given.items()}
    state = {
        "self_attn.in_proj_weight": t["qkv_w"].T,
        "self_attn.in_proj_bias": t["qkv_b"],
        "self_attn.out_proj.weight": t["out_w"].T,
        "self_attn.out_proj.bias": t["out_b"],
        "linear1.weight": t["fc1_w"].T,
        "linear1.bias": t["fc1_b"],
        "linear2.weight": t["fc2_w"].T,
        "linear2.bias": t["fc2_b"],
        "norm1.weight": t["ln1_g"],
        "norm1.bias": t["ln1_b"],
        "norm2.weight": t["ln2_g"],
        "norm2.bias": t["ln2_b"],
    }
    layer.load_state_dict(state)
    layer.train()  # the path without the fused encoder, which would pad the output
    want = layer(t["hidden"], src_key_padding_mask=torch.tensor(~keep))
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-9, atol=1e-11)


def test_92_a_region_with_inner_singletons_equals_the_steps(rng) -> None:
    chain = (("multiply", (0, 1)), ("add", (3, 2)), ("tanh", (4,)), ("cast", (5,), (f64,)))
    x, y, z = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 4, 5), (3, 1, 1), (1, 3, 1, 1)))
    got = run(ElementwiseRegion(chain), x, y, z)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, np.tanh(x * y + z).astype(np.float64))


def test_a_region_is_readable_text_and_reads_back() -> None:
    g = Graph("r")
    x, y = g.input("x", (3, 4)), g.input("y", (4,))
    g.outputs(ElementwiseRegion((("add", (0, 1)), ("cast", (2,), (f16,)), ("exp", (3,))))(x, y))
    assert '{chain = (("add", (0, 1)), ("cast", (2,), (f16,)), ("exp", (3,)))}' in str(g)
    assert parse(str(g)) == g
    ones = np.ones((3, 4), np.float32)
    assert evaluate(g, {"x": ones, "y": ones[0]})[0].dtype == np.float16


def test_mistakes() -> None:
    x, w, b = placeholder("x", f32[3, 4]), placeholder("w", f32[4, 5]), placeholder("b", f32[4])
    with pytest.raises(ShapeError, match=r"bias f32\[4\] does not have one element for each column of f32\[4, 5\]"):
        FusedMatMulBiasAct(None)(x, w, b)
    with pytest.raises(OptionError, match="no activation is named 'gelo'"):
        ops.fused_matmul_bias_act(x, w, placeholder("b", f32[5]), act="gelo")
    with pytest.raises(ShapeError, match="takes 5 inputs with has_bias=True, got 4"):
        FusedResidualRmsNorm(has_bias=True, eps=1e-5)(x, x, b, b)
    with pytest.raises(ShapeError, match="does not make two halves"):
        FusedSwiGLU(gate_first=False, cast_to=None)(placeholder("x", f32[3, 5]))
    with pytest.raises(OptionError, match="step 0: reduce_sum is not element-wise"):
        ElementwiseRegion((("reduce_sum", (0,)),))(x)
    with pytest.raises(OptionError, match=r"step 0: operands \(1,\) are not among the 1 values before it"):
        ElementwiseRegion((("exp", (1,)),))(x)
    with pytest.raises(ShapeError, match="step 0: add: shapes"):
        ElementwiseRegion((("add", (0, 1)),))(x, w)
