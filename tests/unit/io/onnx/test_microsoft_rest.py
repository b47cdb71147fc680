"""com.microsoft operators, one by one: beside onnxruntime's kernels, or NumPy where it has none for the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="its kernels are the reference")

from strata.errors import LowerError, UnknownNameError  # noqa: E402 - after the packages that it needs
from strata.io.onnx import known_ops, load  # noqa: E402
from tests.unit.io.onnx.models import node_model  # noqa: E402

R = np.random.default_rng(11)
U8, I8 = np.uint8, np.int8


def f(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (R.standard_normal(shape) * scale).astype(np.float32)


def whole(low: int, high: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return R.integers(low, high, shape).astype(dtype)


def run(op: str, inputs: list[Any], outputs: int = 1, fixed: tuple[int, ...] = (), **attributes: Any) -> list[Any]:
    arrays = [None if x is None else np.asarray(x) for x in inputs]
    feeds = {f"x{i}": x for i, x in enumerate(arrays) if x is not None and i not in fixed}
    return load(node_model(op, arrays, outputs, fixed, **attributes), device="reference").run(feeds)


SCALE, OTHER = np.float32(0.02), np.float32(0.03)
STATE = {"q_num_heads": 4, "kv_num_heads": 2}
QKV = [f(2, 5, 12), f(2, 5, 6, scale=0.5), f(2, 5, 8)]
HEADS, KEYS = whole(0, 20, 3, 2, 5), f(20, 4)
BOXES = np.array([[0.1, 0.2, 0.9, 0.7], [0.0, -0.3, 1.2, 1.0]], np.float32)
PICK = np.array([1, 0], np.int32)
CASES: dict[str, tuple[str, list[Any], int, tuple[int, ...], dict[str, Any]]] = {
    "conv of codes, channels last": (
        "QLinearConv",
        [whole(0, 256, 1, 6, 5, 4, dtype=U8), SCALE, U8(120), whole(-128, 128, 6, 2, 3, 3, dtype=I8), f(6) ** 2 + 0.01,
         np.zeros(6, I8), np.float32(1.5), U8(128), whole(-500, 500, 6, dtype=np.int32)],
        1, tuple(range(1, 9)), {"channels_last": 1, "group": 2, "pads": [1, 1, 1, 1], "strides": [2, 1]},
    ),
    "matmul of words": (
        "MatMulInteger16", [whole(-99, 99, 3, 4, dtype="i2"), whole(-99, 99, 4, 5, dtype="i2")], 1, (), {},
    ),
    "batches moved": (
        "FusedMatMul", [f(3, 2, 4), f(4, 2, 5)], 1, (), {"transBatchA": 1, "transBatchB": 1, "alpha": 0.5},
    ),
    "batches moved and turned": (
        "FusedMatMul", [f(4, 2, 3), f(5, 2, 4)], 1, (), {"transBatchA": 1, "transBatchB": 1, "transA": 1, "transB": 1},
    ),
    "linear": ("LinearAttention", QKV, 2, (), {**STATE, "update_rule": "linear", "scale": 0.3}),
    "gated, a decay of keys": (
        "LinearAttention", [*QKV, f(2, 2, 3, 4), -f(2, 5, 6) ** 2], 2, (), {**STATE, "update_rule": "gated"},
    ),
    "delta": ("LinearAttention", [*QKV, None, None, f(2, 5, 2) ** 2], 2, (), {**STATE, "update_rule": "delta"}),
    "gated delta": ("LinearAttention", [*QKV, f(2, 2, 3, 4), -f(2, 5, 2) ** 2, f(2, 5, 1) ** 2], 2, (), STATE),
    "more heads of keys": (
        "LinearAttention", [f(2, 5, 6), f(2, 5, 12, scale=0.5), f(2, 5, 8), None, -f(2, 5, 4) ** 2, f(2, 5, 4) ** 2], 2,
        (), {"q_num_heads": 2, "kv_num_heads": 4},
    ),
    "gates of linear attention": ("LinearAttentionGate", [f(2, 3, 4), f(4), -f(4) ** 2, f(2, 3, 4)], 2, (), {}),
    "causal convolution": (
        "CausalConvWithState", [f(2, 4, 6), f(4, 1, 3), f(4), f(2, 4, 2)], 2, (1, 2), {"activation": "silu"},
    ),
    "causal convolution, dilated, channels last": (
        "CausalConvWithState", [f(2, 6, 2, 3), f(6, 1, 3), f(6), f(2, 4, 2, 3)], 2, (1, 2),
        {"dilation": 2, "channels_last": 1},
    ),
    "gated norm": ("GatedRMSNorm", [f(2, 3, 8), f(4), f(2, 3, 8)], 1, (), {"activation": "silu"}),
    "gated norm, sigmoid": ("GatedRMSNorm", [f(2, 8), f(8), f(2, 8)], 1, (), {"activation": "sigmoid"}),
    "gated sum": ("GatedAdd", [f(2, 3, 8), f(2, 3, 8), f(2, 3, 1)], 1, (), {}),
    "scaled silu": ("ScaledSiLU", [f(3, 4)], 1, (), {"alpha": 1.3}),
    "norm of branches": ("BranchwiseRMSNorm", [f(2, 3, 4, 8), f(4, 8)], 1, (), {}),
    "norm of flat branches": ("BranchwiseRMSNorm", [f(2, 32), f(8)], 1, (), {"num_branches": 4}),
    "branches to one": ("HyperConnectionPreMix", [f(2, 3, 4, 8), f(2, 3, 4)], 1, (), {"reduction_scale": 0.5}),
    "flat branches to one": ("HyperConnectionPreMix", [f(2, 32), f(2, 32)], 1, (), {"num_branches": 4}),
    "one to branches": ("HyperConnectionPostMix", [f(2, 3, 4, 8), f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4)], 1, (), {}),
    "one to branches, no mix": ("HyperConnectionPostMix", [f(2, 3, 4, 8), f(2, 3, 8), f(2, 3, 4, 8)], 1, (), {}),
    "engram": (
        "EngramGate", [f(2, 3, 4, 8), f(2, 3, 4, 8), f(2, 3, 8), f(4, 8), f(4, 8), f(4, 8)], 2, (), {},
    ),
    "three positions": (
        "MRotaryEmbedding", [f(2, 3, 5, 8), HEADS, np.cos(KEYS), np.sin(KEYS)], 1, (), {"mrope_section": [1, 2, 1]},
    ),
    "three positions, by turns": (
        "MRotaryEmbedding", [f(2, 5, 24), HEADS, np.cos(KEYS), np.sin(KEYS)], 1, (),
        {"mrope_section": [2, 1, 1], "mrope_layout": 1, "interleaved": 1, "num_heads": 3},
    ),
    "crops": ("CropAndResize", [f(2, 3, 6, 7), BOXES, PICK, np.array([4, 5], np.int32)], 1, (3,), {}),
    "crops, nearest": (
        "CropAndResize", [f(2, 3, 6, 7), BOXES, PICK, np.array([4, 1], np.int32)], 1, (3,),
        {"mode": "nearest", "extrapolation_value": -2.0},
    ),
    "transposed convolution": (
        "ConvTransposeWithDynamicPads", [f(1, 3, 4, 5), f(3, 2, 3, 3), np.array([1, 0, 1, 1]), f(2)], 1, (2,),
        {"strides": [2, 2]},
    ),
    "no repeats": ("NGramRepeatBlock", [whole(0, 3, 3, 9), f(3, 5)], 1, (), {"ngram_size": 3}),
    "windows": ("UnfoldTensor", [f(2, 9, 3)], 1, (), {"dim": 1, "size": 4, "step": 2}),
    "warping": ("DynamicTimeWarping", [f(1, 6, 9)], 1, (), {}),
    "distinct": ("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], 3, (), {}),
    "one token, room for six": (
        "DecoderMaskedMultiHeadAttention",
        [f(2, 1, 8), f(2, 1, 8), f(2, 1, 8), np.array([[1, 1, 1, 1], [1, 1, 0, 1]], np.int32), None, f(2, 2, 6, 4),
         f(2, 2, 6, 4), np.array([3], np.int32), None, None, f(24)],
        3, (), {"num_heads": 2, "past_present_share_buffer": 1},
    ),
    "one token, keys of another sequence": (
        "DecoderMaskedMultiHeadAttention",
        [f(2, 1, 8), f(2, 2, 3, 4), f(2, 2, 3, 4), np.array([[1, 1, 1], [1, 1, 0]], np.int32), None, None, None, None,
         None, None, f(24)],
        1, (), {"num_heads": 2},
    ),
    "codes made on the way": (
        "DynamicQuantizeMatMul", [f(3, 8), whole(0, 256, 8, 5, dtype=U8), SCALE, U8(128), f(5)], 1, (1, 2, 3, 4), {},
    ),
    "samples of a grid": ("GridSample", [f(1, 2, 4, 5), f(1, 3, 3, 2, scale=0.5)], 1, (), {"padding_mode": "border"}),
    "both see all": (
        "GroupQueryAttention",
        [f(2, 3, 32), f(2, 3, 16), f(2, 3, 16), None, None, np.array([2, 2], np.int32), np.array(3, np.int32)],
        3, (), {"num_heads": 4, "kv_num_heads": 2, "causal": 0},
    ),
    **{
        f"gemm and {name}": ("FusedGemm", [f(3, 4), f(4, 5), f(5)], 1, (), {"activation": name, **given})
        for name, given in {
            "Relu": {}, "Softplus": {}, "Softsign": {}, "Elu": {"activation_alpha": 0.7},
            "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4}, "LeakyRelu": {"activation_alpha": 0.1},
            "ScaledTanh": {"activation_alpha": 0.7, "activation_beta": 1.2},
            "ThresholdedRelu": {"activation_alpha": 0.5},
            "Selu": {"activation_alpha": 1.6, "activation_gamma": 1.05},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name: str) -> None:
    op, inputs, outputs, fixed, attributes = CASES[name]
    arrays = [None if x is None else np.asarray(x) for x in inputs]
    feeds = {f"x{i}": x for i, x in enumerate(arrays) if x is not None and i not in fixed}
    onnxruntime.set_default_logger_severity(4)
    file = node_model(op, arrays, outputs, fixed, **attributes).SerializeToString()
    wanted = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)
    for got, want in zip(run(op, inputs, outputs, fixed, **attributes), wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        is_code = want.dtype.kind in "iu" and want.dtype.itemsize == 1
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1 if is_code else 1e-5)


@pytest.mark.parametrize("kind", [0, 1])
def test_codes_of_bitsandbytes(kind: int) -> None:
    """Codes that onnxruntime's own quantiser writes, with sizes that end inside a block."""
    from onnxruntime.capi._pybind_state import quantize_matmul_bnb4

    k, n, size = 40, 6, 16
    packed, largest = np.zeros((n * k + 1) // 2, U8), np.zeros(-(-n * k // size), np.float32)
    quantize_matmul_bnb4(packed, np.ascontiguousarray(f(k, n).T), largest, size, kind, n, k)
    given = {"K": k, "N": n, "block_size": size, "quant_type": kind}
    x = f(2, 3, k)
    file = node_model("MatMulBnb4", [x, packed, largest], 1, (1, 2), **given).SerializeToString()
    (want,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x0": x})
    np.testing.assert_allclose(
        run("MatMulBnb4", [x, packed, largest], 1, (1, 2), **given)[0], want, rtol=1e-4, atol=1e-5
    )


# no kernel of onnxruntime for the CPU: NumPy, by the documentation


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def fast_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_a_gemm_without_an_activation_has_none(rng: np.random.Generator) -> None:
    """The attribute may be left out; onnxruntime's kernel wants it."""
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4, 5), (5,)))
    wanted = 0.5 * (a @ b) + c
    assert (wanted < 0).any()
    for given in ({}, {"activation": ""}):
        (found,) = run("FusedGemm", [a, b, c], 1, (), alpha=0.5, **given)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 5])
