"""Sizes that were taken on trust: where a symbolic size met another one, equality is checked when both are known.

Shape rules let a symbol meet a different size, since the symbol may turn out to be that size. Kernels read every
operand at the index of the result, so the sizes must really be equal when they run. A symbol that turns out to be 1 is
broadcast, which takes another program: one where it is the number 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.core import Dim, Place, substitute, symbols
from strata.errors import SymbolError
from strata.mir import Graph, Node


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """Two sizes that an op needs to be equal."""

    op: str
    left: Dim
    right: Dim
    place: Place | None
    spreads: bool = False  # the left one may be 1: then it is broadcast

    def run(self, binding: Mapping[str, int]) -> dict[str, int]:
        """The symbols that must be numbers here, since an operand is 1 and broadcast."""
        left, right = substitute(self.left, binding), substitute(self.right, binding)
        if left == right or not (isinstance(left, int) and isinstance(right, int)):
            return {}
        if self.spreads and left == 1:
            return {name: binding[name] for name in symbols(self.left)}
        raise SymbolError(self._message(left, right), code="S156", place=self.place)

    def refused(self, binding: Mapping[str, int]) -> SymbolError:
        """The error where an operand cannot be broadcast."""
        left, right = substitute(self.left, binding), substitute(self.right, binding)
        return SymbolError(self._message(left, right), code="S156", place=self.place)

    def _message(self, left: Dim, right: Dim) -> str:
        return f"{self.op}: sizes {self.left} = {left} and {self.right} = {right} must be equal"


class Spread(Exception):  # noqa: N818
    """Some operands are 1 and broadcast; `ones` are the symbols that make them so, `error` what to say otherwise."""

    def __init__(self, ones: Mapping[str, int], error: SymbolError) -> None:
        super().__init__(str(error))
        self.ones, self.error = dict(ones), error


def check_sizes(checks: Sequence[SizeCheck], binding: Mapping[str, int]) -> None:
    """Raises where sizes differ, or Spread where that only takes another program."""
    ones: dict[str, int] = {}
    first: SizeCheck | None = None
    for check in checks:
        found = check.run(binding)
        if found:
            first = first or check
            ones |= found
    if first is not None:
        raise Spread(ones, first.refused(binding))


def size_checks(graph: Graph) -> tuple[SizeCheck, ...]:
    """What must hold of the sizes of a graph's symbols, beyond their bounds; nothing for a graph without symbols."""
    if not graph.symbols():
        return ()
    found: dict[tuple[Dim, Dim, bool], SizeCheck] = {}
    for node in graph.nodes():
        for left, right, spreads in _pairs(node):
            if left != right and not (isinstance(left, int) and isinstance(right, int)):
                key = left, right, spreads
                found.setdefault(key, SizeCheck(node.op.name, left, right, node.origin.place, spreads))
    return tuple(found.values())


def _pairs(node: Node) -> list[tuple[Dim, Dim, bool]]:
    """Sizes of a node's operands beside those they must equal, and whether 1 will do."""
    if node.op.name == "matmul":
        x, y = (v.shape for v in node.inputs)
        batch = node.types[0].shape[:-2]
        return [(x[-1], y[-2], False), *_aligned(x[:-2], batch), *_aligned(y[:-2], batch)]
    if node.op.elementwise or node.op.name == "broadcast_to":
        out = node.types[0].shape
        return [pair for v in node.inputs for pair in _aligned(v.shape, out)]
    return []


def _aligned(shape: Sequence[Dim], out: Sequence[Dim]) -> list[tuple[Dim, Dim, bool]]:
    tail = out[len(out) - len(shape) :]
    return [(d, o, True) for d, o in zip(shape, tail, strict=True) if d != 1]
