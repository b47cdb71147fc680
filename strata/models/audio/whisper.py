"""Whisper: two convolutions over log-mel features, an encoder, and a decoder of text with times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core import f32, sym
from strata.models.audio.mel import MelSettings
from strata.models.audio.transcribe import SpeechTokens, Whisper
from strata.models.base import Folder
from strata.models.blocks.transformer import LayerNames, LayerSizes, TransformerBuilder, half_sizes
from strata.models.cached import CacheSizes
from strata.models.config_values import whole
from strata.models.seq2seq.graphs import CrossGraph, CrossSizes
from strata.models.seq2seq.rules import folder_rules
from strata.models.tokenizer import folder_tokenizer
from strata.models.weights import Weights, check_layers, ops, without_prefix

ENCODER, DECODER = LayerNames(at="encoder.layers.{}."), LayerNames(at="decoder.layers.{}.")


@dataclass(frozen=True, kw_only=True)
class WhisperConfig:
    """The sizes of a Whisper."""

    vocab: int
    bands: int
    sources: int  # positions of the encoder, each of two frames
    positions: int
    encoder: LayerSizes
    decoder: LayerSizes

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> WhisperConfig:
        encoder, decoder = half_sizes(found, layers=4, heads=6, inner=1536, hidden=384)
        return cls(
            vocab=whole(found, "vocab_size", 51865), bands=whole(found, "num_mel_bins", 80),
            sources=whole(found, "max_source_positions", 1500), positions=whole(found, "max_target_positions", 448),
            encoder=encoder, decoder=decoder,
        )  # fmt: skip


class WhisperEncoder(TransformerBuilder):
    """Builds the encoder of one window: its states, and keys and values for each layer of the decoder."""

    def __init__(self, config: WhisperConfig, weights: Weights) -> None:
        super().__init__("whisper encoder", weights)
        self.config = config

    def build(self) -> WhisperEncoder:
        c, h = self.config, self.config.encoder.hidden
        x = self.graph.input("input_features", (sym("B", 1), c.bands, 2 * c.sources), f32)
        for number, width, stride in ((1, c.bands, 1), (2, h, 2)):
            kernel, bias = self.param(f"encoder.conv{number}.weight", (h, width, 3)), f"encoder.conv{number}.bias"
            x = ops.gelu(ops.conv1d(x, kernel, self.param(bias, (h,)), stride=stride, padding=1))
        x = ops.transpose(x, (0, 2, 1)) + self.param("encoder.embed_positions.weight", (c.sources, h))
        x = self.layer_norm(self.stack(x, ENCODER, c.encoder), "encoder.layer_norm", h, c.encoder.eps)
        at = [f"{DECODER.at.format(i)}encoder_attn.{p}_proj" for i in range(c.decoder.layers) for p in "kv"]
        self.graph.outputs(x, *(self.linear(x, name, h, h) for name in at))
        return self


class WhisperDecoder(CrossGraph):
    """Builds the decoder."""

    def __init__(self, config: WhisperConfig, weights: Weights, sizes: CrossSizes, *, every: bool) -> None:
        super().__init__("whisper", weights, sizes, sizes.positions, every=every)
        self.config = config

    def build(self) -> WhisperDecoder:
        c, h = self.config, self.config.decoder.hidden
        x = self.embedding(self.ids, "decoder.embed_tokens.weight", c.vocab, h)
        places = self.param("decoder.embed_positions.weight", (c.positions, h))
        x = x + ops.take(places, self.positions, axis=0)  # scale_embedding has no effect in transformers, either
        for i in range(c.decoder.layers):
            x = self.cross_layer(x, i, DECODER, c.decoder)
        x = self.layer_norm(self.asked(x), "decoder.layer_norm", h, c.decoder.eps)
        head = "proj_out" if self.has("proj_out.weight") else "decoder.embed_tokens"
        self.finish(self.linear(x, head, c.vocab, h))
        return self


def load(folder: Folder) -> Whisper:
    """A model from a folder."""
    config = WhisperConfig.from_json(folder.settings)
    weights = without_prefix(folder.weights, ("model.",))
    for half, names in ((config.encoder, ENCODER), (config.decoder, DECODER)):
        check_layers("whisper", half.layers, weights, names.at)
    d = config.decoder
    sizes = CrossSizes(
        vocab=config.vocab, cache=CacheSizes(d.layers, d.heads, d.heads, d.hidden // d.heads),
        positions=config.positions, sources=config.sources, has_mask=False,
    )  # fmt: skip
    return Whisper(
        sizes, lambda: WhisperEncoder(config, weights).build(),
        lambda every: WhisperDecoder(config, weights, sizes, every=every).build(),
        folder_rules(folder.path, folder.settings, 50257), lambda: folder_tokenizer(folder.path),
        mel=MelSettings.from_folder(folder.path, config.bands), frames=2 * config.sources,
        speech=SpeechTokens.from_folder(folder.path), device=folder.device,
    )  # fmt: skip
