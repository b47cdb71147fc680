"""What users of other runtimes expect: sizes that are checked, scalars, names, origins, first runs without a stall."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")

import onnx
from onnx import TensorProto, helper

from strata.cli import main
from strata.errors import FileError, ShapeError
from strata.io.onnx import load
from strata.io.onnx.reading import Reading
from strata.runtime import Session
from tests.unit.io.onnx.models import model, node, port
from tests.unit.io.onnx.test_files import DATA, external, write


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 1), (3,), (0, 4)])
def test_an_input_of_another_shape(shape: tuple[int, ...]) -> None:
    made = load(model([node("Relu", ["x"], ["y"])], [port("x", ["N", 3])], [port("y", ["N", 3])]), device="reference")
    with pytest.raises(ShapeError) as caught:
        made.run(x=np.zeros(shape, np.float32))
    assert "float32[N, 3]" in str(caught.value)
    assert f"float32{list(shape)}" in str(caught.value)
    assert made.run(x=np.zeros((5, 3), np.float32))[0].shape == (5, 3)
    with pytest.raises(ShapeError):  # also once runs of the right shape are remembered
        made.run(x=np.zeros(shape, np.float32))


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_one_element_for_a_scalar(device: str, caplog: pytest.LogCaptureFixture) -> None:
    proto = model(
        [node("Mul", ["x", "s"], ["y"])], [port("x", ["n"], TensorProto.INT64), port("s", [], TensorProto.INT64)],
        [port("y", ["n"], TensorProto.INT64)],
    )  # fmt: skip
    made = load(proto, device=device)
    x = np.arange(3)
    with caplog.at_level(logging.WARNING, "strata"):
        for s in (np.array([7]), np.array([[7]]), np.array(7), np.array([7])):
            (y,) = made.run(x=x, s=s)
            np.testing.assert_array_equal(y, x * 7)
            assert y.shape == (3,)
    assert caplog.messages == ["input s: int64[], got int64[1]: taken as a scalar"]
    with pytest.raises(ShapeError, match=r"input s: int64\[\], got int64\[2\]"):
        made.run(x=x, s=np.array([7, 8]))


def twice(**changes: Any) -> Any:
    proto = model(
        [node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["y"])], [port("x", [2])], [port("a", [2]), port("y", [2])],
        initializers={"w": np.zeros(2, np.float32)},
    )  # fmt: skip
    graph = proto.graph
    for place, name in changes.items():
        match place:
            case "node":
                graph.node[1].output[0] = name
            case "output":
                graph.output[1].name = name
            case "input":
                graph.input.append(helper.make_tensor_value_info(name, 1, [2]))
            case "initializer":
                graph.initializer.append(helper.make_tensor(name, 1, [2], [0, 0]))
    return proto


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node": "a"}, r"node 'Relu' and node 'Neg' of the model both give 'a'"),
        ({"node": "x"}, r"node 'Neg' of the model gives 'x', which is an input or initializer"),
        ({"node": "w"}, r"node 'Neg' of the model gives 'w', which is an input or initializer"),
        ({"output": "a"}, r"two outputs of the model have the same name, 'a'"),
        ({"input": "x"}, r"two inputs of the model have the same name, 'x'"),
        ({"initializer": "w"}, r"two initializers of the model have the same name, 'w'"),
    ],
)
def test_names_are_defined_once(changes: dict[str, str], message: str) -> None:
    with pytest.raises(FileError, match=message):
        load(twice(**changes))
    load(twice())


def test_names_of_subgraphs_and_functions_are_defined_once() -> None:
    inner = helper.make_graph([node("Relu", ["x"], ["b"]), node("Neg", ["x"], ["b"])], "branch", [], [port("b", [2])])
    flag = helper.make_tensor("f", TensorProto.BOOL, [], [True])
    nodes = [node("Constant", [], ["k"], value=flag), node("If", ["k"], ["y"], then_branch=inner, else_branch=inner)]
    with pytest.raises(FileError, match=r"of the graph 'branch' in node 'If' both give 'b'"):
        load(model(nodes, [port("x", [2])], [port("y", [2])]))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = [node("Relu", ["a"], ["b"]), node("Neg", ["a"], ["b"])]
    made = model([node("Relu", ["x"], ["y"])], [port("x", [2])], [port("y", [2])])
    made.functions.append(helper.make_function("own", "f", ["a"], ["b"], body, imports))
    with pytest.raises(FileError, match=r"of function 'f' both give 'b'"):
        load(made)


@pytest.mark.parametrize(
    ("offset", "length"),
    [("0", "-1"), ("0", "-400"), ("-8", "400"), ("0", "401"), ("0", "4"), ("0", str(1 << 62)), (str(1 << 62), "400"),
     ("0", "1" * 40), ("1e2", "400"), ("1_0", "400"), ("٣", "400"), (" 0", "400"), ("0x0", "400"), ("4", "400")],
)  # fmt: skip
def test_external_data_of_impossible_places(offset: str, length: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(DATA.tobytes())
    proto = external("w.bin")
    entries = {e.key: e for e in proto.graph.initializer[0].external_data}
    entries["offset"].value, entries["length"].value = offset, length
    with pytest.raises(FileError, match="tensor 'w'") as caught:
        load(write(tmp_path, proto), device="reference").run(x=np.zeros(100, np.float32))
    assert caught.value.code == "F502"


def test_a_missing_file_of_external_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tensor 'w'"):
        load(write(tmp_path, external("w.bin")), device="reference").run(x=np.zeros(100, np.float32))


def test_a_broken_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x0e:\xff\xff")
    with pytest.raises(FileError, match=r"bad\.onnx: not an ONNX model"):
        load(tmp_path / "bad.onnx")
    assert main(["inspect", str(tmp_path / "bad.onnx")]) != 0
    assert "bad.onnx" in capsys.readouterr().err


def test_explain_names_the_nodes(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["h"], name="/encoder/dense"), node("Relu", ["h"], ["y"])],
        [port("x", ["n", 4])], [port("y", ["n", 4])], initializers={"w": np.eye(4, dtype=np.float32)},
    )  # fmt: skip
    onnx.save(proto, tmp_path / "net.onnx")
    text = str(load(tmp_path / "net.onnx").compiled().explain())
    assert "[net.onnx: node '/encoder/dense' (MatMul); net.onnx: node 'y' (Relu)]" in text
    assert "test_behaviour.py" not in text
    in_memory = str(load(proto).compiled().explain())
    assert "[node '/encoder/dense' (MatMul); node 'y' (Relu)]" in in_memory


def test_errors_name_the_line_of_the_user() -> None:
    proto = model([node("MatMul", ["x", "x"], ["y"], name="layer")], [port("x", ["n", 3])], [port("y", None)])
    with pytest.raises(ShapeError) as caught:
        load(proto, device="reference").run(x=np.zeros((2, 3), np.float32))  # this line
    assert "node 'layer' (MatMul)" in str(caught.value)
    assert "# this line" in str(caught.value)


def talking(layers: int) -> Any:
    """A graph whose sizes depend on data: each layer picks what is positive, and spreads it again."""
    nodes, name = [], "x"
    for i in range(layers):
        nodes += [
            node("Greater", [name, "zero"], [f"m{i}"]), node("NonZero", [f"m{i}"], [f"at{i}"]),
            node("Transpose", [f"at{i}"], [f"p{i}"]), node("GatherND", [name, f"p{i}"], [f"v{i}"]),
            *(node("Tanh", [f"v{i}" if k == 0 else f"t{i}_{k - 1}"], [f"t{i}_{k}"]) for k in range(20)),
            node("ScatterND", [name, f"p{i}", f"t{i}_19"], [f"s{i}"]), node("Sub", [f"s{i}", "step"], [f"y{i}"]),
        ]  # fmt: skip
        name = f"y{i}"
    return model(
        nodes, [port("x", ["n"])], [port(name, None)], initializers={"zero": np.float32(0), "step": np.float32(0.01)}
    )


def test_sizes_that_depend_on_data_are_not_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of compiles, none of which would be used again, are not worth the wait; a few are made at once."""
    compiled: list[int] = []
    compile_ = Session.compile
    monkeypatch.setattr(
        Session, "compile", lambda self, graph, *a, **k: (compiled.append(len(graph.nodes())), compile_(self, graph))[1]
    )
    proto, rng = talking(12), np.random.default_rng(0)
    ours, reference = load(proto, device="cpu"), load(proto, device="reference")
    for n in (5000, 6000, 7000):  # more elements than are computed with while reading
        x = rng.standard_normal(n).astype(np.float32)
        np.testing.assert_allclose(ours.run(x=x)[0], reference.run(x=x)[0], rtol=1e-5, atol=1e-6)
    assert sum(compiled) < 12 * 26  # less than one of the three runs has


def test_a_segment_that_comes_often_is_compiled() -> None:
    made = load(talking(12), device="cpu")
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    first = made.run(x=x)[0]
    reading: Reading = made._reading
    before = len(reading._compiled)
    for key in reading._spent:
        reading._spent.put(key, 1e6)  # as if it had come a million times
    np.testing.assert_allclose(made.run(x=x)[0], first, rtol=1e-5, atol=1e-6)
    assert len(reading._compiled) > before


def test_what_was_tried_is_not_tried_for_ever() -> None:
    made = load(talking(2), device="reference")
    for n in range(5000, 5020):
        made.run(x=np.ones(n, np.float32))
    assert len(made.why_not_symbolic) < 10
