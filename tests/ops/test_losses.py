"""Losses against torch, values and gradients."""

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import f32, f64, i64
from strata.errors import DTypeError, IndexRangeError, OptionError, ShapeError
from strata.mir import constant, evaluate_values, placeholder, pullback
from strata.ops.nn.losses import SoftmaxCrossEntropyWithLogits
from strata.testing.check import type_of

F = torch.nn.functional


def value_and_gradient(fn, array):
    x = placeholder("x", type_of(array))
    y = fn(x)
    (gradient,) = pullback([y], [ops.ones_like(y)], [x])
    return evaluate_values([y, gradient], {x: array}, {})


def check(ours, theirs, array) -> None:
    t = torch.tensor(array, requires_grad=True)
    expected = theirs(t)
    expected.sum().backward()
    got, slope = value_and_gradient(ours, array)
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(slope, t.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_15_cross_entropy_of_known_rows() -> None:
    logits = np.float32([[1, 2, 3], [-1, 0, 4], [5, 5, 5]])
    labels = np.array([2, 0, 1])
    (got,) = evaluate_values([ops.softmax_cross_entropy_with_logits(constant(logits), constant(labels))], {}, {})
    want = np.log(np.exp(logits).sum(1)) - logits[np.arange(3), labels]
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(got[2], np.log(3), atol=1e-6)


@pytest.mark.torch
def test_16_cross_entropy_backward_equals_torch(rng) -> None:
    logits, labels, dl = rng.standard_normal((4, 5)), rng.integers(0, 5, 4), rng.standard_normal(4)
    (got,) = evaluate_values([ops.softmax_cross_entropy_backward(*map(constant, (logits, labels, dl)))], {}, {})
    t = torch.tensor(logits, requires_grad=True)
    F.cross_entropy(t, torch.tensor(labels), reduction="none").backward(torch.tensor(dl))
    np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-10)


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 5, 3)])
def test_cross_entropy_equals_torch(reduction: str, smoothing: float, weighted: bool, shape, rng) -> None:
    array = rng.standard_normal(shape)
    labels = rng.integers(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if len(shape) > 1:
        labels.flat[1] = -100
    weight = rng.uniform(0.5, 2, 5) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check(
        lambda x: ops.cross_entropy(x, constant(labels), None if weight is None else constant(weight), **options),
        lambda t: F.cross_entropy(t, torch.tensor(labels), None if weight is None else torch.tensor(weight), **options),
        array,
    )


@pytest.mark.torch
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_with_probabilities_equals_torch(smoothing: float, rng) -> None:
    array, target = rng.standard_normal((4, 5)), rng.dirichlet(np.ones(5), 4)
    check(
        lambda x: ops.cross_entropy(x, constant(target), label_smoothing=smoothing),
        lambda t: F.cross_entropy(t, torch.tensor(target), label_smoothing=smoothing),
        array,
    )


def test_leading_axes_and_ignored_rows(rng) -> None:
    logits, labels = rng.standard_normal((2, 3, 4)), np.array([[0, 9, 3], [9, 1, 2]])
    x = placeholder("x", f64[2, 3, 4])
    loss = ops.softmax_cross_entropy_with_logits(x, constant(labels), ignore_index=9)
    (gradient,) = pullback([loss], [ops.ones_like(loss)], [x])
    got, slope = evaluate_values([loss, gradient], {x: logits}, {})
    assert got[labels == 9].tolist() == [0, 0]
    assert not slope[labels == 9].any()
    assert (got[labels != 9] > 0).all()
    np.testing.assert_allclose(slope.sum(-1), 0, atol=1e-12)


def test_float_labels_are_truncated_and_wrong_ones_refused() -> None:
    logits = constant(np.zeros((2, 3), np.float32))
    (got,) = evaluate_values([ops.softmax_cross_entropy_with_logits(logits, constant(np.float32([1, 2])))], {}, {})
    np.testing.assert_allclose(got, np.log(3), rtol=1e-6)
    wrong = ops.softmax_cross_entropy_with_logits(logits, constant(np.array([1, 3])))
    with pytest.raises(IndexRangeError, match="label 3 of row 1 is outside the 3 classes"):
        evaluate_values([wrong], {}, {})
    with pytest.raises(ShapeError, match="do not have one element for each row"):
        ops.softmax_cross_entropy_with_logits(logits, placeholder("l", i64[3]))
    with pytest.raises(DTypeError, match="labels must be integers"):
        SoftmaxCrossEntropyWithLogits(None)(logits, placeholder("l", f32[2]))


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mse_loss", {}),
        ("l1_loss", {}),
        ("huber_loss", {"delta": 0.7}),
        ("smooth_l1_loss", {"beta": 0.4}),
        ("smooth_l1_loss", {"beta": 0.0}),
    ],
)
def test_regression_losses_equal_torch(name: str, options, reduction: str, rng) -> None:
    array, target = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    check(
        lambda x: getattr(ops, name)(x, constant(target), reduction=reduction, **options),
        lambda t: getattr(F, name)(t, torch.tensor(target), reduction=reduction, **options),
        array,
    )


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probability_losses_equal_torch(reduction: str, rng) -> None:
    array, target = rng.standard_normal((3, 4)) * 4, rng.uniform(0, 1, (3, 4))
    weight, positive = rng.uniform(0.5, 2, (3, 4)), rng.uniform(0.5, 2, 4)
    check(
        lambda x: ops.binary_cross_entropy_with_logits(
            x, constant(target), constant(weight), pos_weight=constant(positive), reduction=reduction
        ),
        lambda t: F.binary_cross_entropy_with_logits(
            t, torch.tensor(target), torch.tensor(weight), pos_weight=torch.tensor(positive), reduction=reduction
        ),
        array,
    )
    inside = rng.uniform(0.05, 0.95, (3, 4))
    check(
        lambda x: ops.binary_cross_entropy(x, constant(target), reduction=reduction),
        lambda t: F.binary_cross_entropy(t, torch.tensor(target), reduction=reduction),
        inside,
    )
    labels = rng.integers(0, 4, 3)
    check(
        lambda x: ops.nll_loss(x, constant(labels), reduction=reduction),
        lambda t: F.nll_loss(t, torch.tensor(labels), reduction=reduction),
        np.log(inside),
    )


