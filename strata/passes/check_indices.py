"""Ids are checked before they are used: the setting `check_indices`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value, as_tuple
from strata.ops import CheckedIds, Indexed
from strata.passes.base import Pass, PassContext, register, rewrite


@register
@dataclass(frozen=True)
class CheckIndices(Pass):
    """Put `checked_ids` before every gather and scatter, so that an id out of range is an error, not clamped."""

    name: ClassVar[str] = "check_indices"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite(graph, self._checked, self.name)

    def _checked(self, out: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        op = out.node.op
        if not isinstance(op, Indexed) or isinstance(op, CheckedIds) or isinstance(inputs[1].node.op, CheckedIds):
            return None
        sizes = op.id_sizes(inputs[0].type, inputs[1].type)
        if not sizes:  # coordinates of length 0 name the whole
            return None
        wrap: bool = op.wrap  # type: ignore[attr-defined]  # a field of each of them, in its own place
        return as_tuple(op(inputs[0], CheckedIds(sizes, wrap, op.name)(inputs[1]), *inputs[2:]))
