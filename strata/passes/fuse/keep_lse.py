"""Let attention keep the logarithms of its rows' sums where a backward pass of the same graph reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Node, Value
from strata.ops import Attention, AttentionBackward, AttentionLse
from strata.passes.base import Pass, PassContext, register, rewrite


@register
@dataclass(frozen=True)
class KeepLse(Pass):
    """Attention and its backward over the same inputs: the first leaves what the second would work out again."""

    name: ClassVar[str] = "keep_lse"
    seeks: ClassVar[frozenset[str]] = frozenset({"attention_backward"})

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        nodes = graph.nodes()
        forward = {(n.op, n.inputs): n for n in nodes if isinstance(n.op, Attention)}
        pairs: dict[Node, Node] = {}  # backward, and its forward
        for node in nodes:
            if isinstance(node.op, AttentionBackward) and not node.op.has_lse:
                twin = forward.get(_forward_of(node))
                if twin is not None and _is_taken(node, twin, ctx):
                    pairs[node] = twin
        if not pairs:
            return graph
        kept = set(pairs.values())

        def change(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            node = value.node
            if node in kept:
                return [AttentionLse(**node.op.static_fields())(*inputs)[0]]
            if node in pairs:
                saved = AttentionLse(**pairs[node].op.static_fields())(*inputs[:3], *inputs[4:])
                op = AttentionBackward(**node.op.static_fields() | {"has_lse": True})
                return op(*inputs[:4], *saved, *inputs[4:])
            return None

        return rewrite(graph, change, self.name)


def _forward_of(node: Node) -> tuple[Attention, tuple[Value, ...]]:
    fields = {name: field for name, field in node.op.static_fields().items() if name != "has_lse"}
    return Attention(**fields), (*node.inputs[:3], *node.inputs[4:])


def _is_taken(node: Node, twin: Node, ctx: PassContext) -> bool:
    """Whether the backend has kernels for both."""
    first = AttentionLse(**twin.op.static_fields())
    second = AttentionBackward(**node.op.static_fields() | {"has_lse": True})
    types = [x.type for x in twin.inputs]
    made = first.infer(*types)
    grown = [x.type for x in node.inputs]
    return ctx.takes(first, types) and ctx.takes(second, [*grown[:4], *made, *grown[4:]])
