"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str] | None
FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes)


def port(name: str, shape: Dims, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    opset: int = 21,
    initializers: dict[str, np.ndarray] | None = None,
    functions: Sequence[Any] = (),
    domains: Sequence[str] = (),
) -> Any:
    held = [numpy_helper.from_array(a, name) for name, a in (initializers or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), held)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions))
