"""Transposed convolutions as plain ones, compared with the op's own meaning in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.ops import METHODS

CASES: list[dict[str, Any]] = [
    {"size": (5, 7), "kernel": (2, 2), "stride": 2},
    {"size": (5, 7), "kernel": (3, 3), "stride": 2, "padding": 1, "output_padding": 1},
    {"size": (6, 5), "kernel": (3, 3), "stride": 2, "padding": 1, "outputs": 5},
    {"size": (4, 9), "kernel": (4, 4), "stride": 2, "padding": 1, "outputs": 3},
    {"size": (8, 8), "kernel": (4, 4), "stride": 2, "padding": 1, "outputs": 40},
    {"size": (33,), "kernel": (16,), "stride": 8, "padding": 4, "outputs": 9},
    {"size": (7,), "kernel": (5,), "stride": 3, "output_padding": 2, "groups": 4},
    {"size": (4, 4), "kernel": (1, 1), "stride": 2, "output_padding": 1},
    {"size": (4, 4), "kernel": (1, 2), "stride": (3, 2), "outputs": 20},
    {"size": (5, 5), "kernel": (4, 4), "stride": 2, "padding": 1, "groups": 8},
    {"size": (1, 1), "kernel": (5, 5), "stride": 4, "padding": 2, "output_padding": 3},
    {"size": (4, 4), "kernel": (3, 3), "stride": 3, "padding": 3},
    {"size": (4, 6), "kernel": (3, 4), "stride": (1, 2), "padding": (1, 1)},
    {"size": (3, 4, 2), "kernel": (2, 3, 2), "stride": 2, "outputs": 6},
    {"size": (6, 6), "kernel": (3, 3), "stride": 2, "dilation": 2},
    {"size": (16, 9), "kernel": (2, 2), "stride": 2, "outputs": 5},
    {"size": (16, 9), "kernel": (3, 2), "stride": (3, 2), "outputs": 16},
    {"size": (4, 8, 5), "kernel": (2, 2, 2), "stride": 2, "outputs": 3},
    {"size": (160,), "kernel": (8,), "stride": 8, "outputs": 3},
    {"size": (12, 12), "kernel": (2, 2), "stride": 2, "output_padding": 1},
    {"size": (12, 12), "kernel": (3, 2), "stride": 2, "outputs": 20},
]


def build(g: st.Graph, case: dict[str, Any], images: Any) -> tuple[Any, ...]:
    options = dict(case)
    size, kernel = options.pop("size"), options.pop("kernel")
    outputs, groups = options.pop("outputs", 8), options.get("groups", 1)
    x = g.input("x", (images, 8, *size))
    w = g.param("w", (8, outputs // groups, *kernel))
    b = g.param("b", (outputs,))
    return METHODS[f"conv_transpose{len(size)}d"](x, w, b, **options), x, w, b


@pytest.mark.few(7)
@pytest.mark.parametrize("case", CASES, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()))
def test_as_the_op_says(case: dict[str, Any], rng: np.random.Generator) -> None:
    g = st.Graph("g")
    y, x, w, b = build(g, case, 2)
    g.outputs(y.relu())
    feeds = {n: rng.normal(size=v.shape).astype(np.float32) for n, v in (("x", x), ("w", w), ("b", b))}
    (wanted,) = st.evaluate(g, feeds)
    for threads in (1, 2, 7):
        compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
        compiled.set_params({"w": feeds["w"], "b": feeds["b"]})
        (got,) = compiled.run(x=feeds["x"])
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_any_number_of_images(rng: np.random.Generator) -> None:
    g = st.Graph("g")
    y, _, w, b = build(g, CASES[1], st.sym("n", 1, 16))
    g.outputs(y)
    compiled = st.Session("cpu").compile(g)
    params = {"w": rng.normal(size=w.shape).astype(np.float32), "b": rng.normal(size=b.shape).astype(np.float32)}
    compiled.set_params(params)
    for images in (1, 3, 16):
        x = rng.normal(size=(images, 8, *CASES[1]["size"])).astype(np.float32)
        (wanted,) = st.evaluate(g, {"x": x, **params})
        np.testing.assert_allclose(compiled.run(x=x)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4], CASES[2]], ids=["2", "3 + 1", "4", "3"])
def test_any_size(case: dict[str, Any], rng: np.random.Generator) -> None:
    """With and without a rest of the size that is not known."""
    g = st.Graph("g")
    n = st.sym("n", 2, 40)
    y, _, w, b = build(g, case | {"size": (n, n + 1)}, 1)
    g.outputs(y)
    compiled = st.Session("cpu").compile(g)
    params = {"w": rng.normal(size=w.shape).astype(np.float32), "b": rng.normal(size=b.shape).astype(np.float32)}
    compiled.set_params(params)
    for size in (2, 3, 17, 40):
        x = rng.normal(size=(1, 8, size, size + 1)).astype(np.float32)
        (wanted,) = st.evaluate(g, {"x": x, **params})
        np.testing.assert_allclose(compiled.run(x=x)[0], wanted, rtol=1e-4, atol=1e-4)


def test_between_other_convolutions(rng: np.random.Generator) -> None:
    """Nothing but rows of channels is moved there."""
    g = st.Graph("g")
    x = g.input("x", (1, 16, 6, 6))
    w = [g.param(f"w{i}", s) for i, s in enumerate([(16, 16, 3, 3), (16, 24, 4, 4), (8, 24, 3, 3)])]
    h = st.ops.conv2d(x, w[0], padding=1).relu()
    h = st.ops.conv_transpose2d(h, w[1], stride=2, padding=1).relu()
    g.outputs(st.ops.conv2d(h, w[2], padding=1))
    params = {f"w{i}": (rng.normal(size=v.shape) / 8).astype(np.float32) for i, v in enumerate(w)}
    feed = rng.normal(size=x.shape).astype(np.float32)
    (wanted,) = st.evaluate(g, {"x": feed, **params})
    compiled = st.Session("cpu").compile(g)
    compiled.set_params(params)
    np.testing.assert_allclose(compiled.run(x=feed)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "outputs"), [((2, 2), 16), ((3, 2), 24), ((2, 2, 2), 16)])
def test_behind_a_convolution(kernel: tuple[int, ...], outputs: int, rng: np.random.Generator) -> None:
    """Phases of the last axis share a convolution; rows of the result are turned for each of the others."""
    g = st.Graph("g")
    rank = len(kernel)
    x = g.input("x", (2, 16, *(8, 12, 16)[:rank]))
    w, v = g.param("w", (24, 16, *(3,) * rank)), g.param("v", (24, outputs, *kernel))
    g.outputs(st.ops.conv_transpose(st.ops.conv(x, w, padding=1).relu(), v, stride=2))
    feeds = {n: (rng.normal(size=t.shape) / 8).astype(np.float32) for n, t in (("x", x), ("w", w), ("v", v))}
    (wanted,) = st.evaluate(g, feeds)
    results = []
    for threads in (1, 2, 7):
        compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
        compiled.set_params({"w": feeds["w"], "v": feeds["v"]})
        results.append(compiled.run(x=feeds["x"])[0])
        np.testing.assert_allclose(results[-1], wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(results[-1], results[0])


@pytest.mark.parametrize("channels", [1, 3])
def test_patches_with_many_taps(channels: int, rng: np.random.Generator) -> None:
    """All taps of a line are one run: 16 x 16 of them are 16 runs."""
    g = st.Graph("g")
    x, w = g.input("x", (2, channels, 35, 50)), g.param("w", (24, channels, 16, 16))
    g.outputs(st.ops.conv2d(x, w, stride=16))
    feeds = {n: rng.normal(size=v.shape).astype(np.float32) for n, v in (("x", x), ("w", w))}
    (wanted,) = st.evaluate(g, feeds)
    compiled = st.Session("cpu").compile(g)
    compiled.set_param("w", feeds["w"])
    np.testing.assert_allclose(compiled.run(x=feeds["x"])[0], wanted, rtol=1e-4, atol=2e-4)
