"""Arrangements against NumPy, and their gradients against central differences."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.core import f32, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, evaluate, evaluate_values, placeholder, pullback
from strata.runtime import Session
from tests.ops.evaluation import gradients, leaf, run

X = np.random.default_rng(0).standard_normal((3, 4, 5))
M = np.arange(12.0).reshape(3, 4)
V = np.arange(1.0, 5.0)


def run_all(fn: Callable[..., Any], *arrays: np.ndarray) -> Any:
    inputs = [leaf(f"x{i}", a) for i, a in enumerate(arrays)]
    out = fn(*inputs)
    results = evaluate_values(out if isinstance(out, tuple) else [out], dict(zip(inputs, arrays, strict=True)), {})
    return results if isinstance(out, tuple) else results[0]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "roll": (lambda x: ops.roll(x, 2, 1), lambda x: np.roll(x, 2, 1), (X,)),
    "roll-negative": (lambda x: ops.roll(x, -7, 2), lambda x: np.roll(x, -7, 2), (X,)),
    "roll-flat": (lambda x: ops.roll(x, 7), lambda x: np.roll(x, 7), (X,)),
    "roll-axes": (lambda x: ops.roll(x, (1, -2), (0, 2)), lambda x: np.roll(x, (1, -2), (0, 2)), (X,)),
    "tile": (lambda x: ops.tile(x, 3), lambda x: np.tile(x, 3), (M,)),
    "tile-more": (lambda x: ops.tile(x, (2, 1, 3)), lambda x: np.tile(x, (2, 1, 3)), (M,)),
    "tile-none": (lambda x: ops.tile(x, (0, 2)), lambda x: np.tile(x, (0, 2)), (M,)),
    "repeat": (lambda x: ops.repeat(x, 2, 1), lambda x: np.repeat(x, 2, 1), (M,)),
    "repeat-flat": (lambda x: ops.repeat(x, 3), lambda x: np.repeat(x, 3), (M,)),
    "repeat-each": (lambda x: ops.repeat(x, [2, 0, 1], 0), lambda x: np.repeat(x, [2, 0, 1], 0), (M,)),
    "tril": (lambda x: ops.tril(x, -1), lambda x: np.tril(x, -1), (X,)),
    "triu": (lambda x: ops.triu(x, 1), lambda x: np.triu(x, 1), (X,)),
    "diagonal": (lambda x: ops.diagonal(x, 1, 2, 0), lambda x: np.diagonal(x, 1, 2, 0), (X,)),
    "diagonal-below": (lambda x: ops.diagonal(x, -2), lambda x: np.diagonal(x, -2), (X,)),
    "diagonal-outside": (lambda x: ops.diagonal(x, 9), lambda x: np.diagonal(x, 9), (X,)),
    "diag": (lambda x: ops.diag(x, 1), lambda x: np.diag(x, 1), (M,)),
    "diag-vector": (lambda x: ops.diag(x, 2), lambda x: np.diag(x, 2), (V,)),
    "diag-vector-below": (lambda x: ops.diag(x, -1), lambda x: np.diag(x, -1), (V,)),
    "trace": (lambda x: ops.trace(x, 1), lambda x: np.trace(x, 1), (M,)),
    "meshgrid": (lambda x, y: ops.meshgrid(x, y, y), lambda x, y: tuple(np.meshgrid(x, y, y)), (V, V[:3])),
    "meshgrid-ij": (
        lambda x, y: ops.meshgrid(x, y, indexing="ij"),
        lambda x, y: tuple(np.meshgrid(x, y, indexing="ij")), (V, V[:3]),
    ),
    "unstack": (lambda x: ops.unstack(x, 1), lambda x: tuple(np.moveaxis(x, 1, 0)), (X,)),
    "broadcast": (ops.broadcast_arrays, lambda x, y: tuple(np.broadcast_arrays(x, y)), (M, V)),
    "ravel": (ops.ravel, np.ravel, (X,)),
    "full-like": (lambda x: ops.full_like(x, 7), lambda x: np.full_like(x, 7), (M,)),
    "diff": (lambda x: ops.diff(x, 2, 1), lambda x: np.diff(x, 2, 1), (X,)),
    "diff-of-one": (lambda x: ops.diff(x, 3, 0), lambda x: np.diff(x, 3, 0), (X[:1],)),
    "outer": (ops.outer, np.outer, (M, V)),
    "kron": (ops.kron, np.kron, (M, M.T)),
    "kron-ranks": (ops.kron, np.kron, (X, V)),
    "cross": (ops.cross, np.cross, (X[..., :3], X[:1, ..., 2:])),
    "cross-axis": (lambda x, y: ops.cross(x, y, 0), lambda x, y: np.cross(x, y, axis=0), (X, X[::-1])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, reference, arrays = CASES[name]
    got, expected = run_all(fn, *arrays), reference(*arrays)
    if not isinstance(expected, tuple):
        got, expected = (got,), (expected,)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


PADS = [(2, 3), (0, 1), (4, 0), (9, 11), (-1, 2), (-1, -1)]


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric", "wrap"])
@pytest.mark.parametrize("widths", PADS)
def test_pad(mode: str, widths: tuple[int, int]) -> None:
    """Every mode against NumPy; the gradient is NumPy's padding of positions, counted back."""
    pairs = [(1, 2), (0, 0), widths]

    def reference(x: np.ndarray) -> np.ndarray:
        cut = x[:, :, max(-widths[0], 0) : x.shape[2] - max(-widths[1], 0)]
        return np.pad(cut, [(max(a, 0), max(b, 0)) for a, b in pairs], mode)  # type: ignore[call-overload]

    expected = reference(X)
    np.testing.assert_array_equal(run(lambda x: ops.pad(x, pairs, mode), X), expected)
    ct = np.random.default_rng(1).standard_normal(expected.shape)
    source = reference(np.arange(1.0, X.size + 1).reshape(X.shape)).astype(int)
    counted = np.zeros(X.size + 1)
    np.add.at(counted, source, ct)
    (grad,) = gradients(lambda x: ops.pad(x, pairs, mode), [X], ct)
    np.testing.assert_allclose(grad, counted[1:].reshape(X.shape), rtol=1e-12, atol=1e-12)


