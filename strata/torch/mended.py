"""Functions of torch that its own tracing takes apart into something else, in ops that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from strata.torch.aten.losses import MEAN, NONE


def multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """The labels of a row end at its first -1; torch's decomposition counts class 0 for each of the rest."""
    counts = (target < 0).cumsum(-1) == 0
    ids = torch.where(counts, target, 0)
    is_target = torch.zeros_like(target).scatter_add(-1, ids, counts.to(target.dtype)) > 0
    short = (1 - x.gather(-1, ids).unsqueeze(-1) + x.unsqueeze(-2)).clamp_min(0)
    pairs = counts.unsqueeze(-1) & ~is_target.unsqueeze(-2)
    loss = torch.where(pairs, short, 0).sum((-1, -2)) / x.shape[-1]
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


def _functional(
    x: torch.Tensor, target: torch.Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """As `torch.nn.functional` has it."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    return multilabel_margin_loss(x, target, torch.nn._reduction.get_enum(reduction))


MENDED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.multilabel_margin_loss: _functional,
    torch.ops.aten.multilabel_margin_loss.default: multilabel_margin_loss,
}


def mend(gm: fx.GraphModule) -> None:
    """Put the functions of the table in place of torch's, in a graph and in those inside it."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            found = [node for node in part.graph.nodes if node.op == "call_function" and node.target in MENDED]
            for node in found:
                node.target = MENDED[node.target]
            if found:
                part.recompile()
