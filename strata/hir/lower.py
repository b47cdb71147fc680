"""Lowering from blocks to the tensor graph; every node keeps its block's label and the user's line."""

from __future__ import annotations

from strata.core import here
from strata.errors import LowerError
from strata.hir.build import HirModule
from strata.hir.ir import HirValue, InputLeaf, ParamLeaf, check_policy
from strata.mir import Graph, Input, Value, as_tuple, leaf_name, origin


def lower(module: HirModule, policy: str | None = None) -> Graph:
    """The module as a graph. `policy` overrides the module's own: "direct" or "fusable"."""
    fusable = check_policy(policy or module.fusion) == "fusable"
    if not module.results:
        raise LowerError(f"module {module.name!r} has no outputs", code="L202", place=here(), fix="m.outputs(...)")
    graph = Graph(module.name)
    table: dict[HirValue, Value] = {}
    for node in module.nodes:
        match node.block:
            case InputLeaf(key=key, type=kind):
                outs: tuple[Value, ...] = (graph.input(key, kind),)
            case ParamLeaf(key=key, type=kind):
                outs = (graph.param(key, kind),)
            case made:
                with origin(node.place, node.label):
                    outs = as_tuple(made.lower(*(table[x] for x in node.inputs), fusable=fusable))
        types = tuple(x.type for x in outs)
        assert types == node.types, f"{node.id} {node.label} lowers to {types}, the module says {node.types}"
        table.update({HirValue(module, node, i): out for i, out in enumerate(outs)})
    return graph.outputs(*(table[x] for x in module.results))


def lower_for_autodiff(module: HirModule) -> Graph:
    """The module as primitives, whatever its own policy."""
    return lower(module, "fusable")


def wrap_mir_graph(graph: Graph, fusion: str = "direct") -> HirModule:
    """A graph as a module with a node for each of its nodes."""
    module = HirModule(graph.name, fusion)
    table: dict[Value, HirValue] = {}
    for x in (*graph.inputs, *graph.params):
        declare = module.input if isinstance(x.node.op, Input) else module.param
        table[x] = declare(leaf_name(x), x.type)
    module.take_over(graph.results, table)
    return module.outputs(*(table[x] for x in graph.results))
