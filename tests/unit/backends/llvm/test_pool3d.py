"""Pools over volumes in two passes, against torch: windows, borders, what comes behind, symbolic sizes, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.conv.pool3d import split_volumes
from strata.core import Target, sym
from strata.kernel import Kernel, interpret
from strata.mir import Graph, evaluate
from strata.runtime import CompileOptions, CompilePipeline, Session

torch = pytest.importorskip("torch")
ops: Any = functions
WINDOWS: list[tuple[tuple[int, ...], Any, dict[str, Any]]] = [
    ((2, 3, 8, 14, 14), 3, {"stride": 1, "padding": 1}),
    ((1, 5, 9, 13, 17), (3, 2, 5), {"stride": (2, 1, 3), "padding": (1, 1, 2)}),
    ((1, 2, 7, 9, 35), 3, {"stride": 2, "padding": 1, "ceil_mode": True}),
    ((3, 1, 4, 8, 8), 3, {"stride": 3}),
    ((2, 2, 6, 11, 20), 4, {"stride": (1, 2, 2), "padding": 2}),
    ((1, 2, 1, 8, 9), (1, 3, 3), {"stride": 1, "padding": (0, 1, 1)}),
    ((1, 2, 9, 8, 9), (2, 3, 3), {"stride": (5, 1, 1), "padding": (0, 1, 1)}),  # planes between windows
    ((1, 1, 3, 3, 3), 3, {"stride": 1, "padding": 1}),
]
DEVICES = ["cpu", *(f"cpu:{n}" for n in ("avx2", "baseline") if Target.named(n).runs_on(Target.host()))]


@pytest.mark.few(12)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_as_torch(case: tuple, kind: str, device: str, rng: np.random.Generator) -> None:
    shape, taps, options = case
    x = rng.standard_normal(shape).astype(np.float32)
    g = Graph("pool")
    given, b = g.input("x", shape), g.input("b", (shape[1], 1, 1, 1))
    g.outputs((getattr(ops, f"{kind}_pool")(given, taps, **options) * 2.0 + b).relu())
    shift = rng.standard_normal((shape[1], 1, 1, 1)).astype(np.float32)
    pooled = getattr(torch.nn.functional, f"{kind}_pool3d")(torch.from_numpy(x).double(), taps, **options).numpy()
    results = []
    for threads in (1, 2, 7):
        made = Session(device).compile(g, CompileOptions(threads=threads))
        results.append(made.run(x=x, b=shift)[0])
        np.testing.assert_array_equal(results[-1], results[0])
    np.testing.assert_allclose(results[0], np.maximum(pooled * 2 + shift, 0), rtol=1e-5, atol=1e-6)


def test_nan_and_infinities_stay_in_their_windows() -> None:
    x = np.zeros((1, 1, 6, 8, 24), np.float32)
    x[0, 0, 2, 3, 5], x[0, 0, 4, 6, 20] = np.nan, np.inf
    g = Graph("pool")
    g.outputs(ops.avg_pool(g.input("x", x.shape), 3, 1, 1))
    (got,) = Session("cpu").compile(g).run(x=x)
    wanted = torch.nn.functional.avg_pool3d(torch.from_numpy(x), 3, 1, 1).numpy()
    np.testing.assert_array_equal(got, wanted)


def pool_kernel(depth: Any, stride: int = 1) -> Kernel:
    g = Graph("pool")
    g.outputs(ops.avg_pool(g.input("x", (2, 3, depth, 9, 20)), 3, (stride, 1, 1), 1))
    (kernel,) = (s.kernel for s in CompilePipeline("cpu").compile(g).lir.schedule if s.kernel is not None)
    return kernel


def test_two_kernels_compute_what_one_did(rng: np.random.Generator) -> None:
    kernel = pool_kernel(7)
    volumes = split_volumes(kernel)
    assert volumes is not None
    x = rng.standard_normal((2, 3, 7, 9, 20)).astype(np.float32)
    (between,) = interpret(volumes.planes, [x])
    (got,) = interpret(volumes.rest, [between])
    np.testing.assert_allclose(got, interpret(kernel, [x])[0], rtol=1e-5, atol=1e-6)


def test_planes_that_no_window_sees_are_not_pooled() -> None:
    assert split_volumes(pool_kernel(12, stride=4)) is None


def test_any_depth(rng: np.random.Generator) -> None:
    g = Graph("pool")
    n, depth = sym("n", 0, 4), sym("d", 1, 30)
    g.outputs(ops.avg_pool(g.input("x", (n, 2, depth, 9, 20)), 3, 1, 1))
    made = Session("cpu").compile(g)
    for shape in ((1, 2, 1, 9, 20), (3, 2, 30, 9, 20), (0, 2, 4, 9, 20)):
        x = rng.standard_normal(shape).astype(np.float32)
        (wanted,) = evaluate(g, {"x": x})
        np.testing.assert_allclose(made.run(x=x)[0], wanted, rtol=1e-5, atol=1e-6)
