"""CompilePipeline: the stages of a compile, one method each, and the whole."""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from strata.arguments import own_checks, public
from strata.backends import Backend, planner_for
from strata.config import config
from strata.core import Dim, here, located, progress
from strata.errors import CompileError, LowerError, MemoryLimitError, OptionError, TraceError
from strata.lir import Lir, MemoryPlanOptions, plan, plan_stages, show_module, verify_plan
from strata.mir import Graph
from strata.passes import FusionLimits, Pass, PassContext, PassRecord, default_passes, parse_passes, run_passes
from strata.runtime.compile.dispatch import DispatchReport, as_graph, legalize, pass_context, report_of
from strata.runtime.compile.options import CompileOptions
from strata.runtime.report.explain import Explanation, explain_plan
from strata.runtime.report.fusion import FusionReport

FORMAT = 3  # of plans: a change of what the text means must change their fingerprints


@public
@dataclass(frozen=True)
class CompileResult:
    """A plan and how it was made."""

    lir: Lir
    fusion: FusionReport
    pipeline: CompilePipeline = field(repr=False)
    source: Graph = field(repr=False)

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        return self.fusion.passes

    @cached_property
    def dispatch(self) -> DispatchReport:
        """How each op of the program runs."""
        return report_of(self.source, self.lir.graph, self.pipeline.backend, self.pipeline.options)

    @property
    def has_dynamic_dims(self) -> bool:
        return self.lir.has_dynamic_dims

    @property
    def dynamic_symbols(self) -> tuple[str, ...]:
        return tuple(sorted(self.lir.symbols))

    @located
    def specialize(self, binding: Mapping[str, Dim]) -> CompileResult:
        """The same program for fixed sizes: shapes are inferred and planned again. Symbols left out stay symbols."""
        return self.pipeline.compile_graph(self.source.bind(binding))

    def explain(self) -> Explanation:
        """What was fused, what was not and why, memory and times."""
        return explain_plan(self.lir, self.fusion, self.pipeline.backend.sources(self.lir))


@public
@dataclass(frozen=True)
class TrainingResult:
    """A forward and a backward program over the same parameters."""

    forward: CompileResult
    backward: CompileResult  # the loss, then gradients; `d_output` weighs them
    wrt: tuple[str, ...]

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """Offset and bytes of each parameter in a block that both programs share."""
        return self.forward.lir.manifest().weight_layout()