def test_a_window_of_states(length: int) -> None:
    """Each is the state after a part of the tokens; only CUDA has them, so they are compared with runs of the parts."""
    width, past = 3, f(3, 2, 2, 3, 4)
    q, k, v, decay, rate = (x[:, :length] for x in (*QKV, -(f(2, 5, 2) ** 2), f(2, 5, 2) ** 2))
    out, states = run("LinearAttention", [q, k, v, past, decay, rate], 2, state_window=width, **STATE)
    x, w, before = f(2, 4, length), f(4, 1, 3), f(3, 2, 4, 2)
    out_conv, states_conv = run("CausalConvWithState", [x, w, None, before], 2, (1,), state_window=width)
    for j in range(width):
        count = length - width + j + 1
        if count <= 0:
            assert not states[j].any()
            assert not states_conv[j].any()
            continue
        part, last = run("LinearAttention", [*(a[:, :count] for a in (q, k, v)), past[-1], decay[:, :count],
                         rate[:, :count]], 2, **STATE)  # fmt: skip
        np.testing.assert_allclose(states[j], last, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out[:, :count], part, rtol=1e-5, atol=1e-6)
        part, last = run("CausalConvWithState", [x[:, :, :count], w, None, before[-1]], 2, (1,))
        np.testing.assert_allclose(states_conv[j], last, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out_conv[:, :, :count], part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["NhwcConv", "NhwcFusedConv"])
