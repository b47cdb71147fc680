"""Window functions, mel filters and short-time transforms against onnx's reference, scipy and torch."""

import numpy as np
import onnx
import pytest
import scipy.signal
import torch
from onnx.reference import ReferenceEvaluator

from strata import ops
from strata.errors import OptionError, ShapeError
from strata.mir import Value, constant, evaluate_values
from strata.ops.signal.signal import blackman_window, hamming_window, mel_weight_matrix

RNG = np.random.default_rng(4)


def close(actual: Value, expected: object, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(
        evaluate_values([actual], {}, {})[0], np.asarray(expected), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("n", [1, 2, 7, 8])
@pytest.mark.parametrize("periodic", [True, False])
def test_windows_equal_scipy(n: int, periodic: bool) -> None:
    close(hamming_window(n, periodic, dtype="f64"), scipy.signal.get_window("hamming", n, fftbins=periodic), 1e-12)
    close(blackman_window(n, periodic, dtype="f64"), scipy.signal.get_window("blackman", n, fftbins=periodic), 1e-12)


@pytest.mark.parametrize(
    "numbers", [(8, 16, 8192, 0.0, 4096.0), (20, 256, 16000, 50.0, 7600.0), (5, 7, 100, 0.0, 40.0)]
)
def test_mel_weight_matrix_equals_onnx(numbers: tuple) -> None:
    node = onnx.helper.make_node("MelWeightMatrix", ["a", "b", "c", "d", "e"], ["y"])
    kinds = (np.int64, np.int64, np.int64, np.float32, np.float32)
    feeds = {name: kind(v) for name, kind, v in zip("abcde", kinds, numbers, strict=True)}
    close(mel_weight_matrix(*numbers), ReferenceEvaluator(node).run(None, feeds)[0])


@pytest.mark.parametrize(("onesided", "parts"), [(1, 1), (0, 1), (0, 2)])
def test_stft_equals_onnx(onesided: int, parts: int) -> None:
    signal = RNG.standard_normal((2, 40, parts)).astype(np.float32)
    window = RNG.uniform(0.2, 1, 16).astype(np.float32)
    node = onnx.helper.make_node("STFT", ["s", "step", "w", "n"], ["y"], onesided=onesided)
    feeds = {"s": signal, "step": np.int64(6), "w": window, "n": np.int64(16)}
    expected = ReferenceEvaluator(node).run(None, feeds)[0]
    close(ops.onnx_stft(constant(signal), 6, constant(window), onesided=bool(onesided)), expected, 1e-4)


@pytest.mark.parametrize("center", [True, False])
def test_istft_equals_torch(center: bool) -> None:
    x = torch.tensor(RNG.standard_normal((2, 50)))
    window = torch.hamming_window(16, dtype=torch.float64)
    spec = torch.stft(x, 16, 4, window=window, center=center, return_complex=True)
    expected = torch.istft(spec, 16, 4, window=window, center=center)
    close(ops.istft(constant(spec.numpy()), 16, 4, window=constant(window.numpy()), center=center), expected, 1e-10)
    if center:
        cut = torch.istft(spec, 16, 4, window=window, length=43)
        close(ops.istft(constant(spec.numpy()), 16, 4, window=constant(window.numpy()), length=43), cut, 1e-10)


def test_mistakes() -> None:
    with pytest.raises(OptionError, match="at least 1"):
        hamming_window(0)
    with pytest.raises(OptionError, match="window or a frame_length"):
        ops.onnx_stft(constant(np.zeros((1, 8))), 2)
    with pytest.raises(ShapeError, match="16 elements"):
        ops.onnx_stft(constant(np.zeros((1, 32))), 2, constant(np.ones(8)), 16)
    with pytest.raises(ShapeError, match="complex"):
        ops.istft(constant(np.zeros((9, 4))), 16)
