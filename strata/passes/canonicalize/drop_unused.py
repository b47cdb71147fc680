"""Drop parameters and inputs that no result needs; ops that no result needs are not in a graph to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph
from strata.passes.base import Pass, PassContext, register


@register
@dataclass(frozen=True)
class DropUnused(Pass):
    """Leave out declarations that nothing reads; this changes the signature, so it is never a default."""

    inputs: bool = True
    params: bool = True

    name: ClassVar[str] = "drop_unused"
    keeps_signature: ClassVar[bool] = False

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        used = {id(n) for n in graph.nodes()}
        inputs = tuple(x for x in graph.inputs if id(x.node) in used or not self.inputs)
        params = tuple(x for x in graph.params if id(x.node) in used or not self.params)
        if (inputs, params) == (graph.inputs, graph.params):
            return graph
        made = Graph(graph.name)
        made.scope, made.inputs, made.params, made.results = graph.scope, inputs, params, graph.results
        return made
