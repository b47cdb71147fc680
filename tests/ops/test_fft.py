"""Fourier transforms against NumPy, SciPy and torch, with gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import scipy.signal
import torch
from onnx.reference import ReferenceEvaluator

from strata import ops
from strata.core import c64, f32, f64, sym
from strata.errors import DTypeError, OptionError, ShapeError
from strata.mir import Graph, Value, constant, evaluate, evaluate_values, pullback
from strata.runtime import Session

RNG = np.random.default_rng(5)
NORMS = [None, "backward", "ortho", "forward"]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def complex_normal(*shape: int) -> np.ndarray:
    return normal(*shape) + 1j * normal(*shape)


def value(x: Value | None) -> np.ndarray:
    assert x is not None
    return evaluate_values([x], {}, {})[0]


def close(actual: Value | None, expected: Any, tolerance: float = 1e-10) -> None:
    got = value(actual)
    assert got.shape == np.shape(expected)
    np.testing.assert_allclose(got, np.asarray(expected), rtol=tolerance, atol=tolerance)


def gradient(loss: Callable[[Value], Value], x: np.ndarray) -> Value | None:
    at = constant(x)
    return pullback([loss(at)], [constant(1.0, f64)], [at])[0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [None, 1, 3, 5, 8, 11])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_one_axis_equals_numpy(norm: str | None, n: int | None, axis: int) -> None:
    x, z = normal(4, 6, 5), complex_normal(4, 6, 5)
    for name, array in (("fft", z), ("ifft", z), ("fft", x), ("rfft", x), ("irfft", z), ("hfft", z), ("ihfft", x)):
        expected = getattr(np.fft, name)(array, n, axis, norm)
        close(getattr(ops, name)(array, n, axis, norm), expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("s", "axes"), [(None, None), ((5, 4), None), ((3, 7), (0, 2)), (None, (1,)), (None, (2, 0))])
def test_several_axes_equal_numpy(norm: str | None, s: Any, axes: Any) -> None:
    x, z = normal(4, 6, 5), complex_normal(4, 6, 5)
    places = axes if axes is not None or s is None else (-2, -1)
    for name, array in (("fftn", z), ("ifftn", z), ("rfftn", x), ("irfftn", z)):
        close(getattr(ops, name)(array, s, axes, norm), getattr(np.fft, name)(array, s, places, norm))
    for name, array in (("fft2", z), ("ifft2", z), ("rfft2", x), ("irfft2", z)):
        close(getattr(ops, name)(array, norm=norm), getattr(np.fft, name)(array, norm=norm))


@pytest.mark.parametrize("n", [6, 8])
def test_case_77_direct_transform(n: int) -> None:
    z = complex_normal(n)
    matrix = np.exp(-2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n)
    close(ops.fft_packed(z), matrix @ z)


@pytest.mark.parametrize("n", [6, 7, 8, 16, 30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_case_77_packed_round_trip_is_n_times(n: int, dtype: Any) -> None:
    x = normal(3, 2 * n).astype(dtype)
    there = ops.fft_packed(constant(x))
    assert there.dtype is (f32 if dtype is np.float32 else f64)
    close(ops.fft_packed(there, inverse=True), n * x, 1e-4 if dtype is np.float32 else 1e-12)
    z = x[:, :n] + 1j * x[:, n:]
    expected = np.fft.fft(z)
    close(there, np.concatenate([expected.real, expected.imag], -1), 1e-4 if dtype is np.float32 else 1e-12)


def test_packed_norms_are_not_numpys() -> None:
    z = complex_normal(6)
    plain, back = np.fft.fft(z), np.fft.ifft(z)
    close(ops.fft_packed(z, norm="forward"), plain)
    close(ops.fft_packed(z, inverse=True, norm="forward"), back)
    close(ops.fft_packed(z, inverse=True, norm="backward"), back * 6)
    close(ops.fft_packed(z, norm="ortho"), plain / np.sqrt(6))


def test_case_77_vjp_is_the_inverse_transform() -> None:
    z, ct = complex_normal(6), complex_normal(6)
    at = constant(z)
    (g,) = pullback([ops.fft_packed(at)], [constant(ct)], [at])
    close(g, value(ops.fft_packed(ct, inverse=True)))


@pytest.mark.parametrize("n", [5, 8, 12])
def test_case_111_real_round_trip(n: int) -> None:
    x = normal(3, n)
    close(ops.rfft(x), np.fft.rfft(x))
    close(ops.irfft(ops.rfft(x), n), x)
    close(ops.psd(x), scipy.signal.periodogram(x, detrend=False, return_onesided=False)[1][:, : n // 2 + 1])
    close(ops.fftfreq(n, 0.5, dtype="f64"), np.fft.fftfreq(n, 0.5))
    close(ops.rfftfreq(n, 0.5, dtype="f64"), np.fft.rfftfreq(n, 0.5))


LOSSES: dict[str, tuple[Callable[[Value], Value], Callable[[torch.Tensor], torch.Tensor], np.ndarray]] = {
    "rfft": (lambda x: ops.rfft(x, 7), lambda x: torch.fft.rfft(x, 7), normal(2, 9)),
    "rfft_even": (lambda x: ops.rfft(x, norm="ortho"), lambda x: torch.fft.rfft(x, norm="ortho"), normal(2, 8)),
    "irfft": (lambda z: ops.irfft(z, 9), lambda z: torch.fft.irfft(z, 9), complex_normal(2, 5)),
    "irfft_even": (lambda z: ops.irfft(z, 8), lambda z: torch.fft.irfft(z, 8), complex_normal(2, 5)),
    "hfft": (ops.hfft, torch.fft.hfft, complex_normal(5)),
    "fftn": (ops.fftn, torch.fft.fftn, complex_normal(3, 4)),
    "rfftn": (ops.rfftn, torch.fft.rfftn, normal(3, 5)),
    "irfftn": (ops.irfftn, torch.fft.irfftn, complex_normal(3, 4)),
    "real_fft": (ops.fft, torch.fft.fft, normal(6)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_torch(name: str) -> None:
    ours, theirs, x = LOSSES[name]
    t = torch.tensor(x, requires_grad=True)
    out = theirs(t)
    weights = 1.0 + torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape)
    # a loss that sees real and imaginary parts of every element differently
    loss = ((out.real if out.is_complex() else out) ** 2 * weights).sum()
    if out.is_complex():
        loss = loss + (out.imag * weights.sqrt()).sum()
    loss.backward()

    def ours_loss(v: Value) -> Value:
        y = ours(v)
        total = (y.real() * y.real() * weights.numpy()).sum()
        return total + (y.imag() * np.sqrt(weights.numpy())).sum() if y.dtype.is_complex else total

    scale = 0.5 if t.is_complex() else 1.0  # torch doubles the derivative with respect to the conjugate
    close(gradient(ours_loss, x), t.grad.resolve_conj().numpy() * scale)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_shifts_equal_numpy(n: int) -> None:
    x = normal(n, 4)
    for axes in (None, 0, (1,), (0, 1)):
        close(ops.fftshift(x, axes), np.fft.fftshift(x, axes))
        close(ops.ifftshift(x, axes), np.fft.ifftshift(x, axes))


@pytest.mark.parametrize(("frame", "hop"), [(8, 4), (8, 3), (5, 5), (4, 7), (16, 1)])
def test_frames_and_stft(frame: int, hop: int) -> None:
    x = normal(2, 30)
    count = 1 + (30 - frame) // hop
    pieces = np.stack([x[:, i * hop : i * hop + frame] for i in range(count)], 1)
    close(ops.frames(x, frame, hop), pieces)
    bins = np.fft.rfft(pieces)
    close(ops.stft(x, frame, hop), np.concatenate([bins.real, bins.imag], -1).transpose(1, 0, 2))
    window = torch.hann_window(frame, dtype=torch.float64)
    close(ops.hann_window(frame, dtype="f64"), window)
    for center, mode in ((False, "constant"), (True, "constant"), (True, "reflect")):
        expected = torch.stft(
            torch.tensor(x), frame, hop, window=window, center=center, pad_mode=mode, return_complex=True
        )
        got = ops.stft(x, frame, hop, window=window.numpy(), center=center, pad_mode=mode, packed=False)
        close(got, expected)


def test_a_hop_beyond_the_end_asks_for_nothing_there() -> None:
    x = normal(2, 30)
    close(ops.frames(x, 8, 1 << 45), x[:, None, :8])


def test_convolution() -> None:
    a, b = normal(3, 7), normal(4)
    close(ops.fft_conv1d(a, b), np.stack([np.convolve(row, b) for row in a]))


def test_symbolic_length() -> None:
    graph = Graph("g")
    n = sym("T", 16)
    x = graph.input("x", f32[n])
    graph.outputs(ops.rfft(x), ops.irfft(ops.rfft(x), n), ops.frames(x, 8, 3), ops.psd(x), ops.fftshift(x))
    signal = normal(21).astype(np.float32)
    outs = evaluate(graph, {"x": signal})
    np.testing.assert_allclose(outs[0], np.fft.rfft(signal), atol=1e-4)
    np.testing.assert_allclose(outs[1], signal, atol=1e-5)
    np.testing.assert_allclose(outs[2][-1], signal[12:20], atol=0)
    np.testing.assert_allclose(outs[4], np.fft.fftshift(signal), atol=0)


def test_half_precision_and_integers_are_widened() -> None:
    assert ops.fft(constant(normal(4), "f16")).dtype is c64
    close(ops.rfft(np.arange(5)), np.fft.rfft(np.arange(5)))


@pytest.mark.parametrize(("inverse", "onesided"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("length", [None, 5, 12])
@pytest.mark.parametrize("axis", [1, -2, 0])
def test_onnx_dft_equals_the_reference_implementation(
    inverse: bool, onesided: bool, length: int | None, axis: int
) -> None:
    x = normal(3, 8, 1 if onesided else 2).astype(np.float32)
    inputs = ["x", "n" if length else "", "axis"]
    node = onnx.helper.make_node("DFT", inputs, ["y"], inverse=int(inverse), onesided=int(onesided))
    signature = [onnx.helper.make_tensor_value_info("x", 1, x.shape), onnx.helper.make_tensor_value_info("axis", 7, ())]
    if length:
        signature.append(onnx.helper.make_tensor_value_info("n", 7, ()))
    graph = onnx.helper.make_graph([node], "g", signature, [onnx.helper.make_tensor_value_info("y", 1, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    feeds = {"x": x, "axis": np.int64(axis)} | ({"n": np.int64(length)} if length else {})
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    close(ops.onnx_dft(x, length, axis, inverse=inverse, onesided=onesided), expected, 1e-4)


def test_onnx_one_sided_inverse_gives_real_numbers() -> None:
    x = normal(2, 9)
    bins = np.fft.rfft(x)
    packed = np.stack([bins.real, bins.imag], -1)
    close(ops.onnx_dft(packed, 9, 1, inverse=True, onesided=True), x[..., None])


def test_mistakes() -> None:
    with pytest.raises(ShapeError, match=r"\[re.., im..\] needs an even last axis, got f64\[3, 5\]"):
        ops.fft_packed(normal(3, 5))
    with pytest.raises(OptionError, match="norm is 'backward', 'ortho' or 'forward', got 'unitary'"):
        ops.fft(normal(3), norm="unitary")
    with pytest.raises(DTypeError, match="rfft: needs real numbers"):
        ops.rfft(complex_normal(3))
    with pytest.raises(OptionError, match="n is a number of elements"):
        ops.fft(normal(3), 0)
    with pytest.raises(ShapeError, match="shorter than a frame of 9"):
        ops.stft(normal(8), 9, 1)
    with pytest.raises(ShapeError, match="is empty"):
        ops.fft(np.zeros((2, 0)))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 16, 37, 100, 129])
@pytest.mark.parametrize("axis", [0, 1])
def test_bins_of_real_numbers_that_are_real_are_so_exactly(n: int, axis: int, rng) -> None:
    """As in NumPy: no imaginary part at frequency 0 and, of even lengths, at half the rate."""
    shape = (n, 3) if axis == 0 else (3, n)
    x = rng.standard_normal(shape).astype(np.float32) * 50
    g = Graph("g")
    given = g.input("x", (*shape, 1))
    made = Session("cpu").compile(
        g.outputs(ops.onnx_dft(given, None, axis), ops.onnx_dft(given, None, axis, onesided=True))
    )
    found = [y[..., 0] + 1j * y[..., 1] for y in made.run(x=x[..., None])]
    for got, want in zip(found, (np.fft.fft(x, axis=axis), np.fft.rfft(x, axis=axis)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
        real = [0, n // 2] if n % 2 == 0 else [0]
        if n <= 128:
            assert not np.take(got, real, axis).imag.any()
