"""Softmax, log-softmax and logsumexp against torch and SciPy; all axes, rows of -inf."""

import numpy as np
import pytest
import scipy.special
import torch

from strata import ops
from strata.core import bf16, f32, f64
from strata.errors import DTypeError, ShapeError
from strata.mir import constant, evaluate_values, placeholder, pullback
from strata.ops.reduce.softmax import Softmax


@pytest.mark.torch
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_94_every_axis_equals_torch_in_f64(name: str, axis: int, rng) -> None:
    array = rng.standard_normal((2, 3, 4)) * 5
    x = placeholder("x", f64[2, 3, 4])
    y = getattr(ops, name)(x, axis=axis)
    seed = rng.standard_normal(y.shape)
    (gradient,) = pullback([y], [constant(seed)], [x])
    got, slope = evaluate_values([y, gradient], {x: array}, {})
    t = torch.tensor(array, requires_grad=True)
    expected = getattr(torch, name)(t, dim=axis)
    expected.backward(torch.tensor(seed))
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(slope, t.grad.numpy(), rtol=1e-10, atol=1e-13)


def test_46_gradient_of_the_sum_of_softmax_vanishes(rng) -> None:
    x = placeholder("x", f64[3, 5])
    y = ops.sum(ops.softmax(x))
    (gradient,) = pullback([y], [constant(1.0, f64)], [x])
    (got,) = evaluate_values([gradient], {x: rng.standard_normal((3, 5))}, {})
    np.testing.assert_allclose(got, 0, atol=1e-15)


def test_a_row_of_minus_infinity() -> None:
    rows = np.float64([[-np.inf, -np.inf], [0, -np.inf]])
    x = placeholder("x", f64[2, 2])
    total = ops.logsumexp(x, axis=1)
    (slope,) = pullback([total], [ops.ones_like(total)], [x])
    soft, logs, sums, slopes = evaluate_values([ops.softmax(x), ops.log_softmax(x), total, slope], {x: rows}, {})
    assert np.isnan(soft[0]).all()
    assert soft[1].tolist() == [1, 0]
    assert np.isnan(logs[0]).all()
    assert logs[1].tolist() == [0, -np.inf]
    assert sums.tolist() == [-np.inf, 0]
    assert slopes.tolist() == [[0, 0], [1, 0]]


@pytest.mark.parametrize("axis", [None, 0, (0, 2), (-1, 0, 1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_logsumexp_over_several_axes_equals_scipy(axis, keepdims: bool, rng) -> None:
    array = rng.standard_normal((2, 3, 4)) * 300
    (got,) = evaluate_values([ops.logsumexp(constant(array), axis, keepdims)], {}, {})
    np.testing.assert_allclose(got, scipy.special.logsumexp(array, axis=axis, keepdims=keepdims), rtol=1e-12)


def test_large_values_do_not_overflow() -> None:
    x = constant(np.float32([[1000, 1001], [-1000, -1001]]))
    soft, sums = evaluate_values([ops.softmax(x), ops.logsumexp(x, axis=1)], {}, {})
    np.testing.assert_allclose(soft.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(sums, [1001.3133, -999.6867], rtol=1e-6)


def test_half_precision_decomposes_in_f32() -> None:
    x = placeholder("x", bf16[4, 1000])
    y = Softmax(1).decompose(x)
    assert y.dtype is bf16
    assert y.node.op.name == "cast"
    assert y.node.inputs[0].dtype is f32


def test_integers_become_floats_and_wrong_axes_are_refused() -> None:
    (got,) = evaluate_values([ops.softmax(constant(np.int32([0, 0])))], {}, {})
    assert got.dtype == np.float32
    with pytest.raises(ShapeError, match="axis 2 does not exist in 2 dimensions"):
        ops.softmax(constant(np.zeros((2, 2))), axis=2)
    with pytest.raises(DTypeError, match="only float"):
        Softmax(0)(constant(np.int32([0])))
