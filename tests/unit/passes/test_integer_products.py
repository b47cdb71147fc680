"""Products of codes: equal to exact integer arithmetic, in one kernel, on any number of threads."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.config import using
from strata.core import sym
from strata.mir import Graph, Value, evaluate
from strata.passes import CalibrationEntry, insert_q_dq
from strata.runtime import Session

ops: Any = functions
RANGE = {"u8": (0, 256, np.uint8), "i8": (-128, 128, np.int8)}


def codes(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    low, high, dtype = RANGE[kind]
    return rng.integers(low, high, shape).astype(dtype)


def numbers(x: Value, zero: Any = None) -> Value:
    wide = ops.cast(x, "i32")
    return wide if zero is None else wide - zero


def compiled(graph: Graph, params: dict[str, np.ndarray]) -> Any:
    made = Session("cpu").compile(graph)
    made.set_params({name: params[name] for name in graph.param_names})
    return made


def product_types(made: Any) -> list[tuple[str, str]]:
    """The types that products and convolutions of a program read."""
    found = [n for s in made.lir.schedule for n in s.nodes if n.op.name.startswith(("matmul", "conv"))]
    return [(n.inputs[0].dtype.name, n.inputs[1].dtype.name) for n in found]


@pytest.mark.parametrize(("x_kind", "w_kind"), list(product(RANGE, RANGE)))
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 7, 5), (9, 66, 33), (17, 129, 100), (64, 31, 16), (2, 0, 3)])
def test_matrix_products_are_exact(x_kind: str, w_kind: str, m: int, k: int, n: int, rng) -> None:
    g = Graph("g")
    x, w = g.input("x", (m, k), x_kind), g.param("w", (k, n), w_kind)
    xz, wz = np.int32(11), rng.integers(-9, 200, (n,)).astype(np.int32)
    graph = g.outputs(ops.matmul(numbers(x, xz), numbers(w, wz)), ops.matmul(numbers(x), numbers(w)))
    xs, ws = codes(rng, x_kind, m, k), codes(rng, w_kind, k, n)
    made = compiled(graph, {"w": ws})
    found = made.run(x=xs)
    np.testing.assert_array_equal(found[0], (xs.astype(np.int64) - xz) @ (ws.astype(np.int64) - wz))
    np.testing.assert_array_equal(found[1], xs.astype(np.int64) @ ws.astype(np.int64))
    if k:
        assert product_types(made) == [(x_kind, "i8")]  # both are one product, with other corrections


CONVOLUTIONS = [
    # channels, outputs, sizes, kernel, options
    (4, 5, (6, 7), (3, 3), {"padding": 1}),
    (3, 24, (9, 8), (5, 3), {"padding": (2, 1), "stride": 2}),
    (1, 4, (8, 8), (3, 3), {"padding": ((0, 2), (1, 0))}),
    (16, 40, (7, 7), (1, 1), {}),
    (16, 40, (7, 7), (1, 1), {"stride": 2, "padding": 1}),
    (8, 12, (9, 10), (3, 2), {"dilation": (2, 3), "padding": (2, 1)}),
    (16, 8, (6, 6), (3, 3), {"groups": 2, "padding": 1}),
    (6, 6, (5, 5), (3, 3), {"groups": 6, "padding": 1}),
    (40, 40, (9, 8), (3, 3), {"groups": 40, "padding": 1, "stride": 2}),
    (1, 1, (5, 5), (3, 3), {"padding": 1}),
    (20, 33, (13,), (4,), {"padding": 3}),
    (5, 7, (4, 5, 4), (2, 2, 3), {"padding": 1}),
    (64, 100, (3, 3), (3, 3), {"padding": 2}),
]


@pytest.mark.few(13)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize(("x_kind", "w_kind", "zero"), [("u8", "i8", 113), ("u8", "u8", 0), ("i8", "i8", -5)])
def test_convolutions_are_exact(case: Any, x_kind: str, w_kind: str, zero: int, rng) -> None:
    channels, outputs, sizes, kernel, options = case
    groups = options.get("groups", 1)
    g = Graph("g")
    x = g.input("x", (2, channels, *sizes), x_kind)
    w = g.param("w", (outputs, channels // groups, *kernel), w_kind)
    wz = np.int32(128) if w_kind == "u8" else None
    graph = g.outputs(ops.conv(numbers(x, np.int32(zero)), numbers(w, wz), None, **options))
    feeds = {"x": codes(rng, x_kind, *x.shape), "w": codes(rng, w_kind, *w.shape)}
    made = compiled(graph, feeds)
    np.testing.assert_array_equal(made.run(x=feeds["x"])[0], evaluate(graph, feeds)[0])
    assert product_types(made) == [(x_kind, "i8")]


def quantised_layer(m: Any, k: int, n: int, x_kind: str = "u8") -> Graph:
    """codes of relu(x w + b), x and w given as codes, w's scales by column."""
    g = Graph("layer")
    x, w = g.input("x", (m, k), x_kind), g.param("w", (k, n), "i8")
    scale, bias = g.param("scale", (n,)), g.param("bias", (n,))
    real = ops.cast(numbers(x, np.int32(7)), "f32") * np.float32(0.02)
    y = ops.relu(ops.matmul(real, ops.cast(numbers(w), "f32") * scale) + bias)
    return g.outputs(ops.cast(ops.round(y / np.float32(0.05)) + 3.0, x_kind))


