"""Quantisation passes: codes where a calibration says so, and no second rounding to a grid that values lie on."""

import numpy as np
import pytest

from strata import ops
from strata.core import f32
from strata.errors import ShapeError
from strata.mir import Graph, evaluate
from strata.passes import CalibrationEntry, MergeFakeQuantize, PassContext, insert_q_dq, run_passes


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes()]


def merged(graph: Graph, exact: bool = False) -> Graph:
    return run_passes([MergeFakeQuantize()], graph, PassContext(exact=exact))[0]


def test_a_tapped_value_is_quantised_for_all_its_readers(rng) -> None:
    g = Graph("g")
    x, w = g.input("x", f32[3, 4]), g.param("w", f32[4, 5])
    h = ops.tanh(x)
    graph = g.outputs(h @ w, h)
    made = insert_q_dq(graph, {h: CalibrationEntry.per_tensor(0.1)})
    assert names(made).count("quantize") == names(made).count("dequantize") == 1
    feeds = {"x": rng.standard_normal((3, 4)).astype("f4"), "w": rng.standard_normal((4, 5)).astype("f4")}
    product, kept = evaluate(made, feeds)
    snapped = np.clip(np.round(np.tanh(feeds["x"]) / np.float32(0.1)), -128, 127) * np.float32(0.1)
    np.testing.assert_allclose(kept, snapped, rtol=1e-6)
    np.testing.assert_allclose(product, snapped @ feeds["w"], rtol=1e-5, atol=1e-6)


def test_leaves_and_channels(rng) -> None:
    g = Graph("g")
    x, w = g.input("x", f32[3, 4]), g.param("w", f32[4, 2])
    scales = (0.05, 0.5)
    made = insert_q_dq(
        g.outputs(x @ w), {w: CalibrationEntry.per_channel(1, scales), x: CalibrationEntry.per_tensor(0.1, 3)}
    )
    assert names(made).count("quantize") == 2
    assert made.input_names == ("x",)
    assert made.param_names == ("w",)
    feeds = {"x": rng.standard_normal((3, 4)).astype("f4"), "w": rng.standard_normal((4, 2)).astype("f4")}
    qx = (np.clip(np.round(feeds["x"] / np.float32(0.1)) + 3, -128, 127) - 3) * np.float32(0.1)
    qw = np.clip(np.round(feeds["w"] / np.array(scales, "f4")), -128, 127) * np.array(scales, "f4")
    np.testing.assert_allclose(evaluate(made, feeds)[0], qx @ qw, rtol=1e-4, atol=1e-5)


def test_an_empty_record_changes_nothing() -> None:
    g = Graph("g")
    graph = g.outputs(ops.tanh(g.input("x", f32[3])))
    assert insert_q_dq(graph, {}) is graph


def test_one_output_of_several(rng) -> None:
    g = Graph("g")
    values, places = ops.topk(g.input("x", f32[6]), 2)
    made = insert_q_dq(g.outputs(values, places), {values: CalibrationEntry.per_tensor(0.25)})
    assert names(made).count("quantize") == 1
    x = rng.standard_normal(6).astype("f4")
    top, at = evaluate(made, {"x": x})
    np.testing.assert_allclose(top, np.round(np.sort(x)[::-1][:2] / 0.25) * 0.25)
    np.testing.assert_array_equal(at, np.argsort(-x)[:2])


def test_scales_for_other_channels_are_refused() -> None:
    g = Graph("g")
    x = g.input("x", f32[3, 4])
    with pytest.raises(ShapeError, match="2 scales for 4 channels"):
        insert_q_dq(g.outputs(ops.tanh(x)), {x: CalibrationEntry.per_channel(1, (0.1, 0.2))})


def chain(between, second: dict, first: dict) -> Graph:
    g = Graph("g")
    y, _ = ops.fake_quantize(g.input("x", f32[1, 2, 4, 4]), **first)
    z, scale = ops.fake_quantize(between(y), **second)
    return g.outputs(z, scale)


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        (ops.relu, "relu"), (lambda y: ops.reshape(y, (4, 8)), "reshape"), (lambda y: y, None),
        (lambda y: ops.max_pool(ops.relu(y), 2), "pool_max"), (lambda y: ops.transpose(y, (0, 3, 2, 1)), "transpose"),
    ],
)  # fmt: skip
def test_equal_ones_are_merged_and_what_is_between_stays(between, kept, rng) -> None:
    graph = merged(chain(between, {"bits": 8}, {"bits": 8}))
    assert names(graph).count("fake_quantize") == 1
    assert kept is None or kept in names(graph)
    x = rng.standard_normal((1, 2, 4, 4)).astype("f4")
    x.flat[0] = 4.0  # the largest stays, so the scale does, and so must every bit
    for got, want in zip(evaluate(graph, {"x": x}), evaluate(chain(between, {}, {}), {"x": x}), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("between", "second", "first"),
    [
        (ops.relu, {"bits": 4}, {"bits": 8}),
        (ops.exp, {}, {}),
        (ops.relu, {"ste": "clipped"}, {"ste": "identity"}),
        (lambda y: ops.transpose(y, (0, 3, 2, 1)), {"axis": 1}, {"axis": 1}),
    ],
)
def test_others_stay(between, second: dict, first: dict) -> None:
    graph = chain(between, second, first)
    assert merged(graph) is graph


def test_channels_pass_through_relu() -> None:
    assert names(merged(chain(ops.relu, {"axis": 1}, {"axis": 1}))).count("fake_quantize") == 1


def test_scales_of_the_data_are_left_alone_where_bits_count() -> None:
    graph = chain(ops.relu, {}, {})
    assert merged(graph, exact=True) is graph


def test_scales_that_are_given_must_be_the_same() -> None:
    g = Graph("g")
    x, s, t = g.input("x", f32[4]), g.input("s", f32[1]), g.input("t", f32[1])
    y, _ = ops.fake_quantize(x, s, scale_mode="fixed")
    same, _ = ops.fake_quantize(ops.relu(y), s, scale_mode="fixed")
    other, _ = ops.fake_quantize(ops.relu(y), t, scale_mode="fixed")
    graph = g.outputs(same, other)
    made = merged(graph, exact=True)
    assert names(made).count("fake_quantize") == 2
    feeds = {"x": np.array([-3, 0.26, 0.9, 2], "f4"), "s": np.array([0.1], "f4"), "t": np.array([0.7], "f4")}
    for got, want in zip(evaluate(made, feeds), evaluate(graph, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
