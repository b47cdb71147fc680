"""Graphs of many ops: a kernel has a bounded number of them, so that the time to compile grows with the graph."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st
from strata.lir import fused, fusion, merge, plan, siblings
from strata.runtime import CompilePipeline
from tests.counts import calls, codes
from tests.programs.graphs import encoder
from tests.programs.test_scale import shared


def wide(leaves: int) -> st.Graph:
    """A tree of sums over products with different numbers."""
    g = st.Graph("wide")
    x = g.input("x", (8,), "f32")
    level = [x * float(i % 17 + 1) for i in range(leaves)]
    level = [st.ops.tanh(v + float(i)) for i, v in enumerate(level)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [p[0] if len(p) == 1 else st.ops.add(*p) for p in pairs]
    return g.outputs(level[0])


@pytest.mark.parametrize("most", [32, 100])
def test_a_wide_tree_becomes_kernels_of_a_bounded_size(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused, fusion, siblings):
        monkeypatch.setattr(module, "MOST_OPS", most)
    monkeypatch.setattr(merge, "MAX_OPS", most)
    graph = wide(300)
    compiled = st.Session("cpu").compile(graph)
    sizes = [len(step.nodes) for step in st.CompilePipeline("cpu").compile(graph).lir.schedule]
    assert max(sizes) <= 2 * most
    assert len(sizes) <= 4 * sum(sizes) // most + 8  # few pieces, none of them crumbs
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    want = st.Session("reference").compile(graph).run(x=x)[0]
    np.testing.assert_allclose(compiled.run(x=x)[0], want, rtol=1e-5)


def test_what_fits_one_kernel_stays_one() -> None:
    assert len(st.CompilePipeline("cpu").compile(wide(100)).lir.schedule) == 1


def test_kernels_that_join_are_built_once() -> None:
    """Each value has three readers, so that kernels join one after the other: the work grows with the graph."""

    def work(count: int) -> int:
        graph = shared(count)
        return calls(lambda: plan(graph))

    work(60)  # what ops do is found once
    assert work(480) < 5.5 * work(120)


def test_the_layers_of_a_model_are_built_once() -> None:
    """Each further layer takes no expression that the ones before it have not made."""

    def built(layers: int) -> int:
        graph = CompilePipeline("cpu").compile(encoder(layers, width=32, heads=2)).lir.graph
        return sum(code is fused._Expressions.__init__.__code__ for code in codes(lambda: plan(graph)))

    assert built(3) == built(5)
