"""Elements beside f32: texts are moved like numbers, whole pixels stay whole, each against onnx's own evaluator."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")

from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from strata.errors import StrataError
from strata.io.onnx import load
from tests.unit.io.onnx.models import model, node, port


def texts(*shape: int) -> np.ndarray:
    return np.array([f"t{i}" for i in range(int(np.prod(shape)))], object).reshape(shape)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


MOVED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Flatten": ([texts(2, 3, 2)], {}),
    "Tile": ([texts(2, 3), longs(2, 2)], {}),
    "Pad": ([texts(2, 3), longs(1, 0, 0, 1), np.array("z", object)], {}),
    "GatherElements": ([texts(2, 3), np.array([[0, 1], [2, -1]])], {"axis": 1}),
    "GatherND": ([texts(2, 3), np.array([[0, 1], [1, -1]])], {}),
    "ScatterElements": ([texts(2, 3), np.array([[0, 2]]), np.array([["p", "q"]], object)], {"axis": 1}),
    "ScatterND": ([texts(2, 3), np.array([[1]]), np.array([["p", "q", "r"]], object)], {}),
    "ReverseSequence": ([texts(3, 2), longs(1, 3)], {}),
    "DepthToSpace": ([texts(1, 4, 1, 2)], {"blocksize": 2}),
    "SpaceToDepth": ([texts(1, 1, 2, 2)], {"blocksize": 2}),
    "Split": ([texts(3, 2), longs(1, 2)], {}),
}


def one_node(op: str, inputs: list[Any], attributes: dict[str, Any], *, opset: int = 20, outputs: int = 1) -> Any:
    names = [f"x{i}" for i in range(len(inputs))]
    kinds = [TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs]
    ports = [port(n, [f"{n}_{i}" for i in range(x.ndim)], k) for n, x, k in zip(names, inputs, kinds, strict=True)]
    ends = [f"y{i}" for i in range(outputs)]
    return model([node(op, names, ends, **attributes)], ports, [port(e, None, kinds[0]) for e in ends], opset=opset)


@pytest.mark.parametrize("op", MOVED)
def test_texts_are_moved(op: str) -> None:
    inputs, attributes = MOVED[op]
    proto = one_node(op, inputs, attributes, outputs=2 if op == "Split" else 1)
    feeds = {f"x{i}": x for i, x in enumerate(inputs)}
    for got, wanted in zip(
        load(proto, device="cpu").run(feeds), ReferenceEvaluator(proto).run(None, feeds), strict=True
    ):
        assert got.dtype == object
        assert got.tolist() == wanted.tolist()


def test_texts_are_padded_with_nothing() -> None:
    proto = one_node("Pad", [texts(1, 2), longs(0, 1, 0, 0)], {})
    (got,) = load(proto, device="cpu").run(x0=texts(1, 2), x1=longs(0, 1, 0, 0))
    assert got.tolist() == [["", "t0", "t1"]]


def test_texts_are_not_added() -> None:
    inputs = [texts(2, 3), np.array([[1]]), np.array([["p", "q", "r"]], object)]
    made = load(one_node("ScatterND", inputs, {"reduction": "add"}), device="cpu")
    with pytest.raises(StrataError, match="ScatterND: texts are not combined by 'add'"):
        made.run({f"x{i}": x for i, x in enumerate(inputs)})


def test_more_texts_than_there_is_room_for() -> None:
    made = load(one_node("Tile", [texts(2, 3), longs(1, 1)], {}), device="cpu")
    with pytest.raises(StrataError):
        made.run(x0=texts(2, 3), x1=longs(1 << 30, 1 << 20))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("kind", ["uint8", "int8", "int32"])
def test_whole_pixels_stay_whole(kind: str, mode: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 120, (1, 1, 4, 4)).astype(kind)
    scales = np.array([1, 1, 2, 1.5], np.float32)
    proto = model(
        [node("Resize", ["x", "", "scales"], ["y"], mode=mode)],
        [port("x", list(x.shape), helper.np_dtype_to_tensor_dtype(x.dtype))],
        [port("y", None, helper.np_dtype_to_tensor_dtype(x.dtype))],
        opset=13,
        initializers={"scales": scales},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})  # type: ignore[misc]
    (got,) = load(proto, device="cpu").run(x=x)
    assert got.dtype == x.dtype
    apart = np.asarray(wanted, np.int64) - got.astype(np.int64)
    assert abs(apart).max() <= (1 if mode == "linear" else 0)  # there the point and what follows are cut off


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_where_a_scalar_is_not_zero(value: float) -> None:
    x = np.array(value, np.float32)
    proto = model([node("NonZero", ["x"], ["y"])], [port("x", [])], [port("y", None, TensorProto.INT64)])
    (got,) = load(proto, device="cpu").run(x=x)
    (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})  # type: ignore[misc]
    assert got.shape == np.shape(wanted)


@pytest.mark.parametrize("chosen", [True, False])
def test_branches_of_texts(chosen: bool) -> None:
    kind = TensorProto.STRING
    yes = helper.make_graph([node("Constant", [], ["a"], value_strings=[b"yes"])], "yes", [], [port("a", None, kind)])
    no = helper.make_graph([node("Identity", ["s"], ["b"])], "no", [], [port("b", None, kind)])
    proto = model(
        [node("If", ["c"], ["y"], then_branch=yes, else_branch=no)],
        [port("c", [], TensorProto.BOOL), port("s", ["n"], kind)],
        [port("y", None, kind)],
    )
    (got,) = load(proto, device="cpu").run(c=np.array(chosen), s=texts(2))
    assert got.tolist() == (["yes"] if chosen else ["t0", "t1"])


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_loops_over_texts(steps: int) -> None:
    kind = TensorProto.STRING
    body = helper.make_graph(
        [node("Concat", ["s", "u"], ["s2"], axis=0), node("Identity", ["c"], ["c2"]), node("Identity", ["u"], ["row"])],
        "body",
        [port("i", [], TensorProto.INT64), port("c", [], TensorProto.BOOL), port("s", None, kind)],
        [port("c2", [], TensorProto.BOOL), port("s2", None, kind), port("row", [2], kind)],
    )
    proto = model(
        [node("Loop", ["t", "", "s0"], ["y", "rows"], body=body)],
        [port("t", [], TensorProto.INT64), port("s0", ["n"], kind), port("u", [2], kind)],
        [port("y", None, kind), port("rows", None, kind)],
    )
    y, rows = load(proto, device="cpu").run(t=np.array(steps), s0=np.array(["a"], object), u=texts(2))
    assert y.tolist() == ["a", *["t0", "t1"] * steps]
    assert rows.tolist() == [["t0", "t1"]] * steps
    assert rows.shape == (steps, 2)


@pytest.mark.parametrize(
    ("name", "given", "attributes"),
    [
        ("DFT", [np.linspace(-1, 1, 7, dtype=np.float16).reshape(1, 7, 1), None, np.array(1)], {"onesided": 1}),
        ("DFT", [np.linspace(-1, 1, 14, dtype=np.float16).reshape(1, 7, 2), None, np.array(1)], {"inverse": 1}),
        (
            "STFT",
            [
                np.linspace(-1, 1, 32, dtype=np.float16).reshape(1, 32, 1),
                np.array(8),
                np.hanning(16).astype(np.float16),
            ],
            {},
        ),
        ("Det", [np.linspace(-2, 3, 18, dtype=np.float16).reshape(2, 3, 3) ** 2], {}),
        *(
            (
                "ScatterND",
                [
                    np.array([True, False, True, False]),
                    np.array([[1], [1], [0], [2]]),
                    np.array([True, False, True, False]),
                ],
                {"reduction": reduction},
            )
            for reduction in ("none", "add", "mul")
        ),
        *(
            (
                "ScatterElements",
                [np.array([True, False, True]), np.array([1, 1, 0]), np.array([True, True, False])],
                {"reduction": reduction},
            )
            for reduction in ("add", "mul")
        ),
    ],
)
def test_element_types_are_those_of_onnxruntime(name: str, given: list[Any], attributes: dict[str, Any]) -> None:
    theirs = pytest.importorskip("onnxruntime", reason="the numbers are compared with onnxruntime's")
    kinds = [None if x is None else helper.np_dtype_to_tensor_dtype(x.dtype) for x in given]
    feeds = {f"x{i}": x for i, x in enumerate(given) if x is not None}
    proto = model(
        [node(name, [f"x{i}" if f"x{i}" in feeds else "" for i in range(len(given))], ["y"], **attributes)],
        [port(f"x{i}", list(x.shape), kind) for i, (x, kind) in enumerate(zip(given, kinds, strict=True)) if kind],
        [port("y", None, kinds[0])],
        opset=20,
    )
    proto.ir_version = 10
    (wanted,) = theirs.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    (got,) = load(proto, device="cpu").run(**feeds)
    assert got.dtype == wanted.dtype
    room = 2e-3 if got.dtype == np.float16 else 1e-8
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=room, atol=room)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("LeakyRelu", {"alpha": 0.01}),
        ("HardSigmoid", {"alpha": 0.2, "beta": 0.5}),
        ("Selu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
    ],
)
def test_a_default_is_the_number_that_a_file_would_say(name: str, defaults: dict[str, float]) -> None:
    x = np.linspace(-4, 4, 9)
    results = []
    for attributes in ({}, defaults):
        proto = model(
            [node(name, ["x"], ["y"], **attributes)],
            [port("x", [9], TensorProto.DOUBLE)],
            [port("y", [9], TensorProto.DOUBLE)],
        )
        results.append(load(proto, device="cpu").run(x=x)[0])
        (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})  # type: ignore[misc]
        np.testing.assert_allclose(results[-1], wanted, rtol=1e-15)
    np.testing.assert_array_equal(*results)
