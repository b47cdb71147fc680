"""vmap on graphs: a leading axis on named inputs and on every output."""

from __future__ import annotations

from collections.abc import Sequence

from strata.arguments import own_checks
from strata.core import Dim, SymExpr, located
from strata.errors import OptionError
from strata.mir import Graph, Param, Value, batch_values, leaf_name
from strata.transforms.derive import require_graph


@own_checks("graph")
@located
def vmap(graph: Graph, names: str | Sequence[str], size: Dim) -> Graph:
    """`<name>_vmap`: named inputs gain a leading axis of `size`, the others are shared, every output has it first."""
    require_graph(graph, "vmap")
    picked = [names] if isinstance(names, str) else list(names)
    if not picked:
        raise OptionError("vmap: name at least one input that has a batch axis", code="O263")
    if not isinstance(size, SymExpr) and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        raise OptionError(f"vmap: {size!r} is not a batch size", code="O264")
    for name in picked:
        graph.leaf(name)
    result = Graph(f"{graph.name}_vmap")
    batched: dict[Value, Value] = {}
    shared: dict[Value, Value] = {}
    for x in (*graph.inputs, *graph.params):
        declare = result.param if isinstance(x.node.op, Param) else result.input
        name = leaf_name(x)
        if name in picked:
            batched[x] = declare(name, x.type.with_shape((size, *x.shape)))
        else:
            shared[x] = declare(name, x.type)
    table = batch_values(graph.results, batched, size, shared=shared)
    return result.outputs(
        *(table[x] if x in table else shared.get(x, x).broadcast_to((size, *x.shape)) for x in graph.results)
    )
