"""Building modules: ops as methods, graph values taken over, wrapping graphs, reflection, text."""

import numpy as np
import pytest

from strata import hir
from strata.core import f32, sym
from strata.errors import LowerError, ParseError
from strata.hir import HirModule, reflect, wrap_mir_graph
from strata.mir import Graph, evaluate
from strata.ops.elementwise.math import Exp

TEXT = """\
hir @ffn(x: f32[S, 8], param w: f32[8, 6], param "h0": f32[6]) -> f32[S, 6], f32[S, 3] fusion fusable where S in 1..64 {
  h0 = linear(x, w, "h0") {act = "gelu"} : f32[S, 6] as "layer0.up"
  h1 = mir.exp(h0) : f32[S, 6]
  h2 = mir.constant() {data = dense(f32[], [2.0])} : f32[]
  h3 = mir.multiply(h1, h2) : f32[S, 6]
  h4 = shared_linear_pair(h3, w2, w2) : f32[S, 3], f32[S, 3]
  return h3, h4.1
}"""


def example() -> HirModule:
    m = HirModule("ffn", fusion="fusable")
    x, w, b = m.input("x", (sym("S", 1, 64), 8)), m.param("w", (8, 6)), m.param("h0", (6,))
    w2 = m.param("w2", (6, 3))
    with m.scope("layer0"):
        h = m.named("up", lambda m: m.linear(x, w, b, act="gelu"))
    h = h.exp() * 2.0
    return m.outputs(h, m.shared_linear_pair(h, w2, w2)[1])


def test_text() -> None:
    expected = TEXT.replace('"h0": f32[6])', '"h0": f32[6], param w2: f32[6, 3])')
    assert str(example()) == expected


def test_text_reads_back() -> None:
    m = example()
    again = hir.parse(str(m))
    assert again == m
    assert again.fusion == "fusable"
    assert str(again.lower()) == str(m.lower())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mir.exp(h0)", "mir.exp(h7)"), "line 3: h7 is not defined before it is used"),
        (("linear(x", "linaer(x"), "line 2: no block is named 'linaer'; did you mean 'linear'?"),
        (("mir.exp(h0) : f32[S, 6]", "mir.exp(h0) : f32[S, 7]"), "line 3: h1: text says"),
        (("h1 = mir.exp", "h9 = mir.exp"), "line 3: expected h1, found 'h9': nodes are numbered in order"),
        (("{act", "{acts"), "line 2: linear: "),
        (("linear(x, w,", "linear(x,"), "line 2: linear: matmul"),
    ],
)
def test_wrong_text_names_the_line(change: tuple[str, str], message: str) -> None:
    text = str(example()).replace(*change)
    with pytest.raises(ParseError) as caught:
        hir.parse(text)
    assert message in str(caught.value)


def test_every_op_is_a_method_of_modules_and_values(rng) -> None:
    m = HirModule("ops")
    x, y = m.input("x", (2, 3)), m.input("y", (3, 2))
    a = (x + y.T) / 2 - x * 3.0
    b = -abs(a) @ y
    c = m.sm(m.mm(b, b))
    d = m.concat([c, b], axis=0).sum(axis=-1)
    e = m.gelu_approx(m.reshape_(d, (2, 2)))
    m.outputs(e, 1.0 / (a * a + 1.0), m.split(x, 3, axis=1)[1], m.add(x, 1.0), x[0])
    arrays = {"x": rng.standard_normal((2, 3)).astype(np.float32), "y": rng.standard_normal((3, 2)).astype(np.float32)}
    results = evaluate(m.lower(), arrays)
    xs, ys = arrays["x"], arrays["y"]
    first = (xs + ys.T) / 2 - xs * 3
    np.testing.assert_allclose(results[1], 1 / (first * first + 1), rtol=1e-5)
    np.testing.assert_allclose(results[2], xs[:, 1:2])
    np.testing.assert_allclose(results[3], xs + 1)
    np.testing.assert_allclose(results[4], xs[0])
    assert results[0].shape == (2, 2)
    assert all(node.block.name in ("input", "mir") for node in m.nodes)
    assert hir.parse(str(m)) == m


def test_graph_values_are_taken_over_with_their_leaves(rng) -> None:
    g = Graph("hello")
    x, w = g.input("x", (1, 4), "f32"), g.param("w", (4, 2), "f32")
    m = HirModule("ffn", fusion="direct")
    h = m.linear(x.exp(), w, bias=None, act="gelu")
    m.outputs(h, m.linear(x, w))
    assert [v.text for v in m.inputs] == ["x"]
    assert [v.text for v in m.params] == ["w"]
    assert [n.block.name for n in m.nodes] == ["input", "mir", "param", "linear", "linear"]
    arrays = {"x": rng.standard_normal((1, 4)).astype(np.float32), "w": rng.standard_normal((4, 2)).astype(np.float32)}
    assert evaluate(m.lower(), arrays)[1].tolist() == (arrays["x"] @ arrays["w"]).tolist()


def test_mir_applies_one_op_verbatim() -> None:
    m = HirModule("v")
    y = m.mir(Exp(), m.input("x", (3,)))
    assert y.type == f32[3]
    assert y.label == "exp"
    assert [n.op.name for n in m.outputs(y).lower().nodes()] == ["input", "exp"]


def test_a_wrapped_graph_lowers_to_itself() -> None:
    graph = example().lower()
    wrapped = wrap_mir_graph(graph)
    assert str(wrapped.lower()) == str(graph)
    assert wrapped.nodes[-1].block.name == "mir"
    labels = [n.label for n in wrapped.nodes if n.block.name == "mir"]
    assert labels.count("layer0.up") == 3


def test_reflection() -> None:
    found = reflect(example())
    assert found.name == "ffn"
    assert found.policy == "fusable"
    assert found.node_count == 9
    assert found.inputs == ("x",)
    assert found.params == ("w", "h0", "w2")
    assert found.outputs == ("multiply", "shared_linear_pair[1]")
    assert found.labels == ("layer0.up", "exp", "constant", "multiply", "shared_linear_pair")
    assert found.blocks == {"linear": 1, "mir": 3, "shared_linear_pair": 1}


def test_labels_of_another_module_do_not_leak_through_shared_constants() -> None:
    first = HirModule("a")
    kept = first.outputs(first.named("mine", lambda m: m.input("x", (2,)) * 7.5)).lower()
    second = HirModule("b")
    second.outputs(second.input("x", (2,)) * 7.5)
    assert [n.label for n in second.nodes] == ["x", "constant", "multiply"]
    assert kept.results


def test_define_takes_the_returned_outputs() -> None:
    m = HirModule.define("d", lambda m: m.linear(m.input("x", (2, 3)), m.param("w", (3, 4)), act="relu"))
    assert m.results[0].type == f32[2, 4]


def test_a_value_has_no_truth_value() -> None:
    m = HirModule("t")
    with pytest.raises(LowerError, match="has no truth value"):
        bool(m.input("x", (1,)))
