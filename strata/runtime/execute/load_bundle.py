"""Loading an ahead-of-time bundle: its plan and machine code, or its graph compiled again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from strata.backends import CodeArchive, MissingCodeError
from strata.config import logger
from strata.core import Symbol, Target, here
from strata.errors import FileError, ParseError, StrataError
from strata.lir import RuleCheck, SizeCheck, read_checks
from strata.mir import Graph, parse
from strata.passes import FusionLimits
from strata.runtime.compile.options import CompileOptions
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.storage.bundle import OPTIONS, About, archive_of
from strata.runtime.storage.container import Container
from strata.runtime.storage.stored import DAMAGED, check_plan, read_plan


def load_compiled(path: str | os.PathLike[str], device: str | None = None) -> CompiledGraph:
    """The compiled graph of a bundle. Weights are mapped from the file, which must stay where it is.

    A bundle holds machine code: load only those that you would also install a program from.
    """
    file = Container(path)
    about = About.of(file)
    with ThreadPoolExecutor(1) as beside:  # checksums of weights take as long as all the rest: both at once
        checked = beside.submit(file.verify, [f"weight {name}" for name in about.weights])
        made = _loaded(file, about, device or about.device)
        checked.result()
    return made


def _loaded(file: Container, about: About, where: str) -> CompiledGraph:
    """The program with the weights of the file, which somebody else checks."""
    archive = archive_of(where)
    options = _read_options(file)
    level = next(
        (n for n in reversed(archive.levels) if n in about.levels and Target.named(n).runs_on(Target.host())), None
    )
    if not archive.takes(about.generator) or level is None:
        reason = "this processor has other instructions" if level is None else "another version made it"
        made = _compiled_anew(file, where, options, reason)
    else:
        made = _compiled_before(file, where, options, archive, Target.named(level))
    for name, (dtype, shape) in about.weights.items():
        if name not in made.params:
            raise file.damaged(f"it has a weight {name!r}, the program has none of that name")
        data = np.frombuffer(file.view(f"weight {name}"), np.uint8)
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
            made, checks = archive.load(lir, _Codes(file)), _checks(file)
            return CompiledGraph(lir, made, options, partial(_compile, device), device=device, checks=checks)
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


def _checks(file: Container) -> tuple[SizeCheck | RuleCheck, ...] | None:
    """What must hold of sizes; None where the file does not say, and its graph is asked."""
    if "checks" not in file:
        return None
    kept = json.loads(bytes(file.read("checks")))
    return read_checks(kept, {name: Symbol(name, lo, hi) for name, (lo, hi) in kept["symbols"].items()})


def _reason(error: Exception) -> str:
    if isinstance(error, StrataError):
        return error.summary
    return f"{type(error).__name__}, {error}"[:200]


def _compiled_anew(file: Container, device: str, options: CompileOptions, reason: str) -> CompiledGraph:
    logger.warning("%s is compiled again: %s", file.path, reason)
    return _compile(device, _graph(file), options)


def _compile(device: str, graph: Graph, options: CompileOptions) -> CompiledGraph:
    from strata.runtime.execute.session import Session

    return Session(device).compile(graph, options)


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
