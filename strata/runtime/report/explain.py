"""explain: what a compile did, in words: kernels, fusions, every cut edge and why, memory, times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.core import Place
from strata.errors import SymbolError
from strata.lir import Lir, Step

if TYPE_CHECKING:
    from strata.runtime.report.fusion import FusionReport


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


def _step(number: int, step: Step) -> StepLine:
    places = dict.fromkeys(n.origin.place for n in step.nodes if n.origin.place is not None)
    return StepLine(number, step.name, step.label, step.phase, tuple(n.op.name for n in step.nodes), tuple(places))
