"""Replace ops that the backend does not take by the ops they are composed of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Op, Value, as_tuple, toposort
from strata.passes.base import Pass, PassContext, register, rewrite

ROUNDS = 16  # a composition may be made of compositions; no op nests deeper


@register
@dataclass(frozen=True)
class Decompose(Pass):
    """Expand compositions until only ops the backend takes, primitives, and those to keep (joined by +) are left."""

    keep: str = ""

    name: ClassVar[str] = "decompose"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        for _ in range(ROUNDS):
            if not any(self._expands(n.op, n.inputs, ctx) for n in toposort(graph.results)):
                break
            graph = rewrite(graph, lambda value, inputs: self._expand(value, inputs, ctx), self.name)
        return graph

    def _expand(self, value: Value, inputs: tuple[Value, ...], ctx: PassContext) -> Sequence[Value] | None:
        op = value.node.op
        return as_tuple(op.decompose(*inputs)) if self._expands(op, inputs, ctx) else None

    def _expands(self, op: Op, inputs: tuple[Value, ...], ctx: PassContext) -> bool:
        return op.is_composition and not ctx.takes(op, [x.type for x in inputs]) and op.name not in self.keep.split("+")
