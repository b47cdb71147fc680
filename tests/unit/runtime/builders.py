"""Programs for tests of caches."""

from __future__ import annotations

from strata import ops
from strata.core import sym
from strata.mir import Graph


class Counting:
    """A builder that counts how often it is called."""

    def __init__(self, build) -> None:
        self.build, self.calls = build, []

    def __call__(self, *args):
        self.calls.append(args)
        return self.build(*args)


def symbolic() -> Graph:
    g = Graph("template")
    x, w = g.input("x", (sym("batch", 1, 8), sym("seq", 1, 64), 4)), g.param("w", (4, 4))
    return g.outputs(x @ w)


def relu_graph(n: int = 4) -> Graph:
    g = Graph("relu")
    return g.outputs(ops.relu(g.input("x", (n,))))
