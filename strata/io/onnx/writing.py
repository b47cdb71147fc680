"""ONNX export: a model from a graph, a module, a function of tensors, or from a program with its weights.

Ops with a counterpart in ONNX are written by a table. Ops that are compositions are written as what they are made of.
The rest is refused, all in one error.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from strata.config import logger
from strata.core import flatten, here, located
from strata.errors import DTypeError, LowerError, OptionError, ShapeError, UnknownNameError, file_error
from strata.io.onnx.exporter import OPSET, Exporter
from strata.io.onnx.model import OnnxModel
from strata.io.onnx.writers import register
from strata.mir import Graph, fresh_scope, placeholder
from strata.runtime import CompiledGraph
from strata.tensor import Tensor, asarray

register()

FIRST_OPSET = 8  # all of whose arithmetic broadcasts
MOST_BYTES = 2_000_000_000  # of a message of protobuf; what is larger goes into a separate file


@located
def export(
    program: Any,
    path: str | os.PathLike[str] | None = None,
    *examples: Any,
    params: Mapping[str, Any] | None = None,
    opset: int | None = None,
) -> Any:
    """Write a graph, a module, or a function (with example arguments) as an ONNX model, which is also returned.

    Compiled graphs and loaded models are written with the values of their parameters. `params` gives values of
    parameters; those without one are inputs of the model. Symbolic sizes keep their names. `opset` is that of the
    nodes, 21 if not given; what an older one cannot say is refused. A loaded ONNX model whose sizes depend on data, or
    that has texts or sequences, is not one graph: it is written with the nodes and the opset of its file.
    """
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int)):
        raise OptionError(f"export: opset is a whole number, got {opset!r}", code="O503")
    if opset is not None and not FIRST_OPSET <= opset <= newest:
        raise OptionError(f"export: opset is a version from {FIRST_OPSET} to {newest}, got {opset}", code="O503")
    given = {name: np.asarray(x) for name, x in (params or {}).items()}
    if isinstance(program, OnnxModel):
        model = _again(program, given, opset)
    else:
        graph, held, outputs = _compiled(program) or (_as_graph(program, examples), {}, None)
        model = Exporter(graph, {**held, **given}, OPSET if opset is None else opset, outputs).model()
    if path is not None:
        try:
            _save(model, Path(path))
        except OSError as error:
            raise file_error(path, error, code="F500", what="cannot be written", place=here()) from None
    return model


def _save(model: Any, path: Path) -> None:
    if model.ByteSize() < MOST_BYTES:
        path.write_bytes(model.SerializeToString())
    else:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def _again(model: OnnxModel, params: Mapping[str, np.ndarray], opset: int | None) -> Any:
    """A loaded model: its graph, or the nodes of its file where that is not one graph that ONNX can say."""
    try:
        graph, held = model.whole()
        outputs = [p.name for p in model.outputs]
        return Exporter(graph, {**held, **params}, OPSET if opset is None else opset, outputs).model()
    except (LowerError, OptionError, DTypeError, ShapeError) as error:  # reading it whole needs more than it says
        if opset is not None and opset != model.program.opsets.get(""):
            raise
        logger.info("export: the nodes are those of the file: %s", error.summary)
        return _copied(model, params)


def _copied(model: OnnxModel, params: Mapping[str, np.ndarray]) -> Any:
    """The nodes of the file, with its weights and these parameters inside."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.program.proto)
    held = {t.name: t for t in proto.graph.initializer}
    unknown = set(params) - set(held)
    if unknown:
        raise UnknownNameError(f"export: the model has no parameter {min(unknown)!r}", code="N502")
    for name, tensor in held.items():
        if name in params or tensor.data_location == onnx.TensorProto.EXTERNAL:
            array = params[name] if name in params else model.program.tensor(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))
    return proto


def _compiled(program: Any) -> tuple[Graph, dict[str, np.ndarray], Sequence[str] | None] | None:
    """The graph that was compiled, before any pass, with the parameters that it holds and the names of its results."""
    compiled = getattr(program, "graph", program)
    if not isinstance(compiled, CompiledGraph):
        return None
    names = getattr(program, "outputs", ()) if compiled is not program else ()
    graph = compiled.source
    held = {name: np.asarray(value) for name, value in compiled._param_values.items()}
    return graph, held, names if len(names) == len(graph.results) else None


def _as_graph(program: Any, examples: Sequence[Any]) -> Graph:
    if isinstance(program, Graph):
        return program
    if hasattr(program, "lower") and not isinstance(program, (str, bytes)):
        lowered: Graph = program.lower()
        return lowered
    if not callable(program):
        raise OptionError(f"export: {type(program).__name__} is not a graph, module, function or model", code="O503")
    try:
        inspect.signature(program).bind(*examples)
    except (TypeError, ValueError) as error:
        name = getattr(program, "__name__", type(program).__name__)
        raise OptionError(
            f"export: {name} and {len(examples)} example arguments: {error}", code="O503",
            fix='one array for each argument behind the path: export(f, "f.onnx", x, y)',
        ) from None  # fmt: skip
    scope = fresh_scope()
    names = [placeholder(f"x{i}", asarray(x).type, scope) for i, x in enumerate(examples)]
    results, _ = flatten(program(*(Tensor(x) for x in names)))
    graph = Graph(getattr(program, "__name__", "main"))
    graph.scope, graph.inputs = scope, tuple(names)
    graph.results = tuple(asarray(r).value for r in results)
    return graph
