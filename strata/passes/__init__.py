"""Passes: functions from graph to graph, a pass a file."""

from strata.passes.base import PASSES, Pass, PassContext, PassRecord, parse_passes, register, rewrite, run_passes, with_results
from strata.passes.decompose import Decompose
from strata.passes.fold import Fold
from strata.passes.match import Pattern, RuleSet, V, pat
from strata.passes.pipeline import default_passes
from strata.passes.share_matmul import ShareMatMul
from strata.passes.simplify import Simplify
