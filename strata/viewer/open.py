"""`view`: a page for a program, a model, a file or a trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.core import read_text, symbols
from strata.errors import FileError, MissingFileError, OptionError, StrataError
from strata.hir import HirModule
from strata.mir import Graph
from strata.modules import imported
from strata.runtime import CompiledGraph, CompilePipeline, CompileResult
from strata.viewer.files import (
    bundle_data,
    folder_data,
    gguf_data,
    onnx_data,
    onnx_stage,
    safetensors_data,
    trace_data,
)
from strata.viewer.page import write_page
from strata.viewer.program import LIKELY_SIZE, program_data

PICTURE_SIDE = 320


def view(
    thing: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    device: str = "cpu",
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write a page that shows a program at every stage, a model file or a trace, and give its path.

    `thing` is a graph, an HIR module, a compiled graph or model, or the path of a model file, a graph in text or a
    trace. The page is one HTML file that needs no server and no network. `sizes` are the symbolic sizes that memory is
    shown for.
    """
    data = page_for(thing, device=device, sizes=sizes)
    place = Path(path) if path is not None else Path(f"{_file_name(data['name'])}.html")
    write_page(data, place)
    return place


def page_for(thing: Any, *, device: str = "cpu", sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What a page shows, as data."""
    if isinstance(thing, (str, os.PathLike)):
        return _of_file(Path(thing), device, sizes)
    if isinstance(thing, (Graph, HirModule)):
        return program_data(CompilePipeline(device), thing, sizes)
    if isinstance(thing, CompileResult):
        return program_data(thing.pipeline, thing.source, sizes)
    if isinstance(thing, CompiledGraph):
        return _of_compiled(thing, sizes)
    if hasattr(thing, "events") and hasattr(thing, "write"):  # a trace that is not written yet
        return trace_data("trace", thing.events)
    found = _graph_of_model(thing)
    if found is None:
        raise OptionError(
            f"view: {type(thing).__name__} is not a graph, module, compiled graph, model, trace or path", code="O190",
            fix="st.view(graph, 'graph.html')",
        )  # fmt: skip
    return page_for(found, device=device, sizes=sizes)


def _of_compiled(compiled: CompiledGraph, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    pipeline = CompilePipeline(compiled.device, compiled.options)
    return program_data(pipeline, compiled.source, sizes)


def _graph_of_model(model: Any) -> Graph | CompiledGraph | None:
    """The graph of a loaded model: it has one, or gives one when asked."""
    found = getattr(model, "graph", None)
    if callable(found) and not isinstance(found, (Graph, CompiledGraph)):
        found = found()
    return found if isinstance(found, (Graph, CompiledGraph)) else None


def _of_file(path: Path, device: str, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    if not path.exists():
        raise MissingFileError(f"view: there is no file or folder {path}", code="F148")
    if path.is_dir():
        return _with_program(folder_data(path), path, device, sizes)
    match path.suffix.lower():
        case ".onnx":
            return _of_onnx(path, device, sizes)
        case ".gguf":
            return _with_program(gguf_data(path), path, device, sizes)
        case ".safetensors":
            return safetensors_data(path)
        case ".strata":
            return bundle_data(path, page_for(imported("strata.runtime").load_compiled(path), sizes=sizes))
        case ".pt2":
            return page_for(imported("strata.torch").load(path, device=device).graph, sizes=sizes)
        case ".json":
            return trace_data(path.name, path)
        case ".mir" | ".txt" | ".hir":
            return page_for(imported("strata.texts").parse(_text_of(path)), device=device, sizes=sizes)
    raise FileError(
        f"view: {path.name} cannot be shown; view reads .onnx, .gguf, .safetensors, .strata, .pt2, .mir, .json (a "
        "trace) and folders with config.json", code="F148",
    )  # fmt: skip


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError:
        raise FileError(f"view: {path.name} is not text", code="F148") from None


def _of_onnx(path: Path, device: str, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    """The file's nodes; then the program, with open sizes where that is one graph, else with sizes that are given."""
    model = imported("strata.io.onnx").load(path, device=device)
    facts, pipeline, given = onnx_data(path, model), CompilePipeline(device), dict(sizes or {})
    try:
        return {**program_data(pipeline, model.graph(sizes), given, onnx_stage(model)), **facts}
    except StrataError as error:
        problem = str(error)
    fixed = {**_usual_sizes(model), **given}
    try:
        program = program_data(pipeline, model.compiled(fixed).source, None, onnx_stage(model))
    except StrataError:
        return {"problem": problem, **onnx_stage(model).data(), **facts}
    return {**program, "sizes": fixed, **facts}


def _usual_sizes(model: Any) -> dict[str, int]:
    """Numbers for open sizes: one example, and a side of a picture or a length."""
    found: dict[str, int] = {}
    for port in model.inputs:
        for at, dim in enumerate(port.shape or ()):
            for name in symbols(dim):
                found.setdefault(name, 1 if at == 0 else PICTURE_SIDE if len(port.shape) == 4 else LIKELY_SIZE)
    return found


def _with_program(
    data: dict[str, Any], path: Path, device: str, sizes: Mapping[str, int] | None
) -> dict[str, Any]:  # fmt: skip
    """The file's own facts, and the program where the model can be loaded; else why it cannot."""
    try:
        model = imported("strata.models").load(path, device=device)
        graph = _graph_of_model(model)
        program = {} if graph is None else page_for(graph, device=device, sizes=sizes)
    except StrataError as error:
        program = {"problem": str(error)}
    return {**program, **data}


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name) or "program"
