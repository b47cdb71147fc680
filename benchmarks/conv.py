"""Convolutions and convolutional networks against torch, ONNX Runtime and OpenVINO, interleaved, best of many rounds.

    python benchmarks/conv.py [--threads 1,2] [--rounds 12] [--only 3x3] [--nets resnet18,mobilenet]

A single convolution has a bias and a relu. Ours, and torch's `channels_last`, read and write channels last; the others
work in the layout that their interface has, on the same numbers. Networks start and end with channels first, as users
have them. Weights are packed before the clock starts, as they are when a program is bound.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import time
from collections.abc import Callable
from typing import Any

# idle threads of the peers must sleep, not spin, while the others are measured
os.environ.setdefault("KMP_BLOCKTIME", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np

import strata.ops as functions
from strata.mir import Graph, Value
from strata.runtime import CompileOptions, Session

ops: Any = functions
Run = Callable[[], Any]
SHAPES = (
    # name, channels, size, outputs, kernel, stride, groups
    ("3x3 56", 64, 56, 64, 3, 1, 1), ("3x3 28", 128, 28, 128, 3, 1, 1), ("3x3 14", 256, 14, 256, 3, 1, 1),
    ("3x3 7", 512, 7, 512, 3, 1, 1), ("3x3 s2", 128, 56, 128, 3, 2, 1), ("1x1 56", 64, 56, 256, 1, 1, 1),
    ("1x1 s2", 256, 56, 512, 1, 2, 1), ("7x7 s2", 3, 224, 64, 7, 2, 1), ("narrow", 96, 80, 24, 3, 1, 1),
    ("grouped", 128, 28, 128, 3, 1, 4), ("depth-wise 112", 32, 112, 32, 3, 1, 32),
    ("depth-wise 56", 96, 56, 96, 3, 1, 96), ("depth-wise 14", 576, 14, 576, 3, 1, 576),
    ("depth-wise 5x5", 240, 28, 240, 5, 1, 240),
)  # fmt: skip


class Net:
    """A network written once: as our graph, as an ONNX model, and as a function over torch tensors."""

    def __init__(self, name: str, size: int = 224) -> None:
        import onnx

        self.helper = onnx.helper
        self.graph = Graph(name)
        self.image = self.graph.input("image", (1, 3, size, size))
        self.arrays: dict[str, np.ndarray] = {}
        self.nodes: list[Any] = []
        self.steps: list[Callable[[dict[str, Any]], None]] = []
        self.values: dict[str, Value] = {"image": self.image}
        self.rng = np.random.default_rng(0)

    def _param(self, *shape: int) -> str:
        name = f"w{len(self.arrays)}"
        fan = math.prod(shape[1:]) if len(shape) > 1 else 100
        self.arrays[name] = (self.rng.standard_normal(shape) * (2 / fan) ** 0.5).astype(np.float32)
        self.values[name] = self.graph.param(name, shape)
        return name

    def _add(self, kind: str, inputs: list[str], ours: Value, torch_step: Callable[..., Any], **fields: Any) -> str:
        name = f"y{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, inputs, [name], **fields))
        self.values[name] = ours
        self.steps.append(lambda env: env.update({name: torch_step(*(env[i] for i in inputs))}))
        return name

    def conv(self, x: str, out: int, kernel: int, stride: int = 1, groups: int = 1, act: str = "relu") -> str:
        import torch.nn.functional as f

        given = int(self.values[x].shape[1])
        w, b, pad = self._param(out, given // groups, kernel, kernel), self._param(out), kernel // 2
        made = ops.conv2d(*(self.values[n] for n in (x, w, b)), stride=stride, padding=pad, groups=groups)
        y = self._add(
            "Conv", [x, w, b], made, lambda v, w, b: f.conv2d(v, w, b, stride, pad, 1, groups),
            strides=[stride] * 2, pads=[pad] * 4, group=groups, kernel_shape=[kernel] * 2,
        )  # fmt: skip
        return self.relu(y) if act else y

    def relu(self, x: str) -> str:
        import torch

        return self._add("Relu", [x], ops.relu(self.values[x]), torch.relu)

    def add(self, x: str, y: str) -> str:
        return self._add("Add", [x, y], self.values[x] + self.values[y], lambda a, b: a + b)

    def max_pool(self, x: str) -> str:
        import torch.nn.functional as f

        made = ops.max_pool2d(self.values[x], 3, stride=2, padding=1)
        fields = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
        return self._add("MaxPool", [x], made, lambda v: f.max_pool2d(v, 3, 2, 1), **fields)

    def head(self, x: str, classes: int = 1000) -> str:
        """The mean of each channel, and a linear map of it."""
        value = self.values[x]
        channels = int(value.shape[1])
        mean = ops.mean(value, axis=(2, 3), keepdims=True)
        pooled = self._add("GlobalAveragePool", [x], mean, lambda v: v.mean((2, 3), keepdim=True))
        flat = self._add("Flatten", [pooled], mean.reshape((1, channels)), lambda v: v.flatten(1))
        w = self._param(channels, classes)
        return self._add("MatMul", [flat, w], self.values[flat] @ self.values[w], lambda a, b: a @ b)

    def finished(self, result: str) -> Net:
        self.result = result
        self.graph.outputs(self.values[result])
        return self

    def onnx_bytes(self) -> bytes:
        import onnx

        def info(name: str) -> Any:
            return self.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(self.values[name].shape))

        weights = [onnx.numpy_helper.from_array(a, n) for n, a in self.arrays.items()]
        graph = self.helper.make_graph(self.nodes, self.graph.name, [info("image")], [info(self.result)], weights)
        model = self.helper.make_model(graph, opset_imports=[self.helper.make_opsetid("", 17)], ir_version=8)
        return bytes(model.SerializeToString())


def resnet18() -> Net:
    net = Net("resnet18")
    x = net.max_pool(net.conv("image", 64, 7, 2))
    for stage, channels in enumerate((64, 128, 256, 512)):
        for i in range(2):
            stride = 2 if i == 0 and stage else 1
            y = net.conv(net.conv(x, channels, 3, stride), channels, 3, act="")
            x = net.relu(net.add(y, net.conv(x, channels, 1, stride, act="") if stride == 2 else x))
    return net.finished(net.head(x))


def resnet50() -> Net:
    net = Net("resnet50")
    x = net.max_pool(net.conv("image", 64, 7, 2))
    for stage, (channels, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for i in range(blocks):
            stride = 2 if i == 0 and stage else 1
            y = net.conv(net.conv(net.conv(x, channels, 1), channels, 3, stride), 4 * channels, 1, act="")
            x = net.relu(net.add(y, net.conv(x, 4 * channels, 1, stride, act="") if i == 0 else x))
    return net.finished(net.head(x))


def mobilenet() -> Net:
    """MobileNetV2: wide inside, narrow at the ends of a block."""
    net = Net("mobilenet")
    x, given = net.conv("image", 32, 3, 2), 32
    for grow, out, count, first in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for i in range(count):
            stride = first if i == 0 else 1
            y = net.conv(x, given * grow, 1) if grow > 1 else x
            y = net.conv(net.conv(y, given * grow, 3, stride, given * grow), out, 1, act="")
            x = net.add(y, x) if stride == 1 and given == out else y
            given = out
    return net.finished(net.head(net.conv(x, 1280, 1)))


NETS = {"resnet18": resnet18, "resnet50": resnet50, "mobilenet": mobilenet}


def ours(graph: Graph, params: dict[str, np.ndarray], feed: np.ndarray, threads: int) -> Run:
    compiled = Session("cpu").compile(graph, CompileOptions(threads=threads))
    compiled.set_params(params)
    name = graph.input_names[0]
    return lambda: compiled.run({name: feed})[0]


def peers(model: bytes, feed: np.ndarray, threads: int) -> dict[str, Run]:
    """ONNX Runtime and OpenVINO, where they are installed."""
    found: dict[str, Run] = {}
    try:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        found["ort"] = lambda: session.run(None, {"image": feed})[0]
    except ImportError:
        pass
    try:
        import openvino as ov

        core = ov.Core()
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        request = core.compile_model(core.read_model(io.BytesIO(model)), "CPU", settings).create_infer_request()
        found["openvino"] = lambda: request.infer({"image": feed})[0]
    except ImportError:
        pass
    return found


def best_times(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """The shortest time of each run over interleaved bursts."""
    best, repeats = dict.fromkeys(runs, math.inf), {}
    for name, run in runs.items():
        run()
        begin = time.perf_counter()
        run()
        repeats[name] = max(1, min(20, int(0.01 / max(time.perf_counter() - begin, 1e-6))))
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.003)
            run()
            for _ in range(repeats[name]):
                begin = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def single(row: tuple[str, int, int, int, int, int, int], threads: int) -> tuple[dict[str, Run], float]:
    """Runs of one convolution, and its operations."""
    import torch

    _, channels, size, outputs, kernel, stride, groups = row
    net = Net("conv", size)
    net.values["image"] = net.image = net.graph.input("x", (1, channels, size, size))
    net.finished(net.conv("image", outputs, kernel, stride, groups))
    feed = np.random.default_rng(1).standard_normal((1, channels, size, size)).astype(np.float32)
    last = np.ascontiguousarray(feed.transpose(0, 2, 3, 1))
    g = Graph("conv_last")
    w, b = (g.param(n, a.shape) for n, a in net.arrays.items())
    y = ops.conv2d(g.input("image", last.shape).transpose((0, 3, 1, 2)), w, b, stride, kernel // 2, 1, groups)
    g.outputs(ops.relu(y).transpose((0, 2, 3, 1)))
    runs = {"ours": ours(g, net.arrays, last, threads)} | peers(net.onnx_bytes(), feed, threads)
    x, weight = torch.from_numpy(feed), torch.from_numpy(net.arrays["w0"])
    bias = torch.from_numpy(net.arrays["w1"])
    wide = {"torch": (x, weight), "torch last": tuple(t.to(memory_format=torch.channels_last) for t in (x, weight))}
    for name, (image, taps) in wide.items():

        def run(image: Any = image, taps: Any = taps) -> Any:
            return torch.relu(torch.nn.functional.conv2d(image, taps, bias, stride, kernel // 2, 1, groups))

        runs[name] = run
    made = runs["ours"]()
    assert np.allclose(made.transpose(0, 3, 1, 2), runs["torch"]().numpy(), atol=1e-3), "results differ"
    return runs, 2.0 * made.size * channels // groups * kernel * kernel


def network(name: str, threads: int) -> dict[str, Run]:
    import torch

    net = NETS[name]()
    feed = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype(np.float32)
    runs = {"ours": ours(net.graph, net.arrays, feed, threads)} | peers(net.onnx_bytes(), feed, threads)
    for label, layout in (("torch", torch.contiguous_format), ("torch last", torch.channels_last)):
        tensors = {n: torch.from_numpy(a) for n, a in {**net.arrays, "image": feed}.items()}
        tensors = {n: t.to(memory_format=layout) if t.ndim == 4 else t for n, t in tensors.items()}

        def run(tensors: dict[str, Any] = tensors) -> Any:
            values = dict(tensors)
            with torch.inference_mode():
                for step in net.steps:
                    step(values)
            return values[net.result].numpy()

        runs[label] = run
    wanted = runs["torch"]()
    assert np.abs(runs["ours"]() - wanted).max() <= 1e-3 * np.abs(wanted).max(), "results differ"
    return runs


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--nets", default=",".join(NETS))
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {"convolutions": [], "networks": []}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        print(f"\n{threads} thread(s)   GFLOP/s of convolutions, milliseconds of networks, times over the best peer")
        for row in SHAPES:
            if options.only and options.only not in row[0]:
                continue
            runs, operations = single(row, threads)
            times = best_times(runs, options.rounds)
            ratio = min(t for key, t in times.items() if key != "ours") / times["ours"]
            ratios["convolutions"].append(ratio)
            shown = "  ".join(f"{key} {operations / t / 1e9:6.1f}" for key, t in times.items())
            print(f"{row[0]:15s} {shown}   {ratio:5.2f}x", flush=True)
        for name in filter(None, options.nets.split(",")):
            times = best_times(network(name, threads), options.rounds)
            ratio = min(t for key, t in times.items() if key != "ours") / times["ours"]
            ratios["networks"].append(ratio)
            shown = "  ".join(f"{key} {t * 1e3:7.2f}" for key, t in times.items())
            print(f"{name:15s} {shown}   {ratio:5.2f}x", flush=True)
    for kind, found in ratios.items():
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            print(f"{kind}: geometric mean {mean:.2f}x, worst {min(found):.2f}x")


if __name__ == "__main__":
    main()
