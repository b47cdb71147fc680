"""Session: a device to compile for and run on."""

from __future__ import annotations

from typing import Any

from strata.backends import backend_for, known_backends
from strata.config import config
from strata.runtime.compiled import CompiledGraph
from strata.runtime.options import CompileOptions
from strata.runtime.pipeline import CompilePipeline


class Session:
    """`Session("cpu").compile(graph)` gives a CompiledGraph."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device or config().device
        self.backend = backend_for(self.device)

    def compile(self, program: Any, options: CompileOptions | None = None) -> CompiledGraph:
        """Compile a graph or an HIR module."""
        chosen = options or CompileOptions()
        result = CompilePipeline(self.device, chosen).compile(program)
        return CompiledGraph(result.lir, self.backend.compile(result.lir), chosen)

    def __repr__(self) -> str:
        return f"Session({self.device!r})"


def devices() -> list[str]:
    """Devices that programs can run on here."""
    return known_backends()
