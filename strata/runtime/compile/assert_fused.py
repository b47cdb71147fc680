"""assert_fused: a check for tests that one kernel computes all the named ops."""

from __future__ import annotations

from collections import Counter

from strata.errors import CompileError
from strata.lir import Lir
from strata.mir import REGISTRY, Graph, Node, near
from strata.runtime.compile.pipeline import CompilePipeline, CompileResult


def assert_fused(program: Graph | CompileResult | Lir, *ops: str, device: str = "cpu") -> None:
    """Raise CompileError unless one step computes all the named ops, as they are after the passes."""
    lir = _planned(program, device)
    for name in ops:
        if name not in REGISTRY:
            raise CompileError(f"assert_fused: no op is named {name!r}{near(name, REGISTRY)}", code="C153")
    wanted = Counter(ops)
    steps = [s for _, s in lir.walk()]
    homes = [s for s in steps if not wanted - Counter(n.op.name for n in s.nodes)]
    if homes:
        return
    present = {n.op.name for s in steps for n in s.nodes}
    absent = [name for name in ops if name not in present]
    if absent:
        message = f"assert_fused: no step computes {absent[0]}; the steps are {', '.join(sorted(present))}"
        raise CompileError(message, code="C153")
    reasons = [
        f"{c.producer.op.name} → {c.consumer.op.name}: {c.reason}"
        for plan in (lir, *(body for s in steps for body in s.bodies))
        for c in plan.cuts
        if c.consumer is not None and _concerns(c.producer, c.consumer, ops)
    ]
    where = [f"{name} is in {', '.join(_homes(lir, name))}" for name in wanted]
    raise CompileError(f"no kernel computes {' and '.join(ops)} together", code="C153", operands=[*where, *reasons])


def _homes(lir: Lir, name: str) -> list[str]:
    """The steps that compute an op."""
    return list(dict.fromkeys(s.label for _, s in lir.walk() if any(n.op.name == name for n in s.nodes)))


def _concerns(producer: Node, consumer: Node, ops: tuple[str, ...]) -> bool:
    return producer.op.name in ops or consumer.op.name in ops


def _planned(program: Graph | CompileResult | Lir, device: str) -> Lir:
    if isinstance(program, Lir):
        return program
    found: Lir | None = getattr(program, "lir", None)
    return found if found is not None else CompilePipeline(device).compile(program).lir
