"""If, Loop, Scan: control-flow ops where types allow it, otherwise run on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.config import config
from strata.core import Dim, over_budget, require, substitute
from strata.errors import DTypeError, FileError, OptionError, ShapeError, StrataError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.counting import changed, counted_steps, decided
from strata.io.onnx.dtypes import in_graphs, numpy_dtype
from strata.io.onnx.items import Host, Item, Sizes
from strata.io.onnx.node import NodeView
from strata.io.onnx.program import inputs_of
from strata.io.onnx.registry import reads
from strata.io.onnx.trace import NeedsData
from strata.mir import Constant, Value, constant

UNROLL = 8  # steps of a loop that are written out rather than made a loop of the graph
ENDLESS = (1 << 31) - 1  # steps that no loop runs: what converters write for "as long as the condition holds"
WRITTEN = 4  # of the nodes that a model may become, those of an unrolled loop are one in this many
TRUE = Host(np.array(True))

# why a body does not become one op of the graph: data decide, types change, sequences, elements that graphs do not have
NOT_ONE_OP = (NeedsData, ShapeError, OptionError, DTypeError)


def known_bool(item: Item | None, default: bool | None = None) -> bool | None:
    """A condition that does not depend on data; None where it does."""
    if item is None:
        return default
    if isinstance(item, Host):
        return bool(item.array.reshape(-1)[0])
    if isinstance(item, Value) and isinstance(item.node.op, Constant):
        return bool(item.node.op.data.array.reshape(-1)[0])
    return None


@reads("If")
def if_(n: NodeView) -> tuple[Any, ...]:
    branches = n.attr("then_branch"), n.attr("else_branch")
    chosen = known_bool(n.item(0))
    if chosen is None:
        try:
            return _both(n, branches)
        except NOT_ONE_OP:  # the branches differ in type, or have texts: the data decide
            pass
        chosen = bool(n.array(0).reshape(-1)[0])
    return tuple(n.tracer.run_graph(branches[0] if chosen else branches[1], []))


def _both(n: NodeView, branches: Sequence[Any]) -> tuple[Any, ...]:
    """Both branches in the graph; only the one that is taken runs."""
    tracer = n.tracer

    def branch(graph: Any) -> Any:
        return lambda: tuple(tracer.value(x) for x in tracer.run_graph(graph, []))

    with tracer.closed():
        return tuple(ops.cond(ops.reshape(n[0], ()), branch(branches[0]), branch(branches[1])))


@reads("Loop")
def loop(n: NodeView) -> tuple[Any, ...]:
    body = n.attr("body")
    carried = [n.item(i) for i in range(2, len(n))]
    trip = _trip_count(n)
    start = known_bool(n.items[1] if n.has(1) else None, default=True)
    start = decided(n, n.items[1]) if start is None else start
    if start is True and trip is not None and not (isinstance(trip, int) and trip <= UNROLL):
        try:
            return _counted(n, body, carried, trip)
        except NOT_ONE_OP:
            pass
    if start is True and not _is_limited(n):
        steps = counted_steps(n, body, carried)
        if steps is not None and not (isinstance(steps, int) and steps <= UNROLL):
            try:
                return _counted(n, body, carried, steps, ends_itself=True)
            except NOT_ONE_OP:
                pass
    known = start is not None and isinstance(trip, int) and trip <= UNROLL
    if not known and len(body.output) == 1 + len(carried) and (n.has(0) or n.has(1)):
        try:
            return _until(n, body, carried)
        except NOT_ONE_OP:
            pass
    return _stepwise(n, body, carried)


def _trip_count(n: NodeView) -> Dim | None:
    item = n.items[0] if n.has(0) else None
    if isinstance(item, Sizes):
        return item.flat[0]
    if isinstance(item, Host):
        if item.array.size != 1 or item.array.dtype.kind not in "iu":
            raise FileError(
                f"{n.label}: the trip count is {item.array.dtype} of {item.array.size} elements", code="F504"
            )
        count = max(int(item.array.reshape(())), 0)
        return count if count < ENDLESS else None  # which says that the condition ends the loop
    return None


def _is_limited(n: NodeView) -> bool:
    """Whether a trip count may end a loop."""
    return n.has(0) and not (isinstance(n.item(0), Host) and _trip_count(n) is None)


def _counted(
    n: NodeView, body: Any, carried: Sequence[Item], trip: Dim, *, ends_itself: bool = False
) -> tuple[Any, ...]:
    """A loop whose number of steps is known, as one op of the graph; its condition may be what says the number."""
    tracer = n.tracer
    count, moving = len(carried), changed(body, len(carried))

    def step(state: Any, i: Any) -> Any:
        outs = tracer.run_graph(body, [i, TRUE, *_put(carried, moving, state)])
        if known_bool(outs[0]) is not True and not ends_itself:
            raise NeedsData(f"the condition of {n.label}")
        values = [tracer.value(outs[1 + at]) for at in moving]
        return tuple(values), tuple(tracer.value(x) for x in outs[1 + count :])

    steps = substitute(trip, tracer.hints or {})
    with tracer.limits.loop(steps if isinstance(steps, int) else 1, n.label), tracer.closed():
        state, rows = ops.scan(step, tuple(tracer.value(carried[at]) for at in moving), ops.iota(trip), length=trip)
    return (*_put(carried, moving, state), *rows)


def _put(items: Sequence[Item], places: Sequence[int], values: Sequence[Value]) -> list[Item]:
    """Items with others in some places."""
    found = list(items)
    for at, value in zip(places, values, strict=True):
        found[at] = value
    return found


def _until(n: NodeView, body: Any, carried: Sequence[Item]) -> tuple[Any, ...]:
    """A loop that data end, as one op of the graph: it keeps no rows, and the types of its state never change."""
    tracer, moving = n.tracer, changed(body, len(carried))
    limit = ops.cast(ops.reshape(n[0], ()), "i64") if _is_limited(n) else None
    first = ops.reshape(n[1], ()) if n.has(1) else constant(np.array(True))

    def test(state: Any) -> Any:
        return state[1] if limit is None else ops.logical_and(state[1], ops.less(state[0], limit))

    def step(state: Any) -> Any:
        outs = tracer.run_graph(body, [*state[:2], *_put(carried, moving, state[2:])])
        if limit is None and (outs[0] is state[1] or _is_always_true(outs[0])):
            raise NeedsData(f"the condition of {n.label}")  # which is never run, or never ends
        values = [tracer.value(outs[1 + at]) for at in moving]
        return (state[0] + 1, ops.reshape(tracer.value(outs[0]), ()), *values)

    with tracer.closed():
        start = (constant(np.array(0, np.int64)), first, *(tracer.value(carried[at]) for at in moving))
        return tuple(_put(carried, moving, ops.while_loop(test, step, start)[2:]))


def _stepwise(n: NodeView, body: Any, carried: Sequence[Item]) -> tuple[Any, ...]:
    """A loop written out step by step; conditions that depend on data are computed on the way."""
    tracer = n.tracer
    limit = int(n.scalar(0)) if _is_limited(n) else None
    if not n.has(0) and not n.has(1):
        raise FileError(f"{n.label} has neither a trip count nor a condition: it would never end", code="F504")
    state: list[Any] = list(carried)
    count = len(state)
    rows: list[list[Any]] = [[] for _ in range(len(body.output) - 1 - count)]
    holder = f"\0{id(state)}"
    tracer.frame.items[holder] = [state, *rows]
    condition: Item = n.item(1) if n.has(1) else TRUE
    steps = written = 0  # `written` counts nodes of steps that no data decide
    try:
        while (limit is None or steps < limit) and bool(tracer.array(condition).reshape(-1)[0]):
            written += len(body.node) + 1 if isinstance(condition, Host) and condition.fixed else 0
            if WRITTEN * written > config().max_nodes:
                what = f"{n.label}, written out, has more than {written - 1:,} nodes"
                raise over_budget("max_nodes", WRITTEN * written, what, is_all=False)
            outs = tracer.run_graph(body, [Host(np.array(steps, np.int64)), condition, *state])
            if limit is None and (outs[0] is condition or (known_bool(outs[0]) is True and not _may_end(body))):
                raise _endless(n)
            condition, state[:] = outs[0], outs[1 : 1 + count]
            for row, x in zip(rows, outs[1 + count :], strict=True):
                row.append(x)
            steps += 1
            require("max_steps", steps, f"{n.label} has run {steps:,} steps without an end")
    finally:
        tracer.frame.items.pop(holder, None)
    return (*state, *(_stacked(n, row, i + 1 + count, body) for i, row in enumerate(rows)))


def _endless(n: NodeView) -> StrataError:
    """The error of a loop whose body does not end it."""
    if not n.has(0):
        return FileError(f"{n.label}: nothing in its body ends it", code="F504")
    steps = int(n.scalar(0))
    return over_budget("max_steps", steps, f"{n.label} would run {steps:,} steps")


def _is_always_true(item: Item) -> bool:
    return known_bool(item) is True and not (isinstance(item, Host) and not item.fixed)


def _may_end(body: Any) -> bool:
    """Whether the condition that a step gives depends on what the step is given."""
    makers = {name: node for node in body.node for name in node.output}
    given, seen, open_ = {x.name for x in body.input}, set(), [body.output[0].name]
    while open_:
        name = open_.pop()
        if name in given:
            return True
        if name in makers and name not in seen:
            open_ += inputs_of(makers[name])
        seen.add(name)
    return False


def _stacked(n: NodeView, row: Sequence[Any], output: int, body: Any) -> Any:
    if row and all(isinstance(x, Host) and not (x.fixed and in_graphs(x.array.dtype)) for x in row):
        return Host(np.stack([x.array for x in row]), fixed=all(x.fixed for x in row))
    if row:
        return ops.stack([n.tracer.value(x) for x in row], 0)
    tensor = body.output[output].type.tensor_type
    dims = [d.dim_value for d in tensor.shape.dim]
    return Host(np.zeros((0, *dims), numpy_dtype(tensor.elem_type or 1)))


# ----------------------------------------------------------------------------------------------------------------- Scan


@reads("Scan", since=9)
def scan(n: NodeView) -> tuple[Any, ...]:
    count = n.attr("num_scan_inputs")
    values = n.values()
    return _scan(n, values[: len(values) - count], values[len(values) - count :])


def _scan(n: NodeView, state: Sequence[Value], xs: Sequence[Value]) -> tuple[Any, ...]:
    body = n.attr("body")
    axes = n.attr("scan_input_axes", (0,) * len(xs))
    backwards = n.attr("scan_input_directions", (0,) * len(xs))
    places = [n.place(a, x.ndim, "scan_input_axes") for x, a in zip(xs, axes, strict=True)]
    rows = [ops.moveaxis(x, a, 0) if a else x for x, a in zip(xs, places, strict=True)]
    rows = [ops.flip(x, 0) if back else x for x, back in zip(rows, backwards, strict=True)]
    results = len(body.output) - len(state)
    try:
        last, stacked = _scan_op(n, body, state, rows)
    except NOT_ONE_OP:
        last, stacked = _scan_steps(n, body, state, rows)
    out_axes = n.attr("scan_output_axes", (0,) * results)
    out_backwards = n.attr("scan_output_directions", (0,) * results)
    moved = []
    for y, axis, back in zip(stacked, out_axes, out_backwards, strict=True):
        row = ops.flip(y, 0) if back else y
        moved.append(ops.moveaxis(row, 0, axis % row.ndim) if axis % row.ndim else row)
    return (*last, *moved)


def _scan_op(n: NodeView, body: Any, state: Sequence[Value], rows: Sequence[Value]) -> tuple[Any, Any]:
    tracer, count = n.tracer, len(state)

    def step(carry: Any, x: Any) -> Any:
        values = [tracer.value(item) for item in tracer.run_graph(body, [*carry, *x])]
        return tuple(values[:count]), tuple(values[count:])

    with tracer.closed():
        last, stacked = ops.scan(step, tuple(state), tuple(rows))
    return last, stacked


def _scan_steps(n: NodeView, body: Any, state: Sequence[Value], rows: Sequence[Value]) -> tuple[Any, Any]:
    tracer, count = n.tracer, len(state)
    length = rows[0].shape[0]
    if not isinstance(length, int):
        raise NeedsData(f"the length of {n.label}")
    carry: list[Any] = list(state)
    stacked: list[list[Any]] = [[] for _ in range(len(body.output) - count)]
    for t in range(length):
        outs = tracer.run_graph(body, [*carry, *(x[t] for x in rows)])
        carry = outs[:count]
        for row, y in zip(stacked, outs[count:], strict=True):
            row.append(tracer.value(y))
    return tuple(carry), tuple(ops.stack(row, 0) for row in stacked)


@reads("Scan")
def scan_batched(n: NodeView) -> tuple[Any, ...]:
    """The first form: everything has a batch axis in front."""
    count = n.attr("num_scan_inputs")
    values = [n[i] for i in range(1, len(n))]
    batch = values[0].shape[0]
    if not isinstance(batch, int) or n.has(0):
        raise NeedsData(f"the batch of {n.label}")
    results = []
    for b in range(batch):
        own = [v[b] for v in values]
        results.append(_scan(n, own[: len(own) - count], own[len(own) - count :]))
    return tuple(ops.stack(list(column), 0) for column in zip(*results, strict=True))