def layer_params(rng: np.random.Generator, k: int, n: int) -> dict[str, np.ndarray]:
    return {
        "w": codes(rng, "i8", k, n),
        "scale": (rng.random(n) * 0.01 + 1e-3).astype(np.float32),
        "bias": rng.standard_normal(n).astype(np.float32),
    }


@pytest.mark.parametrize("x_kind", list(RANGE))
def test_a_layer_is_one_kernel_within_a_quantum(x_kind: str, rng) -> None:
    graph, params, x = quantised_layer(33, 70, 50, x_kind), layer_params(rng, 70, 50), codes(rng, x_kind, 33, 70)
    made = compiled(graph, params)
    (found,) = made.run(x=x)
    (wanted,) = evaluate(graph, {"x": x, **params}, wide=True)
    assert found.dtype == wanted.dtype
    away = np.abs(found.astype(np.int64) - wanted.astype(np.int64))
    assert away.max() <= 1
    assert (away > 0).mean() < 1e-3  # only numbers next to a half
    assert len([s for s in made.lir.schedule if s.phase == "steady"]) == 1
    assert "divide" not in [n.op.name for s in made.lir.schedule if s.phase == "steady" for n in s.nodes]


def test_symbolic_rows_and_threads(rng) -> None:
    rows = sym("rows", 1, 300)
    graph, params = quantised_layer(rows, 66, 200), layer_params(rng, 66, 200)
    made = compiled(graph, params)
    for count in (1, 2, 7, 130, 300):
        x = codes(rng, "u8", count, 66)
        found = []
        for threads in (1, 2, 7):
            with using(num_threads=threads):
                found.append(made.run(x=x)[0])
        (wanted,) = evaluate(graph, {"x": x, **params}, wide=True)
        assert np.abs(found[0].astype(np.int64) - wanted.astype(np.int64)).max() <= 1
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])


def test_the_greatest_of_codes_is_a_code(rng) -> None:
    g = Graph("g")
    x = g.input("x", (1, 5, 8, 9), "u8")
    real = ops.cast(numbers(x, np.int32(7)), "f32") * np.float32(0.1)
    graph = g.outputs(ops.max_pool(real, 3, stride=2, padding=1))
    feeds = {"x": codes(rng, "u8", 1, 5, 8, 9)}
    made = compiled(graph, {})
    np.testing.assert_array_equal(made.run(feeds)[0], evaluate(graph, feeds)[0])
    pools = [n for s in made.lir.schedule for n in s.nodes if n.op.name == "pool_max"]
    assert [n.inputs[0].dtype.name for n in pools] == ["u8"]


