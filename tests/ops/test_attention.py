"""Attention against torch and a plain loop, in every layout, with every kind of mask."""

import itertools
import math

import numpy as np
import pytest
import torch

import strata as st
from strata import ops
from strata.core import TensorType, as_dtype, f16, f32, f64, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, evaluate, evaluate_values, placeholder, pullback, pushforward
from strata.ops.nn.attention import AttentionBackward
from strata.runtime import Session

RNG = np.random.default_rng(7)


def run(fn, *arrays):
    """A front-end function on arrays."""
    inputs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    return evaluate_values([fn(*inputs)], dict(zip(inputs, arrays, strict=True)), {})[0]


def normal(*shape):
    return RNG.standard_normal(shape)


def loop(q, k, v, keep=None, bias=None, scale=None, softcap=None):
    """Attention of [B, H, S, D] by the formula, one row at a time; `keep(b, h, i, j)` says which scores stay."""
    batch, heads, queries, d = q.shape
    group = heads // k.shape[1]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        row = []
        for j in range(k.shape[2]):
            s = float(q[b, h, i] @ k[b, h // group, j]) * (d**-0.5 if scale is None else scale)
            s = s if softcap is None else softcap * math.tanh(s / softcap)
            s = s if bias is None else s + bias[b, h, i, j]
            row.append(s if keep is None or keep(b, h, i, j) else -1e9)
        weights = np.exp(np.array(row) - max(row))
        out[b, h, i] = (weights / weights.sum()) @ v[b, h // group]
    return out


def to_layout(x, layout):
    if layout == "bhsd":
        return x
    x = x.transpose(0, 2, 1, 3)
    return x if layout == "bshd" else x.reshape(*x.shape[:2], -1) if layout == "bsd" else x.reshape(x.shape[1], -1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bsd", "sd"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_case_99_every_layout_when_length_equals_heads(layout, kv_heads) -> None:
    batch = 1 if layout == "sd" else 2
    q, k, v = normal(batch, 4, 4, 3), normal(batch, kv_heads, 6, 3), normal(batch, kv_heads, 6, 3)
    got = run(
        lambda *x: ops.attention(
            *x, num_heads=4, kv_heads=kv_heads, layout=layout, causal=True, scale=0.3, softcap=1.5
        ),
        *(to_layout(x, layout) for x in (q, k, v)),
    )
    want = loop(q, k, v, keep=lambda b, h, i, j: j <= i + 2, scale=0.3, softcap=1.5)
    np.testing.assert_allclose(got, to_layout(want, layout), rtol=1e-12)


def test_ambiguous_layout_is_an_error() -> None:
    q = placeholder("q", f32[2, 4, 4, 3])
    with pytest.raises(OptionError, match=r"may be \[B, H, S, D\] or \[B, S, H, D\]"):
        ops.attention(q, q, q, num_heads=4)
    with pytest.raises(OptionError, match="may be"):
        ops.attention(q, q, q)
    assert (
        ops.attention(
            placeholder("q", f32[2, 4, 5, 3]), *[placeholder("k", f32[2, 4, 5, 3])] * 2, num_heads=4
        ).node.op.layout
        == "bhsd"
    )
    assert (
        ops.attention(
            placeholder("q", f32[2, 5, 4, 3]), *[placeholder("k", f32[2, 5, 4, 3])] * 2, num_heads=4
        ).node.op.layout
        == "bshd"
    )


def test_sliding_window_keeps_w_plus_one_keys() -> None:
    q, k, v = normal(1, 1, 5, 2), normal(1, 1, 7, 2), normal(1, 1, 7, 2)
    got = run(lambda *x: ops.attention(*x, layout="bhsd", mask_kind="window", window=2), q, k, v)
    np.testing.assert_allclose(got, loop(q, k, v, keep=lambda b, h, i, j: i <= j <= i + 2), rtol=1e-12)


def test_fully_masked_row_is_the_average_of_v() -> None:
    q, k, v = normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4)
    mask = np.ones((2, 5))
    mask[1] = 0
    got = run(lambda *x: ops.attention(*x, layout="bhsd", mask_kind="custom"), q, k, v, mask)
    np.testing.assert_allclose(got[1], np.broadcast_to(v[1].mean(1, keepdims=True), got[1].shape), rtol=1e-12)
    np.testing.assert_allclose(got[0], loop(q, k, v)[0], rtol=1e-12)
    minus_inf = np.where(mask[:, None, None] > 0, 0, -np.inf)
    np.testing.assert_allclose(run(lambda *x: ops.attention(*x, layout="bhsd"), q, k, v, minus_inf), got, rtol=1e-12)


def test_custom_mask_with_causality_and_bias_broadcast() -> None:
    q, k, v = normal(2, 2, 3, 4), normal(2, 2, 3, 4), normal(2, 2, 3, 4)
    flags = np.array([[True, False, True], [True, True, False]])
    got = run(lambda *x: ops.attention(*x, layout="bhsd", causal=True), q, k, v, flags)
    np.testing.assert_allclose(got, loop(q, k, v, keep=lambda b, h, i, j: flags[b, j] and j <= i), rtol=1e-12)
    bias = normal(2, 3, 3)  # [H, Sq, Sk]
    got = run(lambda *x: ops.attention(*x, layout="bhsd", mask_kind="bias"), q, k, v, bias)
    np.testing.assert_allclose(got, loop(q, k, v, bias=np.broadcast_to(bias, (2, 2, 3, 3))), rtol=1e-12)


def test_cache_of_padded_length() -> None:
    q, k, v = normal(2, 2, 2, 3), normal(2, 1, 8, 3), normal(2, 1, 8, 3)
    lengths = np.array([5, 3])
    want = loop(q, k, v, keep=lambda b, h, i, j: j <= lengths[b] - 2 + i)
    by_length = run(lambda *x: ops.attention(*x[:3], layout="bhsd", causal=True, lengths=x[3]), q, k, v, lengths)
    by_offset = run(lambda *x: ops.attention(*x[:3], layout="bhsd", causal=True, offset=x[3]), q, k, v, lengths - 2)
    np.testing.assert_allclose(by_length, want, rtol=1e-12)
    np.testing.assert_allclose(by_offset, want, rtol=1e-12)
    plain = run(lambda *x: ops.attention(*x[:3], layout="bhsd", lengths=x[3]), q, k, v, lengths)
    np.testing.assert_allclose(plain, loop(q, k, v, keep=lambda b, h, i, j: j < lengths[b]), rtol=1e-12)


@pytest.mark.parametrize(("mask", "causal"), [(None, False), (None, True), ("bool", False), ("float", False)])
@pytest.mark.parametrize(
    "shape",
    [
        ((2, 4, 5, 3), (2, 4, 5, 3)),
        ((2, 4, 5, 3), (2, 2, 6, 3)),
        ((3, 5, 2), (3, 6, 2)),
        ((2, 2, 4, 3, 2), (2, 2, 4, 3, 2)),
    ],
)
def test_torch_agrees(shape, mask, causal) -> None:
    q, k, v = normal(*shape[0]), normal(*shape[1]), normal(*shape[1])
    gqa = len(shape[0]) == 4 and shape[0][1] != shape[1][1]
    extra = []
    if mask == "bool":
        extra = [RNG.random((shape[0][-2], shape[1][-2])) < 0.7]
        extra[0][:, 0] = True
    elif mask == "float":
        extra = [normal(shape[0][-2], shape[1][-2])]
    got = run(lambda *x: ops.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=gqa), q, k, v, *extra)
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.from_numpy(extra[0]) if extra else None, is_causal=causal, enable_gqa=gqa
    )
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-10, atol=1e-12)


