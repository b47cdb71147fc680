"""Dead code in control flow: unused results of nested graphs, and the inputs that only they needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata.mir import Node, Op, Value, make_node, origin_of, toposort
from strata.ops.control.branching import Cond
from strata.ops.control.scanning import ScanOp
from strata.ops.control.tracing import make_graph, used


@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller op, and the places of the inputs and outputs that it keeps."""

    op: Op
    inputs: list[int]
    outputs: list[int]


def prune(roots: Sequence[Value]) -> tuple[Value, ...]:
    """The same values with scans and conds that compute no more than what is used."""
    order = toposort(roots)
    live = set(roots)
    smaller: dict[int, Pruned] = {}
    for node in reversed(order):
        flags = [x in live for x in node.outputs]
        if not any(flags):
            continue
        pruned = _prune_node(node, flags)
        if pruned is not None:
            smaller[id(node)] = pruned
        live.update(node.inputs if pruned is None else (node.inputs[i] for i in pruned.inputs))
    if not smaller:
        return tuple(roots)
    table: dict[Value, Value] = {}
    for node in order:
        if not any(x in live for x in node.outputs):
            continue
        inputs = tuple(table.get(x, x) for x in node.inputs)
        pruned = smaller.get(id(node))
        with origin_of(node):
            if pruned is not None:
                made = make_node(pruned.op, [inputs[i] for i in pruned.inputs])
                table.update(zip((node.outputs[i] for i in pruned.outputs), made.outputs, strict=True))
            elif inputs != node.inputs:
                table.update(zip(node.outputs, make_node(node.op, inputs).outputs, strict=True))
    return tuple(table.get(x, x) for x in roots)


def _prune_node(node: Node, live: Sequence[bool]) -> Pruned | None:
    match node.op:
        case ScanOp():
            return _prune_scan(node.op, live)
        case Cond():
            return _prune_cond(node.op, live)
    return None


def _prune_scan(scan: ScanOp, live: Sequence[bool]) -> Pruned | None:
    leaves, results, carries = scan.body.inputs, scan.body.results, scan.num_carry
    outputs = list(live)
    while True:  # a carry stays when what stays depends on it
        needed = used(leaves, [r for r, keep in zip(results, outputs, strict=True) if keep])
        grown = [keep or (i < carries and needed[i]) for i, keep in enumerate(outputs)]
        if grown == outputs:
            break
        outputs = grown
    inputs = [outputs[i] if i < carries else keep for i, keep in enumerate(needed)]
    if all(outputs) and all(inputs):
        return None
    kept_in, kept_out = _places(inputs), _places(outputs)
    names = scan.body.input_names
    body = make_graph(scan.body.name, [(names[i], leaves[i]) for i in kept_in], [results[i] for i in kept_out])
    first = carries + scan.num_consts
    op = replace(scan, body=body, num_carry=sum(outputs[:carries]), num_consts=sum(inputs[carries:first]))
    return Pruned(op, kept_in, kept_out)


def _prune_cond(cond: Cond, live: Sequence[bool]) -> Pruned | None:
    outputs = _places(live)
    graphs = (cond.then, cond.orelse)
    needs = [used(g.inputs, [g.results[i] for i in outputs]) for g in graphs]
    captures = [a or b for a, b in zip(*needs, strict=True)]
    if all(live) and all(captures):
        return None
    kept = _places(captures)
    then, orelse = (
        make_graph(g.name, [(g.input_names[i], g.inputs[i]) for i in kept], [g.results[i] for i in outputs])
        for g in graphs
    )
    return Pruned(Cond(then, orelse), [0, *(i + 1 for i in kept)], outputs)


def _places(flags: Sequence[bool]) -> list[int]:
    return [i for i, keep in enumerate(flags) if keep]
