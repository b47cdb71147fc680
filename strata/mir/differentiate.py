"""Reverse and forward differentiation over values: the drivers; every rule belongs to an op.

Both walk the nodes between `wrt` and the outputs once, without recursion. A value in `wrt` is a boundary: what it was
computed from is not entered.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.core import located
from strata.errors import ShapeError
from strata.mir.graph import toposort
from strata.mir.ir import METHODS, Node, UnaryOp, Value, as_tuple
from strata.mir.origin import origin_of


@located
def pullback(outputs: Sequence[Value], cotangents: Sequence[Value | None], wrt: Sequence[Value]) -> list[Value | None]:
    """Cotangents of `wrt` given those of `outputs`; None is a known zero."""
    grads: dict[Value, Value] = {}
    for out, ct in zip(outputs, cotangents, strict=True):
        if ct is not None:
            _check("cotangent", ct, out)
            _accumulate(grads, out, ct)
    order, active = _active_nodes(outputs, wrt)
    boundary = set(wrt)
    for node in reversed(order):
        if id(node) not in active or not node.op.differentiable:
            continue
        cts = tuple(None if out in boundary else grads.pop(out, None) for out in node.outputs)
        if all(ct is None for ct in cts):
            continue
        with origin_of(node, made_by="vjp"):
            contributions = _vjp(node, cts)
        for x, ct in zip(node.inputs, contributions, strict=True):
            if ct is not None and x.dtype.is_inexact and (id(x.node) in active or x in boundary):
                _check(f"vjp of {node.op.name}", ct, x)
                with origin_of(node, made_by="vjp"):
                    _accumulate(grads, x, ct)
    return [grads.get(x) for x in wrt]


def pullback_once(
    outputs: Sequence[Value], cotangents: Sequence[Value | None], inputs: Sequence[Value]
) -> list[Value | None]:
    """Cotangents of an op's inputs; a value that is passed twice gets its whole cotangent at its first place."""
    seen: set[Value] = set()
    grads: list[Value | None] = []
    for x, ct in zip(inputs, pullback(outputs, cotangents, inputs), strict=True):
        grads.append(None if x in seen else ct)
        seen.add(x)
    return grads


@located
def pushforward(outputs: Sequence[Value], wrt: Sequence[Value], tangents: Sequence[Value | None]) -> list[Value | None]:
    """Tangents of `outputs` given those of `wrt`; None is a known zero."""
    table: dict[Value, Value] = {}
    for x, dx in zip(wrt, tangents, strict=True):
        if dx is not None:
            _check("tangent", dx, x)
            table[x] = dx
    boundary = set(wrt)
    for node in toposort(outputs, wrt):
        dxs = tuple(table.get(x) for x in node.inputs)
        if not node.op.differentiable or all(dx is None for dx in dxs):
            continue
        with origin_of(node, made_by="jvp"):
            outs = _jvp(node, dxs)
        for out, dout in zip(node.outputs, outs, strict=True):
            if dout is not None and out.dtype.is_inexact and out not in boundary:
                _check(f"jvp of {node.op.name}", dout, out)
                table[out] = dout
    return [table.get(out) for out in outputs]


def _vjp(node: Node, cts: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
    op = node.op
    out = node.outputs if op.multi_output else node.outputs[0]
    result = op.vjp(*node.inputs, out=out, ct=cts if op.multi_output else cts[0])
    contributions = (result,) if isinstance(op, UnaryOp) else as_tuple(result)
    assert len(contributions) == len(node.inputs), (
        f"vjp of {op.name} gave {len(contributions)} of {len(node.inputs)} cotangents"
    )
    return contributions


def _jvp(node: Node, dxs: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
    op = node.op
    out = node.outputs if op.multi_output else node.outputs[0]
    result = op.jvp(*node.inputs, out=out, dx=dxs[0] if isinstance(op, UnaryOp) else dxs)
    outs = result if op.multi_output else (result,)
    assert len(outs) == len(node.types), f"jvp of {op.name} gave {len(outs)} of {len(node.types)} tangents"
    return tuple(outs)


def _active_nodes(outputs: Sequence[Value], wrt: Sequence[Value]) -> tuple[list[Node], set[int]]:
    """Nodes in order, and the ids of those that depend on `wrt`."""
    boundary = set(wrt)
    order = toposort(outputs, wrt)
    active: set[int] = set()
    for node in order:
        if any(x in boundary or id(x.node) in active for x in node.inputs):
            active.add(id(node))
    return order, active


def _accumulate(grads: dict[Value, Value], x: Value, ct: Value) -> None:
    grads[x] = METHODS["add"](grads[x], ct) if x in grads else ct


def _check(what: str, given: Value, like: Value) -> None:
    if given.type != like.type:
        raise ShapeError(f"{what} must be {like.type}, got {given.type}", code="S109")
