"""The order of passes, and nothing else."""

from __future__ import annotations

from strata.passes.base import Pass
from strata.passes.decompose import Decompose
from strata.passes.fold import Fold
from strata.passes.share_matmul import ShareMatMul
from strata.passes.simplify import Simplify


def default_passes() -> list[Pass]:
    """From a graph as the user wrote it to one that a backend can take."""
    return [Simplify(), Fold(), Decompose(), Simplify(), ShareMatMul(), Fold()]
