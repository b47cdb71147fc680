"""Grouped products on the processor: tails, experts without rows, open sizes, threads, targets."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.backend import CpuBackend
from strata.core import Dim, Target, sym
from strata.mir import Graph
from strata.runtime import CompiledGraph, CompileOptions, Session

TARGETS = [t for t in map(Target.named, ("host", "avx512", "avx2", "baseline")) if t.runs_on(Target.host())]


def compiled(
    rows: Dim, w: np.ndarray, ids: str = "i64", threads: int | None = None, target: Target | None = None
) -> CompiledGraph:
    g = Graph("grouped")
    dtype = {4: "f32", 8: "f64"}[w.dtype.itemsize]
    x = g.input("x", (rows, w.shape[1]), dtype)
    g.outputs(ops.grouped_matmul(x, g.param("w", w.shape, dtype), g.input("ids", (rows,), ids)))
    session = Session("cpu")
    session.backend = CpuBackend(target)
    made = session.compile(g, CompileOptions(threads=threads))
    made.set_param("w", w)
    steps = [(s.label, s.kernel) for s in made.lir.schedule]
    assert steps == [("checked_ids", None), ("grouped_matmul", None)]  # one step after the check, and not a loop
    assert not made.host_steps
    return made


def wanted(x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.stack([row @ w[e].astype(np.float64) for row, e in zip(x.astype(np.float64), ids, strict=True)])


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values(target: Target, dtype: type, rng: np.random.Generator) -> None:
    for experts, k, n in ((4, 33, 17), (3, 300, 200), (8, 128, 192), (1, 5, 3), (40, 64, 64), (2, 129, 193)):
        w: np.ndarray = rng.standard_normal((experts, k, n)).astype(dtype)
        made = compiled(sym("M", 0, 256), w, target=target)
        for rows in (0, 1, 2, 3, 5, 17, 64):
            x: np.ndarray = rng.standard_normal((rows, k)).astype(dtype)
            ids = rng.integers(0, experts, rows)
            found = made.run(x=x, ids=ids)[0]
            assert found.shape == (rows, n)
            if rows:
                tolerance = 64 * np.finfo(dtype).eps * np.sqrt(k)
                np.testing.assert_allclose(found, wanted(x, w, ids), rtol=0, atol=tolerance)


def test_all_rows_of_one_expert_and_none_of_others(rng: np.random.Generator) -> None:
    w = rng.standard_normal((5, 70, 50)).astype(np.float32)
    x = rng.standard_normal((40, 70)).astype(np.float32)
    made = compiled(40, w, "i32")
    for expert in (0, 2, 4):
        ids = np.full(40, expert, np.int32)
        np.testing.assert_allclose(made.run(x=x, ids=ids)[0], wanted(x, w, ids), rtol=0, atol=1e-4)


def test_threads_and_company_change_nothing(rng: np.random.Generator) -> None:
    """The bits of a row depend neither on threads nor on how many rows its expert has."""
    w = rng.standard_normal((6, 260, 450)).astype(np.float32)
    x, ids = rng.standard_normal((90, 260)).astype(np.float32), rng.integers(0, 6, 90)
    found = [compiled(sym("M", 1, 128), w, threads=t).run(x=x, ids=ids)[0] for t in (1, 2, 7)]
    for other in found[1:]:
        assert np.array_equal(found[0], other)
    alone = compiled(sym("M", 1, 128), w)
    for i in (0, 41, 89):
        assert np.array_equal(alone.run(x=x[i : i + 1], ids=ids[i : i + 1])[0][0], found[0][i])


def test_few_rows_are_left_to_loops(rng: np.random.Generator) -> None:
    g = Graph("grouped")
    g.outputs(ops.grouped_matmul(g.input("x", (2, 8)), g.input("w", (3, 8, 4)), g.input("ids", (2,), "i64")))
    check, product = Session("cpu").compile(g).lir.schedule
    assert check.label == "checked_ids"
    assert product.kernel is not None
