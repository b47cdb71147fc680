"""The table from op to StableHLO rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from strata.backends.stablehlo.build import Hlo, StableHloBuilder, value_type
from strata.core import TensorType
from strata.mir import Graph, Op, Value, as_tuple

Results = Hlo | tuple[Hlo, ...]
Rule = Callable[["Writer", Any, Sequence[Hlo]], Results]

RULES: dict[str, Rule] = {}


class Writer(Protocol):
    """What a rule writes with."""

    b: StableHloBuilder

    def node(self, op: Op, inputs: Sequence[Hlo]) -> tuple[Hlo, ...]:
        """The results of another op."""

    def graph(self, graph: Graph, inputs: Sequence[Hlo]) -> tuple[Hlo, ...]:
        """The results of a graph inside this one."""

    def values(self, roots: Sequence[Value], known: dict[Value, Hlo]) -> tuple[Hlo, ...]:
        """Values computed from known ones."""

    def fail_if(self, bad: Hlo) -> None:
        """A run in which this boolean is true is an error, which the host then finds."""

    def inside(self, write: Callable[[], Sequence[Hlo]]) -> tuple[tuple[Hlo, ...], Hlo]:
        """What is written in an inner block, and whether anything has failed there."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """The rule for ops of these names. It gets a writer, the op with all sizes known, and its inputs."""

    def enter(made: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = made
        return made

    return enter


def types_of(op: Op, xs: Sequence[Hlo]) -> tuple[TensorType, ...]:
    """The types of an op's results."""
    made: tuple[TensorType, ...] = as_tuple(op.infer(*(value_type(x) for x in xs)))
    return made
