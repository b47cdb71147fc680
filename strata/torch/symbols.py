"""Symbols of torch's sizes in an FX graph: which node carries each, and parts of a graph that lack one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from strata.torch.kinds import is_ragged


class SymbolNodes:
    """What carries each symbol, of the nodes that were noted so far."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sources: dict[str, tuple[fx.Node, int]] = {}  # of a symbol: a node, and its axis (-1: the node itself)
        self.made: dict[str, fx.Node] = {}
        self.first = next((n for n in graph.nodes if n.op != "placeholder"), None)

    def note(self, node: fx.Node) -> None:
        """Note a node that has run by the time that a later one asks."""
        for name, axis in _carried(node.meta.get("val")):
            self.sources.setdefault(name, (node, axis))

    def __contains__(self, name: str) -> bool:
        return name in self.sources

    def node(self, name: str) -> fx.Node:
        """A node that gives the value of a symbol."""
        if name not in self.made:
            source, axis = self.sources[name]
            self.made[name] = source if axis < 0 else self._size(source, axis)
        return self.made[name]

    def _size(self, source: fx.Node, axis: int) -> fx.Node:
        assert self.first is not None  # the output, if there is no other
        before = self.first if source.op == "placeholder" else source.next
        with self.graph.inserting_before(before):
            made = self.graph.call_function(torch.ops.aten.sym_size.int, (source, axis))
        made.meta["val"] = source.meta["val"].shape[axis]
        return made


def give_symbols(node: fx.Node, part: fx.GraphModule, known: SymbolNodes) -> list[str]:
    """Give a part, which a node calls, the symbols of its sizes that none of its arguments carries; those that nothing
    carries are returned.

    An argument of size `2*s0 + 1` says nothing of `s0`, and what the part computes may have that size.
    """
    arguments = part.graph.find_nodes(op="placeholder")
    carried = {name for x in arguments for name, _ in _carried(x.meta.get("val"))}
    asked = {str(s): n for x in part.graph.nodes for n in _sizes(x.meta.get("val")) for s in n.node.expr.free_symbols}
    missing = sorted(asked.keys() - carried)
    for name in missing:
        if name not in known:
            continue
        given = known.node(name)
        with part.graph.inserting_after(arguments[-1]):
            arguments.append(part.graph.placeholder(f"size_{name}"))
        arguments[-1].meta["val"] = given.meta["val"]
        node.args = (*node.args, given)
    return [name for name in missing if name not in known]


def _carried(kept: Any) -> Iterator[tuple[str, int]]:
    """Symbols that a value has as they are, and along which axis."""
    for axis, n in enumerate(kept.shape) if isinstance(kept, torch.Tensor) else ((-1, kept),):
        if isinstance(n, torch.SymInt) and not is_ragged(n) and n.node.expr.is_Symbol:
            yield str(n.node.expr), axis


def _sizes(kept: Any) -> Iterator[torch.SymInt]:
    """Sizes of a value that are symbolic."""
    if isinstance(kept, (tuple, list)):
        for k in kept:
            yield from _sizes(k)
        return
    for n in kept.shape if isinstance(kept, torch.Tensor) else (kept,):
        if isinstance(n, torch.SymInt) and not is_ragged(n):
            yield n