def test_convolution_with_channels_last(op: str) -> None:
    x, w, bias = f(2, 5, 6, 4), f(6, 2, 3, 2), f(6)
    given = {"activation": "Relu"} if op == "NhwcFusedConv" else {}
    (got,) = run(op, [x, w, bias], 1, (1, 2), group=2, strides=[2, 1], pads=[1, 0, 1, 1], **given)
    padded = np.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0)))
    want = np.zeros((2, 3, 6, 6), np.float32)
    for image, row, column, out in np.ndindex(want.shape):
        part = padded[image, 2 * row : 2 * row + 3, column : column + 2, out // 3 * 2 : out // 3 * 2 + 2]
        want[image, row, column, out] = (part * w[out].transpose(1, 2, 0)).sum() + bias[out]
    np.testing.assert_allclose(got, np.maximum(want, 0) if given else want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("activation", [0, 1])
def test_group_norm_of_a_sum(last: int, activation: int) -> None:
    x, gamma, beta, bias = f(2, 3, 5, 8), f(8), f(8), f(8)
    skip = f(2, 8) if activation else f(2, 3, 5, 8)
    total = x + (skip.reshape(2, 1, 1, 8) if activation else skip) + bias
    groups = total.reshape(2, 15, 4, 2)
    mean, var = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    want = ((groups - mean) / np.sqrt(var + 1e-4)).reshape(x.shape) * gamma + beta
    want = want * sigmoid(want) if activation else want

    def moved(a: np.ndarray) -> np.ndarray:
        return a if last or a.ndim < 4 else a.transpose(0, 3, 1, 2)

    got = run(
        "SkipGroupNorm", [moved(x), gamma, beta, moved(skip), bias], 2, groups=4, activation=activation, epsilon=1e-4,
        channels_last=last,
    )  # fmt: skip
    np.testing.assert_allclose(got[0], moved(want), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], moved(total), rtol=1e-5, atol=1e-6)
    (plain,) = run(
        "GroupNorm", [moved(total), gamma, beta], groups=4, activation=activation, epsilon=1e-4, channels_last=last
    )
    np.testing.assert_allclose(plain, got[0], rtol=1e-5, atol=1e-6)


def test_sums_behind_and_before_functions() -> None:
    x, bias, rest = f(2, 3, 8), f(8), f(2, 3, 8)
    np.testing.assert_allclose(run("BiasAdd", [x, bias, rest])[0], x + bias + rest, rtol=1e-6)
    value, gate = np.split((x + bias).astype(np.float64), 2, -1)
    erf = np.vectorize(math.erf)
    want = value * gate * 0.5 * (1 + erf(gate / np.sqrt(2)))
    np.testing.assert_allclose(run("BiasSplitGelu", [x, bias])[0], want, rtol=1e-4, atol=1e-5)
    (got,) = run("BiasSoftmax", [x, f(1, 1, 8) * 0 + bias], axis=2, is_inner_broadcast=1)
    np.testing.assert_allclose(got, softmax(x + bias), rtol=1e-4, atol=1e-6)
    (got,) = run("SimplifiedLayerNormalization", [x, bias], axis=-1, epsilon=1e-5)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * bias
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [[1], [0, 2]])
def test_mean_of_codes(axes: list[int]) -> None:
    x = whole(0, 256, 3, 4, 5, dtype=U8)
    (got,) = run("QLinearReduceMean", [x, SCALE, U8(100), OTHER, U8(7)], axes=axes, keepdims=0)
    mean = ((x.astype(np.float64) - 100) * 0.02).mean(tuple(axes))
    want = np.clip(np.rint(mean / 0.03) + 7, 0, 255)
    assert got.dtype == U8
    np.testing.assert_allclose(got, want, atol=1)


