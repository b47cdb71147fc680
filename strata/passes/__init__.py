"""Passes: functions from graph to graph, a pass a file."""

from strata.arguments import public
from strata.modules import deferred, imported
from strata.passes.base import PASSES

_names = deferred(globals(), public)
with _names:
    from strata.passes.base import (
        Pass,
        PassContext,
        PassRecord,
        parse_passes,
        register,
        rewrite,
        run_passes,
        with_results,
    )
    from strata.passes.canonicalize.control_flow import LowerControlFlow
    from strata.passes.canonicalize.decompose import Decompose
    from strata.passes.canonicalize.drop_unused import DropUnused
    from strata.passes.canonicalize.fold import Fold
    from strata.passes.canonicalize.inline_scan import InlineScan
    from strata.passes.canonicalize.legalize_broadcast import LegalizeBroadcast
    from strata.passes.canonicalize.simplify import Simplify
    from strata.passes.expand.expand import Expand, expanded
    from strata.passes.fuse.find_attention import FindAttention
    from strata.passes.fuse.keep_lse import KeepLse
    from strata.passes.fuse.limits import FusionLimits
    from strata.passes.fuse.share_matmul import ShareMatMul
    from strata.passes.layout.layout import ChannelsLast
    from strata.passes.layout.separate_pools import SeparatePools
    from strata.passes.match import Pattern, RuleSet, V, pat
    from strata.passes.memory.rematerialize import Rematerialize, SplitBarriers
    from strata.passes.pipeline import PassChoices, default_passes
    from strata.passes.quant.insert_quantize import CalibrationEntry, insert_q_dq
    from strata.passes.quant.integer_products import IntegerProducts
    from strata.passes.quant.merge_fake_quantize import MergeFakeQuantize
    from strata.passes.quant.precision import POLICIES, Precision, parse_policy
    from strata.passes.quant.requantize import Requantize


def _load_all() -> None:
    """Load every pass: each registers itself."""
    for module in set(_names.homes.values()):
        imported(module)
    PASSES.source = None


PASSES.source = _load_all
