"""From a graph to a plan: kernels in order, one buffer for each stored value, lifetimes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from strata.core import Target
from strata.kernel import Kernel
from strata.lir.group import Group, group_graph
from strata.lir.ir import Buffer, Io, Lir, Step
from strata.lir.memory import check_limit
from strata.lir.traits import is_inline_constant
from strata.lir.views import view_strides
from strata.mir import Constant, Graph, Node, Value, leaf_name


def plan(
    graph: Graph,
    target: Target | None = None,
    *,
    memory_limit: int | None = None,
    whole: Callable[[Node], bool] | None = None,
    views: Callable[[Node], bool] | None = None,
) -> Lir:
    """Group a graph into kernels and plan its memory. `whole` and `views` are those of `group_graph`."""
    lir = _Planner(graph, target or Target.host(), whole, views).run()
    check_limit(lir, memory_limit)
    return lir


class _Planner:
    def __init__(
        self,
        graph: Graph,
        target: Target,
        whole: Callable[[Node], bool] | None,
        views: Callable[[Node], bool] | None,
    ) -> None:
        self.views = views
        self.graph, self.target, self.whole = graph, target, whole
        self.buffers: dict[Value, Buffer] = {}
        self.constants: list[np.ndarray] = []
        self.kernel_names: dict[Kernel, str] = {}

    def run(self) -> Lir:
        grouping = group_graph(self.graph, self.whole, self.views)
        for x in self.graph.inputs:
            self.buffers[x] = Buffer(leaf_name(x), x.type, "input", leaf_name(x))
        for x in self.graph.params:
            self.buffers[x] = Buffer(leaf_name(x), x.type, "param", leaf_name(x))
        for node in self.graph.nodes():
            if isinstance(node.op, Constant) and not is_inline_constant(node):
                self._constant(Value(node, 0))
        first = {x: i for i, x in reversed(list(enumerate(self.graph.results)))}
        death: dict[Value, int] = {}
        for at, group in enumerate(grouping.groups):
            for x in (*group.reads, *([group.updates] if group.updates is not None else [])):
                death[x] = at
            for root in group.roots:
                death.setdefault(root, at)
        for at, group in enumerate(grouping.groups):
            for root in group.roots:
                if root in grouping.fixed:
                    name = f"weight{sum(b.role == 'weight' for b in self.buffers.values())}"
                    self.buffers[root] = Buffer(name, root.type, "weight")
                elif root in first:
                    self.buffers[root] = Buffer(f"out{first[root]}", root.type, "result", first[root])
                else:
                    name = f"%{sum(b.role == 'scratch' for b in self.buffers.values())}"
                    self.buffers[root] = Buffer(name, root.type, "scratch", None, at, max(death[root], at))
                    self._share(root, group, death, at)
        for x in self.graph.results:  # a result that is a one-element constant has no step that writes it
            if x not in self.buffers:
                self._constant(x)
        steps = tuple(self._step(g) for g in grouping.groups)
        io = Io(
            tuple((leaf_name(x), self.buffers[x].name) for x in self.graph.inputs),
            tuple((leaf_name(x), self.buffers[x].name) for x in self.graph.params),
            tuple(self.buffers[x].name for x in self.graph.results),
        )
        buffers = tuple(self.buffers.values())
        return Lir(self.graph, self.target, buffers, steps, io, tuple(self.constants), tuple(grouping.cuts))

    def _share(self, root: Value, group: Group, death: dict[Value, int], at: int) -> None:
        """An update takes over the memory of a value that nothing reads afterwards."""
        source = self.buffers.get(group.updates) if group.updates is not None else None
        if source is None or source.role != "scratch" or death[group.updates] != at:  # type: ignore[index]
            return
        base = source if source.alias is None else next(b for b in self.buffers.values() if b.name == source.alias)
        made = self.buffers[root]
        self.buffers[root] = replace(made, alias=base.name)
        owner = next(v for v, b in self.buffers.items() if b.name == base.name)
        self.buffers[owner] = replace(base, death=max(base.death, made.death))

    def _constant(self, x: Value) -> None:
        assert isinstance(x.node.op, Constant)
        self.buffers[x] = Buffer(f"const{len(self.constants)}", x.type, "constant", len(self.constants))
        self.constants.append(x.node.op.data.array)

    def _step(self, group: Group) -> Step:
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
            return Step(node.op.name, reads, writes, node.op.name, None, nodes, phase, None, views)
        kernel = self._named(group.kernel)
        updates = self._read_name(group.updates) if group.updates is not None else None
        return Step(kernel.name, reads, writes, group.label, kernel, nodes, phase, updates)

    def _read_name(self, x: Value) -> str:
        if x not in self.buffers:  # a one-element constant read by a host step
            self._constant(x)
        return self.buffers[x].name

    def _named(self, kernel: Kernel) -> Kernel:
        """Equal kernels get one name, k0, k1, … in the order of their first use."""
        anonymous = replace(kernel, name="k")
        name = self.kernel_names.setdefault(anonymous, f"k{len(self.kernel_names)}")
        return replace(kernel, name=name)
