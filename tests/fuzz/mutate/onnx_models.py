"""Mutated ONNX models: fields changed within the format, then, now and then, bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from strata.io.onnx import load
from strata.io.onnx.checks import walk
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes
from tests.fuzz.mutate.onnx_seeds import more_models
from tests.fuzz.mutate.weights import inspect

NUMBERS = (0, 1, 2, 3, -1, -2, 7, 64, 2**31 - 1, 2**31, 2**40, -(2**40), 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 0.5, 1e9, 1e30, float("inf"), float("nan"))
OPS = tuple(sorted({s.name for s in onnx.defs.get_all_schemas() if not s.deprecated}))


def seed_models() -> list[Any]:
    """Small valid models: a conv net, branches and loops, a recurrent net, quantised ops, sequences, shapes as data."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    node, info = helper.make_node, helper.make_tensor_value_info
    flag = helper.make_tensor("flag", TensorProto.BOOL, [], [True])
    branch = [
        helper.make_graph([node(op, ["x"], ["b"])], op, [], [info("b", TensorProto.FLOAT, None)])
        for op in ("Relu", "Neg")
    ]
    loop = helper.make_graph(
        [node("Add", ["v", "w"], ["v2"]), node("Identity", ["c"], ["c2"])],
        "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, None)],
        [info("c2", TensorProto.BOOL, []), info("v2", TensorProto.FLOAT, None)],
    )
    conv = [
        node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["h", "a", "b", "a", "b"], ["n"]),
        node("MaxPool", ["n"], ["p"], kernel_shape=[2, 2]),
        node("Resize", ["p", "", "scales"], ["z"], mode="linear"),
        node("Reshape", ["z", "s"], ["f"]),
        node("Gemm", ["f", "g"], ["q"], transB=1),
        node("Softmax", ["q"], ["y"], axis=1),
    ]
    control = [
        node("Constant", [], ["k"], value=flag),
        node("If", ["k"], ["t"], then_branch=branch[0], else_branch=branch[1]),
        node("Loop", ["m", "", "t"], ["y"], body=loop),
    ]
    recurrent = [
        node("LSTM", ["x", "w", "r"], ["h", "", "c"], hidden_size=3),
        node("Squeeze", ["h", "one"], ["q"]),
        node("TopK", ["q", "k"], ["y", "at"], axis=2),
    ]
    quantised = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "s"], ["y"]),
    ]
    codes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["v"], axis=0),
        node("Conv", ["d", "v", "b"], ["h"], pads=[1, 1, 1, 1]),
        node("MaxPool", ["h"], ["p"], kernel_shape=[2, 2]),
        node("QuantizeLinear", ["p", "s", "z"], ["r"]),
        node("QLinearConv", ["r", "s", "z", "k", "one", "wz", "s", "z"], ["u"], strides=[2, 2]),
        node("DequantizeLinear", ["u", "s", "z"], ["y"]),
    ]
    shapes = [
        node("Shape", ["x"], ["d"]),
        node("Gather", ["d", "first"], ["n"]),
        node("Range", ["zero", "n", "step"], ["i"]),
        node("NonZero", ["x"], ["at"]),
        node("SplitToSequence", ["x"], ["list"], axis=1, keepdims=0),
        node("ConcatFromSequence", ["list"], ["y"], axis=0),
        node("Einsum", ["x", "x"], ["e"], equation="ij,kj->ik"),
    ]
    return [
        _model(conv, (2, 1, 8, 8), ["y"], {
            "w": normal(2, 1, 3, 3), "a": np.ones(2, np.float32), "b": np.ones(2, np.float32),
            "scales": np.array([1, 1, 2, 2], np.float32), "s": np.array([0, -1]), "g": normal(3, 72),
        }),
        _model(control, (2, 3), ["y"], {"w": normal(3), "m": np.array(3)}),
        _model(recurrent, (4, 2, 5), ["y", "at"], {
            "w": normal(1, 12, 5), "r": normal(1, 12, 3), "one": np.array([1]), "k": np.array([2]),
        }),
        _model(quantised, (3, 4), ["y"], {"w": rng.integers(-9, 9, (4, 5)).astype(np.int8)}),
        _model(codes, (2, 3, 6, 6), ["y"], {
            "s": np.float32(0.05), "z": np.uint8(100), "w": rng.integers(-9, 9, (4, 3, 3, 3)).astype(np.int8),
            "ws": np.full(4, 0.01, np.float32), "wz": np.zeros(4, np.int8), "b": normal(4), "one": np.float32(0.01),
            "k": rng.integers(-9, 9, (4, 4, 2, 2)).astype(np.int8),
        }),
        _model(shapes, (3, 4), ["y", "i", "at", "e"], {
            "first": np.array(0), "zero": np.array(0), "step": np.array(1),
        }),
    ]  # fmt: skip


