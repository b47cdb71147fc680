"""Reading ONNX models: symbolic sizes, guards, segments, functions, control flow, custom ops."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")

from onnx import helper

from strata import ops
from strata.config import using
from strata.errors import DTypeError, FileError, ShapeError, UnknownNameError
from strata.io.onnx import StrataBackend, checks, load, program
from tests.unit.io.onnx.models import BOOL, INT64, model, node, port


@pytest.fixture(params=["cpu", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_one_graph_serves_every_size(device: str, rng: np.random.Generator) -> None:
    w = rng.standard_normal((8, 16), dtype=np.float32)
    proto = model(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Relu", ["h"], ["r"]),
            node("ReduceMean", ["r"], ["y"], keepdims=0, axes=[1]),
        ],
        [port("x", ["batch", "length", 8])],
        [port("y", ["batch", 16])],
        opset=13,
        initializers={"w": w},
    )
    m = load(proto, device=device)
    assert [str(p) for p in m.inputs] == ["x: float32[batch, length, 8]"]
    for shape in ((1, 3, 8), (4, 7, 8), (2, 1, 8)):
        x = rng.standard_normal(shape, dtype=np.float32)
        (y,) = m.run(x=x)
        np.testing.assert_allclose(y, np.maximum(x @ w, 0).mean(1), rtol=1e-4, atol=1e-5)
    assert len(m._plans) == 1


def test_shape_arithmetic_stays_symbolic() -> None:
    """[b, s, 12] → [b, s, 3, 4] through Shape, Gather, Unsqueeze and Concat, as exporters write it."""
    proto = model(
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["b"], axis=0),
            node("Gather", ["shape", "one"], ["s"], axis=0),
            node("Unsqueeze", ["b", "axes"], ["b1"]),
            node("Unsqueeze", ["s", "axes"], ["s1"]),
            node("Concat", ["b1", "s1", "rest"], ["new"], axis=0),
            node("Reshape", ["x", "new"], ["y"]),
        ],
        [port("x", ["b", "s", 12])],
        [port("y", None)],
        initializers={
            "zero": np.array(0), "one": np.array(1), "axes": np.array([0]), "rest": np.array([3, 4]),
        },
    )  # fmt: skip
    (result,) = load(proto, device="reference").graph().results
    assert str(result.type) == "f32[b, s, 3, 4]"


def test_a_branch_on_a_size_is_guarded(device: str) -> None:
    """Squeeze without axes depends on which sizes are 1: each case gets a plan of its own."""
    proto = model([node("Squeeze", ["x"], ["y"])], [port("x", ["n", 4])], [port("y", None)])
    m = load(proto, device=device)
    for n, shape in ((3, (3, 4)), (1, (4,)), (5, (5, 4))):
        x = np.arange(n * 4, dtype=np.float32).reshape(n, 4)
        assert m.run(x=x)[0].shape == shape
        np.testing.assert_array_equal(m.run(x=x)[0].reshape(-1), x.reshape(-1))


def test_broadcast_sizes_are_guarded(device: str) -> None:
    """x[n] + z[m]: equal, or one of them 1; a plan for one of these is not used for another."""
    proto = model([node("Add", ["x", "z"], ["y"])], [port("x", ["n"]), port("z", ["m"])], [port("y", None)])
    m = load(proto, device=device)
    for a, b in ((3, 3), (1, 4), (5, 5), (4, 1), (1, 1), (2, 2)):
        x, z = np.arange(1, a + 1, dtype=np.float32), np.arange(1, b + 1, dtype=np.float32)  # 0 would hide a wrong read
        np.testing.assert_array_equal(m.run(x=x, z=z)[0], x + z)
    with pytest.raises(ShapeError, match="3 and 4"):
        m.run(x=np.zeros(3, np.float32), z=np.zeros(4, np.float32))


def test_three_operands_that_are_broadcast(device: str) -> None:
    inputs = [port(name, [f"n_{name}"]) for name in "abc"]
    m = load(model([node("Sum", ["a", "b", "c"], ["y"])], inputs, [port("y", None)]), device=device)
    for sizes in ((1, 1, 4), (1, 4, 1), (4, 1, 4), (4, 4, 4), (1, 3, 3)):
        a, b, c = (np.arange(1, n + 1, dtype=np.float32) for n in sizes)
        np.testing.assert_array_equal(m.run(a=a, b=b, c=c)[0], a + b + c)


def test_an_input_that_decides_a_branch(device: str) -> None:
    """Branches of different rank cannot be one op: the value of the flag chooses the plan."""
    then = helper.make_graph([node("ReduceSum", ["x"], ["a"], keepdims=0)], "then", [], [port("a", None)])
    other = helper.make_graph([node("Neg", ["x"], ["b"])], "else", [], [port("b", None)])
    proto = model(
        [node("If", ["flag"], ["y"], then_branch=then, else_branch=other)],
        [port("x", ["n"]), port("flag", [], BOOL)],
        [port("y", None)],
    )
    m = load(proto, device=device)
    x = np.arange(3, dtype=np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(m.run(x=x, flag=np.array(True))[0], np.float32(3))
        np.testing.assert_array_equal(m.run(x=x, flag=np.array(False))[0], -x)


def test_results_that_need_only_sizes(device: str) -> None:
    nodes = [node("Size", ["x"], ["n"]), node("Mul", ["n", "two"], ["y"])]
    proto = model(nodes, [port("x", ["n", 4])], [port("y", [], INT64)], initializers={"two": np.array(2, np.int64)})
    m = load(proto, device=device)
    for n in (2, 3, 1):
        assert m.run(x=np.zeros((n, 4), np.float32))[0] == 8 * n


def test_whether_there_is_a_tensor_is_known(device: str) -> None:
    nodes = [node("OptionalHasElement", ["x"], ["b"]), node("Cast", ["b"], ["f"], to=1), node("Mul", ["f", "x"], ["y"])]
    m = load(model(nodes, [port("x", ["n", 4])], [port("y", ["n", 4])]), device=device)
    for n in (2, 3):
        x = np.full((n, 4), 1.5, np.float32)
        np.testing.assert_array_equal(m.run(x=x)[0], x)


def test_sequences_of_known_arrays(device: str) -> None:
    """Split while the model is read, with outputs that are computed later beside them."""
    nodes = [
        node("SplitToSequence", ["w"], ["list"], axis=1, keepdims=0),
        node("ConcatFromSequence", ["list"], ["y"], axis=0),
        node("Relu", ["x"], ["z"]),
    ]
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    m = load(
        model(nodes, [port("x", ["n"])], [port("y", None), port("z", ["n"])], initializers={"w": w}), device=device
    )
    y, z = m.run(x=np.array([-1, 2], np.float32))
    np.testing.assert_array_equal(y, w.T.reshape(-1))
    np.testing.assert_array_equal(z, [0, 2])


def test_shapes_that_depend_on_data(device: str) -> None:
    """NonZero splits the model: what is before and after it is compiled."""
    proto = model(
        [
            node("Mul", ["x", "two"], ["d"]),
            node("NonZero", ["d"], ["at"]),
            node("Transpose", ["at"], ["rows"], perm=[1, 0]),
            node("GatherND", ["d", "rows"], ["picked"]),
            node("Add", ["picked", "two"], ["y"]),
        ],
        [port("x", ["n"])],
        [port("y", None)],
        initializers={"two": np.array(2, np.float32)},
    )
    m = load(proto, device=device)
    for x in ([0, 1, 0, 3], [0, 0], [5, 6, 7], [1, 2, 0, 4], [0, 0, 0, 1], [5, 0]):  # shapes again, with other data
        data = np.array(x, np.float32)
        np.testing.assert_array_equal(m.run(x=data)[0], 2 * data[data != 0] + 2)


@pytest.mark.parametrize("trip", [0, 3, 20])
def test_loops(trip: int, device: str) -> None:
    """Short loops are written out, long ones are an op; both give the last state and all rows."""
    body = helper.make_graph(
        [
            node("Cast", ["i"], ["i_f"], to=1),
            node("Add", ["v", "i_f"], ["v2"]),
            node("Identity", ["c"], ["c2"]),
            node("Mul", ["v2", "v2"], ["row"]),
        ],
        "body",
        [port("i", [], INT64), port("c", [], BOOL), port("v", [2])],
        [port("c2", [], BOOL), port("v2", [2]), port("row", [2])],
    )
    proto = model(
        [node("Loop", ["trip", "", "x"], ["last", "rows"], body=body)],
        [port("x", [2])],
        [port("last", [2]), port("rows", None)],
        initializers={"trip": np.array(trip)},
    )
    x = np.array([1, 2], np.float32)
    last, rows = load(proto, device=device).run(x=x)
    want = [x + sum(range(i + 1)) for i in range(trip)]
    np.testing.assert_array_equal(last, want[-1] if want else x)
    np.testing.assert_array_equal(rows, np.array([w * w for w in want], np.float32).reshape(trip, 2))


def test_a_loop_that_data_end(device: str) -> None:
    """Doubled until the sum is 100 or more: one op of a graph that serves every size."""
    body = helper.make_graph(
        [
            node("Add", ["v", "v"], ["v2"]),
            node("ReduceSum", ["v2"], ["sum"], keepdims=0),
            node("Less", ["sum", "limit"], ["c2"]),
        ],
        "body",
        [port("i", [], INT64), port("c", [], BOOL), port("v", ["n"])],
        [port("c2", [], BOOL), port("v2", ["n"])],
    )
    proto = model(
        [node("Loop", ["", "go", "x"], ["y"], body=body)], [port("x", ["n"])], [port("y", ["n"])],
        initializers={"limit": np.array(100, np.float32), "go": np.array(True)},
    )  # fmt: skip
    m = load(proto, device=device)
    for x in ([1.0, 2.0], [3.0], [60.0, 1.0, 1.0]):
        want = 2 * np.array(x, np.float32)
        while want.sum() < 100:
            want = 2 * want
        np.testing.assert_array_equal(m.run(x=np.array(x, np.float32))[0], want)
    assert len(m._plans) == 1


def test_functions_of_the_model(device: str) -> None:
    own = helper.make_function(
        "own", "Scale", ["x"], ["y"],
        [node("Constant", [], ["k"]), node("Mul", ["x", "k"], ["y"])], [helper.make_opsetid("", 21)], ["factor"],
    )  # fmt: skip
    reference = own.node[0].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "value_float", "factor", 1
    proto = model(
        [node("Scale", ["x"], ["y"], domain="own", factor=3.0)], [port("x", [2])], [port("y", [2])],
        functions=[own], domains=["own"],
    )  # fmt: skip
    np.testing.assert_array_equal(load(proto, device=device).run(x=np.array([1, 2], np.float32))[0], [3, 6])


@pytest.mark.parametrize("given", [{}, {"slope": 0.5}])
def test_an_attribute_that_a_call_leaves_out_has_its_default(given: dict[str, float], device: str) -> None:
    """Also where one function passes it on to another."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    inner = helper.make_function("own", "Leak", ["x"], ["y"], [node("LeakyRelu", ["x"], ["y"])], opsets, ["slope"])
    outer = helper.make_function(
        "own", "Outer", ["x"], ["y"], [node("Leak", ["x"], ["y"], domain="own")], opsets, ["slope"]
    )
    inner.node[0].attribute.add(name="alpha", ref_attr_name="slope", type=1)
    outer.node[0].attribute.add(name="slope", ref_attr_name="slope", type=1)
    proto = model(
        [node("Outer", ["x"], ["y"], domain="own", **given)], [port("x", [2])], [port("y", [2])],
        functions=[inner, outer], domains=["own"],
    )  # fmt: skip
    made = load(proto, device=device).run(x=np.array([-1, 2], np.float32))[0]
    np.testing.assert_array_equal(made, np.array([-given.get("slope", 0.01), 2], np.float32))


