"""Networks of 8-bit codes as exporters write them: every layer between QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contenders import onnx_bytes
from benchmarks.registry import Case, Onnx, Run, normal, workload


class _Network:
    """Nodes and arrays of a network, one quantised layer after the other. Scales keep the numbers near one."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = []
        self.held: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(0)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}{len(self.nodes)}"
        self.nodes.append((op, list(inputs), [name], attributes))
        return name

    def hold(self, array: Any) -> str:
        name = f"w{len(self.held)}"
        self.held[name] = np.asarray(array)
        return name

    def coded(self, x: str, scale: float = 0.04, zero: int = 128) -> str:
        """To codes and back."""
        s, z = self.hold(np.float32(scale)), self.hold(np.uint8(zero))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, s, z), s, z)

    def weights(self, *shape: int) -> str:
        """Codes with a scale for each output."""
        codes = self.hold(self.rng.integers(-127, 128, shape).astype(np.int8))
        spread = 1.4 / (73 * np.sqrt(np.prod(shape[1:])))
        scale = self.hold(np.float32(spread * (0.5 + self.rng.random(shape[0]))))
        return self.node("DequantizeLinear", codes, scale, self.hold(np.zeros(shape[0], np.int8)), axis=0)

    def case(self, x: np.ndarray, result: str) -> Case:
        self.nodes.append(("Identity", [result], ["y"], {}))
        program = Onnx(self.nodes, ["y"], self.held)
        # a number halfway between two codes may become either one, and runtimes add in other orders
        case = Case({"x": x}, onnx=program, own={"strata": lambda _: _with_strata(case)}, tolerance=0.15)
        return case


def _with_strata(case: Case) -> Run:
    from strata.io.onnx import load

    model = load(onnx_bytes(case))
    return lambda: model.run(case.inputs)


def _residual_blocks(channels: int, size: int, blocks: int) -> Case:
    """Pairs of 3 × 3 convolutions with a sum around them, as in a ResNet."""
    n = _Network()
    x = n.coded("x")
    for _ in range(blocks):
        first = n.node("Conv", x, n.weights(channels, channels, 3, 3), pads=[1] * 4)
        first = n.coded(n.node("Relu", first), 0.02, 0)
        second = n.coded(n.node("Conv", first, n.weights(channels, channels, 3, 3), pads=[1] * 4))
        x = n.coded(n.node("Relu", n.node("Add", x, second)), 0.03, 0)
    return n.case(normal(1, channels, size, size), x)


def _layers(rows: int, widths: tuple[int, ...]) -> Case:
    """Fully connected layers with relu."""
    n = _Network()
    x = n.coded("x")
    for a, b in itertools.pairwise(widths):
        x = n.coded(n.node("Relu", n.node("Gemm", x, n.weights(b, a), transB=1)), 0.02, 0)
    return n.case(normal(rows, widths[0]), x)


_CASES: dict[str, Callable[[], Case]] = {
    "int8 residual blocks 3x3 28² 128": partial(_residual_blocks, 128, 28, 4),
    "int8 layers 64x1024x1024x1024": partial(_layers, 64, (1024, 1024, 1024, 1024)),
}
for _name, _make in _CASES.items():
    workload(_name, "quantised models")(_make)
