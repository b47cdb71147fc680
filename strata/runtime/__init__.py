"""The runtime: sessions, compiled graphs, options, devices, caches, bundles, traces."""

from strata.arguments import public
from strata.modules import deferred

with deferred(globals(), public):
    from strata.lir import MemoryPlanOptions
    from strata.runtime.cache.aot import AotCache
    from strata.runtime.cache.caches import BucketedCompileCache, CompileCache, pad_rows, slice_rows
    from strata.runtime.cache.contract import VariantGraph, specialize
    from strata.runtime.cache.templates import DynamicDimCompileCache, ModelCompilePipeline
    from strata.runtime.compile.assert_fused import assert_fused
    from strata.runtime.compile.cost import CostModel, cost_model, estimate_graph_cost, pick_device
    from strata.runtime.compile.device import Device, devices, memory
    from strata.runtime.compile.dispatch import DispatchReport, dispatch_report
    from strata.runtime.compile.options import CompileOptions
    from strata.runtime.compile.pipeline import CompilePipeline, CompileResult, TrainingResult
    from strata.runtime.compile.profile import CompileProfile
    from strata.runtime.compile.variant import CompilationMode, ModelComponent, ModelVariant, Phase
    from strata.runtime.execute.arrays import USABLE, StoredArray
    from strata.runtime.execute.compiled import CompiledGraph
    from strata.runtime.execute.foreign import as_given, cast_to
    from strata.runtime.execute.load_bundle import load_compiled
    from strata.runtime.execute.memory import MemoryReport
    from strata.runtime.execute.rows import row_obstacles
    from strata.runtime.execute.session import Session
    from strata.runtime.report.experts import ExpertWatch, ResidencyStats
    from strata.runtime.report.explain import Explanation
    from strata.runtime.report.fusion import FusionReport, MissedFusion
    from strata.runtime.report.prices import compile_price, run_price
    from strata.runtime.report.profile import Profile, flops_of
    from strata.runtime.report.tracing import Tracer, phase, trace
    from strata.runtime.report.watch import watch_finite
    from strata.runtime.storage.bundle import inspect_bundle
    from strata.runtime.storage.stored import DAMAGED, code_version, read_plan, write_plan
