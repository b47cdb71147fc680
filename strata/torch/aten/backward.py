"""Derivatives of torch's fused ops, from the rules that our ops carry."""

from __future__ import annotations

from collections.abc import Sequence

from strata import ops
from strata.mir import Value, pullback
from strata.torch.aten.promotion import value


def derivative(outputs: Sequence[Value], cotangents: Sequence[Value], wrt: Sequence[Value]) -> list[Value]:
    """Cotangents of `wrt`: what an ATen `*_backward` op gives, whatever the forward op is made of."""
    cts = [value(ct, y.dtype) for ct, y in zip(cotangents, outputs, strict=True)]
    found = pullback(outputs, cts, wrt)
    return [ops.zeros_like(x) if ct is None else ct for x, ct in zip(wrt, found, strict=True)]
