"""Linear algebra against NumPy, SciPy and torch, with first and second derivatives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from strata import ops
from strata.core import f32, f64, sym
from strata.errors import DTypeError, MissingRuleError, OptionError, RunError, ShapeError
from strata.mir import Graph, Value, batch, constant, evaluate, evaluate_values, placeholder, pullback, pushforward

RNG = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def complex_normal(*shape: int) -> np.ndarray:
    return normal(*shape) + 1j * normal(*shape)


def value(x: Value | None) -> np.ndarray:
    assert x is not None
    return evaluate_values([x], {}, {})[0]


def close(actual: Value | None, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(value(actual), np.asarray(expected), rtol=tolerance, atol=tolerance)


def gradients(loss: Callable[..., Value], *arrays: np.ndarray) -> list[Value | None]:
    inputs = [constant(a) for a in arrays]
    return pullback([loss(*inputs)], [constant(1.0, f64)], inputs)


def tangent(fn: Callable[[Value], Value], x: np.ndarray, dx: np.ndarray) -> Value | None:
    at = constant(x)
    return pushforward([fn(at)], [at], [constant(dx)])[0]


def central(fn: Callable[[np.ndarray], Any], x: np.ndarray, dx: np.ndarray, step: float = 1e-6) -> np.ndarray:
    return (np.asarray(fn(x + step * dx)) - np.asarray(fn(x - step * dx))) / (2 * step)


A3 = np.array([[2.0, 1, 0], [1, 3, 1], [0, 1, 2]])


def test_case_21_two_by_two() -> None:
    close(ops.dense_solve(np.array([[2.0, 1], [1, 3]]), np.array([5.0, 10])), [1, 3], 1e-12)


def test_case_22_laplacian_residual() -> None:
    a = 2 * np.eye(5) - np.eye(5, k=1) - np.eye(5, k=-1)
    b = np.arange(1.0, 6)
    assert np.abs(a @ value(ops.dense_solve(a, b)) - b).max() < 1e-10


def test_case_23_several_right_sides() -> None:
    b = normal(3, 2)
    np.testing.assert_allclose(A3 @ value(ops.dense_solve(A3, b)), b, atol=1e-10)


@pytest.mark.parametrize("b", [np.array([1.0, 2, 3]), normal(3, 2)], ids=["24_vector", "25_matrix"])
def test_cases_24_25_gradient_of_the_sum(b: np.ndarray) -> None:
    to_a, to_b = gradients(lambda a, b: ops.dense_solve(a, b).sum(), A3, b)
    expected = np.linalg.solve(A3.T, np.ones_like(b))
    close(to_b, expected)
    x = np.linalg.solve(A3, b)
    close(to_a, -np.outer(expected, x) if b.ndim == 1 else -expected @ x.T)
    d = normal(*b.shape)
    slope = central(lambda v: np.linalg.solve(A3, v).sum(), b, d)
    assert abs((value(to_b) * d).sum() - slope) < 1e-7


def test_case_26_batched_gradient() -> None:
    a, b = normal(4, 3, 3) + 3 * np.eye(3), normal(4, 3)
    to_a, to_b = gradients(lambda a, b: ops.batched_dense_solve(a, b).sum(), a, b)
    for i in range(4):
        expected = np.linalg.solve(a[i].T, np.ones(3))
        np.testing.assert_allclose(value(to_b)[i], expected, atol=1e-10)
        np.testing.assert_allclose(value(to_a)[i], -np.outer(expected, np.linalg.solve(a[i], b[i])), atol=1e-10)


def test_cases_27_28_29_tangents() -> None:
    b, db, da, many = normal(3), normal(3), normal(3, 3), normal(3, 2)
    close(tangent(lambda v: ops.solve(A3, v), b, db), np.linalg.solve(A3, db))
    x = np.linalg.solve(A3, b)
    close(tangent(lambda m: ops.solve(m, b), A3, da), -np.linalg.solve(A3, da @ x))
    close(tangent(lambda m: ops.solve(m, b), A3, da), central(lambda m: np.linalg.solve(m, b), A3, da), 1e-7)
    close(tangent(lambda v: ops.solve(A3, v), many, normal(3, 2) * 0 + 1), np.linalg.solve(A3, np.ones((3, 2))))


def test_case_43_vmap_over_both() -> None:
    a, b = normal(4, 3, 3), normal(4, 3)
    pa, pb = placeholder("a", f64[3, 3]), placeholder("b", f64[3])
    (out,) = batch([ops.dense_solve(pa, pb)], {pa: constant(a), pb: constant(b)}, 4)
    close(out, np.stack([np.linalg.solve(m, v) for m, v in zip(a, b, strict=True)]), 1e-12)


def test_singular_matrix_names_the_pivot() -> None:
    stack = np.stack([np.eye(3), np.array([[1.0, 2, 3], [2, 4, 6], [0, 0, 0]])])
    with pytest.raises(RunError, match=r"solve: matrix \[1\] of the stack is singular, pivot 1 is 0") as caught:
        value(ops.inv(stack))
    assert caught.value.code == "X200"
    with pytest.raises(RunError, match="the matrix is singular, pivot 0 is 0"):
        value(ops.solve_triangular(np.array([[0.0, 1], [0, 1]]), np.ones(2)))
    with pytest.raises(RunError, match="its leading 2×2 minor is not positive"):
        value(ops.cholesky(np.array([[1.0, 2], [2, 1]])))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_triangular_solve_equals_scipy(dtype: Any, transpose: bool, unit: bool, lower: bool) -> None:
    a = (complex_normal(4, 4) if dtype is np.complex128 else normal(4, 4)) + 3 * np.eye(4)
    b = normal(4).astype(dtype)
    expected = scipy.linalg.solve_triangular(a, b, lower=lower, trans=int(transpose), unit_diagonal=unit)
    close(ops.solve_triangular(a, b, lower=lower, transpose=transpose, unit_diagonal=unit), expected)


def positive(n: int, *batch: int, dtype: Any = np.float64) -> np.ndarray:
    root = complex_normal(*batch, n, n) if dtype is np.complex128 else normal(*batch, n, n)
    return root @ np.conj(np.swapaxes(root, -1, -2)) + np.eye(n)


REAL = normal(2, 4, 4) + 2 * np.eye(4)
TALL, WIDE = normal(4, 3), normal(3, 5)
SPD = positive(4)


def tsum(*xs: torch.Tensor) -> torch.Tensor:
    """A weighted sum that sees every element differently and no phase."""
    return sum(((x.abs() ** 2) * (1 + torch.arange(x.numel()).reshape(x.shape))).sum() for x in xs)  # type: ignore[return-value]


def wsum(*xs: Value) -> Value:
    total: Any = 0.0
    for x in xs:
        weights = 1.0 + np.arange(np.prod(x.shape), dtype=np.float64).reshape(x.shape)
        total = total + ((x * ops.conj(x)).real() * constant(weights)).sum()
    return total


AGAINST_TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {
    "inv": (lambda a: wsum(ops.inv(a)), lambda a: tsum(torch.linalg.inv(a)), [REAL]),
    "det": (lambda a: wsum(ops.det(a)), lambda a: tsum(torch.linalg.det(a)), [REAL]),
    "slogdet": (lambda a: ops.slogdet(a)[1].sum(), lambda a: torch.linalg.slogdet(a)[1].sum(), [REAL]),
    "cholesky": (lambda a: wsum(ops.cholesky(a)), lambda a: tsum(torch.linalg.cholesky(a)), [SPD]),
    "cholesky_upper": (
        lambda a: wsum(ops.cholesky(a, upper=True)),
        lambda a: tsum(torch.linalg.cholesky(a, upper=True)),
        [SPD],
    ),
    "qr": (lambda a: wsum(*ops.qr(a)), lambda a: tsum(*torch.linalg.qr(a)), [TALL]),
    "qr_wide": (lambda a: wsum(*ops.qr(a)), lambda a: tsum(*torch.linalg.qr(a)), [WIDE]),
    "svd": (lambda a: wsum(*ops.svd(a, False)), lambda a: tsum(*torch.linalg.svd(a, False)), [TALL]),
    "svd_wide": (lambda a: wsum(*ops.svd(a, False)), lambda a: tsum(*torch.linalg.svd(a, False)), [WIDE]),
    "svdvals": (lambda a: wsum(ops.svdvals(a)), lambda a: tsum(torch.linalg.svdvals(a)), [REAL]),
    "eigh": (lambda a: wsum(*ops.eigh(a)), lambda a: tsum(*torch.linalg.eigh(a)), [SPD]),
    "pinv": (lambda a: wsum(ops.pinv(a)), lambda a: tsum(torch.linalg.pinv(a)), [TALL]),
    "lu": (lambda a: wsum(*ops.lu(a)[1:]), lambda a: tsum(*torch.linalg.lu(a)[1:]), [REAL]),
    "lstsq": (
        lambda a, b: wsum(ops.lstsq(a, b)),
        lambda a, b: tsum(torch.linalg.lstsq(a, b[:, None]).solution[:, 0]),
        [TALL, normal(4)],
    ),
    "power": (lambda a: wsum(ops.matrix_power(a, 5)), lambda a: tsum(torch.linalg.matrix_power(a, 5)), [REAL / 4]),
    "power_negative": (
        lambda a: wsum(ops.matrix_power(a, -3)),
        lambda a: tsum(torch.linalg.matrix_power(a, -3)),
        [REAL],
    ),
    "solve_complex": (
        lambda a, b: wsum(ops.solve(a, b)),
        lambda a, b: tsum(torch.linalg.solve(a, b)),
        [complex_normal(3, 3), complex_normal(3, 2)],
    ),
    "inv_complex": (lambda a: wsum(ops.inv(a)), lambda a: tsum(torch.linalg.inv(a)), [complex_normal(3, 3)]),
    "det_complex": (lambda a: wsum(ops.det(a)), lambda a: tsum(torch.linalg.det(a)), [complex_normal(2, 3, 3)]),
    "svd_complex": (
        lambda a: wsum(*ops.svd(a, False)),
        lambda a: tsum(*torch.linalg.svd(a, False)),
        [complex_normal(4, 3)],
    ),
    "eigh_complex": (
        lambda a: wsum(*ops.eigh(a)),
        lambda a: tsum(*torch.linalg.eigh(a)),
        [positive(3, dtype=np.complex128)],
    ),
    "qr_complex": (lambda a: wsum(*ops.qr(a)), lambda a: tsum(*torch.linalg.qr(a)), [complex_normal(4, 3)]),
    "cholesky_complex": (
        lambda a: wsum(ops.cholesky(a)),
        lambda a: tsum(torch.linalg.cholesky(a)),
        [positive(3, dtype=np.complex128)],
    ),
}


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_value_and_gradient_equal_torch(name: str) -> None:
    ours, theirs, arrays = AGAINST_TORCH[name]
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    loss = theirs(*tensors)
    loss.backward()
    close(ours(*[constant(a) for a in arrays]), loss.detach().numpy(), 1e-9)
    for gradient, t in zip(gradients(ours, *arrays), tensors, strict=True):
        scale = 0.5 if t.is_complex() else 1.0  # torch doubles the derivative with respect to the conjugate
        close(gradient, t.grad.numpy() * scale, 1e-7)


SMOOTH: dict[str, tuple[Callable[[Value], Value], np.ndarray]] = {
    "inv": (lambda a: wsum(ops.inv(a)), A3),
    "det": (ops.det, A3),
    "logdet": (ops.logdet, A3),
    "cholesky": (lambda a: wsum(ops.cholesky(a)), A3),
    "eigh": (lambda a: wsum(*ops.eigh(a)), A3),
    "svd": (lambda a: wsum(*ops.svd(a, False)), TALL),
    "qr": (lambda a: wsum(*ops.qr(a)), TALL),
    "lu": (lambda a: wsum(*ops.lu(a)[1:]), A3),
    "pinv": (lambda a: wsum(ops.pinv(a)), TALL),
    "triangular": (lambda a: wsum(ops.solve_triangular(a, np.ones(3), lower=True, transpose=True)), A3),
    "norm_nuc": (lambda a: ops.norm(a, "nuc"), TALL),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivative_equals_differences_of_the_first(name: str) -> None:
    loss, x = SMOOTH[name]
    d = normal(*x.shape)

    def gradient(at: Value) -> Value:
        (g,) = pullback([loss(at)], [constant(1.0, f64)], [at])
        assert g is not None
        return g

    expected = central(lambda a: value(gradient(constant(a))), x, d, 1e-5)
    np.testing.assert_allclose(value(tangent(gradient, x, d)), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_det_has_a_derivative_at_a_singular_matrix() -> None:
    a = np.array([[1.0, 2, 3], [2, 4, 6], [1, 0, 1]])
    cofactors = np.array(
        [[(-1) ** (i + j) * np.linalg.det(np.delete(np.delete(a, i, 0), j, 1)) for j in range(3)] for i in range(3)]
    )
    (g,) = gradients(ops.det, a)
    close(g, cofactors)


@pytest.mark.parametrize("order", [None, 0, 1, 2, 3, 0.5, -1, -2, np.inf, -np.inf])
def test_vector_norms_equal_numpy(order: Any) -> None:
    x = normal(3, 4)
    close(ops.norm(x, order, axis=1), np.linalg.norm(x, order, axis=1))
    close(ops.norm(x, order, axis=0, keepdims=True), np.linalg.norm(x, order, axis=0, keepdims=True))
    z = complex_normal(5)
    close(ops.norm(z, order), np.linalg.norm(z, order))


@pytest.mark.parametrize("order", [None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf])
def test_matrix_norms_equal_numpy(order: Any) -> None:
    x = normal(2, 3, 4)
    for axis in ((1, 2), (2, 0), (-1, -2)):
        close(ops.norm(x, order, axis=axis), np.linalg.norm(x, order, axis=axis))
        close(ops.norm(x, order, axis=axis, keepdims=True), np.linalg.norm(x, order, axis=axis, keepdims=True))
    close(ops.norm(x[0], order), np.linalg.norm(x[0], order))


def test_norm_of_everything_and_gradient_at_zero() -> None:
    x = normal(2, 3, 4)
    close(ops.norm(x), np.linalg.norm(x))
    for order in (1, 2, 3, np.inf):
        (g,) = gradients(lambda v, order=order: ops.norm(v, order), np.zeros(3))
        assert np.isfinite(value(g)).all()


def test_values_equal_numpy_and_scipy() -> None:
    a = normal(3, 5, 4)
    close(ops.svdvals(a), np.linalg.svd(a, compute_uv=False))
    u, s, vh = ops.svd(a)
    assert u.shape == (3, 5, 5)
    assert vh.shape == (3, 4, 4)
    close(ops.matmul(ops.narrow(u, -1, 0, 4) * s.insert_axis(-2), vh), a)
    q, r = ops.qr(a, "complete")
    assert q.shape == (3, 5, 5)
    assert r.shape == (3, 5, 4)
    close(ops.matmul(q, r), a)
    close(ops.qr(a, "r"), np.linalg.qr(a, "r"))
    p, lower, upper = ops.lu(a)
    close(ops.matmul(ops.matmul(p, lower), upper), a)
    close(ops.pinv(a), np.linalg.pinv(a))
    deficient = np.array([[1.0, 2], [2, 4], [3, 6]])
    close(ops.pinv(deficient), np.linalg.pinv(deficient))
    close(ops.lstsq(deficient, np.ones(3)), np.linalg.lstsq(deficient, np.ones(3))[0])
    assert value(ops.matrix_rank(deficient)) == 1
    close(ops.matrix_power(np.array([[1, 1], [1, 0]]), 10), [[89, 55], [55, 34]])
    close(ops.matrix_power(A3, 0), np.eye(3))
    close(ops.eigvalsh(A3), np.linalg.eigvalsh(A3))
    close(ops.solve(np.array([[2, 1], [1, 3]]), np.array([5, 10])), [1, 3])


def test_second_solve_reuses_the_matrix_value() -> None:
    """The gradient solves with the same matrix, so that one factorization can serve both."""
    graph = Graph("g")
    a, b = graph.input("a", f64[3, 3]), graph.input("b", f64[3, 1])
    x = ops.solve(a, b)
    grads = pullback([x], [ops.ones_like(x)], [b])
    solves = [n for n in graph.outputs(x, *grads).nodes() if n.op.name == "solve"]
    assert len(solves) == 2
    assert all(n.inputs[0].same_as(a) for n in solves)


def test_symbolic_batch_and_size() -> None:
    graph = Graph("g")
    batch_size, n = sym("B"), sym("N")
    a, b = graph.input("a", f32[batch_size, n, n]), graph.input("b", f32[batch_size, n])
    x = ops.batched_dense_solve(a, b)
    assert x.shape == (batch_size, n)
    graph.outputs(x, ops.det(a), *ops.svd(a, False), pullback([ops.det(a)], [ops.ones_like(ops.det(a))], [a])[0])
    arrays = {"a": normal(2, 3, 3).astype(np.float32), "b": normal(2, 3).astype(np.float32)}
    outs = evaluate(graph, arrays)
    np.testing.assert_allclose(outs[0][..., None], np.linalg.solve(arrays["a"], arrays["b"][..., None]), rtol=1e-3)


def test_mistakes() -> None:
    x = constant(normal(3, 4))
    with pytest.raises(ShapeError, match=r"inv: needs square matrices, got f64\[3, 4\]"):
        ops.inv(x)
    with pytest.raises(ShapeError, match=r"solve: f64\[3, 3\] and f64\[4, 1\] differ in rows, 3 and 4"):
        ops.solve(A3, np.ones((4, 1)))
    with pytest.raises(ShapeError, match=r"needs \[B, N, N\]"):
        ops.batched_dense_solve(A3, np.ones(3))
    with pytest.raises(DTypeError, match="does not take f16"):
        ops.det(constant(np.eye(2), "f16"))
    with pytest.raises(OptionError, match="mode is"):
        ops.qr(x, "economic")
    with pytest.raises(OptionError, match="not an order of a matrix norm"):
        ops.norm(x, 7)
    with pytest.raises(MissingRuleError, match="full U and V"):
        gradients(lambda a: wsum(*ops.svd(a)), TALL)
