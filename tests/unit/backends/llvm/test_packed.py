"""Packed weights: side by side when they are first set, and by themselves when they are set again."""

import itertools

import numpy as np

from strata.core import f32
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
