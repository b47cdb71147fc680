"""Grouped products and the router against per-row loops."""

import numpy as np
import pytest

from strata import ops
from strata.core import TensorType, as_dtype, f32
from strata.errors import IndexRangeError, OptionError, ShapeError
from strata.mir import evaluate_values, placeholder
from strata.ops.quant.schemes import Scheme

RNG = np.random.default_rng(6)


def run(fn, *arrays):
    xs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    outs = fn(*xs)
    many = isinstance(outs, tuple)
    found = evaluate_values(outs if many else [outs], dict(zip(xs, arrays, strict=True)), {})
    return found if many else found[0]


def test_each_row_uses_its_expert() -> None:
    x, w, ids = RNG.standard_normal((7, 3)), RNG.standard_normal((4, 3, 2)), np.array([3, 0, 0, 2, 3, 3, 0])
    np.testing.assert_allclose(run(ops.grouped_matmul, x, w, ids), np.stack([x[i] @ w[e] for i, e in enumerate(ids)]))
    np.testing.assert_allclose(
        run(ops.grouped_matmul, x, w, ids.astype(np.float32)), run(ops.grouped_matmul, x, w, ids)
    )


def test_expert_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexRangeError, match="row 1 asks for expert 4 of 4"):
        run(ops.grouped_matmul, np.zeros((2, 3)), np.zeros((4, 3, 2)), np.array([0, 4]))


@pytest.mark.parametrize("name", ["gguf_q8k", "gguf_q4k", "gguf_q4_0", "int8/32", "fp8e4m3", "nvfp4/16"])
def test_case_74_quantised_experts(name) -> None:
    k, n, ids = 256, 4, np.array([0, 1, 0])
    scheme = Scheme.from_text(name)
    stored = [scheme.encode(RNG.standard_normal((k, n))) for _ in range(2)]
    x = RNG.standard_normal((3, k))
    want = np.stack([x[i] @ scheme.decode(*stored[e], k=k, n=n) for i, e in enumerate(ids)])
    codes, *sides = (np.stack(p) for p in zip(*stored, strict=True))
    got = run(lambda *v: ops.dequant_grouped_matmul(*v, scheme=scheme, n=n), x, codes, ids, *sides)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    whole = run(lambda *v: ops.dequant_moe_weights(*v, scheme=scheme, k=k, n=n), codes, *sides)
    np.testing.assert_array_equal(whole[1], scheme.decode(*stored[1], k=k, n=n))


def test_router() -> None:
    logits = RNG.standard_normal((5, 8))
    weights, ids = run(lambda v: ops.route_top_k(v, 3), logits)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.argsort(-p, -1)[:, :3]
    np.testing.assert_array_equal(ids, want)
    chosen = np.take_along_axis(p, want, -1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True))
    raw, _ = run(lambda v: ops.route_top_k(v, 3, renormalize=False, scale=2.0), logits)
    np.testing.assert_allclose(raw, 2 * chosen)
    favoured = run(lambda v: ops.route_top_k(v, 1, score="sigmoid", bias=np.eye(8)[5] * 9), logits)
    assert (favoured[1] == 5).all()
    np.testing.assert_allclose(favoured[0], 1)
    with pytest.raises(OptionError, match="neither softmax nor sigmoid"):
        run(lambda v: ops.route_top_k(v, 1, score="tanh"), logits)


def test_a_whole_mixture_equals_the_dense_sum() -> None:
    x, w, logits = RNG.standard_normal((4, 3)), RNG.standard_normal((5, 3, 2)), RNG.standard_normal((4, 5))

    def mixture(x, w, logits):
        weights, ids = ops.route_top_k(logits, 2)
        rows = ops.reshape(ops.broadcast_to(ops.insert_axis(x, 1), (4, 2, 3)), (8, 3))
        return ops.combine_experts(ops.grouped_matmul(rows, w, ops.reshape(ids, (8,))), weights)

    weights, ids = run(lambda v: ops.route_top_k(v, 2), logits)
    want = np.stack([sum(weights[i, j] * x[i] @ w[ids[i, j]] for j in range(2)) for i in range(4)])
    np.testing.assert_allclose(run(mixture, x, w, logits), want)


def test_balance() -> None:
    logits = np.zeros((4, 4))
    np.testing.assert_allclose(run(ops.load_balance_loss, logits, np.arange(4)), 1)
    skewed = np.tile([9.0, 0, 0, 0], (4, 1))
    assert run(ops.load_balance_loss, skewed, np.zeros(4, np.int64)) > 3.9


def test_mistakes() -> None:
    x = placeholder("x", f32[2, 32])
    with pytest.raises(ShapeError, match="does not hold whole"):
        ops.dequant_grouped_matmul(x, np.zeros(35, np.uint8), np.array([0, 0]), scheme="gguf_q8_0", n=1)
    with pytest.raises(ShapeError, match=r"w \[E, K, N\]"):
        ops.grouped_matmul(x, placeholder("w", f32[2, 31, 3]), np.array([0, 0]))
