"""while_loop: a loop whose trip count depends on its values; and scan over Python bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, TensorType, bool_, f64, flatten, i64, located, unflatten
from strata.errors import MissingRuleError, OptionError, ShapeError
from strata.mir import (
    Graph,
    Nested,
    Op,
    Sample,
    Value,
    batch_values,
    op,
    placeholder,
    pullback_once,
    pushforward,
    substitute_values,
)
from strata.ops.base.creation import zeros_like
from strata.ops.base.elementwise import lift
from strata.ops.base.frontend import as_value
from strata.ops.base.movement import broadcast_to, concat, insert_axis, narrow, reshape
from strata.ops.control.branching import Cond, branch_graphs, counted_in, merged_captures
from strata.ops.control.scanning import ScanOp, segment_ends
from strata.ops.control.tracing import is_wide, make_graph, narrowed, numbered, runner, trace_body
from strata.ops.elementwise.logic import to_bool, where
from strata.ops.reduce.reduce import all_, any_


@op("while")
class While(Op):
    """Steps of `body`, (carries, consts) → carries, while `cond` is true; at most `max_iterations` of them if given."""

    cond: Graph
    body: Graph
    num_carry: int
    max_iterations: int | None = None

    multi_output = True
    dtypes = (f64,)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        for which, graph in (("cond", self.cond), ("body", self.body)):
            wanted = [x.type for x in graph.inputs]
            self.require(
                list(types) == wanted and not graph.params, f"{which} takes {wanted}, got {list(types)}", code="S344"
            )
        test = [x.type for x in self.cond.results]
        self.require(test == [bool_[()]], f"cond must give one bool, it gives {test}", code="S346")
        carried, given = list(types[: self.num_carry]), [x.type for x in self.body.results]
        self.require(carried == given, f"carries enter a step as {carried} and leave it as {given}", code="S343")
        bound = self.max_iterations
        self.require(bound is None or bound >= 0, f"max_iterations is {bound}", code="O253", error=OptionError)
        return tuple(carried)

    def nested(self) -> tuple[Nested, ...]:
        still = range(self.num_carry, len(self.body.inputs)) if self.num_carry else range(0)
        return Nested(self.cond, still), Nested(self.body, still)

    def with_nested(self, graphs: Sequence[Graph]) -> While:
        return replace(self, cond=graphs[0], body=graphs[1])

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        types = [x.type for x in self.body.inputs]
        wide = is_wide(arrays, types)
        inputs = narrowed(arrays, types, wide=wide)
        carries, consts = inputs[: self.num_carry], inputs[self.num_carry :]
        goes_on, step = (runner(graph, wide=wide) for graph in (self.cond, self.body))
        steps = 0
        while self.max_iterations is None or steps < self.max_iterations:
            if not goes_on([*carries, *consts])[0]:
                break
            carries = list(step([*carries, *consts]))
            steps += 1
        return tuple(carries)

    def jvp(self, *inputs: Value, out: Any, dx: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        leaves, carries = self.body.inputs, self.num_carry
        names = [placeholder(f"d{i}", x.type) for i, x in enumerate(leaves)]
        active = [t is not None for t in dx]
        while True:
            douts = pushforward(
                self.body.results, leaves, [n if a else None for n, a in zip(names, active, strict=True)]
            )
            grown = [a or (i < carries and douts[i] is not None) for i, a in enumerate(active)]
            if grown == active:
                break
            active = grown
        moving = [i for i in range(carries) if active[i]]
        fixed = [i for i in range(carries, len(leaves)) if active[i]]
        zeroed = [zeros_like(self.body.results[i]) if (d := douts[i]) is None else d for i in moving]

        def close(graph: Graph, results: Sequence[Value]) -> Graph:
            own = graph.inputs
            return make_graph(graph.name, [
                *numbered("c", own[:carries]), *numbered("dc", [names[i] for i in moving]),
                *numbered("k", own[carries:]), *numbered("dk", [names[i] for i in fixed]),
            ], results)  # fmt: skip

        joint = replace(
            self,
            cond=close(self.cond, self.cond.results),
            body=close(self.body, [*self.body.results, *zeroed]),
            num_carry=carries + len(moving),
        )
        seeds = [zeros_like(x) if t is None else t for x, t in zip(inputs, dx, strict=True)]
        outs = joint(*inputs[:carries], *(seeds[i] for i in moving), *inputs[carries:], *(seeds[i] for i in fixed))
        found: list[Value | None] = [None] * carries
        for place, i in enumerate(moving):
            found[i] = outs[carries + place]
        return tuple(found)

    def vjp(self, *inputs: Value, out: Any, ct: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        if self.max_iterations is None:
            raise MissingRuleError(
                "while has no vjp rule without max_iterations: the number of steps to go back over is unknown",
                code="R210", fix="while_loop(cond, body, init, max_iter=N), or scan",
            )  # fmt: skip
        return tuple(pullback_once(self.bounded(*inputs), ct, inputs))

    def bounded(self, *inputs: Value) -> tuple[Value, ...]:
        """The same computation as a scan of max_iterations steps, of which those after the end do nothing."""
        assert self.max_iterations is not None
        stay = make_graph(
            "stay", list(zip(self.body.input_names, self.body.inputs, strict=True)), self.body.inputs[: self.num_carry]
        )
        graph = Graph("step")
        formals = [graph.input(name, x.type) for name, x in zip(self.body.input_names, self.body.inputs, strict=True)]
        (test,) = self.cond.call(*formals)
        step = graph.outputs(*Cond(self.body, stay)(test, *formals))
        return tuple(ScanOp(step, self.max_iterations, self.num_carry, len(inputs) - self.num_carry)(*inputs))

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> tuple[Value, ...]:
        carries = self.num_carry
        flags = list(batched)
        while True:
            test, new = self._batched(flags, size)
            per_row = self.cond.results[0] in test
            grown = [b or (i < carries and (per_row or self.body.results[i] in new)) for i, b in enumerate(flags)]
            if grown == flags:
                break
            flags = grown
        names = self._names(size)
        spread = [
            new.get(x, broadcast_to(x, (size, *x.shape)) if flags[i] else x) for i, x in enumerate(self.body.results)
        ]
        (condition,) = self.cond.results
        keep_going = test.get(condition, condition)
        if per_row:  # rows that have finished keep their values while others go on
            table = dict(zip(self.cond.inputs, self.body.inputs, strict=True))
            (rows,) = make_graph("rows", self._formals(self.cond, names, flags), [keep_going]).call(
                *(n if b else table[x] for x, n, b in zip(self.cond.inputs, names, flags, strict=True))
            )
            table = {n: counted_in(rows, n) for n, b in zip(names, flags, strict=True) if b}
            going = substitute_values(spread, table)
            spread = [where(lift(rows, x.ndim - 1), x, names[i]) for i, x in enumerate(going)]
            keep_going = any_(keep_going)
        cond_graph = make_graph(self.cond.name, self._formals(self.cond, names, flags), [keep_going])
        body = make_graph(self.body.name, self._formals(self.body, names, flags), spread)
        starts = [
            broadcast_to(x, (size, *x.shape)) if b and not given else x
            for x, b, given in zip(inputs, flags, batched, strict=True)
        ]
        outs = replace(self, cond=cond_graph, body=body)(*starts)
        return tuple(y if flags[i] else broadcast_to(y, (size, *y.shape)) for i, y in enumerate(outs))

    def _names(self, size: Dim) -> list[Value]:
        return [placeholder(f"b{i}", x.type.with_shape((size, *x.shape)), 0) for i, x in enumerate(self.body.inputs)]

    def _formals(self, graph: Graph, names: Sequence[Value], flags: Sequence[bool]) -> list[tuple[str, Value]]:
        chosen = [n if b else x for x, n, b in zip(graph.inputs, names, flags, strict=True)]
        return list(zip(graph.input_names, chosen, strict=True))

    def _batched(self, flags: Sequence[bool], size: Dim) -> tuple[dict[Value, Value], dict[Value, Value]]:
        names = self._names(size)
        first, second = (
            batch_values(g.results, {x: n for x, n, b in zip(g.inputs, names, flags, strict=True) if b}, size)
            for g in (self.cond, self.body)
        )
        return first, second

    @classmethod
    def samples(cls) -> list[Sample]:
        below, double, zero, five = _below(), _double(), np.array(0), np.array(5.0)
        return [
            Sample(np.array([1.0, 0.3]), zero, five, cond=below, body=double, num_carry=2, max_iterations=6),
            Sample(np.array([1.0, 9.0]), zero, np.array(2.0), cond=below, body=double, num_carry=2, max_iterations=3),
            Sample(np.array([0.5, 0.7]), zero, five, cond=below, body=double, num_carry=2, max_iterations=1),
            Sample(np.array([0.5, 0.7]), zero, five, cond=below, body=double, num_carry=2, grad=False),
        ]  # fmt: skip


def _below() -> Graph:
    g = Graph("below")
    x, _, limit = g.input("x", f64[2]), g.input("n", i64[()]), g.input("limit", f64[()])
    return g.outputs(x.sum() < limit)


def _double() -> Graph:
    g = Graph("double")
    x, n, limit = g.input("x", f64[2]), g.input("n", i64[()]), g.input("limit", f64[()])
    return g.outputs(x * 1.5 + x.sin() * limit * 0.1, n + 1)


# ------------------------------------------------------------------------------------------------------------ functions


def _values(tree: Any) -> tuple[list[Value], Any]:
    leaves, structure = flatten(tree)
    return [as_value(x) for x in leaves], structure


@located
def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, max_iter: int | None = None) -> Any:
    """body(body(…body(init))) as long as cond(state) is true; a condition with several elements needs all of them.

    Reverse-mode derivatives need `max_iter`, which also bounds the number of steps.
    """
    values, structure = _values(init)
    state = unflatten(structure, values)
    tests = trace_body(lambda s: all_(to_bool(as_value(cond(s)))), [state], "while_loop")
    steps = trace_body(body, [state], "while_loop")
    _same_state("while_loop", structure, values, steps.structure, steps.results)
    captures = merged_captures([tests, steps])
    test, step = branch_graphs([tests, steps], captures, ("cond", "body"))
    outs = While(test, step, len(values), max_iter)(*values, *captures)
    return unflatten(structure, outs)


def _same_state(what: str, before: Any, old: Sequence[Value], after: Any, new: Sequence[Value]) -> None:
    if before != after:
        raise OptionError(f"{what}: the carry goes in as {before} and comes out as {after}", code="O254")
    for i, (x, y) in enumerate(zip(old, new, strict=True)):
        if x.type != y.type:
            fix = f"start with a {y.dtype} carry" if x.shape == y.shape else None
            raise ShapeError(f"{what}: carry {i} goes in as {x.type} and comes out as {y.type}", code="S343", fix=fix)


@located
def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: Dim | None = None,
    *,
    reverse: bool = False,
    checkpoints: int | None = None,
) -> tuple[Any, Any]:
    """(carry, y) = body(carry, x) over the leading axis of `xs`: the last carry and all y, stacked. Any pytrees.

    With `checkpoints` = K the backward pass keeps K carries instead of one a step and computes the others again; 0,
    like the number of steps, keeps them all.
    """
    carries, carry_structure = _values(init)
    rows, row_structure = _values(xs)
    steps = _scan_length(rows, length)
    heads = [placeholder("x", TensorType(x.dtype, x.shape[1:])) for x in rows]
    state, slices = unflatten(carry_structure, carries), unflatten(row_structure, heads)
    results: list[Any] = []

    def step(carry: Any, x: Any) -> Any:
        results[:] = _pair(body(carry, x))
        return tuple(results)

    traced = trace_body(step, [state, slices], "scan")
    new, carry_after = flatten(results[0])
    _same_state("scan", carry_structure, carries, carry_after, traced.results[: len(new)])
    count = len(carries)
    graph = make_graph("body", [
        *numbered("c", traced.inputs[:count]), *numbered("k", traced.captures), *numbered("x", traced.inputs[count:]),
    ], traced.results) if traced.results else None  # fmt: skip
    _, y_structure = flatten(results[1])
    if graph is None:
        return init, unflatten(y_structure, ())
    kept = _checkpoint_count(checkpoints, steps)
    outs = ScanOp(graph, steps, count, len(traced.captures), reverse, kept)(*carries, *traced.captures, *rows)
    return unflatten(carry_structure, outs[:count]), unflatten(y_structure, outs[count:])


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise OptionError("scan: the body must return (carry, y)", code="O255", fix="return carry, None")
    return result[0], result[1]


def _scan_length(rows: Sequence[Value], length: Dim | None) -> Dim:
    for x in rows:
        if not x.shape:
            raise ShapeError(f"scan: xs needs a leading axis to step over, got {x.type}", code="S348")
    sizes = [x.shape[0] for x in rows] + ([length] if length is not None else [])
    if not sizes:
        raise OptionError("scan: without xs the length must be given", code="O256")
    for size in sizes[1:]:
        if size != sizes[0]:
            raise ShapeError(f"scan: {sizes[0]} and {size} steps: all xs and the length must agree", code="S349")
    if isinstance(sizes[0], int) and sizes[0] < 0:
        raise OptionError(f"scan: {sizes[0]} steps", code="O256")
    return sizes[0]


def _checkpoint_count(count: int | None, steps: Dim) -> int | None:
    if count is None or count == 0 or count == steps:
        return None  # every step
    if isinstance(count, bool) or not isinstance(count, int) or count < 0 or (isinstance(steps, int) and count > steps):
        raise OptionError(f"scan: {count!r} checkpoints for {steps} steps", code="O250")
    return count


# ---------------------------------------------------------------------------------------------- the one-carry form


def scan_carry(
    body: Graph,
    init: Value,
    consts: Sequence[Value] = (),
    xs: Sequence[Value] = (),
    *,
    length: Dim,
    trajectory: bool = False,
    checkpoints: int | None = None,
) -> Value:
    """A scan of a body (carry, consts, rows) → carry: the last carry, or with `trajectory` that after every step."""
    kept = _checkpoint_count(checkpoints, length)
    step = body.returning(body.results[0], body.results[0]) if trajectory else body
    outs: tuple[Value, ...] = ScanOp(step, length, 1, len(consts), False, kept)(init, *consts, *xs)
    return outs[-1]


def scan_backward(
    body_vjp: Graph,
    init: Value,
    trajectory: Value,
    upstream: Value,
    xs: Sequence[Value] = (),
    *,
    length: int,
    checkpoints: int | None = None,
    body: Graph | None = None,
) -> tuple[Value, ...]:
    """Cotangents of the first carry and of each xs, in one sweep.

    `body_vjp` is (carry, rows, d_output) → (d carry, d rows). `trajectory` holds the carries after every step, or with
    `checkpoints` = K only those after the K saved steps: then `body` computes the others again. `upstream` is the
    cotangent of the last carry, or of the carry after every step.
    """
    kept = _checkpoint_count(checkpoints, length)
    per_step = upstream.ndim == init.ndim + 1
    if kept is not None and body is None:
        raise OptionError(
            f"scan_backward: {checkpoints} checkpoints of {length} steps need the forward body", code="O257"
        )
    entering = _entering(init, trajectory, xs, length, kept, body)
    carry, *rows, seed = body_vjp.inputs
    step_up = placeholder("up", seed.type)
    inner = placeholder("d", seed.type)
    grads = body_vjp.call(carry, *rows, inner + step_up if per_step else inner)
    graph = make_graph("step", [
        ("d", inner), ("carry", carry), *numbered("x", rows), *([("up", step_up)] if per_step else []),
    ], grads)  # fmt: skip
    start = zeros_like(init) if per_step else upstream
    return tuple(ScanOp(graph, length, 1, 0, reverse=True)(start, entering, *xs, *([upstream] if per_step else [])))


def _entering(
    init: Value, trajectory: Value, xs: Sequence[Value], length: int, kept: int | None, body: Graph | None
) -> Value:
    """The carry that enters each step, from saved ones."""
    if kept is None:
        return narrow(concat([insert_axis(init, 0), trajectory], 0), 0, 0, length)
    assert body is not None
    graph = body.returning(body.results[0], body.inputs[0])
    pieces: list[Value] = []
    start = 0
    for k, end in enumerate(segment_ends(length, kept)):
        assert not isinstance(end, SymExpr)
        anchor = init if k == 0 else reshape(narrow(trajectory, 0, k - 1, 1), init.shape)
        rows = [narrow(x, 0, start, end - start) for x in xs]
        pieces.append(ScanOp(graph, end - start, 1, 0)(anchor, *rows)[1])
        start = end
    return concat(pieces, 0)
