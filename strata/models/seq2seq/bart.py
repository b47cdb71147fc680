"""BART and mBART: learned positions, norms after each block or before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strata.core import bool_, i32, sym
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.transformer import LayerNames, LayerSizes, TransformerBuilder, half_sizes
from strata.models.cached import CacheSizes
from strata.models.config_values import whole
from strata.models.seq2seq.graphs import CrossGraph, CrossSizes
from strata.models.seq2seq.model import TextToText
from strata.models.seq2seq.rules import folder_rules
from strata.models.tokenizer import folder_tokenizer
from strata.models.weights import Weights, check_layers, ops, without_prefix

OFFSET = 2  # rows of the tables of positions before the first token's
ENCODER, DECODER = LayerNames(at="encoder.layers.{}."), LayerNames(at="decoder.layers.{}.")


@dataclass(frozen=True, kw_only=True)
class BartConfig:
    """The sizes of a BART."""

    vocab: int
    positions: int
    scale: float  # of embeddings
    encoder: LayerSizes
    decoder: LayerSizes

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> BartConfig:
        encoder, decoder = half_sizes(
            found, layers=12, heads=16, inner=4096, hidden=1024, is_pre=found["model_type"] == "mbart"
        )
        return cls(
            vocab=whole(found, "vocab_size", 50265), positions=whole(found, "max_position_embeddings", 1024),
            scale=math.sqrt(encoder.hidden) if found.get("scale_embedding") else 1.0, encoder=encoder, decoder=decoder,
        )  # fmt: skip


class BartBlocks(TransformerBuilder):
    """What both halves of a BART are made of."""

    config: BartConfig

    def embedded(self, ids: Value, half: str, places: Value | None, length: Any) -> Value:
        """Embeddings of tokens and positions, normalised; `places` are those of the tokens, or they come from 0."""
        c, h = self.config, self.config.encoder.hidden
        own = f"{half}.embed_tokens.weight"  # where the tables are not tied
        x = self.embedding(ids, own if self.has(own) else "shared.weight", c.vocab, h)
        table = self.param(f"{half}.embed_positions.weight", (c.positions + OFFSET, h))
        at = ops.narrow(table, 0, OFFSET, length) if places is None else ops.take(table, places + OFFSET, axis=0)
        x = (x * c.scale if c.scale != 1.0 else x) + at
        return self.layer_norm(x, f"{half}.layernorm_embedding", h, 1e-5)

    def finished(self, x: Value, half: str) -> Value:
        """The last norm, where layers begin with theirs."""
        c = self.config
        return self.layer_norm(x, f"{half}.layer_norm", c.encoder.hidden, 1e-5) if c.encoder.is_pre else x


class BartEncoder(BartBlocks):
    """Builds the encoder: its states, and keys and values of the source for each layer of the decoder."""

    def __init__(self, config: BartConfig, weights: Weights) -> None:
        super().__init__("bart encoder", weights)
        self.config = config

    def build(self) -> BartEncoder:
        c, h = self.config, self.config.encoder.hidden
        batch, length = sym("B", 1), sym("T", 1, c.positions)
        ids = self.graph.input("input_ids", (batch, length), i32)
        mask = self.graph.input("attention_mask", (batch, length), bool_)
        x = self.embedded(ids, "encoder", None, length)
        kept = ops.reshape(mask, (batch, 1, 1, length))
        x = self.finished(self.stack(x, ENCODER, c.encoder, mask=kept, mask_kind="custom"), "encoder")
        at = [f"{DECODER.at.format(i)}encoder_attn.{p}_proj" for i in range(c.decoder.layers) for p in "kv"]
        self.graph.outputs(x, *(self.linear(x, name, h, h) for name in at))
        return self


class BartDecoder(BartBlocks, CrossGraph):
    """Builds the decoder."""

    def __init__(self, config: BartConfig, weights: Weights, sizes: CrossSizes, *, every: bool) -> None:
        CrossGraph.__init__(self, "bart", weights, sizes, sizes.positions, every=every)
        self.config = config

    def build(self) -> BartDecoder:
        c, h = self.config, self.config.decoder.hidden
        x = self.embedded(self.ids, "decoder", self.positions, self.count)
        for i in range(c.decoder.layers):
            x = self.cross_layer(x, i, DECODER, c.decoder)
        x = self.finished(self.asked(x), "decoder")
        head = "lm_head" if self.has("lm_head.weight") else "shared"
        logits = self.linear(x, head, c.vocab, h)
        if self.has("final_logits_bias"):
            logits = logits + ops.reshape(self.param("final_logits_bias", (1, c.vocab)), (c.vocab,))
        self.finish(logits)
        return self


def load(folder: Folder) -> TextToText:
    """A model from a folder."""
    config = BartConfig.from_json(folder.settings)
    weights = without_prefix(folder.weights, ("model.",))
    for half, names in ((config.encoder, ENCODER), (config.decoder, DECODER)):
        check_layers(str(folder.settings["model_type"]), half.layers, weights, names.at)
    d = config.decoder
    sizes = CrossSizes(
        vocab=config.vocab, cache=CacheSizes(d.layers, d.heads, d.heads, d.hidden // d.heads),
        positions=min(folder.context or config.positions, config.positions), sources=config.positions,
    )  # fmt: skip
    return TextToText(
        sizes, lambda: BartEncoder(config, weights).build(),
        lambda every: BartDecoder(config, weights, sizes, every=every).build(),
        folder_rules(folder.path, folder.settings, 2), lambda: folder_tokenizer(folder.path), device=folder.device,
    )  # fmt: skip
