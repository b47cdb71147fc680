"""What MODEL on a command line can be, behind one interface: inputs, outputs, and a function to run it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.cli.parser import Mistake
from strata.core import TensorType, as_dtype, sym
from strata.core import read_text as read_plain_text
from strata.errors import ParseError
from strata.mir import Graph

if TYPE_CHECKING:
    from strata.runtime import CompiledGraph

GRAPH_SUFFIXES = (".mir", ".txt")
_TYPE = re.compile(r"(\w+)\[(.*)\]")


@dataclass(frozen=True)
class ExampleProgram:
    """Something that runs: named and typed inputs and parameters, names of outputs."""

    name: str
    inputs: Mapping[str, TensorType]
    params: Mapping[str, TensorType]
    outputs: tuple[str, ...]
    run: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
    set_params: Callable[[Mapping[str, np.ndarray]], None]
    source: Any  # the model or compiled graph behind it


def kind_of(path: str) -> str:
    """graph, onnx, gguf, safetensors, bundle, exported or folder, by what the path looks like."""
    place = Path(path)
    if path == "-" or place.suffix in GRAPH_SUFFIXES:
        return "graph"
    if place.is_dir():
        return "folder"
    kinds = {
        ".onnx": "onnx", ".gguf": "gguf", ".safetensors": "safetensors", ".strata": "bundle", ".pt2": "exported",
    }  # fmt: skip
    if not place.exists():
        raise Mistake(f"there is no file or folder {path}")
    if place.suffix not in kinds:
        suffix = f"the suffix {place.suffix}" if place.suffix else "no suffix"
        known = ", ".join([*GRAPH_SUFFIXES, *kinds])
        raise Mistake(f"{path} has {suffix}; strata reads {known} and folders with config.json")
    return kinds[place.suffix]


def read_text(path: str) -> str:
    """A file, or standard input."""
    if path == "-":
        return sys.stdin.read()
    try:
        return read_plain_text(path)
    except UnicodeDecodeError:
        raise Mistake(f"{path} is not text") from None


def read_graph(path: str) -> Graph:
    """A graph from its text."""
    import strata.ops  # noqa: F401 - a graph without its ops cannot be read
    from strata.mir import parse

    text = read_text(path)
    try:
        return parse(text)
    except ParseError as error:
        raise Mistake(f"{path}: {error.summary}   [{error.code}]") from None


def graph_of(path: str, device: str) -> Graph:
    """The graph of a program, before any pass."""
    kind = kind_of(path)
    if kind == "graph":
        return read_graph(path)
    if kind == "onnx":
        from strata.io import onnx

        graph: Graph = onnx.load(path, device=device).graph()
        return graph
    raise Mistake(
        f"{path}: this needs a graph in text or an ONNX file; strata explain and strata view take other models, too"
    )


def open_program(path: str, device: str) -> ExampleProgram:
    """Load and compile."""
    kind = kind_of(path)
    if kind == "graph":
        return _compiled(read_graph(path), device)
    if kind == "safetensors":
        raise Mistake(f"{path} holds weights only: strata inspect shows them; to run a model, name its folder")
    if kind == "bundle":
        from strata.runtime import load_compiled

        return compiled_program(load_compiled(path))
    if kind == "exported":
        from strata.torch import load as load_exported

        return compiled_program(load_exported(path, device=device).graph)
    from strata.models import load

    model = load(path, device=device)
    return _onnx(model) if kind == "onnx" else _model(model, path)


def _compiled(graph: Graph, device: str) -> ExampleProgram:
    from strata.runtime import Session

    return compiled_program(Session(device).compile(graph))


def compiled_program(compiled: CompiledGraph) -> ExampleProgram:
    """A compiled graph; parameters that it brings along need no values."""
    missing = {name: kind for name, kind in compiled.params.items() if name in compiled._missing}
    outputs = tuple(f"out{i}" for i in range(len(compiled.outputs)))

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return list(compiled.run(feeds))

    return ExampleProgram(compiled.name, compiled.inputs, missing, outputs, run, compiled.set_params, compiled)


def _onnx(model: Any) -> ExampleProgram:
    inputs = {}
    for port in model.inputs:
        if port.kind != "tensor" or port.dtype is None or port.shape is None:
            raise Mistake(f"input {port} has no fixed rank and element type: give it with --input")
        inputs[port.name] = TensorType(as_dtype(port.dtype), port.shape)
    names = tuple(port.name for port in model.outputs)
    return ExampleProgram(
        model.program.graph.name or "main", inputs, {}, names, lambda feeds: list(model.run(feeds)), _no_params, model
    )


def _model(model: Any, path: str) -> ExampleProgram:
    inputs = {name: _read_type(text) for name, text in model.inputs.items()}

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return list(model.run(**feeds).values())

    return ExampleProgram(Path(path).name, inputs, {}, tuple(model.outputs), run, _no_params, model)


def _read_type(text: str) -> TensorType:
    match = _TYPE.fullmatch(text)
    assert match is not None, text
    dims = [int(d) if d.isdigit() else sym(d) for d in (part.strip() for part in match[2].split(",")) if d]
    return TensorType(as_dtype(match[1]), tuple(dims))


def _no_params(values: Mapping[str, np.ndarray]) -> None:
    if values:
        raise Mistake("--params: this model brings its own weights")
