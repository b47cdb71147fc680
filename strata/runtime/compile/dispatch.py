"""Dispatch: how each op of a graph runs on a device, and an error that names every op that cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.arguments import public
from strata.backends import Backend, planner_for
from strata.config import config
from strata.core import Place, TensorType, located
from strata.errors import CompileError, OptionError
from strata.mir import REGISTRY, Constant, Graph, Leaf, Node, Op, as_tuple, near, placeholder, toposort
from strata.passes import PassContext, default_passes, run_passes
from strata.runtime.compile.options import CompileOptions

Takes = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class OpPath:
    """How the nodes of one op run: native, decomposed (into native ops), rewritten (by a pass), host, unsupported."""

    op: str
    count: int
    path: str


@dataclass(frozen=True, slots=True)
class Offender:
    """A node that the device cannot run."""

    op: str
    label: str
    place: Place | None
    block: str | None
    nearest: str

    def __str__(self) -> str:
        where = f" at {self.place.describe()}" if self.place is not None else ""
        block = f" in block {self.block}" if self.block else ""
        return f"{self.label}{block}{where}; {self.nearest}"


@public
@dataclass(frozen=True)
class DispatchReport:
    """How a graph runs on a device."""

    device: str
    policy: str
    ops: tuple[OpPath, ...]
    unsupported: tuple[Offender, ...]

    @property
    def compile_ready(self) -> bool:
        return not self.unsupported

    def path(self, op: str) -> str | None:
        """The path of an op of the graph; None where the graph has no such op."""
        return next((p.path for p in self.ops if p.op == op), None)

    def __str__(self) -> str:
        state = "ready" if self.compile_ready else f"{len(self.unsupported)} unsupported"
        lines = [f"dispatch on {self.device}, {self.policy}: {state}"]
        width = max((len(p.op) for p in self.ops), default=0)
        lines += [f"  {p.op:<{width}}  {p.count:>5}  {p.path}" for p in self.ops]
        return "\n".join([*lines, *(f"  {o}" for o in self.unsupported)])


def policy_takes(backend: Backend, options: CompileOptions) -> Takes:
    """What passes may leave as it is: the backend's answer under the dispatch policy of a compile."""

    def takes(op: Op, types: Sequence[TensorType] = ()) -> bool:
        if op.name in options.force_native:
            return True
        if not options.claims(op.name):
            return False
        if op.is_composition and op.name in options.force_common:
            return False
        if options.kernel_dispatch == "force_native":
            return True
        if options.kernel_dispatch == "force_common" and type(op).lower is Op.lower:
            return False
        return backend.takes(op, types)

    return takes


def pass_context(backend: Backend, options: CompileOptions) -> PassContext:
    """What passes may ask of a backend under the options of a compile."""
    takes, claims = policy_takes(backend, options), backend.capabilities.claims
    return PassContext(backend.target, takes, claims, options.exact, config().verify)


def path_of(node: Node, backend: Backend, options: CompileOptions) -> str:
    """How a node of an optimised graph runs."""
    if not options.claims(node.op.name):
        return "unsupported"
    dtypes, types = backend.capabilities.dtypes, [x.type for x in node.inputs]
    if dtypes is not None and any(t.dtype.name not in dtypes for t in (*node.types, *types)):
        return "unsupported"
    if backend.takes(node.op, types):
        return "native"
    return "host" if backend.capabilities.host_steps and node.op.has_rule("numpy") else "unsupported"


def offenders(graph: Graph, backend: Backend, options: CompileOptions) -> tuple[Offender, ...]:
    """The nodes of an optimised graph that cannot run, or that options keep as ops without a kernel."""
    found = []
    for node in toposort(graph.results):
        if isinstance(node.op, (Leaf, Constant)):
            continue
        path = path_of(node, backend, options)
        kept = node.op.name in options.force_native or (
            options.kernel_dispatch == "force_native" and node.op.is_composition
        )
        if path == "unsupported" or (kept and path != "native"):
            found.append(_offender(node, backend))
    return tuple(found)


