"""Contenders: a case as something that can be called, on a number of threads."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.registry import CONTENDERS, Case, Onnx, Run


def installed() -> list[str]:
    """Contenders that can run here."""
    have = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax", "tinygrad", "xllamacpp")}
    # both take their programs as ONNX models
    have |= {n: all(importlib.util.find_spec(x) for x in (n, "onnx")) for n in ("onnxruntime", "openvino")}
    have |= {"strata": True, "numpy": True, "llama.cpp": have["xllamacpp"]}
    have["torch.compile"] = have["torch"] and shutil.which("g++") is not None
    have["tinygrad"] = have["tinygrad"] and shutil.which("clang") is not None  # its processor backend calls it
    return [name for name in CONTENDERS if have[name]]


def takers(case: Case) -> list[str]:
    """Contenders that can run here and have a form of the case."""
    forms = {
        "strata": case.graph, "numpy": case.numpy, "torch": case.torch, "torch.compile": case.torch,
        "onnxruntime": case.onnx, "openvino": case.onnx, "jax": case.jax, "tinygrad": case.tinygrad,
    }  # fmt: skip
    return [name for name in installed() if name in case.own or forms.get(name) is not None]


def make_run(name: str, case: Case, threads: int) -> Run:
    """One contender's form of the case, ready to be called."""
    if name in case.own:
        set_threads(name, threads)
        return case.own[name](threads)
    return _MAKERS[name](case, threads)


def settings(name: str, threads: int) -> dict[str, str]:
    """What the process of a contender has in its environment. Nothing else is tuned: users do not do it either."""
    if name == "strata":
        return {"STRATA_NUM_THREADS": str(threads)}
    if name == "jax":
        return {"JAX_PLATFORMS": "cpu"}
    if name == "tinygrad":
        return {"DEV": "CPU", "CPU_COUNT": str(threads)}
    return {}


def limit_cores(name: str, threads: int) -> None:
    """JAX has no setting for its threads: it starts one a core that it is allowed to use."""
    if name in ("jax", "tinygrad") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def set_threads(name: str, threads: int) -> None:
    """Threads of contenders that keep them in a setting of the process."""
    if name == "numpy":
        _set_blas_threads(threads)
    if name in ("torch", "torch.compile"):
        import torch

        torch.set_num_threads(threads)


def _set_blas_threads(count: int) -> None:
    """In the OpenBLAS that comes with NumPy."""
    for path in Path(np.__file__).parents[1].glob("numpy.libs/*openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(count)


# ---------------------------------------------------------------------------------------------------------- the makers


def _strata(case: Case, threads: int) -> Run:
    import strata as st

    if isinstance(case.onnx, Path) and case.graph is None:
        raise TypeError("a model file is given to strata in `own`")
    assert case.graph is not None
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
    set_threads("numpy", threads)
    arrays = {**case.inputs, **case.params}
    return lambda: case.numpy(**arrays)  # type: ignore[misc]


def _torch(case: Case, threads: int, *, compiled: bool = False) -> Run:
    import torch

    set_threads("torch", threads)
    tensors = {n: torch.from_numpy(a) for n, a in {**case.inputs, **case.params}.items()}
    function: Any = torch.compile(case.torch) if compiled else case.torch

    def run() -> Any:
        with torch.inference_mode():
            return function(**tensors)

    return run


def _torch_compile(case: Case, threads: int) -> Run:
    return _torch(case, threads, compiled=True)


def _jax(case: Case, threads: int) -> Run:  # its threads: see limit_cores
    import jax

    jax.config.update("jax_enable_x64", any(a.dtype.itemsize == 8 for a in case.inputs.values()))
    arrays = {n: jax.device_put(a) for n, a in {**case.inputs, **case.params}.items()}
    function = jax.jit(case.jax)
    return lambda: jax.block_until_ready(function(**arrays))


def _tinygrad(case: Case, threads: int) -> Run:  # its threads: see settings
    from tinygrad import Device, Tensor, TinyJit

    tensors = {n: Tensor(a).realize() for n, a in {**case.inputs, **case.params}.items()}
    function = TinyJit(lambda **t: case.tinygrad(**t).realize())  # type: ignore[misc]
    device = Device[Device.DEFAULT]

    def run() -> Any:
        result = function(**tensors)
        device.synchronize()
        return result

    for _ in range(2):  # the first two calls record
        run()
    return run


def onnx_bytes(case: Case) -> bytes:
    """The case as a serialised ONNX model."""
    from onnx import helper, numpy_helper

    program = case.onnx
    if isinstance(program, Path):
        return program.read_bytes()
    assert isinstance(program, Onnx)
    weights = {**case.params, **program.weights}
    nodes = [helper.make_node(op, list(a), list(b), **kw) for op, a, b, kw in program.nodes]
    used = {name for _, a, _, _ in program.nodes for name in a}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in case.inputs.items()
    ]
    graph = helper.make_graph(
        nodes, "workload", inputs,
        [helper.make_empty_tensor_value_info(n) for n in program.outputs],
        [numpy_helper.from_array(a, n) for n, a in weights.items() if n in used],
    )  # fmt: skip
    first = next(iter(case.inputs.values())).dtype
    kind = helper.np_dtype_to_tensor_dtype(first if first.kind == "f" else np.dtype(np.float32))
    for out in graph.output:
        out.type.tensor_type.elem_type = kind
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", program.opset)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data


def _onnxruntime(case: Case, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    session = ort.InferenceSession(onnx_bytes(case), options, providers=["CPUExecutionProvider"])
    feeds = dict(case.inputs)
    return lambda: session.run(None, feeds)


def _openvino(case: Case, threads: int) -> Run:
    import openvino as ov

    core = ov.Core()
    model = core.read_model(onnx_bytes(case), b"")
    if isinstance(case.onnx, Path):  # sizes that are known make it faster
        model.reshape({name: list(a.shape) for name, a in case.inputs.items()})
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", options).create_infer_request()
    feeds = dict(case.inputs)
    return lambda: list(request.infer(feeds).values())


_MAKERS: dict[str, Any] = {
    "strata": _strata, "numpy": _numpy, "torch": _torch, "torch.compile": _torch_compile,
    "onnxruntime": _onnxruntime, "openvino": _openvino, "jax": _jax, "tinygrad": _tinygrad,
}  # fmt: skip


def first_array(result: Any) -> np.ndarray:
    """The first output of a contender; of complex numbers, their sizes."""
    while isinstance(result, (list, tuple)):
        result = result[0]
    if isinstance(result, Mapping):
        result = next(iter(result.values()))
    if hasattr(result, "detach"):
        result = result.detach()
    with contextlib.suppress(AttributeError):
        result = result.numpy()
    found = np.asarray(result)
    return np.abs(found) if found.dtype.kind == "c" else found
