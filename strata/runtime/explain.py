"""explain: what a compile made of a program, in words: steps, fusions, every cut edge and why, memory, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.core import Place
from strata.errors import CompileError, SymbolError
from strata.lir import Lir, Step
from strata.mir import REGISTRY, Graph, Node, near

if TYPE_CHECKING:
    from strata.runtime.compiled import CompiledGraph
    from strata.runtime.fusion import FusionReport
    from strata.runtime.pipeline import CompileResult


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step: what it computes, from which lines of the user's program."""

    number: int
    kernel: str
    label: str
    phase: str
    ops: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def is_fused(self) -> bool:
        return len(self.ops) > 1


@dataclass(frozen=True, slots=True)
class CutLine:
    """An edge whose value goes through memory, and why."""

    producer: str
    consumer: str | None
    reason: str
    place: Place | None


@dataclass(frozen=True)
class Explanation:
    """Printed, it is a page; its parts can be read by programs."""

    name: str
    steps: tuple[StepLine, ...]
    cuts: tuple[CutLine, ...]
    fusion: FusionReport
    memory: str
    code: Mapping[str, str] = field(default_factory=dict)
    """The text that kernels became, by name, on devices whose code is text."""

    @property
    def kernel_count(self) -> int:
        """Steps of each run; what depends on parameters only is not among them."""
        return sum(s.phase != "prologue" for s in self.steps)

    def __str__(self) -> str:
        fused = sum(len(s.ops) for s in self.steps if s.is_fused)
        lines = [
            f"{self.name}: {self.kernel_count} steps a run, {fused} ops fused",
            self.fusion.summary_line(),
            "",
            "steps",
        ]
        for s in self.steps:
            once = " (once, when parameters are set)" if s.phase == "prologue" else ""
            lines.append(f"  {s.number:>3} {s.kernel:<6} {s.label}{once}{_lines(s.places)}")
        lines += ["", "values that go through memory"]
        for cut in self.cuts:
            to = f" → {cut.consumer}" if cut.consumer else ""
            lines.append(f"  {cut.producer}{to}: {cut.reason}{_lines((cut.place,) if cut.place else ())}")
        lines += ["", "passes"]
        lines += [f"  {p.name}: {p.before} → {p.after} nodes, {p.seconds * 1e3:.1f} ms" for p in self.fusion.passes]
        lines += ["", "memory", *(f"  {line}" for line in self.memory.splitlines())]
        if self.code:
            lines += ["", "code (in full: `.code[name]`)"]
            lines += [f"  {name}: {len(text.splitlines())} lines" for name, text in self.code.items()]
        return "\n".join(lines)


def _lines(places: tuple[Place, ...]) -> str:
    shown = [p.describe() for p in places[:2]]
    more = f" and {len(places) - 2} more" if len(places) > 2 else ""
    return f"   [{'; '.join(shown)}{more}]" if shown else ""


def explain_plan(lir: Lir, fusion: FusionReport, code: Mapping[str, str] | None = None) -> Explanation:
    """The explanation of a plan."""
    try:
        memory = lir.memory_report()
    except SymbolError:
        memory = "known when the sizes are: " + ", ".join(sorted(lir.symbols))
    cuts = tuple(
        CutLine(
            c.producer.op.called,
            c.consumer.op.called if c.consumer is not None else None,
            c.reason,
            c.producer.origin.place,
        )
        for c in lir.cuts
    )
    steps = tuple(_step(i, s) for i, s in enumerate(lir.schedule))
    return Explanation(lir.name, steps, cuts, fusion, memory, dict(code or {}))


def explain(compiled: CompiledGraph) -> Explanation:
    """The explanation of a compiled graph: its plan made once more from its source, which takes no machine code."""
    from strata.runtime.pipeline import CompilePipeline

    pipeline = CompilePipeline(compiled.device, compiled.options)
    return pipeline.compile(compiled.source).explain()


def _step(number: int, step: Step) -> StepLine:
    places = dict.fromkeys(n.origin.place for n in step.nodes if n.origin.place is not None)
    return StepLine(number, step.name, step.label, step.phase, tuple(n.op.name for n in step.nodes), tuple(places))


def assert_fused(program: Graph | CompileResult | Lir, *ops: str, device: str = "cpu") -> None:
    """Raise CompileError unless one step computes all the named ops, as they are after the passes."""
    lir = _planned(program, device)
    for name in ops:
        if name not in REGISTRY:
            raise CompileError(f"assert_fused: no op is named {name!r}{near(name, REGISTRY)}", code="C153")
    wanted = Counter(ops)
    homes = [s for s in lir.schedule if not wanted - Counter(n.op.name for n in s.nodes)]
    if homes:
        return
    present = {n.op.name for s in lir.schedule for n in s.nodes}
    absent = [name for name in ops if name not in present]
    if absent:
        message = f"assert_fused: no step computes {absent[0]}; there are {', '.join(sorted(present))}"
        raise CompileError(message, code="C153")
    reasons = [
        f"{c.producer.op.name} → {c.consumer.op.name}: {c.reason}"
        for c in lir.cuts
        if c.consumer is not None and _concerns(c.producer, c.consumer, ops)
    ]
    where = [f"{name} is in {', '.join(_homes(lir, name))}" for name in wanted]
    raise CompileError(f"no kernel computes {' and '.join(ops)} together", code="C153", operands=[*where, *reasons])


def _homes(lir: Lir, name: str) -> list[str]:
    """The steps that compute an op."""
    return list(dict.fromkeys(s.label for s in lir.schedule if any(n.op.name == name for n in s.nodes)))


def _concerns(producer: Node, consumer: Node, ops: tuple[str, ...]) -> bool:
    return producer.op.name in ops or consumer.op.name in ops


def _planned(program: Graph | CompileResult | Lir, device: str) -> Lir:
    from strata.runtime.pipeline import CompilePipeline

    if isinstance(program, Lir):
        return program
    found: Lir | None = getattr(program, "lir", None)
    return found if found is not None else CompilePipeline(device).compile(program).lir
