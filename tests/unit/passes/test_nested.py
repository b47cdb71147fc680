"""Bodies of loops and branches go through the passes of the program that they are in."""

from typing import Any

import numpy as np
import pytest

from strata import CompileOptions, Session
from strata.core import bf16, f32
from strata.mir import METHODS, Graph, Nested, Node, parse
from strata.ops import cond, scan, while_loop
from strata.passes import PassContext, parse_passes, run_passes
from strata.runtime.compile.pipeline import CompilePipeline


def _program(kind: str) -> Graph:
    g = Graph(kind)
    x, w = g.input("x", f32[4, 4]), g.param("w", f32[4, 4])
    product = METHODS["matmul"]
    if kind == "scan":
        return g.outputs(scan(lambda c, _: (product(c, w), None), x, None, length=3)[0])
    if kind == "while":
        first = (x, METHODS["sum"](x) * 0.0)
        return g.outputs(while_loop(lambda s: s[1] < 3.0, lambda s: (product(s[0], w), s[1] + 1.0), first)[0])
    return g.outputs(cond(METHODS["sum"](x) > 0.0, lambda: product(x, w), lambda: product(w, x)))


def _inner(graph: Graph) -> list[Node]:
    return [n for node in graph.nodes() for nested in node.op.nested() for n in nested.graph.nodes()]


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
def test_the_precision_of_a_compile_reaches_bodies(kind: str) -> None:
    graph = _program(kind)
    optimized = CompilePipeline("cpu", CompileOptions(precision="mixed_bf16")).compile(graph).lir.graph
    products = [n for n in _inner(optimized) if n.op.name in ("matmul", "dot_general")]
    assert products
    assert all(n.types[0].dtype is bf16 for n in products)
    rng = np.random.default_rng(0)
    x, w = rng.random((4, 4), np.float32), rng.random((4, 4), np.float32)
    results = {}
    for precision in (None, "mixed_bf16"):
        compiled = Session("cpu").compile(graph, CompileOptions(precision=precision))
        assert not compiled.host_steps
        compiled.set_param("w", w)
        (results[precision],) = compiled.run(x=x)
    apart = np.abs(results[None] - results["mixed_bf16"]) / np.abs(results[None])
    assert 1e-4 < apart.max() < 3e-2


def test_skipped_passes_are_skipped_inside() -> None:
    g = Graph("g")
    x = g.input("x", f32[4])
    g.outputs(scan(lambda c, _: (METHODS["softmax"](c), None), x, None, length=3)[0])
    for skipped in ((), ("decompose",)):
        made = run_passes(
            CompilePipeline("cpu", CompileOptions(skip_passes=skipped)).passes, g, PassContext(takes=_none)
        )[0]
        assert ("softmax" in {n.op.name for n in _inner(made)}) == bool(skipped)


def _none(op: Any, types: Any = ()) -> bool:
    return False


def test_what_stays_the_same_is_a_parameter_while_passes_run() -> None:
    body = parse("mir @body(c: f32[2], k: f32[2], x: f32[2]) -> f32[2] {\n  %0 = add(k, x) : f32[2]\n  return %0\n}")
    nested = Nested(body, range(1, 2))
    opened = nested.opened()
    assert (opened.input_names, opened.param_names) == (("c", "x"), ("k",))
    assert nested.closed(opened) == body


def test_a_pass_that_changes_the_signature_stays_outside() -> None:
    def body(c: Any, _: Any) -> Any:
        return c * 2.0, c

    g = Graph("g")
    x = g.input("x", f32[3])
    unused = g.input("unused", f32[3])
    g.outputs(scan(body, x, unused)[0])
    made, records = run_passes(parse_passes("drop_unused, decompose"), g, PassContext())
    assert made.input_names == g.input_names
    assert records[-1].name == "all in scan"
