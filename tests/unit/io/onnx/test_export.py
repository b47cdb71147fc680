"""Graphs written as ONNX: checked by onnx, read back by us, and run by onnxruntime where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX models need the package onnx")

import strata as st  # noqa: E402 - after the package that it needs
from strata import ops  # noqa: E402
from strata.errors import LowerError  # noqa: E402
from strata.io.onnx import export, load  # noqa: E402
from strata.mir import evaluate  # noqa: E402

N = st.sym("n")
CASES: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x: (x * 2.0 - ops.exp(x) / 3.0).maximum(0.5),
    "softmax": lambda x: ops.softmax(x, 1),
    "layer norm": lambda x: ops.layer_norm(x, np.ones(6, np.float32), np.zeros(6, np.float32)),
    "activations": lambda x: ops.gelu(x) + ops.silu(x) + ops.relu(x) + ops.softplus(x),
    "reductions": lambda x: ops.mean(x, 1) + ops.max(x, 1) + ops.var(x, 1),
    "movement": lambda x: ops.concat([x[:, ::2], ops.flip(x, 1)[:, 1:3]], 1).reshape((-1, 5)).transpose(1, 0),
    "sizes": lambda x: ops.broadcast_to(ops.sum(x, 0, keepdims=True), x.shape) + ops.iota(6),
    "selection": lambda x: ops.where(x > 0, x, ops.zeros_like(x)).argmax(1),
    "matmul": lambda x: x @ np.arange(12, dtype=np.float32).reshape(6, 2),
    "top": lambda x: ops.topk(x, 2, 1)[0],
    "gather": lambda x: ops.take(x, np.array([3, 0]), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, rng: np.random.Generator) -> None:
    graph = st.Graph(name.replace(" ", "_"))
    x = graph.input("x", (N, 6))
    graph.outputs(CASES[name](x))
    proto = export(graph)
    onnx.checker.check_model(proto)
    for n in (1, 5):
        data = rng.standard_normal((n, 6), dtype=np.float32)
        (want,) = evaluate(graph, {"x": data})
        np.testing.assert_allclose(load(proto, device="reference").run(x=data)[0], want, rtol=1e-5, atol=1e-6)
        if find_spec("onnxruntime") is not None:
            import onnxruntime

            session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
            np.testing.assert_allclose(session.run(None, {"x": data})[0], want, rtol=1e-4, atol=1e-5)


def test_parameters_and_files(tmp_path: Path, rng: np.random.Generator) -> None:
    graph = st.Graph("net")
    x, w, b = graph.input("x", (N, 3, 8, 8)), graph.param("w", (4, 3, 3, 3)), graph.param("b", (4,))
    graph.outputs(ops.max_pool2d(ops.relu(ops.conv2d(x, w, b, padding=1)), 2))
    weights = {"w": rng.standard_normal((4, 3, 3, 3), dtype=np.float32), "b": np.arange(4, dtype=np.float32)}
    export(graph, tmp_path / "net.onnx", params=weights)
    data = rng.standard_normal((2, 3, 8, 8), dtype=np.float32)
    m = load(tmp_path / "net.onnx", device="reference")
    assert [p.name for p in m.inputs] == ["x"]
    (want,) = evaluate(graph, {"x": data, **weights})
    np.testing.assert_allclose(m.run(x=data)[0], want, rtol=1e-5, atol=1e-5)


def test_functions_of_tensors() -> None:
    w = st.tensor([[1.0, 2.0], [3.0, 4.0]])
    proto = export(lambda x: (x @ w).relu(), None, np.zeros((3, 2), np.float32))
    onnx.checker.check_model(proto)
    data = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_allclose(load(proto, device="reference").run(x0=data)[0], data @ w.numpy())


def test_what_onnx_lacks_is_listed() -> None:
    graph = st.Graph("g")
    x = graph.input("x", (3, 3))
    graph.outputs(ops.cholesky(x) + ops.lgamma(x))
    with pytest.raises(LowerError, match="cholesky, lgamma"):
        export(graph)
