"""The order of passes, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.errors import OptionError
from strata.passes.base import Pass, PassContext
from strata.passes.canonicalize.check_indices import CheckIndices
from strata.passes.canonicalize.control_flow import LowerControlFlow
from strata.passes.canonicalize.decompose import Decompose
from strata.passes.canonicalize.drop_unused import DropUnused
from strata.passes.canonicalize.fold import Fold
from strata.passes.canonicalize.inline_scan import InlineScan
from strata.passes.canonicalize.simplify import Simplify
from strata.passes.fuse.find_attention import FindAttention
from strata.passes.fuse.share_matmul import ShareMatMul
from strata.passes.fuse_attention import FuseAttentionBlock
from strata.passes.fuse_matmul import FuseMatMulBiasAct
from strata.passes.fuse_norm_reshape import FuseRmsNormReshape
from strata.passes.fuse_residual import FuseResidualLN, FuseResidualRmsNorm
from strata.passes.fuse_swiglu import FuseSwiGLU, FuseSwiGLUDualMatmul
from strata.passes.layout.layout import ChannelsLast
from strata.passes.layout.separate_pools import SeparatePools
from strata.passes.memory.rematerialize import Rematerialize, SplitBarriers
from strata.passes.quant.integer_products import IntegerProducts
from strata.passes.quant.precision import Precision
from strata.passes.quant.requantize import Requantize
from strata.passes.regions import MAX_INPUTS, MAX_STEPS, MarkElementwiseRegions, UnfuseElementwiseRegions


@dataclass(frozen=True, kw_only=True)
class FusionLimits:
    """How far fusion goes: the largest element-wise region, and the tokens up to which attention is one block."""

    max_steps: int = MAX_STEPS
    max_inputs: int = MAX_INPUTS
    attention_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_inputs", "attention_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"fusion limits: {name} must be a count, got {value!r}", code="O143")


@dataclass(frozen=True, kw_only=True)
class PassChoices:
    """Which of the optional passes run."""

    fusion: bool = True
    limits: FusionLimits = field(default_factory=FusionLimits)
    precision: str | None = None
    control_flow: bool = False
    unroll: int = 64
    drop_unused: bool = False
    rematerialize: bool = False
    check_indices: bool = False
    epilogues: tuple[str, ...] = ("gelu", "silu")


def default_passes(ctx: PassContext | None = None, choices: PassChoices | None = None) -> list[Pass]:
    """From a graph as the user wrote it to one that a backend can take.

    Patterns come before anything that takes ops apart, and before regions are marked: a region hides what is inside.
    """
    chosen = choices or PassChoices()
    passes: list[Pass] = [InlineScan(), Simplify(), Fold()]
    if ctx is not None and ctx.claimed("conv_last"):
        passes = [IntegerProducts(), *passes, Requantize()]  # first, while it can be seen which numbers are codes
    if chosen.drop_unused:
        passes.append(DropUnused())
    if chosen.control_flow:
        passes.append(LowerControlFlow(chosen.unroll))
    if chosen.fusion:
        passes.append(FindAttention())
        passes += _patterns(ctx or PassContext(claims=frozenset()), chosen)
    if chosen.precision not in (None, "f32"):
        passes.append(Precision(chosen.precision))
    if ctx is not None and ctx.claimed("conv_last"):
        passes.append(ChannelsLast())
    passes += [SeparatePools(), Decompose(), CheckIndices(every=chosen.check_indices), Simplify()]
    if chosen.fusion:
        passes.append(ShareMatMul())
    passes += [Fold(), SplitBarriers()]
    if chosen.rematerialize:
        passes.append(Rematerialize())
    return passes + (_regions(ctx or PassContext(claims=frozenset()), chosen) if chosen.fusion else [])


def _patterns(ctx: PassContext, chosen: PassChoices) -> list[Pass]:
    """Passes that make fused ops, where the backend has kernels for what they make."""
    table: list[tuple[str, Pass]] = [
        ("fused_attention_block", FuseAttentionBlock(chosen.limits.attention_tokens)),
        ("fused_matmul_bias_act", FuseMatMulBiasAct("+".join(chosen.epilogues))),
        ("fused_residual_layer_norm", FuseResidualLN()),
        ("fused_residual_rms_norm", FuseResidualRmsNorm()),
        ("rms_norm", FuseRmsNormReshape()),
        ("fused_swiglu", FuseSwiGLUDualMatmul()),
        ("fused_swiglu", ShareMatMul()),
        ("fused_swiglu", FuseSwiGLU()),
    ]
    return [one for makes, one in table if ctx.claimed(makes)]


def _regions(ctx: PassContext, chosen: PassChoices) -> list[Pass]:
    if not ctx.claimed("elementwise_region"):
        return []
    limits = chosen.limits
    return [MarkElementwiseRegions(limits.max_steps, limits.max_inputs),
            UnfuseElementwiseRegions(limits.max_steps, limits.max_inputs)]  # fmt: skip
