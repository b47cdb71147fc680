"""Checks of a model's protobuf before it is read: unique names, a size within the budget, nodes as in the standard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import AttributeProto, defs

from strata.core import Meter, require
from strata.errors import FileError
from strata.kinds import counted
from strata.mir import near

_KINDS = {number: name.lower() for name, number in AttributeProto.AttributeType.items()}
_SINGLE = defs.OpSchema.FormalParameterOption.Single


def subgraphs(node: Any) -> Iterator[Any]:
    """The graphs that are attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def walk(nodes: Any, depth: int = 0) -> Iterator[Any]:
    """All nodes, those of subgraphs included."""
    require("max_depth", depth, f"subgraphs are nested {depth} deep")
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from walk(graph.node, depth + 1)


def require_single_names(graph: Any, place: str = "the model") -> None:
    """A name stands for one thing: no input, initializer, node or output of a graph may have that of another one."""
    held = [*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer)]
    require_unique(held, f"two initializers of {place}")
    given = [x.name for x in graph.input]
    require_unique(given, f"two inputs of {place}")
    _require_written_once(graph.node, {*held, *given}, place)
    for node in graph.node:
        for inner in subgraphs(node):
            require_single_names(inner, f"the graph {inner.name!r} in node {node.name or node.op_type!r}")


def require_single_names_in_function(function: Any) -> None:
    place = f"function {function.name!r}"
    require_unique(function.input, f"two inputs of {place}")
    _require_written_once(function.node, set(function.input), place)
    for node in function.node:
        for inner in subgraphs(node):
            require_single_names(inner, f"the graph {inner.name!r} in node {node.name or node.op_type!r} of {place}")


def require_defined(graph: Any, outer: frozenset[str] = frozenset()) -> None:
    """Nodes and outputs use what is an input, an initializer or a result of an earlier node, here or further out."""
    known = {*outer, *(x.name for x in graph.input), *(t.name for t in graph.initializer)}
    known |= {t.values.name for t in graph.sparse_initializer}
    require_nodes_defined(graph.node, known)
    for x in graph.output:
        if x.name not in known:
            raise FileError(f"output {x.name!r} is not a graph input, initializer, or output of a node", code="F500")


def require_nodes_defined(nodes: Sequence[Any], known: set[str]) -> None:
    """The same of nodes, whose results are added to what is known."""
    for node in nodes:
        for name in node.input:
            if name and name not in known:
                raise FileError(
                    f"node {node.name or node.op_type!r}: input {name!r} is not a graph input, initializer, or output "
                    "of a previous node", code="F500",
                )  # fmt: skip
        for inner in subgraphs(node):
            require_defined(inner, frozenset(known))
        known.update(node.output)


def require_unique(names: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise FileError(f"{what} have the same name, {name!r}", code="F505")
        seen.add(name)


def _require_written_once(nodes: Sequence[Any], known: set[str], place: str) -> None:
    writers: dict[str, str] = {}
    for node in nodes:
        label = f"node {node.name or node.op_type!r}"
        for name in node.output:
            if not name:
                continue
            if name in known:
                raise FileError(f"{label} of {place} gives {name!r}, which is an input or initializer", code="F505")
            if name in writers:
                raise FileError(f"{writers[name]} and {label} of {place} both give {name!r}", code="F505")
            writers[name] = label


def require_few_nodes(
    nodes: Any, functions: Iterable[Any], called: Callable[[Any], Any | None], key: Callable[[Any], Any]
) -> None:
    """Count the nodes that a model becomes once every call of its functions is written out, without doing so."""
    bodies = {key(f): list(walk(f.node)) for f in functions}
    sizes: dict[Any, int] = {}
    path: dict[Any, None] = {}

    def size(found: Sequence[Any]) -> int:
        meter = Meter("max_nodes", "nodes of the model, with its functions written out")
        for node in found:
            function = called(node)
            meter.add(1 if function is None else 1 + _function(function))
        return meter.spent

    def _function(function: Any) -> int:
        name = key(function)
        if name not in sizes:
            if name in path:
                raise FileError(f"function {function.name!r} calls itself", code="F500")
            require("max_depth", len(path) + 1, f"functions call each other {len(path) + 1} deep")
            path[name] = None
            sizes[name] = size(bodies[name])
            del path[name]
        return sizes[name]

    size(list(walk(nodes)))


@dataclass(frozen=True)
class Form:
    """What a node of an op has: kinds of its attributes by name, and how many inputs and outputs."""

    attributes: dict[str, int]
    required: tuple[str, ...]
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    singles: tuple[bool, ...]  # of each input: whether it must be there

    def require(self, node: Any) -> None:
        """Refuse a node with an attribute that the op does not have, and one without what it needs."""
        given = {a.name: a.type for a in node.attribute}
        for name, kind in given.items():
            if not isinstance(name, str) or name.startswith("__"):
                continue
            wanted = self.attributes.get(name)
            if wanted is None:
                raise FileError(
                    f"{_label(node)}: the op has no attribute {name!r}{near(name, self.attributes)}", code="F506"
                )
            if kind and kind != wanted:
                raise FileError(
                    f"{_label(node)}: attribute {name!r} is {_KINDS[wanted]}, the node has {_KINDS.get(kind, kind)}",
                    code="F506",
                )
        missing = [name for name in self.required if name not in given]
        if missing:
            raise FileError(f"{_label(node)}: attribute {missing[0]!r} is missing", code="F504")
        for what, names, (least, most) in (("input", node.input, self.inputs), ("output", node.output, self.outputs)):
            if not least <= len(names) <= most:
                said = counted(most, what) if least == most else f"{least} to {counted(most, what)}"
                said = said if most < _MANY else f"at least {counted(least, what)}"
                raise FileError(f"{_label(node)}: the op has {said}, the node {len(names)}", code="F504")
        for i, (name, is_single) in enumerate(zip(node.input, self.singles, strict=False)):
            if is_single and not name:
                raise FileError(f"{_label(node)}: input {i} is missing", code="F504")


def _label(node: Any) -> str:
    return f"node {node.name or node.op_type!r} ({node.op_type})"


_MANY = 1 << 30
_MOST_OPSETS = (1 << 31) - 1  # that `onnx` takes; a file may say more of any domain


def schema(op: str, opset: int, domain: str) -> Any | None:
    """The standard's schema of an op in an opset; None of one that it does not know."""
    try:
        return defs.get_schema(op, max(0, min(opset, _MOST_OPSETS)), domain)
    except defs.SchemaError:
        return None


def _newest(domain: str) -> int:
    """The newest opset that `onnx` knows."""
    if domain == "ai.onnx.ml":
        return defs.onnx_ml_opset_version()
    return 1 if domain else defs.onnx_opset_version()


@cache
def form(op: str, opset: int, domain: str) -> Form | None:
    """What the standard says of an op in an opset; None of one that it does not know, or that is newer than `onnx`:
    an op may have more there."""
    found = schema(op, opset, domain)
    if found is None or opset > _newest(domain):
        return None
    attributes = found.attributes
    return Form(
        {name: _number(a.type) for name, a in attributes.items()},
        tuple(name for name, a in attributes.items() if a.required),
        (found.min_input, found.max_input),
        (found.min_output, found.max_output),
        tuple(x.option == _SINGLE for x in found.inputs),
    )


def _number(kind: Any) -> int:
    """Of a kind of attribute, as protobuf counts them."""
    return int(kind.value)
