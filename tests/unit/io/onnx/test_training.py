"""Fine-tuning a file follows torch, and what is written agrees in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import strata as st
from strata.errors import StrataError

torch = pytest.importorskip("torch", reason="torch is the oracle")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime reads what is written")


def conv_net() -> tuple[Any, bytes]:
    """A small net of torch's, and the same as a file."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(36, 5),
    ).eval()  # fmt: skip
    net[1].running_mean.normal_()
    held = {k: v.detach().numpy().copy() for k, v in net.state_dict().items() if "num" not in k}
    norm = ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    nodes = [
        helper.make_node("Conv", ["x", "0.weight", "0.bias"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", *norm], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "5.weight", "5.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(v, k) for k, v in held.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return net, bytes(model.SerializeToString())


def cross_entropy(scores: Any, labels: Any) -> Any:
    logs: Any = st.log_softmax(scores, axis=-1)
    return -st.mean(st.gather_elements(logs, labels.reshape((-1, 1)), 1))


def test_training_follows_torch(tmp_path: Path) -> None:
    net, file = conv_net()
    model = st.onnx.load(file).trainable()
    assert sorted(model.params) == sorted(n for n, _ in net.named_parameters())
    step = st.jit(st.value_and_grad(model.loss(cross_entropy)))
    params: dict[str, Any] = dict(model.params)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 1, 6, 6)).astype(np.float32), rng.integers(0, 5, 16)
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(y))
        loss.backward()
        optimizer.step()
        value, slopes = step(params, x, y)
        params = {name: np.asarray(p) - 0.1 * np.asarray(slopes[name]) for name, p in params.items()}
        assert abs(float(value) - loss.item()) < 1e-5
    model.save(tmp_path / "tuned.onnx", params)
    (found,) = ort.InferenceSession(tmp_path / "tuned.onnx").run(None, {"x": x})
    np.testing.assert_allclose(found, net(torch.tensor(x)).detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(np.asarray(model(params, x)), found, atol=1e-5)


def test_some_parameters_only() -> None:
    _, file = conv_net()
    model = st.onnx.load(file).trainable(["5.weight", "5.bias"])
    slopes = st.grad(model.loss(lambda out: st.mean(out * out)))(model.params, np.ones((2, 1, 6, 6), np.float32))
    assert sorted(slopes) == ["5.bias", "5.weight"]
    with pytest.raises(StrataError, match="zork"):
        model.save(None, {"zork": np.ones(3)})
    with pytest.raises(StrataError, match="missing"):
        model(model.params)
    with pytest.raises(StrataError, match=r"5\.bias"):
        model.save(None, {"5.bias": np.ones(3, np.float32)})


def test_a_loaded_model_is_written_with_its_sizes() -> None:
    _, file = conv_net()
    made = st.onnx.export(st.onnx.load(file))
    onnx.checker.check_model(made, full_check=True)
    dims = [d.dim_param or d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["N", 1, 6, 6]
    x = np.random.default_rng(0).standard_normal((3, 1, 6, 6)).astype(np.float32)
    again, first = (ort.InferenceSession(m) for m in (made.SerializeToString(), file))
    np.testing.assert_allclose(again.run(None, {"x": x})[0], first.run(None, {"x": x})[0], atol=1e-5)


def test_a_small_encoder_follows_torch() -> None:
    """BERT in small, as torch exports it; `python -m tests.onnx_finetune` does the same with a MiniLM."""
    from tests.onnx_finetune import batches, compare, network

    sizes = {
        "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50,
        "max_position_embeddings": 32, "type_vocab_size": 2,
    }  # fmt: skip
    ours, theirs, gap = compare(network(sizes), batches(50, 1, 4))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert gap < 1e-4
