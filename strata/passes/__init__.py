"""Passes: functions from graph to graph, a pass a file."""

from strata.arguments import public_names
from strata.passes.base import (
    PASSES,
    Pass,
    PassContext,
    PassRecord,
    parse_passes,
    register,
    rewrite,
    run_passes,
    with_results,
)
from strata.passes.control_flow import LowerControlFlow
from strata.passes.decompose import Decompose
from strata.passes.drop_unused import DropUnused
from strata.passes.find_attention import FindAttention
from strata.passes.fold import Fold
from strata.passes.fuse_attention import FuseAttentionBlock
from strata.passes.fuse_matmul import EPILOGUES, FuseMatMulBiasAct
from strata.passes.fuse_norm_reshape import FuseRmsNormReshape
from strata.passes.fuse_residual import FuseResidualLN, FuseResidualRmsNorm
from strata.passes.fuse_swiglu import FuseSwiGLU, FuseSwiGLUDualMatmul
from strata.passes.inline_scan import InlineScan
from strata.passes.insert_quantize import CalibrationEntry, insert_q_dq
from strata.passes.integer_products import IntegerProducts
from strata.passes.layout import ChannelsLast
from strata.passes.legalize_broadcast import LegalizeBroadcast
from strata.passes.match import Pattern, RuleSet, V, pat
from strata.passes.merge_fake_quantize import MergeFakeQuantize
from strata.passes.pipeline import FusionLimits, PassChoices, default_passes
from strata.passes.precision import POLICIES, Precision, parse_policy
from strata.passes.regions import MarkElementwiseRegions, UnfuseElementwiseRegions
from strata.passes.rematerialize import Rematerialize, SplitBarriers
from strata.passes.requantize import Requantize
from strata.passes.separate_pools import SeparatePools
from strata.passes.share_matmul import ShareMatMul
from strata.passes.simplify import Simplify

public_names(globals())
