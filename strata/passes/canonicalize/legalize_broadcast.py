"""Make broadcasts explicit for backends that cannot index all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value
from strata.ops import broadcast_to
from strata.passes.base import Pass, PassContext, register, rewrite


@register
@dataclass(frozen=True)
class LegalizeBroadcast(Pass):
    """Insert a broadcast where an operand of an element-wise op is not a clean trailing part of the result."""

    name: ClassVar[str] = "legalize_broadcast"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite(graph, self._spread, self.name)

    def _spread(self, value: Value, inputs: tuple[Value, ...]) -> list[Value] | None:
        node = value.node
        if not node.op.elementwise or len(inputs) < 2 or len(node.types) != 1:
            return None
        if all(is_trailing(x, value) for x in inputs):
            return None
        return [node.op(*(x if is_trailing(x, value) else broadcast_to(x, value.shape) for x in inputs))]


def is_trailing(x: Value, out: Value) -> bool:
    """Whether x is one element, or has exactly the last sizes of the result."""
    return x.type.size == 1 or x.shape == out.shape[out.ndim - x.ndim :]