def legalize(graph: Graph, backend: Backend, options: CompileOptions) -> None:
    """Refuse a graph with ops that the backend cannot run, naming all of them."""
    found = offenders(graph, backend, options)
    if not found:
        return
    kinds = ", ".join(dict.fromkeys(o.op for o in found))
    limits = "" if not options.supported_ops else f" (supported: {', '.join(options.supported_ops)})"
    raise CompileError(
        f"{backend.name}{limits} cannot run {len(found)} of the ops of {graph.name!r}: {kinds}", code="C151",
        place=found[0].place, operands=[str(o) for o in found],
    )  # fmt: skip


def _offender(node: Node, backend: Backend) -> Offender:
    inputs = ", ".join(str(x.type) for x in node.inputs)
    label = f"{node.op.name}({inputs}) : {', '.join(map(str, node.types))}"
    return Offender(node.op.name, label, node.origin.place, node.origin.block, _nearest(node, backend))


def _nearest(node: Node, backend: Backend) -> str:
    """The nearest thing that the backend does run: another type, a decomposition, or a related op."""
    dtypes = backend.capabilities.dtypes
    if dtypes is not None:
        foreign = {t.dtype for t in (*node.types, *(x.type for x in node.inputs)) if t.dtype.name not in dtypes}
        if foreign:
            return (
                f"it does not hold {', '.join(sorted(map(str, foreign)))}: cast to one of {', '.join(sorted(dtypes))}"
            )
    if node.op.is_composition:
        parts = toposort(
            as_tuple(node.op.decompose(*(placeholder(f"x{i}", x.type) for i, x in enumerate(node.inputs))))
        )
        names = dict.fromkeys(n.op.name for n in parts if not isinstance(n.op, (Leaf, Constant)))
        return f"it decomposes into {', '.join(names)}"
    family = [
        cls.name
        for cls in REGISTRY.classes()
        if cls.__module__ == type(node.op).__module__ and cls is not type(node.op)
    ]
    taken = [name for name in family if REGISTRY[name].has_rule("lower")]
    close = near(node.op.name, taken).removeprefix("; did you mean ").rstrip("?")
    if close:
        return f"the nearest op with a kernel is {close}"
    return f"of its family there are {', '.join(taken[:4])}" if taken else 'Session("cpu") runs it'


def as_graph(program: Any, blocks: str | None = None) -> Graph:
    """A graph from a graph or an HIR module, whose blocks are lowered directly or to be fused, if that is said."""
    if not isinstance(program, Graph) and (isinstance(program, (str, bytes)) or not hasattr(program, "lower")):
        raise OptionError(
            f"compile takes a graph or a module of blocks, got {type(program).__name__}", code="O412",
            fix="st.parse(text)" if isinstance(program, str) else None,
        )  # fmt: skip
    made: Graph = (
        program if isinstance(program, Graph) else program.lower() if blocks is None else program.lower(blocks)
    )
    return made


@located
def dispatch_report(program: Any, device: str = "cpu", options: CompileOptions | None = None) -> DispatchReport:
    """How each op of a graph (or an HIR module) runs on a device, found by running the passes; compiles no kernel."""
    chosen = options or CompileOptions()
    backend = planner_for(device)
    graph = as_graph(program, chosen.blocks)
    ctx = pass_context(backend, chosen)
    after, _ = run_passes(default_passes(ctx, chosen.choices), graph, ctx)
    return report_of(graph, after, backend, chosen)


def report_of(before: Graph, after: Graph, backend: Backend, options: CompileOptions) -> DispatchReport:
    """The report for a graph before and after the passes."""
    takes = policy_takes(backend, options)
    counted = Counter(n.op.name for n in before.nodes() if not isinstance(n.op, (Leaf, Constant)))
    first = {n.op.name: n for n in reversed(before.nodes())}
    left = {n.op.name: n for n in reversed(after.nodes()) if not isinstance(n.op, (Leaf, Constant))}
    paths = []
    for name, count in sorted(counted.items()):
        if name in left:
            path = path_of(left[name], backend, options)
        elif first[name].op.is_composition and not takes(first[name].op, [x.type for x in first[name].inputs]):
            path = "decomposed"
        else:
            path = "rewritten"
        paths.append(OpPath(name, count, path))
    return DispatchReport(backend.name, options.kernel_dispatch, tuple(paths), offenders(after, backend, options))
