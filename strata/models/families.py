"""Models by family: a folder or a GGUF file becomes an encoder, a decoder, a model of images or of speech."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import FileError, MissingFileError, OptionError
from strata.io import GgufTensor, load_gguf
from strata.models import decoder_config
from strata.models.adapters import PREFIXES, Adapter, LowRank, apply_adapter, permuted_rows
from strata.models.base import Folder, usual_type
from strata.models.cached import DECODERS, CachedGraph, Layout
from strata.models.decoders import MODULES, decoder_family
from strata.models.decoders.expert_weights import ExpertStack, stacked
from strata.models.decoders.resident_experts import expert_stores, no_experts
from strata.models.encoders.bert import NAMES, BertConfig
from strata.models.encoders.deberta import DebertaConfig
from strata.models.encoders.embed import Encoder
from strata.models.encoders.embedding_decoder import EmbeddingConfig, is_embedding
from strata.models.encoders.modernbert import ModernBertConfig
from strata.models.encoders.rotary_bert import RotaryConfig
from strata.models.encoders.text_steps import pooling_modes, text_limit
from strata.models.generate import Decoder
from strata.models.llama import LlamaGraph, gguf_names
from strata.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
from strata.models.weights import Weights, folder_weights, model_text, read_json, without_prefix

ENCODERS: dict[str, Any] = {**dict.fromkeys(NAMES, BertConfig), "modernbert": ModernBertConfig, "new": RotaryConfig}
ENCODERS |= {"deberta-v2": DebertaConfig, "gte": RotaryConfig, "nomic_bert": RotaryConfig}
OTHERS = {  # the module that loads a folder of each other kind
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers"), "vision.vit"),
    **dict.fromkeys(("clip", "clip_vision_model", "siglip", "siglip_vision_model"), "vision.clip"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "seq2seq.t5"),
    **dict.fromkeys(("bart", "mbart"), "seq2seq.bart"),
    "resnet": "vision.resnet",
    **dict.fromkeys(("convnext", "convnextv2"), "vision.convnext"),
    "segformer": "vision.segformer",
    **dict.fromkeys(("swin", "swinv2"), "vision.swin"),
    **dict.fromkeys(("smolvlm", "idefics3"), "vision.smolvlm"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "vision.qwen_vl"),
    "detr": "vision.detr",
    "rt_detr": "vision.rt_detr",
    "whisper": "audio.whisper",
    **dict.fromkeys(("wav2vec2", "hubert"), "audio.wav2vec2"),
}


def _decoder(
    config: Any, make: Callable[..., CachedGraph], weights: Weights, tokenizer: Callable[[], Tokenizer], device: str,
    context: int | None, adapter: Adapter | None, merge: bool, experts: int | None,
) -> Decoder:  # fmt: skip
    stores = None
    if experts is None:
        weights = stacked(weights)
    else:
        stores = expert_stores(config, make, weights, experts, device)
    config.check(weights)
    apart: Mapping[str, LowRank] = {}
    if adapter is not None:
        weights, apart = apply_adapter(weights, adapter, merge=merge)

    def build(length: int, *, every: bool, layout: Layout = "plain") -> Any:
        graph = make(config, weights, length, every=every, layout=layout)
        graph.changes = apart
        if stores is not None:
            graph.is_cut = True
        return graph

    made = Decoder(config, build, tokenizer, device=device, context=context, experts=stores)
    made.weight_type = usual_type(w for w in weights.values() if isinstance(w, np.ndarray))
    made.is_quantized = any(
        w.kind is not None if isinstance(w, ExpertStack) else isinstance(w, GgufTensor) and not w.is_plain
        for w in weights.values()
    )
    return made


def load_gguf_model(
    path: Path, device: str, context: int | None, adapter: Adapter | None, merge: bool, experts: int | None = None
) -> Decoder:
    file = load_gguf(path)
    moe = import_module("strata.models.decoders.gguf_moe")
    config: Any
    graph: Callable[..., CachedGraph] = LlamaGraph
    if moe.is_moe(file.metadata):
        config = moe.moe_config(file.metadata, file)
        graph, weights = moe.moe_graph(config), moe.moe_names(file.tensors, config)
    else:
        config = decoder_config.from_gguf(file.metadata, file)
        weights = gguf_names(file.tensors, config)
    if adapter is not None and config.is_permuted:
        adapter = permuted_rows(adapter, {"q_proj": config.heads, "k_proj": config.kv_heads})
    return _decoder(
        config, graph, weights, lambda: gguf_tokenizer(file.metadata), device, context, adapter, merge, experts
    )


def load_folder(
    folder: Path, device: str, context: int | None, adapter: Adapter | None, merge: bool, experts: int | None = None
) -> Any:
    if not (folder / "config.json").exists():
        raise MissingFileError(f"load: {folder} has no config.json", code="F148")
    settings = read_json(folder / "config.json")
    family = settings.get("model_type")
    weights: Weights = folder_weights(folder)
    kind = str(family)
    if experts is not None and (kind in ENCODERS or kind in OTHERS):
        raise no_experts(kind)
    if kind in ENCODERS:
        if adapter is not None:
            weights = apply_adapter(without_prefix(weights, PREFIXES), adapter, merge=True)[0]
        return _load_encoder(folder, ENCODERS[kind], settings, weights, device)
    if is_embedding(settings, has_pooling=(folder / "modules.json").exists()):
        if experts is not None:
            raise no_experts(kind)
        if adapter is not None:
            weights = apply_adapter(without_prefix(weights, PREFIXES), adapter, merge=True)[0]
        return _load_encoder(folder, EmbeddingConfig, settings, weights, device)
    if kind in OTHERS:
        if adapter is not None:
            raise OptionError(f"load: models of the kind {kind!r} take no adapter", code="O611")
        made = import_module(f"strata.models.{OTHERS[kind]}").load(Folder(folder, settings, weights, device, context))
        made.check()
        return made
    if kind not in MODULES and kind not in DECODERS:
        known = ", ".join((*ENCODERS, *MODULES, *OTHERS))
        raise FileError(f"load: models of the kind {family!r} are not known: {known}", code="F144")
    of = decoder_family(kind)
    config, weights = of.config(settings), of.names(weights)
    return _decoder(
        config, of.graph, weights, lambda: folder_tokenizer(folder), device, context, adapter, merge, experts
    )


def _load_encoder(folder: Path, kind: Any, settings: dict[str, Any], weights: Any, device: str) -> Encoder:
    heads = [weights[n].shape[0] for n in ("classifier.weight", "classifier.out_proj.weight") if n in weights]
    labels = heads[0] if heads else 0
    config = kind.from_json(settings, labels)
    config.check(weights)
    pooling, normalize = "mean", True
    if (folder / "1_Pooling" / "config.json").exists():
        pooling = pooling_modes(read_json(folder / "1_Pooling" / "config.json"))[0]
    if (folder / "modules.json").exists():
        normalize = "Normalize" in model_text(folder / "modules.json")
    return Encoder(
        config, weights, lambda: folder_tokenizer(folder), pooling=pooling, normalize=normalize,
        limit=text_limit(folder), device=device, folder=folder,
    )  # fmt: skip
