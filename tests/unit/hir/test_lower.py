"""Blocks lower to what the specification says, mean the same under both policies, and keep their labels."""

from collections import Counter

import numpy as np
import pytest

from strata import hir, ops
from strata.core import TensorType, bf16, f32, i64
from strata.errors import LowerError, OptionError, ShapeError, UnknownNameError
from strata.hir import HirModule, lower, lower_for_autodiff
from strata.mir import Graph, evaluate, pullback
from strata.ops.quant.dequant import quantize_weights


def counts(graph: Graph) -> Counter[str]:
    return Counter(node.op.name for node in graph.nodes() if node.op.name not in ("input", "param"))


def feeds(module: HirModule, rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {}
    for leaf in (*module.inputs, *module.params):
        shape = leaf.type.static_shape
        ids = leaf.dtype.is_int
        arrays[leaf.text] = (
            rng.integers(0, 3, shape) if ids else (rng.standard_normal(shape) * 0.5).astype(leaf.dtype.np)
        )
    return arrays


def check_policies_agree(module: HirModule, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    arrays = feeds(module, rng)
    direct = evaluate(lower(module, "direct"), arrays, wide=True)
    fusable = evaluate(lower(module, "fusable"), arrays, wide=True)
    for a, b in zip(direct, fusable, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    return direct


def linear_module(act: str | None = "gelu", *, bias: bool = True) -> HirModule:
    m = HirModule("linear")
    x, w = m.input("x", (4, 8)), m.param("w", (8, 6))
    b = m.param("b", (6,)) if bias else None
    return m.outputs(m.linear(x, w, b, act=act))


def swiglu_module() -> HirModule:
    m = HirModule("ffn")
    x = m.input("x", (4, 8))
    up, gate, down = m.param("up", (8, 6)), m.param("gate", (8, 6)), m.param("down", (6, 8))
    return m.outputs(m.swiglu_ffn(x, up, gate, down))


def test_linear_with_bias(rng) -> None:
    m = linear_module()
    assert counts(m.lower()) == {"fused_matmul_bias_act": 1}
    assert len(m.lower().nodes()) <= 5
    assert counts(m.lower("fusable")) == {"matmul": 1, "add": 1, "gelu": 1}
    check_policies_agree(m, rng)


def test_linear_without_bias_is_the_same_in_both(rng) -> None:
    m = linear_module(bias=False)
    assert counts(m.lower()) == counts(m.lower("fusable")) == {"matmul": 1, "gelu": 1}
    assert counts(linear_module(None, bias=False).lower()) == {"matmul": 1}
    check_policies_agree(m, rng)


def test_linear_fused_is_fused_in_both(rng) -> None:
    m = HirModule("f")
    m.outputs(m.linear_fused(m.input("x", (4, 8)), m.param("w", (8, 6)), m.param("b", (6,)), act="silu"))
    assert counts(m.lower()) == counts(m.lower("fusable")) == {"fused_matmul_bias_act": 1}


def test_swiglu_ffn(rng) -> None:
    m = swiglu_module()
    assert counts(m.lower()) == {"concat": 1, "matmul": 2, "fused_swiglu": 1}
    assert counts(m.lower("fusable")) == {"matmul": 3, "silu": 1, "multiply": 1}
    assert len(m.lower("fusable").nodes()) == 9
    (got,) = check_policies_agree(m, rng)
    assert got.shape == (4, 8)


def test_swiglu_ffn_equals_the_formula(rng) -> None:
    m = swiglu_module()
    a = feeds(m, rng)
    g = a["x"].astype(np.float64) @ a["gate"]
    want = (g / (1 + np.exp(-g)) * (a["x"] @ a["up"])) @ a["down"]
    np.testing.assert_allclose(evaluate(m.lower(), a)[0], want, rtol=1e-4, atol=1e-5)


def test_residual_rms_norm(rng) -> None:
    m = HirModule("r")
    x, r, g, b = m.input("x", (3, 4)), m.input("r", (3, 4)), m.param("g", (4,)), m.param("b", (4,))
    m.outputs(m.residual_rms_norm(x, r, g, b, eps=1e-6))
    assert counts(m.lower()) == {"fused_residual_rms_norm": 1}
    assert counts(m.lower("fusable")) == {"add": 1, "rms_norm": 1}
    check_policies_agree(m, rng)


def test_a_shared_pair_is_lowered_once(rng) -> None:
    m = HirModule("pair")
    x, w1, w2 = m.input("x", (3, 4)), m.param("w1", (4, 5)), m.param("w2", (4, 2))
    a, b = m.shared_linear_pair(x, w1, w2)
    assert (a.label, b.label) == ("shared_linear_pair[0]", "shared_linear_pair[1]")
    assert (a.text, b.text) == ("h0.0", "h0.1")
    assert (a.type, b.type) == (f32[3, 5], f32[3, 2])
    m.outputs(a, b)
    assert counts(m.lower()) == {"concat": 1, "matmul": 1, "slice": 2}
    assert counts(m.lower("fusable")) == {"matmul": 2}
    check_policies_agree(m, rng)


def test_attention_rope_and_norm_blocks_equal_the_ops(rng) -> None:
    m = HirModule("a")
    q, k, v = (m.input(n, (2, 3, 8)) for n in "qkv")
    cos, sin, g = m.param("cos", (3, 2)), m.param("sin", (3, 2)), m.param("g", (8,))
    turned = m.rope(q, cos, sin, head_dim=4)
    m.outputs(m.rms_norm(m.attention(turned, k, v, num_heads=2, mask_kind="causal"), g, eps=1e-6))
    (got,) = check_policies_agree(m, rng)
    arrays = feeds(m, np.random.default_rng(0))
    graph = Graph("ops")
    leaves = {x.text: graph.input(x.text, x.type) for x in (*m.inputs, *m.params)}
    y = ops.attention(
        ops.rope(leaves["q"], leaves["cos"], leaves["sin"], head_dim=4),
        leaves["k"],
        leaves["v"],
        num_heads=2,
        causal=True,
    )
    graph.outputs(ops.rms_norm(y, leaves["g"], eps=1e-6))
    np.testing.assert_array_equal(evaluate(m.lower(), arrays)[0], evaluate(graph, arrays)[0])
    assert got.shape == (2, 3, 8)


def test_depthwise_conv1d_causal_equals_a_loop(rng) -> None:
    m = HirModule("c")
    x, w, pad = m.input("x", (2, 5, 3)), m.param("w", (3, 1, 1, 4)), m.input("pad", (2, 3, 3))
    m.outputs(m.depthwise_conv1d_causal(x, w, pad, kernel=4))
    (got,) = check_policies_agree(m, rng)
    arrays = feeds(m, np.random.default_rng(1))
    (got,) = evaluate(m.lower(), arrays)
    long = np.concatenate([arrays["pad"], arrays["x"]], 1)
    want = np.zeros((2, 5, 3))
    for t in range(5):
        for j in range(4):
            want[:, t] += long[:, t + j] * arrays["w"][:, 0, 0, j]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(LowerError, match=r"left_pad must have shape \[2, 4, 3\]"):
        HirModule.depthwise_conv1d_causal(m, x, m.param("w5", (3, 1, 1, 5)), pad, kernel=5)


@pytest.mark.parametrize("scheme", ["int8/8", "int4/8", "fp8e4m3", "gguf_q8_0"])
def test_dequant_matmul(scheme: str, rng) -> None:
    codes, *sides = quantize_weights(rng.standard_normal((32, 3)), scheme)
    m = HirModule("q")
    x = m.input("x", (2, 32))
    m.outputs(m.dequant_matmul(x, codes, *sides, scheme=scheme))
    array = rng.standard_normal((2, 32)).astype(np.float32)
    g = Graph("w")
    g.outputs(ops.dequant_weights(codes, *sides, scheme=scheme, k=32, n=3))
    (got,) = evaluate(m.lower(), {"x": array})
    np.testing.assert_allclose(got, array @ evaluate(g, {})[0], rtol=1e-4, atol=1e-5)
    assert hir.parse(str(m)) == m


def test_gated_delta_net_with_and_without_state(rng) -> None:
    m = HirModule("gdn")
    q, k, v = (m.input(n, (1, 3, 2, 4)) for n in "qkv")
    g, beta, state = m.input("g", (1, 3, 2)), m.input("beta", (1, 3, 2)), m.input("state", (1, 2, 4, 4))
    plain = m.gated_delta_net(q, k, v, g, beta)
    out, last = m.gated_delta_net_carry(q, k, v, g, beta, state)
    assert last.type == f32[1, 2, 4, 4]
    m.outputs(plain, out, last)
    arrays = feeds(m, rng) | {"state": np.zeros((1, 2, 4, 4), np.float32)}
    a, b, _ = evaluate(m.lower(), arrays)
    np.testing.assert_allclose(a, b)


def llama_module(kv_heads: int = 1, mask_kind: str = "causal") -> HirModule:
    m = HirModule("llama")
    x = m.input("x", (2, 3, 8))
    shapes = {
        "ln1_g": (8,),
        "ln1_b": (8,),
        "q": (8, 8),
        "k": (8, 4 * kv_heads),
        "v": (8, 4 * kv_heads),
        "o": (8, 8),
        "ln2_g": (8,),
        "ln2_b": (8,),
        "gate": (8, 6),
        "up": (8, 6),
        "down": (6, 8),
        "cos": (3, 2),
        "sin": (3, 2),
    }
    params = [m.param(n, s) for n, s in shapes.items()]
    mask = [m.input("mask", (2, 3))] if mask_kind == "custom" else []
    y = m.llama_decoder_block(x, *params, *mask, num_heads=2, head_dim=4, kv_heads=kv_heads, mask_kind=mask_kind)
    return m.outputs(y)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("mask_kind", ["causal", "none", "custom"])
def test_a_decoder_block_agrees_under_both_policies(kv_heads: int, mask_kind: str, rng) -> None:
    m = llama_module(kv_heads, mask_kind)
    assert len(m.nodes[-1].inputs) == (15 if mask_kind == "custom" else 14)
    (got,) = check_policies_agree(m, rng)
    assert got.shape == (2, 3, 8)


def test_a_decoder_block_equals_plain_numpy(rng) -> None:
    m = llama_module(kv_heads=1)
    a = {k: v.astype(np.float64) for k, v in feeds(m, rng).items()}
    (got,) = evaluate(m.lower(), feeds(m, np.random.default_rng(3)), wide=True)
    a = {k: v.astype(np.float64) for k, v in feeds(m, np.random.default_rng(3)).items()}

    def rms(x, n):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * a[f"{n}_g"] + a[f"{n}_b"]

    def turn(x, heads):
        x = x.reshape(2, 3, heads, 4)
        lo, hi, c, s = x[..., :2], x[..., 2:], a["cos"][:, None], a["sin"][:, None]
        return np.concatenate([lo * c - hi * s, hi * c + lo * s], -1)

    h = rms(a["x"], "ln1")
    q, k, v = turn(h @ a["q"], 2), turn(h @ a["k"], 1), (h @ a["v"]).reshape(2, 3, 1, 4)
    scores = np.einsum("bshd,btgd->bhst", q, k) / 2
    scores = np.where(np.tril(np.ones((3, 3), bool)), scores, -1e9)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    x = a["x"] + np.einsum("bhst,btgd->bshd", p, v).reshape(2, 3, 8) @ a["o"]
    h = rms(x, "ln2")
    g = h @ a["gate"]
    want = x + (g / (1 + np.exp(-g)) * (h @ a["up"])) @ a["down"]
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_the_draft_head_takes_29_inputs_and_reads_one_token(rng) -> None:
    m = HirModule("mtp")
    width, heads, dim = 8, 2, 4
    shapes = {
        "hidden": (2, 3, width),
        "embedding": (5, width),
        "eh_proj": (2 * width, width),
        "q_gate": (width, heads * 2 * dim),
        "k": (width, dim),
        "v": (width, dim),
        "o": (heads * dim, width),
        "cos": (3, 1),
        "sin": (3, 1),
        "gate": (width, 6),
        "up": (width, 6),
        "down": (6, width),
        "lm_head": (width, 5),
    }
    values = []
    for name in hir.MTP_INPUTS:
        if name in ("ids", "last"):
            values.append(m.input(name, TensorType(i64, (2, 3) if name == "ids" else (2,))))
        else:
            values.append(m.param(name, shapes.get(name, (dim if name[:6] in ("q_norm", "k_norm") else width,))))
    assert len(values) == 29
    y = m.qwen35_mtp_head(*values, num_heads=heads, head_dim=dim, kv_heads=1, n_rot=2)
    assert y.type == f32[2, 5]
    m.outputs(y)
    (got,) = check_policies_agree(m, rng)
    arrays = feeds(m, rng) | {"last": np.array([1, 1])}
    (first,) = evaluate(m.lower(), arrays)
    changed = dict(arrays, hidden=arrays["hidden"].copy())
    changed["hidden"][:, 2] += 1  # a token after the wanted one
    np.testing.assert_allclose(evaluate(m.lower(), changed)[0], first, rtol=1e-6)
    assert got.shape == (2, 5)
    with pytest.raises(LowerError, match="qwen35_mtp_head: takes 29 inputs, got 28"):
        m.qwen35_mtp_head(*values[:28], num_heads=heads, head_dim=dim)


def test_lowering_for_derivatives_is_fusable_and_differentiates() -> None:
    graph = lower_for_autodiff(llama_module())
    assert counts(graph)["fused_swiglu"] == 0
    (y,) = graph.results
    grads = pullback([y], [ops.ones_like(y)], [*graph.inputs, *graph.params])
    assert all(g is not None for g in grads)


def test_symbolic_batch_and_sequence(rng) -> None:
    m = HirModule("sym")
    x = m.input_batch_seq("x", "batch", "seq", 64)
    m.outputs(m.linear(x, m.param("w", (64, 2)), m.param("b", (2,)), act="relu"))
    graph = m.lower()
    assert sorted(graph.symbols()) == ["batch", "seq"]
    assert graph.bind({"batch": 1, "seq": 8}).results[0].type == f32[1, 8, 2]
    arrays = {"x": rng.standard_normal((2, 5, 64)), "w": rng.standard_normal((64, 2)), "b": rng.standard_normal(2)}
    (got,) = evaluate(graph, {k: v.astype(np.float32) for k, v in arrays.items()})
    assert got.shape == (2, 5, 2)


def test_provenance_is_kept() -> None:
    m = HirModule("p")
    x, w, b = m.input("x", (4, 8)), m.param("w", (8, 8)), m.param("b", (8,))
    with m.scope("layer0"):
        h = m.linear(x, w, b, act="gelu")
    h = m.named("second", lambda m: m.linear(h, w, b))
    m.outputs(m.relu(h))
    graph = m.lower("fusable")
    blocks = [n.origin.block for n in graph.nodes() if n.op.name not in ("input", "param")]
    assert blocks == ["layer0.linear", "layer0.linear", "layer0.linear", "second", "second", "relu"]
    places = {n.origin.place.file for n in graph.nodes() if n.op.name == "matmul"}
    assert places == {__file__}


def test_half_precision_modules(rng) -> None:
    m = HirModule("half")
    x, w, b = m.input("x", (4, 8), bf16), m.param("w", (8, 6), bf16), m.param("b", (6,), bf16)
    m.outputs(m.linear(x, w, b, act="gelu"))
    assert m.lower().results[0].dtype is bf16
    check_policies_agree(m, rng)


def test_mistakes() -> None:
    m = HirModule("m")
    x, w, b = m.input("x", (4, 8)), m.param("w", (9, 6)), m.param("b", (6,))
    with pytest.raises(ShapeError, match=r"linear: .*inner sizes differ, 8 and 9") as caught:
        m.linear(x, w, b)
    assert caught.value.place is not None
    assert caught.value.place.file == __file__
    with pytest.raises(LowerError, match="linear_fused: needs a bias"):
        m.linear_fused(x, w, None)
    with pytest.raises(LowerError, match="swiglu_ffn: takes 4 inputs, got 2"):
        m.apply(hir.BLOCKS["swiglu_ffn"](), x, w)
    with pytest.raises(LowerError, match="attention: takes 4 inputs with mask_kind='custom', got 3"):
        m.attention(x, x, x, num_heads=2, mask_kind="custom")
    with pytest.raises(LowerError, match="attention: takes 3 inputs with mask_kind='causal', got 4"):
        m.attention(x, x, x, x, num_heads=2, mask_kind="causal")
    with pytest.raises(LowerError, match="dequant_matmul: needs a scale and a zero point with scheme 'int8/32'"):
        m.dequant_matmul(x, w, scheme="int8/32")
    with pytest.raises(LowerError, match="module 'm' has no outputs"):
        m.lower()
    with pytest.raises(OptionError, match="fusion is 'direct' or 'fusable', got 'eager'"):
        HirModule("n", fusion="eager")
    with pytest.raises(OptionError, match="module 'm' has an input or parameter 'x' already"):
        m.param("x", (1,))
    with pytest.raises(LowerError, match=r"x : f32\[4, 8\] belongs to module 'm', not to 'n'"):
        HirModule("n").relu(x)
    with pytest.raises(OptionError, match="no activation is named 'gelo'"):
        m.linear(x, m.param("w2", (8, 6)), act="gelo")
    with pytest.raises(AttributeError, match="a module has no block or op 'linaer'"):
        _ = m.linaer
    with pytest.raises(UnknownNameError, match="has no input or parameter 'y'"):
        m.leaf("y")
