"""com.microsoft operators of quantised and generative models, beside onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import strata as st

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is the oracle")
B, H, KV, D = 2, 4, 2, 16


def both(op: str, inputs: list[Any], outputs: int, fixed: tuple[int, ...] = (), **attributes: Any) -> tuple[Any, Any]:
    """What strata and onnxruntime give for one node; inputs at some places are initializers."""
    names = ["" if x is None else f"i{i}" for i, x in enumerate(inputs)]
    given = {f"i{i}": x for i, x in enumerate(inputs) if x is not None and i not in fixed}
    held = [numpy_helper.from_array(inputs[i], f"i{i}") for i in fixed]
    node = helper.make_node(op, names, [f"o{i}" for i in range(outputs)], domain="com.microsoft", **attributes)
    ports = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for k, x in given.items()
    ]
    graph = helper.make_graph([node], "one", ports, [onnx.ValueInfoProto(name=f"o{i}") for i in range(outputs)], held)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    file = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
    theirs = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, given)
    return st.ort.InferenceSession(file).run(None, given), theirs


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize(("length", "past", "last"), [(3, 0, (2, 1)), (1, 5, (5, 5)), (1, 5, (5, 3))])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_query_attention(
    rotary: int, length: int, past: int, last: tuple[int, int], packed: bool, rng: np.random.Generator
) -> None:
    angles = np.outer(np.arange(32), 10.0 ** -(np.arange(D // 2) / D))
    tables = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)] if rotary else []
    parts: list[Any] = [floats(rng, B, length, (H + 2 * KV) * D), None, None]
    if not packed:
        parts = [floats(rng, B, length, c * D) for c in (H, KV, KV)]
    known = [floats(rng, B, KV, past, D) for _ in range(2)]
    numbers = [np.array(last, np.int32), np.array(past + length, np.int32)]
    mine, real = both(
        "GroupQueryAttention", [*parts, *known, *numbers, *tables], 3, num_heads=H, kv_num_heads=KV, do_rotary=rotary
    )
    for row, end in enumerate(last):
        tokens = min(end + 1, length)  # the others are padding
        np.testing.assert_allclose(mine[0][row, :tokens], real[0][row, :tokens], atol=2e-6)
        for a, b in zip(mine[1:], real[1:], strict=True):
            np.testing.assert_allclose(a[row, :, : end + 1], b[row, :, : end + 1], atol=2e-6)


def test_dynamic_quantize_lstm(rng: np.random.Generator) -> None:
    """onnxruntime rounds the inputs of each step to 8 bits, which costs it the second digit."""
    w, r = rng.integers(-100, 100, (1, 6, 16)).astype(np.int8), rng.integers(-100, 100, (1, 4, 16)).astype(np.int8)
    scale, zero = np.array([0.01], np.float32), np.array([0], np.int8)
    state = [floats(rng, 1, 2, 4) for _ in range(2)]
    inputs = [floats(rng, 5, 2, 6), w, r, floats(rng, 1, 32), None, *state, None, scale, zero, scale, zero]
    mine, real = both("DynamicQuantizeLSTM", inputs, 3, (1, 2, 3, 8, 9, 10, 11), hidden_size=4)
    for a, b in zip(mine, real, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03)


@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_nbits(bits: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 256, (16, 2, 32 * bits // 8)).astype(np.uint8)
    mine, real = both(
        "MatMulNBits", [floats(rng, 3, 64), codes, floats(rng, 32)], 1, (1, 2), K=64, N=16, bits=bits, block_size=32
    )
    np.testing.assert_allclose(mine[0], real[0], rtol=1e-4, atol=1e-3)


def test_codes(rng: np.random.Generator) -> None:
    def u8(*shape: int) -> np.ndarray:
        return rng.integers(0, 255, shape).astype(np.uint8)

    def scale(x: float) -> np.ndarray:
        return np.array(x, np.float32)

    zero = np.array(5, np.uint8)
    codes, point = u8(3, 4), np.array(0, np.uint8)
    chosen = [rng.random((3, 4)) > 0.5, codes, scale(0.1), zero, u8(3, 4), scale(0.2), zero, scale(0.15), zero]
    table = [u8(10, 16), np.array([[1, 3]]), floats(rng, 10, 2)]
    blocks = {"block_size": 16, "bits": 4, "quantize_axis": 1, "gather_axis": 0}
    pairs = [
        both("QLinearSoftmax", [codes, scale(0.05), zero, scale(1 / 255), point], 1, (1, 2, 3, 4), axis=-1, opset=13),
        both("QLinearWhere", chosen, 1, (2, 3, 5, 6, 7, 8)),
        both("GatherBlockQuantized", table, 1, (0, 2), **blocks),
        both("FusedGemm", [floats(rng, 3, 4), floats(rng, 4, 5), floats(rng, 5)], 1, activation="Relu"),
        both("QuantizeLinear", [floats(rng, 3, 4), scale(0.1), np.array(100, np.uint16)], 1, (1, 2)),
    ]
    for (a,), (b,) in pairs:
        limit = 1 if a.dtype == np.uint8 else 1e-5
        assert np.abs(a.astype(np.float64) - b.astype(np.float64)).max() <= limit


@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_matmuls_that_share_a_dynamically_quantised_operand(
    kind: str, per_channel: bool, tmp_path: Any, rng: np.random.Generator
) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization", reason="it quantises the model")
    nodes, held, ports = [], [], []
    for name, width in (("q", 32), ("k", 32), ("v", 16)):
        held += [
            numpy_helper.from_array(floats(rng, 24, width), f"{name}w"),
            numpy_helper.from_array(floats(rng, width), f"{name}b"),
        ]
        nodes += [
            helper.make_node("MatMul", ["x", f"{name}w"], [f"{name}m"]),
            helper.make_node("Add", [f"{name}m", f"{name}b"], [name]),
        ]
        ports.append(helper.make_tensor_value_info(name, 1, ["B", "S", width]))
    graph = helper.make_graph(nodes, "qkv", [helper.make_tensor_value_info("x", 1, ["B", "S", 24])], ports, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "a.onnx")
    quantization.quantize_dynamic(
        tmp_path / "a.onnx",
        tmp_path / "b.onnx",
        weight_type=getattr(quantization.QuantType, kind),
        per_channel=per_channel,
    )
    x = floats(rng, 2, 5, 24)
    theirs = ort.InferenceSession(tmp_path / "b.onnx").run(None, {"x": x})
    for a, b in zip(st.ort.InferenceSession(tmp_path / "b.onnx").run(None, {"x": x}), theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