@pytest.mark.parametrize("together", [False, True])
def test_attention_of_packed_tokens(together: bool) -> None:
    lengths, heads, size = [1, 2, 4], 2, 4
    q, k, v = (f(7, heads, size) for _ in range(3))
    bias = f(24)
    offset = np.array([[0, 4, 5, 8], [9, 10, 11, 1], [2, 3, 6, 7]], np.int32)
    ends = np.array([0, 1, 3, 7], np.int32)
    parts = [np.stack([q, k, v], 2), None, None] if together else [x.reshape(7, 8) for x in (q, k, v)]
    (got,) = run("PackedMultiHeadAttention", [*parts, bias, offset, ends], num_heads=heads)
    q, k, v = (x + b.reshape(heads, size) for x, b in zip((q, k, v), np.split(bias, 3), strict=True))
    for start, length in zip(ends, lengths, strict=False):
        a, b, c = (x[start : start + length].transpose(1, 0, 2) for x in (q, k, v))
        want = softmax(a @ b.transpose(0, 2, 1) / 2) @ c
        np.testing.assert_allclose(got[start : start + length], want.transpose(1, 0, 2).reshape(length, 8), 1e-4, 1e-5)


def test_dropout_drops_nothing_in_inference() -> None:
    x, bias, rest = f(2, 3), f(3), f(2, 3)
    got = run("BiasDropout", [x, bias, rest, np.float32(0.5)], 2)
    np.testing.assert_allclose(got[0], x + bias + rest, rtol=1e-6)
    assert got[1].dtype == bool
    assert got[1].all()
    np.testing.assert_allclose(run("BitmaskBiasDropout", [x, bias, rest])[0], x + bias + rest, rtol=1e-6)
    np.testing.assert_array_equal(run("BitmaskDropout", [x])[0], x)
    for op, inputs in (("BiasDropout", [x, bias, None]), ("BitmaskDropout", [x])):
        at = len(inputs)
        with pytest.raises(LowerError, match="dropout in training is not supported"):
            run(op, [*inputs, np.float32(0.5), np.bool_(True)], 1, (at, at + 1))


