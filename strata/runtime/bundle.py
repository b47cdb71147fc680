"""Ahead-of-time bundles: a compiled graph in one file, with code for several instruction sets and its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.backends import CodeArchive, MissingCodeError, backend_for
from strata.config import logger
from strata.core import Target, as_dtype, here
from strata.errors import FileError, OptionError, ParseError, StrataError
from strata.mir import Graph, parse
from strata.passes import FusionLimits
from strata.runtime.compiled import CompiledGraph
from strata.runtime.container import Container, Part, write_container
from strata.runtime.options import CompileOptions
from strata.runtime.pipeline import CompilePipeline
from strata.runtime.stored import DAMAGED, check_plan, read_plan, write_plan

if TYPE_CHECKING:
    from strata.lir import Lir

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


@dataclass(frozen=True, slots=True)
class _About:
    """What a bundle says about itself, checked."""

    device: str
    levels: tuple[str, ...]
    generator: str
    weights: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

    @classmethod
    def of(cls, file: Container) -> _About:
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


def load_compiled(path: str | os.PathLike[str], device: str | None = None) -> CompiledGraph:
    """The compiled graph of a bundle. Weights are mapped from the file, which must stay where it is.

    A bundle holds machine code: load those only that come from where you would install a program from.
    """
    file = Container(path)
    about = _About.of(file)
    where = device or about.device
    archive = _archive(where)
    options = _read_options(file)
    level = next(
        (n for n in reversed(archive.levels) if n in about.levels and Target.named(n).runs_on(Target.host())), None
    )
    if about.generator != archive.version or level is None:
        reason = "this processor has other instructions" if level is None else "another version made it"
        made = _compiled_anew(file, where, options, reason)
    else:
        made = _compiled_before(file, where, options, archive, Target.named(level))
    for name, (dtype, shape) in about.weights.items():
        if name not in made.params:
            raise file.damaged(f"it has a weight {name!r}, the program has none of that name")
        data = np.frombuffer(file.read(f"weight {name}"), np.uint8)
        made.set_param(name, data.view(dtype).reshape(shape))
    return made


def _compiled_before(
    file: Container, device: str, options: CompileOptions, archive: CodeArchive, target: Target
) -> CompiledGraph:
    """From the plan and the code in the file."""
    data = bytes(file.read(f"plan {target}"))
    try:
        lir = read_plan(data, None, lambda: _graph(file), target)
        reason = check_plan(lir)
        if not reason:
            return CompiledGraph(lir, archive.load(lir, _Codes(file)), options, device=device)
    except MissingCodeError:
        reason = "its code is of other settings than these"
    except DAMAGED as error:
        if isinstance(error, FileError):
            raise
        raise file.damaged(f"its plan cannot be used: {_reason(error)}") from None
    return _compiled_anew(file, device, options, reason)


def _graph(file: Container) -> Graph:
    try:
        return parse(bytes(file.read("graph")).decode())
    except (UnicodeDecodeError, ParseError) as error:
        raise file.damaged(f"its graph cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, StrataError):
        return error.summary
    return f"{type(error).__name__}, {error}"[:200]


def _compiled_anew(file: Container, device: str, options: CompileOptions, reason: str) -> CompiledGraph:
    from strata.runtime.session import Session

    logger.warning("%s is compiled again: %s", file.path, reason)
    return Session(device).compile(_graph(file), options)


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
    _About.of(file)
    return {**file.about, "parts": {name: file.size(name) for name in file.names}}
