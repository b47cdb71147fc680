"""Granite: Llama with scaled embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import real
from strata.models.decoder_config import DecoderConfig, from_json
from strata.models.llama import LlamaGraph, plain_names


@dataclass(frozen=True)
class GraniteConfig(DecoderConfig):
    """The sizes of a Granite."""

    residual_scale: float = 1.0
    logit_divisor: float = 1.0


def granite_factors(found: dict[str, Any]) -> dict[str, float]:
    """The four factors of config.json."""
    return dict(
        embedding_scale=real(found, "embedding_multiplier", 1.0),
        score_scale=real(found, "attention_multiplier", 1.0),
        residual_scale=real(found, "residual_multiplier", 1.0),
        logit_divisor=real(found, "logits_scaling", 1.0),
    )


def granite_config(found: dict[str, Any]) -> GraniteConfig:
    """From config.json: as Llama, and four factors."""
    return GraniteConfig(**{**vars(from_json(found)), **granite_factors(found)})


class GraniteGraph(LlamaGraph):
    """Builds the graph of a Granite."""

    config: GraniteConfig

    def attention(self, x: Value, layer: int) -> Value:
        return super().attention(x, layer) * self.config.residual_scale

    def feed_forward(self, x: Value, layer: int) -> Value:
        return super().feed_forward(x, layer) * self.config.residual_scale

    def logits(self, x: Value) -> Value:
        return super().logits(x) / self.config.logit_divisor


DECODERS["granite"] = DecoderFamily(granite_config, GraniteGraph, plain_names)
