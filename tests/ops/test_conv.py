"""Convolutions against torch and onnx's rules, and their gradients against torch and finite differences."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from strata import ops
from strata.core import TensorType, f32, f64, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Value, constant, evaluate_values, placeholder, pullback
from strata.ops.conv.conv_functions import (
    conv,
    conv1d,
    conv2d,
    conv3d,
    conv_backward_input,
    conv_backward_weight,
    conv_transpose,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from strata.ops.conv.windows import col2im, fold, im2col, unfold

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def run(*values: Value) -> list[np.ndarray]:
    return list(evaluate_values(values, {}, {}))


def close(actual: Value | np.ndarray, expected: object, tolerance: float = 1e-10) -> None:
    array = run(actual)[0] if isinstance(actual, Value) else actual
    np.testing.assert_allclose(array, np.asarray(expected), rtol=tolerance, atol=tolerance)


FORWARD = {1: (conv1d, F.conv1d), 2: (conv2d, F.conv2d), 3: (conv3d, F.conv3d)}
TRANSPOSED = {
    1: (conv_transpose1d, F.conv_transpose1d), 2: (conv_transpose2d, F.conv_transpose2d),
    3: (conv_transpose3d, F.conv_transpose3d),
}  # fmt: skip


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 3}, {"groups": 2}, {"padding": "same", "dilation": 2},
     {"padding": "valid", "stride": 3}, {"groups": 4, "stride": 2, "padding": 2}],
)  # fmt: skip
def test_conv_equals_torch_with_gradients(rank: int, options: dict) -> None:
    ours, theirs = FORWARD[rank]
    groups = options.get("groups", 1)
    x, w, b = normal(2, 4, *(7, 6, 5)[:rank]), normal(8, 4 // groups, *(2, 3, 2)[:rank]), normal(8)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    expected = theirs(tx, tw, tb, **options)
    ct = normal(*expected.shape)
    expected.backward(torch.tensor(ct))
    vx, vw, vb = constant(x), constant(w), constant(b)
    out = ours(vx, vw, vb, **options)
    close(out, expected.detach())
    for gradient, t in zip(pullback([out], [constant(ct)], [vx, vw, vb]), (tx, tw, tb), strict=True):
        close(gradient, t.grad)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2, "padding": 2, "output_padding": 1},
     {"groups": 2, "stride": 3}, {"groups": 4, "stride": 2, "padding": 2, "dilation": 3, "output_padding": 2}],
)  # fmt: skip
def test_conv_transpose_equals_torch_with_gradients(rank: int, options: dict) -> None:
    ours, theirs = TRANSPOSED[rank]
    groups = options.get("groups", 1)
    x, w, b = normal(2, 4, *(4, 5, 3)[:rank]), normal(4, 8 // groups, *(2, 3, 2)[:rank]), normal(8)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    expected = theirs(tx, tw, tb, **options)
    ct = normal(*expected.shape)
    expected.backward(torch.tensor(ct))
    vx, vw, vb = constant(x), constant(w), constant(b)
    out = ours(vx, vw, vb, **options)
    close(out, expected.detach())
    for gradient, t in zip(pullback([out], [constant(ct)], [vx, vw, vb]), (tx, tw, tb), strict=True):
        close(gradient, t.grad)


def test_one_image_without_a_batch_axis() -> None:
    x, w = normal(2, 5, 5), normal(3, 2, 3, 3)
    close(conv2d(constant(x), constant(w)), F.conv2d(torch.tensor(x), torch.tensor(w)))


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_onnx_auto_pad(mode: str, stride: int) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    x, w = normal(1, 2, 7, 6).astype(np.float32), normal(3, 2, 3, 2).astype(np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=mode, strides=[stride, stride])
    (expected,) = ReferenceEvaluator(node).run(None, {"x": x, "w": w})
    close(conv(constant(x), constant(w), stride=stride, padding=mode), expected, 1e-5)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_onnx_conv_transpose_auto_pad_gives_size_times_stride(mode: str) -> None:
    x, w = normal(1, 2, 5), normal(2, 3, 4)
    out = run(conv_transpose(constant(x), constant(w), stride=3, padding=mode))[0]
    full = F.conv_transpose1d(torch.tensor(x), torch.tensor(w), stride=3).numpy()  # 16 wide: one element is cut
    assert out.shape == (1, 3, 15)
    close(out, full[..., :15] if mode == "SAME_UPPER" else full[..., 1:])


def test_onnx_conv_transpose_output_shape() -> None:
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    x, w = normal(1, 1, 3, 3).astype(np.float32), normal(1, 2, 3, 3).astype(np.float32)
    for extra in (0, 1):  # without output padding the full result is one element too small
        attributes = {"strides": [3, 2], "output_shape": [10, 8], "output_padding": [extra, extra]}
        node = onnx.helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
        (expected,) = ReferenceEvaluator(node).run(None, {"x": x, "w": w})
        ours = conv_transpose(constant(x), constant(w), stride=(3, 2), output_shape=(10, 8), output_padding=extra)
        close(ours, expected, 1e-5)


# ------------------------------------------------------------------------------------------- numbered cases of the spec


def _difference(f, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    gradient = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (f(up) - f(down)) / (2 * step)
    return gradient


def test_case_13_backward_input_against_finite_differences() -> None:
    x, w, dy = normal(1, 2, 4, 4), normal(3, 2, 3, 3), normal(1, 3, 4, 4)

    def loss(a: np.ndarray) -> float:
        return float((F.conv2d(torch.tensor(a), torch.tensor(w), padding=1).numpy() * dy).sum())

    close(conv_backward_input(constant(dy), constant(w), x.shape, padding=1), _difference(loss, x), 1e-7)


def test_case_14_backward_weight_against_finite_differences() -> None:
    x, w, dy = normal(2, 2, 4, 4), normal(2, 2, 3, 3), normal(2, 2, 2, 2)

    def loss(a: np.ndarray) -> float:
        return float((F.conv2d(torch.tensor(x), torch.tensor(a)).numpy() * dy).sum())

    close(conv_backward_weight(constant(x), constant(dy), w.shape), _difference(loss, w), 1e-7)


def test_case_18_transposed_convolution_scatters_its_kernel() -> None:
    x, w = np.full((1, 1, 1, 1), 2.0), np.eye(2).reshape(1, 1, 2, 2)
    close(conv_transpose2d(constant(x), constant(w), stride=2), [[[[2.0, 0.0], [0.0, 2.0]]]])


def test_case_70_shapes() -> None:
    x = placeholder("x", f32[1, 4, 8, 8])
    assert conv2d(x, placeholder("w", f32[8, 2, 3, 3]), padding=1, groups=2).shape == (1, 8, 8, 8)
    assert conv_transpose2d(x, placeholder("w", f32[4, 8, 2, 2]), stride=2).shape == (1, 8, 16, 16)


def test_case_4_one_by_one_convolution_equals_a_loop() -> None:
    x, w = normal(2, 4, 3, 3), normal(5, 4, 1, 1)
    expected = np.zeros((2, 5, 3, 3))
    for n, o, i, j in np.ndindex(2, 5, 3, 3):
        expected[n, o, i, j] = sum(x[n, c, i, j] * w[o, c, 0, 0] for c in range(4))
    close(conv2d(constant(x), constant(w)), expected)


def test_case_50_gradients_of_a_small_network() -> None:
    x, labels = normal(3, 2, 6, 6), np.array([2, 0, 1])
    shapes = [(4, 2, 3, 3), (4,), (36, 3), (3,)]
    params = [placeholder("p", TensorType(f64, shape)) for shape in shapes]
    kernel, bias, dense, offset = params
    features = ops.max_pool2d(ops.relu(conv2d(constant(x), kernel, bias, padding=1)), 2)
    logits = ops.reshape(features, (3, 36)) @ dense + offset
    loss = ops.mean(ops.softmax_cross_entropy_with_logits(logits, constant(labels)))
    gradients = pullback([loss], [constant(1.0, "f64")], params)
    arrays = [normal(*shape) * 0.5 for shape in shapes]
    for i, gradient in enumerate(gradients):

        def value(a: np.ndarray, at: int = i) -> float:
            moved = [a if j == at else b for j, b in enumerate(arrays)]
            return float(evaluate_values([loss], dict(zip(params, moved, strict=True)), {})[0])

        got = evaluate_values([gradient], dict(zip(params, arrays, strict=True)), {})[0]
        np.testing.assert_allclose(got, _difference(value, arrays[i]), rtol=1e-6, atol=1e-7)


# ----------------------------------------------------------------------------------------------------------- properties


def test_second_derivatives_equal_torch() -> None:
    x, w, v = normal(2, 2, 6), normal(4, 1, 3), normal(2, 2, 6)
    options = {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    y = F.conv1d(tx, tw, **options)
    (gx,) = torch.autograd.grad((y**3).sum(), tx, create_graph=True)
    expected = torch.autograd.grad((gx * torch.tensor(v)).sum(), [tx, tw])
    vx, vw = constant(x), constant(w)
    out = conv1d(vx, vw, **options)
    (ours,) = pullback([out], [3.0 * out * out], [vx])
    for gradient, want in zip(pullback([ours], [constant(v)], [vx, vw]), expected, strict=True):
        close(gradient, want)


def test_symbolic_sizes_survive_the_gradient() -> None:
    n, s = sym("N"), sym("S", 8)
    x, w = placeholder("x", TensorType(f32, (n, 4, s, s))), placeholder("w", f32[8, 4, 3, 3])
    out = conv2d(x, w, stride=2, padding=1)
    assert str(out.type) == "f32[N, 8, (S - 1) // 2 + 1, (S - 1) // 2 + 1]"
    gx, gw = pullback([out], [out], [x, w])
    assert gx.type == x.type
    assert gw.type == w.type


def test_im2col_times_weights_is_convolution() -> None:
    x, w = normal(2, 3, 5, 6), normal(4, 3, 2, 3)
    rows = run(im2col(constant(x), (2, 3), stride=2, padding=1))[0]
    expected = F.conv2d(torch.tensor(x), torch.tensor(w), stride=2, padding=1).numpy()
    close((rows @ w.reshape(4, -1).T).reshape(2, *expected.shape[2:], 4).transpose(0, 3, 1, 2), expected)
    back = col2im(constant(rows), (5, 6), 3, (2, 3), stride=2, padding=1)
    counts = run(col2im(constant(np.ones_like(rows)), (5, 6), 3, (2, 3), stride=2, padding=1))[0]
    close(back, x * counts)


def test_unfold_and_fold_equal_torch() -> None:
    x = normal(2, 3, 6, 5)
    options = {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (1, 0), "stride": (2, 1)}
    expected = F.unfold(torch.tensor(x), **options)
    close(unfold(constant(x), **options), expected)
    close(fold(constant(expected.numpy()), (6, 5), **options), F.fold(expected, (6, 5), **options))


LINE, KERNEL = placeholder("x", f32[1, 4, 8]), placeholder("w", f32[8, 4, 3])
PLANE = placeholder("x", f32[1, 4, 8, 8])


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda: conv2d(PLANE, placeholder("w", f32[8, 3, 3, 3])), ShapeError, "S305"),
        (lambda: conv2d(PLANE, placeholder("w", f32[3, 2, 3, 3]), groups=2), ShapeError, "S306"),
        (lambda: conv2d(PLANE, placeholder("w", f32[8, 4, 9, 3])), ShapeError, "S302"),
        (lambda: conv2d(LINE, KERNEL), ShapeError, "S304"),
        (lambda: conv1d(LINE, KERNEL, stride=0), OptionError, "O240"),
        (lambda: conv1d(LINE, KERNEL, padding="same", stride=2), OptionError, "O242"),
        (lambda: conv2d(PLANE, placeholder("w", f32[8, 4, 3, 3]), stride=(1, 2, 3)), OptionError, "O241"),
        (lambda: conv1d(LINE, KERNEL, placeholder("b", f32[7])), ShapeError, "S308"),
        (lambda: conv_transpose1d(LINE, placeholder("w", f32[4, 8, 3]), output_padding=1), OptionError, "O243"),
    ],
)
def test_mistakes(call, error: type[Exception], code: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert caught.value.code == code
