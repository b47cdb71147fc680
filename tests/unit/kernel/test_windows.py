"""Windows of a few terms written out, with borders cut off: pools of every kind against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen.compile import lower_phases
from strata.core import Target
from strata.kernel import Load, Reduce, postorder
from strata.kernel.passes.split_predicates import cut_stores

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
SHAPES = [(2, 3, 13, 17), (1, 2, 2, 5), (3, 1, 28, 28), (1, 20, 14, 14), (1, 1, 64, 131)]
WINDOWS = [(3, 2, 1), (2, 2, 0), (3, 1, 1), (1, 2, 0), (5, 1, 2), (4, 3, 2)]


def padded(x: np.ndarray, k: int, s: int, p: int, fill: float) -> np.ndarray:
    wide = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(wide, (k, k), (2, 3))[:, :, ::s, ::s]


def graph(kind: str, shape: tuple[int, ...], window: tuple[int, int, int]) -> st.Graph:
    g = st.Graph("g")
    g.outputs(getattr(st.ops, f"{kind}_pool2d")(g.input("x", shape), *window))
    return g


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pools(shape: tuple[int, ...], window: tuple[int, int, int], rng: np.random.Generator) -> None:
    x = rng.normal(size=shape).astype(np.float32)
    maxima = padded(x, *window, -np.inf).max((-1, -2))
    means = padded(x, *window, 0).mean((-1, -2))
    for threads in (1, 2, 7):
        options = st.CompileOptions(threads=threads)
        (got,) = st.Session("cpu").compile(graph("max", shape, window), options).run(x=x)
        np.testing.assert_array_equal(got, maxima)
        (got,) = st.Session("cpu").compile(graph("avg", shape, window), options).run(x=x)
        np.testing.assert_allclose(got, means, rtol=1e-5, atol=1e-6)


def test_nan_and_infinity_win(rng: np.random.Generator) -> None:
    x = rng.normal(size=(1, 2, 9, 40)).astype(np.float32)
    x[0, 0, 4, 7], x[0, 1, 0, 0], x[0, 1, 8, 39] = np.nan, np.inf, -np.inf
    for window in ((3, 1, 1), (3, 2, 1), (5, 1, 2)):
        (got,) = st.Session("cpu").compile(graph("max", x.shape, window)).run(x=x)
        np.testing.assert_array_equal(got, padded(x, *window, -np.inf).max((-1, -2)))


def test_inside_reads_have_no_conditions() -> None:
    (kernel,) = st.CompilePipeline("cpu").compile(graph("max", (1, 64, 30, 30), (3, 1, 1))).lir.kernels.values()
    (part,) = cut_stores(kernel)
    nodes = postorder(part.roots)
    assert not any(isinstance(n, Reduce) for n in nodes)
    assert all(n.where is None for n in nodes if isinstance(n, Load))
    assert len(part.stores) == 9


def test_long_sums_stay_loops() -> None:
    g = st.Graph("g")
    g.outputs(g.input("x", (10, 64)).sum(1))
    (kernel,) = st.CompilePipeline("cpu").compile(g).lir.kernels.values()
    assert cut_stores(kernel) == (kernel,)


@pytest.mark.parametrize("target", TARGETS)
def test_lowers_on_every_target(target: str) -> None:
    (kernel,) = st.CompilePipeline("cpu").compile(graph("avg", (1, 8, 30, 30), (3, 2, 1))).lir.kernels.values()
    phases, scratch = lower_phases(kernel, Target.named(target))
    assert len(phases) == 1
    assert scratch == ()


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "new"),
    [((8, 12), (16, 24)), ((9, 17), (18, 34)), ((8, 12), (12, 18)), ((8, 12), (4, 6)), ((6, 6), (24, 24)),
     ((10, 7), (7, 10)), ((5, 40), (5, 30)), ((12, 12), (4, 4)), ((1, 8), (3, 64))],
)  # fmt: skip
def test_resizes_by_phases(size: tuple[int, int], new: tuple[int, int], mode: Any, rng: np.random.Generator) -> None:
    """Against the op's own meaning: a product with a matrix of weights."""
    x = rng.normal(size=(2, 3, *size)).astype(np.float32)
    g = st.Graph("g")
    g.outputs(st.ops.interpolate(g.input("x", x.shape), size=new, mode=mode))
    (wanted,) = st.evaluate(g, {"x": x})
    for threads in (1, 2, 7):
        (got,) = st.Session("cpu").compile(g, st.CompileOptions(threads=threads)).run(x=x)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
