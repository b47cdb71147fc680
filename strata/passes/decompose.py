"""Replace ops that the backend does not take by the ops they are composed of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value, as_tuple, toposort
from strata.passes.base import Pass, PassContext, register, rewrite

ROUNDS = 16  # a composition may be made of compositions; no op nests deeper


@register
@dataclass(frozen=True)
class Decompose(Pass):
    """Expand compositions until only ops that the backend takes, and primitives, are left."""

    name: ClassVar[str] = "decompose"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        for _ in range(ROUNDS):
            if not any(
                n.op.is_composition and not ctx.takes(n.op, [x.type for x in n.inputs]) for n in toposort(graph.results)
            ):
                break
            graph = rewrite(graph, lambda value, inputs: self._expand(value, inputs, ctx), self.name)
        return graph

    def _expand(self, value: Value, inputs: tuple[Value, ...], ctx: PassContext) -> Sequence[Value] | None:
        op = value.node.op
        if not op.is_composition or ctx.takes(op, [x.type for x in inputs]):
            return None
        return as_tuple(op.decompose(*inputs))
