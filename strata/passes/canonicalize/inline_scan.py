"""Inline scans of one step, so that weights are packed ahead and the step fuses with its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.mir import Graph, Value, toposort
from strata.ops import ScanOp, reshape
from strata.passes.base import Pass, PassContext, register, rewrite


@register
@dataclass(frozen=True)
class InlineScan(Pass):
    """Put the body of a scan whose length is 1 in its place; scans inside of the body too."""

    name: ClassVar[str] = "inline_scan"
    seeks: ClassVar[frozenset[str]] = frozenset({"scan"})

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        while any(_is_single(n.op) for n in toposort(graph.results)):
            graph = rewrite(graph, _step, self.name)
        return graph


def _is_single(op: object) -> bool:
    return isinstance(op, ScanOp) and op.length == 1


def _step(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
    op = value.node.op
    if not isinstance(op, ScanOp) or not _is_single(op):
        return None
    first = op.num_carry + op.num_consts
    rows = [reshape(x, x.shape[1:]) for x in inputs[first:]]
    made = op.body.call(*inputs[:first], *rows)
    return [y if i < op.num_carry else reshape(y, (1, *y.shape)) for i, y in enumerate(made)]
