"""The runtime: sessions, compiled graphs, options."""

from strata.runtime.compiled import CompiledGraph
from strata.runtime.options import CompileOptions
from strata.runtime.pipeline import CompilePipeline, CompileResult
from strata.runtime.session import Session, devices
