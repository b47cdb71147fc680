"""Active extents: the first places along a named axis are processed, the rest stays; graphs that mix run in full."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import sym
from strata.errors import OptionError, UnknownNameError
from strata.hir import HirModule
from strata.mir import Graph
from strata.runtime import CompiledGraph, CompileOptions, Session, row_obstacles


def graph(build, shape, count: int = 1) -> Graph:
    g = Graph("g")
    values = [g.input(f"x{i}", shape) for i in range(count)]
    made = build(*values)
    return g.outputs(*(made if isinstance(made, tuple) else (made,)))


def fixed(g: Graph, **sizes: int) -> CompiledGraph:
    return Session("cpu").compile(g, CompileOptions(dim_binding=sizes))


S = sym("seq", 1, 15)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_tail_of_an_activation_stays(is_fixed: bool) -> None:  # behaviour 97
    g = graph(ops.relu, (S,))
    c = fixed(g, seq=15) if is_fixed else Session("cpu").compile(g)
    out = [np.empty(15, np.float32)]
    c.run_into({"x0": np.ones(15, np.float32)}, out)
    assert c.set_active_extent("seq", 5)
    negative = -np.ones(15, np.float32)
    c.run_into({"x0": negative}, out)
    np.testing.assert_array_equal(out[0], [0] * 5 + [1] * 10)
    c.set_active_extent("seq", None)
    c.run_into({"x0": negative}, out)
    np.testing.assert_array_equal(out[0], 0)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_run_keeps_what_the_last_run_gave(is_fixed: bool) -> None:
    g = graph(ops.relu, (S,))
    c = fixed(g, seq=15) if is_fixed else Session("cpu").compile(g)
    c.run(x0=np.ones(15, np.float32))
    c.set_active_extent("seq", 5)
    np.testing.assert_array_equal(c.run(x0=-np.ones(15, np.float32))[0], [0] * 5 + [1] * 10)
    c.set_active_extent("seq", 15)
    c.run(x0=np.ones(15, np.float32))
    c.set_active_extent("seq", 5)
    np.testing.assert_array_equal(c.run(x0=-np.ones(15, np.float32))[0], [0] * 5 + [1] * 10)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("runs", [1, 4])  # later ones take the short way into the program
def test_the_tail_is_of_the_last_run_however_it_was_run(is_fixed: bool, runs: int) -> None:
    g = graph(lambda x: x * 2.0, (S,))
    c = fixed(g, seq=15) if is_fixed else Session("cpu").compile(g)
    for i in range(runs):
        c.run(x0=np.full(15, i, np.float32))
    c.set_active_extent("seq", 4)
    (made,) = c.run(x0=np.full(15, 50, np.float32))
    np.testing.assert_array_equal(made, [100] * 4 + [2 * (runs - 1)] * 11)
    made[:] = -1  # a result is the caller's, and no part of what is kept
    c.set_active_extent("seq", 2)
    np.testing.assert_array_equal(
        c.run(x0=np.full(15, 60, np.float32))[0], [120] * 2 + [100] * 2 + [2 * (runs - 1)] * 11
    )


def test_a_result_that_is_changed_before_an_extent_is_used_is_not_seen() -> None:
    c = Session("cpu").compile(graph(ops.relu, (S,)))
    c.set_active_extent("seq", 15)
    (made,) = c.run(x0=np.ones(15, np.float32))
    made[:] = 7
    c.set_active_extent("seq", 3)
    np.testing.assert_array_equal(c.run(x0=np.zeros(15, np.float32))[0], [0] * 3 + [1] * 12)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_an_extent_of_zero_leaves_what_does_not_lie_along_the_axis(is_fixed: bool) -> None:
    b = sym("batch", 1, 4)
    g = Graph("g")
    x, y, z = g.input("x", (S,)), g.input("y", (3,)), g.input("z", (b, 2))
    g.outputs(x + 1.0, y * 2.0, z * 3.0)
    c = fixed(g, seq=15, batch=4) if is_fixed else Session("cpu").compile(g)
    feeds = {"x": np.ones(15, np.float32), "y": np.ones(3, np.float32), "z": np.ones((4, 2), np.float32)}
    c.run(feeds)
    assert c.set_active_extent("seq", 0)
    more = {name: 10 * a for name, a in feeds.items()}
    for given, expected in zip(c.run(more), (2, 20, 30), strict=True):
        np.testing.assert_array_equal(given, expected)
    out = [np.full(15, -1, np.float32), np.zeros(3, np.float32), np.full((4, 2), -1, np.float32)]
    assert c.set_active_extent("batch", 1)
    c.run_into(more, out)
    np.testing.assert_array_equal(out[0], -1)
    np.testing.assert_array_equal(out[1], 20)
    np.testing.assert_array_equal(out[2], [[30, 30]] + [[-1, -1]] * 3)
    c.set_active_extent("batch", 0)
    np.testing.assert_array_equal(c.run(more)[1], 20)


def test_an_extent_below_the_smallest_size() -> None:
    c = Session("cpu").compile(graph(lambda x: x + 1.0, (sym("n", 4, 8), 2)))
    out = [np.full((6, 2), -1, np.float32)]
    c.set_active_extent("n", 2)
    c.run_into({"x0": np.zeros((6, 2), np.float32)}, out)
    np.testing.assert_array_equal(out[0], [[1, 1]] * 2 + [[-1, -1]] * 4)


def test_sizes_of_options_are_not_the_callers() -> None:
    sizes = {"seq": 15}
    c = Session("cpu").compile(graph(ops.relu, (S,)), CompileOptions(dim_binding=sizes))
    sizes["seq"] = 3
    assert c.options.dim_binding == {"seq": 15}
    assert c.set_active_extent("seq", 5)


def test_a_parameter_along_the_axis_makes_the_run_full() -> None:
    g = Graph("g")
    x, w = g.input("x", (2, S)), g.param("w", (2, S))
    c = Session("cpu").compile(g.outputs(x * w))
    w_value = np.arange(8, dtype=np.float32).reshape(2, 4)
    c.set_param("w", w_value)
    assert not c.set_active_extent("seq", 2)
    assert "parameter w" in c.explain_extent("seq")[0]
    np.testing.assert_array_equal(c.run(x=np.ones((2, 4), np.float32))[0], w_value)


def test_state_that_is_fed_keeps_its_tail() -> None:
    g = Graph("g")
    x, s = g.input("x", (S,)), g.input("s", (S,))
    for c in (Session("cpu").compile(g.outputs(x + s)), fixed(g, seq=15)):
        c.bind("s", np.zeros(15, np.float32))
        c.feed("s", 0)
        c.run(x=np.ones(15, np.float32))
        c.set_active_extent("seq", 5)
        np.testing.assert_array_equal(c.run(x=np.ones(15, np.float32))[0], [2] * 5 + [1] * 10)
        np.testing.assert_array_equal(c.read("s"), [2] * 5 + [1] * 10)


def test_blocks_with_fixed_sizes_have_extents() -> None:
    m = HirModule("m")
    x = m.input("x", (sym("rows", 1, 8), 4))
    m.outputs(m.linear(x, m.param("w", (4, 4))))
    c = Session("cpu").compile(m, CompileOptions(dim_binding={"rows": 8}))
    c.set_param("w", np.eye(4, dtype=np.float32))
    assert c.set_active_extent("rows", 2)
    assert c.run(x=np.ones((8, 4), np.float32))[0].sum() == 8


def test_tail_of_an_addition_stays() -> None:
    c = Session("cpu").compile(graph(lambda a, b: a + b, (S, 3), 2))
    out = [np.empty((15, 3), np.float32)]
    one = np.ones((15, 3), np.float32)
    c.run_into({"x0": one, "x1": one}, out)
    c.set_active_extent("seq", 4)
    c.run_into({"x0": -one, "x1": -one}, out)
    np.testing.assert_array_equal(out[0][:4], -2)
    np.testing.assert_array_equal(out[0][4:], 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_limits_queries_and_keys(batch: int, rng) -> None:
    s = sym("seq", 1, 4)
    c = Session("cpu").compile(
        graph(lambda q, k, v: ops.attention(q, k, v, num_heads=2, layout="bsd"), (batch, s, 8), 3)
    )
    feeds = {f"x{i}": rng.standard_normal((batch, 4, 8)).astype(np.float32) for i in range(3)}
    out = [np.full((batch, 4, 8), 7, np.float32)]
    assert c.set_active_extent("seq", 2), c.explain_extent("seq")
    c.run_into(feeds, out)
    np.testing.assert_array_equal(out[0][:, 2:], 7)
    c.set_active_extent("seq", None)
    (short,) = c.run({n: np.ascontiguousarray(a[:, :2]) for n, a in feeds.items()})
    np.testing.assert_array_equal(out[0][:, :2], short)


def test_axis_is_named_not_the_first() -> None:
    b, s = sym("batch", 1, 4), sym("seq", 1, 6)
    c = Session("cpu").compile(graph(lambda x: ops.softmax(x * 2.0, axis=-1), (b, s, 5)))
    x = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
    (whole,) = c.run(x0=x)
    for axis, actual, cut in (("seq", 2, np.s_[:, :2]), ("batch", 3, np.s_[:3])):
        out = [np.full((4, 6, 5), -1, np.float32)]
        assert c.set_active_extent(axis, actual)
        c.run_into({"x0": x}, out)
        expected = np.full((4, 6, 5), -1, np.float32)
        expected[cut] = whole[cut]
        np.testing.assert_array_equal(out[0], expected)
        c.set_active_extent(axis, None)


def test_two_axes_at_once() -> None:
    b, s = sym("batch", 1, 4), sym("seq", 1, 6)
    c = Session("cpu").compile(graph(ops.relu, (b, s)))
    c.set_active_extent("batch", 2)
    c.set_active_extent("seq", 3)
    out = [np.zeros((4, 6), np.float32)]
    c.run_into({"x0": np.ones((4, 6), np.float32)}, out)
    assert out[0].sum() == 6
    assert out[0][:2, :3].sum() == 6


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda x: ops.softmax(x, axis=0), "runs over seq"),
        (lambda x: x.sum(axis=0), "runs over seq"),
        (lambda x: x - x.mean(axis=0), "seq"),
        (lambda x: ops.cumsum(x, axis=0), "along seq"),
        (lambda x: ops.flip(x, axis=0), "other places along seq"),
        (lambda x: x @ x.T, "seq twice"),
        (lambda x: ops.concat([x, x], axis=0), "made from seq"),
        (lambda x: ops.sort(x, axis=0), "seq"),
    ],
)
def test_graphs_that_mix_places_run_in_full(build, reason: str) -> None:
    c = Session("cpu").compile(graph(build, (S, 3)))
    x = np.arange(45, dtype=np.float32).reshape(15, 3)
    (whole,) = c.run(x0=x)
    assert not c.set_active_extent("seq", 5)
    assert any(reason in r for r in c.explain_extent("seq")), c.explain_extent("seq")
    out = [np.empty_like(whole)]
    c.run_into({"x0": x}, out)
    np.testing.assert_array_equal(out[0], whole)
    np.testing.assert_array_equal(c.run(x0=x)[0], whole)


def test_one_bad_output_makes_the_whole_run_full() -> None:
    c = Session("cpu").compile(graph(lambda x: (ops.relu(x), x.sum(axis=0)), (S,)))
    assert not c.set_active_extent("seq", 5)
    out = [np.empty(15, np.float32), np.empty((), np.float32)]
    c.run_into({"x0": np.ones(15, np.float32)}, out)
    np.testing.assert_array_equal(out[0], 1)
    assert float(out[1]) == 15


def test_rows_of_a_whole_network_are_independent(rng) -> None:
    g = Graph("mlp")
    x, w, b = g.input("x", (sym("rows", 1, 32), 8)), g.param("w", (8, 8)), g.param("b", (8,))
    h = ops.layer_norm(ops.gelu(x @ w + b), b, b)
    c = Session("cpu").compile(g.outputs(ops.softmax(h @ w, axis=-1)))
    assert row_obstacles(c.lir, "rows") == []
    c.set_params({"w": rng.standard_normal((8, 8)).astype(np.float32), "b": np.ones(8, np.float32)})
    data = rng.standard_normal((32, 8)).astype(np.float32)
    (whole,) = c.run(x=data)
    c.set_active_extent("rows", 9)
    out = [np.zeros((32, 8), np.float32)]
    c.run_into({"x": data}, out)
    np.testing.assert_array_equal(out[0][:9], whole[:9])
    assert not out[0][9:].any()


def test_fixed_graphs_keep_their_parameters_in_the_open_one(rng) -> None:
    g = Graph("g")
    x, w = g.input("x", (sym("rows", 1, 8), 4)), g.param("w", (4, 4))
    c = fixed(g.outputs(x @ w), rows=8)
    c.set_param("w", np.eye(4, dtype=np.float32))
    c.set_active_extent("rows", 2)
    out = [np.zeros((8, 4), np.float32)]
    c.run_into({"x": np.ones((8, 4), np.float32)}, out)
    assert out[0].sum() == 8
    c.set_param("w", 2 * np.eye(4, dtype=np.float32))
    c.run_into({"x": np.ones((8, 4), np.float32)}, out)
    assert out[0].sum() == 16


def test_mistakes() -> None:
    c = Session("cpu").compile(graph(ops.relu, (S,)))
    with pytest.raises(UnknownNameError, match="no symbolic size 'sequence'"):
        c.set_active_extent("sequence", 3)
    with pytest.raises(OptionError, match="from 0 to 15, got 16"):
        c.set_active_extent("seq", 16)
    with pytest.raises(OptionError):
        c.set_active_extent("seq", -1)
    c.set_active_extent("seq", 10)
    with pytest.raises(OptionError, match="the arrays have 4"):
        c.run(x0=np.ones(4, np.float32))
    c.set_active_extent("seq", 0)
    out = [np.full(15, 3, np.float32)]
    c.run_into({"x0": np.ones(15, np.float32)}, out)
    np.testing.assert_array_equal(out[0], 3)


# plain sizes


def plain(build, *shapes) -> st.CompiledGraph:
    g = Graph("plain")
    return Session("cpu").compile(g.outputs(build(*(g.input(f"x{i}", shape) for i, shape in enumerate(shapes)))))


def test_a_graph_of_plain_sizes_keeps_what_lies_behind() -> None:  # behaviour 97
    compiled = plain(ops.relu, (15,))
    for _ in range(3):  # the last of them by the short way
        compiled.run(x0=np.ones(15, np.float32))
    assert compiled.set_active_extent((5, 15))
    (out,) = compiled.run(x0=-np.ones(15, np.float32))
    np.testing.assert_array_equal(out, np.r_[np.zeros(5), np.ones(10)].astype(np.float32))
    out[...] = 7  # the caller's own
    (again,) = compiled.run(x0=-np.ones(15, np.float32))
    np.testing.assert_array_equal(again[5:], 1)
    assert compiled.set_active_extent(None)
    np.testing.assert_array_equal(compiled.run(x0=-np.ones(15, np.float32))[0], np.zeros(15, np.float32))


def test_binary_and_attention_of_plain_sizes() -> None:
    added = plain(lambda a, b: a + b, (15,), (15,))
    ones = np.ones(15, np.float32)
    added.run(x0=ones, x1=ones)
    assert added.set_active_extent((5, 15))
    np.testing.assert_array_equal(added.run(x0=-ones, x1=-ones)[0], np.r_[-2 * ones[:5], 2 * ones[:10]])

    attend = plain(ops.scaled_dot_product_attention, (4, 8), (4, 8), (4, 8))
    first = attend.run(x0=np.ones((4, 8), np.float32), x1=np.ones((4, 8), np.float32), x2=np.ones((4, 8), np.float32))
    assert attend.set_active_extent((2, 4))
    v = np.arange(32, dtype=np.float32).reshape(4, 8)
    (out,) = attend.run(x0=np.ones((4, 8), np.float32), x1=np.ones((4, 8), np.float32), x2=v)
    np.testing.assert_array_equal(out[2:], first[0][2:])
    np.testing.assert_allclose(out[:2], np.broadcast_to(v[:2].mean(axis=0), (2, 8)), rtol=1e-6)


def test_graphs_of_plain_sizes_that_mix_rows_run_in_full() -> None:
    compiled = plain(lambda x: x - ops.mean(x, axis=0), (6, 2))
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert not compiled.set_active_extent((2, 6))
    np.testing.assert_allclose(compiled.run(x0=x)[0], x - x.mean(axis=0))


def test_extents_of_plain_sizes_that_are_wrong() -> None:
    compiled = plain(ops.relu, (15,))
    for bad, match in (((5, 14), "no input of 'plain' has 14 places"), ((16, 15), "from 0 to 15, got 16")):
        with pytest.raises(OptionError, match=match):
            compiled.set_active_extent(bad)
