"""Serving: many requests on one model at once, over pages of keys and values; what a server around it needs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.serving.adapters import AdapterQueue
    from strata.serving.batching import Batch, Batcher, Piece, Prefill
    from strata.serving.engine import Engine, Generation
    from strata.serving.metrics import Histogram, Metrics
    from strata.serving.pages import PagedCache, PagePool, PageTable, page_bytes

_PLACES = {
    "adapters": ("AdapterQueue",),
    "batching": ("Batch", "Batcher", "Piece", "Prefill"),
    "engine": ("Engine", "Generation"),
    "metrics": ("Histogram", "Metrics"),
    "pages": ("PagePool", "PageTable", "PagedCache", "page_bytes"),
}
_MODULE = {name: module for module, names in _PLACES.items() for name in names}
__all__ = ["AdapterQueue", "Batch", "Batcher", "Engine", "Generation", "Histogram", "Metrics", "PagePool", "PageTable",
           "PagedCache", "Piece", "Prefill", "page_bytes"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A part is loaded when it is first used."""
    if name not in _MODULE:
        raise AttributeError(f"strata.serving has no name {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})
