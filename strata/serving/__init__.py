"""Serving: continuous batching of requests over a paged KV cache, with an HTTP server around it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strata.arguments import public

if TYPE_CHECKING:
    from strata.models import PagedCache, PagePool, PageTable, page_bytes
    from strata.serving.adapters import AdapterQueue
    from strata.serving.batching import Batch, Batcher, Prefill, PrefillChunk
    from strata.serving.engine import Engine, Generation
    from strata.serving.experts import ExpertPool, ExpertStore, Moves, affordable_experts, hit_counts, merged_mask
    from strata.serving.limits import Limits
    from strata.serving.metrics import Histogram, Metrics
    from strata.serving.pipeline import Pipeline, schedule
    from strata.serving.record import Record, Recorder, read_records, replay
    from strata.serving.requests import ChatRequest, EmbeddingRequest, Options, TextRequest, parse_request
    from strata.serving.server import Server, Service, ask
    from strata.serving.weights import WeightRegistry
    from strata.serving.workers import WorkerPool

_PLACES = {
    "adapters": ("AdapterQueue",),
    "batching": ("Batch", "Batcher", "Prefill", "PrefillChunk"),
    "engine": ("Engine", "Generation"),
    "experts": ("ExpertPool", "ExpertStore", "Moves", "affordable_experts", "hit_counts", "merged_mask"),
    "limits": ("Limits",),
    "metrics": ("Histogram", "Metrics"),
    "pipeline": ("Pipeline", "schedule"),
    "record": ("Record", "Recorder", "read_records", "replay"),
    "requests": ("ChatRequest", "EmbeddingRequest", "Options", "TextRequest", "parse_request"),
    "server": ("Server", "Service", "ask"),
    "weights": ("WeightRegistry",),
    "workers": ("WorkerPool",),
}
_MODULE = {name: f"{__name__}.{module}" for module, names in _PLACES.items() for name in names}
_MODULE |= dict.fromkeys(("PagePool", "PageTable", "PagedCache", "page_bytes"), "strata.models")
__all__ = ["AdapterQueue", "Batch", "Batcher", "ChatRequest", "EmbeddingRequest", "Engine", "ExpertPool",
           "ExpertStore", "Generation", "Histogram", "Limits", "Metrics", "Moves", "Options", "PagePool",
           "PageTable", "PagedCache", "Pipeline", "Prefill", "PrefillChunk", "Record", "Recorder", "Server", "Service",
           "TextRequest", "WeightRegistry", "WorkerPool", "affordable_experts", "ask", "hit_counts", "merged_mask",
           "page_bytes", "parse_request", "read_records", "replay", "schedule"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A part is loaded when it is first used."""
    if name not in _MODULE:
        raise AttributeError(f"strata.serving has no name {name!r}")
    value = globals()[name] = public(getattr(import_module(_MODULE[name]), name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})
