"""A decoder's graph cut at its experts: compiled stages, and between two of them the experts that a router chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.mir import Graph, Input, Leaf, Param, Value, fixed_values, leaf_name, substitute_values, toposort
from strata.runtime import CompiledGraph

Experts = Callable[[str, np.ndarray, np.ndarray], np.ndarray]  # of a layer, for rows with their ids


@dataclass(frozen=True)
class ExpertCut:
    """A place where a graph is cut: rows and the ids of their experts leave it, what these made of them comes in."""

    at: str  # how the names of the layer's weights begin
    rows: Value
    ids: Value
    made: Value


@dataclass(frozen=True)
class GraphStage:
    """A part of a graph between two cuts: what it takes and gives, as values of the whole graph."""

    graph: Graph
    takes: dict[str, Value]
    gives: tuple[Value, ...]


def stages_of(graph: Graph, cuts: Sequence[ExpertCut]) -> list[GraphStage]:
    """The parts of a graph. A node is in the first one that knows all of its operands.

    What is computed from weights only is in each part that reads it.
    """
    wanted = [*(v for cut in cuts for v in (cut.rows, cut.ids)), *graph.results]
    nodes = [node for node in toposort(wanted) if not isinstance(node.op, Leaf)]
    anywhere = fixed_values(toposort(wanted))
    stage_of: dict[Value, int] = {cut.made: i + 1 for i, cut in enumerate(cuts)}
    last = dict.fromkeys(wanted, len(cuts) + 1)  # the last stage that reads a value; the caller comes after all
    for node in (n for n in nodes if n.outputs[0] not in anywhere):
        stage = max((stage_of.get(x, 0) for x in node.inputs), default=0)
        stage_of |= dict.fromkeys(node.outputs, stage)
        for x in node.inputs:
            last[x] = max(last.get(x, 0), stage)
    made = [v for node in nodes for v in node.outputs if v in stage_of]
    return [
        _stage(f"{graph.name}.{i}", i, [v for v in made if stage_of[v] == i and last.get(v, 0) > i], stage_of)
        for i in range(len(cuts) + 1)
    ]


def _stage(name: str, stage: int, gives: Sequence[Value], stage_of: Mapping[Value, int]) -> GraphStage:
    part = Graph(name)
    takes: dict[str, Value] = {}
    known: dict[Value, Value] = {}
    seen: set[Value] = set()
    stack = list(gives)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        op = value.node.op
        if isinstance(op, Param):
            known[value] = part.param(leaf_name(value), value.type)
        elif isinstance(op, Input) or stage_of.get(value, stage) < stage:
            label = leaf_name(value) if isinstance(op, Input) else f"carried{len(takes)}"
            takes[label], known[value] = value, part.input(label, value.type)
        else:
            stack += value.node.inputs
    return GraphStage(part.outputs(*substitute_values(gives, known)), takes, tuple(gives))


class StagedGraph:
    """A graph in stages that runs as a compiled one does; `experts` runs those of a layer."""

    def __init__(
        self, graph: Graph, cuts: Sequence[ExpertCut], compiled: Callable[[Graph], CompiledGraph], experts: Experts
    ) -> None:
        self.graph, self.cuts, self._experts = graph, cuts, experts
        self.stages = [(stage, compiled(stage.graph)) for stage in stages_of(graph, cuts)]
        self._places: dict[Value, int] = {value: i for i, value in enumerate(graph.results)}

    def set_params(self, values: Mapping[str, Any]) -> None:
        """Set parameters, in the stages that have them."""
        for _, compiled in self.stages:
            compiled.set_params({name: value for name, value in values.items() if name in compiled.params})

    def run_into(self, feeds: Mapping[str, Any], out: Sequence[np.ndarray]) -> None:
        """Run into arrays of the caller; what one of them is made of may be in it."""
        known: dict[Value, Any] = {
            value: feeds[leaf_name(value)] for value in self.graph.inputs if leaf_name(value) in feeds
        }
        for number, (stage, compiled) in enumerate(self.stages):
            given = {name: known[value] for name, value in stage.takes.items()}
            over = {}
            for i, value in enumerate(stage.gives):
                room = out[self._places[value]] if value in self._places else None
                if room is None:
                    continue
                lying = [name for name, array in given.items() if array is room]
                if all(compiled.takes_over(name, i) for name in lying):
                    over[i] = room
            made = compiled.run_over(given, over)
            for i, (value, array) in enumerate(zip(stage.gives, made, strict=True)):
                known[value] = array
                if value in self._places and i not in over:
                    np.copyto(out[self._places[value]], array)
            if number < len(self.cuts):
                cut = self.cuts[number]
                known[cut.made] = self._experts(cut.at, known[cut.rows], known[cut.ids])
