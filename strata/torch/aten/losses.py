"""Losses that check what they are given, and checks that stand alone."""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.core import TensorType
from strata.mir import Value
from strata.torch.aten.promotion import as_truth, value
from strata.torch.table import Checked, aten

NONE, MEAN = 0, 1  # torch's numbers of reductions


def outside(p: Value) -> Value:
    """Whether an element is not between 0 and 1."""
    fits = ops.logical_and(ops.greater_equal(p, value(0, p.dtype)), ops.less_equal(p, value(1, p.dtype)))
    return ops.any(ops.logical_not(fits))


def _reduced(loss: Value, reduction: int) -> Value:
    if reduction == NONE:
        return loss
    return ops.mean(loss) if reduction == MEAN else ops.sum(loss)


@aten("binary_cross_entropy")
def binary_cross_entropy(
    out: TensorType, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Checked:
    one, least = value(1, x.dtype), value(-100, x.dtype)
    loss = (target - one) * ops.maximum(ops.log1p(-x), least) - target * ops.maximum(ops.log(x), least)
    loss = loss if weight is None else loss * weight
    return Checked(_reduced(loss, reduction), outside(x), "all elements of input should be between 0 and 1")


@aten("_assert_tensor_metadata")
def assert_kind(out: None, x: Value, *told: Any, **more: Any) -> None:
    """What `torch.export` knew of a tensor in front of a cast: the type of a value says as much."""


@aten("_assert_async.msg")
def assert_true(out: None, x: Value, told: str) -> Checked:
    return Checked(None, ops.any(ops.logical_not(as_truth(x))), told, needed=True)