def test_gqa_must_be_asked_for() -> None:
    with pytest.raises(OptionError, match="q has 4 heads and k has 2"):
        ops.scaled_dot_product_attention(placeholder("q", f32[1, 4, 3, 2]), *[placeholder("k", f32[1, 2, 3, 2])] * 2)


def test_gradients_without_a_mask_are_central_differences() -> None:
    """One node recomputes the probabilities once and gives all three."""
    arrays, ct, step = [normal(1, 2, 3, 4) for _ in range(3)], normal(1, 2, 3, 4), 1e-5
    inputs = [placeholder(f"x{i}", f64[1, 2, 3, 4]) for i in range(4)]

    def attend(*x):
        return ops.attention(*x, num_heads=2, layout="bhsd")

    grads = pullback([attend(*inputs[:3])], [inputs[3]], inputs[:3])
    assert len(set(grads)) == 3
    assert [g.node.op.name for g in grads] == ["attention_backward"] * 3
    assert len({g.node for g in grads}) == 1
    found = evaluate_values(grads, dict(zip(inputs, [*arrays, ct], strict=True)), {})
    for i, gradient in enumerate(found):
        for at in np.ndindex(gradient.shape):
            moved = np.zeros(gradient.shape)
            moved[at] = step
            up, down = (
                run(attend, *(a + sign * moved if j == i else a for j, a in enumerate(arrays))) for sign in (1, -1)
            )
            np.testing.assert_allclose(gradient[at], ((up - down) * ct).sum() / (2 * step), rtol=1e-6, atol=1e-8)


