"""Clones of compiled graphs: weights and code are shared, what is set or held afterwards is not."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.core import sym
from strata.errors import (
    UnknownNameError,
)
from strata.mir import Graph, evaluate
from strata.runtime import CompiledGraph, Session


def test_clones_share_weights_and_code_and_not_state() -> None:
    g = Graph("g")
    x, s, w = g.input("x", (2,)), g.input("s", (2,)), g.param("w", (2,))
    c = Session("cpu").compile(g.outputs(s + x * w))
    c.set_param("w", np.array([1, 2], np.float32))
    c.bind("s", np.zeros(2, np.float32))
    c.feed("s", 0)
    one = np.ones(2, np.float32)
    c.run(x=one)
    other = c.clone()
    c.run(x=one)
    np.testing.assert_array_equal(other.read("s"), [1, 2])
    np.testing.assert_array_equal(c.read("s"), [2, 4])
    assert other._executable is c._executable


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("build", ["product", "scan", "sum"])
def test_what_is_set_on_a_clone_is_not_seen_by_others(device: str, build: str, rng) -> None:
    g = Graph("g")
    x, w, v = g.input("x", (4, 4)), g.param("w", (4, 4)), g.param("v", (4, 4))
    if build == "product":  # weights are packed
        g.outputs((x @ w + v) @ ops.exp(w))
    elif build == "scan":  # and held by the body of a loop
        g.outputs(ops.scan(lambda h, _: ((h @ w + v) * 0.5, None), x, length=3)[0])
    else:
        g.outputs(x + w * v)
    weights = [rng.standard_normal((4, 4)).astype(np.float32) for _ in range(6)]
    x_value = rng.standard_normal((4, 4)).astype(np.float32)

    def expected(w: np.ndarray, v: np.ndarray) -> np.ndarray:
        return evaluate(g, {"x": x_value, "w": w, "v": v})[0]

    def check(c: CompiledGraph, w: np.ndarray, v: np.ndarray) -> None:
        for _ in range(3):
            np.testing.assert_allclose(c.run(x=x_value)[0], expected(w, v), rtol=1e-4, atol=1e-5)

    first = Session(device).compile(g)
    first.set_params({"w": weights[0], "v": weights[1]})
    check(first, weights[0], weights[1])
    second = first.clone()
    third = second.clone()
    check(second, weights[0], weights[1])
    second.set_param("w", weights[2])
    check(first, weights[0], weights[1])
    check(second, weights[2], weights[1])
    check(third, weights[0], weights[1])
    first.set_param("v", weights[3])
    check(first, weights[0], weights[3])
    check(second, weights[2], weights[1])
    check(third, weights[0], weights[1])
    del first
    third.set_params({"w": weights[4], "v": weights[5]})
    check(second, weights[2], weights[1])
    check(third, weights[4], weights[5])


def test_a_clone_made_before_all_parameters_are_set() -> None:
    g = Graph("g")
    x, w, v = g.input("x", (2, 2)), g.param("w", (2, 2)), g.param("v", (2, 2))
    c = Session("cpu").compile(g.outputs(x @ w @ v))
    eye = np.eye(2, dtype=np.float32)
    c.set_param("w", eye)
    other = c.clone()
    other.set_param("v", 2 * eye)
    c.set_param("v", 3 * eye)
    np.testing.assert_array_equal(c.run(x=eye)[0], 3 * eye)
    np.testing.assert_array_equal(other.run(x=eye)[0], 2 * eye)
    third = Session("cpu").compile(g).clone()
    with pytest.raises(UnknownNameError, match="has no value yet"):
        third.run(x=eye)


def test_a_clone_of_a_graph_with_an_extent_has_its_own_weights() -> None:
    g = Graph("g")
    x, w = g.input("x", (sym("n", 1, 4),)), g.param("w", ())
    c = Session("cpu").compile(g.outputs(x * w), dim_binding={"n": 4})
    c.set_param("w", np.float32(2))
    c.set_active_extent("n", 2)
    one = np.ones(4, np.float32)
    c.run(x=one)
    other = c.clone()
    other.set_param("w", np.float32(5))
    other.set_active_extent("n", 3)
    np.testing.assert_array_equal(other.run(x=one)[0], [5, 5, 5, 0])
    np.testing.assert_array_equal(c.run(x=one)[0], [2, 2, 0, 0])
    c.set_param("w", np.float32(3))
    np.testing.assert_array_equal(c.run(x=one)[0], [3, 3, 0, 0])
    np.testing.assert_array_equal(other.run(x=one)[0], [5, 5, 5, 0])


def test_clones_of_graphs_that_spread_a_size_of_one() -> None:
    g = Graph("g")
    n = sym("n", 1, 8)
    x, y, w = g.input("x", (n,)), g.input("y", (sym("m", 1, 8),)), g.param("w", ())
    c = Session("cpu").compile(g.outputs((x + y) * w))
    c.set_param("w", np.float32(2))
    feeds = {"x": np.ones(4, np.float32), "y": np.ones(1, np.float32)}
    np.testing.assert_array_equal(c.run(feeds)[0], [4] * 4)
    other = c.clone()
    other.set_param("w", np.float32(3))
    np.testing.assert_array_equal(c.run(feeds)[0], [4] * 4)
    np.testing.assert_array_equal(other.run(feeds)[0], [6] * 4)


def test_a_backend_without_clones_of_its_own_has_them() -> None:
    g = Graph("g")
    c = Session("reference").compile(g.outputs(g.input("x", (2,)) * g.param("w", (2,)) + g.param("v", (2,))))
    one = np.ones(2, np.float32)
    c.set_params({"w": one, "v": one})
    other = c.clone()
    other.set_param("w", 2 * one)
    np.testing.assert_array_equal(c.run(x=one)[0], [2, 2])
    np.testing.assert_array_equal(other.run(x=one)[0], [3, 3])
