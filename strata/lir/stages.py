"""Plans for backends that take whole graphs: as few modules as possible, between host ops.

What runs on the host cuts a graph: what it needs comes before it, what needs it after. All else is one module, whose
kernels and memory are the business of whoever compiles it. Where fusion is limited, each group is a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.core import Target
from strata.lir.fusion import Cut, group_graph
from strata.lir.ir import PLAIN_MEMORY, Io, Lir, LirBuffer, MemoryPlanOptions, Step
from strata.lir.memory import check_limit
from strata.mir import Constant, Graph, Input, Node, Param, Value, leaf_name

if TYPE_CHECKING:
    from strata.passes import FusionLimits

LABELLED = 6  # ops that the label of a module names

OnHost = Callable[[Node], bool]


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A module, or one op of the host: its nodes without constants, what it reads, and what others read of it."""

    nodes: tuple[Node, ...]
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    is_host: bool


def stages_of(graph: Graph, parts: Iterable[tuple[Sequence[Node], bool]]) -> list[PlanStage]:
    """Parts of a graph in the order in which they run, each with whether it is of the host, as stages. A value that
    several parts compute is handed on by the first."""
    found = []
    for nodes, is_host in parts:
        inside = {id(n) for n in nodes}
        takes = dict.fromkeys(x for n in nodes for x in n.inputs if id(x.node) not in inside)
        found.append((tuple(nodes), tuple(takes), is_host))
    wanted = {x for _, takes, _ in found for x in takes} | set(graph.results)
    stages = []
    for nodes, taken, is_host in found:
        gives = tuple(x for n in nodes for x in n.outputs if x in wanted or is_host)
        wanted.difference_update(gives)
        if gives:
            stages.append(PlanStage(nodes, taken, gives, is_host))
    return stages


def _parts(graph: Graph, on_host: OnHost) -> Iterator[tuple[Sequence[Node], bool]]:
    """As few parts as can be; even levels are modules, odd ones are of the host."""
    level: dict[int, int] = {}
    own: dict[int, list[Node]] = {}
    for node in graph.nodes():
        below = max((level[id(x.node)] for x in node.inputs), default=0)
        if _is_leaf(node):
            level[id(node)] = 0
            continue
        level[id(node)] = below + (below % 2 != on_host(node))
        own.setdefault(level[id(node)], []).append(node)
    for number in sorted(own):
        yield from (((n,), True) for n in own[number]) if number % 2 else ((own[number], False),)


def plan_stages(
    graph: Graph,
    target: Target,
    on_host: OnHost,
    *,
    memory_limit: int | None = None,
    limits: FusionLimits | None = None,
    made_with: str = "",
    memory: MemoryPlanOptions = PLAIN_MEMORY,
) -> Lir:
    """The plan of a graph in stages. Only what goes from one stage to another has a buffer. With `limits`, a module
    has no more than the ops of one kernel."""
    buffers: dict[Value, LirBuffer] = {}
    for role, leaves in (("input", graph.inputs), ("param", graph.params)):
        buffers |= {x: LirBuffer(leaf_name(x), x.type, role, leaf_name(x)) for x in leaves}
    grouping = None if limits is None else group_graph(graph, on_host, limits=limits)
    parts = _parts(graph, on_host) if grouping is None else ((g.nodes, on_host(g.nodes[0])) for g in grouping.groups)
    stages = stages_of(graph, parts)
    first = {x: i for i, x in reversed(list(enumerate(graph.results)))}
    death = {x: at for at, stage in enumerate(stages) for x in stage.takes}
    constants: list[np.ndarray] = []
    needed = [x for s in stages if s.is_host for x in s.takes] + list(graph.results)
    for x in dict.fromkeys(v for v in needed if isinstance(v.node.op, Constant)):
        assert isinstance(x.node.op, Constant)
        buffers[x] = LirBuffer(f"const{len(constants)}", x.type, "constant", len(constants))
        constants.append(x.node.op.data.array)
    scratch = 0
    for at, stage in enumerate(stages):
        for x in stage.gives:
            if x in first:
                buffers[x] = LirBuffer(f"out{first[x]}", x.type, "result", first[x])
            else:
                buffers[x] = LirBuffer(f"%{scratch}", x.type, "scratch", None, at, max(death.get(x, at), at))
                scratch += 1
    names = {x: b.name for x, b in buffers.items()}
    io = Io(
        tuple((leaf_name(x), names[x]) for x in graph.inputs), tuple((leaf_name(x), names[x]) for x in graph.params),
        tuple(names[x] for x in graph.results),
    )  # fmt: skip
    cuts = _cuts(stages) if grouping is None else tuple(grouping.cuts)
    steps = tuple(_step(at, stage, names) for at, stage in enumerate(stages))
    lir = Lir(graph, target, tuple(buffers.values()), steps, io, tuple(constants), cuts, made_with, memory)
    check_limit(lir, memory_limit)
    return lir


def _step(at: int, stage: PlanStage, names: dict[Value, str]) -> Step:
    outputs = tuple(names[x] for x in stage.gives)
    inputs = tuple(names[x] for x in stage.takes if x in names)  # constants are part of a module
    if stage.is_host:
        (node,) = stage.nodes
        return Step(node.op.name, inputs, outputs, node.op.name, None, stage.nodes)
    return Step(f"module{at}", inputs, outputs, _label(stage.nodes), None, stage.nodes, is_module=True)


def _label(nodes: tuple[Node, ...]) -> str:
    shown = [n.op.called for n in nodes[:LABELLED]]
    return " + ".join([*shown, f"{len(nodes) - LABELLED} more"] if len(nodes) > LABELLED else shown)


def _cuts(stages: list[PlanStage]) -> tuple[Cut, ...]:
    """Edges between stages."""
    found = []
    for stage in stages:
        for x in stage.takes:
            if not _is_leaf(x.node):
                user = next(n for n in stage.nodes if x in n.inputs)
                alone = user if stage.is_host else x.node
                found.append(Cut(x.node, user, f"{alone.op.called} runs on the host"))
    return tuple(found)


def _is_leaf(node: Node) -> bool:
    return isinstance(node.op, (Input, Param, Constant))
