"""Writing an ahead-of-time bundle."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Target, as_dtype, here
from strata.errors import OptionError
from strata.lir import size_checks, write_checks
from strata.passes import FusionLimits
from strata.runtime.compile.options import CompileOptions
from strata.runtime.compile.pipeline import CompilePipeline
from strata.runtime.storage.bundle import FORMAT, OPTIONS, archive_of
from strata.runtime.storage.container import Part, write_container
from strata.runtime.storage.stored import write_plan

if TYPE_CHECKING:
    from strata.lir import Lir
    from strata.runtime.execute.compiled import CompiledGraph


def save(
    compiled: CompiledGraph, path: str | os.PathLike[str], *, weights: bool = True, levels: Sequence[str] | None = None
) -> None:
    """Write a bundle. The code of a level runs on every processor that has its instructions."""
    archive = archive_of(compiled.device)
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
    bounds = {name: [s.lo, s.hi] for name, s in graph.symbols().items()}
    checks = {"symbols": bounds, **write_checks(size_checks(graph))}
    parts: dict[str, Part] = {"graph": str(graph).encode(), "checks": json.dumps(checks).encode()}
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


def _written_options(options: CompileOptions) -> dict[str, Any]:
    """Options that decide results, where they are not the default: a bundle may be compiled anew, or saved again."""
    usual = CompileOptions()
    kept = {name: value for name in OPTIONS if (value := getattr(options, name)) != getattr(usual, name)}
    if isinstance(options.fusion, FusionLimits):
        kept["fusion"] = asdict(options.fusion)
    return kept
