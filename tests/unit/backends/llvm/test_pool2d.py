"""Pools over planes against the kernel's own NumPy meaning: windows, targets, epilogues, symbolic sizes, threads."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.conv.pool2d import PoolPlan, emit_pool, plan_pool
from strata.backends.llvm.ir.builder import IrModule
from strata.core import Target, sym
from strata.kernel import Kernel, interpret
from strata.mir import Graph
from strata.runtime import CompilePipeline, Session
from tests.unit.backends.llvm.compiled import compiled

torch = pytest.importorskip("torch")
ops: Any = functions
HOST = Target.host()
TARGETS = [HOST, *(t for t in map(Target.named, ("avx2", "avx512")) if t.runs_on(HOST))]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def kernels(graph: Graph) -> list[Kernel]:
    return [s.kernel for s in CompilePipeline("cpu").compile(graph).lir.schedule if s.kernel is not None]


def run(plan: PoolPlan, inputs: list[np.ndarray]) -> np.ndarray:
    """Chunk by chunk, the last one first."""
    module = IrModule(plan.target.triple)
    name = emit_pool(module, plan)
    code = compiled(module, plan.target, name)
    out = np.full([int(d) for d in plan.out.shape], 77, np.float32)
    block = np.array([a.ctypes.data for a in (*inputs, out)], np.int64)
    for chunk in reversed(range(int(plan.usage.points))):
        KERNEL(code.address(name))(block.ctypes.data, chunk, chunk + 1)
    return out


WINDOWS = [
    # planes, sizes, taps, options
    ((2, 3), (14, 14), 3, {"stride": 1, "padding": 1}),
    ((5,), (13, 17), (3, 5), {"stride": (2, 1), "padding": (0, 2)}),
    ((1, 1), (7, 35), (2, 3), {"stride": (1, 2), "padding": 1}),
    ((1, 33), (9, 9), 2, {"stride": 2}),
    ((2, 2), (11, 40), (5, 4), {"stride": (1, 3), "padding": 2}),
    ((2, 3), (24, 43), (2, 7), {"stride": (4, 8)}),
    ((2,), (17, 90), (3, 5), {"stride": (4, 7), "padding": (1, 2)}),
    ((3,), (6, 50), (1, 7), {"stride": (1, 4), "padding": (0, 3)}),
    ((2,), (12, 21), (3, 2), {"stride": 1, "dilation": (3, 5), "padding": 1}),
    ((4,), (5, 200), (4, 1), {"stride": 1}),
    ((70, 3), (30, 31), 3, {"stride": 2, "padding": 1, "ceil_mode": True}),
    ((1,), (300, 64), 3, {"stride": 1, "padding": 1}),
]


@pytest.mark.few(36)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["max_pool", "min_pool", "sum_pool", "avg_pool"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_against_the_interpreter(case: tuple, kind: str, target: Target, rng: np.random.Generator) -> None:
    planes, sizes, taps, options = case
    g = Graph("pool")
    x = g.input("x", (*planes, *sizes))
    taps = (taps, taps) if isinstance(taps, int) else taps
    g.outputs(getattr(ops, kind)(x, taps, **options))
    data = rng.standard_normal((*planes, *sizes)).astype(np.float32)
    near = 2e-6 if kind in ("sum_pool", "avg_pool") else 0
    for kernel in kernels(g):  # of wide windows, an axis after the other
        plan = plan_pool(kernel, target)
        assert plan is not None
        counts = {b.name: rng.random([int(d) for d in b.shape], np.float32) + 1 for b in kernel.inputs}
        given = [data if b is plan.source else counts[b.name] for b in kernel.inputs]
        (expected,) = interpret(kernel, given)
        np.testing.assert_allclose(run(plan, given), expected, rtol=1e-6, atol=near)
        data = expected


@pytest.mark.parametrize("kind", ["max_pool", "min_pool", "avg_pool"])
def test_nan_and_infinities_stay_in_their_windows(kind: str, rng: np.random.Generator) -> None:
    data = rng.standard_normal((3, 4, 15, 18)).astype(np.float32)
    data.flat[rng.choice(data.size, 60, replace=False)] = np.repeat([np.nan, np.inf, -np.inf], 20)
    data[0, 0] = -np.inf
    data[0, 1] = np.inf
    g = Graph("pool")
    g.outputs(getattr(ops, kind)(g.input("x", data.shape), 3, stride=1, padding=1))
    (kernel,) = kernels(g)
    plan = plan_pool(kernel, HOST)
    assert plan is not None
    with np.errstate(invalid="ignore"):
        (expected,) = interpret(kernel, [data])
    np.testing.assert_allclose(run(plan, [data]), expected, rtol=1e-6, atol=2e-6)


def test_what_comes_behind(rng: np.random.Generator) -> None:
    """Operands of an epilogue are read at planes, lines and pixels."""
    g = Graph("pool")
    shape = (2, 5, 12, 19)
    x, y = g.input("x", shape), g.input("y", shape)
    scale, line = g.param("scale", (5, 1, 1)), g.param("line", (12, 1))
    pooled = ops.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    g.outputs((pooled * scale + y).relu() + line)
    params = {"scale": rng.standard_normal((5, 1, 1)), "line": rng.standard_normal((12, 1))}
    made = Session("cpu").compile(g)
    made.set_params({n: a.astype(np.float32) for n, a in params.items()})
    assert any(plan_pool(s.kernel, HOST) for s in made.lir.schedule if s.kernel is not None)
    a, b = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    mean = torch.nn.functional.avg_pool2d(torch.from_numpy(a).double(), 3, 1, 1, count_include_pad=False).numpy()
    expected = np.maximum(mean * params["scale"] + b, 0) + params["line"]
    np.testing.assert_allclose(made.run(x=a, y=b)[0], expected, rtol=1e-5, atol=1e-5)


def test_symbolic_sizes_and_threads(rng: np.random.Generator) -> None:
    g = Graph("pool")
    x = g.input("x", (sym("N", 1, 8), 3, sym("H", 4, 512), sym("W", 4, 512)))
    y = ops.max_pool2d(x, 3, stride=2, padding=1)
    g.outputs(y, ops.avg_pool2d(x, 5, stride=1, padding=2))
    made = Session("cpu").compile(g)
    assert all(plan_pool(s.kernel, HOST) for s in made.lir.schedule if s.kernel is not None)
    f = torch.nn.functional
    for shape in ((1, 3, 32, 32), (3, 3, 17, 40), (2, 3, 61, 4), (1, 3, 5, 333)):
        data = rng.standard_normal(shape).astype(np.float32)
        t = torch.from_numpy(data).double()
        expected = [f.max_pool2d(t, 3, 2, 1).numpy(), f.avg_pool2d(t, 5, 1, 2).numpy()]
        outs = []
        for threads in (1, 2, 7):
            got = [np.empty(e.shape, np.float32) for e in expected]
            made._executable.run(
                [data], got, dict(zip("NHW", np.take(shape, [0, 2, 3]).tolist(), strict=True)), threads
            )
            outs.append(got)
        for one, two, seven, want in zip(*outs, expected, strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, seven)


def test_other_kernels_stay_loops() -> None:
    def graph(dtype: str, make: Any, *shape: int) -> Graph:
        g = Graph("other")
        return g.outputs(make(g.input("x", shape, dtype)))

    others = [
        graph("f64", lambda x: ops.max_pool2d(x, 3, 1), 2, 3, 9, 9),
        graph("f32", lambda x: ops.max_pool3d(x, 3, 1), 1, 2, 9, 9, 9),
        graph("f32", lambda x: x.sum(axis=-1, keepdims=True), 4, 5, 6),
        graph("f32", lambda x: ops.mean(x, axis=(2, 3)), 2, 3, 7, 7),
        graph("f32", lambda x: ops.max_pool2d(x, 3, 1), 2, 3, 9, 5),  # lines of three pixels
        graph("f32", lambda x: ops.max_pool2d(x.exp(), 3, 1), 2, 3, 9, 9),
        graph("i32", lambda x: ops.max_pool2d(x, 3, 1), 2, 3, 9, 9),
    ]
    for g in others:
        assert not any(plan_pool(k, HOST) for k in kernels(g)), g.name
    pool = graph("f32", lambda x: ops.max_pool2d(x, 3, 1), 2, 3, 9, 9)
    assert not any(plan_pool(k, Target.named("baseline")) for k in kernels(pool))
