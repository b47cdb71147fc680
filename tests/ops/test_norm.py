"""Normalisations against torch: values, gradients, axes, batches; the formulas of the backward ops."""

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import bf16, f32, f64, sym
from strata.errors import DTypeError, OptionError, ShapeError
from strata.mir import Graph, constant, evaluate, evaluate_values, placeholder, pullback
from strata.ops.nn.norm import BatchNormInference, GroupNormOp, LayerNormOp, RmsNorm
from strata.testing.check import type_of

F = torch.nn.functional


def gradients(fn, arrays, seed):
    """fn's value and the gradients of all inputs."""
    inputs = [placeholder(f"x{i}", type_of(a)) for i, a in enumerate(arrays)]
    y = fn(*inputs)
    grads = pullback([y], [constant(seed)], inputs)
    return evaluate_values([y, *grads], dict(zip(inputs, arrays, strict=True)), {})


def torch_gradients(fn, arrays, seed):
    inputs = [torch.tensor(a, requires_grad=True) for a in arrays]
    y = fn(*inputs)
    y.backward(torch.tensor(seed))
    return [y.detach().numpy(), *(t.grad.numpy() for t in inputs)]


def check(ours, theirs, arrays, rng) -> None:
    shape = np.shape(arrays[0])
    seed = rng.standard_normal(shape)
    for got, want in zip(gradients(ours, arrays, seed), torch_gradients(theirs, arrays, seed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.torch
def test_47_layer_norm_equals_torch(rng) -> None:
    arrays = [rng.standard_normal((3, 6)) * 3 + 5, rng.standard_normal(6), rng.standard_normal(6)]
    check(ops.layer_norm, lambda x, g, b: F.layer_norm(x, (6,), g, b), arrays, rng)


@pytest.mark.torch
def test_layer_norm_over_the_last_two_axes_equals_torch(rng) -> None:
    arrays = [rng.standard_normal((2, 3, 4)), rng.standard_normal((3, 4)), rng.standard_normal((3, 4))]
    ours = lambda x, g, b: ops.layer_norm(x, g, b, axis=(-2, -1), eps=1e-3)
    check(ours, lambda x, g, b: F.layer_norm(x, (3, 4), g, b, eps=1e-3), arrays, rng)


@pytest.mark.torch
@pytest.mark.parametrize("axis", [0, 1])
def test_94_layer_norm_on_other_axes_equals_torch_on_the_last(axis: int, rng) -> None:
    n = (4, 3, 5)[axis]
    arrays = [rng.standard_normal((4, 3, 5)), rng.standard_normal(n), rng.standard_normal(n)]

    def theirs(x, g, b):
        return F.layer_norm(x.movedim(axis, -1), (n,), g, b).movedim(-1, axis)

    check(lambda x, g, b: ops.layer_norm(x, g, b, axis=axis), theirs, arrays, rng)


@pytest.mark.torch
def test_98_rms_norm_gradient_equals_torch_when_rms_is_not_one(rng) -> None:
    arrays = [rng.standard_normal((3, 6)) * 7 + 2, rng.standard_normal(6)]
    check(lambda x, g: ops.rms_norm(x, g, eps=1e-6), lambda x, g: F.rms_norm(x, (6,), g, eps=1e-6), arrays, rng)


@pytest.mark.torch
def test_97_group_norm_with_batch_three_equals_torch_and_each_item(rng) -> None:
    arrays = [rng.standard_normal((3, 4, 2, 5)), rng.standard_normal(4), rng.standard_normal(4)]
    check(lambda x, g, b: ops.group_norm(x, 2, g, b), lambda x, g, b: F.group_norm(x, 2, g, b), arrays, rng)
    whole = evaluate_values([ops.group_norm(constant(arrays[0]), 2)], {}, {})[0]
    for n in range(3):
        one = evaluate_values([ops.group_norm(constant(arrays[0][n : n + 1]), 2)], {}, {})[0]
        np.testing.assert_array_equal(whole[n : n + 1], one)


@pytest.mark.torch
def test_instance_norm_equals_torch(rng) -> None:
    arrays = [rng.standard_normal((2, 3, 7)), rng.standard_normal(3), rng.standard_normal(3)]
    check(ops.instance_norm, lambda x, g, b: F.instance_norm(x, weight=g, bias=b), arrays, rng)


@pytest.mark.torch
def test_batch_norm_inference_equals_torch_with_gradients_of_the_statistics(rng) -> None:
    x, c = rng.standard_normal((4, 3, 2)), [rng.standard_normal(3) for _ in range(3)]
    arrays = [x, *c, rng.uniform(0.5, 2, 3)]

    def theirs(x, g, b, m, v):
        m, v, g, b = (t[:, None] for t in (m, v, g, b))
        return (x - m) / torch.sqrt(v + 1e-5) * g + b

    check(ops.batch_norm, theirs, arrays, rng)
    last = evaluate_values(
        [ops.batch_norm_inference(constant(np.moveaxis(x, 1, 2)), *map(constant, arrays[1:]))], {}, {}
    )[0]
    first = evaluate_values([ops.batch_norm(*map(constant, arrays))], {}, {})[0]
    np.testing.assert_array_equal(np.moveaxis(last, 2, 1), first)


@pytest.mark.torch
def test_batch_norm_in_training_equals_torch_and_differentiates_through_the_statistics(rng) -> None:
    arrays = [rng.standard_normal((4, 3, 2)), rng.standard_normal(3), rng.standard_normal(3)]
    check(
        lambda x, g, b: ops.batch_norm(x, g, b, training=True)[0],
        lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True),
        arrays,
        rng,
    )
    mean, var = rng.standard_normal(3), rng.uniform(0.5, 2, 3)
    _, *got = evaluate_values(ops.batch_norm(*map(constant, [*arrays, mean, var]), training=True, momentum=0.3), {}, {})
    expected = [torch.tensor(mean), torch.tensor(var)]
    F.batch_norm(torch.tensor(arrays[0]), *expected, training=True, momentum=0.3)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e.numpy(), rtol=1e-12)


