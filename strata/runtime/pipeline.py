"""CompilePipeline: the stages of a compile, one method each, and the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strata.backends import Backend, backend_for
from strata.config import config
from strata.lir import Lir, plan
from strata.mir import Graph
from strata.passes import PassContext, PassRecord, default_passes, parse_passes, run_passes
from strata.runtime.options import CompileOptions


@dataclass(frozen=True)
class CompileResult:
    """A plan and how it was made."""

    lir: Lir
    passes: tuple[PassRecord, ...]
    pipeline: CompilePipeline = field(repr=False)
    source: Graph = field(repr=False)

    @property
    def has_dynamic_dims(self) -> bool:
        return self.lir.has_dynamic_dims

    @property
    def dynamic_symbols(self) -> tuple[str, ...]:
        return tuple(sorted(self.lir.symbols))

    def specialize(self, binding: dict[str, int]) -> CompileResult:
        """The same program for fixed sizes: shapes are inferred and the plan is made again."""
        return self.pipeline.compile(self.source.bind(binding))


class CompilePipeline:
    """Stages for one target: lower, optimize, plan."""

    def __init__(self, target: str = "cpu", options: CompileOptions | None = None) -> None:
        self.device = target
        self.options = options or CompileOptions()
        self.backend: Backend = backend_for(target)

    def lower(self, program: Any) -> Graph:
        """A graph from a graph or an HIR module."""
        graph: Graph = program if isinstance(program, Graph) else program.lower()
        return graph.bind(self.options.dim_binding) if self.options.dim_binding else graph

    def optimize(self, graph: Graph) -> tuple[Graph, tuple[PassRecord, ...]]:
        """Run the passes; the report has a line for each."""
        backend = self.backend
        ctx = PassContext(backend.target, backend.takes, verify_each=config().verify)
        passes = default_passes() if self.options.passes is None else parse_passes(self.options.passes)
        made, records = run_passes(passes, graph, ctx)
        return made, tuple(records)

    def plan(self, graph: Graph) -> Lir:
        backend = self.backend
        return plan(
            graph, backend.target, memory_limit=self.options.memory_limit, whole=backend.runs_whole, views=backend.reads_views
        )

    def compile(self, program: Any) -> CompileResult:
        """All stages but machine code."""
        graph = self.lower(program)
        optimized, records = self.optimize(graph)
        return CompileResult(self.plan(optimized), records, self, graph)