def test_case_83_backward_agrees_with_torch() -> None:
    arrays = [normal(2, 4, 3, 2), normal(2, 2, 5, 2), normal(2, 2, 5, 2), normal(2, 4, 3, 2)]
    bias = normal(1, 4, 1, 5)
    q, k, v, dy = (torch.from_numpy(a).requires_grad_() for a in arrays)
    b = torch.from_numpy(bias).requires_grad_()
    full = b.expand(2, 4, 3, 5)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=full, enable_gqa=True, scale=0.4)
    want = torch.autograd.grad(out, (q, k, v, b), dy.detach())
    for name, expected in zip(("query", "key", "value", "bias"), want, strict=True):
        got = run(lambda *x, name=name: ops.attention_backward(*x, layout="bhsd", scale=0.4, wrt=name), *arrays, bias)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-10, atol=1e-12)


def test_second_derivative_against_differences() -> None:
    shapes = [(1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2)]
    arrays, moves = [normal(*s) for s in shapes], [normal(*s) for s in shapes]
    xs = [placeholder(f"x{i}", f64[s]) for i, s in enumerate(shapes)]
    ts = [placeholder(f"t{i}", f64[s]) for i, s in enumerate(shapes)]
    y = ops.attention(*xs, layout="bhsd", causal=True, softcap=3.0)
    grads = pullback([y], [y * y], xs)
    hvp = pushforward(grads, xs, ts)
    known = dict(zip(xs, arrays, strict=True)) | dict(zip(ts, moves, strict=True))
    got = evaluate_values(hvp, known, {})
    step = 1e-5
    sides = [
        evaluate_values(grads, {x: a + s * m for x, a, m in zip(xs, arrays, moves, strict=True)}, {})
        for s in (step, -step)
    ]
    for value, up, down in zip(got, *sides, strict=True):
        np.testing.assert_allclose(value, (up - down) / (2 * step), rtol=1e-6, atol=1e-8)


def test_symbolic_lengths() -> None:
    s, t = sym("S"), sym("T")
    g = Graph("decode")
    q, k = g.input("q", (1, 2, s, 4)), g.input("k", (1, 2, t, 4))
    g.outputs(ops.attention(q, k, k, layout="bhsd", causal=True))
    a, b = normal(1, 2, 2, 4).astype("f4"), normal(1, 2, 5, 4).astype("f4")
    (got,) = evaluate(g, {"q": a, "k": b})
    np.testing.assert_allclose(got, loop(a, b, b, keep=lambda b, h, i, j: j <= i + 3), rtol=1e-5, atol=1e-6)
    x, w = placeholder("x", f32[1, 2, s, 4]), placeholder("w", f32[1, 2, t, 4])
    assert ops.attention(x, w, w, layout="bhsd").node.op.decompose(x, w, w).shape == (1, 2, s, 4)


