"""Inputs of ops that stay in torch, in the strides that torch's tracing stated: its kernels may depend on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from strata.core import Dim, SymExpr, substitute, symbols
from strata.torch.kinds import TorchSizes
from strata.torch.symbols import SymbolNodes
from strata.torch.table import Unsupported


def lay_inputs(split: fx.GraphModule, is_ours: Callable[[fx.Node], bool]) -> None:
    """Put the strides right between our parts and torch's ops, and between the arguments of the call and these: what an
    earlier graph of ours gave is an argument of its backward pass."""
    graph = split.graph
    sizes, known = TorchSizes(), SymbolNodes(graph)
    laid: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        for x in node.all_input_nodes if _is_torchs(node, is_ours) else ():
            kept = x.meta.get("val")
            whole = x.args[0] if x.target is operator.getitem else x
            if not isinstance(kept, torch.Tensor) or kept.layout is not torch.strided:
                continue
            if not isinstance(whole, fx.Node) or not (whole.op == "placeholder" or is_ours(whole)):
                continue
            if x not in laid:
                try:
                    strides = sizes.shape(kept.stride())
                except Unsupported:
                    continue
                names = sorted({s for d in strides if isinstance(d, SymExpr) for s in symbols(d)})
                if any(name not in known for name in names):
                    continue
                at = [known.node(name) for name in names]
                name = f"laid_{len(laid)}"
                split.add_module(name, _Laid(strides, names))
                with graph.inserting_before(node):
                    laid[x] = graph.call_module(name, (x, *at))
                laid[x].meta["val"] = kept
            node.replace_input_with(x, laid[x])
        known.note(node)
        sizes.give(node.meta.get("val"))


def _is_torchs(node: fx.Node, is_ours: Callable[[fx.Node], bool]) -> bool:
    """Whether torch runs a node; one that writes to its arguments, or gives a size, gets them as they are."""
    if node.op == "call_module":
        return not is_ours(node)
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


class _Laid(torch.nn.Module):
    def __init__(self, strides: Sequence[Dim], names: Sequence[str]) -> None:
        super().__init__()
        self.strides, self.names = tuple(strides), tuple(names)

    def forward(self, x: Any, *sizes: Any) -> Any:
        if x is None:  # what puts ops with effects in order: a tensor only while torch traces
            return None
        if not self.names:
            return lay(x, self.strides)  # type: ignore[arg-type]
        binding = {name: int(n) for name, n in zip(self.names, sizes, strict=True)}
        return lay(x, tuple(substitute(d, binding) if isinstance(d, SymExpr) else d for d in self.strides))  # type: ignore[misc]


def lay(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these strides and the same elements: itself, where it has them."""
    if t.stride() == strides or not t.numel():
        return t
    if all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True)):
        return t.as_strided(t.shape, strides, t.storage_offset())
    once = t[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
    steps = [(s, n) for n, s in zip(once.shape, strides, strict=True) if n > 1]
    last = sum((n - 1) * s for s, n in steps)
    room = t.new_empty(max(last + 1, *(n * s for s, n in steps), 1))
    if _overlap(steps):  # elements that share memory are equal
        at = torch.arange(len(room), device=t.device).as_strided(once.shape, strides)
        room[at.reshape(-1)] = once.reshape(-1)
    else:
        room.as_strided(once.shape, strides).copy_(once)
    return room.as_strided(t.shape, strides)


def _overlap(steps: Sequence[tuple[int, int]]) -> bool:
    reach = 0
    for step, n in sorted(steps):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False
