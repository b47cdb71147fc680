"""Quantised weight schemes and the products that read them."""

import ml_dtypes
import numpy as np
import pytest

from strata import ops
from strata.core import TensorType, as_dtype, f32, u8
from strata.errors import DTypeError, OptionError, ShapeError
from strata.mir import evaluate_values, placeholder, pullback
from strata.ops.quant.dequant import quantize_weights
from strata.ops.quant.schemes import FP4, Scheme

RNG = np.random.default_rng(4)
NAMES = [
    "int8/32",
    "int8a/32",
    "int4/32",
    "fp8e4m3",
    "fp8e5m2",
    "nvfp4/16",
    "gguf_q4_0",
    "gguf_q8_0",
    "gguf_q4k",
    "gguf_q8k",
]


def run(fn, *arrays):
    xs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    return evaluate_values([fn(*xs)], dict(zip(xs, arrays, strict=True)), {})[0]


def test_scheme_text() -> None:
    for name in NAMES:
        assert str(Scheme.from_text(name)) == name
    assert Scheme.from_text("gguf_q6_k") == Scheme("gguf_q6k")
    for bad in ("int8", "int5/4", "fp8e4m3/3", "gguf_q9", "int4/x", "int4/²", "int4/" + "9" * 5000):
        with pytest.raises(OptionError):
            Scheme.from_text(bad)


@pytest.mark.parametrize("name", NAMES)
def test_encoded_weights_are_close(name) -> None:
    w = RNG.standard_normal((256, 6)).astype(np.float32)
    scheme = Scheme.from_text(name)
    stored = quantize_weights(w, name)
    assert stored[0].size == scheme.code_count(256, 6)
    assert [s.shape for s in stored[1:]] == list(scheme.side_shapes(256, 6))
    error = np.sqrt(np.mean((scheme.decode(*stored, k=256, n=6) - w) ** 2))
    assert error < {4: 0.13, 8: 0.07}[round(scheme.bits) // 4 * 4 if scheme.bits < 9.5 else 8]


def test_case_6_blocks_of_int8() -> None:
    m, k, n = 3, 8, 4
    x = RNG.standard_normal((m, k))
    q = ((np.arange(k * n) * 13 + 7) % 127 - 63).astype(np.int8).reshape(k, n)
    scale = (0.01 + 0.001 * np.arange(2 * n)).astype(np.float32).reshape(2, n)
    w = q * np.repeat(scale, 4, axis=0)
    got = run(lambda *v: ops.dequant_matmul(*v, np.zeros((2, n), np.float32), scheme="int8/4"), x, q, scale)
    np.testing.assert_allclose(got, x @ w, rtol=1e-6)


def test_case_72_and_103_small_floats() -> None:
    assert FP4[2] == 1.0
    assert FP4[14] == -4.0
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    ones = np.ones(1, np.float32)
    e4m3 = Scheme("fp8e4m3").decode(codes, ones, k=16, n=16).reshape(-1)
    assert e4m3[0x38] == 1.0
    assert e4m3[0x7E] == 448.0
    assert np.isnan(e4m3[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(e4m3, [0x7F, 0xFF])).all()
    exponent, fraction = np.arange(256) >> 3 & 15, np.arange(256) & 7
    plain = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7)) * np.where(
        np.arange(256) > 127, -1, 1
    )
    np.testing.assert_array_equal(np.delete(e4m3, [0x7F, 0xFF]), np.delete(plain, [0x7F, 0xFF]))
    e5m2 = Scheme("fp8e5m2").decode(codes, ones, k=16, n=16).reshape(-1)
    assert e5m2[0x7C] == np.inf
    assert e5m2[1] == 2.0**-16


def test_case_103_int4_with_a_zero_point_has_negatives() -> None:
    codes = np.array([0x80, 0xF7], np.uint8)  # nibbles 0, 8, 7, 15
    got = Scheme("int4", 2).decode(codes, np.ones((1, 2)), np.full((1, 2), 8), k=2, n=2)
    np.testing.assert_array_equal(got, [[-8, 0], [-1, 7]])


def test_nvfp4_scales() -> None:
    codes = np.array([0x2E] * 8, np.uint8)  # low nibble 14 = -4, high nibble 2 = 1
    scale = np.array([[ml_dtypes.float8_e4m3fn(2)]]).view(np.uint8)
    got = Scheme("nvfp4").decode(codes, scale, np.float32([0.5]), k=16, n=1)
    np.testing.assert_array_equal(got[:2, 0], [-4, 1])
    broken = Scheme("nvfp4").decode(codes, np.array([[0x7F]], np.uint8), np.float32([1]), k=16, n=1)
    np.testing.assert_array_equal(broken, 0)


@pytest.mark.parametrize("name", NAMES)
def test_case_74_product_equals_decoding_first(name) -> None:
    k, n = 256, 4
    scheme = Scheme.from_text(name)
    stored = quantize_weights(RNG.standard_normal((k, n)), scheme)
    x = RNG.standard_normal((2, 3, k))
    want = x @ scheme.decode(*stored, k=k, n=n).astype(np.float64)
    np.testing.assert_allclose(
        run(lambda *v: ops.dequant_matmul(*v, scheme=scheme), x, *stored), want, rtol=1e-6, atol=1e-6
    )
    xs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate((x, *stored))]
    y = ops.dequant_matmul(*xs, scheme=name)
    known = dict(zip(xs, (x, *stored), strict=True))
    np.testing.assert_allclose(evaluate_values([y.node.op.decompose(*xs)], known, {})[0], want, rtol=1e-6, atol=1e-6)
    c, ct = placeholder("c", y.type), RNG.standard_normal(want.shape)
    (dx,) = pullback([y], [c], xs[:1])
    got = evaluate_values([dx], known | {c: ct}, {})[0]
    np.testing.assert_allclose(got, ct @ scheme.decode(*stored, k=k, n=n).T, rtol=1e-6, atol=1e-6)


def test_mistakes() -> None:
    x = placeholder("x", f32[2, 100])
    with pytest.raises(ShapeError, match="K = 100 is not a multiple of 32"):
        ops.dequant_matmul(x, placeholder("w", u8[90]), scheme="gguf_q4_0")
    with pytest.raises(DTypeError, match="codes are i8"):
        ops.dequant_matmul(x, placeholder("w", u8[100, 2]), placeholder("s", f32[4, 2]), scheme="int8/32")
    with pytest.raises(ShapeError, match="scale of int8/32"):
        ops.dequant_matmul(x, np.zeros((100, 2), np.int8), placeholder("s", f32[3, 2]), scheme="int8/32")
    with pytest.raises(ShapeError, match="takes 2 side tensors"):
        ops.dequant_matmul(x, placeholder("w", u8[100]), placeholder("s", f32[4, 2]), scheme="int4/32")
