"""Sorting, top-k, arg-extrema and running ops against NumPy, torch and plain loops; cases of the op specification."""

import numpy as np
import pytest
import torch

from strata import ops
from strata.core import f32, f64, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, evaluate, evaluate_values, placeholder, pullback
from tests.ops.evaluation import gradients, hessian_product, leaf, run

RNG = np.random.default_rng(0)
SPECIAL = np.float32([[3, np.nan, 1, np.nan, -np.inf], [2, 2, 2, np.inf, 2]])


def runs(fn, *arrays: np.ndarray) -> list[np.ndarray]:
    inputs = [leaf(f"x{i}", a) for i, a in enumerate(arrays)]
    return list(evaluate_values(fn(*inputs), dict(zip(inputs, arrays, strict=True)), {}))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_sort_as_torch(descending: bool, axis: int) -> None:
    """torch too takes NaN as the largest and keeps the order of equal elements."""
    for x in (SPECIAL, RNG.integers(0, 3, (4, 6)).astype(np.float32)):
        values, ids = torch.sort(torch.tensor(x), dim=axis, descending=descending, stable=True)
        np.testing.assert_array_equal(run(lambda a: ops.sort(a, axis, descending=descending), x), values.numpy())
        np.testing.assert_array_equal(run(lambda a: ops.argsort(a, axis, descending=descending), x), ids.numpy())


def test_sort_of_the_flat_array() -> None:
    x = RNG.standard_normal((3, 4))
    np.testing.assert_array_equal(run(lambda a: ops.sort(a, None), x), np.sort(x, None))


def test_gradient_of_sort_and_topk() -> None:
    x, ct = RNG.permutation(12).reshape(3, 4).astype(float), RNG.standard_normal((3, 4))
    order = np.argsort(-x, 1)
    expected = np.zeros((3, 4))
    np.put_along_axis(expected, order, ct, 1)
    np.testing.assert_allclose(gradients(lambda a: ops.sort(a, 1, descending=True), [x], ct)[0], expected)
    top = np.zeros((3, 4))
    np.put_along_axis(top, order[:, :2], ct[:, :2], 1)
    np.testing.assert_allclose(gradients(lambda a: ops.topk(a, 2)[0], [x], ct[:, :2])[0], top)


def test_case_112_topk_of_a_row_with_fewer_than_k_finite_entries() -> None:
    """W21: no id is given twice."""
    x = np.float32([[-np.inf, 1, -np.inf, -np.inf], [0, 0, np.nan, 0]])
    values, ids = runs(lambda a: ops.topk(a, 3), x)
    np.testing.assert_array_equal(ids, [[1, 0, 2], [2, 0, 1]])
    np.testing.assert_array_equal(values, np.take_along_axis(x, ids, 1))


def test_topk_smallest_along_an_inner_axis() -> None:
    x = RNG.standard_normal((3, 5, 2))
    values, ids = runs(lambda a: ops.topk(a, 2, 1, largest=False), x)
    np.testing.assert_array_equal(values, np.sort(x, 1)[:, :2])
    np.testing.assert_array_equal(ids, np.argsort(x, 1)[:, :2])


def test_topk_mistakes() -> None:
    x = placeholder("x", f32[2, 3])
    with pytest.raises(ShapeError, match=r"k = 4 elements of axis 1 of f32\[2, 3\], which has 3"):
        ops.topk(x, 4)
    with pytest.raises(OptionError, match=r"k is an int, got 1\.5"):
        ops.topk(x, 1.5)
    graph = Graph()
    graph.outputs(*ops.topk(graph.input("x", (sym("S", 1),)), 3))
    with pytest.raises(ShapeError, match="k = 3 exceeds the size 2"):
        evaluate(graph, {"x": np.zeros(2, np.float32)})


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_arg_extrema_as_numpy(name: str, axis: int | None) -> None:
    fn, reference = getattr(ops, name), getattr(np, name)
    np.testing.assert_array_equal(run(lambda a: fn(a, axis), SPECIAL), reference(SPECIAL, axis))
    kept = run(lambda a: fn(a, axis, keepdims=True), SPECIAL)
    np.testing.assert_array_equal(kept, reference(SPECIAL, axis, keepdims=True))


