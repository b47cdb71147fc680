"""Files of somebody else through the session: a typed error at once; and sizes that never come twice cost no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX models need the package onnx")
from onnx import helper, numpy_helper  # noqa: E402 - after the package that it needs

from strata import ort  # noqa: E402
from strata.errors import StrataError  # noqa: E402
from tests.ort_sizes import measure  # noqa: E402

FLOAT = onnx.TensorProto.FLOAT


def model(nodes: list[Any], held: Any = (), functions: Any = ()) -> Any:
    port = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [port("x", FLOAT, [4])], [port("y", FLOAT, [4])], list(held))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=8)


def twice_each(count: int) -> Any:
    """Functions that each call the one before twice."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    inner = [helper.make_node("Relu", ["a"], ["b"])]
    made = [helper.make_function("own", "f0", ["a"], ["b"], inner, opsets)]
    for i in range(1, count):
        body = [helper.make_node(f"f{i - 1}", [p], [q], domain="own") for p, q in (("a", "t"), ("t", "b"))]
        made.append(helper.make_function("own", f"f{i}", ["a"], ["b"], body, opsets))
    return model([helper.make_node(f"f{count - 1}", ["x"], ["y"], domain="own")], functions=made)


def external(length: str) -> Any:
    held = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    held.ClearField("raw_data")
    held.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": length}.items():
        entry = held.external_data.add()
        entry.key, entry.value = key, value
    return model([helper.make_node("Add", ["x", "w"], ["y"])], [held])


def odd_text() -> bytes:
    """A key of its metadata, and the name of a value, that are not UTF-8."""
    made = model([helper.make_node("Relu", ["x"], ["qqqq"]), helper.make_node("Relu", ["qqqq"], ["y"])])
    return bytes(made.SerializeToString()).replace(b"qqqq", b"\xff\xfe\xfd\xfc")


HOSTILE: dict[str, Any] = {
    "functions to 2^25 nodes": lambda: twice_each(26).SerializeToString(),
    "functions to 2^60 nodes": lambda: twice_each(61).SerializeToString(),
    "negative length": lambda: external("-8").SerializeToString(),
    "huge length": lambda: external(str(1 << 62)).SerializeToString(),
    "length that is not a number": lambda: external("zork").SerializeToString(),
    "names that are not text": odd_text,
    "half a file": lambda: twice_each(3).SerializeToString()[:60],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_typed_error_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    path = tmp_path / "model.onnx"
    path.write_bytes(HOSTILE[name]())
    with pytest.raises(StrataError) as told:
        ort.InferenceSession(path).run(None, {"x": np.zeros(4, np.float32)})
    assert isinstance(told.value, (RuntimeError, ValueError))


CONV = {"x0": (1, 1, 4, 4), "x1": (1, 1, 2, 2)}
NOT_AS_STANDARD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "an attribute by another name": ("Conv", {"dilation": [2, 2]}, CONV, "did you mean 'dilations'"),
    "an attribute of another kind": ("Softmax", {"axis": 1.0}, {"x0": (2, 2)}, "'axis' is int, the node has float"),
    "no attribute that it needs": ("Concat", {}, {"x0": (2,), "x1": (2,)}, "'axis' is missing"),
    "too many inputs": ("Neg", {}, {"x0": (2,), "x1": (2,)}, "1 input, the node 2"),
    "too few inputs": ("Add", {}, {"x0": (2,)}, "2 inputs, the node 1"),
    "an input without a name": ("Add", {}, {"x0": (2,), "": (2,)}, "input 1 is missing"),
    "too few outputs": ("TopK", {}, {"x0": (2,), "x1": (1,)}, "2 outputs, the node 1"),
    "of ai.onnx.ml": ("ai.onnx.ml.Scaler", {"offsets": [1.0]}, {"x0": (2, 2)}, "did you mean 'offset'"),
    "a kernel of other sizes": ("Conv", {"kernel_shape": [3, 3]}, CONV, "its weights have"),
}


@pytest.mark.parametrize("name", NOT_AS_STANDARD)
def test_nodes_that_are_not_as_the_standard_says(name: str) -> None:
    """Nothing is left out of a node in silence; onnxruntime refuses the same files."""
    op, attributes, inputs, told = NOT_AS_STANDARD[name]
    domain, _, kind = op.rpartition(".")
    ports = [helper.make_tensor_value_info(x, FLOAT, size) for x, size in inputs.items() if x]
    node = helper.make_node(kind, list(inputs), ["y"], domain=domain, **attributes)
    graph = helper.make_graph([node], "g", ports, [helper.make_tensor_value_info("y", FLOAT, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    feeds = {x: np.ones(size, np.float32) for x, size in inputs.items() if x}
    with pytest.raises(StrataError, match=told):
        ort.InferenceSession(data).run(None, feeds)
    theirs = pytest.importorskip("onnxruntime", reason="it is asked for its opinion")
    theirs.set_default_logger_severity(4)
    with pytest.raises(Exception):  # noqa: B017 - its classes are many
        theirs.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_sizes_that_never_come_twice() -> None:
    """`python -m tests.ort_sizes` does 2,000, beside onnxruntime."""
    early, late = measure(ort, 120, 48)
    assert late - early < 12, f"{early:.1f} MB after a tenth, {late:.1f} MB after all"
