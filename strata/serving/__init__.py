"""Serving: continuous batching of requests over a paged KV cache, with an HTTP server around it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strata.arguments import public

if TYPE_CHECKING:
    from strata.models import (
        ExpertPool,
        ExpertStore,
        Moves,
        PagedCache,
        PagePool,
        PageTable,
        affordable_experts,
        hit_counts,
        merged_mask,
        page_bytes,
    )
    from strata.serving.adapters import AdapterQueue
    from strata.serving.api.requests import (
        ChatRequest,
        EmbeddingRequest,
        Options,
        RerankRequest,
        TextRequest,
        parse_request,
    )
    from strata.serving.batching import Batch, Batcher, Prefill, PrefillChunk
    from strata.serving.engine import Engine
    from strata.serving.generation import Generation, TokenScore
    from strata.serving.http.guard import log_requests
    from strata.serving.http.options import HttpOptions
    from strata.serving.limits import Limits, shared_memory
    from strata.serving.load import LoadTest, plot_load, run_load
    from strata.serving.metrics import Histogram, Metrics
    from strata.serving.pipeline import Pipeline, schedule
    from strata.serving.record import Record, Recorder, read_records, replay
    from strata.serving.server import Server, ask
    from strata.serving.service import Service
    from strata.serving.weights import WeightRegistry
    from strata.serving.workers import WorkerPool

_PLACES = {
    "adapters": ("AdapterQueue",),
    "batching": ("Batch", "Batcher", "Prefill", "PrefillChunk"),
    "engine": ("Engine",),
    "generation": ("Generation", "TokenScore"),
    "limits": ("Limits", "shared_memory"),
    "load": ("LoadTest", "plot_load", "run_load"),
    "metrics": ("Histogram", "Metrics"),
    "pipeline": ("Pipeline", "schedule"),
    "record": ("Record", "Recorder", "read_records", "replay"),
    "api.requests": ("ChatRequest", "EmbeddingRequest", "Options", "RerankRequest", "TextRequest", "parse_request"),
    "http.guard": ("log_requests",),
    "http.options": ("HttpOptions",),
    "server": ("Server", "ask"),
    "service": ("Service",),
    "weights": ("WeightRegistry",),
    "workers": ("WorkerPool",),
}
_MODULE = {name: f"{__name__}.{module}" for module, names in _PLACES.items() for name in names}
_MODULE |= dict.fromkeys(
    ("ExpertPool", "ExpertStore", "Moves", "PagePool", "PageTable", "PagedCache", "affordable_experts", "hit_counts",
     "merged_mask", "page_bytes"), "strata.models",
)  # fmt: skip
__all__ = ["AdapterQueue", "Batch", "Batcher", "ChatRequest", "EmbeddingRequest", "Engine", "ExpertPool",
           "ExpertStore", "Generation", "Histogram", "HttpOptions", "Limits", "LoadTest", "Metrics", "Moves", "Options",
           "PagePool", "PageTable", "PagedCache", "Pipeline", "Prefill", "PrefillChunk", "Record", "Recorder",
           "RerankRequest", "Server", "Service", "TextRequest", "TokenScore", "WeightRegistry", "WorkerPool",
           "affordable_experts", "ask", "hit_counts", "log_requests", "merged_mask", "page_bytes", "parse_request",
           "plot_load", "read_records", "replay", "run_load", "schedule", "shared_memory"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A part is loaded when it is first used."""
    if name not in _MODULE:
        raise AttributeError(f"strata.serving has no name {name!r}")
    value = globals()[name] = public(getattr(import_module(_MODULE[name]), name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})
