"""Contenders: a case as something that can be called, on a number of threads."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.registry import Case, Onnx, Run


def installed() -> list[str]:
    """Contenders that can run here."""
    found = ["strata", "numpy"]
    found += [name for name in ("torch",) if importlib.util.find_spec(name)]
    if importlib.util.find_spec("onnx"):  # both take their programs as ONNX models
        found += [name for name in ("onnxruntime", "openvino") if importlib.util.find_spec(name)]
    return found


def make_runs(case: Case, threads: int, only: str | None = None) -> dict[str, Run]:
    """Each contender that can take the case, or the one that is named."""
    makers = {"strata": _strata, "numpy": _numpy, "torch": _torch, "onnxruntime": _onnxruntime, "openvino": _openvino}
    runs: dict[str, Run] = {}
    for name in installed() if only is None else [only]:
        with contextlib.suppress(_Absent):
            runs[name] = makers[name](case, threads)
    if case.own is not None:
        set_threads(threads)
        runs |= case.own()
    return runs


class _Absent(Exception):  # noqa: N818 - not an error: the contender has no form of this case
    pass


def set_threads(threads: int) -> None:
    """Threads of contenders that keep them in a setting of the process."""
    from benchmarks.gemm import set_blas_threads

    set_blas_threads(threads)
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(threads)


def _strata(case: Case, threads: int) -> Run:
    if case.graph is None:
        raise _Absent
    import strata as st

    g = st.Graph("workload")
    values: dict[str, Any] = {n: g.input(n, a.shape, a.dtype) for n, a in case.inputs.items()}
    values |= {n: g.param(n, a.shape, a.dtype) for n, a in case.params.items()}
    made = case.graph(g, values)
    g.outputs(*(made if isinstance(made, tuple) else (made,)))
    compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
    compiled.set_params(case.params)
    feeds = dict(case.inputs)
    return lambda: compiled.run(feeds)


def _numpy(case: Case, threads: int) -> Run:
    if case.numpy is None:
        raise _Absent
    set_threads(threads)
    arrays = {**case.inputs, **case.params}
    return lambda: case.numpy(**arrays)  # type: ignore[misc]


def _torch(case: Case, threads: int) -> Run:
    if case.torch is None:
        raise _Absent
    import torch

    set_threads(threads)
    tensors = {n: torch.from_numpy(a) for n, a in {**case.inputs, **case.params}.items()}

    def run() -> Any:
        with torch.inference_mode():
            return case.torch(**tensors)  # type: ignore[misc]

    return run


def onnx_bytes(case: Case) -> bytes:
    """The case as a serialised ONNX model."""
    from onnx import helper, numpy_helper

    program = case.onnx
    assert isinstance(program, Onnx)
    weights = {**case.params, **program.weights}
    kinds = {np.dtype(np.float32): 1, np.dtype(np.int64): 7, np.dtype(np.int32): 6}
    nodes = [helper.make_node(op, list(a), list(b), **kw) for op, a, b, kw in program.nodes]
    used = {name for _, a, _, _ in program.nodes for name in a}
    graph = helper.make_graph(
        nodes, "workload",
        [helper.make_tensor_value_info(n, kinds[a.dtype], a.shape) for n, a in case.inputs.items()],
        [helper.make_empty_tensor_value_info(n) for n in program.outputs],
        [numpy_helper.from_array(a, n) for n, a in weights.items() if n in used],
    )  # fmt: skip
    for out in graph.output:
        out.type.tensor_type.elem_type = 1
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", program.opset)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data


def _onnxruntime(case: Case, threads: int) -> Run:
    if case.onnx is None:
        raise _Absent
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 4
    session = ort.InferenceSession(onnx_bytes(case), settings, providers=["CPUExecutionProvider"])
    feeds = dict(case.inputs)
    return lambda: session.run(None, feeds)


def _openvino(case: Case, threads: int) -> Run:
    if case.onnx is None:
        raise _Absent
    import openvino as ov

    core = ov.Core()
    model = core.read_model(onnx_bytes(case), b"")
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    feeds = dict(case.inputs)
    return lambda: list(request.infer(feeds).values())


def first_array(result: Any) -> np.ndarray:
    """The first output of a contender, as f64."""
    while isinstance(result, (list, tuple)):
        result = result[0]
    if isinstance(result, Mapping):
        result = next(iter(result.values()))
    if hasattr(result, "detach"):
        result = result.detach().numpy()
    found = np.asarray(result)
    return np.abs(found).astype(np.float64) if found.dtype.kind == "c" else found.astype(np.float64)
