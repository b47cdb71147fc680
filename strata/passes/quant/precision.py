"""Mixed precision: compute in a narrower float type where a policy allows it.

Only f32 ops change: integers, booleans, f64, complex numbers, ids, and the types of inputs and results stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.core import DType, as_dtype, bf16, f16, f32
from strata.errors import OptionError, StrataError
from strata.mir import Constant, Graph, Leaf, Node, Value, as_tuple, near, origin_of, toposort
from strata.ops import cast
from strata.passes.base import Pass, PassContext, register, with_results

CATEGORIES = ("compute", "reduction", "elementwise", "data")
POLICIES: dict[str, dict[str, DType]] = {
    "f32": {},
    "f16": dict.fromkeys(CATEGORIES, f16),
    "bf16": dict.fromkeys(CATEGORIES, bf16),
    "mixed_f16": dict.fromkeys(CATEGORIES, f16),  # reductions add in f32 inside their kernels
    "mixed_f16_conservative": {"compute": f16, "elementwise": f16, "data": f16},
    "mixed_bf16": dict.fromkeys(CATEGORIES, bf16),
}
# Families of ops by the module that defines them; the rest, element-wise ops aside, computes.
_FAMILIES = {
    "reduction": ("norm", "norm_gradients", "softmax", "reduce", "cumulative", "losses", "sampling", "sequence",
                  "moving_window"),
    "data": ("movement", "creation", "indexing", "scattering", "sorting", "subscript", "arrange", "rope", "pool",
             "resize", "grid", "branching", "looping", "scanning", "logic", "remat"),
}  # fmt: skip
_CATEGORY_OF_FAMILY = {family: category for category, families in _FAMILIES.items() for family in families}


def category(node: Node) -> str:
    """compute, reduction, elementwise or data."""
    if node.op.elementwise:
        return "elementwise"
    return _CATEGORY_OF_FAMILY.get(type(node.op).__module__.rpartition(".")[2], "compute")


def parse_policy(text: str) -> dict[str, DType]:
    """A policy by name, or `compute=f16+reduction=f32`: what is not named stays f32."""
    if text in POLICIES:
        return POLICIES[text]
    if "=" not in text:
        raise OptionError(
            f"no precision policy is named {text!r}; known: {', '.join(POLICIES)}{near(text, POLICIES)}", code="O142"
        )
    chosen: dict[str, DType] = {}
    for part in text.split("+"):
        name, _, dtype = part.partition("=")
        if name not in CATEGORIES:
            raise OptionError(
                f"precision: {name!r} is not a category; known: {', '.join(CATEGORIES)}{near(name, CATEGORIES)}",
                code="O142",
            )
        chosen[name] = as_dtype(dtype)
        if chosen[name] not in (f16, bf16, f32):
            raise OptionError(
                f"precision: {name} cannot compute in {chosen[name]}; f16, bf16 and f32 are possible", code="O142"
            )
    return {name: dtype for name, dtype in chosen.items() if dtype is not f32}


@register
@dataclass(frozen=True)
class Precision(Pass):
    """Retype f32 ops by category; inputs are cast once for each type, results are cast back."""

    policy: str = "mixed_f16"

    name: ClassVar[str] = "precision"

    def __post_init__(self) -> None:
        parse_policy(self.policy)

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        chosen = parse_policy(self.policy)
        if not chosen:
            return graph
        table: dict[Value, Value] = {}
        for node in toposort(graph.results):
            if isinstance(node.op, (Leaf, Constant)):
                continue
            with origin_of(node, made_by=self.name):
                outs = _retyped(node, [table.get(x, x) for x in node.inputs], chosen.get(category(node), f32), ctx)
            table.update(zip(node.outputs, outs, strict=True))
        return with_results(graph, [_as(table.get(x, x), x.dtype) for x in graph.results])


def _retyped(node: Node, inputs: Sequence[Value], wanted: DType, ctx: PassContext) -> Sequence[Value]:
    """The node in the wanted type; in its own where it cannot have it, or only its own has a kernel for the op."""
    if wanted is not f32 and is_eligible(node):
        narrow = [_as(x, wanted) if old.dtype is f32 else x for x, old in zip(inputs, node.inputs, strict=True)]
        try:
            outs: Sequence[Value] = as_tuple(node.op(*narrow))
        except StrataError:  # an op that needs f32
            outs = ()
        expected = [t.with_dtype(wanted) if t.dtype is f32 else t for t in node.types]
        whole = node.op.is_composition and ctx.takes(node.op, [x.type for x in node.inputs])
        if [x.type for x in outs] == expected and (not whole or ctx.takes(node.op, [x.type for x in narrow])):
            return outs
    return as_tuple(node.op(*(_as(x, old.dtype) for x, old in zip(inputs, node.inputs, strict=True))))


def is_eligible(node: Node) -> bool:
    """Whether all floats of a node are f32, and its types follow from its inputs alone."""
    floats = [t for t in (*node.types, *(x.type for x in node.inputs)) if t.dtype.is_inexact]
    reads_float = any(x.dtype is f32 for x in node.inputs)
    says_type = any(isinstance(v, DType) for v in node.op.static_fields().values())
    holds_graph = any(isinstance(v, Graph) for v in node.op.static_fields().values())
    return reads_float and bool(floats) and all(t.dtype is f32 for t in floats) and not says_type and not holds_graph


def _as(x: Value, dtype: DType) -> Value:
    """x in a type; equal casts of one value are one node."""
    return x if x.dtype is dtype else cast(x, dtype)
