"""What a workload is, and how each contender gets it.

A workload is written once for each contender that can take it: as a graph for strata, as a function for NumPy and
torch, as nodes of an ONNX model for ONNX Runtime and OpenVINO. The first result of every contender is compared with
NumPy's, or torch's where NumPy has no word for it; one that differs is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Run = Callable[[], Any]
CONTENDERS = ("strata", "numpy", "torch", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Onnx:
    """Nodes of an ONNX model: (op, inputs, outputs, attributes); weights by name."""

    nodes: Sequence[tuple[str, Sequence[str], Sequence[str], Mapping[str, Any]]]
    outputs: Sequence[str]
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    opset: int = 20


@dataclass(frozen=True)
class Case:
    """One workload with its data. `graph` builds strata's program from the shapes of `inputs` and `params`."""

    inputs: Mapping[str, np.ndarray]
    graph: Callable[[Any, Mapping[str, Any]], Any] | None = None  # (graph, values by name) -> result
    params: Mapping[str, np.ndarray] = field(default_factory=dict)
    numpy: Callable[..., Any] | None = None  # of inputs and params, by name
    torch: Callable[..., Any] | None = None  # the same on tensors
    onnx: Onnx | None = None
    own: Callable[[], Mapping[str, Run]] | None = None  # contenders that are built some other way
    tolerance: float = 1e-3
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A named case, made when it is needed. `quick` ones make up the short suite."""

    name: str
    group: str
    make: Callable[[], Case]
    quick: bool = True


WORKLOADS: dict[str, Workload] = {}


def workload(name: str, group: str, *, quick: bool = True) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register the function below as the maker of a workload."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        WORKLOADS[name] = Workload(name, group, make, quick)
        return make

    return register


def load_workloads() -> dict[str, Workload]:
    """All workloads."""
    import benchmarks.workloads  # noqa: F401 - registers them

    return WORKLOADS


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float32)