def test_mistakes() -> None:
    q, k = placeholder("q", f32[2, 4, 3, 2]), placeholder("k", f32[2, 3, 3, 2])
    with pytest.raises(OptionError, match="4 query heads cannot share 3 key heads"):
        ops.attention(q, k, k, layout="bhsd")
    with pytest.raises(ShapeError, match="expected f32"):
        ops.attention(q, q, placeholder("v", f32[2, 4, 5, 2]), layout="bhsd")
    with pytest.raises(OptionError, match="needs the number of heads"):
        ops.attention(*[placeholder("q", f32[2, 3, 8])] * 3)
    with pytest.raises(OptionError, match="softcap"):
        ops.attention(q, q, q, layout="bhsd", softcap=0.0)
    with pytest.raises(OptionError, match="key flags"):
        ops.attention(q, q, q, placeholder("m", f32[2, 3]), layout="bhsd")


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2", "f16", "bf16"])
@pytest.mark.parametrize("given", ["f32", "own"])
def test_an_added_mask_drops_what_a_boolean_one_drops(given: str, dtype: str, device: str) -> None:
    """Also where the type has no infinity: minus infinity is NaN in it."""
    rng, kind = np.random.default_rng(5), as_dtype(dtype)
    feeds = {name: rng.standard_normal((1, 2, 4, 8)).astype(kind.np) for name in "qkv"}
    keep = rng.random((1, 1, 4, 4)) > 0.4
    keep[..., 0] = True
    feeds["keep"], feeds["lengths"] = keep, np.array([3])
    feeds["bias"] = np.where(keep, 0, -np.inf).astype(np.float32 if given == "f32" else kind.np)
    g = Graph("masks")
    q, k, v = (g.input(name, (1, 2, 4, 8), kind) for name in "qkv")
    flags, length = g.input("keep", keep.shape, "bool"), g.input("lengths", (1,), "i64")
    bias = g.input("bias", keep.shape, "f32" if given == "f32" else kind)
    results = [
        ops.attention(q, k, v, mask, mask_kind=name, layout="bhsd", lengths=n)
        for n in (None, length)
        for mask, name in ((flags, "custom"), (bias, "bias"))
    ]
    found = Session(device).compile(g.outputs(*results)).run(feeds)
    assert all(x.dtype is kind for x in results)
    for one, other in (found[:2], found[2:]):
        assert np.isfinite(other.astype(np.float32)).all()
        assert np.array_equal(one, other)


def test_a_width_that_is_a_symbol_is_refused_where_heads_cannot_be_told_apart() -> None:
    """Attention itself checks it when sizes are known; what its gradient is made of needs the number before."""
    g = Graph("open")
    shapes = ((2, 3, sym("n", 0)), (2, 5, 2), (2, 5, 6), (2, 3, 12))
    inputs = [g.input(f"x{i}", shape, f16) for i, shape in enumerate(shapes)]
    g.outputs(*AttentionBackward(num_heads=2, kv_heads=1, head_dim=2, layout="bsd")(*inputs))
    with pytest.raises(ShapeError, match="has 6\\*n elements"):
        Session("cpu").compile(g)


def test_the_threshold_of_masks_is_a_setting(rng):
    q, k, v = (rng.standard_normal((2, 5, 8)).astype(np.float32) for _ in range(3))
    flags = rng.uniform(0, 1, (2, 5)).astype(np.float32)
    flags[:, 0] = 1
    plain = st.attention(q, k, v, flags, mask_kind="custom", num_heads=2, layout="bsd").numpy()
    with st.config.using(attention_mask_threshold=0.8):
        strict = st.attention(q, k, v, flags, mask_kind="custom", num_heads=2, layout="bsd").numpy()
    for threshold, made in ((0.5, plain), (0.8, strict)):
        want = st.attention(q, k, v, flags >= threshold, mask_kind="custom", num_heads=2, layout="bsd").numpy()
        np.testing.assert_array_equal(made, want)
    assert np.abs(plain - strict).max() > 1e-3


def test_small_weights_are_skipped_if_a_setting_says_so(rng):
    q, k, v = (rng.standard_normal((1, 6, 8)).astype(np.float32) * 2 for _ in range(3))
    with st.config.using(attention_score_skip=0.1):
        made = st.attention(q, k, v, num_heads=1, layout="bsd").numpy()
    scores = q[0] @ k[0].T / np.sqrt(8)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(made[0], np.where(weights < 0.1, 0, weights) @ v[0], rtol=1e-4, atol=1e-5)
    assert (weights < 0.1).any()
