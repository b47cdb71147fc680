"""What a program becomes at the stages that golden cases pin: plans, schedules, LLVM IR.

Targets are named ones, so that the text is the same on every machine. Short functions of LLVM IR are shown as they are,
long ones as an outline with a digest: `python -m tests.cases llvm NAME` prints them whole.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator

import strata.ops  # noqa: F401 - fills the registry
from strata.backends.llvm.codegen.compile import lower_phases
from strata.backends.llvm.codegen.kernels import op_source, plan_sources
from strata.core import Target
from strata.kernel import LoopBlock, MapLoop, ReduceLoop, parse_kernel
from strata.lir import Lir
from strata.mir import parse
from strata.runtime import CompilePipeline
from strata.testing import GoldenCase

TARGETS = ("avx2", "avx512", "neon")
SHORT = 40  # lines of a function that is shown whole, for the first target
_VALUE = re.compile(r"%[\w.]+")
_LABEL = re.compile(r"^([\w.]+):", re.MULTILINE)
_CALL = re.compile(r"\bcall [^@]*@([\w.]+)|\bcall (?:[^@%(]+ )?(%[\w.]+)\(")
_OPCODE = re.compile(r"^  (?:%[\w.]+ = )?(?:(?:tail|notail) )?([a-z]\w+)", re.MULTILINE)
_VECTOR = re.compile(r"<\d+ x (?:float|double|half|bfloat|i8|i16|i32|i64)>")


def by_target(text: Callable[[str], str]) -> str:
    """The text for each target, once for those that have the same."""
    found: dict[str, list[str]] = {}
    for name in TARGETS:
        found.setdefault(text(name), []).append(name)
    return "\n".join(f"== {', '.join(names)}\n{made}" for made, names in found.items())


def planned(case: GoldenCase, target: str) -> Lir:
    return CompilePipeline(f"cpu:{target}").compile(parse(case.program)).lir


# ---------------------------------------------------------------------------------------------------------------- plans


def plan_text(case: GoldenCase) -> str:
    """The steps and buffers of a plan, and the edges of the graph that are not fused."""

    def text(target: str) -> str:
        lir = planned(case, target)
        cuts = [f"cut {c.producer.op.name}: {c.reason}" for c in lir.cuts]
        return "\n".join([lir.summary().replace(f" target {target}", ""), *cuts])

    return by_target(text)


# ------------------------------------------------------------------------------------------------------------ schedules


def schedule_text(case: GoldenCase) -> str:
    """The loops of a kernel and how they are run."""
    kernel = parse_kernel(case.program)

    def text(target: str) -> str:
        phases, scratch = lower_phases(kernel, Target.named(target))
        lines = [f"scratch {b}" for b in scratch]
        for phase in phases:
            lines += [f"{phase.kernel.name} over {phase.points}: {'; '.join(map(str, phase.schedule.actions))}"]
            lines += _loops(phase.nest, 1)
        return "\n".join(lines)

    return by_target(text)


def _loops(block: LoopBlock, depth: int) -> Iterator[str]:
    for step in block.steps:
        if isinstance(step, MapLoop | ReduceLoop):
            kind = "for" if isinstance(step, MapLoop) else "reduce"
            yield f"{'  ' * depth}{kind} {step.axis} in {step.axis.extent}"
            yield from _loops(step.body, depth + 1)


# -------------------------------------------------------------------------------------------------------------- LLVM IR


def modules(case: GoldenCase, target: str) -> dict[str, tuple[str, list[str]]]:
    """How the module of each step is called, and its globals and functions."""
    lir = planned(case, target)
    kernels, ops = plan_sources(lir, Target.named(target))
    sources = kernels | {f"step{at} {op.functions[0]}": op_source(op, lir.target) for at, op in ops.items()}
    made = {name: source.make() for name, source in sources.items()}
    return {name: (usage, functions_of(module.text())) for name, (usage, module) in made.items()}


def whole_text(case: GoldenCase, target: str) -> str:
    lines = []
    for name, (usage, parts) in modules(case, target).items():
        lines += [f"; {target} {name} {usage}", *parts]
    return "\n".join(lines)


def llvm_text(case: GoldenCase) -> str:
    """Each module of each target in outline."""

    def text(target: str) -> str:
        lines = []
        for name, (usage, parts) in modules(case, target).items():
            lines += [
                f"{name} {_short(usage, 200)}".rstrip(),
                *(_outline(part, target == TARGETS[0]) for part in parts),
            ]
        return "\n".join(lines)

    return by_target(text)


def functions_of(text: str) -> list[str]:
    """Globals and functions, without declarations and the target; values and blocks are numbered as they come."""
    found = re.split(r"\n(?=@|define |declare |attributes )", "\n" + text)
    functions = [_renumbered(p[: p.index("\n}") + 2]) for p in found if p.startswith("define ")]
    return [p.strip() for p in found if p.startswith("@")] + functions


def _renumbered(function: str) -> str:
    head, body = function.split("\n", 1)
    names = {f"%{name}": f"%b{i}" for i, name in enumerate(_LABEL.findall(body))}
    known = set(_VALUE.findall(head))
    count = 0

    def renamed(match: re.Match[str]) -> str:
        nonlocal count
        name = match[0]
        if name in known:
            return name
        if name not in names:
            names[name] = f"%{count}"
            count += 1
        return names[name]

    body = _VALUE.sub(renamed, body)
    return f"{head}\n" + _LABEL.sub(lambda match: f"{names['%' + match[1]][1:]}:", body)


def _outline(part: str, is_shown: bool) -> str:
    """A short function as it is. Of a long one: size, blocks, loops, and how often it has which operation."""
    if is_shown and part.count("\n") < SHORT:
        return part
    if part.startswith("@"):
        return _short(part, 60)
    head, body = part.split("\n", 1)
    name = head[head.index("@") : head.index("(")]
    labels = {label: i for i, label in enumerate(_LABEL.findall(body))}
    heads: set[str] = set()
    at = 0
    for line in body.splitlines():
        if found := _LABEL.match(line):
            at = labels[found[1]]
        elif line.lstrip().startswith(("br ", "switch ")):
            heads |= {label for label in re.findall(r"label %([\w.]+)", line) if labels[label] <= at}
    opcodes = Counter(_OPCODE.findall(body))
    calls = Counter(direct or "a pointer" for direct, _ in _CALL.findall(body))
    for implied in ("call", "br", "ret"):
        del opcodes[implied]
    lines = [f"{name} [{_digest(part)}] {part.count(chr(10)) + 1} lines, {len(labels)} blocks, {len(heads)} loops"]
    counts = {"ops": opcodes, "calls": calls} if not name.startswith("@micro") else {"calls": calls}
    for kind, counted in counts.items():
        if counted:
            lines.append(f"  {kind}: " + ", ".join(f"{name} {n}" for name, n in sorted(counted.items())))
    vectors = sorted(set(_VECTOR.findall(body)))
    return "\n".join([*lines, f"  vectors: {' '.join(vectors)}"] if vectors else lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… [{_digest(text)}]"