@public
class CompilePipeline:
    """Stages for one target: lower, optimize, plan."""

    @own_checks("target")
    def __init__(self, target: str = "cpu", options: CompileOptions | None = None) -> None:
        self.device = target
        self.options = options or CompileOptions()
        self.backend: Backend = planner_for(target)
        if self.options.tuning == "beam" and not self.backend.capabilities.searches:
            raise OptionError(
                f"tune='beam': {self.backend.name} has no search for schedules", code="O145", fix='tune="heuristic"'
            )

    @property
    def context(self) -> PassContext:
        """What passes may ask of this target under these options."""
        return pass_context(self.backend, self.options)

    @property
    def passes(self) -> list[Pass]:
        """The passes that run here, in order."""
        options = self.options
        if options.passes is not None:
            return parse_passes(options.passes)
        chosen = default_passes(self.context, options.choices)
        return [p for p in chosen if p.name not in options.skip_passes]

    @property
    def arena_alignment(self) -> int:
        """Bytes that every scratch buffer starts at a multiple of."""
        return self.options.arena_alignment

    def with_supported_ops(self, ops: Sequence[str] | None) -> CompilePipeline:
        """The same stages for a device that runs these ops only: others are taken apart, or refused."""
        chosen = None if ops is None else (ops,) if isinstance(ops, str) else tuple(ops)
        return CompilePipeline(self.device, replace(self.options, supported_ops=chosen))

    @located
    def source(self, program: Any) -> Graph:
        """A graph from a graph or an HIR module, its sizes as they were written."""
        if isinstance(program, (Lir, CompileResult)):
            raise TraceError(
                f"{type(program).__name__} is planned already: it has no stage before", code="T230",
                fix="compile(plan), which passes it through",
            )  # fmt: skip
        graph = as_graph(program, self.options.blocks)
        if not graph.results:
            raise LowerError(f"graph {graph.name!r} has no outputs", code="L202", fix="g.outputs(...)")
        return graph

    @located
    def lower(self, program: Any) -> Graph:
        """A graph from a graph or an HIR module, with the sizes that the options fix."""
        graph = self.source(program)
        return graph.bind(self.options.dim_binding) if self.options.dim_binding else graph

    @located
    def optimize(self, graph: Graph) -> tuple[Graph, FusionReport]:
        """Run the passes and check that the backend can run the result."""
        graph = as_graph(graph)
        made, records = run_passes(self.passes, graph, self.context)
        legalize(made, self.backend, self.options)
        return made, FusionReport(graph, made, tuple(records), lambda: self.plan(made))

    @located
    def plan(self, graph: Graph, memory: MemoryPlanOptions | None = None) -> Lir:
        """Kernels, schedule and memory of an optimised graph; `memory` says how scratch buffers share bytes."""
        graph = as_graph(graph)
        memory = memory or self.options.memory
        backend, options = self.backend, self.options
        made_with = f"strata {_version()} format {FORMAT}; {options.key}; {config().key_fields()}; {backend.name}"
        lir = self._in_stages(graph, made_with, memory) or plan(
            graph, backend.target, memory_limit=options.memory_limit, whole=backend.runs_whole,
            views=backend.reads_views, limits=self._limits, again=backend.capabilities.recompute_cost,
            bodies=backend.capabilities.runs_bodies, made_with=made_with, memory=memory,
        )  # fmt: skip
        if options.tuning == "beam":
            lir = self._tuned(lir)
        if config().verify:
            verify_plan(lir)
        return lir

    @property
    def _limits(self) -> FusionLimits | None:
        return FusionLimits.within(self.backend.capabilities.most_buffers, self.options.limits)

    def _in_stages(self, graph: Graph, made_with: str, memory: MemoryPlanOptions) -> Lir | None:
        """The plan for a backend that takes graphs: it says which nodes are left for the host."""
        if not self.backend.capabilities.takes_graphs:
            return None
        backend, options = self.backend, self.options
        return plan_stages(
            graph, backend.target, backend.runs_on_host, memory_limit=options.memory_limit, limits=self._limits,
            made_with=made_with, memory=memory,
        )  # fmt: skip

    def _tuned(self, lir: Lir) -> Lir:
        """Schedules by measuring: seconds a kernel the first time, so that a terminal shows how far it is."""
        seen = 0
        with progress("searching schedules", None) as advance:

            def told(done: int, total: int) -> None:
                nonlocal seen
                advance(done - seen, total=total)
                seen = done

            return self.backend.tune(lir, told)

    def compile(self, program: Any) -> CompileResult:
        """All stages but machine code. A plan passes through as it is, with an empty report."""
        if isinstance(program, CompileResult):
            return program
        if isinstance(program, Lir):
            return self._passed(program)
        return self.compile_graph(self.lower(program))

    def _passed(self, lir: Lir) -> CompileResult:
        """A plan that was made before, for this target or one that runs here."""
        own = self.backend.target
        if lir.target != own and not lir.target.runs_on(own):
            raise CompileError(
                f"the plan of {lir.name!r} is for {lir.target}, {self.device!r} runs {own}", code="C154", place=here()
            )
        return CompileResult(lir, FusionReport(lir.graph, lir.graph, (), lambda: lir), self, lir.graph)

    compile_hir = compile_mir = compile_module = compile

    def compile_graph(self, graph: Graph) -> CompileResult:
        """Optimize and plan a graph as it is; where it goes over the memory limit, compute cheap values again."""
        try:
            return self._compile_graph(graph)
        except MemoryLimitError:
            if self.options.rematerialize or self.options.passes is not None:
                raise
            again = CompilePipeline(self.device, replace(self.options, rematerialize=True))
            with contextlib.suppress(MemoryLimitError):
                return again._compile_graph(graph)
            raise

    def _compile_graph(self, graph: Graph) -> CompileResult:
        _, report = self.optimize(graph)
        if self.options.assert_fusion_clean:
            report.require_clean()
        return CompileResult(report.lir, report, self, graph)

    def compile_training(self, program: Any, wrt: Sequence[str] | None = None) -> TrainingResult:
        """A program with one output and its gradients: the backward program computes the loss too, planned as one."""
        from strata.transforms import grad_with_loss

        graph = self.lower(program)
        backward = grad_with_loss(graph, wrt)
        names = tuple(wrt) if wrt is not None else tuple(graph.param_names or graph.input_names)
        return TrainingResult(self.compile_graph(graph), self.compile_graph(backward), names)

    def inspect(self, program: Any) -> str:
        """The text of every stage, with what each pass changed."""
        parts: list[tuple[str, str]] = []
        if not isinstance(program, Graph):
            parts.append(("HIR", str(program)))
        graph = self.lower(program)
        parts.append(("MIR", str(graph)))
        current = graph
        for one in self.passes:
            made, _ = run_passes([one], current, self.context)
            if made is not current:
                parts.append((f"pass {one}", graph_diff(current, made)))
            current = made
        lir = self.plan(current)
        report = FusionReport(graph, current, (), lambda: lir)
        parts += [
            ("MIR optimized", str(current)),
            ("LIR", _lir_header(lir) + "\n" + show_module(lir)),
            ("fusion", str(report)),
        ]
        if not self.backend.capabilities.long_code:
            parts += [(f"code {name}", text) for name, text in self.backend.sources(lir).items()]
        return "\n".join(f"══ {title} ══\n{text}\n" for title, text in parts)


@cache
def _version() -> str:
    try:
        return version("strata")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "source"


def _lir_header(lir: Lir) -> str:
    placement = lir.placement()
    naive = placement.unshared
    lines = [
        f"fingerprint: {lir.fingerprint()[:16]}",
        f"arena: {placement.arena_size} bytes (saved {placement.bytes_saved} of {naive}, align={lir.memory.alignment})",
        f"schedule: {len(lir.schedule)} steps, {len(lir.kernels)} kernels",
    ]
    return "\n".join([*lines, f"symbols: {', '.join(sorted(lir.symbols))}"] if lir.symbols else lines)


def graph_diff(before: Graph, after: Graph) -> str:
    """Changed op counts, then the lines that differ."""
    counts = [Counter(n.op.name for n in g.nodes()) for g in (before, after)]
    changes = {name: counts[1][name] - counts[0][name] for name in sorted({*counts[0], *counts[1]})}
    summary = ", ".join(f"{name} {delta:+d}" for name, delta in changes.items() if delta) or "no change in ops"
    head = f"# {len(before.nodes())} → {len(after.nodes())} nodes: {summary}"
    lines = difflib.unified_diff(str(before).splitlines(), str(after).splitlines(), lineterm="", n=0)
    return "\n".join([head, *(line for line in lines if not line.startswith(("---", "+++", "@@")))])
