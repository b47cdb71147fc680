"""Losses."""

from __future__ import annotations

from typing import Any

from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

REDUCTIONS = ("none", "mean", "sum")


@reads("NegativeLogLikelihoodLoss")
def nll_loss(n: NodeView) -> Value:
    return _loss(n, n[0])


@reads("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(n: NodeView) -> Any:
    scores = n[0]
    log_probabilities = ops.log_softmax(scores, 1)
    loss = _loss(n, log_probabilities)
    return (loss, log_probabilities) if n.wants(1) else loss


def _loss(n: NodeView, log_probabilities: Value) -> Value:
    """Minus the weighted log-probability of each label; classes are axis 1."""
    reduction = n.choice("reduction", "mean", REDUCTIONS)
    labels = ops.cast(n[1], "i64")
    ignore = n.attr("ignore_index")
    valid = None if ignore is None else ops.not_equal(labels, ignore)
    safe = labels if valid is None else ops.where(valid, labels, ops.zeros_like(labels))
    picked = ops.gather_elements(log_probabilities, ops.insert_axis(safe, 1), 1)
    loss = ops.negative(ops.squeeze(picked, 1))
    weight = None if n[2] is None else ops.gather(n[2], safe, 0)
    if valid is not None:
        keep = ops.cast(valid, loss.dtype)
        weight = keep if weight is None else weight * keep
        loss = ops.where(valid, loss, ops.zeros_like(loss))
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    total = ops.sum(loss)
    if reduction == "sum":
        return total
    return ops.mean(loss) if weight is None else total / ops.sum(weight)