def test_17_layer_norm_2d_normalises_across_the_channels() -> None:
    x = np.arange(1.0, 9.0).reshape(1, 2, 2, 2)
    (got,) = evaluate_values([ops.layer_norm_2d(constant(x), eps=1e-6)], {}, {})
    np.testing.assert_allclose(got[0, 0], -1, rtol=1e-6)
    np.testing.assert_allclose(got[0, 1], 1, rtol=1e-6)


def test_84_layer_norm_of_one_to_four() -> None:
    (got,) = evaluate_values([ops.layer_norm(constant(np.float32([1, 2, 3, 4])))], {}, {})
    np.testing.assert_allclose(got, [-1.342, -0.447, 0.447, 1.342], atol=1e-3)


def test_variance_far_from_zero_is_not_negative() -> None:
    x = np.float32(1e4) + np.float32([[0, 0.01, 0.02, 0.03]])
    (got,) = evaluate_values([LayerNormOp((1,), 1e-12).decompose(constant(x))], {}, {})
    assert np.isfinite(got).all()
    assert abs(got.std() - 1) < 0.05


@pytest.mark.torch
def test_local_response_norm_equals_torch_and_onnx(rng) -> None:
    x = rng.standard_normal((2, 7, 3))
    for size in (1, 3, 5):
        (got,) = evaluate_values([ops.local_response_norm(constant(x), size, alpha=0.1, beta=0.6, k=2.0)], {}, {})
        want = F.local_response_norm(torch.tensor(x), size, alpha=0.1, beta=0.6, k=2.0)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-10)
    (got,) = evaluate_values([ops.local_response_norm(constant(x), 4, alpha=0.1, beta=0.6, k=2.0)], {}, {})
    for c in range(7):  # ONNX: channels c - floor((size - 1) / 2) to c + ceil((size - 1) / 2)
        total = (x[:, max(0, c - 1) : min(7, c + 3)] ** 2).sum(1)
        np.testing.assert_allclose(got[:, c], x[:, c] / (2 + 0.1 / 4 * total) ** 0.6, rtol=1e-10)


