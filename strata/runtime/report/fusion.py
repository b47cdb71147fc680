"""FusionReport: what a compile fused, what it could have fused and did not, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from strata.core import Place
from strata.errors import CompileError
from strata.lir import Lir, Step, traits
from strata.mir import Graph, Node, Value, fixed_values
from strata.passes import EPILOGUES, PassRecord, ShareMatMul

COUNTED = {
    "matmul": "matmul", "attention": "attention", "rope": "rope", "narrow": "slice", "silu": "silu", "mul": "multiply",
    "fused_matmul_bias_act": "fused_matmul_bias_act", "fused_swiglu": "fused_swiglu",
    "fused_residual_ln": "fused_residual_layer_norm", "fused_residual_rms_norm": "fused_residual_rms_norm",
    "fused_attention_block": "fused_attention_block", "fused_transformer_layer": "fused_transformer_layer",
    "elementwise_region": "elementwise_region",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MissedFusion:
    """A pattern that a kernel exists for and that was left unfused."""

    pattern: str
    reason: str
    label: str
    place: Place | None = None
    hint: str = ""

    def __str__(self) -> str:
        where = f" at {self.place.describe()}" if self.place is not None else ""
        hint = f" (try: {self.hint})" if self.hint else ""
        return f"{self.pattern}: {self.label}{where}: {self.reason}{hint}"


@dataclass(frozen=True)
class FusionReport:
    """Counts before and after the passes, misses, and what each pass did. `kernels` is known once the plan is made."""

    nodes_before: int
    nodes_after: int
    before: Mapping[str, int] = field(repr=False)
    after: Mapping[str, int] = field(repr=False)
    missed: tuple[MissedFusion, ...] = ()
    passes: tuple[PassRecord, ...] = field(default=(), repr=False)
    kernels: int | None = None
    fused_kernels: tuple[str, ...] = field(default=(), repr=False)  # labels of kernels that compute several ops
    contractions: tuple[str, ...] = field(default=(), repr=False)  # labels of those with a product and more

    def __getattr__(self, name: str) -> int:
        """`matmul_before`, `matmul_after`, and the counts after the passes: `attention`, `fused_swiglu`, …"""
        base, _, when = name.rpartition("_")
        if when in ("before", "after") and base in COUNTED:
            return (self.before if when == "before" else self.after).get(COUNTED[base], 0)
        if name in COUNTED:
            return self.after.get(COUNTED[name], 0)
        raise AttributeError(name)

    @cached_property
    def fused_products(self) -> int:
        """Products with something behind or before them in the same kernel, by a fused op or by grouping."""
        return self.fused_matmul_bias_act + len(self.contractions)

    def missed_matmul_bias_act(self) -> int:
        return sum(m.pattern == "matmul_bias_act" for m in self.missed)

    def missed_swiglu(self) -> int:
        return sum(m.pattern == "swiglu" for m in self.missed)

    def missed_shared_matmul(self) -> int:
        return sum(m.pattern == "shared_matmul" for m in self.missed)

    def summary_line(self) -> str:
        kernels = "" if self.kernels is None else f" kernels={self.kernels}"
        return (
            f"nodes={self.nodes_before}→{self.nodes_after} matmul={self.matmul_before}→{self.matmul_after}"
            f" fused_mm_act={self.fused_matmul_bias_act} fused_swiglu={self.fused_swiglu}"
            f" elementwise_region={self.elementwise_region} missed_mm_act={self.missed_matmul_bias_act()}"
            f" missed_swiglu={self.missed_swiglu()} missed_shared_mm={self.missed_shared_matmul()}{kernels}"
        )

    def __str__(self) -> str:
        lines = [self.summary_line()]
        lines += [
            f"  pass {p.name}: {p.before} → {p.after} nodes, {p.seconds * 1e3:.1f} ms" for p in self.passes if p.changed
        ]
        return "\n".join([*lines, *(f"  missed {m}" for m in self.missed)])

    def with_plan(self, lir: Lir) -> FusionReport:
        """The report with what grouping into kernels did."""
        labels = tuple(s.label for s in lir.schedule if s.kernel is not None and len(s.nodes) > 1)
        products = tuple(
            s.label for s in lir.schedule if s.kernel is not None and len(s.nodes) > 1 and _contraction(s) is not None
        )
        steady = sum(s.phase != "prologue" for s in lir.schedule)
        return replace(self, missed=(*self.missed, *missed_by_grouping(lir)), kernels=steady, fused_kernels=labels,
                       contractions=products)  # fmt: skip

    def require_clean(self) -> None:
        """Raise unless nothing was missed."""
        if self.missed:
            raise CompileError(
                f"{len(self.missed)} fusions were missed", code="C152", place=self.missed[0].place,
                operands=[str(m) for m in self.missed],
            )  # fmt: skip


def analyze(
    before: Graph, after: Graph, passes: tuple[PassRecord, ...] = (), claims: frozenset[str] = frozenset(),
    epilogues: tuple[str, ...] = ("gelu", "silu"),
) -> FusionReport:  # fmt: skip
    """Compare a graph before and after the passes. Misses are patterns whose fused op is claimed."""
    missed = (
        *_missed_bias(after, claims, epilogues),
        *_missed_epilogue(after, epilogues),
        *_missed_swiglu(after, claims),
        *_missed_shared(after),
    )
    nodes = [g.nodes() for g in (before, after)]
    counts = [MappingProxyType(Counter(n.op.name for n in found)) for found in nodes]
    return FusionReport(len(nodes[0]), len(nodes[1]), counts[0], counts[1], missed, passes)


def scan(graph: Graph, claims: frozenset[str]) -> FusionReport:
    """The report of a graph as it is."""
    return analyze(graph, graph, claims=claims)


def _readers(graph: Graph) -> dict[Value, list[Node]]:
    found: dict[Value, list[Node]] = defaultdict(list)
    for node in graph.nodes():
        for x in dict.fromkeys(node.inputs):
            found[x].append(node)
    return found


def _missed_bias(graph: Graph, claims: frozenset[str], epilogues: tuple[str, ...]) -> Iterator[MissedFusion]:
    if "fused_matmul_bias_act" not in claims:
        return
    readers = _readers(graph)
    for node in graph.nodes():
        if node.op.name != "matmul":
            continue
        users = readers[Value(node, 0)]
        adders = [u for u in users if u.op.name == "add"]
        if not adders or node.inputs[1].ndim != 2:
            continue  # a product without a bias is no miss
        bias = next((x for x in adders[0].inputs if x != Value(node, 0)), None)
        if bias is None or bias.shape == adders[0].types[0].shape:
            continue  # a residual, not a bias
        columns = node.inputs[1].shape[1]
        if len(users) > 1 or Value(node, 0) in graph.results:
            yield _miss(
                node, "matmul_bias_act", f"{len(users)} readers, or it is a result, so the product must be stored"
            )
        elif bias.ndim > 1:
            yield _miss(node, "matmul_bias_act", f"its bias has rank {bias.ndim}", "a bias of one axis")
        elif bias.shape != (columns,):
            yield _miss(
                node, "matmul_bias_act", f"its bias has shape {list(bias.shape)}, the product {columns} columns"
            )


def _missed_epilogue(graph: Graph, epilogues: tuple[str, ...]) -> Iterator[MissedFusion]:
    """Activations behind a fused product that the backend's kernel for it does not know."""
    readers = _readers(graph)
    for node in graph.nodes():
        made = Value(node, 0)
        if node.op.name != "fused_matmul_bias_act" or node.op.act is not None:  # type: ignore[attr-defined]
            continue
        users = readers[made]
        if len(users) != 1 or made in graph.results or users[0].op.name not in EPILOGUES:
            continue
        act = users[0].op.name
        known = ", ".join(epilogues)
        yield _miss(node, "matmul_bias_act", f"{act} is no epilogue of this backend", known and f"one of {known}")


