"""Language models by family: a folder or a GGUF file becomes an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from strata.errors import FileError, MissingFileError
from strata.io import GgufTensor, load_gguf
from strata.models import decoder_config
from strata.models.adapters import PREFIXES, Adapter, LowRank, apply_adapter, turned_rows
from strata.models.bert import BertConfig
from strata.models.cached import DECODERS, CachedGraph, Layout
from strata.models.embed import Encoder
from strata.models.generate import Decoder
from strata.models.llama import LlamaGraph, gguf_names
from strata.models.modernbert import ModernBertConfig
from strata.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
from strata.models.weights import Weights, folder_weights, model_text, read_json, without_prefix

ENCODERS: dict[str, Any] = {"bert": BertConfig, "distilbert": BertConfig, "modernbert": ModernBertConfig}
for _module in ("gpt2", "llama"):  # each enters its families into DECODERS
    import_module(f"strata.models.{_module}")


def _decoder(
    config: Any, make: Callable[..., CachedGraph], weights: Weights, tokenizer: Callable[[], Tokenizer], device: str,
    context: int | None, adapter: Adapter | None, merge: bool,
) -> Decoder:  # fmt: skip
    config.check(weights)
    apart: Mapping[str, LowRank] = {}
    if adapter is not None:
        weights, apart = apply_adapter(weights, adapter, merge=merge)

    def build(length: int, *, every: bool, layout: Layout = "plain") -> Any:
        graph = make(config, weights, length, every=every, layout=layout)
        graph.changes = apart
        return graph

    made = Decoder(config, build, tokenizer, device=device, context=context)
    made.is_quantized = any(isinstance(w, GgufTensor) and not w.is_plain for w in weights.values())
    return made


def load_gguf_model(path: Path, device: str, context: int | None, adapter: Adapter | None, merge: bool) -> Decoder:
    file = load_gguf(path)
    config = decoder_config.from_gguf(file.metadata, file)
    weights = gguf_names(file.tensors, config)
    if adapter is not None and config.interleaved:
        adapter = turned_rows(adapter, {"q_proj": config.heads, "k_proj": config.kv_heads})
    return _decoder(config, LlamaGraph, weights, lambda: gguf_tokenizer(file.metadata), device, context, adapter, merge)


def load_folder(folder: Path, device: str, context: int | None, adapter: Adapter | None, merge: bool) -> Any:
    if not (folder / "config.json").exists():
        raise MissingFileError(f"load: {folder} has no config.json", code="F148")
    settings = read_json(folder / "config.json")
    family = settings.get("model_type")
    weights: Weights = folder_weights(folder)
    kind = str(family)
    if kind in ENCODERS:
        if adapter is not None:
            weights = apply_adapter(without_prefix(weights, PREFIXES), adapter, merge=True)[0]
        return _load_encoder(folder, ENCODERS[kind], settings, weights, device)
    if kind not in DECODERS:
        known = ", ".join((*ENCODERS, *DECODERS))
        raise FileError(f"load: models of the kind {family!r} are not known: {known}", code="F144")
    of = DECODERS[kind]
    config, weights = of.config(settings), of.names(weights)
    return _decoder(config, of.graph, weights, lambda: folder_tokenizer(folder), device, context, adapter, merge)


def _load_encoder(folder: Path, kind: Any, settings: dict[str, Any], weights: Any, device: str) -> Encoder:
    labels = weights["classifier.weight"].shape[0] if "classifier.weight" in weights else 0
    config = kind.from_json(settings, labels)
    config.check(weights)
    pooling, normalize, limit = "mean", True, None
    if (folder / "1_Pooling" / "config.json").exists():
        modes = read_json(folder / "1_Pooling" / "config.json")
        keys = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
        pooling = next((k for k, v in keys.items() if modes.get(f"pooling_mode_{v}")), "mean")
    if (folder / "modules.json").exists():
        normalize = "Normalize" in model_text(folder / "modules.json")
    if (folder / "sentence_bert_config.json").exists():
        limit = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return Encoder(
        config, weights, lambda: folder_tokenizer(folder), pooling=pooling, normalize=normalize,
        limit=limit if isinstance(limit, int) and limit > 0 else None, device=device,
    )  # fmt: skip
