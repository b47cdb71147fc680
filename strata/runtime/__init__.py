"""The runtime: sessions, compiled graphs, options, devices, caches, bundles, traces."""

from strata.arguments import public_names
from strata.runtime.aot import AotCache
from strata.runtime.arrays import USABLE, StoredArray
from strata.runtime.bundle import inspect_bundle, load_compiled
from strata.runtime.caches import BucketedCompileCache, CompileCache, pad_rows, slice_rows
from strata.runtime.compiled import CompiledGraph
from strata.runtime.contract import VariantGraph, specialize
from strata.runtime.cost import CostModel, cost_model, estimate_graph_cost, pick_device
from strata.runtime.device import Device, devices
from strata.runtime.dispatch import DispatchReport, dispatch_report
from strata.runtime.explain import Explanation, assert_fused
from strata.runtime.fusion import FusionReport, MissedFusion, scan
from strata.runtime.memory import MemoryReport
from strata.runtime.options import CompileOptions
from strata.runtime.pipeline import CompilePipeline, CompileResult, TrainingResult
from strata.runtime.prices import compile_price, run_price
from strata.runtime.profile import Profile
from strata.runtime.rows import row_obstacles
from strata.runtime.session import Session
from strata.runtime.stored import DAMAGED, code_version, read_plan, write_plan
from strata.runtime.templates import DynamicDimCompileCache, ModelCompilePipeline
from strata.runtime.tracing import Tracer, trace
from strata.runtime.variant import CompilationMode, ModelComponent, ModelVariant, Phase
from strata.runtime.watch import watch_finite

public_names(globals())
