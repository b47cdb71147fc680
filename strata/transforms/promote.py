"""Parameters as inputs: weights that are passed with every call."""

from __future__ import annotations

from collections.abc import Sequence

from strata.arguments import own_checks
from strata.core import located
from strata.errors import UnknownNameError
from strata.mir import Graph, Value, leaf_name, near, substitute_values
from strata.transforms.derive import require_graph


@own_checks("graph")
@located
def promote_params(graph: Graph, names: str | Sequence[str]) -> Graph:
    """The graph with the named parameters as inputs, after the ones it has; nothing else changes."""
    require_graph(graph, "promote_params")
    picked = [names] if isinstance(names, str) else list(names)
    for name in picked:
        if name not in graph.param_names:
            raise UnknownNameError(
                f"graph {graph.name!r} has no parameter {name!r}{near(name, graph.param_names)}", code="N115"
            )
    result = Graph(graph.name)
    known: dict[Value, Value] = {x: result.input(leaf_name(x), x.type) for x in graph.inputs}
    for x in graph.params:
        declare = result.input if leaf_name(x) in picked else result.param
        known[x] = declare(leaf_name(x), x.type)
    return result.outputs(*substitute_values(graph.results, known))
