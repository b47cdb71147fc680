"""Ahead-of-time bundles: a compiled graph in one file, with code for several instruction sets and its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.backends import CodeArchive, backend_for
from strata.config import logger
from strata.core import Target, as_dtype, here
from strata.errors import FileError, OptionError, StrataError
from strata.mir import parse
from strata.passes import FusionLimits
from strata.runtime.compiled import CompiledGraph
from strata.runtime.container import Container, Part, write_container
from strata.runtime.options import CompileOptions
from strata.runtime.pipeline import CompilePipeline
from strata.runtime.stored import read_plan, write_plan

if TYPE_CHECKING:
    from strata.lir import Lir

FORMAT = 2
OPTIONS = (  # that decide what a program computes, and how
    "precision", "fusion", "kernel_dispatch", "force_common", "force_native", "deterministic", "exact", "control_flow",
    "unroll", "rematerialize", "drop_unused", "passes", "skip_passes",
)  # fmt: skip


def save(
    compiled: CompiledGraph, path: str | os.PathLike[str], *, weights: bool = True, levels: Sequence[str] | None = None
) -> None:
    """Write a bundle. The code of a level runs on every processor that has its instructions."""
    archive = _archive(compiled.device)
    if levels is not None and not isinstance(levels, (list, tuple)):
        raise OptionError(f"save: levels are a list of names, got {levels!r}", code="O411", place=here())
    chosen = list(levels) if levels is not None else list(archive.levels)
    unknown = next((level for level in chosen if level not in archive.known), None)
    if unknown is not None or not chosen:
        raise OptionError(
            f"save: levels are among {', '.join(archive.known)}, got {unknown or chosen!r}", code="O411", place=here()
        )
    pipeline = CompilePipeline(compiled.device, compiled.options)
    graph = pipeline.lower(compiled.source)
    parts: dict[str, Part] = {"graph": str(graph).encode()}
    codes: dict[str, str] = {}
    for level in chosen:
        lir = _plan_for(graph, compiled, Target.named(level))
        plan = write_plan(lir)
        assert plan is not None
        parts[f"plan {level}"] = plan
        for key, code in archive.record(lir).items():
            parts.setdefault(f"code {key}", code)
            codes[key] = level
    kinds = {}
    if weights:
        for name, value in compiled._param_values.items():
            array = np.asarray(value)
            kinds[name] = [as_dtype(array.dtype).name, list(array.shape)]
            parts[f"weight {name}"] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    about = {
        "format": FORMAT, "name": compiled.name, "signature": compiled.signature, "device": compiled.device,
        "levels": chosen, "generator": archive.version, "weights": kinds, "options": compiled.options.key,
        "compile": _written_options(compiled.options),
    }  # fmt: skip
    write_container(path, about, parts)


def _plan_for(graph: Any, compiled: CompiledGraph, target: Target) -> Lir:
    pipeline = CompilePipeline(compiled.device, compiled.options)
    pipeline.backend = type(pipeline.backend)(target)  # type: ignore[call-arg]
    return pipeline.compile_graph(graph).lir


def load_compiled(path: str | os.PathLike[str], device: str | None = None) -> CompiledGraph:
    """The compiled graph of a bundle. Weights are mapped from the file, which must stay where it is."""
    file = Container(path)
    about = file.about
    if about.get("format") != FORMAT:
        raise FileError(
            f"{file.path!r} has format {about.get('format')}, this version reads {FORMAT}", code="F404", place=here()
        )
    where = device or about["device"]
    archive = _archive(where)
    options = _read_options(file)
    level = next(
        (n for n in reversed(archive.levels) if n in about["levels"] and Target.named(n).runs_on(Target.host())), None
    )
    if about["generator"] != archive.version or level is None:
        reason = "this processor has other instructions" if level is None else "another version made it"
        made = _compiled_anew(file, where, options, reason)
    else:
        target = Target.named(level)
        text = bytes(file.read("graph")).decode()
        lir = read_plan(bytes(file.read(f"plan {level}")), None, lambda: parse(text), target)
        entries = _Codes(file)
        made = CompiledGraph(lir, archive.load(lir, entries), options, device=where)
    for name, (dtype, shape) in about["weights"].items():
        data = np.frombuffer(file.read(f"weight {name}"), np.uint8)
        made.set_param(name, data.view(as_dtype(dtype).np).reshape(shape))
    return made


def _compiled_anew(file: Container, device: str, options: CompileOptions, reason: str) -> CompiledGraph:
    from strata.runtime.session import Session

    logger.warning("%s is compiled again: %s", file.path, reason)
    return Session(device).compile(parse(bytes(file.read("graph")).decode()), options)


def _written_options(options: CompileOptions) -> dict[str, Any]:
    """Options that decide results, where they are not the default: a bundle may be compiled anew, or saved again."""
    usual = CompileOptions()
    kept = {name: value for name in OPTIONS if (value := getattr(options, name)) != getattr(usual, name)}
    if isinstance(options.fusion, FusionLimits):
        kept["fusion"] = asdict(options.fusion)
    return kept


def _read_options(file: Container) -> CompileOptions:
    kept = file.about.get("compile", {})
    wrong = f"{file.path!r} has compile options that this version does not know"
    if not isinstance(kept, dict) or not kept.keys() <= set(OPTIONS):
        raise FileError(f"{wrong}: {kept!r}", code="F404", place=here())
    known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()}
    try:
        if isinstance(known.get("fusion"), dict):
            known["fusion"] = FusionLimits(**known["fusion"])
        return CompileOptions(**known)
    except (StrataError, TypeError) as error:
        raise FileError(f"{wrong}: {error}", code="F404", place=here()) from None


class _Codes(Mapping[str, bytes]):
    """Machine code by key, read and checked when it is asked for."""

    def __init__(self, file: Container) -> None:
        self._file = file

    def __getitem__(self, key: str) -> bytes:
        if f"code {key}" not in self._file:
            raise KeyError(key)
        return bytes(self._file.read(f"code {key}"))

    def __contains__(self, key: object) -> bool:
        return f"code {key}" in self._file

    def __iter__(self) -> Any:
        return (n.removeprefix("code ") for n in self._file.names if n.startswith("code "))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _archive(device: str) -> CodeArchive:
    archive = getattr(backend_for(device), "archive", None)
    if archive is None:
        raise OptionError(f"bundles hold machine code, and {device!r} has none to keep", code="O411", place=here())
    made: CodeArchive = archive
    return made


def inspect_bundle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a bundle holds, without loading any of it."""
    file = Container(path)
    return {**file.about, "parts": {name: file.size(name) for name in file.names}}