def _missed_shared(graph: Graph) -> Iterator[MissedFusion]:
    """Products of one left side that could be one wide product."""
    families: dict[Value, list[Node]] = defaultdict(list)
    least, order = ShareMatMul().least_columns, graph.nodes()
    fixed = fixed_values(order)
    for node in order:
        if node.op.name == "matmul" and node.inputs[1].ndim == 2:
            columns = node.inputs[1].shape[1]
            if isinstance(columns, int) and columns >= least and node.inputs[0] not in fixed:
                families[node.inputs[0]].append(node)
    for family in families.values():
        if len(family) < 2:
            continue
        open_weights = sum(node.inputs[1] not in fixed for node in family)
        reason = f"{len(family)} products share their left side and stay apart"
        if open_weights:
            yield _miss(family[0], "shared_matmul", f"{reason}: {open_weights} of their weights are not parameters",
                        "declare the weights as parameters")  # fmt: skip
        else:
            yield _miss(family[0], "shared_matmul", f"{reason}: share_matmul did not join them")


def _missed_swiglu(graph: Graph, claims: frozenset[str]) -> Iterator[MissedFusion]:
    if "fused_swiglu" not in claims:
        return
    for node in graph.nodes():
        if node.op.name != "multiply":
            continue
        gates = [x for x in node.inputs if x.node.op.name == "silu" and x.node.inputs[0].node.op.name == "matmul"]
        ups = [x for x in node.inputs if x.node.op.name == "matmul"]
        if len(gates) == 1 and len(ups) == 1:
            gate, up = gates[0].node.inputs[0].node, ups[0].node
            if gate.inputs[0] != up.inputs[0]:
                yield _miss(node, "swiglu", "its two products have different left sides")
            else:
                yield _miss(
                    node, "swiglu", "a product or its weights have other readers, or weights that are not parameters"
                )


def _miss(node: Node, pattern: str, reason: str, hint: str = "") -> MissedFusion:
    label = f"{node.op.name} : {node.types[0]}"
    return MissedFusion(pattern, reason, label, node.origin.place, hint)


def missed_by_grouping(lir: Lir) -> Iterator[MissedFusion]:
    """Products whose only reader is an element-wise op that ended up in a kernel with nothing heavier than itself."""
    kernel_of = {id(n): s for s in lir.schedule for n in s.nodes}
    for cut in lir.cuts:
        if cut.consumer is None or not traits(cut.producer).contracts or "result of the graph" in cut.reason:
            continue
        home = kernel_of.get(id(cut.consumer))
        maker = kernel_of.get(id(cut.producer))
        if home is None or maker is None or home is maker or not cut.consumer.op.elementwise:
            continue
        if home.kernel is not None and not any(traits(n).reduces or traits(n).contracts for n in home.nodes):
            yield _miss(cut.producer, "epilogue", cut.reason)


def _contraction(step: Step) -> Node | None:
    return next((n for n in step.nodes if traits(n).contracts), None)
