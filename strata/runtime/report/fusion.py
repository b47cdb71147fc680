"""FusionReport: what was fused, what was not, and why; a view of the plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from strata.arguments import public
from strata.core import Place, folded
from strata.errors import CompileError
from strata.lir import Lir, Step, traits
from strata.mir import Constant, Graph, Node, Value, fixed_values
from strata.passes import PassRecord, ShareMatMul

COUNTED = {
    "matmul": "matmul", "attention": "attention", "rope": "rope", "narrow": "slice", "silu": "silu", "mul": "multiply",
}  # fmt: skip
FUSED = {
    "fused_matmul_bias_act": "fused_matmul_bias_act", "fused_swiglu": "fused_swiglu",
    "fused_residual_ln": "fused_residual_layer_norm", "fused_residual_rms_norm": "fused_residual_rms_norm",
    "fused_attention_block": "fused_attention_block", "fused_transformer_layer": "fused_transformer_layer",
    "elementwise_region": "elementwise_region",
}  # fmt: skip


@public
@dataclass(frozen=True, slots=True)
class MissedFusion:
    """A pattern that could have been one kernel and is not."""

    pattern: str
    reason: str
    label: str
    place: Place | None = None
    hint: str = ""

    def __str__(self) -> str:
        where = f" at {self.place.describe()}" if self.place is not None else ""
        hint = f" (try: {self.hint})" if self.hint else ""
        return f"{self.pattern}: {self.label}{where}: {self.reason}{hint}"


@public
class FusionReport:
    """Counts of ops before and after the passes, of patterns that kernels compute, and of those that were missed."""

    def __init__(self, before: Graph, after: Graph, passes: tuple[PassRecord, ...], plan: Callable[[], Lir]) -> None:
        self._before, self._after, self._plan = before, after, plan
        self.passes = passes

    def __getattr__(self, name: str) -> int:
        """`matmul_before`, `matmul_after`, and the counts of the plan: `attention`, `fused_swiglu`, …"""
        base, _, when = name.rpartition("_")
        if when in ("before", "after") and base in COUNTED:
            return (self.before if when == "before" else self.after)[COUNTED[base]]
        if name in COUNTED:
            return self.after[COUNTED[name]]
        if name in FUSED:
            return self.fused[FUSED[name]]
        raise AttributeError(name)

    @cached_property
    def before(self) -> Counter[str]:
        return Counter(n.op.name for n in self._before.nodes())

    @cached_property
    def after(self) -> Counter[str]:
        return Counter(n.op.name for n in self._after.nodes())

    @property
    def nodes_before(self) -> int:
        return self.before.total()

    @property
    def nodes_after(self) -> int:
        """Inputs, parameters and steps of the plan: what a kernel computes is one node."""
        return self.after["input"] + self.after["param"] + len(self.lir.schedule)

    @cached_property
    def lir(self) -> Lir:
        """The plan that the report is about."""
        return self._plan()

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        """Those of bodies of loops too."""
        return tuple(step for _, step in self.lir.walk())

    @property
    def kernels(self) -> int:
        """Steps of each run."""
        return sum(s.phase != "prologue" for s in self.lir.schedule)

    @cached_property
    def fused_kernels(self) -> tuple[str, ...]:
        """Labels of kernels that compute several ops."""
        return tuple(s.label for s in self._steps if _is_kernel(s) and len(s.nodes) > 1)

    @cached_property
    def fused_products(self) -> int:
        """Matmuls with something after or before them in the same kernel."""
        return sum(_is_kernel(s) and len(s.nodes) > 1 and any(map(_contracts, s.nodes)) for s in self._steps)

    @cached_property
    def fused(self) -> Counter[str]:
        """How often a kernel computes which pattern, under the name of the op that stands for it."""
        named = Counter(n.op.name for s in self._steps for n in s.nodes if n.op.name in FUSED.values())
        return named + Counter(p for s in self._steps if _is_kernel(s) for p in _patterns(s))

    @cached_property
    def missed(self) -> tuple[MissedFusion, ...]:
        plans = [self.lir, *(body for s in self._steps for body in s.bodies)]
        found = [_Misses(lir) for lir in plans]
        return tuple(miss for one in found for miss in (*one.epilogues(), *one.swiglu(), *one.shared()))

    def missed_matmul_bias_act(self) -> int:
        return sum(m.pattern == "matmul_bias_act" for m in self.missed)

    def missed_swiglu(self) -> int:
        return sum(m.pattern == "swiglu" for m in self.missed)

    def missed_shared_matmul(self) -> int:
        return sum(m.pattern == "shared_matmul" for m in self.missed)

    def summary_line(self) -> str:
        return (
            f"nodes={self.nodes_before}→{self.nodes_after} matmul={self.matmul_before}→{self.matmul_after}"
            f" fused_mm_act={self.fused_matmul_bias_act} fused_swiglu={self.fused_swiglu}"
            f" elementwise_region={self.elementwise_region} missed_mm_act={self.missed_matmul_bias_act()}"
            f" missed_swiglu={self.missed_swiglu()} missed_shared_mm={self.missed_shared_matmul()}"
            f" kernels={self.kernels}"
        )

    def __repr__(self) -> str:
        return f"<FusionReport {self.summary_line()}>"

    def _repr_html_(self) -> str:
        return folded(self.summary_line(), str(self))

    def __str__(self) -> str:
        lines = [self.summary_line()]
        lines += [
            f"  pass {p.name}: {p.before} → {p.after} nodes, {p.seconds * 1e3:.1f} ms" for p in self.passes if p.changed
        ]
        return "\n".join([*lines, *(f"  missed {m}" for m in self.missed)])

    def require_clean(self) -> None:
        """Raise unless nothing was missed."""
        if self.missed:
            raise CompileError(
                f"{len(self.missed)} fusions were missed", code="C152", place=self.missed[0].place,
                operands=[str(m) for m in self.missed],
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------- what kernels compute


def _is_kernel(step: Step) -> bool:
    return step.kernel is not None or step.is_module


def _contracts(node: Node) -> bool:
    return traits(node).contracts


def _is_light(node: Node) -> bool:
    """Whether an op computes, or moves, one element at a time."""
    return node.op.elementwise or traits(node).moves


def _patterns(step: Step) -> Iterator[str]:
    """The patterns that a kernel computes, by the names of the ops that stand for them."""
    inside = {id(n) for n in step.nodes}
    for node in step.nodes:
        if node.op.name == "add" and any(id(x.node) in inside for x in _biased(node)):
            yield "fused_matmul_bias_act"
        elif (gate := _gate(node)) is not None and id(gate) in inside:
            yield "fused_swiglu"
        elif node.op.name in ("rsqrt", "layer_norm", "rms_norm") and (norm := _residual_norm(node, inside)):
            yield norm
    if sum(n.op.elementwise for n in step.nodes) > 1 and all(map(_is_light, step.nodes)):
        yield "elementwise_region"


def _biased(add: Node) -> list[Value]:
    """The matmul whose bias a node adds, if it does."""
    for x, bias in (add.inputs, add.inputs[::-1]):
        if x.node.op.name == "matmul" and bias.shape != add.types[0].shape and x.shape == add.types[0].shape:
            return [x]
    return []


def _gate(node: Node) -> Node | None:
    """The silu of up · silu(gate), where both come from matmuls, or are slices of one value."""
    if node.op.name != "multiply":
        return None
    for up, gate in (node.inputs, node.inputs[::-1]):
        if gate.node.op.name == "silu":
            sources = [up.node, gate.node.inputs[0].node]
            if all(n.op.name == "matmul" for n in sources):
                return gate.node
            if all(n.op.name == "slice" for n in sources) and sources[0].inputs[0].same_as(sources[1].inputs[0]):
                return gate.node
    return None


def _residual_norm(node: Node, inside: set[int]) -> str | None:
    """The norm that ends in a node, if what it normalises is a sum of two values computed in the same kernel."""
    names: set[str] = {node.op.name}
    residual = False
    stack, seen = [node], {id(node)}
    while stack:
        for x in stack.pop().inputs:
            if id(x.node) not in inside or id(x.node) in seen:
                continue
            seen.add(id(x.node))
            if x.node.op.name == "add" and not any(
                y.shape != x.shape or isinstance(y.node.op, Constant) for y in x.node.inputs
            ):
                residual = residual or x.ndim > 0
            elif not _contracts(x.node):
                stack.append(x.node)
                names.add(x.node.op.name)
    if not residual or not names & {"reduce_sum", "layer_norm", "rms_norm"}:
        return None
    centred = "subtract" in names or "layer_norm" in names
    return "fused_residual_layer_norm" if centred else "fused_residual_rms_norm"


# ------------------------------------------------------------------------------------------------------ what was missed


class _Misses:
    """Patterns of a plan that are split over several steps."""

    def __init__(self, lir: Lir) -> None:
        self.lir = lir
        self.order = lir.graph.nodes()
        self.reasons = {id(c.producer): c.reason for c in reversed(lir.cuts)}
        self.homes: dict[int, list[Step]] = defaultdict(list)
        for step in lir.schedule:
            for node in step.nodes:
                self.homes[id(node)].append(step)
        self.readers: dict[Value, list[Node]] = defaultdict(list)
        for node in self.order:
            for x in dict.fromkeys(node.inputs):
                self.readers[x].append(node)

    def epilogues(self) -> Iterator[MissedFusion]:
        """Matmuls, with what is after them in their kernel, that an op reads which could have been part of it."""
        for step in self.lir.schedule:
            products = filter(_contracts, step.nodes) if _is_kernel(step) else ()
            yield from (miss for product in products for miss in self._behind(step, product))

    def _behind(self, step: Step, product: Node) -> Iterator[MissedFusion]:
        behind = set(product.outputs)
        for node in step.nodes:
            if node.op.elementwise and behind.intersection(node.inputs):
                behind.update(node.outputs)
            reader = self._left_apart(node) if behind.issuperset(node.outputs) else None
            if reader is not None:
                is_known = product.op.name == "matmul" and (len(reader.inputs) == 1 or reader.op.name == "add")
                yield _miss(product, "matmul_bias_act" if is_known else "epilogue", self._reason(node, reader))

    def _left_apart(self, node: Node) -> Node | None:
        """An element-wise reader of a value that runs in a kernel with nothing heavier than itself."""
        value = Value(node, 0)
        for reader in self.readers[value]:
            if not reader.op.elementwise or reader.types[0].shape != value.shape:
                continue
            for home in self.homes[id(reader)]:
                if not any(n is node for n in home.nodes) and all(map(_is_light, home.nodes)):
                    return reader
        return None

    def _reason(self, node: Node, reader: Node) -> str:
        return f"{reader.op.name} is another kernel: {self.reasons.get(id(node), f'{node.op.name} is stored')}"

    def swiglu(self) -> Iterator[MissedFusion]:
        for node in self.order:
            gate = _gate(node)
            if gate is None:
                continue
            up = next(x.node for x in node.inputs if x.node is not gate)
            sources = [up, gate.inputs[0].node]
            if up.op.name == "slice":
                (product,) = {id(n.inputs[0].node): n.inputs[0].node for n in sources}.values()
                apart = [s for s in self.homes[id(node)] if not any(n is product for n in s.nodes)]
                if product.op.name == "matmul" and apart:
                    yield _miss(node, "swiglu", self._reason(product, node))
            elif sources[0].inputs[0] != sources[1].inputs[0]:
                yield _miss(node, "swiglu", "its two matmuls have different left sides")
            else:
                yield _miss(
                    node, "swiglu", "a matmul or its weights have other readers, or weights that are not parameters"
                )

    def shared(self) -> Iterator[MissedFusion]:
        """Matmuls of one left side that could be one wide matmul."""
        families: dict[Value, list[Node]] = defaultdict(list)
        least, fixed = ShareMatMul().least_columns, fixed_values(self.order)
        for node in self.order:
            if node.op.name == "matmul" and node.inputs[1].ndim == 2:
                columns = node.inputs[1].shape[1]
                if isinstance(columns, int) and columns >= least and node.inputs[0] not in fixed:
                    families[node.inputs[0]].append(node)
        for family in families.values():
            if len(family) < 2:
                continue
            open_weights = sum(node.inputs[1] not in fixed for node in family)
            reason = f"{len(family)} matmuls share their left side and stay apart"
            if open_weights:
                yield _miss(family[0], "shared_matmul", f"{reason}: {open_weights} of their weights are not parameters",
                            "declare the weights as parameters")  # fmt: skip
            else:
                yield _miss(family[0], "shared_matmul", f"{reason}: share_matmul did not join them")


def _miss(node: Node, pattern: str, reason: str, hint: str = "") -> MissedFusion:
    label = f"{node.op.name} : {node.types[0]}"
    return MissedFusion(pattern, reason, label, node.origin.place, hint)
