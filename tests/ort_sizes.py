"""Memory of a session over many sizes of input, with strata.ort and with onnxruntime: `python -m tests.ort_sizes`.

A small convolutional net with open sizes runs on images of random sizes, in a process of its own for each of the two.
The memory after a tenth of the runs and after all of them is told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

COUNT, LARGEST = 2000, 160


def net() -> bytes:
    """Convolutions, a pool, and a mean over what is left."""
    import onnx
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(0)
    shapes = {"a": (16, 3, 3, 3), "b": (32, 16, 3, 3), "c": (32, 32, 1, 1)}
    held = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32) * 0.1, n) for n, s in shapes.items()]
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["p"], **pads), helper.make_node("Relu", ["p"], ["q"]),
        helper.make_node("MaxPool", ["q"], ["r"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["r", "b"], ["s"], **pads), helper.make_node("Relu", ["s"], ["t"]),
        helper.make_node("Conv", ["t", "c"], ["u"]), helper.make_node("GlobalAveragePool", ["u"], ["y"]),
    ]  # fmt: skip
    port, kind = helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    graph = helper.make_graph(nodes, "net", [port("x", kind, ["n", 3, "h", "w"])], [port("y", kind, None)], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def resident() -> float:
    """Megabytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4096 / 1e6


def measure(module: Any, count: int, largest: int) -> list[float]:
    """Memory after a tenth of the runs, and after all."""
    options = module.SessionOptions()
    options.intra_op_num_threads = 1
    session = module.InferenceSession(net(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    told = []
    image = np.zeros((2, 3, largest, largest), np.float32)
    for i in range(count):
        n, h, w = (int(rng.integers(low, high + 1)) for low, high in ((1, 2), (16, largest), (16, largest)))
        session.run(None, {"x": np.ascontiguousarray(image[:n, :, :h, :w])})
        if i + 1 in (count // 10, count):
            told.append(resident())
    return told


def main(argv: list[str]) -> int:
    if argv:
        import importlib

        print("RESULT" + json.dumps(measure(importlib.import_module(argv[0]), COUNT, LARGEST)))
        return 0
    for name in ("strata.ort", "onnxruntime"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.ort_sizes", name], capture_output=True, text=True, check=True
        )
        early, late = json.loads(done.stdout.partition("RESULT")[2])
        print(f"{name}: {early:.0f} MB after {COUNT // 10} sizes, {late:.0f} MB after {COUNT}: {late - early:+.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
