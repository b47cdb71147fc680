"""The order of nodes is that of a plain walk, inputs first; addresses are the sums that they stand for."""

from __future__ import annotations

import numpy as np

from strata import ops
from strata.core import i64, sym
from strata.kernel import Axis, Const, Expr, postorder
from strata.kernel.algebra import strided
from strata.kernel.ir import apply, size
from strata.mir import Graph, Node, Value, toposort
from tests.unit.kernel import samples


def walked(roots, inputs):
    done: dict[object, None] = {}

    def visit(node) -> None:
        if node not in done:
            for x in inputs(node):
                visit(x)
            done[node] = None

    for root in roots:
        visit(root)
    return list(done)


def test_expressions() -> None:
    n = sym("n")
    for sample in (samples.softmax(n, 9), samples.layernorm(n, 768), samples.pad(n, 5, 2, 3), samples.gather(n, 4, 8)):
        roots = sample.kernel.roots
        assert postorder(roots) == walked(roots, lambda e: e.inputs)
        assert postorder([*roots, *roots]) == postorder(roots)
    assert postorder([]) == []


def test_nodes() -> None:
    rng = np.random.default_rng(0)
    g = Graph("g")
    values: list[Value] = [g.input("x", (4, 4)), g.param("w", (4, 4))]
    for _ in range(60):
        a, b = (values[int(i)] for i in rng.integers(len(values), size=2))
        values.append([ops.add, ops.matmul, ops.maximum][int(rng.integers(3))](a, b))
    g.outputs(values[-1], values[5], values[-3])

    def below(node: Node) -> list[Node]:
        return [x.node for x in node.inputs]

    expected = walked([x.node for x in g.results], below)
    assert toposort(g.results) == expected
    assert g.nodes() == expected
    g.nodes().clear()  # a list of the caller's own
    assert g.nodes() == expected
    stopped = toposort(g.results, [values[20]])
    assert values[20].node not in stopped
    assert set(stopped) <= set(expected)


def test_addresses() -> None:
    n = sym("n")
    i, j, k = Axis("i", n), Axis("j", 6), Axis("k", n * 6)
    cases: list[tuple[list[Expr], list]] = [
        ([i, j], [6, 1]),
        ([apply("floordiv", k, Const(6, i64)), apply("mod", k, Const(6, i64))], [6, 1]),
        ([j, apply("add", i, Const(2, i64)), apply("mul", j, Const(3, i64))], [n * n, n, 1]),
        ([apply("floordiv", k, Const(4, i64)), j, i], [n, 0, -1]),
        ([], []),
    ]
    for index, strides in cases:
        total: Expr = Const(0, i64)
        for e, stride in zip(index, strides, strict=True):
            total = total + e * size(stride)
        assert strided(index, strides) is total