@pytest.mark.parametrize("version", [1 << 31, 1 << 62, -1])
def test_opsets_beyond_all_are_the_newest(version: int, device: str) -> None:
    proto = model([node("Gelu", ["x"], ["y"], domain="com.microsoft")], [port("x", [2])], [port("y", [2])])
    proto.opset_import.add(domain="com.microsoft", version=version)
    made = load(proto, device=device).run(x=np.zeros(2, np.float32))[0]
    np.testing.assert_array_equal(made, np.zeros(2, np.float32))


def test_nodes_of_opsets_that_onnx_does_not_know_may_have_more(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """An op whose newer form is read here loads beside an older release of `onnx`, too."""
    proto = model([node("Relu", ["x"], ["y"], later=1)], [port("x", [2])], [port("y", [2])])
    (opset,) = proto.opset_import
    with pytest.raises(FileError, match="no attribute 'later'"):
        load(proto, device=device)
    monkeypatch.setattr(checks.defs, "onnx_opset_version", lambda: opset.version - 1)
    monkeypatch.setattr(program, "form", checks.form.__wrapped__)  # not what was found for the newer one
    np.testing.assert_array_equal(load(proto, device=device).run(x=np.array([-1, 2], np.float32))[0], [0, 2])


def test_unknown_ops_are_listed_at_once() -> None:
    proto = model(
        [node(op, [a], [b], domain="own") for op, a, b in (("Foo", "x", "a"), ("Bar", "a", "b"), ("Foo", "b", "y"))],
        [port("x", [2])], [port("y", [2])], domains=["own"],
    )  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"does not know: own\.Bar \(b\); own\.Foo \(a, y\)"):
        load(proto)


