"""Quotient and remainder that are put together again keep the constant of what was divided."""

import numpy as np

from strata import ops
from strata.core import sym
from strata.kernel import Axis, linear, size
from strata.kernel.algebra import divide, remainder
from strata.mir import Graph, evaluate
from strata.runtime import Session


def test_constant_of_a_recombined_index_is_kept() -> None:
    batch, length = sym("B", 1), sym("S", 1, 64)
    g = Graph("rotated")
    x = g.input("x", (batch * length, 12))
    cos, sin = g.input("cos", (length, 2)), g.input("sin", (length, 2))
    g.input("rows", (batch, 1))  # only binds B
    y = ops.narrow(ops.reshape(x, (batch, length, 12)), -1, 4, 4)
    g.outputs(ops.rope(y, cos, sin, head_dim=4, n_rot=4, layout="bsd"))
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((10, 12)).astype(np.float32),
        "cos": rng.standard_normal((5, 2)).astype(np.float32),
        "sin": rng.standard_normal((5, 2)).astype(np.float32),
        "rows": np.zeros((2, 1), np.float32),
    }
    (got,) = Session("cpu").compile(g).run(feeds)
    (want,) = evaluate(g, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_heads_of_as_many_rows_as_a_symbol_are_divided_by_heads() -> None:
    rows = sym("n", 0)
    head, row = Axis("i0", 4), Axis("i1", rows)
    place = head * size(rows) + row
    assert str(divide(place, 2 * rows)) == str(divide(head, 2))
    left = remainder(place, 2 * rows)
    assert linear(left).terms == {row: 1, remainder(head, 2): rows}
