"""ONNX export: control flow: cond as If, scan as Scan or Loop, while as Loop, recurrences along an axis as Scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import NUMBER
from strata.io.onnx.exporter import Exporter, spells, writes
from strata.mir import Node, Value

BOOL, LONG = NUMBER[np.dtype(bool)], NUMBER[np.dtype(np.int64)]


def _listed(made: Any) -> list[str]:
    return [made] if isinstance(made, str) else list(made)


@writes("cond")
def _cond(e: Exporter, node: Node, xs: list[str]) -> Sequence[str]:
    op: Any = node.op
    then, orelse = (
        e.body(name, (), lambda graph=graph: e.inlined(graph, xs[1:]))  # type: ignore[misc]
        for name, graph in (("then", op.then), ("orelse", op.orelse))
    )
    return _listed(e.add("If", xs[:1], len(node.outputs), then_branch=then, else_branch=orelse))


@writes("scan")
def _scan(e: Exporter, node: Node, xs: list[str]) -> Sequence[str]:
    op: Any = node.op
    carries, first = op.num_carry, op.num_carry + op.num_consts
    consts, rows = xs[carries:first], xs[first:]
    leaves = op.body.inputs
    moving = [*leaves[:carries], *leaves[first:]]
    names = [e.fresh() for _ in moving]
    if rows:
        inputs = list(zip(names, moving, strict=True))
        body = e.body("step", inputs, lambda: e.inlined(op.body, [*names[:carries], *consts, *names[carries:]]))
        outputs = len(node.outputs)
        back = int(op.reverse)
        return _listed(
            e.add(
                "Scan", [*xs[:carries], *rows], outputs, body=body, num_scan_inputs=len(rows),
                scan_input_directions=[back] * len(rows), scan_output_directions=[back] * (outputs - carries),
            )
        )  # fmt: skip
    step, go = e.fresh(), e.fresh()
    counters = [(step, ops.zeros((), "i64")), (go, ops.zeros((), "bool"))]

    def write() -> list[str]:
        return [e.add("Identity", [go]), *e.inlined(op.body, [*names[:carries], *consts])]

    body = e.body("step", [*counters, *zip(names, moving, strict=True)], write)
    count = e.add("Squeeze", [e.size(op.length)])
    found = _listed(e.add("Loop", [count, e.array(True), *xs[:carries]], len(node.outputs), body=body))
    if op.reverse:
        ends = [e.array([n], np.int64) for n in (-1, np.iinfo(np.int64).min, 0, -1)]
        found[carries:] = [str(e.add("Slice", [x, *ends])) for x in found[carries:]]
    return found


@writes("while")
def _while(e: Exporter, node: Node, xs: list[str]) -> Sequence[str]:
    op: Any = node.op
    carries, consts = xs[: op.num_carry], xs[op.num_carry :]
    leaves = op.body.inputs[: op.num_carry]
    names = [e.fresh() for _ in leaves]
    (start,) = e.inlined(op.cond, xs)

    def write() -> list[str]:
        made = e.inlined(op.body, [*names, *consts])
        return [*e.inlined(op.cond, [*made, *consts]), *made]

    counters = [(e.fresh(), ops.zeros((), "i64")), (e.fresh(), ops.zeros((), "bool"))]
    body = e.body("step", [*counters, *zip(names, leaves, strict=True)], write)
    most = "" if op.max_iterations is None else e.array(op.max_iterations, np.int64)
    return _listed(e.add("Loop", [most, start, *carries], len(node.outputs), body=body))


# along an axis


def _along(axis: int, reverse: bool, step: Any, init: Value, *xs: Value) -> Value:
    """What a scan of rows along an axis gives, in its place."""
    order = (axis, *(a for a in range(xs[0].ndim) if a != axis))
    rows = tuple(ops.transpose(x, order) for x in xs)
    _, found = ops.scan(step, init, rows, reverse=reverse)
    return ops.transpose(found, tuple(order.index(a) for a in range(len(order))))


def _row(x: Value, axis: int) -> tuple[Any, ...]:
    return (*x.shape[:axis], *x.shape[axis + 1 :])


@spells("cumprod")
def _cumprod(op: Any, x: Value) -> Value:
    one = ops.ones(_row(x, op.axis), x.dtype)

    def step(total: Any, row: Any) -> Any:
        made = total * row[0]
        return made, total if op.exclusive else made

    return _along(op.axis, op.reverse, step, one, x)


@spells("linear_recurrence")
def _linear_recurrence(op: Any, a: Value, b: Value) -> Value:
    def step(held: Any, row: Any) -> Any:
        made = row[0] * held + row[1]
        return made, made

    return _along(op.axis, op.reverse, step, ops.zeros(_row(b, op.axis), b.dtype), a, b)


@spells("logcumsumexp")
def _logcumsumexp(op: Any, x: Value) -> Value:
    def step(total: Any, row: Any) -> Any:
        made = ops.logaddexp(total, row[0])
        return made, made

    return _along(op.axis, False, step, ops.full(_row(x, op.axis), -np.inf, x.dtype), x)


@spells("cummax", "cummin")
def _running_extreme(op: Any, x: Value) -> tuple[Value, Value]:
    """The best row so far and where it was; NaN is better than every number."""
    order = (op.axis, *(a for a in range(x.ndim) if a != op.axis))
    back = tuple(order.index(a) for a in range(x.ndim))
    rows = ops.transpose(x, order)
    count = rows.shape[0]
    place = ops.reshape(ops.iota(count), (count, *(1,) * (x.ndim - 1)))
    start = ops.zeros(rows.shape[1:], x.dtype), ops.full(rows.shape[1:], -1, "i64")

    def step(held: Any, row: Any) -> Any:
        (best, at), (new, here) = held, row
        is_better = new < best if op.name == "cummin" else new > best
        if x.dtype.is_float:
            is_better = ops.logical_or(is_better, ops.logical_and(ops.isnan(new), ops.logical_not(ops.isnan(best))))
        is_better = ops.logical_or(is_better, at < 0)
        made = ops.where(is_better, new, best), ops.where(is_better, here, at)
        return made, made

    _, (values, ids) = ops.scan(step, start, (rows, ops.broadcast_to(place, rows.shape)))
    return ops.transpose(values, back), ops.transpose(ids, back)
