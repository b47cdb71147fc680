"""Ahead-of-time bundles: a compiled graph in one file, with code for several instruction sets and its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.backends import CodeArchive, backend_for
from strata.core import Target, as_dtype, here
from strata.errors import FileError, OptionError
from strata.lir import size_checks, write_checks
from strata.passes import FusionLimits
from strata.runtime.compile.options import CompileOptions
from strata.runtime.compile.pipeline import CompilePipeline
from strata.runtime.storage.container import Container, Part, write_container
from strata.runtime.storage.stored import write_plan

if TYPE_CHECKING:
    from strata.lir import Lir
    from strata.runtime.execute.compiled import CompiledGraph

FORMAT = 2
OPTIONS = (  # that decide what a program computes, and how
    "precision", "fusion", "kernel_dispatch", "force_common", "force_native", "deterministic", "exact", "control_flow",
    "unroll", "rematerialize", "drop_unused", "passes", "skip_passes",
)  # fmt: skip
MAX_RANK = 32


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


@dataclass(frozen=True, slots=True)
class About:
    """What a bundle says about itself, checked."""

    device: str
    levels: tuple[str, ...]
    generator: str
    weights: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

    @classmethod
    def of(cls, file: Container) -> About:
        about = file.about
        if about.get("format") != FORMAT:
            told = f"has format {about.get('format')}, this version reads {FORMAT}"
            raise FileError(f"{file.path!r} {told}", code="F404", place=here())
        levels, weights = about.get("levels"), about.get("weights")
        for name in ("device", "generator"):
            if not isinstance(about.get(name), str):
                raise file.damaged(f"its {name} is {about.get(name)!r}, a name is needed")
        if not isinstance(levels, list) or not all(isinstance(level, str) for level in levels):
            raise file.damaged(f"its levels are {levels!r}, a list of names is needed")
        if not isinstance(weights, dict):
            raise file.damaged(f"its weights are {weights!r}, types and shapes by name are needed")
        kinds = {name: _weight_type(file, name, kind) for name, kind in weights.items()}
        return cls(about["device"], tuple(levels), about["generator"], kinds)


def _weight_type(file: Container, name: str, kind: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The type and shape of a weight, which its part must have the bytes of."""
    if not isinstance(kind, list) or len(kind) != 2 or not isinstance(kind[0], str) or not isinstance(kind[1], list):
        raise file.damaged(f"weight {name!r} has no type and shape")
    dtype, shape = as_dtype(kind[0]).np, tuple(kind[1])
    if not all(type(d) is int and d >= 0 for d in shape) or len(shape) > MAX_RANK:
        raise file.damaged(f"weight {name!r} has the shape {list(shape)}")
    part = f"weight {name}"
    if part not in file or file.size(part) != prod(shape) * dtype.itemsize:
        held = file.size(part) if part in file else "no"
        raise file.damaged(f"weight {name!r} : {kind[0]}{list(shape)} has {held} bytes")
    return dtype, shape


def _written_options(options: CompileOptions) -> dict[str, Any]:
    """Options that decide results, where they are not the default: a bundle may be compiled anew, or saved again."""
    usual = CompileOptions()
    kept = {name: value for name in OPTIONS if (value := getattr(options, name)) != getattr(usual, name)}
    if isinstance(options.fusion, FusionLimits):
        kept["fusion"] = asdict(options.fusion)
    return kept


def archive_of(device: str) -> CodeArchive:
    archive = backend_for(device).archive
    if archive is None:
        raise OptionError(f"bundles hold machine code, and {device!r} has none to keep", code="O411", place=here())
    return archive


def inspect_bundle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a bundle holds, without loading any of it."""
    file = Container(path)
    About.of(file)
    return {**file.about, "parts": {name: file.size(name) for name in file.names}}
