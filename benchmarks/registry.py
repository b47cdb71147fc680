"""What a workload is, and how each contender gets it.

A workload is written once for each contender that can take it: as a graph for strata, as a function for NumPy, torch,
JAX and tinygrad, as nodes of an ONNX model (or a file) for ONNX Runtime and OpenVINO; anything else is in `own`. Each
contender has a process of its own, which calls only its own maker. The first result of every contender is compared with
NumPy's, or with that of the first that has the workload in the order of JUDGES; one that differs is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], Any]
Maker = Callable[[int], Run]  # of the number of threads
CONTENDERS = (
    "strata", "numpy", "torch", "torch.compile", "onnxruntime", "openvino", "jax", "tinygrad", "llama.cpp",
)  # fmt: skip
JUDGES = ("numpy", "torch", "onnxruntime", "llama.cpp")
COMPILERS = ("torch.compile", "tinygrad")  # these take seconds for a workload


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
    onnx: Onnx | Path | None = None  # nodes, or a model file
    jax: Callable[..., Any] | None = None  # the same on arrays of JAX
    tinygrad: Callable[..., Any] | None = None  # the same on tensors of tinygrad
    own: Mapping[str, Maker] = field(default_factory=dict)  # contenders that are built some other way
    tolerance: float = 1e-3
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A named case, made when it is needed. `quick` ones make up the short suite, `compilers` have COMPILERS in it."""

    name: str
    group: str
    make: Callable[[], Case]
    quick: bool = True
    compilers: bool = False


WORKLOADS: dict[str, Workload] = {}


def workload(
    name: str, group: str, *, quick: bool = True, compilers: bool = False
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register the function below as the maker of a workload."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        WORKLOADS[name] = Workload(name, group, make, quick, compilers)
        return make

    return register


def load_workloads() -> dict[str, Workload]:
    """All workloads."""
    import benchmarks.language  # these register them
    import benchmarks.onnx_models
    import benchmarks.quantised
    import benchmarks.torch_compile
    import benchmarks.training_steps
    import benchmarks.workloads  # noqa: F401

    return WORKLOADS


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float32)
