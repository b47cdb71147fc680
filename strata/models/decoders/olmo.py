"""OLMo 1 to 3 and EXAONE 4: norms without weights, or norms behind attention and feed-forward only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import optional_real
from strata.models.decoder_config import DecoderConfig, from_json, listed_json, with_defaults
from strata.models.llama import LlamaGraph, plain_names
from strata.models.weights import ops


@dataclass(frozen=True)
class OlmoConfig(DecoderConfig):
    """The sizes of an OLMo."""

    clip: float | None = None  # of queries, keys and values


def olmo_config(found: dict[str, Any]) -> OlmoConfig:
    made = from_json(with_defaults(found, rms_norm_eps=1e-5))
    return OlmoConfig(**{**vars(made), "norm": "layer", "clip": optional_real(found, "clip_qkv")})


def exaone_config(found: dict[str, Any]) -> DecoderConfig:
    """Where some layers have windows, only those have rotary positions."""
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5))
    near = [made.window(i) is not None for i in range(made.layers)]
    return replace(made, rope_layers=tuple(near) if made.windows else ())


class OlmoGraph(LlamaGraph):
    """Builds the graph of the first OLMo: layer norms have no weights, projections are clipped."""

    config: OlmoConfig

    def norm(self, x: Value, name: str, width: int) -> Value:
        found: Value = ops.layer_norm(x, eps=self.config.eps)
        return found

    def linears(self, x: Value, names: list[str], ns: tuple[int, ...], k: int) -> list[Value]:
        found, clip = super().linears(x, names, ns, k), self.config.clip
        if clip is None or not names[0].endswith("q_proj"):
            return found
        return [ops.clip(y, -clip, clip) for y in found]


class LateNormGraph(LlamaGraph):
    """Builds a graph whose norms come behind attention and feed-forward: EXAONE 4."""

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        x = x + self.norm(self.attention(x, number), f"{at}post_attention_layernorm", c.hidden)
        return x + self.norm(self.feed_forward(x, number), f"{at}post_feedforward_layernorm", c.hidden)


class Olmo2Graph(LateNormGraph):
    """Builds the graph of an OLMo 2 or 3: queries and keys are normalised across all heads."""

    def heads_norm(self, x: Value, name: str, heads: int) -> Value:
        return self.norm(x, name, heads * self.config.head_dim)


DECODERS["olmo"] = DecoderFamily(olmo_config, OlmoGraph, plain_names)
DECODERS["exaone4"] = DecoderFamily(exaone_config, LateNormGraph, plain_names)
DECODERS.update(dict.fromkeys(("olmo2", "olmo3"), DecoderFamily(from_json, Olmo2Graph, plain_names)))