@pytest.mark.torch
@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_normalize_equals_torch(p: int, rng) -> None:
    arrays = [rng.standard_normal((3, 4))]
    check(lambda x: ops.lp_normalize(x, p, axis=0), lambda x: F.normalize(x, p, dim=0), arrays, rng)
    (zero,) = evaluate_values([ops.lp_normalize(constant(np.zeros((2, 2))), p)], {}, {})
    assert not zero.any()


def test_mean_variance_normalization(rng) -> None:
    x = rng.standard_normal((2, 3, 4, 5)) * 3 + 1
    (got,) = evaluate_values([ops.mean_variance_normalization(constant(x))], {}, {})
    want = (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-7)


def test_half_precision_is_normalised_in_f32_and_keeps_f32_parameters(rng) -> None:
    x, gamma = rng.standard_normal((2, 512)).astype(bf16.np) + 100, rng.uniform(1, 1.001, 512).astype(np.float32)
    x = x.astype(bf16.np)
    value = ops.layer_norm(constant(x), constant(gamma))
    assert value.dtype is bf16
    (got,) = evaluate_values([value], {}, {})
    wide = x.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * gamma
    np.testing.assert_allclose(got.astype(np.float64), want, atol=0.02, rtol=0.01)


def test_symbolic_batch(rng) -> None:
    g = Graph("sym")
    x = g.input("x", (sym("N"), 4, 3))
    g.outputs(ops.layer_norm(x), ops.group_norm(x, 2), ops.rms_norm(x, axis=0))
    array = rng.standard_normal((5, 4, 3)).astype(np.float32)
    layer, group, rms = evaluate(g, {"x": array})
    np.testing.assert_allclose(layer, F.layer_norm(torch.tensor(array), (3,)).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(group, F.group_norm(torch.tensor(array), 2).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rms, array / np.sqrt((array**2).mean(0) + 1e-5), rtol=1e-5)


def test_only_the_shift_may_be_given() -> None:
    x, beta = constant(np.float64([[1, 3]])), constant(np.float64([10, 20]))
    (got,) = evaluate_values([ops.layer_norm(x, None, beta, eps=0.0)], {}, {})
    np.testing.assert_allclose(got, [[9, 21]])


def test_a_node_stays_one_node_under_vmap_and_vjp() -> None:
    x, gamma = placeholder("x", f32[5, 3, 4]), placeholder("g", f32[4])
    y = LayerNormOp((1,), 1e-5).vmap(x, gamma, batched=(True, False), size=5)
    assert y.node.op == LayerNormOp((2,), 1e-5)
    single = RmsNorm((2,), 1e-5)(x, gamma)
    dx, dgamma = pullback([single], [ops.ones_like(single)], [x, gamma])
    assert dx.node.op.name == "rms_norm_backward_input"
    assert dgamma.node.op.name == "rms_norm_backward_gamma"


def test_mistakes() -> None:
    x = placeholder("x", f32[2, 6, 3])
    with pytest.raises(ShapeError, match=r"axes \(2,\) of f32\[2, 6, 3\] need parameters of shape \[3\], got f32\[6\]"):
        ops.layer_norm(x, placeholder("g", f32[6]))
    with pytest.raises(ShapeError, match=r"6 channels of .* do not divide into 4 groups"):
        GroupNormOp(4, 1e-5)(x)
    with pytest.raises(ShapeError, match="is empty and cannot be normalised"):
        ops.rms_norm(placeholder("x", f32[2, 0]))
    with pytest.raises(OptionError, match="eps must not be negative, got -1"):
        ops.layer_norm(x, eps=-1)
    with pytest.raises(OptionError, match="the mean and the variance must be given"):
        ops.batch_norm(x)
    with pytest.raises(DTypeError, match="operands differ in dtype"):
        BatchNormInference(1, 1e-5)(x, *(placeholder("c", f64[6]) for _ in range(4)))
