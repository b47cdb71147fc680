"""Insert bounds checks of ids: always for experts, pages and axes that may be empty, elsewhere on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value, as_tuple
from strata.ops import CheckedIds, CustomKernel, EnsureIds, Indexed, PagedAttention, PagedUpdate, may_be_empty
from strata.passes.base import Pass, PassContext, register, rewrite


@register
@dataclass(frozen=True)
class CheckIndices(Pass):
    """Put `checked_ids` before every gather and scatter, and before what a user's kernel reads at computed places, so
    that an id out of range is an error, not clamped; with `every=false` only before ops that always check."""

    every: bool = True
    name: ClassVar[str] = "check_indices"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite(graph, self._checked, self.name)

    def _checked(self, out: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        op = out.node.op
        if isinstance(op, CustomKernel):
            return op.with_checks(*inputs) if self.every else None
        if isinstance(op, PagedAttention | PagedUpdate):
            return op.with_checks(*inputs)
        if not isinstance(op, Indexed) or isinstance(op, CheckedIds):
            return None
        ids = inputs[op.ids_at]
        if isinstance(ids.node.op, CheckedIds | EnsureIds):
            return None
        sizes = op.id_sizes(*(x.type for x in inputs))
        kind = op.ids_are if self.every or op.ids_are == "expert" else "empty"
        needed = kind != "empty" or (op.ids_read and any(map(may_be_empty, sizes)))
        if not sizes or not needed or ids.type.size == 0:  # coordinates of length 0 name the whole
            return None
        checked = CheckedIds(sizes, bool(getattr(op, "wrap", False)), op.name, kind)(ids)
        return as_tuple(op(*inputs[: op.ids_at], checked, *inputs[op.ids_at + 1 :]))
