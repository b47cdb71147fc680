"""tree_leaves: tables kept as packed nodes and tables of a run, few rows and many, NaN, links that lead out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.mir import METHODS
from strata.ops.indexing.trees import TreeLeaves

TREES, DEPTH, WIDTH = 37, 7, 6


def forest(rng: np.random.Generator, dtype: Any, *, lost: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trees that are not balanced: splits, links and roots."""
    splits: list[float] = []
    links: list[list[int]] = []
    roots, ends = [], 0

    def fill(at: int, depth: int) -> None:
        nonlocal ends
        if depth == 0 or rng.random() < 0.2:
            links[at] = [0, ~ends]
            ends += 1
            return
        feature = int(rng.integers(WIDTH))
        links[at] = [~feature if lost and rng.random() < 0.5 else feature, len(links)]
        splits[at] = float(np.round(rng.standard_normal(), 1))
        first = len(links)
        links.extend([[0, 0], [0, 0]])
        splits.extend([0, 0])
        fill(first, depth - 1)
        fill(first + 1, depth - 1)

    for _ in range(TREES):
        roots.append(len(links))
        links.append([0, 0])
        splits.append(0)
        fill(roots[-1], DEPTH)
    return np.array(splits, dtype), np.array(links, np.int32), np.array(roots, np.int32)


def rows_of(rng: np.random.Generator, count: int, dtype: Any, width: int = WIDTH) -> np.ndarray:
    x = np.round(rng.standard_normal((count, width)), 1).astype(dtype)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


@pytest.mark.parametrize("count", [0, 1, 7, 31, 32, 45, 600])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tables_that_stay_and_tables_of_a_run(count: int, lost: bool, dtype: Any, rng: np.random.Generator) -> None:
    tables, x = forest(rng, dtype, lost=lost), rows_of(rng, count, dtype)
    want = TreeLeaves(DEPTH).numpy(x, *tables)
    graph = st.Graph("kept")
    graph.outputs(METHODS["tree_leaves"](graph.input("x", x.shape, dtype), *tables, depth=DEPTH))
    np.testing.assert_array_equal(st.Session("cpu").compile(graph).run(x=x)[0], want)
    graph = st.Graph("given")
    ports = [graph.input(name, a.shape, a.dtype) for name, a in zip("xslr", (x, *tables), strict=True)]
    graph.outputs(TreeLeaves(DEPTH)(*ports))
    given = dict(zip("xslr", (x, *tables), strict=True))
    np.testing.assert_array_equal(st.Session("cpu").compile(graph).run(given)[0], want)


def test_rows_that_are_too_short_and_links_that_lead_out(rng: np.random.Generator) -> None:
    splits, links, roots = forest(rng, np.float32, lost=True)
    links = links.copy()
    links[rng.random(len(links)) < 0.1, 1] = len(links) + 5
    links[rng.random(len(links)) < 0.1, 1] = len(links) - 1
    roots[3] = len(links) + 9
    graph = st.Graph("kept")
    x = graph.input("x", (st.sym("n", 1, 64), st.sym("w", 1, 8)))
    graph.outputs(METHODS["tree_leaves"](x, splits, links, roots, depth=DEPTH))
    compiled = st.Session("cpu").compile(graph)
    for width in (WIDTH, 2, 8, 1):
        rows = rows_of(rng, 5, np.float32, width)
        np.testing.assert_array_equal(compiled.run(x=rows)[0], TreeLeaves(DEPTH).numpy(rows, splits, links, roots))


def test_parameters_that_are_set_again(rng: np.random.Generator) -> None:
    graph = st.Graph("set")
    first, second = (forest(np.random.default_rng(5), np.float32, lost=False) for _ in range(2))
    x = graph.input("x", (4, WIDTH))
    ports = [graph.param(name, a.shape, a.dtype) for name, a in zip("slr", first, strict=True)]
    graph.outputs(TreeLeaves(DEPTH)(x, *ports))
    compiled = st.Session("cpu").compile(graph)
    compiled.set_params(dict(zip("slr", first, strict=True)))
    rows = rows_of(rng, 4, np.float32)
    np.testing.assert_array_equal(compiled.run(x=rows)[0], TreeLeaves(DEPTH).numpy(rows, *first))
    compiled.set_param("s", second[0] + 0.5)
    np.testing.assert_array_equal(compiled.run(x=rows)[0], TreeLeaves(DEPTH).numpy(rows, second[0] + 0.5, *first[1:]))
