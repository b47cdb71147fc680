"""The order of passes, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from strata.passes.base import Pass, PassContext
from strata.passes.canonicalize.check_indices import CheckIndices
from strata.passes.canonicalize.control_flow import LowerControlFlow
from strata.passes.canonicalize.decompose import Decompose
from strata.passes.canonicalize.drop_unused import DropUnused
from strata.passes.canonicalize.fold import Fold
from strata.passes.canonicalize.inline_scan import InlineScan
from strata.passes.canonicalize.simplify import Simplify
from strata.passes.expand.expand import Expand
from strata.passes.fuse.find_attention import FindAttention
from strata.passes.fuse.keep_lse import KeepLse
from strata.passes.fuse.share_matmul import ShareMatMul
from strata.passes.layout.layout import ChannelsLast
from strata.passes.layout.separate_pools import SeparatePools
from strata.passes.memory.rematerialize import Rematerialize, SplitBarriers
from strata.passes.quant.integer_products import IntegerProducts
from strata.passes.quant.precision import Precision
from strata.passes.quant.requantize import Requantize


@dataclass(frozen=True, kw_only=True)
class PassChoices:
    """Which of the optional passes run."""

    fusion: bool = True
    precision: str | None = None
    control_flow: bool = False
    unroll: int = 64
    drop_unused: bool = False
    rematerialize: bool = False
    check_indices: bool = False


def default_passes(ctx: PassContext | None = None, choices: PassChoices | None = None) -> list[Pass]:
    """From a graph as the user wrote it to one that a backend can take.

    Attention is found before anything that takes ops apart, and before what is computed of sizes is a number. Which ops
    share a kernel is decided later, by grouping.
    """
    chosen = choices or PassChoices()
    passes: list[Pass] = [InlineScan(), Simplify(), Fold(sizes=False)]
    if ctx is not None and ctx.claimed("conv_last"):
        passes = [IntegerProducts(), *passes, Requantize()]  # first, while it can be seen which numbers are codes
    if chosen.drop_unused:
        passes.append(DropUnused())
    if chosen.control_flow:
        passes.append(LowerControlFlow(chosen.unroll))
    if chosen.fusion:
        passes.append(FindAttention())
    if chosen.precision not in (None, "f32"):
        passes.append(Precision(chosen.precision))
    if ctx is not None and ctx.claimed("conv_last"):
        passes.append(ChannelsLast())
    if chosen.fusion:
        passes.append(KeepLse())
    passes += [SeparatePools(), Decompose()]
    claims = ctx.claims if ctx is not None and ctx.claims is not None else frozenset()
    if "expand" in claims:
        passes += [Expand(loops="loops" in claims), Decompose()]
    passes.append(CheckIndices(every=chosen.check_indices))
    if "expand" in claims:
        passes.append(Expand(loops=False))  # the checks
    passes.append(Simplify())
    if chosen.fusion:
        passes.append(ShareMatMul())
    passes += [Fold(), SplitBarriers()]
    if chosen.rematerialize:
        passes.append(Rematerialize())
    return passes
