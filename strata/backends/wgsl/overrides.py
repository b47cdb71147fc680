"""Ops without a lowering in shaders: those of `ordering.py`, on types that shaders hold."""

from __future__ import annotations

from strata.backends.ordering import own_phases as phases_of_op
from strata.backends.wgsl.values import HELD
from strata.core import TensorType
from strata.kernel import Phases
from strata.mir import Op


def own_phases(op: Op, types: tuple[TensorType, ...]) -> Phases | None:
    """The kernels of an op that has no lowering, over buffers in0 …, out0 …; None where it runs on the host. Elements
    that share a byte with others cannot be written one by one."""
    if any(t.dtype.name not in HELD or t.dtype.bits < 8 for t in types):
        return None
    return phases_of_op(op, types)
