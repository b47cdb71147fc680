"""The one door from expressions to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strata.errors import SymbolError, TraceError
from strata.mir import Graph, Input, Param, Value, evaluate, substitute_values
from strata.tensor.data import Handle, handle_of, remember


def run(graph: Graph, feeds: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Run a graph on arrays."""
    return evaluate(graph, feeds)


def realize_values(values: Sequence[Value]) -> list[Handle]:
    """Storage for each value: expressions that are not realized yet run together, as one graph."""
    wanted = list(dict.fromkeys(v for v in values if handle_of(v) is None))
    if wanted:
        graph, feeds = as_graph(wanted)
        for value, array in zip(wanted, run(graph, feeds), strict=True):
            remember(value, Handle(array))
    handles = [handle_of(v) for v in values]
    assert all(h is not None for h in handles)
    return [h for h in handles if h is not None]


def as_graph(values: Sequence[Value], name: str = "tensors") -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph of expressions whose inputs are their arrays, and the arrays by input name."""
    graph = Graph(name)
    table: dict[Value, Value] = {}
    feeds: dict[str, np.ndarray] = {}
    for leaf, handle in stored_leaves(values).items():
        key = f"d{len(feeds)}"
        table[leaf] = graph.input(key, handle.type)
        feeds[key] = handle.array
    graph.outputs(*substitute_values(values, table))
    if graph.symbols():
        unknown = ", ".join(graph.symbols())
        raise SymbolError(f"the tensor cannot be computed while its size {unknown} has no value", code="S353")
    return graph, feeds


def stored_leaves(values: Sequence[Value]) -> dict[Value, Handle]:
    """The values with storage that expressions start from; a value that belongs to a trace is an error."""
    found: dict[Value, Handle] = {}
    for x in _walk(values):
        handle = handle_of(x)
        if handle is not None:
            found[x] = handle
        elif isinstance(x.node.op, (Input, Param)):
            raise TraceError(
                f"a tensor that was made while a function was traced is used outside of it: it depends on "
                f"argument {x.node.op.key!r} : {x.type}, which has no value",
                code="T205", place=x.node.origin.place, fix="return it from the function",
            )  # fmt: skip
    return found


def is_traced(x: Value) -> bool:
    """Whether a value depends on an argument of a function that is being traced."""
    return any(isinstance(v.node.op, (Input, Param)) for v in _walk([x]))


def _walk(values: Sequence[Value]) -> list[Value]:
    """Values below the given ones, down to leaves and to what has storage."""
    seen: dict[Value, None] = {}
    stack = list(reversed(values))
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen[x] = None
        if handle_of(x) is None:
            stack.extend(reversed(x.node.inputs))
    return list(seen)
