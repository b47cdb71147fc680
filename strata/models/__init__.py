"""Models built on the compiler: loading, tokenising, embedding, text generation with a KV cache, OCR."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strata.arguments import public
from strata.models.loading import load

if TYPE_CHECKING:
    from strata.models.adapters import LowRank
    from strata.models.audio.ctc import CtcSpeech
    from strata.models.audio.sound import load_wav
    from strata.models.audio.transcribe import Segment, Transcript, Whisper
    from strata.models.base import Model
    from strata.models.cached import PAGE
    from strata.models.chat import (
        Call,
        CallParser,
        Tool,
        ToolChoice,
        ToolStyle,
        call_message,
        style_of,
        tool_grammar,
        with_tools,
    )
    from strata.models.detokenize import Speech
    from strata.models.encoders.bert import pooled, unit
    from strata.models.encoders.embed import Encoder, batches, padded
    from strata.models.encoders.text_steps import read_steps
    from strata.models.generate import Decoder, DecodeState
    from strata.models.generating.experts import (
        ExpertPool,
        ExpertStore,
        ExpertStores,
        Moves,
        affordable_experts,
        hit_counts,
        merged_mask,
    )
    from strata.models.generating.feeding import Chosen, FedRow, FedSteps, TokenDraw, prompt_class, prompt_rows
    from strata.models.generating.prompts import PromptTokens, from_url
    from strata.models.grammar import Grammar
    from strata.models.ocr import Line, TextReader
    from strata.models.paged import PagedCache, PagePool, PageTable, page_bytes, page_keys
    from strata.models.sampling import Sampler, log_probabilities
    from strata.models.seq2seq.engine import EncoderDecoder
    from strata.models.seq2seq.model import TextToText
    from strata.models.speculative import NgramDraft
    from strata.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
    from strata.models.vision.detection import Detection, DetectionModel
    from strata.models.vision.language import ImageDecoder
    from strata.models.vision.model import ImageModel, Label
    from strata.models.vision.towers import ImageTextModel
    from strata.models.weights import read_json

_PLACES = {
    "LowRank": "adapters",
    "Model": "base", "Encoder": "encoders.embed", "Decoder": "generate", "DecodeState": "generate", "Line": "ocr",
    "TextReader": "ocr",
    "PAGE": "cached", "Sampler": "sampling", "log_probabilities": "sampling", "NgramDraft": "speculative",
    "Grammar": "grammar", "Speech": "detokenize", "Tokenizer": "tokenizer",
    "PagePool": "paged", "PageTable": "paged", "PagedCache": "paged", "page_bytes": "paged", "page_keys": "paged",
    **dict.fromkeys(("ExpertPool", "ExpertStore", "ExpertStores", "Moves"), "generating.experts"),
    **dict.fromkeys(("affordable_experts", "hit_counts", "merged_mask"), "generating.experts"),
    **dict.fromkeys(("Chosen", "FedRow", "FedSteps", "TokenDraw", "prompt_class", "prompt_rows"), "generating.feeding"),
    "batches": "encoders.embed", "padded": "encoders.embed", "read_steps": "encoders.text_steps",
    "pooled": "encoders.bert", "unit": "encoders.bert",
    "folder_tokenizer": "tokenizer", "gguf_tokenizer": "tokenizer", "read_json": "weights",
    **dict.fromkeys(("Call", "CallParser", "Tool", "ToolChoice", "ToolStyle"), "chat"),
    **dict.fromkeys(("call_message", "style_of", "tool_grammar", "with_tools"), "chat"),
    "EncoderDecoder": "seq2seq.engine", "TextToText": "seq2seq.model", "Whisper": "audio.transcribe",
    "Transcript": "audio.transcribe", "load_wav": "audio.sound", "CtcSpeech": "audio.ctc",
    "Segment": "audio.transcribe",
    "ImageDecoder": "vision.language", "PromptTokens": "generating.prompts", "from_url": "generating.prompts",
    "Detection": "vision.detection", "DetectionModel": "vision.detection",
    "ImageModel": "vision.model", "ImageTextModel": "vision.towers", "Label": "vision.model",
}  # fmt: skip
__all__ = ["PAGE", "CtcSpeech", "DecodeState", "Decoder", "Detection", "DetectionModel", "Encoder",
           "EncoderDecoder", "ExpertPool", "ExpertStore", "ExpertStores", "Grammar", "ImageDecoder", "ImageModel",
           "ImageTextModel", "Label", "Line", "LowRank", "Model", "Moves", "NgramDraft", "PagePool", "PageTable",
           "PagedCache", "PromptTokens", "Sampler", "Segment", "Speech", "TextReader", "TextToText", "Tokenizer",
           "Transcript", "Whisper", "affordable_experts", "folder_tokenizer", "from_url", "gguf_tokenizer",
           "hit_counts", "load", "load_wav", "log_probabilities", "merged_mask", "page_bytes", "page_keys",
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
