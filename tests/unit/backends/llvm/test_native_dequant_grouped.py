"""Grouped products with quantised weights on the processor: every scheme, odd sizes, experts without rows, threads."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.backend import CpuBackend
from strata.core import Dim, Target, sym
from strata.mir import Graph
from strata.ops.quant.schemes import Scheme
from strata.runtime import CompiledGraph, CompileOptions, Session

TARGETS = [t for t in map(Target.named, ("host", "avx512", "avx2", "baseline")) if t.runs_on(Target.host())]
BLOCKS = tuple(f"gguf_{b}" for b in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "q8k"))
OTHERS = ("int4/4", "int4/32", "int8/7", "int8a/32", "fp8e4m3", "fp8e5m2", "nvfp4/16")


class Experts:
    """Some matrices in one scheme, stored and as floats."""

    def __init__(self, scheme: str, experts: int, k: int, n: int, rng: np.random.Generator) -> None:
        self.scheme, self.n = Scheme.from_text(scheme), n
        stored = [self.scheme.encode(rng.standard_normal((k, n))) for _ in range(experts)]
        self.codes = np.concatenate([one[0].reshape(-1) for one in stored])
        self.sides = [np.stack(side) for side in zip(*(one[1:] for one in stored), strict=True)]
        decoded = (self.scheme.decode(*one, k=k, n=n) for one in stored)
        self.w = np.stack([w.astype(np.float64) for w in decoded])

    def compiled(
        self,
        rows: Dim,
        *,
        ids: str = "i64",
        dtype: str = "f32",
        target: Target | None = None,
        threads: int | None = None,
    ) -> CompiledGraph:
        g = Graph("grouped")
        names = {"u": "u8", "i": "i8", "f": "f32"}
        codes = g.param("codes", self.codes.shape, names[self.codes.dtype.kind])
        sides = [g.param(f"side{i}", s.shape, names[s.dtype.kind]) for i, s in enumerate(self.sides)]
        x = g.input("x", (rows, self.w.shape[1]), dtype)
        kinds = dict(scheme=self.scheme, n=self.n)
        g.outputs(ops.dequant_grouped_matmul(x, codes, g.input("ids", (rows,), ids), *sides, **kinds))
        session = Session("cpu")
        session.backend = CpuBackend(target)
        made = session.compile(g, CompileOptions(threads=threads))
        made.set_param("codes", self.codes)
        for i, side in enumerate(self.sides):
            made.set_param(f"side{i}", side)
        assert not made.host_steps
        return made

    def check(self, found: np.ndarray, x: np.ndarray, ids: np.ndarray) -> None:
        """Within 1e-4 of what products of such sizes come to; blocks take x in 16 bits."""
        assert found.shape == (len(x), self.n)
        for y, row, expert in zip(found, x.astype(np.float64), ids, strict=True):
            size = np.sqrt((row**2).sum() * (self.w[expert] ** 2).sum(0))
            assert (np.abs(y - row @ self.w[expert]) <= 1e-4 * size + 1e-5).all()


@pytest.mark.parametrize("scheme", [*BLOCKS, *OTHERS])
def test_every_scheme(scheme: str, rng: np.random.Generator) -> None:
    """Experts with no row, few rows and many, in the order of chance."""
    for experts, k, n in ((5, 256, 37), (3, 512, 64), (1, 256, 1)):
        given = Experts(scheme, experts, k, n, rng)
        made = given.compiled(sym("M", 0, 64))
        if scheme in OTHERS or Target.host().has_avx2:
            steps = [(s.label, s.kernel) for s in made.lir.schedule]
            assert steps == [("checked_ids", None), ("dequant_grouped_matmul", None)]  # no loop
        for rows in (0, 1, 3, 23):
            x = rng.standard_normal((rows, k)).astype(np.float32)
            ids = rng.integers(0, experts, rows)
            given.check(made.run(x=x, ids=ids)[0], x, ids)


@pytest.mark.parametrize("scheme", OTHERS)
def test_sizes_that_fill_no_block(scheme: str, rng: np.random.Generator) -> None:
    for experts, k, n in ((4, 33, 17), (2, 5, 3), (3, 130, 200), (2, 1, 1)):
        given = Experts(scheme, experts, k, n, rng)
        x = rng.standard_normal((9, k)).astype(np.float32)
        ids = rng.integers(0, experts, 9).astype(np.int32)
        given.check(given.compiled(9, ids="i32").run(x=x, ids=ids)[0], x, ids)


@pytest.mark.parametrize(("scheme", "target"), [
    *((scheme, t) for scheme in ("gguf_q4k", "gguf_q8_0") for t in TARGETS if t.has_avx2),
    *((scheme, t) for scheme in ("int4/32", "fp8e4m3", "nvfp4/16") for t in TARGETS),
], ids=str)  # fmt: skip
def test_other_processors(scheme: str, target: Target, rng: np.random.Generator) -> None:
    given = Experts(scheme, 3, 256, 50, rng)
    x = rng.standard_normal((11, 256)).astype(np.float32)
    ids = np.array([2, 0, 2, 2, 2, 0, 2, 2, 0, 2, 2])
    given.check(given.compiled(11, target=target).run(x=x, ids=ids)[0], x, ids)


@pytest.mark.parametrize("scheme", ["gguf_q6k", "int8/32"])
def test_all_rows_of_one_expert_and_none_of_others(scheme: str, rng: np.random.Generator) -> None:
    given = Experts(scheme, 4, 256, 40, rng)
    x = rng.standard_normal((17, 256)).astype(np.float32)
    made = given.compiled(17)
    for expert in (0, 1, 3):
        ids = np.full(17, expert)
        given.check(made.run(x=x, ids=ids)[0], x, ids)


@pytest.mark.parametrize("scheme", ["gguf_q4_0", "gguf_q5k", "int4/32"])
def test_bits_do_not_depend_on_threads(scheme: str, rng: np.random.Generator) -> None:
    given = Experts(scheme, 6, 512, 700, rng)
    x = rng.standard_normal((25, 512)).astype(np.float32)
    ids = np.array([0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 1, 5, 5])
    one, two, seven = (given.compiled(25, threads=threads).run(x=x, ids=ids)[0] for threads in (1, 2, 7))
    assert (one == two).all()
    assert (one == seven).all()
    given.check(one, x, ids)


def test_half_precision_takes_the_same_way(rng: np.random.Generator) -> None:
    given = Experts("gguf_q8_0", 3, 64, 20, rng)
    x = rng.standard_normal((5, 64)).astype(np.float16)
    ids = np.array([0, 2, 2, 0, 2])
    made = given.compiled(5, dtype="f16")
    assert any(s.label == "dequant_grouped_matmul" for s in made.profile(x=x, ids=ids, repeats=1).rows)
    exact = np.stack([row.astype(np.float64) @ given.w[e] for row, e in zip(x, ids, strict=True)])
    np.testing.assert_allclose(made.run(x=x, ids=ids)[0].astype(np.float64), exact, atol=2e-2)


def test_one_scale_for_a_matrix_of_small_floats(rng: np.random.Generator) -> None:
    w = rng.integers(0, 120, (2, 32, 10)).astype(np.uint8)
    scheme, scale = Scheme("fp8e5m2"), np.array([[0.5], [2.0]], np.float32)
    x = rng.standard_normal((4, 32)).astype(np.float32)
    ids = np.array([1, 0, 1, 1])
    g = Graph("grouped")
    given = g.input("x", (4, 32)), g.input("w", w.shape, "u8"), g.input("ids", (4,), "i64"), g.input("scale", (2, 1))
    g.outputs(ops.dequant_grouped_matmul(*given, scheme=scheme, n=10))
    found = Session("cpu").compile(g).run(x=x, w=w, ids=ids, scale=scale)[0]
    decoded = [scheme.decode(w[e], scale[e], k=32, n=10).astype(np.float64) for e in range(2)]
    exact = np.stack([row.astype(np.float64) @ decoded[e] for row, e in zip(x, ids, strict=True)])
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
