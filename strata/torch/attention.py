"""What attention's backward pass keeps of its forward pass: neither its output, nor its sums, nor the random state.

Strata's derivative recomputes what it needs, so the partition need not keep them. Torch's own backward pass does need
them; if the op stays in torch after all, it gets them from a second forward pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_QUERY = 1  # the place of the query among the arguments of each backward op


def _efficient(ct: Any, q: Any, k: Any, v: Any, bias: Any, y: Any, lse: Any, seed: Any, offset: Any,
               dropout: Any, wanted: Any, causal: Any = False) -> tuple[Any, ...]:  # fmt: skip
    return q, k, v, bias, True, dropout, causal


def _flash(ct: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, starts_q: Any, starts_k: Any, max_q: Any, max_k: Any,
           dropout: Any, causal: Any, *state: Any) -> tuple[Any, ...]:  # fmt: skip
    return q, k, v, dropout, causal


def _cudnn(ct: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, seed: Any, offset: Any, bias: Any, starts_q: Any,
           starts_k: Any, max_q: Any, max_k: Any, dropout: Any, causal: Any) -> tuple[Any, ...]:  # fmt: skip
    return q, k, v, bias, True, dropout, causal


def _host(ct: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, dropout: Any, causal: Any) -> tuple[Any, ...]:
    return q, k, v, dropout, causal


# Of each backward op: its forward op, that one's arguments, where the dropout is, and which result goes to which place.
_BACKWARD: dict[Any, tuple[Any, Any, int, dict[int, int]]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default, _host, 6, {4: 0, 5: 1},
    ),
    _ATEN._scaled_dot_product_flash_attention_backward.default: (
        _ATEN._scaled_dot_product_flash_attention.default, _flash, 10, {4: 0, 5: 1, 12: 6, 13: 7},
    ),
    _ATEN._scaled_dot_product_efficient_attention_backward.default: (
        _ATEN._scaled_dot_product_efficient_attention.default, _efficient, 9, {5: 0, 6: 1, 7: 2, 8: 3},
    ),
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: (
        _ATEN._scaled_dot_product_cudnn_attention.default, _cudnn, 13, {4: 0, 5: 1, 6: 6, 7: 7},
    ),
}  # fmt: skip


def forget(node: fx.Node) -> None:
    """Let a backward op ask for nothing that the forward pass made: the query stands in those places."""
    if node.op != "call_function" or node.target not in _BACKWARD:
        return
    _, _, dropout, places = _BACKWARD[node.target]
    if node.args[dropout] == 0 and all(isinstance(node.args[at], fx.Node) for at in places):
        for at in places:
            node.update_arg(at, node.args[_QUERY])


def remember(node: fx.Node) -> list[fx.Node]:
    """Give a backward op that torch is to run what `forget` took; the nodes that make it."""
    if node.op != "call_function" or node.target not in _BACKWARD:
        return []
    forward, arguments, _, places = _BACKWARD[node.target]
    if any(node.args[at] is not node.args[_QUERY] for at in places):
        return []
    graph = node.graph
    with graph.inserting_before(node):
        again = graph.call_function(forward, arguments(*node.args), dict(node.kwargs))
        parts = [graph.call_function(operator.getitem, (again, i)) for i in places.values()]
    for made in (again, *parts):
        made.meta.update({k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")})
    for at, part in zip(places, parts, strict=True):
        node.update_arg(at, part)
    return [again, *parts]
