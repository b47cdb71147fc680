"""What graph transforms share: a copy to build on, inputs and parameters by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.core import Dim, dim_prod
from strata.errors import DTypeError, OptionError, TraceError
from strata.kinds import counted
from strata.mir import Graph, Param, Value, constant, leaf_name
from strata.ops import iota, ones, zeros

Names = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Derived:
    """A new graph with the inputs and parameters of another, and the other's results on them."""

    graph: Graph
    outputs: tuple[Value, ...]

    def leaf(self, name: str) -> Value:
        return self.graph.leaf(name)

    def add_input(self, name: str, like: Value) -> Value:
        return self.graph.input(fresh_name(name, (*self.graph.input_names, *self.graph.param_names)), like.type)


def derive(graph: Graph, suffix: str) -> Derived:
    """A copy of a graph's declarations under the name `<name>_<suffix>`."""
    require_graph(graph, suffix)
    result = Graph(f"{graph.name}_{suffix}")
    leaves = [
        (result.param if isinstance(x.node.op, Param) else result.input)(leaf_name(x), x.type)
        for x in (*graph.inputs, *graph.params)
    ]
    return Derived(result, graph.call(*leaves))


def require_graph(graph: object, what: str) -> None:
    """Transforms work on finished graphs: blocks are lowered first, plans are too late."""
    if not isinstance(graph, Graph):
        raise TraceError(f"{what}: takes a Graph, got {type(graph).__name__}", code="T201")
    if not graph.results:
        raise TraceError(f"{what}: graph {graph.name!r} has no outputs yet", code="T202", fix="g.outputs(...)")


def fresh_name(name: str, taken: Iterable[str]) -> str:
    """`name`, or `name_2`, `name_3`, … when it is taken."""
    used = set(taken)
    candidate, count = name, 1
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def chosen(graph: Graph, names: Names, what: str) -> list[str]:
    """Names given by the caller, each once and each of a float; by default all parameters, or all float inputs."""
    if names is None:
        pool = graph.params or graph.inputs
        picked = [leaf_name(x) for x in pool if x.dtype.is_inexact]
    else:
        picked = [names] if isinstance(names, str) else list(names)
    if not picked:
        raise OptionError(f"{what}: graph {graph.name!r} has nothing to differentiate", code="O259")
    for i, name in enumerate(picked):
        leaf = graph.leaf(name)
        if name in picked[:i]:
            raise OptionError(f"{what}: {name!r} is named twice", code="O260")
        if not leaf.dtype.is_inexact:
            raise DTypeError(f"{what}: {name!r} is {leaf.type}, and derivatives exist for floats only", code="T203")
    return picked


def one_output(graph: Graph, what: str) -> None:
    if len(graph.results) != 1:
        raise OptionError(
            f"{what}: graph {graph.name!r} has {counted(len(graph.results), 'output')}, a loss is one",
            code="O261",
            fix="transforms.vjp",
        )


def or_zeros(x: Value | None, like: Value) -> Value:
    """Zeros where nothing flows."""
    return zeros(like.shape, like.dtype) if x is None else x


def one_like(x: Value) -> Value:
    return constant(1, x.dtype) if x.shape == () else ones(x.shape, x.dtype)


def basis(like: Value) -> Value:
    """The unit tensors of a shape, one after the other: [n, *shape] for n elements."""
    count: Dim = dim_prod(like.shape)
    square = iota((count, count), 0).equal(iota((count, count), 1)).cast(like.dtype)
    result: Value = square.reshape((count, *like.shape))
    return result
