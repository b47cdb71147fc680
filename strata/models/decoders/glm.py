"""GLM-4 and ERNIE 4.5: Llama where neighbouring features are rotated; GLM-4-0414 has norms behind its blocks, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.decoder_config import DecoderConfig, from_json, with_defaults
from strata.models.llama import LlamaGraph, plain_names


def glm_config(found: dict[str, Any]) -> DecoderConfig:
    """From config.json. Half of a head's features are rotated."""
    made = from_json(with_defaults(found, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7))
    return replace(made, interleaved=True)


def ernie_config(found: dict[str, Any]) -> DecoderConfig:
    return replace(from_json(with_defaults(found, rms_norm_eps=1e-5, tie_word_embeddings=True)), interleaved=True)


class Glm4Graph(LlamaGraph):
    """Builds the graph of a GLM-4-0414."""

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        mixed = self.attention(self.norm(x, f"{at}input_layernorm", c.hidden), number)
        x = x + self.norm(mixed, f"{at}post_self_attn_layernorm", c.hidden)
        inner = self.feed_forward(self.norm(x, f"{at}post_attention_layernorm", c.hidden), number)
        return x + self.norm(inner, f"{at}post_mlp_layernorm", c.hidden)


DECODERS["glm"] = DecoderFamily(glm_config, LlamaGraph, plain_names)
DECODERS["glm4"] = DecoderFamily(glm_config, Glm4Graph, plain_names)
DECODERS["ernie4_5"] = DecoderFamily(ernie_config, LlamaGraph, plain_names)