def _model(nodes: Sequence[Any], shape: Sequence[int], outputs: Sequence[str], held: dict[str, np.ndarray]) -> Any:
    dims = ["n", *shape[1:]]
    graph = helper.make_graph(
        list(nodes),
        "seed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(a, name) for name, a in held.items()],
        doc_string=",".join(map(str, shape)),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def changed(proto: Any, rng: random.Random) -> bytes:
    """A mutant: fields changed within the format, then, now and then, bytes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    nodes = [*walk(graph.node), *(n for f in copy.functions for n in walk(f.node))]
    names = [x for n in nodes for x in (*n.input, *n.output)] + ["", "nothing"]
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        n = rng.choice(nodes)
        t = rng.choice(graph.initializer)
        match rng.randrange(15):
            case 0:
                n.op_type = rng.choice(OPS)
            case 1 if n.input:
                n.input[rng.randrange(len(n.input))] = rng.choice(names)
            case 2 if n.output:
                n.output[rng.randrange(len(n.output))] = rng.choice(names)
            case 3 if n.attribute:
                a = rng.choice(n.attribute)
                a.i = rng.choice(NUMBERS)
                a.ints.append(rng.choice(NUMBERS))
            case 4 if t.dims:
                t.dims[rng.randrange(len(t.dims))] = rng.choice(NUMBERS)
            case 5:
                t.data_type = rng.randrange(32)
            case 6:
                a = n.attribute.add()
                a.name, a.type, a.i = (
                    rng.choice(("axis", "to", "group", "keepdims", "size", "mode")),
                    2,
                    rng.choice(NUMBERS),
                )
            case 7:
                t.ClearField("raw_data")
                t.data_location = TensorProto.EXTERNAL
                place = rng.choice(("/etc/passwd", "../x", "link", "data", "a/../../x", ".", "", "\0", "no"))
                for key, value in (("location", place), ("offset", str(rng.choice(NUMBERS)))):
                    entry = t.external_data.add()
                    entry.key, entry.value = key, value
            case 8:
                values = np.array([rng.choice(NUMBERS) for _ in range(rng.randrange(4))], np.int64)
                t.CopyFrom(numpy_helper.from_array(values, t.name))
            case 9:
                graph.node.append(n)
            case 10 if len(graph.node) > 1:
                del graph.node[rng.randrange(len(graph.node))]
            case 11:
                copy.opset_import[0].version = rng.choice((1, 5, 7, 13, 17, 22, 26, 99, -1))
            case 12 if n.attribute:
                a = rng.choice(n.attribute)
                a.f, a.s = (
                    rng.choice(FLOATS),
                    rng.choice((b"", b"linear", b"(a+)+$", b"a{9999}", b"\xff", b"ij,jk->ik")),
                )
                del a.ints[rng.randrange(len(a.ints) + 1) :]
            case 13:
                t.CopyFrom(numpy_helper.from_array(np.array(rng.choice(NUMBERS)), t.name))
            case 14 if len(n.input) > 1:
                n.input[0] = n.input[1]
    data = bytes(copy.SerializeToString())
    return change_bytes(data, rng) if rng.random() < 0.3 else data


class Onnx(Format):
    name = "onnx"

    def prepare(self, folder: Path) -> None:
        self.models = [*seed_models(), *more_models()]
        for proto in self.models:
            (folder / "shape").write_text(proto.graph.doc_string)
            (folder / "model.onnx").write_bytes(proto.SerializeToString())
            self.attempt(folder, random.Random(0))

    def mutant(self, rng: random.Random) -> Files:
        proto = rng.choice(self.models)
        return {"model.onnx": changed(proto, rng), "data": bytes(64), "shape": proto.graph.doc_string.encode()}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        link = folder / "link"
        if not link.is_symlink():
            link.symlink_to("/etc/passwd")
        shape = [int(d) for d in (folder / "shape").read_text().split(",")]
        x = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        if rng.random() < 0.1:
            inspect(folder / "model.onnx")
        load(folder / "model.onnx", device="cpu" if rng.random() < 0.03 else "reference").run({"x": x})
        return "ran"
