"""`load`: a model from a file or a folder, whatever is in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.errors import FileError
from strata.io import load_gguf
from strata.models import decoder_config
from strata.models.bert import BertConfig
from strata.models.embed import Encoder
from strata.models.generate import Decoder
from strata.models.gpt2 import Gpt2Config, Gpt2Graph
from strata.models.llama import LlamaGraph, gguf_names, plain_names
from strata.models.modernbert import ModernBertConfig
from strata.models.tokenizer import folder_tokenizer, gguf_tokenizer
from strata.models.weights import folder_weights, read_json

ENCODERS = ("bert", "distilbert", "modernbert")


def load(path: str | os.PathLike[str], *, device: str = "cpu", context: int | None = None) -> Any:
    """A model from an ONNX file, a GGUF file, or a folder with config.json and safetensors.

    `context` bounds the tokens that a text generator plans for.
    """
    place = Path(path)
    if place.is_dir():
        return _load_folder(place, device, context)
    if not place.exists():
        raise FileError(f"load: there is no file or folder {place}", code="F148")
    match place.suffix.lower():
        case ".onnx":
            from strata.io import onnx

            return onnx.load(place, device=device)
        case ".gguf":
            return _load_gguf(place, device, context)
    raise FileError(f"load: {place.name} is none of .onnx, .gguf, or a folder with config.json", code="F148")


def _load_gguf(path: Path, device: str, context: int | None) -> Decoder:
    file = load_gguf(path)
    config = decoder_config.from_gguf(file.metadata, file)
    weights = gguf_names(file.tensors, config)

    def build(length: int, *, every: bool) -> LlamaGraph:
        return LlamaGraph(config, weights, length, every=every)

    return Decoder(config, build, lambda: gguf_tokenizer(file.metadata), device=device, context=context)


def _load_folder(folder: Path, device: str, context: int | None) -> Any:
    if not (folder / "config.json").exists():
        raise FileError(f"load: {folder} has no config.json", code="F148")
    settings = read_json(folder / "config.json")
    family = settings.get("model_type")
    weights = folder_weights(folder)
    if family in ENCODERS:
        return _load_encoder(folder, settings, weights, device)
    if family in (*decoder_config.FAMILIES, "gpt2"):
        return _load_decoder(folder, settings, weights, device, context)
    known = ", ".join((*ENCODERS, "gpt2", *decoder_config.FAMILIES))
    raise FileError(f"load: models of the kind {family!r} are not known: {known}", code="F144")


def _load_decoder(folder: Path, settings: dict[str, Any], weights: Any, device: str, context: int | None) -> Decoder:
    make: Callable[..., Any] = LlamaGraph
    if settings.get("model_type") == "gpt2":
        config: Any = Gpt2Config.from_json(settings)
        make = Gpt2Graph
    else:
        config = decoder_config.from_json(settings)
        weights = plain_names(weights)

    def build(length: int, *, every: bool) -> Any:
        return make(config, weights, length, every=every)

    return Decoder(config, build, lambda: folder_tokenizer(folder), device=device, context=context)


def _load_encoder(folder: Path, settings: dict[str, Any], weights: Any, device: str) -> Encoder:
    labels = weights["classifier.weight"].shape[0] if "classifier.weight" in weights else 0
    modern = settings.get("model_type") == "modernbert"
    config = ModernBertConfig.from_json(settings) if modern else BertConfig.from_json(settings, labels)
    pooling, normalize, limit = "mean", True, None
    if (folder / "1_Pooling" / "config.json").exists():
        modes = read_json(folder / "1_Pooling" / "config.json")
        keys = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
        pooling = next((k for k, v in keys.items() if modes.get(f"pooling_mode_{v}")), "mean")
    if (folder / "modules.json").exists():
        normalize = "Normalize" in (folder / "modules.json").read_text("utf-8")
    if (folder / "sentence_bert_config.json").exists():
        limit = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return Encoder(
        config, weights, lambda: folder_tokenizer(folder), pooling=pooling, normalize=normalize,
        limit=limit if isinstance(limit, int) and limit > 0 else None, device=device,
    )  # fmt: skip
