"""The text of a plan reads back as the same plan, which runs."""

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends import backend_for
from strata.core import f32, sym
from strata.errors import ParseError
from strata.lir import parse_module, show, show_module, verify_plan
from strata.mir import Graph, evaluate
from strata.runtime import CompilePipeline


def programs():
    g = Graph("norm")
    yield g.outputs(ops.layer_norm(g.input("x", f32[3, 8]), g.param("g", f32[8]), g.param("b", f32[8])))
    g = Graph("odd names")
    x = g.input("input:0", f32[4, 4])
    yield g.outputs(x @ g.param("layer.0/w, b", f32[4, 4]) + g.constant(np.arange(4, dtype=np.float32)))
    g = Graph("steps")
    x = g.input("x", f32[16])
    yield g.outputs(ops.sort(ops.sin(ops.sort(x * 2.0))), x)
    g = Graph("attend")
    q, k, v = (g.input(n, (2, sym("S", 1, 64), 32)) for n in "qkv")
    yield g.outputs(ops.attention(q, k, v, num_heads=4, layout="bsd"))
    g = Graph("once")
    w = g.param("w", f32[8, 8])
    yield g.outputs(g.input("x", f32[2, 8]) @ ops.softmax(w))


PROGRAMS = list(programs())


@pytest.mark.parametrize("graph", PROGRAMS, ids=[g.name for g in PROGRAMS])
def test_round_trip(graph):
    lir = CompilePipeline("cpu").compile(graph).lir
    text = show_module(lir)
    assert str(lir) == text
    assert st.parse(str(lir)) == lir
    again = parse_module(text)
    verify_plan(again)
    assert show_module(again) == text
    assert show(again) == show(lir)
    assert (again.buffers, again.io) == (lir.buffers, lir.io)
    assert again == lir == st.parse(text)
    assert again != CompilePipeline("cpu").compile(PROGRAMS[PROGRAMS[0] is graph]).lir


def test_one_function_reads_the_texts_of_all_stages():
    module = st.hir.Module("blocks")
    module.outputs(module.linear(module.input("x", (2, 8)), module.param("w", (8, 4)), bias=None, act="gelu"))
    assert st.parse(str(module)) == module
    graph = module.lower()
    assert st.parse(f"# a note\n\n{graph}") == graph
    for kernel in CompilePipeline("cpu").compile(graph).lir.kernels.values():
        assert st.parse(str(kernel)) == kernel


@pytest.mark.parametrize("graph", PROGRAMS[:3], ids=[g.name for g in PROGRAMS[:3]])
def test_what_was_read_runs(graph, rng):
    again = parse_module(show_module(CompilePipeline("cpu").compile(graph).lir))
    executable = backend_for("cpu").compile(again)
    feeds = {x.node.op.key: rng.standard_normal(x.shape).astype("f4") for x in (*graph.inputs, *graph.params)}
    for name in graph.param_names:
        executable.set_param(name, feeds[name])
    outputs = [np.empty(x.shape, np.float32) for x in graph.results]
    executable.run([feeds[n] for n in graph.input_names], outputs, {}, 1)
    for got, want in zip(outputs, evaluate(graph, feeds, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_errors_name_the_line():
    text = show_module(CompilePipeline("cpu").compile(PROGRAMS[0]).lir)
    for old, new, message in (
        ("run k0", "walk k0", "expected a buffer, a step or return"),
        ("run k0", "run k7", "the text has no kernel k7"),
        ("buffer x :", "buffer x ", "expected `buffer name : type role`"),
        ("lir @norm", "lir norm", "expected `lir @name target cpu {`"),
        ("nodes ", "nodes 99 ", "the graph has no node 99"),
    ):
        with pytest.raises(ParseError, match="plan text, line") as error:
            parse_module(text.replace(old, new, 1))
        assert message in str(error.value)
    with pytest.raises(ParseError, match="one `lir`"):
        parse_module(text + "\nlir @twice target host {\n}\n")


def test_constants_are_numbered_as_they_come() -> None:
    """A number that is not its own would name another array, or none."""
    g = Graph("two")
    x = g.input("x", f32[3])
    tables = [g.constant(np.arange(3, dtype=np.float32) + i) for i in range(2)]
    text = show_module(CompilePipeline("cpu").compile(g.outputs(x * tables[0], *tables)).lir)
    assert "constant 0 node" in text
    assert "constant 1 node" in text
    for old, new in (("constant 0 node", "constant 65536 node"), ("constant 1 node", "constant 0 node")):
        with pytest.raises(ParseError, match=r"constant \d+ comes where constant \d is expected"):
            parse_module(text.replace(old, new))


def test_names_that_no_file_can_hold_are_refused() -> None:
    """Half of a surrogate pair has no bytes: neither keys nor files could be made of it."""
    lone = "\ud800"
    for make in (lambda: Graph(lone), lambda: Graph("g").input(lone, f32[2]), lambda: Graph("g").param(lone, f32[2])):
        with pytest.raises(st.errors.OptionError, match="is not a name"):
            make()
    g = Graph("g")
    text = show_module(CompilePipeline("cpu").compile(g.outputs(ops.sin(g.input("odd name", f32[2])))).lir)
    with pytest.raises(ParseError):
        parse_module(text.replace("odd name", "\\ud800"))
    with pytest.raises(ParseError, match=r"line \d+: '\\ud800' is half of a character"):
        st.parse(text.replace("# sin", f"# {lone}"))