def test_scales_known_at_run_time_and_codes_of_both_sides(rng) -> None:
    """As dynamic quantisation gives them: no operand is a parameter, zero points come as data."""
    g = Graph("g")
    x, y = g.input("x", (2, 9, 30), "u8"), g.input("y", (2, 30, 11), "u8")
    xz, xs = g.input("xz", (), "i32"), g.input("xs", ())
    real = ops.cast(numbers(x, xz), "f32") * xs
    graph = g.outputs(ops.matmul(real, ops.cast(numbers(y, np.int32(100)), "f32") * np.float32(0.5)))
    feeds = {
        "x": codes(rng, "u8", 2, 9, 30),
        "y": codes(rng, "u8", 2, 30, 11),
        "xz": np.int32(9),
        "xs": np.float32(0.1),
    }
    made = compiled(graph, {})
    np.testing.assert_allclose(made.run(feeds)[0], evaluate(graph, feeds, wide=True)[0], rtol=1e-6)
    assert product_types(made) == [("u8", "i8")]


def test_transposed_weights_and_reshaped_codes(rng) -> None:
    g = Graph("g")
    x, w, s = g.input("x", (4, 3, 6), "i8"), g.param("w", (5, 18), "i8"), g.param("s", (5, 1))
    flat = ops.reshape(ops.cast(numbers(x), "f32") * np.float32(0.1), (4, 18))
    graph = g.outputs(ops.matmul(flat, ops.transpose(ops.cast(numbers(w), "f32") * s, (1, 0))))
    feeds = {"x": codes(rng, "i8", 4, 3, 6), "w": codes(rng, "i8", 5, 18), "s": rng.random((5, 1)).astype("f4")}
    made = compiled(graph, feeds)
    np.testing.assert_allclose(made.run(x=feeds["x"])[0], evaluate(graph, feeds, wide=True)[0], rtol=1e-5)
    assert product_types(made) == [("i8", "i8")]


def test_calibrated_graphs_run_on_codes(rng) -> None:
    """insert_q_dq's pairs are what it looks for, too."""
    g = Graph("g")
    x, w = g.input("x", (6, 20)), g.param("w", (20, 12))
    record = {x: CalibrationEntry.per_tensor(0.03, 4), w: CalibrationEntry.per_channel(1, np.linspace(0.01, 0.03, 12))}
    graph = insert_q_dq(g.outputs(ops.matmul(x, w)), record)
    feeds = {"x": rng.standard_normal((6, 20)).astype("f4"), "w": rng.standard_normal((20, 12)).astype("f4")}
    made = compiled(graph, feeds)
    np.testing.assert_allclose(made.run(x=feeds["x"])[0], evaluate(graph, feeds)[0], rtol=1e-5, atol=1e-5)
    assert product_types(made) == [("i8", "i8")]


def test_what_varies_along_the_sum_stays_as_it_is(rng) -> None:
    g = Graph("g")
    x, w, s = g.input("x", (4, 6), "i8"), g.param("w", (6, 5), "i8"), g.param("s", (6,))
    graph = g.outputs(ops.matmul(ops.cast(numbers(x), "f32") * s, ops.cast(numbers(w), "f32") * np.float32(0.1)))
    feeds = {"x": codes(rng, "i8", 4, 6), "w": codes(rng, "i8", 6, 5), "s": rng.random(6).astype("f4")}
    made = compiled(graph, feeds)
    np.testing.assert_allclose(made.run(x=feeds["x"])[0], evaluate(graph, feeds, wide=True)[0], rtol=1e-5, atol=1e-5)
    assert product_types(made) == [("f32", "f32")]
