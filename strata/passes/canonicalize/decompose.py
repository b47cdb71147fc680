"""Decompose ops that the backend does not claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.errors import SymbolError
from strata.mir import Graph, Op, Value, as_tuple, toposort
from strata.passes.base import Pass, PassContext, register, rewrite

ROUNDS = 16  # a composition may be made of compositions; no op nests deeper


@register
@dataclass(frozen=True)
class Decompose(Pass):
    """Expand compositions until only ops the backend takes, primitives, and those to keep (joined by +) are left."""

    keep: str = ""

    name: ClassVar[str] = "decompose"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        for _ in range(ROUNDS):
            if not any(self._expands(n.op, n.inputs, ctx) for n in toposort(graph.results)):
                break
            graph = rewrite(graph, lambda value, inputs: self._expand(value, inputs, ctx), self.name)
        return graph

    def _expand(self, value: Value, inputs: tuple[Value, ...], ctx: PassContext) -> Sequence[Value] | None:
        op = value.node.op
        if not self._expands(op, inputs, ctx):
            return None
        made = as_tuple(op.decompose(*inputs))
        for own, found in zip(value.node.outputs, made, strict=True):
            _check_sizes(op, own, found)
        return made

    def _expands(self, op: Op, inputs: tuple[Value, ...], ctx: PassContext) -> bool:
        return op.is_composition and not ctx.takes(op, [x.type for x in inputs]) and op.name not in self.keep.split("+")


def _check_sizes(op: Op, own: Value, made: Value) -> None:
    """An op with a number for a size may take a symbol that can be that number; what it is made of cannot."""
    if own.type == made.type or own.dtype is not made.dtype or own.ndim != made.ndim:
        return  # other types are found after the pass
    a, b = next((a, b) for a, b in zip(own.shape, made.shape, strict=True) if a != b)
    if isinstance(a, int) == isinstance(b, int):
        return  # two symbols: runs find out whether they are equal
    number, symbol = (b, a) if isinstance(b, int) else (a, b)
    raise SymbolError(
        f"{op.name}: the size {symbol} must be known to be {number}: it is {a} by the rule of the op, and {b} by the "
        f"ops that it is made of",
        code="S161", place=own.node.origin.place,
        fix=f"declare the size {number} in place of {symbol}",
    )  # fmt: skip
