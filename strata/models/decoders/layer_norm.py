"""Decoders with layer norms: StableLM, Nemotron, StarCoder2, Phi 1 and 2, GPT-NeoX (Pythia)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from strata.io import GgufTensor
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import real
from strata.models.decoder_config import DecoderConfig, from_json, with_defaults
from strata.models.llama import LlamaGraph, plain_names
from strata.models.weights import Weights, np, ops, without_prefix

PHI_NAMES = {
    "self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
    "final_layernorm": "norm", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
}  # fmt: skip
NEOX_NAMES = {
    "attention.dense": "self_attn.o_proj", "attention.query_key_value": "self_attn.qkv_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj", "final_layer_norm": "norm",
    "embed_in": "embed_tokens", "embed_out": "lm_head",
}  # fmt: skip
STARCODER_NAMES = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
Renamed = Callable[[Weights], "dict[str, np.ndarray | GgufTensor]"]


def renamed(names: Mapping[str, str]) -> Renamed:
    """Weights under the names that Llama has for them."""

    def rename(weights: Weights) -> dict[str, np.ndarray | GgufTensor]:
        found: dict[str, np.ndarray | GgufTensor] = {}
        for name, tensor in without_prefix(plain_names(weights), ("gpt_neox.",)).items():
            old = next((o for o in names if f".{o}." in f".{name}"), None)
            found[name if old is None else name.replace(old, names[old])] = tensor
        return found

    return rename


def config(found: dict[str, Any], *, is_gated: bool = False, offset: float = 0.0, **defaults: Any) -> DecoderConfig:
    """From config.json, with a family's defaults."""
    made = from_json(with_defaults(found, **defaults))
    is_parallel = bool(found.get("use_parallel_residual", defaults.get("use_parallel_residual", False)))
    return replace(made, norm="layer", norm_offset=offset, is_gated=is_gated, is_parallel=is_parallel)


def stablelm_config(found: dict[str, Any]) -> DecoderConfig:
    return config(found, is_gated=True, layer_norm_eps=1e-5, partial_rotary_factor=0.25)


def nemotron_config(found: dict[str, Any]) -> DecoderConfig:
    return config(found, offset=1.0, norm_eps=1e-5, partial_rotary_factor=0.5, hidden_act="relu2")


def starcoder_config(found: dict[str, Any]) -> DecoderConfig:
    return config(found, norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)


def phi_config(found: dict[str, Any]) -> DecoderConfig:
    own: dict[str, Any] = dict(partial_rotary_factor=0.5, hidden_act="gelu_new", use_parallel_residual=True)
    return config(found, layer_norm_eps=1e-5, **own)


def neox_config(found: dict[str, Any]) -> DecoderConfig:
    found = {**found, "num_key_value_heads": found.get("num_attention_heads")}
    pct, theta = real(found, "rotary_pct", 0.25), real(found, "rotary_emb_base", 10000.0)
    own: dict[str, Any] = dict(partial_rotary_factor=pct, hidden_act="gelu", use_parallel_residual=True)
    return config(found, layer_norm_eps=1e-5, rope_theta=theta, **own)


class LayerNormGraph(LlamaGraph):
    """Builds a graph whose attention and feed-forward may stand side by side, behind one norm or one each."""

    def layer(self, x: Value, number: int) -> Value:
        if not self.config.is_parallel:
            return super().layer(x, number)
        at, hidden = f"layers.{number}.", self.config.hidden
        first = self.norm(x, f"{at}input_layernorm", hidden)
        second = f"{at}post_attention_layernorm"
        behind = self.norm(x, second, hidden) if self.has(f"{second}.weight") else first
        return x + self.attention(first, number) + self.feed_forward(behind, number)


class StableLmGraph(LayerNormGraph):
    """Builds the graph of a StableLM: norms of heads have weights for each head."""

    def heads_norm(self, x: Value, name: str, heads: int) -> Value:
        size, first = self.config.head_dim, name.replace("_norm", "_layernorm")
        if not self.has(f"{first}.norms.0.weight"):
            return x
        split = ops.reshape(x, (self.batch, self.count, heads, size))
        gammas = [self.param(f"{first}.norms.{i}.weight", (size,)) for i in range(heads)]
        return ops.reshape(ops.layer_norm(split, eps=self.config.eps) * ops.stack(gammas, 0), x.shape)


class NeoxGraph(LayerNormGraph):
    """Builds the graph of a GPT-NeoX: a head's query, key and value lie side by side."""

    def projected(self, x: Value, layer: int) -> list[Value]:
        c = self.config
        both = self.linear(x, f"layers.{layer}.self_attn.qkv_proj", 3 * c.hidden, c.hidden)
        split = ops.reshape(both, (self.batch, self.count, c.heads, 3, c.head_dim))
        return [ops.reshape(ops.narrow(split, 3, i, 1), x.shape) for i in range(3)]


DECODERS["stablelm"] = DecoderFamily(stablelm_config, StableLmGraph, plain_names)
DECODERS["nemotron"] = DecoderFamily(nemotron_config, LayerNormGraph, plain_names)
DECODERS["starcoder2"] = DecoderFamily(starcoder_config, LayerNormGraph, renamed(STARCODER_NAMES))
DECODERS["phi"] = DecoderFamily(phi_config, LayerNormGraph, renamed(PHI_NAMES))
DECODERS["gpt_neox"] = DecoderFamily(neox_config, NeoxGraph, renamed(NEOX_NAMES))
