"""Cohere's Command R and R7B: attention and feed-forward side by side behind one norm, rotary pairs of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import real
from strata.models.decoder_config import DecoderConfig, listed_json, with_defaults
from strata.models.llama import LlamaGraph, plain_names
from strata.models.weights import ops


@dataclass(frozen=True)
class CohereConfig(DecoderConfig):
    """The sizes of a Command R."""

    logit_scale: float = 1.0


def cohere_config(found: dict[str, Any]) -> CohereConfig:
    """From config.json. In the second generation only layers with a window have rotary positions."""
    made = listed_json(with_defaults(found, layer_norm_eps=1e-5, tie_word_embeddings=True))
    near = tuple(made.window(i) is not None for i in range(made.layers)) if found.get("model_type") == "cohere2" else ()
    own = dict(norm="layer", interleaved=True, rope_layers=near, logit_scale=real(found, "logit_scale", 0.0625))
    return CohereConfig(**{**vars(made), **own})


class CohereGraph(LlamaGraph):
    """Builds the graph of a Command R."""

    config: CohereConfig

    def heads_norm(self, x: Value, name: str, heads: int) -> Value:
        """A norm of each head with weights of its own, where the model has one."""
        if not self.has(f"{name}.weight"):
            return x
        size = self.config.head_dim
        split = ops.reshape(x, (self.batch, self.count, heads, size))
        normal = ops.layer_norm(split, eps=self.config.eps) * self.param(f"{name}.weight", (heads, size))
        return ops.reshape(normal, x.shape)

    def layer(self, x: Value, number: int) -> Value:
        normal = self.norm(x, f"layers.{number}.input_layernorm", self.config.hidden)
        return x + self.attention(normal, number) + self.feed_forward(normal, number)

    def logits(self, x: Value) -> Value:
        return super().logits(x) * self.config.logit_scale


DECODERS.update(dict.fromkeys(("cohere", "cohere2"), DecoderFamily(cohere_config, CohereGraph, plain_names)))