def test_arg_extrema_from_the_end_and_of_nothing() -> None:
    np.testing.assert_array_equal(run(lambda a: ops.argmax(a, 1, select_last=True), SPECIAL), [3, 3])
    np.testing.assert_array_equal(run(lambda a: ops.argmin(a[1:], 1, select_last=True), SPECIAL), [4])
    with pytest.raises(ShapeError, match="empty"):
        ops.argmax(placeholder("x", f32[2, 0]), 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(side: str) -> None:
    numbers, x = np.float32([-1, 0, 0, 2, np.nan]), np.float32([[0, 3, -5], [np.nan, 2, np.inf]])
    np.testing.assert_array_equal(
        run(lambda a, b: ops.searchsorted(a, b, side), numbers, x), np.searchsorted(numbers, x, side)
    )
    rows, wanted = np.sort(RNG.standard_normal((3, 4)), 1), RNG.standard_normal((3, 2))
    expected = torch.searchsorted(torch.tensor(rows), torch.tensor(wanted), right=side == "right").numpy()
    np.testing.assert_array_equal(run(lambda a, b: ops.searchsorted(a, b, side), rows, wanted), expected)


# -------------------------------------------------------------------------------------------------------------- running


def test_case_10_cumsum() -> None:
    x = np.float32([[1, 2, 3, 4], [10, 20, 30, 40]])
    np.testing.assert_array_equal(run(lambda a: ops.cumsum(a, 1), x), [[1, 3, 6, 10], [10, 30, 60, 100]])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_case_94_cumsum_and_its_backward_on_every_axis(axis: int, exclusive: bool, reverse: bool) -> None:
    """W9."""
    x, ct = RNG.standard_normal((3, 4, 2)), RNG.standard_normal((3, 4, 2))
    n = x.shape[axis]
    matrix = np.tril(np.ones((n, n)), -1 if exclusive else 0)
    matrix = matrix.T if reverse else matrix

    def along(m: np.ndarray, a: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.tensordot(m, a, (1, axis)), 0, axis)

    got = run(lambda a: ops.cumsum(a, axis, exclusive=exclusive, reverse=reverse), x)
    np.testing.assert_allclose(got, along(matrix, x), rtol=1e-12, atol=1e-12)
    (grad,) = gradients(lambda a: ops.cumsum(a, axis, exclusive=exclusive, reverse=reverse), [x], ct)
    np.testing.assert_allclose(grad, along(matrix.T, ct), rtol=1e-12, atol=1e-12)
    if not reverse:
        back = run(lambda c: ops.cumsum_backward(c, axis, exclusive), ct)
        np.testing.assert_allclose(back, along(matrix.T, ct), rtol=1e-12, atol=1e-12)


def test_cumulative_defaults_follow_numpy() -> None:
    x = np.array([[100, 100], [100, 100]], np.int8)
    out = run(ops.cumsum, x)
    assert out.dtype == np.int64
    np.testing.assert_array_equal(out, np.cumsum(x))
    np.testing.assert_array_equal(run(lambda a: ops.cumprod(a, 0), x), np.cumprod(x, 0))


def test_gradient_of_cumprod_as_torch_at_zeros() -> None:
    x, ct = np.array([[2.0, 0.0, 3.0, 0.0], [1.5, -2.0, 0.5, 3.0]]), RNG.standard_normal((2, 4))
    t = torch.tensor(x, requires_grad=True)
    torch.cumprod(t, 1).backward(torch.tensor(ct))
    np.testing.assert_allclose(gradients(lambda a: ops.cumprod(a, 1), [x], ct)[0], t.grad.numpy(), rtol=1e-12)
    t.grad = None
    torch.prod(t, 1).backward(torch.tensor(ct[:, 0]))
    np.testing.assert_allclose(gradients(lambda a: ops.prod(a, 1), [x], ct[:, 0])[0], t.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["cumprod", "prod", "logcumsumexp"])
def test_second_derivatives(name: str) -> None:
    x = np.array([2.0, 0.0, 3.0, 0.0, -1.0])
    shape = () if name == "prod" else (5,)
    ct, v = RNG.standard_normal(shape), RNG.standard_normal(5)
    got, expected = hessian_product(lambda a: getattr(ops, name)(a, axis=0), x, ct, v)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_running_extrema_as_a_loop(name: str) -> None:
    x = np.float32([[1, 3, 3, 2, 5, np.nan, 7], [-np.inf, -np.inf, -3, -4, np.inf, -np.inf, 0]])
    values, ids = runs(lambda a: getattr(ops, name)(a, 1), x)
    for r, row in enumerate(x):
        for i in range(len(row)):
            best = getattr(np, f"arg{name[3:]}")(row[: i + 1])
            assert ids[r, i] == best
            np.testing.assert_equal(values[r, i], row[best])
    np.testing.assert_array_equal(values, getattr(torch, name)(torch.tensor(x), 1).values.numpy())


def test_logcumsumexp_as_torch() -> None:
    x, ct = np.array([-np.inf, -3.0, 800.0, -np.inf, 801.0, 5.0]), RNG.standard_normal(6)
    t = torch.tensor(x, requires_grad=True)
    expected = torch.logcumsumexp(t, 0)
    np.testing.assert_allclose(run(ops.logcumsumexp, x), expected.detach().numpy(), rtol=1e-12)
    finite = np.isfinite(x)
    (got,) = gradients(ops.logcumsumexp, [x], ct)
    expected[1:].backward(torch.tensor(ct[1:]))
    np.testing.assert_allclose(got[finite], t.grad.numpy()[finite], rtol=1e-9)
    assert np.all(got[~finite] == 0)


def test_linear_recurrence_as_a_loop() -> None:
    a, b = RNG.standard_normal(6), RNG.standard_normal((3, 6))
    got = run(lambda x, y: ops.linear_recurrence(x, y, 1), a, b)
    h = np.zeros(3)
    for i in range(6):
        h = a[i] * h + b[:, i]
        np.testing.assert_allclose(got[:, i], h, rtol=1e-12)


def test_half_precision_adds_up_in_f32() -> None:
    out = run(lambda a: ops.cumsum(a, 0), np.ones(4096, np.float16))
    assert out[-1] == 4096


def test_unused_output_has_no_gradient() -> None:
    x = placeholder("x", f64[4])
    assert pullback([ops.topk(x, 2)[1]], [None], [x]) == [None]
