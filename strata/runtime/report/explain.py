"""explain: what a compile did, in words: kernels, fusions, every cut edge and why, memory, times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.arguments import public
from strata.core import Place, folded
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
    bodies: tuple[tuple[StepLine, ...], ...] = ()
    """Of a loop or branch that runs natively: the steps of each graph inside of it."""

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


@public
@dataclass(frozen=True)
class Explanation:
    """Printed, it is a page; its parts can be read by programs."""

    name: str
    steps: tuple[StepLine, ...]
    cuts: tuple[CutLine, ...]
    fusion: FusionReport
    memory: str
    code: Mapping[str, str] = field(default_factory=dict)
    """The text that kernels became, by name: LLVM IR, Triton, WGSL or StableHLO."""

    @property
    def kernel_count(self) -> int:
        """Steps of each run; what depends on parameters only is not among them."""
        return sum(s.phase != "prologue" for s in self.steps)

    def _repr_html_(self) -> str:
        return folded(f"{self.name}: {self.kernel_count} steps a run", str(self))

    def __str__(self) -> str:
        fused = sum(len(s.ops) for s in _all(self.steps) if s.is_fused)
        before, after = self.fusion.nodes_before, self.fusion.after.total()
        lines = [
            f"{self.name}: {self.kernel_count} steps a run, {fused} ops fused",
            f"{before} nodes as written, {after} after the passes; {self._missed()}",
            "",
            "steps",
        ]
        lines += _shown(self.steps, "(once, when parameters are set)")
        lines += ["", "values that go through memory"]
        for cut in self.cuts:
            to = f" → {cut.consumer}" if cut.consumer else ""
            lines.append(f"  {cut.producer}{to}: {cut.reason}{_lines((cut.place,) if cut.place else ())}")
        lines += ["", "passes"]
        changed = [p for p in self.fusion.passes if p.changed]
        idle = [p for p in self.fusion.passes if not p.changed]
        lines += [f"  {p.name}: {p.before} → {p.after} nodes, {p.seconds * 1e3:.1f} ms" for p in changed]
        if idle:
            took = sum(p.seconds for p in idle) * 1e3
            lines.append(f"  {len(idle)} {'others ' * bool(changed)}changed nothing, {took:.1f} ms")
        lines += ["", "memory", *(f"  {line}" for line in self.memory.splitlines())]
        if self.code:
            lines += ["", "code (as text: `.code[name]`)", f"  {', '.join(self.code)}"]
        return "\n".join(lines)

    def _missed(self) -> str:
        found = [f"{m.label}: {m.reason}" for m in self.fusion.missed]
        return f"missed fusions: {'; '.join(found)}" if found else "no fusion was missed"


def _all(steps: Iterable[StepLine]) -> Iterator[StepLine]:
    """Steps, and those inside of them."""
    for step in steps:
        yield step
        for body in step.bodies:
            yield from _all(body)


def _shown(steps: Iterable[StepLine], once: str, indent: str = "  ") -> Iterator[str]:
    for s in steps:
        yield f"{indent}{s.number:>3} {s.kernel:<6} {s.label}{f' {once}' * (s.phase == 'prologue')}{_lines(s.places)}"
        for body in s.bodies:
            yield from _shown(body, "(once, before the first turn)", f"{indent}    | ")


def _lines(places: tuple[Place, ...]) -> str:
    shown = [p.describe() for p in places[:2]]
    more = f" and {len(places) - 2} more" if len(places) > 2 else ""
    return f"   [{'; '.join(shown)}{more}]" if shown else ""


def explain_plan(lir: Lir, fusion: FusionReport, code: Mapping[str, str] | None = None) -> Explanation:
    """The explanation of a plan."""
    try:
        memory = lir.memory_report()
    except SymbolError:
        memory = "known when these sizes are known: " + ", ".join(sorted(lir.symbols))
    cuts = tuple(
        CutLine(
            c.producer.op.called,
            c.consumer.op.called if c.consumer is not None else None,
            c.reason,
            c.producer.origin.place,
        )
        for one in (lir, *(body for _, s in lir.walk() for body in s.bodies))
        for c in one.cuts
    )
    return Explanation(lir.name, _steps(lir), cuts, fusion, memory, code or {})


def _steps(lir: Lir) -> tuple[StepLine, ...]:
    return tuple(_step(i, s) for i, s in enumerate(lir.schedule))


def _step(number: int, step: Step) -> StepLine:
    places = dict.fromkeys(n.origin.place for n in step.nodes if n.origin.place is not None)
    ops = tuple(n.op.name for n in step.nodes)
    return StepLine(number, step.name, step.label, step.phase, ops, tuple(places), tuple(map(_steps, step.bodies)))
