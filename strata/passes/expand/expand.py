"""Expand ops that the backend has no kernel for into ops that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strata.errors import MissingRuleError
from strata.mir import Constant, Graph, Leaf, Node, Op, Value, toposort
from strata.passes.base import Pass, PassContext, register, rewrite
from strata.passes.expand import bounds, factorize, fourier, jacobi, recurrences  # noqa: F401 - they fill the table
from strata.passes.expand.rules import EXPANSIONS, LOOPS

ROUNDS = 8  # expansions use ops that have expansions


def expanded(op: Op, *inputs: Value) -> tuple[Value, ...]:
    """An op of known sizes that has an expansion, built from others."""
    build = EXPANSIONS.get(op.name)
    made = None if build is None else build(op, *inputs)
    if made is None:
        types = ", ".join(str(x.type) for x in inputs)
        raise MissingRuleError(f"{op.name} of {types} has no expansion into other ops", code="R201")
    return tuple(made)


@register
@dataclass(frozen=True)
class Expand(Pass):
    """Build transforms, recurrences and factorisations from other ops, for devices that would leave them to the host.

    Ops that come out as loops over graphs are left alone where loops run on the host themselves, and so is an op of
    which a part would run there: one step on the host is better than many.
    """

    loops: bool = True

    name: ClassVar[str] = "expand"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        def change(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            op = value.node.op
            build = EXPANSIONS.get(op.name)
            if build is None or (op.name in LOOPS and not self.loops) or ctx.takes(op, [x.type for x in inputs]):
                return None
            made = build(op, *inputs)
            return list(made) if made is not None and self._run_there(made, inputs, ctx) else None

        for _ in range(ROUNDS):
            if not any(node.op.name in EXPANSIONS for node in toposort(graph.results)):
                break
            made = rewrite(graph, change, self.name)
            if made is graph:
                break
            graph = made
        return graph

    def _run_there(self, made: Sequence[Value], inputs: Sequence[Value], ctx: PassContext) -> bool:
        """Whether the backend takes all that was built from some inputs, as it is or once it is taken apart."""
        given, left, seen = set(inputs), list(made), set[Value]()
        while left:
            value = left.pop()
            if value in given or value in seen:
                continue
            seen.add(value)
            if not self._is_taken(value.node, ctx):
                return False
            left += value.node.inputs
        return True

    def _is_taken(self, node: Node, ctx: PassContext) -> bool:
        op = node.op
        if isinstance(op, (Leaf, Constant)) or op.is_composition or op.name in EXPANSIONS:
            return True
        if self.loops and op.nested():
            return all(self._run_there(nested.graph.results, (), ctx) for nested in op.nested())
        return ctx.takes(op, [x.type for x in node.inputs])
