"""Golden cases of StableHLO text: one file a case, the whole text compared; and what the text says is computed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.io import stablehlo
from strata.mir import evaluate, leaf_name, parse
from strata.testing import find_cases, read_case

CASES = find_cases(Path(__file__).parent / "stablehlo", "*.txt")


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_becomes(path: Path, golden) -> None:
    golden(path, lambda case: stablehlo.export(parse(case.program)).rstrip("\n"))


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_computes_the_same(path: Path, rng: np.random.Generator, tmp_path: Path) -> None:
    from strata.backends.stablehlo.adapter import client

    graph = parse(read_case(path).program)
    feeds = {}
    for x in (*graph.inputs, *graph.params):
        shape = x.type.static_shape
        values = rng.integers(0, 5, shape) if not x.dtype.is_float else rng.standard_normal(shape)
        feeds[leaf_name(x)] = np.asarray(values).astype(x.dtype.np)
    text = stablehlo.export(graph, tmp_path / "module.mlir")
    assert (tmp_path / "module.mlir").read_text("utf-8") == text
    loaded = client().place(0).load(text, graph.name)
    results = client().run(loaded, [client().place(0).put(a) for a in feeds.values()])
    for got, want in zip(results, evaluate(graph, feeds), strict=True):
        np.testing.assert_allclose(client().take(got).astype(np.float64), want.astype(np.float64), rtol=2e-3, atol=2e-5)
