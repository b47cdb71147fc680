"""Models built on the compiler: loading, tokenising, embedding, text generation with a KV cache, OCR."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strata.arguments import public
from strata.models.loading import load

if TYPE_CHECKING:
    from strata.models.base import Model
    from strata.models.cached import PAGE
    from strata.models.embed import Encoder
    from strata.models.generate import Decoder, DecodeState
    from strata.models.ocr import Line, TextReader
    from strata.models.paged import PagedCache, PagePool, PageTable, page_bytes
    from strata.models.sampling import Sampler
    from strata.models.speech import Speech
    from strata.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
    from strata.models.weights import read_json

_PLACES = {
    "Model": "base", "Encoder": "embed", "Decoder": "generate", "DecodeState": "generate", "Line": "ocr",
    "TextReader": "ocr",
    "PAGE": "cached", "Sampler": "sampling", "Speech": "speech", "Tokenizer": "tokenizer",
    "PagePool": "paged", "PageTable": "paged", "PagedCache": "paged", "page_bytes": "paged",
    "folder_tokenizer": "tokenizer", "gguf_tokenizer": "tokenizer", "read_json": "weights",
}  # fmt: skip
__all__ = ["PAGE", "DecodeState", "Decoder", "Encoder", "Line", "Model", "PagePool", "PageTable", "PagedCache",
           "Sampler", "Speech", "TextReader", "Tokenizer", "folder_tokenizer", "gguf_tokenizer", "load", "page_bytes",
           "read_json"]  # fmt: skip

load = public(load)


def __getattr__(name: str) -> Any:
    """A file of weights needs one family: the others are not loaded."""
    if name not in _PLACES:
        raise AttributeError(f"strata.models has no name {name!r}")
    value = globals()[name] = public(getattr(import_module(f"{__name__}.{_PLACES[name]}"), name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
