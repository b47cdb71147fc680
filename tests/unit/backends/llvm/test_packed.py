"""Packed weights: side by side when they are first set, and by themselves when they are set again."""

import itertools

import numpy as np

from strata.core import f32, f64
from strata.mir import Graph
from strata.runtime import Session

WIDTHS = (48, 130, 7, 300)


def _chain():
    g = Graph("chain")
    x = g.input("x", f32[5, WIDTHS[0]])
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        x = x @ g.param(f"w{i}", f32[a, b])
    g.outputs(x)
    return Session("cpu").compile(g)


def test_weights_are_side_by_side_and_may_be_set_again(rng: np.random.Generator) -> None:
    c = _chain()
    shapes = list(itertools.pairwise(WIDTHS))
    weights = [rng.standard_normal(s).astype("f") for s in shapes]
    x = rng.standard_normal((5, WIDTHS[0])).astype("f")

    def check() -> None:
        want = x.astype("f8")
        for w in weights:
            want = want @ w
        np.testing.assert_allclose(c.run(x=x)[0], want, rtol=1e-3, atol=1e-3)

    for i, w in enumerate(weights):
        c.set_param(f"w{i}", w)
    check()
    packed = list(c._executable._packed)  # type: ignore[attr-defined]
    assert len(packed) == 3
    places = sorted((w.memory.address, w.size) for w in packed)
    for (at, size), (following, _) in itertools.pairwise(places):
        assert at % 64 == 0
        assert size <= following - at < size + 64
    held = c.memory.packed
    for i in (1, 0, 2, 1):
        weights[i] = rng.standard_normal(shapes[i]).astype("f")
        c.set_param(f"w{i}", weights[i])
        check()
    assert c.memory.packed == held


def test_a_product_that_reads_its_factor_where_it_lies_does_not_pack_for_others(rng: np.random.Generator) -> None:
    """Both factors are 8×8 matrices of one layout, but only the weight is packed."""
    g = Graph("beside")
    x, w = g.input("x", f64[8, 8]), g.param("w", f64[8, 8])
    g.outputs((x.transpose((1, 0)) @ x) @ w)
    c = Session("cpu").compile(g)
    a, b = rng.standard_normal((2, 8, 8))
    c.set_param("w", b)
    np.testing.assert_allclose(c.run(x=a)[0], a.T @ a @ b, rtol=1e-12, atol=1e-12)
