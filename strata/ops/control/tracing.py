"""Closed graphs from Python functions: what control-flow ops keep as fields.

A traced function may use values of the graph around it. They become inputs of the closed graph (closure conversion), so
that a nested graph never refers to anything outside itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import TensorType, TreeDef, as_dtype, flatten, unflatten
from strata.errors import TraceError
from strata.kinds import with_article
from strata.mir import (
    Constant,
    Evaluation,
    Graph,
    Leaf,
    Node,
    Value,
    fresh_scope,
    next_serial,
    placeholder,
    substitute_values,
    toposort,
)
from strata.ops.base.frontend import as_value

INLINE_ELEMENTS = 16  # larger constants are passed into a nested graph rather than printed inside it

Named = tuple[str, Value]


def make_graph(name: str, leaves: Sequence[Named], results: Sequence[Value]) -> Graph:
    """A closed graph: `results` with each value of `leaves` replaced by an input of that name."""
    graph = Graph(name)
    table = {value: graph.input(label, value.type) for label, value in leaves}
    return graph.outputs(*substitute_values(results, table))


def numbered(prefix: str, values: Sequence[Value]) -> list[Named]:
    return [(f"{prefix}{i}", value) for i, value in enumerate(values)]


@dataclass(frozen=True, slots=True)
class Traced:
    """The flat results of a traced function on placeholders, their structure, and the outer values that it uses."""

    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    structure: TreeDef
    captures: tuple[Value, ...]

    def restore(self, values: Sequence[Any]) -> Any:
        return unflatten(self.structure, values)


def trace_body(fn: Callable[..., Any], args: Sequence[Any], what: str, *, hoist: bool = True) -> Traced:
    """Run `fn` on placeholders shaped like the values in `args` (pytrees).

    With `hoist`, everything that does not depend on the arguments is computed outside; without it only what existed
    before the call is, so that the work of a branch stays in the branch.
    """
    leaves, structure = flatten(list(args))
    since, scope = next_serial(), fresh_scope()
    inputs = tuple(placeholder(f"a{i}", x.type, scope) for i, x in enumerate(leaves))
    flat, result = flatten(fn(*unflatten(structure, inputs)))
    results = tuple(_as_result(x, what) for x in flat)
    return Traced(inputs, results, result, outer_values(results, inputs, since, hoist=hoist))


def _as_result(x: Any, what: str) -> Value:
    try:
        return as_value(x)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{what}: the function returned {with_article(type(x))}, not a value", code="T200") from error


def outer_values(results: Sequence[Value], own: Sequence[Value], since: int, *, hoist: bool) -> tuple[Value, ...]:
    """The values that a closed graph of `results` takes as inputs besides `own`, in order of appearance."""
    mine = set(own)
    inner: set[int] = set()  # ids of nodes that depend on `own` or have effects
    outer: set[int] = set()  # ids of nodes that depend on something that a graph cannot hold
    for node in toposort(results, own):
        if any(x in mine or id(x.node) in inner for x in node.inputs) or not node.op.pure:
            inner.add(id(node))
        if _is_outer_leaf(node) or any(id(x.node) in outer for x in node.inputs):
            outer.add(id(node))

    def captured(x: Value) -> bool:
        if id(x.node) in inner or id(x.node) not in outer:
            return False
        return hoist or x.node.serial < since or _is_outer_leaf(x.node)

    found: dict[Value, None] = {}
    seen: set[Value] = set()
    stack = list(reversed(results))
    while stack:
        x = stack.pop()
        if x in seen or x in mine:
            continue
        seen.add(x)
        if captured(x):
            found[x] = None
        else:
            stack.extend(reversed(x.node.inputs))
    return tuple(found)


def _is_outer_leaf(node: Node) -> bool:
    if isinstance(node.op, Constant):
        return node.op.data.array.size > INLINE_ELEMENTS
    return isinstance(node.op, Leaf)


# ------------------------------------------------------------------------------------------------ running nested graphs


def is_wide(arrays: Sequence[np.ndarray], types: Sequence[TensorType]) -> bool:
    """Whether arrays come from an evaluation in which every float is f64, whatever its declared type."""
    return any(
        a.dtype in (np.float64, np.complex128) and as_dtype(a.dtype) is not t.dtype
        for a, t in zip(arrays, types, strict=True)
    )


def narrowed(arrays: Sequence[np.ndarray], types: Sequence[TensorType], *, wide: bool) -> list[np.ndarray]:
    """Arrays in their declared types (the interpreter hands half precision to rules as f32)."""
    return [a if wide else np.asarray(a).astype(t.dtype.np, copy=False) for a, t in zip(arrays, types, strict=True)]


def run_graph(graph: Graph, arrays: Sequence[np.ndarray], *, wide: bool) -> tuple[np.ndarray, ...]:
    """The results of a closed graph on arrays."""
    return runner(graph, wide=wide)(arrays)


def runner(graph: Graph, *, wide: bool) -> Callable[[Sequence[np.ndarray]], tuple[np.ndarray, ...]]:
    """Gives the results of a closed graph on arrays, many times."""
    evaluation = Evaluation(graph.results, graph.inputs)

    def run(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        known = {leaf: np.asarray(a) for leaf, a in zip(graph.inputs, arrays, strict=True)}
        return evaluation.run(known, {}, wide=wide)

    return run


def used(candidates: Sequence[Value], results: Sequence[Value]) -> list[bool]:
    """Which of the candidates the results depend on."""
    reached = {x for node in toposort(results) for x in node.inputs} | set(results)
    return [x in reached for x in candidates]
