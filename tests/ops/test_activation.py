"""Activations against torch, values and gradients, kinks included."""

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import f32, f64
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, constant, evaluate, evaluate_values, placeholder, pullback
from strata.ops.elementwise.activation import ACTIVATIONS, SLOPES
from strata.testing.check import type_of

F = torch.nn.functional
POINTS = np.array([-200.0, -7, -3, -1.7, -1, -0.5, -0.2, 0, 0.2, 0.5, 1, 1.3, 3, 6, 7, 200])

CASES = [
    ("leaky_relu", F.leaky_relu, {}),
    ("leaky_relu", F.leaky_relu, {"negative_slope": 0.2}),
    ("elu", F.elu, {}),
    ("elu", F.elu, {"alpha": 0.7}),
    ("selu", F.selu, {}),
    ("celu", F.celu, {"alpha": 1.5}),
    ("softplus", F.softplus, {}),
    ("softsign", F.softsign, {}),
    ("hard_sigmoid", F.hardsigmoid, {}),
    ("hard_swish", F.hardswish, {}),
    ("hard_tanh", F.hardtanh, {"min_val": -0.3, "max_val": 1.1}),
    ("relu6", F.relu6, {}),
    ("mish", F.mish, {}),
    ("log_sigmoid", F.logsigmoid, {}),
    ("tanhshrink", F.tanhshrink, {}),
    ("softshrink", F.softshrink, {"lambd": 0.4}),
    ("hard_shrink", F.hardshrink, {"lambd": 0.4}),
    ("threshold", F.threshold, {"threshold": 0.3, "value": -2.0}),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), {}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "reference", "options"), CASES, ids=lambda c: c if isinstance(c, str) else "")
def test_values_and_gradients_equal_torch(name, reference, options) -> None:
    apply = ACTIVATIONS.get(name) if name == "gelu_tanh" else getattr(ops, name)
    x = placeholder("x", f64[len(POINTS)])
    y = apply(x, **options)
    (gradient,) = pullback([y], [ops.ones_like(y)], [x])
    got, slope = evaluate_values([y, gradient], {x: POINTS}, {})
    t = torch.tensor(POINTS, requires_grad=True)
    expected = reference(t, **options)
    expected.sum().backward()
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(slope, t.grad.numpy(), rtol=1e-7, atol=1e-12)  # torch holds 1 / 6 in f32


def test_20_activation_backward_equals_central_differences() -> None:
    x = np.linspace(0.3, 2.5, 9)
    for kind in SLOPES:
        if kind == "round":
            continue
        v, dy = placeholder("x", f64[9]), placeholder("dy", f64[9])
        f = ACTIVATIONS[kind](v)
        h = 1e-6
        up, down = (evaluate_values([f], {v: x + s}, {})[0] for s in (h, -h))
        g = np.linspace(-1, 1, 9)
        (got,) = evaluate_values([ops.activation_backward(v, dy, kind)], {v: x, dy: g}, {})
        np.testing.assert_allclose(got, (up - down) / (2 * h) * g, rtol=1e-6, atol=1e-8, err_msg=kind)


def test_11_relu_backward_passes_only_where_positive() -> None:
    x = constant(np.float32([-2, -0.1, 0, 0.1, 1, 3, -5]))
    dy = constant(np.float32([1, 2, 3, 4, 5, 6, 7]))
    (got,) = evaluate_values([ops.relu_backward(x, dy)], {}, {})
    assert got.tolist() == [0, 0, 0, 4, 5, 6, 0]


def test_softplus_and_its_slope_do_not_overflow() -> None:
    x = placeholder("x", f32[3])
    y = ops.softplus(x)
    (slope,) = pullback([y], [ops.ones_like(y)], [x])
    values, slopes = evaluate_values([y, slope], {x: np.float32([-1000, 0, 1000])}, {})
    np.testing.assert_allclose(values, [0, np.log(2), 1000])
    np.testing.assert_allclose(slopes, [0, 0.5, 1])


def test_prelu_along_an_axis_equals_torch() -> None:
    rng = np.random.default_rng(0)
    x, slope = rng.standard_normal((2, 3, 4)), rng.standard_normal(3)
    (got,) = evaluate_values([ops.prelu(constant(x), constant(slope), axis=1)], {}, {})
    np.testing.assert_allclose(got, F.prelu(torch.tensor(x), torch.tensor(slope)).numpy())
    with pytest.raises(ShapeError, match="needs 4 elements"):
        ops.prelu(constant(x), constant(slope), axis=-1)


def test_glu_and_logit_equal_torch() -> None:
    x = np.random.default_rng(1).uniform(0.01, 0.99, (3, 6))
    got = evaluate_values(
        [ops.glu(constant(x)), ops.glu(constant(x.T), axis=0), ops.logit(constant(x), eps=0.1)], {}, {}
    )
    t = torch.tensor(x)
    np.testing.assert_allclose(got[0], F.glu(t).numpy())
    np.testing.assert_allclose(got[1], F.glu(t.T, dim=0).numpy())
    np.testing.assert_allclose(got[2], torch.logit(t, eps=0.1).numpy(), rtol=1e-9)
    with pytest.raises(ShapeError, match="two halves"):
        ops.glu(constant(np.zeros((2, 3))))


def test_onnx_shrink_and_thresholded_relu() -> None:
    x = constant(np.float32([-2, -1, 0, 1, 2]))
    got = evaluate_values([ops.shrink(x, 1.5, 1.5), ops.thresholded_relu(x, 1.0)], {}, {})
    assert got[0].tolist() == [-0.5, 0, 0, 0, 0.5]
    assert got[1].tolist() == [0, 0, 0, 0, 2]


def test_nan_stays_nan() -> None:
    x = np.float64([np.nan])
    for name in ("leaky_relu", "elu", "hard_swish", "relu6", "mish", "softplus", "log_sigmoid", "selu"):
        (got,) = evaluate_values([getattr(ops, name)(constant(x))], {}, {})
        assert np.isnan(got).all(), name


def test_every_named_activation_takes_any_float_shape() -> None:
    for name, apply in ACTIVATIONS.items():
        g = Graph(name)
        x = g.input("x", (2, 3))
        array = np.full((2, 3), 0.5, np.float32)
        (got,) = evaluate(g.outputs(apply(x)), {"x": array})
        assert got.shape == (2, 3), name
        assert type_of(got) == f32[2, 3], name


def test_unknown_names_are_refused_with_the_nearest() -> None:
    x = constant(np.float32([1]))
    with pytest.raises(OptionError, match=r"no activation is named 'gelo'; did you mean 'gelu'\?"):
        ops.activation(x, "gelo")
    with pytest.raises(OptionError, match="O210"):
        ops.activation_backward(x, x, "gelo")
