"""ONNX models in int8: convolutional nets trained on digits keep their accuracy, in strata and in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata.errors import OptionError

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
ort = pytest.importorskip("onnxruntime")


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images[:, None] / 16).astype(np.float32), found.target


def trained(residual: bool) -> list[np.ndarray]:
    """Weights of a small net after some epochs: two convolutions, one of which may be added to its input."""
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(a) for a in digits())
    parts = [torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.Linear(16 * 16, 10)]
    adam = torch.optim.Adam([p for part in parts for p in part.parameters()], 1e-2)
    for _ in range(30):
        x = torch.relu(parts[0](images[:600]))
        y = torch.relu(parts[1](x))
        y = torch.nn.functional.max_pool2d(x + y if residual else y, 2).flatten(1)
        loss = torch.nn.functional.cross_entropy(parts[2](y), labels[:600])
        adam.zero_grad()
        loss.backward()
        adam.step()
    return [p.detach().numpy() for part in parts for p in part.parameters()]


def saved(path: Path, residual: bool) -> Path:
    weights = trained(residual)
    names = ["w0", "b0", "w1", "b1", "w2", "b2"]
    node = onnx.helper.make_node
    nodes = [node("Conv", ["x", "w0", "b0"], ["c0"], pads=[1] * 4), node("Relu", ["c0"], ["r0"]),
             node("Conv", ["r0", "w1", "b1"], ["c1"], pads=[1] * 4), node("Relu", ["c1"], ["r1"])]  # fmt: skip
    nodes += [node("Add", ["r0", "r1"], ["s"])] if residual else [node("Identity", ["r1"], ["s"])]
    nodes += [node("MaxPool", ["s"], ["p"], kernel_shape=[2, 2], strides=[2, 2]), node("Flatten", ["p"], ["f"]),
              node("Gemm", ["f", "w2", "b2"], ["y"], transB=1)]  # fmt: skip
    graph = onnx.helper.make_graph(
        nodes, "net", [onnx.helper.make_tensor_value_info("x", 1, ["N", 1, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", 1, ["N", 10])],
        [onnx.numpy_helper.from_array(w, n) for n, w in zip(names, weights, strict=True)],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("residual", [False, True])
def test_accuracy_stays_within_one_percent(residual: bool, tmp_path: Path) -> None:
    images, labels = digits()
    path = saved(tmp_path / "net.onnx", residual)
    feeds = [{"x": images[i : i + 100]} for i in range(0, 300, 100)]
    made = st.quantize(path, format="int8", calibration=feeds, output=tmp_path / "net.int8.onnx")
    held, wanted = images[1200:], labels[1200:]

    def right(scores: np.ndarray) -> float:
        return float((scores.argmax(-1) == wanted).mean())

    before = right(st.load(path).run(x=held)[0])
    session = ort.InferenceSession(tmp_path / "net.int8.onnx", providers=["CPUExecutionProvider"])
    for scores in (made.run(x=held)[0], session.run(None, {"x": held})[0]):
        assert right(scores) >= before - 0.01
    assert before > 0.8
    assert [layer.kind for layer in made.report.layers] == ["int8"] * 3
    kinds = {t.data_type for t in onnx.load(tmp_path / "net.int8.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in kinds
    assert made.report.bytes_after < 0.6 * made.report.bytes_before


def test_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(OptionError, match="calibrated with arrays"):
        st.quantize(path, format="int8")
    with pytest.raises(OptionError, match="not to 'q4_k'"):
        st.quantize(path)
