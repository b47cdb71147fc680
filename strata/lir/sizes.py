"""Sizes that were taken on trust: where a symbolic size met another one, equality is checked when both are known.

Shape rules let a symbol meet a different size, since the symbol may turn out to be that size. Kernels read every
operand at the index of the result, so the sizes must really be equal when they run; a symbol that turns out to be 1
would have to be broadcast, which only a program for fixed sizes does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.core import Dim, Place, substitute
from strata.errors import SymbolError
from strata.mir import Graph, Node


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """Two sizes that an op needs to be equal."""

    op: str
    left: Dim
    right: Dim
    place: Place | None

    def run(self, binding: Mapping[str, int]) -> None:
        left, right = substitute(self.left, binding), substitute(self.right, binding)
        if left != right and isinstance(left, int) and isinstance(right, int):
            raise SymbolError(
                f"{self.op}: sizes {self.left} = {left} and {self.right} = {right} must be equal",
                code="S156",
                place=self.place,
            )


def size_checks(graph: Graph) -> tuple[SizeCheck, ...]:
    """What must hold of the sizes of a graph's symbols, beyond their bounds; nothing for a graph without symbols."""
    if not graph.symbols():
        return ()
    found: dict[tuple[Dim, Dim], SizeCheck] = {}
    for node in graph.nodes():
        for left, right in _pairs(node):
            if left != right and not (isinstance(left, int) and isinstance(right, int)):
                found.setdefault((left, right), SizeCheck(node.op.name, left, right, node.origin.place))
    return tuple(found.values())


def _pairs(node: Node) -> list[tuple[Dim, Dim]]:
    """Sizes of a node's operands beside those they must equal."""
    if node.op.name == "matmul":
        x, y = (v.shape for v in node.inputs)
        batch = node.types[0].shape[:-2]
        return [(x[-1], y[-2]), *_aligned(x[:-2], batch), *_aligned(y[:-2], batch)]
    if node.op.elementwise or node.op.name == "broadcast_to":
        out = node.types[0].shape
        return [pair for v in node.inputs for pair in _aligned(v.shape, out)]
    return []


def _aligned(shape: Sequence[Dim], out: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    tail = out[len(out) - len(shape) :]
    return [(d, o) for d, o in zip(shape, tail, strict=True) if d != 1]
