"""Clean-up after differentiation: scans that the backward pass would repeat for their trajectory are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata.mir import Node, Value, make_node, origin_of, substitute_values, toposort
from strata.ops import Cond, ScanOp, prune


def tidy(roots: Sequence[Value]) -> tuple[Value, ...]:
    """What gradients need so that a forward scan runs once, and computes no more than what is used."""
    if not any(isinstance(node.op, (ScanOp, Cond)) for node in toposort(roots)):
        return tuple(roots)
    return merge_scans(prune(expand_checkpoints(roots)))


def expand_checkpoints(roots: Sequence[Value]) -> tuple[Value, ...]:
    """Scans with checkpoints as the scans over segments that their backward pass starts from; values do not change."""
    table: dict[Value, Value] = {}
    for node in toposort(roots):
        inputs = tuple(table.get(x, x) for x in node.inputs)
        with origin_of(node):
            if isinstance(node.op, ScanOp) and node.op.checkpoints is not None:
                outs: Sequence[Value] = node.op.segmented(*inputs)
            elif inputs != node.inputs:
                outs = make_node(node.op, inputs).outputs
            else:
                continue
        table.update(zip(node.outputs, outs, strict=True))
    return tuple(table.get(x, x) for x in roots)


def merge_scans(roots: Sequence[Value]) -> tuple[Value, ...]:
    """Scans that step the same carries over the same inputs become one that gives the rows of all of them."""
    order = toposort(roots)
    groups: dict[object, list[Node]] = {}
    same: dict[Value, Value] = {}  # carries of one group are equal, so what starts from them may be one group, too
    for node in order:
        if isinstance(node.op, ScanOp) and node.op.num_carry:
            inputs = tuple(same.get(x, x) for x in node.inputs)
            group = groups.setdefault((inputs, _steps_of(node.op)), [])
            group.append(node)
            carries = node.op.num_carry
            same.update(zip(node.outputs[:carries], group[0].outputs[:carries], strict=True))
    member = {id(node): group for group in groups.values() if len(group) > 1 for node in group}
    if not member:
        return tuple(roots)
    table: dict[Value, Value] = {}
    for node in order:
        if id(node) in member:
            if node.outputs[0] not in table:
                inputs = tuple(table.get(x, x) for x in node.inputs)
                with origin_of(node):
                    _merge(member[id(node)], inputs, table)
            continue
        inputs = tuple(table.get(x, x) for x in node.inputs)
        if inputs != node.inputs:
            with origin_of(node):
                table.update(zip(node.outputs, make_node(node.op, inputs).outputs, strict=True))
    return tuple(table.get(x, x) for x in roots)


def _steps_of(scan: ScanOp) -> ScanOp:
    """The scan without its ys."""
    return replace(scan, body=scan.body.returning(*scan.body.results[: scan.num_carry]))


def _merge(group: Sequence[Node], inputs: tuple[Value, ...], table: dict[Value, Value]) -> None:
    first = group[0].op
    assert isinstance(first, ScanOp)
    carries = first.num_carry
    rows: dict[Value, int] = {}
    places: list[list[int]] = []
    for node in group:
        assert isinstance(node.op, ScanOp)
        body = node.op.body
        same = substitute_values(body.results[carries:], dict(zip(body.inputs, first.body.inputs, strict=True)))
        places.append([rows.setdefault(row, len(rows)) for row in same])
    merged = replace(first, body=first.body.returning(*first.body.results[:carries], *rows))(*inputs)
    for node, at in zip(group, places, strict=True):
        outs = (*merged[:carries], *(merged[carries + i] for i in at))
        table.update(zip(node.outputs, outs, strict=True))
