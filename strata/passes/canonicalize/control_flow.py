"""Lower control flow: branches become selections, bounded loops are unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.errors import CompileError
from strata.mir import Graph, Value, toposort
from strata.ops import Cond, While, where
from strata.passes.base import Pass, PassContext, register, rewrite

ROUNDS = 16  # bodies may contain branches and loops


@register
@dataclass(frozen=True)
class LowerControlFlow(Pass):
    """cond becomes where over both branches; a loop of at most `unroll` steps becomes its steps.

    With `strict`, a loop without a bound, or with a larger one, is refused rather than left.
    """

    unroll: int = 64
    strict: bool = False

    name: ClassVar[str] = "lower_control_flow"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        for _ in range(ROUNDS):
            if not any(isinstance(n.op, (Cond, While)) for n in toposort(graph.results)):
                break
            made = rewrite(graph, self._lower, self.name)
            if made is graph:
                break
            graph = made
        return graph

    def _lower(self, value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        op = value.node.op
        if isinstance(op, Cond):
            predicate, captures = inputs[0], inputs[1:]
            pairs = zip(op.then.call(*captures), op.orelse.call(*captures), strict=True)
            return [a if a == b else where(predicate, a, b) for a, b in pairs]
        if isinstance(op, While):
            if op.max_iterations is not None and op.max_iterations <= self.unroll:
                return _unrolled(op, inputs)
            if self.strict:
                bound = (
                    "no bound"
                    if op.max_iterations is None
                    else f"up to {op.max_iterations} steps, the limit is {self.unroll}"
                )
                raise CompileError(
                    f"while: cannot be unrolled: it has {bound}", code="C150", place=value.node.origin.place,
                    fix="while_loop(cond, body, init, max_iter=N)",
                )  # fmt: skip
        return None


def _unrolled(loop: While, inputs: tuple[Value, ...]) -> list[Value]:
    """Steps one after the other; carries freeze from the first step whose condition is false."""
    assert loop.max_iterations is not None
    carries, consts = list(inputs[: loop.num_carry]), inputs[loop.num_carry :]
    active: Value | None = None
    for _ in range(loop.max_iterations):
        (test,) = loop.cond.call(*carries, *consts)
        active = test if active is None else active & test
        stepped = loop.body.call(*carries, *consts)
        carries = [new if new == old else where(active, new, old) for new, old in zip(stepped, carries, strict=True)]
    return carries
