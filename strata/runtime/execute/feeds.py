"""Inputs of a run by name, and arrays for its outputs: what is missing, what is too many, what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strata.core import here
from strata.errors import OptionError, UnknownNameError
from strata.kinds import counted
from strata.lir import check_sizes, size_checks
from strata.mir import infer_binding, near
from strata.runtime.execute.arrays import check_output, read_array, signature
from strata.runtime.execute.memory import makers_of

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


def by_name(graph: CompiledGraph, given: Any) -> Mapping[str, Any]:
    if hasattr(given, "get"):
        return given
    name = graph._inputs[0][0] if graph._inputs else "x"
    raise OptionError(
        f"{graph.name!r} takes its inputs by name, got {type(given).__name__}", code="O152", place=here(),
        fix=f"run({name}=array), or run({{{name!r}: array}})",
    )  # fmt: skip


def together(graph: CompiledGraph, feeds: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inputs of a mapping and of keywords."""
    twice = next((name for name in by_name(graph, feeds) if name in named), None)
    if twice is not None:
        raise OptionError(
            f"{graph.name!r}: input {twice!r} is given in the mapping and as a keyword", code="O152", place=here()
        )
    return {**feeds, **named}


def refuse_extra(graph: CompiledGraph, given: Mapping[str, Any]) -> None:
    names = [n for n, _ in graph._inputs]
    for extra in (n for n in given if n not in names):
        raise UnknownNameError(
            f"{graph.name!r} has no input {extra!r}; the signature is {signature(graph)}{near(extra, names)}",
            code="N112", place=here(),
        )  # fmt: skip


def check_params(graph: CompiledGraph) -> None:
    """Refuse to run before all parameters have values."""
    if graph._missing:
        name = min(graph._missing)
        raise UnknownNameError(
            f"parameter {name!r} : {graph._params[name]} has no value yet: use set_param", code="N114", place=here()
        )


def read_input(graph: CompiledGraph, name: str, value: Any, at: int) -> Any:
    """An input that is not an array of NumPy as it should be."""
    kind = graph._inputs[at][1]
    if value is None:
        raise UnknownNameError(
            f"input {name!r} : {kind} is missing; the signature is {signature(graph)}", code="N114", place=here()
        )
    return read_array(name, kind, value, "input")


def sizes(graph: CompiledGraph, arrays: Sequence[Any]) -> tuple[dict[str, int], tuple[Any, ...]]:
    """Sizes of the symbols that arrays give, checked, and what makes the outputs that follow from them."""
    for (name, kind), array in zip(graph._inputs, arrays, strict=True):
        read_array(name, kind, array, "input")
    source = graph._lir.graph
    shapes = {x: a.shape for x, a in zip(source.inputs, arrays, strict=True)}
    given = {source.leaf(name): shape for name, shape in graph._param_shapes.items()}
    binding = infer_binding({**shapes, **given})
    if graph._checks is None:
        graph._checks = size_checks(graph.source)
    check_sizes(graph._checks, binding)
    return binding, makers_of([t.bind(binding) for t in graph._outputs])


def check_outputs(
    graph: CompiledGraph, outputs: Sequence[Any], binding: Mapping[str, int], makers: Sequence[Any]
) -> None:
    """Refuse arrays that results cannot be written into."""
    if len(outputs) != len(makers):
        raise OptionError(
            f"{graph.name!r} has {counted(len(makers), 'output')}, got {counted(len(outputs), 'array')}",
            code="O150",
            place=here(),
        )
    for i, (kind, array) in enumerate(zip(graph._outputs, outputs, strict=True)):
        check_output(i, kind.bind(binding) if binding else kind, array)
