"""com.microsoft ops against onnxruntime, which defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")
runtime = pytest.importorskip("onnxruntime", reason="the ops are onnxruntime's own")

from onnx import TensorProto, helper  # noqa: E402 - after the packages that it needs

from strata.io.onnx import load  # noqa: E402
from strata.io.onnx.dtypes import NUMBER  # noqa: E402

MS = "com.microsoft"
R = np.random.default_rng(7)


def f(*shape: int) -> np.ndarray:
    return R.standard_normal(shape, dtype=np.float32)


def u8(*shape: int) -> np.ndarray:
    return R.integers(0, 256, shape).astype(np.uint8)


def i32(*shape: int) -> np.ndarray:
    return R.integers(-500, 500, shape).astype(np.int32)


def quantised(*shape: int) -> list[np.ndarray]:
    return [u8(*shape), np.float32(0.05), np.uint8(120)]  # type: ignore[list-item]


Inputs = list[Any]
TABLES = [np.cos(f(20, 4)), np.sin(f(20, 4))]
PLACES = np.array([[0, 1, 2], [5, 6, 7]])
CASES: dict[str, tuple[str, Inputs, dict[str, Any], int]] = {
    "FusedMatMul": ("FusedMatMul", [f(2, 4, 3), f(2, 4, 5)], {"transA": 1, "alpha": 0.5}, 1),
    "Gelu": ("Gelu", [f(3, 4)], {}, 1),
    "BiasGelu": ("BiasGelu", [f(3, 4), f(4)], {}, 1),
    "FastGelu": ("FastGelu", [f(3, 4), f(4)], {}, 1),
    "QuickGelu": ("QuickGelu", [f(3, 4)], {"alpha": 1.5}, 1),
    "SkipLayerNormalization": ("SkipLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)], {}, 1),
    "SkipRms": ("SkipSimplifiedLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8)], {}, 1),
    "EmbedLayerNormalization": (
        "EmbedLayerNormalization",
        [*(R.integers(0, 2, (2, 3)).astype(np.int32) for _ in range(2)), f(9, 8), f(5, 8), f(2, 8), f(8), f(8)], {}, 1,
    ),
    "FusedConv": ("FusedConv", [f(1, 2, 6, 6), f(3, 2, 3, 3), f(3)], {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1),
    "MultiHeadAttention": (
        "MultiHeadAttention",
        [f(2, 3, 16), f(2, 5, 16), f(2, 5, 16), f(48), np.array([[1, 1, 1, 0, 0], [1] * 5], np.int32)],
        {"num_heads": 2}, 1,
    ),
    "Attention": (
        "Attention", [f(2, 4, 8), f(8, 24), f(24), np.array([[1, 1, 1, 0], [1] * 4], np.int32)], {"num_heads": 2}, 1,
    ),
    "Attention causal": ("Attention", [f(2, 4, 8), f(8, 24), f(24)], {"num_heads": 2, "unidirectional": 1}, 1),
    "RotaryEmbedding": ("RotaryEmbedding", [f(2, 4, 3, 8), PLACES, *TABLES], {}, 1),
    "RotaryEmbedding pairs": ("RotaryEmbedding", [f(2, 4, 3, 8), PLACES, *TABLES], {"interleaved": 1}, 1),
    "RotaryEmbedding flat": ("RotaryEmbedding", [f(2, 3, 32), np.array([4]), *TABLES], {}, 1),
    "MatMulNBits": ("MatMulNBits", [f(3, 40), u8(5, 2, 16), f(10)], {"N": 5, "K": 40, "bits": 4, "block_size": 32}, 1),
    "MatMulNBits zero": (
        "MatMulNBits", [f(3, 64), u8(5, 2, 16), f(10), u8(5)], {"N": 5, "K": 64, "bits": 4, "block_size": 32}, 1,
    ),
    "MatMulIntegerToFloat": (
        "MatMulIntegerToFloat", [u8(3, 4), u8(4, 5), np.float32(0.1), f(5), np.uint8(3), u8(5), f(5)], {}, 1,
    ),
    "QGemm": (
        "QGemm", [*quantised(3, 6), u8(5, 6), f(5), u8(5), i32(5), np.float32(0.3), np.uint8(100)],
        {"transB": 1, "alpha": 0.5}, 1,
    ),
    "QGemm numbers": ("QGemm", [*quantised(3, 6), *quantised(6, 5)], {}, 1),
    "QLinearAdd": ("QLinearAdd", [*quantised(3, 4), *quantised(3, 4), np.float32(0.1), np.uint8(128)], {}, 1),
    "QLinearMul": ("QLinearMul", [*quantised(3, 4), *quantised(4), np.float32(0.3), np.uint8(128)], {}, 1),
    "QLinearSigmoid": ("QLinearSigmoid", [*quantised(3, 4), np.float32(1 / 256), np.uint8(0)], {}, 1),
    "QLinearLeakyRelu": ("QLinearLeakyRelu", [*quantised(3, 4), np.float32(0.05), np.uint8(60)], {"alpha": 0.2}, 1),
    "QLinearGlobalAveragePool": (
        "QLinearGlobalAveragePool", [*quantised(2, 3, 4, 4), np.float32(0.05), np.uint8(120)], {}, 1,
    ),
    "QLinearConcat": (
        "QLinearConcat", [np.float32(0.06), np.uint8(120), *quantised(2, 3), *quantised(2, 4)], {"axis": 1}, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device"), [(n, "reference") for n in CASES] + [(n, "cpu") for n in CASES if "Q" in n or "Integer" in n]
)
def test_agrees_with_onnxruntime(name: str, device: str) -> None:
    op, inputs, attributes, outputs = CASES[name]
    arrays = {f"i{i}": np.asarray(x) for i, x in enumerate(inputs)}
    ports = [helper.make_tensor_value_info(k, NUMBER[a.dtype], a.shape) for k, a in arrays.items()]
    results = [f"o{i}" for i in range(outputs)]
    kind = NUMBER[arrays["i0"].dtype] if op.startswith("QLinear") and op != "QLinearConcat" else TensorProto.FLOAT
    kind = TensorProto.UINT8 if op == "QLinearConcat" or (op == "QGemm" and len(arrays) == 9) else kind
    names = [*results, *(["unused"] if op == "EmbedLayerNormalization" else [])]
    ends = [helper.make_tensor_value_info(r, kind, None) for r in results]
    graph = helper.make_graph([helper.make_node(op, list(arrays), names, domain=MS, **attributes)], "g", ports, ends)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=9)
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(load(proto, device=device).run(arrays), session.run(None, arrays), strict=True):
        assert got.dtype == want.dtype
        step = 1 if want.dtype == np.uint8 else 2e-4  # codes may differ by one: ours round the exact result
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2e-4, atol=step)
