"""Session: a device to compile for and run on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from strata.arguments import public
from strata.backends import Executable, backend_for
from strata.config import config
from strata.core import here, located
from strata.errors import OptionError
from strata.lir import Lir, RuleCheck, SizeCheck
from strata.mir import Graph
from strata.runtime.compile.device import Device
from strata.runtime.compile.options import CompileOptions
from strata.runtime.compile.pipeline import CompilePipeline, CompileResult
from strata.runtime.execute.compiled import CompiledGraph
from strata.runtime.execute.deferred import DeferredExecutable
from strata.runtime.report.tracing import phase
from strata.runtime.storage.stored import plan_key, stored_plan


@public
class Session:
    """`Session("cpu").compile(graph)` gives a CompiledGraph.

    Options given here hold for every compile that does not say otherwise: an option of `compile` wins over the
    session's.
    """

    @located
    def __init__(
        self, device: str | Device | None = None, options: CompileOptions | None = None, **changes: Any
    ) -> None:
        self.device = str(device or config().device)
        self.backend = backend_for(self.device)
        self.options = options or CompileOptions()
        self.options = self._merged(None, changes)

    @located
    def compile(self, program: Any, options: CompileOptions | None = None, **changes: Any) -> CompiledGraph:
        """Compile a graph, an HIR module or a plan. Keywords are options: `compile(g, memory_limit=1 << 20)`."""
        chosen = self._merged(options, changes)
        if isinstance(program, (Lir, CompileResult)):
            return self.compile_lir(CompilePipeline(self.device, chosen).compile(program), chosen)
        with phase("compile", device=self.device):
            pipeline = CompilePipeline(self.device, chosen.settled())
            with phase("lower"):
                source = pipeline.source(program)
                graph = pipeline.lower(source)
            with ExitStack() as while_compiling:
                lir, is_stored = self._plan(pipeline, graph, while_compiling)
                with phase("code"):
                    executable = self._code(lir, chosen)
                    if chosen.memory_limit is not None:
                        executable.limit_scratch(chosen.memory_limit)
        replan = (lambda: pipeline.compile_graph(graph).lir) if is_stored else None
        return CompiledGraph(
            lir, executable, chosen, self.compile, source=source, device=self.device, replan=replan,
            again=lambda sizes: self.compile(source.bind(sizes), chosen),
        )  # fmt: skip

    compile_with = compile_hir = compile_module = compile

    def compile_lir(
        self, plan: Lir | CompileResult, options: CompileOptions | None = None, *, lazy: bool = False
    ) -> CompiledGraph:
        """Machine code for a plan that is made already: now, or if `lazy` when it first runs."""
        lir = plan.lir if isinstance(plan, CompileResult) else plan
        source = plan.source if isinstance(plan, CompileResult) else None

        def make() -> Executable:
            with phase("code"):
                return self.backend.compile(lir)

        executable = DeferredExecutable(lir, make) if lazy else make()
        made = CompiledGraph(lir, executable, options or self.options, self.compile, source=source, device=self.device)
        if isinstance(executable, DeferredExecutable):
            executable.serve(made)
        return made

    def compile_stored(
        self, lir: Lir, checks: tuple[SizeCheck | RuleCheck, ...], graph: Callable[[], Graph]
    ) -> CompiledGraph:
        """Machine code for a plan that was read back; `graph` makes the program again, for explanations."""
        with phase("code"):
            executable = self.backend.compile(lir)

        def replan() -> Lir:
            return CompilePipeline(self.device, self.options).compile_graph(graph()).lir

        return CompiledGraph(
            lir, executable, self.options, self.compile, device=self.device, replan=replan, checks=checks,
            again=lambda sizes: self.compile(graph().bind(sizes)),
        )  # fmt: skip

    def plan_options(self) -> str | None:
        """All beside the program that decides a plan; None where plans of this session are not kept."""
        if not self.backend.capabilities.keeps_plans or self.options.assert_fusion_clean:
            return None
        return self.plan_key()

    def plan_key(self, options: CompileOptions | None = None) -> str:
        """All beside the program that decides its plan, here, under these options or the session's."""
        chosen = self.options if options is None else options
        return f"{chosen.key}; {self.backend.name}; {self.backend.target.key}; {config().key_fields()}"

    def entry_key(self, options: CompileOptions) -> str:
        """All beside the program that decides its compiled graph, for tables of them: how it is run, too."""
        return f"{self.plan_key(options)}; threads={options.threads}"

    def chosen(self, options: CompileOptions | None) -> CompileOptions:
        """Options of a compile over the session's."""
        return self._merged(options, {})

    def _plan(self, pipeline: CompilePipeline, graph: Graph, while_compiling: ExitStack) -> tuple[Lir, bool]:
        def make() -> Lir:
            while_compiling.enter_context(self.backend.expecting(graph))
            return _traced_plan(pipeline, graph)

        if not self.backend.capabilities.keeps_plans or pipeline.options.assert_fusion_clean:
            return make(), False
        with phase("plan", graph=graph.name):
            key = plan_key(graph, pipeline.options.key, self.backend.name, self.backend.target)
            return stored_plan(key, graph, make)

    def _code(self, lir: Lir, options: CompileOptions) -> Executable:
        """What runs a plan: on the device, or on all of a mesh."""
        spread = options.spread
        if spread is None:
            return self.backend.compile(lir)
        if not self.backend.capabilities.spreads:
            raise OptionError(f"compile option mesh: {self.device} is one device", code="O144", place=here())
        unknown = sorted(set(spread.cuts) - {*lir.graph.input_names, *lir.graph.param_names})
        if unknown:
            raise OptionError(
                f"compile option shard: {lir.name!r} has no input or parameter {unknown[0]!r}",
                code="O144",
                place=here(),
            )
        return self.backend.compile_spread(lir, spread)

    def _merged(self, options: CompileOptions | None, changes: dict[str, Any]) -> CompileOptions:
        """Options of a compile over the session's: what was not given there comes from here."""
        chosen = self.options if options is None else options
        if options is not None and options.precision is None and self.options.precision is not None:
            chosen = replace(options, precision=self.options.precision)
        if not changes:
            return chosen
        return replace(chosen, **changes)

    def __repr__(self) -> str:
        return f"Session({self.device!r})"


def _traced_plan(pipeline: CompilePipeline, graph: Graph) -> Lir:
    """All stages, with a span for each pass in a trace."""
    start = time.perf_counter_ns()
    result = pipeline.compile_graph(graph)
    at = start
    for record in result.passes:
        stop = at + int(record.seconds * 1e9)
        phase.add(f"pass {record.name}", at, stop, nodes_before=record.before, nodes_after=record.after)
        at = stop
    phase.add("plan memory and kernels", at, time.perf_counter_ns(), steps=len(result.lir.schedule))
    return result.lir
