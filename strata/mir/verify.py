"""The graph verifier: known leaves, unique names, types that agree with the ops' shape rules."""

from __future__ import annotations

from weakref import WeakSet

from strata.errors import StrataError, TraceError, VerifyError
from strata.mir.graph import Graph
from strata.mir.ir import Node, describe_operand
from strata.mir.leaves import Input, Param, leaf_name


def verify(graph: Graph, after: str | None = None) -> None:
    """Raise VerifyError (TraceError for a value of another graph) at the first broken rule; `after` names a pass."""
    where = f" after {after}" if after else ""
    declared = {id(x.node) for x in (*graph.inputs, *graph.params)}
    names = [leaf_name(x) for x in (*graph.inputs, *graph.params)]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise VerifyError(f"graph {graph.name!r}{where} declares {twice!r} twice", code="V111")
    for node in graph.nodes():
        if isinstance(node.op, (Input, Param)):
            if id(node) not in declared:
                raise TraceError(
                    f"graph {graph.name!r}{where} uses {node.op.name} {node.op.key!r}, which belongs to another graph",
                    code="T115",
                    place=node.origin.place,
                )
            continue
        _verify_node(node, where)


_verified: WeakSet[Node] = WeakSet()  # a node never changes: passes leave most of them as they are


def _verify_node(node: Node, where: str) -> None:
    if node in _verified:
        return
    try:
        types = node.op.infer_types([x.type for x in node.inputs])
    except StrataError as error:
        operands = tuple(describe_operand(x) for x in node.inputs)
        raise VerifyError(f"{error.summary}{where}", code="V112", place=node.origin.place, operands=operands) from error
    if types != node.types:
        raise VerifyError(
            f"{node.op.name}{where} is declared {_show(node.types)}, its inputs give {_show(types)}",
            code="V113",
            place=node.origin.place,
        )
    _verified.add(node)


def _show(types: tuple[object, ...]) -> str:
    return ", ".join(map(str, types))
