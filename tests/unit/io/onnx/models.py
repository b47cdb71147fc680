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


def node_model(
    op: str, inputs: Sequence[np.ndarray | None], outputs: int, fixed: Sequence[int] = (), **attributes: Any
) -> Any:
    """A model of one node of com.microsoft; the inputs of these numbers are initializers."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    made = helper.make_node(op, names, [f"y{i}" for i in range(outputs)], domain="com.microsoft", **attributes)
    held = [numpy_helper.from_array(x, names[i]) for i, x in enumerate(inputs) if x is not None and i in fixed]
    ports = [
        port(names[i], x.shape, helper.np_dtype_to_tensor_dtype(x.dtype))
        for i, x in enumerate(inputs)
        if x is not None and i not in fixed
    ]
    results = [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)]
    graph = helper.make_graph([made], "g", ports, results, held)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=9
    )
