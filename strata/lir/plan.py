"""From a graph to a plan: kernels in order, a buffer for each stored value, lifetimes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Target
from strata.kernel import Expr, Kernel, Load, Reduce, Scan, postorder
from strata.lir.fused import FusionGroup
from strata.lir.fusion import CHEAP, Grouping, group_graph
from strata.lir.ir import PLAIN_MEMORY, Io, Lir, LirBuffer, MemoryPlanOptions, Step
from strata.lir.memory import check_limit
from strata.lir.traits import is_inline_constant, traits
from strata.lir.views import Spacing, view_strides
from strata.mir import Constant, Graph, Node, Op, Value, leaf_name

if TYPE_CHECKING:
    from strata.passes import FusionLimits


def plan(
    graph: Graph,
    target: Target | None = None,
    *,
    memory_limit: int | None = None,
    whole: Callable[[Node], bool] | None = None,
    views: Callable[[Node], bool] | None = None,
    limits: FusionLimits | None = None,
    again: int = CHEAP,
    bodies: bool = False,
    made_with: str = "",
    memory: MemoryPlanOptions = PLAIN_MEMORY,
) -> Lir:
    """Group a graph into kernels and plan its memory: `whole`, `views`, `limits` and `again` are as in `group_graph`.

    With `bodies`, loops and branches have plans of what they run, made in the same way.
    """

    def plan_bodies(op: Op) -> tuple[Lir, ...]:
        options: Any = {
            "whole": whole,
            "views": views,
            "limits": limits,
            "again": again,
            "bodies": True,
            "memory": memory,
        }
        return tuple(plan(nested.opened(), target, **options) for nested in op.nested()) if bodies else ()

    grouping = group_graph(graph, whole, views, limits=limits, again=again)
    lir = _Planner(graph, target or Target.host(), grouping, plan_bodies).run(made_with, memory)
    check_limit(lir, memory_limit)
    return lir


class _Planner:
    def __init__(
        self, graph: Graph, target: Target, grouping: Grouping, plan_bodies: Callable[[Op], tuple[Lir, ...]]
    ) -> None:
        self.graph, self.target, self.grouping, self.plan_bodies = graph, target, grouping, plan_bodies
        self.buffers: dict[Value, LirBuffer] = {}
        self.owners: dict[str, Value] = {}  # of scratch memory, by buffer name
        self.constants: list[np.ndarray] = []
        self.kernel_names: dict[Kernel, str] = {}
        self.count = Counter[str]()

    def run(self, made_with: str, memory: MemoryPlanOptions) -> Lir:
        grouping = self.grouping
        for x in self.graph.inputs:
            self.buffers[x] = LirBuffer(leaf_name(x), x.type, "input", leaf_name(x))
        for x in self.graph.params:
            self.buffers[x] = LirBuffer(leaf_name(x), x.type, "param", leaf_name(x))
        for node in self.graph.nodes():
            if isinstance(node.op, Constant) and not is_inline_constant(node):
                self._constant(Value(node, 0))
        first = {x: i for i, x in reversed(list(enumerate(self.graph.results)))}
        death: dict[Value, int] = {}
        for at, group in enumerate(grouping.groups):
            for x in group.read_values:
                death[x] = at
            for root in group.roots:
                death.setdefault(root, at)
        for at, group in enumerate(grouping.groups):
            for root in group.roots:
                if root in grouping.fixed:
                    self.buffers[root] = LirBuffer(self._next("weight"), root.type, "weight")
                elif root in first:
                    self.buffers[root] = LirBuffer(f"out{first[root]}", root.type, "result", first[root])
                else:
                    self.buffers[root] = LirBuffer(
                        self._next("%"), root.type, "scratch", None, at, max(death[root], at)
                    )
                    self._share(root, group, death, at)
        for x in self.graph.results:  # a result that is a one-element constant has no step that writes it
            if x not in self.buffers:
                self._constant(x)
        steps = with_epilogue([self._step(g) for g in grouping.groups])
        io = Io(
            tuple((leaf_name(x), self.buffers[x].name) for x in self.graph.inputs),
            tuple((leaf_name(x), self.buffers[x].name) for x in self.graph.params),
            tuple(self.buffers[x].name for x in self.graph.results),
        )
        buffers = tuple(self.buffers.values())
        constants, cuts = tuple(self.constants), tuple(grouping.cuts)
        return Lir(self.graph, self.target, buffers, steps, io, constants, cuts, made_with, memory)

    def _next(self, kind: str) -> str:
        self.count[kind] += 1
        return f"{kind}{self.count[kind] - 1}"

    def _share(self, root: Value, group: FusionGroup, death: dict[Value, int], at: int) -> None:
        """Take over memory that nothing reads afterwards: of a value that is updated, or read element by element."""
        self.owners[self.buffers[root].name] = root
        dying = [x for x in inplace_inputs(group, root) if death[x] == at and self._is_scratch(x)]
        if not dying:
            return
        source = self.buffers[dying[0]]
        base = source if source.alias is None else self.buffers[self.owners[source.alias]]
        made = self.buffers[root]
        self.buffers[root] = replace(made, alias=base.name)
        self.buffers[self.owners[base.name]] = replace(base, death=max(base.death, made.death))

    def _is_scratch(self, x: Value) -> bool:
        return x in self.buffers and self.buffers[x].role == "scratch"

    def _constant(self, x: Value) -> None:
        assert isinstance(x.node.op, Constant)
        self.buffers[x] = LirBuffer(f"const{len(self.constants)}", x.type, "constant", len(self.constants))
        self.constants.append(x.node.op.data.array)

    def _step(self, group: FusionGroup) -> Step:
        reads = tuple(self._read_name(x) for x in group.reads)
        writes = tuple(self.buffers[x].name for x in group.roots)
        nodes = tuple(group.nodes)
        phase = "prologue" if all(self.buffers[x].role == "weight" for x in group.roots) else "steady"
        if group.kernel is None:
            (node,) = nodes
            reads = tuple(self._read_name(x) for x in group.sources)
            spaced = [view_strides(x, base) for x, base in zip(node.inputs, group.sources, strict=True)]
            views = tuple(v for v in spaced if v is not None)
            assert len(views) == len(spaced)
            bodies = self.plan_bodies(node.op)
            return Step(node.op.name, reads, writes, node.op.name, None, nodes, phase, (), views, bodies=bodies)
        kernel = self._named(group.kernel)
        updates = tuple((self.buffers[x].name, self._read_name(start)) for x, start in group.updates.items())
        return Step(kernel.name, reads, writes, group.label, kernel, nodes, phase, updates, _views_of_sliding(nodes))

    def _read_name(self, x: Value) -> str:
        if x not in self.buffers:  # a one-element constant read by a host step
            self._constant(x)
        return self.buffers[x].name

    def _named(self, kernel: Kernel) -> Kernel:
        """Equal kernels get one name, k0, k1, … in the order of their first use."""
        anonymous = replace(kernel, name="k")
        name = self.kernel_names.setdefault(anonymous, f"k{len(self.kernel_names)}")
        return replace(kernel, name=name)


def _views_of_sliding(nodes: tuple[Node, ...]) -> tuple[Spacing, ...] | None:
    """Where a convolution among the nodes of a kernel reads its inputs."""
    inside = {id(n) for n in nodes}
    views: list[Spacing] = []
    for x in next((n.inputs for n in nodes if traits(n).slides), ()):
        base = x
        while id(base.node) in inside:
            base = base.node.inputs[0]
        spacing = view_strides(x, base)
        if spacing is None:
            return None
        views.append(spacing)
    return tuple(views) or None


def inplace_inputs(group: FusionGroup, root: Value) -> list[Value]:
    """Inputs whose memory a root of a group may take over while it runs.

    Without reductions, one output element is computed at a time, so an input that is read at the output's own index
    only is read before it is overwritten.
    """
    if root in group.updates:
        return [x for x in (group.updates[root],) if x not in group.reads]
    if group.kernel is None or len(group.roots) != 1 or len(group.kernel.stores) != 1:
        return []
    (store,) = group.kernel.stores
    exprs = postorder([store.value])
    if tuple(store.index) != tuple(store.axes) or any(isinstance(e, (Reduce, Scan)) for e in exprs):
        return []
    indices: dict[str, set[tuple[Expr, ...]]] = {}
    for e in exprs:
        if isinstance(e, Load):
            indices.setdefault(e.buffer.name, set()).add(tuple(e.index))
    pairs = zip(group.reads, group.kernel.inputs, strict=True)
    return [x for x, buffer in pairs if x.type == root.type and indices.get(buffer.name) == {tuple(store.index)}]


def with_epilogue(steps: list[Step]) -> tuple[Step, ...]:
    """Steps after the last heavy one (a contraction, attention, …) are the epilogue; without any, all are steady."""
    heavy = [
        i
        for i, s in enumerate(steps)
        if s.phase == "steady" and (s.kernel is None or any(traits(n).contracts for n in s.nodes))
    ]
    sampled = [i for i, s in enumerate(steps) if any(n.op.name in ("sample", "topk") for n in s.nodes)]
    if not heavy:
        return tuple(steps)
    last = min([heavy[-1], *(i - 1 for i in sampled if i >= heavy[-1])])
    return tuple(replace(s, phase="epilogue") if s.phase == "steady" and i > last else s for i, s in enumerate(steps))
