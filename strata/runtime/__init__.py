"""The runtime: sessions, compiled graphs, options."""

from strata.runtime.compiled import CompiledGraph
from strata.runtime.device import Device, devices
from strata.runtime.dispatch import DispatchReport, dispatch_report
from strata.runtime.explain import Explanation, assert_fused
from strata.runtime.fusion import FusionReport, MissedFusion, scan
from strata.runtime.options import CompileOptions
from strata.runtime.pipeline import CompilePipeline, CompileResult, TrainingResult
from strata.runtime.session import Session
from strata.runtime.tracing import trace
