"""Programs with open sizes: the numbers are those that substitution gives, and steps without points do nothing."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.runtime.symbolic_program import Numbers
from strata.core import dim_max, dim_min, floordiv, mod, substitute, sym
from strata.mir import Graph, evaluate
from strata.runtime import Session

B, S = sym("B", 0, 64), sym("len.of", 0, 64)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (3, 17), (64, 64)])
def test_numbers_are_what_substitution_gives(sizes) -> None:
    dims = [
        7,
        B,
        B * S,
        B * B - S * 3 + 1,
        floordiv(B + 63, 64) * S,
        mod(B * S, 5),
        dim_min(B, S + 2),
        dim_max(B * 2, 9),
        -B,
    ]
    binding = {"B": sizes[0], "len.of": sizes[1]}
    numbers = Numbers()
    places = [numbers.add(d) for d in (*dims, *dims)]
    assert places[: len(dims)] == places[len(dims) :]
    assert numbers.values(binding).tolist() == [substitute(d, binding) for d in dims]


def test_no_numbers_at_all() -> None:
    assert Numbers().values({}).tolist() == []


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_products_packed_at_run_time_and_updates(rows: int, rng) -> None:
    g = Graph("g")
    x, y, at = g.input("x", (B, 8)), g.input("y", (8, B)), g.input("at", (), "i64")
    z = ops.dynamic_update_slice(x * 2.0, g.input("new", (0, 8)), (at, g.constant(0, "i64")))
    g.outputs(x @ y, ops.softmax(x, axis=-1), z + 1.0, x.sum(axis=0))
    feeds = {
        "x": rng.standard_normal((rows, 8)).astype(np.float32),
        "y": rng.standard_normal((8, rows)).astype(np.float32),
        "at": np.int64(0),
        "new": np.zeros((0, 8), np.float32),
    }
    for out, wanted in zip(Session("cpu").compile(g).run(feeds), evaluate(g, feeds), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