@pytest.mark.torch
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
def test_kl_div_equals_torch(reduction: str, log_target: bool, rng) -> None:
    array, target = np.log(rng.dirichlet(np.ones(4), 3)), rng.dirichlet(np.ones(4), 3)
    target = np.log(target) if log_target else np.where(np.arange(4) == 0, 0.0, target)
    check(
        lambda x: ops.kl_div(x, constant(target), reduction=reduction, log_target=log_target),
        lambda t: F.kl_div(t, torch.tensor(target), reduction=reduction, log_target=log_target),
        array,
    )


@pytest.mark.torch
def test_cosine_similarity_equals_torch(rng) -> None:
    other = rng.standard_normal((3, 4))
    for axis in (0, 1):
        check(
            lambda x, axis=axis: ops.cosine_similarity(x, constant(other), axis=axis),
            lambda t, axis=axis: F.cosine_similarity(t, torch.tensor(other), dim=axis),
            rng.standard_normal((3, 4)),
        )


def test_extreme_logits_stay_finite() -> None:
    got, slope = value_and_gradient(
        lambda x: ops.binary_cross_entropy_with_logits(x, constant(np.float32([0, 1, 0.5])), reduction="none"),
        np.float32([1e4, -1e4, 0]),
    )
    np.testing.assert_allclose(got, [1e4, 1e4, np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(slope, [1, -1, 0], atol=1e-6)


def test_certain_probabilities_have_slopes() -> None:
    """Right ones and wrong ones: a sigmoid that is rounded to 0 or 1 does not end a training."""
    target = np.float32([0, 1, 0, 1, 1])
    got, slope = value_and_gradient(
        lambda x: ops.binary_cross_entropy(x, constant(target), reduction="none"), np.float32([0, 0, 1, 1, 1e-20])
    )
    np.testing.assert_allclose(got, [0, 100, 100, 0, np.log(1e20)], rtol=1e-6)
    np.testing.assert_allclose(slope, [1, -1e12, 1e12, -1, -1e12], rtol=1e-6)


def test_unknown_reductions_and_shapes_are_refused() -> None:
    x, y = placeholder("x", f32[3]), placeholder("y", f32[4])
    with pytest.raises(OptionError, match="reduction is 'mean', 'sum' or 'none', got 'avg'"):
        ops.mse_loss(x, x, reduction="avg")
    with pytest.raises(ShapeError, match=r"the prediction f32\[3\] and the target f32\[4\] differ in shape"):
        ops.mse_loss(x, y)
    with pytest.raises(OptionError, match="label_smoothing lies in"):
        ops.cross_entropy(x, constant(0), label_smoothing=2)
