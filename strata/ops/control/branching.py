"""cond: two closed graphs of which one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strata.core import Dim, TensorType, bool_, f64, flatten, located, unflatten
from strata.errors import OptionError, ShapeError
from strata.mir import Graph, Nested, Op, Sample, Value, batch_values, op, placeholder, pullback, pushforward
from strata.ops.base.creation import zeros_like
from strata.ops.base.elementwise import lift
from strata.ops.base.frontend import as_value
from strata.ops.base.movement import broadcast_to
from strata.ops.control.tracing import Traced, is_wide, make_graph, narrowed, numbered, run_graph, trace_body
from strata.ops.elementwise.logic import logical_not, stop_gradient, to_bool, where


def counted_in(rows: Value, x: Value) -> Value:
    """x, with gradients in these rows only: where a branch is not taken, they may be no number."""
    return where(lift(rows, x.ndim - 1), x, stop_gradient(x)) if x.dtype.is_inexact else x


@op("cond")
class Cond(Op):
    """`then` on the captures where the predicate, one bool, is true, else `orelse`. Only the one that is taken runs."""

    then: Graph
    orelse: Graph

    multi_output = True
    dtypes = (bool_,)

    def infer(self, predicate: TensorType, *captures: TensorType) -> tuple[TensorType, ...]:
        self.require_dtype(predicate.dtype is bool_, f"the predicate must be bool, got {predicate}", code="D106")
        self.require(predicate.shape == (), f"the predicate must be one value, got {predicate}", code="S346")
        for which, graph in (("then", self.then), ("orelse", self.orelse)):
            wanted = [x.type for x in graph.inputs]
            self.require(
                list(captures) == wanted and not graph.params,
                f"{which} takes {_show(wanted)}, got {_show(captures)}",
                code="S344",
            )
        then, orelse = ([x.type for x in g.results] for g in (self.then, self.orelse))
        self.require(then == orelse, f"the branches give {_show(then)} and {_show(orelse)}", code="S347")
        return tuple(then)

    def nested(self) -> tuple[Nested, ...]:
        return Nested(self.then), Nested(self.orelse)

    def with_nested(self, graphs: Sequence[Graph]) -> Cond:
        return Cond(*graphs)

    def numpy(self, predicate: np.ndarray, *captures: np.ndarray) -> tuple[np.ndarray, ...]:
        graph = self.then if bool(predicate) else self.orelse
        types = [x.type for x in graph.inputs]
        wide = is_wide(captures, types)
        return run_graph(graph, narrowed(captures, types, wide=wide), wide=wide)

    def jvp(self, *inputs: Value, out: Any, dx: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        names = [None if t is None else placeholder("d", t.type) for t in dx[1:]]
        tangents = [pushforward(g.results, g.inputs, names) for g in (self.then, self.orelse)]
        given = [n for n in names if n is not None]
        return self._both(inputs, tangents, given, [t for t in dx[1:] if t is not None], self.then.results)

    def vjp(self, *inputs: Value, out: Any, ct: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        names = [None if c is None else placeholder("u", c.type) for c in ct]
        grads = [pullback(g.results, names, g.inputs) for g in (self.then, self.orelse)]
        given = [n for n in names if n is not None]
        return (None, *self._both(inputs, grads, given, [c for c in ct if c is not None], list(self.then.inputs)))

    def _both(
        self,
        inputs: Sequence[Value],
        results: Sequence[Sequence[Value | None]],
        formals: Sequence[Value],
        extra: Sequence[Value],
        like: Sequence[Value],
    ) -> tuple[Value | None, ...]:
        """A cond of what the branches give; an output that is None (a known zero) in one branch only is zeros there."""
        present = [i for i in range(len(like)) if any(row[i] is not None for row in results)]
        if not present:
            return (None,) * len(like)
        graphs = []
        for graph, row in zip((self.then, self.orelse), results, strict=True):
            leaves = [*zip(graph.input_names, graph.inputs, strict=True), *numbered("d", formals)]
            values = [zeros_like(like[i]) if (r := row[i]) is None else r for i in present]
            graphs.append(make_graph(graph.name, _distinct(leaves), values))
        outs = Cond(*graphs)(*inputs, *extra)
        found: list[Value | None] = [None] * len(like)
        for i, value in zip(present, outs, strict=True):
            found[i] = value
        return tuple(found)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> tuple[Value, ...]:
        predicate, captures, flags = inputs[0], inputs[1:], batched[1:]
        if batched[0]:
            then, orelse = (
                [_spread(table, plain, x, size) for x in g.results]
                for g, rows in ((self.then, predicate), (self.orelse, logical_not(predicate)))
                for plain in [{n: c for n, c, b in zip(g.inputs, captures, flags, strict=True) if not b}]
                for table in [
                    batch_values(
                        g.results,
                        {n: counted_in(rows, c) for n, c, b in zip(g.inputs, captures, flags, strict=True) if b},
                        size,
                        shared=plain,
                    )
                ]
            )
            return tuple(
                where(lift(predicate, x.ndim - 1), x, y) if x is not y else x for x, y in zip(then, orelse, strict=True)
            )
        graphs = []
        for g in (self.then, self.orelse):
            names = [placeholder("b", x.type.with_shape((size, *x.shape))) for x in g.inputs]
            table = batch_values(g.results, {x: n for x, n, b in zip(g.inputs, names, flags, strict=True) if b}, size)
            formals = [n if b else x for x, n, b in zip(g.inputs, names, flags, strict=True)]
            results = [_spread(table, {}, x, size) for x in g.results]
            graphs.append(make_graph(g.name, list(zip(g.input_names, formals, strict=True)), results))
        return tuple(Cond(*graphs)(predicate, *captures))

    @classmethod
    def samples(cls) -> list[Sample]:
        both: dict[str, Any] = {"then": _branch(0), "orelse": _branch(1)}
        return [
            Sample(np.array(True), f64[3], f64[3], **both), Sample(np.array(False), f64[3], f64[3], **both),
            Sample(np.array(True), f64[3], f64[3], then=_branch(1), orelse=_branch(2)),
        ]  # fmt: skip


def _show(types: Sequence[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"


def _distinct(leaves: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """Names made distinct: a derivative of a derivative would say d0 again."""
    taken: set[str] = set()
    result = []
    for name, value in leaves:
        free = name
        while free in taken:
            free = f"d{free}"
        taken.add(free)
        result.append((free, value))
    return result


def _spread(table: dict[Value, Value], plain: dict[Value, Value], x: Value, size: Dim) -> Value:
    if x in table:
        return table[x]
    value = plain.get(x, x)
    return broadcast_to(value, (size, *value.shape))


def _branch(kind: int) -> Graph:
    g = Graph(f"branch{kind}")
    x, y = g.input("x", f64[3]), g.input("y", f64[3])
    return g.outputs(*((x * y, x.sin()), (x + 1.0, y.exp()), (y, x))[kind])


def branch_graphs(traces: Sequence[Traced], captures: Sequence[Value], names: Sequence[str]) -> list[Graph]:
    """Closed graphs of traced branches that take the same arguments and the same captures."""
    return [
        make_graph(name, [*numbered("a", t.inputs), *numbered("k", captures)], t.results)
        for name, t in zip(names, traces, strict=True)
    ]


def merged_captures(traces: Sequence[Traced]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(x for t in traces for x in t.captures))


@located
def cond(predicate: Any, then: Callable[..., Any], orelse: Callable[..., Any], *args: Any) -> Any:
    """then(*args) where the predicate, one bool, is true, else orelse(*args); both give the same types."""
    if not callable(then) or not callable(orelse):
        raise OptionError("cond: takes a predicate, two functions and their arguments", code="O251")
    test = to_bool(as_value(predicate))
    if test.shape != ():
        raise ShapeError(
            f"cond: the predicate must be one value, got {test.type}", code="S346", fix="where(condition, a, b)"
        )
    leaves, structure = flatten(list(args))
    values = [as_value(x) for x in leaves]
    arguments = unflatten(structure, values)
    traces = [trace_body(f, arguments, "cond", hoist=False) for f in (then, orelse)]
    first, second = traces
    if first.structure != second.structure:
        raise OptionError(f"cond: the branches give {first.structure} and {second.structure}", code="O252")
    for i, (x, y) in enumerate(zip(first.results, second.results, strict=True)):
        if x.type != y.type:
            raise ShapeError(f"cond: the branches give {x.type} and {y.type} as result {i}", code="S347")
    if not first.results:
        return first.restore(())
    captures = merged_captures(traces)
    graphs = branch_graphs(traces, captures, ("then", "orelse"))
    return first.restore(Cond(*graphs)(test, *values, *captures))