def test_custom_ops() -> None:
    proto = model(
        [node("Foo", ["x"], ["y"], domain="own", k=2.0)], [port("x", ["n"])], [port("y", ["n"])], domains=["own"]
    )
    m = load(proto, custom_ops={"own::Foo": lambda n: ops.exp(n[0]) * n.attr("k")})
    x = np.array([0, 1], np.float32)
    np.testing.assert_allclose(m.run(x=x)[0], 2 * np.exp(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("feeds", "error", "words"),
    [
        ({}, UnknownNameError, "input x: float32.* is missing"),
        ({"z": np.zeros(2, np.float32)}, UnknownNameError, "no input 'z'"),
        ({"x": np.zeros(2, np.float64)}, DTypeError, "float64"),
        ({"x": np.zeros((2, 2), np.float32)}, ShapeError, r"\[2, 2\]"),
    ],
)
def test_wrong_inputs(feeds: dict[str, Any], error: type[Exception], words: str) -> None:
    m = load(model([node("Neg", ["x"], ["y"])], [port("x", ["n"])], [port("y", ["n"])]), device="reference")
    with pytest.raises(error, match=words):
        m.run(feeds)


AXES: dict[str, tuple[str, dict[str, Any], list[tuple[str, list[int]]], int]] = {
    "reduce": ("ReduceSum", {}, [("axes", [2])], 21),
    "reduce of an attribute": ("ReduceMax", {"axes": [-3]}, [], 13),
    "running sum": ("CumSum", {}, [("axis", [4])], 21),
    "softmax of trailing axes": ("Softmax", {"axis": 3}, [], 11),
    "slice": ("Slice", {}, [("starts", [0]), ("ends", [1]), ("axes", [2])], 21),
    "pad": ("Pad", {}, [("pads", [1, 1]), ("", []), ("axes", [-4])], 21),
    "unsqueeze": ("Unsqueeze", {}, [("axes", [3])], 21),
    "crop": ("CenterCropPad", {"axes": [2]}, [("shape", [1])], 21),
    "resize": ("Resize", {"axes": [5]}, [("", []), ("", []), ("sizes", [4])], 21),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_that_do_not_exist_are_refused(name: str) -> None:
    op, attributes, held, opset = AXES[name]
    initializers = {k: np.asarray(v, np.int64) for k, v in held if k}
    made = node(op, ["x", *(k for k, _ in held)], ["y"], **attributes)
    whole = model([made], [port("x", (2, 3))], [port("y", None)], opset=opset, initializers=initializers)
    with pytest.raises(ShapeError, match=r"does not exist in [23] dimensions"):
        load(whole).run(x=np.ones((2, 3), np.float32))


def test_names_are_what_they_are_called_for() -> None:
    """Whichever is asked for first, and whatever modules it loads."""
    code = (
        "import strata as st; from strata.io.onnx import StrataBackend, reads, load, export, known_ops; "
        "assert st.onnx.backend is StrataBackend; assert callable(st.onnx.export); assert callable(st.onnx.load)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_backend_interface() -> None:
    assert StrataBackend.supports_device("CPU")
    assert not StrataBackend.supports_device("CUDA")
    x = np.array([-1, 2], np.float32)
    np.testing.assert_array_equal(StrataBackend.run_node(node("Relu", ["x"], ["y"]), [x])[0], [0, 2])
    proto = model([node("Neg", ["x"], ["y"])], [port("x", [2])], [port("y", [2])])
    np.testing.assert_array_equal(StrataBackend.run_model(proto, [x])[0], -x)
    np.testing.assert_array_equal(StrataBackend.prepare(proto).run({"x": x})[0], -x)


def test_runs_alike_go_a_short_way_and_others_do_not(device: str) -> None:
    """The second run on arrays of a shape skips the search for a plan; what it would refuse is still refused."""
    proto = model(
        [node("Sub", ["x", "y"], ["d"]), node("Neg", ["x"], ["n"])],
        [port("x", ["n"]), port("y", ["n"])],
        [port("d", ["n"]), port("n", ["n"])],
    )
    m = load(proto, device=device)
    x, y = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    for feeds in ({"x": x, "y": y}, {"y": y, "x": x}, {"x": x[::-1], "y": y}, {"x": [0.0, 1.0], "y": [1.0, 1.0]}):
        for _ in range(3):
            d, n = m.run(feeds)
            np.testing.assert_array_equal(d, np.asarray(feeds["x"]) - np.asarray(feeds["y"]))
            np.testing.assert_array_equal(n, -np.asarray(feeds["x"]))
    with pytest.raises(DTypeError, match="x: float32"):
        m.run(x=x.astype(np.float64), y=y)
    with pytest.raises(ShapeError):
        m.run(x=x[:2], y=np.ones(4, np.float32))
    with pytest.raises(UnknownNameError, match="missing"):
        m.run(x=x)
    with pytest.raises(UnknownNameError, match="has no input"):
        m.run(x=x, y=y, z=y)


def test_elements_that_decide_are_looked_at_in_each_run(device: str) -> None:
    proto = model(
        [node("Reshape", ["x", "shape"], ["y"])],
        [port("x", ["n", 4]), port("shape", [2], INT64)],
        [port("y", None)],
    )
    m = load(proto, device=device)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for shape in ([4, 3], [4, 3], [2, 6], [4, 3], [6, 2], [6, 2], [2, 6]):
        (y,) = m.run(x=x, shape=np.array(shape))
        np.testing.assert_array_equal(y, x.reshape(shape))


def test_forms_that_must_fail_again_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A height that is no multiple of 32 stays open in the second form: the op that refused it would refuse again."""
    from strata.io.onnx.reading import Reading

    trace, tried = Reading._trace, []

    def watched(self: Reading, tracer: Any, leaves: Any) -> Any:
        tried.append(str(leaves["x"].type))
        return trace(self, tracer, leaves)

    monkeypatch.setattr(Reading, "_trace", watched)
    proto = model(
        [
            node("MaxPool", ["x"], ["p"], kernel_shape=[3, 1], strides=[3, 1]),
            node("Shape", ["x"], ["sizes"]),
            node("Gather", ["sizes", "first"], ["n"], axis=0),
            node("Gather", ["sizes", "last"], ["w"], axis=0),
            node("Concat", ["n", "middle", "w"], ["flat"], axis=0),
            node("Reshape", ["p", "flat"], ["y"]),
        ],
        [port("x", ["n", 4, "h", "w"])],
        [port("y", None)],
        initializers={"first": np.array([0]), "last": np.array([3]), "middle": np.array([4, 1])},
    )
    m = load(proto, device="cpu")
    for n, w in ((2, 64), (1, 32), (2, 5)):
        x = np.random.default_rng(w).standard_normal((n, 4, 3, w)).astype(np.float32)
        (y,) = m.run(x=x)
        np.testing.assert_array_equal(y, x.max(2).reshape(n, 4, 1, w))
    assert tried[0] == "f32[n, 4, h, w]"
    assert len(tried) > 1
    assert not any("32*" in shape for shape in tried)


def test_settings_that_decide_the_code_have_plans_of_their_own() -> None:
    """A model that ran without checks of indices checks them where a setting asks for it."""
    gather = node("GatherElements", ["x", "at"], ["y"])
    made = load(model([gather], [port("x", ["N"]), port("at", ["M"], INT64)], [port("y", ["M"])]))
    feeds = {"x": np.ones(8, np.float32), "at": np.arange(6)}
    far = feeds | {"at": np.arange(6) + 50}
    for _ in range(2):
        made.run(feeds)
        with using(check_indices=True):
            made.run(feeds)
            for _ in range(2):
                with pytest.raises(IndexError):
                    made.run(far)
        made.run(far)


@pytest.mark.parametrize("most", [(1 << 63) - 1, (1 << 31) - 1])
@pytest.mark.parametrize("batch", [0, 1, 20])
def test_a_loop_that_only_its_condition_ends(most: int, batch: int) -> None:
    """What converters make of TensorFlow's map: as long as i < batch, with more steps than anyone runs."""
    body = helper.make_graph(
        [
            node("Add", ["i", "one"], ["i2"]),
            node("Less", ["i2", "count"], ["c2"]),
            node("Gather", ["x", "i"], ["row"]),
            node("Neg", ["row"], ["y0"]),
        ],
        "body",
        [port("step", [], INT64), port("c", [], BOOL), port("i", [], INT64)],
        [port("c2", [], BOOL), port("i2", [], INT64), port("y0", [2])],
    )
    proto = model(
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["count"]),
            node("Less", ["zero", "count"], ["c"]),
            node("Loop", ["most", "c", "zero"], ["last", "y"], body=body),
        ],
        [port("x", ["n", 2])],
        [port("last", [], INT64), port("y", ["n", 2])],
        initializers={"most": np.array(most), "zero": np.array(0), "one": np.array(1)},
    )
    x = np.arange(2 * batch, dtype=np.float32).reshape(batch, 2)
    last, y = load(proto, device="cpu").run(x=x)
    assert last == batch
    np.testing.assert_array_equal(y, -x)


def test_a_loop_that_counts_to_a_size_is_one_op() -> None:
    """An LSTM of TensorFlow: the counter and its bound are state, and are compared as floats."""
    long, float_, flag = INT64, 1, BOOL
    body = helper.make_graph(
        [
            node("Constant", [], ["one"], value_int=1),
            node("Add", ["i", "one"], ["i2"]),
            node("Gather", ["x", "i"], ["row"], axis=0),
            node("Add", ["h", "row"], ["sum"]),
            node("Tanh", ["sum"], ["h2"]),
            node("Identity", ["h2"], ["out"]),
            node("Cast", ["i2"], ["left"], to=float_),
            node("Cast", ["count"], ["right"], to=float_),
            node("Less", ["left", "right"], ["c2"]),
        ],
        "body",
        [port("k", [], long), port("c", [], flag), port("i", [], long), port("h", [2]), port("count", [], long)],
        [port("c2", [], flag), port("i2", [], long), port("h2", [2]), port("count", [], long), port("out", [2])],
    )
    proto = model(
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["n"]),
            node("Cast", ["zero"], ["a"], to=float_),
            node("Cast", ["n"], ["b"], to=float_),
            node("Less", ["a", "b"], ["c0"]),
            node("Loop", ["", "c0", "zero", "h0", "n"], ["i_last", "h_last", "n_last", "rows"], body=body),
        ],
        [port("x", ["n", 2]), port("h0", [2])],
        [port("i_last", [], long), port("h_last", [2]), port("rows", ["n", 2])],
        initializers={"zero": np.array(0)},
    )
    made, rng = load(proto, device="cpu"), np.random.default_rng(0)
    for count in (30, 7, 1, 0, 55):
        x, h = rng.standard_normal((count, 2)).astype(np.float32), np.zeros(2, np.float32)
        rows = np.zeros((count, 2), np.float32)
        for t in range(count):
            h = rows[t] = np.tanh(h + x[t])
        last, got, got_rows = made.run(x=x, h0=np.zeros(2, np.float32))
        assert last == count
        np.testing.assert_allclose(got, h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got_rows, rows, rtol=1e-5, atol=1e-6)
        if count == 30:
            assert not made.why_not_symbolic
