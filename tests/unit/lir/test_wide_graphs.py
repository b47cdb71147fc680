"""Graphs of many ops: a kernel has a bounded number of them, so that the time to compile grows with the graph."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st
from strata.lir import fused, fusion, siblings


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
    monkeypatch.setattr(fusion, "MAX_OPS", most)
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
