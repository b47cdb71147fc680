"""Quantised models on the compiled backend against onnxruntime without its optimiser: within a quantum, on codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.reference
import pytest
from onnx import TensorProto, helper, numpy_helper

from strata.io.onnx import load

runtime = pytest.importorskip("onnxruntime")
node = helper.make_node


def model(nodes: list[Any], shape: tuple[Any, ...], held: dict[str, Any], kind: int = TensorProto.FLOAT) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def wanted(proto: Any, x: np.ndarray) -> np.ndarray:
    """What the nodes say one by one; onnxruntime's own fusions round elsewhere."""
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def products(proto: Any, x: np.ndarray) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """The result, and the types that its products read."""
    made = load(proto, device="cpu")
    (result,) = made.run({"x": x})
    (plan,) = made._by_signature.values()
    nodes = [n for s in plan.compiled.lir.schedule for n in s.nodes if n.op.name.startswith(("conv", "matmul"))]
    return result, [(n.inputs[0].dtype.name, n.inputs[1].dtype.name) for n in nodes]


def compare(proto: Any, x: np.ndarray, quantum: float) -> list[tuple[str, str]]:
    result, types = products(proto, x)
    want = wanted(proto, x)
    assert result.dtype == want.dtype
    away = np.abs(result.astype(np.float64) - want.astype(np.float64)) / quantum
    assert away.max() <= 1.001
    assert (away > 0.5).mean() < 2e-3  # numbers next to a half
    return types


