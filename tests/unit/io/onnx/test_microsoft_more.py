"""com.microsoft operators of optimised files: beside onnxruntime's kernels, or NumPy where it has none for the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX models need the package onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="its kernels are the reference")

from onnx import helper  # noqa: E402 - after the package that it needs

from strata.io.onnx import load  # noqa: E402
from tests.unit.io.onnx.models import node_model  # noqa: E402

R = np.random.default_rng(7)


def f(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (R.standard_normal(shape) * scale).astype(np.float32)


def codes(dtype: Any, *shape: int, low: int | None = None, high: int | None = None) -> np.ndarray:
    info = np.iinfo(dtype)
    return R.integers(info.min if low is None else low, info.max if high is None else high + 1, shape).astype(dtype)


ONE, SCALE = np.float32(0.02), np.float32(0.03)
U8, I8 = np.uint8, np.int8
WORDS = [codes(U8, n, 8) for n in (20, 6, 2)]
CASES: dict[str, tuple[str, list[Any], int, dict[str, Any]]] = {
    "attention lengths": ("Attention", [f(2, 3, 8), f(8, 24), f(24), np.array([2, 3], np.int32)], 1, {"num_heads": 2}),
    "attention ends and starts": (
        "Attention", [f(2, 4, 8), f(8, 24), f(24), np.array([4, 3, 1, 0], np.int32)], 1, {"num_heads": 2},
    ),
    "attention flags of pairs": (
        "Attention", [f(1, 3, 8), f(8, 24), f(24), np.tril(np.ones((1, 3, 3), np.int32))], 1, {"num_heads": 2},
    ),
    "attention past": (
        "Attention", [f(2, 3, 8), f(8, 24), f(24), None, f(2, 2, 2, 4, 4)], 2, {"num_heads": 2, "unidirectional": 1},
    ),
    "lengths of keys": (
        "MultiHeadAttention", [f(2, 3, 8), f(2, 5, 8), f(2, 5, 8), f(24), np.array([5, 2], np.int32)], 1,
        {"num_heads": 2},
    ),
    "quantised attention": (
        "QAttention",
        [codes(U8, 2, 3, 8), codes(I8, 8, 24), f(24), ONE, SCALE, np.array([3, 2], np.int32), U8(120), I8(0)], 1,
        {"num_heads": 2},
    ),
    "quantised attention past": (
        "QAttention",
        [codes(U8, 1, 2, 8), codes(U8, 8, 24), f(24), ONE, SCALE, None, np.uint8(9), np.uint8(128), f(2, 1, 2, 3, 4)],
        2, {"num_heads": 2, "unidirectional": 1},
    ),
    "softcap": (
        "GroupQueryAttention",
        [f(2, 3, 32), f(2, 3, 16), f(2, 3, 16), None, None, np.array([2, 2], np.int32), np.array(3, np.int32)],
        3, {"num_heads": 4, "kv_num_heads": 2, "softcap": 0.8},
    ),
    "smooth softmax": (
        "GroupQueryAttention",
        [f(2, 3, 32), f(2, 3, 16), f(2, 3, 16), None, None, np.array([2, 2], np.int32), np.array(3, np.int32)],
        3, {"num_heads": 4, "kv_num_heads": 2, "smooth_softmax": 1},
    ),
    "average pool of codes": (
        "QLinearAveragePool", [codes(U8, 1, 2, 5, 6), ONE, np.uint8(12), SCALE, np.uint8(3)], 1,
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]},
    ),
    "average pool of codes, channels last": (
        "QLinearAveragePool", [codes(I8, 1, 5, 6, 3), ONE, np.int8(-4), SCALE, np.int8(3)], 1,
        {"kernel_shape": [2, 2], "channels_last": 1, "count_include_pad": 1},
    ),
    "global pool of codes, channels last": (
        "QLinearGlobalAveragePool", [codes(U8, 2, 4, 4, 3), ONE, U8(100), ONE, U8(90)], 1, {"channels_last": 1},
    ),
    "pool, channels last": ("NhwcMaxPool", [codes(U8, 1, 5, 6, 3)], 1, {"kernel_shape": [2, 3], "strides": [2, 2]}),
    "embeddings of codes": (
        "QEmbedLayerNormalization",
        [codes(np.int32, 2, 4, low=0, high=19), codes(np.int32, 2, 4, low=0, high=1), *WORDS, codes(U8, 8),
         codes(U8, 8), np.ones((2, 4), np.int32), ONE, ONE, SCALE, ONE, SCALE,
         *(U8(z) for z in (3, 7, 128, 0, 90))],
        2, {},
    ),
    "transposed matmul": ("TransposeMatMul", [f(2, 3, 4), f(2, 3, 5)], 1, {"transA": 1, "alpha": 0.5}),
    "inverse": ("Inverse", [f(2, 3, 3) + 3 * np.eye(3, dtype=np.float32)], 1, {}),
    "axes": ("ExpandDims", [f(2, 3), np.array(-1, np.int32)], 1, {}),
    "distances": ("CDist", [f(4, 3), f(5, 3)], 1, {"metric": "euclidean"}),
    "triangle": ("Trilu", [f(3, 4)], 1, {"upper": 0}),
}  # fmt: skip
CONSTANT = {  # inputs that are initializers
    "Attention": (1, 2), "QAttention": (1, 2, 3, 4, 6, 7), "QLinearAveragePool": (1, 2, 3, 4), "ExpandDims": (1,),
    "QLinearGlobalAveragePool": (1, 2, 3, 4), "QEmbedLayerNormalization": (*range(2, 7), *range(8, 18)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name: str) -> None:
    op, inputs, outputs, attributes = CASES[name]
    inputs = [None if x is None else np.asarray(x) for x in inputs]
    fixed = CONSTANT.get(op, ())
    model = node_model(op, inputs, outputs, fixed, **attributes)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in fixed}
    onnxruntime.set_default_logger_severity(4)
    wanted = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, feeds
    )
    for got, want in zip(load(model, device="reference").run(feeds), wanted, strict=True):
        is_code = want.dtype.kind in "iu" and want.dtype.itemsize == 1
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1 if is_code else 1e-4)
        assert got.dtype == want.dtype


def test_packed_projections() -> None:
    """onnxruntime has no kernel of these for the CPU: the same numbers as apart."""
    q, k, v = f(2, 3, 2, 4), f(2, 3, 2, 4), f(2, 3, 2, 4)
    bias = f(24)

    def run(*inputs: Any) -> np.ndarray:
        given = [*inputs, *[None] * (3 - len(inputs)), bias]
        model = node_model("MultiHeadAttention", given, 1, (3,), num_heads=2)
        feeds = {f"x{i}": x for i, x in enumerate(inputs)}
        return load(model, device="reference").run(feeds)[0]

    want = run(*(x.reshape(2, 3, 8) for x in (q, k, v)))
    np.testing.assert_allclose(run(np.stack([q, k, v], 3)), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(q.reshape(2, 3, 8), np.stack([k, v], 3)), want, rtol=1e-5, atol=1e-6)


def experts_by_hand(
    x: np.ndarray, scores: np.ndarray, w1: Any, w2: Any, k: int, act: Any, normalize: bool
) -> np.ndarray:
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    out = np.zeros_like(x)
    for row in range(len(x)):
        ids = np.argsort(-scores[row], kind="stable")[:k]
        total = shares[row, ids].sum() if normalize else 1.0
        for e in ids:
            out[row] += shares[row, e] / total * (act(x[row] @ w1[e].T) @ w2[e].T)
    return out


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_experts() -> None:
    x, scores, w1, w2 = f(5, 4), f(5, 3), f(3, 6, 4), f(3, 4, 6)
    model = node_model(
        "MoE", [x, scores, w1, None, w2], 1, (2, 4), k=2, activation_type="silu", normalize_routing_weights=1
    )
    (got,) = load(model, device="reference").run(x0=x, x1=scores)
    np.testing.assert_allclose(got, experts_by_hand(x, scores, w1, w2, 2, silu, True), rtol=1e-4, atol=1e-5)
    w1 = f(3, 12, 4)
    model = node_model(
        "MoE", [x, scores, w1, None, w2], 1, (2, 4), k=1, activation_type="swiglu", swiglu_fusion=1, swiglu_limit=1.5,
        activation_alpha=1.702, activation_beta=1.0,
    )  # fmt: skip
    (got,) = load(model, device="reference").run(x0=x, x1=scores)

    def swiglu(h: np.ndarray) -> np.ndarray:
        gate, line = np.minimum(h[0::2], 1.5), np.clip(h[1::2], -1.5, 1.5)
        return gate / (1 + np.exp(-1.702 * gate)) * (line + 1)

    np.testing.assert_allclose(got, experts_by_hand(x, scores, w1, w2, 1, swiglu, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_of_codes(bits: int) -> None:
    x, scores = f(5, 8), f(5, 3)
    held = [R.integers(0, 1 << bits, shape).astype(np.uint8) for shape in ((3, 6, 8), (3, 8, 6))]
    scales = [f(3, n, scale=0.05) for n in (6, 8)]
    packed = [h if bits == 8 else (h[..., 0::2] | (h[..., 1::2] << 4)) for h in held]
    model = node_model(
        "QMoE", [x, scores, packed[0], scales[0], None, packed[1], scales[1]], 1, (2, 3, 5, 6), k=2,
        activation_type="relu", expert_weight_bits=bits,
    )  # fmt: skip
    (got,) = load(model, device="reference").run(x0=x, x1=scores)
    w1, w2 = ((h.astype(np.float32) - (1 << (bits - 1))) * s[..., None] for h, s in zip(held, scales, strict=True))
    want = experts_by_hand(x, scores, w1, w2, 2, lambda h: np.maximum(h, 0), False)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_tokens_without_padding() -> None:
    """RemovePadding, packed attention and RestorePadding: the numbers of attention with lengths, zeros elsewhere."""
    x, w, bias, counts = f(2, 4, 8), f(8, 24), f(24), np.array([2, 4], np.int32)
    ms = {"domain": "com.microsoft"}
    nodes = [
        helper.make_node("RemovePadding", ["x", "counts"], ["tokens", "offset", "ends", "most"], **ms),
        helper.make_node("PackedAttention", ["tokens", "w", "b", "offset", "ends"], ["seen"], num_heads=2, **ms),
        helper.make_node("RestorePadding", ["seen", "offset"], ["y"], **ms),
    ]
    port, kinds = helper.make_tensor_value_info, onnx.TensorProto
    graph = helper.make_graph(
        nodes, "g", [port("x", kinds.FLOAT, x.shape), port("counts", kinds.INT32, (2,))],
        [port("y", kinds.FLOAT, x.shape)],
        [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(bias, "b")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    (got,) = load(helper.make_model(graph, opset_imports=opsets), device="reference").run(x=x, counts=counts)
    plain = node_model("Attention", [x, w, bias, counts], 1, (1, 2), num_heads=2)
    (want,) = load(plain, device="reference").run(x0=x, x3=counts)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(got[row, :count], want[row, :count], rtol=1e-4, atol=1e-5)
        assert not got[row, count:].any()


def test_biases_by_distance() -> None:
    """The buckets of T5, beside its own formula."""
    table = f(32, 2)
    model = node_model(
        "RelativePositionBias", [table, np.array([5], np.int64), np.array([40], np.int64)], 1, (1, 2), max_distance=20,
        is_bidirectional=1,
    )  # fmt: skip
    (got,) = load(model, device="reference").run(x0=table)
    gap = np.arange(40)[None] - np.arange(5)[:, None]
    start, away = (gap > 0) * 16, abs(gap)
    far = 8 + (np.log(np.maximum(away, 1) / 8) / np.log(20 / 8) * 8).astype(np.int64)
    want = table[start + np.where(away < 8, away, np.minimum(far, 15))].transpose(2, 0, 1)[None]
    np.testing.assert_allclose(got, want)
