"""Butterfly stages, log-mel features and complex helpers against plain loops, NumPy and finite differences."""

from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.core import f32, f64
from strata.errors import DTypeError, ShapeError
from strata.mir import Value, constant, evaluate_values, placeholder, pullback

RNG = np.random.default_rng(9)


def value(x: Value | None) -> np.ndarray:
    assert x is not None
    return evaluate_values([x], {}, {})[0]


def test_case_68_squared_modulus_and_its_gradient() -> None:
    z = np.array([3 + 4j, 1, 0])
    np.testing.assert_allclose(value(ops.complex_norm_sq(z)), [25, 1, 0])
    at = constant(np.array([2 + 1j, -1 + 3j]))
    (g,) = pullback([ops.complex_norm_sq(at)], [constant(np.array([0.5, -2]))], [at])
    np.testing.assert_allclose(value(g), [1 + 0.5j, 2 - 6j])
    one = constant(np.array(3 + 4j))
    (g,) = pullback([ops.complex_norm_sq(one)], [constant(1.0, f64)], [one])
    np.testing.assert_allclose(2 * value(g), 6 + 8j)


def test_angle_and_conjugate() -> None:
    z = RNG.standard_normal(5) + 1j * RNG.standard_normal(5)
    np.testing.assert_allclose(value(ops.angle(z)), np.angle(z))
    np.testing.assert_allclose(value(ops.angle(np.array([1.0, -2.0]))), [0, np.pi])
    np.testing.assert_allclose(value(ops.conjugate(ops.conjugate(z))), z)
    np.testing.assert_allclose(value(ops.arctan2(1, -1)), np.arctan2(1, -1), rtol=1e-6)


@pytest.mark.parametrize("n", [2, 8, 16])
def test_all_butterfly_stages_make_a_fourier_transform(n: int) -> None:
    """With every gate open and no reversal, the stages after a bit-reversed load are the radix-2 transform."""
    levels = n.bit_length() - 1
    z = RNG.standard_normal((3, n)) + 1j * RNG.standard_normal((3, n))
    order = [int(format(i, f"0{levels}b")[::-1], 2) for i in range(n)]
    state: Any = constant(np.stack([z.real, z.imag], -1)[:, order])
    for stage in range(levels):
        t = 1 << stage
        twiddle = np.exp(-1j * np.pi * (np.arange(n // 2) % t) / t)
        ones, zeros = np.ones(n // 2), np.zeros(n // 2)
        state = ops.fft_butterfly_stage(state, ones, zeros, twiddle.real, twiddle.imag, stage=stage, n_fft=n)
    got = value(state)
    np.testing.assert_allclose(got[..., 0] + 1j * got[..., 1], np.fft.fft(z), atol=1e-12)


def test_closed_gates_copy_and_reversal_swaps() -> None:
    x = RNG.standard_normal((1, 4, 2))
    one, zero = np.ones(2), np.zeros(2)
    np.testing.assert_allclose(value(ops.fft_butterfly_stage(x, zero, zero, one, zero, stage=0, n_fft=4)), x)
    plain = value(ops.fft_butterfly_stage(x, one, zero, one, zero, stage=1, n_fft=4))
    swapped = value(ops.fft_butterfly_stage(x, one, one, one, zero, stage=1, n_fft=4))
    np.testing.assert_allclose(swapped, plain[:, [2, 3, 0, 1]])


def test_case_85_log_mel_geometry() -> None:
    out = ops.log_mel(placeholder("s", f32[4, 256]), placeholder("f", f32[80, 65]))
    assert out.type == f32[4, 80]


def features(spec: np.ndarray, filters: np.ndarray) -> np.ndarray:
    return value(ops.log_mel(spec, filters))


def test_log_mel_gradient_moves_the_floor_with_the_loudest_band() -> None:
    """W61: a clamped band follows the loudest band of its frame, so its cotangent goes there."""
    re = np.array([[300.0, 2.0, 0.01, 5.0], [1.0, 2.0, 3.0, 4.0]])
    im = np.array([[200.0, 1.0, 0.02, 1.0], [0.5, 0.0, 1.0, 2.0]])
    spec = np.concatenate([re, im], -1)
    filters = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1e-2]])
    level = np.log10((re**2 + im**2)[:, :3] @ filters.T)
    assert level[0, 2] < level[0].max() - 8
    assert not (level[1] < level[1].max() - 8).any()
    dy = RNG.standard_normal((2, 3))
    got = value(ops.log_mel_backward(constant(spec), filters, dy))
    at = constant(spec)
    (again,) = pullback([ops.log_mel(at, filters)], [constant(dy)], [at])
    np.testing.assert_allclose(got, value(again), rtol=1e-10, atol=1e-12)
    for i in np.ndindex(spec.shape):
        step = np.zeros_like(spec)
        step[i] = 1e-6 * max(1.0, abs(spec[i]))
        slope = ((features(spec + step, filters) - features(spec - step, filters)) * dy).sum() / (2 * step[i])
        assert abs(slope - got[i]) < 1e-7 * max(1.0, abs(slope))


def test_log_mel_filters_have_a_gradient_and_silence_has_none() -> None:
    spec, filters = RNG.standard_normal((2, 6)), RNG.uniform(0.1, 1, (3, 2))
    at = constant(filters)
    (g,) = pullback([ops.log_mel(spec, at).sum()], [constant(1.0, f64)], [at])
    step = np.zeros_like(filters)
    step[1, 0] = 1e-6
    slope = (features(spec, filters + step) - features(spec, filters - step)).sum() / 2e-6
    assert abs(slope - value(g)[1, 0]) < 1e-7
    silent = constant(np.zeros((2, 6)))
    (g,) = pullback([ops.log_mel(silent, filters).sum()], [constant(1.0, f64)], [silent])
    np.testing.assert_array_equal(value(g), np.zeros((2, 6)))


def test_mistakes() -> None:
    with pytest.raises(ShapeError, match="even last axis"):
        ops.log_mel(placeholder("s", f32[4, 7]), placeholder("f", f32[8, 4]))
    with pytest.raises(ShapeError, match="a spectrum of 4 points has 3 bins, the filters have 5"):
        ops.log_mel(placeholder("s", f32[4, 8]), placeholder("f", f32[8, 5]))
    with pytest.raises(DTypeError, match="both f32 or both f64"):
        ops.log_mel(placeholder("s", f32[4, 8]), placeholder("f", f64[8, 3]))
    half = np.zeros(4, np.float32)
    with pytest.raises(ShapeError, match="stage 3 does not divide 8 points"):
        ops.fft_butterfly_stage(placeholder("s", f32[1, 8, 2]), half, half, half, half, stage=3, n_fft=8)
    with pytest.raises(ShapeError, match="does not divide 8 points"):
        ops.fft_butterfly_stage(placeholder("s", f32[1, 8, 2]), half, half, half, half, stage=1 << 60, n_fft=8)
