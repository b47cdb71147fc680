"""Quantised arithmetic against integer references, and quantisation-aware training against its definition."""

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import TensorType, as_dtype, f32, f64, i8, i32
from strata.errors import DTypeError, OptionError, ShapeError
from strata.mir import Graph, evaluate, evaluate_values, placeholder, pullback, pushforward
from strata.runtime import Session

RNG = np.random.default_rng(8)


def inputs_for(arrays):
    return [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]


def run(fn, *arrays):
    xs = inputs_for(arrays)
    outs = fn(*xs)
    many = isinstance(outs, tuple)
    known = dict(zip(xs, arrays, strict=True))
    found = evaluate_values(outs if many else [outs], known, {})
    node = (outs[0] if many else outs).node
    if node.op.is_composition:  # the two meanings of a composition agree
        parts = node.op.decompose(*node.inputs)
        for a, b in zip(found, evaluate_values(parts if many else [parts], known, {}), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    return found if many else found[0]


def away(x):
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def test_case_53_saturation() -> None:
    x = np.float32([0.1, -0.3, 1.0, 999, -999])
    q = run(lambda v: ops.quantize(v, 0.05, 3), x)
    back = run(lambda v: ops.dequantize(v, 0.05, 3), q)
    np.testing.assert_allclose(back[3:], [(127 - 3) * 0.05, (-128 - 3) * 0.05], rtol=1e-6)
    np.testing.assert_allclose(back[:3], x[:3], atol=0.05)


def test_case_54_each_channel_has_its_scale() -> None:
    size = np.float32([0.01, 0.5, 5, 50])
    x = (RNG.uniform(-1, 1, (6, 4)) * size).astype(np.float32)
    x[0] = size * 1000
    x[1] = -size * 1000
    scale = size / 127
    back = run(lambda v: ops.dequantize(v, scale, axis=1), run(lambda v: ops.quantize(v, scale, axis=-1), x))
    np.testing.assert_allclose(back[0], 127 * scale, rtol=1e-6)
    np.testing.assert_allclose(back[1], -128 * scale, rtol=1e-6)
    assert (np.abs(back[2:] - x[2:]) <= scale * 0.51).all()


def test_halves_round_away_from_zero() -> None:
    x = np.float32([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997])
    np.testing.assert_array_equal(run(lambda v: ops.quantize(v, 1.0), x), [1, 2, 3, -1, -3, 0])


def test_case_52_product_is_bit_exact() -> None:
    x, w = RNG.integers(-128, 128, (3, 8)).astype(np.int8), RNG.integers(-128, 128, (8, 5)).astype(np.int8)
    bias = RNG.integers(-1000, 1000, 5).astype(np.int32)
    for zps in ((0, 0, 0), (3, -7, 5)):
        total = [
            [int(bias[j]) + sum((int(x[i, p]) - zps[0]) * (int(w[p, j]) - zps[1]) for p in range(8)) for j in range(5)]
            for i in range(3)
        ]
        for mult in (0.003, np.linspace(0.001, 0.01, 5)):
            want = np.clip(away(np.float32(total) * np.float32(mult)) + zps[2], -128, 127)
            got = run(
                lambda *v, zps=zps, mult=mult: ops.qmatmul(*v, x_zp=zps[0], w_zp=zps[1], out_zp=zps[2], mult=mult),
                x,
                w,
                bias,
            )
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("zps", [(0, 0, 0), (4, -2, 1)])
def test_case_51_convolution_is_bit_exact(zps) -> None:
    x, w = RNG.integers(-128, 128, (1, 2, 5, 5)).astype(np.int8), RNG.integers(-128, 128, (3, 2, 3, 3)).astype(np.int8)
    bias = RNG.integers(-1000, 1000, 3).astype(np.int32)
    exact = torch.nn.functional.conv2d(
        torch.from_numpy(x.astype(np.float64) - zps[0]),
        torch.from_numpy(w.astype(np.float64) - zps[1]),
        torch.from_numpy(bias.astype(np.float64)),
        padding=1,
    ).numpy()
    want = np.clip(away(exact.astype(np.float32) * np.float32(0.002)) + zps[2], -128, 127)
    got = run(lambda *v: ops.qconv2d(*v, padding=1, x_zp=zps[0], w_zp=zps[1], out_zp=zps[2], mult=0.002), x, w, bias)
    np.testing.assert_array_equal(got, want)


def test_straight_through_pair() -> None:
    x, t = placeholder("x", f32[3]), placeholder("t", f32[3])
    y = ops.quantize_dequantize(x, 0.1)
    assert pullback([y], [t], [x]) == [t]
    assert pushforward([y], [x], [t]) == [t]
    got = run(lambda v: ops.quantize_dequantize(v, 0.1, 3), np.float32([0.26, -0.04, 99]))
    np.testing.assert_allclose(got, [0.3, 0.0, 12.4], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fake_quantize_per_batch(bits) -> None:
    x = RNG.standard_normal((4, 6))
    y, scale = run(lambda v: ops.fake_quantize(v, bits=bits, axis=1), x)
    qmax = 2 ** (bits - 1) - 1
    np.testing.assert_allclose(scale, np.abs(x).max(0) / qmax)
    np.testing.assert_allclose(y, np.clip(away(x / scale), -qmax, qmax) * scale)


def test_moving_scale_is_returned() -> None:
    x = RNG.standard_normal((4, 2))
    state = np.array([0.5, 0.0])
    now = np.abs(x).max(0) / 127
    _, scale = run(lambda *v: ops.fake_quantize(*v, axis=1, scale_mode="ema", decay=0.9), x, state)
    np.testing.assert_allclose(scale, [0.9 * 0.5 + 0.1 * now[0], now[1]])
    y, fixed = run(lambda *v: ops.fake_quantize(*v, axis=1, scale_mode="fixed"), x, np.array([0.01, 0.02]))
    np.testing.assert_allclose(fixed, [0.01, 0.02])
    assert np.abs(y).max() <= 127 * 0.02 + 1e-9


@pytest.mark.parametrize("ste", ["identity", "clipped", "tanh", "hardtanh"])
def test_straight_through_uses_the_scale_of_the_forward_pass(ste) -> None:
    x, state, ct = RNG.standard_normal(50), np.array([0.01]), RNG.standard_normal(50)
    qmax = 127
    v, s, c = placeholder("v", f64[50]), placeholder("s", f64[1]), placeholder("c", f64[50])
    y, _ = ops.fake_quantize(v, s, ste=ste, scale_mode="fixed")
    (grad,) = pullback([y], [c], [v])
    known = {v: x, s: state, c: ct}
    slope = {
        "identity": np.ones(50), "clipped": np.abs(x) <= qmax * 0.01, "tanh": 1 - np.tanh(x / 0.01) ** 2,
        "hardtanh": np.maximum(0, 1 - np.abs(x) / (qmax * 0.01)),
    }[ste]  # fmt: skip
    np.testing.assert_allclose(evaluate_values([grad], known, {})[0], ct * slope)
    (tangent,) = pushforward([y], [v], [c])
    np.testing.assert_allclose(evaluate_values([tangent], known, {})[0], ct * slope)


@pytest.mark.parametrize("mode", ["per_batch", "ema"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_the_largest_number_is_not_clipped(mode, dtype, size) -> None:
    """The scale is the largest number over qmax, rounded: none lies outside its grid."""
    rng = np.random.default_rng(0)
    g = Graph("g")
    x, s = g.input("x", (12,), dtype), g.input("s", (1,), dtype)
    state = () if mode == "per_batch" else (s,)
    y, _ = ops.fake_quantize(x, *state, ste="clipped", scale_mode=mode)
    (grad,) = pullback([y], [ops.ones((12,), dtype)], [x])
    compiled = Session("cpu").compile(g.outputs(grad))
    for _ in range(200):
        feeds = {"x": (rng.standard_normal(12) * size).astype(x.dtype.np), "s": np.zeros(1, x.dtype.np)}
        np.testing.assert_array_equal(compiled.run(feeds)[0].astype(np.float64), 1)
        np.testing.assert_array_equal(evaluate(g, feeds)[0].astype(np.float64), 1)


@pytest.mark.parametrize("ste", ["clipped", "tanh", "hardtanh"])
def test_slopes_of_nothing_but_zeros(ste) -> None:
    """f16 has no number as small as the smallest scale."""
    g = Graph("g")
    x = g.input("x", (3,), "f16")
    y, _ = ops.fake_quantize(x, ste=ste)
    (grad,) = pullback([y], [ops.ones((3,), "f16")], [x])
    g.outputs(grad)
    for device in ("cpu", "reference"):
        np.testing.assert_array_equal(Session(device).compile(g).run(x=np.zeros(3, np.float16))[0], 1)


@pytest.mark.parametrize("factor", [False, True])
def test_learned_step(factor) -> None:
    x, scale, ct = RNG.standard_normal((5, 3)), np.array([0.1, 0.2, 0.9]), RNG.standard_normal((5, 3))
    v, s, c = inputs_for([x, scale, ct])
    y = ops.fake_quantize_lsq(v, s, bits=4, axis=1, gradient_factor=factor)
    known = dict(zip((v, s, c), (x, scale, ct), strict=True))
    dx, ds = evaluate_values(pullback([y], [c], [v, s]), known, {})
    z = x / scale
    inside = np.abs(z) <= 7
    np.testing.assert_allclose(dx, ct * inside)
    psi = np.where(inside, away(z) - z, np.sign(z) * 7)
    want = (psi * ct).sum(0) / (np.sqrt(5 * 7) if factor else 1)
    np.testing.assert_allclose(ds, want)
    t = placeholder("t", f64[3])
    (dy,) = pushforward([y], [s], [t])
    move = RNG.standard_normal(3)
    got = evaluate_values([dy], known | {t: move}, {})[0]
    np.testing.assert_allclose((got * ct).sum(), (want * move).sum())


def test_mistakes() -> None:
    x = placeholder("x", f32[2, 3])
    with pytest.raises(ShapeError, match="2 scales for 3 channels"):
        ops.quantize(x, [0.1, 0.2], axis=1)
    with pytest.raises(OptionError, match="must be positive"):
        ops.quantize(x, 0.0)
    with pytest.raises(DTypeError, match="x must be i8"):
        ops.qmatmul(x, placeholder("w", i8[3, 2]))
    with pytest.raises(ShapeError, match="multipliers"):
        ops.qmatmul(placeholder("a", i8[2, 3]), placeholder("w", i8[3, 2]), placeholder("b", i32[2]), mult=[1, 2, 3])
    with pytest.raises(OptionError, match="9 bits"):
        ops.fake_quantize(x, bits=9)
    with pytest.raises(OptionError, match="ste 'none'"):
        ops.fake_quantize(x, ste="none")
    with pytest.raises(OptionError, match="not from 0 to 1"):
        ops.fake_quantize(x, np.ones(1, np.float32), scale_mode="ema", decay=2.0)
    with pytest.raises(ShapeError, match="scales of"):
        ops.fake_quantize_lsq(x, np.ones(2, np.float32), axis=1)
