"""com.microsoft operators at their edges, beside onnxruntime: attributes and inputs left out, halves, no elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")
runtime = pytest.importorskip("onnxruntime", reason="its kernels are the reference")

from onnx import helper  # noqa: E402 - after the packages that it needs

from strata.io.onnx import load  # noqa: E402
from tests.unit.io.onnx.models import node_model, port  # noqa: E402

R = np.random.default_rng(5)
ONE, POINT = np.float32(0.1), np.uint8(3)


def f(*shape: int) -> np.ndarray:
    return R.standard_normal(shape, dtype=np.float32)


def half(*shape: int) -> np.ndarray:
    return f(*shape).astype(np.float16)


def u8(*shape: int) -> np.ndarray:
    return R.integers(0, 256, shape).astype(np.uint8)


PRODUCT = [u8(3, 6), ONE, POINT, u8(6, 5), np.float32(0.2), np.uint8(4), R.integers(-9, 9, 5).astype(np.int32)]
BOXES = np.array([[0.1, 0.2, 0.9, 0.7], [0.0, -0.3, 1.2, 1.0]], np.float16)
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "activation": ("FusedGemm", [f(3, 4), f(4, 5), f(5)], {"activation": "Relu"}),
    "no rows": ("FusedGemm", [f(0, 4), f(4, 5), f(5)], {"activation": "Tanh"}),
    "nothing to sum": ("FusedGemm", [f(3, 0), f(0, 5), f(5)], {"activation": "Relu"}),
    "no activation": ("FusedConv", [f(1, 2, 6, 6), f(3, 2, 3, 3), f(3)], {}),
    "a scale without a zero point": ("QGemm", [*PRODUCT, np.float32(0.3)], {}),
    "a scale and a zero point": ("QGemm", [*PRODUCT, np.float32(30.0), np.uint8(7)], {}),
    "neither": ("QGemm", PRODUCT, {}),
    "scales in halves": (
        "MatMulIntegerToFloat", [u8(3, 4), u8(4, 5), np.float16(0.01), half(5) / 99, POINT, u8(5), half(5)], {},
    ),
    "attention in halves": (
        "QAttention",
        [u8(2, 3, 8), u8(8, 24), half(24), np.float16(0.02), np.float16(0.03), np.array([3, 2], np.int32), POINT,
         POINT],
        {"num_heads": 2},
    ),
    "inverse of halves": ("Inverse", [half(2, 3, 3) / 4 + np.eye(3, dtype=np.float16)], {}),
    "no codes": ("DynamicQuantizeMatMul", [f(0, 8), u8(8, 3), ONE, POINT], {}),
    "crops in halves": (
        "CropAndResize", [half(2, 3, 7, 6), BOXES, np.array([1, 0], np.int32), np.array([4, 3], np.int32)],
        {"mode": "nearest"},
    ),
}  # fmt: skip


def compare(proto: Any, feeds: dict[str, np.ndarray]) -> None:
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(load(proto, device="reference").run(feeds), session.run(None, feeds), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        away = 1 if want.dtype == np.uint8 else 5e-3 if want.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=away, atol=away)


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime_does(name: str) -> None:
    op, inputs, attributes = CASES[name]
    arrays = [np.asarray(x) for x in inputs]
    compare(node_model(op, arrays, 1, **attributes), {f"x{i}": x for i, x in enumerate(arrays)})


@pytest.mark.parametrize(
    "x", [np.zeros((2, 3), np.float32), f(0, 4), f(6) + 9, f(6) - 9], ids=["zeros", "none", "+", "-"]
)
def test_codes_of_data_at_its_edges(x: np.ndarray) -> None:
    made = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    ends = [helper.make_empty_tensor_value_info(name) for name in "qsz"]
    graph = helper.make_graph([made], "g", [port("x", x.shape)], ends)
    compare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), {"x": x})