@pytest.mark.parametrize(("given", "wanted"), [
    ({}, (True, False, False)), ({"isinf_only": 1}, (True, False, True)), ({"isnan_only": 1}, (True, True, False)),
])  # fmt: skip
def test_all_finite(given: dict[str, int], wanted: tuple[bool, ...]) -> None:
    fine, infinite, none = (np.array([1.0, v], np.float32) for v in (2.0, -np.inf, np.nan))
    for odd, want in zip((fine, infinite, none), wanted, strict=True):
        (got,) = run("IsAllFinite", [fine, odd], **given)
        assert got.shape == ()
        assert bool(got) is want


def test_products_and_gelu() -> None:
    x, w, bias = f(2, 3, 4), f(4, 5), f(5)
    np.testing.assert_allclose(run("GemmFastGelu", [x, w, bias])[0], fast_gelu(x @ w + bias), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run("GemmFastGelu", [x, w])[0], fast_gelu(x @ w), rtol=1e-4, atol=1e-5)
    want = np.tanh(0.5 * x @ w)
    (got,) = run("FusedMatMulActivation", [x, w], alpha=0.5, activation="Tanh")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["ComplexMul", "ComplexMulConj"])
def test_complex_products(op: str) -> None:
    a, b = f(3, 4, 2), f(1, 4, 2)
    x, y = (v[..., 0] + 1j * v[..., 1] for v in (a, b))
    want = x * (y.conj() if op == "ComplexMulConj" else y)
    np.testing.assert_allclose(run(op, [a, b])[0], np.stack([want.real, want.imag], -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8, 12])
def test_fourier_transforms(size: int) -> None:
    x = f(2, 3, size)
    bins = np.fft.rfft(x)
    apart = np.stack([bins.real, bins.imag], -1).astype(np.float32)
    np.testing.assert_allclose(run("Rfft", [x], signal_ndim=1)[0], apart, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run("Irfft", [apart], signal_ndim=1)[0], x, rtol=1e-4, atol=1e-5)


def test_integers() -> None:
    a, b = whole(0, 256, 3, 4, dtype=U8), whole(0, 256, 4, dtype=U8)
    (got,) = run("MulInteger", [a, U8(9), b, U8(200)])
    np.testing.assert_array_equal(got, (a.astype(np.int32) - 9) * (b.astype(np.int32) - 200))
    assert got.dtype == np.int32
    (got,) = run("ReduceSumInteger", [a], axes=[1], keepdims=0)
    np.testing.assert_array_equal(got, a.astype(np.uint32).sum(1))
    assert got.dtype == np.uint32
    np.testing.assert_array_equal(run("TorchEmbedding", [f(5, 3)[:0].reshape(0, 3), whole(0, 1, 0)])[0].shape, (0, 3))


