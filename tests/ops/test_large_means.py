"""Statistics of rows far from zero keep their digits: as many as torch's, or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata import ops as functions
from strata.mir import Graph
from strata.runtime import Session

ops: Any = functions
CASES = [
    (1e3, 1.0, 768),
    (1e4, 1.0, 64),
    (1e5, 1.0, 8),
    (1e4, 0.1, 1024),
    (0.0, 1.0, 768),
    (3e4, 2.0, 4096),
    (1e2, 1.0, 5),
]


def compiled(f: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    g = Graph("far")
    (got,) = Session("cpu").compile(g.outputs(f(g.input("x", x.shape, "f32")))).run(x=x)
    return np.asarray(got)


def rows(mean: float, spread: float, length: int, rng: np.random.Generator) -> np.ndarray:
    return (rng.standard_normal((24, length)) * spread + mean).astype(np.float32)


def normal(x: np.ndarray, axes: tuple[int, ...], eps: float = 1e-5) -> np.ndarray:
    wide = x.astype(np.float64)
    return (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + eps)


@pytest.mark.parametrize(("mean", "spread", "length"), CASES)
def test_norms(mean: float, spread: float, length: int, rng: np.random.Generator) -> None:
    x = rows(mean, spread, length, rng)
    np.testing.assert_allclose(compiled(ops.layer_norm, x), normal(x, (1,)), rtol=2e-5, atol=4e-6)
    np.testing.assert_allclose(compiled(lambda v: ops.layer_norm(v, axis=0), x), normal(x, (0,)), rtol=2e-5, atol=4e-6)
    grouped = x.reshape(3, 8, length)
    want = normal(grouped.reshape(3, 2, -1), (2,)).reshape(grouped.shape)
    np.testing.assert_allclose(compiled(lambda v: ops.group_norm(v, 2), grouped), want, rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize(("mean", "spread", "length"), CASES)
def test_variances(mean: float, spread: float, length: int, rng: np.random.Generator) -> None:
    x = rows(mean, spread, length, rng)
    want = x.astype(np.float64).var(1)
    np.testing.assert_allclose(compiled(lambda v: ops.var(v, axis=1), x), want, rtol=2e-6)
    np.testing.assert_allclose(compiled(lambda v: ops.std(v, axis=1), x), np.sqrt(want), rtol=2e-6)


def test_rows_of_one_number() -> None:
    """Their variance is nothing, and never below that."""
    x = np.full((4, 7), 1e7 / 3, np.float32)
    np.testing.assert_array_equal(compiled(lambda v: ops.var(v, axis=1), x), np.zeros(4, np.float32))
    assert np.abs(compiled(ops.layer_norm, x)).max() < 1e-3


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("spread", [1e30, 1e36])
def test_squares_too_large_for_their_type(spread: float, device: str, rng: np.random.Generator) -> None:
    """The variance is infinite then, and rows are divided by that."""
    x = rows(0.0, spread, 100, rng)
    g = Graph("far")
    v = g.input("x", x.shape, "f32")
    variance, normal = Session(device).compile(g.outputs(ops.var(v, axis=1), ops.layer_norm(v))).run(x=x)
    np.testing.assert_array_equal(variance, np.full(len(x), np.inf, np.float32))
    np.testing.assert_array_equal(np.abs(normal), np.zeros_like(x))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_variances_near_the_largest_number(device: str, rng: np.random.Generator) -> None:
    """The square of what the mean lost, summed, would be too large: the variance is not."""
    x = rows(1e25, 1e17, 100, rng)
    g = Graph("far")
    (got,) = Session(device).compile(g.outputs(ops.var(g.input("x", x.shape, "f32"), axis=1))).run(x=x)
    np.testing.assert_allclose(got, x.astype(np.float64).var(1), rtol=1e-4)


@pytest.mark.parametrize(("mean", "spread", "length"), CASES)
def test_as_many_digits_as_torch(mean: float, spread: float, length: int, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = rows(mean, spread, length, rng)
    want = normal(x, (1,))
    theirs = torch.nn.functional.layer_norm(torch.from_numpy(x), (length,)).numpy()
    ours = compiled(ops.layer_norm, x)
    assert np.abs(ours - want).max() <= max(1.5 * np.abs(theirs - want).max(), 2e-6)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("axis", [0, 1])
def test_many_rows(device: str, axis: int, rng: np.random.Generator) -> None:
    """Sums of very many terms, along whichever axis, on every device."""
    x = (rng.random((200_000, 2)) + 1).astype(np.float32)
    x = x if axis == 0 else np.ascontiguousarray(x.T)
    g = Graph("many")
    v = g.input("x", x.shape, "f32")
    g.outputs(ops.sum(v, axis=axis), ops.mean(v, axis=axis), ops.var(v, axis=axis), ops.cumsum(v, axis=axis))
    total, mean, var, running = Session(device).compile(g).run(x=x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(total, wide.sum(axis), rtol=2e-6)
    np.testing.assert_allclose(mean, wide.mean(axis), rtol=2e-6)
    np.testing.assert_allclose(var, wide.var(axis), rtol=4e-6)
    np.testing.assert_allclose(running, wide.cumsum(axis), rtol=2e-6)
