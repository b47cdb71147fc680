"""What became of torch's graphs: how many, which ops stayed in torch and why, what they cost."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

MOST = 1024  # graphs that are remembered


@dataclass(slots=True)
class GraphReport:
    """One graph that torch handed over."""

    kind: str
    ops: int
    stayed: dict[str, list[Any]] = field(default_factory=dict)  # by overload: how often in the graph, and why
    seconds: float = 0.0  # in torch, over all calls
    calls: int = 0
    traced: str = ""  # torch's number for the trace: frame/how often it was traced before
    reason: str = ""  # why torch traced again
    converting: float = 0.0  # seconds to make a graph of ours
    compiling: float = 0.0  # seconds to make programs
    meanwhile: int = 0  # calls that torch ran while the program was compiled in the background
    failed: str = ""  # what ended a compile in the background
    programs: list[Any] = field(default_factory=list)  # weak references to what was compiled

    def made(self, compiled: Any, seconds: float) -> None:
        """Note a compiled graph, and how long it took."""
        self.programs.append(ref(compiled))
        self.compiling += seconds

    def explain(self) -> str:
        """What became of the graph: why it was traced, what stayed in torch, and each step of its programs."""
        trace = f", trace {self.traced}" if self.traced else ""
        took = f"converted in {self.converting * 1e3:.0f} ms, compiled in {self.compiling * 1e3:.0f} ms"
        lines = [f"{self.kind} graph{trace}: {self.ops} ops, {took}"]
        if self.reason:
            lines.append(f"  traced again, because {self.reason}")
        lines += [f"  stays in torch: {name} × {count}: {why}" for name, (count, why) in self.stayed.items()]
        if self.meanwhile:
            lines.append(f"  {self.meanwhile} calls ran in torch meanwhile")
        if self.failed:
            lines.append(f"  the compile ended with {self.failed}: the graph stays in torch")
        for program in self.programs:
            compiled = program()
            text = "a program that is no longer in use" if compiled is None else str(compiled.explain())
            lines += [f"  {line}".rstrip() for line in text.splitlines()]
        return "\n".join(lines)

    def stay(self, unsupported: Mapping[Any, str]) -> None:
        """Note ops that stay in torch, with the reasons."""
        for node, why in unsupported.items():
            if node.target is operator.getitem:  # what takes several results apart is no op
                continue
            self.stayed.setdefault(str(node.target), [0, why])[0] += 1


@dataclass(slots=True)
class TorchReport:
    """Of all graphs of this process."""

    graphs: list[GraphReport]

    @property
    def stayed(self) -> dict[str, int]:
        """Ops that stayed in torch, and how often."""
        total: dict[str, int] = {}
        for g in self.graphs:
            for name, (count, _) in g.stayed.items():
                total[name] = total.get(name, 0) + count
        return total

    def explain(self) -> str:
        """All graphs in turn: why each was traced, what stayed in torch, what was fused and what not."""
        return "\n\n".join(g.explain() for g in self.graphs)

    def __str__(self) -> str:
        ops = sum(g.ops for g in self.graphs)
        lines = [f"{len(self.graphs)} graphs, {ops} ops, {sum(self.stayed.values())} of them in torch"]
        for g in self.graphs:
            for name, (count, why) in g.stayed.items():
                lines.append(f"  {name} × {count} ({g.kind}): {why}")
            if g.stayed and g.calls:
                lines.append(f"  torch took {g.seconds * 1e3 / g.calls:.2f} ms of a call, over {g.calls} calls")
            if g.reason:
                lines.append(f"  traced again ({g.traced}): {g.reason}")
        return "\n".join(lines)

    __repr__ = __str__


class _Reports:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: list[GraphReport] = []

    def add(self, kind: str, gm: Any, unsupported: Mapping[Any, str]) -> GraphReport:
        made = GraphReport(kind, sum(n.op == "call_function" for n in gm.graph.nodes))
        made.traced, made.reason = _trace()
        made.stay(unsupported)
        with self._lock:
            self._graphs.append(made)
            del self._graphs[:-MOST]
        return made

    def all(self) -> TorchReport:
        with self._lock:
            return TorchReport(list(self._graphs))

    def clear(self) -> None:
        with self._lock:
            self._graphs.clear()


def _trace() -> tuple[str, str]:
    """The trace that torch is at, and why there is another one of the same code."""
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext

    number = CompileContext.current_compile_id()
    if number is None:
        return "", ""
    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return str(number), " ".join(str(reason).split())[:300] if reason else ""


REPORTS = _Reports()


def report() -> TorchReport:
    """What became of the graphs that torch handed over in this process."""
    return REPORTS.all()