def qdq_conv(
    rng: np.random.Generator, o: int, c: int, kernel: tuple[int, ...], by_channel: bool, kind: Any, **attributes: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Nodes from x to codes to a convolution with bias and relu to codes to numbers; the arrays they read."""
    size = (o,) if by_channel else ()
    scale = np.float32(rng.random(size) * 0.02 + 0.001)
    held = {
        "w": rng.integers(-127, 128, (o, c, *kernel)).astype(np.int8), "ws": scale, "wz": np.zeros(size, np.int8),
        "xs": np.float32(0.02), "xz": kind(14), "ys": np.float32(0.15), "yz": kind(3),
        "b": rng.integers(-1000, 1000, o).astype(np.int32), "bs": np.float32(0.02) * scale,
        "bz": np.zeros(size, np.int32),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]), node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        node("DequantizeLinear", ["b", "bs", "bz"], ["bd"], axis=0),
        node("Conv", ["xd", "wd", "bd"], ["c"], **attributes), node("Relu", ["c"], ["r"]),
        node("QuantizeLinear", ["r", "ys", "yz"], ["yq"]), node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]),
    ]  # fmt: skip
    return nodes, held


CONVOLUTIONS = [
    ((2, 3, 17, 17), 24, 3, (3, 3), {"pads": [1] * 4}),
    ((1, 16, 9, 9), 70, 16, (5, 5), {"pads": [2] * 4, "strides": [2, 2]}),
    ((2, 8, 7, 6), 12, 8, (1, 1), {}),
    ((1, 16, 8, 8), 8, 8, (3, 3), {"group": 2, "pads": [0, 1, 2, 1]}),
    ((1, 12, 8, 8), 12, 1, (3, 3), {"group": 12, "pads": [1] * 4}),
    ((1, 4, 30), 8, 4, (3,), {"dilations": [2], "pads": [2, 2]}),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("shape", "o", "c", "kernel", "attributes"), CONVOLUTIONS)
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_qdq_convolutions(
    shape: Any, o: int, c: int, kernel: Any, attributes: Any, by_channel: bool, kind: Any, rng
) -> None:
    nodes, held = qdq_conv(rng, o, c, kernel, by_channel, kind, **attributes)
    x = rng.standard_normal(shape).astype(np.float32)
    types = compare(model(nodes, ("n", *shape[1:]), held), x, 0.15)
    codes = "u8" if kind is np.uint8 else "i8"
    assert types == [(codes, "i8")]


@pytest.mark.parametrize("w_kind", [np.int8, np.uint8])
@pytest.mark.parametrize("w_zero", [0, 3])
def test_qdq_gemm_and_a_residual(w_kind: Any, w_zero: int, rng) -> None:
    """Weights of either sign, transposed as Gemm has them, and a sum of two quantised values behind."""
    zero = w_zero + (128 if w_kind is np.uint8 else 0)
    info = np.iinfo(w_kind)
    held = {
        "w": rng.integers(info.min, info.max + 1, (30, 50)).astype(w_kind),
        "ws": np.float32(rng.random(30) * 0.01 + 1e-3), "wz": np.full(30, zero, w_kind),
        "xs": np.float32(0.03), "xz": np.uint8(120), "ys": np.float32(0.2), "yz": np.uint8(128),
        "rs": np.float32(0.25), "rz": np.uint8(100),
        "b": rng.standard_normal(30).astype(np.float32), "k": rng.standard_normal((1, 30)).astype(np.float32),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]), node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        node("Gemm", ["xd", "wd", "b"], ["m"], transB=1), node("QuantizeLinear", ["m", "ys", "yz"], ["mq"]),
        node("DequantizeLinear", ["mq", "ys", "yz"], ["md"]), node("Add", ["md", "k"], ["a"]),
        node("QuantizeLinear", ["a", "rs", "rz"], ["aq"]), node("DequantizeLinear", ["aq", "rs", "rz"], ["y"]),
    ]  # fmt: skip
    types = compare(model(nodes, ("n", 50), held), rng.standard_normal((9, 50)).astype(np.float32), 0.25)
    assert types == [("u8", "i8")]


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_qlinear_ops(by_channel: bool, kind: Any, rng) -> None:
    size = (20,) if by_channel else ()
    held = {
        "xs": np.float32(0.05), "xz": kind(9), "w": rng.integers(-127, 128, (20, 5, 3, 3)).astype(np.int8),
        "ws": np.float32(rng.random(size) * 0.02 + 0.001), "wz": np.zeros(size, np.int8), "ys": np.float32(0.3),
        "yz": kind(-7 if kind is np.int8 else 119), "b": rng.integers(-500, 500, 20).astype(np.int32),
        "v": rng.integers(-127, 128, (6, 11)).astype(np.int8), "vs": np.float32(0.01), "vz": np.int8(0),
        "zs": np.float32(0.9), "zz": kind(10),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        node("QLinearConv", ["q", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["c"], pads=[1] * 4),
        node("QLinearMatMul", ["c", "ys", "yz", "v", "vs", "vz", "zs", "zz"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, (2, 5, 7, 6), held)
    result, types = products(proto, x := rng.standard_normal((2, 5, 7, 6)).astype(np.float32))
    away = np.abs(result.astype(np.int64) - wanted(proto, x).astype(np.int64))
    assert away.max() <= 1
    codes = "u8" if kind is np.uint8 else "i8"
    assert types == [(codes, "i8"), (codes, "i8")]


@pytest.mark.parametrize("w_kind", [np.int8, np.uint8])
def test_dynamic_quantisation_and_integer_ops(w_kind: Any, rng) -> None:
    info = np.iinfo(w_kind)
    held = {
        "w": rng.integers(info.min, info.max + 1, (19, 33)).astype(w_kind), "wz": w_kind(5),
        "ws": np.float32(0.01), "b": rng.standard_normal(33).astype(np.float32),
    }  # fmt: skip
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), node("Mul", ["s", "ws"], ["t"]),
        node("Mul", ["f", "t"], ["m"]), node("Add", ["m", "b"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, ("n", 19), held)
    x = rng.standard_normal((6, 19)).astype(np.float32)
    result, types = products(proto, x)
    np.testing.assert_allclose(result, wanted(proto, x), rtol=1e-6, atol=1e-6)
    assert types == [("u8", "i8")]


def test_integer_convolution(rng) -> None:
    held = {"w": rng.integers(0, 256, (6, 4, 3, 3)).astype(np.uint8), "xz": np.uint8(77), "wz": np.uint8(128)}
    proto = model(
        [node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], pads=[1] * 4)], (1, 4, 6, 6), held, TensorProto.UINT8
    )
    x = rng.integers(0, 256, (1, 4, 6, 6)).astype(np.uint8)
    result, types = products(proto, x)
    reference = onnx.reference.ReferenceEvaluator(proto)
    np.testing.assert_array_equal(result, reference.run(None, {"x": x})[0])
    assert types == [("u8", "i8")]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("code", [np.uint8, np.int8])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 2, 1]])
def test_convolutions_of_a_zero_point_that_a_run_knows(groups: int, code: Any, pads: list[int]) -> None:
    """Codes are summed as they are: the zero point of x is around it, that of each filter is taken off afterwards."""
    rng = np.random.default_rng(3)
    info = np.iinfo(code)
    w = rng.integers(info.min, info.max + 1, (6, 4 // groups, 3, 2)).astype(code)
    points = rng.integers(info.min, info.max + 1, 6).astype(code)
    port, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    node = onnx.helper.make_node("ConvInteger", ["x", "w", "a", "b"], ["y"], pads=pads, group=groups, strides=[1, 2])
    graph = onnx.helper.make_graph(
        [node], "g", [port("x", kinds.UINT8, ["n", 4, "h", "v"]), port("a", kinds.UINT8, [])],
        [port("y", kinds.INT32, None)], [numpy_helper.from_array(w, "w"), numpy_helper.from_array(points, "b")],
    )  # fmt: skip
    model = load(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8))
    for zero, size in ((0, 5), (131, 8), (255, 3)):
        x = rng.integers(0, 256, (2, 4, size, 6)).astype(np.uint8)
        (got,) = model.run(x=x, a=np.uint8(zero))
        wide = np.pad(x.astype(np.int64) - zero, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
        views = np.lib.stride_tricks.sliding_window_view(wide, (3, 2), (2, 3))[:, :, :, ::2]
        filters = w.astype(np.int64) - points.reshape(-1, 1, 1, 1)
        parts = zip(np.split(views, groups, 1), np.split(filters, groups, 0), strict=True)
        want = np.concatenate([np.einsum("nchwij,ocij->nohw", a, b) for a, b in parts], 1)
        np.testing.assert_array_equal(got, want)