def test_pad_widths_and_value() -> None:
    np.testing.assert_array_equal(run(lambda x: ops.pad(x, 1, constant_values=7), M), np.pad(M, 1, constant_values=7))
    np.testing.assert_array_equal(run(lambda x: ops.pad(x, (1, 2)), M), np.pad(M, (1, 2)))
    np.testing.assert_array_equal(
        run(lambda x: ops.pad(x, [(3, 1)], "reflect"), M[:1]), np.pad(M[:1], [(3, 1)], "reflect")
    )


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "wrap", "edge"])
def test_pad_of_a_symbolic_size(mode: str) -> None:
    graph = Graph()
    x = graph.input("x", (sym("S", 3),))
    graph.outputs(ops.pad(x, (2, 1), mode))
    data = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(evaluate(graph, {"x": data})[0], np.pad(data, (2, 1), mode))  # type: ignore[call-overload]


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "wrap", "edge"])
@pytest.mark.parametrize("low", [0, 1, 3])
def test_pad_wider_than_a_symbolic_size(mode: str, low: int) -> None:
    """One program for all sizes: narrower and wider than what is added, forwards and backwards; nothing has no ends."""
    graph = Graph()
    x = graph.input("x", (2, sym("S", low)), "f64")
    padded = ops.pad(x, [(0, 0), (3, 5)], mode)
    (grad,) = pullback([padded], [ops.cast(ops.iota(padded.shape, 1), "f64")], [x])
    assert grad is not None
    graph.outputs(padded, grad)
    devices = [Session(device).compile(graph) for device in ("cpu", "reference")]
    for size in range(max(low, 1), 9):
        data = np.arange(2.0 * size).reshape(2, size)
        want = np.pad(data, [(0, 0), (3, 5)], mode)  # type: ignore[call-overload]
        added = np.zeros(2 * size)
        np.add.at(added, want.astype(int), np.broadcast_to(np.arange(size + 8), want.shape))
        for made in devices:
            got = made.run({"x": data})
            np.testing.assert_array_equal(got[0], want)
            np.testing.assert_array_equal(got[1], added.reshape(2, size))
    for made in devices if low == 0 else ():
        with pytest.raises(ShapeError, match="does not lie within axis"):
            made.run({"x": np.zeros((2, 0))})


def test_symbolic_sizes() -> None:
    size = sym("S", 2)
    graph = Graph()
    x = graph.input("x", (size, size))
    graph.outputs(ops.tril(x), ops.diagonal(x), ops.roll(x, 1, 0), ops.tile(x, 2), ops.eye(size), ops.arange(1, size))
    data = np.arange(9, dtype=np.float32).reshape(3, 3)
    expected = [np.tril(data), np.diagonal(data), np.roll(data, 1, 0), np.tile(data, 2), np.eye(3), np.arange(1, 3)]
    for got, want in zip(evaluate(graph, {"x": data}), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "args", [(5,), (2, 9), (2, 9, 3), (9, 2, -3), (5, 2), (0.5, 3.0, 0.4), (3.0, 0.5, -0.7), (0, 1, 0.25)]
)
def test_arange(args: tuple[float, ...]) -> None:
    got = evaluate_values([ops.arange(*args)], {}, {})[0]
    expected = np.arange(*args)
    assert got.dtype == (np.int64 if expected.dtype.kind == "i" else np.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_linspace_and_eye() -> None:
    np.testing.assert_allclose(evaluate_values([ops.linspace(-1, 2, 7)], {}, {})[0], np.linspace(-1, 2, 7), rtol=1e-6)
    got = evaluate_values([ops.linspace(0, 1, 4, endpoint=False, dtype="f64")], {}, {})[0]
    np.testing.assert_array_equal(got, np.linspace(0, 1, 4, endpoint=False))
    for args in [(3,), (3, 5), (4, 3, 1), (3, 3, -2), (0, 2)]:
        np.testing.assert_array_equal(evaluate_values([ops.eye(*args)], {}, {})[0], np.eye(*args))
        np.testing.assert_array_equal(evaluate_values([ops.tri(*args)], {}, {})[0], np.tri(*args))


def test_mistakes() -> None:
    x = placeholder("x", f32[3, 4])
    with pytest.raises(OptionError, match="mode 'mirror' is not one of constant, edge"):
        ops.pad(x, 1, "mirror")
    with pytest.raises(ShapeError, match=r"are not \(before, after\) widths for f32\[3, 4\]"):
        ops.pad(x, [(1, 1), (1, 1), (1, 1)])
    with pytest.raises(ShapeError, match="empty"):
        ops.pad(placeholder("e", f32[0]), 1, "edge")
    with pytest.raises(OptionError, match="3 shifts for 2 axes"):
        ops.roll(x, (1, 2, 3), (0, 1))
    with pytest.raises(ShapeError, match=r"\[2\] counts for axis 0"):
        ops.repeat(x, [1, 2], 0)
    with pytest.raises(ShapeError, match="must have size 3"):
        ops.cross(x, x)
