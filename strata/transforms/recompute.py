"""checkpoint on graphs: the backward pass keeps only the inputs and recomputes the rest."""

from __future__ import annotations

from strata.arguments import own_checks
from strata.core import located
from strata.mir import Graph, Param, leaf_name
from strata.ops import CheckpointOp, make_graph
from strata.transforms.derive import require_graph


@own_checks("graph")
@located
def checkpoint(graph: Graph) -> Graph:
    """The same graph as a single op: differentiating it computes the intermediate values again."""
    require_graph(graph, "checkpoint")
    leaves = (*graph.inputs, *graph.params)
    body = make_graph("body", [(leaf_name(x), x) for x in leaves], graph.results)
    result = Graph(f"{graph.name}_checkpoint")
    given = [(result.param if isinstance(x.node.op, Param) else result.input)(leaf_name(x), x.type) for x in leaves]
    return result.outputs(*CheckpointOp(body)(*given))
