"""Attention of few queries and few heads over many keys: segments of keys on all threads, added up in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.backend import CpuBackend
from strata.core import Dim, Target, as_dtype, sym
from strata.mir import Graph
from strata.ops.nn.attention import Attention
from strata.runtime import CompiledGraph, CompileOptions, Session

TARGETS = [t for t in map(Target.named, ("host", "avx512", "avx2", "baseline")) if t.runs_on(Target.host())]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 700},
    "narrow": {"causal": True, "window": 3},
    "softcap": {"softcap": 5.0},
    "offset": {"causal": True, "has_offset": True},
}
DIM = 32


def compiled(
    heads: tuple[int, int], keys: Dim, queries: Dim, given: dict[str, Any], *, batch: int = 1, dtype: str = "f32",
    threads: int | None = None, target: Target | None = None,
) -> CompiledGraph:  # fmt: skip
    g = Graph("decode")
    q = g.input("q", (batch, heads[0], queries, DIM), dtype)
    k, v = (g.input(name, (batch, heads[1], keys, DIM), dtype) for name in "kv")
    options = {name: value for name, value in given.items() if name != "has_offset"}
    if "has_offset" in given:
        options["offset"] = g.input("offset", (batch,), "i64")
    g.outputs(ops.attention(q, k, v, num_heads=heads[0], kv_heads=heads[1], layout="bhsd", **options))
    session = Session("cpu")
    session.backend = CpuBackend(target)
    return session.compile(g, CompileOptions(threads=threads))


def feeds(
    rng: np.random.Generator, heads: tuple[int, int], keys: int, queries: int, batch: int, dtype: type
) -> dict[str, np.ndarray]:
    shapes = {"q": (heads[0], queries), "k": (heads[1], keys), "v": (heads[1], keys)}
    return {n: rng.standard_normal((batch, *shape, DIM)).astype(dtype) for n, shape in shapes.items()}


def check(
    made: CompiledGraph, x: dict[str, np.ndarray], heads: tuple[int, int], given: dict[str, Any], close: float = 1e-5
) -> None:
    op = Attention(num_heads=heads[0], kv_heads=heads[1], head_dim=DIM, **given)
    extra = [x["offset"]] if "offset" in x else []
    exact = op.numpy(*(x[n].astype(np.float64) for n in "qkv"), *extra)
    np.testing.assert_allclose(made.run(x)[0].astype(np.float64), exact, rtol=0, atol=close)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)], ids=str)
def test_values(case: str, heads: tuple[int, int], rng: np.random.Generator) -> None:
    """Open lengths: one segment, segments that are not whole, segments before and behind what a query sees."""
    given = CASES[case]
    made = compiled(heads, sym("keys", 1, 4096), sym("queries", 1, 8), given, batch=2)
    for keys, queries in ((1, 1), (512, 1), (513, 1), (1024, 3), (1100, 4), (2000, 1), (2000, 5)):
        x = feeds(rng, heads, keys, queries, 2, np.float32)
        if "has_offset" in given:
            x["offset"] = np.array([keys - queries, (keys - queries) // 3])
        check(made, x, heads, given)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_targets_and_types(target: Target, rng: np.random.Generator) -> None:
    for name, close in (("f32", 1e-5), ("f64", 1e-5), ("f16", 1e-3), ("bf16", 4e-3)):
        made = compiled((6, 2), 1500, 1, {}, dtype=name, target=target)
        assert [step.label for step in made.lir.schedule] == ["attention"]
        check(made, feeds(rng, (6, 2), 1500, 1, 1, as_dtype(name).np), (6, 2), {}, close)


def test_bits_depend_neither_on_threads_nor_on_the_batch(rng: np.random.Generator) -> None:
    x = feeds(rng, (6, 3), 3000, 2, 2, np.float32)
    found = [compiled((6, 3), 3000, 2, {}, batch=2, threads=t).run(x)[0] for t in (1, 2, 7)]
    for other in found[1:]:
        assert np.array_equal(found[0], other)
    alone = compiled((6, 3), 3000, 2, {}).run({n: a[:1] for n, a in x.items()})[0]
    assert np.array_equal(alone, found[0][:1])


def test_scores_far_apart(rng: np.random.Generator) -> None:
    """A segment whose scores are far below those of another adds nothing, and no infinity."""
    x = feeds(rng, (1, 1), 1200, 1, 1, np.float32)
    x["k"][0, 0, :600] = 100 * x["q"][0, 0, 0]
    x["k"][0, 0, 600:] = -100 * x["q"][0, 0, 0]
    made = compiled((1, 1), 1200, 1, {})
    check(made, x, (1, 1), {})
    check(made, {**x, "k": x["k"][:, :, ::-1].copy()}, (1, 1), {})