def test_gated_biases_by_distance() -> None:
    x, bias, distance, w, offset, share = f(2, 5, 8), f(8), f(1, 2, 5, 5), f(4, 6), f(6), f(1, 2, 1, 1)
    (got,) = run("GatedRelativePositionBias", [x, bias, distance, w, offset, share], num_heads=2)
    q = (x + bias).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    gates = sigmoid((q @ w + offset).reshape(2, 2, 5, 2, 3).sum(-1))
    update, reset = gates[..., :1], gates[..., 1:]
    np.testing.assert_allclose(got, (update * (reset * share - 1) + 2) * distance, rtol=1e-4, atol=1e-5)


def test_angles_that_are_given() -> None:
    angles, parts = f(2, 5, 4), [f(2, 3, 5, 4) for _ in range(4)]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    got = run("GemmaRotaryEmbedding", [angles, *parts], 2)
    for made, (x, turned) in zip(got, (parts[:2], parts[2:]), strict=True):
        np.testing.assert_allclose(made, x * cos + turned * sin, rtol=1e-5, atol=1e-6)


def test_products_with_codes_behind_a_norm() -> None:
    """The matrices are those that MatMulNBits has, whose kernel is the reference for its own part."""
    k, n, x, skip, scale = 32, 6, f(2, 3, 32), f(2, 3, 32), f(32)
    total = x + skip
    normed = (total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * scale).astype(np.float32)
    matrices = [[whole(0, 256, n, 1, 16, dtype=U8), f(n), f(n)] for _ in range(3)]
    given = {"K": k, "bits": 4, "block_size": 32}

    def product(codes: np.ndarray, scales: np.ndarray, bias: np.ndarray) -> np.ndarray:
        file = node_model("MatMulNBits", [normed, codes, scales], 1, (1, 2), N=n, **given).SerializeToString()
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return session.run(None, {"x0": normed})[0] + bias

    parts = [product(*m) for m in matrices]
    gate, up, last = matrices
    got = run("MatMulNBitsMlp", [x, skip, scale, *gate, *up], 2, tuple(range(3, 9)), N=n, activation="silu", **given)
    np.testing.assert_allclose(got[0], parts[0] * sigmoid(parts[0]) * parts[1], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(got[1], total, rtol=1e-6)
    got = run(
        "MatMulNBitsQkv", [x, skip, scale, *gate, *up, *last], 4, tuple(range(3, 12)), Nq=n, Nkv=n, epsilon=1e-5,
        **given,
    )  # fmt: skip
    for made, want in zip(got, [*parts, total], strict=True):
        np.testing.assert_allclose(made, want, rtol=2e-3, atol=2e-3)


def test_norms_of_queries_and_keys() -> None:
    """GroupQueryAttention with weights of norms: the same as without them, of heads that are normalised before."""
    q, k, v, scales = f(1, 3, 16), f(1, 3, 8), f(1, 3, 8), [f(4), f(4)]
    ends = [np.array([2], np.int32), np.array(3, np.int32)]

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        heads = x.reshape(1, 3, -1, 4)
        return (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * scale).reshape(x.shape).astype(np.float32)

    given = {"num_heads": 4, "kv_num_heads": 2}
    got = run("GroupQueryAttention", [q, k, v, None, None, *ends, *[None] * 7, *scales], 3, **given)
    want = run("GroupQueryAttention", [normed(q, scales[0]), normed(k, scales[1]), v, None, None, *ends], 3, **given)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_every_operator_that_is_read_is_in_a_test() -> None:
    text = "".join(file.read_text("utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in known_ops("com.microsoft") if f'"{name}"' not in text] == []


def test_what_is_not_read_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match=r"com\.microsoft\.LongformerAttention"):
        load(node_model("LongformerAttention", [f(1, 2, 4)] * 7, 1, num_heads=2, window=2))
    q, ends = f(1, 3, 16), [np.array([2], np.int32), np.array(3, np.int32)]
    with pytest.raises(LowerError, match="caches of a window"):
        run("GroupQueryAttention", [q, f(1, 3, 8), f(1, 3, 8), None, None, *ends], 3, num_heads=4, kv_num_heads=2,
            sliding_window_cache=1, local_window_size=2)  # fmt: skip
